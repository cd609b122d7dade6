"""The table of changes: passes are added once, in order, to the base that they were made for; no Spark."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from ringsync.replica.base import replaced_table
from ringsync.replica.changes import (
    StaleStateError,
    append_pass,
    begin_changes,
    check_base,
    empty_changes,
    forget_merged,
    replica_state,
)
from ringsync.replica.delta_log import ConcurrentCommitError, read_snapshot
from ringsync.replica.errors import ReplicaMismatchError, SchemaChangedError
from ringsync.replica.folders import base_folder
from ringsync.schema.table import DroppedColumn
from ringsync.storage.local import LocalStore
from tests.replica.bases import NOW_MS, replica_uri, state_of, write_base, write_file, write_pass
from tests.replica.test_table import images, simple, simple_images, table

CHANGES = "replica/shop/orders/changes"
BASE = base_folder("shop", "orders")


def newest(store: Path) -> list[tuple[int, int, str]]:
    """(pass, id, v) of all images, as delta-rs reads them."""
    changes = DeltaTable(f"{replica_uri(store, simple())}/changes")
    found = QueryBuilder().register("c", changes).execute("SELECT _version, id, v FROM c ORDER BY _version, id")
    return [tuple(row.values()) for row in pa.table(found.read_all()).to_pylist()]


def test_a_pass_is_added_once_and_in_order(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert replica_state(store, simple()) is None
    write_base(tmp_path, simple(), simple_images(3), as_of_us=5)
    before = state_of(tmp_path, simple())
    assert (before.applied, before.changes_version, before.as_of_us) == (0, -1, 5)
    file = write_file(tmp_path, simple(), simple_images(2, "one"), 1)
    assert append_pass(store, simple(), 1, [file], NOW_MS, seen=before) == 1
    # Repeated, by one who knows what is there and by one who does not.
    assert append_pass(store, simple(), 1, [file], NOW_MS, seen=before) == 1
    assert append_pass(store, simple(), 1, [file], NOW_MS, seen=state_of(tmp_path, simple())) == 1
    with pytest.raises(StaleStateError, match="pass 2 was made for base test-0 with pass 0"):
        append_pass(store, simple(), 2, [file], NOW_MS, seen=before)
    assert write_pass(tmp_path, simple(), simple_images(0), 2) == 2
    write_pass(tmp_path, simple(), simple_images(1, "three"), 3)
    now = state_of(tmp_path, simple())
    assert (now.applied, now.as_of_us, now.changed_rows, now.base_rows) == (3, 5, 3, 3)
    sizes = [sum(file.stat().st_size for file in tmp_path.glob(f"{one}/*.parquet")) for one in (CHANGES, BASE)]
    assert [now.changed_bytes, now.base_bytes] == sizes
    assert newest(tmp_path) == [(1, 0, "one"), (1, 1, "one"), (3, 0, "three")]


def test_a_column_that_was_dropped_and_added_again_is_another_schema(tmp_path: Path) -> None:
    """Its old values are gone: the replica must follow before anything is read or added under this schema."""
    write_base(tmp_path, simple(), simple_images(3))
    seen = state_of(tmp_path, simple())
    *others, column = simple().columns
    gone = (DroppedColumn(column.name, "regular", column.type, NOW_MS * 1000),)
    for altered in (replace(simple(), columns=tuple(others), dropped=gone), replace(simple(), dropped=gone)):
        with pytest.raises(SchemaChangedError, match=r"schema of .* changed .* follows"):
            replica_state(LocalStore(tmp_path), altered)
        with pytest.raises(ReplicaMismatchError):
            append_pass(LocalStore(tmp_path), altered, 1, [], NOW_MS, seen=seen)
    write_base(tmp_path, altered, simple_images(1, "new"))
    assert state_of(tmp_path, altered).base_rows == 1
    with pytest.raises(ReplicaMismatchError):
        replica_state(LocalStore(tmp_path), simple())


def test_zombies_and_rivals_of_one_pass(tmp_path: Path) -> None:
    write_base(tmp_path, simple(), simple_images(3))
    for number in range(1, 24):
        seen = state_of(tmp_path, simple())

        def rival(_: int, number: int = number, seen: object = seen) -> int:
            file = write_file(tmp_path, simple(), simple_images(2, str(number)), number)
            return append_pass(LocalStore(tmp_path), simple(), number, [file], NOW_MS, seen=seen)

        with ThreadPoolExecutor(3) as threads:
            assert len(set(threads.map(rival, range(3)))) == 1
    assert [row[0] for row in newest(tmp_path)] == sorted([*range(1, 24)] * 2)
    # Read from a checkpoint, as versions 10 and 20 have made.
    assert (tmp_path / CHANGES / "_delta_log" / f"{20:020}.checkpoint.parquet").exists()
    assert state_of(tmp_path, simple()).applied == 23


def test_a_new_base_begins_anew(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_base(tmp_path, simple(), simple_images(3))
    for number in (1, 2, 3):
        write_pass(tmp_path, simple(), simple_images(2, "old"), number)
    old = state_of(tmp_path, simple())
    write_base(tmp_path, simple(), simple_images(4), from_pass=3)
    # Killed before the table of changes was emptied: its images belong to another base.
    now = state_of(tmp_path, simple())
    assert (now.applied, now.changes_version, now.changed_rows, now.base_rows) == (2, -1, 0, 4)
    assert now.changed_bytes == 0
    with pytest.raises(StaleStateError):
        append_pass(store, simple(), 4, [], NOW_MS, seen=old)
    for _ in range(2):
        begin_changes(store, simple(), NOW_MS)
    assert newest(tmp_path) == []
    write_pass(tmp_path, simple(), simple_images(1, "new"), 3)
    begin_changes(store, simple(), NOW_MS)
    assert newest(tmp_path) == [(3, 0, "new")]
    assert state_of(tmp_path, simple()).applied == 3


def test_rows_of_a_table_that_was_created_again_never_meet_those_of_the_old_one(tmp_path: Path) -> None:
    """Whoever reads both without a look at their properties sees the one table's or the other's, at any moment."""
    store, again = LocalStore(tmp_path), replace(simple(), table_id="2" * 32)
    third = replace(simple(), table_id="3" * 32)
    write_base(tmp_path, simple(), simple_images(3))
    write_pass(tmp_path, simple(), simple_images(2, "old"), 1)
    asleep = state_of(tmp_path, simple())
    file = write_file(tmp_path, simple(), simple_images(1, "late"), 2)
    for before, newer in ((simple(), again), (again, third)):
        old = read_snapshot(store, BASE)
        assert replaced_table(old, newer) == {"table_id": before.table_id, "version": old.version}
        for _ in range(2):
            empty_changes(store, newer, old, NOW_MS)
            assert newest(tmp_path) == []
        with pytest.raises(ReplicaMismatchError, match="dropped and created again"):
            replica_state(store, newer)
        write_base(tmp_path, newer, simple_images(1, "new"), from_pass=8)
        assert state_of(tmp_path, newer).applied == 7, "what was emptied counts as no pass"
        begin_changes(store, newer, NOW_MS)
        assert replaced_table(read_snapshot(store, BASE), newer) is None
        write_pass(tmp_path, newer, simple_images(1, "newer"), 8)
        assert newest(tmp_path) == [(8, 0, "newer")]
        with pytest.raises(ConcurrentCommitError):  # a bootstrap of a table before, which wakes up now
            empty_changes(store, before, old, NOW_MS)
        assert newest(tmp_path) == [(8, 0, "newer")]
    with pytest.raises(ReplicaMismatchError):
        append_pass(store, simple(), 2, [file], NOW_MS, seen=asleep)
    for late in (lambda: check_base(store, simple(), asleep), lambda: forget_merged(store, simple(), asleep, NOW_MS)):
        with pytest.raises(StaleStateError):
            late()
    first = QueryBuilder().register("b", DeltaTable(f"{replica_uri(tmp_path, simple())}/base", version=0))
    assert len(pa.table(first.execute("SELECT * FROM b").read_all())) == 3


def test_another_schema_is_refused(tmp_path: Path) -> None:
    wider = table(("id", "partition_key", simple().columns[0].type), ("w", "regular", simple().columns[0].type))
    write_base(tmp_path, simple(), simple_images(3))
    write_pass(tmp_path, simple(), simple_images(1), 1)
    seen = state_of(tmp_path, simple())
    for call in (lambda: replica_state(LocalStore(tmp_path), wider), lambda: write_pass(tmp_path, wider, None, 2)):
        with pytest.raises(ReplicaMismatchError, match=r"schema of .* changed"):
            call()
    with pytest.raises(ReplicaMismatchError, match="dropped and created again"):
        replica_state(LocalStore(tmp_path), replace(simple(), table_id="2" * 32))
    rows = images(wider, {"id": pa.array([1], pa.int32()), "w": pa.array([5], pa.int32())})
    write_base(tmp_path, wider, rows, from_pass=2)
    write_pass(tmp_path, wider, rows, 2)
    assert state_of(tmp_path, wider).applied == 2
    assert "w" in DeltaTable(f"{replica_uri(tmp_path, wider)}/changes").schema().to_arrow().names
    assert seen.base != state_of(tmp_path, wider).base
    assert read_snapshot(LocalStore(tmp_path), CHANGES).rows == 1


def test_what_was_merged_is_forgotten_and_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_base(tmp_path, simple(), simple_images(3))
    for number in range(1, 12):  # over a checkpoint
        write_pass(tmp_path, simple(), simple_images(1, str(number)), number)
    seen = state_of(tmp_path, simple())
    write_pass(tmp_path, simple(), simple_images(1, "later"), 12)
    for _ in range(2):
        forget_merged(store, simple(), seen, NOW_MS)
        assert newest(tmp_path) == [(12, 0, "later")]
    assert state_of(tmp_path, simple()).applied == 12


def test_merged_images_that_somebody_writes_anew_with_later_ones_stay_until_the_next(tmp_path: Path) -> None:
    """If only some of a row's merged images went, an older one would be taken for its newest."""
    store = LocalStore(tmp_path)
    write_base(tmp_path, simple(), simple_images(3))
    for number in (1, 2):
        write_pass(tmp_path, simple(), simple_images(1, str(number)), number)
    merged = state_of(tmp_path, simple())
    write_pass(tmp_path, simple(), simple_images(2, "three").slice(1), 3)
    theirs = DeltaTable(f"{replica_uri(tmp_path, simple())}/changes").update(
        updates={"v": "v"}, predicate="_version = 1 OR _version = 3"
    )
    assert (theirs["num_removed_files"], theirs["num_added_files"]) == (2, 1)
    forget_merged(store, simple(), merged, NOW_MS)
    assert [row for row in newest(tmp_path) if row[1] == 0] in ([], [(1, 0, "1"), (2, 0, "2")])
    forget_merged(store, simple(), state_of(tmp_path, simple()), NOW_MS)
    assert newest(tmp_path) == []


def test_a_merge_that_wakes_up_after_a_bootstrap_takes_nothing_out(tmp_path: Path) -> None:
    """The passes that it has merged into the base before are added to the new one again."""
    store = LocalStore(tmp_path)
    write_base(tmp_path, simple(), simple_images(3))
    for number in (1, 2):
        write_pass(tmp_path, simple(), simple_images(1, str(number)), number)
    seen = state_of(tmp_path, simple())
    check_base(store, simple(), seen)
    write_base(tmp_path, simple(), simple_images(3), from_pass=2)
    begin_changes(store, simple(), NOW_MS)
    write_pass(tmp_path, simple(), simple_images(1, "again"), 2)
    for late in (check_base, lambda *given: forget_merged(*given, NOW_MS)):
        with pytest.raises(StaleStateError, match="a bootstrap or a change of the table's schema has replaced"):
            late(store, simple(), seen)
    assert newest(tmp_path) == [(2, 0, "again")]
