"""Random CQL types and values, and a plain-Python serialiser that is the oracle of the codecs.

Nothing here uses the package's codecs. The Python form of a value, by type:

==========================  ==============================================================
integers, counter           ``int``
boolean, float, double      ``bool``, ``float`` (a float is one that 32 bits hold)
text, ascii; blob, custom   ``str``; ``bytes``
decimal, varint             ``decimal.Decimal`` (exponent = minus the scale), ``int``
uuid, timeuuid, inet        ``uuid.UUID``, ``ipaddress.IPv4Address | IPv6Address``
date, time, timestamp       ``int``: days since 1970, ns of the day, ms since 1970
duration                    ``(months, days, nanoseconds)``
list, set, vector           ``list``
map                         ``list`` of (key, value)
tuple, UDT                  ``list`` of fields; a shorter list lacks tail fields
null                        ``None``
==========================  ==============================================================
"""

from __future__ import annotations

import decimal
import ipaddress
import math
import struct
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from ringsync.cql.natives import NATIVES
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
)
from tests.commitlog_model.types import FIXED_LENGTHS

NATIVE_NAMES = sorted(NATIVES)

_STRUCT = {
    "bigint": ">q",
    "boolean": ">?",
    "counter": ">q",
    "double": ">d",
    "float": ">f",
    "int": ">i",
    "smallint": ">h",
    "time": ">q",
    "timestamp": ">q",
    "tinyint": ">b",
}


def cql_types(max_depth: int = 2) -> st.SearchStrategy[CqlType]:
    """Generate types nested up to ``max_depth`` levels below the outermost. Nested types are frozen and no counters."""
    scalar = st.sampled_from([name for name in NATIVE_NAMES if name != "counter"]).map(Native)
    if max_depth == 0:
        return scalar
    inner = cql_types(max_depth - 1)
    frozen = st.just(True)
    fields = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        scalar,
        st.builds(ListType, inner, frozen),
        st.builds(SetType, inner, frozen),
        st.builds(MapType, inner, inner, frozen),
        st.builds(TupleType, fields),
        fields.map(lambda types: UserType("ks", "udt", tuple(f"f{i}" for i in range(len(types))), types, True)),
        st.builds(VectorType, inner, st.integers(1, 3)),
        st.just(CustomType("org.apache.cassandra.db.marshal.BytesType")),
    )


def typed_values(cql_type: CqlType, missing_tails: bool = True) -> st.SearchStrategy[tuple[Any, bytes]]:
    """Generate (Python value, serialised bytes) of values that the Arrow type can hold; never null.

    :param missing_tails: whether tuples and UDTs may lack fields at their end, as after ALTER TYPE … ADD;
        such values decode to null fields, which encode to other bytes
    """
    return python_values(cql_type, missing_tails).map(lambda value: (value, serialise(cql_type, value)))


def python_values(cql_type: CqlType, missing_tails: bool = True) -> st.SearchStrategy[Any]:
    """Generate Python values of this type; never null, but elements, fields and map values inside may be null."""

    def nullable(inner: CqlType) -> st.SearchStrategy[Any]:
        return st.one_of(python_values(inner, missing_tails), st.none())

    match cql_type:
        case Native(name):
            return _native_values(name)
        case ListType(element) | SetType(element):
            return st.lists(nullable(element), max_size=4)
        case MapType(key, value):
            return st.lists(st.tuples(python_values(key, missing_tails), nullable(value)), max_size=4)
        case TupleType(fields) | UserType(field_types=fields):
            whole = st.tuples(*map(nullable, fields)).map(list)
            if not missing_tails:
                return whole
            return st.builds(lambda values, kept: values[:kept], whole, st.integers(1, len(fields)))
        case VectorType(element, dimension):
            return st.lists(python_values(element, missing_tails), min_size=dimension, max_size=dimension)
        case CustomType():
            return st.binary(max_size=20)


