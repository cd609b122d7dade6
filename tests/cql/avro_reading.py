"""Avro values of the exact mapping converted back to Arrow values, for comparisons in the tests of messages."""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

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


def arrow_values(cql_type: CqlType, data: Sequence[Any]) -> pa.Array:
    """Convert Python objects of an Avro reader back to Arrow values, by the exact mapping.

    :param data: numbers, str, bytes, lists, dicts and None, read by :func:`without_logical_types` of the schema,
        since Python's date and datetime end at the year 9999 and Cassandra's do not
    :returns: an array of ``arrow_type(cql_type)``
    """
    match cql_type:
        case Native("decimal" | "varint"):
            return pa.array([None if one is None else big_decimal_text(one) for one in data], pa.string())
        case Native("timestamp"):
            return pc.multiply_checked(pa.array(data, pa.int64()), 1000).cast(arrow_type(cql_type))
        case Native() | CustomType():
            return pa.array(data, arrow_type(cql_type))
        case ListType(element) | SetType(element) | VectorType(element):
            items = arrow_values(element, [item for one in data if one is not None for item in one])
            return pa.ListArray.from_arrays(_lengths_to_offsets(data), items, mask=_is_none(data))
        case MapType(key, value):
            entries = [entry for one in data if one is not None for entry in _entries(one)]
            keys = arrow_values(key, [entry[0] for entry in entries])
            items = arrow_values(value, [entry[1] for entry in entries])
            offsets, mask = _lengths_to_offsets(data), _is_none(data)
            if pa.types.is_map(arrow_type(cql_type)):
                return pa.MapArray.from_arrays(offsets, keys, items, mask=mask)
            return pa.ListArray.from_arrays(
                offsets, pa.StructArray.from_arrays([keys, items], names=["key", "value"]), mask=mask
            )
        case TupleType(types) | UserType(field_types=types):
            names = [field.name for field in arrow_type(cql_type)]
            fields = [
                arrow_values(kind, [None if one is None else one[name] for one in data])
                for name, kind in zip(names, types, strict=True)
            ]
            return pa.StructArray.from_arrays(fields, names=names, mask=_is_none(data))
    raise AssertionError(f"no Arrow values for {cql_type!r}")


def big_decimal_text(data: bytes) -> str:
    """Write a big-decimal like Java's BigDecimal.toString; with scale 0 that is an integer's plain form."""
    length, start = _read_long(data, 0)
    scale, _ = _read_long(data, start + length)
    # By way of Decimal: Python's own int → str refuses more than 4300 digits.
    sign, digits, _ = decimal.Decimal(int.from_bytes(data[start : start + length], "big", signed=True)).as_tuple()
    return str(decimal.Decimal((sign, digits, -scale)))


def _read_long(data: bytes, position: int) -> tuple[int, int]:
    """Read an Avro long at a position. Return the value and the position after it."""
    zigzag = shift = 0
    while True:
        byte = data[position]
        zigzag |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return (zigzag >> 1) ^ -(zigzag & 1), position


def _entries(one: Any) -> list[tuple[Any, Any]]:
    return list(one.items()) if isinstance(one, dict) else [(entry["key"], entry["value"]) for entry in one]


def _lengths_to_offsets(data: Sequence[Any]) -> pa.Array:
    return pa.array(accumulate((0 if one is None else len(one) for one in data), initial=0), pa.int32())


def _is_none(data: Sequence[Any]) -> pa.Array:
    return pa.array([one is None for one in data], pa.bool_())
