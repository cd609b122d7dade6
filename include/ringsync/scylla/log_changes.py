"""Kernels that make a change row of a log row, or of the two log rows of a range deletion.

:mod:`ringsync.scylla.log_state` explains ``m``, :mod:`ringsync.scylla.log_cells` the other arguments and what the
functions return.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.schema import RANGE_DELETION, ROW, STATIC
from ringsync.compiled.memory import (
    KERNEL,
    PADDING,
    copy16,
    copy_bytes,
    load8,
    load64_native,
    store8,
    store32,
    store64,
)
from ringsync.formats.rows import state as at
from ringsync.formats.rows.cells import put_complex_deletions
from ringsync.formats.rows.decode import put_partition_deletion
from ringsync.formats.rows.output import begin_partition, begin_row, end_row, fits, put_deletion, put_liveness
from ringsync.formats.rows.state import FULL, LAST_CODE, LONGEST_KEY
from ringsync.scylla import log_state as of
from ringsync.scylla.log_cells import cell_address, cell_length, failed, fits_width, put_cells
from ringsync.scylla.log_schema import ATOMIC
from ringsync.scylla.log_state import (
    BAD_CLUSTERING,
    CELL_BYTES,
    CHANGED,
    CONTENT,
    EMPTY,
    LAST_OUTCOME,
    LONG_KEY,
    MISFIT,
    NO_KEY,
    NO_START,
    TIME_COLUMN,
    UNKNOWN_OPERATION,
    UNSET,
)

UPDATE, INSERT, ROW_DELETION, PARTITION_DELETION = 1, 2, 3, 4
START_INCLUSIVE, START_EXCLUSIVE, END_INCLUSIVE, END_EXCLUSIVE = 5, 6, 7, 8
ROW_EXPIRY, PARTITION_EXPIRY = -3, -4
"""Values of ``cdc$operation``; the last two are deletions by the server itself."""
_TIME_BYTES = 16


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_change(m: int, operation: int) -> int:
    """Write the change row of a log row that is no part of a range deletion. Return the outcome."""
    s = load64_native(m + of.OUTPUT)
    outcome = _begin(m, s)
    if outcome != CHANGED:
        return outcome
    if operation in (UPDATE, INSERT):
        return _put_write(m, s, operation)
    if operation in (ROW_DELETION, ROW_EXPIRY):
        outcome = _check_deletion(m)
        return _put_row_deletion(m, s) if outcome == CHANGED else outcome
    if operation not in (PARTITION_DELETION, PARTITION_EXPIRY):
        return UNKNOWN_OPERATION
    outcome = _check_deletion(m)
    if outcome != CHANGED:
        return outcome
    if _prefix(m) != 0:
        return BAD_CLUSTERING
    p = put_partition_deletion(s, LAST_CODE + 1, load64_native(m + of.TIME), load64_native(m + of.LOCAL))
    return FULL if p <= LAST_CODE else CHANGED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _begin(m: int, s: int) -> int:
    """Begin the partition of the log row. Return the outcome: CHANGED, if nothing is wrong with the key."""
    first, count = load64_native(m + of.KEY), load64_native(m + of.KEYS)
    if count == 1:
        key, length = cell_address(m, first), cell_length(m, first)
        if length < 0:
            return failed(m, NO_KEY, first)
        if not fits_width(m, first, length):
            return failed(m, MISFIT, first)
    else:
        key, length = load64_native(m + of.KEY_ROOM), _compose(m, first, count)
        if length < 0:
            return -length
    if length > LONGEST_KEY:
        return LONG_KEY
    store64(s + at.POSITION, load64_native(m + of.TIME))
    begin_partition(s, 0, load64_native(m + of.TABLE_ID), key, length)
    return CHANGED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _compose(m: int, first: int, count: int) -> int:
    """Write a partition key of several columns: for each its length, its bytes, a zero. Return its length, or minus
    the outcome."""
    room, length = load64_native(m + of.KEY_ROOM), 0
    for place in range(first, first + count):
        size = cell_length(m, place)
        if size < 0:
            return -failed(m, NO_KEY, place)
        if not fits_width(m, place, size):
            return -failed(m, MISFIT, place)
        if size > LONGEST_KEY - length - 3:
            return -LONG_KEY
        store8(room + length, size >> 8)
        store8(room + length + 1, size)
        copy_bytes(room + length + 2, cell_address(m, place), size)
        store8(room + length + 2 + size, 0)
        length += size + 3
    return length


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _prefix(m: int) -> int:
    """Return how many clustering columns are set, or minus one: one is null and a later one is not."""
    first, count = load64_native(m + of.CLUSTERING), load64_native(m + of.CLUSTERINGS)
    prefix = 0
    while prefix < count and cell_length(m, first + prefix) >= 0:
        prefix += 1
    for place in range(first + prefix, first + count):
        if cell_length(m, place) >= 0:
            return -1
    return prefix


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_clustering(m: int, s: int, q: int, prefix: int) -> int:
    """Write the first clustering columns in the form of change rows."""
    first = load64_native(m + of.CLUSTERING)
    store32(q, prefix)
    q += 4
    for place in range(first, first + prefix):
        length = cell_length(m, place)
        if not fits_width(m, place, length):
            return failed(m, MISFIT, place)
        if not fits(s, q, length + PADDING):
            return FULL
        store32(q, length)
        copy_bytes(q + 4, cell_address(m, place), length)
        q += 4 + length
    return q


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _check_deletion(m: int) -> int:
    """Check that a deletion sets nothing. Return the outcome."""
    value = load64_native(m + of.VALUES)
    while value < load64_native(m + of.VALUES_END):
        place = load64_native(value)
        columns = 2 if load64_native(value + of.VALUE_FORM) == ATOMIC else 3
        for column in range(place, place + columns):
            if cell_length(m, column) >= 0:
                return failed(m, CONTENT, column)
        value += of.VALUE_BYTES
    return CHANGED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_write(m: int, s: int, operation: int) -> int:
    """Write the row, or static row, of an update or insert. Return the outcome."""
    prefix, all_columns = _prefix(m), load64_native(m + of.CLUSTERINGS)
    kind = ROW
    if prefix != all_columns:
        if prefix != 0 or operation != UPDATE or not load64_native(m + of.HAS_STATIC):
            return BAD_CLUSTERING
        kind = STATIC
    begin_row(s)
    q = _put_clustering(m, s, load64_native(s + at.HEAD_END), prefix)
    if q <= LAST_OUTCOME:
        return q
    clustering_end = q if kind == ROW else 0
    has_liveness = 0
    ttl, time, local = load64_native(m + of.TTL), load64_native(m + of.TIME), load64_native(m + of.LOCAL)
    if operation == INSERT:
        has_liveness = 2 if ttl else 1
    q = put_liveness(s, q, has_liveness, time, ttl, local + ttl)
    q = put_deletion(s, q, 0, 0, 0)
    q = put_cells(m, s, q, kind == STATIC)
    if q <= LAST_OUTCOME:
        return q
    has_cells = load64_native(s + at.CELLS) > load64_native(s + at.FIRST_CELL)
    if not has_cells and not has_liveness and load64_native(s + at.COMPLEX) == load64_native(s + at.FIRST_COMPLEX):
        return EMPTY if time <= load64_native(m + of.DROPPED_UNTIL) else UNSET
    if has_cells:
        store64(s + at.WRITE_TIME, time)  # No part of a log row is later.
    q = put_complex_deletions(s, q)
    if q <= LAST_CODE or not fits(s, q, _TIME_BYTES):
        return FULL
    if ttl:
        # The same write may come again, and then expires later: of its bytes only cdc$time tells.
        copy16(q, cell_address(m, TIME_COLUMN))
        q += _TIME_BYTES
    return FULL if end_row(s, LAST_CODE + 1, q, kind, clustering_end, 0) <= LAST_CODE else CHANGED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_row_deletion(m: int, s: int) -> int:
    """Write the deletion of a row. Return the outcome."""
    prefix = _prefix(m)
    if prefix != load64_native(m + of.CLUSTERINGS):
        return BAD_CLUSTERING
    begin_row(s)
    clustering_end = _put_clustering(m, s, load64_native(s + at.HEAD_END), prefix)
    if clustering_end <= LAST_OUTCOME:
        return clustering_end
    q = put_liveness(s, clustering_end, 0, 0, 0, 0)
    q = put_deletion(s, q, 1, load64_native(m + of.TIME), load64_native(m + of.LOCAL))
    store64(q, 0)
    return FULL if end_row(s, LAST_CODE + 1, q + 8, ROW, clustering_end, 0) <= LAST_CODE else CHANGED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def check_bound(m: int) -> int:
    """Check the log row of a range's start or end. Return the outcome."""
    if load64_native(m + of.CLUSTERINGS) == 0:
        return UNKNOWN_OPERATION
    if _prefix(m) < 0:
        return BAD_CLUSTERING
    outcome = _check_deletion(m)
    if outcome != CHANGED:
        return outcome
    # The bytes of the bound are written to free memory, which checks them, and again by :func:`put_range`.
    s = load64_native(m + of.OUTPUT)
    outcome = _begin(m, s)
    if outcome != CHANGED:
        return outcome
    q = _put_clustering(m, s, load64_native(s + at.HEAD_END), _prefix(m))
    return q if q <= LAST_OUTCOME else CHANGED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_range(m: int, starts_inclusive: int, ends_inclusive: int) -> int:
    """Write the deletion of a range, of whose end the log row is. Return the outcome.

    The bounds of a range are in the order of the table: that of a descending column begins with a greater value.
    """
    outcome = check_bound(m)
    if outcome != CHANGED:
        return outcome
    s = load64_native(m + of.OUTPUT)
    if not _is_same_partition(m):
        return NO_START
    begin_row(s)
    end_cells = load64_native(m + of.CELLS)
    store64(m + of.CELLS, load64_native(m + of.START))
    is_bounded = _prefix(m) > 0
    clustering_end = _put_bound(m, s, load64_native(s + at.HEAD_END), starts_inclusive)
    store64(m + of.CELLS, end_cells)
    # All of a partition is deleted by another operation: here the log has lost the bounds.
    if not is_bounded and _prefix(m) == 0:
        return BAD_CLUSTERING
    if clustering_end <= LAST_OUTCOME:
        return clustering_end
    range_end = _put_bound(m, s, clustering_end, ends_inclusive)
    if range_end <= LAST_OUTCOME:
        return range_end
    q = put_liveness(s, range_end, 0, 0, 0, 0)
    q = put_deletion(s, q, 1, load64_native(m + of.TIME), load64_native(m + of.LOCAL))
    store64(q, 0)
    done = end_row(s, LAST_CODE + 1, q + 8, RANGE_DELETION, clustering_end, range_end)
    return FULL if done <= LAST_CODE else CHANGED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_bound(m: int, s: int, q: int, inclusive: int) -> int:
    prefix = _prefix(m)
    q = _put_clustering(m, s, q, prefix)
    if q <= LAST_OUTCOME:
        return q
    # Without any value there is no bound, whatever the operation says.
    store8(q, 1 if prefix == 0 else inclusive)
    return q + 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _is_same_partition(m: int) -> bool:
    """Tell whether a range's start and end have the same partition key."""
    first, count = load64_native(m + of.KEY), load64_native(m + of.KEYS)
    start = load64_native(m + of.START)
    for place in range(first, first + count):
        length = cell_length(m, place)
        if load64_native(start + CELL_BYTES * place + 8) != length:
            return False
        data, other = cell_address(m, place), load64_native(start + CELL_BYTES * place)
        for index in range(length):
            if load8(data + index) != load8(other + index):
                return False
    return True
