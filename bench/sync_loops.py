"""Run the applications of the sync as Airflow starts them: each by spark-submit with the DAGs' own settings."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from ringsync.config import load_config
from ringsync.orchestration import BUCKET_CLOSE, OUT_OF_SEQUENCE, SparkApplication, commitlog_stage
from ringsync.status import STOP_KEY, Status, read_statuses
from ringsync.wiring import store_of
from servers import ServerError
from servers.airflow import spark_environment
from servers.cassandra import CassandraNode
from servers.jars import fetch
from servers.process import ServerProcess, stop_together
from servers.spark import lean_java_options

MASTER = "local[2]"
SERVER = "bench"
STAGE, CLOSE = commitlog_stage("default"), BUCKET_CLOSE
LOOPS = (STAGE, CLOSE, OUT_OF_SEQUENCE)
SUBMIT_SECONDS = 400
STOP_SECONDS = 120
RUN_S = 7200.0
"""Seconds of a run: longer than any benchmark, since the loops are asked to end."""


def write_conf(folder: Path, nodes: Sequence[CassandraNode], **sections: Any) -> Path:
    """Write a configuration for these nodes, with ``folder/lake`` as the object store; all else has its default.

    :param sections: further keys of ``ringsync.yaml``; those of ``sync`` are added to ours
    """
    document: dict[str, Any] = {
        "server_name": SERVER,
        "cassandra": {
            "contact_points": [node.contact_point for node in nodes],
            "port": nodes[0].port,
            "connect_timeout_s": 60,
        },
        "store": {"url": "lake"},
        **sections,
        "sync": {"run_s": RUN_S, **sections.get("sync", {})},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ringsync.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


class Loops:
    """The running applications of one configuration; all have ended when the block ends.

    :param conf: ``ringsync.yaml``; logs are written beside it
    :param cache: folder that keeps the jars

    :ivar running: the running loops, by name of the application
    """

    def __init__(self, conf: Path, cache: Path) -> None:
        self._conf = conf
        self._folder = conf.parent
        self.lake = self._folder / "lake"
        self._store = store_of(load_config(conf))
        self._run = f"bench-{time.time():.0f}"
        delta = sorted(jar for jar in fetch("delta", cache).glob("*.jar") if jar.name.startswith(("delta-", "unity")))
        self._jars = ",".join(str(jar.resolve()) for jar in delta)
        self._environment = {
            **os.environ,
            **spark_environment(),
            "JDK_JAVA_OPTIONS": lean_java_options(cache, delta),
        }
        self.running: dict[str, ServerProcess] = {}

    def start(self, *applications: SparkApplication) -> None:
        """Start loops."""
        for application in applications:
            queue = ["--queue", application.queue] if application.queue else []
            self.running[application.name] = self._submit(application, *queue)

    def finish(self, application: SparkApplication, table: str, *options: str) -> None:
        """Run an application on a table to its end; if it fails, once more: nodes on a busy machine may be slow.

        :raises ServerError: it fails twice
        """
        try:
            self._finish(application, table, *options)
        except ServerError as error:
            print(f"{error}\n{application.name} is tried again", file=sys.stderr, flush=True)
            self._report(application.name).unlink(missing_ok=True)
            self._finish(application, table, *options)

    def _finish(self, application: SparkApplication, table: str, *options: str) -> None:
        process = self._submit(application, "--table", table, *options)
        try:
            process.wait_until(lambda: self._reported(application), SUBMIT_SECONDS, application.name)
            _wait_for_end([process], STOP_SECONDS)
        finally:
            process.kill()

    def check(self) -> None:
        """Check that no loop has ended.

        :raises ServerError: a loop has ended; with the end of its log
        """
        for name, process in self.running.items():
            if process.ended:
                raise ServerError(f"{name} has ended.\n{process.log_end()}")

    def status(self) -> dict[str, Status]:
        """Read the last status of each loop, by ``<application>/<name>``."""
        return read_statuses(self._store)

    def stop(self) -> dict[str, dict[str, Any]]:
        """Ask the loops to end, as ``cdcservice stop`` does; return their reports by name.

        :raises ServerError: a loop does not end, or ends without a report
        """
        self._store.put(STOP_KEY, json.dumps({"at_ms": int(time.time() * 1000)}).encode())
        _wait_for_end(list(self.running.values()), STOP_SECONDS)
        reports = {}
        for name, process in self.running.items():
            path = self._report(name)
            if not path.exists() or (report := json.loads(path.read_text()))["exit_code"] != 0:
                raise ServerError(f"{name} has failed.\n{process.log_end()}")
            reports[name] = report
        self.running.clear()
        return reports

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_together(list(self.running.values()), 5)
        self.running.clear()

    def _submit(self, application: SparkApplication, *options: str) -> ServerProcess:
        conf = {**application.spark_conf(), "spark.jars": self._jars}
        command = [
            *(str(Path(sys.executable).parent / "spark-submit"), "--master", MASTER),
            *(part for key, value in conf.items() for part in ("--conf", f"{key}={value}")),
            *("--driver-memory", application.driver_memory, application.path),
            *("--conf", str(self._conf), "--run", self._run, *options),
        ]
        return ServerProcess(command, self._folder / f"{application.name}.log", self._environment, self._folder)

    def _report(self, name: str) -> Path:
        return self.lake / "reports" / name / f"{self._run}.json"

    def _reported(self, application: SparkApplication) -> bool:
        path = self._report(application.name)
        if not path.exists():
            return False
        report = json.loads(path.read_text())
        if report["exit_code"] != 0:
            raise ServerError(f"{application.name} has failed: {report}")
        return True


def _wait_for_end(processes: Sequence[ServerProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        while not process.ended:
            if time.monotonic() > deadline:
                raise ServerError(f"It does not end within {seconds} s.\n{process.log_end()}")
            time.sleep(0.2)
