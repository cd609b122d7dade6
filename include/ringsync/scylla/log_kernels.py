"""Kernels that walk over the rows of a CDC log in result pages: writes, range deletions, and what cannot be used.

:mod:`ringsync.scylla.log_state` explains ``m``. A write (here: group) is a run of log rows with one stream and one
time.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.schema import EXPIRING, TOMBSTONE
from ringsync.compiled.memory import (
    KERNEL,
    load8,
    load16,
    load32,
    load32_native,
    load32_signed,
    load64,
    load64_native,
    store8,
    store16,
    store32,
    store64,
)
from ringsync.formats.rows import state as at
from ringsync.formats.rows.cells import MOST_TTL
from ringsync.scylla import log_state as of
from ringsync.scylla.log_cells import cell_address, cell_length, failed
from ringsync.scylla.log_changes import (
    END_EXCLUSIVE,
    END_INCLUSIVE,
    START_EXCLUSIVE,
    START_INCLUSIVE,
    check_bound,
    put_change,
    put_range,
)
from ringsync.scylla.log_schema import ATOMIC, EPOCH_100NS, FIELDS
from ringsync.scylla.log_state import (
    BAD_TTL,
    CELL_BYTES,
    CHANGED,
    END_OF_BATCH_COLUMN,
    HELD,
    IMAGE,
    MISFIT,
    NO_END,
    NO_START,
    NUMBER_COLUMN,
    OPERATION_COLUMN,
    REMAINING_COLUMN,
    STREAM_COLUMN,
    TIME_COLUMN,
    TTL_COLUMN,
)

UNKNOWN_ARRIVAL = -1
FUTURE_S = 10
"""Scylla refuses write times that are more than 5 s ahead of its clock, which may be ahead itself."""
CLOCKS_S = 2
"""A write that arrived so close to its write time, s, has that as its time of arrival as far as its TTL allows: TTLs
have whole seconds."""
_MICROS, _LAST_SECOND = 1_000_000, 2**32 - 1
_HAS_TTL = 2
_PREIMAGE, _POSTIMAGE = 0, 9
_ID, _INT = 16, 4
_NO_ROW, _NO_OPERATION = -1, 127

GROUP_BYTES = 32
"""Bytes of a group: id of the stream, and the time."""
OUTCOMES, CULPRITS, GROUP_OF, CHANGE_GROUPS, CHANGE_ARRIVALS, GROUPS, COMPLETE, STARTS = range(0, 64, 8)
"""Words of the record ``w``, each the address of an array: uint8 outcome of each log row, int16 column because of which
it failed, int32 group; int64 group of each change row, int64 arrival of its write; 32 bytes of each group, uint8
whether it is complete; int32 first byte of each log row in the page."""


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def measure(m: int, base: int, size: int, rows: int, totals: int) -> int:
    """Count what the log rows of a page can become at most.

    :param totals: address of three int64: cells, complex deletions, most cells of one log row
    :returns: the position after the last cell, or minus the position of a truncated cell
    """
    p, end = base + 4, base + size
    all_cells = deletions = most = 0
    for _ in range(rows):
        p = _read_cells(m, p, end)
        if p < 0:
            return base + p
        count, deleted = _count(m)
        all_cells += count
        deletions += deleted
        most = max(most, count)
    store64(totals, all_cells)
    store64(totals + 8, deletions)
    store64(totals + 16, most)
    return p - base


@njit(inline="always")  # type: ignore[untyped-decorator]
def _count(m: int) -> tuple[int, int]:
    """Count cells and complex deletions of the log row, at most."""
    cells = deletions = 0
    value = load64_native(m + of.VALUES)
    while value < load64_native(m + of.VALUES_END):
        place, form = load64_native(value), load64_native(value + of.VALUE_FORM)
        deleted = cell_length(m, place + 1) >= 0
        if form == ATOMIC:
            cells += cell_length(m, place) >= 0 or deleted
        else:
            deletions += deleted
            if form == FIELDS:
                cells += load64_native(value + of.VALUE_FIELDS)
            else:
                cells += _elements(m, place)
            cells += _elements(m, place + 2)
        value += of.VALUE_BYTES
    return cells, deletions


@njit(inline="always")  # type: ignore[untyped-decorator]
def _elements(m: int, place: int) -> int:
    """Return the number of elements that a frozen collection can have at most."""
    length = cell_length(m, place)
    if length < 4:
        return 0
    return min(max(load32_signed(cell_address(m, place)), 0), length >> 2)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def decode_rows(
    m: int, w: int, base: int, size: int, rows: int, take_incomplete: int, page_ends: int, asked: int
) -> int:
    """Decode the log rows of pages that were joined to one. The word ``GROUPS`` of ``m`` becomes the number of groups.

    :param w: address of the addresses of arrays, see ``OUTCOMES`` …
    :param page_ends: address of int64: the log row behind the last one of each page; ``asked``: when each was asked
        for, s since the epoch
    :returns: the position after the last cell, or minus the position of a truncated cell
    """
    groups = first = page_end = 0
    pending = _NO_ROW
    is_complete = True
    p, end = base + 4, base + size
    store32(load64_native(w + STARTS), 4)
    for row in range(rows):
        if pending != _NO_ROW:
            _keep_cells(m)
        p = _read_cells(m, p, end)
        if p < 0:
            return base + p
        store32(load64_native(w + STARTS) + 4 * row + 4, p - base)
        while row >= page_end:
            page_end = load64_native(page_ends)
            store64(m + of.READ_AT, load64_native(asked))
            page_ends += 8
            asked += 8
        is_first = row == 0 or not _is_of_group(m, load64_native(w + GROUPS) + GROUP_BYTES * (groups - 1))
        if is_first:
            if row:
                _end_group(m, w, first, row, pending, is_complete or take_incomplete != 0)
            _begin_group(m, load64_native(w + GROUPS) + GROUP_BYTES * groups)
            pending, first = _NO_ROW, row
            groups += 1
        # What the first row of a group undoes is what the group undoes.
        cursors = of.CURSORS_OF_GROUP if is_first else of.CURSORS_OF_ROW
        _save(m, cursors)
        pending = _decode_row(m, w, row, pending, groups - 1, cursors)
        is_complete = _ends_batch(m)
        store8(load64_native(w + COMPLETE) + groups - 1, is_complete)
    if rows:
        _end_group(m, w, first, rows, pending, is_complete or take_incomplete != 0)
    store64(m + of.GROUPS, groups)
    return p - base


@njit(inline="always")  # type: ignore[untyped-decorator]
def _has_prefix(m: int, p: int, cell: int) -> bool:
    """Tell whether the first cells have the lengths that are expected, and write their places.

    The places do not depend on what is read, so that the processor need not wait for one length to find the next.
    """
    differ, lengths = 0, load64_native(m + of.PREFIX_LENGTHS)
    for _ in range(load64_native(m + of.PREFIX)):
        length = load64_native(lengths)
        differ |= load32_signed(p) ^ length
        store64(cell, p + 4)
        store64(cell + 8, length)
        p += 4 + max(length, 0)
        cell += CELL_BYTES
        lengths += 8
    return differ == 0


@njit(inline="always")  # type: ignore[untyped-decorator]
def _read_cells(m: int, p: int, end: int) -> int:
    """Find the cells of the log row at ``p``. Return the address after it, or minus that of a truncated cell.

    The length is read before it is known whether the cell reaches so far, which the page's spare bytes allow.
    """
    cell, done = load64_native(m + of.CELLS), 0
    if end - p >= load64_native(m + of.PREFIX_BYTES) and _has_prefix(m, p, cell):
        done = load64_native(m + of.PREFIX)
        p += load64_native(m + of.PREFIX_BYTES)
        cell += CELL_BYTES * done
    for _ in range(load64_native(m + of.COLUMNS) - done):
        length = max(load32_signed(p), -1)
        p += 4
        if max(length, 0) > end - p:
            return 4 - p
        store64(cell, p)
        store64(cell + 8, length)
        p += max(length, 0)
        cell += CELL_BYTES
    return p


@njit(inline="always")  # type: ignore[untyped-decorator]
def _keep_cells(m: int) -> None:
    """Keep the cells of the log row as those of a range's start: the next row is read into the other table."""
    cells = load64_native(m + of.CELLS)
    store64(m + of.CELLS, load64_native(m + of.START))
    store64(m + of.START, cells)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _address_in_start(m: int, place: int) -> int:
    """Return the address of a cell of the range's start."""
    return load64_native(load64_native(m + of.START) + CELL_BYTES * place)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _is_of_group(m: int, group: int) -> bool:
    """Tell whether the log row is of the group at this address."""
    for place in (STREAM_COLUMN, TIME_COLUMN):
        first = second = 0
        if cell_length(m, place) == _ID:
            first, second = load64_native(cell_address(m, place)), load64_native(cell_address(m, place) + 8)
        if load64_native(group + _ID * place) != first or load64_native(group + _ID * place + 8) != second:
            return False
    return True


