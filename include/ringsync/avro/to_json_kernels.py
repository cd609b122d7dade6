"""The compiled loop of :mod:`ringsync.avro.to_json`: Avro datums become JSON.

A program is a list of instructions: three int64, an operation and two numbers ``a`` and ``b``. The instructions of an
Avro schema have the order of the values in a datum:

========== ============================================================================================
LITERAL    write the ``b`` bytes at place ``a`` of the literals
UNION      read the branch; if it is ``a``, which is null, write ``null`` and jump to byte ``b``
LONG       write an int or long
BOOLEAN    write a boolean
TEXT       write a string
BYTES      write bytes as a string of base64
DECIMAL    write a big-decimal as a string, like BigDecimal.toString
FLOAT      note the ``a`` bytes (4 or 8) and the place: the digits are inserted later
ITEMS      read the number of items of an array or map; if there are none, jump to byte ``b``
NEXT       after an item: jump back to byte ``b`` for the next one; after the last go on
END        the datum is complete
========== ============================================================================================

``p`` and ``end`` are addresses in the datum, ``q`` and ``limit`` in the output. All buffers end in
:data:`~ringsync.compiled.memory.PADDING` spare bytes. ``p`` becomes ``DAMAGED`` if a datum does not fit the program
(:mod:`ringsync.avro.datum_kernels`). ``q`` becomes :data:`FULL` if the output is too small.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ringsync.avro.datum_kernels import DAMAGED, read_length, read_long
from ringsync.compiled.memory import KERNEL, copy_bytes, load8, load64_native, store8, store32, store64
from ringsync.cql.codec.text_forms import DIGITS_PER_BYTE, NUMBER_ROOM, write_digits, write_scaled

LITERAL, UNION, LONG, BOOLEAN, TEXT, BYTES, DECIMAL, FLOAT, ITEMS, NEXT, END = range(11)
INSTRUCTION_BYTES = 24

FULL = 0

_LONGEST_LONG = 20
_LONGEST_ESCAPE = 6
_QUOTE, _BACKSLASH, _DASH, _ZERO, _COMMA, _EQUALS = b'"\\-0,='
_TRUE, _FALSE, _NULL, _ESCAPED = (int.from_bytes(text, "little") for text in (b"true", b"fals", b"null", b"\\u00"))
_LAST_OF_FALSE = ord("e")
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_BASE64 = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)

# Words of eight equal bytes.
_ONES, _SPACES, _QUOTES, _BACKSLASHES = (int.from_bytes(bytes([byte] * 8), "little") for byte in (1, 32, 34, 92))
_HIGH_BITS = -0x7F7F_7F7F_7F7F_7F80


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def write_json(
    program: int,
    literals: int,
    data: int,
    offsets: int,
    first: int,
    rows: int,
    output: int,
    limit: int,
    ends: int,
    floats: int,
    stack: int,
    scratch: int,
    scratch_end: int,
) -> int:
    """Write the JSON of datums, one after the other.

    :param offsets: address of int64[rows + 1]: offsets of the datums in ``data``
    :param first: number of the first datum to write
    :param ends: output: address of int64[rows]: end of each datum's JSON in the output
    :param floats: output: address of int64: number of floats, then for each its place in the output, address and bytes
    :param stack: address of one int64 per level of nested arrays and maps
    :param scratch: address of room for the digits of the longest big-decimal, see
        :mod:`ringsync.cql.codec.text_forms`
    :returns: number of the first datum that did not fit, or ``rows``; −1 − row: this datum is damaged
    """
    q = output
    noted = 0
    for row in range(first, rows):
        p = data + load64_native(offsets + 8 * row)
        end = data + load64_native(offsets + 8 * row + 8)
        p, q, noted = _write_datum(
            program, literals, p, end, q, limit, output, floats, noted, stack, scratch, scratch_end
        )
        if q == FULL:
            return row
        if p != end:
            return -1 - row
        store64(ends + 8 * row, q - output)
        store64(floats, noted)
    return rows


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_datum(
    program: int,
    literals: int,
    p: int,
    end: int,
    q: int,
    limit: int,
    output: int,
    floats: int,
    noted: int,
    stack: int,
    scratch: int,
    scratch_end: int,
) -> tuple[int, int, int]:
    step = program
    while p != DAMAGED and q != FULL:
        kind, a, b = load64_native(step), load64_native(step + 8), load64_native(step + 16)
        step += INSTRUCTION_BYTES
        if kind == LITERAL:
            q = _write_literal(literals + a, b, q, limit)
        elif kind == UNION:
            branch, p = read_long(p, end)
            if branch == a:
                q = _write_word(_NULL, q, limit)
                step = program + b
        elif kind == ITEMS:
            left, p = _read_count(p, end)
            if left == 0:
                step = program + b
            else:
                store64(stack, left)
                stack += 8
        elif kind == NEXT:
            left = load64_native(stack - 8) - 1
            if left == 0:
                left, p = _read_count(p, end)
            if left == 0:
                stack -= 8
            else:
                store64(stack - 8, left)
                q = _write_byte(_COMMA, q, limit)
                step = program + b
        elif kind == FLOAT:
            store64(floats + 8 + 24 * noted, q - output)
            store64(floats + 16 + 24 * noted, p)
            store64(floats + 24 + 24 * noted, a)
            noted += 1
            p = p + a if a <= end - p else DAMAGED
        elif kind == END:
            break
        else:
            p, q = _write_value(kind, p, end, q, limit, scratch, scratch_end)
    return p, q, noted


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_value(kind: int, p: int, end: int, q: int, limit: int, scratch: int, scratch_end: int) -> tuple[int, int]:
    if kind == LONG:
        value, p = read_long(p, end)
        q = _write_long(value, q, limit)
    elif kind == TEXT:
        p, q = _write_text(p, end, q, limit)
    elif kind == BOOLEAN:
        p, q = _write_boolean(p, end, q, limit)
    elif kind == BYTES:
        p, q = _write_base64(p, end, q, limit)
    else:
        p, q = _write_decimal(p, end, q, limit, scratch, scratch_end)
    return p, q


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _read_count(p: int, end: int) -> tuple[int, int]:
    """Read the number of items in a block. If it is negative, the block's bytes follow. An item has at least a byte."""
    count, p = read_long(p, end)
    if p != DAMAGED and count < 0:
        _, p = read_long(p, end)
        count = -count
    if p == DAMAGED or count < 0 or count > end - p:
        return 0, DAMAGED
    return count, p


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_literal(literal: int, length: int, q: int, limit: int) -> int:
    if length > limit - q:
        return FULL
    copy_bytes(q, literal, length)
    return q + length


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_byte(byte: int, q: int, limit: int) -> int:
    if q >= limit:
        return FULL
    store8(q, byte)
    return q + 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_word(word: int, q: int, limit: int) -> int:
    if limit - q < 4:
        return FULL
    store32(q, word)
    return q + 4


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_long(value: int, q: int, limit: int) -> int:
    if limit - q < _LONGEST_LONG:
        return FULL
    # The least int64 has no positive counterpart, so the last digit is taken off before the sign.
    last = value % 10
    rest = value // 10
    if value < 0:
        store8(q, _DASH)
        q += 1
        last = (10 - last) % 10
        rest = -(rest + (1 if last else 0))
    digits = 0
    left = rest
    while left:
        left //= 10
        digits += 1
    for place in range(q + digits - 1, q - 1, -1):
        tens = rest // 10
        store8(place, _ZERO + rest - 10 * tens)
        rest = tens
    store8(q + digits, _ZERO + last)
    return q + digits + 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_boolean(p: int, end: int, q: int, limit: int) -> tuple[int, int]:
    if p >= end:
        return DAMAGED, q
    if load8(p):
        return p + 1, _write_word(_TRUE, q, limit)
    q = _write_word(_FALSE, q, limit)
    return p + 1, (FULL if q == FULL else _write_byte(_LAST_OF_FALSE, q, limit))


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_text(p: int, end: int, q: int, limit: int) -> tuple[int, int]:
    """Write a string; only quotes, backslashes and control characters are escaped."""
    length, p = read_length(p, end)
    if p == DAMAGED:
        return p, q
    if limit - q < _LONGEST_ESCAPE * length + 2:
        return p, FULL
    store8(q, _QUOTE)
    q += 1
    end = p + length
    while p < end:
        if end - p >= 8:
            word = load64_native(p)
            quotes, backslashes = word ^ _QUOTES, word ^ _BACKSLASHES
            special = ((word - _SPACES) & ~word) | ((quotes - _ONES) & ~quotes) | ((backslashes - _ONES) & ~backslashes)
            if special & _HIGH_BITS == 0:
                store64(q, word)
                p += 8
                q += 8
                continue
        byte = load8(p)
        p += 1
        if byte in (_QUOTE, _BACKSLASH):
            store8(q, _BACKSLASH)
            q += 1
        elif byte < 0x20:
            store32(q, _ESCAPED)
            store8(q + 4, _ZERO + (byte >> 4))
            q += 5
            byte = _DIGITS[byte & 15]
        store8(q, byte)
        q += 1
    store8(q, _QUOTE)
    return p, q + 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_base64(p: int, end: int, q: int, limit: int) -> tuple[int, int]:
    length, p = read_length(p, end)
    if p == DAMAGED:
        return p, q
    if limit - q < (length + 2) // 3 * 4 + 2:
        return p, FULL
    store8(q, _QUOTE)
    q += 1
    end = p + length
    while p < end:
        taken = min(end - p, 3)
        bits = load8(p) << 16
        if taken > 1:
            bits |= load8(p + 1) << 8
        if taken > 2:
            bits |= load8(p + 2)
        for place in range(4):
            store8(q + place, _BASE64[(bits >> (18 - 6 * place)) & 63] if place <= taken else _EQUALS)
        p += taken
        q += 4
    store8(q, _QUOTE)
    return p, q + 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_decimal(p: int, end: int, q: int, limit: int, scratch: int, scratch_end: int) -> tuple[int, int]:
    """Write a big-decimal: bytes that hold the unscaled number as bytes, and the scale (Avro's logical type)."""
    length, p = read_length(p, end)
    if p == DAMAGED:
        return p, q
    end = p + length
    size, unscaled = read_length(p, end)
    if unscaled == DAMAGED or size == 0:
        return DAMAGED, q
    scale, p = read_long(unscaled + size, end)
    if p != end:
        return DAMAGED, q
    if limit - q < DIGITS_PER_BYTE * size + NUMBER_ROOM:
        return p, FULL
    store8(q, _QUOTE)
    q += 1
    if load8(unscaled) >= 0x80:
        store8(q, _DASH)
        q += 1
    digits = write_digits(unscaled, size, scratch, scratch_end)
    q = write_scaled(q, digits, scratch_end - digits, scale)
    store8(q, _QUOTE)
    return p, q + 1