def _native_values(name: str) -> st.SearchStrategy[Any]:
    match name:
        case "bigint" | "counter" | "time":
            return _integers(64)
        case "int" | "date":
            return _integers(32)
        case "smallint":
            return _integers(16)
        case "tinyint":
            return _integers(8)
        case "timestamp":
            return st.integers(-(2**63 // 1000), (2**63 - 1) // 1000)
        case "varint":
            return st.one_of(_integers(64), _integers(128), _integers(2000))
        case "decimal":
            return st.builds(
                lambda unscaled, scale: decimal.Decimal(
                    (int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale)
                ),
                st.one_of(_integers(64), _integers(500)),
                st.one_of(st.integers(-20, 40), _integers(32)),
            )
        case "duration":
            return st.tuples(_integers(32), _integers(32), _integers(64))
        case "inet":
            return st.one_of(
                st.ip_addresses(),
                st.binary(min_size=4, max_size=4).map(
                    lambda tail: ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + tail)
                ),
                st.lists(st.sampled_from([0, 0, 1, 0xABCD]), min_size=8, max_size=8).map(
                    lambda groups: ipaddress.IPv6Address(struct.pack(">8H", *groups))
                ),
            )
    return {
        "ascii": st.text(st.characters(max_codepoint=127), max_size=20),
        "blob": st.binary(max_size=20),
        "boolean": st.booleans(),
        "double": st.floats(),
        "float": st.floats(width=32),
        "text": st.text(max_size=20),
        "timeuuid": st.uuids(version=1),
        "uuid": st.uuids(),
    }[name]


def _integers(bits: int) -> st.SearchStrategy[int]:
    limit = 2 ** (bits - 1)
    return st.one_of(st.integers(-limit, limit - 1), st.sampled_from([-limit, limit - 1, 0, -1]))


def serialise(cql_type: CqlType, value: Any) -> bytes:
    """Serialise a value as Cassandra does (docs/formats.md, 2.6). ``value`` is not null."""
    match cql_type:
        case Native(name):
            return _serialise_native(name, value)
        case ListType(element) | SetType(element):
            return struct.pack(">i", len(value)) + b"".join(_prefixed(element, one) for one in value)
        case MapType(key, inner):
            pairs = b"".join(_prefixed(key, k) + _prefixed(inner, v) for k, v in value)
            return struct.pack(">i", len(value)) + pairs
        case TupleType(fields) | UserType(field_types=fields):
            return b"".join(_prefixed(field, one) for field, one in zip(fields, value, strict=False))
        case VectorType(element):
            items = [serialise(element, one) for one in value]
            if vector_element_length(element) is not None:
                return b"".join(items)
            return b"".join(unsigned_vint(len(item)) + item for item in items)
        case CustomType():
            return bytes(value)


def vector_element_length(cql_type: CqlType) -> int | None:
    """Return the bytes of each vector element of this type; None: elements follow their length."""
    if isinstance(cql_type, VectorType):
        inner = vector_element_length(cql_type.element)
        return None if inner is None else inner * cql_type.dimension
    return FIXED_LENGTHS.get(cql_type.name) if isinstance(cql_type, Native) else None


def unsigned_vint(value: int) -> bytes:
    """Encode an unsigned vint (docs/formats.md, 2.1)."""
    for extra in range(8):
        if value < 1 << (7 * (extra + 1)):
            ones = (0xFF00 >> extra) & 0xFF
            return ((ones << (8 * extra)) | value).to_bytes(extra + 1, "big")
    return b"\xff" + value.to_bytes(8, "big")


def signed_vint(value: int) -> bytes:
    """Encode the zigzag form as an unsigned vint."""
    return unsigned_vint((value << 1) ^ (value >> 63) if value >= 0 else (~value << 1) | 1)


def minimal_bytes(value: int) -> bytes:
    """Encode the shortest two's complement, like BigInteger.toByteArray."""
    return value.to_bytes((value if value >= 0 else ~value).bit_length() // 8 + 1, "big", signed=True)


def _prefixed(cql_type: CqlType, value: Any) -> bytes:
    if value is None:
        return struct.pack(">i", -1)
    data = serialise(cql_type, value)
    return struct.pack(">i", len(data)) + data


def _serialise_native(name: str, value: Any) -> bytes:
    if name in _STRUCT:
        return struct.pack(_STRUCT[name], value)
    match name:
        case "ascii" | "text":
            return bytes(value.encode())
        case "date":
            return struct.pack(">I", value + 2**31)
        case "decimal":
            return struct.pack(">i", -value.as_tuple().exponent) + minimal_bytes(_unscaled(value))
        case "duration":
            return b"".join(map(signed_vint, value))
        case "inet":
            return bytes(value.packed)
        case "timeuuid" | "uuid":
            return bytes(value.bytes)
        case "varint":
            return minimal_bytes(value)
    return bytes(value)


def _unscaled(value: decimal.Decimal) -> int:
    sign, digits, _ = value.as_tuple()
    magnitude = int("".join(map(str, digits)))
    return -magnitude if sign else magnitude


def expected(cql_type: CqlType, value: Any) -> Any:
    """Return the content of the Arrow value as plain Python: timestamps in µs, dates in days, inet and uuid as text.

    The counterpart of an Arrow array whose timestamps and dates were cast to integers, see :func:`plain`.
    """
    if value is None:
        return None
    match cql_type:
        case Native(name):
            return _expected_native(name, value)
        case ListType(element) | SetType(element) | VectorType(element):
            return [expected(element, one) for one in value]
        case MapType(key, inner):
            return [(expected(key, k), expected(inner, v)) for k, v in value]
        case TupleType(fields) | UserType(field_types=fields):
            padded = [*value, *[None] * (len(fields) - len(value))]
            return tuple(expected(field, one) for field, one in zip(fields, padded, strict=True))
        case CustomType():
            return value


def _expected_native(name: str, value: Any) -> Any:
    match name:
        case "timestamp":
            return value * 1000
        case "decimal" | "varint" | "uuid" | "timeuuid":
            return str(value)
        case "inet":
            mapped = value.version == 6 and value.ipv4_mapped
            return f"::ffff:{mapped}" if mapped else str(value)
        case "float" | "double":
            return _bits(value)
    return value


def _bits(value: float) -> bytes:
    """Return the bits of a double; all NaN have the same."""
    return b"NaN" if math.isnan(value) else struct.pack(">d", value)


def plain(array: Any) -> list[Any]:
    """Convert an Arrow array to the Python of :func:`expected`: structs as tuples, maps as pairs, floats as bits."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        return list(array.cast(pa.int64()).to_pylist())
    if pa.types.is_date32(kind):
        return list(array.cast(pa.int32()).to_pylist())
    if pa.types.is_floating(kind):
        return [None if one is None else _bits(one) for one in array.to_pylist()]
    if pa.types.is_struct(kind):
        fields = [plain(field) for field in array.flatten()]
        rows = zip(*fields, strict=True)
        return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]
    if pa.types.is_map(kind):
        entries = list(zip(plain(array.keys), plain(array.items), strict=True))
        return _slices(array, entries)
    if pa.types.is_list(kind):
        return _slices(array, plain(array.values))
    return list(array.to_pylist())


def _slices(array: Any, flat: list[Any]) -> list[Any]:
    offsets = array.offsets.to_pylist()
    valid = array.is_valid().to_pylist()
    return [flat[a:b] if ok else None for a, b, ok in zip(offsets[:-1], offsets[1:], valid, strict=True)]
