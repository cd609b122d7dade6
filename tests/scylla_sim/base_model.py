"""The base table by last write wins: :func:`apply` from mutations, :func:`replay` from log rows.

The two share the store, :class:`Rows`, but not the way from what they read to what they put into it.
Expiry is not modelled by the clock: of equal timestamps the greater TTL wins as if it expired later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.scylla_model.log_rows import LogRow
from tests.scylla_model.mutation import Bound, Cell, Change, Key, Mutation, RangeDeletion
from tests.scylla_sim.arithmetic import micros_of, timeuuid_order
from tests.scylla_sim.tables import BaseTable

NEVER = -(2**62)
STATIC: Key = ("static",)
"""Stands for the clustering key of the static row."""


@dataclass(frozen=True)
class Written:
    """A cell, or a row marker, that was written last: value None is a tombstone."""

    value: Any
    timestamp: int
    ttl: int | None

    def order(self, data: bytes) -> tuple[int, bool, bool, int, bytes]:
        """Which of two wins: the greater."""
        return self.timestamp, self.value is None, self.ttl is not None, self.ttl or 0, data


@dataclass
class Row:
    """What is known of a row; cells by column and element, deletions by their timestamps."""

    deleted: int = NEVER
    marker: Written | None = None
    cells: dict[tuple[str, Any], Written] = field(default_factory=dict)
    cleared: dict[str, int] = field(default_factory=dict)


@dataclass
class Partition:
    """What is known of a partition; rows by clustering key."""

    deleted: int = NEVER
    ranges: list[RangeDeletion] = field(default_factory=list)
    rows: dict[Key, Row] = field(default_factory=dict)


Living = dict[tuple[str, Any], Written]
"""The living cells of a row by column and element; ``("", None)`` is the row marker."""


class Rows:
    """The rows of one table; cells of a column that it no longer has are not shown."""

    def __init__(self, table: BaseTable) -> None:
        self.table = table
        self.partitions: dict[Key, Partition] = {}

    def partition(self, key: Key) -> Partition:
        """The partition of a key, which may have nothing in it."""
        return self.partitions.setdefault(key, Partition())

    def row(self, key: Key, clustering: Key) -> Row:
        """A row, which may have nothing in it."""
        return self.partition(key).rows.setdefault(clustering, Row())

    def write(self, row: Row, column: str, path: Any, written: Written) -> None:
        """Put a cell, if it wins."""
        spec, old = self.table.column(column), row.cells.get((column, path))
        if old is None or written.order(spec.value_bytes(path, written.value)) > old.order(
            spec.value_bytes(path, old.value)
        ):
            row.cells[column, path] = written

    def mark(self, row: Row, timestamp: int, ttl: int | None) -> None:
        """Put a row marker, if it wins."""
        written = Written(True, timestamp, ttl)
        if row.marker is None or written.order(b"") > row.marker.order(b""):
            row.marker = written

    def living(self) -> dict[tuple[Key, Key], Living]:
        """All rows that are alive by their partition and clustering keys."""
        found = {}
        for key, partition in self.partitions.items():
            for clustering, row in partition.rows.items():
                if living := self._living(partition, clustering, row):
                    found[key, clustering] = living
        return found

    def _living(self, partition: Partition, clustering: Key, row: Row) -> Living:
        covering = (one.timestamp for one in partition.ranges if clustering is not STATIC and covers(one, clustering))
        deleted = max(partition.deleted, row.deleted, *covering, NEVER)
        living = {("", None): row.marker} if row.marker and row.marker.timestamp > deleted else {}
        columns = {column.name for column in self.table.columns}
        for (column, path), cell in row.cells.items():
            if column not in columns:
                continue
            if cell.value is not None and cell.timestamp > max(deleted, row.cleared.get(column, NEVER)):
                living[column, path] = cell
        return living


def covers(deletion: RangeDeletion, key: Key) -> bool:
    """Whether a range has a clustering key in it."""
    start, end = deletion.start, deletion.end
    first, last = key[: len(start.prefix)], key[: len(end.prefix)]
    above = first >= start.prefix if start.inclusive else first > start.prefix
    below = last <= end.prefix if end.inclusive else last < end.prefix
    return bool(above and below)


def apply(rows: Rows, mutation: Mutation) -> None:
    """Write a mutation."""
    partition = rows.partition(mutation.key)
    for change in mutation.static:
        _change(rows, rows.row(mutation.key, STATIC), change)
    for one in mutation.rows:
        row = rows.row(mutation.key, one.key)
        for change in one.changes:
            _change(rows, row, change)
        if one.marker:
            rows.mark(row, one.marker.timestamp, one.marker.ttl)
    for row_deletion in mutation.row_deletions:
        row = rows.row(mutation.key, row_deletion.key)
        row.deleted = max(row.deleted, row_deletion.timestamp)
    partition.ranges += [one for one in mutation.range_deletions if not one.degenerate]
    if mutation.partition_deletion:
        partition.deleted = max(partition.deleted, mutation.partition_deletion.timestamp)


def _change(rows: Rows, row: Row, change: Change) -> None:
    if isinstance(change, Cell):
        rows.write(row, change.column, None, Written(change.value, change.timestamp, change.ttl))
        return
    if change.tombstone is not None:
        row.cleared[change.column] = max(row.cleared.get(change.column, NEVER), change.tombstone)
    for one in change.elements:
        rows.write(row, change.column, one.key, Written(one.value, one.timestamp, one.ttl))


def replay(rows: Rows, log: Iterable[LogRow]) -> None:
    """Write what log rows tell; their order, and rows that come twice, do not matter."""
    ordered = sorted(
        log, key=lambda row: (row["cdc$stream_id"], timeuuid_order(row["cdc$time"]), row["cdc$batch_seq_no"])
    )
    following: Iterator[LogRow | None] = iter([*ordered[1:], None])
    for row, after in zip(ordered, following, strict=True):
        _replay(rows, row, after)


def _replay(rows: Rows, row: LogRow, after: LogRow | None) -> None:
    table, operation, timestamp = rows.table, row["cdc$operation"], micros_of(row["cdc$time"])
    key = tuple(row[name] for name, _ in table.partition_key)
    clustering = _clustering(table, row)
    if operation in (1, 2):
        static = bool(table.clustering_key) and not clustering
        target = rows.row(key, STATIC if static else clustering)
        if operation == 2:
            rows.mark(target, timestamp, row["cdc$ttl"])
        for column in table.columns:
            if column.name not in row:
                continue  # added later
            _replay_column(rows, target, row, column.name, timestamp)
    elif operation == 3:
        target = rows.row(key, clustering)
        target.deleted = max(target.deleted, timestamp)
    elif operation == 4:
        partition = rows.partition(key)
        partition.deleted = max(partition.deleted, timestamp)
    elif operation in (5, 6):
        assert after is not None
        assert after["cdc$operation"] in (7, 8)
        assert (after["cdc$time"], after["cdc$batch_seq_no"]) == (row["cdc$time"], row["cdc$batch_seq_no"] + 1)
        start = Bound(clustering, operation == 5)
        end = Bound(_clustering(table, after), after["cdc$operation"] == 7)
        rows.partition(key).ranges.append(RangeDeletion(start, end, timestamp))


def _clustering(table: BaseTable, row: LogRow) -> Key:
    values = [row[name] for name, _ in table.clustering_key]
    return table.clustering(*(value for value in values if value is not None))


def _replay_column(rows: Rows, target: Row, row: LogRow, name: str, timestamp: int) -> None:
    column, value, ttl = rows.table.column(name), row[name], row["cdc$ttl"]
    deleted = row[f"cdc$deleted_{name}"]
    if column.kind == "atomic":
        if deleted or value is not None:
            rows.write(target, name, None, Written(None if deleted else value, timestamp, None if deleted else ttl))
        return
    if deleted:
        # Logged one microsecond late.
        target.cleared[name] = max(target.cleared.get(name, NEVER), timestamp - 1)
    for path in row[f"cdc$deleted_elements_{name}"] or ():
        rows.write(target, name, path, Written(None, timestamp, None))
    if value is None:
        return
    if column.kind == "set":
        added = dict.fromkeys(value, True)
    elif column.kind == "udt":
        added = {place: value[field] for place, (field, _) in enumerate(column.fields) if value[field] is not None}
    else:
        added = value
    for path, element in added.items():
        rows.write(target, name, path, Written(element, timestamp, ttl))
