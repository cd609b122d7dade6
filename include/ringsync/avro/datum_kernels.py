"""Compiled readers of values in Avro datums, and of the one value in an envelope that decides Kafka's partition.

``p`` and ``end`` are addresses in the datum. ``p`` becomes :data:`DAMAGED` if the datum does not follow its schema.
"""

from __future__ import annotations

from numba import njit

from ringsync.compiled.memory import KERNEL, load8, load64_native, store64

DAMAGED = 0

LONG, TEXT, BOOLEAN = range(3)
STEP_BYTES = 16
"""Bytes of a step to a value: the kind of value to skip, and the null branch of its union; −1: no union."""


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def read_long(p: int, end: int) -> tuple[int, int]:
    """Read an int or long. Return the value and the address after it."""
    number = 0
    shift = 0
    while p < end and shift < 64:
        byte = load8(p)
        p += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return ((number >> 1) & 0x7FFF_FFFF_FFFF_FFFF) ^ -(number & 1), p
    return 0, DAMAGED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def read_length(p: int, end: int) -> tuple[int, int]:
    """Read the length of a string or bytes. Return it and the address after it."""
    length, p = read_long(p, end)
    if p == DAMAGED or length < 0 or length > end - p:
        return 0, DAMAGED
    return length, p


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def read_longs(steps: int, count: int, data: int, bounds: int, rows: int, found: int) -> int:
    """Read from each datum the long that follows these steps.

    :param steps: address of the steps; ``count``: their number
    :param bounds: address of int64[2 · rows]: start and end of each datum in ``data``
    :param found: output: address of int64[rows] for the numbers
    :returns: −1, or the first damaged datum
    """
    for row in range(rows):
        p = data + load64_native(bounds + 16 * row)
        end = data + load64_native(bounds + 16 * row + 8)
        for step in range(count):
            kind, null = load64_native(steps + STEP_BYTES * step), load64_native(steps + STEP_BYTES * step + 8)
            if null >= 0:
                branch, p = read_long(p, end)
                if p == DAMAGED:
                    return row
                if branch == null:
                    continue
            if kind == TEXT:
                length, p = read_length(p, end)
                p = DAMAGED if p == DAMAGED else p + length
            elif kind == BOOLEAN:
                p = p + 1 if p < end else DAMAGED
            else:
                _, p = read_long(p, end)
            if p == DAMAGED:
                return row
        value, p = read_long(p, end)
        if p == DAMAGED:
            return row
        store64(found + 8 * row, value)
    return -1
