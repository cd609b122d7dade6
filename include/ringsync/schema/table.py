"""What a table looks like: keys, columns, types. The one description that every step works from."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from ringsync.cql.identifiers import printable
from ringsync.cql.types import CqlType, is_multicell

ColumnKind = Literal["partition_key", "clustering", "static", "regular"]


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
        return str(self.type) == "counter"


@dataclass(frozen=True)
class TableSchema:
    """A table as of one moment.

    :ivar table_id: Cassandra's table id, 32 hexadecimal digits; a re-created table has another
    :ivar columns: partition key in its order, clustering in its order, then static and regular columns by name
    """

    keyspace: str
    name: str
    table_id: str
    columns: tuple[Column, ...]

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
        """SHA-256 (hex) of everything that decides how bytes are read; equal digests mean the same schema."""
        description = [
            [self.keyspace, self.name, self.table_id],
            *[[c.name, c.kind, _describe(c.type), c.descending] for c in self.columns],
        ]
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def _describe(cql_type: CqlType) -> str:
    """The type with user-defined types spelled out, so that a changed field changes the digest."""
    return repr(cql_type)
