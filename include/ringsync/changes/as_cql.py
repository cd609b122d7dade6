"""Change rows as CQL: the statements that make the same change, each with its own timestamp.

CQL cannot say everything that a log holds. Entries of lists are found by their values
(:mod:`ringsync.changes.cql_lists`). A counter's cell has its total, but a statement adds: the totals so far are
remembered and the differences printed. docs/inspect.md says what a replay therefore reproduces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import pyarrow as pa

from ringsync.changes.cql_lists import ListChange, ListEntries, is_prepended
from ringsync.changes.cql_ranges import range_conditions
from ringsync.changes.cql_rows import Cell, ChangeRow, Times, change_objects
from ringsync.changes.schema import PARTITION_DELETION, RANGE_DELETION, STATIC
from ringsync.changes.tables import LoggedColumn
from ringsync.changes.texts import counter_shards
from ringsync.cql.identifiers import printable
from ringsync.cql.types import ListType, MapType, SetType, UserType
from ringsync.cql.value_texts import NULL
from ringsync.schema.table import TableSchema

_COMMENT = "-- "


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
        for row in change_objects(rows, self._tables):
            if (row.file, row.position) != self._said:
                self._said = row.file, row.position
                yield f"{_COMMENT}{row.file}:{row.position}"
            if None in row.partition_key or (row.clustering and {None, NULL} & {*row.clustering.values}):
                yield self._unsaid(f"a row of {row.table.full_name} whose key is no value of its type")
            elif row.kind in (PARTITION_DELETION, RANGE_DELETION):
                yield from self._deletion(row)
            elif _is_counter(row.table):
                yield from self._counters(row)
            else:
                yield from self._row(row)

    def _unsaid(self, what: str) -> str:
        self.unsaid += 1
        return f"{_COMMENT}cannot be said in CQL: {what}"

    def _deletion(self, row: ChangeRow) -> Iterator[str]:
        pieces: list[list[str]] = [[]]
        if row.kind == RANGE_DELETION and row.clustering and row.range_end:
            pieces = range_conditions(row.table.clustering, row.clustering, row.range_end)
        if pieces == [[]] and row.kind == RANGE_DELETION and row.table.of_kind("static"):
            yield self._unsaid("the deletion of all rows of a partition, but not of its static columns")
            return
        for piece in pieces:
            yield f"DELETE FROM {_at(row, row.deletion)} WHERE {' AND '.join([*_partition(row), *piece])};"

    def _row(self, row: ChangeRow) -> Iterator[str]:
        cells = [cell for cell in row.cells if _is_kept(row.table, cell.column, cell.times.timestamp)]
        deletions = [one for one in row.complex_deletions if _is_kept(row.table, *one)]
        for column, timestamp in deletions:
            self._lists.forget((row.key, column.name), timestamp)
        if row.deletion is not None:
            yield f"DELETE FROM {_at(row, row.deletion)} WHERE {_where(row)};"
        lists = {
            column: self._lists.change((row.key, column.name), [cell for cell in cells if cell.column == column])
            for column in dict.fromkeys(cell.column for cell in cells)
            if isinstance(column.type, ListType) and column.is_multicell
        }
        sayable = [cell for cell in cells if cell.column not in lists and _is_sayable(cell)]
        for cell in cells:
            if cell.column not in lists and not _is_sayable(cell):
                yield self._unsaid(f"a value of {row.table.full_name} {cell.column.name}")
        sayable += [cell for change in lists.values() for cell in change.added if _is_sayable(cell)]
        assigned = _assignments(sayable, deletions, lists)
        yield from self._deleted_cells(row, sayable, [one for one in deletions if one[0] not in assigned])
        yield from self._removed_entries(row, lists)
        groups: dict[Times, list[Cell]] = defaultdict(list)
        if row.liveness:
            groups[row.liveness] = []
        for cell in sayable + [cell for change in lists.values() for cell in change.back]:
            if not cell.is_tombstone:
                groups[cell.times].append(cell)
        for times, group in groups.items():
            yield from self._written(row, times, group, assigned)

    def _deleted_cells(
        self, row: ChangeRow, cells: Sequence[Cell], deletions: Iterable[tuple[LoggedColumn, int]]
    ) -> Iterator[str]:
        found: dict[int, list[str]] = defaultdict(list)
        for column, timestamp in deletions:
            found[timestamp].append(printable(column.name))
        for cell in cells:
            if cell.is_tombstone:
                found[cell.times.timestamp].append(_element(cell))
        for timestamp, names in found.items():
            yield f"DELETE {', '.join(names)} FROM {_at(row, timestamp)} WHERE {_where(row)};"

    def _removed_entries(self, row: ChangeRow, lists: Mapping[LoggedColumn, ListChange]) -> Iterator[str]:
        for column, change in lists.items():
            if change.unknown:
                yield self._unsaid(
                    f"the end of {change.unknown} entries of {column.name}, which this log did not put there"
                )
            name = printable(column.name)
            for value, timestamp in change.removed:
                yield f"UPDATE {_at(row, timestamp)} SET {name} = {name} - [{value}] WHERE {_where(row)};"

    def _written(
        self, row: ChangeRow, times: Times, cells: Sequence[Cell], assigned: Mapping[LoggedColumn, Times]
    ) -> Iterator[str]:
        """The statements of what has the same times: an INSERT where the row itself has them, UPDATEs of the rest."""
        by_column: dict[LoggedColumn, list[Cell]] = defaultdict(list)
        for cell in cells:
            by_column[cell.column].append(cell)
        whole = {
            column: _whole(column, found)
            for column, found in by_column.items()
            if not column.is_multicell or assigned.get(column) == times
        }
        using, end = self._using(times)
        if times == row.liveness:
            names = [printable(name) for name in (*(c.name for c in row.table.key_columns), *(c.name for c in whole))]
            values = [*row.partition_key, *(row.clustering.values if row.clustering else ()), *whole.values()]
            yield (
                f"INSERT INTO {row.table.full_name} ({', '.join(names)}) VALUES ({', '.join(map(str, values))})"
                f"{using};{end}"
            )
            whole = {}
        updates = [[f"{printable(column.name)} = {value}" for column, value in whole.items()]]
        for column, found in by_column.items():
            if column.is_multicell and assigned.get(column) != times:
                first, *more = _additions(column, found)
                updates[0] += first
                updates += more
        for update in updates:
            if update:
                yield f"UPDATE {row.table.full_name}{using} SET {', '.join(update)} WHERE {_where(row)};{end}"

    def _using(self, times: Times) -> tuple[str, str]:
        """The USING clause, and a comment for the end of the line: when what expires does so."""
        clause = f" USING TIMESTAMP {times.timestamp}"
        if times.ttl is None or times.expires_at is None:
            return clause, ""
        ttl = times.ttl if self._now is None else max(times.expires_at - int(self._now()), 1)
        return f"{clause} AND TTL {ttl}", f" {_COMMENT}expires_at {times.expires_at}"

    def _counters(self, row: ChangeRow) -> Iterator[str]:
        """Counters take no timestamps; what is added is what the total is greater than the one before in this log."""
        if row.deletion is not None:
            yield f"DELETE FROM {row.table.full_name} WHERE {_where(row)};"
        added, deleted = [], []
        for cell in row.cells:
            name = printable(cell.column.name)
            if not _is_kept(row.table, cell.column, cell.times.timestamp):
                continue
            if cell.is_tombstone:
                deleted.append(name)
            elif (more := self._added((row.key, cell.column.name), cell.raw_value or b"")) is not None:
                added.append(f"{name} = {name} {'-' if more < 0 else '+'} {abs(more)}")
        if deleted:
            yield f"DELETE {', '.join(deleted)} FROM {row.table.full_name} WHERE {_where(row)};"
        if added:
            yield f"UPDATE {row.table.full_name} SET {', '.join(added)} WHERE {_where(row)};"

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


def _assignments(
    cells: Iterable[Cell], deletions: Iterable[tuple[LoggedColumn, int]], lists: Mapping[LoggedColumn, ListChange]
) -> dict[LoggedColumn, Times]:
    """Columns of many cells that are written as a whole, ``m = {…}``: that deletes what was there 1 µs before."""
    found = {}
    for column, timestamp in deletions:
        own = [cell for cell in cells if cell.column == column]
        times = {cell.times for cell in own}
        change = lists.get(column, ListChange())
        only_new = not change.removed and not change.unknown and not any(map(is_prepended, change.added))
        if len(times) == 1 and only_new and not any(cell.is_tombstone for cell in own):
            (one,) = times
            if one.timestamp - 1 == timestamp:
                found[column] = one
    return found


def _whole(column: LoggedColumn, cells: Sequence[Cell]) -> str:
    """The literal of a column of which these are all cells."""
    if not column.is_multicell:
        return str(cells[0].value)
    if isinstance(column.type, UserType):
        return "{" + ", ".join([f"{printable(str(cell.path))}: {cell.value}" for cell in cells]) + "}"
    return _collection(column, cells)


def _collection(column: LoggedColumn, cells: Sequence[Cell]) -> str:
    match column.type:
        case ListType():
            return "[" + ", ".join([str(cell.value) for cell in cells]) + "]"
        case MapType():
            return "{" + ", ".join([f"{cell.path}: {cell.value}" for cell in cells]) + "}"
    return "{" + ", ".join([str(cell.path) for cell in cells]) + "}"


def _additions(column: LoggedColumn, cells: Sequence[Cell]) -> list[list[str]]:
    """Assignments that add cells to a column of many: one UPDATE can have those of each list."""
    name = printable(column.name)
    if isinstance(column.type, UserType):
        return [[f"{name}.{printable(str(cell.path))} = {cell.value}" for cell in cells]]
    if not isinstance(column.type, ListType):
        return [[f"{name} = {name} + {_collection(column, cells)}"]]
    before = [cell for cell in cells if is_prepended(cell)]
    behind = [cell for cell in cells if not is_prepended(cell)]
    found = [[f"{name} = {name} + {_collection(column, behind)}"]] if behind else []
    return [*found, [f"{name} = {_collection(column, before)} + {name}"]] if before else found


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


def _is_kept(table: TableSchema, column: LoggedColumn, timestamp: int) -> bool:
    """Whether a write to a column still counts: not if the column is gone, or was when it came again."""
    return not column.dropped and timestamp > _dropped_at(table).get(column.name, -(2**63) - 1)


@lru_cache(maxsize=4096)
def _dropped_at(table: TableSchema) -> dict[str, int]:
    return {column.name: column.dropped_at for column in table.dropped}


@lru_cache(maxsize=4096)
def _is_counter(table: TableSchema) -> bool:
    return any(column.is_counter for column in table.columns)


def _at(row: ChangeRow, timestamp: int | None) -> str:
    """The table, and when it is written to; that of counters takes no timestamps."""
    name = row.table.full_name
    return name if _is_counter(row.table) else f"{name} USING TIMESTAMP {timestamp}"


def _partition(row: ChangeRow) -> list[str]:
    columns = row.table.partition_key
    return [f"{printable(column.name)} = {value}" for column, value in zip(columns, row.partition_key, strict=True)]


def _where(row: ChangeRow) -> str:
    """The conditions that name a row; of a static one its partition."""
    values = row.clustering.values if row.clustering and row.kind != STATIC else ()
    conditions = [f"{printable(c.name)} = {value}" for c, value in zip(row.table.clustering, values, strict=False)]
    return " AND ".join(_partition(row) + conditions)
