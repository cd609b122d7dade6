"""Applications on a Spark cluster, as Airflow submits them: only the driver has configuration and secrets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from ringsync.config import load_config
from ringsync.orchestration import SparkApplication
from ringsync.wiring import store_of
from servers.process import ServerProcess
from servers.spark_cluster import SparkCluster
from tests.chaos.applications import PROJECT, environment
from tests.chaos.under_airflow import until


@dataclass(frozen=True)
class Driver:
    """Submits applications.

    :ivar conf: the configuration, which only drivers can read
    :ivar jars: jars of Spark, between commas
    :ivar secrets: environment variables of the drivers only
    """

    cluster: SparkCluster
    conf: Path
    jars: str
    secrets: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The drivers' working folder."""
        return self.conf.parent

    def command(self, name: str, run: str, *options: str) -> list[str]:
        """The command that submits an application."""
        settings = SparkApplication(name, (), "1g", lean=True).spark_conf()
        settings |= {"spark.jars": self.jars, "spark.ui.enabled": "true", "spark.ui.port": "0"}
        found = [str(Path(sys.executable).parent / "spark-submit"), "--master", self.cluster.url]
        found += ["--driver-memory", "512m"]
        found += [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
        return [*found, str(PROJECT / "spark_apps" / f"{name}.py"), "--conf", str(self.conf), "--run", run, *options]

    @contextmanager
    def started(self, name: str, run: str, *options: str) -> Iterator[ServerProcess]:
        """An application that runs, all of which has ended when this ends."""
        told = {**environment(), **self.cluster.driver_environment, **self.secrets}
        log = self.folder / f"{run}.{name}.log"
        process = ServerProcess(self.command(name, run, *options), log, told, self.folder)
        try:
            yield process
        finally:
            process.kill()

    def finished(self, name: str, run: str, *options: str, timeout_s: float = 300) -> tuple[int, dict[str, Any]]:
        """Run an application to its end; its exit code and report."""
        with self.started(name, run, *options) as process:
            until(lambda: process.ended, timeout_s)
        report = json.loads(store_of(load_config(self.conf)).get(f"reports/{name}/{run}.json"))
        return report["exit_code"], report

    def log(self, name: str, run: str) -> str:
        """What an application has printed."""
        return (self.folder / f"{run}.{name}.log").read_text(errors="replace")


def arguments_of_all() -> Iterator[str]:
    """The arguments of all processes of this machine."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue


def shown_by(cluster: SparkCluster) -> Iterator[str]:
    """What the pages of the cluster show, and of the applications on it."""
    pages = [f"http://127.0.0.1:{cluster.ui_port}{path}" for path in ("/", "/json/")]
    for page in pages:
        yield _page(page)
    for application in json.loads(_page(pages[1]))["activeapps"]:
        yield _page(f"http://127.0.0.1:{cluster.ui_port}/app/?appId={application['id']}")


def _page(url: str) -> str:
    with urlopen(url, timeout=10) as answer:
        return str(answer.read().decode(errors="replace"))


def files_with(secret: str, folder: Path) -> list[Path]:
    """The files under a folder that hold a secret."""
    return [file for file in folder.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]
