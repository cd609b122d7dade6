"""Kernels that decode rows, cells and range tombstone markers of a mutation, and write change rows.

:mod:`ringsync.formats.commitlog.mutation` explains the arguments. While a kernel reads a row, it collects the bytes of
its digest in the scratch, in the order of :mod:`ringsync.changes.digest`. ``q`` is an address in the scratch.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.digest import DIGEST_BYTES, store_digest
from ringsync.changes.schema import EXPIRING, LIVE, PARTITION_DELETION, RANGE_DELETION, ROW, STATIC, TOMBSTONE
from ringsync.compiled.memory import (
    KERNEL,
    PADDING,
    copy16,
    copy_bytes,
    copy_twice,
    load8,
    load16,
    load32_native,
    load64_native,
    load_unsigned_vint,
    store8,
    store32,
    store64,
)
from ringsync.formats.commitlog import state as at
from ringsync.formats.commitlog.state import FULL, LAST_CODE, MALFORMED

_NO_TIMESTAMP = -(2**63)
"""Timestamp of a deletion that deletes nothing; Cassandra writes it where the format needs a deletion."""
_SECONDS = 0xFFFFFFFF

_HAS_TIMESTAMP, _HAS_TTL, _HAS_DELETION, _HAS_ALL_COLUMNS = 0x04, 0x08, 0x10, 0x20
_IS_MARKER_OR_END, _HAS_COMPLEX_DELETION, _IS_EXTENDED, _IS_STATIC = 0x03, 0x40, 0x80, 0x01
_IS_DELETED, _IS_EXPIRING, _HAS_EMPTY_VALUE, _USE_ROW_TIMESTAMP, _USE_ROW_TTL = 0x01, 0x02, 0x04, 0x08, 0x10
_EXCLUSIVE_END, _INCLUSIVE_START, _EXCLUSIVE_END_INCLUSIVE_START = 0, 1, 2
_INCLUSIVE_END_EXCLUSIVE_START, _INCLUSIVE_END, _EXCLUSIVE_START = 5, 6, 7
_FEW_COLUMNS = 64
"""With fewer columns than this, a column subset is a bit mask."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def _room(s: int, cursor: int) -> int:
    """Return how much is left of the capacity that belongs to a cursor."""
    return load64_native(s + cursor - at.CURSOR_BYTES) - load64_native(s + cursor)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _fits(s: int, q: int, size: int) -> bool:
    """Tell whether ``size`` bytes fit into the scratch from ``q`` on."""
    return size <= load64_native(s + at.SCRATCH_END) - q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _read_times(s: int, p: int, least: int) -> tuple[int, int, int]:
    """Read a timestamp (µs) or TTL (s), a distance from ``least``, and a local time (s). Return both, and the end."""
    value, p = load_unsigned_vint(p)
    local, p = load_unsigned_vint(p)
    return value + load64_native(s + least), (local + load64_native(s + at.MIN_LOCAL)) & _SECONDS, p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _raise_write_time(s: int, timestamp: int) -> None:
    if timestamp > load64_native(s + at.WRITE_TIME):
        store64(s + at.WRITE_TIME, timestamp)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def decode_partition_deletion(s: int, p: int, end: int) -> int:
    """Decode the deletion of the whole partition."""
    timestamp, local, p = _read_times(s, p, at.MIN_TIMESTAMP)
    if p > end:
        return MALFORMED
    if timestamp == _NO_TIMESTAMP:
        return p
    q = load64_native(s + at.HEAD_END)
    _begin_row(s)
    store32(q, 0)
    q = _put_liveness(s, q + 4, 0, 0, 0, 0)
    q = _put_deletion(s, q, 1, timestamp, local)
    store64(q, 0)
    return _end_row(s, p, q + 8, PARTITION_DELETION, 0, 0)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def decode_row(s: int, p: int, end: int, flags: int, kind: int) -> int:
    """Decode a row, or the static row, after its flags."""
    is_static = 0
    if flags & _IS_EXTENDED:
        is_static = load8(p) & _IS_STATIC
        p += 1
    if is_static != (kind == STATIC) or flags & _IS_MARKER_OR_END:
        return MALFORMED
    table = load64_native(s + at.DIRECTORY) + at.TABLE_BYTES * load64_native(s + at.TABLE)
    size = load64_native(table + at.TABLE_CLUSTERING) if kind == ROW else 0
    _begin_row(s)
    p, q = _copy_clustering(s, p, end, size, load64_native(s + at.HEAD_END))
    if p <= LAST_CODE:
        return p
    clustering_end = q
    timestamp = ttl = expires = has = 0
    if flags & _HAS_TIMESTAMP:
        timestamp, p = load_unsigned_vint(p)
        timestamp += load64_native(s + at.MIN_TIMESTAMP)
        has = 1
        if flags & _HAS_TTL:
            ttl, expires, p = _read_times(s, p, at.MIN_TTL)
            has = 2
    q = _put_liveness(s, q, has, timestamp, ttl, expires)
    timestamp = local = 0
    if flags & _HAS_DELETION:
        timestamp, local, p = _read_times(s, p, at.MIN_TIMESTAMP)
    if p > end:
        return MALFORMED
    q = _put_deletion(s, q, (flags & _HAS_DELETION) >> 4, timestamp, local)
    p, q = _decode_cells(s, p, end, q, flags, s + (at.STATIC_MAP if kind == STATIC else at.REGULAR_MAP))
    if p <= LAST_CODE:
        return p
    return _end_row(s, p, q, kind, clustering_end, 0) if p <= end else MALFORMED


