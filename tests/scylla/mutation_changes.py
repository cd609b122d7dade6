"""What a mutation of the base table says, as change rows in the jsonl form of the model of commit logs.

This is made of the mutation itself, without its log rows: what comes out of these must say the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringsync.cql import types as cql
from tests.scylla.log_tables import Tables, raw
from tests.scylla_model.mutation import Bound, Cell, Collection, Element, Key, Mutation

Change = dict[str, Any]
SMALLINT = cql.Native("smallint")


def changes_of(mutation: Mutation, tables: Tables) -> list[Change]:
    """One change row for each fact: each has one cell, or one deletion, or the liveness of a row."""
    maker = _Maker(mutation, tables)
    found = [one for change in mutation.static for one in maker.change(None, change)]
    for row in mutation.rows:
        found += [one for change in row.changes for one in maker.change(row.key, change)]
        if row.marker is not None:
            found.append(maker.row(row.key, liveness=times(row.marker.timestamp, row.marker.ttl)))
    found += [maker.row(one.key, deletion=deletion(one.timestamp)) for one in mutation.row_deletions]
    for one in mutation.range_deletions:
        if not one.degenerate:
            bounds = {"start": maker.bound(one.start), "end": maker.bound(one.end)}
            found.append(maker.head("range_deletion") | {"range": bounds, "deletion": deletion(one.timestamp)})
    if mutation.partition_deletion:
        at = mutation.partition_deletion.timestamp
        found.append(maker.head("partition_deletion") | {"deletion": deletion(at)})
    return found


def times(timestamp: int, ttl: int | None) -> Change:
    """Timestamp, TTL and expiry: nobody knows when the write arrived, so the timestamp stands for that."""
    return {"timestamp": timestamp} | ({"ttl": ttl, "expires_at": timestamp // 10**6 + ttl} if ttl else {})


def deletion(timestamp: int) -> Change:
    """A deletion's times."""
    return {"timestamp": timestamp, "local_deletion_time": timestamp // 10**6}


class _Maker:
    def __init__(self, mutation: Mutation, tables: Tables) -> None:
        self.tables, self.mutation = tables, mutation
        keys = tables.base.partition_key
        parts = [raw(key.type, value) or b"" for key, value in zip(keys, mutation.key, strict=True)]
        composed = b"".join(len(part).to_bytes(2, "big") + part + b"\0" for part in parts)
        self.key = (parts[0] if len(parts) == 1 else composed).hex()

    def head(self, kind: str) -> Change:
        return {"table_id": self.tables.commitlog.id, "kind": kind, "raw_partition_key": self.key}

    def clustering(self, values: Key) -> list[str]:
        return [
            (raw(key.type, value) or b"").hex() for key, value in zip(self.tables.base.clustering, values, strict=False)
        ]

    def bound(self, bound: Bound) -> Change:
        return {"raw_clustering": self.clustering(bound.prefix), "inclusive": bound.inclusive}

    def row(self, key: Key | None, **content: Any) -> Change:
        head = self.head("static") if key is None else self.head("row") | {"raw_clustering": self.clustering(key)}
        return head | content

    def change(self, key: Key | None, change: Cell | Collection) -> Iterable[Change]:
        kind = self.tables.base.column(change.column).type
        if isinstance(change, Cell):
            yield self.row(key, cells=[self.cell(change.column, change, kind)])
            return
        if change.tombstone is not None:
            # Its local time is not in the log; that of the log row, 1 µs later, stands for it.
            local = {"local_deletion_time": (change.tombstone + 1) // 10**6}
            yield self.row(key, complex_deletions=[{"column": change.column, "timestamp": change.tombstone} | local])
        for element in change.elements:
            path, value = self.element(kind, element)
            yield self.row(key, cells=[self.cell(change.column, element, value) | {"raw_path": path.hex()}])

    @staticmethod
    def cell(column: str, change: Cell | Element, kind: cql.CqlType) -> Change:
        if change.value is None:
            return {"column": column, "deleted": True} | deletion(change.timestamp)
        data = b"" if isinstance(kind, cql.SetType) and not kind.frozen else raw(kind, change.value)
        assert data is not None
        return {"column": column, "raw": data.hex()} | times(change.timestamp, change.ttl)

    @staticmethod
    def element(kind: cql.CqlType, element: Element) -> tuple[bytes, cql.CqlType]:
        """The path of an element, and the type of its value; that of a set has none."""
        match kind:
            case cql.SetType(inner):
                path, value = raw(inner, element.key), kind
            case cql.MapType(inner, value):
                path = raw(inner, element.key)
            case cql.ListType(value):
                path = raw(cql.Native("timeuuid"), element.key)
            case cql.UserType(field_types=fields):
                path, value = raw(SMALLINT, element.key), fields[element.key]
        assert path is not None
        return path, value


def facts(changes: Iterable[Change]) -> list[Any]:
    """Take change rows apart: a sorted list with an entry for each cell, deletion and liveness."""
    found = []
    for change in changes:
        parts = ("cells", "complex_deletions", "liveness", "deletion")
        head = {k: v for k, v in change.items() if k not in (*parts, "token", "digest", "position")}
        for part in parts:
            content = change.get(part, [])
            for one in content if isinstance(content, list) else [content]:
                found.append(repr(sorted((head | {part: sorted(one.items())}).items())))
    return sorted(found)
