"""Tests of row images from pages, against a model in plain Python that keeps each cell's absolute times."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cql.types import ListType, MapType, Native, SetType, UserType
from ringsync.images.from_pages import ResultColumn, row_images
from ringsync.images.schema import row_image_schema
from ringsync.images.times import UnrepresentableValueError, cell_times
from ringsync.schema.table import Column, TableSchema
from tests.cql.strategies import serialise
from tests.formats.test_result_page import page

NOW = 1_800_000_000
INT, TEXT, BIGINT = Native("int"), Native("text"), Native("bigint")
ADDRESS = UserType("shop", "address", ("street", "zip"), (TEXT, INT))
TABLE = TableSchema(
    "shop",
    "orders",
    "0" * 32,
    (
        Column("id", "partition_key", INT),
        Column("Line no", "clustering", TEXT),
        Column("place", "static", TEXT),
        Column("amount", "regular", INT),
        Column("items", "regular", ListType(INT)),
        Column("limits", "regular", MapType(TEXT, INT)),
        Column("tags", "regular", SetType(TEXT)),
        Column("ship_to", "regular", ADDRESS),
    ),
)
MULTICELL = ("items", "limits", "tags", "ship_to")
Times = tuple[int, int | None]
"""Writetime in µs, expiry in s or None."""


@dataclass(frozen=True)
class Cell:
    """A column's value in one row: its bytes, and the times of its cell or (multi-cell) of its elements."""

    raw: bytes
    times: Any


def layout(lacking: str | None = None, times: bool = True) -> list[ResultColumn]:
    """The select list of a scan, without times for one column or for all."""
    found = [ResultColumn("token", None)]
    for column in TABLE.columns:
        found.append(ResultColumn("value", column.name))
        if times and not column.is_key and column.name != lacking:
            found += [ResultColumn("writetime", column.name), ResultColumn("ttl", column.name)]
    return found


def body(rows: list[dict[str, Cell | None]], select: list[ResultColumn]) -> bytes:
    return page(*[[cell_bytes(entry, row, number) for entry in select] for number, row in enumerate(rows)])


def cell_bytes(entry: ResultColumn, row: dict[str, Cell | None], number: int) -> bytes | None:
    if entry.column is None:
        moment = row.get(entry.role)
        return struct.pack(">q", number) if moment is None else moment.raw
    cell = row.get(entry.column)
    if cell is None:
        return None
    if entry.role == "value":
        return cell.raw
    if entry.column in MULTICELL:
        kind = ListType(BIGINT if entry.role == "writetime" else INT)
        return serialise(kind, [one and time_value(entry.role, one) for one in cell.times])
    value = time_value(entry.role, cell.times)
    return None if value is None else struct.pack(">q" if entry.role == "writetime" else ">i", value)


def time_value(role: str, times: Times) -> int | None:
    return times[0] if role == "writetime" else times[1] and times[1] - NOW


def images(rows: list[dict[str, Cell | None]], misfits: Any = "error", lacking: str | None = None) -> pa.RecordBatch:
    select = layout(lacking)
    found = row_images([body(rows, select)], TABLE, select, NOW, misfits)
    found.validate(full=True)
    assert found.schema.equals(row_image_schema(TABLE))
    return found


A, B, C = (1000, None), (1000, NOW + 60), (2000, None)
cell_times_strategy = st.sampled_from([A, A, A, B, C, (-(2**63), None), (2**63 - 1, NOW + 1)])


def key(number: int) -> dict[str, Cell | None]:
    return {"id": Cell(struct.pack(">i", number), None), "Line no": Cell(b"x", None)}


@st.composite
def table_rows(draw: st.DrawFn) -> dict[str, Cell | None]:
    pool = st.just(draw(cell_times_strategy)) if draw(st.booleans()) else cell_times_strategy
    row = key(draw(st.integers(-5, 5)))

    def cell(column: str, raw: bytes, count: int | None = None) -> None:
        if draw(st.booleans()):
            row[column] = Cell(raw, draw(pool) if count is None else [draw(pool) for _ in range(count)])

    cell("place", b"here")
    cell("amount", draw(st.sampled_from([b"\0\0\0\x07", b"\0\0\0\x08", b""])))
    count = draw(st.integers(1, 3))
    cell("items", serialise(ListType(INT), list(range(count))), count)
    cell("limits", serialise(MapType(TEXT, INT), [(str(i), i) for i in range(count)]), count)
    cell("tags", serialise(SetType(TEXT), draw(st.sampled_from([["a"], ["b"]]))), 1)
    street, zip_code = draw(st.sampled_from([("s", None), (None, 1), ("s", 1)]))
    if draw(st.booleans()):
        row["ship_to"] = Cell(
            serialise(ADDRESS, [street, zip_code]), [None if v is None else draw(pool) for v in (street, zip_code)]
        )
    return row


