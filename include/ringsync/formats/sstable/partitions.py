"""Where the partitions of an SSTable are in its Data.db, by token.

Both indexes, the list Index.db and the trie Partitions.db, have each partition once, in the order of Data.db. Neither
has checksums: whoever begins to read at a position must check that the key there has its token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.compiled.arrow import Integers
from ringsync.cql.murmur3 import tokens
from ringsync.formats.sstable.cursor import DAMAGED
from ringsync.formats.sstable.data import DataFile
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.index import read_index
from ringsync.formats.sstable.names import INDEX, PARTITIONS, ROWS
from ringsync.formats.sstable.source import Source
from ringsync.formats.sstable.tries import read_trie
from ringsync.ring.tokens import TokenRange

MOST_PARTITIONS = 2**20
"""Number of partitions that are remembered: 24 MB."""


@dataclass(frozen=True)
class Partitions:
    """The partitions of an SSTable in the order of its Data.db, which is that of their tokens.

    :ivar lowest: int64[n]: token of each; a trie has only its first bits: then the lowest token with these
    :ivar highest: int64[n]: the same, or the highest token with these bits
    :ivar positions: int64[n]: uncompressed position of each in Data.db
    :ivar length: uncompressed bytes of Data.db
    :ivar step: one of so many partitions is known
    :ivar token_at: function from position to the token of the partition there; None: Data.db cannot be read there
    """

    lowest: Integers
    highest: Integers
    positions: Integers
    length: int
    step: int
    token_at: Callable[[int], int | None]

    def __len__(self) -> int:
        return len(self.positions)

    def positions_of(self, wanted: TokenRange) -> tuple[tuple[int, int], ...]:
        """Return the parts of Data.db with the partitions of a token range: first byte, and the one after the last.

        :returns: at most two parts, the second one of a range that wraps around; none that is empty. A partition that
            may belong to the range, but cannot be read, is included; and where only some partitions are known, others
            around the range are, too
        """
        parts = []
        for part in wanted.unwrap():
            first, end = self._after(part.start, 0), self._after(part.end, 1)
            if self.step > 1:
                first = max(first - 1, 0)
            if first < end:
                parts.append((int(self.positions[first]), self._position(end)))
        return tuple(parts)

    def behind(self, position: int) -> int:
        """Return the position of the first known partition at a position or behind it; at the end: ``length``."""
        return self._position(int(np.searchsorted(self.positions, position)))

    def _position(self, number: int) -> int:
        return int(self.positions[number]) if number < len(self.positions) else self.length

    def _after(self, token: int, if_unknown: int) -> int:
        """Return the number of the first partition with a higher token.

        :param if_unknown: 1: a partition with an unknown token counts as lower; 0: as higher
        """
        number = int(np.searchsorted(self.lowest, token, side="right"))
        # The bits that a trie has of two partitions differ. So all others are certain.
        if number and self.highest[number - 1] > token:
            found = self.token_at(int(self.positions[number - 1]))
            is_higher = found > token if found is not None else not if_unknown
            return number - is_higher
        return number


def read_partitions(source: Source, data: DataFile, most: int = MOST_PARTITIONS) -> Partitions:
    """Read where the partitions of an SSTable are.

    :param data: its Data.db
    :param most: number of partitions that are remembered at most, about; of more only some are
    :raises SSTableError: the index is missing or damaged
    """
    is_trie = source.descriptor.format == "bti"
    lowest, highest, positions, step = (read_trie if is_trie else read_index)(source, most)
    file = source.descriptor.path(PARTITIONS if is_trie else INDEX)
    _check(file, f"it and {ROWS}" if is_trie else "it", lowest, highest, positions, data.length)
    return Partitions(lowest, highest, positions, data.length, step, lambda position: _token_at(data, position))


def _check(file: str, index: str, lowest: Integers, highest: Integers, positions: Integers, length: int) -> None:
    """Check that the partitions fill Data.db in the order of their tokens.

    :param index: what says where they are, for messages: the trie names places in Rows.db, which may be the one damaged
    :raises SSTableError: they do not
    """
    starts = np.append(positions, length)
    if int(starts[0]) != 0:
        raise SSTableError(
            file, None, f"by {index} the first partition begins at byte {int(starts[0]):,} of Data.db", DAMAGED
        )
    for problem, wrong in (
        ("does not begin behind the one before it, or lies behind the end of Data.db", np.diff(starts) <= 0),
        ("has a lower token than the one before it", lowest[1:] < highest[:-1]),
    ):
        if wrong.any():
            number = int(np.argmax(wrong)) + 1
            raise SSTableError(file, None, f"by {index} partition {number:,} {problem}", DAMAGED)


def _token_at(data: DataFile, position: int) -> int | None:
    size = _read(data, position, 2)
    key = _read(data, position + 2, int.from_bytes(size, "big")) if size else None
    return None if key is None else int(tokens(pa.array([key], pa.binary()))[0])


def _read(data: DataFile, position: int, size: int) -> bytes | None:
    """Read some bytes; None: they are lost, or there are not so many."""
    if size > data.length - position:
        return None
    buffer: npt.NDArray[np.uint8] = np.empty(size, np.uint8)
    return buffer.tobytes() if data.read_into(buffer, 0, position, size) is None else None
