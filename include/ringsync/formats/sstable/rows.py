"""Kernel that decodes the partitions of an SSTable's Data.db to change rows, one window of bytes at a time.

A window begins where the last one stopped: at a partition, or at a row or marker inside one. So memory does not grow
with the file or the partition. What must outlive a window is copied: the partition's key, and the open bound of a range
tombstone. A range that is open where a window ends is cut there: its part up to the last row is written, and the rest
begins behind that row. Both parts together delete what the range deletes.

The layout is in docs/formats.md, 4 (C: io/sstable/format/SortedTableWriter, db/rows/UnfilteredSerializer,
db/DeletionTime). :mod:`ringsync.formats.rows.decode` explains ``s``, ``p`` and ``end``. ``r`` is the address of the
place where the kernel is in the file: int64[``WORDS``] with the words below.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.schema import ROW, STATIC
from ringsync.compiled.memory import (
    KERNEL,
    copy_bytes,
    load8,
    load16,
    load32,
    load32_signed,
    load64,
    load64_native,
    store64,
)
from ringsync.formats.rows import state as at
from ringsync.formats.rows.decode import decode_marker, decode_row, open_range, put_partition_deletion, put_range
from ringsync.formats.rows.output import begin_partition, mark, room, undo
from ringsync.formats.rows.state import CUT, DECODED, FULL, LAST_CODE, MALFORMED

WORDS = 12
(
    NEXT,
    END,
    IS_LAST,
    DATA_POSITION,
    INSIDE,
    TABLE_ID,
    KEY,
    KEY_LENGTH,
    BOUND,
    HAS_STATIC,
    HAS_SHORT_DELETIONS,
    PARTITIONS,
) = range(0, WORDS * 8, 8)
"""Byte offsets of words: address of the next unfiltered or partition; address after the window; whether the data ends
there; position in the data minus address; whether ``NEXT`` is inside a partition; address of the table's id; address of
room for a key, and the key's length; address of room for an open bound; whether each partition has a static row;
whether deletions have the form of oa and da; number of partitions that began."""

LONGEST_BOUND = 2**16 + 64
"""Most bytes of a clustering: Cassandra refuses values of 64 KiB or more together; a header comes before 32 of them."""
ROOM = LONGEST_BOUND + 16
"""Bytes of the room for a partition key, and of that for a bound."""
_SPARE_ROWS, _SPARE_BYTES = 3, 2 * ROOM
"""Room that is kept for the part of a range that is cut at the end of a batch."""

_END, _IS_MARKER = 0x01, 0x02
_LIVE = 0x80
_NEVER = -(2**63)
_SECONDS = 0xFFFFFFFF


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def decode_partitions(s: int, r: int) -> int:
    """Decode from ``NEXT`` on.

    :returns: DECODED: the window is read up to its end; CUT: what begins at ``NEXT`` goes on behind the window; FULL:
        the batch is full; MALFORMED, SHADOWABLE: what begins at ``NEXT`` cannot be decoded
    """
    if load64_native(r + INSIDE):
        begin_partition(s, 0, load64_native(r + TABLE_ID), load64_native(r + KEY), load64_native(r + KEY_LENGTH))
    store64(s + at.LAST_CLUSTERING, 0)
    outcome = _decode(s, r)
    if load64_native(r + INSIDE) and load64_native(s + at.OPEN):
        _cut_range(s, r)
    return outcome


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode(s: int, r: int) -> int:
    end = load64_native(r + END)
    while True:
        p = load64_native(r + NEXT)
        if p >= end:
            return MALFORMED if load64_native(r + INSIDE) and load64_native(r + IS_LAST) else DECODED
        if (
            room(s, at.ROWS) <= _SPARE_ROWS
            or room(s, at.KEY_BYTES) <= _SPARE_BYTES
            or room(s, at.CLUSTERING_BYTES) <= _SPARE_BYTES
            or room(s, at.RANGE_BYTES) <= _SPARE_BYTES
        ):
            return FULL
        mark(s)
        store64(s + at.POSITION, p + load64_native(r + DATA_POSITION))
        p = _decode_unfiltered(s, r, p, end) if load64_native(r + INSIDE) else _decode_header(s, r, p, end)
        if p <= LAST_CODE:
            undo(s)
            # Without the rest of the bytes nobody knows what they mean.
            return CUT if p == MALFORMED and load64_native(r + IS_LAST) == 0 else p
        store64(r + NEXT, p)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode_header(s: int, r: int, p: int, end: int) -> int:
    """Decode key, deletion and static row of a partition."""
    if end - p < 3:
        return MALFORMED
    length = load16(p)
    p += 2
    # Cassandra refuses empty keys.
    if length == 0 or length > end - p:
        return MALFORMED
    key = load64_native(r + KEY)
    copy_bytes(key, p, length)
    p += length
    timestamp, local, p = _read_deletion(r, p)
    if p > end:
        return MALFORMED
    begin_partition(s, 0, load64_native(r + TABLE_ID), key, length)
    if timestamp != _NEVER:
        p = put_partition_deletion(s, p, timestamp, local)
    if p > LAST_CODE and load64_native(r + HAS_STATIC):
        p = _decode_static(s, p, end)
    if p > LAST_CODE:
        store64(r + KEY_LENGTH, length)
        store64(r + INSIDE, 1)
        store64(r + PARTITIONS, load64_native(r + PARTITIONS) + 1)
        store64(s + at.OPEN, 0)
    return p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _read_deletion(r: int, p: int) -> tuple[int, int, int]:
    """Read a partition's deletion: time (µs), local deletion time (s), and the address after it."""
    if load64_native(r + HAS_SHORT_DELETIONS):
        if load8(p) & _LIVE:
            return _NEVER, 0, p + 1
        return load64(p), load32(p + 8), p + 12
    return load64(p + 4), load32_signed(p) & _SECONDS, p + 12


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode_static(s: int, p: int, end: int) -> int:
    """Decode a static row; an empty one leaves nothing."""
    if p >= end:
        return MALFORMED
    rows = load64_native(s + at.ROWS)
    clusterings, keys = load64_native(s + at.CLUSTERING_BYTES), load64_native(s + at.KEY_BYTES)
    p = decode_row(s, p + 1, end, load8(p), STATIC)
    if (
        p > LAST_CODE
        and load64_native(s + at.CELLS) == load64_native(s + at.FIRST_CELL)
        and load64_native(s + at.COMPLEX) == load64_native(s + at.FIRST_COMPLEX)
    ):
        store64(s + at.ROWS, rows)
        store64(s + at.CLUSTERING_BYTES, clusterings)
        store64(s + at.KEY_BYTES, keys)
    return p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _decode_unfiltered(s: int, r: int, p: int, end: int) -> int:
    """Decode a row, a marker or the end of the partition."""
    flags = load8(p)
    if flags & _END:
        if load64_native(s + at.OPEN):
            return MALFORMED
        store64(r + INSIDE, 0)
        return p + 1
    if flags & _IS_MARKER:
        p = decode_marker(s, p + 1, end)
        size = load64_native(s + at.OPEN_END) - load64_native(s + at.OPEN) if load64_native(s + at.OPEN) else 0
    else:
        p = decode_row(s, p + 1, end, flags, ROW)
        size = load64_native(s + at.LAST_CLUSTERING_END) - load64_native(s + at.LAST_CLUSTERING)
    return p if p <= LAST_CODE or size <= LONGEST_BOUND else MALFORMED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _cut_range(s: int, r: int) -> None:
    """Write the open range up to the last row of this window, and keep the rest for the next one."""
    kept = load64_native(r + BOUND)
    first, stop = load64_native(s + at.LAST_CLUSTERING), load64_native(s + at.LAST_CLUSTERING_END)
    timestamp, local = load64_native(s + at.OPEN_TIMESTAMP), load64_native(s + at.OPEN_LOCAL)
    size, inclusive = load64_native(s + at.OPEN_SIZE), load64_native(s + at.OPEN_INCLUSIVE)
    if first:
        table = load64_native(s + at.DIRECTORY)
        size, inclusive = load64_native(table + at.TABLE_CLUSTERING), 0
        put_range(s, first, stop, size, True, timestamp, local)
    else:
        first, stop = load64_native(s + at.OPEN), load64_native(s + at.OPEN_END)
    if first != kept:
        copy_bytes(kept, first, stop - first)
    open_range(s, kept, kept + stop - first, size, inclusive, timestamp, local)
