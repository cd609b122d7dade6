"""The sync as production runs it: a Spark cluster, a host that stages, one that submits, and a bucket. They have
nothing in common but the store, the package and the configuration, of which each has a copy in a folder of its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.config import load_config
from ringsync.config.section import connection_variable
from ringsync.steps.application import ExitCode
from ringsync.storage.gcs import GcsStore
from ringsync.wiring import store_of
from servers.cassandra import CassandraNode
from servers.cluster import connected, creating, three_nodes
from servers.gcs import GcsEmulator
from servers.jars import fetch
from servers.spark_cluster import SparkCluster
from tests.chaos.applications import PROJECT, environment
from tests.chaos.bootstraps import nodetool_of
from tests.chaos.test_gcs import World, mirrored
from tests.chaos.under_airflow import until
from tests.on_cluster import Driver, arguments_of_all, files_with, shown_by
from tests.sync.judge import judge
from tests.sync.pipeline import Pipeline, wait_until_drained, write_conf
from tests.sync.scenario import AFTER_IMAGES, TABLES, create_schema, modes, statements, write

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

SECRET = "sesame-of-production"
DRAINED_S = 600
BY_SELECT, BY_SSTABLES = "workload.collections", "workload.single"


class Spread(Pipeline):
    """The loops, each where it belongs: the stage on a database host, the closing on the cluster.

    :param driver: submits to the cluster
    :param host: folder of the database host, with its own copy of the configuration
    """

    def __init__(self, driver: Driver, host: Path, cache: Path) -> None:
        super().__init__(driver.conf, driver.folder, cache)
        self._driver, self._host = driver, host

    def start(self, name: str, *options: str) -> None:
        run = f"{name}-{time.time():.0f}"
        command = [sys.executable, f"{PROJECT}/spark_apps/{name}.py", "--run", run, "--conf"]
        command += [str(self._host / "ringsync.yaml"), *options]
        told = {**environment(), **self._driver.secrets}
        if name == "bucket_close":
            command, told = (
                self._driver.command(name, run, *options),
                {**told, **self._driver.cluster.driver_environment},
            )
        with (self._folder / f"{name}.log").open("ab") as out:
            self.running[name] = subprocess.Popen(
                command, env=told, cwd=self._host, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )


@contextmanager
def watched(cluster: SparkCluster) -> Iterator[list[str]]:
    """What all arguments and all pages have shown meanwhile, each text once."""
    seen, ended = set[str](), threading.Event()

    def watch() -> None:
        while not ended.wait(2):
            seen.update(arguments_of_all(), shown_by(cluster))

    thread, texts = threading.Thread(target=watch), list[str]()
    thread.start()
    try:
        yield texts
    finally:
        ended.set()
        thread.join()
        texts.extend(seen)


def configured(tmp_path: Path, nodes: list[CassandraNode], bucket: GcsEmulator) -> tuple[Path, Path]:
    """The folders of the driver and of the database host, each with its copy of the configuration."""
    places = [tmp_path / name for name in ("driver", "database host")]
    for place in places:
        place.mkdir()
        write_conf(
            place,
            nodes,
            cassandra={"username": "ringsync", "password": {"airflow_connection": "prod"}},
            store={"url": f"{bucket.url}/lake", "gcs_endpoint": bucket.endpoint},
            sync={"tables": modes(0)},
            replica={"merge_interval_s": 1.0, "unrepresentable_values": "raw"},
            sstable={"nodes": {node.contact_point: {"nodetool": nodetool_of(node)} for node in nodes}},
        )
    return places[0], places[1]


def bootstrapped(driver: Driver, table: str, during: list[Any], *options: str) -> None:
    """Copy a table; something is done while the scan runs."""
    assert driver.finished("bootstrap_prepare", table, "--table", table, *options)[0] == 0
    if "--mode=sstable" in options:
        code, report = driver.finished("sstable_snapshot", table, "--table", table, "--bootstrap-run", table)
        assert code == 0, report
    with driver.started("bootstrap_scan", table, "--table", table) as scan:
        for act in during:
            act()
        until(lambda: scan.ended, 600)
    report = json.loads(store_of(load_config(driver.conf)).get(f"reports/bootstrap_scan/{table}.json"))
    assert report["exit_code"] == 0, driver.log("bootstrap_scan", table)[-4000:]
    code, report = driver.finished("bootstrap_drain", table, "--table", table)
    assert code == 0, report


def test_a_cluster_a_bucket_and_folders_with_nothing_in_common(tmp_path: Path, cache: Path, spark: Any) -> None:
    jars = [*fetch("delta", cache).glob("*.jar"), *fetch("gcs", cache).glob("*.jar")]
    wanted = ",".join(str(jar) for jar in jars if jar.name.startswith(("delta-", "unity", "gcs-")))
    with (
        GcsEmulator(bucket="ringsync-lake") as bucket,
        three_nodes(tmp_path / "nodes", cache, 181, authenticator="password") as nodes,
        SparkCluster(tmp_path / "spark", [f"{PROJECT}/include"] * 2, cores=4, memory_mb=2816) as cluster,
        connected(nodes, ConsistencyLevel.ALL) as session,
    ):
        with creating(nodes[0]) as creator:
            creator.execute(f"CREATE ROLE ringsync WITH PASSWORD = '{SECRET}' AND LOGIN = true AND SUPERUSER = true")
            create_schema(creator)
        folder, host = configured(tmp_path, nodes, bucket)
        driver = Driver(cluster, folder / "ringsync.yaml", wanted, {connection_variable("prod"): SECRET})
        store = GcsStore(bucket.bucket, "lake", endpoint=bucket.endpoint)
        world = World(driver.conf, folder, session, None, store, random.Random(1))  # type: ignore[arg-type]
        workload, running = statements(40, 1200), Spread(driver, host, cache)
        with watched(cluster) as shown, running.ending():
            for name in ("commitlog_stage", "bucket_close", "out_of_sequence"):
                running.start(name)
            write(session, workload, 200)

            def lose_a_worker() -> None:
                time.sleep(15)
                cluster.workers[1].kill()
                write(session, workload, 200)

            bootstrapped(driver, BY_SELECT, [lose_a_worker])
            cluster.start_worker(1)
            bootstrapped(driver, BY_SSTABLES, [lambda: write(session, workload, 200)], "--mode=sstable")
            wait_until_drained(running.store, DRAINED_S, running.check)
            code, report = driver.finished("replica_merge", "m1")
            assert code == 0, report
            write(session, workload, 200)
            wait_until_drained(running.store, DRAINED_S, running.check)
            for table in (BY_SELECT, BY_SSTABLES):
                code, report = driver.finished("replica_verify", f"v-{table}", "--table", table)
                assert (code, report["differences"]) == (0, 0), report
            # What is lost must be nowhere else, e.g. among changes that are not merged yet.
            assert driver.finished("replica_merge", "m2")[0] == 0
            assert world.damage(BY_SELECT) > 0
            code, report = driver.finished("replica_verify", "repair", "--table", BY_SELECT, "--repair")
            assert (code, report["differences"]) == (ExitCode.OK, 0), report
            assert report["before_repair"]["ranges_differing"] > 0
            wait_until_drained(running.store, DRAINED_S, running.check)
        config = load_config(driver.conf)
        local = mirrored(store, tmp_path / "mirror")
        rows = judge(local, session, TABLES, (BY_SELECT, BY_SSTABLES), config.sync)
    print(rows)
    assert min(rows.values()) > 5
    assert {mode["after_image"] for mode in modes(0).values()} == set(AFTER_IMAGES)
    assert any("bucket_close" in text and "RUNNING" in text for text in shown)
    for secret in (SECRET, cluster.secret):
        assert not [text[:300] for text in shown if secret in text]
        places = [tmp_path / name for name in ("driver", "database host", "spark", "mirror")]
        found = [file for place in places for file in files_with(secret, place)]
        assert [file.name for file in found if file.name != "spark-defaults.conf"] == []
