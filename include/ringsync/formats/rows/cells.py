"""Kernels that decode the cells of rows (docs/formats.md, 2.6; C: db/rows/Cell).

:mod:`ringsync.formats.rows.decode` explains the arguments.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.schema import EXPIRING, LIVE, TOMBSTONE
from ringsync.compiled.memory import (
    KERNEL,
    PADDING,
    load8,
    load64_native,
    load_unsigned_vint,
    store8,
    store32,
    store64,
)
from ringsync.formats.rows import state as at
from ringsync.formats.rows.output import (
    NO_TIMESTAMP,
    append,
    fits,
    put_cell,
    put_plain_cell,
    raise_write_time,
    room,
)
from ringsync.formats.rows.state import FULL, LAST_CODE, MALFORMED

_SECONDS = 0xFFFFFFFF
_HAS_ALL_COLUMNS, _HAS_COMPLEX_DELETION = 0x20, 0x40
_IS_DELETED, _IS_EXPIRING, _HAS_EMPTY_VALUE, _USE_ROW_TIMESTAMP, _USE_ROW_TTL = 0x01, 0x02, 0x04, 0x08, 0x10
MOST_TTL = 2**31 - 1
"""Cassandra's TTLs are int32, and not negative (s)."""
_FEW_COLUMNS = 64
"""With fewer columns than this, a column subset is a bit mask."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def read_times(s: int, p: int, least: int) -> tuple[int, int, int]:
    """Read a timestamp (µs) or TTL (s), a distance from ``least``, and a local time (s). Return both, and the end."""
    value, p = load_unsigned_vint(p)
    local, p = load_unsigned_vint(p)
    return value + load64_native(s + least), (local + load64_native(s + at.MIN_LOCAL)) & _SECONDS, p


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def decode_cells(s: int, p: int, end: int, q: int, flags: int, m: int) -> tuple[int, int]:
    """Decode the row's columns.

    :param m: address of two words: address of the addresses of the columns' descriptions, and their number
    """
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
        if load64_native(column + at.COLUMN_NUMBER) < 0:
            p = _skip_column(s, p, end, column, flags)
        elif load64_native(column + at.COLUMN_IS_COMPLEX) == 0:
            p, q = _decode_cell(s, p, end, q, column, False)
        else:
            p, q = _decode_complex(s, p, end, q, column, flags)
        if p <= LAST_CODE:
            return p, q
    store32(count_at, load64_native(s + at.CELLS) - load64_native(s + at.FIRST_CELL))
    q = put_complex_deletions(s, q)
    return (p if q > LAST_CODE else FULL), q


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_complex_deletions(s: int, q: int) -> int:
    """Write the complex deletions of a row into the bytes of its digest. Return the address after them, or FULL."""
    first, last = load64_native(s + at.FIRST_COMPLEX), load64_native(s + at.COMPLEX)
    if not fits(s, q, 24 * (last - first) + PADDING):
        return FULL
    store32(q, last - first)
    q += 4
    for place in range(first, last):
        store64(q, load64_native(load64_native(s + at.COMPLEX_HASH) + 8 * place))
        store64(q + 8, load64_native(load64_native(s + at.COMPLEX_TIMESTAMP) + 8 * place))
        store64(q + 16, load64_native(load64_native(s + at.COMPLEX_LOCAL) + 8 * place))
        q += 24
    return q


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
        timestamp, local, p = read_times(s, p, at.MIN_TIMESTAMP)
        if timestamp != NO_TIMESTAMP:
            place = load64_native(s + at.COMPLEX)
            if room(s, at.COMPLEX) == 0:
                return FULL, q
            store32(load64_native(s + at.COMPLEX_COLUMN) + 4 * place, load64_native(column + at.COLUMN_NUMBER))
            store64(load64_native(s + at.COMPLEX_HASH) + 8 * place, load64_native(column + at.COLUMN_HASH))
            store64(load64_native(s + at.COMPLEX_TIMESTAMP) + 8 * place, timestamp)
            store64(load64_native(s + at.COMPLEX_LOCAL) + 8 * place, local)
            store64(s + at.COMPLEX, place + 1)
            raise_write_time(s, timestamp)
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
    flags, kind, timestamp, ttl, local, p = _read_cell_times(s, p, end)
    if p <= LAST_CODE:
        return p, q
    cell = load64_native(s + at.CELLS)
    if room(s, at.CELLS) == 0:
        return FULL, q
    store32(load64_native(s + at.CELL_COLUMN) + 4 * cell, load64_native(column + at.COLUMN_NUMBER))
    if not has_path and load64_native(s + at.IS_PLAIN):
        return _decode_plain_value(s, p, end, cell, column, flags, kind, timestamp, ttl, local), q
    store64(q, load64_native(column + at.COLUMN_HASH))
    q += 8
    path_length = -1
    if has_path:
        path_length, p = load_unsigned_vint(p)
        if path_length < 0 or path_length > end - p:
            return MALFORMED, q
        if not fits(s, q, path_length + PADDING):
            return FULL, q
        store8(load64_native(s + at.CELL_HAS_PATH) + cell, 1)
        append(s, at.PATHS, at.PATH_BYTES, q + 4, p, path_length)
        p += path_length
    store32(load64_native(s + at.PATH_ENDS) + 4 * cell + 4, load64_native(s + at.PATH_BYTES))
    store32(q, path_length)
    q += 4 + max(path_length, 0)
    length, p = _value_length(p, flags, column)
    if length < 0 or length > end - p:
        return MALFORMED, q
    if not fits(s, q, length + PADDING):
        return FULL, q
    q = put_cell(s, q, cell, kind, timestamp, ttl, local, p, length)
    store64(s + at.CELLS, cell + 1)
    return p + length, q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _read_cell_times(s: int, p: int, end: int) -> tuple[int, int, int, int, int, int]:
    """Read what comes before a cell's path and value.

    :returns: flags, kind, timestamp (µs), TTL (s), local time (s), and the address after them, or MALFORMED
    """
    if p >= end:
        return 0, LIVE, 0, 0, 0, MALFORMED
    flags = load8(p)
    p += 1
    timestamp = load64_native(s + at.ROW_TIMESTAMP)
    if not flags & _USE_ROW_TIMESTAMP:
        timestamp, p = load_unsigned_vint(p)
        timestamp += load64_native(s + at.MIN_TIMESTAMP)
        raise_write_time(s, timestamp)
    if not flags & (_IS_DELETED | _IS_EXPIRING):
        return flags, LIVE, timestamp, 0, 0, p
    ttl, local, p = _read_cell_expiry(s, p, flags)
    if (flags & _IS_DELETED and flags & _IS_EXPIRING) or ttl < 0 or ttl > MOST_TTL:
        p = MALFORMED
    return flags, TOMBSTONE if flags & _IS_DELETED else EXPIRING, timestamp, ttl, local, p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _decode_plain_value(
    s: int, p: int, end: int, cell: int, column: int, flags: int, kind: int, timestamp: int, ttl: int, local: int
) -> int:
    """Read the length of a plain cell's value, and write where it is. Return the address after it, or MALFORMED."""
    length, p = _value_length(p, flags, column)
    if length < 0 or length > end - p:
        return MALFORMED
    put_plain_cell(s, cell, kind, timestamp, ttl, local, p, length)
    store64(s + at.CELLS, cell + 1)
    return p + length


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


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _skip_column(s: int, p: int, end: int, column: int, flags: int) -> int:
    """Read over the cells of a column that is not wanted."""
    count, is_complex = 1, load64_native(column + at.COLUMN_IS_COMPLEX)
    if is_complex:
        if flags & _HAS_COMPLEX_DELETION:
            _, _, p = read_times(s, p, at.MIN_TIMESTAMP)
        count, p = load_unsigned_vint(p)
    if count < 0 or count > end - p:
        return MALFORMED
    for _ in range(count):
        if p >= end:
            return MALFORMED
        flags = load8(p)
        p += 1
        if not flags & _USE_ROW_TIMESTAMP:
            _, p = load_unsigned_vint(p)
        if flags & (_IS_DELETED | _IS_EXPIRING):
            _, _, p = _read_cell_expiry(s, p, flags)
        length = 0
        if is_complex:
            length, p = load_unsigned_vint(p)
            if length < 0 or length > end - p:
                return MALFORMED
        length, p = _value_length(p + length, flags, column)
        if length < 0 or length > end - p:
            return MALFORMED
        p += length
    return p
