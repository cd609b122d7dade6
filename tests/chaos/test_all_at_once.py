"""Twenty minutes on a bucket, under Airflow, in which everything gives way by chance: processes, nodes, the broker, the
object store, the sync itself, the room in ``cdc_raw``, and a node's logs. It ends exact, and every alarm is cleared."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.airflow_client import AirflowError
from ringsync.cli import main
from ringsync.config import load_config
from ringsync.ledger.alarms import Alarm, history, raised_now
from ringsync.ledger.archive import READ, archived
from ringsync.ledger.staging import closed_until
from ringsync.storage.gcs import GcsStore
from servers.cluster import connected, three_nodes
from servers.gcs import GcsEmulator
from tests.chaos.test_archive import BULK, ROW_BYTES
from tests.chaos.test_gcs import mirrored
from tests.chaos.under_airflow import BOOTSTRAPPED, SYNC_DAGS, Sync, judge_kafka, started, until, writing
from tests.gcs_faults import FaultyProxy, faulty
from tests.sync.judge import judge
from tests.sync.pipeline import wait_until_drained
from tests.sync.scenario import TABLES, TROUBLES, create_schema, statements

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark, pytest.mark.airflow]

MINUTES = float(os.environ.get("RINGSYNC_CHAOS_MINUTES", "20"))
SEED = int(os.environ.get("RINGSYNC_CHAOS_SEED", "20261125"))
CDC_MIB = 16
SHARE = 0.002
"""Of the requests to the store that meet each kind of fault, all the time."""
DAGS = (*SYNC_DAGS, "commitlog_archive", "archive_reprocess", "alarms")
FAULTS = {
    **{"commitlog_stage": 2, "bucket_close": 2, "out_of_sequence": 1, "schema_update": 1, "commitlog_archive": 2},
    **{"replica_merge": 1, "scheduler": 1, "worker": 1, "node": 2, "broker": 1},
    **{"broker away": 2, "store away": 2, "stopped": 2, "wiped": 1},
}
"""How often each happens in twenty minutes, at least once each."""
KINDS = {"kafka-failing", "segments-lost", "sync-stopped"}
"""Alarms that these faults must raise; what else is raised depends on chance."""
TOLD = """
import json
from airflow.sdk import BaseNotifier

class Writes(BaseNotifier):
    template_fields = ("text",)

    def __init__(self, path, text):
        super().__init__()
        self.path, self.text = path, text

    def notify(self, context):
        with open(self.path, "a") as file:
            file.write(self.text + "\\n")
"""
VERIFY = re.compile(r"cdcservice verify --repair --table ([\w.]+)")


@dataclass
class World:
    """What gives way.

    :ivar direct: the same store, without faults
    """

    sync: Sync
    proxy: FaultyProxy
    direct: GcsStore
    session: Any
    numbers: Iterator[int]

    def happen(self, fault: str) -> None:
        """Let something happen, and be over."""
        chance = self.sync.moments
        match fault:
            case "broker away":
                assert self.sync.broker
                self.sync.broker.kill()
                self.bulk(chance.uniform(30, 60))
                # Meanwhile the sync may have had nothing to publish.
                until(self.has_failed_to_publish, 600)
                self.sync.broker.start()
            case "store away":
                self.proxy.share = 1.0
                self.bulk(chance.uniform(20, 40))
                self.proxy.share = SHARE
            case "stopped":
                self.stop()
                self.bulk(chance.uniform(30, 60))
                self.start()
            case "wiped":
                self.stop()
                self.bulk(10)
                node = chance.choice(self.sync.nodes)
                for file in node.cdc_raw.glob("CommitLog-*"):
                    file.unlink(missing_ok=True)
                self.start()
                until(self.has_lost, 600)
            case _:
                self.sync.kill(fault)

    def stop(self) -> None:
        """Stop the sync, as an operator does."""
        until(lambda: main(["stop", "--conf", str(self.sync.conf), "--timeout", "120"]) in (0, 1))

    def start(self) -> None:
        """Start the sync again."""
        until(lambda: main(["start", "--conf", str(self.sync.conf), "--timeout", "1"]) in (0, 1))

    def bulk(self, seconds: float) -> None:
        """Write rows that fill the nodes' logs for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            number = next(self.numbers)
            value = random.Random(number).randbytes(ROW_BYTES)
            try:
                self.session.execute(f"INSERT INTO {BULK} (id, v) VALUES (%s, %s)", (number % 100, value))
            except TROUBLES:
                time.sleep(1)
            time.sleep(0.1)

    def raised(self, kind: str = "") -> list[Alarm]:
        """The alarms of a kind that are raised now."""
        return [one for one in raised_now(self.direct) if kind in ("", one.kind)]

    def has_failed_to_publish(self) -> bool:
        """Whether it is told that the broker is away."""
        self.bulk(3)
        return bool(self.raised("kafka-failing"))

    def has_lost(self) -> bool:
        """Whether the loss of a node's logs is told. An empty folder is believed when the node writes a new segment."""
        self.bulk(3)
        return bool(self.raised("segments-lost"))

    def repair(self) -> None:
        """Run the commands that the alarms of gaps name, until they are over. While rows are on their way, source and
        replica differ."""
        for attempt in range(8):
            tables = {name for alarm in self.raised("segments-lost") for name in VERIFY.findall(alarm.text)}
            if not self.direct.list("gaps/"):
                return
            for name in sorted(tables):
                run = f"repair-{attempt}-{name}-{time.time():.0f}"
                until(partial(self.sync.trigger, "replica_verify", run, {"table": name, "repair": True}))
                until(partial(self.ended, run), 600)
            time.sleep(20)
        assert self.direct.list("gaps/") == []

    def ended(self, run: str) -> bool:
        """Whether a verification has ended, well or not; False: Airflow does not answer just now."""
        try:
            return self.sync.client.state("replica_verify", run).finished
        except AirflowError:
            return False


