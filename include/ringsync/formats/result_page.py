"""Result pages of the native protocol: where each cell lies.

A page's body is an int32 number of rows, then row after row each cell as an int32 length (negative: null) and that
many bytes (native_protocol_v5.spec §4.2.5.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from ringsync.cql.cells import Cells
from ringsync.cql.kernels import KERNEL, PADDING, address, load32_native, load32_signed, store32

Page = bytes | memoryview
"""The body of a result page."""


@dataclass(frozen=True)
class PaddedPage:
    """The body of a result page, ready for the kernels.

    :ivar buffer: the bytes, followed by :data:`~ringsync.cql.kernels.PADDING` spare bytes
    """

    buffer: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.buffer) - PADDING


def join_pages(bodies: Sequence[Page]) -> PaddedPage:
    """Several pages of one result as one page: a few large ones are decoded faster than many small ones."""
    rows = sum(int.from_bytes(body[:4], "big") for body in bodies)
    buffer = _pooled(4 + sum(len(body) - 4 for body in bodies) + PADDING, np.uint8)
    buffer[:4] = np.frombuffer(rows.to_bytes(4, "big"), np.uint8)
    end = 4
    for body in bodies:
        start, end = end, end + len(body) - 4
        buffer[start:end] = np.frombuffer(body, np.uint8, offset=4)
    buffer[end:] = 0
    return PaddedPage(buffer)


def page_cells(
    body: Page | PaddedPage, column_count: int, usual_lengths: Sequence[int] = ()
) -> tuple[int, list[Cells]]:
    """The cells of a result page.

    :param body: what follows the metadata in a RESULT/Rows message
    :param column_count: columns of the result
    :param usual_lengths: for each column the bytes that its values nearly always have, 0 where there is no such
        number: where it is right, the next cell is found without waiting for this one's length
    :return: number of rows, and the cells of each column in the order of the result
    :raises ValueError: when the page is not exactly this many rows and columns, naming the byte position
    """
    page = body if isinstance(body, PaddedPage) else _padded(body)
    buffer, size = page.buffer, len(page)
    rows = int.from_bytes(buffer[:4].tobytes(), "big", signed=True)
    if size < 4 or not 0 <= rows * column_count * 4 <= size - 4:
        raise ValueError(
            f"malformed result page at byte 0: {rows} rows of {column_count} columns cannot be in {size} bytes"
        )
    offsets, lengths = _pooled(2 * column_count * rows, np.int32).reshape(2, column_count, rows)
    usual = np.array(usual_lengths or [0] * column_count, np.int32)
    base, first_offset, first_length = address(buffer), address(offsets), address(lengths)
    stop = _find_cells(base, size, rows, column_count, first_offset, first_length, address(usual))
    if stop < 0:
        raise ValueError(f"truncated result page: the cell at byte {-stop} runs past the end at byte {size}")
    if stop < size:
        raise ValueError(
            f"malformed result page: {size - stop} bytes are left at byte {stop}, "
            f"behind {rows} rows of {column_count} columns"
        )
    width = 4 * rows
    return rows, [
        Cells(buffer, offsets[i], lengths[i], (base, first_offset + i * width, first_length + i * width, rows))
        for i in range(column_count)
    ]


def _padded(body: Page) -> PaddedPage:
    buffer = _pooled(len(body) + PADDING, np.uint8)
    buffer[: len(body)] = np.frombuffer(body, np.uint8)
    buffer[len(body) :] = 0
    return PaddedPage(buffer)


def _pooled(count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """An array in Arrow's memory pool: for arrays of this size numpy would ask the system for new pages every time."""
    return np.frombuffer(pa.allocate_buffer(count * np.dtype(kind).itemsize), kind)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _find_cells(base: int, size: int, rows: int, columns: int, offsets: int, lengths: int, usual: int) -> int:
    """Fill int32[columns, rows] offsets and lengths; the end position, or minus the position of a truncated cell."""
    p, end = base + 4, base + size
    for row in range(rows):
        offset, length = offsets + 4 * row, lengths + 4 * row
        for column in range(columns):
            if end - p < 4:
                return base - p
            cell_length = load32_signed(p)
            expected = load32_native(usual + 4 * column)
            p += 4
            store32(offset, p - base)
            if cell_length == expected:
                # The processor goes on by this number while the other is still being loaded.
                store32(length, expected)
                if expected > end - p:
                    return base - p + 4
                p += expected
            else:
                store32(length, max(cell_length, -1))
                if cell_length > end - p:
                    return base - p + 4
                p += max(cell_length, 0)
            offset += 4 * rows
            length += 4 * rows
    return p - base
