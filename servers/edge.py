"""Hosts with edge workers: an Airflow whose tasks run on workers that reach nothing of it but its API server.

Each worker is started by the unit that the project ships, `deploy/ringsync-edge-worker.service`: its command, in its
environment, and nothing else. Only the places are others: `/opt/ringsync` is this checkout, `/var/lib/ringsync` and
`/etc/ringsync` are folders of the worker.

    airflow = edge_airflow(folder / "airflow", free_port(), dags)
    here = EdgeWorker(folder / "here", airflow, ["default"], dags)
    host = EdgeWorker(folder / "host-1", airflow, ["cassandra-1"], dags, config, {"RINGSYNC_SPARK_JARS": jars})
    with airflow, here, host:
        …

The executor is the edge executor for all tasks, with a worker of the default queue on Airflow's host. So the DAGs need
not say which executor runs what, and no task ends with the scheduler, as with the local executor.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servers import ServerError
from servers.airflow import PROJECT, Airflow, spark_environment
from servers.process import Server, ServerProcess

UNIT = PROJECT / "deploy" / "ringsync-edge-worker.service"
EXAMPLE = PROJECT / "deploy" / "edge-worker.env.example"
START_SECONDS = 60
STOP_SECONDS = 60
EXECUTOR = "airflow.providers.edge3.executors.EdgeExecutor"
SECRET = "AIRFLOW__API_AUTH__JWT_SECRET"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What systemd gives a service."""


def edge_airflow(
    home: Path,
    port: int,
    dags: Path,
    *,
    environment: Mapping[str, str] | None = None,
    parallelism: int = 32,
    heartbeat_s: int = 10,
) -> Airflow:
    """
    Return an Airflow that runs no task itself: all go to edge workers, those of the default queue, too.

    Its tokens are signed by a private key of its own: the secret that workers have only proves that they are workers.

    :param home: as for `Airflow`.
    :param port: as for `Airflow`.
    :param dags: as for `Airflow`.
    :param environment: further environment variables of API server, scheduler and DAG processor.
    :param parallelism: number of tasks that run, or wait in queues without workers.
    :param heartbeat_s: seconds between two signs of life of a worker; after five it is taken for dead.
    """
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    settings = {
        "AIRFLOW__CORE__EXECUTOR": EXECUTOR,
        "AIRFLOW__EDGE__API_ENABLED": "True",
        "AIRFLOW__EDGE__HEARTBEAT_INTERVAL": str(heartbeat_s),
        "AIRFLOW__API_AUTH__JWT_PRIVATE_KEY_PATH": str(_private_key(home / "jwt.pem")),
        "AIRFLOW__API_AUTH__JWT_LEEWAY": "300",
        SECRET: _made(home / "edge-secret", secrets.token_urlsafe(64)).read_text(),
    }
    return Airflow(home, port, dags, environment=settings | dict(environment or {}), parallelism=parallelism)


