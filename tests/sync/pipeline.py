"""The sync as its users run it: applications as processes, which may be killed and are started again; and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ringsync.config import load_config
from ringsync.config.sync import Sync
from ringsync.service.published import wait_until_published
from ringsync.storage.port import ObjectStore
from ringsync.wiring import store_of
from servers.cassandra import CassandraNode
from servers.jars import fetch
from tests.chaos.applications import PROJECT, environment, session_of

LOG_SYNC_MS = 3000
"""The nodes' ``commitlog_sync_period`` (one second, see ``NodeSettings``), and what a busy machine may add."""

WINDOW_MS = 3000

COMMANDS = {
    "commitlog_stage": [str(Path(sys.executable).parent / "spark-submit"), "--master", "spark://127.0.0.1:1"],
}
"""How an application is started, else by Python. Stage reads local files: it must not care which master Spark has."""

EXCLUDED = "workload.excluded"
"""A table that has cdc, and that :func:`write_conf` excludes."""

LOOPS = ("commitlog_stage", "bucket_close", "out_of_sequence")


def write_conf(folder: Path, nodes: Sequence[CassandraNode], *, window_ms: int = WINDOW_MS, **sections: Any) -> Path:
    """A configuration for these nodes; the store is the folder's ``lake``."""
    document: dict[str, Any] = {
        "server_name": "test",
        "cassandra": {"contact_points": [node.contact_point for node in nodes], "port": nodes[0].port},
        "store": {"url": "lake"},
        "commitlog_processor_window_interval_ms": window_ms,
        "out_of_sequence_processor_poll_interval_ms": 1000,
        "sync": {"run_s": 3600, "poll_interval_ms": 500, "exclude": ["*.excl*"]},
        "stream": {"codec": "null"},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "ringsync.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


class Pipeline:
    """The loops of the sync.

    :ivar running: by name of the application
    """

    def __init__(self, conf: Path, folder: Path, cache: Path) -> None:
        self.conf = conf
        self._folder = folder
        jars = [str(jar) for jar in fetch("delta", cache).glob("*.jar") if jar.name.startswith(("delta-", "unity"))]
        self.environment = {**environment(), "RINGSYNC_SPARK_JARS": ",".join(jars)}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._options: dict[str, tuple[str, ...]] = {}
        self.store = store_of(load_config(conf))

    def start(self, name: str, *options: str) -> None:
        """Start an application; again if it has ended."""
        log = self._folder / f"{name}.log"
        self._options[name] = options
        arguments = [
            *COMMANDS.get(name, [sys.executable]),
            str(PROJECT / "spark_apps" / f"{name}.py"),
            "--conf",
            str(self.conf),
            "--run",
            f"{name}-{time.time():.0f}",
            *options,
        ]
        with log.open("ab") as out:
            self.running[name] = subprocess.Popen(
                arguments, env=self.environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def run(self, name: str, run: str, *options: str) -> dict[str, Any]:
        """Run an application to its end, and return its report.

        :raises AssertionError: it ends with another exit code than 0
        """
        log = self._folder / f"{name}.log"
        spark_submit = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]", "--conf"]
        spark_submit += [f"spark.jars={self.environment['RINGSYNC_SPARK_JARS']}", f"{PROJECT}/spark_apps/{name}.py"]
        arguments = [*spark_submit, "--conf", str(self.conf), "--run", run, *options]
        with log.open("ab") as out:
            done = subprocess.run(arguments, env=self.environment, stdout=out, stderr=subprocess.STDOUT, check=False)
        assert not done.returncode, f"{name} has failed:\n{log.read_text()[-3000:]}"
        report: dict[str, Any] = json.loads(self.store.get(f"reports/{name}/{run}.json"))
        return report

    def check(self) -> None:
        """Fail if an application has failed that nobody has killed. A loop whose run has ended well, since the
        configuration has changed, begins the next one, as in Airflow."""
        for name, process in list(self.running.items()):
            if process.poll() == 0:
                self.start(name, *self._options[name])
            elif process.poll() is not None:
                tail = (self._folder / f"{name}.log").read_text()[-3000:]
                raise AssertionError(f"{name} has ended with {process.returncode}:\n{tail}")

    def kill(self, name: str) -> None:
        """Kill an application's driver and all its workers at once."""
        process = self.running.pop(name)
        for pid in session_of(process.pid):
            with_suppressed(os.kill, pid, signal.SIGKILL)
        process.wait()

    @contextmanager
    def ending(self) -> Iterator[Pipeline]:
        """The loops, all of which have ended when this ends."""
        try:
            yield self
        finally:
            for name in list(self.running):
                self.kill(name)


def with_suppressed(function: Callable[..., object], *arguments: object) -> None:
    """Call a function on a process that may have ended."""
    try:
        function(*arguments)
    except ProcessLookupError:
        return


@contextmanager
def pipeline(conf: Path, folder: Path, cache: Path) -> Iterator[Pipeline]:
    """The loops, all of which have ended when this ends."""
    with Pipeline(conf, folder, cache).ending() as found:
        yield found


def wait_until_drained(store: ObjectStore, timeout_s: float, check: Callable[[], object] = lambda: None) -> None:
    """Wait until all that the nodes have logged is staged, published, and in the replicas; nobody writes any more.

    :param check: called again and again meanwhile; it may raise
    :raises AssertionError: it is not in time
    """
    written_until_ms = int(time.time() * 1000) + LOG_SYNC_MS
    found = wait_until_published(store, Sync(), written_until_ms, timeout_s, tell=lambda _: check())
    assert not found.left, f"not drained after {timeout_s} s: {found.left}"
