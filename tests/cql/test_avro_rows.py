"""Tests of the compiled Avro encoder against fastavro, byte by byte, on random schemas and values."""

import io
from itertools import count
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.avro.rows import encode_rows

SCALARS: list[tuple[Any, pa.DataType, st.SearchStrategy[Any]]] = [
    ("boolean", pa.bool_(), st.booleans()),
    ("int", pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    ("int", pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    ("long", pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    ("long", pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    ("float", pa.float32(), st.floats(width=32)),
    ("double", pa.float64(), st.floats()),
    ("string", pa.string(), st.text(st.characters(exclude_categories=["Cs"]), max_size=40)),
    ("bytes", pa.large_binary(), st.binary(max_size=40)),
    ({"type": "int", "logicalType": "date"}, pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    ({"type": "long", "logicalType": "timestamp-micros"}, pa.timestamp("us", "UTC"), st.integers(-(2**62), 2**62)),
]


@st.composite
def schemas(draw: st.DrawFn, depth: int, names: Any) -> tuple[Any, pa.DataType, st.SearchStrategy[Any]]:
    """An Avro schema, its Arrow type, and values for both fastavro and pyarrow."""
    kind = draw(st.sampled_from(["scalar", "scalar", "fixed", "record", "array", "map"][: 6 if depth else 3]))
    if kind == "scalar":
        schema, arrow, values = draw(st.sampled_from(SCALARS))
    elif kind == "fixed":
        size = draw(st.integers(1, 20))
        schema = {"type": "fixed", "name": f"n{next(names)}", "size": size}
        arrow = draw(st.sampled_from([pa.binary(), pa.binary(size)]))
        values = st.binary(min_size=size, max_size=size)
    elif kind == "record":
        schema, arrow, values = draw(records(depth - 1, names))
    else:
        inner_schema, inner_arrow, inner_values = draw(schemas(depth - 1, names))
        if kind == "array":
            schema, arrow = {"type": "array", "items": inner_schema}, pa.list_(inner_arrow)
            values = st.lists(inner_values, max_size=4)
        else:
            schema, arrow = {"type": "map", "values": inner_schema}, pa.map_(pa.string(), inner_arrow)
            values = st.dictionaries(st.text("abé", max_size=20), inner_values, max_size=3)
    if draw(st.booleans()):
        schema, values = draw(st.sampled_from([["null", schema], [schema, "null"]])), st.none() | values
    return schema, arrow, values


@st.composite
def records(draw: st.DrawFn, depth: int, names: Any) -> tuple[Any, pa.DataType, st.SearchStrategy[Any]]:
    fields = {f"f{index}": draw(schemas(depth, names)) for index in range(draw(st.integers(1, 4)))}
    schema = {
        "type": "record",
        "name": f"n{next(names)}",
        "fields": [{"name": name, "type": field[0]} for name, field in fields.items()],
    }
    arrow = pa.struct([(name, field[1]) for name, field in fields.items()])
    return schema, arrow, st.fixed_dictionaries({name: field[2] for name, field in fields.items()})


def arrow_value(value: Any, arrow: pa.DataType) -> Any:
    """Turn maps into pairs for pyarrow."""
    if value is None:
        return None
    if pa.types.is_map(arrow):
        return [(key, arrow_value(item, arrow.item_type)) for key, item in value.items()]
    if pa.types.is_list(arrow):
        return [arrow_value(item, arrow.value_type) for item in value]
    if pa.types.is_struct(arrow):
        return {field.name: arrow_value(value[field.name], field.type) for field in arrow}
    return value


def expected(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, schema, value)
    return stream.getvalue()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rows_are_what_fastavro_writes(data: st.DataObject) -> None:
    plain, arrow, values = data.draw(records(3, count()))
    schema = fastavro.parse_schema(plain)
    rows = data.draw(st.lists(values, max_size=9))
    array = pa.array([arrow_value(row, arrow) for row in rows], arrow)
    first = data.draw(st.integers(0, len(rows)))
    sliced = array[first:]
    assert encode_rows(schema, sliced).to_pylist() == [expected(schema, row) for row in rows[first:]]
    assert encode_rows(plain, array[:first]).to_pylist() == [expected(schema, row) for row in rows[:first]]


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "row", "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}


def test_a_long_row_is_copied_exactly() -> None:
    texts = [bytes([65 + length % 26]) * length for length in range(70)] * 3
    array = pa.StructArray.from_arrays([pa.array(texts), pa.array(range(len(texts)))], ["a", "b"])
    schema = record(a=["null", "bytes"], b="long")
    assert encode_rows(schema, array).to_pylist() == [expected(schema, row) for row in array.to_pylist()]


def test_values_hidden_under_a_null_are_not_written() -> None:
    hidden = pa.StructArray.from_arrays(
        [pa.array(["x", None, "z"]), pa.ListArray.from_arrays([0, 2, 3, 4], pa.array([1, 2, None, 4]))],
        ["text", "numbers"],
        mask=pa.array([False, True, False]),
    )
    array = pa.StructArray.from_arrays([hidden], ["inner"])
    inner = {
        "type": "record",
        "name": "inner",
        "fields": record(text="string", numbers={"type": "array", "items": "int"})["fields"],
    }
    schema = record(inner=["null", inner])
    assert encode_rows(schema, array).to_pylist() == [expected(schema, row) for row in array.to_pylist()]


def test_garbage_in_a_null_list_row_is_skipped() -> None:
    numbers = pa.ListArray.from_arrays([0, 1, 3], pa.array([1, None, 3]), mask=pa.array([False, True]))
    schema = record(numbers=["null", {"type": "array", "items": "int"}])
    encoded = encode_rows(schema, pa.StructArray.from_arrays([numbers], ["numbers"]))
    assert encoded.to_pylist() == [expected(schema, {"numbers": [1]}), expected(schema, {"numbers": None})]


def test_milliseconds_are_rounded_down() -> None:
    array = pa.StructArray.from_arrays([pa.array([-1, 1999, None], pa.timestamp("us", "UTC"))], ["at"])
    schema = record(at=["null", {"type": "long", "logicalType": "timestamp-millis"}])
    assert encode_rows(schema, array).to_pylist() == [expected(schema, {"at": at}) for at in (-1, 1, None)]


def test_types_as_other_engines_give_them() -> None:
    schema = record(
        a={"type": "array", "items": "string"},
        b="string",
        c=["null", "string"],
        d={"type": "fixed", "name": "id", "size": 2},
    )
    columns = [
        pa.array([["x", "yy"], []], pa.large_list(pa.string_view())),
        pa.array(["p", "q"]).dictionary_encode(),
        pa.nulls(2),
        pa.array(["ab", "cd"], pa.large_string()),
    ]
    array = pa.StructArray.from_arrays(columns, list("abcd"))
    rows = [{**row, "d": row["d"].encode()} for row in array.to_pylist()]
    assert encode_rows(schema, array).to_pylist() == [expected(schema, row) for row in rows]


@pytest.mark.parametrize(
    ("schema", "array", "message"),
    [
        (record(a="int"), pa.array([{"a": 1}, {"a": None}]), r"row\.a: the value of entry 1 is null"),
        (
            record(a={"type": "array", "items": record(b="string")}),
            pa.array([{"a": [{"b": None}]}], pa.struct([("a", pa.list_(pa.struct([("b", pa.string())])))])),
            r"row\.a\[\]\.b: the value of entry 0 is null",
        ),
        (record(a="int"), pa.array([None], pa.struct([("a", pa.int32())])), "row: the value of entry 0 is null"),
        (record(a="int"), pa.array([{"a": 2**31}]), r"row\.a: Arrow type int64 as Avro int: .*2147483648"),
        (record(a="int", b="int"), pa.array([{"a": 1}]), r"row\.b: the struct has no field of this name"),
        (record(a={"type": "fixed", "name": "f", "size": 3}), pa.array([{"a": b"ab"}]), r"row\.a: "),
        (record(a=["int", "string"]), pa.array([{"a": 1}]), r"row\.a: the union"),
        (record(a={"type": "map", "values": "int"}), pa.array([{"a": [1]}]), r"row\.a: Arrow type list"),
        (record(a=record(b="int")), pa.array([{"a": 1}]), r"row\.a: a record needs a struct"),
        (record(a={"type": "enum", "name": "e", "symbols": ["x"]}), pa.array([{"a": "x"}]), r"row\.a: .*'enum'"),
    ],
)
def test_what_does_not_fit_is_named(schema: Any, array: pa.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_rows(schema, array)


def test_no_rows() -> None:
    assert encode_rows(record(a="int"), pa.array([], pa.struct([("a", pa.int32())]))).to_pylist() == []
