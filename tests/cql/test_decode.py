"""Tests of decoding to Arrow. The oracles are the plain serialiser of tests/cql/strategies.py and the driver's."""

from __future__ import annotations

import datetime
import decimal
import ipaddress
import struct
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cassandra import cqltypes, util
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.cql.codec.decode import decode, misfit_reason
from ringsync.cql.types import (
    CqlType,
    ListType,
    MapType,
    Native,
    SetType,
    TupleType,
    UserType,
    VectorType,
    arrow_type,
)
from tests.cql.strategies import (
    NATIVE_NAMES,
    cql_types,
    expected,
    minimal_bytes,
    plain,
    serialise,
    signed_vint,
    typed_values,
)
from tests.own_process import output_of

INT, TEXT = Native("int"), Native("text")


def cells(*values: bytes | None) -> Cells:
    return cells_of(pa.array(values, pa.binary()))


def decoded(cql_type: CqlType, *values: bytes | None) -> list[Any]:
    """Decode values without misfits."""
    found = decode(cql_type, cells(*values))
    found.values.validate(full=True)
    assert found.misfits is None
    return found.values.to_pylist()


def is_misfit(cql_type: CqlType, value: bytes) -> bool:
    """Decode one value between nulls; the nulls must stay nulls and never be misfits."""
    found = decode(cql_type, cells(None, value, None))
    found.values.validate(full=True)
    if found.misfits is None:
        return False
    assert found.misfits.tolist() == [False, True, False]
    assert found.values.null_count == 3
    assert misfit_reason(cql_type, value)
    return True


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_values_decode_to_what_was_serialised_and_misfits_leave_their_neighbours_alone(data: st.DataObject) -> None:
    cql_type = data.draw(cql_types())
    one = st.one_of(typed_values(cql_type), st.just((None, None)), st.binary(max_size=9).map(lambda raw: (..., raw)))
    rows = data.draw(st.lists(one, max_size=12))
    found = decode(cql_type, cells(*[raw for _, raw in rows]))
    found.values.validate(full=True)
    assert found.values.type == arrow_type(cql_type)
    for row, (value, got) in enumerate(zip([value for value, _ in rows], plain(found.values), strict=True)):
        if value is not ...:
            assert got == expected(cql_type, value)
            assert found.misfits is None or not found.misfits[row]
        elif got is None:
            assert found.misfits is not None
            assert found.misfits[row]


@pytest.mark.parametrize(
    ("name", "driver_type", "value", "arrow"),
    [
        ("ascii", cqltypes.AsciiType, "abc", "abc"),
        ("bigint", cqltypes.LongType, -(2**63), -(2**63)),
        ("blob", cqltypes.BytesType, b"\0\xff", b"\0\xff"),
        ("boolean", cqltypes.BooleanType, True, True),
        ("counter", cqltypes.CounterColumnType, 7, 7),
        ("date", cqltypes.SimpleDateType, util.Date(-1), datetime.date(1969, 12, 31)),
        ("decimal", cqltypes.DecimalType, decimal.Decimal("-1234567890123456789012.50"), "-1234567890123456789012.50"),
        ("double", cqltypes.DoubleType, 1.5e300, 1.5e300),
        ("duration", cqltypes.DurationType, util.Duration(-1, -2, -3), {"months": -1, "days": -2, "nanoseconds": -3}),
        ("float", cqltypes.FloatType, 1.5, 1.5),
        ("inet", cqltypes.InetAddressType, "2001:db8::1", "2001:db8::1"),
        ("int", cqltypes.Int32Type, -(2**31), -(2**31)),
        ("smallint", cqltypes.ShortType, -(2**15), -(2**15)),
        ("text", cqltypes.UTF8Type, "Grüße €😀", "Grüße €😀"),
        ("time", cqltypes.TimeType, util.Time(86399999999999), 86399999999999),
        (
            "timestamp",
            cqltypes.DateType,
            datetime.datetime(1969, 12, 31, 23, 59, 59, 999000),
            datetime.datetime(1969, 12, 31, 23, 59, 59, 999000, datetime.UTC),
        ),
        ("timeuuid", cqltypes.TimeUUIDType, uuid.UUID(int=2**127 + 5), str(uuid.UUID(int=2**127 + 5))),
        ("tinyint", cqltypes.ByteType, -128, -128),
        ("uuid", cqltypes.UUIDType, uuid.UUID(int=2**128 - 6), "f" * 8 + "-ffff-ffff-ffff-" + "f" * 11 + "a"),
        ("varint", cqltypes.IntegerType, -(10**40), str(-(10**40))),
    ],
)
def test_the_drivers_bytes_of_every_native_type(name: str, driver_type: Any, value: Any, arrow: Any) -> None:
    raw = driver_type.serialize(value, 5)
    assert decoded(Native(name), raw, None, raw) == [arrow, None, arrow]


