"""The part of `statements.py` that writes every type of value."""

from __future__ import annotations

from collections.abc import Iterator

from tests.commitlogs.literals import EDGES, edge
from tests.commitlogs.schema import COMPARED, NATIVES

YEAR = 365 * 86400
NO_EMPTY = ("date", "smallint", "time", "tinyint", "duration")
"""Types of which Cassandra refuses an empty value."""


def natives() -> Iterator[str]:
    """Write every native type, its edges, nulls and unset columns."""
    columns = ", ".join(f"c_{name}" for name in NATIVES)
    for number in range(max(map(len, EDGES.values()))):
        values = ", ".join(edge(name, number) for name in NATIVES)
        yield f"INSERT INTO shop.natives (id, {columns}) VALUES ({number}, {values})"
    for number, name in enumerate(NATIVES):
        yield f"UPDATE shop.natives SET c_{name} = {edge(name, 0)} WHERE id = {100 + number}"
    yield f"INSERT INTO shop.natives (id, {columns}) VALUES (50, {', '.join(['null'] * len(NATIVES))})"
    values = '"c_text": "json ☃", "c_decimal": 1.50, "c_duration": "1mo", "c_inet": "::1", "c_date": "2020-02-29"'
    yield f"""INSERT INTO shop.natives JSON '{{"id": 51, {values}}}'"""
    yield """INSERT INTO shop.natives JSON '{"id": 51, "c_text": "unset", "c_int": 7}' DEFAULT UNSET"""
    yield """INSERT INTO shop.natives JSON '{"id": 51, "c_bigint": -7}' DEFAULT NULL"""
    yield """INSERT INTO shop.natives JSON '{"id": 52, "c_int": null, "c_text": ""}' DEFAULT UNSET"""
    yield "INSERT INTO shop.natives (id) VALUES (53)"
    yield f"INSERT INTO shop.natives (id, c_text) VALUES (54, '{'long ' * 1000}')"
    yield f"INSERT INTO shop.natives (id, c_blob) VALUES (55, 0x{bytes(range(256)).hex() * 2})"


def empties() -> Iterator[str]:
    """Write values of no bytes, which are not nulls."""
    for number, name in enumerate(name for name in NATIVES if name not in NO_EMPTY):
        yield f"INSERT INTO shop.empties (id, c_{name}) VALUES ({10 + number}, {_empty(name)})"
    yield f"UPDATE shop.empties USING TTL {YEAR} SET c_int = blobAsInt(0x), c_text = '' WHERE id = 30"
    yield "INSERT INTO shop.empties (id, c_int, c_text) VALUES (31, null, null)"


def _empty(name: str) -> str:
    return "0x" if name == "blob" else f"blobAs{name.capitalize()}(0x)"


def keys() -> Iterator[str]:
    """Write every type as a part of partition keys and clusterings."""
    clustering = ", ".join(f"c_{name}" for name in COMPARED)
    partition = ", ".join(f"k_{name}" for name in COMPARED)
    empty = [_empty(name) if name not in NO_EMPTY else edge(name, 0) for name in COMPARED]
    rows = [[edge(name, number) for name in COMPARED] for number in range(4)]
    for number, values in enumerate([*rows, empty]):
        yield f"INSERT INTO shop.clusterings (id, {clustering}, v) VALUES (1, {', '.join(values)}, 'v{number}')"
        yield f"INSERT INTO shop.keys ({partition}, v) VALUES ({', '.join(values)}, 'v{number}')"
    for values in (rows[1], empty):
        where = " AND ".join(f"c_{name} = {value}" for name, value in zip(COMPARED, values, strict=True))
        yield f"DELETE v FROM shop.clusterings WHERE id = 1 AND {where}"
    where = " AND ".join(f"c_{name} = {value}" for name, value in zip(COMPARED[:9], rows[2], strict=False))
    yield f"DELETE FROM shop.clusterings WHERE id = 1 AND {where} AND c_{COMPARED[9]} > {rows[0][9]}"
    keys = ("[1, 2]", "{'a': 1, 'b': 2}", "(1, 'x')", "{street: 's', number: 1, tags: {'t', 'u'}}")
    yield f"INSERT INTO shop.frozen_keys (k, c, t, u, v) VALUES ({', '.join(keys)}, 1)"
    yield "INSERT INTO shop.frozen_keys (k, c, t, u, v) VALUES ([1, 2], {}, (null, ''), {street: null}, 2)"
    yield "INSERT INTO shop.frozen_keys (k, c, t, u, v) VALUES ([], {'': 0}, (5, null), {number: 3}, 3)"
    yield "DELETE FROM shop.frozen_keys WHERE k = [1, 2] AND c = {} AND t > (7, 'y')"


