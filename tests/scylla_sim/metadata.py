"""The tables that tell a client of streams, as they are visible, and what changed in them.

Names are Scylla's. :mod:`tests.scylla_sim.materialise` writes the changes into a real server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TIMESTAMPS = "system_distributed.cdc_generation_timestamps"
STREAMS = "system_distributed.cdc_streams_descriptions_v2"
STREAMS_V1 = "system_distributed.cdc_streams_descriptions"
LOCAL = "system.cdc_local"
TABLET_TIMESTAMPS = "system.cdc_timestamps"
TABLET_STREAMS = "system.cdc_streams"

KEYS = {
    TIMESTAMPS: ("key", "time"),
    STREAMS: ("time", "range_end"),
    STREAMS_V1: ("time",),
    LOCAL: ("key",),
    TABLET_TIMESTAMPS: ("keyspace_name", "table_name", "timestamp"),
    TABLET_STREAMS: ("keyspace_name", "table_name", "timestamp", "stream_state", "stream_id"),
}
"""The primary key of each table (docs/scylla.md)."""

Row = dict[str, Any]
"""A row; times are ms since the epoch."""


@dataclass(frozen=True)
class Put:
    """A row was written."""

    table: str
    row: Row


@dataclass(frozen=True)
class Deleted:
    """A row was deleted; it has the key's columns only."""

    table: str
    row: Row


@dataclass
class Metadata:
    """The rows of the tables, and the changes that nobody has taken yet."""

    tables: dict[str, dict[tuple[Any, ...], Row]] = field(default_factory=lambda: {name: {} for name in KEYS})
    changes: list[Put | Deleted] = field(default_factory=list)

    def put(self, table: str, **row: Any) -> None:
        """Write a row, in place of one with the same key."""
        key = tuple(row[name] for name in KEYS[table])
        if self.tables[table].get(key) != row:
            self.tables[table][key] = row
            self.changes.append(Put(table, row))

    def delete(self, table: str, **where: Any) -> None:
        """Delete the rows that have the given values."""
        for key, row in list(self.tables[table].items()):
            if all(row[name] == value for name, value in where.items()):
                del self.tables[table][key]
                self.changes.append(Deleted(table, dict(zip(KEYS[table], key, strict=True))))

    def rows(self, table: str, **where: Any) -> list[Row]:
        """The rows that have the given values, by their keys."""
        found = (row for _, row in sorted(self.tables[table].items()))
        return [row for row in found if all(row[name] == value for name, value in where.items())]

    def drain(self) -> Sequence[Put | Deleted]:
        """Take the changes since the last time, in their order."""
        taken, self.changes = self.changes, []
        return taken
