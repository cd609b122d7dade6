"""Run the Spark Cassandra Connector on Spark 3.5 in an environment of its own: see spark_connector_job.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from peers.measure import Measurement
from peers.table import KEYSPACE, TABLE, VALUE_COLUMNS

from servers import ServerError, last_lines
from servers.cassandra import CassandraNode
from servers.jars import exclusive, fetch
from servers.java import find_java_home

PINS = ("pyspark==3.5.7", "py4j==0.10.9.7")
SINKS = ("noop", "parquet")
JOB = Path(__file__).with_name("spark_connector_job.py")


def environment(cache: Path) -> Path:
    """Return the Python of an environment with Spark 3.5; the first call makes the environment.

    :param cache: folder that keeps the environment between runs
    :raises ServerError: the packages cannot be installed; with the installer's last lines
    """
    folder = cache.resolve() / "bench" / "spark-3.5"
    python, marker = folder / "bin" / "python", folder / "completed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.parent / "spark-3.5.lock"):
        if not marker.exists() or marker.read_text() != "\n".join(PINS):
            shutil.rmtree(folder, ignore_errors=True)
            for command in (
                [sys.executable, "-m", "venv", str(folder)],
                [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINS],
            ):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise ServerError(f"Spark 3.5 could not be installed:\n{last_lines(done.stdout + done.stderr)}")
            marker.write_text("\n".join(PINS))
    return python


def read(node: CassandraNode, page_size: int, scratch: Path, *, times: bool) -> dict[str, Measurement]:
    """Read the table with the connector into each sink; return measurements by sink.

    :param page_size: rows per result page
    :param scratch: folder for the Parquet files, which are deleted at the end
    :param times: whether to read writetimes and TTLs, too
    :raises ServerError: the job fails; with its last lines
    """
    python = environment(node.cache)
    jars = fetch("spark-cassandra-connector", node.cache).resolve()
    with tempfile.TemporaryDirectory(dir=scratch, prefix="spark.") as folder:
        order = {
            "jars": [str(jar) for jar in sorted(jars.glob("*.jar"))],
            "address": node.contact_point,
            "port": node.port,
            "server": node.pid,
            "keyspace": KEYSPACE,
            "table": TABLE,
            "timed_columns": VALUE_COLUMNS if times else (),
            "page_size": page_size,
            "sinks": SINKS,
            "folder": folder,
        }
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_", "PYTHON"))
        }
        variables |= {"JAVA_HOME": str(find_java_home()), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": str(python)}
        done = subprocess.run(
            [str(python), str(JOB), json.dumps(order)],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env=variables,
        )
        results = Path(folder, "results.json")
        if done.returncode != 0 or not results.exists():
            raise ServerError(f"The Spark Cassandra Connector failed:\n{last_lines(done.stdout + done.stderr, 40)}")
        return {sink: Measurement(**measured) for sink, measured in json.loads(results.read_text()).items()}
