"""The merge of many sorted streams of change rows, with memory for one batch of each.

A stream is what one SSTable holds: sorted by token, partition key and clustering (see :class:`Stream`). The merge goes
through all of them side by side, one part of the order at a time: up to the place that every stream has reached. A
partition may be larger than a part. What concerns the partition's later rows, too, is then carried from part to part:
its deletion, its static row, and the deletions of ranges that are not over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.batch import ChangeRows, concatenated
from ringsync.changes.grid import CellGrid
from ringsync.changes.keys.order import clustering_keys
from ringsync.changes.keys.order_kernels import END
from ringsync.changes.plain import PlainRows
from ringsync.changes.reconcile.plain import OrderedRows, order_plain
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import PARTITION_DELETION, RANGE_DELETION, ROW, STATIC
from ringsync.compiled.arrow import integers
from ringsync.cql.cells import cells_of
from ringsync.schema.table import TableSchema

Place = tuple[int, bytes, int, bytes]
"""A place in the order: token, partition key, whether rows begin (0: deletion, 1: static row, 2: rows), and the
clustering in the form that sorts. A range deletion has the place of its end."""

_BEFORE_ALL: Place = (-(2**63) - 1, b"", 0, b"")


class UnsortedRowsError(ValueError):
    """The rows of a stream are not in their order, so they cannot be merged with others.

    :ivar file: path of the SSTable
    :ivar position: of the first row that comes too late, in the uncompressed data
    """

    def __init__(self, file: str, position: int, token: int) -> None:
        self.problem = f"the row at {position:,} (uncompressed), of token {token}, is not in its order"
        super().__init__(f"{file}: {self.problem}: is the file damaged?")
        self.file, self.position = file, position


@dataclass(frozen=True)
class Stream:
    """Change rows of one table from one source.

    :ivar first_token: no row has a smaller token; the stream is not opened before
    :ivar open: function that returns batches of ``CHANGE_ROWS``, in this order: by token, then partition key; in a
        partition its deletion, its static row, then rows by clustering, each range deletion behind the rows that it
        covers. No range covers rows of a later batch
    """

    first_token: int
    open: Callable[[], Iterator[pa.RecordBatch | PlainRows]]


@dataclass(frozen=True)
class MergedPart:
    """A part of the result of :func:`merge_streams`.

    :ivar found: reconciled change rows (:mod:`ringsync.changes.reconcile.rows`) that no other part has; or rows that
        are not reconciled before somebody asks for them
    :ivar carried: the deletion and the static row of the partition with which the part begins, where the partition
        began in an earlier part: that part has them
    """

    found: ChangeRows | OrderedRows
    carried: ChangeRows

    @property
    def rows(self) -> ChangeRows:
        """The reconciled change rows."""
        return self._reconciled[0]

    @property
    def grid(self) -> CellGrid | None:
        """Cells that are no tombstones; None: they are among the rows, as are all others. A part that has a grid has
        no digests and sources.
        """
        return self._reconciled[1]

    @cached_property
    def _reconciled(self) -> tuple[ChangeRows, CellGrid | None]:
        return self.found.merged() if isinstance(self.found, OrderedRows) else (self.found, None)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, about."""
        size = int(self.rows.to_arrow().nbytes)
        if self.grid is not None:
            size += self.grid.writetimes.nbytes + self.grid.expiries.nbytes
            size += sum(int(cells.lengths.clip(0).sum(dtype=np.int64)) for cells in self.grid.values)
        return size


def merge_streams(streams: Sequence[Stream], table: TableSchema) -> Iterator[MergedPart]:
    """Reconcile sorted streams. All parts together are what :func:`~ringsync.changes.reconcile.rows.merge` returns.

    :param streams: any number of streams, in any order; rows may occur in several
    :raises UnsortedRowsError: a stream is not sorted
    """
    waiting = sorted(streams, key=lambda stream: stream.first_token, reverse=True)
    reading: list[_Reading] = []
    carried, held, before = None, None, _BEFORE_ALL
    while waiting or reading:
        reading = [one for one in reading if one.refill()]
        bound = min((one.reached for one in reading), default=_BEFORE_ALL)
        if waiting and (not reading or waiting[-1].first_token <= bound[0]):
            reading.append(_Reading(waiting.pop().open(), table))
            continue
        if reading:
            members = [part for one in reading for part in one.up_to(bound)]
            part, carried, held = _merged(members, carried, held, bound, table)
            if not _lies_between(part.found, before, bound, table):
                raise _unsorted(members, before, bound, table)
            before = bound
            yield part
    if held is not None and len(held):
        yield MergedPart(held, held.where(np.zeros(len(held), np.bool_)))


