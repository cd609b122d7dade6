"""Where the partitions of an SSTable are in its Data.db, by token.

Both indexes, the list Index.db and the trie Partitions.db, have each partition once, in the order of Data.db. They are
read from front to back, with little memory. What is remembered is one partition of every some hundred KiB: enough to
divide the ring over tasks, and to find where a task begins, a little too early. So no task reads an index. Neither
index has checksums: whoever reads between two positions must check the tokens there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ringsync.compiled.arrow import Integers
from ringsync.formats.sstable.cursor import DAMAGED
from ringsync.formats.sstable.data import DataFile, token_at
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.index import read_index
from ringsync.formats.sstable.names import INDEX, PARTITIONS, ROWS
from ringsync.formats.sstable.source import Source
from ringsync.formats.sstable.tries import read_trie
from ringsync.ring.tokens import TokenSet

STEP_BYTES = 2**19
"""One partition is remembered of so many uncompressed bytes, of small SSTables of 1/512 of them. A task reads so much
too much at each end; and 3 TB need 144 MB of the driver's memory."""
_LEAST_STEPS = 2**9
_ARRAYS, _FACTS = ("lowest", "highest", "positions"), ("last", "length", "is_within")


@dataclass(frozen=True)
class Partitions:
    """Some partitions of an SSTable, among them the first, in the order of its Data.db, which is that of their tokens.

    :ivar lowest: int64[n]: token of each; a trie has only its first bits: then the lowest token with these
    :ivar highest: int64[n]: the same, or the highest token with these bits
    :ivar positions: int64[n]: uncompressed position of each in Data.db
    :ivar last: highest token that the last partition of all may have
    :ivar length: uncompressed bytes of Data.db
    :ivar is_within: whether it is known that all partitions, also the others, are of tokens that its node holds
    """

    lowest: Integers
    highest: Integers
    positions: Integers
    last: int
    length: int
    is_within: bool = False

    def __len__(self) -> int:
        return len(self.positions)

    def between(self, starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
        """Find the parts of Data.db with the partitions of token ranges, which do not wrap.

        :param starts: int64[r]: their starts, excluded; ``ends``: their ends
        :returns: int64[r]: position of the first byte, and of the one behind the last. At both ends there may be
            partitions of other tokens. The partition at the first position has a token up to the start, or is the first
            of all; that at the second has one above the end, or there is none
        """
        first = np.maximum(np.searchsorted(self.highest, starts, side="right") - 1, 0)
        first[starts >= self.last] = len(self)
        end = np.searchsorted(self.lowest, ends, side="right")
        places = np.append(self.positions, self.length)
        return places[first], places[end]


def read_partitions(source: Source, length: int, held: TokenSet = (), step_bytes: int | None = None) -> Partitions:
    """Read where some partitions of an SSTable are.

    :param length: uncompressed bytes of its Data.db
    :param held: tokens that its node holds, in their order; empty: unknown
    :param step_bytes: uncompressed bytes of which one partition is remembered; None: by the length
    :raises SSTableError: the index is missing or damaged
    """
    step = max(min(STEP_BYTES, length // _LEAST_STEPS), 1) if step_bytes is None else step_bytes
    kept, before, last, is_within = [], -1, 0, bool(held)
    for batch in each_partition(source, length):
        is_within = is_within and _are_within(source, held, *batch)
        steps = batch[2] // step
        chosen = np.flatnonzero(np.diff(steps, prepend=before))
        before, last = int(steps[-1]), int(batch[1][-1])
        kept.append([array[chosen] for array in batch])
    lowest, highest, positions = (np.concatenate(arrays) for arrays in zip(*kept, strict=True))
    return Partitions(lowest, highest, positions, last, length, is_within)


def _are_within(source: Source, held: TokenSet, lowest: Integers, highest: Integers, positions: Integers) -> bool:
    """Tell whether partitions are of tokens that are held. Where a trie does not tell, Data.db does."""
    starts, ends = (np.array([getattr(one, end) for one in held], np.int64) for end in ("start", "end"))
    number = np.searchsorted(starts, lowest) - 1
    unsure = np.flatnonzero((number < 0) | (highest > ends[number]))
    if (lowest[unsure] == highest[unsure]).any():
        return False
    data = DataFile(source)
    tokens = (token_at(data, position) for position in positions[unsure].tolist())
    return all(token is not None and any(token in one for one in held) for token in tokens)


def each_partition(source: Source, length: int) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Read where all partitions of an SSTable are, some at a time.

    :param length: uncompressed bytes of its Data.db
    :returns: lowest and highest token, and position, as in :class:`Partitions`; never none
    :raises SSTableError: the index is missing or damaged; that may show only at the end
    """
    is_trie = source.descriptor.format == "bti"
    file = source.descriptor.path(PARTITIONS if is_trie else INDEX)
    index, number, before = f"it and {ROWS}" if is_trie else "it", 0, (-(2**63), -1)
    for lowest, highest, positions in read_trie(source) if is_trie else read_index(source):
        if number == 0 and positions[0] != 0:
            problem = f"by {index} the first partition begins at byte {int(positions[0]):,} of Data.db"
            raise SSTableError(file, None, problem, DAMAGED)
        for problem, wrong in (
            ("does not begin behind the one before it", np.diff(positions, prepend=before[1]) <= 0),
            ("lies behind the end of Data.db", positions >= length),
            ("has a lower token than the one before it", lowest < np.append(before[0], highest[:-1])),
        ):
            if wrong.any():
                raise SSTableError(
                    file, None, f"by {index} partition {number + int(np.argmax(wrong)):,} {problem}", DAMAGED
                )
        yield lowest, highest, positions
        number, before = number + len(positions), (int(highest[-1]), int(positions[-1]))
    if number == 0:
        raise SSTableError(file, None, f"by {index} there is no partition", DAMAGED)


def to_arrow(partitions: Sequence[Partitions]) -> pa.RecordBatch:
    """Write what is remembered of several SSTables as a record batch, a row for each."""
    offsets = np.cumsum([0, *map(len, partitions)], dtype=np.int32)
    arrays = [np.concatenate([getattr(one, name) for one in partitions] or [[]]) for name in _ARRAYS]
    columns = [pa.ListArray.from_arrays(offsets, pa.array(array, pa.int64())) for array in arrays]
    facts = [[getattr(one, name) for one in partitions] for name in _FACTS]
    return pa.record_batch([*columns, *map(pa.array, facts)], [*_ARRAYS, *_FACTS])


def from_arrow(batch: pa.RecordBatch) -> list[Partitions]:
    """Read what :func:`to_arrow` has written; nothing is copied."""
    arrays = [[one.values.to_numpy() for one in batch[name]] for name in _ARRAYS]
    facts = [batch[name].to_pylist() for name in _FACTS]
    return [Partitions(*of_one) for of_one in zip(*arrays, *facts, strict=True)]
