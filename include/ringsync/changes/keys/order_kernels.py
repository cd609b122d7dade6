"""The compiled half of :mod:`ringsync.changes.keys.order`: values, clusterings and bounds as bytes that sort alike.

A type is a program: int64[nodes, 4] of kind, first child, number of children, and a number whose meaning depends on
the kind. Every value becomes a marker and a body. No body is the beginning of another one of its type, so the bytes
that follow cannot change the order. Output has room for ``GROWTH`` bytes per byte of input and ``MARGIN`` per value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.compiled.memory import (
    KERNEL,
    load8,
    load32_native,
    load32_signed,
    load64,
    load64_native,
    load_unsigned_vint,
    store8,
    store32,
)
from ringsync.cql.codec.encode_kernels import store_big_endian
from ringsync.cql.codec.gather import checked_vint_size
from ringsync.cql.natives import BOOLEAN, BYTES, DECIMAL, FLOAT, SIGNED, TIMEUUID, UUID, VARINT

SEQUENCE, FIELDS, VECTOR = range(TIMEUUID + 1, TIMEUUID + 4)
"""Kinds of types; they follow the kinds of native types. The node's number is the bytes of each value (0: any). For
VECTOR it is the dimension times 2**32 plus the bytes of each element (0: each has its length before it)."""

GROWTH, MARGIN = 4, 24
NODE_BYTES = 32

_END, _NULL, _EMPTY, _VALUE, _MISFIT = 0x00, 0x10, 0x20, 0x21, 0x22
"""Markers. Bytes that are no value of their type sort after all values, in the order of the bytes."""
_BEFORE, _ROW, _BEHIND = 0x00, 0x80, 0xFF
"""Last bytes of clusterings: a bound before all rows that begin with it, a row, a bound after these rows."""

START, END = 0, 1
"""Sides of a range."""
_SIGN = -(2**63)
_CHUNK, _CHUNK_DIGITS = 1_000_000_000, 9


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy(p: int, length: int, q: int, flip: int) -> int:
    """Copy bytes and invert the bits ``flip`` of the first. Return the address after them."""
    for i in range(length):
        store8(q + i, load8(p + i))
    if length:
        store8(q, load8(p) ^ flip)
    return q + length


@njit(inline="always")  # type: ignore[untyped-decorator]
def _flip(q: int, end: int) -> None:
    for at in range(q, end):
        store8(at, load8(at) ^ 0xFF)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_escaped(p: int, length: int, q: int) -> int:
    """Write bytes of any length: 255 follows each zero, and two zeros end them."""
    for i in range(length):
        byte = load8(p + i)
        store8(q, byte)
        q += 1
        if byte == 0:
            store8(q, 0xFF)
            q += 1
    store8(q, 0)
    store8(q + 1, 0)
    return q + 2


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_float(p: int, length: int, q: int) -> int:
    """Write a float in the order of Java's Double.compare: −0.0 before 0.0, all NaN equal and last."""
    sign = _SIGN
    bits = load64(p)
    infinity = 0x7FF0000000000000
    if length == 4:
        bits = load32_signed(p) << 32
        infinity = 0x7F80000000000000
    if (bits & ~sign) > infinity:
        bits = infinity + (infinity & -infinity) // 2
    bits = ~bits if bits < 0 else bits ^ sign
    end: int = store_big_endian(q, bits >> (64 - 8 * length), length)
    return end


