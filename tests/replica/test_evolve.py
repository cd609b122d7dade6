"""A replica follows its table's schema: every kind of change, kills between commits, rivals; no Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from ringsync.cql.types import CqlType, ListType, MapType, Native, UserType
from ringsync.images.live import shown_rows
from ringsync.images.schema import lake_names, row_image_schema
from ringsync.replica import evolve
from ringsync.replica.changes import StaleStateError, append_pass
from ringsync.replica.delta_log import ConcurrentCommitError, DataFile, read_snapshot
from ringsync.replica.errors import ReplicaMismatchError, ReplicaWaitsError, SchemaChangedError
from ringsync.replica.evolve import (
    Piece,
    RewriteNeededError,
    RewriteTask,
    follow_schema,
    rewrite,
)
from ringsync.replica.folders import base_folder
from ringsync.replica.lookup import images_between
from ringsync.schema.table import Column, ColumnKind, DroppedColumn, TableSchema
from ringsync.storage.local import LocalStore
from tests.replica.bases import NOW_MS, replica_uri, state_of, write_base, write_file, write_pass

INT, TEXT = Native("int"), Native("text")
ALL = (-(2**63), 2**63 - 1)
DROPPED_US = 5_000
Row = dict[str, Any]


def user_type(*fields: str, frozen: bool = False) -> UserType:
    return UserType("shop", "part", fields, (INT, TEXT, TEXT)[: len(fields)], frozen=frozen)


def table(
    *columns: tuple[str, ColumnKind, CqlType], key: str = "line", dropped: tuple[DroppedColumn, ...] = ()
) -> TableSchema:
    keys: list[tuple[str, ColumnKind, CqlType]] = [("id", "partition_key", INT), (key, "clustering", INT)]
    described = (*keys, *sorted(columns, key=lambda column: (column[1] != "static", column[0])))
    return TableSchema("shop", "orders", "1" * 32, tuple(Column(*column) for column in described), dropped)


V = ("v", "regular", TEXT)
M = ("m", "regular", MapType(TEXT, INT))
GONE = (DroppedColumn("v", "regular", TEXT, DROPPED_US),)
MAP_GONE = (DroppedColumn("m", "regular", M[2], DROPPED_US),)


def image(schema: TableSchema, token: int, written_us: int = 1_000, **values: Any) -> Row:
    """A row image; a value may be ``(value, d)``: with the differences of its writetimes."""
    x: dict[str, Any] = {}
    for name, value in list(values.items()):
        if isinstance(value, tuple):
            values[name], difference = value
            x[name] = {"d": difference}
    return {"token": token, **values, "_row": {"writetime": written_us, "live": written_us}, "_x": x}


def rows_of(schema: TableSchema, *rows: Row) -> pa.Table:
    return pa.Table.from_pylist(list(rows), row_image_schema(schema))


def shown(store: Path, schema: TableSchema) -> dict[int, Row]:
    """What a reader under this schema sees, by id."""
    names = [column.name for column in schema.columns]
    found: dict[int, Row] = {}
    for batch in shown_rows(images_between(state_of(store, schema), schema, *ALL), schema, NOW_MS // 1000):
        for row in batch.select(names).to_pylist():
            assert row["id"] not in found
            found[row["id"]] = row
    return found


def plain(store: Path, name: str, part: str = "base") -> dict[int, Any]:
    """Values of a column as delta-rs reads them, without ringsync."""
    delta = DeltaTable(f"{replica_uri(store, table())}/{part}")
    return {
        row["id"]: row[name]
        for row in pa.table(
            QueryBuilder().register("t", delta).execute(f'SELECT id, "{name}" FROM t').read_all()
        ).to_pylist()
    }


def columns_of(store: Path, part: str) -> set[str]:
    return set(DeltaTable(f"{replica_uri(store, table())}/{part}").schema().to_arrow().names)


def run_here(task: RewriteTask, pieces: Sequence[Piece]) -> list[DataFile]:
    return list(task(pieces))


def follow(store: Path, versions: Sequence[TableSchema], objects: Any = None, to: int = -1) -> None:
    """What the sync and replica_merge do together."""
    objects = objects or LocalStore(store)
    try:
        follow_schema(objects, versions[to], lambda: versions, NOW_MS)
    except RewriteNeededError:
        rewrite(objects, versions[to], lambda: versions, run_here, lambda: LocalStore(store), {}, NOW_MS)


def begun(store: Path, schema: TableSchema, *rows: Row, newer: Sequence[Row] = ()) -> None:
    write_base(store, schema, rows_of(schema, *rows))
    write_pass(store, schema, rows_of(schema, *newer), 1)


def added() -> list[TableSchema]:
    first = table(V, ("u", "regular", user_type("a")), ("l", "regular", ListType(user_type("a", frozen=True), True)))
    second = table(
        V,
        ("b", "regular", INT),
        ("s", "static", TEXT),
        ("tags", "regular", ListType(TEXT)),
        ("u", "regular", user_type("a", "b")),
        ("l", "regular", ListType(user_type("a", "b", frozen=True), True)),
        ("w", "regular", user_type("a", "b")),
    )
    return [first, second]


def test_added_columns_and_fields_are_null_in_old_rows(tmp_path: Path) -> None:
    old, new = versions = added()
    expiring = image(old, 3, id=3, line=3, u=({"a": 5}, [7]))
    expiring["_x"]["u"]["e"] = [NOW_MS // 1000 - 5]
    rows = image(old, 1, id=1, line=1, v="x", u={"a": 4}, l=[{"a": 6}]), image(old, 2, id=2, line=1, v="y")
    begun(tmp_path, old, *rows, expiring, newer=[image(old, 2, id=2, line=1, v="z", u=({"a": 9}, [3]))])
    versions_before = [read_snapshot(LocalStore(tmp_path), base_folder("shop", "orders")).version]
    follow(tmp_path, versions)
    follow(tmp_path, versions)  # nothing is left to do
    assert read_snapshot(LocalStore(tmp_path), base_folder("shop", "orders")).version == versions_before[0] + 1
    found = shown(tmp_path, new)
    none = {"b": None, "s": None, "tags": None, "w": None}
    assert found[1] == {"id": 1, "line": 1, "v": "x", "u": {"a": 4, "b": None}, "l": [{"a": 6, "b": None}], **none}
    assert (found[2]["v"], found[2]["u"]) == ("z", {"a": 9, "b": None})
    assert found[3]["u"] is None, "the expiry of an old field counts"
    assert (plain(tmp_path, "b"), plain(tmp_path, "b", "changes")) == (dict.fromkeys([1, 2, 3]), {2: None})
    write_pass(tmp_path, new, rows_of(new, image(new, 1, id=1, line=1, b=8, u={"a": 4, "b": "q"}, w={"b": "r"})), 2)
    found = shown(tmp_path, new)
    assert (found[1]["b"], found[1]["u"]["b"], found[1]["w"]) == (8, "q", {"a": None, "b": "r"})
    assert found[2]["v"] == "z"


def test_a_dropped_column_is_gone_and_its_old_cells_never_come_back(tmp_path: Path) -> None:
    first, second, third = table(V, M), table(M, dropped=GONE), table(V, M, dropped=GONE)
    versions = [first, second, third]
    begun(tmp_path, first, image(first, 1, id=1, line=1, v="old"), newer=[image(first, 2, id=2, line=1, v="old")])
    follow(tmp_path, versions[:2])
    assert "v" not in columns_of(tmp_path, "base") | columns_of(tmp_path, "changes")
    assert [sorted(row) for row in shown(tmp_path, second).values()] == [["id", "line", "m"]] * 2
    write_pass(tmp_path, second, rows_of(second, image(second, 3, id=3, line=1, m=[("k", 1)])), 2)
    with pytest.raises(RewriteNeededError, match=r"another column v, which was dropped"):
        follow_schema(LocalStore(tmp_path), third, lambda: versions, NOW_MS)
    follow(tmp_path, versions)
    assert plain(tmp_path, "v") == dict.fromkeys([1, 2, 3])
    write_pass(tmp_path, third, rows_of(third, image(third, 1, 9_000, id=1, line=1, v="new")), 3)
    assert {id: row["v"] for id, row in shown(tmp_path, third).items()} == {1: "new", 2: None, 3: None}
    assert shown(tmp_path, third)[3]["m"] == [("k", 1)]


def test_a_column_dropped_and_added_again_between_two_looks_keeps_only_newer_cells(tmp_path: Path) -> None:
    first, last = table(V, M), table(V, M, dropped=GONE + MAP_GONE)
    begun(
        tmp_path,
        first,
        image(first, 1, 1_000, id=1, line=1, v="old", m=[("k", 1)]),
        image(first, 2, 9_000, id=2, line=1, v=("old", -4_000), m=([("k", 1), ("new", 2)], [-8_000, 0])),
        image(first, 3, 9_000, id=3, line=1, v="new", m=([("k", 1)], [])),  # of unknown time: read before the drop
        newer=[image(first, 4, 9_000, id=4, line=1, v=("new", -3_999))],
    )
    with pytest.raises(RewriteNeededError, match=r"column v was dropped and added again"):
        follow_schema(LocalStore(tmp_path), last, lambda: [first, last], NOW_MS)
    follow(tmp_path, [first, last])
    assert plain(tmp_path, "v") == {1: None, 2: None, 3: "new", 4: "new"}
    assert {id: row["m"] for id, row in shown(tmp_path, last).items()} == {1: None, 2: [("new", 2)], 3: None, 4: None}


@pytest.mark.parametrize(
    ("old", "new", "value", "shown_as"),
    [
        ("timestamp", "bigint", datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC), 5_000),
        ("bigint", "timestamp", 5_000, datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)),
        ("text", "blob", "ab", b"ab"),
        ("varint", "blob", "5", b"\x05"),
        ("decimal", "blob", "1.5", b"\x00\x00\x00\x01\x0f"),
        ("timeuuid", "uuid", "50554d6e-29bb-11e5-b345-feff819cdc9f", "50554d6e-29bb-11e5-b345-feff819cdc9f"),
    ],
)
def test_a_column_added_again_with_another_type_keeps_its_bytes(
    tmp_path: Path, old: str, new: str, value: Any, shown_as: Any
) -> None:
    """A timestamp was shown as microseconds; what Arrow cannot cast stopped the rewriting for ever."""
    gone = (DroppedColumn("v", "regular", Native(old), DROPPED_US),)
    first, last = table(("v", "regular", Native(old)), M), table(("v", "regular", Native(new)), M, dropped=gone)
    newer = image(first, 2, 9_000, id=2, line=2, v=value, m=[("k", 1)])
    begun(tmp_path, first, image(first, 1, id=1, line=1, v=value, m=[("k", 1)]), newer=[newer])
    follow(tmp_path, [first, last])
    assert {id: (row["v"], row["m"]) for id, row in shown(tmp_path, last).items()} == {
        1: (None, [("k", 1)]),
        2: (shown_as, [("k", 1)]),
    }


def test_other_collections_of_unknown_times_stay_when_a_column_is_added_again(tmp_path: Path) -> None:
    """Cassandra before 5.0 shows no times of elements. ``m`` was dropped and added again long before the bootstrap: the
    rows with a value of ``v`` lost it, since cells of unknown time counted as from before that drop."""
    long_ago = DroppedColumn("m", "regular", M[2], 500)
    first, last = table(V, M, dropped=(long_ago,)), table(V, M, dropped=(long_ago, *GONE))
    elements = ([("k", 1)], [])
    newer = image(first, 1, DROPPED_US + 1, id=1, line=1, v="new", m=elements)
    begun(tmp_path, first, newer, image(first, 2, id=2, line=1, m=elements))
    follow(tmp_path, [first, last])
    found = shown(tmp_path, last)
    assert [(found[number]["v"], found[number]["m"]) for number in (1, 2)] == [("new", [("k", 1)]), (None, [("k", 1)])]


@pytest.mark.parametrize("has_static", [False, True])
def test_rows_that_had_expired_stay_dead_when_their_column_is_dropped(tmp_path: Path, has_static: bool) -> None:
    """A row of unknown liveness whose only cell has expired is dead: without the column nothing told so any more."""
    w, static = ("w", "regular", INT), ("s", "static", INT)
    others = (w, static) if has_static else (w,)
    first, second = table(V, *others), table(*others, dropped=GONE)

    def read(number: int, expires_at: int) -> Row:
        row = image(first, number, id=number, line=1, v="x", **({"s": 1} if has_static else {}))
        row["_row"] = {"writetime": 1_000, "expires_at": expires_at, "live": None}
        return row

    now_s = NOW_MS // 1000
    begun(tmp_path, first, *(read(number, now_s - 3600) for number in range(1, 6)), read(6, now_s + 3600))
    before = {number for number, row in shown(tmp_path, first).items() if row["line"] is not None}
    follow(tmp_path, [first, second])
    assert {number for number, row in shown(tmp_path, second).items() if row["line"] is not None} >= before
    # Where the expiry may be that of static cells, it tells nothing of the row.
    assert (set(shown(tmp_path, second)) == {6}) == (not has_static)


def test_a_renamed_key_column(tmp_path: Path) -> None:
    first, last = table(V), table(V, key="place")
    begun(tmp_path, first, *(image(first, i, id=i, line=i, v="old") for i in range(4)))
    write_pass(tmp_path, first, rows_of(first, image(first, 3, id=3, line=3, v="new")), 2)
    before = state_of(tmp_path, first)
    with pytest.raises(
        RewriteNeededError, match=r"waits until replica_merge .*: the key column line was renamed to pl"
    ):
        follow_schema(LocalStore(tmp_path), last, lambda: [first, last], NOW_MS)
    assert shown(tmp_path, first)[3]["v"] == "new", "those who do not know it go on reading"
    follow(tmp_path, [first, last])
    now = state_of(tmp_path, last)
    kept = ("applied", "as_of_us", "live_known_from_us", "deletions_known_from_us", "whole")
    assert [getattr(now, name) for name in kept] == [getattr(before, name) for name in kept]
    assert plain(tmp_path, "place") == {i: i for i in range(4)}
    write_pass(tmp_path, last, rows_of(last, image(last, 2, id=2, place=2, v="newest")), 3)
    assert {i: (row["place"], row["v"]) for i, row in shown(tmp_path, last).items()} == {
        0: (0, "old"),
        1: (1, "old"),
        2: (2, "newest"),
        3: (3, "new"),
    }
    with pytest.raises(StaleStateError):
        append_pass(LocalStore(tmp_path), last, 3, [], NOW_MS, seen=before)


def test_fields_inside_maps_and_renamed_fields(tmp_path: Path) -> None:
    def version(*fields: str) -> TableSchema:
        inner = user_type(*fields, frozen=True)
        return table(("m", "regular", MapType(TEXT, inner)), ("u", "regular", user_type(*fields)))

    versions = [version("a"), version("a", "b"), version("a", "c")]
    begun(tmp_path, versions[0], image(versions[0], 1, id=1, line=1, m=[("k", {"a": 1})], u={"a": 2}))
    follow(tmp_path, versions[:2])
    written = image(versions[1], 2, id=2, line=1, m=[("k", {"a": 1, "b": "x"})], u={"a": 2, "b": "y"})
    write_pass(tmp_path, versions[1], rows_of(versions[1], written), 2)
    follow(tmp_path, versions)
    found = shown(tmp_path, versions[2])
    assert (found[1]["m"], found[1]["u"]) == ([("k", {"a": 1, "c": None})], {"a": 2, "c": None})
    assert (found[2]["m"], found[2]["u"]) == ([("k", {"a": 1, "c": "x"})], {"a": 2, "c": "y"})


class MortalStore(LocalStore):
    """Dies before a commit of a Delta log."""

    def __init__(self, folder: Path, commits: int) -> None:
        super().__init__(folder)
        self.left = commits

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> Any:
        if "_delta_log" in key:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
        return super().put(key, data, if_absent=if_absent)


def history() -> list[TableSchema]:
    return [
        table(V, M),
        table(V, M, ("b", "regular", INT)),
        table(M, ("b", "regular", INT), dropped=GONE),
        table(V, M, ("b", "regular", INT), dropped=GONE),
        table(V, M, ("b", "regular", INT), dropped=GONE, key="place"),
    ]


def expected(number: int) -> dict[int, Row]:
    version = history()[number]
    rows: dict[int, Row] = {}
    for i in (1, 2):
        values = {"id": i, "line": i, "place": i, "v": "v" if number < 2 else None, "m": [("k", i)], "b": None}
        rows[i] = {column.name: values[column.name] for column in version.columns}
    return rows


@pytest.mark.parametrize("to", range(1, 5))
@pytest.mark.parametrize("commits", range(3))
def test_killed_between_any_two_commits(tmp_path: Path, to: int, commits: int) -> None:
    """The next process, which may know one more version already, finishes it; a pass before that is not lost."""
    versions = history()
    first, newer = (image(versions[0], i, id=i, line=i, v="v", m=[("k", i)]) for i in (1, 2))
    begun(tmp_path, versions[0], first, newer=[newer])
    for number in range(1, to):
        follow(tmp_path, versions[: number + 1])
    with suppress(KeyboardInterrupt):
        follow(tmp_path, versions[: to + 1], MortalStore(tmp_path, commits))
    known = versions[: to + 1]
    if to + 1 < len(versions):
        known = versions[: to + 2]
    follow(tmp_path, known)
    assert shown(tmp_path, known[-1]) == expected(len(known) - 1)
    assert state_of(tmp_path, known[-1]).applied == 1
    with pytest.raises(ReplicaWaitsError, match="later version"):
        follow_schema(LocalStore(tmp_path), versions[0], lambda: known, NOW_MS)


def test_a_process_that_is_behind_changes_and_adds_nothing(tmp_path: Path) -> None:
    """Also if its pass is ready: it meets the commit to the changes, before the base has followed."""
    old, new = table(V), table(V, M)
    begun(tmp_path, old, image(old, 1, id=1, line=1, v="v"))
    asleep = state_of(tmp_path, old)
    file = write_file(tmp_path, old, rows_of(old, image(old, 2, id=2, line=1)), 2)
    with pytest.raises(KeyboardInterrupt):
        follow(tmp_path, [old, new], MortalStore(tmp_path, 1))
    assert {part: "m" in columns_of(tmp_path, part) for part in ("base", "changes")} == {"base": False, "changes": True}
    with pytest.raises(SchemaChangedError):
        append_pass(LocalStore(tmp_path), old, 2, [file], NOW_MS, seen=asleep)
    with pytest.raises(ReplicaWaitsError):
        follow_schema(LocalStore(tmp_path), old, lambda: [old, new], NOW_MS)
    follow(tmp_path, [old, new])
    assert list(shown(tmp_path, new)) == [1]
    with pytest.raises(ReplicaMismatchError, match="dropped and created again"):
        follow_schema(LocalStore(tmp_path), replace(new, table_id="2" * 32), lambda: [new], NOW_MS)
    with pytest.raises(SchemaChangedError, match="history does not know"):
        follow_schema(LocalStore(tmp_path), old, lambda: [old], NOW_MS)


def test_two_processes_follow_at_once(tmp_path: Path) -> None:
    versions = history()
    rows = [image(versions[0], i, id=i, line=i, v="v", m=[("k", i)]) for i in (1, 2)]
    begun(tmp_path, versions[0], rows[0], newer=rows[1:])

    def rival(numbers: tuple[int, int]) -> None:
        number, last = numbers
        for _ in range(20):
            with suppress(ReplicaWaitsError, ConcurrentCommitError):
                return follow(tmp_path, versions[: last + 1], to=number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(rival, [(1, 2), (1, 2), (2, 2), (2, 2)]))
        assert shown(tmp_path, versions[2]) == expected(2)
        list(threads.map(rival, [(3, 4), (4, 4), (4, 4), (3, 4)]))
    follow(tmp_path, versions)
    assert shown(tmp_path, versions[4]) == expected(4)


def test_who_wakes_up_late_begins_no_changes_for_a_base_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could follow or write the base again afterwards."""
    first, second, third = versions = [table(V), table(V, key="place"), table(V, key="spot")]
    begun(tmp_path, first, image(first, 1, id=1, line=1, v="x"))
    store, begin = LocalStore(tmp_path), evolve.begin_changes
    monkeypatch.setattr(evolve, "begin_changes", lambda *_: None)  # the one sleeps here, the other one is killed
    for known in (versions[:2], versions):
        rewrite(store, known[-1], partial(tuple, known), run_here, lambda: LocalStore(tmp_path), {}, NOW_MS)
    begin(store, second, NOW_MS)
    monkeypatch.undo()
    follow(tmp_path, versions)
    begin(store, third, NOW_MS)
    assert shown(tmp_path, third) == {1: {"id": 1, "spot": 1, "v": "x"}}


