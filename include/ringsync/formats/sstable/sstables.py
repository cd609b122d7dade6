"""SSTables of one table: each of them opened, and all of them merged for a token range.

This is what a bootstrap and ``inspect`` read: as many SSTables and replicas as there are, with bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from ringsync.changes.plain import PlainRows
from ringsync.changes.reconcile.streams import MergedPart, Stream, UnsortedRowsError, merge_streams
from ringsync.compiled.arrow import Integers, Mask, integers
from ringsync.formats.rows.state import Capacity
from ringsync.formats.sstable.cursor import DAMAGED
from ringsync.formats.sstable.data import READ_BYTES, DataFile, Loss
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.partitions import Partitions, read_partitions
from ringsync.formats.sstable.reader import Layout, SSTableRows, layout_of, read_plain_rows, read_rows
from ringsync.formats.sstable.source import Source
from ringsync.formats.sstable.statistics import Statistics, read_statistics
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import TableSchema

MEMORY_BYTES = 2**28
"""Default for the memory of a merge."""

_LEAST_BYTES, _MOST_BYTES = 2**18, 2**23
"""Bounds of a batch. Small batches cost time, larger ones than that gain nothing."""
_MOST_ROWS, _LEAST_ROWS, _CELLS_PER_ROW = 2**17, 64, 8
"""Bounds of the rows that are merged at once, of all SSTables together and of each; room for cells of a row."""
_FEW = 4
"""Number of SSTables up to which a batch may keep all the room that it was given."""
_COPIES = 4
"""A batch's bytes are in its window, in its change rows, and in those that are being merged."""


@dataclass(frozen=True)
class Part:
    """The partitions of an SSTable in a token range that does not wrap around.

    :ivar first: position of the first one in the uncompressed data; ``end``: position behind the last one
    :ivar is_exact: whether no other partitions lie between these positions
    """

    tokens: TokenRange
    first: int
    end: int
    is_exact: bool


@dataclass(frozen=True)
class SSTable:
    """An SSTable whose small files were read.

    :ivar layout: how the rows of its Data.db become change rows of the table
    """

    source: Source
    statistics: Statistics
    layout: Layout

    def partitions(self) -> Partitions:
        """Read where its partitions are. Of many SSTables that takes more memory than all else: nobody keeps it.

        :raises SSTableError: the index is missing or damaged
        """
        return read_partitions(self.source, DataFile(self.source))

    def parts(self, wanted: TokenRange) -> Iterator[Part]:
        """Find the partitions of a token range: at most two parts."""
        return parts_of(self.partitions(), wanted)

    def rows(
        self, part: Part, capacity: Capacity | None = None, *, compact: bool = False
    ) -> Iterator[SSTableRows[pa.RecordBatch]]:
        """Read the rows of a part.

        :param capacity: capacity of a batch; ``compact``: see :func:`.reader.read_rows`
        :raises SSTableError: a file is missing or damaged, so that nothing can be read; or a row has another token than
            the index says, which has no checksum
        """
        data, index = self._data(capacity), _IndexAfterLoss(self)
        batches = read_rows(data, self.layout, part.first, part.end, index.behind, capacity, compact=compact)
        for batch in batches:
            rows = batch.rows
            if (inside := _inside(part, integers(rows["token"]), integers(rows["position"]), data)) is not None:
                rows = rows.filter(pa.array(inside))
            yield replace(batch, rows=rows, losses=index.explained(batch.losses))

    def plain_rows(
        self, part: Part, capacity: Capacity | None = None, *, compact: bool = False
    ) -> Iterator[SSTableRows[PlainRows]]:
        """Read the rows of a part as :meth:`rows` does, if the layout is plain."""
        data, index = self._data(capacity), _IndexAfterLoss(self)
        batches = read_plain_rows(data, self.layout, part.first, part.end, index.behind, capacity, compact=compact)
        for batch in batches:
            rows = batch.rows
            if (inside := _inside(part, rows.token, rows.position, data)) is not None:
                first, count = int(np.argmax(inside)), int(np.count_nonzero(inside))
                if not inside[first : first + count].all():
                    raise SSTableError(data.file, None, "its partitions are not in the order of their tokens", DAMAGED)
                rows = rows.part(first, first + count)
            yield replace(batch, rows=rows, losses=index.explained(batch.losses))

    def _data(self, capacity: Capacity | None) -> DataFile:
        return DataFile(self.source, min(READ_BYTES, (capacity or Capacity()).bytes))


