"""Result pages decoded to Arrow: the columns of some pages of one result.

Nearly all values of nearly all tables are well-formed numbers, times, uuids and texts. One pass over the received bytes
finds the end of each cell and stores such values in Arrow's form. A copy of the pages, or a second pass, would cost as
much again. Pages that hold anything else are joined and decoded cell by cell (:mod:`ringsync.cql.codec.decode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from ringsync.compiled.arrow import Integers, pooled
from ringsync.compiled.memory import (
    KERNEL,
    PADDING,
    address,
    copy_bytes,
    copy_exactly,
    load8,
    load32_signed,
    load64,
    load64_native,
    store8,
    store32,
    store64,
)
from ringsync.cql.cells import Cells
from ringsync.cql.codec.decode import Decoded, decode, has_high_bit
from ringsync.cql.codec.gather import MAX_MILLISECONDS, mark_invalid_text
from ringsync.cql.codec.text_forms import UUID_ROOM, uuid_characters
from ringsync.cql.natives import DATE_EPOCH, NATIVES, Codec, NativeType
from ringsync.cql.types import CqlType, Native
from ringsync.formats.result_page import Page, check_end, join_pages, page_cells, page_rows

_CELL, _TEXT, _FOUR, _EIGHT, _DATE, _MILLISECONDS, _UUID = range(7)
_WAY: dict[Codec, int] = {
    **dict.fromkeys(("text", "ascii", "blob"), _TEXT),
    "date": _DATE,
    "timestamp": _MILLISECONDS,
    "uuid": _UUID,
}
_WAY_OF_WIDTH = {4: _FOUR, 8: _EIGHT}
"""The way in which the pass stores values of a native type. Values of other types are decoded after it."""
_VALUE_WIDTH = {_FOUR: 4, _EIGHT: 8, _DATE: 4, _MILLISECONDS: 8}

_FIRST, _SECOND, _VALID, _NULLS, _SIZE = range(8, 48, 8)
_ENTRY = 48
"""The kernel's table has six int64 per column: the way; the address of values or offsets; the address of lengths or
starts; the address of the validity bitmap; the number of nulls so far; the bytes of texts so far."""
_UNUSUAL = 1 << 62
"""Return value of the kernel: some value does not fit its type."""


@dataclass(frozen=True)
class PageColumns:
    """The columns of some result pages.

    :ivar decoded: columns in the order of the result
    :ivar cells: the same columns as bytes; None if the Arrow types hold all values
    """

    rows: int
    decoded: Sequence[Decoded]
    cells: Sequence[Cells] | None


def decode_pages(pages: Sequence[Page], types: Sequence[CqlType]) -> PageColumns:
    """Decode some pages of one result.

    :param pages: bodies of result pages with the same columns
    :raises ValueError: a page is malformed or cut off; the message names the byte position
    """
    ways = [_way(NATIVES[kind.name]) if isinstance(kind, Native) else _CELL for kind in types]
    decoded = _decode_usual(pages, types, ways)
    if decoded is not None:
        return decoded
    rows, cells = page_cells(join_pages(pages), len(types))
    return PageColumns(rows, [decode(kind, column) for kind, column in zip(types, cells, strict=True)], cells)


def _way(native: NativeType) -> int:
    if native.codec == "fixed":
        return _WAY_OF_WIDTH.get(native.width, _CELL)
    return _WAY.get(native.codec, _CELL)


def _decode_usual(pages: Sequence[Page], types: Sequence[CqlType], ways: Sequence[int]) -> PageColumns | None:
    """Decode pages if all values fit their types; None: some value does not."""
    # Columns that are decoded after the pass need all cells in one buffer, with spare bytes at its end.
    joined = join_pages(pages) if _CELL in ways else None
    bodies = [np.frombuffer(page, np.uint8) for page in pages] if joined is None else [joined[:-PADDING]]
    counts = [page_rows(body, len(types)) for body in bodies]
    rows = sum(counts)
    room = _room(ways, rows, sum(map(len, bodies)))
    first = 0
    for body, count in zip(bodies, counts, strict=True):
        stop = _decode_page(address(body), len(body), first, count, len(types), address(room.table))
        if stop == _UNUSUAL:
            return None
        check_end(stop, len(body), count, len(types))
        first += count
    decoded = []
    for place, (kind, way) in enumerate(zip(types, ways, strict=True)):
        if way == _CELL and joined is not None:
            column = decode(kind, Cells(joined, *room.parts[place]))
            if column.misfits is not None:
                return None
            decoded.append(column)
            continue
        buffers = room.buffers(place, way)
        native = NATIVES[str(kind)]
        if native.is_text and not _is_text(buffers, rows, native):
            return None
        nulls = int(room.table[place, _NULLS // 8])
        bitmap = pa.py_buffer(room.valid[place]) if nulls else None
        decoded.append(Decoded(pa.Array.from_buffers(native.arrow, rows, [bitmap, *buffers], null_count=nulls), None))
    return PageColumns(rows, decoded, None)


@dataclass(frozen=True)
class _Room:
    """Memory that the kernel fills.

    :ivar table: int64[columns, 6], see ``_ENTRY``
    :ivar valid: uint8[columns, bytes], validity bitmaps
    :ivar parts: memory of each column. If the column is decoded after the pass: offsets and lengths of its cells,
        int32[rows] each; otherwise Arrow's buffers: the values, and the offsets if they are texts
    """

    table: Integers
    valid: npt.NDArray[np.uint8]
    parts: list[Any]

    def buffers(self, place: int, way: int) -> list[pa.Buffer]:
        """Return Arrow's buffers of a column that the pass stored, without the validity bitmap."""
        if way not in (_TEXT, _UUID):
            return list(self.parts[place])
        size = int(self.table[place, _SIZE // 8])
        data, starts = self.parts[place]
        np.frombuffer(starts, np.int32)[-1:] = size
        if way == _TEXT:
            # There was room for all bytes of all pages. A batch that waits must not keep so much memory.
            data.resize(size + PADDING, shrink_to_fit=True)
        return [starts, data.slice(0, size)]


def _room(ways: Sequence[int], rows: int, size: int) -> _Room:
    """Allocate memory for ``rows`` rows whose cells have ``size`` bytes at most.

    :raises ValueError: there are more bytes than Arrow's offsets can count
    """
    if size > np.iinfo(np.int32).max:
        raise ValueError(f"{rows} rows have {size} bytes together: pass fewer pages at once (2 GiB at most)")
    table = np.zeros((len(ways), _ENTRY // 8), np.int64)
    valid = np.full((len(ways), (rows + 7) // 8), 255, np.uint8)
    parts: list[Any] = []
    for way, entry, bitmap in zip(ways, table, valid, strict=True):
        entry[0], entry[_VALID // 8] = way, address(bitmap)
        if way == _CELL:
            parts.append(pooled(2 * rows, np.int32).reshape(2, rows))
            entry[1:3] = [address(numbers) for numbers in parts[-1]]
            continue
        if way in (_TEXT, _UUID):
            capacity = size if way == _TEXT else rows * UUID_ROOM
            parts.append([pa.allocate_buffer(capacity + PADDING, resizable=True), pa.allocate_buffer(4 * rows + 4)])
        else:
            parts.append([pa.allocate_buffer(rows * _VALUE_WIDTH[way])])
        entry[1 : 1 + len(parts[-1])] = [buffer.address for buffer in parts[-1]]
    return _Room(table, valid, parts)


def _is_text(buffers: Sequence[pa.Buffer], rows: int, native: NativeType) -> bool:
    """Tell whether all values are valid UTF-8, or ASCII for this type."""
    starts, data = buffers
    if not has_high_bit(data):
        return True
    limits, misfits = np.frombuffer(starts, np.int32), np.zeros(rows, np.bool_)
    cells = Cells(np.frombuffer(data, np.uint8), limits[:-1], np.diff(limits))
    mark_invalid_text(*cells.arguments, int(native.codec == "ascii"), address(misfits))
    return not misfits.any()


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _decode_page(base: int, size: int, first_row: int, rows: int, columns: int, table: int) -> int:
    """Store a page's cells from row ``first_row`` on.

    Return the position after the last cell, or minus the position of a truncated cell, or ``_UNUSUAL``.
    """
    p, end = base + 4, base + size
    for row in range(first_row, first_row + rows):
        for column in range(table, table + _ENTRY * columns, _ENTRY):
            if end - p < 4:
                return base - p
            length = load32_signed(p)
            p += 4
            if length > end - p:
                return base - p + 4
            way, first = load64_native(column), load64_native(column + _FIRST)
            # ``p`` grows by a constant, not by ``length``: the processor need not wait for the length.
            if way == _EIGHT and length == 8:
                store64(first + 8 * row, load64(p))
                p += 8
            elif way == _FOUR and length == 4:
                store32(first + 4 * row, load32_signed(p))
                p += 4
            elif way == _TEXT:
                _store_text(column, row, p, length, end)
                p += max(length, 0)
            elif way == _CELL:
                store32(first + 4 * row, p - base)
                store32(load64_native(column + _SECOND) + 4 * row, max(length, -1))
                if length < 0:
                    _mark_null(column, row)
                else:
                    p += length
            elif length < 0:
                _store_null(column, row)
            elif _store_converted(column, row, p, length):
                p += length
            else:
                return _UNUSUAL
    return p - base


@njit(inline="always")  # type: ignore[untyped-decorator]
def _store_text(column: int, row: int, p: int, length: int, end: int) -> None:
    """Append the bytes at ``p`` to a column of texts. The column has spare bytes at its end, the page has none."""
    first, position = load64_native(column + _FIRST), load64_native(column + _SIZE)
    store32(load64_native(column + _SECOND) + 4 * row, position)
    if length < 0:
        _mark_null(column, row)
        return
    if length + 15 < end - p:
        copy_bytes(first + position, p, length)
    else:
        copy_exactly(first + position, p, length)
    store64(column + _SIZE, position + length)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _store_converted(column: int, row: int, p: int, length: int) -> bool:
    """Store a value whose form differs in Arrow and Cassandra; False: it does not fit its type."""
    way, first = load64_native(column), load64_native(column + _FIRST)
    if way == _UUID and length == 16:
        position = load64_native(column + _SIZE)
        store32(load64_native(column + _SECOND) + 4 * row, position)
        store64(column + _SIZE, position + UUID_ROOM)
        uuid_characters(first + position, p)
        return True
    if way == _MILLISECONDS and length == 8:
        value = load64(p)
        store64(first + 8 * row, value * 1000)
        return -MAX_MILLISECONDS <= value <= MAX_MILLISECONDS
    if way == _DATE and length == 4:
        store32(first + 4 * row, load32_signed(p) ^ DATE_EPOCH)
        return True
    return False


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _store_null(column: int, row: int) -> None:
    """Store a null in a column of values, as 0 or an empty text."""
    way, first = load64_native(column), load64_native(column + _FIRST)
    if way == _UUID:
        store32(load64_native(column + _SECOND) + 4 * row, load64_native(column + _SIZE))
    elif way in (_FOUR, _DATE):
        store32(first + 4 * row, 0)
    else:
        store64(first + 8 * row, 0)
    _mark_null(column, row)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _mark_null(column: int, row: int) -> None:
    byte = load64_native(column + _VALID) + (row >> 3)
    store8(byte, load8(byte) & ~(1 << (row & 7)))
    store64(column + _NULLS, load64_native(column + _NULLS) + 1)
