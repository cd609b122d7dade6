"""SSTables of one table: each of them opened, and all of them merged for a token range.

This is what a bootstrap and ``inspect`` read: as many SSTables and replicas as there are, with bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from ringsync.changes.reconcile.streams import MergedPart, Stream, merge_streams
from ringsync.compiled.arrow import integers
from ringsync.formats.rows.state import Capacity
from ringsync.formats.sstable.cursor import DAMAGED
from ringsync.formats.sstable.data import DataFile, Loss
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.partitions import Partitions, read_partitions
from ringsync.formats.sstable.reader import Layout, SSTableRows, layout_of, read_rows
from ringsync.formats.sstable.source import Source
from ringsync.formats.sstable.statistics import Statistics, read_statistics
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import TableSchema

MEMORY_BYTES = 2**28
"""Default for the memory of a merge."""

_LEAST_BYTES, _MOST_BYTES = 2**19, 2**23
"""Bounds of a batch. Small batches cost time, larger ones than that gain nothing."""
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

    @cached_property
    def partitions(self) -> Partitions:
        """Where its partitions are.

        :raises SSTableError: the index is missing or damaged
        """
        return read_partitions(self.source, DataFile(self.source))

    def parts(self, wanted: TokenRange) -> Iterator[Part]:
        """Find the partitions of a token range: at most two parts."""
        for tokens in wanted.unwrap():
            for first, end in self.partitions.positions_of(tokens):
                yield Part(tokens, first, end, self.partitions.step == 1)

    def rows(self, part: Part, capacity: Capacity | None = None) -> Iterator[SSTableRows]:
        """Read the rows of a part.

        :param capacity: capacity of a batch
        :raises SSTableError: a file is missing or damaged, so that nothing can be read; or a row has another token than
            the index says, which has no checksum
        """
        data = DataFile(self.source)
        # The index is read only where something is lost, or where it was needed to find the part.
        for batch in read_rows(
            data, self.layout, part.first, part.end, lambda at: self.partitions.behind(at), capacity
        ):
            tokens = integers(batch.rows["token"])
            inside = (tokens > part.tokens.start) & (tokens <= part.tokens.end)
            if inside.all():
                yield batch
                continue
            if part.is_exact:
                row = int(np.argmin(inside))
                position = int(integers(batch.rows["position"])[row])
                problem = (
                    f"at {position:,} is the token {tokens[row]}, but by the index the range {part.tokens} is here"
                )
                raise SSTableError(data.file, None, problem, DAMAGED)
            yield replace(batch, rows=batch.rows.filter(pa.array(inside)))


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
) -> Iterator[MergedPart]:
    """Merge parts of SSTables, of one node or of several: what they hold together.

    :param parts: any number of them, in any order; all are of the same token range
    :param lose: function that is told what cannot be read; the merge goes on with the rest
    :param memory_bytes: memory for the batches of all SSTables; a row that is larger gets more
    :raises SSTableError: a file is missing or damaged, so that nothing can be read
    """
    share = memory_bytes // (_COPIES * max(len(parts), 1))
    capacity = capacity_of(min(max(share, _LEAST_BYTES), _MOST_BYTES))

    def opening(sstable: SSTable, part: Part) -> Callable[[], Iterator[pa.RecordBatch]]:
        def batches() -> Iterator[pa.RecordBatch]:
            for batch in sstable.rows(part, capacity):
                for loss in batch.losses:
                    lose(loss)
                yield batch.rows

        return batches

    return merge_streams([Stream(part.tokens.start, opening(sstable, part)) for sstable, part in parts], table)


def capacity_of(size: int) -> Capacity:
    """Return the capacity of a batch of so many bytes."""
    return Capacity(size // 2**8, size // 2**5, size // 2**8, size)