def test_the_drivers_bytes_of_nested_types() -> None:
    driver = cqltypes.lookup_casstype(
        "MapType(UTF8Type,FrozenType(ListType(FrozenType(TupleType(Int32Type,FrozenType(SetType(UUIDType)))))))"
    )
    one = uuid.UUID(int=1)
    value = {"a": [(1, {one}), (2, None)], "b": []}
    cql = MapType(TEXT, ListType(TupleType((INT, SetType(Native("uuid"))))))
    first = {"field_1": 1, "field_2": [str(one)]}
    assert decoded(cql, driver.serialize(value, 5)) == [[("a", [first, {"field_1": 2, "field_2": None}]), ("b", [])]]


@pytest.mark.parametrize("element", ["int", "float", "uuid", "boolean"])
def test_vectors_of_fixed_length_elements_may_nest(element: str) -> None:
    inner = VectorType(Native(element), 3)
    values = [[[1] * 3, [0] * 3], [[0] * 3, [1] * 3]]
    values = [[[uuid.UUID(int=x) if element == "uuid" else x for x in y] for y in z] for z in values]
    raws = [serialise(VectorType(inner, 2), value) for value in values]
    assert all(len(raw) == 6 * {"uuid": 16, "boolean": 1}.get(element, 4) for raw in raws)
    texts = [[[str(x) if element == "uuid" else x for x in y] for y in z] for z in values]
    assert decoded(VectorType(inner, 2), *raws) == texts


def test_vectors_of_other_elements_carry_lengths() -> None:
    assert decoded(VectorType(TEXT, 2), b"\x01a\x80\x80" + b"b" * 128) == [["a", "b" * 128]]
    assert decoded(VectorType(Native("smallint"), 2), b"\x02\0\x01\x02\xff\xff") == [[1, -1]]
    assert is_misfit(VectorType(TEXT, 2), b"\x01a\x80\x01b")  # a length that one byte could hold
    assert is_misfit(VectorType(TEXT, 2), b"\x01a\xff" + b"\xff" * 8)
    assert is_misfit(VectorType(TEXT, 2), b"\x01a")
    assert is_misfit(VectorType(TEXT, 1), b"\x01aa")
    assert is_misfit(VectorType(INT, 2), b"\0" * 12)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        *[(name, b"") for name in NATIVE_NAMES if name not in ("ascii", "blob", "text")],
        ("int", b"\0" * 3),
        ("uuid", b"\0" * 15),
        ("inet", b"\0" * 5),
        ("boolean", b"\x02"),
        ("timestamp", struct.pack(">q", (2**63 - 1) // 1000 + 1)),
        ("timestamp", struct.pack(">q", -(2**63))),
        ("varint", b"\0\x7f"),
        ("varint", b"\xff\x80"),
        ("decimal", b"\0\0\0\0"),
        ("decimal", b"\0\0\0\x01\0\0"),
        ("duration", b"\x80\x02\x00\x00"),
        ("duration", signed_vint(2**31) + b"\0\0"),
        ("duration", b"\0\0"),
        ("duration", b"\0\0\0\0"),
        ("ascii", b"plain a\xc3\xa4"),
    ],
)
def test_bytes_that_no_arrow_value_stands_for(name: str, raw: bytes) -> None:
    assert is_misfit(Native(name), raw)
    assert is_misfit(ListType(Native(name)), struct.pack(">ii", 1, len(raw)) + raw)
    assert is_misfit(TupleType((INT, Native(name))), struct.pack(">ii", -1, len(raw)) + raw)


