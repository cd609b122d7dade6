"""Passes of an altered table: no process takes them by an earlier schema, and a replica that waits gets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.changes.identity import UnresolvedRowsError
from ringsync.ledger.followed import followed_tables, keep_following
from ringsync.ledger.table_versions import version_of, versions_of
from ringsync.replica.evolve import rewrite
from ringsync.schema.table import DroppedColumn, Schema, TableSchema
from ringsync.steps.close.followed import Followed
from ringsync.steps.close.table_state import TableState
from ringsync.steps.replica import merge
from ringsync.steps.sync_plan import SyncTable
from tests.steps.test_bootstrap_begins_back import bootstrap, follow_ups, rows_of_replica
from tests.steps.test_close import NOW, TABLE, Lake
from tests.steps.test_follow_ups import change

TOPIC = "test.shop.t"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    found = Lake(tmp_path)
    bootstrap(found, "b1")
    return found


def altered(lake: Lake, table: TableSchema) -> SyncTable:
    return SyncTable(version_of(lake.store, table), TOPIC, False)


def written_again(lake: Lake, table: TableSchema) -> None:
    versions = partial(versions_of, lake.store, TABLE)
    run: Callable[..., Any] = lambda task, pieces: list(task(pieces))  # noqa: E731
    rewrite(lake.store, table, versions, run, lambda: lake.store, {}, int(time.time() * 1000))


def test_who_knows_only_that_a_column_was_dropped_adds_no_pass_from_after_it_was_added_again(lake: Lake) -> None:
    """The pass was taken without the column's new values, which were then missing for ever."""
    v = TABLE.column("v")
    gone = (DroppedColumn("v", "regular", v.type, NOW.start * 1000 - 1_000_000),)
    dropped = altered(
        lake, replace(TABLE, columns=tuple(column for column in TABLE.columns if column != v), dropped=gone)
    )
    again = altered(lake, replace(TABLE, dropped=gone))
    new, old = follow_ups(lake), follow_ups(lake)
    for one in (new, old):
        one.follow(dropped)
        one.catch_up()
    new.follow(again)
    change(lake, new, 1)
    with pytest.raises(UnresolvedRowsError, match="later than version 2"):
        old.catch_up()
    written_again(lake, again.schema)
    new.follow(again)  # and looks at the replica at once, not in a minute
    new.catch_up()
    assert rows_of_replica(lake, again.schema) == {(1, 1): "c"}


def test_a_replica_that_waits_is_waited_for_when_its_table_loses_cdc(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Following ended, and replica_merge looked at tables with cdc only: the replica lacked the passes for good."""
    columns = (replace(c, name="place") if c.kind == "clustering" else c for c in TABLE.columns)
    renamed = altered(lake, replace(TABLE, columns=tuple(columns)))
    keep_following(lake.store, TABLE.table_id)
    found = follow_ups(lake)
    found.follow(renamed)
    change(lake, found, 1)
    assert "written its base again" in found.status()["replica_error"]
    feed: Any = SimpleNamespace(status=lambda topic: None)
    config: Any = None
    followed = Followed(lake.store, config, feed)
    state = TableState(renamed, follow_ups=found)
    followed.look(set(), [TABLE.table_id])
    assert (found.is_done(), followed.ends(state)) == (False, False)
    monkeypatch.setattr(merge, "read_tables", lambda session: Schema((renamed.schema,)))
    row = SimpleNamespace(id=SimpleNamespace(hex=TABLE.table_id), cdc=False, gc_grace_seconds=864_000)
    session = SimpleNamespace(execute=lambda query: [row])
    assert merge.candidates(session, lake.store, None) == [(renamed.schema, 864_000)]
    written_again(lake, renamed.schema)
    found.follow(renamed)
    found.catch_up()
    assert rows_of_replica(lake, renamed.schema) == {(1, 1): "c"}
    followed.look(set(), [TABLE.table_id])
    assert followed.ends(state)
    assert followed_tables(lake.store) == {}
    assert merge.candidates(session, lake.store, None) == []
