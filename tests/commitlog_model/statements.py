"""Statements of every kind and values of every type, for the tests that compare the model with a server."""

from __future__ import annotations

import random
from collections.abc import Iterator

VALUES: dict[str, list[str]] = {
    "ascii": ["'a'", "''", "'~ \"quoted\" \\ back'"],
    "bigint": ["0", "-1", "9223372036854775807", "-9223372036854775808"],
    "blob": ["0x", "0x00", "0xff00", "0x7f", "0xff"],
    "boolean": ["true", "false"],
    "date": ["'1970-01-01'", "'1969-12-31'", "'-0044-03-15'", "'9999-12-31'", "0", "4294967295"],
    "decimal": ["0", "1.10", "-1.5", "1E+30", "-1E+30", "1E-30", "12345678901234567890.123456789", "0.00000001"],
    "double": ["0.0", "-0.0", "1.5", "-1.5", "NaN", "Infinity", "-Infinity", "5e-324", "1.7976931348623157e308", "0.1"],
    "duration": ["1y2mo3d4h5m6s7ms8us9ns", "-1mo2d3ns", "1d", "0s", "P2M3DT4H"],
    "float": ["0.0", "-0.0", "1.5", "-1.5", "NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e38", "0.1", "16777216"],
    "inet": ["'127.0.0.1'", "'255.0.0.1'", "'::1'", "'2001:db8::ff00:42:8329'", "'::'"],
    "int": ["0", "-1", "2147483647", "-2147483648"],
    "smallint": ["0", "-1", "32767", "-32768"],
    "text": ["'a'", "''", "'€ 𝄞 ''quoted'' \" \\'", "'line\nbreak\ttab'", "'b'", "'ab'"],
    "time": ["'00:00:00'", "'23:59:59.999999999'", "'08:12:54.1'"],
    "timestamp": [
        *("0", "-1", "1700000000123", "253402300800000", "-62135596800001", "-12219292800000", "-12219292800001"),
        *("-62167219200000", "-62135769600000", "-99999999999999", "9223372036854775807", "-9223372036854775808"),
    ],
    "timeuuid": [
        *("00000000-0000-1000-8080-808080808080", "ffffffff-ffff-1fff-bf7f-7f7f7f7f7f7f"),
        *("50554d6e-29bb-11e5-b345-feff819cdc9f", "50554d6e-29bb-11e5-b345-00ff819cdc9f"),
        "50554d6f-29bb-11e4-b345-feff819cdc9f",
    ],
    "tinyint": ["0", "-1", "127", "-128"],
    "uuid": [
        *("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"),
        *("123e4567-e89b-42d3-a456-426614174000", "923e4567-e89b-42d3-a456-426614174000"),
        *("50554d6e-29bb-11e5-b345-feff819cdc9f", "50554d6e-29bb-11e4-f345-feff819cdc9f"),
        *("ffffffff-0000-1000-8000-000000000000", "00000000-ffff-1000-8000-000000000000"),
    ],
    "varint": ["0", "-1", "127", "128", "-129", "123456789012345678901234567890", "-123456789012345678901234567890"],
}
"""Native type → CQL literals of values that are all different."""

EMPTY_VALUES = ("bigint", "decimal", "double", "float", "inet", "int", "timestamp", "uuid", "varint")
"""Types (beside text and blob) of which Cassandra takes a value without bytes, by ``blobAs…(0x)``.

An empty boolean, which it takes as well, makes SELECT JSON of 5.0.9 fail.
"""

USER_TYPE = 'CREATE TYPE {ks}.address (street text, "Number" int, tags frozen<set<text>>)'

COMPOSITES: dict[str, list[str]] = {
    "frozen<list<int>>": ["[]", "[1, 2]", "[1]", "[2]"],
    "frozen<set<text>>": ["{}", "{'b', 'a'}"],
    "frozen<map<int, text>>": ["{}", "{2: 'x', 1: 'y'}", "{1: 'y'}"],
    "frozen<tuple<int, text, double>>": ["(1, 'a', 1.5)", "(1, null, null)", "(null, 'x', NaN)"],
    "frozen<address>": ["{street: 's', \"Number\": 5, tags: {'x', 'w'}}", "{street: 's'}", '{"Number": 0}'],
    "frozen<map<frozen<list<int>>, frozen<set<int>>>>": ["{[1, 2]: {3}, [0]: {}}"],
    "vector<float, 3>": ["[1, 2.5, -3]", "[0, 0, 0.1]"],
    "vector<text, 2>": ["['a', '']", "['', 'b']"],
    "list<int>": ["[3, 1, 2]", "[]"],
    "list<double>": ["[0.1, NaN, 3]"],
    "set<decimal>": ["{1.5, -2, 1E+3}"],
    "set<timeuuid>": ["{" + ", ".join(VALUES["timeuuid"]) + "}"],
    "set<uuid>": ["{" + ", ".join(VALUES["uuid"]) + "}"],
    "map<text, int>": ["{'k2': 2, 'k1': 1, '': 0}"],
    "map<int, text>": ["{-1: 'a', 1: ''}"],
    "map<double, frozen<list<text>>>": ["{1e10: ['a'], 0.0001: [], -0.5: ['b', 'c'], 1e7: [], 9999999.5: []}"],
    "map<boolean, blob>": ["{true: 0x01, false: 0x}"],
    "map<frozen<tuple<int, text>>, timestamp>": ["{(1, 'a\"b'): 0, (0, null): 1}"],
    "map<frozen<address>, int>": ["{{street: 's', \"Number\": 5}: 1}"],
    "map<date, duration>": ["{'2020-02-29': 1mo}"],
    "address": ["{street: 's', \"Number\": 5, tags: {'x', 'w'}}", '{"Number": 7}'],
}
"""Other types → literals."""

