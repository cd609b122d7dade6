"""The rows of the CDC log that a mutation of the base table gives.

The rules are those of docs/scylla.md; where an older document says something else, a comment
names it. Not modelled: images (operations 0 and 9), deletions by the server itself (-3 and -4), ``delta`` = keys,
Alternator's own way of splitting, counters (CDC refuses them), and ``cdc$stream_id``, which no rule here depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.scylla_model.mutation import (
    Cell,
    Change,
    Column,
    Element,
    Key,
    Mutation,
    RangeDeletion,
    RowDeletion,
    Table,
    UndocumentedError,
)

LogRow = dict[str, Any]
"""A row with all columns of the log but ``cdc$stream_id``."""

UPDATE, INSERT, ROW_DELETE, PARTITION_DELETE = 1, 2, 3, 4
START_INCLUSIVE, START_EXCLUSIVE, END_INCLUSIVE, END_EXCLUSIVE = 5, 6, 7, 8


@dataclass
class Write:
    """What one log row tells of one row of the base table: all of it has one timestamp and one TTL.

    :param key: None is the static row
    :param cells: values of atomic columns by name; None is a tombstone
    :param elements: changed elements of collections by column name
    :param cleared: the collections that have a tombstone over all their elements
    """

    key: Key | None
    ttl: int | None
    insert: bool = False
    cells: dict[str, Any] = field(default_factory=dict)
    elements: dict[str, list[Element]] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)


@dataclass
class Group:
    """All changes of a mutation with one timestamp: they share ``cdc$time``."""

    timestamp: int
    writes: list[Write] = field(default_factory=list)
    row_deletions: list[RowDeletion] = field(default_factory=list)
    range_deletions: list[RangeDeletion] = field(default_factory=list)
    partition_deletion: bool = False

    def write(self, key: Key | None, ttl: int | None) -> Write:
        """The write to that row with that TTL, a new one if there is none yet."""
        for write in self.writes:
            if (write.key, write.ttl) == (key, ttl):
                return write
        self.writes.append(Write(key, ttl))
        return self.writes[-1]


def split(mutation: Mutation) -> list[Group]:
    """The changes of a mutation by their timestamps, oldest first."""
    groups: dict[int, Group] = {}

    def at(timestamp: int) -> Group:
        return groups.setdefault(timestamp, Group(timestamp))

    for change in mutation.static:
        _add(at, None, change)
    for row in mutation.rows:
        for change in row.changes:
            _add(at, row.key, change)
        if row.marker is not None:
            _insert(at(row.marker.timestamp), row.key, row.marker.ttl)
    for row_deletion in mutation.row_deletions:
        at(row_deletion.timestamp).row_deletions.append(row_deletion)
    for range_deletion in mutation.range_deletions:
        if not range_deletion.degenerate:
            at(range_deletion.timestamp).range_deletions.append(range_deletion)
    if mutation.partition_deletion is not None:
        at(mutation.partition_deletion.timestamp).partition_deletion = True
    return [groups[timestamp] for timestamp in sorted(groups)]


def log_rows(mutation: Mutation, time_of: Callable[[int], Any] = lambda timestamp: timestamp) -> list[LogRow]:
    """The log rows of a mutation in the order of the log.

    :param time_of: gives the ``cdc$time`` of a group by its timestamp, for example a timeuuid; it is called once for
        each group. Without it ``cdc$time`` is the timestamp.
    """
    result: list[LogRow] = []
    for group in split(mutation):
        time, rows = time_of(group.timestamp), list(_rows_of_group(mutation, group))
        for number, row in enumerate(rows):
            # The reference document knows no cdc$end_of_batch: it is newer (3.1).
            last = True if number == len(rows) - 1 else None
            metadata = {"cdc$time": time, "cdc$batch_seq_no": number, "cdc$end_of_batch": last}
            result.append(dict.fromkeys(log_columns(mutation.table)) | metadata | row)
    return result


def log_columns(table: Table) -> list[str]:
    """The names of the log's columns but ``cdc$stream_id``."""
    metadata = ["time", "batch_seq_no", "operation", "ttl", "end_of_batch"]
    names = [*(f"cdc${name}" for name in metadata), *table.partition_key, *table.clustering_key]
    for column in table.columns:
        names += [column.name, f"cdc$deleted_{column.name}"]
        if column.kind != "atomic":
            names.append(f"cdc$deleted_elements_{column.name}")
    return names