@njit(inline="always")  # type: ignore[untyped-decorator]
def _begin_group(m: int, group: int) -> None:
    """Write stream and time of a group, or zeros if they have a wrong length."""
    for place in (STREAM_COLUMN, TIME_COLUMN):
        first = second = 0
        if cell_length(m, place) == _ID:
            first, second = load64_native(cell_address(m, place)), load64_native(cell_address(m, place) + 8)
        store64(group + _ID * place, first)
        store64(group + _ID * place + 8, second)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _end_group(m: int, w: int, first: int, behind: int, pending: int, is_taken: bool) -> None:
    """End a group of the log rows from ``first`` on, and before ``behind``. Those that are not taken are held."""
    outcomes = load64_native(w + OUTCOMES)
    if pending != _NO_ROW:
        store8(outcomes + pending, NO_END)
    if not is_taken:
        for row in range(first, behind):
            store8(outcomes + row, HELD)
        _restore(m, of.CURSORS_OF_GROUP)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _ends_batch(m: int) -> bool:
    """Tell whether the log row is the last one of its write; where the log does not say so, each is."""
    place = load64_native(m + END_OF_BATCH_COLUMN)
    return place < 0 or (cell_length(m, place) == 1 and load8(cell_address(m, place)) != 0)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _save(m: int, word: int) -> None:
    """Remember the output so far."""
    s, cursors = load64_native(m + of.OUTPUT), load64_native(m + word)
    for cursor in range(at.CURSORS[0], at.CURSORS[1], 8):
        store64(cursors + cursor - at.CURSORS[0], load64_native(s + cursor))


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _restore(m: int, word: int) -> None:
    """Forget the output since :func:`_save`."""
    s, cursors = load64_native(m + of.OUTPUT), load64_native(m + word)
    has_path = load64_native(s + at.CELL_HAS_PATH)
    for cell in range(load64_native(cursors + at.CELLS - at.CURSORS[0]), load64_native(s + at.CELLS)):
        store8(has_path + cell, 0)
    for cursor in range(at.CURSORS[0], at.CURSORS[1], 8):
        store64(s + cursor, load64_native(cursors + cursor - at.CURSORS[0]))


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode_row(m: int, w: int, row: int, pending: int, group: int, cursors: int) -> int:
    """Decode a log row.

    :param pending: log row of a range's start whose end this row must be, or ``_NO_ROW``
    :returns: the same for the next log row
    """
    outcomes, next_pending = load64_native(w + OUTCOMES), _NO_ROW
    outcome, operation = _read_metadata(m)
    is_end = operation in (END_INCLUSIVE, END_EXCLUSIVE)
    if pending != _NO_ROW and not (is_end and outcome == CHANGED and _follows(m)):
        store8(outcomes + pending, NO_END)
        pending = _NO_ROW
    if outcome != CHANGED:
        pass
    elif operation in (_PREIMAGE, _POSTIMAGE):
        outcome = IMAGE
    elif operation in (START_INCLUSIVE, START_EXCLUSIVE):
        outcome = check_bound(m)
        next_pending = row if outcome == CHANGED else _NO_ROW
    elif is_end:
        outcome = _end_range(m, outcomes, pending, operation)
    else:
        outcome = put_change(m, operation)
    store8(outcomes + row, outcome)
    store16(load64_native(w + CULPRITS) + 2 * row, load64_native(m + of.CULPRIT))
    store32(load64_native(w + GROUP_OF) + 4 * row, group)
    if outcome != CHANGED:
        _restore(m, cursors)
    elif next_pending == _NO_ROW:
        _put_facts(m, w, group)
    return next_pending


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_facts(m: int, w: int, group: int) -> None:
    """Write group and arrival of the change row that was just written."""
    change = load64_native(load64_native(m + of.OUTPUT) + at.ROWS) - 1
    arrival = UNKNOWN_ARRIVAL
    if cell_length(m, REMAINING_COLUMN) == _INT:
        remaining, log_ttl = load32_signed(cell_address(m, REMAINING_COLUMN)), load64_native(m + of.LOG_TTL)
        if 0 <= remaining <= log_ttl:
            arrival = load64_native(m + of.READ_AT) - (log_ttl - remaining)
    store64(load64_native(w + CHANGE_GROUPS) + 8 * change, group)
    store64(load64_native(w + CHANGE_ARRIVALS) + 8 * change, arrival)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def expire(s: int, arrivals: int, took: int, error: int, later: int, ttls: int, newest: int) -> None:
    """Let cells and liveness of change rows expire by the arrival of their writes, and date their deletions by it.

    :param arrivals: address of int64 arrivals of the change rows by the largest TTL: the earliest that are possible
    :param took: so much later they may be, s; ``error``: and so wrong, since a server's clock is
    :param later: address of int64: so much later they are by each of the TTLs, s, by the present one first
    :param ttls: number of TTLs
    :param newest: no arrival is later, s since the epoch
    """
    for row in range(load64_native(s + at.ROWS)):
        arrival = load64_native(arrivals + 8 * row)
        if arrival == UNKNOWN_ARRIVAL:
            continue
        # Mostly the coordinator took the write time from its clock, or had one like it: this is better known.
        written = load64_native(load64_native(s + at.ROW_WRITE_TIME) + 8 * row) // _MICROS
        at_once = UNKNOWN_ARRIVAL
        for place in range(ttls):
            of_ttl = arrival + load64_native(later + 8 * place)
            if of_ttl - CLOCKS_S - error <= written <= of_ttl + took + error + CLOCKS_S:
                at_once = min(max(written, of_ttl - error), of_ttl + took + error)
        if at_once == written:
            continue
        if at_once != UNKNOWN_ARRIVAL:
            _date_row(s, row, at_once)
            continue
        if arrival + load64_native(later) <= newest:
            arrival += load64_native(later)
        # No write is so far in the future: the log had another TTL then.
        if arrival + took + error + FUTURE_S < written:
            continue
        _date_row(s, row, arrival)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _date_row(s: int, row: int, arrival: int) -> None:
    now = min(max(arrival, 0), _LAST_SECOND)
    if load8(load64_native(s + at.ROW_LIVENESS) + row) == _HAS_TTL:
        ttl = load32_native(load64_native(s + at.ROW_LIVENESS_TTL) + 4 * row)
        store64(load64_native(s + at.ROW_LIVENESS_EXPIRES) + 8 * row, min(arrival + ttl, _LAST_SECOND))
    if load8(load64_native(s + at.ROW_DELETION) + row):
        store64(load64_native(s + at.ROW_DELETION_LOCAL) + 8 * row, now)
    cells = load64_native(s + at.ROW_CELLS) + 4 * row
    for cell in range(load32_native(cells), load32_native(cells + 4)):
        kind = load8(load64_native(s + at.CELL_KIND) + cell)
        if kind == EXPIRING:
            ttl = load32_native(load64_native(s + at.CELL_TTL) + 4 * cell)
            store64(load64_native(s + at.CELL_LOCAL) + 8 * cell, min(arrival + ttl, _LAST_SECOND))
        elif kind == TOMBSTONE:
            store64(load64_native(s + at.CELL_LOCAL) + 8 * cell, now)
    complex_deletions = load64_native(s + at.ROW_COMPLEX) + 4 * row
    for place in range(load32_native(complex_deletions), load32_native(complex_deletions + 4)):
        store64(load64_native(s + at.COMPLEX_LOCAL) + 8 * place, now)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _end_range(m: int, outcomes: int, pending: int, operation: int) -> int:
    """Join the log row with that of the range's start. Return the outcome."""
    if pending == _NO_ROW:
        return NO_START
    start = load8(_address_in_start(m, OPERATION_COLUMN))
    outcome = put_range(m, start == START_INCLUSIVE, operation == END_INCLUSIVE)
    if outcome != CHANGED:
        store8(outcomes + pending, NO_END)
    return outcome


