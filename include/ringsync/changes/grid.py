"""The cells of single-cell columns of many rows as a grid of columns and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.changes.columns import LoggedColumn
from ringsync.changes.common_times import NO_CELL
from ringsync.changes.flat import FlatCells
from ringsync.changes.schema import LIVE, NO_EXPIRY, TOMBSTONE
from ringsync.compiled.arrow import Integers, Places, Places32
from ringsync.compiled.memory import KERNEL, load32_native
from ringsync.cql.cells import NULL_LENGTH, Cells

_ELSEWHERE = -1


@dataclass(frozen=True)
class CellGrid:
    """Live and expiring cells by column and row.

    :ivar values: values of each column; null where there is no cell
    :ivar writetimes: int64[columns, rows], µs
    :ivar expiries: int64[columns, rows], s since the epoch, NO_EXPIRY, or NO_CELL
    """

    values: tuple[Cells, ...]
    writetimes: Integers
    expiries: Integers


def cell_grid(cells: FlatCells, columns: Sequence[LoggedColumn], rows: int, static_of: Places) -> CellGrid:
    """Place cells in a grid; tombstones and cells of other columns are left out.

    :param columns: columns of one cell
    :param static_of: index of the row whose static cells each row shows
    """
    offsets, lengths = np.zeros((len(columns), rows), np.int32), np.full((len(columns), rows), NULL_LENGTH, np.int32)
    writetimes, expiries = np.zeros((len(columns), rows), np.int64), np.full((len(columns), rows), NO_CELL, np.int64)
    lines = np.full(max([column.number for column in columns], default=0) + 1, _ELSEWHERE, np.int32)
    lines[[column.number for column in columns]] = np.arange(len(columns))
    values = cells.value
    _place(
        *(cells.row, cells.column, cells.kind, cells.timestamp, cells.local, lines),
        *(values.arguments[1], values.arguments[2], offsets, lengths, writetimes, expiries),
    )
    shares = bool((static_of != np.arange(rows)).any())
    for line, column in enumerate(columns):
        if column.is_static and shares:
            for grid in (offsets, lengths, writetimes, expiries):
                grid[line] = grid[line][static_of]
    found = tuple(Cells(values.buffer, *line) for line in zip(offsets, lengths, strict=True))
    return CellGrid(found, writetimes, expiries)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _place(
    row: Integers,
    column: Integers,
    kind: Integers,
    timestamp: Integers,
    local: Integers,
    lines: Places32,
    value_offsets: int,
    value_lengths: int,
    offsets: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    writetimes: Integers,
    expiries: Integers,
) -> None:
    """Fill the grid.

    :param lines: line of the grid by number of the column; -1, or none: the column is not in the grid
    :param value_offsets: address of int32[cells]; ``value_lengths``: likewise
    """
    for cell in range(len(row)):
        number = column[cell]
        if kind[cell] == TOMBSTONE or number >= len(lines) or lines[number] == _ELSEWHERE:
            continue
        line, place = lines[number], row[cell]
        offsets[line, place] = load32_native(value_offsets + 4 * cell)
        lengths[line, place] = load32_native(value_lengths + 4 * cell)
        writetimes[line, place] = timestamp[cell]
        expiries[line, place] = NO_EXPIRY if kind[cell] == LIVE else local[cell]