@dataclass(frozen=True)
class Unit:
    """
    What a unit of systemd tells to run.

    :ivar command: the words of `ExecStart`; variables are not yet replaced.
    :ivar before: those of each `ExecStartPre`.
    :ivar environment: of `Environment` and the files of `EnvironmentFile`.
    :ivar folder: the working directory.
    :ivar restart_s: seconds until it is started again after it has ended.
    """

    command: list[str]
    before: list[list[str]]
    environment: dict[str, str]
    folder: Path
    restart_s: float

    def words(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Return a command with the variables that it names, as systemd replaces them."""
        return [re.sub(r"\$\{(\w+)\}", lambda name: environment.get(name[1], ""), word) for word in command]


def read_unit(path: Path, places: Mapping[str, str]) -> Unit:
    """
    Read a unit as systemd does, as far as ours goes.

    :param path: its file.
    :param places: beginning of paths in the unit → where that is here.
    :raises ServerError: it has no command or no working directory.
    """
    found: dict[str, list[str]] = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            found.setdefault(name.strip(), []).append(moved(value.strip(), places))
    try:
        (command,), (folder,) = found["ExecStart"], found["WorkingDirectory"]
    except (KeyError, ValueError) as error:
        raise ServerError(f"{path} has not exactly one ExecStart and one WorkingDirectory") from error
    environment = dict(word.split("=", 1) for line in found.get("Environment", []) for word in shlex.split(line))
    for name in found.get("EnvironmentFile", []):
        environment |= read_environment(Path(name).read_text())
    before = [shlex.split(line) for line in found.get("ExecStartPre", [])]
    return Unit(shlex.split(command), before, environment, Path(folder), float(found.get("RestartSec", ["0.1"])[0]))


def read_environment(text: str) -> dict[str, str]:
    """
    Return the variables of an `EnvironmentFile`.

    :param text: its content: assignments, one a line, with quotes as in a shell, and comments.
    """
    assignments = [line.split("=", 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {name: " ".join(shlex.split(value)) for name, value in assignments}


def moved(text: str, places: Mapping[str, str]) -> str:
    """
    Return a text with all paths that begin with one of `places` elsewhere.

    :param places: beginning of paths → where that is here; the first that fits counts.
    """
    names = "|".join(map(re.escape, places))
    return re.sub(rf"(?<![\w/.-])({names})(?![\w-])", lambda found: places[found[1]], text)


@dataclass
class EdgeWorker(Server):
    """
    An edge worker on a host of its own, as far as folders and environment make one: `with EdgeWorker(…) as worker`.

    It may be stopped, killed and started again at any time. What it leaves: `home`, its `AIRFLOW_HOME`; `work`, its
    working directory; `dags`, its copy of the DAGs; `etc/`, its environment file and its copy of the configuration.

    :param folder: its files; its name is the name of the worker.
    :param airflow: whose tasks it takes; it is given the address, and the secret of workers.
    :param queues: which tasks it takes.
    :param source: DAGs, of which it gets a copy.
    :param config: `ringsync.yaml`, of which it gets a copy; None: none.
    :param environment: values of its environment file that are others than in the example, or are not there.
    :param concurrency: tasks at once.
    """

    folder: Path
    airflow: Airflow
    queues: Sequence[str]
    source: Path
    config: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    concurrency: int = 4
    _process: ServerProcess | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """Its name in Airflow."""
        return self.folder.name

    @property
    def home(self) -> Path:
        """Its AIRFLOW_HOME: logs, and the last good configuration."""
        return self.work / "airflow"

    @property
    def work(self) -> Path:
        """Its working directory, and that of its tasks."""
        return self.folder.resolve() / "var"

    @property
    def etc(self) -> Path:
        """Folder of its environment file, and of its copy of the configuration, `ringsync.yaml`."""
        return self.folder.resolve() / "etc"

    @property
    def dags(self) -> Path:
        """Its copy of the DAGs."""
        return self.folder.resolve() / "dags"

    @property
    def log(self) -> Path:
        """What it says."""
        return self.folder / "worker.log"

    @property
    def pid(self) -> int:
        """
        The id of its process, which is also that of its session.

        :raises ServerError: it is not running.
        """
        if self._process is None:
            raise ServerError(f"The edge worker {self.name} is not running.")
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the worker itself, not only its tasks, has ended, or was never started."""
        return self._process is None or self._process.ended

    def start(self) -> None:
        """
        Start it as systemd would, and wait until Airflow knows it.

        Airflow refuses a worker whose namesake it does not yet take for dead: then the unit starts it again.

        :raises ServerError: it runs already, or is not up after a minute longer than a namesake may hold its name.
        """
        if self._process is not None:
            raise ServerError(f"The edge worker {self.name} is already running.")
        unit = self._unit()
        environment = _system() | unit.environment
        held_s = 5 * int(self.airflow.environment()["AIRFLOW__EDGE__HEARTBEAT_INTERVAL"])
        deadline = time.monotonic() + START_SECONDS + held_s
        # It writes the file once Airflow has taken it.
        pid_file = self.home / "airflow-edge-worker.pid"
        while self._process is None:
            for command in unit.before:
                subprocess.run(unit.words(command, environment), env=environment, cwd=unit.folder, check=True)
            self._process = ServerProcess(unit.words(unit.command, environment), self.log, environment, unit.folder)
            try:
                self._process.wait_until(lambda: pid_file.exists() or self.ended, START_SECONDS, "The edge worker")
                if self.ended and time.monotonic() > deadline:
                    raise ServerError(f"The edge worker {self.name} does not start.\n{self._process.log_end()}")
            except BaseException:
                self.kill()
                raise
            if self.ended:
                self.kill()
                time.sleep(unit.restart_s)

    def stop(self) -> None:
        """End it and its tasks (SIGTERM to the worker; SIGKILL to what is left after a minute), as the unit says."""
        if self._process is not None and not self._process.ended:
            os.kill(self._process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self._process is not None and not self._process.ended and time.monotonic() < deadline:
            time.sleep(0.1)
        self.kill()

    def kill(self) -> None:
        """End it with its tasks as a power cut would. Nothing happens if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _unit(self) -> Unit:
        """Write its environment file, copy DAGs and configuration, and read the unit for these places."""
        for folder in (self.home, self.etc):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self.source, self.dags, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        programs = str(Path(sys.executable).parent)
        places = {
            "/opt/ringsync/.venv/bin": programs,
            "/opt/ringsync/dags": str(self.dags),
            "/opt/ringsync": str(PROJECT),
            "/var/lib/ringsync": str(self.work),
            "/etc/ringsync": str(self.etc),
        }
        if self.config is not None:
            shutil.copy(self.config, self.etc / "ringsync.yaml")
        values = read_environment(moved(EXAMPLE.read_text(), places))
        values |= {
            "RINGSYNC_WORKER": self.name,
            "RINGSYNC_QUEUES": ",".join(self.queues),
            "RINGSYNC_CONCURRENCY": str(self.concurrency),
            "AIRFLOW__EDGE__API_URL": f"{self.airflow.url}/edge_worker/v1/rpcapi",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.airflow.url}/execution/",
            SECRET: self.airflow.environment()[SECRET],
            # A test waits for a second rather than five.
            "AIRFLOW__EDGE__JOB_POLL_INTERVAL": "1",
        }
        values |= {name: spark_environment()[name] for name in ("JAVA_HOME", "SPARK_HOME", "SPARK_LOCAL_IP")}
        values |= self.environment
        file = self.etc / "edge-worker.env"
        file.touch(mode=0o600)
        file.write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items()))
        return read_unit(UNIT, places)


def _system() -> dict[str, str]:
    """What systemd puts into the environment of a service with a user."""
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "USER": getpass.getuser(), "HOME": str(Path.home())}


def _private_key(file: Path) -> Path:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return _made(file, key.decode())


def _made(file: Path, content: str) -> Path:
    """A file that only its owner may read, made once."""
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(content)
    return file