def _merged(
    members: Sequence[ChangeRows | PlainRows],
    before: ChangeRows | None,
    held: ChangeRows | None,
    bound: Place,
    table: TableSchema,
) -> tuple[MergedPart, ChangeRows, ChangeRows | None]:
    """Merge the rows up to a place.

    :param before: what was carried: the deletion and the static row of the partition that goes on
    :param held: that of it which no part has yet
    :returns: the part, what is to be carried to the next one, and what of it no part has yet
    """
    if not before and all(isinstance(one, PlainRows) and not one.kind.any() for one in members):
        ordered = order_plain([one for one in members if isinstance(one, PlainRows)], table)
        if ordered is not None:
            nothing = ordered.parts[0].part(0, 0).change_rows()
            return MergedPart(ordered, nothing), nothing, None
    rows = [one.change_rows() if isinstance(one, PlainRows) else one for one in members]
    is_held = held is not None and len(held) > 0
    known = set() if before is None or is_held else {_head(before, row) for row in range(len(before))}
    merged = merge(concatenated([*rows, *([before] if before else [])]), table)
    is_head = (merged.kind == PARTITION_DELETION) | (merged.kind == STATIC)
    is_known = np.zeros(len(merged), np.bool_)
    if known:
        # They belong to the first partition, and come first in it.
        for row in np.flatnonzero(is_head)[:2].tolist():
            is_known[row] = _head(merged, row) in known
    no_rows = np.flatnonzero((merged.token == bound[0]) & (merged.kind != ROW)).tolist()
    of_last = np.array([row for row in no_rows if merged.partition_key.value(row) == bound[1]], np.intp)
    is_new = ~is_known
    # A range that ends behind the bound comes again.
    ranges = of_last[~is_head[of_last]]
    ends = clustering_keys(merged.range_end.take(ranges), table, END)
    is_new[[row for at, row in enumerate(ranges.tolist()) if bound[2:] < (2, ends.value(at) or b"")]] = False
    heads = merged.take(of_last[is_head[of_last]])
    if not table.clustering and bound[2] < 2:
        # The deletion of a partition and its only row are one thing: they come out together.
        is_new[of_last] = False
        return MergedPart(merged.where(is_new), merged.take(np.flatnonzero(is_known))), heads, heads
    return MergedPart(merged.where(is_new), merged.take(np.flatnonzero(is_known))), heads, None


def _lies_between(found: ChangeRows | OrderedRows, before: Place, bound: Place, table: TableSchema) -> bool:
    """Tell whether merged rows come behind a place, and up to another. Batches are searched as if they were sorted: a
    row that is not in its order is taken too early or too late. Then other streams may have had it in another part.
    """
    if not len(found):
        return True
    if isinstance(found, OrderedRows):
        return all(before < _place(one, 0, table) <= bound for one in found.ends())
    if found.token.min() < before[0] or found.token.max() > bound[0]:
        return False
    is_row = found.kind == ROW
    first, last = int(np.argmax(is_row)), len(found) - 1 - int(np.argmax(is_row[::-1]))
    return not is_row[first] or all(before < _place(found, row, table) <= bound for row in (first, last))


def _place(rows: ChangeRows | PlainRows, row: int, table: TableSchema) -> Place:
    """Return the place of a row that is no deletion and not static."""
    key = clustering_keys(rows.clustering.part(row, row + 1), table).value(0) or b""
    return int(rows.token[row]), rows.partition_key.value(row) or b"", 2, key


def _unsorted(
    members: Sequence[ChangeRows | PlainRows], before: Place, bound: Place, table: TableSchema
) -> UnsortedRowsError:
    """Find the first row that is not in its order."""
    rows = [one.change_rows() if isinstance(one, PlainRows) else one for one in members]
    for one in rows:
        last = before
        keys = clustering_keys(one.clustering, table)
        for row in np.flatnonzero(one.kind == ROW).tolist():
            place = (int(one.token[row]), one.partition_key.value(row) or b"", 2, keys.value(row) or b"")
            if not last < place <= bound:
                return _unsorted_at(one, row)
            last = place
    return _unsorted_at(rows[0], 0)


def _unsorted_at(rows: ChangeRows, row: int) -> UnsortedRowsError:
    return UnsortedRowsError((rows.file.value(row) or b"").decode(), int(rows.position[row]), int(rows.token[row]))


def _head(rows: ChangeRows, row: int) -> tuple[int, bytes | None, int]:
    """Name the deletion or the static row of a partition."""
    return int(rows.token[row]), rows.partition_key.value(row), int(rows.kind[row])


