"""A table's schema as plain JSON, in the words of ``system_schema``: what a plan carries to the executors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ringsync.cql.types import (
    CqlType,
    CqlTypeError,
    ListType,
    MapType,
    SetType,
    TupleType,
    UserType,
    VectorType,
    parse_type,
)
from ringsync.schema.table import Column, TableSchema

_KIND_ORDER = ("partition_key", "clustering", "static", "regular")


def describe(table: TableSchema) -> dict[str, Any]:
    """The table as JSON values; :func:`from_description` gives an equal table back."""
    positions = dict.fromkeys(_KIND_ORDER, 0)
    columns = []
    for column in table.columns:
        columns.append(
            {
                "name": column.name,
                "kind": column.kind,
                "position": positions[column.kind],
                "type": str(column.type),
                "descending": column.descending,
            }
        )
        positions[column.kind] += 1
    user_types: dict[str, list[list[str]]] = {}
    for column in table.columns:
        _collect_user_types(column.type, user_types)
    return {
        "keyspace": table.keyspace,
        "table": table.name,
        "table_id": table.table_id,
        "columns": columns,
        "user_types": user_types,
    }


def from_description(description: Mapping[str, Any]) -> TableSchema:
    """The table that a description stands for. Columns may come in any order.

    :param description: keys ``keyspace``, ``table``, ``table_id``; ``columns``: list of ``name``, ``kind``,
        ``position``, ``type``, ``descending``; ``user_types``: list of [field, type] by type name
    :raises CqlTypeError: for a type that cannot be understood
    """
    user_types = resolve_user_types(description["keyspace"], description["user_types"])
    columns = sorted(
        description["columns"],
        key=lambda c: (
            _KIND_ORDER.index(c["kind"]),
            c["position"] if c["kind"] in ("partition_key", "clustering") else 0,
            c["name"].encode(),
        ),
    )
    parsed = [Column(c["name"], c["kind"], parse_type(c["type"], user_types), c["descending"]) for c in columns]
    return TableSchema(description["keyspace"], description["table"], description["table_id"], tuple(parsed))


def resolve_user_types(keyspace: str, fields: Mapping[str, Iterable[Iterable[str]]]) -> dict[str, UserType]:
    """User-defined types by name, each field parsed, whatever type contains whatever other.

    :param keyspace: where the types live
    :param fields: pairs of field name and type string, by type name
    :raises CqlTypeError: for a field type that cannot be understood; the message names type and field
    """
    pending = {name: [(field, text) for field, text in pairs] for name, pairs in fields.items()}
    resolved: dict[str, UserType] = {}
    while pending:
        problem: CqlTypeError | None = None
        done = []
        for name, pairs in pending.items():
            try:
                types = tuple(parse_type(text, resolved) for _, text in pairs)
            except CqlTypeError as error:
                problem = CqlTypeError(f"user-defined type {keyspace}.{name}: {error}")
                continue
            resolved[name] = UserType(keyspace, name, tuple(field for field, _ in pairs), types)
            done.append(name)
        if problem and not done:
            raise problem
        for name in done:
            del pending[name]
    return resolved


def _collect_user_types(cql_type: CqlType, found: dict[str, list[list[str]]]) -> None:
    match cql_type:
        case ListType(element) | SetType(element) | VectorType(element):
            _collect_user_types(element, found)
        case MapType(key, value):
            _collect_user_types(key, found)
            _collect_user_types(value, found)
        case TupleType(fields):
            for field in fields:
                _collect_user_types(field, found)
        case UserType(_, name, field_names, field_types):
            found[name] = [[field, str(kind)] for field, kind in zip(field_names, field_types, strict=True)]
            for field in field_types:
                _collect_user_types(field, found)
