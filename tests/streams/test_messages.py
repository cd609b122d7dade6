"""Messages read by fastavro, against the row images they were made from."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringsync
from ringsync.avro.mapping import AvroMappingError, Mapping, without_logical_types
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, TupleType, UserType, arrow_type
from ringsync.images.schema import MERGE, ROW_TIMES, lake_names, row_image_schema
from ringsync.schema.table import Column, ColumnKind, TableSchema
from ringsync.streams.messages import Messages, envelope_schema, key_schema, message_schema, snapshot_messages
from tests.cql.avro_reading import arrow_values
from tests.cql.strategies import cql_types, plain, python_values, serialise
from tests.cql.test_avro import as_multicell, decoded, storable
from tests.oracle import hashable, identity

INT, TEXT, UUID = Native("int"), Native("text"), Native("uuid")
ADDRESS = UserType("shop", "address", ("street", "Zip code"), (TEXT, INT))
ID = "0f0e0d0c-0000-1000-8000-000000000001"
NO_TIMES = {"writetime": None, "expires_at": None, "deleted_at": None, "live": None}


def table_of(*columns: tuple[str, ColumnKind, CqlType]) -> TableSchema:
    return TableSchema("shop", "orders", "0" * 32, tuple(Column(*column) for column in columns))


ORDERS = table_of(
    ("id", "partition_key", UUID),
    ("Line no", "clustering", INT),
    ("customer", "static", TEXT),
    ("address", "regular", ADDRESS),
    ("amount", "regular", Native("decimal")),
    ("notes", "regular", ListType(TEXT)),
    ("placed", "regular", Native("timestamp")),
    ("prices", "regular", MapType(TEXT, Native("varint"))),
    ("stock", "regular", MapType(INT, INT)),
    ("tags", "regular", SetType(UUID)),
)

ORDER: dict[str, Any] = {
    "token": -7,
    "id": ID,
    "Line_no": 3,
    "customer": "Ann",
    "address": {"street": "High Street", "Zip_code": None},
    "amount": "12.50",
    "notes": ["a", "b"],
    "placed": 1_600_000_000_123_000,
    "prices": [("net", "1000")],
    "stock": [(5, 6)],
    "tags": [ID],
    "_row": {**NO_TIMES, "writetime": 1_000_999, "expires_at": 5000},
    "_x": {
        "customer": {"d": -1000, "e": -1},
        "address": {"d": [7, None], "e": None},
        "notes": {"d": [0, 1], "e": [-1, 6000]},
        "prices": {"d": [], "e": []},
    },
}

DOCUMENTED = table_of(
    ("id", "partition_key", UUID),
    ("line", "clustering", INT),
    ("Ship to", "static", TEXT),
    ("amount", "regular", Native("decimal")),
    ("placed", "regular", Native("timestamp")),
    ("tags", "regular", SetType(TEXT)),
)

DOCUMENTED_ROW: dict[str, Any] = {
    "token": -236102846372591546,
    "id": "5b6962dd-3f90-4c93-8f61-eabfa4a803e2",
    "line": 1,
    "Ship_to": "Ann",
    "amount": "12.50",
    "placed": 1_790_845_200_000_000,
    "tags": ["gift", "new"],
    "_row": {**NO_TIMES, "writetime": 1_790_845_200_123_456},
    "_x": {
        "Ship_to": {"d": -86_400_000_000, "e": None},
        "tags": {"d": [0, 60_000_000], "e": [-1, 1_790_931_660]},
    },
}

BARE: dict[str, Any] = {"token": 8, "id": ID, "_row": NO_TIMES}
"""A row of which nothing but its partition key is known."""


def images(table: TableSchema, *rows: dict[str, Any]) -> pa.RecordBatch:
    """Row images of plain Python values; what is not given is null, and ``_x`` says nothing."""
    schema = row_image_schema(table)
    nothing = {field.name: {"raw": None} for field in schema.field("_x").type}
    whole = [{**row, "_x": {**nothing, **row.get("_x", {})}} for row in rows]
    return pa.RecordBatch.from_pylist(whole, schema=schema)


def messages_of(table: TableSchema, batch: pa.RecordBatch, mapping: Mapping = "exact", **other: Any) -> Messages:
    arguments = {"hostname": "node1", "processed_at_ms": 42, "schema_version": 3, **other}
    return snapshot_messages(batch, table, "demo", mapping, **arguments)


def read(schema: Any, data: pa.Array) -> list[Any]:
    parsed = fastavro.parse_schema(without_logical_types(schema))
    found = []
    for one in data.to_pylist():
        stream = io.BytesIO(one)
        found.append(fastavro.schemaless_reader(stream, parsed))
        assert stream.read() == b""
    return found


def cell(writetime: int | None, expires_at: int | None, raw: bytes | None = None) -> dict[str, Any]:
    return {"writetime": writetime, "expires_at": expires_at, "deleted_at": None, "raw": raw}


def element(identity: Any, writetime: int, expires_at: int | None) -> dict[str, Any]:
    times = {"writetime": writetime, "expires_at": expires_at, "deleted_at": None}
    return {"identity": identity, **times, "raw": None}


def collection(*elements: dict[str, Any], raw: bytes | None = None, known: bool = True) -> dict[str, Any]:
    return {"deleted_at": None, "raw": raw, "elements": list(elements) if known else None}


def test_a_whole_message() -> None:
    messages = messages_of(ORDERS, images(ORDERS, BARE, ORDER)[1:])
    assert read(key_schema(ORDERS, "demo", "exact"), messages.keys) == [{"id": ID, "Line_no": 3, "_x": None}]
    (value,) = read(envelope_schema(ORDERS, "demo", "exact"), messages.values)
    assert value == {
        "op": "r",
        "source": {
            "version": ringsync.__version__,
            "hostname": "node1",
            "file": None,
            "pos": None,
            "ts_ms": 1001,
            "snapshot": True,
            "query": None,
            "ts_us": 1_001_006,
            "token": -7,
            "schema_version": 3,
            "event_id": messages.event_ids[0].as_py().hex(),
            "late": False,
            "table_id": ORDERS.table_id,
        },
        "ts_ms": 42,
        "range": None,
        "before": None,
        "after": {
            "id": ID,
            "Line_no": 3,
            "customer": "Ann",
            "address": {"street": "High Street", "Zip_code": None},
            "amount": b"\x04\x04\xe2\x04",
            "notes": ["a", "b"],
            "placed": 1_600_000_000_123,
            "prices": {"net": b"\x04\x03\xe8\x00"},
            "stock": [{"key": 5, "value": 6}],
            "tags": [ID],
        },
        "cells": {
            "_row": None,
            "id": None,
            "Line_no": None,
            "customer": cell(999_999, None),
            "address": collection(element("street", 1_001_006, 5000)),
            "amount": cell(1_000_999, 5000),
            "notes": collection(element(None, 1_000_999, None), element(None, 1_001_000, 6000)),
            "placed": cell(1_000_999, 5000),
            "prices": collection(known=False),
            "stock": collection(element(5, 1_000_999, 5000)),
            "tags": collection(element(ID, 1_000_999, 5000)),
        },
    }


def test_the_message_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "messages.md").read_text()
    documented = json.loads(text.split("```json")[1].split("```")[0])
    times = {"processed_at_ms": 1_790_845_301_000, "schema_version": 1, "hostname": "10.0.0.7"}
    table = replace(DOCUMENTED, table_id="7c2fd0e05c9211f08de9f3bd2ad0d1ff")
    messages = messages_of(table, images(table, DOCUMENTED_ROW), **times)
    (key,) = read(key_schema(DOCUMENTED, "demo", "exact"), messages.keys)
    (value,) = read(envelope_schema(DOCUMENTED, "demo", "exact"), messages.values)
    assert json.loads(json.dumps({"key": key, "value": value}, default=lambda data: f"0x{data.hex()}")) == documented


def test_a_row_without_cells() -> None:
    """Also what a partition with only static cells looks like: clustering is null."""
    messages = messages_of(ORDERS, images(ORDERS, BARE))
    (value,) = read(envelope_schema(ORDERS, "demo", "exact"), messages.values)
    assert read(key_schema(ORDERS, "demo", "exact"), messages.keys) == [{"id": ID, "Line_no": None, "_x": None}]
    assert (value["source"]["ts_us"], value["source"]["ts_ms"]) == (None, None)
    assert [value["after"].pop("id"), *set(value["after"].values())] == [ID, None]
    assert set(value["cells"].values()) == {None}


def test_times_of_the_row_itself_where_they_are_known() -> None:
    row = {**BARE, "_row": {**NO_TIMES, "live": -5, "deleted_at": -9}}
    (value,) = read(envelope_schema(ORDERS, "demo", "exact"), messages_of(ORDERS, images(ORDERS, row)).values)
    assert value["cells"]["_row"] == {"writetime": -5, "expires_at": None, "deleted_at": -9}
    assert (value["source"]["ts_us"], value["source"]["ts_ms"]) == (-5, -1)


def test_misfits_carry_cassandra_s_bytes() -> None:
    x = {
        "id": {"raw": b""},
        "amount": {"d": 1, "e": None, "raw": b"\0\0"},
        "tags": {"d": [], "e": [], "raw": b"set"},
    }
    row = {"token": 1, "_row": {**NO_TIMES, "writetime": 10}, "_x": x}
    messages = messages_of(ORDERS, images(ORDERS, row, ORDER))
    key = {"id": None, "Line_no": None, "_x": {"id": b"", "Line_no": None}}
    assert read(key_schema(ORDERS, "demo", "exact"), messages.keys)[0] == key
    cells = read(envelope_schema(ORDERS, "demo", "exact"), messages.values)[0]["cells"]
    assert cells["id"] == {"raw": b""}
    assert cells["amount"] == cell(11, None, raw=b"\0\0")
    assert cells["tags"] == collection(raw=b"set", known=False)


SPELLED = table_of(
    ("p", "partition_key", Native("decimal")),
    ("c", "clustering", Native("decimal")),
    ("t", "clustering", TupleType((Native("decimal"), TEXT))),
    ("m", "regular", MapType(Native("decimal"), INT)),
    ("s", "regular", SetType(Native("decimal"))),
)


def spelled(*texts: str) -> dict[str, Any]:
    p, c, inner, element = texts
    times = {**NO_TIMES, "writetime": 5}
    return {
        "token": 1,
        "p": p,
        "c": c,
        "t": {"field_1": inner, "field_2": "x"},
        "m": [(element, 7)],
        "s": [element],
        "_row": times,
    }


def number(unscaled: int, scale: int) -> bytes:
    """A big-decimal."""
    size = unscaled.bit_length() // 8 + 1
    zigzag = scale << 1 ^ scale >> 31
    return bytes([2 * size]) + unscaled.to_bytes(size, "big", signed=True) + bytes([zigzag])


def test_a_row_has_one_key_and_an_element_one_identity_whatever_their_spelling() -> None:
    """``after`` keeps the spelling. Partition keys are what they are: 1.0 and 1.00 are two."""
    batch = images(SPELLED, spelled("1.0", "2.0", "30", "4.0"), spelled("1.00", "2.00", "30.0", "4"))
    messages = messages_of(SPELLED, batch)
    keys = read(key_schema(SPELLED, "demo", "exact"), messages.keys)
    canonical = {"c": number(2, 0), "t": {"field_1": number(3, -1), "field_2": "x"}, "_x": None}
    assert keys == [{"p": number(10, 1), **canonical}, {"p": number(100, 2), **canonical}]
    first, second = read(envelope_schema(SPELLED, "demo", "exact"), messages.values)
    assert [value["after"]["c"] for value in (first, second)] == [number(20, 1), number(200, 2)]
    assert [value["after"]["s"] for value in (first, second)] == [[number(40, 1)], [number(4, 0)]]
    assert first["after"]["m"] == [{"key": number(40, 1), "value": 7}]
    for value in (first, second):
        for name in ("m", "s"):
            assert value["cells"][name] == collection(element(number(4, 0), 5, None))


def test_event_ids_are_of_the_content() -> None:
    def ids(*rows: dict[str, Any], **other: Any) -> list[bytes]:
        found: list[bytes] = messages_of(ORDERS, images(ORDERS, *rows), **other).event_ids.to_pylist()
        return found

    (id_,) = ids(ORDER)
    assert len(id_) == 16
    assert ids(BARE, ORDER, hostname="node2", processed_at_ms=43, schema_version=4)[1] == id_
    changed = [
        {**ORDER, "Line_no": 4},
        {**ORDER, "amount": "12.5"},
        {**ORDER, "_row": {**ORDER["_row"], "writetime": 1_001_000}},
        {**ORDER, "_row": {**ORDER["_row"], "expires_at": None}},
    ]
    assert len({id_, *ids(*changed)}) == 5


@pytest.mark.parametrize("mapping", ["exact", "classic"])
def test_names_are_valid_and_unique(mapping: Mapping) -> None:
    inner = replace(ADDRESS, frozen=True)
    pair = TupleType((inner, TupleType((inner,)), ListType(inner, True)))
    kinds: list[CqlType] = [ADDRESS, inner, pair, MapType(inner, pair), SetType(pair), Native("duration"), INT]
    names = ["a", "A", "token", "_row", "_x", "_cells", "Odd name", "Odd_name", "1st", "writetime", "element", "Cell"]
    table = TableSchema(
        "1 shop",
        "Odd-table",
        "0" * 32,
        (
            Column("key", "partition_key", inner),
            Column("Key", "clustering", pair),
            *(Column(f"{name}{i}" if i else name, "regular", k) for i, k in enumerate(kinds) for name in names),
        ),
    )
    key, value = key_schema(table, "my-server.eu", mapping), envelope_schema(table, "my-server.eu", mapping)
    parsed: Any = fastavro.parse_schema(json.loads(json.dumps(message_schema(key, value))))
    assert parsed["name"] == "my_server.eu._1_shop.Odd_table.Message"
    row = next(field for field in value["fields"] if field["name"] == "before")["type"][1]
    assert {field.get("cql", field["name"]): field["name"] for field in row["fields"]} == lake_names(table)


def test_messages_from_before_there_was_before_are_read_with_today_s_schema() -> None:
    """Compatibility BACKWARD: what is in streams and registries since versions without the field."""
    today = envelope_schema(ORDERS, "demo", "exact")
    types = {field["name"]: field["type"] for field in today["fields"]}
    then = {**today, "fields": [dict(field) for field in today["fields"] if field["name"] != "before"]}
    next(field for field in then["fields"] if field["name"] == "after")["type"] = types["before"]
    (datum,) = messages_of(ORDERS, images(ORDERS, ORDER)).values.to_pylist()
    (value,) = read(today, pa.array([datum]))
    sink = io.BytesIO()
    old, new = (fastavro.parse_schema(without_logical_types(schema)) for schema in (then, today))
    fastavro.schemaless_writer(sink, old, {name: one for name, one in value.items() if name != "before"})
    assert len(sink.getvalue()) == len(datum) - 1
    assert fastavro.schemaless_reader(io.BytesIO(sink.getvalue()), old, new) == value


def test_a_server_s_name_must_have_parts() -> None:
    with pytest.raises(ValueError, match=r"server name 'a\.\.b'"):
        key_schema(ORDERS, "a..b", "exact")


def test_classic_errors_name_the_column() -> None:
    table = table_of(("id", "partition_key", INT), ("Big one", "regular", Native("varint")))
    batch = images(table, {"token": 1, "id": 1, "Big_one": str(2**63), "_row": {**NO_TIMES, "writetime": 1}})
    with pytest.raises(AvroMappingError, match=r"shop.orders, column 'Big one': the varint 9223372036854775808"):
        messages_of(table, batch, "classic")


def test_no_rows_no_messages() -> None:
    messages = messages_of(ORDERS, images(ORDERS, ORDER)[:0])
    assert (len(messages.keys), len(messages.values), len(messages.event_ids)) == (0, 0, 0)


micros = st.integers(-(2**50), 2**50)
seconds = st.integers(0, 2**40)


@st.composite
def random_images(draw: st.DrawFn) -> tuple[TableSchema, pa.RecordBatch]:
    """Row images of random columns, values and times; every difference form of ``_x`` occurs."""
    kinds = [INT, *draw(st.lists(st.tuples(cql_types(1), st.booleans()), min_size=1, max_size=3))]
    types = [kind if isinstance(kind, Native) else as_multicell(kind[0]) if kind[1] else kind[0] for kind in kinds]
    table = table_of(*((f"c{i}", "regular" if i else "partition_key", kind) for i, kind in enumerate(types)))
    return table, draw(images_of(table))


@st.composite
def images_of(draw: st.DrawFn, table: TableSchema) -> pa.RecordBatch:
    """Row images of a table with random values and times."""
    count = draw(st.integers(1, 3))
    arrays, differences = [], {}
    for column in table.columns:
        value = python_values(column.type, missing_tails=False)
        drawn = [storable(column.type, draw(value if column.is_key else st.none() | value)) for _ in range(count)]
        if column.is_multicell:
            drawn = [one if one and any(part is not None for part in one) else None for one in drawn]
        arrays.append(decoded(column.type, [None if one is None else serialise(column.type, one) for one in drawn]))
        differences[column.name] = [draw(cell_differences(column, one)) for one in drawn]
    times = st.fixed_dictionaries({"writetime": micros, "expires_at": st.none() | seconds})
    row = pa.array([{**NO_TIMES, **draw(times)} for _ in range(count)], ROW_TIMES)
    schema = row_image_schema(table)
    x = [dict(zip(differences, each, strict=True)) for each in zip(*differences.values(), strict=True)]
    token = pa.array(range(count), pa.int64())
    merge = pa.nulls(count, MERGE)
    arrays = [token, *arrays, row, pa.array(x, schema.field("_x").type), merge]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def cell_differences(column: Column, value: Any) -> st.SearchStrategy[dict[str, Any]]:
    if column.is_key or value is None:
        return st.just({"raw": None})
    d, e = micros, st.just(-1) | seconds
    if not column.is_multicell:
        return st.fixed_dictionaries({"d": st.none() | d, "e": st.none() | e})
    slots = [part is not None for part in value]
    d, e = (st.none() | st.tuples(*(one if is_set else st.none() for is_set in slots)).map(list) for one in (d, e))
    return st.one_of(st.fixed_dictionaries({"d": d, "e": e}), st.just({"d": [], "e": []}))


@settings(max_examples=100, deadline=None)
@given(random_images())
def test_messages_say_what_the_row_images_say(drawn: tuple[TableSchema, pa.RecordBatch]) -> None:
    table, batch = drawn
    values = read(envelope_schema(table, "demo", "exact"), messages_of(table, batch).values)
    rows = batch.select(["_row", "_x"]).to_pylist()
    for column in table.columns:
        source = batch.column(column.name)
        assert plain(arrow_values(column.type, [value["after"][column.name] for value in values])) == plain(source)
        if column.is_key:
            continue
        for value, row, before in zip(values, rows, plain(source), strict=True):
            check_cell(column, value["cells"][column.name], before, row["_row"], row["_x"][column.name])
    for value in values:
        times = [time for one in value["cells"].values() for time in writetimes(one)]
        if None not in times:
            assert value["source"]["ts_us"] == max(times, default=None)


def check_cell(column: Column, found: Any, value: Any, row: dict[str, Any], x: dict[str, Any]) -> None:
    """Compare one cell with what the docstring of images/schema.py says of ``_row`` and ``_x``."""

    def times(d: int | None, e: int | None) -> tuple[int, int | None]:
        return row["writetime"] + (d or 0), row["expires_at"] if e is None else None if e == -1 else e

    if value is None:
        assert found is None
    elif not column.is_multicell:
        assert found == cell(*times(x["d"], x["e"]))
    elif x["d"] == []:
        assert found == collection(known=False)
    else:
        d, e = (one or [None] * len(value) for one in (x["d"], x["e"]))
        slots = zip(identities(column.type, value), value, d, e, strict=True)
        expected = [(name, *times(d, e)) for name, part, d, e in slots if part is not None]
        elements = found["elements"]
        read_back = [one["identity"] for one in elements]
        if isinstance(column.type, SetType | MapType):
            kind = column.type.element if isinstance(column.type, SetType) else column.type.key
            # Whatever the row's spelling, the message has one.
            read_back = [hashable(one) for one in plain(arrow_values(kind, read_back))]
            expected = [(identity(kind, name), *times) for name, *times in expected]
        got = [(name, one["writetime"], one["expires_at"]) for name, one in zip(read_back, elements, strict=True)]
        assert got == expected


def identities(cql_type: CqlType, value: Any) -> list[Any]:
    match cql_type:
        case SetType():
            return list(value)
        case MapType():
            return [key for key, _ in value]
        case UserType():
            return [field.name for field in arrow_type(cql_type)]
    return [None] * len(value)


def writetimes(found: Any) -> list[int | None]:
    """Writetimes that a cell of a message tells; None where it does not know."""
    if found is None or "writetime" in found:
        return [found["writetime"]] if found else []
    return [None] if found["elements"] is None else [one["writetime"] for one in found["elements"]]
