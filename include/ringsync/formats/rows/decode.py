"""Kernels that decode rows, cells and range tombstone markers, and write change rows.

Mutations of a commit log and SSTables have the same rows (C: db/rows/UnfilteredSerializer); in an SSTable each says its
size, too. Each function gets the address ``s`` of the state (:mod:`ringsync.formats.rows.state`) and reads the bytes
from ``p`` to ``end``. It returns the address after the bytes that it has read, or a code that is no address
(``LAST_CODE`` or less). Bytes are never trusted: each length is compared with the bytes that are left.

While a kernel reads a row, it collects the bytes of its digest in the scratch, in the order of
:mod:`ringsync.changes.digest`. ``q`` is an address in the scratch.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.schema import PARTITION_DELETION, RANGE_DELETION, ROW, STATIC
from ringsync.compiled.memory import (
    KERNEL,
    PADDING,
    copy_bytes,
    load8,
    load16,
    load32_native,
    load64_native,
    load_unsigned_vint,
    store8,
    store32,
    store64,
)
from ringsync.formats.rows import state as at
from ringsync.formats.rows.cells import MOST_TTL, decode_cells, read_times
from ringsync.formats.rows.output import NO_TIMESTAMP, begin_row, end_row, fits, put_deletion, put_liveness
from ringsync.formats.rows.state import CUT, FULL, LAST_CODE, MALFORMED, SHADOWABLE

_HAS_TIMESTAMP, _HAS_TTL, _HAS_DELETION = 0x04, 0x08, 0x10
_IS_MARKER_OR_END, _IS_EXTENDED, _IS_STATIC, _IS_SHADOWABLE = 0x03, 0x80, 0x01, 0x02
_EXCLUSIVE_END, _INCLUSIVE_START, _EXCLUSIVE_END_INCLUSIVE_START = 0, 1, 2
_INCLUSIVE_END_EXCLUSIVE_START, _INCLUSIVE_END, _EXCLUSIVE_START = 5, 6, 7


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def decode_partition_deletion(s: int, p: int, end: int) -> int:
    """Decode the deletion of the whole partition."""
    timestamp, local, p = read_times(s, p, at.MIN_TIMESTAMP)
    if p > end:
        return MALFORMED
    return p if timestamp == NO_TIMESTAMP else put_partition_deletion(s, p, timestamp, local)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_partition_deletion(s: int, p: int, timestamp: int, local: int) -> int:
    """Write the change row of a deletion of the whole partition. Return ``p``, or FULL."""
    q = load64_native(s + at.HEAD_END)
    begin_row(s)
    store32(q, 0)
    q = put_liveness(s, q + 4, 0, 0, 0, 0)
    q = put_deletion(s, q, 1, timestamp, local)
    store64(q, 0)
    return end_row(s, p, q + 8, PARTITION_DELETION, 0, 0)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def decode_row(s: int, p: int, end: int, flags: int, kind: int) -> int:
    """Decode a row, or the static row, after its flags."""
    extended = 0
    if flags & _IS_EXTENDED:
        extended = load8(p)
        p += 1
    if (extended & _IS_STATIC) != (kind == STATIC) or flags & _IS_MARKER_OR_END:
        return MALFORMED
    if extended & _IS_SHADOWABLE:
        return SHADOWABLE
    table = load64_native(s + at.DIRECTORY) + at.TABLE_BYTES * load64_native(s + at.TABLE)
    size = load64_native(table + at.TABLE_CLUSTERING) if kind == ROW else 0
    begin_row(s)
    clustering = p
    p, q = _copy_clustering(s, p, end, size, load64_native(s + at.HEAD_END))
    if p <= LAST_CODE:
        return p
    clustering_end, clustering_stop = q, p
    has_sizes = load64_native(s + at.HAS_SIZES)
    if has_sizes:
        p, end = _read_sizes(s, p, end)
        if p <= LAST_CODE:
            return p
    p, q = _decode_row_times(s, p, q, flags)
    if p <= LAST_CODE or p > end:
        return MALFORMED
    p, q = decode_cells(s, p, end, q, flags, s + (at.STATIC_MAP if kind == STATIC else at.REGULAR_MAP))
    if p <= LAST_CODE:
        return p
    if p > end or (has_sizes and p != end):
        return MALFORMED
    p = end_row(s, p, q, kind, clustering_end, 0)
    if p > LAST_CODE and kind == ROW:
        store64(s + at.LAST_CLUSTERING, clustering)
        store64(s + at.LAST_CLUSTERING_END, clustering_stop)
    return p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _decode_row_times(s: int, p: int, q: int, flags: int) -> tuple[int, int]:
    """Decode the liveness and the deletion of a row, where its flags announce them. Return both ends, or MALFORMED."""
    timestamp = ttl = expires = has = 0
    if flags & _HAS_TIMESTAMP:
        timestamp, p = load_unsigned_vint(p)
        timestamp += load64_native(s + at.MIN_TIMESTAMP)
        has = 1
        if flags & _HAS_TTL:
            ttl, expires, p = read_times(s, p, at.MIN_TTL)
            if ttl < 0 or ttl > MOST_TTL:
                return MALFORMED, q
            has = 2
    q = put_liveness(s, q, has, timestamp, ttl, expires)
    timestamp = local = 0
    if flags & _HAS_DELETION:
        timestamp, local, p = read_times(s, p, at.MIN_TIMESTAMP)
    return p, put_deletion(s, q, (flags & _HAS_DELETION) >> 4, timestamp, local)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _read_sizes(s: int, p: int, end: int) -> tuple[int, int]:
    """Read what only SSTables have: the size of the rest of the row or marker, and the size of the one before it.

    :returns: the address after them, or CUT: the rest is not all there; and the end of the row or marker
    """
    size, p = load_unsigned_vint(p)
    if p > end or size < 1:
        return MALFORMED, end
    if size > end - p:
        store64(s + at.BYTES_MISSING, size - (end - p))
        return CUT, end
    end = p + size
    _, p = load_unsigned_vint(p)
    return (p if p <= end else MALFORMED), end


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _copy_clustering(s: int, p: int, end: int, size: int, q: int) -> tuple[int, int]:
    """Copy ``size`` clustering values (docs/formats.md, 2.4) to ``q`` in the form of change rows. Return both ends."""
    table = load64_native(s + at.DIRECTORY) + at.TABLE_BYTES * load64_native(s + at.TABLE)
    lengths = load64_native(table + at.TABLE_CLUSTERING_LENGTHS)
    store32(q, size)
    q += 4
    header = 0
    for place in range(size):
        if place & 31 == 0:
            header, p = load_unsigned_vint(p)
        state = (header >> (2 * (place & 31))) & 3
        if state:
            length = -1 if state & 2 else 0
        else:
            length = load32_native(lengths + 4 * place)
            if length < 0:
                length, p = load_unsigned_vint(p)
                if length < 0:
                    return MALFORMED, q
        if length > end - p or p > end:
            return MALFORMED, q
        if not fits(s, q, length + PADDING):
            return FULL, q
        store32(q, length)
        copy_bytes(q + 4, p, length)
        p += max(length, 0)
        q += 4 + max(length, 0)
    return p, q


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def decode_marker(s: int, p: int, end: int) -> int:
    """Decode a range tombstone's bound, or a boundary between two ranges, after its flags."""
    if end - p < 3:
        return MALFORMED
    kind, size = load8(p), load16(p + 1)
    bound = p + 3
    has_sizes = load64_native(s + at.HAS_SIZES)
    table = load64_native(s + at.DIRECTORY) + at.TABLE_BYTES * load64_native(s + at.TABLE)
    if size > load64_native(table + at.TABLE_CLUSTERING) or kind > _EXCLUSIVE_START or kind in (3, 4):
        return MALFORMED
    p, _ = _copy_clustering(s, bound, end, size, load64_native(s + at.HEAD_END))
    if p <= LAST_CODE:
        return p
    bound_end = p
    if has_sizes:
        p, end = _read_sizes(s, p, end)
        if p <= LAST_CODE:
            return p
    ends = kind not in (_INCLUSIVE_START, _EXCLUSIVE_START)
    begins = kind not in (_EXCLUSIVE_END, _INCLUSIVE_END)
    if ends == (load64_native(s + at.OPEN) == 0):
        return MALFORMED
    timestamp, local, p = read_times(s, p, at.MIN_TIMESTAMP)
    if ends:
        inclusive = kind in (_INCLUSIVE_END, _INCLUSIVE_END_EXCLUSIVE_START)
        outcome = put_range(s, bound, bound_end, size, inclusive, timestamp, local)
        if outcome <= LAST_CODE:
            return outcome
        store64(s + at.OPEN, 0)
    if begins:
        if ends:
            timestamp, local, p = read_times(s, p, at.MIN_TIMESTAMP)
        inclusive = kind in (_INCLUSIVE_START, _EXCLUSIVE_END_INCLUSIVE_START)
        open_range(s, bound, bound_end, size, inclusive, timestamp, local)
    return p if p == end or (p < end and not has_sizes) else MALFORMED


