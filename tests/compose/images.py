"""The images that docker-compose.yaml names: pulled where a registry answers, otherwise built here from packages."""

from __future__ import annotations

import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from servers.cassandra import LOGBACK, MODULE_FLAGS
from servers.gcs import emulator_binary
from servers.jars import fetch
from tests.compose.engine import Engine, EngineError, run

REGISTRY = "https://registry-1.docker.io/v2/"
BASE = "localhost/ringsync-debian:12"
STAND_INS = Path(__file__).parent / "stand_ins"
BUILD_S = 1800
_HOST_CERTIFICATES = Path("/usr/local/share/ca-certificates")
_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_MIRROR = "http://deb.debian.org/debian"

TARGETS = {
    "apache/kafka": "kafka",
    "apicurio/apicurio-registry": "apicurio",
    "cassandra": "cassandra",
    "fsouza/fake-gcs-server": "gcs",
    "maven": "maven",
    "postgres": "postgres",
    "python": "python",
}
"""The stage of stand_ins/Dockerfile that stands in for an image."""


def external_images(project: Path) -> list[str]:
    """
    Return the images that docker-compose.yaml and docker/Dockerfile name, but not those that they build.

    :param project: the folder of both.
    """
    services = yaml.safe_load((project / "docker-compose.yaml").read_text())["services"].values()
    built = {one["image"] for one in services if "build" in one}
    bases = re.findall(r"^FROM (\S+)", (project / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    return sorted({one["image"] for one in services} - built | {*bases})


def provide(engine: Engine, names: list[str], cache: Path) -> dict[str, str]:
    """
    Make sure that the engine has images.

    :param engine: the engine.
    :param names: the images, as docker-compose.yaml and the Dockerfile name them.
    :param cache: folder that keeps the jars.
    :returns: where each image is from.
    """
    reachable = _registry_answers()
    found = {name: "official" for name in names if reachable and _pulled(engine, name)}
    missing = [name for name in names if name not in found]
    if missing:
        _make_base(engine)
    for name in missing:
        _build(engine, name, cache)
        found[name] = "stand-in"
    return found


def settings_of_this_machine(folder: Path) -> list[str]:
    """
    Return the options of `podman build` by which pip, uv and Maven ask the registries that they ask outside.

    :param folder: takes the files that are mounted; they get into no image.
    """
    folder.mkdir(parents=True, exist_ok=True)
    configured = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    indexes = dict(re.findall(r"^(?:global|:env:)\.(index-url|extra-index-url)='(.+)'$", configured, re.MULTILINE))
    pip = "".join(f"{key} = {value}\n" for key, value in indexes.items())
    (folder / "pip.conf").write_text(f"[global]\ncert = {_BUNDLE}\ndefault-timeout = 180\n{pip}")
    uv = f'index-url = "{indexes["index-url"]}"\n' if "index-url" in indexes else ""
    (folder / "uv.toml").write_text(f"native-tls = true\n{uv}")
    mounts = {folder / "pip.conf": "/etc/pip.conf", folder / "uv.toml": "/etc/uv/uv.toml"}
    maven = Path.home() / ".m2" / "settings.xml"
    if maven.is_file():
        mounts[maven] = "/root/.m2/settings.xml"  # inside the container that builds, whose user is root
    for path in folder.iterdir():
        path.chmod(0o600)
    return [f"--volume={source}:{target}:ro" for source, target in mounts.items()]


def _registry_answers() -> bool:
    try:
        urllib.request.urlopen(REGISTRY, timeout=5).close()
    except urllib.error.HTTPError:
        return True  # it asks for a login, which a pull brings
    except OSError:
        return False
    return True


def _pulled(engine: Engine, name: str) -> bool:
    try:
        engine.podman("pull", "--quiet", name, timeout=900)
    except EngineError:
        return False
    return True


def _make_base(engine: Engine) -> None:
    """Make Debian 12, with the authorities that this machine trusts."""
    try:
        engine.podman("image", "exists", BASE)
        return
    except EngineError:
        pass
    root, tree = engine.folder / "debian", engine.folder / "debian.tar"
    nothing: list[str] = ["--include=ca-certificates", "--variant=minbase"]
    run(["rm", "-rf", str(root)], engine.environment, 60)
    run(["debootstrap", *nothing, "bookworm", str(root), _MIRROR], engine.environment, BUILD_S)
    sources = root / "etc" / "apt" / "sources.list"
    security = f"deb {_MIRROR}-security bookworm-security main\n"
    sources.write_text(f"deb {_MIRROR} bookworm main\ndeb {_MIRROR} bookworm-updates main\n{security}")
    for certificate in _HOST_CERTIFICATES.glob("*.crt"):
        (root / "usr/local/share/ca-certificates" / certificate.name).write_bytes(certificate.read_bytes())
    run(["chroot", str(root), "update-ca-certificates"], engine.environment, 120)
    run(["tar", "--directory", str(root), "--create", "--file", str(tree), "."], engine.environment, 300)
    engine.podman("import", "--quiet", str(tree), BASE, timeout=300)
    run(["rm", "-rf", str(root), str(tree)], engine.environment, 60)


def _build(engine: Engine, name: str, cache: Path) -> None:
    target = TARGETS[name.split(":")[0]]
    contexts: dict[str, Path] = {}
    if target in ("cassandra", "kafka", "apicurio"):
        contexts["jars"] = fetch("cassandra-5.0" if target == "cassandra" else target, cache)
    if target == "gcs":
        contexts["binary"] = emulator_binary().parent
    if target == "cassandra":
        contexts["settings"] = settings = engine.folder / "cassandra"
        settings.mkdir(exist_ok=True)
        (settings / "modules").write_text(" ".join(MODULE_FLAGS) + "\n")
        for file, level in (("logback.xml", "INFO"), ("logback-off.xml", "OFF")):
            (settings / file).write_text(LOGBACK.format(level=level))
    full = f"docker.io/{name if '/' in name else f'library/{name}'}"
    options = [f"--build-context={key}={path.resolve()}" for key, path in contexts.items()]
    engine.podman(
        *("build", "--quiet", "--layers", f"--target={target}", f"--tag={full}", *options, str(STAND_INS)),
        timeout=BUILD_S,
    )
