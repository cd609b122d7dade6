"""What a user does with ``cdcservice``, through a real Airflow, Spark and Cassandra."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.scylla.demo import HABITS, ORDERS
from ringsync.config import load_config
from ringsync.status import read_statuses
from ringsync.wiring import store_of
from servers.airflow import Airflow
from servers.cassandra import CassandraNode
from servers.jars import fetch
from servers.ports import free_port
from servers.spark import lean_java_options
from tests.chaos.bootstraps import nodetool_of
from tests.scylla_server.proxy import scylla_stand_in
from tests.scylla_sim.materialise import KEYSPACES
from tests.scylla_sim.world import World

PROJECT = Path(__file__).parents[2]
pytestmark = [pytest.mark.server, pytest.mark.airflow, pytest.mark.spark]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the configuration and the store."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="module")
def cdcservice(cassandra: CassandraNode, folder: Path, cache: Path) -> Iterator[Run]:
    """The command, with an Airflow and a configuration of its own."""
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
        "commitlog_processor_window_interval_ms": 5000,
        "airflow": {"url": airflow.url, "username": airflow.username},
        "sstable": {"nodetool": nodetool_of(cassandra)},
    }
    configuration = folder / "ringsync.yaml"
    configuration.write_text(yaml.safe_dump(document))
    with airflow:
        client = {**os.environ, "RINGSYNC_AIRFLOW_PASSWORD": airflow.password, "PYTHONPATH": str(PROJECT / "include")}

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "ringsync.cli", *arguments, "--conf", str(configuration)]
            return subprocess.run(command, env=client, capture_output=True, text=True, timeout=420, check=False)

        yield run


def test_bootstrap_and_verify(cdcservice: Run, session: Any, keyspace: str) -> None:
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


def test_bootstrap_from_sstables(cdcservice: Run, session: Any, keyspace: str, cassandra: CassandraNode) -> None:
    table = f"{keyspace}.stored"
    session.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
    for i in range(50):
        session.execute(f"INSERT INTO {table} (id, v) VALUES (%s, 'x')", (i,))
    session.execute(f"DELETE FROM {table} WHERE id = 7")
    done = cdcservice("bootstrap", "--table", table, "--mode", "sstable", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "snapshot_default: " in done.stdout
    assert "50 rows" in done.stdout  # with the deleted one
    assert "0 differences" in done.stdout
    assert not list((cassandra.folder / "data").glob("*/*/snapshots/ringsync_*"))


def test_changes_are_followed(cdcservice: Run, session: Any, keyspace: str, folder: Path) -> None:
    table = f"{keyspace}.changes"
    session.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text) WITH cdc = true")
    started = cdcservice("start")
    assert started.returncode == 0, started.stdout + started.stderr
    assert table in started.stdout
    for i in range(20):
        session.execute(f"INSERT INTO {table} (id, v) VALUES (%s, 'x')", (i,))
    store, end = store_of(load_config(folder / "ringsync.yaml")), time.monotonic() + 240
    # The command is not the way to look often: each start of it takes a second or two of a core.
    while rows_published(read_statuses(store), table) == 0:
        assert time.monotonic() < end, read_statuses(store)
        time.sleep(0.5)
    while True:
        status = cdcservice("status", "--json")
        found = json.loads(status.stdout)
        published = rows_published(found["loops"], table)
        if status.returncode == 0 and published == 20:
            break
        assert published <= 20, found
        assert time.monotonic() < end, found
        time.sleep(2)
    stopped = cdcservice("stop", "--timeout", "120")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert cdcservice("status").returncode == 1


@pytest.mark.chaos
def test_the_same_configuration_with_another_cluster_follows_a_scylla(
    cdcservice: Run, cassandra: CassandraNode, session: Any, folder: Path
) -> None:
    """Only where the cluster is, and the store, are other: which database it is, ``start`` finds out."""
    for name in KEYSPACES.values():
        session.execute(f"DROP KEYSPACE IF EXISTS {name}")
    configuration = folder / "ringsync.yaml"
    document = yaml.safe_load(configuration.read_text())
    with scylla_stand_in(cassandra, element_times=True) as scylla:
        document["cassandra"] |= {"contact_points": [scylla.host], "port": scylla.port}
        document |= {"store": {"url": "lake-of-scylla"}, "scylla": {"confidence_ms": 5000, "window_ms": 2000}}
        configuration.write_text(yaml.safe_dump(document))
        world = World(scylla, random.Random(3), [ORDERS], shards=2, tokens=16)
        world.create()
        table, write = ORDERS.full_name, partial(world.write, habits=HABITS, change_every_s=60.0)
        write(3)
        started = cdcservice("start")
        assert started.returncode == 0, started.stdout + started.stderr
        assert table in started.stdout
        copied = cdcservice("bootstrap", "--table", table, "--wait")
        assert copied.returncode == 0, copied.stdout + copied.stderr
        write(5)
        published = cdcservice("wait", "--timeout", "300")
        assert published.returncode == 0, published.stdout + published.stderr
        verified = cdcservice("verify", "--table", table, "--wait")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert "0 differences" in verified.stdout
        stopped = cdcservice("stop", "--timeout", "120")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        loops = read_statuses(store_of(load_config(configuration)))
        assert loops["scylla_log_stage/log"]["rows"] > 0
        assert rows_published(loops, table) > 0


def rows_published(loops: dict[str, Any], table: str) -> int:
    """What the loop that closes buckets tells of a table."""
    tables = loops.get("bucket_close/close", {"tables": {}})["tables"]
    return int(tables.get(table, {}).get("rows_published", 0))
