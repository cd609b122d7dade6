"""Fetch the jars of a server, once: `python -m servers.jars cassandra-5.0 delta`.

Only `servers/poms/<name>.xml` says what to fetch. Maven fetches it if Maven is installed; otherwise the Ivy inside the
pyspark wheel does, from the same file (slower, and without the native TLS libraries of Netty, which Cassandra replaces
by Java's own TLS). Each has its own settings for the registry and its mirrors.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import ServerError, last_lines
from servers.java import find_java_home

POMS = Path(__file__).parent / "poms"
DEFAULT_CACHE = Path(__file__).parent.parent / ".cache"
COMPLETED = "completed.json"
FREE_BYTES_NEEDED = 1 << 30
CLIENT_TIMEOUT_SECONDS = 900
IVY_CLASSIFIER = "{http://ant.apache.org/ivy/maven}classifier"
POM_NAMESPACE = {"m": "http://maven.apache.org/POM/4.0.0"}


def fetch(name: str, cache: Path) -> Path:
    """
    Return the folder that holds the jars of a server; fetch them first if they are not all there.

    The folder appears in one step, with a marker in it that lists every jar. So a process that is killed half-way
    leaves nothing that looks complete. Processes that ask at the same time wait for the first one.

    :param name: a file name in `servers/poms` without its ending, for example `cassandra-5.0` or `delta`.
    :param cache: folder that keeps the jars between runs.
    :raises ServerError: unknown name, no Java, no network, or less than 1 GiB free in the cache folder.
    """
    pom = POMS / f"{name}.xml"
    if not pom.is_file():
        raise ServerError(f"No server is called {name!r}; known are {', '.join(known_names())}.")
    folder = cache / "jars" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.parent / f"{name}.lock"):
        if not is_complete(folder, pom):
            require_free_space(folder.parent)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{name}.") as scratch:
                fetched = Path(scratch) / "jars"
                fetched.mkdir()
                run_client(pom, fetched, cache)
                drop_other_platforms(fetched)
                write_marker(fetched, pom)
                if folder.exists():
                    shutil.rmtree(folder)
                fetched.rename(folder)
    return folder


def known_names() -> list[str]:
    """Return the names that `fetch` accepts."""
    return sorted(pom.stem for pom in POMS.glob("*.xml"))


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """
    Hold a lock that only one process has at a time; the system releases it when the process ends for any reason.

    :param path: the lock file; it is created if need be and stays.
    """
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_complete(folder: Path, pom: Path) -> bool:
    """
    Tell whether a folder holds the pom's jars: its marker names this pom, and every jar has the recorded size.

    :param folder: the folder of jars.
    :param pom: the file with the coordinates.
    """
    try:
        marker = json.loads((folder / COMPLETED).read_text())
        sizes = {jar: (folder / jar).stat().st_size for jar in marker["jars"]}
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError, TypeError):
        return False
    return bool(sizes) and marker == {"pom": pom_hash(pom), "jars": sizes}


def write_marker(folder: Path, pom: Path) -> None:
    """
    Write the marker that `is_complete` reads.

    :param folder: the folder of jars.
    :param pom: the file with the coordinates.
    :raises ServerError: the folder has no jar.
    """
    sizes = {jar.name: jar.stat().st_size for jar in sorted(folder.glob("*.jar"))}
    if not sizes:
        raise ServerError(f"Fetching {pom.stem} ended without an error and without a jar.")
    (folder / COMPLETED).write_text(json.dumps({"pom": pom_hash(pom), "jars": sizes}, indent=1))


def pom_hash(pom: Path) -> str:
    """
    Return a digest of the pom: if a pinned version changes, the jars are fetched again.

    :param pom: the file with the coordinates.
    """
    return hashlib.sha256(pom.read_bytes()).hexdigest()


def require_free_space(folder: Path) -> None:
    """
    Refuse to fetch onto a full disk.

    :param folder: any folder on the disk.
    :raises ServerError: less than 1 GiB is free.
    """
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES_NEEDED:
        raise ServerError(
            f"Only {free >> 20} MiB are free in {folder}, {FREE_BYTES_NEEDED >> 20} MiB are needed. "
            "Free some space or pass another cache folder."
        )


def run_client(pom: Path, target: Path, cache: Path) -> None:
    """
    Run Maven, or Ivy if there is no Maven, and wait for it.

    :param pom: the file with the coordinates.
    :param target: the folder for the jars.
    :param cache: the folder under which Ivy keeps its own cache.
    :raises ServerError: no Java, or the client failed; the message ends with the client's own last lines.
    """
    java_home = find_java_home()
    maven = shutil.which("mvn")
    whole = whole_artifact(pom)
    repository = target.parent / "repository"
    if whole is not None and maven is None:
        raise ServerError(f"Only Maven can fetch {pom.stem}: install it, so that mvn is on PATH.")
    if maven is not None:
        client = "Maven"
        command = maven_get_command(maven, whole, repository) if whole else maven_command(maven, pom, target)
    else:
        client, command = "Ivy", ivy_command(java_home / "bin" / "java", pom, target, cache)
    environment = os.environ | {"JAVA_HOME": str(java_home)}
    try:
        answer = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            timeout=CLIENT_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"{client} did not fetch {pom.stem} within {CLIENT_TIMEOUT_SECONDS} s.") from error
    if answer.returncode != 0:
        raise ServerError(
            f"{client} could not fetch {pom.stem} (exit code {answer.returncode}). Is there a network?\n"
            "Its last lines:\n" + last_lines(answer.stdout)
        )
    if whole is not None:
        for jar in repository.rglob("*-jar-with-dependencies.jar"):
            jar.rename(target / jar.name)
        for archive in repository.rglob("*-all.tar.gz"):
            take_jars(archive, target)


def whole_artifact(pom: Path) -> str | None:
    """
    Return the coordinates of a pom's single file (a jar with dependencies, or an archive of jars); None: it has none.

    :param pom: the file with the coordinates.
    """
    for dependency in ElementTree.parse(pom).iterfind("m:dependencies/m:dependency", POM_NAMESPACE):
        parts = [dependency.findtext(f"m:{name}", "", POM_NAMESPACE) for name in ("groupId", "artifactId", "version")]
        classifier = dependency.findtext("m:classifier", "", POM_NAMESPACE)
        if classifier in ("jar-with-dependencies", "all"):
            return ":".join([*parts, dependency.findtext("m:type", "jar", POM_NAMESPACE), classifier])
    return None


def take_jars(archive: Path, target: Path) -> None:
    """
    Copy the jars of all folders of an archive into one folder.

    :param archive: a tar file.
    :param target: the folder for the jars.
    """
    with tarfile.open(archive) as opened:
        for member in opened:
            content = opened.extractfile(member) if member.name.endswith(".jar") else None
            if content is not None:
                with content, (target / Path(member.name).name).open("wb") as jar:
                    shutil.copyfileobj(content, jar)


def maven_get_command(maven: str, artifact: str, repository: Path) -> list[str]:
    """
    Return the command by which Maven fetches one file without its dependencies.

    :param maven: the `mvn` program.
    :param artifact: `group:artifact:version:type:classifier`.
    :param repository: the folder where Maven puts the file and its own plugins.
    """
    # Version 3 of the plugin reads the poms of the jar and its parent even without transitive dependencies.
    goal = ["org.apache.maven.plugins:maven-dependency-plugin:2.8:get", "-Dtransitive=false"]
    return [maven, "--quiet", "--batch-mode", *goal, f"-Dartifact={artifact}", f"-Dmaven.repo.local={repository}"]


def maven_command(maven: str, pom: Path, target: Path) -> list[str]:
    """
    Return the command by which Maven copies all runtime jars of a pom.

    :param maven: the `mvn` program.
    :param pom: the file with the coordinates.
    :param target: the folder for the jars.
    """
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={target}"]
    # -U: ask again for files that could not be fetched last time.
    return [maven, "--quiet", "--batch-mode", "-U", f"--file={pom}", *goal]


def ivy_command(java: Path, pom: Path, target: Path, cache: Path) -> list[str]:
    """
    Return the command by which the Ivy of pyspark fetches the same; write its two input files beside `target`.

    :param java: the `java` program.
    :param pom: the file with the coordinates.
    :param target: the folder for the jars.
    :param cache: the folder under which Ivy keeps its own cache.
    :raises ServerError: pyspark is not installed.
    """
    package = importlib.util.find_spec("pyspark")
    locations = package.submodule_search_locations if package else None
    ivy_jars = [jar for location in locations or [] for jar in Path(location).glob("jars/ivy-*.jar")]
    if not ivy_jars:
        raise ServerError(
            "mvn is not on PATH, and pyspark is not installed: install Maven, or the requirements of this project."
        )
    settings = target.parent / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="central"/>'
        '<resolvers><ibiblio name="central" m2compatible="true"/></resolvers></ivysettings>'
    )
    module = target.parent / "ivy.xml"
    module.write_text(ivy_module(pom))
    options = ["-settings", str(settings), "-ivy", str(module), "-cache", str(cache / "ivy"), "-confs", "default"]
    return [
        str(java),
        "-jar",
        str(ivy_jars[0]),
        *options,
        "-retrieve",
        f"{target}/[artifact]-[revision](-[classifier]).[ext]",
    ]


def ivy_module(pom: Path) -> str:
    """
    Translate the dependencies of a pom into an Ivy module; one with exclusions comes without its own dependencies.

    :param pom: the file with the coordinates.
    """
    module = ElementTree.Element("ivy-module", version="2.0")
    ElementTree.SubElement(module, "info", organisation="ringsync.servers", module=pom.stem)
    dependencies = ElementTree.SubElement(module, "dependencies")
    for dependency in ElementTree.parse(pom).iterfind("m:dependencies/m:dependency", POM_NAMESPACE):
        alone = dependency.find("m:exclusions", POM_NAMESPACE) is not None
        translated = ElementTree.SubElement(
            dependencies,
            "dependency",
            org=dependency.findtext("m:groupId", "", POM_NAMESPACE),
            name=dependency.findtext("m:artifactId", "", POM_NAMESPACE),
            rev=dependency.findtext("m:version", "", POM_NAMESPACE),
            conf="default->default",
            transitive="false" if alone else "true",
        )
        if classifier := dependency.findtext("m:classifier", "", POM_NAMESPACE):
            jar = {"name": translated.attrib["name"], "type": "jar", "ext": "jar", IVY_CLASSIFIER: classifier}
            ElementTree.SubElement(translated, "artifact", jar)
    return ElementTree.tostring(module, encoding="unicode")


def drop_other_platforms(folder: Path) -> None:
    """
    Delete the jars with native libraries for other systems than this one.

    :param folder: the folder of jars.
    """
    foreign = {"osx", "windows", "riscv64", "x86_64", "aarch_64"}
    foreign -= {"aarch64": {"aarch_64"}, "x86_64": {"x86_64"}}.get(platform.machine(), set())
    for jar in folder.glob("*.jar"):
        if any(f"-{word}" in jar.name for word in foreign):
            jar.unlink()


def main() -> int:
    """Fetch the jars that the command line names, and print their folders."""
    parser = argparse.ArgumentParser(prog="python -m servers.jars", description="Fetch the jars of servers.")
    parser.add_argument("names", nargs="+", metavar="name", help=f"one of {', '.join(known_names())}")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help="folder that keeps the jars (default: .cache)"
    )
    arguments = parser.parse_args()
    for name in arguments.names:
        print(f"{name}: fetching unless it is there …", flush=True)
        started = time.monotonic()
        try:
            folder = fetch(name, arguments.cache)
        except ServerError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        jars = list(folder.glob("*.jar"))
        megabytes = sum(jar.stat().st_size for jar in jars) / 1e6
        print(f"{name}: {len(jars)} jars, {megabytes:.0f} MB in {folder} ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