def test_a_replica_of_some_columns_does_not_follow(tmp_path: Path) -> None:
    """Its schema is that of an earlier version of the whole table: it became one of all columns, without values."""
    first, second = table(V), table(V, ("w", "regular", INT))
    selected = {"selection": json.dumps({"columns": ["v"], "ranges": [], "where": ""})}
    row = rows_of(first, image(first, 1, id=1, line=1, v="x"))
    write_base(tmp_path, first, row, properties=selected)
    with pytest.raises(SchemaChangedError, match=r"has only some columns of shop\.orders"):
        follow(tmp_path, [first, second])
    assert "w" not in columns_of(tmp_path, "base")


def test_a_pass_that_comes_while_the_base_is_written_again_is_added_again(tmp_path: Path) -> None:
    old, new = table(V), table(V, key="place")
    begun(tmp_path, old, image(old, 1, id=1, line=1, v="old"))

    def interrupted(task: RewriteTask, pieces: Sequence[Piece]) -> list[DataFile]:
        files = list(task(pieces))
        write_pass(tmp_path, old, rows_of(old, image(old, 1, id=1, line=1, v="new")), 2)
        return files

    store = LocalStore(tmp_path)
    rewrite(store, new, lambda: [old, new], interrupted, lambda: LocalStore(tmp_path), {}, NOW_MS)
    assert (state_of(tmp_path, new).applied, shown(tmp_path, new)[1]["v"]) == (1, "old")
    write_pass(tmp_path, new, rows_of(new, image(new, 1, id=1, place=1, v="new")), 2)
    assert shown(tmp_path, new)[1]["v"] == "new"


