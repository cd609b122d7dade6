"""Which tables' changes are shown, and whose the other records are."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from ringsync.changes.columns import LoggedTables, logged_tables
from ringsync.cluster.schema import SYSTEM_KEYSPACES, near_names
from ringsync.cql.identifiers import printable
from ringsync.inspect.files import InspectError
from ringsync.schema.system_tables import system_tables
from ringsync.schema.table import Schema, TableSchema


@dataclass(frozen=True)
class Tables:
    """The tables that are known.

    :ivar by_id: tables that can be decoded, by id; Cassandra's own only on request
    :ivar shown: ids of those that are asked for
    :ivar unreadable: why a known table cannot be decoded, by id
    """

    by_id: dict[str, TableSchema]
    shown: frozenset[str]
    unreadable: dict[str, str]

    @property
    def logged(self) -> LoggedTables:
        """For the reader."""
        return logged_tables(list(self.by_id.values()))

    @property
    def all_shown(self) -> bool:
        """Whether the change rows of every table that can be decoded are asked for."""
        return len(self.shown) == len(self.by_id)

    def is_system(self, table_id: str) -> bool:
        """Whether an id is that of one of Cassandra's own tables, which nobody asked for."""
        return table_id in system_tables()

    def reason(self, table_id: str) -> str:
        """Why the records of an unknown table cannot be decoded."""
        if table_id in self.unreadable:
            return self.unreadable[table_id]
        return f"of table {uuid.UUID(table_id)}, which is not in the schema"


def choose_tables(schema: Schema, names: Sequence[tuple[str, str]]) -> Tables:
    """The tables to read.

    :param names: keyspace and name of those to show; none: all but Cassandra's own
    :raises SchemaError: when there are tables whose id is not known
    :raises InspectError: for a name that no table has; lists names that come near
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
    unreadable = {
        one.table_id: f"of {printable(one.keyspace)}.{printable(one.name)}, which {one.reason}"
        for one in schema.unreadable
    }
    return Tables(by_id, shown, unreadable)


def _explain_missing(schema: Schema, name: tuple[str, str]) -> str:
    full_name = ".".join(map(printable, name))
    for one in schema.unreadable:
        if (one.keyspace, one.name) == name:
            return f"table {full_name} {one.reason}"
    if near := near_names(*name, [(table.keyspace, table.name) for table in schema.tables]):
        return f"there is no table {full_name} in the schema; did you mean {' or '.join(near)}?"
    shown = sorted({table.full_name for table in schema.tables})
    listed = ", ".join(shown[:10]) + (", …" if len(shown) > 10 else "")
    return f"there is no table {full_name} in the schema; it has {listed or 'no tables at all'}"
