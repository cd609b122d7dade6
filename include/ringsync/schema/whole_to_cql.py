"""The statements that turn one whole schema into another, in an order in which they can be executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringsync.cql.identifiers import printable
from ringsync.schema.to_cql import change_types, column_statements, create_table, is_same_table
from ringsync.schema.whole import Keyspace, WholeSchema


@dataclass(frozen=True)
class Statement:
    """A statement that changes the schema of one keyspace."""

    keyspace: str
    ddl: str


def whole_statements(before: WholeSchema, after: WholeSchema) -> list[Statement]:
    """Write the statements that turn a schema into another, keyspace by keyspace.

    What uses a type goes before the type goes, and comes after it comes: tables and columns are dropped, then types
    dropped and made, then tables and columns made. What came and went in between is left out.
    """
    names = sorted({*before.keyspaces, *after.keyspaces})
    return [Statement(name, ddl) for name in names for ddl in _of_keyspace(name, before, after)]


def _of_keyspace(name: str, before: WholeSchema, after: WholeSchema) -> Iterator[str]:
    old, new = before.keyspaces.get(name), after.keyspaces.get(name)
    if new is None:
        yield f"DROP KEYSPACE {printable(name)};"
        return
    if old != new:
        yield f"{'CREATE' if old is None else 'ALTER'} KEYSPACE {printable(name)} WITH {_options(new)};"
    tables_before, tables = (
        {key: table for key, table in sorted(schema.tables.items()) if key[0] == name} for schema in (before, after)
    )
    there = {key: table for key, table in tables_before.items() if key in tables}
    changed = {key for key, table in there.items() if table != tables[key]}
    kept = {key for key, table in there.items() if key not in changed or is_same_table(table, tables[key])}
    for key, table in tables_before.items():
        if key not in kept:
            yield f"DROP TABLE {table.full_name};"
    columns = [column_statements(tables_before[key], tables[key]) for key in sorted(kept & changed)]
    for first, _ in columns:
        yield from first
    yield from change_types(before.types.get(name, {}), after.types.get(name, {}), drop=True)
    for key, table in tables.items():
        if key not in kept:
            yield create_table(table)
    for _, last in columns:
        yield from last


def _options(keyspace: Keyspace) -> str:
    replication = ", ".join(f"{_text(name)}: {_text(value)}" for name, value in keyspace.replication)
    return f"replication = {{{replication}}} AND durable_writes = {str(keyspace.durable_writes).lower()}"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
