"""Change rows as CQL: the statements that make the same change, each with its own timestamp.

CQL cannot say everything that a log holds. Entries of lists are found by their values
(:mod:`ringsync.changes.cql_lists`). A counter's cell has its total, but a statement adds: the totals so far are
remembered and the differences printed. docs/inspect.md says what a replay therefore reproduces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from ringsync.changes.cql_lists import ListChange, ListEntries, is_prepended
from ringsync.changes.cql_ranges import range_conditions
from ringsync.changes.cql_rows import Cell, ChangeRow, Times, change_objects
from ringsync.changes.schema import PARTITION_DELETION, RANGE_DELETION
from ringsync.changes.tables import LoggedColumn
from ringsync.changes.texts import counter_shards
from ringsync.cql.identifiers import printable
from ringsync.cql.types import ListType, MapType, SetType, UserType
from ringsync.cql.value_texts import NULL
from ringsync.schema.table import TableSchema

_COMMENT = "-- "


@dataclass(frozen=True)
class _Names:
    """What statements need to know of a table.

    :ivar table: its full name
    :ivar dropped_at: µs, of columns that there were, by name
    """

    table: str
    partition_key: tuple[str, ...]
    clustering: tuple[str, ...]
    is_counter: bool
    dropped_at: Mapping[str, int]

    def at(self, timestamp: int | None) -> str:
        """The table, and when it is written to; that of counters takes no timestamps."""
        return self.table if self.is_counter else f"{self.table} USING TIMESTAMP {timestamp}"

    def keeps(self, column: LoggedColumn, timestamp: int) -> bool:
        """Whether a write to a column still counts: not if the column is gone, or was when it came again."""
        return not column.dropped and timestamp > self.dropped_at.get(column.name, -(2**63) - 1)


def _names(table: TableSchema) -> _Names:
    return _Names(
        table.full_name,
        tuple(printable(column.name) for column in table.partition_key),
        tuple(printable(column.name) for column in table.clustering),
        any(column.is_counter for column in table.columns),
        {column.name: column.dropped_at for column in table.dropped},
    )


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
        self._names = {table_id: _names(table) for table_id, table in tables.items()}
        self._now = now
        self._lists = ListEntries()
        self._totals: dict[object, dict[bytes, tuple[int, int]]] = defaultdict(dict)
        self._said = ("", -1)

    def lines(self, rows: pa.RecordBatch) -> Iterator[str]:
        """Statements, one a line, and comments: where each record is, and what cannot be said.

        :param rows: of ``CHANGE_ROWS``
        """
        for row in change_objects(rows, self._tables):
            names = self._names[row.table.table_id]
            if (row.file, row.position) != self._said:
                self._said = row.file, row.position
                yield f"{_COMMENT}{row.file}:{row.position}"
            bounds = [bound for bound in (row.clustering, row.range_end) if bound]
            if None in row.partition_key or any({None, NULL} & {*bound.values} for bound in bounds):
                yield self._unsaid(f"a row of {names.table} whose key is no value of its type")
            elif row.kind in (PARTITION_DELETION, RANGE_DELETION):
                yield from self._deletion(row, names)
            elif names.is_counter:
                yield from self._counters(row, names)
            else:
                yield from self._row(row, names)

    def _unsaid(self, what: str) -> str:
        self.unsaid += 1
        return f"{_COMMENT}cannot be said in CQL: {what}"

    def _deletion(self, row: ChangeRow, names: _Names) -> Iterator[str]:
        pieces: list[list[str]] = [[]]
        if row.kind == RANGE_DELETION and row.clustering and row.range_end:
            pieces = range_conditions(row.table, row.clustering, row.range_end)
        if not pieces:
            yield self._unsaid(
                f"the deletion of all rows of a partition of {names.table}, but not of its static columns"
            )
        for piece in pieces:
            yield f"DELETE FROM {names.at(row.deletion)} WHERE {' AND '.join([*_partition(row, names), *piece])};"

    def _row(self, row: ChangeRow, names: _Names) -> Iterator[str]:
        where = _where(row, names)
        cells = [cell for cell in row.cells if names.keeps(cell.column, cell.times.timestamp)]
        deletions = [
            (column.name, timestamp) for column, timestamp in row.complex_deletions if names.keeps(column, timestamp)
        ]
        for name, timestamp in deletions:
            self._lists.forget((row.key, name), timestamp)
        if row.deletion is not None:
            yield f"DELETE FROM {names.at(row.deletion)} WHERE {where};"
        lists = self._list_changes(row, cells)
        written = [cell for cell in cells if cell.column.name not in lists]
        written += [cell for change in lists.values() for cell in change.added]
        for cell in written:
            if not _is_sayable(cell):
                yield self._unsaid(f"a value of {names.table} {cell.column.name}")
        written = list(filter(_is_sayable, written))
        assigned = _assignments(written, deletions, lists) if deletions else {}
        deleted = _deleted(written, [one for one in deletions if one[0] not in assigned])
        groups: dict[Times, list[Cell]] = defaultdict(list)
        if row.liveness:
            groups[row.liveness] = []
        for cell in written + [cell for change in lists.values() for cell in change.back]:
            if not cell.is_tombstone:
                groups[cell.times].append(cell)
        for timestamp, elements in deleted.items():
            yield f"DELETE {', '.join(elements)} FROM {names.at(timestamp)} WHERE {where};"
        for name, change in lists.items():
            yield from self._removed_entries(printable(name), change, names, where)
        for times, group in groups.items():
            yield from self._written(row, names, times, group, assigned)

    def _list_changes(self, row: ChangeRow, cells: Iterable[Cell]) -> dict[str, ListChange]:
        """By name of the column."""
        found: dict[str, list[Cell]] = defaultdict(list)
        for cell in cells:
            if isinstance(cell.column.type, ListType) and cell.column.is_multicell:
                found[cell.column.name].append(cell)
        return {name: self._lists.change((row.key, name), own) for name, own in found.items()}

    def _removed_entries(self, name: str, change: ListChange, names: _Names, where: str) -> Iterator[str]:
        if change.unknown:
            yield self._unsaid(f"the end of {change.unknown} entries of {name}, which this log did not put there")
        for value, timestamp in change.removed:
            yield f"UPDATE {names.at(timestamp)} SET {name} = {name} - [{value}] WHERE {where};"

    def _written(
        self, row: ChangeRow, names: _Names, times: Times, cells: Sequence[Cell], assigned: Mapping[str, Times]
    ) -> Iterator[str]:
        """The statements of what has the same times: an INSERT where the row itself has them, UPDATEs of the rest."""
        by_column: dict[str, list[Cell]] = defaultdict(list)
        for cell in cells:
            by_column[cell.column.name].append(cell)
        whole, parts = {}, []
        for name, found in by_column.items():
            if not found[0].column.is_multicell or assigned.get(name) == times:
                whole[printable(name)] = _whole(found)
            else:
                parts.append((printable(name), found))
        using = self._using(times)
        updates = [[f"{name} = {value}" for name, value in whole.items()]]
        if times == row.liveness:
            columns = ", ".join([*names.partition_key, *names.clustering, *whole])
            values = [*row.partition_key, *(row.clustering.values if row.clustering else ()), *whole.values()]
            yield f"INSERT INTO {names.table} ({columns}) VALUES ({', '.join(map(str, values))}){using};"
            updates = [[]]
        for name, found in parts:
            first, *more = _additions(name, found)
            updates[0] += first
            updates += more
        for update in updates:
            if update:
                yield f"UPDATE {names.table}{using} SET {', '.join(update)} WHERE {_where(row, names)};"

    def _using(self, times: Times) -> str:
        """The USING clause; a comment in it, which servers take within a line, says when what expires does so."""
        clause = f" USING TIMESTAMP {times.timestamp}"
        if times.ttl is None or times.expires_at is None:
            return clause
        ttl = times.ttl if self._now is None else max(times.expires_at - int(self._now()), 1)
        return f"{clause} AND TTL {ttl} /* expires_at {times.expires_at} */"

    def _counters(self, row: ChangeRow, names: _Names) -> Iterator[str]:
        """Counters take no timestamps; what is added is what the total is greater than the one before in this log."""
        where = _where(row, names)
        if row.deletion is not None:
            yield f"DELETE FROM {names.table} WHERE {where};"
        added, deleted = [], []
        for cell in row.cells:
            name = printable(cell.column.name)
            if not names.keeps(cell.column, cell.times.timestamp):
                continue
            if cell.is_tombstone:
                deleted.append(name)
            elif (more := self._added((row.key, cell.column.name), cell.raw_value or b"")) is not None:
                added.append(f"{name} = {name} {'-' if more < 0 else '+'} {abs(more)}")
        if deleted:
            yield f"DELETE {', '.join(deleted)} FROM {names.table} WHERE {where};"
        if added:
            yield f"UPDATE {names.table} SET {', '.join(added)} WHERE {where};"

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


def _deleted(cells: Iterable[Cell], deletions: Iterable[tuple[str, int]]) -> dict[int, list[str]]:
    """What DELETEs name, by timestamp in µs."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, timestamp in deletions:
        found[timestamp].append(printable(name))
    for cell in cells:
        if cell.is_tombstone:
            found[cell.times.timestamp].append(_element(cell))
    return found


