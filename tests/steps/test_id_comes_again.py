"""A table that gets an id again which had the stream before (``WITH ID``): it waits, and loses nothing."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.config import load_config
from ringsync.ledger.staging import (
    Block,
    Bucket,
    StageCommit,
    encode_blocks,
    encode_rows,
    late_key,
    put_commit,
    rows_key,
)
from ringsync.ledger.table_versions import version_of
from ringsync.ledger.topic_owners import take_topic
from ringsync.schema.table import Schema
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.steps import absent_tables
from ringsync.steps.application import Application
from ringsync.steps.close import bucket_close
from ringsync.steps.close.bucket_close import Closer
from ringsync.steps.late import late_pass
from ringsync.steps.late.late_pass import LatePasses
from ringsync.steps.late.late_rows import LateRows
from ringsync.steps.sync_plan import SyncPlan, SyncTable
from ringsync.storage.port import ObjectStore
from tests.steps.late_files import Write, change_rows
from tests.steps.test_bootstrap_begins_back import OneByOne
from tests.steps.test_close import RING, TABLE, Lake

EXPECTED = Expected.of_commit_logs([])

TOPIC = "test.shop.t"
FIRST, SECOND, THIRD = (f"{n}d3c5e005c9211f08de9f3bd2ad0d1ff" for n in (1, 2, 3))
ROWS = 5


class Context(OneByOne):
    """Spark's, which lives."""

    defaultParallelism = 1
    _jsc = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))


