"""Spark's standalone cluster on one machine: a master and workers, each with a folder and an environment of its own.

Whoever does not know the cluster's secret can start nothing on it (`spark.authenticate`); what Spark sends and what it
puts on disks is encrypted. The secret is in a file that only the user may read: it is in no argument.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from servers.java import find_java_home
from servers.ports import free_port, is_free
from servers.process import Server, ServerProcess, stop_together

ADDRESS = "127.0.0.1"
START_SECONDS = 60
STOP_SECONDS = 15
CLASSES = "org.apache.spark.deploy"


class SparkCluster(Server):
    """
    A standalone cluster: `with SparkCluster(home) as cluster: cluster.url`.

    :param home: folder of the cluster: a folder for each of its processes, logs, and the settings with the secret.
    :param packages: `PYTHONPATH` of each worker, where ringsync is; they may be copies.
    :param cores: of each worker.
    :param memory_mb: that each worker may give to executors, MB.
    """

    def __init__(self, home: Path, packages: Sequence[str], *, cores: int = 1, memory_mb: int = 1024) -> None:
        self.home, self.packages = home, packages
        self.cores, self.memory_mb = cores, memory_mb
        self.port = self.ui_port = 0
        self.secret = secrets.token_hex(16)
        self.master: ServerProcess | None = None
        self.workers: list[ServerProcess] = []

    @property
    def url(self) -> str:
        """Address for drivers."""
        return f"spark://{ADDRESS}:{self.port}"

    @property
    def driver_environment(self) -> dict[str, str]:
        """What a driver needs of the cluster beside its address: where its settings are."""
        return {"SPARK_CONF_DIR": str(self.home / "conf"), "SPARK_LOCAL_IP": ADDRESS}

    def start(self) -> None:
        conf = self.home / "conf"
        conf.mkdir(parents=True, exist_ok=True)
        settings = conf / "spark-defaults.conf"
        settings.touch(mode=0o600)
        settings.write_text(
            f"spark.authenticate true\nspark.authenticate.secret {self.secret}\n"
            "spark.network.crypto.enabled true\nspark.io.encryption.enabled true\n"
            # Of one application: the first one would take them all.
            f"spark.executor.memory 640m\nspark.deploy.defaultCores {len(self.packages)}\n"
        )
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self.port, self.ui_port = free_port(), free_port()
        self.master = self._started(
            "master", "master.Master", "--host", ADDRESS, "--port", str(self.port), "--webui-port", str(self.ui_port)
        )
        self.master.wait_until(lambda: not is_free(ADDRESS, self.port), START_SECONDS, "Spark's master")
        for number in range(len(self.packages)):
            self.start_worker(number)

    def start_worker(self, number: int) -> None:
        """Start a worker, with its executors' folders in its own."""
        port, name = free_port(), f"worker-{number}"
        options = ["--host", ADDRESS, "--webui-port", str(port), "--work-dir", str(self.home / name / "work")]
        options += ["--cores", str(self.cores), "--memory", f"{self.memory_mb}m", self.url]
        worker = self._started(name, "worker.Worker", *options, package=self.packages[number])
        self.workers.append(worker)
        worker.wait_until(lambda: not is_free(ADDRESS, port), START_SECONDS, f"Spark's {name}")

    def stop(self) -> None:
        stop_together([process for process in (*self.workers, self.master) if process is not None], STOP_SECONDS)

    def _started(self, name: str, kind: str, *options: str, package: str | None = None) -> ServerProcess:
        import pyspark

        folder = self.home / name
        folder.mkdir(exist_ok=True)
        home, java = Path(pyspark.__path__[0]), find_java_home()
        environment = {
            **{name: os.environ[name] for name in ("LANG", "NUMBA_CACHE_DIR") if name in os.environ},
            **{"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder)},
            **{"JAVA_HOME": str(java), "SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m"},
            **{"PYSPARK_PYTHON": sys.executable, **self.driver_environment},
            **({"PYTHONPATH": package} if package else {}),
        }
        command = [str(home / "bin" / "spark-class"), f"{CLASSES}.{kind}", *options]
        return ServerProcess(command, self.home / f"{name}.log", environment, folder)
