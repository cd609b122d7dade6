"""The times that most cells of a row share.

A cell has two times, both int64: writetime (µs) and expiry (s since the epoch, ``NO_EXPIRY`` or ``NO_CELL``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.compiled.arrow import Integers
from ringsync.compiled.memory import KERNEL, address, load32_native, load64_native, store64

NO_CELL = -2
"""Expiry of a cell that is not there; its writetime means nothing."""


@dataclass(frozen=True)
class ElementTimes:
    """Times of the elements of a multi-cell column.

    :ivar starts: int32[rows + 1]: place of each row's first element; a row without elements is null or its times are
        unknown
    :ivar writetimes: writetime of each element, µs
    :ivar expiries: expiry of each element, s; :data:`NO_CELL` for a UDT field that is not set
    """

    starts: npt.NDArray[np.int32]
    writetimes: Integers
    expiries: Integers


@dataclass(frozen=True)
class RowTimes:
    """The times that most cells of each row share.

    :ivar writetimes: common writetime of each row, µs
    :ivar expiries: common expiry of each row, s; :data:`NO_CELL` if the row has no cell
    :ivar mixed: whether any row has a cell with other times
    """

    writetimes: Integers
    expiries: Integers
    mixed: bool


def common_times(writetimes: Integers, expiries: Integers, elements: Sequence[ElementTimes], rows: int) -> RowTimes:
    """Find the (writetime, expiry) that most cells of each row have; among equally common ones the greatest.

    :param writetimes: writetimes of the single-cell columns, int64[columns, rows]
    :param expiries: their expiries, int64[columns, rows]; :data:`NO_CELL` if there is no cell
    :param elements: times of the multi-cell columns
    """
    lists = np.empty((len(elements), 3), np.int64)
    most_cells = len(writetimes)
    for place, column in enumerate(elements):
        lists[place] = address(column.starts), address(column.writetimes), address(column.expiries)
        most_cells += int(np.diff(column.starts).max(initial=0))
    slots = 2 << most_cells.bit_length()
    scratch = np.empty(2 * most_cells + 3 * slots, np.int64)
    row_writetimes, row_expiries = np.empty((2, rows), np.int64)
    mixed = _common_times(
        address(writetimes),
        address(expiries),
        len(writetimes),
        rows,
        address(lists),
        len(elements),
        address(scratch),
        address(row_writetimes),
        address(row_expiries),
    )
    return RowTimes(row_writetimes, row_expiries, mixed > 0)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _common_times(
    writetimes: int,
    expiries: int,
    columns: int,
    rows: int,
    lists: int,
    list_count: int,
    scratch: int,
    row_writetimes: int,
    row_expiries: int,
) -> int:
    """Fill the rows' times. Return the number of rows whose cells differ in their times.

    :param lists: int64[list_count, 3]: addresses of starts, writetimes and expiries
    :param scratch: memory for two words per cell of a row and three words per slot
    """
    mixed = 0
    for row in range(rows):
        cells = 0
        alike = True
        for column in range(columns):
            place = 8 * (column * rows + row)
            cells, alike = _add_cell(scratch, cells, alike, writetimes + place, expiries + place)
        for column in range(list_count):
            starts = load64_native(lists + 24 * column)
            times = load64_native(lists + 24 * column + 8)
            ends = load64_native(lists + 24 * column + 16)
            for element in range(load32_native(starts + 4 * row), load32_native(starts + 4 * row + 4)):
                cells, alike = _add_cell(scratch, cells, alike, times + 8 * element, ends + 8 * element)
        best = scratch
        if cells == 0:
            store64(scratch, 0)
            store64(scratch + 8, NO_CELL)
        elif not alike:
            mixed += 1
            best = _most_common(scratch, cells)
        store64(row_writetimes + 8 * row, load64_native(best))
        store64(row_expiries + 8 * row, load64_native(best + 8))
    return mixed


@njit(inline="always")  # type: ignore[untyped-decorator]
def _add_cell(scratch: int, cells: int, alike: bool, writetime_at: int, expiry_at: int) -> tuple[int, bool]:
    """Append a cell's times to those in ``scratch``. Return their number now, and whether all are alike."""
    expiry = load64_native(expiry_at)
    if expiry == NO_CELL:
        return cells, alike
    writetime = load64_native(writetime_at)
    store64(scratch + 16 * cells, writetime)
    store64(scratch + 16 * cells + 8, expiry)
    alike = alike and writetime == load64_native(scratch) and expiry == load64_native(scratch + 8)
    return cells + 1, alike


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _most_common(pairs: int, count: int) -> int:
    """Count ``count`` pairs by hashing. Return the address of the commonest; of equally common ones the greatest."""
    table = pairs + 16 * count
    mask = 1
    while mask < 2 * count:
        mask *= 2
    mask -= 1
    for slot in range(mask + 1):
        store64(table + 24 * slot + 16, 0)
    best = table
    best_writetime, best_expiry, most = 0, 0, 0
    for index in range(count):
        writetime, expiry = load64_native(pairs + 16 * index), load64_native(pairs + 16 * index + 8)
        slot = (((writetime * 31 + expiry) * -7046029254386353131) >> 29) & mask
        entry = table + 24 * slot
        while load64_native(entry + 16) > 0 and (
            load64_native(entry) != writetime or load64_native(entry + 8) != expiry
        ):
            slot = (slot + 1) & mask
            entry = table + 24 * slot
        seen = load64_native(entry + 16) + 1
        store64(entry, writetime)
        store64(entry + 8, expiry)
        store64(entry + 16, seen)
        greater = writetime > best_writetime or (writetime == best_writetime and expiry > best_expiry)
        if seen > most or (seen == most and greater):
            best, best_writetime, best_expiry, most = entry, writetime, expiry, seen
    return best
