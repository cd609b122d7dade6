"""The merge of plain rows (:mod:`ringsync.changes.plain`) without deletions of partitions or ranges.

Its result is that of :func:`ringsync.changes.reconcile.rows.merge`, without digests and sources, several times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringsync.changes.batch import ChangeRows, Deletion, Liveness
from ringsync.changes.common_times import NO_CELL
from ringsync.changes.flat import FlatDeletions, tombstones
from ringsync.changes.grid import CellGrid
from ringsync.changes.keys.order import clustering_keys
from ringsync.changes.plain import PlainRows
from ringsync.changes.reconcile import plain_kernels as kernel
from ringsync.changes.schema import ROW, TOMBSTONE
from ringsync.compiled.arrow import pooled
from ringsync.compiled.memory import PADDING, address
from ringsync.cql.cells import NULL_LENGTH, Cells, no_cells
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
    if not _suit(parts, len(table.value_columns)):
        return None
    ordered = [clustering_keys(part.clustering, table) for part in parts]
    streams = np.array([_words(part, keys) for part, keys in zip(parts, ordered, strict=True)], np.int64)
    room, columns = sum(map(len, parts)), len(table.value_columns)
    cells = [slice(part.cell_starts[0], part.cell_starts[-1]) for part in parts]
    dead = sum(int(np.count_nonzero(part.cell_kind[of] == TOMBSTONE)) for part, of in zip(parts, cells, strict=True))
    key, clustering = _copies([part.partition_key for part in parts]), _copies([part.clustering for part in parts])
    # The values of a single stream stay where they are.
    buffer = (
        parts[0].value.buffer
        if len(parts) == 1
        else _bytes([part.value.lengths[of] for part, of in zip(parts, cells, strict=True)])
    )
    token, live_at, live_ttl, live_until, deleted_at, deleted_local = (pooled(room, np.int64) for _ in range(6))
    offsets, lengths = (pooled(columns * room, np.int32) for _ in range(2))
    writetimes, expiries = (pooled(columns * room, np.int64) for _ in range(2))
    lengths.fill(NULL_LENGTH)
    expiries.fill(NO_CELL)
    dead_row, dead_column, dead_at, dead_local = np.empty((4, dead), np.int64)
    arrays = [
        *(token, *_arrays(key), *_arrays(clustering), live_at, live_ttl, live_until, deleted_at, deleted_local),
        *(buffer, offsets, lengths, writetimes, expiries, dead_row, dead_column, dead_at, dead_local),
    ]
    result = np.array([*map(address, arrays), room, len(parts) > 1, 0], np.int64)
    members = np.zeros(2 * len(parts), np.int64)
    rows = kernel.merge_plain(address(streams), len(parts), address(members), address(result))
    if rows < 0:
        return None
    dead = int(result[kernel.R_DEAD // 8])
    nothing = np.zeros(0, np.int64)
    merged = ChangeRows(
        np.broadcast_to(np.frombuffer(parts[0].table_id, np.int64), (rows, 2)),
        np.zeros(rows, np.int64),
        token[:rows],
        key.part(0, rows),
        np.full(rows, ROW, np.int64),
        clustering.part(0, rows),
        no_cells(rows),
        np.zeros(rows, np.int64),
        Liveness(live_at[:rows], live_ttl[:rows], live_until[:rows]),
        Deletion(deleted_at[:rows], deleted_local[:rows]),
        tombstones(dead_row[:dead], dead_column[:dead], dead_at[:dead], dead_local[:dead], no_cells(dead)),
        FlatDeletions(nothing, nothing, nothing, nothing),
        np.zeros((rows, 2), np.uint64),
        no_cells(rows),
        np.zeros(rows, np.int64),
    )
    lines = [values.reshape(columns, room)[:, :rows] for values in (offsets, lengths, writetimes, expiries)]
    values = tuple(Cells(buffer, *line) for line in zip(lines[0], lines[1], strict=True))
    return merged, CellGrid(values, np.ascontiguousarray(lines[2]), np.ascontiguousarray(lines[3]))


def _suit(parts: Sequence[PlainRows], columns: int) -> bool:
    """Tell whether a grid suits rows: of few streams, with many of the columns, within what 32-bit offsets reach."""
    cells = sum(int(part.cell_starts[-1] - part.cell_starts[0]) for part in parts)
    sizes = [
        sum(_size(part.partition_key.lengths) for part in parts),
        sum(_size(part.clustering.lengths) for part in parts),
        sum(_size(part.value.lengths[part.cell_starts[0] : part.cell_starts[-1]]) for part in parts),
    ]
    rows = sum(map(len, parts))
    return len(parts) <= _MOST_STREAMS and columns * rows <= _SPARSE * (cells + rows) and max(sizes) < _MOST_BYTES


def _size(lengths: npt.NDArray[np.int32]) -> int:
    return int(lengths.sum(dtype=np.int64))


def _words(part: PlainRows, ordered: Cells) -> list[int]:
    """Return the block of a stream for the kernel."""
    columns: list[list[npt.NDArray[Any]]] = [
        [part.token, *_arrays(part.partition_key), *_arrays(ordered), *_arrays(part.clustering)],
        [part.liveness, part.liveness_timestamp, part.liveness_ttl, part.liveness_expires],
        [part.deletion, part.deletion_timestamp, part.deletion_local, part.cell_starts],
        [part.column, part.timestamp, part.ttl, part.local, part.cell_kind, *_arrays(part.value)],
    ]
    addresses = [address(values) for some in columns for values in some]
    return [*addresses, 0, len(part), 0, 0]


def _arrays(cells: Cells) -> list[npt.NDArray[Any]]:
    return [cells.buffer, cells.offsets, cells.lengths]


def _copies(parts: Sequence[Cells]) -> Cells:
    """Make room for a copy of all these values."""
    count = sum(map(len, parts))
    return Cells(_bytes([part.lengths for part in parts]), pooled(count, np.int32), pooled(count, np.int32))


def _bytes(lengths: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.uint8]:
    """Make room for values of these lengths."""
    return pooled(sum(map(_size, lengths)) + PADDING, np.uint8)
