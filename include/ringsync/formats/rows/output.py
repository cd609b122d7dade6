"""Kernels that write change rows, and the bytes that their digests cover.

:mod:`ringsync.formats.rows.decode` explains the arguments.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.digest import DIGEST_BYTES, store_digest
from ringsync.changes.schema import EXPIRING, LIVE, TOMBSTONE
from ringsync.compiled.memory import (
    KERNEL,
    copy16,
    copy_bytes,
    copy_twice,
    load64_native,
    store8,
    store32,
    store64,
)
from ringsync.cql.murmur3 import token_of
from ringsync.formats.rows import state as at
from ringsync.formats.rows.state import FULL

NO_TIMESTAMP = -(2**63)
"""Timestamp of a deletion that deletes nothing; Cassandra writes it where the format needs a deletion."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def room(s: int, cursor: int) -> int:
    """Return how much is left of the capacity that belongs to a cursor."""
    return load64_native(s + cursor - at.CURSOR_BYTES) - load64_native(s + cursor)


@njit(inline="always")  # type: ignore[untyped-decorator]
def fits(s: int, q: int, size: int) -> bool:
    """Tell whether ``size`` bytes fit into the scratch from ``q`` on."""
    return size <= load64_native(s + at.SCRATCH_END) - q


@njit(inline="always")  # type: ignore[untyped-decorator]
def raise_write_time(s: int, timestamp: int) -> None:
    if timestamp > load64_native(s + at.WRITE_TIME):
        store64(s + at.WRITE_TIME, timestamp)


@njit(inline="always")  # type: ignore[untyped-decorator]
def mark(s: int) -> None:
    """Remember the output so far, for :func:`undo`."""
    for cursor in range(at.CURSORS[0], at.CURSORS[1], 8):
        store64(s + cursor + at.CURSOR_BYTES, load64_native(s + cursor))


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def undo(s: int) -> None:
    """Forget the output since :func:`mark`."""
    has_path = load64_native(s + at.CELL_HAS_PATH)
    for cell in range(load64_native(s + at.CELLS + at.CURSOR_BYTES), load64_native(s + at.CELLS) + 1):
        store8(has_path + cell, 0)
    for cursor in range(at.CURSORS[0], at.CURSORS[1], 8):
        store64(s + cursor, load64_native(s + cursor + at.CURSOR_BYTES))
    store64(s + at.KEY_PLACE, -1)


@njit(inline="always")  # type: ignore[untyped-decorator]
def begin_partition(s: int, table: int, table_id: int, key: int, length: int) -> None:
    """Remember the partition, and write the first bytes of its rows' digests.

    :param table: number of the table in the directory; ``table_id``: address of its id
    :param key: address of the partition key, with ``length`` bytes; it stays there while rows of the partition are read
    """
    store64(s + at.TABLE, table)
    store64(s + at.KEY, key)
    store64(s + at.KEY_LENGTH, length)
    store64(s + at.TOKEN, token_of(key, length))
    scratch = load64_native(s + at.SCRATCH)
    copy_bytes(scratch, table_id, 16)
    store32(scratch + 17, length)
    copy_bytes(scratch + 21, key, length)
    store64(s + at.HEAD_END, scratch + 21 + length)
    store64(s + at.KEY_PLACE, -1)


@njit(inline="always")  # type: ignore[untyped-decorator]
def begin_row(s: int) -> None:
    store64(s + at.WRITE_TIME, NO_TIMESTAMP)
    store64(s + at.FIRST_CELL, load64_native(s + at.CELLS))
    store64(s + at.FIRST_COMPLEX, load64_native(s + at.COMPLEX))


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_liveness(s: int, q: int, has: int, timestamp: int, ttl: int, expires: int) -> int:
    """Write the row's liveness; ``has``: 0 none, 1 without TTL, 2 with it."""
    row = load64_native(s + at.ROWS)
    store8(load64_native(s + at.ROW_LIVENESS) + row, has)
    store64(s + at.ROW_TIMESTAMP, timestamp)
    store64(s + at.ROW_TTL, ttl)
    store64(s + at.ROW_EXPIRES, expires)
    store8(q, has)
    if has == 0:
        return q + 1
    raise_write_time(s, timestamp)
    store64(load64_native(s + at.ROW_LIVENESS_TIMESTAMP) + 8 * row, timestamp)
    store64(q + 1, timestamp)
    if has == 1:
        return q + 9
    store32(load64_native(s + at.ROW_LIVENESS_TTL) + 4 * row, ttl)
    store64(load64_native(s + at.ROW_LIVENESS_EXPIRES) + 8 * row, expires)
    store32(q + 9, ttl)
    store64(q + 13, expires)
    return q + 21


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_deletion(s: int, q: int, has: int, timestamp: int, local: int) -> int:
    """Write the row's deletion, if it has one."""
    row = load64_native(s + at.ROWS)
    store8(load64_native(s + at.ROW_DELETION) + row, has)
    store8(q, has)
    if has == 0:
        return q + 1
    raise_write_time(s, timestamp)
    store64(load64_native(s + at.ROW_DELETION_TIMESTAMP) + 8 * row, timestamp)
    store64(load64_native(s + at.ROW_DELETION_LOCAL) + 8 * row, local)
    store64(q + 1, timestamp)
    store64(q + 9, local)
    return q + 17


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_cell(
    s: int, q: int, cell: int, kind: int, timestamp: int, ttl: int, local: int, value: int, length: int
) -> int:
    """Write a cell's content, except column and path."""
    store64(load64_native(s + at.CELL_TIMESTAMP) + 8 * cell, timestamp)
    store8(load64_native(s + at.CELL_KIND) + cell, kind)
    store8(q, kind)
    store64(q + 1, timestamp)
    q += 9
    if kind == TOMBSTONE:
        store64(load64_native(s + at.CELL_LOCAL) + 8 * cell, local)
        store64(q, local)
        q += 8
    else:
        if kind == EXPIRING:
            store32(load64_native(s + at.CELL_TTL) + 4 * cell, ttl)
            store64(load64_native(s + at.CELL_LOCAL) + 8 * cell, local)
            store32(q, ttl)
            store64(q + 4, local)
            q += 12
        store32(q, length)
        append(s, at.VALUES, at.VALUE_BYTES, q + 4, value, length)
        q += 4 + length
    store32(load64_native(s + at.VALUE_ENDS) + 4 * cell + 4, load64_native(s + at.VALUE_BYTES))
    return q


