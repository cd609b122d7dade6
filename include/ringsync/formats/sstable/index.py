"""Index.db: a list of the partitions of an SSTable of the format ``big`` (docs/formats.md, 9.5).

An entry is ``u16 length, key, uvint position in Data.db, uvint size, size bytes`` of an index inside the partition
(C: io/sstable/format/big/RowIndexEntry).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit

from ringsync.compiled.arrow import Integers
from ringsync.compiled.memory import KERNEL, address, load16, load_unsigned_vint, padded, store64
from ringsync.cql.murmur3 import token_of
from ringsync.formats.sstable.cursor import DAMAGED
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import INDEX
from ringsync.formats.sstable.source import Source

WINDOW_BYTES = 4 << 20
_LONGEST_ENTRY = 2 + 0xFFFF + 9 + 9
"""Bytes of an entry without the index inside the partition, at most."""
_SHORTEST_ENTRY = 2 + 1 + 1


def read_index(source: Source, window_bytes: int = WINDOW_BYTES) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Read an Index.db, a window at a time.

    :param window_bytes: bytes that are read at once
    :returns: of some partitions, int64[n]: tokens, twice the same array; positions in Data.db
    :raises SSTableError: the file is missing or damaged
    """
    file, size = source.descriptor.path(INDEX), source.size(INDEX)
    if size is None:
        raise SSTableError(file, None, "there is no such file", "copy all files of the SSTable")
    window_bytes = max(window_bytes, _LONGEST_ENTRY)
    end, place = np.zeros(1, np.int64), 0
    while place < size:
        window = source.read_range(INDEX, place, window_bytes)
        found = np.empty((2, len(window) // _SHORTEST_ENTRY + 1), np.int64)
        buffer = padded(window)
        is_last = place + len(window) >= size
        count = _find_entries(
            address(buffer), len(window), int(is_last), address(found[0]), address(found[1]), address(end)
        )
        if not count or place + int(end[0]) > size:
            raise SSTableError(file, place, "what follows is not whole entries up to the end of the file", DAMAGED)
        place += int(end[0])
        yield found[0, :count], found[0, :count], found[1, :count]


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _find_entries(start: int, size: int, is_last: int, tokens: int, positions: int, end: int) -> int:
    """Find entries in the bytes at an address.

    :param is_last: whether the file ends with these bytes; if not, the last entries are left for the next call
    :param tokens: address of int64[n]; ``positions``: likewise
    :param end: address of int64: bytes up to the next entry; they may be more than there are
    :returns: number of entries
    """
    p, stop, count = start, start + size, 0
    while stop - p >= (_SHORTEST_ENTRY if is_last else _LONGEST_ENTRY):
        length = load16(p)
        if length > stop - p - _SHORTEST_ENTRY:
            break
        position, q = load_unsigned_vint(p + 2 + length)
        skipped, q = load_unsigned_vint(q)
        if q > stop or skipped < 0 or skipped > (1 << 48) or (is_last and skipped > stop - q):
            break
        store64(tokens + 8 * count, token_of(p + 2, length))
        store64(positions + 8 * count, position)
        count += 1
        p = q + skipped
    if is_last and p != stop:
        count = 0
    store64(end, p - start)
    return count
