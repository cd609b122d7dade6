"""``airflow backfill create`` over past hours reads again exactly the archived logs with writes of each hour, and
changes nothing that was right."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.ledger.archive import READ, WAITING, ArchivedSegment, archived, read_segment
from ringsync.ledger.staging import closed_until
from ringsync.orchestration import safe_run_id
from ringsync.status import LATE_ROWS, read_statuses
from ringsync.storage.port import ObjectStore
from servers.airflow import airflow_command
from servers.cassandra import CassandraNode, NodeSettings
from servers.cluster import connected
from tests.chaos.applications import PROJECT
from tests.chaos.under_airflow import SYNC_DAGS, Sync, started, until
from tests.commitlog_model.mutation import Change
from tests.commitlog_model.schema import load_tables
from tests.commitlog_model.segment import read_segment as decoded
from tests.sync.judge import judge, stream_messages
from tests.sync.pipeline import wait_until_drained
from tests.sync.scenario import bootstrap, create_schema

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark, pytest.mark.airflow]

DAG = "archive_reprocess"
DAGS = (*SYNC_DAGS, "commitlog_archive", DAG)
IN_TIME, ARRIVING = TABLES = ("shop.orders", "shop.imports")
"""Rows of past hours are late in the first table; the second one has buckets by arrival."""
HOUR_US = 3_600_000_000
HOURS = 3
ROWS = 90
"""Of an hour and table; 25 fill half a segment."""


@dataclass(frozen=True)
class Hour:
    """An hour of the past.

    :ivar start_us: µs since the epoch
    """

    start_us: int

    @property
    def text(self) -> str:
        """Its begin, as the command line takes it."""
        return datetime.fromtimestamp(self.start_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M")

    def has(self, moment_us: int) -> bool:
        return self.start_us <= moment_us < self.start_us + HOUR_US


def write(session: Any, moments: Iterator[int], chance: random.Random) -> None:
    """Write a row of each table at each moment, or delete one."""
    for number, moment in enumerate(moments):
        for table in TABLES:
            key = chance.randrange(40), chance.randrange(5)
            if number % 9 == 8:
                session.execute(f"DELETE FROM {table} USING TIMESTAMP {moment} WHERE id = %s AND seq = %s", key)
            else:
                row = (*key, chance.randbytes(20_000))
                session.execute(f"INSERT INTO {table} (id, seq, v) VALUES (%s, %s, %s) USING TIMESTAMP {moment}", row)


def test_a_backfill_reads_the_logs_of_its_hours(tmp_path: Path, cache: Path, spark: Any) -> None:
    this_hour = time.time_ns() // 1000 // HOUR_US * HOUR_US
    hours = [Hour(this_hour - ago * HOUR_US) for ago in range(HOURS, 0, -1)]
    settings, chance = NodeSettings(heap_mb=384).on_free_ports(), random.Random(20)
    with ExitStack() as servers:
        node = servers.enter_context(CassandraNode(tmp_path / "node", settings, cache))
        session = servers.enter_context(connected([node], ConsistencyLevel.ALL))
        create_schema(session, replicas=1)
        session.execute("CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
        for table in TABLES:
            session.execute(f"CREATE TABLE {table} (id int, seq int, v blob, PRIMARY KEY (id, seq)) WITH cdc = true")
        sync = started(
            *(tmp_path, cache, [node], servers, chance),
            dags=DAGS,
            with_kafka=False,
            sync={"tables": {ARRIVING: {"bucket_by": "arrival"}}, "run_s": 40, "digest_retention_h": 12.0},
            archive={"policy": "always", "poll_interval_ms": 1000},
        )
        until(lambda: closed_until(sync.store))
        write(session, iter([hours[0].start_us + number for number in range(20)]), chance)
        for name in TABLES:
            bootstrap(sync.conf, name, name)
        for hour in hours:
            write(session, (hour.start_us + number * HOUR_US // ROWS for number in range(ROWS)), chance)
        write(session, (time.time_ns() // 1000 for _ in range(ROWS)), chance)
        wait_until_all_is_archived(sync, node)
        entries = list(archived(sync.store, READ))
        told = {name: stream_messages(sync.store, read_table(session, *name.split("."))) for name in TABLES}
        passes, dropped = of_passes(sync.store, session), duplicates(sync.store)
        assert min(map(len, told.values())) > 150

        backfill(sync, hours[1], hours[2])
        reports = [json.loads(sync.store.get(f"reports/{DAG}/{safe_run_id(run)}.json")) for run in ended(sync, 2)]
        for hour, report in zip(hours[1:], reports, strict=True):
            wanted = logs_of(sync.store, session, entries, hour)
            print(f"{hour.text}: {len(wanted)} of {len(entries)} logs, {report}", flush=True)
            assert sorted(report["logs"]) == wanted
            assert 2 <= len(wanted) < len(entries) - 2
            assert (report["read_again"], report["read"], report["left"]) == (len(wanted), 0, 0)
            assert report["late"] + report["not_cdc"] == report["rows"]
            assert report["late"] >= len(TABLES) * ROWS
        wait_until_drained(sync.store, 300)
        until(lambda: duplicates(sync.store) == dropped + sum(report["late"] for report in reports), 60)
        assert sync.store.list(LATE_ROWS) == []
        for name in TABLES:
            assert stream_messages(sync.store, read_table(session, *name.split("."))) == told[name]
        assert of_passes(sync.store, session) == passes
        rows = judge(sync.store, session, TABLES, TABLES, load_config(sync.conf).sync)
        print(f"rows: {rows}; messages: { {name: len(messages) for name, messages in told.items()} }")
        take_picture(sync, hours[2])
    assert min(rows.values()) > 100


def wait_until_all_is_archived(sync: Sync, node: CassandraNode) -> None:
    """Wait until all that was written is published, and all finished segments have been read and are archived."""
    wait_until_drained(sync.store, 420)

    def finished() -> list[Path]:
        return [index for index in node.cdc_raw.glob("*_cdc.idx") if "COMPLETED" in index.read_text()]

    until(lambda: not finished() and not list(archived(sync.store, WAITING)), 180)
    wait_until_drained(sync.store, 180)


def logs_of(store: ObjectStore, session: Any, entries: list[ArchivedSegment], hour: Hour) -> list[str]:
    """The archived logs that have writes of an hour, as an independent reader sees it."""
    tables = load_tables(session)
    found = []
    for entry in entries:
        changes = decoded(read_segment(store, READ, entry), tables, entry.name).changes
        written = [moment for change in changes if change["keyspace"] == "shop" for moment in times(change)]
        if any(map(hour.has, written)):
            found.append(f"{entry.node}/{entry.name}")
            start_ms = hour.start_us // 1000
            assert entry.touches(start_ms, start_ms + HOUR_US // 1000)
    return sorted(found)


def times(change: Change) -> Iterator[int]:
    """The write times in a change, µs."""
    parts = (change.get("liveness"), change.get("deletion"), *change.get("cells", ()))
    yield from (part["timestamp"] for part in parts if part)


def duplicates(store: ObjectStore) -> int:
    """The late rows that were dropped, since they were published before: in all runs, also in the present one."""
    found, ended_ms = 0, 0.0
    for stat in store.list("reports/out_of_sequence/"):
        report = json.loads(store.get(stat.key))
        found += report["duplicates"]
        began = datetime.fromisoformat(report["started_at"]).timestamp()
        ended_ms = max(ended_ms, (began + report["seconds"] + 1) * 1000)
    status = read_statuses(store)["out_of_sequence/queue"]
    return found + (status["duplicates"] if status["at_ms"] > ended_ms else 0)


def of_passes(store: ObjectStore, session: Any) -> list[str]:
    """The keys of all passes of the tables."""
    ids = [read_table(session, *name.split(".")).table_id for name in TABLES]
    return [stat.key for table_id in ids for stat in store.list(f"sync/{table_id}/passes/")]


def backfill(sync: Sync, first: Hour, last: Hour) -> None:
    """Create the backfill, with the command of docs/archive.md. The last hour has a run by schedule already."""
    command = f"backfill create --dag-id {DAG} --from-date {first.text} --to-date {last.text}".split()
    options = ["--reprocess-behavior", "completed", "--max-active-runs", "1"]
    said = subprocess.run(
        [*airflow_command(), *command, *options],
        env=sync.airflow.environment(),
        cwd=sync.airflow.home,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr


def ended(sync: Sync, count: int) -> list[str]:
    """Wait until the runs of the backfill have ended well; their ids, by their hours."""

    def runs() -> list[dict[str, Any]]:
        path = f"dags/{DAG}/dagRuns?run_type=backfill&order_by=logical_date"
        found: list[dict[str, Any]] = sync.client._request("GET", path)["dag_runs"]
        assert not [run for run in found if run["state"] == "failed"], found
        return found if [run["state"] for run in found] == ["success"] * count else []

    return [run["dag_run_id"] for run in until(runs, 420)]


def take_picture(sync: Sync, hour: Hour) -> None:
    """Take the picture of the DAG's runs for docs/archive.md, if somebody wants it."""
    if image := os.environ.get("RINGSYNC_SCREENSHOT"):
        script = str(PROJECT / "docs" / "images" / "screenshot.py")
        page = f"{sync.airflow.url}/dags/{DAG}/runs?run_type=backfill"
        command = [sys.executable, script, page, str(sync.airflow.password_file), hour.text[:10], image]
        subprocess.run(command, check=True, timeout=180)
