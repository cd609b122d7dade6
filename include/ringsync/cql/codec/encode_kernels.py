"""The compiled loops of :mod:`ringsync.cql.codec.encode` that join serialised parts, and Cassandra's vints.

Arguments are int64 numbers. ``bitmap`` is the address of an Arrow validity bitmap (0: no nulls), ``first_bit`` the bit
of the first row. Offsets are int64 as in a large_binary array.
"""

from __future__ import annotations

from numba import njit

from ringsync.compiled.memory import (
    KERNEL,
    copy_exactly,
    count_leading_zeros,
    is_valid,
    load32_native,
    load64_native,
    store8,
    store64,
)

INT_LENGTH = 0
"""The length stands before each part as int32; −1 is null: collections, tuples, user-defined types."""
VINT_LENGTH = 1
"""The length stands before each part as unsigned vint: vectors, unless their elements have a fixed length."""
KEY_COMPONENT = 2
"""Each part stands between its length as uint16 and a zero byte: partition keys of several columns."""

PART_FIELDS = 4
"""int64 numbers that describe a part: bitmap, first bit, address of its offsets, address of its data."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def unsigned_vint_length(value: int) -> int:
    """Return the bytes of an unsigned vint (Cassandra: VIntCoding.computeUnsignedVIntSize)."""
    leading_zeros: int = count_leading_zeros(value | 1)
    return (639 - leading_zeros * 9) >> 6


@njit(inline="always")  # type: ignore[untyped-decorator]
def store_big_endian(p: int, value: int, length: int) -> int:
    """Write the low ``length`` bytes of a number, high byte first. Return the address after it."""
    for index in range(length):
        store8(p + index, value >> (8 * (length - 1 - index)))
    return p + length


@njit(inline="always")  # type: ignore[untyped-decorator]
def store_unsigned_vint(p: int, value: int) -> int:
    """Write an unsigned vint (docs/formats.md, 2.1). Return the address after it."""
    more: int = unsigned_vint_length(value) - 1
    if more == 8:
        store8(p, 0xFF)
        store_big_endian(p + 1, value, 8)
    else:
        store_big_endian(p, value | (((0xFF00 >> more) & 0xFF) << (8 * more)), more + 1)
    return p + 1 + more


@njit(inline="always")  # type: ignore[untyped-decorator]
def store_signed_vint(p: int, value: int) -> int:
    """Write a number as the unsigned vint of its zigzag form. Return the address after it."""
    behind: int = store_unsigned_vint(p, (value << 1) ^ (value >> 63))
    return behind


@njit(inline="always")  # type: ignore[untyped-decorator]
def framed_length(length: int, framing: int) -> int:
    """Return the bytes of a part (null: length −1) including its framing."""
    if framing == INT_LENGTH:
        return 4 + max(length, 0)
    return length + (unsigned_vint_length(length) if framing == VINT_LENGTH else 3)


@njit(inline="always")  # type: ignore[untyped-decorator]
def part_range(part: int, item: int) -> tuple[int, int]:
    """Return the start of this item in the part's data, and its length; −1: null."""
    offsets = load64_native(part + 16) + 8 * item
    start = load64_native(offsets)
    if not is_valid(load64_native(part), load64_native(part + 8) + item):
        return start, -1
    return start, load64_native(offsets + 8) - start


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def measure_composites(
    parts: int,
    part_count: int,
    framing: int,
    counted: int,
    items: int,
    bitmap: int,
    first_bit: int,
    rows: int,
    offsets: int,
) -> None:
    """Fill ``offsets`` with the start of each row's bytes. The arguments are those of :func:`write_composites`."""
    end = 0
    store64(offsets, 0)
    for row in range(rows):
        if is_valid(bitmap, first_bit + row):
            end += 4 * counted
            for item in range(load64_native(items + 8 * row), load64_native(items + 8 * row + 8)):
                for part in range(part_count):
                    _, length = part_range(parts + 8 * PART_FIELDS * part, item)
                    end += framed_length(length, framing)
        store64(offsets + 8 * row + 8, end)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def write_composites(
    parts: int, part_count: int, framing: int, counted: int, items: int, bitmap: int, first_bit: int, rows: int, p: int
) -> None:
    """Write the items of each row, and the parts of each item, one after the other.

    :param parts: address of int64[part_count, PART_FIELDS]
    :param framing: framing of each part: INT_LENGTH …
    :param counted: 1: each row begins with the number of its items as int32; 0: it does not
    :param items: address of int64[rows + 1]: place of each row's first item in the parts
    :param p: address of the first byte to write
    """
    for row in range(rows):
        if not is_valid(bitmap, first_bit + row):
            continue
        first = load64_native(items + 8 * row)
        end = load64_native(items + 8 * row + 8)
        if counted:
            p = store_big_endian(p, end - first, 4)
        for item in range(first, end):
            for index in range(part_count):
                part = parts + 8 * PART_FIELDS * index
                start, length = part_range(part, item)
                if framing == INT_LENGTH:
                    p = store_big_endian(p, length, 4)
                elif framing == VINT_LENGTH:
                    p = store_unsigned_vint(p, length)
                else:
                    p = store_big_endian(p, length, 2)
                if length > 0:
                    copy_exactly(p, load64_native(part + 24) + start, length)
                    p += length
                if framing == KEY_COMPONENT:
                    store8(p, 0)
                    p += 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def write_durations(
    months: int, days: int, nanoseconds: int, bitmap: int, first_bit: int, rows: int, offsets: int, data: int
) -> None:
    """Write durations as three signed vints; ``data`` has room for 27 bytes a row (Cassandra: DurationSerializer).

    :param months: address of the months, int32; ``days``: int32; ``nanoseconds``: int64
    """
    p = data
    store64(offsets, 0)
    for row in range(rows):
        if is_valid(bitmap, first_bit + row):
            p = store_signed_vint(p, load32_native(months + 4 * row))
            p = store_signed_vint(p, load32_native(days + 4 * row))
            p = store_signed_vint(p, load64_native(nanoseconds + 8 * row))
        store64(offsets + 8 * row + 8, p - data)