def _assignments(
    cells: Iterable[Cell], deletions: Iterable[tuple[str, int]], lists: Mapping[str, ListChange]
) -> dict[str, Times]:
    """Columns of many cells that are written as a whole, ``m = {…}``: that deletes what was there 1 µs before."""
    found = {}
    for name, timestamp in deletions:
        own = [cell for cell in cells if cell.column.name == name]
        times = {cell.times for cell in own}
        change = lists.get(name, ListChange())
        only_new = not change.removed and not change.unknown and not any(map(is_prepended, change.added))
        if len(times) == 1 and only_new and not any(cell.is_tombstone for cell in own):
            (one,) = times
            if one.timestamp - 1 == timestamp:
                found[name] = one
    return found


def _whole(cells: Sequence[Cell]) -> str:
    """The literal of a column of which these are all cells."""
    column = cells[0].column
    if not column.is_multicell:
        return str(cells[0].value)
    if isinstance(column.type, UserType):
        return "{" + ", ".join([f"{printable(str(cell.path))}: {cell.value}" for cell in cells]) + "}"
    return _collection(cells)


def _collection(cells: Sequence[Cell]) -> str:
    match cells[0].column.type:
        case ListType():
            return "[" + ", ".join([str(cell.value) for cell in cells]) + "]"
        case MapType():
            return "{" + ", ".join([f"{cell.path}: {cell.value}" for cell in cells]) + "}"
    return "{" + ", ".join([str(cell.path) for cell in cells]) + "}"