def _add(at: Callable[[int], Group], key: Key | None, change: Change) -> None:
    """Put a change of a row into the groups of its timestamps."""
    if isinstance(change, Cell):
        at(change.timestamp).write(key, change.ttl).cells[change.column] = change.value
        return
    if change.tombstone is not None:
        # An overwrite has its tombstone 1 µs before its elements, so every such tombstone is logged 1 µs late, also
        # that of a DELETE, which has the DELETE's own timestamp (3.3).
        at(change.tombstone + 1).write(key, None).cleared.add(change.column)
    for element in change.elements:
        at(element.timestamp).write(key, element.ttl).elements.setdefault(change.column, []).append(element)


def _insert(group: Group, key: Key, ttl: int | None) -> None:
    """Put a row marker into its group: the write with its timestamp and TTL is the INSERT."""
    write = group.write(key, ttl)
    if not set(write.elements) - write.cleared:
        write.insert = True
        return
    # An INSERT with a TTL whose collections stand in another log row than their tombstones, which have no TTL: the
    # marker has a row of its own (3.3). The documents show it with nothing else in the INSERT, and no marker beside
    # elements that are added without a tombstone.
    cleared = {column for other in group.writes if other.key == key for column in other.cleared}
    if write.cells or set(write.elements) - cleared:
        raise UndocumentedError("a row marker beside these cells")
    group.writes.append(Write(key, ttl, insert=True))


def _rows_of_group(mutation: Mutation, group: Group) -> Iterator[LogRow]:
    """The log rows of one timestamp in their order, without the columns that number them."""
    table = mutation.table
    partition = dict(zip(table.partition_key, mutation.key, strict=True))
    # 3.3 orders updates by TTL. That static updates and inserts are ordered so too, and rows of the same kind and TTL
    # by clustering key, is this model's choice: the reference document ("Batch sequence number column") leaves the
    # order of two rows open.
    for write in sorted(group.writes, key=lambda one: (one.key is not None, not one.insert, one.ttl or 0, one.key)):
        yield partition | _clustering(table, write.key or ()) | _written(table, write)
    for row_deletion in sorted(group.row_deletions, key=lambda one: one.key):
        yield partition | _clustering(table, row_deletion.key) | {"cdc$operation": ROW_DELETE}
    for deletion in group.range_deletions:
        start = START_INCLUSIVE if deletion.start.inclusive else START_EXCLUSIVE
        # "Basic operations" speaks of "up to two" rows, but prints two for a range with one bound; 3.2 says two. No
        # document prints a range without right bound: 7 is the reading of 3.2, where a whole prefix is 5 and 7.
        end = END_INCLUSIVE if deletion.end.inclusive else END_EXCLUSIVE
        yield partition | _clustering(table, deletion.start.prefix) | {"cdc$operation": start}
        yield partition | _clustering(table, deletion.end.prefix) | {"cdc$operation": end}
    if group.partition_deletion:
        yield partition | {"cdc$operation": PARTITION_DELETE}


def _clustering(table: Table, prefix: Key) -> LogRow:
    """The clustering columns; those after the prefix stay None."""
    return dict(zip(table.clustering_key, prefix, strict=False))


def _written(table: Table, write: Write) -> LogRow:
    """What a log row tells of one write."""
    row: LogRow = {"cdc$operation": INSERT if write.insert else UPDATE, "cdc$ttl": write.ttl}
    for name, value in write.cells.items():
        row |= {f"cdc$deleted_{name}": True} if value is None else {name: value}
    for name in write.cleared:
        row[f"cdc$deleted_{name}"] = True
    for name in write.cleared | set(write.elements):
        elements = write.elements.get(name, [])
        removed = frozenset(element.key for element in elements if element.value is None)
        row[name] = _added(table.column(name), elements)
        row[f"cdc$deleted_elements_{name}"] = removed or None
    return row


def _added(column: Column, elements: list[Element]) -> Any:
    """The value column of a collection; a UDT has all its fields there, also if none is set (3.3)."""
    added = {element.key: element.value for element in elements if element.value is not None}
    if column.kind == "udt":
        return {name: added.get(index) for index, name in enumerate(column.fields)}
    if not added:
        return None
    return frozenset(added) if column.kind == "set" else added
