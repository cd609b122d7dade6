"""What was published before a bootstrap, and not seen by its scan, comes into the new base all the same."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.changes.identity import TableVersion
from ringsync.config import load_config
from ringsync.images.live import live_rows
from ringsync.ledger.passes import Pass, get_pass, mark, pass_numbers
from ringsync.ledger.staging import put_closed_until
from ringsync.replica.changes import replica_state
from ringsync.replica.lookup import images_between
from ringsync.schema.table import TableSchema
from ringsync.steps.application import Application
from ringsync.steps.bootstrap.publish import publish
from ringsync.steps.passes.follow_ups import FORGOTTEN_LATER_MS, FollowUps
from ringsync.steps.replica.verify import repair_level
from ringsync.steps.sync_plan import SyncTable
from tests.steps.late_files import Write
from tests.steps.test_close import NOW, RING, TABLE, Lake, outcome

KEPT_MS = 4 * 3_600_000


class OneByOne:
    """Spark's context, whose tasks are done here and now."""

    def parallelize(self, items: Iterable[Any], pieces: int) -> OneByOne:
        self.items = items
        return self

    def mapPartitions(self, task: Callable[[Iterator[Any]], Iterable[Any]]) -> OneByOne:
        self.found = task(iter(self.items))
        return self

    def collect(self) -> list[Any]:
        return list(self.found)


def follow_ups(lake: Lake) -> FollowUps:
    config = load_config(lake.conf)
    options = argparse.Namespace()
    application = Application("bucket_close", str(lake.conf), config, lake.store, None, "run", options)
    table = SyncTable(TableVersion.first(TABLE), "test.shop.t", False)
    made = FollowUps(application, table, OneByOne(), None)  # type: ignore[arg-type]
    made.ring = RING
    return made


def caught_up(ours: FollowUps) -> FollowUps:
    """Let the replica take all passes, in however many cycles this machine needs."""
    while ours.catch_up() is False:
        pass
    return ours


def bootstrap(lake: Lake, name: str, *, complete: bool = True, ring: str = RING.ring.digest) -> None:
    """Copy the table, whose scan finds no rows.

    :param ring: digest of the ring snapshot of the scan
    """
    begin = mark(lake.store, TABLE.table_id, "begin", name, int(time.time() * 1000))
    selection = SimpleNamespace(to_json=lambda: "{}")
    scan = SimpleNamespace(table=TABLE, selection=selection, element_times=True)
    plan: Any = SimpleNamespace(
        scan=scan, bootstrap=SimpleNamespace(id=name, as_of=int(time.time())), run="run", topic="test.shop.t"
    )
    publish(lake.store, load_config(lake.conf), plan, lambda: None, [], begin, ring)
    if complete:
        mark(lake.store, TABLE.table_id, "cutover", name, int(time.time() * 1000))


def rows_of_replica(lake: Lake, table: TableSchema | None = None) -> dict[tuple[int, int], str]:
    """Living rows: value by key."""
    table = table or TABLE
    state = replica_state(lake.store, table)
    assert state is not None
    found = {}
    names = [*(column.name for column in table.key_columns), "v"]
    for batch in images_between(state, table, -(2**63), 2**63 - 1):
        shown = live_rows(batch, table, int(time.time()))
        alive = shown["#alive"].to_pylist()
        for row, lives in zip(batch.select(names).to_pylist(), alive, strict=True):
            if lives:
                first, second, value = row.values()
                found[first, second] = value
    return found


def again(lake: Lake, change: Callable[[Pass], Pass]) -> None:
    """Write all passes anew, changed."""
    for number in pass_numbers(lake.store, TABLE.table_id):
        one = change(get_pass(lake.store, TABLE.table_id, number))
        key = f"sync/{TABLE.table_id}/passes/{number:012}.json"
        lake.store.put(key, json.dumps(asdict(one)).encode())


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


ALONE = Write(1, 1, "x", NOW.start * 1000 + 5)
DELETED, DELETION = Write(2, 1, "x", NOW.start * 1000 + 6), Write(2, 1, None, NOW.start * 1000 + 9)