def parts_of(partitions: Partitions, wanted: TokenRange) -> Iterator[Part]:
    """Find the partitions of a token range among those of an SSTable: at most two parts."""
    for tokens in wanted.unwrap():
        for first, end in partitions.positions_of(tokens):
            yield Part(tokens, first, end, partitions.step == 1)


class _IndexAfterLoss:
    """An SSTable's index, which is read only where something is lost."""

    def __init__(self, sstable: SSTable) -> None:
        self._sstable, self._problem = sstable, ""
        self._partitions: Partitions | None = None

    def behind(self, position: int) -> int | None:
        """Return the position of the next partition that is known; None: there is none."""
        try:
            self._partitions = self._partitions or self._sstable.partitions()
            return self._partitions.behind(position)
        except SSTableError as error:
            self._problem = f"; what follows is lost, too, since {error}"
            return None

    def explained(self, losses: tuple[Loss, ...]) -> tuple[Loss, ...]:
        """Add to the reasons that the index cannot be read."""
        return tuple(replace(loss, reason=loss.reason + self._problem) for loss in losses)


def _inside(part: Part, tokens: Integers, positions: Integers, data: DataFile) -> Mask | None:
    """Find the rows of a part among those that were read; None: all of them are.

    :raises SSTableError: the part is exact, and a row does not belong to it
    """
    inside = (tokens > part.tokens.start) & (tokens <= part.tokens.end)
    if inside.all():
        return None
    if part.is_exact:
        row = int(np.argmin(inside))
        problem = f"at {positions[row]:,} is the token {tokens[row]}, but by the index the range {part.tokens} is here"
        raise SSTableError(data.file, None, problem, DAMAGED)
    return np.asarray(inside)


def open_sstable(source: Source, table: TableSchema, shown: TableSchema | None = None) -> SSTable:
    """Read what is needed to read an SSTable's rows.

    :param shown: the table with those columns only that are read; None: all
    :raises SSTableError: a file is missing or damaged, or the SSTable is not of this table
    """
    statistics = read_statistics(source)
    return SSTable(source, statistics, layout_of(source.descriptor, statistics.header, table, shown))


def merged_rows(
    parts: Sequence[tuple[SSTable, Part]],
    table: TableSchema,
    lose: Callable[[Loss], None],
    memory_bytes: int = MEMORY_BYTES,
    *,
    with_source: bool = True,
) -> Iterator[MergedPart]:
    """Merge parts of SSTables, of one node or of several: what they hold together.

    :param parts: any number of them, in any order; all are of the same token range
    :param lose: function that is told what cannot be read; the merge goes on with the rest
    :param memory_bytes: memory for the batches of all SSTables; a row that is larger gets more
    :param with_source: whether rows have their digest, file and position; without them the merge is several times
        faster, because plain rows can stay where they were read (:mod:`ringsync.changes.plain`)
    :raises SSTableError: a file is missing or damaged, so that nothing can be read; or its rows are not in their order,
        so that they cannot be merged with those of others
    """
    count = max(len(parts), 1)
    capacity = capacity_of(min(max(memory_bytes // (_COPIES * count), _LEAST_BYTES), _MOST_BYTES))
    rows = max(min(capacity.rows, _MOST_ROWS // count), _LEAST_ROWS)
    capacity = replace(capacity, rows=rows, cells=min(capacity.cells, _CELLS_PER_ROW * rows), complex=rows)
    compact = count > _FEW

    def opening(sstable: SSTable, part: Part) -> Callable[[], Iterator[pa.RecordBatch | PlainRows]]:
        def batches() -> Iterator[pa.RecordBatch | PlainRows]:
            is_plain = sstable.layout.is_plain and not with_source
            for batch in (sstable.plain_rows if is_plain else sstable.rows)(part, capacity, compact=compact):
                for loss in batch.losses:
                    lose(loss)
                yield batch.rows

        return batches

    try:
        yield from merge_streams([Stream(part.tokens.start, opening(sstable, part)) for sstable, part in parts], table)
    except UnsortedRowsError as error:
        raise SSTableError(error.file, None, error.problem, DAMAGED) from error


def capacity_of(size: int) -> Capacity:
    """Return the capacity of a batch of so many bytes."""
    return Capacity(size // 2**8, size // 2**5, size // 2**8, size)
