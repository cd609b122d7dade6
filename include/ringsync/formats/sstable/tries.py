"""Partitions.db: a trie of the partitions of an SSTable of the format ``bti``; and the keys of Rows.db.

Its keys are ``40, token with the sign bit flipped, 40, …``, each only as far as it differs from all others. A child
lies before its parent in the file. See docs/formats.md, 9.5; C: io/tries/TrieNode, io/util/SizedInts,
io/sstable/format/bti/PartitionIndex and TrieIndexEntry.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.compiled.arrow import Integers
from ringsync.compiled.memory import (
    KERNEL,
    address,
    load8,
    load16,
    load64,
    load64_native,
    load_unsigned_vint,
    padded,
    store64,
)
from ringsync.cql.murmur3 import token_of
from ringsync.formats.sstable.cursor import DAMAGED, Cursor
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import PARTITIONS, ROWS
from ringsync.formats.sstable.source import Source

FOOTER_BYTES = 24
_SMALLEST_LEAF = 2
_COMPONENT = 0x40
_DEEPEST = 2 * 0xFFFF + 64
"""Bytes of the longest key: each byte of a partition key may be escaped."""
_LEVEL_WORDS, _PARTITION_WORDS = 3, 3
_FIRST_DENSE = 10
"""Nodes of type 0 have no children, of 1 to 4 one, of 5 to 9 some, and later ones one for each byte in a range."""
_DONE, _OUTSIDE, _TOO_MANY, _TOO_DEEP, _NO_TOKEN, _ABSENT, _FULL = range(7)
_WRITTEN, _TOTAL, _VISITED, _STATUS, _PAGE = range(8, 48, 8)
_STATE_WORDS = 6
BATCH = 2**16
"""Partitions that are found at once."""
_PAGE_BITS = 18
PAGE_BYTES = 1 << _PAGE_BITS
_PAGES_KEPT = 64
_LARGEST_NODE = 4096
"""Bytes of a node with its payload, at most: Cassandra puts it into one of its pages."""
_ROWS_BYTES, _ROWS_AT_ONCE = 2**18, 2**12
"""Bytes of Rows.db, more than an entry has, and entries that are read at once."""
_PROBLEMS = {
    _OUTSIDE: "a node lies outside of the file",
    _TOO_MANY: "the trie has more nodes or partitions than the file can hold",
    _TOO_DEEP: "the trie is deeper than the longest key",
    _NO_TOKEN: "a key does not begin with a token",
}


def read_trie(source: Source) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Read a Partitions.db, and the keys of the partitions in Rows.db, some pages at a time.

    :returns: of some partitions, int64[n]: lowest and highest token that each may have; positions in Data.db
    :raises SSTableError: a file is missing or damaged; that may show only at the end
    """
    file, size = source.descriptor.path(PARTITIONS), source.size(PARTITIONS)
    if size is None:
        raise SSTableError(file, None, "there is no such file", "copy all files of the SSTable")
    tail = max(size - FOOTER_BYTES, 0)
    footer = Cursor(source.read_range(PARTITIONS, tail, FOOTER_BYTES), file)
    first_and_last, count, root = footer.i64(), footer.i64(), footer.i64()
    nodes = min(first_and_last, size)
    if not 0 <= root < nodes or not 0 < count <= nodes // _SMALLEST_LEAF:
        problem = f"{count:,} partitions below a root at byte {root:,} are not possible"
        raise SSTableError(file, tail, problem, DAMAGED)
    pages = _Pages(source, file, nodes)
    levels = np.empty((min(_DEEPEST, nodes) + 2, _LEVEL_WORDS), np.int64)
    levels[0] = root, -1, 0
    state = np.zeros(_STATE_WORDS, np.int64)
    status = _FULL
    while status in (_FULL, _ABSENT):
        partitions = np.empty((min(count, BATCH), _PARTITION_WORDS), np.int64)
        _walk(
            address(pages.frames),
            nodes,
            count,
            address(levels),
            len(levels),
            address(partitions),
            len(partitions),
            address(state),
        )
        _, written, _, _, status, absent = state.tolist()
        if status in _PROBLEMS:
            raise SSTableError(file, None, _PROBLEMS[status], DAMAGED)
        if written:
            bits, known, values = partitions[:written].T
            free = (1 << np.minimum(64 - known, 63)) - 1
            lowest = bits ^ np.int64(-(2**63))
            highest = np.where(known == 0, np.int64(2**63 - 1), lowest | free)
            yield _with_rows(source, lowest, highest, values)
        if status == _ABSENT:
            pages.load(absent)
    if (number := int(state[_TOTAL // 8])) != count:
        raise SSTableError(file, None, f"the trie has {number:,} partitions instead of {count:,}", DAMAGED)


class _Pages:
    """The part of a Partitions.db that is in memory: each node lies in one page, with all that follows it.

    :ivar frames: int64[pages]: address of each page; 0: it is not in memory
    """

    def __init__(self, source: Source, file: str, size: int) -> None:
        self.frames = np.zeros((size >> _PAGE_BITS) + 1, np.int64)
        self._source, self._file, self._size = source, file, size
        self._kept: dict[int, npt.NDArray[np.uint8]] = {}

    def load(self, page: int) -> None:
        """Read a page; the one that was read first of those in memory may have to go.

        :raises SSTableError: the file ends before
        """
        start = page << _PAGE_BITS
        expected = min(PAGE_BYTES + _LARGEST_NODE, self._size - start)
        content = self._source.read_range(PARTITIONS, start, expected)
        if len(content) < expected:
            raise SSTableError(self._file, start, "the file ends here", DAMAGED)
        if len(self._kept) == _PAGES_KEPT:
            oldest = next(iter(self._kept))
            self.frames[oldest] = 0
            del self._kept[oldest]
        self._kept[page] = padded(content)
        self.frames[page] = address(self._kept[page])


def _with_rows(
    source: Source, lowest: Integers, highest: Integers, values: Integers
) -> tuple[Integers, Integers, Integers]:
    """Replace places in Rows.db, where large partitions are, by tokens and positions in Data.db."""
    positions = ~values
    large = np.flatnonzero(values >= 0)
    if len(large) == 0:
        return lowest, highest, positions
    file, size = source.descriptor.path(ROWS), source.size(ROWS)
    if size is None:
        raise SSTableError(file, None, "there is no such file", "copy all files of the SSTable")
    found, places, read = np.empty((2, len(large)), np.int64), values[large], 0
    while read < len(large):
        start = int(places[read])
        content = source.read_range(ROWS, start, _ROWS_BYTES) if start < size else b""
        buffer, inside = padded(content), places[read : read + _ROWS_AT_ONCE] - start
        tokens, at = found[:, read:]
        count = _read_rows(address(buffer), len(content), address(inside), len(inside), address(tokens), address(at))
        if not count:
            raise SSTableError(
                file, start, "there is no whole entry of a partition here, where Partitions.db has one", DAMAGED
            )
        read += count
    own = found[0]
    outside = (own < lowest[large]) | (own > highest[large])
    if outside.any():
        place = int(places[np.argmax(outside)])
        raise SSTableError(file, place, "the key here has another token than in Partitions.db", DAMAGED)
    lowest[large] = highest[large] = own
    positions[large] = found[1]
    return lowest, highest, positions


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _read_rows(start: int, size: int, places: int, number: int, tokens: int, positions: int) -> int:
    """Read key and position at places of Rows.db; return how many are whole."""
    stop = start + size
    for i in range(number):
        place = load64_native(places + 8 * i)
        if place < 0 or place > size - 3:
            return i
        p = start + place
        length = load16(p)
        if length > stop - p - 3:
            return i
        position, q = load_unsigned_vint(p + 2 + length)
        if q > stop:
            return i
        store64(tokens + 8 * i, token_of(p + 2, length))
        store64(positions + 8 * i, position)
    return number


@njit(inline="always")  # type: ignore[untyped-decorator]
def _big_endian(p: int, size: int) -> int:
    """Load a number of up to 8 bytes without a sign."""
    if size == 0:
        return 0
    return (load64(p) >> (64 - 8 * size)) & ((1 << (8 * size)) - 1) if size < 8 else load64(p)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _packed_12(p: int, index: int) -> int:
    """Load one of several numbers of 12 bits."""
    word = load16(p + 3 * index // 2)
    return word & 0xFFF if index & 1 else word >> 4


@njit(inline="always")  # type: ignore[untyped-decorator]
def _delta_bytes(kind: int) -> int:
    """Return the bytes of the distance to a child, by the type of a node with many; 0: one and a half."""
    if kind == 5:
        return 1
    if kind == 7 or kind == 11:
        return 2
    if kind == 8 or kind == 12:
        return 3
    if kind == 13:
        return 4
    if kind == 9 or kind == 14:
        return 5
    return 8 if kind == 15 else 0


@njit(inline="always")  # type: ignore[untyped-decorator]
def _shape(p: int, left: int) -> tuple[int, int]:
    """Return the number of places for children of the node at an address, and its bytes without the payload.

    :param left: bytes from the node to the end of the trie; a node may claim more than that
    """
    kind = load8(p) >> 4
    if kind == 0:
        return 0, 1
    if kind < 5:
        return 1, (2 if kind == 1 else 3 if kind < 4 else 4)
    if left < 3:
        return 1, 3
    count = load8(p + 1) if kind < _FIRST_DENSE else load8(p + 2) + 1
    head = 2 + count if kind < _FIRST_DENSE else 3
    each = _delta_bytes(kind)
    return count, head + (each * count if each else (3 * count + 1) // 2)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _child(p: int, index: int) -> tuple[int, int]:
    """Return the byte that leads to a child, and its distance before the node; distance 0: there is none."""
    first = load8(p)
    kind = first >> 4
    if kind == 1:
        return load8(p + 1), first & 15
    if kind == 2:
        return load8(p + 1), load8(p + 2)
    if kind == 3:
        return load8(p + 2), ((first & 15) << 8) | load8(p + 1)
    if kind == 4:
        return load8(p + 1), load16(p + 2)
    each = _delta_bytes(kind)
    if kind < _FIRST_DENSE:
        deltas = p + 2 + load8(p + 1)
        transition = load8(p + 2 + index)
    else:
        deltas = p + 3
        transition = load8(p + 1) + index
    return transition, (_big_endian(deltas + each * index, each) if each else _packed_12(deltas, index))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _payload_bytes(p: int) -> int:
    """Return the bytes of a node's payload; 0: it has none."""
    first = load8(p)
    kind, bits = first >> 4, first & 15
    if kind == 1 or kind == 3 or bits == 0:
        return 0
    return bits - 6 if bits >= 8 else bits


@njit(inline="always")  # type: ignore[untyped-decorator]
def _payload(p: int, size: int) -> int:
    """Load a signed number from the payload of ``size`` bytes at an address."""
    value = _big_endian(p, size)
    return (value << (64 - 8 * size)) >> (64 - 8 * size)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _problem(place: int, distance: int, transition: int, depth: int, depth_room: int) -> int:
    """Tell what is wrong with a child of the node at a place."""
    if distance <= 0 or distance > place:
        return _OUTSIDE
    if depth == 0 and transition != _COMPONENT:
        return _NO_TOKEN
    return _TOO_DEEP if depth + 1 >= depth_room else _DONE


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _walk(
    frames: int, size: int, count: int, levels: int, depth_room: int, partitions: int, room: int, state: int
) -> None:
    """Walk through a trie in the order of its keys, up to a page that is not in memory, or until a batch is full.

    :param frames: address of the pages' addresses; ``size``: bytes of the trie; ``count``: number of partitions
    :param levels: address of int64[depth_room, 3]: place of a node, its next child, bits of the token so far
    :param partitions: address of int64[room, 3]: first bits of the token, the others are 0; number of these bits;
        payload
    :param state: address of the state: depth, partitions of this batch, all of them, nodes, status, the page
    """
    depth, total, visited = load64_native(state), load64_native(state + _TOTAL), load64_native(state + _VISITED)
    written, status = 0, _DONE
    while depth >= 0 and status == _DONE:
        level = levels + 8 * _LEVEL_WORDS * depth
        place, index, token = load64_native(level), load64_native(level + 8), load64_native(level + 16)
        frame = load64_native(frames + 8 * (place >> _PAGE_BITS))
        if frame == 0:
            store64(state + _PAGE, place >> _PAGE_BITS)
            status = _ABSENT
            continue
        p, left = frame + (place & (PAGE_BYTES - 1)), size - place
        children, node_bytes = _shape(p, left)
        if index < 0:
            payload = _payload_bytes(p)
            if payload > 0 and written == room and total < count:
                status = _FULL
                continue
            visited += 1
            if node_bytes > left - payload:
                status = _OUTSIDE
                continue
            if visited > size or (payload > 0 and total == count):
                status = _TOO_MANY
                continue
            if payload > 0:
                has_hash = (load8(p) >> 3) & 1
                partition = partitions + 8 * _PARTITION_WORDS * written
                store64(partition, token)
                store64(partition + 8, 8 * min(max(depth - 1, 0), 8))
                store64(partition + 16, _payload(p + node_bytes + has_hash, payload - has_hash))
                written += 1
                total += 1
            index = 0
        store64(level + 8, index + 1)
        if index >= children:
            depth -= 1
            continue
        transition, distance = _child(p, index)
        if distance == 0 and load8(p) >> 4 >= _FIRST_DENSE:
            continue  # a dense node has a place for each byte in a range, though some lead nowhere
        status = _problem(place, distance, transition, depth, depth_room)
        if status == _DONE:
            if 1 <= depth <= 8:
                token |= transition << (64 - 8 * depth)
            depth += 1
            level += 8 * _LEVEL_WORDS
            store64(level, place - distance)
            store64(level + 8, -1)
            store64(level + 16, token)
    store64(state, depth)
    store64(state + _WRITTEN, written)
    store64(state + _TOTAL, total)
    store64(state + _VISITED, visited)
    store64(state + _STATUS, status)