def _additions(name: str, cells: Sequence[Cell]) -> list[list[str]]:
    """Assignments that add cells to a column of many: one UPDATE can have those of each list."""
    cql_type = cells[0].column.type
    if isinstance(cql_type, UserType):
        return [[f"{name}.{printable(str(cell.path))} = {cell.value}" for cell in cells]]
    if not isinstance(cql_type, ListType):
        return [[f"{name} = {name} + {_collection(cells)}"]]
    before = [cell for cell in cells if is_prepended(cell)]
    behind = [cell for cell in cells if not is_prepended(cell)]
    found = [[f"{name} = {name} + {_collection(behind)}"]] if behind else []
    return [*found, [f"{name} = {_collection(before)} + {name}"]] if before else found


def _element(cell: Cell) -> str:
    """What a DELETE names: a column, an entry of a map, an element of a set, a field."""
    name = printable(cell.column.name)
    if cell.raw_path is None:
        return name
    if isinstance(cell.column.type, UserType):
        return f"{name}.{printable(str(cell.path))}"
    return f"{name}[{cell.path}]"


def _is_sayable(cell: Cell) -> bool:
    """Whether path and value have literals."""
    if cell.raw_path is not None and cell.path is None:
        return False
    is_element = cell.column.is_multicell and isinstance(cell.column.type, SetType)
    return cell.is_tombstone or is_element or cell.value is not None


def _partition(row: ChangeRow, names: _Names) -> list[str]:
    return [f"{name} = {value}" for name, value in zip(names.partition_key, row.partition_key, strict=True)]


def _where(row: ChangeRow, names: _Names) -> str:
    """The conditions that name a row; of a static one its partition."""
    values = row.clustering.values if row.clustering else ()
    conditions = [f"{name} = {value}" for name, value in zip(names.clustering, values, strict=False)]
    return " AND ".join(_partition(row, names) + conditions)
