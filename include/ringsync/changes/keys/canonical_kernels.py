"""The compiled half of :mod:`ringsync.changes.keys.canonical`: one spelling for all equal values.

Types are the programs of :mod:`ringsync.changes.keys.order_kernels`. Two values have the same canonical bytes exactly
if they have the same bytes there. No canonical value is longer than the value that it is made from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.changes.keys.order_kernels import FIELDS, NODE_BYTES, SEQUENCE, VECTOR, magnitude, part_of, stripped
from ringsync.compiled.memory import KERNEL, load8, load32_native, load32_signed, load64_native, store8, store32
from ringsync.cql.codec.encode_kernels import store_big_endian, store_unsigned_vint, unsigned_vint_length
from ringsync.cql.natives import BOOLEAN, DECIMAL, FLOAT, VARINT

_NAN32, _NAN64 = 0x7FC00000, 0x7FF8000000000000
_MIN_SCALE = -(2**31)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy(p: int, length: int, q: int) -> int:
    """Copy bytes to a place before them or after their end. Return the address after the copy."""
    for i in range(length):
        store8(q + i, load8(p + i))
    return q + length


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_varint(p: int, length: int, q: int) -> int:
    """Write a number without the bytes that only repeat its sign."""
    skip = stripped(p, length)
    end: int = _copy(p + skip, length - skip, q)
    return end


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_magnitude(words: npt.NDArray[np.uint32], negative: int, q: int) -> int:
    """Write a number in two's complement, from its absolute value, lowest word first. Four more bytes are used while it
    is written."""
    size = 4 * len(words) + 1
    carry = np.int64(negative)
    for i in range(size):
        byte = np.int64(0)
        if i < size - 1:
            byte = (np.int64(words[i >> 2]) >> (8 * (i & 3))) & 0xFF
        if negative:
            byte = (byte ^ 0xFF) + carry
            carry = byte >> 8
        store8(q + size - 1 - i, int(byte))
    skip = stripped(q, size)
    end: int = _copy(q + skip, size - skip, q)
    return end


@njit(inline="always")  # type: ignore[untyped-decorator]
def _rest(words: npt.NDArray[np.uint32], divide: bool) -> int:
    """Return the remainder of a number divided by ten. If ``divide``, ``words`` become the quotient."""
    rest = np.int64(0)
    for i in range(len(words) - 1, -1, -1):
        value = (rest << 32) | np.int64(words[i])
        rest = value % 10
        if divide:
            words[i] = np.uint32(value // 10)
    return int(rest)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_decimal(p: int, length: int, q: int) -> int:
    """Strip zeros as Java's BigDecimal.stripTrailingZeros does. It stops before the scale gets less than an int32."""
    scale = load32_signed(p)
    end: int
    # A number that ends in a zero is even: odd ones need no division.
    if load8(p + length - 1) & 1:
        end = _put_varint(p + 4, length - 4, store_big_endian(q, scale, 4))
        return end
    words = magnitude(p + 4, length - 4)
    used = np.int64(0)
    for i in range(len(words)):
        used |= np.int64(words[i])
    if used == 0:
        scale = 0
    while used and scale > _MIN_SCALE and _rest(words, False) == 0:
        _rest(words, True)
        scale -= 1
    end = _put_magnitude(words, load8(p + 4) >> 7, store_big_endian(q, scale, 4))
    return end


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_native(kind: int, width: int, p: int, length: int, q: int) -> int:
    """Write a value that has no parts. Bytes that are no value stay as they are."""
    end: int
    if kind == VARINT:
        end = _put_varint(p, length, q)
    elif kind == DECIMAL and length > 4:
        end = _put_decimal(p, length, q)
    else:
        end = _copy(p, length, q)
        if kind == BOOLEAN and length == 1:
            store8(q, load8(p) != 0)
        elif kind == FLOAT and length == width:
            high = load32_signed(p) & 0x7FFFFFFF
            if length == 4 and high > 0x7F800000:
                store_big_endian(q, _NAN32, 4)
            elif length == 8 and (high > 0x7FF00000 or (high == 0x7FF00000 and load32_signed(p + 4) != 0)):
                store_big_endian(q, _NAN64, 8)
    return end


@njit(inline="always")  # type: ignore[untyped-decorator]
def _length_bytes(kind: int, width: int, size: int) -> int:
    """Return how many bytes the length before a part of a composite value takes."""
    if kind != VECTOR:
        return 4
    length: int = 0 if width else unsigned_vint_length(max(size, 0))
    return length


@njit(inline="always")  # type: ignore[untyped-decorator]
def _close_part(kind: int, width: int, start: int, begins: int, behind: int) -> int:
    """Write the length before a part, which may have become shorter. Return the address after the part.

    :param start: address of the length
    :param begins: address of the part
    :param behind: address after the part; one less than ``begins``: the part is null
    """
    size = behind - begins
    end: int = max(behind, begins)
    if kind != VECTOR:
        store_big_endian(start, size, 4)
    elif not width:
        end = _copy(begins, size, store_unsigned_vint(start, size))
    return end


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_canonical(program: int, node: int, p: int, length: int, q: int) -> int:
    """Write a value's canonical form. Return the address after it. The arguments are those of ``put_value``.

    :param length: bytes of the value, not negative
    :param q: address of the output: room for as many bytes, and four more that are used meanwhile
    """
    at = program + NODE_BYTES * node
    kind, width = load64_native(at), load64_native(at + 24)
    if length == 0:
        return q
    kept: int = q
    if kind < SEQUENCE:
        kept = _put_native(kind, width, p, length, q)
        return kept
    child, count = load64_native(at + 8), load64_native(at + 16)
    children, part, end, written = count, p, p + length, q
    if kind == SEQUENCE:
        items = load32_signed(p) if length >= 4 else -1
        count *= items
        part = end + 1
        if items >= 0:
            part = p + 4
            written = store_big_endian(q, items, 4)
    elif kind == VECTOR:
        count, width = width >> 32, width & 0xFFFFFFFF
    kept, number = written, 0
    while number < count and not (kind == FIELDS and part == end):
        part, size = part_of(kind, width, part, end)
        if size < -1:
            part = end + 1
            break
        behind = begins = written + _length_bytes(kind, width, size)
        if size > 0:
            behind = put_canonical(program, child + number % children, part, size, begins)
        written = _close_part(kind, width, written, begins, behind if size >= 0 else begins - 1)
        # Nulls at the end of tuples and UDTs are left out. If all parts are null, the first stays.
        if size >= 0 or kind != FIELDS or number == 0:
            kept = written
        part += max(size, 0)
        number += 1
    if part != end:
        kept = _copy(p, length, q)
    return kept


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_canonicals(
    base: int, offsets: int, lengths: int, count: int, program: int, node: int, output: int, output_offsets: int
) -> None:
    """Write a column's values one after the other, and nothing for null.

    :param node: number of the column's node. (A constant would be a second signature of a recursive function, and
        numba cannot load both from its cache.)
    :param output_offsets: address of int32[count + 1]
    """
    q = output
    store32(output_offsets, 0)
    for row in range(count):
        length = load32_native(lengths + 4 * row)
        if length > 0:
            q = put_canonical(program, node, base + load32_native(offsets + 4 * row), length, q)
        store32(output_offsets + 4 * row + 4, q - output)