@njit(inline="always")  # type: ignore[untyped-decorator]
def stripped(p: int, length: int) -> int:
    """Count the first bytes of a number that only repeat its sign."""
    skip = 0
    while skip < length - 1:
        first = load8(p + skip)
        same = load8(p + skip + 1) >> 7
        if not ((first == 0 and same == 0) or (first == 0xFF and same == 1)):
            break
        skip += 1
    return skip


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_varint(p: int, length: int, q: int) -> int:
    skip = stripped(p, length)
    p += skip
    length -= skip
    negative = load8(p) >> 7
    store8(q, 1 - negative)
    q = store_big_endian(q + 1, ~length if negative else length, 4)
    q = _copy(p, length, q, 0)
    return q


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def magnitude(p: int, length: int) -> npt.NDArray[np.uint32]:
    """Return the absolute value of a number in two's complement, lowest word first."""
    words = np.zeros((length + 3) // 4, np.uint32)
    flip = 0xFF if load8(p) >> 7 else 0
    carry = flip & 1
    for i in range(length):
        byte = (load8(p + length - 1 - i) ^ flip) + carry
        carry = byte >> 8
        words[i >> 2] |= np.uint32((byte & 0xFF) << (8 * (i & 3)))
    return words


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decimal_chunks(words: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int64], int]:
    """Split a number into chunks of nine digits, lowest first. Return them and their number. ``words`` become zero."""
    chunks = np.zeros(len(words) * 32 // 29 + 2, np.int64)
    used = 0
    high = len(words)
    while True:
        while high > 0 and words[high - 1] == 0:
            high -= 1
        if high == 0:
            return chunks, used
        rest = np.int64(0)
        for i in range(high - 1, -1, -1):
            value = (rest << 32) | np.int64(words[i])
            words[i] = np.uint32(value // _CHUNK)
            rest = value % _CHUNK
        chunks[used] = rest
        used += 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_decimal(p: int, length: int, q: int) -> int:
    """Write sign, exponent of the first digit, digits without zeros at the end (C: DecimalType compares numbers)."""
    scale = load32_signed(p)
    negative = load8(p + 4) >> 7
    chunks, used = _decimal_chunks(magnitude(p + 4, length - 4))
    if used == 0:
        store8(q, 1)
        return q + 1
    store8(q, 2)
    power, first = 1, 1
    while chunks[used - 1] >= 10 * power:
        power *= 10
        first += 1
    digits = (used - 1) * _CHUNK_DIGITS + first
    end: int = store_big_endian(q + 1, (digits - scale) ^ _SIGN, 8)
    last = end
    place = used - 1
    for _ in range(digits):
        digit = chunks[place] // power % 10
        store8(end, digit + 1)
        end += 1
        if digit:
            last = end
        power //= 10
        if power == 0:
            power = _CHUNK // 10
            place -= 1
    store8(last, 0)
    last += 1
    if negative:
        store8(q, 0)
        _flip(q + 1, last)
    return last


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_time(p: int, q: int) -> int:
    """Write a UUID's time, highest bytes first."""
    q = _copy(p + 6, 2, q, 0)
    q = _copy(p + 4, 2, q, 0)
    q = _copy(p, 4, q, 0)
    return q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_uuid(p: int, q: int) -> int:
    """Write the version, then the time (version 1) or the high half, then the low half (C: UUIDType)."""
    version = load8(p + 6) >> 4
    store8(q, version)
    q = _put_time(p, q + 1) if version == 1 else _copy(p, 8, q + 1, 0)
    q = _copy(p + 8, 8, q, 0)
    return q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_timeuuid(p: int, q: int) -> int:
    """Write the time, then the low half, each byte as a signed number (C: TimeUUIDType)."""
    q = _put_time(p, q)
    for i in range(8, 16):
        store8(q + i - 8, load8(p + i) ^ 0x80)
    return q + 8


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_native(kind: int, width: int, p: int, length: int, q: int) -> int:
    """Write the body of a value that has no parts. Return the address after it; -1: these bytes are no value."""
    end = -1
    if kind == BYTES:
        end = _put_escaped(p, length, q)
    elif kind == VARINT:
        end = _put_varint(p, length, q)
    elif kind == DECIMAL:
        if length > 4:
            end = _put_decimal(p, length, q)
    elif length != width:
        pass
    elif kind == FLOAT:
        end = _put_float(p, length, q)
    elif kind == UUID:
        end = _put_uuid(p, q)
    elif kind == TIMEUUID:
        end = _put_timeuuid(p, q)
    elif kind == BOOLEAN:
        end = _copy(p, 1, q, 0)
        store8(q, load8(p) != 0)
    else:
        end = _copy(p, length, q, 0x80 if kind == SIGNED else 0)
    return end


@njit(inline="always")  # type: ignore[untyped-decorator]
def part_of(kind: int, width: int, p: int, end: int) -> tuple[int, int]:
    """Find the next part of a composite value. Return its address and length (-1: null; less: malformed)."""
    length = width
    if kind == VECTOR:
        if width == 0:
            length = -2
            if checked_vint_size(p, end) > 0:
                length, p = load_unsigned_vint(p)
        if length < 0:
            length = -2
    else:
        length = load32_signed(p) if end - p >= 4 else -2
        p += 4
    return p, length if length <= end - p else -2


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_value(program: int, node: int, p: int, length: int, q: int) -> int:
    """Write a value so that unsigned byte order is the order of its type. Return the address after it.

    :param program: address of the type's nodes
    :param node: number of this type's node
    :param p: address of the value
    :param length: bytes of the value; -1: null
    :param q: address of the output
    """
    if length <= 0:
        store8(q, _EMPTY if length == 0 else _NULL)
        return q + 1
    at = program + NODE_BYTES * node
    kind, width = load64_native(at), load64_native(at + 24)
    store8(q, _VALUE)
    behind = -1
    if kind < SEQUENCE:
        behind = _put_native(kind, width, p, length, q + 1)
    else:
        child, count = load64_native(at + 8), load64_native(at + 16)
        children, part, end = count, p, p + length
        if kind == SEQUENCE:
            items = load32_signed(p) if length >= 4 else -1
            count *= items
            # With a negative number of elements these bytes are no value.
            part = p + 4 if items >= 0 else end + 1
        elif kind == VECTOR:
            count, width = width >> 32, width & 0xFFFFFFFF
        written = kept = q + 1
        number = 0
        while number < count and not (kind == FIELDS and part == end):
            part, size = part_of(kind, width, part, end)
            if size < -1:
                part = end + 1
                break
            written = put_value(program, child + number % children, part, size, written)
            # Nulls at the end of tuples and UDTs are left out, because the last fields may be missing.
            kept = written if size >= 0 or kind != FIELDS else kept
            part += max(size, 0)
            number += 1
        if part == end:
            store8(kept, _END)
            behind = kept + 1
    if behind < 0:
        store8(q, _MISFIT)
        behind = _put_escaped(p, length, q + 1)
    return behind


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_values(
    base: int, offsets: int, lengths: int, count: int, program: int, node: int, output: int, output_offsets: int
) -> None:
    """Write a column's values one after the other.

    :param output_offsets: address of int32[count + 1]
    """
    q = output
    store32(output_offsets, 0)
    for row in range(count):
        q = put_value(program, node, base + load32_native(offsets + 4 * row), load32_native(lengths + 4 * row), q)
        store32(output_offsets + 4 * row + 4, q - output)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_clusterings(
    base: int,
    offsets: int,
    lengths: int,
    count: int,
    program: int,
    columns: int,
    descending: int,
    side: int,
    output: int,
    output_offsets: int,
) -> int:
    """Write clusterings and bounds, and nothing for null. Return the bytes of all; -1: one is malformed.

    :param program: address of the nodes; the first ones are the clustering columns' types
    :param columns: number of clustering columns
    :param descending: address of one byte per column: whether it is descending
    :param side: START or END: the side of the range at which bounds stand
    """
    q = output
    store32(output_offsets, 0)
    for row in range(count):
        p = base + load32_native(offsets + 4 * row)
        length = load32_native(lengths + 4 * row)
        end = p + length
        if length >= 0:
            if length < 4:
                return -1
            values = load32_native(p)
            p += 4
            if values < 0 or values > columns:
                return -1
            for column in range(values):
                size = load32_native(p) if end - p >= 4 else -2
                p += 4
                if size < -1 or size > end - p:
                    return -1
                start = q
                q = put_value(program, column, p, size, q)
                if size >= 0 and load8(descending + column):
                    _flip(start, q)
                p += max(size, 0)
            last = _ROW
            if end - p == 1:
                last = _BEFORE if (load8(p) != 0) == (side == START) else _BEHIND
            elif p != end:
                return -1
            store8(q, last)
            q += 1
        store32(output_offsets + 4 * row + 4, q - output)
    return q - output