def test_everything_gives_way(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, spark: Any) -> None:
    moments = random.Random(SEED)
    with ExitStack() as servers:
        nodes = servers.enter_context(three_nodes(tmp_path / "nodes", cache, 141, cdc_total_mib=CDC_MIB))
        session = servers.enter_context(connected(nodes, ConsistencyLevel.QUORUM))
        create_schema(session)
        session.execute(f"CREATE TABLE {BULK} (id int PRIMARY KEY, v blob) WITH cdc = true")
        emulator = servers.enter_context(GcsEmulator(bucket="ringsync-lake"))
        proxy = servers.enter_context(faulty(emulator, SEED, SHARE))
        told = tmp_path / "told.jsonl"
        text = (
            '{"kind": "{{ alarm.kind }}", "where": {{ alarm.where | tojson }}, "at": {{ alarm.cleared_ms | tojson }}}'
        )
        sync = started(
            *(tmp_path, cache, nodes, servers, moments),
            dags=DAGS,
            jars=("delta", "gcs"),
            modules={"told_alarms": TOLD},
            store={"url": f"{emulator.url}/lake", "gcs_endpoint": proxy.endpoint},
            # On two slow cores, each start of Spark and each small bucket costs much.
            window_ms=10_000,
            sync={"run_s": 300},
            verify={"ranges": 16},
            archive={"poll_interval_ms": 1000},
            alarms={
                **{"after_s": 10, "interval_s": 5},
                "notifiers": [{"name": "told_alarms.Writes", "arguments": {"path": str(told), "text": text}}],
            },
        )
        monkeypatch.setenv("RINGSYNC_AIRFLOW_PASSWORD", sync.airflow.password)
        direct = GcsStore(emulator.bucket, "lake", endpoint=emulator.endpoint)
        world = World(sync, proxy, direct, session, count())
        # Before the first close, each old timestamp of the workload would get a bucket of its own.
        until(lambda: closed_until(sync.store))
        with writing(session, statements(SEED, 50_000)):
            for name in BOOTSTRAPPED:
                until(partial(sync.trigger, "bootstrap_table", name, {"table": name, "verify": False}))
            for name in BOOTSTRAPPED:
                until(partial(sync.succeeded, "bootstrap_table", name), 900)
            happened = let_it_happen(world)
        proxy.share = 0
        wait_until_drained(sync.store, 1200)
        world.repair()
        local = mirrored(direct, tmp_path / "mirror")
        with connected(nodes, ConsistencyLevel.ALL) as reading:
            rows = judge(local, reading, (*TABLES, BULK), BOOTSTRAPPED, load_config(sync.conf).sync)
            judge_kafka(sync, reading)
        until(lambda: not world.raised(), 600)
        alarms = list(history(direct, 0))
        print(
            f"{dict(happened)}; alarms: {dict(Counter(one.kind for one in alarms))}; {dict(proxy.counts)}; rows: {rows}"
        )
        assert [one for one in alarms if one.cleared_ms is None] == []
        assert {one.kind for one in alarms} >= KINDS
        # While the store is away, each run of the watch tells again what it sees.
        notified = {(one["kind"], one["where"], one["at"] is not None) for one in map(json.loads, told.open())}
        assert notified >= {(one.kind, one.where, cleared) for one in alarms for cleared in (False, True)}
        assert len(list(archived(direct, READ))) > 0, "cdc_raw was never short of room"
    assert min(rows.values()) > 5
    shutil.rmtree(tmp_path / "mirror")


def let_it_happen(world: World) -> Counter[str]:
    """Let everything happen in a random order, for so many minutes; how often what has happened."""
    happened: Counter[str] = Counter()
    faults = [name for name, times in FAULTS.items() for _ in range(max(1, round(times * MINUTES / 20)))]
    world.sync.moments.shuffle(faults)
    end = time.monotonic() + MINUTES * 60
    while faults or time.monotonic() < end:
        fault = faults.pop() if faults else world.sync.moments.choice(sorted(FAULTS))
        print(f"{time.strftime('%H:%M:%S')} {fault}", flush=True)
        world.happen(fault)
        happened[fault] += 1
        time.sleep(world.sync.moments.uniform(1, 15))
    return happened
