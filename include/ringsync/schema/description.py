"""A table's schema as plain JSON, in the words of ``system_schema``. Plans carry it to the executors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ringsync.cql.types import CqlType, CqlTypeError, Native, UserType, parse_type, types_inside
from ringsync.schema.table import Column, ColumnKind, DroppedColumn, TableSchema

_KIND_ORDER: tuple[ColumnKind, ...] = ("partition_key", "clustering", "static", "regular")


class UserTypeError(CqlTypeError):
    """An error: the user-defined type ``name`` has a field whose type cannot be read."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


def describe(table: TableSchema) -> dict[str, Any]:
    """Describe a table by JSON values; :func:`from_description` gives back an equal table."""
    return {
        "keyspace": table.keyspace,
        "table": table.name,
        "table_id": table.table_id,
        "columns": [
            {"name": c.name, "kind": kind, "position": position, "type": str(c.type), "descending": c.descending}
            for kind in _KIND_ORDER
            for position, c in enumerate(table.of_kind(kind))
        ],
        "dropped": [
            {"name": old.name, "kind": old.kind, "type": str(old.type), "dropped_at": old.dropped_at}
            for old in table.dropped
        ],
        "user_types": user_types_of(table),
        "since_us": table.since_us,
        "is_selection": table.is_selection,
        "every_name": table.every_name,
        "former_keys": table.former_keys,
        "relabelled": table.relabelled,
    }


def user_types_of(table: TableSchema) -> dict[str, list[list[str]]]:
    """List the user-defined types of a table's columns, and of their fields: pairs of field and type, by name."""
    found: dict[str, list[list[str]]] = {}
    for cql_type in [column.type for column in table.columns] + [old.type for old in table.dropped]:
        _collect_user_types(cql_type, found)
    return found


def from_description(description: Mapping[str, Any]) -> TableSchema:
    """Build the table of a description. Columns may come in any order.

    :param description: keys ``keyspace``, ``table``, ``table_id``; ``columns``: list of ``name``, ``kind``,
        ``position``, ``type``, ``descending``; ``user_types``: list of [field, type] by type name; optional
        ``dropped``: list of ``name``, ``kind``, ``type``, ``dropped_at`` (µs); optional ``since_us``, ``is_selection``,
        ``every_name``, ``former_keys``, ``relabelled``
    :raises CqlTypeError: a type cannot be read
    """
    return build_table(description, resolve_user_types(description["keyspace"], description["user_types"]))


def build_table(description: Mapping[str, Any], user_types: Mapping[str, UserType]) -> TableSchema:
    """Build a table like :func:`from_description`, with resolved user-defined types (``user_types`` is not read)."""
    columns = sorted(
        description["columns"],
        key=lambda c: (
            _KIND_ORDER.index(c["kind"]),
            c["position"] if c["kind"] in ("partition_key", "clustering") else 0,
            c["name"].encode(),
        ),
    )
    parsed = [Column(c["name"], c["kind"], parse_type(c["type"], user_types), c["descending"]) for c in columns]
    dropped = [
        DroppedColumn(old["name"], old["kind"], parse_dropped_type(old["type"], user_types), old["dropped_at"])
        for old in sorted(description.get("dropped", ()), key=lambda old: old["name"].encode())
    ]
    names = (description["keyspace"], description["table"], description["table_id"])
    others = (description.get("since_us", 0), description.get("is_selection", False))
    former_keys = tuple(tuple(former) for former in description.get("former_keys", ()))
    every_name = tuple(description.get("every_name", ()))
    relabelled = tuple((name, label) for name, label in description.get("relabelled", ()))
    return TableSchema(*names, tuple(parsed), tuple(dropped), *others, every_name, former_keys, relabelled)


def parse_dropped_type(text: str, user_types: Mapping[str, UserType]) -> CqlType:
    """Parse the type of a dropped column.

    Cassandra writes user-defined types as tuples here, except inside a vector. Such a type may be dropped by now, and a
    snapshot does not write its CREATE TYPE. Then blob replaces it, whose bytes have the same layout.

    :raises CqlTypeError: the text has a syntax error
    """
    return parse_type(text, user_types, unknown=Native("blob"))


def resolve_user_types(keyspace: str, fields: Mapping[str, Iterable[Iterable[str]]]) -> dict[str, UserType]:
    """Parse the fields of user-defined types, which may contain each other. Return the types by name.

    :param fields: pairs of field name and type string, by type name
    :raises UserTypeError: the type of a field cannot be read; the message names type and field
    """
    pending = {name: [(field, text) for field, text in pairs] for name, pairs in fields.items()}
    resolved: dict[str, UserType] = {}
    while pending:
        problem: UserTypeError | None = None
        before = len(pending)
        for name, pairs in list(pending.items()):
            try:
                types = tuple(parse_type(text, resolved) for _, text in pairs)
            except CqlTypeError as error:
                problem = UserTypeError(f"user-defined type {keyspace}.{name}: {error}", name)
                problem.__cause__ = error
                continue
            resolved[name] = UserType(keyspace, name, tuple(field for field, _ in pairs), types)
            del pending[name]
        if problem and len(pending) == before:
            raise problem
    return resolved


def _collect_user_types(cql_type: CqlType, user_types: dict[str, list[list[str]]]) -> None:
    if isinstance(cql_type, UserType):
        fields = zip(cql_type.field_names, cql_type.field_types, strict=True)
        user_types[cql_type.name] = [[field, str(kind)] for field, kind in fields]
    for inner in types_inside(cql_type):
        _collect_user_types(inner, user_types)
