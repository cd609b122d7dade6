"""Tests of encoding against the plain-Python serialiser of strategies.py: random types and values, and extremes."""

import decimal
import ipaddress
import struct
import uuid
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringsync.cql.cells import cells_of
from ringsync.cql.codec.decode import decode
from ringsync.cql.codec.encode import encode, partition_key_bytes
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
    parse_type,
)
from tests.cql.strategies import cql_types, plain, python_values, serialise

INT, TEXT = Native("int"), Native("text")


def arrow_value(cql_type: CqlType, value: Any) -> Any:
    """Convert the value for pyarrow; decimal, varint, uuid and inet become text."""
    if value is None:
        return None
    match cql_type:
        case Native("timestamp"):
            return value * 1000
        case Native("decimal" | "varint" | "uuid" | "timeuuid" | "inet"):
            return str(value)
        case Native("duration"):
            return dict(zip(("months", "days", "nanoseconds"), value, strict=True))
        case ListType(element) | SetType(element) | VectorType(element):
            return [arrow_value(element, item) for item in value]
        case MapType(key, inner) if pa.types.is_map(arrow_type(cql_type)):
            return [(arrow_value(key, k), arrow_value(inner, v)) for k, v in value]
        case MapType(key, inner):
            return [{"key": arrow_value(key, k), "value": arrow_value(inner, v)} for k, v in value]
        case TupleType(fields) | UserType(field_types=fields):
            names = [field.name for field in arrow_type(cql_type)]
            return {name: arrow_value(field, item) for name, field, item in zip(names, fields, value, strict=True)}
    return value


def arrow_array(cql_type: CqlType, values: list[Any]) -> pa.Array:
    return pa.array([arrow_value(cql_type, value) for value in values], arrow_type(cql_type))


def expected(cql_type: CqlType, values: list[Any]) -> list[bytes | None]:
    return [None if value is None else serialise(cql_type, value) for value in values]


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_types_and_values(data: st.DataObject) -> None:
    cql_type = data.draw(cql_types(2))
    values = data.draw(st.lists(st.none() | python_values(cql_type, missing_tails=False), max_size=6))
    array = arrow_array(cql_type, values)
    cut = data.draw(st.integers(0, len(values)))
    assert encode(cql_type, array[cut:]).to_pylist() == expected(cql_type, values[cut:])
    encoded = encode(cql_type, array[:cut])
    assert encoded.type == pa.binary()
    encoded.validate(full=True)
    assert encoded.to_pylist() == expected(cql_type, values[:cut])


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_round_trips_with_decode(data: st.DataObject) -> None:
    cql_type = data.draw(cql_types(2))
    values = data.draw(st.lists(st.none() | python_values(cql_type, missing_tails=False), max_size=6))
    raw = pa.array(expected(cql_type, values), pa.binary())
    decoded = decode(cql_type, cells_of(raw))
    assert decoded.misfits is None or not decoded.misfits.any()
    assert encode(cql_type, decoded.values).equals(raw)
    again = decode(cql_type, cells_of(encode(cql_type, decoded.values[1:])))
    assert plain(again.values) == plain(decoded.values[1:])


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**200), 10**200) | st.integers(-(2**70), 2**70))
@example(0)
@example(10**199)
@example(-(10**199) + 1)
def test_varint_of_any_length(number: int) -> None:
    assert encode(Native("varint"), pa.array([str(number)])).to_pylist() == [serialise(Native("varint"), number)]


def test_varint_at_every_power_of_two() -> None:
    numbers = [sign * (2**bits + more) for bits in range(300) for sign in (1, -1) for more in (-1, 0, 1)]
    assert encode(Native("varint"), pa.array(map(str, numbers))).to_pylist() == expected(Native("varint"), numbers)


@pytest.mark.parametrize(
    ("text", "unscaled", "scale"),
    [
        ("0", 0, 0),
        ("-0", 0, 0),
        ("0E-8", 0, 8),
        ("0E+3", 0, -3),
        ("1.500", 1500, 3),
        ("-0.00", 0, 2),
        (".5", 5, 1),
        ("5.", 5, 0),
        ("+7", 7, 0),
        ("1e5", 1, -5),
        ("-1.23E-10", -123, 12),
        ("1E+2147483648", 1, -(2**31)),
        ("1E-2147483647", 1, 2**31 - 1),
        ("00012345678901234567890.1", 123456789012345678901, 1),
    ],
)
def test_decimal_forms(text: str, unscaled: int, scale: int) -> None:
    raw = struct.pack(">i", scale) + serialise(Native("varint"), unscaled)
    assert encode(Native("decimal"), pa.array([text])).to_pylist() == [raw]


