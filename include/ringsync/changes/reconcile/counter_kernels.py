"""Merging the contexts of counters (C: db/context/CounterContext.merge; docs/formats.md, 3.1)."""

from __future__ import annotations

from numba import njit

from ringsync.compiled.memory import KERNEL, copy16, load16, load64
from ringsync.compiled.sorting import compare_bytes
from ringsync.cql.codec.encode_kernels import store_big_endian
from ringsync.cql.counters import SHARD_BYTES

_ID_BYTES = 16
_REMOTE, _LOCAL, _GLOBAL = range(3)
_GLOBAL_INDEX = 0x8000
"""Bit of a header's element. Set: the shard with this number is global. Not set: it is local."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def _header_bytes(p: int, length: int) -> int:
    """Return the number of bytes before the shards."""
    if length < 2:
        return length
    elements = load16(p)
    return min(length, 2 + 2 * (elements if elements < _GLOBAL_INDEX else 2 * _GLOBAL_INDEX - elements))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _kind(p: int, header: int, shard: int) -> int:
    for at in range(p + 2, p + header, 2):
        marked = load16(at)
        if marked & (_GLOBAL_INDEX - 1) == shard:
            return _GLOBAL if marked & _GLOBAL_INDEX else _LOCAL
    return _REMOTE


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merge_contexts(p: int, p_length: int, q: int, q_length: int, output: int) -> int:
    """Merge two contexts. Of two versions of a shard global wins over local over remote, then the greater clock. Two
    local ones are added up, as in Cassandra (they come from before 2.1, and are not in a commit log).

    :param output: address with room for both contexts and 16 spare bytes
    :returns: bytes of the merged context
    """
    p_header, q_header = _header_bytes(p, p_length), _header_bytes(q, q_length)
    p_shards, q_shards = (p_length - p_header) // SHARD_BYTES, (q_length - q_header) // SHARD_BYTES
    marked = shards = i = j = 0
    # The header's length is known only after the last shard. Until then the shards lie after the longest header.
    body = output + 2 + 2 * (p_shards + q_shards)
    while i < p_shards or j < q_shards:
        a, b = p + p_header + SHARD_BYTES * i, q + q_header + SHARD_BYTES * j
        order = -1 if j == q_shards else 1
        if i < p_shards and j < q_shards:
            order = compare_bytes(a, _ID_BYTES, b, _ID_BYTES)
        kind = other = -1
        if order <= 0:
            kind = _kind(p, p_header, i)
            i += 1
        if order >= 0:
            other = _kind(q, q_header, j)
            j += 1
        chosen = b if other > kind else a
        clock, count = load64(chosen + 16), load64(chosen + 24)
        if other == kind:
            clock_b, count_b = load64(b + 16), load64(b + 24)
            if kind == _LOCAL:
                clock, count = clock + clock_b, count + count_b
            elif clock_b > clock or (clock_b == clock and count_b > count):
                clock, count = clock_b, count_b
        shard = body + SHARD_BYTES * shards
        copy16(shard, chosen)
        store_big_endian(shard + 16, clock, 8)
        store_big_endian(shard + 24, count, 8)
        kind = max(kind, other)
        if kind != _REMOTE:
            store_big_endian(output + 2 + 2 * marked, shards | (_GLOBAL_INDEX if kind == _GLOBAL else 0), 2)
            marked += 1
        shards += 1
    store_big_endian(output, marked, 2)
    header = 2 + 2 * marked
    for at in range(0, SHARD_BYTES * shards, 16):
        copy16(output + header + at, body + at)
    return header + SHARD_BYTES * shards
