"""Compiled parsers of the CQL types that are text in the lake: decimal, varint, inet, uuid.

Each kernel reads the texts of a large_binary array (``texts``: address of the first row's int64 offset;
``text_data``: address of the bytes). It writes Cassandra's bytes to ``data`` and their offsets to ``offsets``
(int64[rows + 1]). It returns the first row whose text it cannot parse, or −1. Null rows (``bitmap``, ``first_bit``) get
no bytes.
"""

from __future__ import annotations

from numba import njit

from ringsync.compiled.memory import (
    KERNEL,
    count_leading_zeros,
    is_valid,
    load8,
    load64_native,
    store8,
    store64,
)
from ringsync.cql.codec.encode_kernels import store_big_endian

ZERO, NINE, PLUS, MINUS, POINT, COLON = 48, 57, 43, 45, 46, 58
DIGITS_PER_LIMB_STEP = 9
"""Decimal digits that are added to the big number at once: 10^9 times a 32-bit limb fits int64."""
LIMIT_OF_EXPONENT = 1 << 40
"""A greater exponent is refused before it can overflow int64; a scale is an int32 anyway."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def multiply_add(limbs: int, count: int, factor: int, summand: int) -> int:
    """Compute big number × factor + summand, in 32-bit limbs, lowest first, each in an int64. Return their number."""
    carry = summand
    for index in range(count):
        carry += load64_native(limbs + 8 * index) * factor
        store64(limbs + 8 * index, carry & 0xFFFF_FFFF)
        carry >>= 32
    if carry:
        store64(limbs + 8 * count, carry)
        count += 1
    return count


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def store_twos_complement(p: int, limbs: int, count: int, negative: bool) -> int:
    """Write a big number in the fewest bytes of two's complement, like BigInteger.toByteArray."""
    if count == 0:
        store8(p, 0)
        return p + 1
    if negative:  # −n is the complement of n − 1
        index = 0
        while load64_native(limbs + 8 * index) == 0:
            store64(limbs + 8 * index, 0xFFFF_FFFF)
            index += 1
        store64(limbs + 8 * index, load64_native(limbs + 8 * index) - 1)
    top = load64_native(limbs + 8 * (count - 1))
    bits = 32 * (count - 1) + 64 - count_leading_zeros(top)
    flip = 0xFF if negative else 0
    for index in range(bits // 8, -1, -1):
        limb = load64_native(limbs + 8 * (index >> 2)) if index >> 2 < count else 0
        store8(p, (limb >> (8 * (index & 3))) & 0xFF ^ flip)
        p += 1
    return p


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def read_digits(p: int, end: int, limbs: int) -> tuple[int, int, int, int]:
    """Read decimal digits with at most one point into a big number.

    :returns: address of the first other character, number of limbs, of digits, and of digits after the point; -1: there
        is no point
    """
    count = chunk = digits = 0
    factor = 1
    point = -1
    while p < end:
        character = load8(p)
        if character == POINT and point < 0:
            point = digits
        elif ZERO <= character <= NINE:
            chunk = chunk * 10 + (character - ZERO)
            factor *= 10
            digits += 1
            if digits % DIGITS_PER_LIMB_STEP == 0:
                count = multiply_add(limbs, count, factor, chunk)
                chunk = 0
                factor = 1
        else:
            break
        p += 1
    if factor > 1:
        count = multiply_add(limbs, count, factor, chunk)
    return p, count, digits, (digits - point if point >= 0 else -1)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def read_exponent(p: int, end: int) -> tuple[int, bool]:
    """Read the exponent of a decimal: nothing, or E and a number. Return it, and whether it is well-formed."""
    if p == end:
        return 0, True
    if load8(p) | 0x20 != 0x65:  # e, E
        return 0, False
    p += 1
    negative = p < end and load8(p) == MINUS
    if p < end and (load8(p) == PLUS or negative):
        p += 1
    if p == end:
        return 0, False
    exponent = 0
    while p < end:
        character = load8(p)
        if character < ZERO or character > NINE or exponent > LIMIT_OF_EXPONENT:
            return 0, False
        exponent = exponent * 10 + (character - ZERO)
        p += 1
    return (-exponent if negative else exponent), True


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def parse_numbers(
    texts: int,
    text_data: int,
    bitmap: int,
    first_bit: int,
    rows: int,
    with_scale: int,
    limbs: int,
    offsets: int,
    data: int,
) -> int:
    """Parse varints (``with_scale`` 0) or decimals (1) in the form of BigInteger.toString and BigDecimal.toString.

    :param limbs: address of int64 scratch: one for each 9 digits of the longest text, and two more
    :param data: address with room for half of each text and 6 bytes more
    """
    p = data
    store64(offsets, 0)
    for row in range(rows):
        if is_valid(bitmap, first_bit + row):
            start = text_data + load64_native(texts + 8 * row)
            end = text_data + load64_native(texts + 8 * row + 8)
            negative = start < end and load8(start) == MINUS
            if start < end and (negative or load8(start) == PLUS):
                start += 1
            start, count, digits, fraction = read_digits(start, end, limbs)
            if digits == 0:
                return row
            if with_scale:
                exponent, well_formed = read_exponent(start, end)
                scale = max(fraction, 0) - exponent
                if not well_formed or scale < -0x8000_0000 or scale > 0x7FFF_FFFF:
                    return row
                p = store_big_endian(p, scale, 4)
            elif start != end or fraction >= 0:
                return row
            p = store_twos_complement(p, limbs, count, negative)
        store64(offsets + 8 * row + 8, p - data)
    return -1


@njit(inline="always")  # type: ignore[untyped-decorator]
def hex_digit(character: int) -> int:
    """Return the value of a hexadecimal digit, or −1. It has no branches: random digits would make them slow."""
    letter = character | 0x20
    no_digit = ((character - ZERO) | (NINE - character)) >> 63
    no_letter = ((letter - 97) | (102 - letter)) >> 63
    return ((character & 15) + 9 * (character >> 6)) | (no_digit & no_letter)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def parse_uuids(texts: int, text_data: int, bitmap: int, first_bit: int, rows: int, offsets: int, data: int) -> int:
    """Parse UUIDs of the form 8-4-4-4-12; ``data`` has room for 16 bytes a row."""
    p = data
    store64(offsets, 0)
    for row in range(rows):
        if is_valid(bitmap, first_bit + row):
            text = text_data + load64_native(texts + 8 * row)
            if load64_native(texts + 8 * row + 8) - load64_native(texts + 8 * row) != 36:
                return row
            index = 0
            for byte in range(16):
                if byte == 4 or byte == 6 or byte == 8 or byte == 10:
                    if load8(text + index) != MINUS:
                        return row
                    index += 1
                value = hex_digit(load8(text + index)) << 4 | hex_digit(load8(text + index + 1))
                if value < 0:
                    return row
                store8(p + byte, value)
                index += 2
            p += 16
        store64(offsets + 8 * row + 8, p - data)
    return -1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def read_ipv4(text: int, end: int, p: int) -> bool:
    """Write the four bytes of a dotted address. Tell whether it is one. Leading zeros are refused: some read octal."""
    for part in range(4):
        value = digits = 0
        while text < end and ZERO <= load8(text) <= NINE and digits < 4:
            value = value * 10 + (load8(text) - ZERO)
            digits += 1
            text += 1
        if digits == 0 or value > 255 or (digits > 1 and load8(text - digits) == ZERO):
            return False
        store8(p + part, value)
        if part < 3:
            if text == end or load8(text) != POINT:
                return False
            text += 1
    return text == end


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def read_group(text: int, end: int) -> tuple[int, int]:
    """Read up to four hexadecimal digits. Return the address after them, and their value."""
    value = 0
    limit = min(end, text + 4)
    while text < limit and hex_digit(load8(text)) >= 0:
        value = value << 4 | hex_digit(load8(text))
        text += 1
    return text, value


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def fill_gap(p: int, groups: int, gap: int) -> bool:
    """Put zeros in place of ``::`` before group ``gap``; −1: there was none. Tell whether the address is complete."""
    if gap < 0:
        return groups == 8
    moved = 2 * (groups - gap)
    for index in range(1, moved + 1):
        store8(p + 16 - index, load8(p + 2 * groups - index))
    for index in range(2 * gap, 16 - moved):
        store8(p + index, 0)
    return groups < 8


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def read_ipv6(text: int, end: int, p: int) -> bool:
    """Write the 16 bytes of an IPv6 address in any form of RFC 4291, section 2.2. Tell whether the text is one."""
    groups = 0
    gap = -1
    # A first colon must be one of two. The loop takes the second one for the start of a gap.
    if load8(text) == COLON:
        text += 1
        if text == end or load8(text) != COLON:
            return False
    while text < end:
        if load8(text) == COLON:
            if gap >= 0:
                return False
            gap = groups
            text += 1
            continue
        behind, value = read_group(text, end)
        if behind < end and load8(behind) == POINT:
            if groups > 6 or not read_ipv4(text, end, p + 2 * groups):
                return False
            groups += 2
            break
        if behind == text or groups == 8:
            return False
        store_big_endian(p + 2 * groups, value, 2)
        groups += 1
        text = behind
        if text < end:
            if load8(text) != COLON or text + 1 == end:
                return False
            text += 1
    whole: bool = fill_gap(p, groups, gap)
    return whole


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def parse_inets(texts: int, text_data: int, bitmap: int, first_bit: int, rows: int, offsets: int, data: int) -> int:
    """Parse IPv4 and IPv6 addresses to 4 and 16 bytes; ``data`` has room for 16 bytes a row.

    An IPv4-mapped address (``::ffff:192.0.2.1``) stays 16 bytes, though Java would make it 4.
    """
    p = data
    store64(offsets, 0)
    for row in range(rows):
        if is_valid(bitmap, first_bit + row):
            text = text_data + load64_native(texts + 8 * row)
            end = text_data + load64_native(texts + 8 * row + 8)
            is_ipv6 = False
            for character in range(text, min(end, text + 5)):
                if load8(character) == COLON:
                    is_ipv6 = True
            if not (read_ipv6(text, end, p) if is_ipv6 else read_ipv4(text, end, p)):
                return row
            p += 16 if is_ipv6 else 4
        store64(offsets + 8 * row + 8, p - data)
    return -1
