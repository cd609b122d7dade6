"""A compiled, stable merge sort of row numbers, by a number, then bytes, then bytes again.

A record is the sort key of a row: int64[6] of a number, the address and length of the first bytes, the first eight of
the second bytes as a number (:func:`prefix`), and the address and length of the second bytes. Most comparisons need
nothing but the records.
"""

from __future__ import annotations

from numba import njit

from ringsync.compiled.arrow import Places32
from ringsync.compiled.memory import KERNEL, load8, load32, load64, load64_native, store64

RECORD_BYTES = 48
NUMBER, FIRST, FIRST_LENGTH, PREFIX, SECOND, SECOND_LENGTH = range(0, RECORD_BYTES, 8)
_SIGN = -(2**63)
_BLOCK = 12
"""Number of rows that are sorted by insertion."""


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def compare_bytes(p: int, p_length: int, q: int, q_length: int) -> int:
    """Compare bytes by unsigned order, the shorter first. Return a negative number, zero or a positive number."""
    shorter = min(p_length, q_length)
    if shorter >= 8:
        last, done = shorter - 8, 0
        while True:
            x, y = load64(p + done), load64(q + done)
            if x != y:
                return -1 if (x ^ _SIGN) < (y ^ _SIGN) else 1
            if done == last:
                return p_length - q_length
            # The last eight bytes may overlap those before, which are equal.
            done = min(done + 8, last)
    done = 0
    if shorter >= 4:
        x, y = load32(p), load32(q)
        if x != y:
            return -1 if x < y else 1
        done = 4
    while done < shorter:
        difference: int = load8(p + done) - load8(q + done)
        if difference:
            return difference
        done += 1
    return p_length - q_length


@njit(inline="always")  # type: ignore[untyped-decorator]
def prefix(p: int, length: int) -> int:
    """Return the first eight bytes as a number with the same order. Spare bytes must follow them."""
    if length == 0:
        return _SIGN
    spare = 8 * max(8 - length, 0)
    word: int = load64(p) >> spare << spare
    return word ^ _SIGN


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_record(record: int, number: int, first: int, first_length: int, second: int, second_length: int) -> None:
    """Write the record of a row."""
    store64(record + NUMBER, number)
    store64(record + FIRST, first)
    store64(record + FIRST_LENGTH, first_length)
    store64(record + PREFIX, prefix(second, second_length))
    store64(record + SECOND, second)
    store64(record + SECOND_LENGTH, second_length)


@njit(inline="always")  # type: ignore[untyped-decorator]
def compare_first(a: int, b: int) -> int:
    """Compare two records only by the number and the first bytes."""
    x, y = load64_native(a + NUMBER), load64_native(b + NUMBER)
    if x != y:
        return -1 if x < y else 1
    first, first_length = load64_native(a + FIRST), load64_native(a + FIRST_LENGTH)
    other, other_length = load64_native(b + FIRST), load64_native(b + FIRST_LENGTH)
    return 0 if first == other else compare_bytes(first, first_length, other, other_length)


@njit(inline="always")  # type: ignore[untyped-decorator]
def compare_second(a: int, b: int, without: int) -> int:
    """Compare two records only by the second bytes, without the last ``without`` of them."""
    x, y = load64_native(a + PREFIX), load64_native(b + PREFIX)
    if x != y and without == 0:
        return -1 if x < y else 1
    length = load64_native(a + SECOND_LENGTH) - without
    other = load64_native(b + SECOND_LENGTH) - without
    order: int = compare_bytes(load64_native(a + SECOND), length, load64_native(b + SECOND), other)
    return order


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _is_behind(records: int, i: int, j: int) -> bool:
    a, b = records + RECORD_BYTES * i, records + RECORD_BYTES * j
    order: int = compare_first(a, b)
    if order == 0:
        order = compare_second(a, b, 0)
    return order > 0


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def sort_records(records: int, count: int, order: Places32, spare: Places32) -> None:
    """Sort row numbers; equal rows keep their order.

    :param records: address of the rows' records
    :param order: output: row numbers
    :param spare: memory as long as ``order``
    """
    for start in range(0, count, _BLOCK):
        for row in range(start, min(start + _BLOCK, count)):
            place = row
            while place > start and _is_behind(records, order[place - 1], row):
                order[place] = order[place - 1]
                place -= 1
            order[place] = row
    width = _BLOCK
    while width < count:
        for start in range(0, count - width, 2 * width):
            middle, end = start + width, min(start + 2 * width, count)
            _merge_runs(records, order, spare, start, middle, end)
        width *= 2


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _merge_runs(records: int, order: Places32, spare: Places32, start: int, middle: int, end: int) -> None:
    """Merge two neighbouring sorted runs in place."""
    if not _is_behind(records, order[middle - 1], order[middle]):
        return
    for place in range(start, middle):
        spare[place] = order[place]
    left, right, place = start, middle, start
    while left < middle and right < end:
        a, b = spare[left], order[right]
        if _is_behind(records, a, b):
            order[place] = b
            right += 1
        else:
            order[place] = a
            left += 1
        place += 1
    while left < middle:
        order[place] = spare[left]
        left += 1
        place += 1
