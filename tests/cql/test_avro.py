"""Tests of CQL values to Avro and back, in both mappings. fastavro and Cassandra's bytes are the oracles."""

import io
import json
import struct
from dataclasses import replace
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.avro.mapping import AvroMappingError, Mapping, avro_type, avro_values, without_logical_types
from ringsync.avro.rows import encode_rows
from ringsync.compiled.memory import padded
from ringsync.cql.cells import Cells
from ringsync.cql.codec.decode import decode
from ringsync.cql.codec.encode import encode
from ringsync.cql.types import (
    CqlType,
    CustomType,
    ListType,
    MapType,
    Native,
    SetType,
    TupleType,
    UserType,
    VectorType,
    arrow_type,
)
from tests.cql.avro_reading import arrow_values
from tests.cql.strategies import NATIVE_NAMES, cql_types, plain, python_values, serialise

INT, TEXT = Native("int"), Native("text")
BOTH: list[Mapping] = ["exact", "classic"]


def decoded(cql_type: CqlType, values: list[bytes | None]) -> pa.Array:
    """Decode Cassandra's bytes to a slice of a longer Arrow array, because batches are often slices."""
    lengths = np.array([-1, *(-1 if one is None else len(one) for one in values)], np.int32)
    offsets = np.cumsum(np.maximum(lengths, 0), dtype=np.int32) - np.maximum(lengths, 0)
    found = decode(cql_type, Cells(padded(b"".join(one or b"" for one in values)), offsets, lengths))
    assert found.misfits is None or not found.misfits.any()
    return found.values[1:]


def through_avro(cql_type: CqlType, mapping: Mapping, values: pa.Array, logical: bool = False) -> list[Any]:
    """Read the values by fastavro, with plain numbers or with Python's dates and uuids."""
    schema: Any = ["null", avro_type(cql_type, mapping, "server.ks.t.value.c")]
    rows = encode_rows(schema, avro_values(cql_type, mapping, values)).to_pylist()
    reader_schema = fastavro.parse_schema(schema if logical else without_logical_types(schema))
    return [fastavro.schemaless_reader(io.BytesIO(row), reader_schema) for row in rows]


def as_multicell(cql_type: CqlType) -> CqlType:
    """Return the type as that of a column, not frozen."""
    can_be = isinstance(cql_type, ListType | SetType | MapType | UserType)
    return replace(cql_type, frozen=False) if can_be else cql_type


def storable(cql_type: CqlType, value: Any) -> Any:
    """Return the value in a form that Cassandra allows: no key twice in a map, no null element unless frozen."""
    if value is None:
        return None
    match cql_type:
        case ListType(element, frozen) | SetType(element, frozen):
            return [storable(element, one) for one in value if frozen or one is not None]
        case MapType(key, inner, frozen):
            pairs = [(storable(key, k), storable(inner, v)) for k, v in value if frozen or v is not None]
            return list({serialise(key, k): (k, v) for k, v in pairs}.values())
        case VectorType(element):
            return [storable(element, one) for one in value]
        case TupleType(fields) | UserType(field_types=fields):
            return [storable(field, one) for field, one in zip(fields, value, strict=True)]
    return value


@st.composite
def columns(draw: st.DrawFn) -> tuple[CqlType, list[bytes | None]]:
    cql_type = draw(cql_types(2))
    if draw(st.booleans()):
        cql_type = as_multicell(cql_type)
    values = draw(st.lists(st.none() | python_values(cql_type, missing_tails=False), min_size=1, max_size=4))
    kept = [storable(cql_type, value) for value in values]
    return cql_type, [None if value is None else serialise(cql_type, value) for value in kept]


@settings(max_examples=150, deadline=None)
@given(columns())
def test_exact_mapping_gives_the_bytes_again(column: tuple[CqlType, list[bytes | None]]) -> None:
    cql_type, data = column
    values = decoded(cql_type, data)
    back = arrow_values(cql_type, through_avro(cql_type, "exact", values))
    assert back.type == arrow_type(cql_type)
    assert plain(back) == plain(values)
    assert encode(cql_type, back).to_pylist() == data


@settings(max_examples=30, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", NATIVE_NAMES)
def test_exact_mapping_of_every_native_type(name: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | python_values(Native(name)), min_size=1, max_size=6))
    expected = [None if value is None else serialise(Native(name), value) for value in values]
    read = through_avro(Native(name), "exact", decoded(Native(name), expected))
    assert encode(Native(name), arrow_values(Native(name), read)).to_pylist() == expected


@settings(max_examples=100, deadline=None)
@given(cql_types(3), st.sampled_from(BOTH), st.booleans())
def test_fastavro_accepts_every_type_and_names_are_unique(cql_type: CqlType, mapping: Mapping, frozen: bool) -> None:
    schema = avro_type(cql_type if frozen else as_multicell(cql_type), mapping, "server.ks.t.value.c")
    fastavro.parse_schema(json.loads(json.dumps(schema)))  # raises for a name defined twice


def test_names_that_avro_does_not_know() -> None:
    odd = UserType("ks", "string", ("Zip code", "1st", "ok", "OK"), (INT, INT, INT, TEXT))
    schema: Any = avro_type(odd, "exact", "server.ks.t.value.c")
    fastavro.parse_schema(schema)
    assert schema["name"] == "string_"
    assert [(field["name"], field.get("cql")) for field in schema["fields"]] == [
        ("Zip_code", "Zip code"),
        ("_1st", "1st"),
        ("ok", None),
        ("OK_", "OK"),
    ]