@njit(inline="always")  # type: ignore[untyped-decorator]
def append(s: int, output: int, cursor: int, q: int, p: int, length: int) -> None:
    """Append bytes to a column and copy them to ``q``. The caller's check of the scratch covers the column, too."""
    size = load64_native(s + cursor)
    copy_twice(load64_native(s + output) + size, q, p, length)
    store64(s + cursor, size + length)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _append_only(s: int, output: int, cursor: int, p: int, length: int) -> None:
    """Append bytes to a column. The caller has checked that there is room."""
    size = load64_native(s + cursor)
    copy_bytes(load64_native(s + output) + size, p, length)
    store64(s + cursor, size + length)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def end_row(s: int, p: int, q: int, kind: int, clustering_end: int, range_end: int) -> int:
    """Write the fields that all rows have. Return ``p``, or FULL.

    :param clustering_end: address after the clustering in the scratch; 0: it is null
    :param range_end: address after the range's end in the scratch; 0: it is null
    """
    row, head = load64_native(s + at.ROWS), load64_native(s + at.HEAD_END)
    clustering = clustering_end - head if clustering_end else 0
    bound = range_end - clustering_end if range_end else 0
    key_length = load64_native(s + at.KEY_LENGTH)
    # One row always stays free, because a row's fields are written before this check.
    if (
        room(s, at.ROWS) <= 1
        or key_length > room(s, at.KEY_BYTES)
        or clustering > room(s, at.CLUSTERING_BYTES)
        or bound > room(s, at.RANGE_BYTES)
    ):
        return FULL
    _append_only(s, at.CLUSTERINGS, at.CLUSTERING_BYTES, head, clustering)
    _append_only(s, at.RANGES, at.RANGE_BYTES, clustering_end, bound)
    store32(load64_native(s + at.CLUSTERING_ENDS) + 4 * row + 4, load64_native(s + at.CLUSTERING_BYTES))
    store32(load64_native(s + at.RANGE_ENDS) + 4 * row + 4, load64_native(s + at.RANGE_BYTES))
    store32(load64_native(s + at.ROW_CELLS) + 4 * row + 4, load64_native(s + at.CELLS))
    store32(load64_native(s + at.ROW_COMPLEX) + 4 * row + 4, load64_native(s + at.COMPLEX))
    store8(load64_native(s + at.ROW_KIND) + row, kind)
    store64(load64_native(s + at.ROW_TOKEN) + 8 * row, load64_native(s + at.TOKEN))
    store64(load64_native(s + at.ROW_POSITION) + 8 * row, load64_native(s + at.POSITION))
    store64(load64_native(s + at.ROW_WRITE_TIME) + 8 * row, load64_native(s + at.WRITE_TIME))
    store64(s + at.ROWS, row + 1)
    if load64_native(s + at.IS_PLAIN):
        _put_shared_key(s, row, key_length)
        return p
    _append_only(s, at.KEYS, at.KEY_BYTES, load64_native(s + at.KEY), key_length)
    store32(load64_native(s + at.KEY_ENDS) + 4 * row + 4, load64_native(s + at.KEY_BYTES))
    scratch = load64_native(s + at.SCRATCH)
    copy16(load64_native(s + at.ROW_TABLE_ID) + 16 * row, scratch)
    store8(scratch + 16, kind)
    store_digest(load64_native(s + at.ROW_DIGEST) + DIGEST_BYTES * row, scratch, q - scratch)
    return p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_shared_key(s: int, row: int, length: int) -> None:
    """Write where a plain row's partition key is. The caller has checked that there is room for another one."""
    place = load64_native(s + at.KEY_PLACE)
    if place < 0:
        place = load64_native(s + at.KEY_BYTES)
        _append_only(s, at.KEYS, at.KEY_BYTES, load64_native(s + at.KEY), length)
        store64(s + at.KEY_PLACE, place)
    store32(load64_native(s + at.KEY_ENDS) + 4 * row, place)
    store32(load64_native(s + at.KEY_LENGTHS) + 4 * row, length)


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_plain_cell(s: int, cell: int, kind: int, timestamp: int, ttl: int, local: int, value: int, length: int) -> None:
    """Write a plain cell's content, except its column."""
    store64(load64_native(s + at.CELL_TIMESTAMP) + 8 * cell, timestamp)
    store8(load64_native(s + at.CELL_KIND) + cell, kind)
    if kind != LIVE:
        store32(load64_native(s + at.CELL_TTL) + 4 * cell, ttl)
        store64(load64_native(s + at.CELL_LOCAL) + 8 * cell, local)
    store32(load64_native(s + at.VALUE_ENDS) + 4 * cell, value - load64_native(s + at.BASE))
    store32(load64_native(s + at.VALUE_LENGTHS) + 4 * cell, length)