BASE = 1_400_000_000_000_000
"""µs, before the epoch of the encoding: deltas wrap."""


def random_statements(table: str, count: int, seed: int) -> Iterator[str]:
    """Statements on a table of :data:`RANDOM_TABLE`'s form that meet each other often, at few different timestamps."""
    rng = random.Random(seed)
    for _ in range(count):
        statements = [_random_statement(table, rng) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
        yield statements[0] if len(statements) == 1 else f"BEGIN UNLOGGED BATCH {'; '.join(statements)}; APPLY BATCH"


RANDOM_TABLE = """
CREATE TABLE {name} (p int, c text, d decimal, s text STATIC, sm map<int, text> STATIC,
    i int, t text, f frozen<list<int>>, l list<int>, st set<decimal>, m map<text, text>, u address,
    PRIMARY KEY (p, c, d)) WITH cdc = true AND CLUSTERING ORDER BY (c ASC, d DESC)
"""
_TEXTS = ("'a'", "'b'", "''", "null")
_TAKE = {
    "i": ("0", "1", "-5", "null", "blobAsInt(0x)"),
    "t": _TEXTS,
    "f": ("[1]", "[]", "null"),
    "l": ("[1, 2]", "[]", "null"),
    "st": ("{1, 2.5}", "{1.0}", "null"),
    "m": ("{'a': 'x', 'b': 'y'}", "null"),
    "u": ("{street: 'x', \"Number\": 1}", "{street: null}", "null"),
}
_SET = (
    *("i = {i}", "t = {t}", "f = {f}", "l = {l}", "l = l + [7, 8]", "l = [9] + l", "st = {st}", "st = st + {{3, 4}}"),
    *("st = st - {{1}}", "m = {m}", "m['a'] = {t}", "m = m + {{'c': 'z'}}", "m = m - {{'b'}}", "u = {u}"),
    *("u.street = {t}", 'u."Number" = 3'),
)
_SET_STATIC = ("s = {t}", "sm[1] = {t}", "sm = {{1: 'q', 2: 'r'}}", "sm = sm - {{2}}", "sm = null")
_DELETED = ("i", "t", "f", "l", "st", "m", "u", "m['a']", "u.street", "i, m")


def _random_statement(table: str, rng: random.Random) -> str:
    at = BASE + rng.randrange(30)
    p, c, d = rng.randrange(3), rng.choice(("'a'", "'b'", "''")), rng.choice(("1", "2.5", "-3"))
    row = f"p = {p} AND c = {c} AND d = {d}"
    ttl = rng.choice(("", "", f" AND TTL {rng.choice((100_000, 100_001))}"))
    take = {name: rng.choice(values) for name, values in _TAKE.items()}
    match rng.randrange(12):
        case 0 | 1 | 2:
            names = rng.sample(list(_TAKE), rng.randrange(4))
            columns, values = ", ".join(["p, c, d", *names]), ", ".join([str(p), c, d, *(take[n] for n in names)])
            return f"INSERT INTO {table} ({columns}) VALUES ({values}) USING TIMESTAMP {at}{ttl}"
        case 3 | 4 | 5 | 6:
            assignment = rng.choice(_SET).format(**take)
            return f"UPDATE {table} USING TIMESTAMP {at}{ttl} SET {assignment} WHERE {row}"
        case 7:
            assignment = rng.choice(_SET_STATIC).format(**take)
            return f"UPDATE {table} USING TIMESTAMP {at}{ttl} SET {assignment} WHERE p = {p}"
        case 8:
            return f"DELETE {rng.choice(_DELETED)} FROM {table} USING TIMESTAMP {at} WHERE {row}"
        case 9:
            return f"DELETE FROM {table} USING TIMESTAMP {at - 10} WHERE {row}"
        case 10:
            return f"DELETE FROM {table} USING TIMESTAMP {at - 12} WHERE p = {p} AND {_range(rng, c, d)}"
    where = f"p = {p}"
    return f"DELETE {rng.choice(('', 's', 'sm'))} FROM {table} USING TIMESTAMP {at - 15} WHERE {where}"


def _range(rng: random.Random, c: str, d: str) -> str:
    lower, upper = rng.choice((">", ">=")), rng.choice(("<", "<="))
    return rng.choice(
        (
            f"c = {c}",
            f"c {lower} {c}",
            f"c {upper} {c}",
            f"c >= '' AND c {upper} {c}",
            f"c = {c} AND d {lower} {d}",
            f"c = {c} AND d {upper} {d}",
            f"c = {c} AND d > -3 AND d {upper} {d}",
            f"(c, d) {lower} ({c}, {d})",
            f"(c, d) {lower} ('', 1) AND (c, d) {upper} ({c}, {d})",
        )
    )