def test_a_type_used_twice_has_two_names() -> None:
    inner = UserType("ks", "inner", ("a",), (INT,), frozen=True)
    outer = UserType("ks", "outer", ("inner", "a_b", "a"), (inner, inner, MapType(inner, TupleType((inner,)), True)))
    fastavro.parse_schema(avro_type(outer, "exact", "server.ks.t.value.c"))


def test_logical_types_as_a_plain_reader_sees_them() -> None:
    """Anybody's fastavro gives dates, datetimes and uuids where Python has them."""
    text = "0f0e0d0c-0000-1000-8000-000000000001"
    assert str(through_avro(Native("uuid"), "exact", pa.array([text]), logical=True)[0]) == text
    moment = pa.array([1_600_000_000_123_000], pa.timestamp("us", "UTC"))
    assert through_avro(Native("timestamp"), "exact", moment, logical=True)[0].isoformat() == (
        "2020-09-13T12:26:40.123000+00:00"
    )
    day = pa.array([18_000], pa.date32())
    assert through_avro(Native("date"), "exact", day, logical=True)[0].isoformat() == "2019-04-14"


def test_big_decimal_is_laid_out_as_avro_1_12_says() -> None:
    """Conversions.BigDecimalConversion: the unscaled bytes with their length, then the scale, both as in Avro."""
    values = pa.array(["-1.28", "1E+3", None, "0"])
    read = through_avro(Native("decimal"), "exact", values)
    assert read == [b"\x02\x80\x04", b"\x02\x01\x05", None, b"\x02\x00\x00"]
    assert through_avro(Native("varint"), "exact", pa.array(["128"])) == [b"\x04\x00\x80\x00"]


CLASSIC = [
    (Native("ascii"), pa.array(["a"]), "string", "a"),
    (Native("counter"), pa.array([2**40]), "long", 2**40),
    (Native("date"), pa.array([-3], pa.date32()), "int", -3),
    (Native("decimal"), pa.array(["1.10"]), "double", 1.1),
    (Native("duration"), pa.array([{"months": 1, "days": -1, "nanoseconds": 2}], arrow_type(Native("duration"))),
     "bytes", b"\x02\x01\x04"),
    (Native("inet"), pa.array(["::1"]), "string", "::1"),
    (Native("smallint"), pa.array([-7], pa.int16()), "int", -7),
    (Native("time"), pa.array([5]), "long", 5),
    (Native("timestamp"), pa.array([-2_000], pa.timestamp("us", "UTC")), "long", -2),
    (Native("uuid"), pa.array(["0f0e0d0c-0000-1000-8000-000000000001"]), "bytes",
     bytes.fromhex("0f0e0d0c000010008000000000000001")),
    (Native("varint"), pa.array([str(-(2**63))]), "long", -(2**63)),
    (ListType(INT), pa.array([[1, 2]], pa.list_(pa.int32())), {"type": "array", "items": "int"}, [1, 2]),
    (ListType(INT, frozen=True), pa.array([[1]], pa.list_(pa.int32())), "bytes", struct.pack(">iii", 1, 4, 1)),
    (TupleType((INT,)), pa.array([{"field_1": 1}], pa.struct([("field_1", pa.int32())])), "bytes",
     struct.pack(">ii", 4, 1)),
    (VectorType(INT, 2), pa.array([[1, 2]], pa.list_(pa.int32())), {"type": "array", "items": "int"}, [1, 2]),
    (MapType(TEXT, Native("varint")), pa.array([[("k", "5")]], pa.map_(pa.string(), pa.string())),
     {"type": "map", "values": "long"}, {"k": 5}),
    (CustomType("x.Y"), pa.array([b"z"]), "bytes", b"z"),
]  # fmt: skip


@pytest.mark.parametrize(("cql_type", "values", "schema", "expected"), CLASSIC, ids=[str(case[0]) for case in CLASSIC])
def test_classic_mapping_is_the_original_design_s_table(
    cql_type: CqlType, values: pa.Array, schema: Any, expected: Any
) -> None:
    assert avro_type(cql_type, "classic", "s.ks.t.value.c") == schema
    with_null = pa.concat_arrays([pa.nulls(1, values.type), values])
    assert through_avro(cql_type, "classic", with_null) == [None, expected]


def test_classic_user_type_is_a_record_of_nullable_fields() -> None:
    udt = UserType("ks", "u", ("a", "b"), (Native("uuid"), ListType(INT, frozen=True)))
    values = pa.array([{"a": None, "b": [7]}], arrow_type(udt))
    assert through_avro(udt, "classic", values) == [{"a": None, "b": struct.pack(">iii", 1, 4, 7)}]


@pytest.mark.parametrize(
    ("cql_type", "value", "message"),
    [
        (Native("varint"), str(2**63), "varint 9223372036854775808 is not a long"),
        (Native("varint"), "-" + "9" * 100, r"varint -9{56}… \(101 characters\)"),
        (Native("decimal"), "1E+400", r"decimal 1E\+400 is not a finite double"),
    ],
)
def test_classic_mapping_refuses_what_it_would_falsify(cql_type: CqlType, value: str, message: str) -> None:
    with pytest.raises(AvroMappingError, match=message):
        avro_values(cql_type, "classic", pa.array(["1", None, value]))


def test_numbers_longer_than_python_prints() -> None:
    digits = "7" * 6000
    assert arrow_values(Native("varint"), through_avro(Native("varint"), "exact", pa.array([digits])))[0].as_py() == (
        digits
    )
