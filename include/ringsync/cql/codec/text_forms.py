"""Kernels that write the text of uuid, inet, varint and decimal values.

The arguments are those of :mod:`ringsync.cql.codec.gather`; ``starts`` gets Arrow's offsets of the texts in ``output``.
Each kernel returns the number of bytes written. ``output`` must have room for the longest text in each row: the
``*_ROOM`` constants say how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ringsync.compiled.memory import (
    KERNEL,
    copy_bytes,
    load8,
    load16,
    load32,
    load32_native,
    load32_signed,
    load64_native,
    store8,
    store32,
    store64,
)

UUID_ROOM = 36
INET_ROOM = 39
NUMBER_ROOM = 32
"""Room besides :data:`DIGITS_PER_BYTE` digits per byte: sign, point, zeros before the first digit, exponent."""
DIGITS_PER_BYTE = 3

_DASH, _POINT, _COLON, _ZERO, _PLUS, _E = b"-.:0+E"


@intrinsic  # type: ignore[untyped-decorator]
def uuid_characters(_context: Any, _destination: Any, _source: Any) -> Any:
    """Write the 36 characters of the uuid whose 16 bytes are at ``_source``.

    Vector instructions make the digits of all half bytes at once, and put them between the dashes.
    """

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        def vector(values: Sequence[int], bits: int = 8) -> Any:
            return ir.Constant(ir.VectorType(ir.IntType(bits), len(values)), list(values))

        def shuffled(first: Any, second: Any, order: Sequence[int]) -> Any:
            return builder.shuffle_vector(first, second, vector(order, 32))

        def stored(value: Any, at: int) -> None:
            place = builder.add(arguments[0], ir.Constant(ir.IntType(64), at))
            builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=1)

        source = builder.inttoptr(arguments[1], ir.VectorType(ir.IntType(8), 16).as_pointer())
        data = builder.load(source, align=1)
        high, low = builder.lshr(data, vector([4] * 16)), builder.and_(data, vector([15] * 16))
        digits = []
        for first in (0, 8):
            nibbles = shuffled(high, low, [place + side for place in range(first, first + 8) for side in (0, 16)])
            letters = builder.icmp_unsigned(">", nibbles, vector([9] * 16))
            base = builder.select(letters, vector([ord("a") - 10] * 16), vector([ord("0")] * 16))
            digits.append(builder.add(nibbles, base))
        dashed = shuffled(digits[0], vector([_DASH] * 16), [*range(8), 16, *range(8, 12), 16, 12, 13])
        stored(dashed, 0)
        rest = shuffled(digits[0], digits[1], [14, 15, *range(16, 30)])
        dashes = vector([_DASH] * 16)
        stored(shuffled(rest, dashes, [0, 1, 16, 2, 3, 4, 5, 16, *range(6, 14)]), 16)
        stored(shuffled(digits[1], digits[1], [12, 13, 14, 15]), 32)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def uuid_text(base: int, offsets: int, lengths: int, count: int, starts: int, output: int) -> int:
    """Write uuids as 36 characters; values of another length become empty."""
    out = output
    for row in range(count):
        store32(starts + 4 * row, out - output)
        if load32_native(lengths + 4 * row) == 16:
            uuid_characters(out, base + load32_native(offsets + 4 * row))
            out += UUID_ROOM
    store32(starts + 4 * count, out - output)
    return out - output


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def inet_text(base: int, offsets: int, lengths: int, count: int, starts: int, output: int) -> int:
    """Write addresses of 4 bytes with points, those of 16 bytes by RFC 5952; other values become empty."""
    out = output
    for row in range(count):
        store32(starts + 4 * row, out - output)
        length = load32_native(lengths + 4 * row)
        p = base + load32_native(offsets + 4 * row)
        if length == 4:
            out = _write_ipv4(out, p)
        elif length == 16:
            out = _write_ipv6(out, p)
    store32(starts + 4 * count, out - output)
    return out - output


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_ipv4(out: int, p: int) -> int:
    for index in range(4):
        if index > 0:
            store8(out, _POINT)
            out += 1
        value = load8(p + index)
        if value >= 100:
            store8(out, _ZERO + value // 100)
            out += 1
        if value >= 10:
            store8(out, _ZERO + value // 10 % 10)
            out += 1
        store8(out, _ZERO + value % 10)
        out += 1
    return out


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _write_ipv6(out: int, p: int) -> int:
    """Write an address by RFC 5952: no leading zeros, ``::`` for the first longest run of two or more zero groups
    (section 4), a mapped IPv4 address with dots (section 5)."""
    mapped = load64_native(p) == 0 and load32(p + 8) == 0xFFFF
    groups = 6 if mapped else 8
    run_start, run_length, length = -1, 1, 0
    for group in range(groups):
        length = length + 1 if load16(p + 2 * group) == 0 else 0
        if length > run_length:
            run_start, run_length = group - length + 1, length
    group = 0
    while group < groups:
        if group == run_start:
            store8(out, _COLON)
            store8(out + 1, _COLON)
            out += 2
            group += run_length
            continue
        if group > 0 and group != run_start + run_length:
            store8(out, _COLON)
            out += 1
        value = load16(p + 2 * group)
        for shift in (12, 8, 4, 0):
            if value >> shift or shift == 0:
                digit = (value >> shift) & 15
                store8(out, _ZERO + digit + (39 if digit > 9 else 0))
                out += 1
        group += 1
    if mapped:
        store8(out, _COLON)
        out = _write_ipv4(out + 1, p + 12)
    return out


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def number_text(
    base: int,
    offsets: int,
    lengths: int,
    count: int,
    scaled: int,
    scratch: int,
    scratch_end: int,
    starts: int,
    output: int,
    misfits: int,
) -> int:
    """Write varints (``scaled`` 0) like BigInteger.toString, decimals (1) like BigDecimal.toString.

    A varint is the shortest two's complement of a number; a decimal is an int32 scale and a varint. All other bytes are
    misfits. The scratch memory must have room for :data:`DIGITS_PER_BYTE` digits and two bytes per byte of the longest
    value, and 64 bytes.
    """
    out = output
    for row in range(count):
        store32(starts + 4 * row, out - output)
        length = load32_native(lengths + 4 * row)
        if length < 0:
            continue
        p = base + load32_native(offsets + 4 * row)
        scale = 0
        if scaled and length >= 4:
            scale = load32_signed(p)
        p += 4 * scaled
        length -= 4 * scaled
        if length < 1 or (length > 1 and ((load16(p) + 0x80) & 0xFFFF) < 0x100):
            store8(misfits + row, 1)
            continue
        if load8(p) >= 0x80:
            store8(out, _DASH)
            out += 1
        digits = write_digits(p, length, scratch, scratch_end)
        out = write_scaled(out, digits, scratch_end - digits, scale)
    store32(starts + 4 * count, out - output)
    return out - output


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def write_digits(p: int, length: int, limbs: int, end: int) -> int:
    """Write the digits of a two's complement number's magnitude so that they end at ``end``. Return their start.

    :param limbs: address of memory for ``length`` bytes and 15 more
    """
    negative = -1 if load8(p) >= 0x80 else 0
    size = 0
    carry = -negative
    left = length
    while left > 0:
        taken = min(left, 4)
        limb = load32(p + left - taken) >> (8 * (4 - taken))
        if negative:
            limb ^= (1 << (8 * taken)) - 1
        limb += carry
        carry = limb >> 32
        store64(limbs + 8 * size, limb & 0xFFFFFFFF)
        size += 1
        left -= taken
    if carry:
        store64(limbs + 8 * size, carry)
        size += 1
    out = end
    while size > 0:
        remainder = 0
        for index in range(size - 1, -1, -1):
            part = (remainder << 32) | load64_native(limbs + 8 * index)
            quotient = part // 1_000_000_000
            remainder = part - quotient * 1_000_000_000
            store64(limbs + 8 * index, quotient)
        while size > 0 and load64_native(limbs + 8 * (size - 1)) == 0:
            size -= 1
        for _ in range(9):
            if size == 0 and remainder == 0 and out < end:
                break
            out -= 1
            store8(out, _ZERO + remainder % 10)
            remainder //= 10
    return out


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def write_scaled(out: int, digits: int, size: int, scale: int) -> int:
    """Write an unscaled magnitude like BigDecimal.toString. Return the end of its text."""
    exponent = size - 1 - scale
    if scale == 0:
        copy_bytes(out, digits, size)
        return out + size
    if scale > 0 and exponent >= -6:
        whole = size - scale
        if whole <= 0:
            store8(out, _ZERO)
            store8(out + 1, _POINT)
            out += 2
            for _ in range(-whole):
                store8(out, _ZERO)
                out += 1
            copy_bytes(out, digits, size)
            return out + size
        copy_bytes(out, digits, whole)
        store8(out + whole, _POINT)
        copy_bytes(out + whole + 1, digits + whole, scale)
        return out + size + 1
    store8(out, load8(digits))
    out += 1
    if size > 1:
        store8(out, _POINT)
        copy_bytes(out + 1, digits + 1, size - 1)
        out += size
    store8(out, _E)
    store8(out + 1, _DASH if exponent < 0 else _PLUS)
    out += 2
    power = 1
    while abs(exponent) // power >= 10:
        power *= 10
    while power > 0:
        store8(out, _ZERO + abs(exponent) // power % 10)
        out += 1
        power //= 10
    return out