def test_the_limits_that_still_fit() -> None:
    limit = (2**63 - 1) // 1000
    raws = [struct.pack(">q", limit), struct.pack(">q", -limit)]
    found = decode(Native("timestamp"), cells(*raws))
    assert found.misfits is None
    assert found.values.cast(pa.int64()).to_pylist() == [limit * 1000, -limit * 1000]
    ends = decode(Native("date"), cells(b"\0" * 4, b"\xff" * 4)).values
    assert ends.cast(pa.int32()).to_pylist() == [-(2**31), 2**31 - 1]
    assert decoded(TEXT, b"") == [""]
    assert decoded(Native("blob"), b"", None) == [b"", None]
    months = {"months": 2**31 - 1, "days": -(2**31), "nanoseconds": -(2**63)}
    assert decoded(Native("duration"), serialise(Native("duration"), months.values())) == [months]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=12), st.text(max_size=12).map(str.encode)), st.binary(max_size=2))
def test_text_is_valid_exactly_where_python_says_so(text: bytes, tail: bytes) -> None:
    raw = b"eight or more bytes "[: len(text)] + text + tail
    try:
        value = raw.decode()
    except UnicodeDecodeError:
        assert is_misfit(TEXT, raw)
    else:
        assert decoded(TEXT, raw) == [value]
    assert is_misfit(Native("ascii"), raw) == (not raw.isascii())


@pytest.mark.parametrize(
    "raw",
    [b"\xc0\x80", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xe2\x82"],
)
def test_utf8_is_read_strictly_and_no_character_reaches_into_the_next_value(raw: bytes) -> None:
    found = decode(TEXT, cells(b"\xe2\x82\xac", raw, b"\xac"))
    assert found.misfits is not None
    assert found.misfits.tolist() == [False, True, True]
    assert found.values.to_pylist() == ["€", None, None]


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.integers(), st.integers(-(2**4000), 2**4000)), st.integers(-(2**31), 2**31 - 1))
def test_numbers_of_any_size_and_scale_are_exact(number: int, scale: int) -> None:
    raw = minimal_bytes(number)
    assert decoded(Native("varint"), raw, b"\0") == [str(number), "0"]
    for each in (scale, scale % 20, number.bit_length() // 4):
        digits = decimal.Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -each))
        assert decoded(Native("decimal"), struct.pack(">i", each) + raw) == [str(digits)]


@pytest.mark.parametrize(
    ("unscaled", "scale", "text"),
    # What java.math.BigDecimal(BigInteger, scale).toString() prints, from its documentation and its source.
    [
        (123, 0, "123"),
        (-123, 0, "-123"),
        (123, -1, "1.23E+3"),
        (123, -3, "1.23E+5"),
        (123, 1, "12.3"),
        (123, 5, "0.00123"),
        (123, 10, "1.23E-8"),
        (-123, 12, "-1.23E-10"),
        (0, 2, "0.00"),
        (0, 7, "0E-7"),
        (0, -3, "0E+3"),
        (5, 2**31 - 1, "5E-2147483647"),
        (50, -(2**31), "5.0E+2147483649"),
    ],
)
def test_decimals_read_as_java_prints_them(unscaled: int, scale: int, text: str) -> None:
    assert decoded(Native("decimal"), struct.pack(">i", scale) + minimal_bytes(unscaled)) == [text]


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("0.0.0.0", "0.0.0.0"),
        ("255.100.10.9", "255.100.10.9"),
        ("::", "::"),
        ("::1", "::1"),
        ("1::", "1::"),
        ("::ffff:1.2.3.4", "::ffff:1.2.3.4"),
        ("::1.2.3.4", "::102:304"),
        ("1:0:0:2:0:0:0:3", "1:0:0:2::3"),
        ("1:0:0:2:0:0:3:4", "1::2:0:0:3:4"),
        ("1:0:2:0:3:0:4:0", "1:0:2:0:3:0:4:0"),
        ("ABCD:0:0:0:0:0:0:EF01", "abcd::ef01"),
    ],
)
def test_inet_texts_follow_rfc_5952(address: str, text: str) -> None:
    assert decoded(Native("inet"), ipaddress.ip_address(address).packed) == [text]


def test_float_bits_survive_even_of_nans() -> None:
    raws = [bytes.fromhex(text) for text in ("7fc00001", "ff800001", "80000000")]
    values = decode(Native("float"), cells(*raws)).values
    assert np.frombuffer(values.buffers()[1], "<u4").astype(">u4").tobytes() == b"".join(raws)
    wide = [bytes.fromhex(text) for text in ("7ff8000000000abc", "fff0000000000001")]
    values = decode(Native("double"), cells(*wide)).values
    assert np.frombuffer(values.buffers()[1], "<u8").astype(">u8").tobytes() == b"".join(wide)


