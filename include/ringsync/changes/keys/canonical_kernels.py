"""The compiled half of :mod:`ringsync.changes.keys.canonical`: one spelling for all equal values.

Types are the programs of :mod:`ringsync.changes.keys.order_kernels`, and two values have the same canonical bytes
exactly where they have the same bytes there. No canonical value is longer than what it was made of.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.changes.keys.order_kernels import FIELDS, NODE_BYTES, SEQUENCE, VECTOR, magnitude, part_of, stripped
from ringsync.compiled.memory import KERNEL, load8, load32_native, load32_signed, load64_native, store8, store32
from ringsync.cql.codec.encode_kernels import store_unsigned_vint, unsigned_vint_length
from ringsync.cql.natives import BOOLEAN, DECIMAL, FLOAT, VARINT

_NAN32, _NAN64 = 0x7FC00000, 0x7FF8000000000000
_MIN_SCALE = -(2**31)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy(p: int, length: int, q: int) -> int:
    """Copy bytes to before or behind where they are; the address behind the copy."""
    for i in range(length):
        store8(q + i, load8(p + i))
    return q + length


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put32(q: int, value: int) -> int:
    for i in range(4):
        store8(q + i, value >> (24 - 8 * i))
    return q + 4


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_varint(p: int, length: int, q: int) -> int:
    """A number without bytes that only repeat its sign."""
    skip = stripped(p, length)
    end: int = _copy(p + skip, length - skip, q)
    return end


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_magnitude(words: npt.NDArray[np.uint32], negative: int, q: int) -> int:
    """A number in two's complement, from its absolute value, lowest word first; needs four bytes more for a while."""
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
    """What is left of a number divided by ten; ``words`` become the tenth if that is wanted."""
    rest = np.int64(0)
    for i in range(len(words) - 1, -1, -1):
        value = (rest << 32) | np.int64(words[i])
        rest = value % 10
        if divide:
            words[i] = np.uint32(value // 10)
    return int(rest)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_decimal(p: int, length: int, q: int) -> int:
    """As Java's BigDecimal.stripTrailingZeros, which leaves them where the scale would be less than an int32."""
    scale = load32_signed(p)
    end: int
    # What ends in a zero is even.
    if load8(p + length - 1) & 1:
        end = _put_varint(p + 4, length - 4, _put32(q, scale))
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
    end = _put_magnitude(words, load8(p + 4) >> 7, _put32(q, scale))
    return end


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_native(kind: int, width: int, p: int, length: int, q: int) -> int:
    """A value that has no parts, as it is if these bytes are none."""
    found: int
    if kind == VARINT:
        found = _put_varint(p, length, q)
    elif kind == DECIMAL and length > 4:
        found = _put_decimal(p, length, q)
    else:
        found = _copy(p, length, q)
        if kind == BOOLEAN and length == 1:
            store8(q, load8(p) != 0)
        elif kind == FLOAT and length == width:
            high = load32_signed(p) & 0x7FFFFFFF
            if length == 4 and high > 0x7F800000:
                _put32(q, _NAN32)
            elif length == 8 and (high > 0x7FF00000 or (high == 0x7FF00000 and load32_signed(p + 4) != 0)):
                _put32(_put32(q, _NAN64 >> 32), 0)
    return found


@njit(inline="always")  # type: ignore[untyped-decorator]
def _length_bytes(kind: int, width: int, size: int) -> int:
    """Bytes of the length before a part of a composite value."""
    if kind != VECTOR:
        return 4
    length: int = 0 if width else unsigned_vint_length(max(size, 0))
    return length


@njit(inline="always")  # type: ignore[untyped-decorator]
def _close_part(kind: int, width: int, start: int, begins: int, behind: int) -> int:
    """Write the length before a part, which may have become less; the address behind the part.

    :param start: where the length is
    :param begins: where the part is
    :param behind: the address behind it; one less than ``begins``: the part is null
    """
    size = behind - begins
    end: int = max(behind, begins)
    if kind != VECTOR:
        _put32(start, size)
    elif not width:
        end = _copy(begins, size, store_unsigned_vint(start, size))
    return end


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_canonical(program: int, node: int, p: int, length: int, q: int) -> int:
    """Write a value's canonical form; the address behind it.

    :param program: address of the type's nodes
    :param node: number of this type's node
    :param p: address of the value
    :param length: its bytes, not negative
    :param q: where to write: as many bytes, and four more for a while
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
            written = _put32(q, items)
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
        # Nulls at the end of tuples and UDTs are left out, all but the first of nothing but nulls.
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
) -> int:
    """Write a column's values one behind the other, of null nothing; the bytes of all.

    :param node: of the column's type. (A constant would be a second signature of a function that calls itself, and
        numba cannot load such two from its cache.)
    :param output_offsets: of int32[count + 1]
    """
    q = output
    store32(output_offsets, 0)
    for row in range(count):
        length = load32_native(lengths + 4 * row)
        if length > 0:
            q = put_canonical(program, node, base + load32_native(offsets + 4 * row), length, q)
        store32(output_offsets + 4 * row + 4, q - output)
    return q - output
