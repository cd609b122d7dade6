"""Change rows as CQL for ``inspect``: the statements that make the same change, each on a line of its own.

CQL cannot say everything that a log holds. Entries of lists are found by their values
(:mod:`ringsync.changes.text.lists`). A counter's cell has its total, but a statement adds: the totals so far are
remembered and the differences printed. docs/inspect.md says what a replay therefore reproduces.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from ringsync.changes.flat import FlatCells, flat, kept, together
from ringsync.changes.schema import CELL, RANGE_DELETION, TOMBSTONE
from ringsync.changes.text.assignments import (
    Deleted,
    LiveCells,
    assignments,
    deleted_names,
    first_places,
    live_cells,
    place_of,
)
from ringsync.changes.text.lists import Entry, ListEntries
from ringsync.changes.text.statements import Keys, Statements, cell_deletions, deletions_of_rows, row_keys, writes
from ringsync.changes.text.values import counter_shards
from ringsync.compiled.arrow import Integers, integers, valid_mask
from ringsync.cql.cells import cells_of_values
from ringsync.cql.identifiers import printable
from ringsync.cql.text.literals import literals
from ringsync.cql.types import ListType
from ringsync.schema.table import TableSchema

_COMMENT = "-- "
_UNSAID = f"{_COMMENT}cannot be said in CQL: "
_Lines = list[tuple[int, str]]
"""Rows and what is said of them."""


class CqlStatements:
    """Writes statements, and remembers what later ones need: entries of lists, totals of counters.

    :ivar unsaid: how many parts of changes no statement says; each is a comment in the output
    """

    def __init__(self, tables: Mapping[str, TableSchema], now: Callable[[], float] | None = None) -> None:
        """Begin a replay.

        :param tables: by id
        :param now: the clock by which TTLs become what is left of them; None: TTLs are as they were written
        """
        self.unsaid = 0
        self._tables = tables
        self._now = now
        self._lists = ListEntries()
        self._totals: dict[object, dict[bytes, tuple[int, int]]] = defaultdict(dict)
        self._said = ("", -1)

    def lines(self, rows: pa.RecordBatch) -> Iterator[str]:
        """Statements, one a line, and comments: where each record is, and what cannot be said.

        :param rows: of ``CHANGE_ROWS``
        """
        found: list[list[str]] = [[] for _ in range(len(rows))]
        ids = rows["table_id"].dictionary_encode()
        for number, table_id in enumerate(ids.dictionary.to_pylist()):
            chosen = np.flatnonzero(integers(ids.indices) == number)
            for row, line in self._of_table(rows.take(pa.array(chosen)), self._tables[table_id.hex()]):
                found[chosen[row]].append(line)
        for file, position, said in zip(rows["file"].to_pylist(), rows["position"].to_pylist(), found, strict=True):
            if (file, position) != self._said:
                self._said = file, position
                yield f"{_COMMENT}{file}:{position}"
            self.unsaid += sum(line.startswith(_UNSAID) for line in said)
            yield from said

    def _of_table(self, rows: pa.RecordBatch, table: TableSchema) -> _Lines:
        """What is said of the rows of one table; of each row in the order in which it is executed."""
        keys = row_keys(rows, table, literals)
        deletions = deletions_of_rows(rows, table, keys.where)
        has_key = valid_mask(keys.where)
        unsaid = integers(rows["kind"]) == RANGE_DELETION
        for statements in deletions:
            has_key[statements.rows[~valid_mask(statements.texts)]] = False
            unsaid[statements.rows] = False
        all_rows = f"the deletion of all rows of a partition of {table.full_name}, but not of its static columns"
        no_key = f"a row of {table.full_name} whose key is no value of its type"
        said = _lines(deletions) + [(row, _UNSAID + all_rows) for row in np.flatnonzero(unsaid).tolist()]
        said += self._counters(rows, table, keys.where) if table.has_counters else self._cells(rows, table, keys)
        said = [(row, line) for row, line in said if has_key[row]]
        return said + [(row, _UNSAID + no_key) for row in np.flatnonzero(~has_key).tolist()]

    def _cells(self, rows: pa.RecordBatch, table: TableSchema, keys: Keys) -> _Lines:
        lists = self._list_changes(rows, table)
        deletions = kept(flat(rows["complex_deletions"]), table)
        live = live_cells(lists.cells, deletions, table, literals)
        live = replace(live, whole=np.setdiff1d(live.whole, lists.changed))
        deleted = deleted_names(lists.cells, deletions, table, live.whole, literals)
        units = assignments(live, in_log_order=True)
        now = int(self._now()) if self._now else None
        return [
            *_unsaid_cells(live, deleted, table),
            *_lines(cell_deletions(table, _in_log_order(deleted), keys.where)),
            *lists.removals(table, keys.where),
            *_lines(writes(rows, table, units, keys, own_times_first=True, now=now)),
        ]

    def _list_changes(self, rows: pa.RecordBatch, table: TableSchema) -> _Lists:
        """The cells of rows, those of lists as what they do to what is known of them."""
        cells, deletions = (kept(flat(rows[name]), table) for name in ("cells", "complex_deletions"))
        columns = [n for n, c in enumerate(table.value_columns) if c.is_multicell and isinstance(c.type, ListType)]
        is_entry = np.isin(cells.integers("column"), columns)
        if not is_entry.any() and not np.isin(deletions.integers("column"), columns).any():
            return _Lists(cells)
        keys = list(zip(rows["partition_key"].to_pylist(), rows["clustering"].to_pylist(), strict=True))
        forgotten: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, deletion in zip(deletions.row.tolist(), deletions.cells.to_pylist(), strict=True):
            forgotten[row].append((deletion["column"], deletion["timestamp"]))
        own = cells.where(is_entry)
        entries: dict[int, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for row, cell in zip(own.row.tolist(), own.cells.to_pylist(), strict=True):
            entries[row][cell["column"]].append(Entry(**cell))
        found = _Lists(cells)
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
                    found.unknown.append((row, column, change.unknown))
                found.removed.extend((row, column, value, timestamp) for value, timestamp in change.removed)
        written = FlatCells(np.array([row for row, _ in stay], np.int64), pa.array([vars(e) for _, e in stay], CELL))
        return replace(found, cells=together([cells.where(~is_entry), written], CELL))

    def _counters(self, rows: pa.RecordBatch, table: TableSchema, where: pa.Array) -> _Lines:
        """Counters take no timestamps; what is added is what the total is greater than the one before in this log."""
        cells = kept(flat(rows["cells"]), table)
        names = [printable(column.name) for column in table.value_columns]
        keys = list(zip(rows["partition_key"].to_pylist(), rows["clustering"].to_pylist(), strict=True))
        found: _Lines = []
        parts = zip(cells.row.tolist(), cells.cells.to_pylist(), strict=True)
        for row, own in itertools.groupby(parts, lambda part: part[0]):
            added, deleted = [], []
            for _, cell in own:
                name = names[cell["column"]]
                if cell["kind"] == TOMBSTONE:
                    deleted.append(name)
                elif (more := self._added((table.table_id, *keys[row], name), cell["value"])) is not None:
                    added.append(f"{name} = {name} {'-' if more < 0 else '+'} {abs(more)}")
            if deleted:
                found.append((row, f"DELETE {', '.join(deleted)} FROM {table.full_name} WHERE {where[row]};"))
            if added:
                found.append((row, f"UPDATE {table.full_name} SET {', '.join(added)} WHERE {where[row]};"))
        return found

    def _added(self, key: object, context: bytes) -> int | None:
        """What a counter's cell adds to what is known of it; None: nothing. Of each shard the greatest clock counts."""
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
    """What change rows do to lists.

    :ivar cells: the rows' cells; of those of lists what is put there, again or for the first time
    :ivar removed: row, column, value, and when (µs)
    :ivar unknown: row, column, and how many of its entries go that the log did not put there
    """

    cells: FlatCells
    removed: list[tuple[int, int, bytes, int]] = field(default_factory=list)
    unknown: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def changed(self) -> Integers:
        """The (row, column) of lists that lose entries: they are not written as a whole."""
        rows, columns = np.array([one[:2] for one in (*self.removed, *self.unknown)], np.int64).reshape(-1, 2).T
        return place_of(rows, columns)

    def removals(self, table: TableSchema, where: pa.Array) -> _Lines:
        """What says that entries go."""
        names = [printable(column.name) for column in table.value_columns]
        found = [
            (row, column, f"{_UNSAID}the end of {count} entries of {names[column]}, which this log did not put there")
            for row, column, count in self.unknown
        ]
        for row, column, value, timestamp in self.removed:
            cql_type, name = table.value_columns[column].type, names[column]
            assert isinstance(cql_type, ListType)
            literal = literals(cql_type.element, cells_of_values([value]))[0].as_py()
            if literal is not None:
                change = f"UPDATE {table.full_name} USING TIMESTAMP {timestamp} SET {name} = {name} - [{literal}]"
                found.append((row, column, f"{change} WHERE {where[row]};"))
        return [(row, line) for row, _, line in sorted(found, key=lambda one: one[:2])]


def _lines(statements: list[Statements]) -> _Lines:
    return [
        (row, f"{text};")
        for one in statements
        for row, text in zip(one.rows.tolist(), one.texts.to_pylist(), strict=True)
    ]


def _in_log_order(deleted: Deleted) -> Deleted:
    order = np.argsort(deleted.places, kind="stable")
    rows, times, places = deleted.rows[order], deleted.times[order], deleted.places[order]
    return Deleted(
        rows, times, deleted.names.take(pa.array(order)), places, first_places(places, times, rows), deleted.unsaid
    )


def _unsaid_cells(live: LiveCells, deleted: Deleted, table: TableSchema) -> _Lines:
    rows, columns, places = (np.concatenate(pair) for pair in zip(live.unsaid, deleted.unsaid, strict=True))
    names = [column.name for column in table.value_columns]
    return [
        (int(rows[at]), f"{_UNSAID}a value of {table.full_name} {names[columns[at]]}")
        for at in np.argsort(places).tolist()
    ]
