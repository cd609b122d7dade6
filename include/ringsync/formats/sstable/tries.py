"""Partitions.db: a trie of the partitions of an SSTable of the format ``bti``; and the keys of Rows.db.

Its keys are ``40, token with the sign bit flipped, 40, …``, each only as far as it differs from all others. A child
lies before its parent in the file. See docs/formats.md, 9.5; C: io/tries/TrieNode, io/util/SizedInts,
io/sstable/format/bti/PartitionIndex and TrieIndexEntry.
"""

from __future__ import annotations

import numpy as np
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
_DONE, _OUTSIDE, _TOO_MANY, _TOO_DEEP, _NO_TOKEN = range(5)
_PROBLEMS = {
    _OUTSIDE: "a node lies outside of the file",
    _TOO_MANY: "the trie has more nodes or partitions than the file can hold",
    _TOO_DEEP: "the trie is deeper than the longest key",
    _NO_TOKEN: "a key does not begin with a token",
}


def read_trie(source: Source, most: int) -> tuple[Integers, Integers, Integers, int]:
    """Read a Partitions.db, and the keys of the partitions in Rows.db.

    :param most: number of partitions to return at most, about
    :returns: int64[n]: lowest and highest token that each partition may have; positions in Data.db;
        step: one of so many partitions is returned
    :raises SSTableError: a file is missing or damaged
    """
    file, content = source.descriptor.path(PARTITIONS), source.read(PARTITIONS)
    if content is None:
        raise SSTableError(file, None, "there is no such file", "copy all files of the SSTable")
    footer = Cursor(content, file, max(len(content) - FOOTER_BYTES, 0))
    first_and_last, count, root = footer.i64(), footer.i64(), footer.i64()
    nodes = min(first_and_last, len(content))
    if not 0 <= root < nodes or not 0 < count <= nodes // _SMALLEST_LEAF:
        problem = f"{count:,} partitions below a root at byte {root:,} are not possible"
        raise SSTableError(file, len(content) - FOOTER_BYTES, problem, DAMAGED)
    buffer = padded(content)
    step = -(-count // most)
    partitions = np.empty((-(-count // step), _PARTITION_WORDS), np.int64)
    levels = np.empty((min(_DEEPEST, nodes) + 2, _LEVEL_WORDS), np.int64)
    found = np.zeros(2, np.int64)
    _walk(
        address(buffer),
        nodes,
        root,
        count,
        step,
        address(levels),
        len(levels),
        address(partitions),
        address(found),
    )
    number, status = found.tolist()
    if status != _DONE:
        raise SSTableError(file, None, _PROBLEMS[status], DAMAGED)
    if number != count:
        raise SSTableError(file, None, f"the trie has {number:,} partitions instead of {count:,}", DAMAGED)
    bits, known, values = partitions.T
    free = (1 << np.minimum(64 - known, 63)) - 1
    lowest = bits ^ np.int64(-(2**63))
    highest = np.where(known == 0, np.int64(2**63 - 1), lowest | free)
    return *_with_rows(source, lowest, highest, values), step


def _with_rows(
    source: Source, lowest: Integers, highest: Integers, values: Integers
) -> tuple[Integers, Integers, Integers]:
    """Replace places in Rows.db, where large partitions are, by tokens and positions in Data.db."""
    positions = ~values
    large = np.flatnonzero(values >= 0)
    if len(large) == 0:
        return lowest, highest, positions
    file, content = source.descriptor.path(ROWS), source.read(ROWS)
    if content is None:
        raise SSTableError(file, None, "there is no such file", "copy all files of the SSTable")
    buffer = padded(content)
    found = np.empty((2, len(large)), np.int64)
    places = values[large]
    read = _read_rows(address(buffer), len(content), address(places), len(large), address(found[0]), address(found[1]))
    if read != len(large):
        raise SSTableError(
            file, int(places[read]), "there is no whole entry of a partition here, where Partitions.db has one", DAMAGED
        )
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
        if place > size - 3:
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
    start: int, size: int, root: int, room: int, step: int, levels: int, depth_room: int, partitions: int, found: int
) -> None:
    """Walk through a trie in the order of its keys.

    :param start: address of the trie; ``size``: its bytes; ``root``: place of its root
    :param room: number of partitions; one of ``step`` is written
    :param levels: address of int64[depth_room, 3]: place of a node, its next child, bits of the token so far
    :param partitions: address of int64[room, 3]: first bits of the token, the others are 0; number of these bits;
        payload
    :param found: address of int64[2]: number of partitions that were found, and how it ended
    """
    depth, count, visited, status = 0, 0, 0, _DONE
    store64(levels, root)
    store64(levels + 8, -1)
    store64(levels + 16, 0)
    while depth >= 0 and status == _DONE:
        level = levels + 8 * _LEVEL_WORDS * depth
        place, index, token = load64_native(level), load64_native(level + 8), load64_native(level + 16)
        p, left = start + place, size - place
        children, node_bytes = _shape(p, left)
        if index < 0:
            payload = _payload_bytes(p)
            visited += 1
            if node_bytes > left - payload:
                status = _OUTSIDE
                continue
            if visited > size or (payload > 0 and count == room):
                status = _TOO_MANY
                continue
            if payload > 0:
                if count % step == 0:
                    has_hash = (load8(p) >> 3) & 1
                    partition = partitions + 8 * _PARTITION_WORDS * (count // step)
                    store64(partition, token)
                    store64(partition + 8, 8 * min(max(depth - 1, 0), 8))
                    store64(partition + 16, _payload(p + node_bytes + has_hash, payload - has_hash))
                count += 1
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
    store64(found, count)
    store64(found + 8, status)
