"""The schema of a table: keys, columns, types. All steps work with it."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from ringsync.cql.identifiers import printable
from ringsync.cql.types import COUNTER, CqlType, is_multicell

ColumnKind = Literal["partition_key", "clustering", "static", "regular"]


class SchemaError(ValueError):
    """An error: ringsync cannot read a table or a text. The message says why and what to do."""


@dataclass(frozen=True)
class Column:
    """One column. ``descending`` concerns clustering columns only."""

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
    """A dropped column: older commit logs and SSTables still name it.

    A column that was added again under its old name is also among the table's columns.

    :ivar type: type of the column, with user-defined types written as tuples
    :ivar dropped_at: time of the drop, µs; cells written then or before are gone. ``system_schema`` keeps only whole
        milliseconds
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
    """The schema of a table at one moment.

    :ivar table_id: Cassandra's table id, 32 hexadecimal digits; a re-created table has another one. Empty: the text
        that describes the table does not have it, see :meth:`Schema.by_id`
    :ivar columns: partition key in its order, clustering in its order, then static and regular columns by name
    :ivar dropped: dropped columns, by name
    :ivar since_us: time of the statement that gave the table this schema, µs, by the clock of the node that executed
        it; 0: unknown. Schemas are equal whatever it is
    :ivar is_selection: whether columns of the table are left out
    :ivar every_name: labels of all columns that the table ever had, keys too, in the order in which they came; they
        decide the names in lake and messages. Empty: only the present ones are known. Schemas are equal whatever it is
    :ivar former_keys: earlier labels of each key column, the oldest first, in the order of :attr:`key_columns`; empty:
        none is known. Schemas are equal whatever it is
    :ivar relabelled: pairs of a column's name and its label, where another column had the name before. The label of any
        other column is its name. Schemas are equal whatever it is
    """

    keyspace: str
    name: str
    table_id: str
    columns: tuple[Column, ...]
    dropped: tuple[DroppedColumn, ...] = ()
    since_us: int = field(default=0, compare=False)
    is_selection: bool = field(default=False, compare=False)
    every_name: tuple[str, ...] = field(default=(), compare=False)
    former_keys: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    relabelled: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def full_name(self) -> str:
        """``keyspace.table``, with quotes where CQL needs them."""
        return f"{printable(self.keyspace)}.{printable(self.name)}"

    def label(self, name: str) -> str:
        """Return a column's label, which no other column of the table ever had."""
        return next((label for column, label in self.relabelled if column == name), name)

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
        """Whether this is a table of counters: then statements add, and take no timestamps."""
        return any(column.is_counter for column in self.columns)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def only(self, columns: Collection[str]) -> TableSchema:
        """Return the table with only these columns and its key.

        :raises ValueError: a name is no column; the message suggests a similar one, or lists all
        """
        known = {column.name for column in self.columns}
        for name in columns:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(c.name for c in self.columns)}"
                raise ValueError(f"{self.full_name} has no column {name}; {hint}")
        chosen = tuple(column for column in self.columns if column.is_key or column.name in columns)
        return replace(self, columns=chosen, is_selection=self.is_selection or chosen != self.columns)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all facts that decide how rows are read; equal digests mean the same schema.

        A column that was dropped and added again is another column: its earlier cells are gone. Other dropped columns
        are not included: a SELECT does not return them, and the digests in plans and replicas were made without them.
        Dropping a column changes the digest anyway.
        """
        names = {column.name for column in self.columns}
        description = [
            [self.keyspace, self.name, self.table_id],
            # A type's repr has the fields of user-defined types, so that a changed field changes the digest.
            *[[c.name, c.kind, repr(c.type), c.descending] for c in self.columns],
            *[[before.name, before.dropped_at] for before in self.dropped if before.name in names],
        ]
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()


@dataclass(frozen=True)
class UnreadableTable:
    """A table whose layout is unknown.

    :ivar reason: why, and what to do, as a sentence without its subject and its full stop
    """

    keyspace: str
    name: str
    table_id: str
    reason: str

    @property
    def full_name(self) -> str:
        """``keyspace.table`` as CQL prints it."""
        return f"{printable(self.keyspace)}.{printable(self.name)}"


@dataclass(frozen=True)
class Schema:
    """The tables and materialised views of a cluster, or of a text that describes them.

    Two tables may have one name: a table and an earlier one that was dropped.
    """

    tables: tuple[TableSchema, ...]
    unreadable: tuple[UnreadableTable, ...] = ()

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all tables, including unreadable ones."""
        return frozenset([table.table_id for table in self.tables] + [table.table_id for table in self.unreadable])

    def by_id(self) -> dict[str, TableSchema]:
        """Return the tables by id, by which a commit log names them.

        :raises SchemaError: the id of a table is unknown
        """
        by_id = {table.table_id: table for table in self.tables if table.table_id}
        identified = {table.full_name for table in by_id.values()}
        missing = sorted({table.full_name for table in self.tables if not table.table_id} - identified)
        if missing:
            shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
            raise SchemaError(
                f"the id of {shown} is missing, and a commit log names tables by their id: take the text that "
                "DESCRIBE SCHEMA WITH INTERNALS prints, or the schema.cql of a snapshot"
            )
        return by_id
