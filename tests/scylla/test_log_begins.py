"""Where the reading of a log begins, and from where on it has all rows."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.generations import Streams, clocks
from ringsync.cluster.scylla import CdcOptions
from ringsync.config.sections import Scylla
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Schema, UnreadableTable
from ringsync.scylla.progress import SLOT_MS, Position, Sweep
from ringsync.steps.scylla.followed_logs import FollowedLogs, FollowedTable, _ByName
from ringsync.steps.scylla.known_generations import KnownGenerations
from ringsync.steps.scylla.log_task import TableResult
from ringsync.steps.scylla.log_work import plan_end
from ringsync.steps.scylla.positions import note_log_begins
from ringsync.storage.local import LocalStore
from tests.scylla.log_tables import log_text
from tests.scylla.test_log_stager import TABLE_ID, generation
from tests.scylla.test_log_task import RULES, TTL_S, followed

NOW = 1_790_000_000_000
HOUR = 3_600_000


@pytest.mark.parametrize(
    ("noted", "first_ms", "begins", "kept_from"),
    [
        (None, NOW - 10 * HOUR, NOW - HOUR, NOW - 10 * HOUR),
        (NOW - 3 * HOUR, NOW - 10 * HOUR, NOW - 3 * HOUR, NOW - 10 * HOUR),
        # It was noted longer ago than the log keeps rows: the first windows tell of a gap.
        (NOW - 30 * HOUR, NOW - 90 * HOUR, NOW - 30 * HOUR, NOW - 24 * HOUR),
        # With tablets the log began a little later than was noted: no gap.
        (NOW - 3 * HOUR, NOW - 3 * HOUR + 700, NOW - 3 * HOUR + 700, NOW - 3 * HOUR + 700),
    ],
)
def test_where_a_log_begins(tmp_path: Path, noted: int | None, first_ms: int, begins: int, kept_from: int) -> None:
    store, session = LocalStore(tmp_path), SimpleNamespace()
    config: Any = SimpleNamespace(scylla=SimpleNamespace(lookback_s=3600, window_ms=15_000))
    if noted is not None:
        note_log_begins(store, TABLE_ID, noted)
    logs = FollowedLogs(config, store, session, {}, None)
    table = FollowedTable(TABLE_ID, "ks.t", followed(), (generation(first_ms),))
    position = logs.begin(
        table,
        NOW,
    )
    assert begins - 300_000 < position.until_ms <= begins
    assert position.ttl_s == TTL_S
    assert table.kept_from_ms(TTL_S, NOW) == kept_from
    assert logs.begin(table, NOW + HOUR) == position, "the begin is kept"
    # Only what was noted, and has expired, is before what the log has.
    assert (position.until_ms < kept_from) == (noted == NOW - 30 * HOUR)


def test_tables_that_have_lost_their_log_or_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = followed().log.base
    schema = Schema((base,))

    def look_at_schema(logs: FollowedLogs) -> None:
        logs._schema = _ByName.of(schema)

    monkeypatch.setattr(FollowedLogs, "_look_at_schema", look_at_schema)
    monkeypatch.setattr(FollowedLogs, "_look_at_clocks", lambda _: None)
    logs = FollowedLogs(SimpleNamespace(), LocalStore(tmp_path), SimpleNamespace(), {}, None)  # type: ignore[arg-type]
    nothing: Any = SimpleNamespace(tables=(), replications={})
    read = Position.begin(NOW - HOUR, [NOW - 10 * HOUR], 15_000)
    (gone,) = logs.look(nothing, {TABLE_ID: read}, NOW)
    assert (gone.log, gone.problem) == (None, "")
    assert gone.ends_ms is not None
    assert NOW + 5_000 <= gone.ends_ms < NOW + 305_000
    ended = plan_end(gone, read, RULES).taken(TableResult())
    assert logs.look(nothing, {TABLE_ID: ended}, NOW + HOUR) == []
    # A log that cannot be read is not gone.
    schema = Schema(
        (base,), (UnreadableTable(base.keyspace, f"{base.name}_scylla_cdc_log", "66" * 16, "it has vectors"),)
    )
    (unreadable,) = logs.look(nothing, {TABLE_ID: read}, NOW)
    assert unreadable.problem == "log table t_scylla_cdc_log: it has vectors"
    # The same of its table: its position is kept.
    schema = Schema((), (UnreadableTable(base.keyspace, base.name, TABLE_ID, "it has vectors"),))
    logs.look(nothing, {TABLE_ID: read}, NOW)
    assert logs.is_there(TABLE_ID)
    # It was dropped and created again since the plan was made: the log of this name is another table's.
    schema = Schema((replace(base, table_id="77" * 16),))
    planned: Any = SimpleNamespace(tables=(SimpleNamespace(table_id=TABLE_ID, schema=base),), replications={})
    assert logs.look(planned, {}, NOW) == []


def test_one_wrong_clock_does_not_move_that_of_the_cluster() -> None:
    hosts = [
        SimpleNamespace(is_up=True, ahead_ms=ahead_ms, endpoint=name)
        for name, ahead_ms in (("a", 1000), ("b", 1200), ("c", 43_200_000))
    ]

    def execute(_: str, host: Any) -> Any:
        row = SimpleNamespace(now_ms=time.time() * 1000 + host.ahead_ms)
        return SimpleNamespace(one=lambda: row)

    session = SimpleNamespace(
        cluster=SimpleNamespace(metadata=SimpleNamespace(all_hosts=lambda: hosts)), execute=execute
    )
    found = clocks(session)
    assert found is not None
    assert found.ahead_ms == pytest.approx(1200, abs=500)
    assert found.error_ms == pytest.approx(43_198_800, abs=1000)
    assert found.behind_ms == pytest.approx(200, abs=100)
    assert found.worst == "c"
    hosts.clear()
    assert clocks(session) is None


class TestLeft:
    """Tables that have left the plan, at a moment when their log is there."""

    @pytest.fixture(autouse=True)
    def _schema(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = LocalStore(tmp_path)
        base = followed().log.base
        (log,) = parse_schema(log_text(base), "log").tables
        self.schema, self.options = Schema((base, replace(log, table_id="66" * 16))), CdcOptions(False)
        self.follows, only = True, generation(NOW - 9 * HOUR)

        def look_at_schema(logs: FollowedLogs) -> None:
            logs._schema, logs._options = _ByName.of(self.schema), {TABLE_ID: self.options}

        monkeypatch.setattr(FollowedLogs, "_look_at_schema", look_at_schema)
        monkeypatch.setattr(FollowedLogs, "_look_at_clocks", lambda _: None)
        monkeypatch.setattr(FollowedLogs, "_streams_of", lambda *_: Streams())
        monkeypatch.setattr(KnownGenerations, "of", lambda *_: (only,))

    def left(self, position: Position, now_ms: int = NOW, unwatched_since_ms: int | None = None) -> list[FollowedTable]:
        sync = SimpleNamespace(bucket_by_of=lambda _: "write_time", follows=lambda _: self.follows)
        config: Any = SimpleNamespace(sync=sync, scylla=Scylla())
        logs = FollowedLogs(config, self.store, SimpleNamespace(), {}, unwatched_since_ms)  # type: ignore[arg-type]
        nothing: Any = SimpleNamespace(tables=(), replications={})
        return logs.look(nothing, {TABLE_ID: position}, now_ms)

    def ended(self, ends_ms: int) -> Position:
        over = Sweep(ends_ms + 120_000, ends_ms)
        read = Position.begin(NOW - 90 * HOUR, [NOW - 9 * HOUR], 15_000)
        return replace(read, until_ms=ends_ms, ends_ms=ends_ms, near=over, far=over, ttl_s=TTL_S)

    def test_it_is_read_until_sweeps_have_found_what_came_late(self) -> None:
        read = Position.begin(NOW - HOUR, [NOW - 9 * HOUR], 15_000)
        (first,) = self.left(read)
        assert first.ends_ms is not None
        assert NOW + 5_000 <= first.ends_ms < NOW + 5_000 + SLOT_MS
        assert not first.ends_ms % SLOT_MS
        ended = self.ended(first.ends_ms)
        assert self.left(ended) == []
        for sweep in ("near", "far"):
            for so_far in (Sweep(first.ends_ms, 0), Sweep(NOW + 9 * HOUR, 0, next_ms=NOW)):
                (going_on,) = self.left(replace(ended, **{sweep: so_far}))
                assert (going_on.ends_ms, going_on.begins_ms) == (first.ends_ms, None)

    def test_it_is_looked_at_anew_from_when_nobody_has_watched_it(self) -> None:
        """cdc may have been on meanwhile, and be off again: the log has what was written then."""
        ended = self.ended(NOW - 80 * HOUR // SLOT_MS * SLOT_MS)
        (anew,) = self.left(ended, unwatched_since_ms=NOW - HOUR)
        assert anew.begins_ms == NOW - HOUR - 120_000
        assert anew.ends_ms is not None
        assert anew.ends_ms > NOW
        going_on = replace(ended, far=Sweep(ended.until_ms, 0))
        (longer,) = self.left(going_on, unwatched_since_ms=NOW - HOUR)
        assert (longer.begins_ms, longer.ends_ms) == (None, anew.ends_ms)
        self.follows = False
        assert self.left(ended, unwatched_since_ms=NOW - HOUR) == []
        self.follows, self.schema = True, Schema((followed().log.base,))
        assert self.left(ended, unwatched_since_ms=NOW - HOUR) == [], "its log is gone"

    def test_one_that_cannot_be_read_ends_with_a_gap(self) -> None:
        self.options = CdcOptions(True, delta="keys")
        ends_ms = NOW // SLOT_MS * SLOT_MS
        read = replace(Position.begin(NOW - HOUR, [NOW - 9 * HOUR], 15_000), ends_ms=ends_ms)
        (now,), (later,) = self.left(read), self.left(read, NOW + 2 * HOUR)
        assert ("keys only" in now.problem, later.problem) == (True, "")
        planned = plan_end(later, read, RULES)
        ((first_ms, last_ms),) = planned.unread(NOW, TableResult())
        assert first_ms <= read.until_ms
        assert last_ms == ends_ms
        assert self.left(planned.taken(TableResult()), NOW + 2 * HOUR) == []
