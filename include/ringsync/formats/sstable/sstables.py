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
from ringsync.formats.sstable.data import READ_BYTES, DataFile, Loss, token_at
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import INDEX, PARTITIONS
from ringsync.formats.sstable.partitions import Partitions, each_partition, read_partitions
from ringsync.formats.sstable.reader import Layout, SSTableRows, layout_of, read_plain_rows, read_rows
from ringsync.formats.sstable.source import Source
from ringsync.formats.sstable.statistics import read_statistics
from ringsync.ring.tokens import TokenRange, TokenSet
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

    :ivar first: position in the uncompressed data from which they are read; ``end``: position up to which they are.
        Partitions before and behind the range may lie there, too
    :ivar only: ranges, in token order, in which partitions count; empty: all of ``tokens``
    """

    tokens: TokenRange
    first: int
    end: int
    only: TokenSet = ()


@dataclass(frozen=True)
class SSTable:
    """An SSTable whose small files were read.

    :ivar layout: how the rows of its Data.db become change rows of the table
    """

    source: Source
    layout: Layout

    def partitions(self) -> Partitions:
        """Read where some of its partitions are.

        :raises SSTableError: the index is missing or damaged
        """
        return read_partitions(self.source, DataFile(self.source).length)

    def parts(self, wanted: TokenRange) -> Iterator[Part]:
        """Find the partitions of a token range: at most two parts."""
        partitions = self.partitions()
        for tokens in wanted.unwrap():
            (first,), (end,) = partitions.between(np.array([tokens.start]), np.array([tokens.end]))
            if first < end:
                yield Part(tokens, int(first), int(end))

    def rows(
        self, part: Part, capacity: Capacity | None = None, *, compact: bool = False
    ) -> Iterator[SSTableRows[pa.RecordBatch]]:
        """Read the rows of a part.

        :param capacity: capacity of a batch; ``compact``: see :func:`.reader.read_rows`
        :raises SSTableError: a file is missing or damaged, so that nothing can be read; or the tokens at an end of the
            part are others than the index says, which has no checksum
        """
        data, index = self._data(capacity), _IndexAfterLoss(self)
        chosen = _Chosen(part, data)
        for batch in read_rows(data, self.layout, part.first, part.end, index.behind, capacity, compact=compact):
            rows = batch.rows
            if (inside := chosen.among(integers(rows["token"]), batch.losses)) is not None:
                rows = rows.filter(pa.array(inside))
            yield replace(batch, rows=rows, losses=index.explained(batch.losses))
        chosen.check_end()

    def plain_rows(
        self, part: Part, capacity: Capacity | None = None, *, compact: bool = False
    ) -> Iterator[SSTableRows[PlainRows]]:
        """Read the rows of a part as :meth:`rows` does, if the layout is plain."""
        data, index = self._data(capacity), _IndexAfterLoss(self)
        chosen = _Chosen(part, data)
        for batch in read_plain_rows(data, self.layout, part.first, part.end, index.behind, capacity, compact=compact):
            losses = index.explained(batch.losses)
            if (inside := chosen.among(batch.rows.token, batch.losses)) is None:
                yield replace(batch, losses=losses)
                continue
            if losses:
                yield replace(batch, rows=batch.rows.part(0, 0), losses=losses)
            edges = np.flatnonzero(np.diff(inside, prepend=False, append=False)).tolist()
            for first, end in zip(edges[::2], edges[1::2], strict=True):
                yield replace(batch, rows=batch.rows.part(first, end), losses=())
        chosen.check_end()

    def _data(self, capacity: Capacity | None) -> DataFile:
        return DataFile(self.source, min(READ_BYTES, (capacity or Capacity()).bytes))


class _IndexAfterLoss:
    """An SSTable's index, which is read only where something is lost, from front to back, and not kept."""

    def __init__(self, sstable: SSTable) -> None:
        self._sstable, self._problem = sstable, ""
        self._batches: Iterator[tuple[Integers, Integers, Integers]] | None = None
        self._positions = np.empty(0, np.int64)

    def behind(self, position: int) -> int | None:
        """Return the position of the next partition, or the end of the data; None: the index does not tell.

        :param position: not before those that were asked for before
        """
        source = self._sstable.source
        if source.size(INDEX) is None and source.size(PARTITIONS) is None:
            return None  # a copy for a bootstrap, which ends at the first loss
        try:
            length = DataFile(source).length
            self._batches = self._batches or each_partition(source, length)
            while not len(self._positions) or self._positions[-1] < position:
                if (batch := next(self._batches, None)) is None:
                    return length
                self._positions = batch[2]
            return int(self._positions[np.searchsorted(self._positions, position)])
        except SSTableError as error:
            self._problem = f"; what follows is lost, too, since {error}"
            return None

    def explained(self, losses: tuple[Loss, ...]) -> tuple[Loss, ...]:
        """Add to the reasons that the index cannot be read."""
        return tuple(replace(loss, reason=loss.reason + self._problem) for loss in losses)


class _Chosen:
    """Chooses the rows of a part among those that were read, and checks that the index has told its ends right."""

    def __init__(self, part: Part, data: DataFile) -> None:
        self._part, self._data = part, data
        self._is_sure = part.first == 0
        ranges = part.only or (part.tokens,)
        self._starts, self._ends = (np.array([getattr(one, end) for one in ranges]) for end in ("start", "end"))

    def among(self, tokens: Integers, losses: Sequence[Loss]) -> Mask | None:
        """Find the rows of the part; None: all of them are.

        :param losses: what could not be read before them
        :raises SSTableError: partitions of the range may lie before the part
        """
        if not self._is_sure and not losses and len(tokens) and tokens[0] > self._part.tokens.start:
            self._fail(self._part.first, int(tokens[0]))
        self._is_sure |= bool(losses) or len(tokens) > 0
        number = np.searchsorted(self._starts, tokens) - 1
        inside = (number >= 0) & (tokens <= self._ends[number])
        return None if inside.all() else np.asarray(inside)

    def check_end(self) -> None:
        """Check what lies behind the part; what cannot be read belongs to another part.

        :raises SSTableError: partitions of the range lie there
        """
        end = self._part.end
        token = token_at(self._data, end) if end < self._data.length else None
        if token is not None and token <= self._part.tokens.end:
            self._fail(end, token)

    def _fail(self, position: int, token: int) -> None:
        problem = f"at {position:,} is the token {token}, but by the index the range {self._part.tokens} "
        problem += "begins there or before" if position == self._part.first else "ends before"
        raise SSTableError(self._data.file, None, problem, DAMAGED)


def open_sstable(source: Source, table: TableSchema, shown: TableSchema | None = None) -> SSTable:
    """Read what is needed to read an SSTable's rows.

    :param shown: the table with those columns only that are read; None: all
    :raises SSTableError: a file is missing or damaged, or the SSTable is not of this table
    """
    return SSTable(source, layout_of(source.descriptor, read_statistics(source), table, shown))


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
