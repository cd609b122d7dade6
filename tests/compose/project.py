"""docker-compose.yaml as a user has it: a copy of the project with a filled in .env, carried out by podman-compose.

podman-compose of podman 4.3 waits for no condition of `depends_on`, and podman without systemd makes no health check by
itself. So `Project.up` starts the services one by one, in the order that docker-compose.yaml asks for, and has podman
make the checks that docker-compose.yaml describes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import time
from base64 import urlsafe_b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.compose.engine import Engine, EngineError, run

SOURCE = Path(__file__).parents[2]
PATIENCE = float(os.environ.get("RINGSYNC_COMPOSE_PATIENCE", "1"))
"""How many times as long as docker-compose.yaml allows a service may take to become healthy, on a busy machine."""

_LABEL = "io.podman.compose.project"
_SECONDS = re.compile(r"(\d+)s")


@dataclass
class Project:
    """
    One project of compose.

    :param engine: what carries it out.
    :param folder: takes the copy.
    :param name: the project's name.
    :param profiles: profiles that are switched on.
    """

    engine: Engine
    folder: Path
    name: str
    profiles: tuple[str, ...] = ()
    services: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        files = run(["git", "ls-files", "-z"], dict(os.environ), 60, SOURCE).split("\0")
        for file in filter(None, files):
            if (SOURCE / file).is_file():
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(SOURCE / file, self.folder / file)
        fill_in(self.folder / ".env.example", self.folder / ".env")
        services = yaml.safe_load((self.folder / "docker-compose.yaml").read_text())["services"]
        wanted = {*self.profiles}
        self.services = {
            name: one for name, one in services.items() if not one.get("profiles") or wanted & {*one["profiles"]}
        }

    def compose(self, *arguments: str, options: tuple[str, ...] = (), timeout: float = 300) -> str:
        """
        Run podman-compose and return what it prints.

        :param arguments: its command and what follows.
        :param options: options that stand before the command.
        :param timeout: seconds that it may take.
        :raises EngineError: it fails, or takes longer.
        """
        profiles = [word for profile in self.profiles for word in ("--profile", profile)]
        command = ["podman-compose", f"--project-name={self.name}", *profiles, *options, *arguments]
        return run(command, self.engine.environment, timeout, self.folder)

    def up(self) -> dict[str, float]:
        """
        Start all services, each when what it depends on is as it must be, and wait until all are healthy.

        :returns: after how many seconds each was healthy.
        :raises EngineError: one does not start, fails, or does not become healthy in time.
        """
        seconds: dict[str, float] = {}
        while len(seconds) < len(self.services):
            ready = [
                name
                for name, one in self.services.items()
                if name not in seconds and {*one.get("depends_on", {})} <= {*seconds}
            ]
            started = {}
            for name in ready:
                started[name] = time.monotonic()
                self.compose("up", "--detach", "--no-deps", "--no-build", name)
            for name in ready:
                self.wait(name)
                seconds[name] = time.monotonic() - started[name]
        return seconds

    def wait(self, service: str) -> None:
        """
        Wait until a service is healthy, or has ended well if it runs once.

        :param service: its name.
        :raises EngineError: it is not in time; with the end of its log.
        """
        container = self.container(service)
        check = self.services[service].get("healthcheck")
        if check is None:
            if (code := self.engine.podman("wait", container, timeout=600 * PATIENCE).strip()) != "0":
                raise EngineError(f"{service} ended with code {code}:\n{self.log(service)}")
            return
        every = _seconds(check["interval"])
        limit = time.monotonic() + PATIENCE * (_seconds(check.get("start_period", "0s")) + check["retries"] * every)
        while True:
            try:
                self.engine.podman("healthcheck", "run", container)
                return
            except EngineError as error:
                if time.monotonic() > limit:
                    raise EngineError(f"{service} is not healthy: {error}\n{self.log(service)}") from error
            time.sleep(1)

    def restart(self, service: str) -> float:
        """
        Restart a service and wait until it is healthy.

        :param service: its name.
        :returns: the seconds that it took.
        :raises EngineError: it does not come back in time.
        """
        started = time.monotonic()
        self.compose("restart", service)
        self.wait(service)
        return time.monotonic() - started

    def container(self, service: str) -> str:
        """
        Return the name of a service's container.

        :param service: its name.
        :raises EngineError: it has none.
        """
        mine = ("--filter", f"label={_LABEL}={self.name}", "--filter", f"label=com.docker.compose.service={service}")
        names = self.engine.podman("ps", "--all", "--format", "{{.Names}}", *mine).split()
        if len(names) != 1:
            raise EngineError(f"{service} has {len(names)} containers")
        return names[0]

    def execute(self, service: str, *command: str, timeout: float = 120) -> str:
        """
        Run a command in a service's container, and return what it prints.

        :param service: the service's name.
        :param command: the command.
        :param timeout: seconds that it may take.
        :raises EngineError: it fails, or takes longer.
        """
        return self.engine.podman("exec", self.container(service), *command, timeout=timeout)

    def log(self, service: str, lines: int = 40) -> str:
        """
        Return the end of what a service has printed.

        :param service: its name.
        :param lines: how much.
        """
        command = ["podman", "logs", f"--tail={lines}", self.container(service)]
        done = subprocess.run(
            command, env=self.engine.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        return done.stdout.decode(errors="replace")

    def memory_mib(self) -> dict[str, int]:
        """Return how much memory each container has, without the files that the system keeps for it."""
        found = json.loads(self.engine.podman("stats", "--no-stream", "--format", "json"))
        units = {"B": 2**-20, "kB": 1e3 / 2**20, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}
        memory = {}
        for one in found:
            amount = re.match(r"([\d.]+)([kMG]?B)", one["mem_usage"])
            if amount and one["name"].startswith(self.name):
                memory[one["name"].removeprefix(self.name).strip("_-").rsplit("_", 1)[0]] = round(
                    float(amount[1]) * units[amount[2]]
                )
        return memory

    def down(self) -> list[str]:
        """
        Stop all, and remove containers, networks and volumes.

        :returns: what compose left behind, which is removed as well.
        """
        problem: list[str] = []
        try:
            self.compose("down", "--volumes", timeout=600)
        except EngineError as error:
            problem.append(str(error))
        mine = ("--filter", f"label={_LABEL}={self.name}")
        removals = (("ps", "--all"), ("rm", "--force", "--time=5")), (("volume", "ls"), ("volume", "rm", "--force"))
        networks = (("network", "ls"), ("network", "rm", "--force"))
        for listing, removal in (*removals, networks):
            left = self.engine.podman(*listing, "--quiet", *mine).split()
            if left:
                problem += left
                self.engine.podman(*removal, *left)
        return problem


def fill_in(example: Path, target: Path) -> None:
    """
    Write an .env with random secrets.

    :param example: .env.example.
    :param target: the file, which only its owner can read.
    """
    key = urlsafe_b64encode(secrets.token_bytes(32)).decode()
    lines = [
        line + (key if line.startswith("AIRFLOW_FERNET_KEY") else secrets.token_hex(24)) if line.endswith("=") else line
        for line in example.read_text().splitlines()
    ]
    target.touch(mode=0o600)
    target.write_text("\n".join(lines) + "\n")


def with_alternatives(conf: str) -> str:
    """
    Return docker/ringsync.yaml with the emulator of Google Cloud Storage and Kafka, which it has as comments.

    :param conf: the file's text.
    """
    without_volume = re.sub(r"^ *url: file://.*\n", "", conf, flags=re.MULTILINE)
    return re.sub(r"^( *)# ( *[a-z_]+:.*)$", r"\1\2", without_volume, flags=re.MULTILINE)


def _seconds(text: str) -> float:
    found = _SECONDS.fullmatch(text)
    assert found, text
    return float(found[1])
