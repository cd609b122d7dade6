"""The model of ScyllaDB's CDC log gives the log rows that the documents print.

Values are those of the pages "The CDC log table", "Basic operations in CDC" and "Advanced column types" of ScyllaDB's
manual, and of the tests that docs/scylla.md cites. No ScyllaDB server has been asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from tests.scylla_model.log_rows import log_columns, log_rows, split
from tests.scylla_model.mutation import (
    Bound,
    Cell,
    Change,
    Collection,
    Column,
    Element,
    Key,
    Kind,
    Marker,
    Mutation,
    PartitionDeletion,
    RangeDeletion,
    Row,
    RowDeletion,
    Table,
    UndocumentedError,
)

T = 1606390225588947
ROW = (0,)


def table(*columns: str, kind: Kind = "atomic", clustering: tuple[str, ...] = ("ck",), static: str = "") -> Table:
    """A table with the partition key pk; every column but the static one is of the given kind."""
    fields = ("a", "b", "c") if kind == "udt" else ()
    regular = tuple(Column(name, kind, fields=fields) for name in columns)
    return Table(("pk",), clustering, (*regular, *([Column(static, static=True)] if static else [])))


def cells(timestamp: int = T, ttl: int | None = None, /, **values: Any) -> tuple[Change, ...]:
    """What ``SET`` writes: a TTL has no effect on null."""
    return tuple(Cell(name, value, timestamp, None if value is None else ttl) for name, value in values.items())


def elements(values: Mapping[Any, Any], timestamp: int = T, ttl: int | None = None) -> tuple[Element, ...]:
    """Elements of a collection; None removes one."""
    return tuple(Element(key, value, timestamp, None if value is None else ttl) for key, value in values.items())


def overwritten(column: str, values: Mapping[Any, Any], timestamp: int = T, ttl: int | None = None) -> Collection:
    """What ``SET column = {…}`` and INSERT write: the tombstone is 1 µs older than the elements."""
    return Collection(column, elements(values, timestamp, ttl), timestamp - 1)


def update(schema: Table, *changes: Change, key: Key = ROW) -> Mutation:
    return Mutation(schema, (0,), (Row(key, changes),))


def insert(schema: Table, *changes: Change, ttl: int | None = None, static: tuple[Change, ...] = ()) -> Mutation:
    return Mutation(schema, (0,), (Row(ROW, changes, Marker(T, ttl)),), static)


def shown(mutation: Mutation, *columns: str) -> list[tuple[Any, ...]]:
    """The named columns of all log rows; names that begin with $ are metadata columns."""
    names = [f"cdc{column}" if column.startswith("$") else column for column in columns]
    return [tuple(row[name] for name in names) for row in log_rows(mutation)]


def test_columns_of_the_documented_log() -> None:
    schema = Table(("pk1", "pk2"), ("ck1", "ck2"), (Column("v"), Column("vs", static=True)))
    assert set(log_columns(schema)) == {
        *("cdc$time", "cdc$batch_seq_no", "cdc$operation", "cdc$ttl", "cdc$end_of_batch"),
        *("pk1", "pk2", "ck1", "ck2", "v", "cdc$deleted_v", "vs", "cdc$deleted_vs"),
    }
    for kind in ("set", "map", "list", "udt"):
        names = log_columns(table("v", kind=kind))
        assert names[-3:] == ["v", "cdc$deleted_v", "cdc$deleted_elements_v"]


class TestLogTable:
    """The CDC log table."""

    def test_time(self) -> None:
        time = UUID("b223c55e-6d07-11ea-7654-24e4fb3f20b9")
        mutation = update(table("a", "b"), *cells(1584969040910883, a=0))
        assert (time.time - 0x01B21DD213814000) // 10 == 1584969040910883
        rows = log_rows(mutation, {1584969040910883: time}.__getitem__)
        assert [row["cdc$time"] for row in rows] == [time]

    def test_two_timestamps_in_a_batch(self) -> None:
        changes = cells(1584966784195983, a=0) + cells(1584966784195984, b=0)
        assert shown(update(table("a", "b"), *changes), "$time", "$batch_seq_no", "a", "b", "$end_of_batch") == [
            (1584966784195983, 0, 0, None, True),
            (1584966784195984, 0, None, 0, True),
        ]

    def test_two_rows_in_a_batch(self) -> None:
        rows = tuple(Row((key,), cells(a=0)) for key in (0, 1))
        mutation = Mutation(table("a"), (0,), rows)
        # Which of the two is first is not told.
        assert shown(mutation, "$time", "$batch_seq_no", "$end_of_batch") == [(T, 0, None), (T, 1, True)]
        assert {row["ck"] for row in log_rows(mutation)} == {0, 1}

    def test_two_rows_with_two_timestamps(self) -> None:
        rows = tuple(Row((key,), cells(1584971217889332 + key, a=0)) for key in (0, 1))
        assert shown(Mutation(table("a"), (0,), rows), "$time", "$batch_seq_no", "ck") == [
            (1584971217889332, 0, 0),
            (1584971217889333, 0, 1),
        ]

    def test_ttl(self) -> None:
        assert shown(update(table("a"), *cells(a=0)), "$ttl") == [(None,)]
        assert shown(update(table("a"), *cells(T, 5, a=0)), "$ttl") == [(5,)]
        assert shown(update(table("a"), *cells(T, 5, a=None)), "$ttl") == [(None,)]

    def test_dead_and_live_cells_with_a_ttl(self) -> None:
        mutation = update(table("a", "b"), *cells(T, 5, a=0, b=None))
        assert shown(mutation, "$batch_seq_no", "a", "$deleted_a", "b", "$deleted_b", "$ttl") == [
            (0, None, None, None, True, None),
            (1, 0, None, None, None, 5),
        ]


class TestBasicOperations:
    """Basic operations in CDC."""

    COLUMNS = "$batch_seq_no", "pk", "ck", "v1", "$deleted_v1", "v2", "$deleted_v2", "$operation"

    def test_updates(self) -> None:
        schema = table("v1", "v2")
        assert shown(update(schema, *cells(v1=0)), *self.COLUMNS) == [(0, 0, 0, 0, None, None, None, 1)]
        assert shown(update(schema, *cells(v2=None)), *self.COLUMNS) == [(0, 0, 0, None, None, None, True, 1)]

    def test_inserts(self) -> None:
        schema = table("v1", "v2")
        assert shown(insert(schema, *cells(v1=0)), *self.COLUMNS) == [(0, 0, 0, 0, None, None, None, 2)]
        assert shown(insert(schema, *cells(v2=None)), *self.COLUMNS) == [(0, 0, 0, None, None, None, True, 2)]

    @pytest.mark.parametrize("operation", [1, 2])
    def test_static_and_clustered_row(self, operation: int) -> None:
        marker = Marker(T) if operation == 2 else None
        mutation = Mutation(table("c", static="s"), (0,), (Row(ROW, cells(c=0), marker),), cells(s=0))
        assert shown(mutation, "$batch_seq_no", "pk", "ck", "s", "c", "$operation") == [
            (0, 0, None, 0, None, 1),
            (1, 0, 0, None, 0, operation),
        ]

    def test_an_insert_of_static_columns_only_is_an_update(self) -> None:
        mutation = Mutation(table("c", static="s"), (0,), static=cells(s=0))
        assert shown(mutation, "ck", "s", "$operation") == [(None, 0, 1)]

    def test_row_deletion(self) -> None:
        mutation = Mutation(table("v"), (0,), row_deletions=(RowDeletion(ROW, T),))
        assert shown(mutation, "pk", "ck", "v", "$deleted_v", "$ttl", "$operation") == [(0, 0, None, None, None, 3)]

    @pytest.mark.parametrize(
        ("start", "end", "rows"),
        [
            (Bound((0,), False), Bound((2,)), [(0, 0, 0, None, 6), (1, 0, 2, None, 7)]),
            (Bound(), Bound((3,), False), [(0, 0, None, None, 5), (1, 0, 3, None, 8)]),
        ],
    )
    def test_range_deletions(self, start: Bound, end: Bound, rows: list[tuple[Any, ...]]) -> None:
        mutation = Mutation(table("v"), (0,), range_deletions=(RangeDeletion(start, end, T),))
        assert shown(mutation, "$batch_seq_no", "pk", "ck", "v", "$operation") == rows

    def test_range_deletion_with_a_prefix(self) -> None:
        schema = table("v", clustering=("ck1", "ck2", "ck3"))
        deletion = RangeDeletion(Bound((0, 0), False), Bound((0, 3), False), T)
        mutation = Mutation(schema, (0,), range_deletions=(deletion,))
        assert shown(mutation, "$batch_seq_no", "pk", "ck1", "ck2", "ck3", "v", "$operation") == [
            (0, 0, 0, 0, None, None, 6),
            (1, 0, 0, 3, None, None, 8),
        ]

    def test_range_of_a_whole_prefix(self) -> None:
        schema = table("v", clustering=("ck1", "ck2"))
        mutation = Mutation(schema, (0,), range_deletions=(RangeDeletion(Bound((2,)), Bound((2,)), T),))
        assert shown(mutation, "ck1", "ck2", "$operation") == [(2, None, 5), (2, None, 7)]

    def test_partition_deletion(self) -> None:
        mutation = Mutation(table("v"), (0,), partition_deletion=PartitionDeletion(T))
        expected = [(0, 0, None, None, 4, True)]
        assert shown(mutation, "$batch_seq_no", "pk", "ck", "v", "$operation", "$end_of_batch") == expected


FIRST, SECOND = UUID("db3214f0-2fe9-11eb-af55-000000000001"), UUID("db3214f1-2fe9-11eb-af55-000000000001")
GIVEN = UUID("0dd381f0-2fea-11eb-af55-000000000001")
ONES = UUID("cc5baec0-2fec-11eb-af55-000000000001"), UUID("cc5baec2-2fec-11eb-af55-000000000001")
NEITHER = {"a": None, "b": None, "c": None}


class TestAdvancedColumnTypes:
    """Advanced column types."""

    COLUMNS = "$time", "v", "$deleted_v", "$deleted_elements_v", "$operation"

    @pytest.mark.parametrize(
        ("kind", "changed", "value", "removed"),
        [
            ("map", {1: "v1", 2: "v2"}, {1: "v1", 2: "v2"}, None),
            ("map", dict.fromkeys((1, 2, 3)), None, {1, 2, 3}),
            ("set", {1: True, 2: True}, {1, 2}, None),
            ("set", dict.fromkeys((1, 2, 3)), None, {1, 2, 3}),
            ("list", {FIRST: 1, SECOND: 2}, {FIRST: 1, SECOND: 2}, None),
            ("list", {GIVEN: 0}, {GIVEN: 0}, None),
            ("list", dict.fromkeys(ONES), None, set(ONES)),
            ("list", {ONES[0]: None}, None, {ONES[0]}),
            ("udt", {0: 0, 1: 1}, {"a": 0, "b": 1, "c": None}, None),
            ("udt", {0: None, 1: None}, NEITHER, {0, 1}),
            ("udt", {0: 42, 2: None}, {"a": 42, "b": None, "c": None}, {2}),
        ],
    )
    def test_elements(self, kind: Kind, changed: dict[Any, Any], value: Any, removed: set[Any] | None) -> None:
        mutation = update(table("v", kind=kind), Collection("v", elements(changed)))
        assert shown(mutation, *self.COLUMNS) == [(T, value, None, removed, 1)]

    @pytest.mark.parametrize(
        ("kind", "written", "value"),
        [
            ("map", {}, None),
            ("map", {1: "v1", 2: "v2"}, {1: "v1", 2: "v2"}),
            ("set", {}, None),
            ("set", {1: True, 2: True}, {1, 2}),
            ("list", {}, None),
            ("list", {FIRST: 1, SECOND: 2}, {FIRST: 1, SECOND: 2}),
            ("udt", {}, NEITHER),
            ("udt", {0: 1, 1: 2}, {"a": 1, "b": 2, "c": None}),
        ],
    )
    def test_overwritten_or_cleared(self, kind: Kind, written: dict[Any, Any], value: Any) -> None:
        schema, change = table("v", kind=kind), overwritten("v", written)
        assert shown(update(schema, change), *self.COLUMNS) == [(T, value, True, None, 1)]
        assert shown(insert(schema, change), *self.COLUMNS) == [(T, value, True, None, 2)]

    def test_a_deleted_column_is_logged_one_microsecond_late(self) -> None:
        mutation = update(table("v", kind="map"), Collection("v", tombstone=1606390225588947))
        assert shown(mutation, *self.COLUMNS) == [(1606390225588948, None, True, None, 1)]

    def test_deleted_one_microsecond_before_the_elements(self) -> None:
        change = Collection("v", elements({1: "v1", 2: "v2"}, 1606390225588947), 1606390225588946)
        expected = [(1606390225588947, {1: "v1", 2: "v2"}, True, None, 1)]
        assert shown(update(table("v", kind="map"), change), *self.COLUMNS) == expected


MIXED = Table(("pk",), ("ck",), (Column("s", static=True), Column("v1"), Column("v2"), Column("m", "map")))


class TestSplitting:
    """What test_change_splitting tells of a write that gives several rows."""

    def test_three_timestamps(self) -> None:
        row = Row(ROW, cells(T + 1, v1=1) + cells(T + 2, v2=2))
        assert shown(Mutation(MIXED, (0,), (row,), cells(s=-1)), "$batch_seq_no", "s", "v1", "v2") == [
            (0, -1, None, None),
            (0, None, 1, None),
            (0, None, None, 2),
        ]

    def test_four_ttls(self) -> None:
        changed = (*elements({0: 6, 1: 6}, T, 6), *elements({2: 7, 3: None}, T, 7), *elements({4: 0}))
        mutation = update(MIXED, *cells(T, 5, v1=5, v2=None), Collection("m", changed))
        columns = "$batch_seq_no", "v1", "v2", "$deleted_v2", "m", "$deleted_elements_m", "$ttl", "$end_of_batch"
        assert shown(mutation, *columns) == [
            (0, None, None, True, {4: 0}, {3}, None, None),
            (1, 5, None, None, None, None, 5, None),
            (2, None, None, None, {0: 6, 1: 6}, None, 6, None),
            (3, None, None, None, {2: 7}, None, 7, True),
        ]

    def test_batch_of_every_kind(self) -> None:
        rows = (
            Row(ROW, (*cells(T + 3, v1=1, v2=2), overwritten("m", {3: 3}, T + 4)), Marker(T + 4)),
            Row((1,), (overwritten("m", {4: 4}, T + 5, 5),), Marker(T + 5, 5)),
        )
        mutation = Mutation(
            MIXED,
            (1,),
            rows,
            row_deletions=(RowDeletion(ROW, T + 2),),
            range_deletions=(RangeDeletion(Bound((0,)), Bound((3,), False), T + 1),),
            partition_deletion=PartitionDeletion(T),
        )
        columns = "$time", "$batch_seq_no", "ck", "v1", "v2", "m", "$deleted_m", "$operation"
        assert shown(mutation, *columns) == [
            (T, 0, None, None, None, None, None, 4),
            (T + 1, 0, 0, None, None, None, None, 5),
            (T + 1, 1, 3, None, None, None, None, 8),
            (T + 2, 0, 0, None, None, None, None, 3),
            (T + 3, 0, 0, 1, 2, None, None, 1),
            (T + 4, 0, 0, None, None, {3: 3}, True, 2),
            (T + 5, 0, 1, None, None, None, None, 2),
            (T + 5, 1, 1, None, None, None, True, 1),
            (T + 5, 2, 1, None, None, {4: 4}, None, 1),
        ]

    def test_insert_of_collections_with_a_ttl(self) -> None:
        schema = table("m1", "m2", kind="map", clustering=())
        changes = overwritten("m1", {1: 1}, T, 5), overwritten("m2", {2: 2}, T, 5)
        mutation = Mutation(schema, (0,), (Row((), changes, Marker(T, 5)),))
        assert shown(mutation, "m1", "$deleted_m1", "m2", "$deleted_m2", "$ttl", "$operation") == [
            (None, None, None, None, 5, 2),
            (None, True, None, True, None, 1),
            ({1: 1}, None, {2: 2}, None, 5, 1),
        ]

    def test_order_inside_one_timestamp(self) -> None:
        rows = (Row((1,), cells(T, 9, v1=1)), Row((2,), cells(v1=2)), Row((3,), cells(v1=3), Marker(T)))
        mutation = Mutation(
            MIXED,
            (0,),
            rows,
            cells(s=0),
            row_deletions=(RowDeletion((7,), T), RowDeletion((4,), T)),
            range_deletions=(RangeDeletion(Bound((5,)), Bound((6,)), T),),
            partition_deletion=PartitionDeletion(T),
        )
        expected = [(1, None), (2, 3), (1, 2), (1, 1), (3, 4), (3, 7), (5, 5), (7, 6), (4, None)]
        assert shown(mutation, "$operation", "ck") == expected
        assert shown(mutation, "$batch_seq_no") == [(number,) for number in range(9)]
        assert shown(mutation, "$end_of_batch") == [(None,)] * 8 + [(True,)]

    def test_update_and_deletion_of_one_row(self) -> None:
        mutation = Mutation(MIXED, (0,), (Row(ROW, cells(v1=666)),), row_deletions=(RowDeletion(ROW, T),))
        assert shown(mutation, "v1", "$operation") == [(666, 1), (None, 3)]


@pytest.mark.parametrize(
    ("start", "end", "empty"),
    [
        (Bound((2,), False), Bound((1,), False), True),  # the documented one
        (Bound((2,)), Bound((2,), False), True),
        (Bound((2,), False), Bound((2,)), True),
        (Bound((2, 7)), Bound((2,), False), True),
        (Bound((2,), False), Bound((2, 7)), True),
        (Bound((2,)), Bound((2,)), False),
        (Bound((2, 7), False), Bound((2,)), False),
        (Bound((2,), False), Bound((3,), False), False),
        (Bound(), Bound((0,), False), False),
    ],
)
def test_degenerate_ranges(start: Bound, end: Bound, empty: bool) -> None:
    deletion = RangeDeletion(start, end, T)
    assert deletion.degenerate == empty
    mutation = Mutation(table("v", clustering=("a", "b")), (0,), range_deletions=(deletion,))
    assert len(log_rows(mutation)) == (0 if empty else 2)
    assert len(split(mutation)) == (0 if empty else 1)


def test_what_no_document_tells() -> None:
    added = Collection("m", elements({1: 1}))
    with pytest.raises(UndocumentedError, match="a row marker"):
        log_rows(insert(MIXED, added))
    with pytest.raises(UndocumentedError, match="a row marker"):
        log_rows(insert(MIXED, Collection("m", elements({1: 1}, T, 5)), ttl=5))
    with pytest.raises(UndocumentedError, match="a row marker"):
        log_rows(insert(MIXED, *cells(T, 5, v1=1), overwritten("m", {1: 1}, T, 5), ttl=5))
    ranges = RangeDeletion(Bound((0,)), Bound((2,)), T), RangeDeletion(Bound((1,)), Bound((3,)), T)
    with pytest.raises(UndocumentedError, match="overlap"):
        Mutation(MIXED, (0,), range_deletions=ranges)


def test_what_is_no_mutation() -> None:
    with pytest.raises(ValueError, match="a tombstone has no TTL"):
        Cell("v1", None, T, 5)
    with pytest.raises(ValueError, match="deleted with its partition"):
        Mutation(table("v", clustering=()), (0,), row_deletions=(RowDeletion((), T),))
    with pytest.raises(ValueError, match="takes no such change"):
        update(MIXED, *cells(s=1))
