"""Fifteen faults on a running sync under Airflow: each raises its alarm in the time that docs/runbook.md states, no
write is refused, each clears by itself or by what the alarm names, and replica and stream equal the source."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.config import load_config
from ringsync.config.section import connection_variable
from ringsync.ledger.alarms import Alarm, history, raised_now
from ringsync.ledger.staging import closed_until
from ringsync.state.session import StateSession
from ringsync.storage.gcs import GcsStore
from ringsync.storage.local import LocalStore
from ringsync.storage.port import NotFoundError
from servers.cassandra import CassandraNode
from servers.cluster import connected, three_nodes
from servers.gcs import GcsEmulator
from tests.chaos.faults import (
    ACTS,
    AFTER_S,
    CDC_MIB,
    CLOCK,
    CONNECTION,
    FAULTS,
    HINTS_S,
    LAG_S,
    NOTES,
    ORDERS,
    PASSWORD,
    PEOPLE,
    PICTURES,
    ROLE,
    UNTOUCHED,
    WINDOW_S,
    Fault,
    World,
    give_connection,
)
from tests.chaos.under_airflow import Sync, judge_kafka, started, until
from tests.gcs_faults import faulty
from tests.sync.evolving import in_background
from tests.sync.judge import judge
from tests.sync.pipeline import wait_until_drained

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark, pytest.mark.airflow]

CHOSEN = [name for name in os.environ.get("RINGSYNC_FAULTS", "").split(",") if name] or list(FAULTS)
"""Names of the faults to play."""
NEED_REPLICAS = {"planted difference", "masked column", "table out of and back into cdc"}
FIRST, DISK_MIB = 171, 1500
LOOK_S = 90
"""A look of the alarms, a cycle of the loop that tells them, and two slow cores."""
CLEAR_S, RUN_S = 420, 600
"""An alarm is over by then; that of a DAG, or of what a DAG reads at the end of a run, with the next run."""
NOT_TOLD = Alarm("", "", "", is_critical=False, since_ms=0, seen_ms=0)
SPOTTED = 100
"""Rows of each table that production writes again and again."""


def test_each_fault_is_told_in_time_and_clears(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[str] = []
    replicated = (ORDERS, PEOPLE, NOTES) if NEED_REPLICAS & {*CHOSEN} else ()
    with ExitStack() as servers:
        nodes = servers.enter_context(_nodes(tmp_path / "nodes", cache))
        session = servers.enter_context(connected(nodes, ConsistencyLevel.QUORUM, 60))
        _create_schema(session, nodes[0])
        emulator = servers.enter_context(GcsEmulator(bucket="ringsync-lake"))
        proxy = servers.enter_context(faulty(emulator, 1, 0))
        sync = _started(tmp_path, cache, nodes, servers, f"{emulator.url}/lake", proxy.endpoint)
        monkeypatch.setenv("RINGSYNC_AIRFLOW_PASSWORD", sync.airflow.password)
        monkeypatch.setenv(connection_variable(CONNECTION), PASSWORD)
        world = World(sync, proxy, GcsStore(emulator.bucket, "lake", endpoint=emulator.endpoint), session, tmp_path)
        give_connection(world)
        until(lambda: world.command("start") in (0, 1))
        until(lambda: closed_until(world.direct), 600)
        with _production(world):
            if replicated:
                assert world.command("bootstrap", "--table", ",".join(replicated), "--no-verify", "--wait") == 0
            for act in ACTS:
                for line in _play(world, {name: FAULTS[name] for name in act if name in CHOSEN}):
                    _say(f"wrong: {line}")
                    wrong.append(line)
        wait_until_drained(world.direct, 600)
        _judge(world, nodes, replicated)
        until(lambda: not raised_now(world.direct), CLEAR_S)
        assert world.command("status") == 0
        print(f"alarms: {Counter(alarm.kind for alarm in history(world.direct, 0))}")
    assert not wrong, wrong


def _play(world: World, faults: Mapping[str, Fault]) -> Iterator[str]:
    """Let things go wrong at the same time; yield what is not told in time, or not over by what its alarm says."""
    if not faults:
        return
    began: dict[str, float] = {}
    told: dict[str, Alarm] = {}
    for name, fault in faults.items():
        _say(name)
        began[name] = time.time()
        try:
            began[name] = fault.begin(world) or began[name]
        except AssertionError as error:
            yield f"{name}: {error}"
    for name, fault in faults.items():
        if fault.kind and (alarm := _told(world, fault, began[name])) is None:
            yield f"{name}: no alarm {fault.kind}"
        elif fault.kind and alarm and alarm.raised_ms:
            told[name], after_s = alarm, alarm.raised_ms / 1000 - began[name]
            _say(f"{name}: after {after_s:.0f} s: {alarm.summary()}")
            if after_s > fault.within_s + LOOK_S:
                yield f"{name}: told after {after_s:.0f} s, not {fault.within_s:.0f}"
    for name, fault in faults.items():
        try:
            fault.end(world, told.get(name, NOT_TOLD))
        except AssertionError as error:
            yield f"{name}: {error}"
    yield from _not_cleared(world, told)
    yield from (f"{', '.join(faults)}: refused {times} times: {error}" for error, times in world.refused.items())
    world.refused.clear()


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _told(world: World, fault: Fault, began: float) -> Alarm | None:
    """Wait for the alarm of a fault, for longer than it may take."""
    deadline = began + fault.within_s + 3 * LOOK_S
    while True:
        for alarm in history(world.direct, int(began * 1000)):
            if alarm.kind == fault.kind and re.fullmatch(fault.where, alarm.where):
                return alarm
        if time.time() > deadline:
            return None
        time.sleep(1)


def _not_cleared(world: World, told: Mapping[str, Alarm]) -> Iterator[str]:
    """Wait until what was raised is over; yield what is not after long."""
    began = time.monotonic()
    for name, alarm in told.items():
        while any((one.kind, one.where) == (alarm.kind, alarm.where) for one in raised_now(world.direct)):
            if time.monotonic() > began + CLEAR_S + RUN_S * (alarm.kind in ("dag-failed", "archive-waiting")):
                yield f"{name}: not cleared: {alarm.summary()}"
                break
            time.sleep(1)
        else:
            _say(f"{name}: cleared")


def _judge(world: World, nodes: list[CassandraNode], replicated: Collection[str]) -> None:
    """Replica, stream and Kafka are equal to the source, cell by cell; where a stream has a gap, the replica is."""
    whole = (ORDERS, PEOPLE)
    local = LocalStore(world.folder / "mirror")  # the oracle's own reader of Delta tables knows nothing of buckets
    for stat in world.direct.list():
        if "pictures" not in stat.key:
            with suppress(NotFoundError):  # signs of life come and go
                local.put(stat.key, world.direct.get(stat.key))
    with connected(nodes, ConsistencyLevel.ALL) as reading:
        rows = judge(local, reading, whole, replicated, load_config(world.sync.conf).sync, not_followed=())
        judge_kafka(world.sync, reading, whole)
    for name in (*((NOTES,) if replicated else ()), *([PICTURES] if "big rows" in CHOSEN else [])):
        assert world.verify(name) == 0, name
    print(f"rows: {rows}", flush=True)
    assert min(rows.values()) >= SPOTTED


@contextmanager
def _nodes(folder: Path, cache: Path) -> Iterator[list[CassandraNode]]:
    """Three nodes with small heaps, the third on a disk of its own."""
    disk = folder / str(FIRST + 2)
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)], check=True)
    try:
        more = (("max_hint_window", f"{HINTS_S}s"), ("dynamic_data_masking_enabled", True))
        options = {"heap_mb": 384, "segment_mib": 8, "cdc_total_mib": CDC_MIB, "authenticator": "password"}
        with three_nodes(folder, cache, FIRST, more=more, **options) as nodes:
            yield nodes
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def _create_schema(session: Any, node: CassandraNode) -> None:
    three = "{'class': 'SimpleStrategy', 'replication_factor': 3}"
    session.execute(f"ALTER KEYSPACE system_auth WITH replication = {three}")
    node.nodetool("repair", "--full", "system_auth")
    StateSession(session, "cdc").create({"class": "SimpleStrategy", "replication_factor": "3"})
    for statement in (
        f"CREATE KEYSPACE shop WITH replication = {three}",
        f"CREATE TABLE {ORDERS} (id int PRIMARY KEY, state text, total int) WITH cdc = true",
        f"CREATE TABLE {PEOPLE} (id int PRIMARY KEY, name text) WITH cdc = true",
        f"CREATE TABLE {NOTES} (id int PRIMARY KEY, v text) WITH cdc = true",
        f"CREATE TABLE {PICTURES} (id int, seq int, v blob, PRIMARY KEY (id, seq))",
        f"CREATE ROLE {ROLE} WITH PASSWORD = '{PASSWORD}' AND LOGIN = true",
        *(f"GRANT SELECT ON TABLE {name} TO {ROLE}" for name in (ORDERS, PEOPLE, NOTES, PICTURES)),
        *(
            f"GRANT SELECT ON TABLE system_views.{name} TO {ROLE}"
            for name in ("settings", "max_partition_size", "gossip_info")
        ),
        *(f"GRANT {right} ON KEYSPACE cdc TO {ROLE}" for right in ("SELECT", "MODIFY")),
        f"GRANT ALTER ON TABLE {PICTURES} TO {ROLE}",
        f"INSERT INTO {ORDERS} (id, state) VALUES ({UNTOUCHED}, 'as it was')",
    ):
        session.execute(statement)


def _started(
    folder: Path, cache: Path, nodes: list[CassandraNode], servers: ExitStack, url: str, endpoint: str
) -> Sync:
    return started(
        *(folder, cache, nodes, servers, random.Random(1)),
        dags=(),
        jars=("delta", "gcs"),
        heartbeat_s=120,  # nobody kills workers here, and two cores have much to do
        modules={"sitecustomize": CLOCK.replace("{flag}", str(folder / "ahead"))},
        store={"url": url, "gcs_endpoint": endpoint},
        # On two slow cores, each start of Spark and each small bucket costs much.
        window_ms=WINDOW_S * 1000,
        sync={"run_s": RUN_S, "poll_interval_ms": 3000, "tables": {}, "exclude": []},
        cassandra={"username": ROLE, "password": {"airflow_connection": CONNECTION}},
        archive={"poll_interval_ms": 5000, "policy": "always"},
        alarms={"after_s": AFTER_S, "lag_s": LAG_S},
        replica={"verify_schedule": "off", "merge_rows_fraction": 1.0},
        verify={"ranges": 16},
        scan={"min_splits": 1},
    )


@contextmanager
def _production(world: World) -> Iterator[None]:
    """Write to the tables while the block lasts."""
    ended = Event()

    def work() -> None:
        for number in world.numbers:
            if ended.is_set():
                return
            key = 10 + number % SPOTTED
            world.write(f"INSERT INTO {ORDERS} (id, state, total) VALUES (%s, %s, %s)", (key, f"s{number}", number))
            world.write(f"INSERT INTO {PEOPLE} (id, name) VALUES (%s, %s)", (key, f"Ann {number}"))
            if number % 10 == 0:
                world.write(f"INSERT INTO {NOTES} (id, v) VALUES (%s, 'now')", (100 + key,))
            time.sleep(0.5)

    with in_background(work):
        try:
            yield
        finally:
            ended.set()
