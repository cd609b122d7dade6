"""The merge of plain rows (:mod:`ringsync.changes.plain`) without deletions of partitions or ranges.

Its result is that of :func:`ringsync.changes.reconcile.rows.merge`, without digests and sources, several times faster.
Most readers want no times, but only what a SELECT shows, which takes half the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ringsync.changes.batch import ChangeRows, Deletion, Liveness
from ringsync.changes.flat import FlatDeletions, tombstones
from ringsync.changes.grid import CellGrid
from ringsync.changes.keys.order import clustering_keys
from ringsync.changes.plain import PlainRows
from ringsync.changes.reconcile import plain_kernels as kernel
from ringsync.changes.reconcile.shown_kernels import show_rows
from ringsync.changes.schema import ROW, TOMBSTONE
from ringsync.compiled.arrow import Integers, Places32, pooled
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


@dataclass(frozen=True)
class ShownRows:
    """Rows that a SELECT shows at a moment.

    :ivar values: values of each column; null where there is none, or where it has expired
    """

    partition_key: Cells
    clustering: Cells
    values: Sequence[Cells]


@dataclass(frozen=True)
class OrderedRows:
    """Rows of streams of the same table, and which of them are one.

    :ivar parts: at least one of each stream
    :ivar streams: block of each part for the kernels; ``kept``: what it points to
    :ivar members: int64[rows of all parts]: part, and number in it, of each row; those that are one together
    :ivar starts: int32[rows + 1]: place in ``members`` of the first member of each row, and the end
    :ivar sizes: bytes of the partition keys, the clusterings and the values
    """

    table: TableSchema
    parts: Sequence[PlainRows]
    streams: Integers = field(repr=False)
    kept: Sequence[Cells] = field(repr=False)
    members: Integers = field(repr=False)
    starts: Places32 = field(repr=False)
    sizes: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def ends(self) -> tuple[PlainRows, PlainRows]:
        """Return a member of the first row, and one of the last."""
        return self._member(0), self._member(len(self.members) - 1)

    def _member(self, place: int) -> PlainRows:
        part, row = divmod(int(self.members[place]), 1 << kernel.ROW_BITS)
        return self.parts[part].part(row, row + 1)

    def merged(self) -> tuple[ChangeRows, CellGrid]:
        """Reconcile the rows: return change rows, whose cells are the tombstones, and all other cells."""
        rows, columns = len(self), len(self.table.value_columns)
        cells = [part.cell_kind[part.cell_starts[0] : part.cell_starts[-1]] for part in self.parts]
        dead = sum(int(np.count_nonzero(kinds == TOMBSTONE)) for kinds in cells)
        key, clustering, values, addresses = self._room()
        token, live_at, live_ttl, live_until, deleted_at, deleted_local = (pooled(rows, np.int64) for _ in range(6))
        writetimes, expiries = pooled(2 * columns * rows, np.int64).reshape(2, columns, rows)
        dead_row, dead_column, dead_at, dead_local = np.empty((4, dead), np.int64)
        times = [token, live_at, live_ttl, live_until, deleted_at, deleted_local, writetimes, expiries]
        tombs = [dead_row, dead_column, dead_at, dead_local]
        result = np.array([*addresses, *map(address, (*times, *tombs)), 0], np.int64)
        self._run(kernel.merge_rows, result)
        dead = int(result[kernel.R_DEAD // 8])
        nothing = np.zeros(0, np.int64)
        merged = ChangeRows(
            np.broadcast_to(np.frombuffer(self.parts[0].table_id, np.int64), (rows, 2)),
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
        return merged, CellGrid(tuple(values), writetimes, expiries)

    def shown(self, now_s: int) -> ShownRows:
        """Reconcile the rows: return those that a SELECT shows at a moment (s since the epoch), without any times."""
        key, clustering, values, addresses = self._room()
        result = np.array([*addresses, *(kernel.RESULT_WORDS - len(addresses)) * [0]], np.int64)
        count = self._run(show_rows, result, now_s)
        return ShownRows(key.part(0, count), clustering.part(0, count), [cells.part(0, count) for cells in values])

    def _room(self) -> tuple[Cells, Cells, list[Cells], list[int]]:
        """Make room for keys, clusterings and the values of each column; return also the result's first words."""
        rows, columns = len(self), len(self.table.value_columns)
        key, clustering = (
            Cells(_bytes(size), pooled(rows, np.int32), pooled(rows, np.int32)) for size in self.sizes[:2]
        )
        # The values of a single stream stay where they are.
        is_copied = len(self.parts) > 1
        buffer = _bytes(self.sizes[2]) if is_copied else self.parts[0].value.buffer
        offsets, lengths = pooled(2 * columns * rows, np.int32).reshape(2, columns, rows)
        arrays = [*_arrays(key), *_arrays(clustering), buffer, offsets, lengths]
        values = [Cells(buffer, *line) for line in zip(offsets, lengths, strict=True)]
        return key, clustering, values, [rows, columns, is_copied, *map(address, arrays)]

    def _run(self, merge: Callable[..., Any], result: Integers, *more: int) -> Any:
        """Let a kernel merge the rows, and write them where the result's block says."""
        winners = np.empty(2 * len(self.table.value_columns), np.int64)
        arrays: list[npt.NDArray[Any]] = [self.streams, self.members, self.starts, winners, result]
        return merge(*map(address, arrays), *more)


def order_plain(parts: Sequence[PlainRows], table: TableSchema) -> OrderedRows | None:
    """Find out which rows of streams of the same table are one.

    :param parts: rows without deletions of partitions and ranges, at least one of each stream
    :returns: None: the rows are not in their order, or this is not for them: see :func:`_suit`
    """
    sizes = _sizes(parts)
    if not _suit(parts, len(table.value_columns), sizes):
        return None
    ordered = [clustering_keys(part.clustering, table) for part in parts]
    streams = np.array([_words(part, keys) for part, keys in zip(parts, ordered, strict=True)], np.int64)
    most = sum(map(len, parts))
    members, starts = pooled(most, np.int64), pooled(most + 1, np.int32)
    scratch = np.empty(3 * len(parts), np.int64)
    rows = kernel.order_rows(address(streams), len(parts), *map(address, (scratch, members, starts)))
    return None if rows < 0 else OrderedRows(table, parts, streams, ordered, members, starts[: rows + 1], sizes)


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
