"""Cassandra's order of serialised values (docs/formats.md, 3.2), by plain comparison of two values."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from tests.commitlog_model.types import Type
from tests.commitlog_model.values import collection_elements, decode, tuple_fields, vector_elements

_BYTE_ORDER = ("text", "varchar", "ascii", "blob", "inet", "date", "time", "custom", "empty")
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "varint", "timestamp", "counter")


def compare(cql_type: Type, left: bytes | None, right: bytes | None) -> int:
    """Negative, zero or positive as ``left`` sorts before, with or after ``right``.

    Null sorts before every value, and an empty value before every other one. Equal values need not have equal bytes.
    """
    if not left or not right or left == right:
        return _sign(_emptiness(left), _emptiness(right))
    if cql_type.kind in _KEYS:
        key = _KEYS[cql_type.kind]
        return _sign(key(left), key(right))
    if cql_type.kind == "tuple" or cql_type.kind == "udt":
        pairs = zip(cql_type.inner, tuple_fields(cql_type, left), tuple_fields(cql_type, right), strict=True)
        return next((found for one, a, b in pairs if (found := compare(one, a, b))), 0)
    if cql_type.kind == "vector":
        return _compare_elements(cql_type.inner, vector_elements(cql_type, left), vector_elements(cql_type, right))
    per_element = len(cql_type.inner)
    elements = [collection_elements(one, per_element) for one in (left, right)]
    return _compare_elements(cql_type.inner, *elements)


def compare_clustering(
    columns: Sequence[tuple[Type, bool]], left: Sequence[bytes | None], right: Sequence[bytes | None]
) -> int:
    """Compare two clusterings by the columns that both have.

    :param columns: type of each clustering column, and whether it is descending
    """
    for (cql_type, descending), a, b in zip(columns, left, right, strict=False):
        found = compare(cql_type, a, b)
        if found:
            return -found if descending and a is not None and b is not None else found
    return 0


def _compare_elements(types: Sequence[Type], left: Sequence[bytes | None], right: Sequence[bytes | None]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        found = compare(types[i % len(types)], a, b)
        if found:
            return found
    return _sign(len(left), len(right))


def _sign(left: Any, right: Any) -> int:
    return (left > right) - (left < right)


def _emptiness(raw: bytes | None) -> int:
    return -1 if raw is None else min(len(raw), 1)


def _double(raw: bytes) -> tuple[bool, float, float]:
    """Java's Double.compare: −0.0 before 0.0, NaN after everything."""
    (value,) = struct.unpack(">f" if len(raw) == 4 else ">d", raw)
    return (True, 0.0, 0.0) if math.isnan(value) else (False, value, math.copysign(1, value))


def _uuid(raw: bytes) -> tuple[int, int, bytes]:
    version = raw[6] >> 4
    high = _uuid_time(raw) if version == 1 else int.from_bytes(raw[:8], "big")
    return version, high, raw[8:]


def _uuid_time(raw: bytes) -> int:
    return int.from_bytes(raw[6:8] + raw[4:6] + raw[:4], "big")


def _timeuuid(raw: bytes) -> tuple[int, tuple[int, ...]]:
    return _uuid_time(raw), struct.unpack(">8b", raw[8:])


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "big", signed=True)


_KEYS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(_BYTE_ORDER, bytes),
    **dict.fromkeys(_NUMBERS, _number),
    "boolean": lambda raw: raw != b"\0",
    "decimal": lambda raw: decode(Type("decimal"), raw),
    "double": _double,
    "float": _double,
    "timeuuid": _timeuuid,
    "uuid": _uuid,
}