@pytest.mark.parametrize("value", ["TRUE", "False"])
def test_a_base_that_is_written_again_may_have_deletion_vectors_as_before(tmp_path: Path, value: str) -> None:
    old, new = table(V), table(V, key="place")
    begun(tmp_path, old, image(old, 1, id=1, line=1, v="old"))
    base = DeltaTable(f"{replica_uri(tmp_path, old)}/base")
    base.alter.set_table_properties({"delta.enableDeletionVectors": value})
    follow(tmp_path, [old, new])
    found = read_snapshot(LocalStore(tmp_path), base_folder("shop", "orders")).configuration
    assert found["delta.enableDeletionVectors"].lower() == value.lower()


def test_a_repair_while_the_base_is_written_again_stays(tmp_path: Path) -> None:
    old, new = table(V), table(V, key="place")
    begun(tmp_path, old, image(old, 1, id=1, line=1, v="old"))

    def interrupted(task: RewriteTask, pieces: Sequence[Piece]) -> Iterator[DataFile]:
        write_base(tmp_path, old, rows_of(old, image(old, 1, id=1, line=1, v="right")))
        yield from task(pieces)

    store = LocalStore(tmp_path)
    with pytest.raises(ConcurrentCommitError):
        rewrite(
            store, new, lambda: [old, new], lambda *a: list(interrupted(*a)), lambda: LocalStore(tmp_path), {}, NOW_MS
        )
    follow(tmp_path, [old, new])
    assert shown(tmp_path, new)[1]["v"] == "right"


