"""Change rows as CQL for ``inspect``: statements that make the same changes, one per line.

CQL cannot express everything that a log holds. Statements find entries of lists by their values
(:mod:`ringsync.changes.text.lists`). A counter's cell holds a total, but a statement adds: the writer remembers the
totals and prints the differences. docs/inspect.md says what a replay reproduces.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import columns_of
from ringsync.changes.flat import FlatCells, kept, together
from ringsync.changes.schema import RANGE_DELETION, TOMBSTONE
from ringsync.changes.text.assignments import (
    Deleted,
    LiveCells,
    assignments,
    deleted_names,
    first_places,
    live_cells,
    place_of,
)
from ringsync.changes.text.lists import Entry, ListEntries, cells_of_entries
from ringsync.changes.text.statements import Keys, Statements, cell_deletions, deletions_of_rows, row_keys, writes
from ringsync.changes.text.values import by_table, counter_shards
from ringsync.compiled.arrow import Integers, array_of, valid_mask
from ringsync.cql.cells import cells_of_values
from ringsync.cql.identifiers import printable
from ringsync.cql.text.literals import literals
from ringsync.cql.types import ListType
from ringsync.schema.table import TableSchema

_COMMENT = "-- "
_NO_CQL = f"{_COMMENT}cannot be expressed in CQL: "
_Lines = list[tuple[int, str]]
"""Numbers of rows and the lines printed for them."""


class CqlStatements:
    """A writer of statements. It remembers entries of lists and totals of counters for later statements.

    :ivar omitted: number of changes that CQL cannot express; each is a comment in the output
    """

    def __init__(self, tables: Mapping[str, TableSchema], now: Callable[[], float] | None = None) -> None:
        """Begin a replay.

        :param tables: tables by id
        :param now: clock (s since the epoch) from which TTLs count; None: TTLs are as they were written
        """
        self.omitted = 0
        self._tables = tables
        self._now = now
        self._lists = ListEntries()
        self._totals: dict[object, dict[bytes, tuple[int, int]]] = defaultdict(dict)
        self._printed = ("", -1)

    def lines(self, rows: pa.RecordBatch) -> Iterator[str]:
        """Write statements, one per line, and comments: each record's position, and changes that CQL cannot express."""
        lines: list[list[str]] = [[] for _ in range(len(rows))]
        changes = ChangeRows.of(rows)
        for table, chosen in by_table(changes, self._tables):
            for row, line in self._of_table(changes.take(chosen), table):
                lines[chosen[row]].append(line)
        for file, position, of_row in zip(rows["file"].to_pylist(), rows["position"].to_pylist(), lines, strict=True):
            if (file, position) != self._printed:
                self._printed = file, position
                yield f"{_COMMENT}{file}:{position}"
            self.omitted += sum(line.startswith(_NO_CQL) for line in of_row)
            yield from of_row

    def _of_table(self, rows: ChangeRows, table: TableSchema) -> _Lines:
        """Write the lines for the rows of one table. The lines of a row are in the order of execution."""
        keys = row_keys(rows, table, literals)
        deletions = deletions_of_rows(rows, table, keys.where)
        has_key = valid_mask(keys.where)
        omitted = rows.kind == RANGE_DELETION
        for statements in deletions:
            has_key[statements.rows[~valid_mask(statements.texts)]] = False
            omitted[statements.rows] = False
        all_rows = f"the deletion of all rows of a partition of {table.full_name}, but not of its static columns"
        no_key = f"a row of {table.full_name} whose key is no value of its type"
        written = _lines(deletions) + [(row, _NO_CQL + all_rows) for row in np.flatnonzero(omitted).tolist()]
        written += self._counters(rows, table, keys.where) if table.has_counters else self._cells(rows, table, keys)
        written = [(row, line) for row, line in written if has_key[row]]
        return written + [(row, _NO_CQL + no_key) for row in np.flatnonzero(~has_key).tolist()]

    def _cells(self, rows: ChangeRows, table: TableSchema, keys: Keys) -> _Lines:
        lists = self._list_changes(rows, table)
        deletions = kept(rows.complex_deletions, table)
        live = live_cells(lists.cells, deletions, table, literals)
        live = replace(live, whole=np.setdiff1d(live.whole, lists.changed))
        deleted = deleted_names(lists.cells, deletions, table, live.whole, literals)
        units = assignments(live, in_log_order=True)
        now = int(self._now()) if self._now else None
        return [
            *_omitted_cells(live, deleted, table),
            *_lines(cell_deletions(table, _in_log_order(deleted), keys.where)),
            *lists.removals(table, keys.where),
            *_lines(writes(rows, table, units, keys, own_times_first=True, now=now)),
        ]

    def _list_changes(self, rows: ChangeRows, table: TableSchema) -> _Lists:
        """Return the cells of rows. Cells of lists are replaced by their effects on the known entries."""
        cells, deletions = kept(rows.cells, table), kept(rows.complex_deletions, table)
        columns = [column.number for column in columns_of(table) if column.is_list]
        is_entry = np.isin(cells.column, columns)
        if not is_entry.any() and not np.isin(deletions.column, columns).any():
            return _Lists(cells)
        keys = _keys(rows)
        forgotten: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, column, timestamp, _ in zip(*(part.tolist() for part in vars(deletions).values()), strict=True):
            forgotten[row].append((column, timestamp))
        in_lists = cells.where(is_entry)
        entries: dict[int, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for at, (row, column) in enumerate(zip(in_lists.row.tolist(), in_lists.column.tolist(), strict=True)):
            entries[row][column].append(Entry.of(in_lists, at))
        lists = _Lists(cells)
        stay: list[tuple[int, Entry]] = []
        for row in sorted({*forgotten, *entries}):
            for column, timestamp in forgotten.get(row, ()):
                self._lists.forget((table.table_id, *keys[row], column), timestamp)
            changes = {
                column: self._lists.change((table.table_id, *keys[row], column), of_column)
                for column, of_column in entries.get(row, {}).items()
            }
            stay += [(row, entry) for change in changes.values() for entry in change.added]
            stay += [(row, entry) for change in changes.values() for entry in change.back]
            for column, change in changes.items():
                if change.unknown:
                    lists.unknown.append((row, column, change.unknown))
                lists.removed.extend((row, column, value, timestamp) for value, timestamp in change.removed)
        written = cells_of_entries(np.array([row for row, _ in stay], np.int64), [entry for _, entry in stay])
        return replace(lists, cells=together([cells.where(~is_entry), written]))

    def _counters(self, rows: ChangeRows, table: TableSchema, where: pa.Array) -> _Lines:
        """Write changes of counters, without timestamps. A statement adds the difference to this log's last total."""
        cells = kept(rows.cells, table)
        names = [printable(column.name) for column in table.value_columns]
        keys = _keys(rows)
        lines: _Lines = []
        for row, row_parts in itertools.groupby(enumerate(cells.row.tolist()), lambda part: part[1]):
            added, deleted = [], []
            for at, _ in row_parts:
                name = names[cells.column[at]]
                if cells.kind[at] == TOMBSTONE:
                    deleted.append(name)
                    continue
                more = self._added((table.table_id, *keys[row], name), cells.value.value(at) or b"")
                if more is not None:
                    added.append(f"{name} = {name} {'-' if more < 0 else '+'} {abs(more)}")
            if deleted:
                lines.append((row, f"DELETE {', '.join(deleted)} FROM {table.full_name} WHERE {where[row]};"))
            if added:
                lines.append((row, f"UPDATE {table.full_name} SET {', '.join(added)} WHERE {where[row]};"))
        return lines

    def _added(self, key: object, context: bytes) -> int | None:
        """Return what a counter's cell adds to the known total; None: nothing. A shard with a greater clock wins."""
        shards = self._totals[key]
        is_new, before = not shards, sum(count for _, count in shards.values())
        for identifier, clock, count in counter_shards(context):
            if identifier not in shards or clock > shards[identifier][0]:
                shards[identifier] = clock, count
        more = sum(count for _, count in shards.values()) - before
        more = (more + 2**63) % 2**64 - 2**63
        return more if more or is_new else None


@dataclass(frozen=True)
class _Lists:
    """The effects of change rows on lists.

    :ivar cells: cells of the rows; those of lists are the entries to add or put back
    :ivar removed: row, column, value, time of the removal (µs)
    :ivar unknown: row, column, number of removed entries that the log did not add
    """

    cells: FlatCells
    removed: list[tuple[int, int, bytes, int]] = field(default_factory=list)
    unknown: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def changed(self) -> Integers:
        """The (row, column) of lists that lose entries: they are not written as a whole."""
        rows, columns = np.array([entry[:2] for entry in (*self.removed, *self.unknown)], np.int64).reshape(-1, 2).T
        return place_of(rows, columns)

    def removals(self, table: TableSchema, where: pa.Array) -> _Lines:
        """Write the lines that remove entries."""
        names = [printable(column.name) for column in table.value_columns]
        lines = [
            (row, column, f"{_NO_CQL}the end of {count} entries of {names[column]}, which this log did not put there")
            for row, column, count in self.unknown
        ]
        for row, column, value, timestamp in self.removed:
            cql_type, name = table.value_columns[column].type, names[column]
            assert isinstance(cql_type, ListType)
            literal = literals(cql_type.element, cells_of_values([value]))[0].as_py()
            if literal is not None:
                change = f"UPDATE {table.full_name} USING TIMESTAMP {timestamp} SET {name} = {name} - [{literal}]"
                lines.append((row, column, f"{change} WHERE {where[row]};"))
        return [(row, line) for row, _, line in sorted(lines, key=lambda line: line[:2])]


def _keys(rows: ChangeRows) -> list[tuple[bytes | None, bytes | None]]:
    return [(rows.partition_key.value(row), rows.clustering.value(row)) for row in range(len(rows))]


def _lines(statements: list[Statements]) -> _Lines:
    return [
        (row, f"{text};")
        for group in statements
        for row, text in zip(group.rows.tolist(), group.texts.to_pylist(), strict=True)
    ]


def _in_log_order(deleted: Deleted) -> Deleted:
    order = np.argsort(deleted.places, kind="stable")
    rows, times, places = deleted.rows[order], deleted.times[order], deleted.places[order]
    return Deleted(
        rows, times, deleted.names.take(array_of(order)), places, first_places(places, times, rows), deleted.omitted
    )


def _omitted_cells(live: LiveCells, deleted: Deleted, table: TableSchema) -> _Lines:
    rows, columns, places = (np.concatenate(pair) for pair in zip(live.omitted, deleted.omitted, strict=True))
    names = [column.name for column in table.value_columns]
    return [
        (int(rows[at]), f"{_NO_CQL}a value of {table.full_name} {names[columns[at]]}")
        for at in np.argsort(places).tolist()
    ]
