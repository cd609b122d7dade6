"""The values of change rows as text, for JSON and CQL, decoded one column of a table at a time."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.keys.parts import are_inclusive, clustering_parts, field_numbers, partition_parts
from ringsync.changes.schema import TOMBSTONE
from ringsync.compiled.arrow import Places
from ringsync.cql.cells import Cells, raw_values
from ringsync.cql.counters import counter_totals
from ringsync.cql.text.values import TextForm, value_texts
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, UserType
from ringsync.schema.table import Column, TableSchema

Texts = list[str | None]
_TIMEUUID = Native("timeuuid")


@dataclass(frozen=True)
class Bound:
    """One side of a range, or the clustering of a row.

    :ivar values: texts of the first clustering columns; None: bytes that are no value
    :ivar inclusive: whether rows that begin with these values belong to the range; True for a row
    :ivar raw: bytes of these columns; None: null
    """

    values: tuple[str | None, ...]
    inclusive: bool = True
    raw: tuple[bytes | None, ...] = ()


@dataclass(frozen=True)
class ChangeTexts:
    """The values in change rows.

    :ivar tables: table of each row
    :ivar partition_keys: text of each key column, by row; None: bytes that are no value
    :ivar clusterings: clustering of each row, start of each range; None: static rows, partition deletions
    :ivar range_ends: end of each range, by row; None: no range
    :ivar columns: column of each cell
    :ivar paths: path of each cell: timeuuid without quotes, element, key, name of a field; None: a single-cell column,
        or bytes that are no value
    :ivar values: value of each cell; None: a tombstone, an element of a set, or bytes that are no value
    :ivar malformed: number of values whose bytes are no value of the column's type, by table and column
    """

    tables: list[TableSchema]
    partition_keys: list[tuple[str | None, ...]]
    clusterings: list[Bound | None]
    range_ends: list[Bound | None]
    columns: list[LoggedColumn]
    paths: Texts
    values: Texts
    malformed: Counter[tuple[str, str]]


def change_texts(rows: ChangeRows, tables: Mapping[str, TableSchema], form: TextForm) -> ChangeTexts:
    """Decode the values of change rows.

    :param tables: tables by id, at least those of the rows
    :param form: :data:`ringsync.cql.text.json.JSON` or :data:`ringsync.cql.text.literals.CQL`
    """
    reader = _Reader(form)
    keys: list[tuple[str | None, ...]] = [()] * len(rows)
    starts: list[Bound | None] = [None] * len(rows)
    ends: list[Bound | None] = [None] * len(rows)
    cells = rows.cells
    table_of: dict[int, TableSchema] = {}
    column_of: dict[int, LoggedColumn] = {}
    paths: Texts = [None] * len(cells.row)
    values: Texts = [None] * len(cells.row)
    for table, chosen in by_table(rows, tables):
        table_of |= dict.fromkeys(chosen.tolist(), table)
        parts = partition_parts(rows.partition_key.take(chosen), table)
        _fill(keys, chosen, zip(*reader.columns(table, table.partition_key, parts), strict=True))
        for bounds, encoded in ((starts, rows.clustering), (ends, rows.range_end)):
            there = chosen[encoded.lengths[chosen] >= 0]
            _fill(bounds, there, reader.bounds(table, encoded.take(there)))
        of_table, columns = np.isin(cells.row, chosen), columns_of(table)
        for number in np.unique(cells.column[of_table]).tolist():
            column, of_column = columns[number], np.flatnonzero(of_table & (cells.column == number))
            column_of |= dict.fromkeys(of_column.tolist(), column)
            live = of_column[cells.kind[of_column] != TOMBSTONE]
            if column.is_multicell:
                _fill(paths, of_column, reader.paths(table, column, cells.path.take(of_column)))
            _fill(values, live, reader.values(table, column, cells.value.take(live), cells.path.take(live)))
    by_row, by_cell = [table_of[row] for row in range(len(rows))], [column_of[cell] for cell in range(len(values))]
    return ChangeTexts(by_row, keys, starts, ends, by_cell, paths, values, reader.malformed)


def by_table(rows: ChangeRows, tables: Mapping[str, TableSchema]) -> Iterator[tuple[TableSchema, Places]]:
    """Yield each table of change rows, and the places of its rows.

    :param tables: tables by id, at least those of the rows
    """
    ids, number_of_row = np.unique(rows.table_ids, axis=0, return_inverse=True)
    for number, table_id in enumerate(ids):
        yield tables[table_id.tobytes().hex()], np.flatnonzero(number_of_row.reshape(-1) == number)


class _Reader:
    """A decoder of values that counts malformed ones."""

    def __init__(self, form: TextForm) -> None:
        self._form = form
        self.malformed: Counter[tuple[str, str]] = Counter()

    def bounds(self, table: TableSchema, cells: Cells) -> Iterator[Bound]:
        counts, parts, sizes = clustering_parts(cells, len(table.clustering))
        texts = list(zip(*self.columns(table, table.clustering, parts), strict=True)) or [()] * len(cells)
        raws = list(zip(*(raw_values(part).to_pylist() for part in parts), strict=True)) or [()] * len(cells)
        inclusive = are_inclusive(cells, sizes).tolist()
        for count, values, belongs, raw in zip(counts.tolist(), texts, inclusive, raws, strict=True):
            yield Bound(values[:count], belongs, raw[:count])

    def paths(self, table: TableSchema, column: LoggedColumn, cells: Cells) -> Texts:
        match column.type:
            case ListType():
                texts = self._texts(table, column.name, _TIMEUUID, cells)
                return [text and text.strip('"') for text in texts]
            case SetType(element=kind) | MapType(key=kind):
                return self._texts(table, column.name, kind, cells)
            case UserType(field_names=names):
                numbers = field_numbers(cells).tolist()
                fields = [names[number] if 0 <= number < len(names) else None for number in numbers]
                if unknown := fields.count(None):
                    self.malformed[table.full_name, column.name] += unknown
                return fields
        raise AssertionError(f"{table.full_name}.{column.name} has no paths")

    def values(self, table: TableSchema, column: LoggedColumn, cells: Cells, paths: Cells) -> Texts:
        if not column.is_multicell:
            if column.is_counter:
                return [str(total or 0) for total in counter_totals(raw_values(cells)).to_pylist()]
            return self._texts(table, column.name, column.type, cells)
        match column.type:
            case ListType(element=kind) | MapType(value=kind):
                return self._texts(table, column.name, kind, cells)
            case UserType(field_types=kinds):
                values: Texts = [None] * len(cells)
                numbers = field_numbers(paths)
                for number, kind in enumerate(kinds):
                    of_field = np.flatnonzero(numbers == number)
                    _fill(values, of_field, self._texts(table, column.name, kind, cells.take(of_field)))
                return values
        return [None] * len(cells)

    def columns(self, table: TableSchema, columns: Sequence[Column], parts: list[Cells]) -> list[Texts]:
        return [
            self._texts(table, column.name, column.type, cells) for column, cells in zip(columns, parts, strict=True)
        ]

    def _texts(self, table: TableSchema, name: str, cql_type: CqlType, cells: Cells) -> Texts:
        texts = value_texts(self._form, cql_type, cells)
        if texts.null_count:
            self.malformed[table.full_name, name] += texts.null_count
        listed: Texts = texts.to_pylist()
        return listed


def _fill(target: list[Any], places: Places, values: Iterable[Any]) -> None:
    for place, value in zip(places.tolist(), values, strict=True):
        target[place] = value


def counter_shards(context: bytes) -> list[tuple[bytes, int, int]]:
    """Return the shards of a counter's cell: id, clock, count (docs/formats.md, 2.6; C: db/context/CounterContext)."""
    if len(context) < 2:
        return []
    header = 2 + 2 * abs(struct.unpack_from(">h", context)[0])
    body = context[header : len(context) - (len(context) - header) % 32]
    return list(struct.iter_unpack(">16sqq", body))
