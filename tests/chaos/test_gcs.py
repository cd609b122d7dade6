"""The whole pipeline on a bucket whose service refuses, loses answers, and breaks off uploads and downloads by chance:
whatever is written, stream and replica are what SELECT gives, and each change comes once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.config import load_config
from ringsync.orchestration import SparkApplication
from ringsync.replica.delta_log import read_snapshot, remove
from ringsync.replica.folders import base_folder
from ringsync.steps.application import ExitCode
from ringsync.storage.gcs import GcsStore
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore
from servers.cassandra import CassandraNode, NodeSettings
from servers.cluster import connected
from servers.gcs import GcsEmulator
from servers.jars import fetch
from tests.chaos.applications import PROJECT, environment
from tests.gcs_faults import KINDS, OWN, FaultyProxy, faulty
from tests.sync.judge import judge
from tests.sync.pipeline import Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import TABLES, bootstrap, create_schema, start_loops, statements, write

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

SHARE = 0.01
"""Of the requests that meet each kind of fault."""
SEED = 20261125
DRAINED_S = 600
TIMED = "workload.timed"
"""A table whose rows often have old timestamps: then they are late."""
REPLICATED = ("workload.collections", TIMED)
TRIES = 3
"""The driver of an application may lose more than it can repeat; then Airflow starts it again."""


@dataclass
class World:
    """What the applications work on.

    :ivar direct: the same store, without faults
    """

    conf: Path
    folder: Path
    session: Any
    proxy: FaultyProxy
    direct: GcsStore
    keys: random.Random

    def submit(self, name: str, *options: str) -> tuple[int, dict[str, Any]]:
        """Run an application as Airflow does; its exit code and report."""
        run = f"{name}-{time.time_ns()}"
        settings = SparkApplication(name, (), "1g").spark_conf()
        command = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]"]
        command += [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
        command += [str(PROJECT / "spark_apps" / f"{name}.py"), "--conf", str(self.conf), "--run", run, *options]
        began = time.monotonic()
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900, check=False)
        (self.folder / f"{run}.log").write_text(done.stdout + done.stderr)
        report = json.loads(self.direct.get(f"reports/{name}/{run}.json"))
        print(f"{name} {' '.join(options)}: {done.returncode}, {time.monotonic() - began:.0f} s, {report.get('error')}")
        return done.returncode, report

    def write_timed(self, count: int) -> None:
        """Write rows of now and of ten minutes ago, and delete some."""
        for _ in range(count):
            at = time.time_ns() // 1000 - self.keys.choice((0, 0, 600_000_000))
            key = self.keys.randrange(40), self.keys.randrange(10)
            if self.keys.random() < 0.2:
                self.session.execute(f"DELETE FROM {TIMED} USING TIMESTAMP {at} WHERE id = %s AND seq = %s", key)
            else:
                value = (*key, f"v{self.keys.random()}")
                self.session.execute(
                    f"INSERT INTO {TIMED} (id, seq, v) VALUES (%s, %s, %s) USING TIMESTAMP {at}", value
                )

    def merge(self) -> dict[str, Any]:
        """Merge all tables that have changes; the report of the run that did the last of it."""
        for _ in range(TRIES):
            code, report = self.submit("replica_merge")
            if code == ExitCode.OK:
                return report
        raise AssertionError(report)

    def verify(self, table: str, *options: str) -> tuple[int, dict[str, Any]]:
        """Verify a table; again after a crash, as Airflow does."""
        for _ in range(TRIES):
            code, report = self.submit("replica_verify", "--table", table, *options)
            if code != ExitCode.CRASHED:
                break
        return code, report

    def damage(self, table: str) -> int:
        """Remove a file from the base of a replica; the rows in it."""
        folder = base_folder(*table.split("."))
        before = read_snapshot(self.direct, folder)
        file = max(before.files, key=lambda one: int(one["size"]))
        remove(self.direct, folder, before, [file], now_ms=int(time.time() * 1000))
        return before.rows - read_snapshot(self.direct, folder).rows


@pytest.fixture
def world(tmp_path: Path, cache: Path, spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    jars = [*fetch("delta", cache).glob("*.jar"), *fetch("gcs", cache).glob("*.jar")]
    wanted = [str(jar) for jar in jars if jar.name.startswith(("delta-", "unity", "gcs-"))]
    monkeypatch.setenv("RINGSYNC_SPARK_JARS", ",".join(wanted))
    settings = NodeSettings(heap_mb=384).on_free_ports()
    with (
        CassandraNode(tmp_path / "node", settings, cache) as node,
        connected([node], ConsistencyLevel.ALL) as session,
        GcsEmulator(bucket="ringsync-lake") as emulator,
        faulty(emulator, SEED, SHARE) as proxy,
    ):
        create_schema(session, replicas=1)
        session.execute(f"CREATE TABLE {TIMED} (id int, seq int, v text, PRIMARY KEY (id, seq)) WITH cdc = true")
        conf = write_conf(
            tmp_path,
            [node],
            store={"url": f"{emulator.url}/lake", "gcs_endpoint": proxy.endpoint},
            sync={"tables": {TIMED: {"after_image": "replica"}}},
            replica={"merge_interval_s": 1.0},
        )
        direct = GcsStore(emulator.bucket, "lake", endpoint=emulator.endpoint)
        yield World(conf, tmp_path, session, proxy, direct, random.Random(SEED))


def test_a_service_with_faults(world: World, cache: Path) -> None:
    workload = statements(25, 1500)
    with pipeline(world.conf, world.folder, cache) as running:
        start_loops(running)
        write(world.session, workload, 150)
        world.write_timed(150)
        for table in REPLICATED:
            bootstrap(world.conf, table, table, [lambda: world.write_timed(20)] * 2)
        write(world.session, workload, 150)
        world.write_timed(150)
        world.merge()
        write(world.session, workload, 150)
        world.write_timed(150)
        drain(running)
        world.merge()
        for table in REPLICATED:
            code, report = world.verify(table)
            assert (code, report["differences"]) == (0, 0), report
        for table in REPLICATED:
            repaired(world, table)
        write(world.session, workload, 100)
        world.write_timed(100)
        drain(running)
        world.merge()
        late = running.store.list("sync/")
        assert any("late" in stat.key for stat in late)
    local = mirrored(world.direct, world.folder / "mirror")
    rows = judge(local, world.session, (*TABLES, TIMED), REPLICATED, load_config(world.conf).sync)
    print(rows, world.proxy.counts)
    assert min(rows.values()) > 5
    assert all(world.proxy.counts[kind] for kind in (*KINDS, OWN)), world.proxy.counts


def drain(running: Pipeline) -> None:
    began = time.monotonic()
    wait_until_drained(running.store, DRAINED_S, running.check)
    print(f"drained: {time.monotonic() - began:.0f} s")


def repaired(world: World, table: str) -> None:
    """Rows that are lost from a replica are found and brought back."""
    lost = world.damage(table)
    assert lost > 0
    code, report = world.verify(table, "--repair")
    assert code == ExitCode.OK, report
    assert report["before_repair"]["ranges_differing"] > 0
    assert report["differences"] == 0


def mirrored(store: ObjectStore, folder: Path) -> LocalStore:
    """All objects, in a folder: the oracle's own reader of Delta tables knows nothing of buckets."""
    local = LocalStore(folder)
    for stat in store.list():
        local.put(stat.key, store.get(stat.key))
    return local
