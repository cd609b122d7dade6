"""What the kernels have written, as a batch of change rows, or as plain rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.plain import PlainRows
from ringsync.changes.schema import (
    CELL,
    CHANGE_ROWS,
    COMPLEX_DELETION,
    DELETION,
    EXPIRING,
    LIVENESS,
    PARTITION_DELETION,
    RANGE_DELETION,
    TOMBSTONE,
)
from ringsync.compiled.arrow import Mask, array_of, bitmap, structs_of
from ringsync.cql.cells import NULL_LENGTH, Cells, cells_of_values, raw_values
from ringsync.formats.rows import state as at
from ringsync.formats.rows.state import Output


def constant_columns(rows: int, file: str) -> tuple[pa.Array, pa.Array]:
    """Make the columns that are equal in all rows: version of the schema, and name of the file."""
    return array_of(np.zeros(rows, np.int32)), raw_values(
        cells_of_values([file.encode()]).take(np.zeros(rows, np.intp)), pa.string()
    )


def change_rows(output: Output, versions: pa.Array, files: pa.Array) -> pa.RecordBatch:
    """Wrap the arrays that the kernels have filled: a batch of ``CHANGE_ROWS``. Nothing is copied.

    :param versions: versions of the schema, at least as many as rows
    :param files: names of the file, at least as many as rows
    """
    rows, cells, deletions = (output.count(cursor) for cursor in (at.ROWS, at.CELLS, at.COMPLEX))
    arrays = output.arrays
    liveness, deletion, kinds = (arrays[name][:rows] for name in (at.ROW_LIVENESS, at.ROW_DELETION, at.ROW_KIND))
    cell_kinds = arrays[at.CELL_KIND][:cells]

    def numbers(name: int, count: int, valid: Mask | None = None) -> pa.Array:
        return array_of(arrays[name][:count], valid)

    def binary(ends: int, data: int, count: int, valid: Mask | None = None) -> pa.Array:
        nulls = None if valid is None or valid.all() else bitmap(valid)
        return pa.Array.from_buffers(pa.binary(), count, [nulls, *map(pa.py_buffer, (arrays[ends], arrays[data]))])

    def lists(structs: pa.StructArray, starts: int) -> pa.Array:
        buffers = [None, pa.py_buffer(arrays[starts])]
        return pa.Array.from_buffers(pa.list_(structs.type), rows, buffers, children=[structs])

    cell = [
        numbers(at.CELL_COLUMN, cells),
        binary(at.PATH_ENDS, at.PATHS, cells, arrays[at.CELL_HAS_PATH][:cells] > 0),
        binary(at.VALUE_ENDS, at.VALUES, cells, cell_kinds != TOMBSTONE),
        numbers(at.CELL_TIMESTAMP, cells),
        numbers(at.CELL_TTL, cells, cell_kinds == EXPIRING),
        numbers(at.CELL_LOCAL, cells, cell_kinds >= EXPIRING),
        numbers(at.CELL_KIND, cells),
    ]
    of_complex = (at.COMPLEX_COLUMN, at.COMPLEX_TIMESTAMP, at.COMPLEX_LOCAL)
    complex_deletion = [numbers(name, deletions) for name in of_complex]
    expiring = liveness == 2
    row_liveness = [
        numbers(at.ROW_LIVENESS_TIMESTAMP, rows),
        numbers(at.ROW_LIVENESS_TTL, rows, expiring),
        numbers(at.ROW_LIVENESS_EXPIRES, rows, expiring),
    ]
    row_deletion = [numbers(at.ROW_DELETION_TIMESTAMP, rows), numbers(at.ROW_DELETION_LOCAL, rows)]
    columns = [
        pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(arrays[at.ROW_TABLE_ID])], 0),
        versions.slice(0, rows),
        numbers(at.ROW_TOKEN, rows),
        binary(at.KEY_ENDS, at.KEYS, rows),
        numbers(at.ROW_KIND, rows),
        binary(at.CLUSTERING_ENDS, at.CLUSTERINGS, rows, (kinds == 0) | (kinds == 3)),
        binary(at.RANGE_ENDS, at.RANGES, rows, kinds == 3),
        numbers(at.ROW_WRITE_TIME, rows),
        structs_of(LIVENESS, row_liveness, liveness > 0),
        structs_of(DELETION, row_deletion, deletion > 0),
        lists(structs_of(CELL, cell), at.ROW_CELLS),
        lists(structs_of(COMPLEX_DELETION, complex_deletion), at.ROW_COMPLEX),
        pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(arrays[at.ROW_DIGEST])], 0),
        files.slice(0, rows),
        numbers(at.ROW_POSITION, rows),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_ROWS)


def plain_rows(output: Output, window: npt.NDArray[np.uint8], table_id: bytes, file: str) -> PlainRows:
    """Wrap the arrays that the kernels have filled with plain rows. Nothing is copied.

    :param window: the bytes that were read; nobody may change them afterwards
    :param file: path of the SSTable
    """
    rows, cells, arrays = output.count(at.ROWS), output.count(at.CELLS), output.arrays

    def of_rows(name: int) -> npt.NDArray[Any]:
        return arrays[name][:rows]

    def of_cells(name: int) -> npt.NDArray[Any]:
        return arrays[name][:cells]

    def between(ends: int, data: int, absent: Mask) -> Cells:
        limits = arrays[ends][: rows + 1]
        lengths = np.diff(limits)
        if absent.any():
            lengths[absent] = NULL_LENGTH
        return Cells(arrays[data], limits[:-1], lengths)

    kind = of_rows(at.ROW_KIND)
    return PlainRows(
        table_id,
        file,
        token=of_rows(at.ROW_TOKEN),
        kind=kind,
        partition_key=Cells(arrays[at.KEYS], of_rows(at.KEY_ENDS), of_rows(at.KEY_LENGTHS)),
        clustering=between(at.CLUSTERING_ENDS, at.CLUSTERINGS, kind == PARTITION_DELETION),
        range_end=between(at.RANGE_ENDS, at.RANGES, kind != RANGE_DELETION),
        write_time=of_rows(at.ROW_WRITE_TIME),
        position=of_rows(at.ROW_POSITION),
        liveness=of_rows(at.ROW_LIVENESS),
        liveness_timestamp=of_rows(at.ROW_LIVENESS_TIMESTAMP),
        liveness_ttl=of_rows(at.ROW_LIVENESS_TTL),
        liveness_expires=of_rows(at.ROW_LIVENESS_EXPIRES),
        deletion=of_rows(at.ROW_DELETION),
        deletion_timestamp=of_rows(at.ROW_DELETION_TIMESTAMP),
        deletion_local=of_rows(at.ROW_DELETION_LOCAL),
        cell_starts=arrays[at.ROW_CELLS][: rows + 1],
        column=of_cells(at.CELL_COLUMN),
        timestamp=of_cells(at.CELL_TIMESTAMP),
        ttl=of_cells(at.CELL_TTL),
        local=of_cells(at.CELL_LOCAL),
        cell_kind=of_cells(at.CELL_KIND),
        value=Cells(window, of_cells(at.VALUE_ENDS), of_cells(at.VALUE_LENGTHS)),
    )
