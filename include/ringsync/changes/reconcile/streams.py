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

import numpy as np
import pyarrow as pa

from ringsync.changes.batch import ChangeRows, concatenated
from ringsync.changes.keys.order import clustering_keys
from ringsync.changes.keys.order_kernels import END
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import CHANGE_ROWS, PARTITION_DELETION, RANGE_DELETION, ROW, STATIC
from ringsync.compiled.arrow import integers
from ringsync.cql.cells import cells_of
from ringsync.schema.table import TableSchema

Place = tuple[int, bytes, int, bytes]
"""A place in the order: token, partition key, whether rows begin (0: deletion, 1: static row, 2: rows), and the
clustering in the form that sorts. A range deletion has the place of its end."""

_BEFORE_ALL: Place = (-(2**63) - 1, b"", 0, b"")
_BEHIND_ALL: Place = (2**63, b"", 0, b"")


@dataclass(frozen=True)
class Stream:
    """Change rows of one table from one source.

    :ivar first_token: no row has a smaller token; the stream is not opened before
    :ivar open: function that returns batches of ``CHANGE_ROWS``, in this order: by token, then partition key; in a
        partition its deletion, its static row, then rows by clustering, each range deletion behind the rows that it
        covers. No range covers rows of a later batch
    """

    first_token: int
    open: Callable[[], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class MergedPart:
    """A part of the result of :func:`merge_streams`.

    :ivar rows: reconciled change rows (:mod:`ringsync.changes.reconcile.rows`) that no other part has
    :ivar carried: the deletion and the static row of the partition with which the part begins, where the partition
        began in an earlier part: that part has them
    """

    rows: ChangeRows
    carried: ChangeRows


def merge_streams(streams: Sequence[Stream], table: TableSchema) -> Iterator[MergedPart]:
    """Reconcile sorted streams. All parts together are what :func:`~ringsync.changes.reconcile.rows.merge` returns.

    :param streams: any number of streams, in any order; rows may occur in several
    :raises ValueError: a stream is not sorted
    """
    waiting = sorted(streams, key=lambda stream: stream.first_token, reverse=True)
    reading: list[_Reading] = []
    carried: ChangeRows | None = None
    while waiting or reading:
        bound = min((one.reached for one in reading), default=_BEFORE_ALL)
        if waiting and (not reading or waiting[-1].first_token <= bound[0]):
            opened = _Reading(waiting.pop().open(), table)
            if opened.advance():
                reading.append(opened)
            continue
        parts = [one.up_to(bound) for one in reading]
        members = [part for part in parts if len(part)]
        reading = [one for one in reading if not one.is_read or one.advance()]
        if members:
            part, carried = _merged(members, carried, bound, table)
            yield part


def _merged(
    members: Sequence[ChangeRows], before: ChangeRows | None, bound: Place, table: TableSchema
) -> tuple[MergedPart, ChangeRows]:
    """Merge the rows up to a place. Return the part, and what is to be carried to the next one."""
    known = set() if before is None else {_head(before, row) for row in range(len(before))}
    merged = merge(concatenated([*members, *([before] if before else [])]), table)
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
    part = MergedPart(merged.where(is_new), merged.take(np.flatnonzero(is_known)))
    return part, merged.take(of_last[is_head[of_last]])


def _head(rows: ChangeRows, row: int) -> tuple[int, bytes | None, int]:
    """Name the deletion or the static row of a partition."""
    return int(rows.token[row]), rows.partition_key.value(row), int(rows.kind[row])


class _Reading:
    """An open stream: the batch that is being merged, and how far.

    :ivar reached: place of the batch's last row
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], table: TableSchema) -> None:
        self._batches, self._table = batches, table
        self._batch = pa.RecordBatch.from_pylist([], CHANGE_ROWS)
        self._done = 0
        self.reached: Place = _BEFORE_ALL

    def advance(self) -> bool:
        """Go to the next batch; False: there is none.

        :raises ValueError: its rows come before those of the last one
        """
        for batch in self._batches:
            if batch.num_rows:
                before, self._done = self.reached, 0
                self._batch = batch
                self._tokens, self._keys = integers(batch["token"]), cells_of(batch["partition_key"])
                self._kinds = integers(batch["kind"])
                self._clusterings, self._range_ends = cells_of(batch["clustering"]), cells_of(batch["range_end"])
                last = len(batch) - 1
                self.reached = self._places(last, last + 1)(last)
                if self._places(0, 1)(0) < before:
                    raise ValueError(f"the rows of {batch['file'][0]} are not in their order: is the file damaged?")
                return True
        return False

    @property
    def is_read(self) -> bool:
        return self._done == len(self._batch)

    def up_to(self, bound: Place) -> ChangeRows:
        """Take the rows up to a place, and the ranges that begin before it and end behind it."""
        first, self._done = self._done, self._count_up_to(bound)
        batches = [self._batch.slice(first, self._done - first), *self._begun_ranges(bound)]
        parts = [ChangeRows.of(batch) for batch in batches]
        return concatenated(parts) if len(parts) > 1 else parts[0]

    def _count_up_to(self, bound: Place) -> int:
        """Count the rows of the batch up to a place."""
        if bound >= self.reached:
            return len(self._batch)
        first, end = (int(np.searchsorted(self._tokens, bound[0], side)) for side in ("left", "right"))
        first = max(first, self._done)
        end = max(end, first)
        return bisect_right(range(end), bound, lo=first, key=self._places(first, end))

    def _begun_ranges(self, bound: Place) -> Iterator[pa.RecordBatch]:
        """Yield the ranges that begin before a place and end behind it."""
        for row in (self._done + np.flatnonzero(self._kinds[self._done :] == RANGE_DELETION)).tolist():
            start = clustering_keys(self._clusterings.take(np.array([row])), self._table)
            if (*self._partition(row), 2, start.value(0) or b"") > bound:
                return
            yield self._batch.slice(row, 1)

    def _partition(self, row: int) -> tuple[int, bytes]:
        return int(self._tokens[row]), self._keys.value(row) or b""

    def _places(self, first: int, end: int) -> Callable[[int], Place]:
        """Return a function that returns the place of a row from ``first`` on, and before ``end``."""
        rows = np.arange(first, end)
        clusterings = clustering_keys(self._clusterings.take(rows), self._table)
        ends = clustering_keys(self._range_ends.take(rows), self._table, END)

        def place(row: int) -> Place:
            kind = int(self._kinds[row])
            if kind in (PARTITION_DELETION, STATIC):
                return *self._partition(row), int(kind == STATIC), b""
            keys = ends if kind == RANGE_DELETION else clusterings
            return *self._partition(row), 2, keys.value(row - first) or b""

        return place
