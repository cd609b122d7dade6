"""What a server's SELECT shows of a table, in a form that can be compared with the model's rows."""

from __future__ import annotations

import json
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from tests.commitlog_model.replay import Row, Shown
from tests.commitlog_model.types import Table, Type

UNTOLD: Any = object()
"""In a part of :class:`Shown`: the server was not asked, or could not answer."""
NULL = Shown(None, None, None, None)
_TEXTS = ("text", "varchar", "ascii")
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "varint", "counter", "boolean", "decimal", "float", "double")


def select(session: Any, table: Table) -> tuple[list[Row], int]:
    """All rows of a 5.0 server, values from SELECT JSON, and the second at which they were read.

    The times are read by a SELECT of their own: 5.0 fails to write those of a UDT's fields as JSON if one is null.
    """
    names = [name for name, *_ in [*table.partition_key, *table.clustering]]
    values = [*table.static, *table.regular]
    times = ", ".join(f"writetime({_quoted(name)}), ttl({_quoted(name)})" for name in values)
    source = f"FROM {_quoted(table.keyspace)}.{_quoted(table.name)}"
    while True:
        now = int(time.time())
        texts = [row.json for row in session.execute(f"SELECT JSON {', '.join(map(_quoted, names + values))} {source}")]
        all_times = [tuple(row) for row in session.execute(f"SELECT {times} {source}")] if times else [()] * len(texts)
        if int(time.time()) == now:
            break
    rows = []
    for text, row_times in zip(texts, all_times, strict=True):
        found = list(json.loads(text, parse_float=Decimal).values())
        row = {name: Shown(value, UNTOLD, None, None) for name, value in zip(names, found, strict=False)}
        for i, name in enumerate(values):
            expires_at = _expiry(row_times[2 * i + 1], now)
            row[name] = Shown(found[len(names) + i], UNTOLD, row_times[2 * i], expires_at)
        rows.append(row)
    return rows, now


def differences(table: Table, model: Iterable[Row], server: Iterable[Row]) -> list[str]:
    """What differs, in words; of the server's rows only what it has told is compared.

    Partitions may come in any order; the rows of one must be in the same order.
    """
    server = list(server)
    has_bytes = any(shown.raw is not UNTOLD for row in server for shown in row.values())
    ours, theirs = _by_partition(table, model, has_bytes), _by_partition(table, server, has_bytes)
    found = [f"{table.name}: the server has no partition {key}" for key in ours.keys() - theirs.keys()]
    found += [f"{table.name}: the model has no partition {key}" for key in theirs.keys() - ours.keys()]
    for key in ours.keys() & theirs.keys():
        if len(ours[key]) != len(theirs[key]):
            found.append(f"{table.name} {key}: {len(ours[key])} rows, the server has {len(theirs[key])}")
        for a, b in zip(ours[key], theirs[key], strict=False):
            found += [
                f"{table.name} {key} {name} {cells[0].value}: {part} {mine!r}, the server has {its!r}"
                for name in table.types
                if (cells := (a.get(name, NULL), b.get(name, NULL)))
                for part, mine, its in _parts(table.types[name], *cells)
                if repr(mine) != repr(its)
            ]
    return found


def comparable(cql_type: Type, value: Any) -> Any:
    """A JSON value with what the two sides write differently made equal, and maps as lists of pairs."""
    kind = cql_type.kind
    if value is None or (value == "" and kind not in _TEXTS):
        return None
    if kind in ("float", "double"):
        return None if isinstance(value, str) else _rounded(kind, float(value))
    if kind == "decimal":
        return str(Decimal(value))
    if kind in ("list", "set", "vector"):
        return [comparable(cql_type.inner[0], one) for one in value]
    if kind == "map":
        return [[_map_key(cql_type.inner[0], k), comparable(cql_type.inner[1], v)] for k, v in value.items()]
    if kind == "tuple":
        return [comparable(inner, one) for inner, one in zip(cql_type.inner, value, strict=True)]
    if kind == "udt":
        return [[k, comparable(inner, v)] for inner, (k, v) in zip(cql_type.inner, value.items(), strict=True)]
    return value


def _by_partition(table: Table, rows: Iterable[Row], has_bytes: bool) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        key = [(cql_type, row[name]) for name, cql_type in table.partition_types]
        identity = [shown.raw if has_bytes else comparable(cql_type, shown.value) for cql_type, shown in key]
        found[repr(identity)].append(row)
    return found


def _parts(cql_type: Type, mine: Shown, its: Shown) -> Iterator[tuple[str, Any, Any]]:
    if its.value is not UNTOLD:
        yield "value", comparable(cql_type, mine.value), comparable(cql_type, its.value)
    if its.raw is not UNTOLD:
        yield "bytes", mine.raw, its.raw
    if its.writetime is not UNTOLD:
        yield "writetime", _listed(mine.writetime), _listed(its.writetime)
        yield "expires at", _listed(mine.expires_at), _listed(its.expires_at)


def _map_key(cql_type: Type, text: str) -> Any:
    has_text = cql_type.kind not in (*_NUMBERS, "list", "set", "map", "tuple", "udt", "vector")
    if has_text or text in ("NaN", "Infinity", "-Infinity", ""):
        return comparable(cql_type, text)
    return comparable(cql_type, json.loads(text, parse_float=Decimal))


def _rounded(kind: str, value: float) -> float:
    return float(struct.unpack(">f", struct.pack(">f", value))[0]) if kind == "float" else value


def _expiry(ttl: Any, now: int) -> Any:
    if isinstance(ttl, list):
        return [_expiry(one, now) for one in ttl]
    return None if ttl is None else now + ttl


def _listed(times: Any) -> Any:
    """Where no element has a time the server says null, or a list of nulls."""
    return None if isinstance(times, list) and all(one is None for one in times) else times


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
