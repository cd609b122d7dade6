"""Changes that connectors are known to report incompletely or not at all, and what each stream reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cassandra.concurrent import execute_concurrent_with_args

KEYSPACE, TABLE = "facts", "baskets"
CREATION = (
    f"CREATE KEYSPACE {KEYSPACE} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 3}}",
    f"CREATE TABLE {KEYSPACE}.{TABLE} (shop text, id int, owner text static, note text, tags set<text>, "
    "prices map<text, int>, PRIMARY KEY (shop, id)) WITH cdc = true",
)
_BASKETS = f"{KEYSPACE}.{TABLE}"
_KEY = "WHERE shop = ? AND id = 0"

Value = Mapping[str, Any]
"""The value of a message, or of an event, as JSON."""


def _ours(told: Callable[[Value, Value], bool]) -> Callable[[Value], bool]:
    return lambda value: told(value["after"] or {}, value["cells"] or {})


def _debezium(told: Callable[[Value], bool]) -> Callable[[Value], bool]:
    """Wrap a judgement of Debezium's events: columns that an event does not have are empty."""
    return lambda value: told({name: cell or {} for name, cell in (value["after"] or {}).items()})


def _removed(cells: Value, column: str) -> bool:
    elements = (cells.get(column) or {}).get("elements") or []
    return any(element["identity"] == "gone" and element["deleted_at"] for element in elements)


def _is_first(note: Any, tags: Any, prices: Any) -> bool:
    return note == "first" and sorted(tags or ()) == ["a", "b"] and len(prices or ()) == 1


def _not_shown(after: Value, column: str) -> bool:
    """Tell whether an event has a column, and does not show the removed element as present."""
    return bool(after.get(column)) and "gone" not in (after[column].get("value") or ())


@dataclass(frozen=True)
class Kind:
    """A kind of change.

    :ivar cql: statement whose only parameter is the partition key; each change is to another row
    :ivar ours: tells whether our message reports the change
    :ivar debezium: tells whether Debezium's event does; in doubt it does
    """

    cql: str
    ours: Callable[[Value], bool]
    debezium: Callable[[Value], bool]


def _value(after: Value, column: str) -> Any:
    return after.get(column, {}).get("value")


KINDS = {
    "insert": Kind(
        f"INSERT INTO {_BASKETS} (shop, id, note, tags, prices) VALUES (?, 0, 'first', {{'a', 'b'}}, {{'x': 1}})",
        _ours(lambda after, _: _is_first(*map(after.get, ("note", "tags", "prices")))),
        _debezium(lambda after: _is_first(*(_value(after, column) for column in ("note", "tags", "prices")))),
    ),
    "static column": Kind(
        f"UPDATE {_BASKETS} SET owner = 'Ann' WHERE shop = ?",
        _ours(lambda after, _: after.get("owner") == "Ann"),
        _debezium(lambda after: _value(after, "owner") == "Ann"),
    ),
    "element removed from a set": Kind(
        f"UPDATE {_BASKETS} SET tags = tags - {{'gone'}} {_KEY}",
        _ours(lambda _, cells: _removed(cells, "tags")),
        _debezium(lambda after: _not_shown(after, "tags")),
    ),
    "key removed from a map": Kind(
        f"DELETE prices['gone'] FROM {_BASKETS} {_KEY}",
        _ours(lambda _, cells: _removed(cells, "prices")),
        _debezium(lambda after: _not_shown(after, "prices")),
    ),
    "set replaced, not added to": Kind(
        f"UPDATE {_BASKETS} SET tags = {{'new'}} {_KEY}",
        _ours(lambda after, cells: after.get("tags") == ["new"] and bool((cells.get("tags") or {}).get("deleted_at"))),
        _debezium(lambda after: bool(after.get("tags", {}).get("deletion_ts"))),
    ),
    "row deleted and inserted in a batch": Kind(
        f"BEGIN UNLOGGED BATCH DELETE FROM {_BASKETS} USING TIMESTAMP ? {_KEY}; "
        f"INSERT INTO {_BASKETS} (shop, id, note) VALUES (?, 0, 'second') USING TIMESTAMP ?; APPLY BATCH",
        _ours(lambda after, _: after.get("note") == "second"),
        _debezium(lambda after: _value(after, "note") == "second"),
    ),
}


@dataclass(frozen=True)
class Told:
    """The changes that a stream reports.

    :ivar messages: number of its messages
    :ivar rows: number of different keys
    :ivar told: number of reported changes, by kind
    """

    messages: int
    rows: int
    told: dict[str, int]


def write(session: Any, count: int, now_us: int) -> None:
    """Write ``count`` changes of each kind, at the session's consistency level."""
    for name, kind in KINDS.items():
        prepared = session.prepare(kind.cql)
        shops = [f"{name}-{number}" for number in range(count)]
        parameters = [(now_us, shop, shop, now_us + 1) if "BATCH" in kind.cql else (shop,) for shop in shops]
        execute_concurrent_with_args(session, prepared, parameters, concurrency=64)


def judge(events: Iterable[tuple[bytes, bytes]], *, ours: bool) -> Told:
    """Count the messages and the reported changes of a stream.

    :param events: keys and values as JSON
    """
    told: dict[str, set[str]] = {name: set() for name in KINDS}
    rows = set()
    messages = 0
    for key, value in events:
        shop, document = _payload(key)["shop"], _payload(value)
        messages += 1
        rows.add(key)
        name = shop.rpartition("-")[0]
        kind = KINDS[name]
        if (kind.ours if ours else kind.debezium)(document):
            told[name].add(shop)
    return Told(messages, len(rows), {name: len(shops) for name, shops in told.items()})


def _payload(text: bytes) -> Value:
    document: dict[str, Any] = json.loads(text)
    found: Value = document["payload"] if document.keys() == {"schema", "payload"} else document
    return found
