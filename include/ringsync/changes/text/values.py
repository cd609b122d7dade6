"""The values of change rows as text, for JSON and CQL, decoded one column of a table at a time."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.keys.parts import clustering_parts, partition_parts
from ringsync.changes.schema import TOMBSTONE
from ringsync.compiled.arrow import integers
from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.cql.counters import counter_totals
from ringsync.cql.text.values import TextForm, value_texts
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, UserType
from ringsync.schema.table import Column, TableSchema

Texts = list[str | None]
_TIMEUUID = Native("timeuuid")
_COLUMNS_PER_TABLE = 2**20


@dataclass(frozen=True)
class Bound:
    """One side of a range, or the clustering of a row.

    :ivar values: texts of the first clustering columns; None: bytes that are no value
    :ivar inclusive: whether rows that begin with these values belong to the range; True for a row
    """

    values: tuple[str | None, ...]
    inclusive: bool = True


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
    malformed: Counter[tuple[str, str]] = field(default_factory=Counter)


def change_texts(rows: pa.RecordBatch, tables: Mapping[str, TableSchema], form: TextForm) -> ChangeTexts:
    """Decode the values of change rows.

    :param rows: batch of ``CHANGE_ROWS``
    :param tables: tables by id, at least those of the rows
    :param form: :data:`ringsync.cql.text.json.JSON` or :data:`ringsync.cql.text.literals.CQL`
    """
    reader = _Reader(rows, tables, form)
    keys: list[tuple[str | None, ...]] = [()] * len(rows)
    starts: list[Bound | None] = [None] * len(rows)
    ends: list[Bound | None] = [None] * len(rows)
    for number, table in enumerate(reader.tables):
        chosen = np.flatnonzero(reader.of_row == number)
        for row, texts in zip(chosen.tolist(), reader.partition_keys(table, chosen), strict=True):
            keys[row] = texts
        for name, bounds in (("clustering", starts), ("range_end", ends)):
            for row, bound in reader.bounds(table, chosen, name):
                bounds[row] = bound
    columns, paths, values = reader.cells()
    by_row = [reader.tables[number] for number in reader.of_row.tolist()]
    return ChangeTexts(by_row, keys, starts, ends, columns, paths, values, reader.malformed)


class _Reader:
    """A decoder of one batch, with the state that all its columns share."""

    def __init__(self, rows: pa.RecordBatch, tables: Mapping[str, TableSchema], form: TextForm) -> None:
        self.rows = rows
        self.form = form
        self.malformed: Counter[tuple[str, str]] = Counter()
        ids = rows["table_id"].dictionary_encode()
        self.tables = [tables[table_id.hex()] for table_id in ids.dictionary.to_pylist()]
        self.of_row: npt.NDArray[np.int32] = np.frombuffer(ids.indices.buffers()[1], np.int32, len(rows))

    def partition_keys(self, table: TableSchema, chosen: npt.NDArray[np.intp]) -> Iterator[tuple[str | None, ...]]:
        cells = cells_of(self.rows["partition_key"]).take(chosen)
        return zip(*self._columns(table, table.partition_key, partition_parts(cells, table)), strict=True)

    def bounds(self, table: TableSchema, chosen: npt.NDArray[np.intp], name: str) -> Iterator[tuple[int, Bound]]:
        cells = cells_of(self.rows[name])
        chosen = chosen[cells.lengths[chosen] >= 0]
        cells = cells.take(chosen)
        counts, parts, ends = clustering_parts(cells, len(table.clustering))
        inclusive = (ends == cells.lengths) | (cells.buffer[cells.offsets + ends] > 0)
        texts = list(zip(*self._columns(table, table.clustering, parts), strict=True)) or [()] * len(chosen)
        for row, count, values, belongs in zip(
            chosen.tolist(), counts.tolist(), texts, inclusive.tolist(), strict=True
        ):
            yield row, Bound(values[:count], belongs)

    def cells(self) -> tuple[list[LoggedColumn], Texts, Texts]:
        """Return columns, paths and values of all cells."""
        lists = self.rows["cells"]
        flat = lists.flatten()
        sizes = lists.value_lengths().to_pylist()
        groups = np.repeat(self.of_row.astype(np.int64), sizes) * _COLUMNS_PER_TABLE + integers(flat.field("column"))
        columns: list[LoggedColumn | None] = [None] * len(flat)
        paths: Texts = [None] * len(flat)
        values: Texts = [None] * len(flat)
        all_paths, all_values = cells_of(flat.field("path")), cells_of(flat.field("value"))
        kinds = integers(flat.field("kind"))
        for group in np.unique(groups).tolist():
            table = self.tables[group // _COLUMNS_PER_TABLE]
            column = columns_of(table)[group % _COLUMNS_PER_TABLE]
            chosen = np.flatnonzero(groups == group)
            live = chosen[kinds[chosen] != TOMBSTONE]
            for cell in chosen.tolist():
                columns[cell] = column
            if column.is_multicell:
                self._fill(paths, chosen, self._paths(table, column, all_paths.take(chosen)))
            self._fill(values, live, self._values(table, column, all_values.take(live), all_paths.take(live)))
        return [column for column in columns if column is not None], paths, values

    def _paths(self, table: TableSchema, column: LoggedColumn, cells: Cells) -> Texts:
        match column.type:
            case ListType():
                texts = self._texts(table, column.name, _TIMEUUID, cells)
                return [text and text.strip('"') for text in texts]
            case SetType(element=kind) | MapType(key=kind):
                return self._texts(table, column.name, kind, cells)
            case UserType(field_names=names):
                fields = _field_numbers(cells)
                return [names[number] if number < len(names) else None for number in fields]
        raise AssertionError(f"{table.full_name}.{column.name} has no paths")

    def _values(self, table: TableSchema, column: LoggedColumn, cells: Cells, paths: Cells) -> Texts:
        if not column.is_multicell:
            if str(column.type) == "counter":
                return [str(total or 0) for total in counter_totals(raw_values(cells)).to_pylist()]
            return self._texts(table, column.name, column.type, cells)
        match column.type:
            case ListType(element=kind) | MapType(value=kind):
                return self._texts(table, column.name, kind, cells)
            case UserType(field_types=kinds):
                values: Texts = [None] * len(cells)
                fields = np.array(_field_numbers(paths), np.int64)
                for number, kind in enumerate(kinds):
                    chosen = np.flatnonzero(fields == number)
                    self._fill(values, chosen, self._texts(table, column.name, kind, cells.take(chosen)))
                return values
        return [None] * len(cells)

    def _columns(self, table: TableSchema, columns: Sequence[Column], parts: list[Cells]) -> list[Texts]:
        return [
            self._texts(table, column.name, column.type, cells) for column, cells in zip(columns, parts, strict=True)
        ]

    def _texts(self, table: TableSchema, name: str, cql_type: CqlType, cells: Cells) -> Texts:
        texts = value_texts(self.form, cql_type, cells)
        if texts.null_count:
            self.malformed[table.full_name, name] += texts.null_count
        listed: Texts = texts.to_pylist()
        return listed

    @staticmethod
    def _fill(target: Texts, places: npt.NDArray[np.intp], texts: Texts) -> None:
        for place, text in zip(places.tolist(), texts, strict=True):
            target[place] = text


def counter_shards(context: bytes) -> list[tuple[bytes, int, int]]:
    """Return the shards of a counter's cell: id, clock, count (docs/formats.md, 2.6; C: db/context/CounterContext)."""
    if len(context) < 2:
        return []
    header = 2 + 2 * abs(struct.unpack_from(">h", context)[0])
    body = context[header : len(context) - (len(context) - header) % 32]
    return list(struct.iter_unpack(">16sqq", body))


def _field_numbers(cells: Cells) -> list[int]:
    return [int.from_bytes(cells.value(row) or b"", "big") for row in range(len(cells))]