@settings(max_examples=100, deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_decimals_of_python(number: decimal.Decimal) -> None:
    assert encode(Native("decimal"), pa.array([str(number)])).to_pylist() == [serialise(Native("decimal"), number)]


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789abcfF:.%g", max_size=24) | st.ip_addresses().map(str))
@example("::")
@example("1::")
@example("::1")
@example(":::")
@example("1:2:3:4:5:6:7:8")
@example("1:2:3:4:5:6:7::")
@example("1:2:3:4:5:6:7:8::")
@example("::1:2:3:4:5:6:7")
@example("1::2::3")
@example("1:2:3:4:5:6:1.2.3.4")
@example("1:2:3:4:5:6:7:1.2.3.4")
@example("::ffff:192.0.2.1")
@example("::1.2.3.4.5")
@example("1.2.3.04")
@example("1.2.3.256")
@example("12345::")
@example("")
def test_inet_is_read_as_the_standard_library_reads_it(text: str) -> None:
    try:
        raw = ipaddress.ip_address(text.partition("%")[0] if "%" not in text else "refused").packed
    except ValueError:
        with pytest.raises(ValueError, match=r"row 0: .* is not a inet"):
            encode(Native("inet"), pa.array([text]))
    else:
        assert encode(Native("inet"), pa.array([text])).to_pylist() == [raw]


def test_uuid_in_both_cases() -> None:
    ident = uuid.UUID("0123abcd-ef45-6789-abcd-ef0123456789")
    texts = pa.array([str(ident), str(ident).upper(), None])
    assert encode(Native("uuid"), texts).to_pylist() == [ident.bytes, ident.bytes, None]


def test_extremes_of_numbers() -> None:
    far = -((5_000_000 + 1970) * 365)
    assert encode(Native("date"), pa.array([far, 0, None], pa.date32())).to_pylist() == [
        struct.pack(">I", far + 2**31),
        bytes.fromhex("80000000"),
        None,
    ]
    doubles = encode(Native("double"), pa.array([-0.0, float("nan"), 5e-324])).to_pylist()
    assert doubles == [bytes.fromhex("8000000000000000"), bytes.fromhex("7ff8000000000000"), bytes(7) + b"\1"]
    at = pa.array([-1000, None, (2**63 - 1) // 1000 * 1000], pa.timestamp("us", "UTC"))
    assert encode(Native("timestamp"), at).to_pylist() == [b"\xff" * 8, None, struct.pack(">q", (2**63 - 1) // 1000)]
    duration = arrow_array(Native("duration"), [(-(2**31), 2**31 - 1, -(2**63)), (0, 0, 64)])
    assert encode(Native("duration"), duration).to_pylist() == [
        bytes.fromhex("f0fffffffff0fffffffeffffffffffffffffff"),
        bytes.fromhex("00008080"),
    ]


def test_empty_is_not_null() -> None:
    assert encode(TEXT, pa.array(["", None])).to_pylist() == [b"", None]
    assert encode(Native("blob"), pa.array([b"", None])).to_pylist() == [b"", None]
    assert encode(ListType(TEXT, True), pa.array([[], None, [None, ""]], pa.list_(pa.string()))).to_pylist() == [
        bytes(4),
        None,
        bytes.fromhex("00000002ffffffff00000000"),
    ]


def test_vector_lengths() -> None:
    two_by_two = VectorType(VectorType(Native("float"), 2), 2)
    array = pa.array([[[1.0, 2.0], [3.0, 4.0]]], arrow_type(two_by_two))
    assert encode(two_by_two, array).to_pylist() == [struct.pack(">4f", 1, 2, 3, 4)]
    of_text = VectorType(TEXT, 2)
    long = "x" * 300
    assert encode(of_text, pa.array([["a", long]])).to_pylist() == [b"\1a\x81\x2c" + long.encode()]
    assert encode(VectorType(Native("smallint"), 1), pa.array([[7]], pa.list_(pa.int16()))).to_pylist() == [b"\2\0\7"]


def test_what_lies_under_a_null_is_not_read() -> None:
    pair = TupleType((Native("varint"), INT))
    hidden = pa.StructArray.from_arrays(
        [pa.array(["nonsense", "1"]), pa.array([1, None], pa.int32())], ["a", "b"], mask=pa.array([True, False])
    )
    assert encode(pair, hidden).to_pylist() == [None, bytes.fromhex("0000000101ffffffff")]
    masked = pa.ListArray.from_arrays([0, 1, 2], pa.array(["nonsense", "1"]), mask=pa.array([True, False]))
    assert encode(ListType(Native("varint"), True), masked).to_pylist() == [None, bytes.fromhex("000000010000000101")]


def test_arrays_as_other_engines_give_them() -> None:
    map_type = parse_type("frozen<map<text, list<int>>>", {})
    rows = [None, [("a", [1, None]), ("b", None)], [], [("c", [])]]
    array = pa.array(rows, arrow_type(map_type))
    as_list = array.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.list_(pa.int32()))])))
    large = as_list.cast(pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.large_list(pa.int64()))])))
    assert encode(map_type, array).to_pylist() == expected(map_type, rows)
    for other in (as_list, large):
        assert encode(map_type, other[1:]).to_pylist() == expected(map_type, rows)[1:]
    assert encode(TEXT, pa.array(["x", None, "x"]).dictionary_encode()).to_pylist() == [b"x", None, b"x"]
    vector = VectorType(INT, 2)
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    assert encode(vector, fixed[1:]).to_pylist() == [None, struct.pack(">2i", 3, 4)]
    assert encode(vector, pa.nulls(2)).to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("cql_type", "array", "message"),
    [
        (Native("varint"), pa.array(["1", "1.5"]), r"varint, row 1: '1\.5' is not a varint"),
        (Native("varint"), pa.array(["-"]), "'-' is not a varint"),
        (Native("varint"), pa.array([""]), "'' is not a varint"),
        (Native("decimal"), pa.array([None, "1.2.3"]), r"row 1: '1\.2\.3'"),
        (Native("decimal"), pa.array(["1E"]), "'1E'"),
        (Native("decimal"), pa.array(["1E+2147483649"]), "2147483649"),
        (Native("decimal"), pa.array(["1E99999999999999999999999"]), "is not a decimal"),
        (Native("decimal"), pa.array(["."]), r"'\.'"),
        (Native("uuid"), pa.array(["0123abcd-ef45-6789-abcd-ef012345678"]), "is not a uuid"),
        (Native("uuid"), pa.array(["0123abcd-ef45-6789-abcd-ef012345678g"]), "is not a uuid"),
        (Native("uuid"), pa.array(["0123abcd+ef45-6789-abcd-ef0123456789"]), "is not a uuid"),
        (ListType(INT, True), pa.array([["x"]]), "does not fit"),
        (Native("timestamp"), pa.array([0, 1500], pa.timestamp("us", "UTC")), "row 1: 1500 µs .* whole"),
        (VectorType(INT, 2), pa.array([[1, 2], None, [1]], pa.list_(pa.int32())), "row 2: a vector of 1 elements"),
        (VectorType(INT, 2), pa.array([[], [1, None]][1:], pa.list_(pa.int32())), "row 0: .* cannot hold null"),
        (
            ListType(ListType(Native("inet"), True), True),
            pa.array([None, [[], ["::1"]], [["::1"], ["::1", "no"]]]),
            "row 2: 'no' is not a inet",
        ),
        (TupleType((INT, INT)), pa.array([{"a": 1}]), "has 2 fields"),
        (INT, pa.array([2**31]), "does not fit"),
        (
            Native("duration"),
            pa.array([None, {"months": 1, "days": None, "nanoseconds": 2}], arrow_type(Native("duration"))),
            "row 1: .* lacks a number",
        ),
    ],
)
def test_what_cannot_be_encoded_is_named(cql_type: CqlType, array: pa.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(cql_type, array)


def test_custom_types_stay_bytes() -> None:
    assert encode(CustomType("org.example.Odd"), pa.array([b"\0\1", None])).to_pylist() == [b"\0\1", None]


def test_partition_keys() -> None:
    texts = encode(TEXT, pa.array(["ab", "ü"]))
    numbers = encode(INT, pa.array([None, 1, -1], pa.int32())[1:])
    assert partition_key_bytes([texts]).to_pylist() == [b"ab", "ü".encode()]
    assert partition_key_bytes([texts, numbers]).to_pylist() == [
        b"\0\2ab\0" + b"\0\4\0\0\0\1\0",
        b"\0\2\xc3\xbc\0" + b"\0\4\xff\xff\xff\xff\0",
    ]
    long = partition_key_bytes([pa.array([b"x" * 300]), pa.array([b""], pa.large_binary())])
    assert long.to_pylist() == [b"\1\x2c" + b"x" * 300 + b"\0" + b"\0\0\0"]


def test_partition_keys_that_cannot_be() -> None:
    for columns in ([pa.array([b"a", None])], [pa.array([b"a", None]), pa.array([b"a", b"b"])]):
        with pytest.raises(ValueError, match="row 1: a value is null"):
            partition_key_bytes(columns)
    with pytest.raises(ValueError, match="row 0: a value is longer than 65535"):
        partition_key_bytes([pa.array([b"a" * 65536]), pa.array([b"a"])])