def test_a_row_that_only_one_replica_had_is_in_the_new_base(lake: Lake) -> None:
    """Its hint comes later, and is no news for the stream; a row that was deleted meanwhile stays away."""
    lake.publish(NOW, [ALONE, DELETED], by_arrival=False)
    lake.publish(NOW, [DELETION], by_arrival=False)
    bootstrap(lake, "b1")
    caught_up(follow_ups(lake))
    assert outcome(lake.publish(NOW, [ALONE, DELETED], by_arrival=False)) == (0, 2)
    assert rows_of_replica(lake) == {(1, 1): "x"}


def test_what_all_replicas_had_is_not_added_again(lake: Lake) -> None:
    """The scan has seen it; that costs nothing then."""
    lake.publish(NOW, [ALONE], by_arrival=False)
    again(lake, lambda one: replace(one, counts={**one.counts, "everywhere": 1}))
    bootstrap(lake, "b1")
    state = replica_state(lake.store, TABLE)
    assert state is not None
    assert state.applied == 2, "it begins behind the mark of the bootstrap"


@pytest.mark.parametrize("ring", ["", "another"])
def test_what_a_scan_of_another_ring_may_not_have_seen_is_added_and_told(lake: Lake, ring: str) -> None:
    """A node that has joined since lacks what it dropped meanwhile, and the scan may have read it there."""
    lake.publish(NOW, [ALONE], by_arrival=False)
    again(lake, lambda one: replace(one, counts={**one.counts, "everywhere": 1}))
    bootstrap(lake, "b1", ring=ring)
    assert [debt.missed[0].number for debt in follow_ups(lake)._debts()] == [1]
    caught_up(follow_ups(lake))
    assert rows_of_replica(lake) == {(1, 1): "x"}


@pytest.mark.parametrize("age_ms", [KEPT_MS - 60_000, KEPT_MS + 60_000, KEPT_MS + 2 * FORGOTTEN_LATER_MS])
def test_changes_are_kept_for_as_long_as_a_bootstrap_begins_with_them(lake: Lake, age_ms: int) -> None:
    lake.publish(NOW, [ALONE], by_arrival=False)
    lake.publish(NOW, [Write(3, 1, "y", NOW.start * 1000 + 7)], by_arrival=False)
    again(lake, lambda one: replace(one, created_at_ms=int(time.time() * 1000) - age_ms * (one.number == 1)))
    caught_up(follow_ups(lake))
    assert pass_numbers(lake.store, TABLE.table_id) == [1, 2], "its bucket is open: what was published is known by it"
    put_closed_until(lake.store, NOW.end)
    caught_up(follow_ups(lake))
    kept = age_ms < KEPT_MS + FORGOTTEN_LATER_MS
    assert pass_numbers(lake.store, TABLE.table_id) == ([1, 2] if kept else [2])
    bootstrap(lake, "b1")
    caught_up(follow_ups(lake))
    assert rows_of_replica(lake) == ({(1, 1): "x", (3, 1): "y"} if age_ms < KEPT_MS else {(3, 1): "y"})


@pytest.mark.parametrize(
    ("digests", "is_open"),
    [({}, False), ({str(NOW): ("a",)}, True), ({"late": ("a",)}, True), ({"3999999599880000-60000": ("a",)}, True)],
)
def test_passes_are_kept_until_the_buckets_of_their_time_are_closed(
    lake: Lake, digests: dict[str, tuple[str, ...]], is_open: bool
) -> None:
    """Also of tables by arrival, whose digests name no bucket; and a row of the far future is not waited for."""
    made = Pass(1, "changes", TABLE.table_id, NOW.end + 5, digests=digests)
    put_closed_until(lake.store, NOW.start)
    assert made.is_of_open_bucket(lake.store) == is_open
    put_closed_until(lake.store, NOW.end + 60_000)
    assert not made.is_of_open_bucket(lake.store)


def test_what_a_repair_takes_out_no_replica_has(lake: Lake) -> None:
    """Of a table that nobody follows no copy is dropped, so that it may be read as ever."""
    plan: Any = SimpleNamespace(table=TABLE, consistency_level="LOCAL_QUORUM")
    assert repair_level(lake.store, plan) == "LOCAL_QUORUM"
    lake.publish(NOW, [ALONE], by_arrival=False)
    assert repair_level(lake.store, plan) == "ALL"
