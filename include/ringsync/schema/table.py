"""What a table looks like: keys, columns, types. The one description that every step works from."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from ringsync.cql.identifiers import printable
from ringsync.cql.types import COUNTER, CqlType, is_multicell

ColumnKind = Literal["partition_key", "clustering", "static", "regular"]


class SchemaError(ValueError):
    """A table or a text cannot be read by ringsync; the message says why and what to do."""


@dataclass(frozen=True)
class Column:
    """One column. ``descending`` is meaningful for clustering columns only."""

    name: str
    kind: ColumnKind
    type: CqlType
    descending: bool = False

    @property
    def is_key(self) -> bool:
        return self.kind in ("partition_key", "clustering")

    @property
    def is_multicell(self) -> bool:
        """Whether each element is a cell with its own writetime and TTL."""
        return not self.is_key and is_multicell(self.type)

    @property
    def is_counter(self) -> bool:
        return self.type == COUNTER


@dataclass(frozen=True)
class DroppedColumn:
    """A column that the table had: commit logs and SSTables from before still name it.

    A column that was added again under its old name is among the table's columns, too.

    :ivar type: as it was, but with user-defined types spelled out as tuples
    :ivar dropped_at: µs; what was written to the column at this time or before is gone. ``system_schema`` keeps whole
        milliseconds only
    """

    name: str
    kind: Literal["static", "regular"]
    type: CqlType
    dropped_at: int

    @property
    def is_multicell(self) -> bool:
        """Whether each element is a cell with its own writetime and TTL."""
        return is_multicell(self.type)


@dataclass(frozen=True)
class TableSchema:
    """A table as of one moment.

    :ivar table_id: Cassandra's table id, 32 hexadecimal digits; a re-created table has another. Empty: the text that
        the table comes from does not tell it, see :meth:`Schema.by_id`
    :ivar columns: partition key in its order, clustering in its order, then static and regular columns by name
    :ivar dropped: columns that it had, by name
    """

    keyspace: str
    name: str
    table_id: str
    columns: tuple[Column, ...]
    dropped: tuple[DroppedColumn, ...] = ()

    @property
    def full_name(self) -> str:
        """``keyspace.table`` as CQL prints it."""
        return f"{printable(self.keyspace)}.{printable(self.name)}"

    def of_kind(self, *kinds: ColumnKind) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.kind in kinds)

    @property
    def partition_key(self) -> tuple[Column, ...]:
        return self.of_kind("partition_key")

    @property
    def clustering(self) -> tuple[Column, ...]:
        return self.of_kind("clustering")

    @property
    def key_columns(self) -> tuple[Column, ...]:
        """Partition key, then clustering."""
        return self.of_kind("partition_key", "clustering")

    @property
    def value_columns(self) -> tuple[Column, ...]:
        """Static and regular columns."""
        return self.of_kind("static", "regular")

    @property
    def has_counters(self) -> bool:
        """Whether it is a table of counters: statements then add, and take no timestamps."""
        return any(column.is_counter for column in self.columns)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def only(self, columns: Collection[str]) -> TableSchema:
        """The table with these columns and its key.

        :raises ValueError: for a name that is no column; names columns that come near
        """
        known = {column.name for column in self.columns}
        for name in columns:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(c.name for c in self.columns)}"
                raise ValueError(f"{self.full_name} has no column {name}; {hint}")
        return replace(self, columns=tuple(c for c in self.columns if c.is_key or c.name in columns))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides how rows are read; equal digests mean the same schema.

        A column that was dropped and added again is another one: what was written to the first is gone. Other dropped
        columns are no part of it: a SELECT does not return them, and the digests that plans and replicas keep were made
        without them. Dropping a column that is there changes the digest by itself.
        """
        names = {column.name for column in self.columns}
        description = [
            [self.keyspace, self.name, self.table_id],
            *[[c.name, c.kind, _describe(c.type), c.descending] for c in self.columns],
            *[[before.name, before.dropped_at] for before in self.dropped if before.name in names],
        ]
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()


@dataclass(frozen=True)
class UnreadableTable:
    """A table whose layout is not known.

    :ivar table_id: as in :class:`TableSchema`
    :ivar reason: why, and what to do, as a sentence without its subject and its full stop
    """

    keyspace: str
    name: str
    table_id: str
    reason: str


@dataclass(frozen=True)
class Schema:
    """The tables and materialised views of a cluster, or of a text that describes them.

    Two tables may have one name: a table and the one that was dropped before it.
    """

    tables: tuple[TableSchema, ...]
    unreadable: tuple[UnreadableTable, ...] = ()

    @property
    def ids(self) -> frozenset[str]:
        """Of all tables: one that cannot be understood is there, too."""
        return frozenset([one.table_id for one in self.tables] + [one.table_id for one in self.unreadable])

    def by_id(self) -> dict[str, TableSchema]:
        """The tables by id: how a commit log names them.

        :raises SchemaError: when there are tables whose id is not known
        """
        found = {table.table_id: table for table in self.tables if table.table_id}
        identified = {table.full_name for table in found.values()}
        missing = sorted({table.full_name for table in self.tables if not table.table_id} - identified)
        if missing:
            shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
            raise SchemaError(
                f"the id of {shown} is missing, and a commit log names tables by their id: take the text that "
                "DESCRIBE SCHEMA WITH INTERNALS prints, or the schema.cql of a snapshot"
            )
        return found


def _describe(cql_type: CqlType) -> str:
    """The type with user-defined types spelled out, so that a changed field changes the digest."""
    return repr(cql_type)