@njit(inline="always")  # type: ignore[untyped-decorator]
def open_range(s: int, bound: int, bound_end: int, size: int, inclusive: bool, timestamp: int, local: int) -> None:
    """Remember where a range begins that is deleted, and when it was."""
    store64(s + at.OPEN, bound)
    store64(s + at.OPEN_END, bound_end)
    store64(s + at.OPEN_SIZE, size)
    store64(s + at.OPEN_INCLUSIVE, inclusive)
    store64(s + at.OPEN_TIMESTAMP, timestamp)
    store64(s + at.OPEN_LOCAL, local)
    store64(s + at.LAST_CLUSTERING, 0)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_range(s: int, bound: int, bound_end: int, size: int, inclusive: bool, timestamp: int, local: int) -> int:
    """Write the change row of a range deletion from the open bound to this one. Return ``bound_end``, or FULL."""
    begin_row(s)
    start, start_end = load64_native(s + at.OPEN), load64_native(s + at.OPEN_END)
    p, q = _copy_clustering(s, start, start_end, load64_native(s + at.OPEN_SIZE), load64_native(s + at.HEAD_END))
    if p <= LAST_CODE:
        return p
    store8(q, load64_native(s + at.OPEN_INCLUSIVE))
    clustering_end = q + 1
    p, q = _copy_clustering(s, bound, bound_end, size, clustering_end)
    if p <= LAST_CODE:
        return p
    store8(q, inclusive)
    range_end = q + 1
    q = put_liveness(s, range_end, 0, 0, 0, 0)
    q = put_deletion(s, q, 1, timestamp, local)
    store64(q, 0)
    return end_row(s, p, q + 8, RANGE_DELETION, clustering_end, range_end)
