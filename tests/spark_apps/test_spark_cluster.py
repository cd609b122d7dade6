"""Applications on a Spark cluster whose workers share nothing with the driver but the store and what is installed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ringsync.config.section import connection_variable
from servers.cassandra import CassandraNode
from servers.jars import fetch
from servers.spark_cluster import SparkCluster
from tests.chaos.applications import PROJECT
from tests.on_cluster import Driver, arguments_of_all, files_with, shown_by

pytestmark = [pytest.mark.server, pytest.mark.spark]

ROWS = 500
SECRET = "sesame-reader"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory, cache: Path, guarded: CassandraNode) -> Iterator[Driver]:
    """A driver whose configuration names the secret of a login by an Airflow connection, beside a cluster."""
    folder = tmp_path_factory.mktemp("cluster")
    session = guarded.cluster()
    statement = "INSERT INTO shop.orders (id, v) VALUES (%s, %s)"
    connected = session.connect()
    for row in range(ROWS):
        connected.execute(statement, (row, f"v{row}"))
    session.shutdown()
    (folder / "driver").mkdir()
    conf = folder / "driver" / "ringsync.yaml"
    document = {
        "server_name": "test",
        "cassandra": {
            **{"contact_points": [guarded.contact_point], "port": guarded.port},
            **{"username": "reader", "password": {"airflow_connection": "prod"}},
        },
        "store": {"url": str(folder / "lake")},
    }
    conf.write_text(yaml.safe_dump(document))
    conf.chmod(0o600)
    jars = [str(jar) for jar in fetch("delta", cache).glob("*.jar") if jar.name.startswith(("delta-", "unity"))]
    with SparkCluster(folder / "spark", [f"{PROJECT}/include"] * 2) as cluster:
        yield Driver(cluster, conf, ",".join(jars), {connection_variable("prod"): SECRET})


def test_a_bootstrap_by_executors_that_know_no_secret(driver: Driver) -> None:
    """The secret is only where it is used: on no page, in no argument, in no file."""
    options = ("--table", "shop.orders")
    seen: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1):
            seen.extend([*arguments_of_all(), *shown_by(driver.cluster)])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for name in ("bootstrap_prepare", "bootstrap_scan", "bootstrap_drain", "replica_verify"):
            code, report = driver.finished(name, "r1", *options)
            assert code == 0, driver.log(name, "r1")[-4000:]
    finally:
        ended.set()
        watcher.join()
    assert (report["rows"], report["ranges_differing"]) == (ROWS, 0), report
    assert any(driver.cluster.url in text for text in seen)
    assert any("bootstrap_scan" in text and "RUNNING" in text for text in seen), "the cluster has shown it at work"
    for secret in (SECRET, driver.cluster.secret):
        assert not [text for text in seen if secret in text]
        assert not [file for file in files_with(secret, driver.folder.parent) if file.name != "spark-defaults.conf"]
    used = list((driver.cluster.home / "worker-0" / "work").rglob("stderr"))
    assert used, "executors have worked"


@pytest.mark.chaos
def test_a_worker_with_other_libraries_is_named(driver: Driver, tmp_path: Path) -> None:
    """A task on it fails before it does anything."""
    (tmp_path / "numpy-1.0.dist-info").mkdir()
    (tmp_path / "numpy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
    with SparkCluster(tmp_path / "spark", [f"{tmp_path}:{PROJECT}/include"]) as cluster:
        wrong = replace(driver, cluster=cluster)
        assert wrong.finished("bootstrap_prepare", "r2", "--table", "shop.orders")[0] == 0
        code, report = wrong.finished("bootstrap_scan", "r2", "--table", "shop.orders")
    assert code == 3, report
    assert "numpy 1.0, not " in report["error"]
    assert "install the same on all hosts" in report["error"]