class _Reading:
    """An open stream, and its batches that are not merged yet."""

    def __init__(self, batches: Iterator[pa.RecordBatch | PlainRows], table: TableSchema) -> None:
        self._batches, self._table = batches, table
        self._pending: list[_Batch] = []
        self.reached: Place = _BEFORE_ALL

    def refill(self) -> bool:
        """Read on while less than half a batch is left: else streams would go on in small steps, in turn.

        :returns: whether any row is left
        :raises UnsortedRowsError: the rows of a batch come before those of the last one
        """
        while not self._pending or 2 * sum(one.left for one in self._pending) < len(self._pending[-1]):
            batch = next((one for one in self._batches if len(one)), None)
            if batch is None:
                break
            found = _Batch(batch, self._table)
            first = found.places(0, 1)(0)
            if first < self.reached or found.last < first:
                raise found.unsorted_at(0 if first < self.reached else len(found) - 1)
            self._pending.append(found)
            self.reached = found.last
        return bool(self._pending)

    def up_to(self, bound: Place) -> Iterator[ChangeRows | PlainRows]:
        """Take the rows up to a place, and yield also the ranges that begin before it and end behind it."""
        while self._pending:
            batch = self._pending[0]
            yield from batch.up_to(bound)
            if batch.left:
                return
            del self._pending[0]


class _Batch:
    """A batch of a stream, and how far it is merged.

    :ivar last: place of its last row
    """

    def __init__(self, batch: pa.RecordBatch | PlainRows, table: TableSchema) -> None:
        self._batch, self._table, self._done = batch, table, 0
        if isinstance(batch, PlainRows):
            self._tokens, self._keys = batch.token, batch.partition_key
            self._kinds: npt.NDArray[np.integer[Any]] = batch.kind
            self._clusterings, self._range_ends = batch.clustering, batch.range_end
        else:
            self._tokens, self._keys = integers(batch["token"]), cells_of(batch["partition_key"])
            self._kinds = integers(batch["kind"])
            self._clusterings, self._range_ends = cells_of(batch["clustering"]), cells_of(batch["range_end"])
        self.last = self.places(len(batch) - 1, len(batch))(len(batch) - 1)

    def __len__(self) -> int:
        return len(self._batch)

    def unsorted_at(self, row: int) -> UnsortedRowsError:
        """Return the error that a row is not in its order."""
        rows = self._rows(row, row + 1)
        return _unsorted_at(rows.change_rows() if isinstance(rows, PlainRows) else rows, 0)

    @property
    def left(self) -> int:
        """Number of rows that are not merged yet."""
        return len(self._batch) - self._done

    def up_to(self, bound: Place) -> Iterator[ChangeRows | PlainRows]:
        """Take the rows up to a place, and yield also the ranges that begin before it and end behind it."""
        first, self._done = self._done, self._count_up_to(bound)
        if self._done > first:
            yield self._rows(first, self._done)
        yield from self._begun_ranges(bound)

    def _rows(self, first: int, end: int) -> ChangeRows | PlainRows:
        if isinstance(self._batch, PlainRows):
            return self._batch.part(first, end)
        return ChangeRows.of(self._batch.slice(first, end - first))

    def _count_up_to(self, bound: Place) -> int:
        """Count the rows of the batch up to a place."""
        if bound >= self.last:
            return len(self._batch)
        first, end = (int(np.searchsorted(self._tokens, bound[0], side)) for side in ("left", "right"))
        first = max(first, self._done)
        end = max(end, first)
        return bisect_right(range(end), bound, lo=first, key=self.places(first, end))

    def _begun_ranges(self, bound: Place) -> Iterator[ChangeRows | PlainRows]:
        for row in (self._done + np.flatnonzero(self._kinds[self._done :] == RANGE_DELETION)).tolist():
            start = clustering_keys(self._clusterings.take(np.array([row])), self._table)
            if (*self._partition(row), 2, start.value(0) or b"") > bound:
                return
            yield self._rows(row, row + 1)

    def _partition(self, row: int) -> tuple[int, bytes]:
        return int(self._tokens[row]), self._keys.value(row) or b""

    def places(self, first: int, end: int) -> Callable[[int], Place]:
        """Return a function that returns the place of a row from ``first`` on, and before ``end``."""
        clusterings = clustering_keys(self._clusterings.part(first, end), self._table)
        has_ranges = (self._kinds[first:end] == RANGE_DELETION).any()
        ends = clustering_keys(self._range_ends.part(first, end), self._table, END) if has_ranges else clusterings

        def place(row: int) -> Place:
            kind = int(self._kinds[row])
            if kind in (PARTITION_DELETION, STATIC):
                return *self._partition(row), int(kind == STATIC), b""
            keys = ends if kind == RANGE_DELETION else clusterings
            return *self._partition(row), 2, keys.value(row - first) or b""

        return place
