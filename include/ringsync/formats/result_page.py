"""Result pages of the native protocol: where each cell lies.

A page's body is an int32 number of rows, then row after row each cell as an int32 length (negative: null) and that
many bytes (native_protocol_v5.spec §4.2.5.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from ringsync.cql.cells import Cells
from ringsync.cql.kernels import KERNEL, PADDING, address, load32_signed, store32

Page = bytes | memoryview
"""The body of a result page."""


def page_cells(body: Page, column_count: int) -> tuple[int, list[Cells]]:
    """The cells of a result page.

    :param body: what follows the metadata in a RESULT/Rows message
    :param column_count: columns of the result
    :return: number of rows, and the cells of each column in the order of the result
    :raises ValueError: when the page is not exactly this many rows and columns, naming the byte position
    """
    rows = int.from_bytes(body[:4], "big", signed=True)
    if len(body) < 4 or not 0 <= rows * column_count * 4 <= len(body) - 4:
        raise ValueError(
            f"malformed result page at byte 0: {rows} rows of {column_count} columns cannot be in {len(body)} bytes"
        )
    buffer = _pooled(len(body) + PADDING, np.uint8)
    buffer[: len(body)] = np.frombuffer(body, np.uint8)
    buffer[len(body) :] = 0
    offsets, lengths = _pooled(2 * column_count * rows, np.int32).reshape(2, column_count, rows)
    base, first_offset, first_length = address(buffer), address(offsets), address(lengths)
    stop = _find_cells(base, len(body), rows, column_count, first_offset, first_length)
    if stop < 0:
        raise ValueError(f"truncated result page: the cell at byte {-stop} runs past the end at byte {len(body)}")
    if stop < len(body):
        raise ValueError(
            f"malformed result page: {len(body) - stop} bytes are left at byte {stop}, "
            f"behind {rows} rows of {column_count} columns"
        )
    width = 4 * rows
    return rows, [
        Cells(buffer, offsets[i], lengths[i], (base, first_offset + i * width, first_length + i * width, rows))
        for i in range(column_count)
    ]


def join_pages(bodies: Sequence[Page]) -> Page:
    """Several pages of one result as one page: a few large ones are decoded faster than many small ones."""
    if len(bodies) == 1:
        return bodies[0]
    rows = sum(int.from_bytes(body[:4], "big") for body in bodies)
    return b"".join([rows.to_bytes(4, "big"), *(memoryview(body)[4:] for body in bodies)])


def _pooled(count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """An array in Arrow's memory pool: for arrays of this size numpy would ask the system for new pages every time."""
    return np.frombuffer(pa.allocate_buffer(count * np.dtype(kind).itemsize), kind)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _find_cells(base: int, size: int, rows: int, columns: int, offsets: int, lengths: int) -> int:
    """Fill int32[columns, rows] offsets and lengths; the end position, or minus the position of a truncated cell."""
    p, end = base + 4, base + size
    for row in range(rows):
        offset, length = offsets + 4 * row, lengths + 4 * row
        for _ in range(columns):
            if end - p < 4:
                return base - p
            cell_length = load32_signed(p)
            p += 4
            store32(offset, p - base)
            store32(length, cell_length)
            if cell_length > 0:
                if cell_length > end - p:
                    return base - p + 4
                p += cell_length
            elif cell_length < 0:
                store32(length, -1)
            offset += 4 * rows
            length += 4 * rows
    return p - base
