"""The compiled loops of :mod:`ringsync.avro.rows`: they measure and write Avro values.

All kernels share these arguments, each an int64:

* ``bitmap``, ``first_bit``: address of the Arrow validity bitmap (0: no nulls), and the bit of the first row
* ``null_branch``: byte of the null branch of a union (0 or 2); −1: no union
* ``rows``: number of rows
* ``lengths``: address of int64[rows], length of each row so far; −1: the row is hidden under a null, skip it
* ``cursors``: address of int64[rows], address of each row's next byte; 0: the row is hidden, skip it

Kernels that measure return the first row with a null (or a length) that the schema does not allow, or −1.
Values are copied with exact lengths, because a neighbour's bytes may already be written.
"""

from __future__ import annotations

from numba import njit

from ringsync.compiled.memory import (
    KERNEL,
    copy_exactly,
    count_leading_zeros,
    is_valid,
    load64_native,
    store8,
    store64,
)

INTEGERS, FIXED, BYTES = range(3)
"""Kinds of values: int64; numbers of ``size`` bytes; byte strings, by their int64 offsets."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def zigzag(value: int) -> int:
    """Turn a signed number into an unsigned one so that small magnitudes stay small. Read the result as unsigned."""
    return (value << 1) ^ (value >> 63)


@njit(inline="always")  # type: ignore[untyped-decorator]
def varint_length(unsigned: int) -> int:
    """Return the bytes of a base-128 varint: one for each 7 bits."""
    highest_bit: int = 63 - count_leading_zeros(unsigned | 1)
    return (highest_bit * 9 + 73) >> 6


@njit(inline="always")  # type: ignore[untyped-decorator]
def write_varint(p: int, unsigned: int) -> int:
    """Write a base-128 varint, low bits first. Return the address after it."""
    while unsigned & ~0x7F:
        store8(p, (unsigned & 0x7F) | 0x80)
        unsigned = (unsigned >> 7) & 0x01FF_FFFF_FFFF_FFFF
        p += 1
    store8(p, unsigned)
    return p + 1


@njit(inline="always")  # type: ignore[untyped-decorator]
def write_branch(p: int, null_branch: int, valid: bool) -> int:
    """Write the union's branch, if there is a union. Return the address after it."""
    if null_branch < 0:
        return p
    store8(p, 2 - null_branch if valid else null_branch)
    return p + 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def measure_values(
    kind: int, values: int, size: int, bitmap: int, first_bit: int, null_branch: int, rows: int, lengths: int
) -> int:
    """Add the lengths of numbers or byte strings.

    :param kind: INTEGERS, FIXED or BYTES
    :param values: address of the first row's number or, for BYTES, of its int64 offset
    :param size: bytes of each value, for FIXED and BYTES; −1: byte strings have a length prefix
    """
    branch = 1 if null_branch >= 0 else 0
    for row in range(rows):
        length = load64_native(lengths + 8 * row)
        if length < 0:
            continue
        if is_valid(bitmap, first_bit + row):
            if kind == INTEGERS:
                length += varint_length(zigzag(load64_native(values + 8 * row)))
            elif kind == FIXED:
                length += size
            else:
                value = load64_native(values + 8 * row + 8) - load64_native(values + 8 * row)
                if size < 0:
                    length += varint_length(zigzag(value))
                elif value != size:
                    return row
                length += value
        elif branch == 0:
            return row
        store64(lengths + 8 * row, length + branch)
    return -1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def write_values(
    kind: int, values: int, size: int, data: int, bitmap: int, first_bit: int, null_branch: int, rows: int, cursors: int
) -> None:
    """Write numbers as zigzag varints (INTEGERS) or as they are (FIXED), or byte strings, which are in ``data``."""
    for row in range(rows):
        p = load64_native(cursors + 8 * row)
        if p == 0:
            continue
        valid = is_valid(bitmap, first_bit + row)
        p = write_branch(p, null_branch, valid)
        if valid:
            if kind == INTEGERS:
                p = write_varint(p, zigzag(load64_native(values + 8 * row)))
            elif kind == FIXED:
                copy_exactly(p, values + size * row, size)
                p += size
            else:
                start = load64_native(values + 8 * row)
                length = load64_native(values + 8 * row + 8) - start
                if size < 0:
                    p = write_varint(p, zigzag(length))
                copy_exactly(p, data + start, length)
                p += length
        store64(cursors + 8 * row, p)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def measure_record(bitmap: int, first_bit: int, null_branch: int, rows: int, lengths: int, inner: int) -> int:
    """Add the union's branch, and start the lengths of the fields at ``inner``: 0, or −1 if there is no record."""
    branch = 1 if null_branch >= 0 else 0
    for row in range(rows):
        length = load64_native(lengths + 8 * row)
        valid = length >= 0 and is_valid(bitmap, first_bit + row)
        store64(inner + 8 * row, 0 if valid else -1)
        if length < 0:
            continue
        if not valid and branch == 0:
            return row
        store64(lengths + 8 * row, length + branch)
    return -1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def write_record(bitmap: int, first_bit: int, null_branch: int, rows: int, cursors: int, inner: int) -> None:
    """Write the union's branch. ``inner`` becomes the cursors of the fields, 0 if there is no record."""
    for row in range(rows):
        p = load64_native(cursors + 8 * row)
        store64(inner + 8 * row, 0)
        if p == 0:
            continue
        valid = is_valid(bitmap, first_bit + row)
        p = write_branch(p, null_branch, valid)
        store64(cursors + 8 * row, p)
        if valid:
            store64(inner + 8 * row, p)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def reveal_items(
    offsets: int, bitmap: int, first_bit: int, null_branch: int, rows: int, lengths: int, item_lengths: int
) -> int:
    """Start the lengths of items at 0 in rows that are neither hidden nor null. All other items stay hidden."""
    for row in range(rows):
        if load64_native(lengths + 8 * row) < 0:
            continue
        if is_valid(bitmap, first_bit + row):
            for item in range(load64_native(offsets + 8 * row), load64_native(offsets + 8 * row + 8)):
                store64(item_lengths + 8 * item, 0)
        elif null_branch < 0:
            return row
    return -1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def measure_items(
    offsets: int, bitmap: int, first_bit: int, null_branch: int, rows: int, lengths: int, item_lengths: int
) -> None:
    """Add the lengths of the items, their count and the end mark."""
    branch = 1 if null_branch >= 0 else 0
    for row in range(rows):
        length = load64_native(lengths + 8 * row)
        if length < 0:
            continue
        length += branch
        if is_valid(bitmap, first_bit + row):
            first = load64_native(offsets + 8 * row)
            end = load64_native(offsets + 8 * row + 8)
            length += 1 if first == end else 1 + varint_length(zigzag(end - first))
            for item in range(first, end):
                length += load64_native(item_lengths + 8 * item)
        store64(lengths + 8 * row, length)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def write_items(
    offsets: int,
    bitmap: int,
    first_bit: int,
    null_branch: int,
    rows: int,
    cursors: int,
    item_lengths: int,
    item_cursors: int,
) -> None:
    """Write counts and end marks (one block; if empty, only the end mark), and set each item's cursor to its place."""
    for row in range(rows):
        p = load64_native(cursors + 8 * row)
        if p == 0:
            continue
        valid = is_valid(bitmap, first_bit + row)
        p = write_branch(p, null_branch, valid)
        if valid:
            first = load64_native(offsets + 8 * row)
            end = load64_native(offsets + 8 * row + 8)
            if first != end:
                p = write_varint(p, zigzag(end - first))
            for item in range(first, end):
                store64(item_cursors + 8 * item, p)
                p += load64_native(item_lengths + 8 * item)
            store8(p, 0)
            p += 1
        store64(cursors + 8 * row, p)
