"""Serialised values as ``SELECT JSON`` shows them (docs/formats.md, 2.6), decoded in plain Python.

Numbers with digits that count (decimal) are ``decimal.Decimal``, varints ``int``, floats the shortest number that is
the same in their 32 or 64 bits; NaN and infinities are strings.
"""

from __future__ import annotations

import decimal
import ipaddress
import math
import re
import struct
import uuid
from typing import Any

from tests.commitlog_model.types import Type

_INTEGERS = ("tinyint", "smallint", "int", "bigint", "varint")
_NANOSECONDS = (("h", 3_600_000_000_000), ("m", 60_000_000_000), ("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000))
_GREATEST = {">f": float(2**128 - 2**104), ">d": math.nextafter(math.inf, 0)}
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def decode(cql_type: Type, raw: bytes) -> Any:
    """The JSON value of a serialised value; an empty one is "" for text, "0x" for blob, otherwise None.

    :raises ValueError: the bytes are no value of the type
    """
    try:
        return _decode(cql_type, raw)
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError(f"{raw.hex() or 'nothing'} is no {cql_type.kind}: {error}") from error


def _decode(cql_type: Type, raw: bytes) -> Any:
    kind = cql_type.kind
    if kind in ("text", "varchar", "ascii"):
        return raw.decode()
    if kind in ("blob", "custom"):
        return "0x" + raw.hex()
    if not raw:
        return None
    if kind in _INTEGERS:
        return int.from_bytes(raw, "big", signed=True)
    if kind in _SCALARS:
        return _SCALARS[kind](raw)
    if kind in ("list", "set"):
        return [_element(cql_type.inner[0], one) for one in collection_elements(raw)]
    if kind == "vector":
        return [decode(cql_type.inner[0], one) for one in vector_elements(cql_type, raw)]
    if kind == "map":
        parts = collection_elements(raw, 2)
        keys = [key_text(_element(cql_type.inner[0], key)) for key in parts[::2]]
        return dict(zip(keys, (_element(cql_type.inner[1], one) for one in parts[1::2]), strict=True))
    if kind in ("tuple", "udt"):
        values = [_element(t, one) for t, one in zip(cql_type.inner, tuple_fields(cql_type, raw), strict=True)]
        return values if kind == "tuple" else dict(zip(map(json_name, cql_type.fields), values, strict=True))
    raise ValueError(f"no values of type {kind} are expected")


def counter_value(context: bytes) -> int:
    """The sum of a counter context's shards, wrapped to 64 bits as Java does (C: db/context/CounterContext.total)."""
    total = sum(count for _, _, count, _ in counter_shards(context))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def counter_shards(context: bytes) -> list[tuple[bytes, int, int, str]]:
    """The shards of a counter context: (counter id, clock, count, ``global``, ``local`` or ``remote``)."""
    if not context:
        return []
    header = abs(struct.unpack_from(">h", context)[0])
    marked = struct.unpack_from(f">{header}h", context, 2)
    kinds = {(i if i >= 0 else i + 32768): ("local" if i >= 0 else "global") for i in marked}
    body = context[2 + 2 * header :]
    if len(body) % 32:
        raise ValueError(f"{context.hex()} is no counter context: its shards are not of 32 bytes")
    shards = struct.iter_unpack(">16sqq", body)
    return [(*shard, kinds.get(i, "remote")) for i, shard in enumerate(shards)]


def collection_elements(raw: bytes, per_element: int = 1) -> list[bytes | None]:
    """The elements of a frozen list or set, or keys and values in turn of a frozen map (2 ``per_element``)."""
    (count,) = struct.unpack_from(">i", raw)
    return _sized(raw, 4, count * per_element)


def tuple_fields(cql_type: Type, raw: bytes) -> list[bytes | None]:
    """The fields of a tuple or a frozen UDT; those that the value lacks are None."""
    found: list[bytes | None] = []
    position = 0
    while position < len(raw) and len(found) < len(cql_type.inner):
        (field,) = _sized(raw, position, 1)
        found.append(field)
        position += 4 + len(field or b"")
    return found + [None] * (len(cql_type.inner) - len(found))


def partition_key_components(key: bytes, count: int) -> list[bytes]:
    """The columns of a serialised partition key.

    :param count: of the columns; a single one is the key itself
    """
    if count == 1:
        return [key]
    found, position = [], 0
    for _ in range(count):
        (size,) = struct.unpack_from(">H", key, position)
        found.append(_slice(key, position + 2, size))
        position += size + 3
    return found


def vector_elements(cql_type: Type, raw: bytes) -> list[bytes]:
    """The elements of a vector."""
    length = cql_type.inner[0].fixed_length
    if length is not None:
        return [raw[i * length : (i + 1) * length] for i in range(cql_type.dimension)]
    found, position = [], 0
    for _ in range(cql_type.dimension):
        size, position = read_uvint(raw, position)
        found.append(_slice(raw, position, size))
        position += size
    return found


def read_uvint(data: bytes, position: int) -> tuple[int, int]:
    """An unsigned vint (docs/formats.md, 2.1) and the position after it."""
    first = data[position]
    more = 8 - (first ^ 0xFF).bit_length()
    value = first & (0xFF >> more) if more < 8 else 0
    return value << 8 * more | int.from_bytes(_slice(data, position + 1, more), "big"), position + 1 + more


def key_text(value: Any) -> str:
    """The text of a map's key in a JSON object: a string stays, any other value is its own JSON text."""
    return value if isinstance(value, str) else json_text(value)


def json_name(name: str) -> str:
    """A UDT's field as Cassandra names it in JSON: one with capitals stands in quotes (C: UserType.toJSONString)."""
    return name if name == name.lower() else f'"{name}"'


def json_text(value: Any) -> str:
    """The JSON text of a decoded value, with Cassandra's spaces and Java's numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return '"' + re.sub(r'["\\\x00-\x1f]', lambda m: _ESCAPES.get(m[0], f"\\u{ord(m[0]):04X}"), value) + '"'
        case float():
            return _java_text(value)
        case list():
            return "[" + ", ".join(map(json_text, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{json_text(k)}: {json_text(v)}" for k, v in value.items()) + "}"
    return str(value)


def _element(cql_type: Type, raw: bytes | None) -> Any:
    return None if raw is None else decode(cql_type, raw)


def _sized(raw: bytes, position: int, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    for _ in range(count):
        (size,) = struct.unpack_from(">i", raw, position)
        found.append(None if size < 0 else _slice(raw, position + 4, size))
        position += 4 + max(size, 0)
    return found


def _slice(raw: bytes, position: int, size: int) -> bytes:
    if position + size > len(raw):
        raise ValueError(f"{raw.hex()} ends before the {size} bytes at {position}")
    return raw[position : position + size]


def _floating(raw: bytes) -> float | str:
    form = ">f" if len(raw) == 4 else ">d"
    (value,) = struct.unpack(form, raw)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 18))
    return next(short for short in candidates if abs(short) <= _GREATEST[form] and struct.pack(form, short) == raw)


def _java_text(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return format(decimal.Decimal(repr(value)), "f")
    sign, digits, exponent = decimal.Decimal(repr(value)).normalize().as_tuple()
    first, *rest = map(str, digits)
    return f"{'-' * sign}{first}.{''.join(rest) or '0'}E{int(exponent) + len(rest)}"


def _decimal(raw: bytes) -> decimal.Decimal:
    (scale,) = struct.unpack_from(">i", raw)
    unscaled = int.from_bytes(raw[4:], "big", signed=True)
    sign, digits, _ = decimal.Decimal(unscaled).as_tuple()
    return decimal.Decimal((sign, digits, -scale))


def _date(raw: bytes) -> str:
    year, month, day = _civil(struct.unpack(">I", raw)[0] - (1 << 31))
    text = f"{'-' * (year < 0)}{abs(year):04}" if year <= 9999 else f"+{year}"
    return f"{text}-{month:02}-{day:02}"


def _time(raw: bytes) -> str:
    seconds, nanoseconds = divmod(struct.unpack(">q", raw)[0], 1_000_000_000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{nanoseconds:09}"


def _timestamp(raw: bytes) -> str:
    """As Java's ``yyyy-MM-dd HH:mm:ss.SSSX``: years BC are counted from 1 and lack their sign."""
    days, milliseconds = divmod(struct.unpack(">q", raw)[0], 86_400_000)
    year, month, day = _civil(days)
    year_of_era = year if year > 0 else 1 - year
    seconds, milliseconds = divmod(milliseconds, 1000)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{milliseconds:03}"
    return f"{'+' * (year_of_era > 9999)}{year_of_era:04}-{month:02}-{day:02} {clock}Z"


def _civil(days: int) -> tuple[int, int, int]:
    """Year, month and day of a day since 1970 in the Gregorian calendar (years from 1 March, eras of 400)."""
    era, day = divmod(days + 719_468, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5
    return 400 * era + year + (month >= 10), month + 3 if month < 10 else month - 9, day + 1


def _duration(raw: bytes) -> str:
    parts, position = [], 0
    for _ in range(3):
        value, position = read_uvint(raw, position)
        parts.append(value >> 1 ^ -(value & 1))
    months, days, nanoseconds = map(abs, parts)
    units = [("y", months // 12), ("mo", months % 12), ("d", days)]
    for unit, size in _NANOSECONDS:
        count, nanoseconds = divmod(nanoseconds, size)
        units.append((unit, count))
    units.append(("ns", nanoseconds))
    return "-" * any(part < 0 for part in parts) + "".join(f"{count}{unit}" for unit, count in units if count)


def _inet(raw: bytes) -> str:
    """As Java's getHostAddress: groups of IPv6 are not shortened, an IPv4 address in 16 bytes is an IPv4 address."""
    if len(raw) == 4:
        return str(ipaddress.IPv4Address(raw))
    mapped = ipaddress.IPv6Address(raw).ipv4_mapped
    return str(mapped) if mapped else ":".join(f"{group:x}" for group in struct.unpack(">8H", raw))


_SCALARS: dict[str, Any] = {
    "boolean": lambda raw: raw != b"\0",
    "counter": counter_value,
    "date": _date,
    "decimal": _decimal,
    "double": _floating,
    "duration": _duration,
    "float": _floating,
    "inet": _inet,
    "time": _time,
    "timestamp": _timestamp,
    "timeuuid": lambda raw: str(uuid.UUID(bytes=raw)),
    "uuid": lambda raw: str(uuid.UUID(bytes=raw)),
}