class Cluster:
    """Whose schema has the tables that it is told, all of one name."""

    def __init__(self, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: ObjectStore = lake.store
        self.application = Application(
            "close", str(lake.conf), load_config(lake.conf), lake.store, None, "run", argparse.Namespace()
        )
        self.there: tuple[str, ...] = ()
        self.agrees = True
        self.planned: tuple[str, ...] | None = None
        for module in (bucket_close, late_pass):
            monkeypatch.setattr(module, "read_tables", self._schema)
            monkeypatch.setattr(module, "Agreement", lambda *_: lambda: self.agrees)
            monkeypatch.setattr(module, "plan_of", self._plan)
            monkeypatch.setattr(module, "read_ring", lambda session, keyspace: RING.ring)
        monkeypatch.setattr(Closer, "_close_buckets", lambda closer, plan, now_ms: None)
        monkeypatch.setattr(absent_tables, "GONE_AFTER_S", 0.001)

    def table(self, table_id: str) -> SyncTable:
        return SyncTable(version_of(self.store, replace(TABLE, table_id=table_id)), TOPIC, False)

    def _schema(self, session: Any) -> Schema:
        return Schema(tuple(replace(TABLE, table_id=table_id) for table_id in self.there))

    def _plan(self, store: Any, config: Any, session: Any, interval: Bucket, before: Any) -> SyncPlan:
        tables = self.there if self.planned is None else self.planned
        return SyncPlan(
            interval, RING.ring.hosts, {"shop": RING.ring.replication}, tuple(self.table(one) for one in tables)
        )

    def closer(self) -> Closer:
        feed: Any = SimpleNamespace(watch=lambda t: None, announce=lambda t, b: None, status=lambda t: None)
        control: Any = SimpleNamespace(address=None)
        return Closer(self.application, None, Context(), control, feed)

    def stage(self, table_id: str) -> str:
        """Rows of a bucket that has just ended; gives the key of their file."""
        length = 60_000
        bucket = Bucket(int(time.time() * 1000) // length * length - length, length)
        rows = change_rows([Write(n, 1, "x", bucket.start * 1000 + n) for n in range(ROWS)], TABLE)
        key = rows_key("a", 1, "x")
        data, (place,) = encode_blocks([self.table(table_id).version.to_store(rows)], key)
        self.store.put(key, data)
        block = Block(place, table_id, 1, str(bucket), ROWS, "", ())
        put_commit(self.store, StageCommit("a", 1, (), {}, {}, {}, (block,)))
        return key


def cycle(closer: Closer) -> dict[str, Any]:
    """One with a plan of its own; gives the status."""
    closer._plan = None
    closer.cycle()
    time.sleep(0.005)
    return {"at_ms": 0, "began_ms": 0, "error": None, "tables": closer.status(), **closer.problems()}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(Lake(tmp_path), monkeypatch)


def test_its_rows_wait_and_status_says_what_to_do(cluster: Cluster) -> None:
    for table_id in (FIRST, SECOND):
        cluster.there = (table_id,)
        cycle(cluster.closer())
    cluster.there = (FIRST,)
    staged = cluster.stage(FIRST)
    closer = cluster.closer()
    for _ in range(3):
        status = cycle(closer)
        closer._tables[FIRST].again_ms = 0
    assert status["rows_of_dropped_tables"] == {}
    assert len(closer._tables[FIRST].buckets) == 1
    assert cluster.store.stat(staged) is not None
    found = [one.text for one in problems({"bucket_close/close": status}, {}, EXPECTED, False, 0.0)]
    (told,) = [one for one in found if "shop.t" in one]
    assert FIRST in told
    assert "create it again without an id" in told

    cluster.there = (THIRD,)  # which is what they do
    for _ in range(3):
        status = cycle(closer)
    assert status["rows_of_dropped_tables"] == {"shop.t": ROWS}
    assert (status["tables"].keys(), status["tables"]["shop.t"]["error"]) == ({"shop.t"}, None)


def test_an_id_of_a_clock_that_is_behind_waits_too(cluster: Cluster) -> None:
    take_topic(cluster.store, TOPIC, SECOND, 1)
    cluster.there = (FIRST,)
    cluster.stage(FIRST)
    status = cycle(cluster.closer())
    assert (status["rows_of_dropped_tables"], "without an id" in status["tables"]["shop.t"]["error"]) == ({}, True)


def test_an_old_table_that_a_node_still_names_is_forgotten_once_it_does_not(cluster: Cluster) -> None:
    cluster.there = (FIRST,)
    closer = cluster.closer()
    cycle(closer)
    cluster.stage(FIRST)
    take_topic(cluster.store, TOPIC, SECOND, 1)
    status = cycle(closer)
    assert status["rows_of_dropped_tables"] == {}
    cluster.there = (SECOND,)
    for _ in range(3):
        status = cycle(closer)
    assert status["rows_of_dropped_tables"] == {"shop.t": ROWS}
    assert status["tables"].keys() == {"shop.t"}


def test_a_table_that_was_dropped_is_no_problem_while_it_waits_to_be_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_tables, "GONE_AFTER_S", 1e6)
    cluster.there = (FIRST,)
    closer = cluster.closer()
    cycle(closer)
    cluster.stage(FIRST)
    take_topic(cluster.store, TOPIC, SECOND, 1)
    cluster.there = (SECOND,)
    for _ in range(3):
        status = cycle(closer)
    assert {one["error"] for one in status["tables"].values()} == {None}
    assert status["tables"].keys() == {"shop.t", f"shop.t (table id {FIRST})"}


class Queue:
    """Of late rows, which is empty."""

    def find(self, files: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("planned", [True, False], ids=["with cdc", "without cdc any more"])
def test_its_late_rows_wait_and_the_queue_says_why(cluster: Cluster, planned: bool) -> None:
    for table_id in (FIRST, SECOND):
        take_topic(cluster.store, TOPIC, table_id, 1)
    cluster.there = (FIRST,)
    cluster.planned = None if planned else ()
    rows = cluster.table(FIRST).version.to_store(change_rows([Write(1, 1, "x", 1)], TABLE))
    key = late_key(FIRST, "a-1-0")
    cluster.store.put(key, encode_rows(rows))
    late = LateRows(cluster.store, Queue(), LatePasses(cluster.application, None, None))  # type: ignore[arg-type]
    late.cycle()
    assert cluster.store.stat(key) is not None
    assert late.counts["of_dropped_tables"] == 0
    assert "create it again without an id" in str(late.error)
