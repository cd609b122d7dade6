"""The schema of a moment in the past, from the histories of all tables: for old commit logs, without the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ringsync.changes.identity import TableVersion
from ringsync.ledger.table_versions import HistoryEntry, TableVersionError, history_named, names_of_histories
from ringsync.schema.table import DroppedColumn, Schema, TableSchema
from ringsync.storage.port import ObjectStore


@dataclass(frozen=True)
class PastSchema:
    """All recorded tables as they were at one moment, also those that were dropped since, or created later.

    :ivar versions: each table's version of that moment by table id, and of a table that was created later its first.
        Columns that it got later are among its dropped ones, since a log may go on after an ALTER; so all cells that
        the table ever had can be decoded, and have ids
    :ivar damaged: what is damaged of the histories; tables without any other version are left out
    """

    versions: dict[str, TableVersion]
    damaged: tuple[str, ...] = ()

    @property
    def schema(self) -> Schema:
        """The tables, to decode a commit log by."""
        return Schema(tuple(version.table for version in self.versions.values()))


def past_schema(store: ObjectStore, at_us: int | None = None) -> PastSchema:
    """Read the schema of a moment (:meth:`Histories.at`)."""
    return read_histories(store).at(at_us)


@dataclass(frozen=True)
class Histories:
    """The versions of all tables, by table id; and what of them cannot be read."""

    entries: dict[str, list[HistoryEntry]]
    damaged: tuple[str, ...]

    def at(self, at_us: int | None = None) -> PastSchema:
        """Return the schema of a moment.

        :param at_us: µs since the epoch, by the clocks of Cassandra's nodes; None: the newest version of each table
        """
        versions = {table_id: _version_at(of_table, at_us) for table_id, of_table in self.entries.items()}
        return PastSchema(versions, self.damaged)


def read_histories(store: ObjectStore) -> Histories:
    """Read the histories of all tables."""
    entries: dict[str, list[HistoryEntry]] = {}
    damaged: list[str] = []
    for name in names_of_histories(store):
        for entry in history_named(store, name):
            if isinstance(entry, TableVersionError):
                damaged.append(str(entry))
            else:
                entries.setdefault(entry.version.table_id, []).append(entry)
    return Histories(entries, tuple(damaged))


def _version_at(entries: Sequence[HistoryEntry], at_us: int | None) -> TableVersion:
    """Return the version of a moment, with all columns of all versions of the table.

    :param entries: versions of one table id, maybe under several names
    """
    newest = max((entry.version for entry in entries), key=lambda version: (len(version.names), version.number))
    by_time = sorted(entries, key=lambda entry: (entry.since_us, entry.version.number))
    begun = [entry for entry in by_time if at_us is None or entry.since_us <= at_us]
    chosen = (begun[-1] if begun else by_time[0]).version
    tables = [entry.version.table for entry in reversed(by_time)]
    return replace(chosen, table=_with_columns_of(chosen.table, tables), names=newest.names)


def _with_columns_of(table: TableSchema, others: Sequence[TableSchema]) -> TableSchema:
    """Add the columns of other versions of a table as dropped ones. They were never dropped: no cell is too old.

    :param others: versions; the first that has a column counts
    """
    known = {column.name for column in table.columns} | {dropped.name for dropped in table.dropped}
    missing: dict[str, DroppedColumn] = {}
    for other in others:
        for column in other.value_columns:
            kind: Literal["static", "regular"] = "static" if column.kind == "static" else "regular"
            missing.setdefault(column.name, DroppedColumn(column.name, kind, column.type, 0))
    for other in others:
        for dropped in other.dropped:
            missing.setdefault(dropped.name, dropped)
    added = [dropped for name, dropped in missing.items() if name not in known]
    every = sorted((*table.dropped, *added), key=lambda dropped: dropped.name.encode())
    return replace(table, dropped=tuple(every))