def test_tuples_and_udts_may_lack_their_last_fields_but_not_have_more() -> None:
    one = struct.pack(">ii", 4, 7)
    udt = UserType("ks", "t", ("a", "b"), (INT, TEXT))
    assert decoded(udt, one, one + b"\xff" * 4) == [{"a": 7, "b": None}] * 2
    assert decoded(TupleType((INT, INT)), one) == [{"field_1": 7, "field_2": None}]
    for surplus in (one + one + one, one + one + b"\0", one + b"\0", b""):
        assert is_misfit(TupleType((INT, INT)), surplus)


def test_null_elements_stay_null_and_null_map_keys_are_misfits() -> None:
    null = b"\xff" * 4
    value = struct.pack(">ii", 4, 7)
    assert decoded(ListType(INT), b"\0\0\0\x02" + null + value) == [[None, 7]]
    assert decoded(MapType(INT, INT), b"\0\0\0\x01" + value + null) == [[(7, None)]]
    assert decoded(MapType(INT, INT), b"\0\0\0\x02" + (value + value) * 2) == [[(7, 7), (7, 7)]]
    assert is_misfit(MapType(INT, INT), b"\0\0\0\x01" + null + value)
    map_keys = MapType(MapType(INT, INT), INT)
    inner = b"\0\0\0\x01" + value + value
    raw = b"\0\0\0\x01" + struct.pack(">i", len(inner)) + inner + value
    assert decoded(map_keys, raw) == [[{"key": [(7, 7)], "value": 7}]]
    assert is_misfit(map_keys, b"\0\0\0\x01" + null + value)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0\0\0",
        b"\xff" * 4,
        b"\x7f\xff\xff\xff",
        b"\0\0\0\x01",
        b"\0\0\0\x01\x7f\xff\xff\xff",
        b"\0\0\0\x01\xff\xff\xff\xfe",
        b"\0\0\0\x01\0\0\0\x01",
        b"\0\0\0\0\0",
    ],
)
def test_malformed_collections_are_misfits(raw: bytes) -> None:
    for cql_type in (ListType(TEXT), SetType(Native("blob")), MapType(TEXT, TEXT)):
        assert is_misfit(cql_type, raw)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.binary(max_size=90)), max_size=20), st.integers(0, 5), st.integers(0, 20))
def test_arrow_binary_to_cells_and_back(values: list[bytes | None], start: int, length: int) -> None:
    array = pa.array(values, pa.binary()).slice(start, length)
    assert raw_values(cells_of(array)).equals(array)
    assert raw_values(cells_of(array)).to_pylist() == values[start : start + length]


def test_an_empty_column_of_any_type() -> None:
    for name in ("int", "text", "boolean", "decimal", "uuid", "inet", "duration", "blob"):
        for cql_type in (Native(name), MapType(INT, Native(name)), VectorType(Native(name), 2)):
            assert decode(cql_type, cells()).values.equals(pa.array([], arrow_type(cql_type)))


FUZZ = """
import random, sys
import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from ringsync.cql.cells import cells_of
from ringsync.cql.codec.decode import decode
from tests.cql.strategies import cql_types, typed_values

@seed(20240229)
@settings(max_examples=120, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=HealthCheck)
@given(st.data(), st.integers(0, 2**32))
def fuzz(data, start):
    cql_type = data.draw(cql_types())
    good = [raw for _, raw in data.draw(st.lists(typed_values(cql_type), min_size=1, max_size=3))]
    dice = random.Random(start)
    values = []
    for _ in range(200):
        value = bytearray(dice.choice(good))
        for _ in range(dice.randrange(4)):
            place = dice.randrange(len(value) + 1)
            kind = dice.randrange(4)
            if kind == 0:
                value[place:place] = dice.randbytes(dice.randrange(6))
            elif kind == 1:
                del value[place : place + dice.randrange(6)]
            else:
                value[place : place + 1] = dice.choice([b"\\0", b"\\x7f", b"\\x80", b"\\xff", b"\\xff" * 4])
        values.append(bytes(value))
    found = decode(cql_type, cells_of(pa.array(values, pa.binary())))
    found.values.validate(full=True)
    lost = set() if found.misfits is None else set(found.misfits.nonzero()[0].tolist())
    assert lost == {row for row, value in enumerate(found.values.is_null().to_pylist()) if value}

fuzz()
print("survived")
"""


def test_random_bytes_never_crash() -> None:
    assert output_of(FUZZ) == "survived"
