"""CQL literals: the values at the edges of each native type, and random ones of any type."""

from __future__ import annotations

import ipaddress
import uuid
from random import Random

from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, TupleType, UserType, VectorType

EDGES: dict[str, tuple[str, ...]] = {
    "ascii": ("'ascii ~ \"''\\'", "''", "'z'"),
    "bigint": ("9223372036854775807", "-9223372036854775808", "0", "-1"),
    "blob": ("0x00ff80", "0x", "0x5c22"),
    "boolean": ("true", "false"),
    "date": ("'2023-11-14'", "0", "4294967295", "2147483648", "'1969-12-31'"),
    "decimal": (
        "1.0",
        "-123456789012345678901234567890.000000000000000000123",
        "1E+3",
        "0.00",
        "-0.000000000000001",
        "1.00",
        "128",
        "5E-400",
    ),
    "double": ("1.7976931348623157E308", "-0.0", "NaN", "Infinity", "-Infinity", "4.9E-324", "1e10", "0.001"),
    "duration": ("1y2mo3d4h5m6s7ms8us9ns", "-1mo2d3ns", "0s", "P1DT12H", "2147483647mo", "-9223372036854775807ns"),
    "float": ("3.4028235E38", "-0.0", "NaN", "Infinity", "-Infinity", "1.4E-45", "0.1"),
    "inet": ("'127.0.0.1'", "'2001:db8::1'", "'::'", "'255.255.255.255'", "'::ffff:1:2'"),
    "int": ("2147483647", "-2147483648", "0", "-1"),
    "smallint": ("32767", "-32768", "0"),
    "text": ("'naïve ☃ 😀 \"''\\\t/'", "''", "'\x01\x7f\u2028'"),
    "time": ("'23:59:59.999999999'", "'00:00:00'", "'12:34:56.7'"),
    "timestamp": (
        "1700000000123",
        "-62135596800000",
        "253402300799999",
        "0",
        "-1",
        "'2023-11-14 22:13:20+0200'",
        "-62135596800001",
        "1000000000000000",
    ),
    "timeuuid": (
        "5e1fb3c0-8320-11ee-b962-0242ac120002",
        "00000000-0000-1000-8080-808080808080",
        "ffffffff-ffff-1fff-bf7f-7f7f7f7f7f7f",
    ),
    "tinyint": ("127", "-128", "0"),
    "uuid": (
        "123e4567-e89b-42d3-a456-426614174000",
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
    ),
    "varint": ("0", "-1", "127", "128", "-129", "123456789012345678901234567890123456789012345678901234567890"),
}
"""Every native type but counter. The first literal of each is an ordinary value."""

TEXTS = ("", "a", "b", "zz", "naïve", "☃", "it's", '"', "\\", "😀", "x" * 200)
NOT_IN_KEYS = ("NaN", "Infinity", "-Infinity", "-0.0")


def edge(name: str, number: int) -> str:
    """Return one of a native type's edge literals; numbers beyond their count begin anew."""
    return EDGES[name][number % len(EDGES[name])]


def quoted(text: str) -> str:
    """Return a text as a CQL literal."""
    return "'" + text.replace("'", "''") + "'"


def literal(random: Random, cql_type: CqlType, key: bool = False) -> str:
    """
    Return a random literal of a type.

    :param random: the source of chance.
    :param cql_type: any type but counter and custom ones.
    :param key: whether the value is compared (key column, set element, map key): then only one spelling of each value
        is used, because Cassandra takes decimals 1.0 and 1.00 for equal and keeps the one that came first.
    """
    match cql_type:
        case Native(name):
            return native(random, name, key)
        case ListType(element) | SetType(element):
            compared = key or isinstance(cql_type, SetType)
            items = ", ".join(literal(random, element, compared) for _ in range(random.choice((0, 1, 1, 2, 3))))
            return f"[{items}]" if isinstance(cql_type, ListType) else f"{{{items}}}"
        case MapType(of, value):
            count = random.choice((0, 1, 1, 2, 3))
            items = ", ".join(f"{literal(random, of, True)}: {literal(random, value, key)}" for _ in range(count))
            return f"{{{items}}}"
        case TupleType(fields):
            return f"({', '.join(_field(random, field, key) for field in fields)})"
        case UserType():
            pairs = zip(cql_type.field_names, cql_type.field_types, strict=True)
            return f"{{{', '.join(f'{name}: {_field(random, field, key)}' for name, field in pairs)}}}"
        case VectorType(element, dimension):
            return f"[{', '.join(literal(random, element, key) for _ in range(dimension))}]"
    raise ValueError(f"there is no literal of type {cql_type}")


def _field(random: Random, cql_type: CqlType, key: bool) -> str:
    return "null" if random.random() < 0.1 else literal(random, cql_type, key)


def native(random: Random, name: str, key: bool) -> str:
    """Return a random literal of a native type; the arguments are those of `literal`."""
    if name != "decimal" and random.random() < 0.15:
        edges = [one for one in EDGES[name] if not (key and one in NOT_IN_KEYS)]
        return random.choice(edges)
    match name:
        case "ascii":
            return quoted("".join(random.choices("abc'\" ~", k=random.randrange(1, 6))))
        case "text":
            return quoted("".join(random.choices(TEXTS, k=2)) + random.choice("xyz"))
        case "boolean":
            return random.choice(("true", "false"))
        case "blob":
            return f"0x{random.randbytes(random.randrange(1, 20)).hex()}"
        case "decimal":
            # a last digit that is not 0 leaves one spelling per value
            return (
                f"{random.choice(('', '-'))}{random.randrange(10 ** random.randrange(1, 25))}.{random.randrange(1, 10)}"
            )
        case "varint":
            return str(random.randrange(-(10**30), 10**30))
        case "double" | "float":
            return repr(random.randrange(-(1 << 20), 1 << 20) / 64 + 1 / 128)
        case "inet":
            six = random.random() < 0.3
            bits = random.getrandbits(128 if six else 32)
            return f"'{ipaddress.IPv6Address(bits) if six else ipaddress.IPv4Address(bits)}'"
        case "uuid" | "timeuuid":
            return str(uuid.UUID(int=random.getrandbits(128), version=4 if name == "uuid" else 1))
    return _moment_or_integer(random, name)


def _moment_or_integer(random: Random, name: str) -> str:
    match name:
        case "date":
            return str((1 << 31) + random.randrange(-30_000, 30_000))
        case "time":
            hours, minutes, seconds = random.randrange(24), random.randrange(60), random.randrange(60)
            return f"'{hours:02}:{minutes:02}:{seconds:02}.{random.randrange(10**9):09}'"
        case "timestamp":
            return str(random.randrange(-(10**12), 2 * 10**12))
        case "duration":
            sign = random.choice(("", "-"))
            return f"{sign}{random.randrange(1, 30)}mo{random.randrange(40)}d{random.randrange(10**14)}ns"
    bits = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}[name]
    return str(random.randrange(-(1 << (bits - 1)), 1 << (bits - 1)))