@njit(inline="always")  # type: ignore[untyped-decorator]
def _follows(m: int) -> bool:
    """Tell whether the log row's number is the one after that of the range's start."""
    number = load32_signed(cell_address(m, NUMBER_COLUMN))
    return number == load32_signed(_address_in_start(m, NUMBER_COLUMN)) + 1


@njit(inline="always")  # type: ignore[untyped-decorator]
def _read_metadata(m: int) -> tuple[int, int]:
    """Read time and TTL of the log row. Return the outcome: CHANGED, if nothing is wrong; and the operation."""
    store64(m + of.CULPRIT, 0)
    operation = _NO_OPERATION
    if cell_length(m, OPERATION_COLUMN) == 1:
        operation = load8(cell_address(m, OPERATION_COLUMN))
        operation -= (operation & 0x80) << 1
    for place, length in ((STREAM_COLUMN, _ID), (TIME_COLUMN, _ID), (NUMBER_COLUMN, _INT), (OPERATION_COLUMN, 1)):
        if cell_length(m, place) != length:
            return failed(m, MISFIT, place), operation
    p = cell_address(m, TIME_COLUMN)
    high = load16(p + 6)
    if high >> 12 != 1:
        return failed(m, MISFIT, TIME_COLUMN), operation
    ticks = (high & 0xFFF) << 48 | load16(p + 4) << 32 | load32(p)
    time = (ticks - EPOCH_100NS) // 10
    store64(m + of.TIME, time)
    store64(m + of.LOCAL, min(max(time // _MICROS, 0), _LAST_SECOND))
    ttl, length = 0, cell_length(m, TTL_COLUMN)
    if length == 8:
        ttl = load64(cell_address(m, TTL_COLUMN))
    if (length >= 0 and length != 8) or ttl < 0 or ttl > MOST_TTL:
        return BAD_TTL, operation
    store64(m + of.TTL, ttl)
    return CHANGED, operation
