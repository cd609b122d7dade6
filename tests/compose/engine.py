"""podman with images, containers and networks of its own, which nobody else on this machine sees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = "podman runc netavark aardvark-dns iptables debootstrap"
"""What Debian calls the programs that the test needs."""

_PROGRAMS = ("podman", "runc", "iptables", "debootstrap", "podman-compose")

# Without systemd, and in a container of a hosting service, crun and the default limits may be refused.
_CONTAINERS = """
[containers]
default_ulimits = ["nofile=10000:10000", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{run}/libpod"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{run}/storage"
"""
_REGISTRIES = 'unqualified-search-registries = ["docker.io"]\n'


class EngineError(RuntimeError):
    """A command of the engine failed; the message ends with its last lines."""


@dataclass(frozen=True)
class Engine:
    """
    The engine.

    :param folder: keeps its configuration and images between runs.
    :param run: holds what is there only while it works; short, since sockets are in it.
    """

    folder: Path
    run: Path = field(default=Path("/run/ringsync-compose"))

    def prepare(self) -> None:
        """Write the engine's configuration."""
        for folder in (self.folder / "networks", self.run):
            folder.mkdir(parents=True, exist_ok=True)
        contents = {"containers": _CONTAINERS, "storage": _STORAGE, "registries": _REGISTRIES}
        for name, content in contents.items():
            (self.folder / f"{name}.conf").write_text(
                content.replace("{folder}", str(self.folder)).replace("{run}", str(self.run))
            )

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which `podman`, and whatever calls it, finds this engine's configuration."""
        own = {
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(self.folder / "registries.conf"),
        }
        programs = str(Path(sys.executable).parent)
        return os.environ | own | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}

    def podman(self, *arguments: str, timeout: float = 120) -> str:
        """
        Run podman and return what it prints.

        :param arguments: its arguments.
        :param timeout: seconds that it may take.
        :raises EngineError: it fails, or takes longer.
        """
        return run(["podman", *arguments], self.environment, timeout)


def run(command: list[str], environment: dict[str, str], timeout: float, folder: Path | None = None) -> str:
    """
    Run a command and return its standard output.

    :param command: the program and its arguments.
    :param environment: its environment variables.
    :param timeout: seconds that it may take.
    :param folder: where it runs.
    :raises EngineError: it fails, or takes longer.
    """
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{' '.join(command)} took longer than {timeout:.0f} s") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).splitlines()[-40:]
        raise EngineError("\n".join([f"{' '.join(command)} ended with code {done.returncode}:", *lines]))
    return done.stdout


def why_not() -> str | None:
    """Return why no engine can run here, for people; None: it can be tried."""
    if os.geteuid() != 0:
        return "containers are started by root only"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        install = f"apt-get install --no-install-recommends {PACKAGES}"
        return f"{', '.join(missing)} not on PATH; on Debian: {install}; make test-compose brings podman-compose"
    return None