def test_lake_names_that_change_without_a_rename(tmp_path: Path) -> None:
    """A new column takes the name in the lake that another one had."""
    old = table(("a!b", "regular", TEXT))
    new = table(("a!b", "regular", TEXT), ("a b", "regular", TEXT))
    assert lake_names(old)["a!b"] == lake_names(new)["a b"] == "a_b"
    write_base(tmp_path, old, rows_of(old, image(old, 1, id=1, line=1, a_b="x")))
    follow(tmp_path, [old, new])
    assert (plain(tmp_path, lake_names(new)["a!b"]), plain(tmp_path, "a_b")) == ({1: "x"}, {1: None})


def test_a_schema_that_was_read_from_a_checkpoint_is_followed(tmp_path: Path) -> None:
    """What a checkpoint has as lists of pairs is written as the objects that the log has."""
    old, new = table(V), table(V, M)
    begun(tmp_path, old, image(old, 1, id=1, line=1, v="v"))
    for number in range(2, 12):
        write_pass(tmp_path, old, rows_of(old, image(old, number, id=number, line=1, v="v")), number)
    folder = tmp_path / "replica/shop/orders/changes/_delta_log"
    assert list(folder.glob("*.checkpoint.parquet"))
    for commit in folder.glob("0000000000000000000*.json"):
        commit.unlink()
    follow(tmp_path, [old, new])
    (metadata,) = (
        json.loads(line)["metaData"]
        for line in max(folder.glob("*.json")).read_text().splitlines()
        if "metaData" in json.loads(line)
    )
    assert (metadata["format"], type(metadata["configuration"])) == ({"provider": "parquet", "options": {}}, dict)
    assert plain(tmp_path, "m", "changes") == dict.fromkeys(range(2, 12))
    assert len(shown(tmp_path, new)) == 11
