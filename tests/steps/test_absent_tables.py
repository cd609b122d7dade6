"""A table is gone once two readings of the schema lack it, a minute apart, and both after it was missed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ringsync.config import load_config
from ringsync.ledger.staging import Block, Bucket, Place, StageCommit, put_commit
from ringsync.ring.ring import Host
from ringsync.schema.table import Schema
from ringsync.steps.application import Application
from ringsync.steps.close import bucket_close
from ringsync.steps.close.bucket_close import Closer
from ringsync.steps.late import late_pass
from ringsync.steps.late.late_pass import LatePasses
from ringsync.steps.late.late_rows import LateRows
from ringsync.steps.sync_plan import SyncPlan
from ringsync.storage.local import LocalStore
from tests.steps.late_files import Write, put_late
from tests.steps.test_close import RING, TABLE

START = 1_790_000_000 // 3600 * 3600 + 1
ROWS = 5


class Cluster:
    """Its clock goes on when it is told to, and by what its answers take; it plans no table.

    :ivar there_at: from when on it has the table, s after the start
    :ivar gone_at: from when on it has not
    :ivar plan_s: a plan takes so long
    :ivar reads: when its schema was read, s after the start
    """

    def __init__(self, folder: Path, interval_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
        document = {
            **{"server_name": "test", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "lake"}},
            "commitlog_processor_window_interval_ms": interval_s * 1000,
        }
        conf = folder / "ringsync.yaml"
        conf.write_text(yaml.safe_dump(document))
        self.store = LocalStore(folder / "lake")
        self.application = Application(
            "late", str(conf), load_config(conf), self.store, None, "run", argparse.Namespace()
        )
        self.now = float(START)
        self.there_at, self.gone_at, self.plan_s = 0.0, float("inf"), 0.0
        self.reads: list[float] = []
        self.agrees = True
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        for module in (bucket_close, late_pass):
            monkeypatch.setattr(module, "plan_of", self._plan)
            monkeypatch.setattr(module, "read_tables", self._schema)
            monkeypatch.setattr(module, "Agreement", lambda *_: lambda: self.agrees)

    @property
    def seconds(self) -> float:
        return self.now - START

    def _plan(self, store: Any, config: Any, session: Any, interval: Bucket, before: Any) -> SyncPlan:
        self.now += self.plan_s
        return SyncPlan(interval, (Host("a", "127.0.0.1", 9042, "dc", "r1", (0,)),), {}, ())

    def _schema(self, session: Any) -> Schema:
        self.reads.append(self.seconds)
        return Schema((TABLE,) if self.there_at <= self.seconds < self.gone_at else ())

    def late_rows(self) -> LateRows:
        queue: Any = SimpleNamespace(find=lambda files: {})
        effects = LatePasses(self.application, None, None)  # type: ignore[arg-type]
        return LateRows(self.store, queue, effects, clock=lambda: self.now)

    def until(self, end: float, step: float, cycle: Callable[[], None]) -> None:
        while self.seconds < end:
            self.now += step
            cycle()


@pytest.fixture(params=[60, 120, 300])
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, request.param, monkeypatch)


def put_rows(cluster: Cluster) -> str:
    writes = [Write(1, n, "x", 1_600_000_000_000_000 + n) for n in range(ROWS)]
    return put_late(cluster.store, writes, TABLE, "node-1-1")


def test_late_rows_of_a_table_that_was_created_in_a_long_interval_are_published(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were removed a minute after the table was first missed in a schema that is read once in an interval."""
    found: list[str] = []

    def publish(version: Any, files: Any) -> None:
        found.append(version.table_id)
        for key in files:
            cluster.store.delete(key)

    late = cluster.late_rows()
    monkeypatch.setattr(late_pass, "read_ring", lambda session, keyspace: RING.ring)
    monkeypatch.setattr(late, "_publish_new", publish)
    other = put_late(cluster.store, [], replace(TABLE, name="u", table_id="6" * 32), "node-1-1")
    cluster.there_at = 5
    late.cycle()
    assert cluster.reads, "for the other one"
    cluster.store.delete(other)
    cluster.now += 5
    put_rows(cluster)
    cluster.until(120, 10, late.cycle)
    assert late.counts["of_dropped_tables"] == 0
    assert found == [TABLE.table_id]


def test_late_rows_of_a_table_that_was_dropped_are_removed_when_two_readings_lack_it(cluster: Cluster) -> None:
    cluster.gone_at = 0
    late, key = cluster.late_rows(), put_rows(cluster)

    def cycle() -> None:
        late.cycle()
        apart = cluster.reads[-1] - cluster.reads[0]
        assert (cluster.store.stat(key) is None) == (apart >= 60)
        assert (late.status()["tables_unknown"] == 0) == (apart >= 60)

    cluster.until(100, 10, cycle)
    assert late.counts["of_dropped_tables"] == ROWS
    assert len(cluster.reads) < 5

    # With the same id: what was read before does not count.
    cluster.gone_at, cluster.there_at = 1e9, cluster.seconds + 9
    cluster.now += 1
    key = put_rows(cluster)
    late.cycle()
    assert cluster.store.stat(key) is not None


def test_staged_rows_are_kept_where_two_readings_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of the first interval came at its end: a minute lay between the questions, and none between reads."""
    cluster = Cluster(tmp_path, 60, monkeypatch)
    monkeypatch.setattr(Closer, "_close_buckets", lambda closer, plan, now_ms: None)
    closer = Closer(cluster.application, None, None, None, None)  # type: ignore[arg-type]
    block = Block(Place("f", 0, 1, 0), TABLE.table_id, 1, str(Bucket(START * 1000, 60_000)), ROWS, "", ())
    closer.cycle()
    put_commit(cluster.store, StageCommit("a", 1, (), {}, {}, {}, (block,)))
    cluster.there_at = 1e9
    cluster.plan_s = 59
    cluster.until(60, 60, closer.cycle)
    cluster.plan_s = 0
    cluster.until(121, 1, closer.cycle)
    assert len(cluster.reads) == 2
    assert cluster.reads[1] - cluster.reads[0] < 60
    assert closer.problems()["rows_of_dropped_tables"] == {}
    cluster.until(300, 60, closer.cycle)
    assert closer.problems()["rows_of_dropped_tables"] == {TABLE.table_id: ROWS}


def test_nothing_is_gone_while_nodes_disagree(cluster: Cluster) -> None:
    """A node that had not heard of a new table for a minute had its rows removed."""
    cluster.gone_at, cluster.agrees = 0, False
    late, key = cluster.late_rows(), put_rows(cluster)
    cluster.until(400, 10, late.cycle)
    assert late.counts["of_dropped_tables"] == 0
    assert cluster.store.stat(key) is not None
    cluster.agrees = True
    cluster.until(600, 10, late.cycle)
    assert late.counts["of_dropped_tables"] == ROWS
