"""What a user does: ``cdcservice bootstrap`` and ``verify`` through a real Airflow, Spark and Cassandra."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from servers.airflow import Airflow
from servers.cassandra import CassandraNode
from servers.jars import fetch
from servers.ports import free_port
from servers.spark import lean_java_options

PROJECT = Path(__file__).parents[2]
pytestmark = [pytest.mark.server, pytest.mark.airflow, pytest.mark.spark]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def cdcservice(cassandra: CassandraNode, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Run]:
    """The command, with an Airflow and a configuration of its own."""
    folder = tmp_path_factory.mktemp("e2e")
    jars = sorted(fetch("delta", cache).glob("*.jar"))
    environment = {
        "RINGSYNC_CONFIG": str(folder / "ringsync.yaml"),
        "RINGSYNC_SPARK_JARS": ",".join(map(str, jars)),
        "JDK_JAVA_OPTIONS": lean_java_options(cache, jars),
    }
    airflow = Airflow(folder / "airflow", free_port(), PROJECT / "dags", environment=environment)
    document = {
        "server_name": "test",
        "cassandra": {"contact_points": [cassandra.contact_point], "port": cassandra.port},
        "store": {"url": "lake"},
        "airflow": {"url": airflow.url, "username": airflow.username},
    }
    (folder / "ringsync.yaml").write_text(yaml.safe_dump(document))
    with airflow:
        client = {**os.environ, "RINGSYNC_AIRFLOW_PASSWORD": airflow.password, "PYTHONPATH": str(PROJECT / "include")}

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "ringsync.cli", *arguments, "--conf", str(folder / "ringsync.yaml")]
            return subprocess.run(command, env=client, capture_output=True, text=True, timeout=300, check=False)

        yield run


def test_bootstrap_verify_and_what_goes_wrong(cdcservice: Run, session: Any, keyspace: str) -> None:
    session.execute(f"CREATE TABLE {keyspace}.orders (id int PRIMARY KEY, v text, m map<text, int>)")
    for i in range(50):
        session.execute(
            f"INSERT INTO {keyspace}.orders (id, v, m) VALUES (%s, %s, %s) USING TIMESTAMP 1000", (i, f"v{i}", {"a": i})
        )
    done = cdcservice("bootstrap", "--table", f"{keyspace}.orders", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50 rows" in done.stdout
    assert "0 differences" in done.stdout

    session.execute(f"UPDATE {keyspace}.orders USING TIMESTAMP 1001 SET v = 'other' WHERE id = 7")
    differs = cdcservice("verify", "--table", f"{keyspace}.orders", "--wait")
    assert differs.returncode == 1, differs.stdout + differs.stderr
    assert "2 differences" in differs.stdout

    unknown = cdcservice("bootstrap", "--table", f"{keyspace}.order", "--wait")
    assert unknown.returncode == 3, unknown.stdout + unknown.stderr
    assert f"did you mean {keyspace}.orders?" in unknown.stdout
