"""Kernels that gather serialised values into Arrow buffers, and kernels that split collections into elements.

All arguments are int64: addresses, counts. ``offsets`` and ``lengths`` are addresses of a column's
:class:`~ringsync.cql.cells.Cells`. ``count`` is the number of rows. ``misfits`` is the address of one byte per row, set
to 1 if the bytes are no value of the type. Values must lie within the buffer; their content is never trusted.
"""

from __future__ import annotations

from numba import njit

from ringsync.compiled.memory import (
    KERNEL,
    copy_bytes,
    count_leading_zeros,
    load8,
    load16,
    load32,
    load32_native,
    load32_signed,
    load64,
    load64_native,
    load_unsigned_vint,
    store8,
    store16,
    store32,
    store64,
)

MAX_MILLISECONDS = (2**63 - 1) // 1000
"""Greatest timestamp that int64 µs can hold; the smallest is its negative."""


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def gather_fixed(base: int, offsets: int, lengths: int, count: int, width: int, flip: int, output: int) -> int:
    """Gather values of 1, 2, 4 or 8 bytes. Return the number of rows with another length; they get 0.

    :param flip: bits to invert, only for 4 bytes (2^31 makes an unsigned date a signed one)
    """
    other = 0
    for row in range(count):
        value = 0
        if load32_native(lengths + 4 * row) == width:
            at = base + load32_native(offsets + 4 * row)
            if width == 4:
                value = load32(at) ^ flip
            elif width == 8:
                value = load64(at)
            elif width == 2:
                value = load16(at)
            else:
                value = load8(at)
        else:
            other += 1
        if width == 4:
            store32(output + 4 * row, value)
        elif width == 8:
            store64(output + 8 * row, value)
        elif width == 2:
            store16(output + 2 * row, value)
        else:
            store8(output + row, value)
    return other


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def gather_timestamps(base: int, offsets: int, lengths: int, count: int, output: int, misfits: int) -> None:
    """Convert milliseconds to int64 µs."""
    for row in range(count):
        length = load32_native(lengths + 4 * row)
        value = 0
        if length == 8:
            value = load64(base + load32_native(offsets + 4 * row))
        if (length != 8 and length >= 0) or value > MAX_MILLISECONDS or value < -MAX_MILLISECONDS:
            store8(misfits + row, 1)
        store64(output + 8 * row, value * 1000)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def gather_booleans(base: int, offsets: int, lengths: int, count: int, output: int, misfits: int) -> None:
    """Convert bytes 00 and 01 to a bitmap of ``(count + 7) // 8`` bytes."""
    for group in range((count + 7) >> 3):
        bits = 0
        for row in range(group * 8, min(group * 8 + 8, count)):
            length = load32_native(lengths + 4 * row)
            if length >= 0:
                value = load8(base + load32_native(offsets + 4 * row))
                if length != 1 or value > 1:
                    store8(misfits + row, 1)
                else:
                    bits |= value << (row & 7)
        store8(output + group, bits)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def gather_durations(
    base: int, offsets: int, lengths: int, count: int, months: int, days: int, nanoseconds: int, misfits: int
) -> None:
    """Convert three signed vints to int32, int32, int64. Vints that are longer than necessary are misfits, too."""
    for row in range(count):
        length = load32_native(lengths + 4 * row)
        p = base + load32_native(offsets + 4 * row)
        end = p + max(length, 0)
        good = length >= 0
        for field in range(3):
            value = 0
            size = checked_vint_size(p, end)
            if good and size > 0:
                unsigned, p = load_unsigned_vint(p)
                value = ((unsigned >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(unsigned & 1)
            else:
                good = False
            if field == 2:
                store64(nanoseconds + 8 * row, value)
            else:
                good = good and -(2**31) <= value < 2**31
                store32((months if field == 0 else days) + 4 * row, value)
        if length >= 0 and not (good and p == end):
            store8(misfits + row, 1)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def checked_vint_size(p: int, end: int) -> int:
    """Return the bytes of the unsigned vint at ``p``; 0 if it runs past ``end`` or is longer than necessary."""
    if p >= end:
        return 0
    size = count_leading_zeros(~(load8(p) << 56)) + 1
    if size > end - p:
        return 0
    value, _ = load_unsigned_vint(p)
    # VIntCoding.computeUnsignedVIntSize
    return size if size == (639 - count_leading_zeros(value | 1) * 9) >> 6 else 0


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def count_bytes(lengths: int, count: int) -> int:
    """Return the number of bytes of all values together."""
    total = 0
    for row in range(count):
        total += max(load32_native(lengths + 4 * row), 0)
    return total


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def sum_lengths(lengths: int, count: int, starts: int) -> int:
    """Write Arrow's offsets of the gathered values. Return the number of bytes."""
    total = 0
    store32(starts, 0)
    for row in range(count):
        total += max(load32_native(lengths + 4 * row), 0)
        store32(starts + 4 * row + 4, total)
    return total


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def gather_bytes(base: int, offsets: int, lengths: int, count: int, starts: int, output: int) -> None:
    """Copy the values into ``output``, to the offsets in ``starts``. ``output`` needs 16 spare bytes at its end."""
    for row in range(count):
        source = base + load32_native(offsets + 4 * row)
        copy_bytes(output + load32_native(starts + 4 * row), source, load32_native(lengths + 4 * row))


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def mark_invalid_text(base: int, offsets: int, lengths: int, count: int, ascii_only: int, misfits: int) -> None:
    """Mark values that are not UTF-8 (or not ASCII)."""
    for row in range(count):
        p = base + load32_native(offsets + 4 * row)
        end = p + max(load32_native(lengths + 4 * row), 0)
        valid = True
        while p < end and valid:
            if end - p >= 8 and load64_native(p) & -0x7F7F7F7F7F7F7F80 == 0:
                p += 8
                continue
            size = _utf8_size(p, end)
            valid = size == 1 or (size > 1 and ascii_only == 0)
            p += size
        if not valid:
            store8(misfits + row, 1)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _utf8_size(p: int, end: int) -> int:
    """Return the bytes of the UTF-8 character at ``p``; 0: there is none (RFC 3629: shortest form, no surrogates)."""
    word = load32(p)
    if word & 0x80000000 == 0:
        return 1
    if word & 0xE0C00000 == 0xC0800000:
        return 2 if end - p >= 2 and word & 0x1E000000 else 0
    if word & 0xF0C0C000 == 0xE0808000:
        code = ((word >> 12) & 0xF000) | ((word >> 10) & 0xFC0) | ((word >> 8) & 0x3F)
        return 3 if end - p >= 3 and code >= 0x800 and code & 0xF800 != 0xD800 else 0
    if word & 0xF8C0C0C0 == 0xF0808080:
        code = ((word >> 6) & 0x1C0000) | ((word >> 4) & 0x3F000)
        return 4 if end - p >= 4 and 0x10000 <= code < 0x110000 else 0
    return 0


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def split_collections(
    base: int,
    offsets: int,
    lengths: int,
    count: int,
    values_per_entry: int,
    starts: int,
    element_offsets: int,
    element_lengths: int,
    misfits: int,
) -> int:
    """Find the elements of lists and sets (1 value per entry) or maps (2: key, value, interleaved).

    A value is an int32 count, then each element as int32 length (-1: null) and bytes. Return the number of entries.
    ``starts`` gets Arrow's list offsets, which count entries. The element arrays must have room for one element per
    four bytes of value.
    """
    entries = 0
    store32(starts, 0)
    for row in range(count):
        length = load32_native(lengths + 4 * row)
        p = base + load32_native(offsets + 4 * row)
        end = p + max(length, 0)
        size = load32_signed(p) if length >= 4 else -1
        p += 4
        good = 0 <= size <= (end - p) // (4 * values_per_entry)
        if good:
            element = entries * values_per_entry
            for _ in range(size * values_per_entry):
                if end - p < 4:
                    good = False
                    break
                element_length = load32_signed(p)
                p += 4
                if element_length < -1 or element_length > end - p:
                    good = False
                    break
                store32(element_offsets + 4 * element, p - base)
                store32(element_lengths + 4 * element, element_length)
                element += 1
                p += max(element_length, 0)
        if good and p == end:
            entries += size
        elif length >= 0:
            store8(misfits + row, 1)
        store32(starts + 4 * row + 4, entries)
    return entries


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def split_fields(
    base: int,
    offsets: int,
    lengths: int,
    count: int,
    fields: int,
    field_offsets: int,
    field_lengths: int,
    misfits: int,
) -> None:
    """Find the fields of tuples and UDTs: each int32 length (-1: null) and bytes. Missing last fields are null.

    The field arrays are int32[fields, count].
    """
    for row in range(count):
        length = load32_native(lengths + 4 * row)
        p = base + load32_native(offsets + 4 * row)
        end = p + max(length, 0)
        good = length != 0
        for field in range(fields):
            place = 4 * (field * count + row)
            store32(field_offsets + place, p - base)
            store32(field_lengths + place, -1)
            if p == end or not good:
                continue
            field_length = load32_signed(p) if end - p >= 4 else -2
            p += 4
            if field_length < -1 or field_length > end - p:
                good = False
                p = end
                continue
            store32(field_offsets + place, p - base)
            store32(field_lengths + place, field_length)
            p += max(field_length, 0)
        if not (good and p == end):
            store8(misfits + row, 1)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def split_vectors(
    base: int,
    offsets: int,
    lengths: int,
    count: int,
    dimension: int,
    element_length: int,
    starts: int,
    element_offsets: int,
    element_lengths: int,
    misfits: int,
) -> int:
    """Find the elements of vectors. Return their number. ``starts`` gets Arrow's list offsets.

    The element arrays must have room for ``dimension`` elements per row, or for one per byte of value if that is less.

    :param element_length: bytes of each element; 0: each follows its length as an unsigned vint
    """
    elements = 0
    store32(starts, 0)
    for row in range(count):
        length = load32_native(lengths + 4 * row)
        p = base + load32_native(offsets + 4 * row)
        end = p + max(length, 0)
        good = length >= dimension
        if element_length > 0:
            good = length == dimension * element_length
        if good:
            for index in range(dimension):
                size = element_length
                if element_length == 0:
                    size = -1
                    if checked_vint_size(p, end) > 0:
                        size, p = load_unsigned_vint(p)
                if size < 0 or size > end - p:
                    good = False
                    break
                store32(element_offsets + 4 * (elements + index), p - base)
                store32(element_lengths + 4 * (elements + index), size)
                p += size
        if good and p == end:
            elements += dimension
        elif length >= 0:
            store8(misfits + row, 1)
        store32(starts + 4 * row + 4, elements)
    return elements
