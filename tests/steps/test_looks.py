"""When suspects are looked at: while replicas are behind, once they have all, and when the wait is over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ringsync.config.sections import Verify
from ringsync.cql.types import Native
from ringsync.images.differences import Difference
from ringsync.ledger.archive import ArchivedSegment
from ringsync.ledger.proofs import note_examined
from ringsync.ledger.staging import Bucket
from ringsync.replica.compare import Comparison
from ringsync.replica.suspects import Judged, WaitingRows
from ringsync.ring.ring import Host
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.lookup.read import RowsRead, UnreadRow
from ringsync.status import STOP_KEY
from ringsync.steps.replica import caught_up, looks
from ringsync.steps.replica.caught_up import CatchUp, SyncSeen, why_behind
from ringsync.steps.replica.examine import Examine
from ringsync.steps.replica.kept import FirstLook
from ringsync.steps.replica.looks import UNSETTLED, Found, LookTask, Suspected, TableLook, judge_all
from ringsync.steps.replica.verify import examined
from ringsync.steps.sync_plan import SyncPlan
from ringsync.storage.local import LocalStore
from ringsync.storage.port import UnavailableError

ID = "3" * 32
TABLE = TableSchema("shop", "orders", ID, (Column("id", "partition_key", Native("int")),))


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class FakeLooker:
    """Finds what ``finds`` says, given the look and its number; notes at which times it was asked."""

    store: LocalStore
    clock: Clock
    finds: Callable[[TableLook, int], Found]
    asked: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def application(self) -> Any:
        return SimpleNamespace(store=self.store, config=SimpleNamespace(verify=Verify(wait_s=60.0)))

    def look(self, tables: Mapping[int, Suspected], looks: Mapping[int, TableLook]) -> None:
        for number, look in looks.items():
            self.asked.append((self.clock.now_s - 1000.0, look.has_all))
            tables[number].found = self.finds(look, len(self.asked))


def suspected(*, is_followed: bool = True) -> Suspected:
    seen = SimpleNamespace(as_of_us=1, applied=5)
    sides: Any = SimpleNamespace(plan=SimpleNamespace(table=TABLE, now=1000), seen=seen, is_followed=is_followed)
    return Suspected(sides, None, lambda: seen, Found(files=["a"], rows_left=3))  # type: ignore[arg-type, return-value]


def looked(
    tmp_path: Path, finds: Callable[[TableLook, int], Found], *, has_all_at_s: float, **more: Any
) -> tuple[Suspected, list[tuple[float, bool]]]:
    clock, table = Clock(), suspected(**more)
    looker: Any = FakeLooker(LocalStore(tmp_path), clock, finds)

    def behind(seen: SyncSeen, catch_up: CatchUp, applied: Callable[[], int]) -> str:
        return "" if clock.now_s >= catch_up.logged_ms / 1000 + has_all_at_s - 1 else "the sync is slow"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looks, "why_behind", behind)
        judge_all(looker, [table], 0, clock, clock.sleep)
    return table, looker.asked


def left(*_: Any) -> Found:
    return Found(files=["b"], rows_left=1)


def test_the_wait_ends_with_the_last_row_that_comes(tmp_path: Path) -> None:
    done = Found(Counter(equal=3))
    table, asked = looked(tmp_path, lambda look, number: left() if number < 3 else done, has_all_at_s=50)
    assert [has_all for _, has_all in asked] == [False] * 3
    assert asked[-1][0] < 20
    assert (table.found.outcomes["not_judged"], table.found.why) == (0, "")


def test_what_is_left_is_looked_at_once_all_is_there_and_then_again(tmp_path: Path) -> None:
    table, asked = looked(tmp_path, left, has_all_at_s=30)
    at = [second for second, has_all in asked if has_all]
    assert len(at) == looks.ROUNDS
    assert all(later - earlier >= 30 for earlier, later in pairwise(at))
    assert (table.found.outcomes["not_judged"], table.found.why) == (1, UNSETTLED)


def test_a_replica_that_stays_behind_is_not_judged(tmp_path: Path) -> None:
    table, asked = looked(tmp_path, left, has_all_at_s=10**6)
    assert not any(has_all for _, has_all in asked)
    assert 60 <= asked[-1][0] < 70, "once, within the time that it may wait"
    assert (table.found.outcomes["not_judged"], table.found.why) == (1, "the sync is slow")


def test_nobody_waits_for_a_sync_that_is_stopped_or_does_not_follow(tmp_path: Path) -> None:
    LocalStore(tmp_path).put(STOP_KEY, b"{}")
    table, asked = looked(tmp_path, left, has_all_at_s=10**6)
    assert (asked, table.found.why) == ([(0.0, False)], "the sync is slow")
    done = Found(Counter(different=3))
    table, asked = looked(tmp_path, lambda look, number: done, has_all_at_s=10**6, is_followed=False)
    assert (asked, table.copy is None) == ([(0.0, True)], False)


@pytest.mark.parametrize("for_ever", [False, True])
def test_an_answer_of_the_store_that_breaks_off_ends_nothing(tmp_path: Path, for_ever: bool) -> None:
    look, answers = SyncSeen.look, [True, False]

    def broken(*given: Any) -> SyncSeen:
        if for_ever or answers.pop() if answers else False:
            raise UnavailableError("it broke off")
        return look(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyncSeen, "look", broken)
        done = Found(Counter(equal=3))
        table, asked = looked(tmp_path, lambda look, number: left() if number < 2 else done, has_all_at_s=50)
    if for_ever:
        assert (asked, str(table.failure)) == ([], "it broke off")
    else:
        assert (len(asked), table.failure, table.found.outcomes["equal"]) == (2, None, 3)


def test_a_range_with_a_row_that_waits_as_late_is_not_proved(tmp_path: Path) -> None:
    """It is left out of the comparison, so it proves nothing, though the verification succeeds."""
    task: Any = LookTask(None, None, "", (-100, 0, 100), 9, {})  # type: ignore[arg-type]
    found = Found()
    for tokens in ({50}, {60}):
        found.add(task._found(Judged(Counter(late=1), late=tokens), []), 9)
    assert (found.late, found.wrong, found.unjudged) == ({1}, set(), set())
    sums = pa.table({"rows": [1, 1], "cells": [1, 1]})
    config = SimpleNamespace(verify=Verify())
    examine: Any = SimpleNamespace(_edges=(-100, 0, 100), _application=SimpleNamespace(config=config))
    table = replace(suspected(), found=found)
    ranges = ((0, 100),)
    compared = Examine._concluded(examine, (sums, sums), (table.sides, ranges), FirstLook(0, 2, []), table)
    assert isinstance(compared, Comparison)
    assert (compared.is_equal, compared.wrong_ranges) == (True, ())
    application: Any = SimpleNamespace(run="r", options=None)
    sides: Any = table.sides
    sides.seen.base, sides.chosen = "b1", None
    told = examined(application, sides, compared)
    proof = note_examined(LocalStore(tmp_path), told)
    assert (proof.ranges_ms, proof.compared_ms, proof.differing) == ((1_000_000, 0), (1_000_000, 1_000_000), ())


@pytest.mark.parametrize("unread", [(), (1,)])
def test_a_node_that_is_down_keeps_only_its_own_rows_from_being_read_from_all(
    monkeypatch: pytest.MonkeyPatch, unread: tuple[int, ...]
) -> None:
    """Nobody is asked for what a replica has that is down; of what is asked for, all counts that comes. One key of a
    partition that is read whole stands for its others."""
    asked: list[list[int]] = []

    def read(self: LookTask, of_table: Any, permits: Any, level: str, keys: pa.RecordBatch, *, of_all: bool) -> Any:
        asked.append(keys["token"].to_pylist())
        assert (level, of_all) == ("ALL", False)
        return RowsRead(keys, np.array([]), tuple(UnreadRow(place, "no") for place in unread)), 7

    monkeypatch.setattr(LookTask, "_read", read)
    task: Any = LookTask(None, None, "", (-100, 0, 100), 9, {})  # type: ignore[arg-type]
    ring = SimpleNamespace(all_live=np.array([True, False]), numbers_of=lambda tokens: (tokens > 50).astype(int))
    keys = pa.RecordBatch.from_pydict({"token": pa.array([1, 2, 99, 2], pa.int64())})
    _, now_s, came = task.read_of_all(SimpleNamespace(copy=None, ring=ring), None, keys)
    assert (asked, now_s) == ([[1, 2, 2]], 7)
    assert came.tolist() == ([True, False, False, False] if unread else [True, True, False, True])
    assert task.read_of_all(SimpleNamespace(copy=None, ring=ring), None, keys.slice(2, 1)) is None


def test_no_more_differences_are_listed_than_asked_for_however_many_files_have_some() -> None:
    found = Found()
    for number in range(3):
        listed = [Difference("extra", {"id": f"{number} {name}"}) for name in "ab"]
        found.add(Found(Counter(different=2), listed=listed), 3)
    assert [one.key["id"] for one in found.listed] == ["0 a", "0 b", "1 a"]
    assert found.outcomes["different"] == 6


HOST = Host("h1", "10.0.0.1", 9042, "dc1", "r1", (0,))


@pytest.mark.parametrize("of_scylla", [False, True])
def test_a_write_is_followed_from_the_log_to_the_replica(tmp_path: Path, of_scylla: bool) -> None:
    """Nothing but the last of these tells that the replica has what was logged."""
    store = LocalStore(tmp_path)
    sync = SimpleNamespace(queues=("default",), queue_of=lambda *_: "default")
    plan = SyncPlan(Bucket(0, 60_000), (HOST,), {}, (), of_scylla=of_scylla)
    catch_up = CatchUp(TABLE, logged_ms=100_000)
    staged = {"at_ms": 200_000, "clear_at_ms": 99_999, "nodes": {"h1": {"clear_at_ms": 99_999, "is_read": True}}}
    told: dict[str, Any] = {"table_id": ID, "oldest_open_bucket_ms": 60_000, "bootstrap": ""}
    close: dict[str, Any] = {"began_ms": 150_000, "tables": {"shop.orders": told}}
    statuses: dict[str, Any] = {
        "scylla_log_stage/log" if of_scylla else "commitlog_stage/default": staged,
        "bucket_close/close": close,
    }

    def why(applied: int = 7, now_ms: int = 200_000) -> str:
        config: Any = SimpleNamespace(sync=sync)
        return why_behind(SyncSeen(store, config, statuses, plan, False, now_ms), catch_up, lambda: applied)

    assert why() == "what was logged is not staged yet"
    staged["clear_at_ms"] = staged["nodes"]["h1"]["clear_at_ms"] = 100_000  # type: ignore[index]
    assert why() == "bucket_close has not looked since"
    close["began_ms"] = 200_001
    assert why(now_ms=300_000) == "its oldest bucket is not closed"
    told["oldest_open_bucket_ms"] = 180_001
    assert why() == "its oldest bucket is not closed", "rows may have come into it until all was staged"
    told["oldest_open_bucket_ms"] = 240_000
    store.put(f"sync/{ID}/passes/{7:012}.json", b"{}")
    assert why(applied=6) == "the replica has pass 6 of 7"
    assert (why(), catch_up.waiting) == ("", WaitingRows())
    store.put(f"sync/{ID}/passes/{8:012}.json", b"{}")
    told["oldest_open_bucket_ms"] = 0
    assert why() == "", "what comes later is none of its business"


def test_a_sync_that_is_silent_or_stopped_is_behind(tmp_path: Path) -> None:
    sync: Any = SimpleNamespace(sync=SimpleNamespace(queues=("default",), queue_of=lambda *_: "default"))
    plan = SyncPlan(Bucket(0, 60_000), (HOST,), {}, ())
    silent = SyncSeen(LocalStore(tmp_path), sync, {}, plan, False, 200_000)
    assert "has given no sign of life" in why_behind(silent, CatchUp(TABLE, 100_000), lambda: 7)
    stopped = SyncSeen(LocalStore(tmp_path), sync, {}, plan, True, 200_000)
    assert why_behind(stopped, CatchUp(TABLE, 100_000), lambda: 7) == "the sync is stopped: cdcservice start"
    assert caught_up.newest_plan(LocalStore(tmp_path)) is None


def test_only_archived_logs_of_before_that_may_still_be_read_are_waited_for(tmp_path: Path) -> None:
    """One that cannot be read must not keep any table from being judged: an alarm names it."""
    store = LocalStore(tmp_path)
    sync: Any = SimpleNamespace(sync=SimpleNamespace(queues=("default",), queue_of=lambda *_: "default"))
    staged = {"at_ms": 200_000, "clear_at_ms": 150_000, "nodes": {"h1": {"clear_at_ms": 150_000, "is_read": True}}}
    archive: dict[str, Any] = {"at_ms": 200_000, "unreadable": []}
    statuses = {"commitlog_stage/default": staged, "archive_reprocess/archive": archive}

    def why() -> str:
        plan = SyncPlan(Bucket(0, 60_000), (HOST,), {}, ())
        return SyncSeen(store, sync, statuses, plan, False, 200_000).why_not_staged(100_000)

    def put(name: str, began_ms: int) -> None:
        entry = ArchivedSegment("h1", name, "9\n", 1, 1, began_ms, began_ms + 9, began_ms + 10)
        store.put(f"cdc/h1/{name}.json", json.dumps(asdict(entry)).encode())

    put("CommitLog-7-3.log", 100_000)
    assert why() == "", "it was begun later"
    put("CommitLog-7-1.log", 99_999)
    assert "CommitLog-7-1.log of node h1" in why()
    archive["unreadable"] = ["h1/CommitLog-7-1.log"]
    assert why() == ""
    put("CommitLog-7-2.log", 0)
    assert "CommitLog-7-2.log of node h1" in why(), "nobody knows when it was begun"
    store.put("cdc/h1/CommitLog-7-2.log.json", b"damaged")
    assert why() == ""
