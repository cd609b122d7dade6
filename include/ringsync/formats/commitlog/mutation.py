"""Kernels that decode mutations to change rows (docs/formats.md, 2; C: db/Mutation.MutationSerializer,
db/partitions/PartitionUpdate, db/rows/UnfilteredSerializer).

:mod:`ringsync.formats.rows.decode` explains the arguments and decodes what an SSTable has, too: rows and markers.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.schema import ROW, STATIC
from ringsync.compiled.memory import (
    KERNEL,
    load8,
    load64_native,
    load_unsigned_vint,
    store8,
    store64,
)
from ringsync.formats.rows import state as at
from ringsync.formats.rows.decode import decode_marker, decode_partition_deletion, decode_row
from ringsync.formats.rows.output import begin_partition, mark, undo
from ringsync.formats.rows.state import DECODED, FULL, LAST_CODE, MALFORMED, UNKNOWN_COLUMN, UNKNOWN_TABLE

_TIMESTAMP_EPOCH, _LOCAL_EPOCH = 1442880000000000, 1442880000
_IS_EMPTY, _IS_REVERSED, _HAS_PARTITION_DELETION, _HAS_STATIC_ROW, _HAS_ROW_ESTIMATE = 0x01, 0x02, 0x04, 0x08, 0x10
_END, _IS_MARKER = 0x01, 0x02


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def decode_records(
    s: int, offsets: int, sizes: int, positions: int, outcomes: int, ids: int, first: int, last: int
) -> int:
    """Decode records from ``first`` on. Return the number of the first record that does not fit any more.

    :param outcomes: address of one code per record, uint8
    :param ids: address of 16 bytes per record: id of the unknown table
    """
    store64(s + at.NAMES_TABLE, -1)
    base = load64_native(s + at.BASE)
    for record in range(first, last):
        mark(s)
        p = base + load64_native(offsets + 8 * record)
        store64(s + at.POSITION, load64_native(positions + 8 * record))
        outcome = _decode_mutation(s, p, p + load64_native(sizes + 8 * record))
        if outcome != DECODED:
            undo(s)
            if outcome == FULL:
                return record
            if outcome == UNKNOWN_TABLE:
                unknown = load64_native(s + at.UNKNOWN_ID)
                store64(ids + 16 * record, load64_native(unknown))
                store64(ids + 16 * record + 8, load64_native(unknown + 8))
        store8(outcomes + record, outcome)
    return last


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode_mutation(s: int, p: int, end: int) -> int:
    """Decode all updates of a mutation. Return its outcome."""
    count, p = load_unsigned_vint(p)
    if count < 1 or count > end - p:
        return MALFORMED
    for _ in range(count):
        p = _decode_update(s, p, end)
        if p <= LAST_CODE:
            return p
    return DECODED if p == end else MALFORMED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode_update(s: int, p: int, end: int) -> int:
    """Decode the update of one partition of one table."""
    if end - p < 18:
        return MALFORMED
    table_id, table = p, _find_table(s, p)
    length, p = load_unsigned_vint(p + 16)
    if length < 0 or length > at.LONGEST_KEY or length >= end - p:
        return MALFORMED
    key = p
    flags = load8(p + length)
    p += length + 1
    if flags & _IS_EMPTY:
        return p
    if table < 0:
        unknown = load64_native(s + at.UNKNOWN_ID)
        store64(unknown, load64_native(table_id))
        store64(unknown + 8, load64_native(table_id + 8))
        return UNKNOWN_TABLE
    begin_partition(s, table, table_id, key, length)
    value, p = load_unsigned_vint(p)
    store64(s + at.MIN_TIMESTAMP, value + _TIMESTAMP_EPOCH)
    value, p = load_unsigned_vint(p)
    store64(s + at.MIN_LOCAL, value + _LOCAL_EPOCH)
    value, p = load_unsigned_vint(p)
    store64(s + at.MIN_TTL, value)
    entry = load64_native(s + at.DIRECTORY) + at.TABLE_BYTES * table
    if load64_native(s + at.NAMES_TABLE) != table:
        store64(s + at.NAMES_TABLE, table)
        store64(s + at.STATIC_BYTES, 0)
        store64(s + at.REGULAR_BYTES, 0)
    if flags & _HAS_STATIC_ROW:
        p = _read_columns(s + at.STATIC_MAP, p, end, entry + at.TABLE_STATIC)
        if p <= LAST_CODE:
            return p
    p = _read_columns(s + at.REGULAR_MAP, p, end, entry + at.TABLE_REGULAR)
    if p > LAST_CODE and flags & _HAS_PARTITION_DELETION:
        p = decode_partition_deletion(s, p, end)
    if p > LAST_CODE and flags & _HAS_STATIC_ROW:
        p = decode_row(s, p + 1, end, load8(p), STATIC)
    if p <= LAST_CODE:
        return p
    return _decode_unfiltereds(s, p, end, flags)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _find_table(s: int, p: int) -> int:
    """Return the number of the table whose id is at ``p``; -1: it is unknown."""
    first, second = load64_native(p), load64_native(p + 8)
    lookup, mask = load64_native(s + at.LOOKUP), load64_native(s + at.LOOKUP_MASK)
    directory = load64_native(s + at.DIRECTORY)
    slot = (first ^ second) & mask
    while True:
        table = load64_native(lookup + 8 * slot)
        if table < 0:
            return -1
        entry = directory + at.TABLE_BYTES * table
        if load64_native(entry) == first and load64_native(entry + 8) == second:
            return table
        slot = (slot + 1) & mask


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _read_columns(m: int, p: int, end: int, table: int) -> int:
    """Find the columns that an update names among the table's columns; both have the same order.

    Most updates of a table name the same columns, so the map is kept for updates with the same bytes of names.

    :param m: address of four words: address of the map to fill (addresses of descriptions), number of its columns,
        address and length of the names that it was made from
    :param table: address of two words: address and number of the table's descriptions
    """
    size = load64_native(m + 24)
    if size > 0 and size <= end - p and _is_equal(load64_native(m + 16), p, size):
        return p + size
    begin = p
    count, p = load_unsigned_vint(p)
    if count < 0 or count > end - p:
        return MALFORMED
    known, known_end = load64_native(table), load64_native(table) + at.COLUMN_BYTES * load64_native(table + 8)
    entry = load64_native(m)
    store64(m + 24, 0)
    for _ in range(count):
        length, p = load_unsigned_vint(p)
        if length < 0 or length > end - p:
            return MALFORMED
        while known < known_end:
            if load64_native(known + at.COLUMN_NAME_LENGTH) == length and _is_equal(
                load64_native(known + at.COLUMN_NAME), p, length
            ):
                break
            known += at.COLUMN_BYTES
        if known >= known_end:
            return UNKNOWN_COLUMN
        store64(entry, known)
        entry += 8
        known += at.COLUMN_BYTES
        p += length
    store64(m + 8, count)
    store64(m + 16, begin)
    store64(m + 24, p - begin)
    return p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _is_equal(first: int, second: int, length: int) -> bool:
    """Tell whether two byte strings are equal. Up to 7 bytes after them are read."""
    while length >= 8:
        if load64_native(first) != load64_native(second):
            return False
        first += 8
        second += 8
        length -= 8
    return length == 0 or (load64_native(first) ^ load64_native(second)) << (64 - 8 * length) == 0


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode_unfiltereds(s: int, p: int, end: int, update_flags: int) -> int:
    """Decode rows and range tombstone markers up to the end of the partition, after an estimate of their number."""
    if update_flags & _IS_REVERSED:
        return MALFORMED
    if update_flags & _HAS_ROW_ESTIMATE:
        _, p = load_unsigned_vint(p)
    store64(s + at.OPEN, 0)
    while p < end:
        flags = load8(p)
        p += 1
        if flags & _END:
            return p if load64_native(s + at.OPEN) == 0 else MALFORMED
        p = decode_marker(s, p, end) if flags & _IS_MARKER else decode_row(s, p, end, flags, ROW)
        if p <= LAST_CODE:
            return p
    return MALFORMED
