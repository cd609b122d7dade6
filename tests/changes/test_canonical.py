"""Tests of canonical keys: their bytes are equal if and only if their places in the order are."""

from __future__ import annotations

import decimal
import struct

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.changes.keys.canonical import canonical_cells, canonical_column, decoded_clustering, has_aliases
from ringsync.changes.keys.order import value_keys
from ringsync.cql.cells import cells_of, cells_of_values, raw_values
from ringsync.cql.codec.decode import decode
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
    parse_type,
)
from tests.cql.strategies import cql_types, typed_values


def canonical(cql_type: CqlType, *values: bytes | None) -> list[bytes | None]:
    cells = cells_of(pa.array(values, pa.binary()))
    found: list[bytes | None] = raw_values(canonical_cells(cells, cql_type)).to_pylist()
    return found


def respelled(data: st.DataObject, cql_type: CqlType, value: bytes) -> bytes:
    """Return the same value in another spelling, or bytes that are no value."""
    if not value:
        return value
    match cql_type:
        case Native("decimal") if len(value) > 4:
            (scale,), number = struct.unpack(">i", value[:4]), int.from_bytes(value[4:], "big", signed=True)
            zeros = data.draw(st.integers(0, 12))
            number, scale = number * 10**zeros, min(scale + zeros, 2**31 - 1)
            size = number.bit_length() // 8 + 1 + data.draw(st.integers(0, 2))
            return struct.pack(">i", scale) + number.to_bytes(size, "big", signed=True)
        case Native("varint"):
            return (b"\xff" if value[0] >> 7 else b"\0") * data.draw(st.integers(0, 2)) + value
        case Native("boolean"):
            return data.draw(st.sampled_from([value, b"\x02" if value[0] else value]))
        case Native("double"):
            return data.draw(
                st.sampled_from([value, b"\x7f\xf8\0\0\0\0\0\0", b"\xff\xf0\0\0\0\0\0\1", b"\x80" + bytes(7)])
            )
        case Native("float"):
            return data.draw(st.sampled_from([value, b"\x7f\xc0\0\0", b"\xff\x80\0\1", b"\x80\0\0\0"]))
        case ListType(element) | SetType(element):
            return sequence(data, (element,), value)
        case MapType(key, item):
            return sequence(data, (key, item), value)
        case TupleType(fields) | UserType(field_types=fields):
            parts = split(data, fields, value)
            missing = len(fields) - len(parts)
            return b"".join(map(framed, parts + [None] * data.draw(st.integers(0, missing))))
    return value


def sequence(data: st.DataObject, types: tuple[CqlType, ...], value: bytes) -> bytes:
    (count,) = struct.unpack(">i", value[:4])
    return value[:4] + b"".join(map(framed, split(data, types * count, value[4:])))


def split(data: st.DataObject, types: tuple[CqlType, ...], value: bytes) -> list[bytes | None]:
    found: list[bytes | None] = []
    for kind in types:
        if value:
            (size,) = struct.unpack(">i", value[:4])
            part, value = value[4 : 4 + max(size, 0)], value[4 + max(size, 0) :]
            found.append(None if size < 0 else respelled(data, kind, part))
    return found


def framed(value: bytes | None) -> bytes:
    return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_values_have_one_form_where_they_have_one_place_in_the_order(data: st.DataObject) -> None:
    cql_type = data.draw(cql_types())
    drawn = data.draw(st.lists(typed_values(cql_type).map(lambda pair: pair[1]), min_size=1, max_size=4))
    damaged = [data.draw(st.binary(max_size=2)) + value[: data.draw(st.integers(0, len(value)))] for value in drawn[:1]]
    values = [*drawn, *(respelled(data, cql_type, value) for value in drawn for _ in range(2)), *damaged, b""]
    forms, places = canonical(cql_type, *values), raw_values(value_keys(cells_of_values(values), cql_type)).to_pylist()
    for value, form, place in zip(values, forms, places, strict=True):
        assert form is not None
        assert len(form) <= len(value)
        assert raw_values(value_keys(cells_of_values([form]), cql_type)).to_pylist() == [place]
        for other, its_place in zip(forms, places, strict=True):
            assert (form == other) == (place == its_place), (cql_type, form, other)
    assert canonical(cql_type, *forms) == forms


