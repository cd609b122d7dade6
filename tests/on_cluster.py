"""Applications on a Spark cluster, as Airflow submits them: only the driver has configuration and secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from ringsync.config import load_config
from ringsync.orchestration import SparkApplication
from ringsync.wiring import store_of
from servers.spark_cluster import SparkCluster
from tests.chaos.applications import PROJECT, environment


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

    def started(self, name: str, run: str, *options: str) -> subprocess.Popen[bytes]:
        """Start an application in a session of its own."""
        told = {**environment(), **self.cluster.driver_environment, **self.secrets}
        with (self.folder / f"{run}.{name}.log").open("ab") as out:
            return subprocess.Popen(
                self.command(name, run, *options),
                **{"env": told, "cwd": self.folder, "stdout": out, "stderr": subprocess.STDOUT},
                start_new_session=True,
            )

    def finished(self, name: str, run: str, *options: str, timeout_s: float = 300) -> tuple[int, dict[str, Any]]:
        """Run an application to its end; its exit code and report."""
        process = self.started(name, run, *options)
        try:
            code = process.wait(timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
        report = store_of(load_config(self.conf)).get(f"reports/{name}/{run}.json")
        return code, json.loads(report)

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
