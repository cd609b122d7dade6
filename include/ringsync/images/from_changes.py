"""The conversion of merged change rows to row images (to_changes.py is the reverse).

Both conversions go through Cassandra's bytes. The image of a collection or user-defined type is decoded from the frozen
form, which is built from the cells. The reverse takes it apart in the same way. So every value that can be decoded
comes back unchanged. Images lack TTLs and counters: a TTL comes back as 0, counters do not come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.common_times import NO_CELL, ElementTimes
from ringsync.changes.flat import FlatCells, by_column, kept, of_rows, spread
from ringsync.changes.flat import expiries as expiries_of
from ringsync.changes.grid import CellGrid, cell_grid
from ringsync.changes.keys.canonical import decoded_clustering
from ringsync.changes.keys.parts import clustering_parts, field_numbers, partition_parts
from ringsync.changes.schema import ROW, TOMBSTONE
from ringsync.compiled.arrow import Places, array_of
from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.cql.codec.decode import Decoded, decode
from ringsync.cql.codec.encode import frozen_values
from ringsync.cql.counters import counter_totals
from ringsync.cql.types import ListType, MapType, UserType
from ringsync.images.merge_column import merge_column
from ringsync.images.schema import NO_LIVENESS, row_image_schema
from ringsync.images.times import Differences, differences_of, refuse_misfits, row_times, x_column
from ringsync.schema.table import Column, TableSchema

Misfits = Literal["error", "raw"]


def row_images_of(merged: ChangeRows, table: TableSchema, misfits: Misfits) -> pa.RecordBatch:
    """Convert the rows and static rows of merged change rows to images of what these change rows alone say.

    :param merged: result of :func:`ringsync.changes.reconcile.rows.merge`; each column's cells in the order of paths
    :param misfits: treatment of values that the Arrow type cannot hold: fail, or keep their bytes in ``_x``
    :returns: images with ``row_image_schema(table)``, one for each row and static row, in their order
    :raises UnrepresentableValueError: there is such a value, with ``misfits="error"``
    """
    rows = merged.where(merged.of_row)
    return images_of(rows, table, misfits, np.arange(len(rows)))


def images_of(
    rows: ChangeRows, table: TableSchema, misfits: Misfits, static_of: Places, grid: CellGrid | None = None
) -> pa.RecordBatch:
    """Convert rows and static rows to images, as :func:`row_images_of` does.

    :param static_of: index of the row whose static cells each row shows
    :param grid: cells of all rows that are no tombstones, if they are not among the rows; all columns have one cell
    """
    count = len(rows)
    columns = [column for column in columns_of(table) if not column.dropped]
    cells = kept(rows.cells, table)
    scalars = [column for column in columns if not column.is_multicell]
    grid = grid or cell_grid(cells, scalars, count, static_of)
    live = _elements(cells, columns, static_of)
    _, clustering, _ = clustering_parts(rows.clustering, len(table.clustering))
    keys = [*partition_parts(rows.partition_key, table), *clustering]
    raws = dict(zip([column.name for column in table.key_columns], keys, strict=True))
    raws |= {column.name: values for column, values in zip(scalars, grid.values, strict=True)}
    raws |= {column.name: _values(column, live[column.name], count) for column in columns if column.is_multicell}
    decoded = {column.name: _decoded(column, raws[column.name]) for column in table.columns}
    for key in table.clustering:
        decoded[key.name], raws[key.name] = decoded_clustering(decoded[key.name], raws[key.name], key.type)
    if misfits == "error":
        refuse_misfits(table, decoded, raws, partial(_described, rows, table))
    row, differences = _times(rows, grid, columns, live, decoded)
    misfit_bytes = {name: values.raw(raws[name]) for name, values in decoded.items()}
    x = x_column(table, differences, misfit_bytes, count)
    lists = {column.name: live[column.name] for column in columns if column.is_list}
    merge = merge_column(rows, table, cells.where(cells.kind == TOMBSTONE), lists)
    values = [decoded[column.name].values for column in table.columns]
    return pa.RecordBatch.from_arrays([array_of(rows.token), *values, row, x, merge], schema=row_image_schema(table))


def _elements(cells: FlatCells, columns: Sequence[LoggedColumn], static_of: Places) -> dict[str, FlatCells]:
    """Return the cells of each multi-cell column that are no tombstones.

    :param static_of: index of the row whose static cells each row shows
    """
    multicell = np.array([column.is_multicell for column in columns], np.bool_)
    if not multicell.any():
        return {}
    elements = cells.where(multicell[cells.column] & (cells.kind != TOMBSTONE))
    live = {
        column.name: found
        for column, found in zip(columns, by_column(elements, len(columns)), strict=True)
        if column.is_multicell
    }
    for column in columns:
        if column.is_static and column.is_multicell:
            live[column.name] = of_rows(live[column.name], static_of, len(static_of))
    return live


def _values(column: LoggedColumn, cells: FlatCells, rows: int) -> Cells:
    """Return a multi-cell column of all rows, serialised as if it was frozen; null where there is no cell."""
    counts = np.bincount(cells.row, minlength=rows)
    present = np.flatnonzero(counts)
    if isinstance(column.type, UserType):
        number, row = _field_numbers(column, cells), np.searchsorted(present, cells.row)
        of_fields = [np.flatnonzero(number == field) for field in range(len(column.type.field_types))]
        parts = [raw_values(spread(cells.value.take(at), row[at], len(present))) for at in of_fields]
        frozen = frozen_values(parts, np.ones(len(present), np.int64), counted=False)
    else:
        sides = {ListType: [cells.value], MapType: [cells.path, cells.value]}.get(type(column.type), [cells.path])
        frozen = frozen_values([raw_values(side) for side in sides], counts[present], counted=True)
    return spread(cells_of(frozen), present, rows)


def _field_numbers(column: LoggedColumn, cells: FlatCells) -> Places:
    """Return the number of the field that each cell of a user-defined type belongs to."""
    assert isinstance(column.type, UserType)
    number, fields = field_numbers(cells.path), len(column.type.field_types)
    if np.any((number < 0) | (number >= fields)):
        raise ValueError(
            f"column {column.name} has a cell for field {int(number.max())} of its type {column.type}, which has "
            f"{fields} fields in the known schema: read the table's schema again"
        )
    return number


def _decoded(column: LoggedColumn | Column, raw: Cells) -> Decoded:
    if column.is_counter:
        return Decoded(counter_totals(raw_values(raw)), None)
    return decode(column.type, raw)


def _described(rows: ChangeRows, table: TableSchema, row: int) -> str:
    """Describe a row for an error message, by the bytes of its key."""
    key, clustering = (cells.value(row) or b"" for cells in (rows.partition_key, rows.clustering))
    return f"partition key 0x{key.hex()}" + (f", clustering 0x{clustering.hex()}" if table.clustering else "")


def _times(
    rows: ChangeRows,
    grid: CellGrid,
    columns: Sequence[LoggedColumn],
    elements: dict[str, FlatCells],
    decoded: dict[str, Decoded],
) -> tuple[pa.Array, dict[str, Differences]]:
    """Return ``_row``, and ``d`` and ``e`` by column.

    :param elements: cells of the multi-cell columns
    """
    count = len(rows)
    times = {
        column.name: _element_times(column, elements[column.name], count) for column in columns if column.is_multicell
    }
    names = [column.name for column in columns if not column.is_multicell]
    values = {name: decoded[name] for name in times}
    common, differences = differences_of(names, grid.writetimes, grid.expiries, times, values, count)
    deleted_at = array_of(rows.deletion.timestamp, rows.deletion.there)
    return row_times(common, deleted_at, live_times(rows)), differences


def live_times(rows: ChangeRows) -> pa.Array:
    """Return ``_row.live`` of rows; null for static rows."""
    live = np.where(rows.liveness.there, rows.liveness.timestamp, NO_LIVENESS)
    return array_of(live, (rows.kind == ROW) & ~rows.liveness.unknown)


def _element_times(column: LoggedColumn, cells: FlatCells, rows: int) -> ElementTimes:
    """Return the times of the elements of each row; a row with an unknown time gets none."""
    unknown = np.bincount(cells.row, cells.unknown, rows) > 0
    known = cells.where(~unknown[cells.row]) if unknown.any() else cells
    counts = np.bincount(known.row, minlength=rows)
    writetimes, expiries = known.timestamp, expiries_of(known)
    if isinstance(column.type, UserType):
        width = len(column.type.field_types)
        present = np.flatnonzero(counts)
        places = np.searchsorted(present, known.row) * width + _field_numbers(column, known)
        times = np.full((2, len(present) * width), NO_CELL, np.int64)
        times[:, places] = writetimes, expiries
        writetimes, expiries = times
        counts = np.where(counts > 0, width, 0)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return ElementTimes(starts, writetimes, expiries)
