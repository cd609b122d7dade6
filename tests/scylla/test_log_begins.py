"""Where the reading of a log begins, and from where on it has all rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.generations import Streams
from ringsync.cluster.scylla import CdcOptions
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Schema, UnreadableTable
from ringsync.scylla.progress import Position
from ringsync.steps.scylla.followed_logs import FollowedLogs, FollowedTable
from ringsync.steps.scylla.log_task import TableResult
from ringsync.steps.scylla.log_work import plan_end
from ringsync.steps.scylla.positions import note_log_begins
from ringsync.storage.local import LocalStore
from tests.scylla.log_tables import _log_text
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
    logs = FollowedLogs(config, store, session, {})
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
        logs._schema, logs._ids = schema, schema.ids

    monkeypatch.setattr(FollowedLogs, "_look_at_schema", look_at_schema)
    monkeypatch.setattr(FollowedLogs, "_look_at_clocks", lambda _: None)
    logs = FollowedLogs(SimpleNamespace(), LocalStore(tmp_path), SimpleNamespace(), {})  # type: ignore[arg-type]
    nothing: Any = SimpleNamespace(tables=(), replications={})
    read = Position.begin(NOW - HOUR, [NOW - 10 * HOUR], 15_000)
    (gone,) = logs.look(nothing, {TABLE_ID: read}, NOW)
    assert (gone.log, gone.problem, gone.ends_ms) == (None, "", NOW + 5_000)
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


def test_a_log_that_was_read_to_its_end_is_looked_at_once_more_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cdc may have been on meanwhile, and be off again: the log has what was written then."""
    base = followed().log.base
    (log,) = parse_schema(_log_text(base), "log").tables
    schema = Schema((base, replace(log, table_id="66" * 16)))

    def look_at_schema(logs: FollowedLogs) -> None:
        logs._schema, logs._ids, logs._options = schema, schema.ids, {TABLE_ID: CdcOptions(False)}

    monkeypatch.setattr(FollowedLogs, "_look_at_schema", look_at_schema)
    monkeypatch.setattr(FollowedLogs, "_look_at_clocks", lambda _: None)
    monkeypatch.setattr(FollowedLogs, "_streams_of", lambda *_: Streams())
    monkeypatch.setattr(FollowedLogs, "_generations_of", lambda *_: (generation(NOW - 9 * HOUR),))
    config: Any = SimpleNamespace(sync=SimpleNamespace(bucket_by_of=lambda _: "write_time"))
    nothing: Any = SimpleNamespace(tables=(), replications={})
    ended = replace(Position.begin(NOW - HOUR, [NOW - 9 * HOUR], 15_000), until_ms=NOW - HOUR, ends_ms=NOW - HOUR)
    for before, ends_ms in (({"logs": {}}, []), ({}, [NOW + 5_000])):
        logs = FollowedLogs(config, LocalStore(tmp_path), SimpleNamespace(), before)  # type: ignore[arg-type]
        assert [one.ends_ms for one in logs.look(nothing, {TABLE_ID: ended}, NOW)] == ends_ms
    read = replace(ended, until_ms=NOW + 5_000, ends_ms=NOW + 5_000)
    assert logs.look(nothing, {TABLE_ID: read}, NOW + 60_000) == []
    # A log that is gone has nothing more.
    schema = Schema((base,))
    logs = FollowedLogs(config, LocalStore(tmp_path), SimpleNamespace(), {})  # type: ignore[arg-type]
    assert logs.look(nothing, {TABLE_ID: ended}, NOW) == []
