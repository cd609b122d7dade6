"""Cells in result pages of the native protocol.

A page's body is an int32 number of rows, then the cells, row by row. A cell is an int32 length (negative: null) and
its bytes (native_protocol_v5.spec, section 4.2.5.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.compiled.arrow import pooled
from ringsync.compiled.memory import KERNEL, PADDING, address, load32_signed, padded, store32
from ringsync.cql.cells import Cells

Page = bytes | memoryview
"""The body of a result page."""


PaddedPage = npt.NDArray[np.uint8]
"""The same, followed by :data:`~ringsync.compiled.memory.PADDING` spare bytes, as the kernels need it."""


def join_pages(bodies: Sequence[Page]) -> PaddedPage:
    """Join several pages of one result to one page."""
    rows = sum(int.from_bytes(body[:4], "big") for body in bodies)
    buffer = pooled(4 + sum(len(body) - 4 for body in bodies) + PADDING, np.uint8)
    buffer[:4] = np.frombuffer(rows.to_bytes(4, "big"), np.uint8)
    end = 4
    for body in bodies:
        start, end = end, end + len(body) - 4
        buffer[start:end] = np.frombuffer(body, np.uint8, offset=4)
    buffer[end:] = 0
    return buffer


def page_cells(body: Page | PaddedPage, column_count: int) -> tuple[int, list[Cells]]:
    """Find the cells of a result page.

    :param body: bytes after the metadata in a RESULT/Rows message
    :returns: number of rows, and the cells of each column in the order of the result
    :raises ValueError: the page is malformed or cut off; the message names the byte position
    """
    buffer = body if isinstance(body, np.ndarray) else padded(body)
    size = len(buffer) - PADDING
    rows = page_rows(buffer[:size], column_count)
    offsets, lengths = pooled(2 * column_count * rows, np.int32).reshape(2, column_count, rows)
    base, first_offset, first_length = address(buffer), address(offsets), address(lengths)
    check_end(_find_cells(base, size, rows, column_count, first_offset, first_length), size, rows, column_count)
    width = 4 * rows
    return rows, [
        Cells(buffer, offsets[i], lengths[i], (base, first_offset + i * width, first_length + i * width, rows))
        for i in range(column_count)
    ]


def page_rows(page: npt.NDArray[np.uint8], column_count: int) -> int:
    """Return the number of rows of a page.

    :param page: bytes of the page, without spare bytes
    :raises ValueError: a page of this size cannot hold so many rows and columns
    """
    rows = int.from_bytes(page[:4].tobytes(), "big", signed=True)
    if len(page) < 4 or not 0 <= rows * column_count * 4 <= len(page) - 4:
        raise ValueError(
            f"malformed result page at byte 0: {rows} rows of {column_count} columns cannot be in {len(page)} bytes"
        )
    return rows


def check_end(stop: int, size: int, rows: int, column_count: int) -> None:
    """Check that the page ends with its last cell.

    :param stop: position after the last cell, or minus the position of a cell that runs past the end
    :raises ValueError: the page ends within a cell, or bytes follow the last one
    """
    if stop < 0:
        raise ValueError(f"truncated result page: the cell at byte {-stop} runs past the end at byte {size}")
    if stop < size:
        raise ValueError(
            f"malformed result page: {size - stop} bytes are left at byte {stop}, "
            f"after {rows} rows of {column_count} columns"
        )


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _find_cells(base: int, size: int, rows: int, columns: int, offsets: int, lengths: int) -> int:
    """Fill int32[columns, rows] offsets and lengths. Return the end, or minus the position of a truncated cell."""
    p, end = base + 4, base + size
    for row in range(rows):
        offset, length = offsets + 4 * row, lengths + 4 * row
        for _ in range(columns):
            if end - p < 4:
                return base - p
            cell_length = load32_signed(p)
            p += 4
            store32(offset, p - base)
            store32(length, max(cell_length, -1))
            if cell_length > end - p:
                return base - p + 4
            p += max(cell_length, 0)
            offset += 4 * rows
            length += 4 * rows
    return p - base