def elements() -> Iterator[str]:
    """Write every type into lists, sets and maps."""
    for number, name in enumerate(NATIVES):
        first, second = edge(name, 0), edge(name, 1)
        sets = [f"l_{name} = [{first}, {second}, {first}]"]
        if name in COMPARED:
            sets += [f"s_{name} = {{{first}, {second}}}", f"m_{name} = {{{first}: {second}, {second}: {first}}}"]
        yield f"UPDATE shop.elements SET {', '.join(sets)} WHERE id = {number}"
        yield f"UPDATE shop.elements SET l_{name} = l_{name} + [{second}] WHERE id = 100"
    for name in COMPARED:
        first = edge(name, 0)
        change = f"s_{name} = s_{name} - {{{first}}}, m_{name}[{first}] = null"
        yield f"UPDATE shop.elements SET {change} WHERE id = {NATIVES.index(name)}"
    yield "INSERT INTO shop.elements (id, l_int, s_text, m_text) VALUES (101, [], {}, {})"
    yield "INSERT INTO shop.elements (id, s_decimal) VALUES (102, {1.0, 2.00})"
    yield "UPDATE shop.elements SET s_decimal = s_decimal + {1.00} WHERE id = 102"


def nested() -> Iterator[str]:
    """Write frozen and nested collections, tuples and user-defined types."""
    address = "{street: 'Main', number: 7, tags: {'a', 'b'}}"
    person = f"{{name: 'Ann', home: {address}, phones: {{'x': '1', 'y': '2'}}, size: (180, 0.5)}}"
    values = {
        "fl": "[3, 1, 2]",
        "fs": "{'b', 'a', ''}",
        "fm": "{'one': 1, '': 0}",
        "t": "(1, 'x', [1.5, -0.0])",
        "u": address,
        "fu": address,
        "p": person,
        "lm": "[{'k': [1, 2]}, {}, {'l': []}]",
        "mt": "{(1, 'a'): {123e4567-e89b-42d3-a456-426614174000}, (2, null): {}}",
        "su": f"{{{address}, {{street: null}}}}",
        "mu": f"{{'me': {person}, 'you': {{name: 'Bob'}}}}",
        "ft": f"{{1: (5, {address}), 2: (null, null)}}",
    }
    yield f"INSERT INTO shop.nested (id, {', '.join(values)}) VALUES (1, {', '.join(values.values())})"
    for number, (name, value) in enumerate(values.items()):
        yield f"INSERT INTO shop.nested (id, {name}) VALUES ({10 + number}, {value})"
    yield "INSERT INTO shop.nested (id, fl, fs, fm, t) VALUES (2, [], {}, {}, (null, null, null))"
    yield "UPDATE shop.nested SET u.street = 'Side', p.size = (1, 2.0) WHERE id = 1"
    yield "UPDATE shop.nested SET u.number = null, p.phones = null WHERE id = 1"
    yield "DELETE u.tags FROM shop.nested WHERE id = 1"
    yield "UPDATE shop.nested SET u = {street: 'New'} WHERE id = 14"
    yield "UPDATE shop.nested SET lm = lm + [{'z': [9]}], mt[(3, 'c')] = {}, su = su - {{street: null}} WHERE id = 1"
    yield "UPDATE shop.nested SET u.number = 9 WHERE id = 30"
    values = '"fm": {"a": 1}, "t": [2, "y", null], "u": {"street": "J"}, "mt": {"[4, \\"d\\"]": []}'
    yield f"""INSERT INTO shop.nested JSON '{{"id": 31, {values}}}'"""


def vectors() -> Iterator[str]:
    """Write vectors with elements of fixed and of variable length."""
    values = "[1.5, -0.0, 3], ['one', ''], [1, -2], [[1, 2], []], [[0.5, 1], [2, 3]], {'k': [7]}"
    yield f"INSERT INTO shop.vectors (id, f, t, s, n, l, m) VALUES (1, {values})"
    yield "UPDATE shop.vectors SET f = [0, 0, 0], l = l + [[9, 9]], m['n'] = [8] WHERE id = 2"
    yield "INSERT INTO shop.vectors (id, f, t) VALUES (3, null, ['☃', 'x'])"
    yield f"INSERT INTO shop.vectors (id, t) VALUES (4, ['{'y' * 300}', ''])"