def as_decimal(text: str) -> bytes:
    sign, digits, exponent = decimal.Decimal(text).as_tuple()
    number = int("".join(map(str, digits))) * (-1 if sign else 1)
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return struct.pack(">i", -int(exponent)) + number.to_bytes(size, "big", signed=True)


@pytest.mark.parametrize(
    ("spelling", "form"),
    [
        ("1.00", "1"),
        ("-1.50", "-1.5"),
        ("100", "1E+2"),
        ("-1000000000000000000000000000000.00", "-1E+30"),
        ("0.000", "0"),
        ("0E+7", "0"),
        ("-128E1", "-1.28E+3"),
        ("123456789012345678901234567890", "12345678901234567890123456789E+1"),
        ("12.5", "12.5"),
    ],
)
def test_decimals_lose_zeros_at_their_end(spelling: str, form: str) -> None:
    assert canonical(Native("decimal"), as_decimal(spelling)) == [as_decimal(form)]


def test_no_scale_becomes_less_than_an_int32() -> None:
    values = [struct.pack(">ib", -(2**31) + 1, 100), struct.pack(">ib", -(2**31), 10)]
    assert canonical(Native("decimal"), *values) == [values[1]] * 2


def test_other_natives() -> None:
    assert canonical(Native("varint"), b"\0\0\x05", b"\xff\x80", b"\0\x80") == [b"\x05", b"\x80", b"\0\x80"]
    assert canonical(Native("boolean"), b"\0", b"\1", b"\x07", b"ab") == [b"\0", b"\1", b"\1", b"ab"]
    assert canonical(Native("float"), b"\xff\xff\0\0", b"\x80\0\0\0", bytes(4)) == [
        b"\x7f\xc0\0\0",
        b"\x80\0\0\0",
        bytes(4),
    ]
    assert canonical(Native("double"), b"\xff\xf0\0\0\0\0\0\1", b"\x7f\xf0" + bytes(6)) == [
        b"\x7f\xf8" + bytes(6),
        b"\x7f\xf0" + bytes(6),
    ]
    assert canonical(Native("text"), b"1.00", None, b"") == [b"1.00", None, b""]


def test_parts_of_frozen_values() -> None:
    one, other = as_decimal("1.0"), as_decimal("1")
    pair = parse_type("tuple<int, decimal>", {})
    assert canonical(pair, framed(None) + framed(one)) == [framed(None) + framed(other)]
    assert canonical(pair, framed(b"abcd") + framed(None), framed(b"abcd")) == [framed(b"abcd")] * 2
    assert canonical(pair, framed(None) + framed(None), framed(None), b"") == [framed(None), framed(None), b""]
    numbers = parse_type("frozen<set<decimal>>", {})
    assert canonical(numbers, struct.pack(">i", 1) + framed(one)) == [struct.pack(">i", 1) + framed(other)]
    vector = VectorType(Native("decimal"), 2)
    assert canonical(vector, b"\6" + as_decimal("1000") + b"\5" + other) == [b"\5" + as_decimal("1E+3") + b"\5" + other]


def test_a_long_vector_element_may_need_a_shorter_length() -> None:
    long = as_decimal("1" + "0" * 400)
    assert canonical(VectorType(Native("decimal"), 1), struct.pack(">H", 0x8000 | len(long)) + long) == [
        b"\5" + as_decimal("1E+400")
    ]


def test_which_types_have_aliases() -> None:
    assert all(has_aliases(parse_type(one, {})) for one in ("decimal", "frozen<map<text, double>>", "tuple<int>"))
    assert not any(has_aliases(parse_type(one, {})) for one in ("text", "timeuuid", "frozen<list<int>>", "inet"))
    assert not has_aliases(CustomType("a.b.C"))


def test_columns_are_typed_again() -> None:
    found = canonical_column(pa.array(["1.00", None, "1E+1", "10"]), Native("decimal"))
    assert found.to_pylist() == ["1", None, "1E+1", "1E+1"]


def test_a_misfit_with_needless_bytes_becomes_its_value() -> None:
    kind = Native("varint")
    cells = cells_of(pa.array([b"\0\5", b"\5", None, b""], pa.binary()))
    decoded, cells = decoded_clustering(decode(kind, cells), cells, kind)
    assert decoded.values.to_pylist() == ["5", "5", None, None]
    assert decoded.misfits is not None
    assert decoded.misfits.tolist() == [False, False, False, True]