@njit(inline="always")  # type: ignore[untyped-decorator]
def _begin_row(s: int) -> None:
    store64(s + at.WRITE_TIME, _NO_TIMESTAMP)
    store64(s + at.FIRST_CELL, load64_native(s + at.CELLS))
    store64(s + at.FIRST_COMPLEX, load64_native(s + at.COMPLEX))


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
        if not _fits(s, q, length + PADDING):
            return FULL, q
        store32(q, length)
        copy_bytes(q + 4, p, length)
        p += max(length, 0)
        q += 4 + max(length, 0)
    return p, q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_liveness(s: int, q: int, has: int, timestamp: int, ttl: int, expires: int) -> int:
    """Write the row's liveness; ``has``: 0 none, 1 without TTL, 2 with it."""
    row = load64_native(s + at.ROWS)
    store8(load64_native(s + at.ROW_LIVENESS) + row, has)
    store64(s + at.ROW_TIMESTAMP, timestamp)
    store64(s + at.ROW_TTL, ttl)
    store64(s + at.ROW_EXPIRES, expires)
    store8(q, has)
    if has == 0:
        return q + 1
    _raise_write_time(s, timestamp)
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
def _put_deletion(s: int, q: int, has: int, timestamp: int, local: int) -> int:
    """Write the row's deletion, if it has one."""
    row = load64_native(s + at.ROWS)
    store8(load64_native(s + at.ROW_DELETION) + row, has)
    store8(q, has)
    if has == 0:
        return q + 1
    _raise_write_time(s, timestamp)
    store64(load64_native(s + at.ROW_DELETION_TIMESTAMP) + 8 * row, timestamp)
    store64(load64_native(s + at.ROW_DELETION_LOCAL) + 8 * row, local)
    store64(q + 1, timestamp)
    store64(q + 9, local)
    return q + 17


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode_cells(s: int, p: int, end: int, q: int, flags: int, m: int) -> tuple[int, int]:
    """Decode the row's columns; ``m``: see :func:`ringsync.formats.commitlog.mutation._read_columns`."""
    columns, count = load64_native(m), load64_native(m + 8)
    count_at = q
    q += 4
    missing = 0
    few = True
    if not flags & _HAS_ALL_COLUMNS:
        missing, p = load_unsigned_vint(p)
        if missing != 0 and count >= _FEW_COLUMNS:
            few = False
            p = _read_subset(s, p, end, count, missing)
            if p <= LAST_CODE:
                return p, q
    subset = load64_native(s + at.SUBSET)
    for place in range(count):
        if few:
            if missing != 0 and (missing >> place) & 1:
                continue
        elif load8(subset + place) == 0:
            continue
        column = load64_native(columns + 8 * place)
        if load64_native(column + at.COLUMN_IS_COMPLEX) == 0:
            p, q = _decode_cell(s, p, end, q, column, False)
        else:
            p, q = _decode_complex(s, p, end, q, column, flags)
        if p <= LAST_CODE:
            return p, q
    store32(count_at, load64_native(s + at.CELLS) - load64_native(s + at.FIRST_CELL))
    first, last = load64_native(s + at.FIRST_COMPLEX), load64_native(s + at.COMPLEX)
    if not _fits(s, q, 24 * (last - first) + PADDING):
        return FULL, q
    store32(q, last - first)
    q += 4
    for place in range(first, last):
        store64(q, load64_native(load64_native(s + at.COMPLEX_HASH) + 8 * place))
        store64(q + 8, load64_native(load64_native(s + at.COMPLEX_TIMESTAMP) + 8 * place))
        store64(q + 16, load64_native(load64_native(s + at.COMPLEX_LOCAL) + 8 * place))
        q += 24
    return p, q


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _read_subset(s: int, p: int, end: int, count: int, missing: int) -> int:
    """Read which of 64 or more columns a row has, as one byte per column.

    See docs/formats.md, 2.3; C: Columns.deserializeLargeSubset.
    """
    if missing < 0 or missing > count:
        return MALFORMED
    listed = count - missing
    present = 1
    if listed >= count // 2:
        listed, present = missing, 0
    subset = load64_native(s + at.SUBSET)
    for place in range(count):
        store8(subset + place, 1 - present)
    for _ in range(listed):
        if p >= end:
            return MALFORMED
        place, p = load_unsigned_vint(p)
        if place < 0 or place >= count:
            return MALFORMED
        store8(subset + place, present)
    return p


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode_complex(s: int, p: int, end: int, q: int, column: int, flags: int) -> tuple[int, int]:
    """Decode a multi-cell column: its deletion, if the row's flags announce deletions, and its cells."""
    if flags & _HAS_COMPLEX_DELETION:
        timestamp, local, p = _read_times(s, p, at.MIN_TIMESTAMP)
        if timestamp != _NO_TIMESTAMP:
            place = load64_native(s + at.COMPLEX)
            if _room(s, at.COMPLEX) == 0:
                return FULL, q
            store32(load64_native(s + at.COMPLEX_COLUMN) + 4 * place, load64_native(column + at.COLUMN_NUMBER))
            store64(load64_native(s + at.COMPLEX_HASH) + 8 * place, load64_native(column + at.COLUMN_HASH))
            store64(load64_native(s + at.COMPLEX_TIMESTAMP) + 8 * place, timestamp)
            store64(load64_native(s + at.COMPLEX_LOCAL) + 8 * place, local)
            store64(s + at.COMPLEX, place + 1)
            _raise_write_time(s, timestamp)
    count, p = load_unsigned_vint(p)
    if count < 0 or count > end - p:
        return MALFORMED, q
    for _ in range(count):
        p, q = _decode_cell(s, p, end, q, column, True)
        if p <= LAST_CODE:
            break
    return p, q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _decode_cell(s: int, p: int, end: int, q: int, column: int, has_path: bool) -> tuple[int, int]:
    """Decode a cell (docs/formats.md, 2.6)."""
    if p >= end:
        return MALFORMED, q
    flags = load8(p)
    p += 1
    timestamp = load64_native(s + at.ROW_TIMESTAMP)
    if not flags & _USE_ROW_TIMESTAMP:
        timestamp, p = load_unsigned_vint(p)
        timestamp += load64_native(s + at.MIN_TIMESTAMP)
        _raise_write_time(s, timestamp)
    ttl = local = 0
    kind = LIVE
    if flags & (_IS_DELETED | _IS_EXPIRING):
        if flags & _IS_DELETED and flags & _IS_EXPIRING:
            return MALFORMED, q
        kind = TOMBSTONE if flags & _IS_DELETED else EXPIRING
        ttl, local, p = _read_cell_expiry(s, p, flags)
    cell = load64_native(s + at.CELLS)
    if _room(s, at.CELLS) == 0:
        return FULL, q
    store64(q, load64_native(column + at.COLUMN_HASH))
    q += 8
    path_length = -1
    if has_path:
        path_length, p = load_unsigned_vint(p)
        if path_length < 0 or path_length > end - p:
            return MALFORMED, q
        if not _fits(s, q, path_length + PADDING):
            return FULL, q
        store8(load64_native(s + at.CELL_HAS_PATH) + cell, 1)
        _append(s, at.PATHS, at.PATH_BYTES, q + 4, p, path_length)
        p += path_length
    store32(load64_native(s + at.PATH_ENDS) + 4 * cell + 4, load64_native(s + at.PATH_BYTES))
    store32(q, path_length)
    q += 4 + max(path_length, 0)
    length, p = _value_length(p, flags, column)
    if length < 0 or length > end - p:
        return MALFORMED, q
    if not _fits(s, q, length + PADDING):
        return FULL, q
    q = _put_cell(s, q, cell, kind, timestamp, ttl, local, p, length)
    store32(load64_native(s + at.CELL_COLUMN) + 4 * cell, load64_native(column + at.COLUMN_NUMBER))
    store64(s + at.CELLS, cell + 1)
    return p + length, q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _value_length(p: int, flags: int, column: int) -> tuple[int, int]:
    """Return the length of a cell's value, and its address."""
    if flags & _HAS_EMPTY_VALUE:
        return 0, p
    length = load64_native(column + at.COLUMN_FIXED)
    if length < 0:
        return load_unsigned_vint(p)
    return length, p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _read_cell_expiry(s: int, p: int, flags: int) -> tuple[int, int, int]:
    """Read TTL (s) and local deletion or expiration time (s) of a cell. Return them and the address after them."""
    if flags & _USE_ROW_TTL:
        return load64_native(s + at.ROW_TTL), load64_native(s + at.ROW_EXPIRES), p
    local, p = load_unsigned_vint(p)
    ttl = 0
    if flags & _IS_EXPIRING:
        ttl, p = load_unsigned_vint(p)
        ttl += load64_native(s + at.MIN_TTL)
    return ttl, (local + load64_native(s + at.MIN_LOCAL)) & _SECONDS, p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_cell(
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
        _append(s, at.VALUES, at.VALUE_BYTES, q + 4, value, length)
        q += 4 + length
    store32(load64_native(s + at.VALUE_ENDS) + 4 * cell + 4, load64_native(s + at.VALUE_BYTES))
    return q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _append(s: int, output: int, cursor: int, q: int, p: int, length: int) -> None:
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
def decode_marker(s: int, p: int, end: int) -> int:
    """Decode a range tombstone's bound, or a boundary between two ranges, after its flags."""
    if end - p < 3:
        return MALFORMED
    kind, size = load8(p), load16(p + 1)
    bound = p + 3
    table = load64_native(s + at.DIRECTORY) + at.TABLE_BYTES * load64_native(s + at.TABLE)
    if size > load64_native(table + at.TABLE_CLUSTERING) or kind > _EXCLUSIVE_START or kind in (3, 4):
        return MALFORMED
    p, _ = _copy_clustering(s, bound, end, size, load64_native(s + at.HEAD_END))
    if p <= LAST_CODE:
        return p
    ends = kind not in (_INCLUSIVE_START, _EXCLUSIVE_START)
    begins = kind not in (_EXCLUSIVE_END, _INCLUSIVE_END)
    if ends == (load64_native(s + at.OPEN) == 0):
        return MALFORMED
    timestamp, local, p = _read_times(s, p, at.MIN_TIMESTAMP)
    if ends:
        inclusive = kind in (_INCLUSIVE_END, _INCLUSIVE_END_EXCLUSIVE_START)
        outcome = _put_range(s, end, bound, size, inclusive, timestamp, local)
        if outcome <= LAST_CODE:
            return outcome
        store64(s + at.OPEN, 0)
    if begins:
        if ends:
            timestamp, local, p = _read_times(s, p, at.MIN_TIMESTAMP)
        store64(s + at.OPEN, bound)
        store64(s + at.OPEN_SIZE, size)
        store64(s + at.OPEN_INCLUSIVE, kind in (_INCLUSIVE_START, _EXCLUSIVE_END_INCLUSIVE_START))
    return p if p <= end else MALFORMED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_range(s: int, end: int, bound: int, size: int, inclusive: bool, timestamp: int, local: int) -> int:
    """Write the change row of a range deletion from the open bound to this one."""
    _begin_row(s)
    start = load64_native(s + at.OPEN)
    p, q = _copy_clustering(s, start, end, load64_native(s + at.OPEN_SIZE), load64_native(s + at.HEAD_END))
    if p <= LAST_CODE:
        return p
    store8(q, load64_native(s + at.OPEN_INCLUSIVE))
    clustering_end = q + 1
    p, q = _copy_clustering(s, bound, end, size, clustering_end)
    if p <= LAST_CODE:
        return p
    store8(q, inclusive)
    range_end = q + 1
    q = _put_liveness(s, range_end, 0, 0, 0, 0)
    q = _put_deletion(s, q, 1, timestamp, local)
    store64(q, 0)
    return _end_row(s, p, q + 8, RANGE_DELETION, clustering_end, range_end)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _end_row(s: int, p: int, q: int, kind: int, clustering_end: int, range_end: int) -> int:
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
        _room(s, at.ROWS) <= 1
        or key_length > _room(s, at.KEY_BYTES)
        or clustering > _room(s, at.CLUSTERING_BYTES)
        or bound > _room(s, at.RANGE_BYTES)
    ):
        return FULL
    _append_only(s, at.KEYS, at.KEY_BYTES, load64_native(s + at.KEY), key_length)
    _append_only(s, at.CLUSTERINGS, at.CLUSTERING_BYTES, head, clustering)
    _append_only(s, at.RANGES, at.RANGE_BYTES, clustering_end, bound)
    store32(load64_native(s + at.KEY_ENDS) + 4 * row + 4, load64_native(s + at.KEY_BYTES))
    store32(load64_native(s + at.CLUSTERING_ENDS) + 4 * row + 4, load64_native(s + at.CLUSTERING_BYTES))
    store32(load64_native(s + at.RANGE_ENDS) + 4 * row + 4, load64_native(s + at.RANGE_BYTES))
    store32(load64_native(s + at.ROW_CELLS) + 4 * row + 4, load64_native(s + at.CELLS))
    store32(load64_native(s + at.ROW_COMPLEX) + 4 * row + 4, load64_native(s + at.COMPLEX))
    store8(load64_native(s + at.ROW_KIND) + row, kind)
    store64(load64_native(s + at.ROW_TOKEN) + 8 * row, load64_native(s + at.TOKEN))
    store64(load64_native(s + at.ROW_POSITION) + 8 * row, load64_native(s + at.POSITION))
    store64(load64_native(s + at.ROW_WRITE_TIME) + 8 * row, load64_native(s + at.WRITE_TIME))
    scratch = load64_native(s + at.SCRATCH)
    copy16(load64_native(s + at.ROW_TABLE_ID) + 16 * row, scratch)
    store8(scratch + 16, kind)
    store_digest(load64_native(s + at.ROW_DIGEST) + DIGEST_BYTES * row, scratch, q - scratch)
    store64(s + at.ROWS, row + 1)
    return p
