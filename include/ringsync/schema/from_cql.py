"""Table schemas from CQL text: the output of DESCRIBE, or the schema.cql of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ringsync.cql.identifiers import printable
from ringsync.cql.types import CqlType, CqlTypeError, UnknownTypeError, UserType, parse_type
from ringsync.schema.cql_statements import ColumnText, Statements, TableText
from ringsync.schema.description import UserTypeError, parse_dropped_type, resolve_user_types
from ringsync.schema.table import Column, DroppedColumn, Schema, SchemaError, TableSchema, UnreadableTable


def parse_schema(text: str, source_name: str) -> Schema:
    """Read the tables and materialised views that a CQL text describes.

    The text may be several files, joined. The later of two CREATE TABLE with the same id counts, with the statements
    that follow it. Tables with the same name and different ids are different tables. The later of two CREATE TYPE with
    one name counts. A table without an id (DESCRIBE without WITH INTERNALS) gets an empty one. Keyspaces, indexes,
    functions, roles and the like are ignored.

    Unreadable are tables with COMPACT STORAGE, views without their table, and tables with a type that the text does not
    create: the schema.cql of a snapshot leaves out types that are used only inside other types, and DESCRIBE TABLE
    leaves out all types.

    :param text: output of ``DESCRIBE SCHEMA | KEYSPACE | TABLE … [WITH INTERNALS]``, or schema.cql files
    :param source_name: name of the file, for messages
    :raises SchemaError: the text has anything else; the message has file, line, column, and what was expected
    """
    statements = Statements(text, source_name)
    user_types = {keyspace: _resolve(statements, keyspace) for keyspace in statements.user_types}
    tables, unreadable = [], []
    for table in statements.tables.values():
        try:
            tables.append(_build(statements, _with_columns(statements, table), user_types.get(table.keyspace, {})))
        except _UnreadableError as reason:
            unreadable.append(UnreadableTable(table.keyspace, table.name, table.table_id, str(reason)))
    return Schema(tuple(tables), tuple(unreadable))


class _UnreadableError(SchemaError):
    """An error: the text does not say enough about a table."""


def _resolve(statements: Statements, keyspace: str) -> dict[str, UserType]:
    """Resolve the user-defined types of a keyspace, without those that contain an unknown type."""
    texts = statements.user_types[keyspace]
    fields = {name: [(part.name, part.type_text) for part in parts] for name, (_, parts) in texts.items()}
    while True:
        try:
            return resolve_user_types(keyspace, fields)
        except UserTypeError as error:
            if not isinstance(error.__cause__, UnknownTypeError):
                statements.error(str(error), texts[error.name][0])
            del fields[error.name]


def _with_columns(statements: Statements, table: TableText) -> TableText:
    """Return a table unchanged, and a view with the columns of its table."""
    if table.compact:
        raise _UnreadableError(
            "is declared WITH COMPACT STORAGE, whose hidden columns no text shows: read the schema from the cluster, "
            "or run ALTER TABLE … DROP COMPACT STORAGE and describe it again"
        )
    if table.base is None:
        return table
    base = statements.newest.get(table.base)
    if base is None:
        name = ".".join(map(printable, table.base))
        raise _UnreadableError(f"is a materialised view of {name}, whose CREATE TABLE is missing: add it to the text")
    for name in base.columns if table.selected is None else table.selected:
        if name not in base.columns:
            statements.error(f"{base.full_name} has no column {name}, which its view selects", table.start)
        table.columns[name] = base.columns[name]
    for name in (*table.partition_key, *table.clustering):
        if name not in table.columns:
            statements.error(f"{table.full_name} lacks {name}, which its PRIMARY KEY names", table.start)
    return table


def _build(statements: Statements, text: TableText, user_types: Mapping[str, UserType]) -> TableSchema:
    def parsed(column: ColumnText, parse: Callable[[str, Mapping[str, UserType]], CqlType] = parse_type) -> CqlType:
        try:
            return parse(column.type_text, user_types)
        except UnknownTypeError as error:
            raise _UnreadableError(
                f"has a column {column.name} whose type needs a CREATE TYPE that is missing or incomplete ({error}): "
                f"add what DESCRIBE KEYSPACE {printable(text.keyspace)} WITH INTERNALS prints"
            ) from error
        except CqlTypeError as error:
            statements.error(f"column {column.name} of {text.full_name}: {error}", column.start)

    keys = (*text.partition_key, *text.clustering)
    others = sorted((c for c in text.columns.values() if c.name not in keys), key=lambda c: c.name.encode())
    types = {name: parsed(column) for name, column in text.columns.items()}
    columns = (
        *(Column(name, "partition_key", types[name]) for name in text.partition_key),
        *(Column(name, "clustering", types[name], text.descending.get(name, False)) for name in text.clustering),
        *(Column(column.name, "static", types[column.name]) for column in others if column.static),
        *(Column(column.name, "regular", types[column.name]) for column in others if not column.static),
    )
    dropped = tuple(
        DroppedColumn(name, "static" if column.static else "regular", parsed(column, parse_dropped_type), dropped_at)
        for name, (column, dropped_at) in sorted(text.dropped.items(), key=lambda item: item[0].encode())
    )
    return TableSchema(text.keyspace, text.name, text.table_id, columns, dropped)
