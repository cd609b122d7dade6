"""The merge of plain rows (:mod:`ringsync.changes.plain`) without deletions of partitions or ranges.

Its result is that of :func:`ringsync.changes.reconcile.rows.merge`, without digests and sources, several times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringsync.changes.batch import ChangeRows, Deletion, Liveness
from ringsync.changes.flat import FlatDeletions, tombstones
from ringsync.changes.grid import CellGrid
from ringsync.changes.keys.order import clustering_keys
from ringsync.changes.plain import PlainRows
from ringsync.changes.reconcile import plain_kernels as kernel
from ringsync.changes.schema import ROW, TOMBSTONE
from ringsync.compiled.arrow import pooled
from ringsync.compiled.memory import PADDING, address
from ringsync.cql.cells import Cells, no_cells
from ringsync.cql.codec.split import total_bytes
from ringsync.schema.table import TableSchema

_MOST_STREAMS = 128
"""The kernel compares all streams for each row: with more of them, sorting is faster."""
_SPARSE = 8
"""Most places of the grid for each cell: it has one for each column of each row."""
_MOST_BYTES = 2**31 - 1 - PADDING
"""What 32-bit offsets reach."""


def merge_plain(parts: Sequence[PlainRows], table: TableSchema) -> tuple[ChangeRows, CellGrid] | None:
    """Merge rows of streams of the same table.

    :param parts: rows without deletions of partitions and ranges, at least one of each stream
    :returns: reconciled change rows, whose cells are the tombstones, and all other cells; None: the rows are not in
        their order, or this is not for them: see :func:`_suit`
    """
    columns, sizes = len(table.value_columns), _sizes(parts)
    if not _suit(parts, columns, sizes):
        return None
    ordered = [clustering_keys(part.clustering, table) for part in parts]
    streams = np.array([_words(part, keys) for part, keys in zip(parts, ordered, strict=True)], np.int64)
    most = sum(map(len, parts))
    members, starts = pooled(most, np.int64), pooled(most + 1, np.int32)
    scratch = np.empty(3 * len(parts), np.int64)
    rows = kernel.order_rows(address(streams), len(parts), *map(address, (scratch, members, starts)))
    if rows < 0:
        return None
    cells = [part.cell_kind[part.cell_starts[0] : part.cell_starts[-1]] for part in parts]
    dead = sum(int(np.count_nonzero(kinds == TOMBSTONE)) for kinds in cells)
    key, clustering = (Cells(_bytes(size), pooled(rows, np.int32), pooled(rows, np.int32)) for size in sizes[:2])
    # The values of a single stream stay where they are.
    buffer = parts[0].value.buffer if len(parts) == 1 else _bytes(sizes[2])
    token, live_at, live_ttl, live_until, deleted_at, deleted_local = (pooled(rows, np.int64) for _ in range(6))
    grid = pooled(3 * columns * rows, np.int64)
    writetimes, expiries = grid[: 2 * columns * rows].reshape(2, columns, rows)
    offsets, lengths = grid[2 * columns * rows :].view(np.int32).reshape(2, columns, rows)
    dead_row, dead_column, dead_at, dead_local = np.empty((4, dead), np.int64)
    arrays = [
        *(token, *_arrays(key), *_arrays(clustering), live_at, live_ttl, live_until, deleted_at, deleted_local),
        *(buffer, offsets, lengths, writetimes, expiries, dead_row, dead_column, dead_at, dead_local),
    ]
    result = np.array([*map(address, arrays), rows, columns, len(parts) > 1, 0], np.int64)
    winners = np.empty(2 * columns, np.int64)
    kernel.merge_rows(*map(address, (streams, members, starts, winners, result)))
    dead = int(result[kernel.R_DEAD // 8])
    nothing = np.zeros(0, np.int64)
    merged = ChangeRows(
        np.broadcast_to(np.frombuffer(parts[0].table_id, np.int64), (rows, 2)),
        np.zeros(rows, np.int64),
        token,
        key,
        np.full(rows, ROW, np.int64),
        clustering,
        no_cells(rows),
        np.zeros(rows, np.int64),
        Liveness(live_at, live_ttl, live_until),
        Deletion(deleted_at, deleted_local),
        tombstones(dead_row[:dead], dead_column[:dead], dead_at[:dead], dead_local[:dead], no_cells(dead)),
        FlatDeletions(nothing, nothing, nothing, nothing),
        np.zeros((rows, 2), np.uint64),
        no_cells(rows),
        np.zeros(rows, np.int64),
    )
    values = tuple(Cells(buffer, *line) for line in zip(offsets, lengths, strict=True))
    return merged, CellGrid(values, writetimes, expiries)


def _sizes(parts: Sequence[PlainRows]) -> tuple[int, int, int]:
    """Return the bytes of partition keys, clusterings and values."""
    cells = [part.value.part(int(part.cell_starts[0]), int(part.cell_starts[-1])) for part in parts]
    all_cells = [part.partition_key for part in parts], [part.clustering for part in parts], cells
    keys, clusterings, values = (sum(map(total_bytes, each)) for each in all_cells)
    return keys, clusterings, values


def _suit(parts: Sequence[PlainRows], columns: int, sizes: Sequence[int]) -> bool:
    """Tell whether a grid suits rows: of few streams, with many of the columns, within what 32-bit offsets reach."""
    cells = sum(int(part.cell_starts[-1] - part.cell_starts[0]) for part in parts)
    rows = sum(map(len, parts))
    return len(parts) <= _MOST_STREAMS and columns * rows <= _SPARSE * (cells + rows) and max(sizes) < _MOST_BYTES


def _words(part: PlainRows, ordered: Cells) -> list[int]:
    """Return the block of a stream for the kernel."""
    columns: list[list[npt.NDArray[Any]]] = [
        [part.token, *_arrays(part.partition_key), *_arrays(ordered), *_arrays(part.clustering)],
        [part.liveness, part.liveness_timestamp, part.liveness_ttl, part.liveness_expires],
        [part.deletion, part.deletion_timestamp, part.deletion_local, part.cell_starts],
        [part.column, part.timestamp, part.ttl, part.local, part.cell_kind, *_arrays(part.value)],
    ]
    addresses = [address(values) for some in columns for values in some]
    return [*addresses, 0, len(part)]


def _arrays(cells: Cells) -> list[npt.NDArray[Any]]:
    return [cells.buffer, cells.offsets, cells.lengths]


def _bytes(size: int) -> npt.NDArray[np.uint8]:
    """Make room for values of so many bytes."""
    return pooled(size + PADDING, np.uint8)
