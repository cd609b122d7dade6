"""The schema of all users' keyspaces at one moment: keyspaces, user-defined types and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringsync.cql.types import UserType
from ringsync.schema.description import describe, from_description, resolve_user_types
from ringsync.schema.table import TableSchema

TableName = tuple[str, str]
"""Keyspace and table."""


@dataclass(frozen=True)
class Keyspace:
    """The options of a keyspace.

    :ivar replication: option and value, with the class, sorted by option
    """

    name: str
    replication: tuple[tuple[str, str], ...]
    durable_writes: bool = True


@dataclass(frozen=True)
class WholeSchema:
    """All users' keyspaces. Materialised views are not among the tables: they follow their base tables.

    :ivar types: by keyspace and name; each after those that it contains
    """

    keyspaces: Mapping[str, Keyspace] = field(default_factory=dict)
    types: Mapping[str, Mapping[str, UserType]] = field(default_factory=dict)
    tables: Mapping[TableName, TableSchema] = field(default_factory=dict)


def difference(before: WholeSchema, after: WholeSchema) -> dict[str, Any]:
    """Describe what differs between two schemas as JSON values, for :func:`applied`; empty: nothing."""
    keyspaces = {
        name: _keyspace_document(after.keyspaces.get(name))
        for name in sorted({*before.keyspaces, *after.keyspaces})
        if before.keyspaces.get(name) != after.keyspaces.get(name)
    }
    types = {
        name: [[kind.name, *_fields(kind)] for kind in after.types.get(name, {}).values()]
        for name in sorted({*before.types, *after.types})
        if dict(before.types.get(name, {})) != dict(after.types.get(name, {}))
    }
    tables = [
        [*name, describe(after.tables[name]) if name in after.tables else None]
        for name in sorted({*before.tables, *after.tables})
        if before.tables.get(name) != after.tables.get(name)
    ]
    document = {"keyspaces": keyspaces, "types": types, "tables": tables}
    return {name: part for name, part in document.items() if part}


def applied(before: WholeSchema, changed: Mapping[str, Any]) -> WholeSchema:
    """Return the schema after a change (:func:`difference`).

    :raises AttributeError, KeyError, TypeError, ValueError: the change is damaged
    """
    keyspaces, types, tables = dict(before.keyspaces), dict(before.types), dict(before.tables)
    for name, options in changed.get("keyspaces", {}).items():
        keyspaces.pop(name, None)
        if options is not None:
            replication = tuple(sorted(options["replication"].items()))
            keyspaces[name] = Keyspace(name, replication, bool(options["durable_writes"]))
    for name, kinds in changed.get("types", {}).items():
        types[name] = resolve_user_types(name, {kind: fields for kind, *fields in kinds})
    for keyspace, name, description in changed.get("tables", ()):
        tables.pop((keyspace, name), None)
        if description is not None:
            tables[keyspace, name] = from_description(description)
    return WholeSchema(keyspaces, {name: kinds for name, kinds in types.items() if kinds}, tables)


def _keyspace_document(keyspace: Keyspace | None) -> dict[str, Any] | None:
    if keyspace is None:
        return None
    return {"replication": dict(keyspace.replication), "durable_writes": keyspace.durable_writes}


def _fields(kind: UserType) -> list[list[str]]:
    return [[name, str(inner)] for name, inner in zip(kind.field_names, kind.field_types, strict=True)]
