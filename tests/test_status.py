"""When all that was written is published, as far as the loops tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringsync.status import LATE_ROWS, wait_until_published, what_is_left
from ringsync.steps.loop import put_status
from ringsync.storage.local import LocalStore

SINCE_MS = 1_000
NODE = {"endpoint": "10.0.0.1:9042", "clear_at_ms": 1_500, "backlog_bytes": 0, "error": None}
TABLE = {"open_buckets": 0, "last_pass": 7, "replica_pass": 7}


def put_all(store: LocalStore, **changed: Any) -> None:
    """Statuses of loops that have done everything, but for what is changed: of a node, a table, a loop."""
    node, table = ({**one, **changed.get(name, {})} for one, name in ((NODE, "node"), (TABLE, "table")))
    put_status(store, "commitlog_stage", "default", {"nodes": {"4e5d": node}, "error": None})
    close = {"began_ms": 1_500, "tables": {"shop.orders": table}, "error": None, **changed.get("close", {})}
    put_status(store, "bucket_close", "close", close)
    put_status(store, "out_of_sequence", "queue", {"waiting": 0, "error": None, **changed.get("late", {})})


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({}, ""),
        ({"node": {"clear_at_ms": 999, "backlog_bytes": 4096}}, "10.0.0.1:9042 is not staged: 4,096 bytes are left"),
        ({"node": {"clear_at_ms": 999, "error": "no such folder"}}, "10.0.0.1:9042 is not staged: no such folder"),
        ({"close": {"began_ms": 999}}, "bucket_close has not looked yet"),
        ({"close": {"error": "NoHostAvailable"}}, "NoHostAvailable"),
        ({"table": {"open_buckets": 2}}, "shop.orders has 2 open buckets"),
        ({"table": {"replica_pass": 6}}, "the replica of shop.orders has pass 6 of 7"),
        ({"table": {"replica_pass": None}}, ""),
        ({"late": {"waiting": 3}}, "3 late rows wait"),
        ({"late": {"at_ms": 999}}, "out_of_sequence has not looked yet"),
    ],
)
def test_what_is_left(tmp_path: Path, changed: dict[str, Any], left: str) -> None:
    store = LocalStore(tmp_path)
    put_all(store, **changed)
    assert what_is_left(store, SINCE_MS).endswith(left)
    assert bool(what_is_left(store, SINCE_MS)) == bool(left)


def test_files_of_late_rows_are_left(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put_all(store)
    store.put(f"{LATE_ROWS}4e5d/one.arrow", b"rows")
    assert what_is_left(store, SINCE_MS) == "1 files of late rows"


def test_no_loop_has_told_anything(tmp_path: Path) -> None:
    assert what_is_left(LocalStore(tmp_path), SINCE_MS) == "no log of a node has been read yet"


def sleeping(store: LocalStore, moment: list[float], then: Callable[[int], dict[str, Any]]) -> Callable[[float], None]:
    """A sleep of half a second, in which all loops look again."""

    def sleep(_: float) -> None:
        moment[0] += 0.5
        now_ms = int(moment[0] * 1000)
        seen = then(now_ms)
        put_all(store, **{**seen, "node": {"clear_at_ms": now_ms}, "close": {"began_ms": now_ms}})

    return sleep


def test_what_goes_from_loop_to_loop_is_waited_for(tmp_path: Path) -> None:
    """Late rows become a pass only after bucket_close has looked; the replica lacks it until it looks again."""
    store, moment, told = LocalStore(tmp_path), [2.0], list[str]()

    def then(now_ms: int) -> dict[str, Any]:
        return {"table": {"last_pass": 8, "replica_pass": 7 if now_ms < 5_000 else 8} if now_ms > 2_000 else {}}

    put_all(store)
    clock = lambda: moment[0]  # noqa: E731
    left = wait_until_published(store, SINCE_MS, 60, told.append, clock, sleeping(store, moment, then))
    assert left == ""
    assert "the replica of shop.orders has pass 7 of 8" in told
    assert moment[0] >= 5


def test_the_time_is_over(tmp_path: Path) -> None:
    store, moment = LocalStore(tmp_path), [1.0]
    put_all(store, table={"open_buckets": 1})
    sleep = sleeping(store, moment, lambda _: {"table": {"open_buckets": 1}})
    left = wait_until_published(store, SINCE_MS, 5, clock=lambda: moment[0], sleep=sleep)
    assert left == "shop.orders has 1 open buckets"
    assert moment[0] == 6
