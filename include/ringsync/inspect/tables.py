"""Choice of the tables whose changes are shown, and names of the tables of other records."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from ringsync.cluster.schema import SYSTEM_KEYSPACES, near_names
from ringsync.cql.identifiers import printable
from ringsync.inspect.files import InspectError
from ringsync.schema.table import Schema, TableSchema


@dataclass(frozen=True)
class Tables:
    """The known tables.

    :ivar by_id: tables that can be decoded, by id; Cassandra's own only on request
    :ivar unreadable: reason why a known table cannot be decoded, by id
    """

    by_id: dict[str, TableSchema]
    shown: frozenset[str]
    unreadable: dict[str, str]

    def reason(self, table_id: str) -> str:
        """Explain why the records of a table cannot be decoded."""
        if table_id in self.unreadable:
            return self.unreadable[table_id]
        return f"of table {uuid.UUID(table_id)}, which is not in the schema"


def choose_tables(schema: Schema, names: Sequence[tuple[str, str]]) -> Tables:
    """Choose the tables to read.

    :param names: keyspace and name of the tables to show; empty: all but Cassandra's own
    :raises SchemaError: the id of a table is not known
    :raises InspectError: no table has one of the names; the message lists similar names
    """
    tables = schema.by_id()
    for name in names:
        if not any((table.keyspace, table.name) == name for table in tables.values()):
            raise InspectError(_explain_missing(schema, name))
    by_id = {
        table_id: table
        for table_id, table in tables.items()
        if table.keyspace not in SYSTEM_KEYSPACES or (table.keyspace, table.name) in names
    }
    shown = frozenset(i for i, table in by_id.items() if not names or (table.keyspace, table.name) in names)
    unreadable = {table.table_id: f"of {table.full_name}, which {table.reason}" for table in schema.unreadable}
    return Tables(by_id, shown, unreadable)


def _explain_missing(schema: Schema, name: tuple[str, str]) -> str:
    full_name = ".".join(map(printable, name))
    for table in schema.unreadable:
        if (table.keyspace, table.name) == name:
            return f"table {full_name} {table.reason}"
    if near := near_names(*name, [(table.keyspace, table.name) for table in schema.tables]):
        return f"there is no table {full_name} in the schema; did you mean {' or '.join(near)}?"
    shown = sorted({table.full_name for table in schema.tables})
    listed = ", ".join(shown[:10]) + (", …" if len(shown) > 10 else "")
    return f"there is no table {full_name} in the schema; it has {listed or 'no tables at all'}"