def all_times(row: dict[str, Cell | None], lacking: str | None) -> list[Times]:
    """Return the times of all cells of a row."""
    found: list[Times] = []
    for column, cell in row.items():
        if cell is not None and cell.times is not None and column != lacking:
            found += [one for one in cell.times if one] if column in MULTICELL else [cell.times]
    return found


def commonest(times: list[Times]) -> Times | None:
    counts = Counter(times)
    return max(counts, key=lambda one: (counts[one], one[0], one[1] or -1), default=None)


@settings(max_examples=200, deadline=None)
@given(st.lists(table_rows(), max_size=8), st.sampled_from([None, None, "items", "ship_to"]))
def test_every_cells_times_come_back_and_rows_hold_the_commonest(rows: list[Any], lacking: str | None) -> None:
    batch = images(rows, "raw", lacking)
    for number, row in enumerate(rows):
        common = commonest(all_times(row, lacking))
        assert batch["_row"][number].as_py() == {
            "writetime": common and common[0],
            "expires_at": common and common[1],
            "deleted_at": None,
            "live": None,
        }
    for column in TABLE.value_columns:
        for part, got in enumerate(cell_times(batch, TABLE, column.name)):
            assert got.to_pylist() == [model_times(row.get(column.name), column, part, lacking) for row in rows]
    half = batch.slice(len(rows) // 2)
    for column in TABLE.value_columns:
        whole, part = cell_times(batch, TABLE, column.name), cell_times(half, TABLE, column.name)
        assert [one.to_pylist()[len(rows) // 2 :] for one in whole] == [one.to_pylist() for one in part]


def model_times(cell: Cell | None, column: Column, part: int, lacking: str | None) -> Any:
    if cell is None:
        return None
    if not column.is_multicell:
        return cell.times[part]
    return [] if column.name == lacking else [one and one[part] for one in cell.times]


@settings(max_examples=100, deadline=None)
@given(table_rows(), table_rows())
def test_a_rows_image_does_not_depend_on_its_neighbours(one: Any, other: Any) -> None:
    alone = images([one], "raw")
    assert (
        alone.drop_columns(["token"]).to_pylist() == images([other, one], "raw").drop_columns(["token"]).to_pylist()[1:]
    )


def row(**cells: Cell | None) -> dict[str, Cell | None]:
    return {**key(1), **cells}


def test_rows_written_at_once_have_no_differences() -> None:
    rows = [
        row(amount=Cell(b"\0\0\0\x07", B), place=Cell(b"p", B), items=Cell(serialise(ListType(INT), [1, 2]), [B, B])),
        row(),
    ]
    batch = images(rows)
    assert batch["_x"].null_count == 2
    assert batch["_row"].to_pylist()[0] == {
        "writetime": 1000,
        "expires_at": NOW + 60,
        "deleted_at": None,
        "live": None,
    }
    assert set(batch["_row"].to_pylist()[1].values()) == {None}
    assert batch["items"].to_pylist() == [[1, 2], None]
    assert batch["token"].to_pylist() == [0, 1]


def test_differences_are_kept_by_cell_and_by_element() -> None:
    later, forever = (1500, NOW + 60), (1000, None)
    rows = [
        row(
            place=Cell(b"p", later),
            amount=Cell(b"\0\0\0\x07", forever),
            items=Cell(serialise(ListType(INT), [1, 2, 3]), [B, later, forever]),
            limits=Cell(serialise(MapType(TEXT, INT), [("a", 1), ("b", 2), ("c", 3)]), [B, B, B]),
            ship_to=Cell(serialise(ADDRESS, [None, 5]), [None, later]),
        )
    ]
    (x,) = images(rows)["_x"].to_pylist()
    assert x["place"] == {"d": 500, "e": None, "raw": None}
    assert x["amount"] == {"d": None, "e": -1, "raw": None}
    assert x["items"] == {"d": [0, 500, 0], "e": [NOW + 60, NOW + 60, -1], "raw": None}
    assert x["limits"] is None
    assert x["ship_to"] == {"d": [None, 500], "e": None, "raw": None}
    assert x["id"] is None


def test_times_that_the_server_cannot_tell_are_unknown_not_equal() -> None:
    rows = [row(amount=Cell(b"\0\0\0\x07", A), items=Cell(serialise(ListType(INT), [1, 2]), [A, A])), row()]
    batch = images(rows, lacking="items")
    assert batch["_x"].to_pylist()[0]["items"] == {"d": [], "e": [], "raw": None}
    assert batch["_x"].to_pylist()[1] is None
    assert [one.to_pylist() for one in cell_times(batch, TABLE, "items")] == [[[], None], [[], None]]


def test_the_servers_time_counts_for_ttls_if_it_is_selected() -> None:
    select = [layout()[0], ResultColumn("now", None), *layout()[1:]]
    bodies = [
        body([row(amount=Cell(b"\0\0\0\x07", B), now=Cell(struct.pack(">q", (NOW + later) * 1000 + 999), A))], select)
        for later in (5, 9)
    ]
    batch = row_images(bodies, TABLE, select, NOW - 10**6, "error")
    assert batch["_row"].field("expires_at").to_pylist() == [NOW + 60 + later for later in (5, 9)]


def test_a_scan_without_times() -> None:
    select = layout(times=False)
    rows = [row(amount=Cell(b"\0\0\0\x07", A), items=Cell(serialise(ListType(INT), [1]), [A]))]
    batch = row_images([body(rows, select)], TABLE, select, NOW, "error")
    assert batch["_row"].null_count == batch["_x"].null_count == 1
    assert [one.to_pylist() for one in cell_times(batch, TABLE, "amount")] == [[None], [None]]
    assert [one.to_pylist() for one in cell_times(batch, TABLE, "items")] == [[[]], [[]]]


def test_a_misfit_keeps_its_bytes_and_its_times() -> None:
    rows = [
        {
            "id": Cell(b"", None),
            "Line no": None,
            "amount": Cell(b"", A),
            "tags": Cell(b"\0\0\0\x01\0\0\0\x01\xff", [A]),
        },
        row(amount=Cell(b"\0\0\0\x07", A)),
    ]
    batch = images(rows, "raw")
    first, second = batch["_x"].to_pylist()
    assert (first["id"], first["amount"]) == ({"raw": b""}, {"d": None, "e": None, "raw": b""})
    assert first["tags"] == {"d": [0], "e": [-1], "raw": b"\0\0\0\x01\0\0\0\x01\xff"}
    assert second is None
    assert batch["amount"].to_pylist() == [None, 7]
    assert [one.to_pylist() for one in cell_times(batch, TABLE, "amount")] == [[1000, 1000], [None, None]]
    assert [one.to_pylist() for one in cell_times(batch, TABLE, "tags")] == [[[1000], None], [[None], None]]


def test_the_error_names_the_cell_and_the_remedy() -> None:
    rows = [row(amount=Cell(b"\0\0\0\x07", A)), {**key(42), "amount": Cell(b"", A)}]
    with pytest.raises(UnrepresentableValueError) as caught:
        images(rows)
    message = str(caught.value)
    assert message.startswith(
        "table shop.orders, column amount, row id = 42, Line no = x: 0x is an empty value of type"
    )
    assert "set replica.unrepresentable_values: raw in the configuration to keep such values" in message
    assert message.endswith("as bytes in _x.amount.raw")
    long = {**key(42), "place": Cell(b"\xff" * 100, A)}
    with pytest.raises(UnrepresentableValueError, match=rf"0x{'ff' * 64}… \(100 bytes\) is a text that is not valid"):
        images([long])


def test_a_layout_that_lacks_something_is_refused() -> None:
    for lacking, message in (("token", "token"), ("value", "value of amount"), ("writetime", "writetime of amount")):
        select = [e for e in layout() if e.role != lacking or e.column not in (None, "amount")]
        with pytest.raises(ValueError, match=f"the scan of shop.orders does not select: {message}"):
            row_images([body([], select)], TABLE, select, NOW, "error")


def test_lists_of_times_that_do_not_fit_together_are_refused() -> None:
    select = layout()
    good = body([row(items=Cell(serialise(ListType(INT), [1]), [B]))], select)
    ttl = struct.pack(">iiii", 12, 1, 4, 60)
    assert good.count(ttl) == 1
    bad = good.replace(ttl, struct.pack(">iiiii", 16, 2, 4, 60, -1))
    with pytest.raises(ValueError, match="different numbers of elements"):
        row_images([bad], TABLE, select, NOW, "error")


def test_a_row_of_many_cells_with_many_times() -> None:
    times = [(1000 + i % 5000, None) for i in range(20_000)] + [(7, None)] * 5
    batch = images([row(items=Cell(serialise(ListType(INT), [1] * len(times)), times))])
    assert batch["_row"].to_pylist()[0]["writetime"] == 7
    assert cell_times(batch, TABLE, "items")[0].to_pylist() == [[one[0] for one in times]]
