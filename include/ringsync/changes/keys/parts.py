"""The values inside partition keys, clusterings and range ends of change rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from ringsync.compiled.arrow import Integers, Mask
from ringsync.compiled.memory import KERNEL, address, load32_native, store32, store64
from ringsync.cql.cells import NULL_LENGTH, Cells
from ringsync.schema.table import TableSchema


def partition_parts(cells: Cells, table: TableSchema) -> list[Cells]:
    """Split partition keys into the values of each column."""
    if len(table.partition_key) == 1:
        return [cells]
    # Each column is a uint16 length, the bytes and a zero (docs/formats.md, 2.6).
    at, parts = cells.offsets.astype(np.int64), []
    ends = at + cells.lengths
    for _ in table.partition_key:
        at = np.minimum(at, ends)
        lengths = cells.buffer[at].astype(np.int64) << 8 | cells.buffer[at + 1]
        whole = at + 2 + lengths <= ends
        parts.append(_part(cells, at + 2, np.where(whole, lengths, NULL_LENGTH)))
        at = at + 3 + lengths
    return parts


def clustering_parts(cells: Cells, columns: int) -> tuple[Integers, list[Cells], Integers]:
    """Split clusterings. Return the number of values in each, the values of each column, and the bytes of each.

    :param cells: clusterings in the form of :mod:`ringsync.changes.schema`; a null has no values
    """
    rows = len(cells)
    counts, sizes = np.empty((2, rows), np.int64)
    offsets, lengths = np.empty((2, columns, rows), np.int32)
    # The kernel reads no more than the buffer has, since the lengths before a value may be wrong.
    end = cells.arguments[0] + len(cells.buffer)
    output = [address(counts), address(offsets), address(lengths), address(sizes)]
    if not _split(*cells.arguments, end, columns, *output):
        raise IndexError("a clustering is not encoded as ringsync.changes.schema says: it ends behind its bytes")
    return counts, [Cells(cells.buffer, *part) for part in zip(offsets, lengths, strict=True)], sizes


def are_inclusive(cells: Cells, sizes: Integers) -> Mask:
    """Tell which bounds of ranges belong to their range, by the byte after their values; true for rows.

    :param sizes: bytes of the values (:func:`clustering_parts`)
    """
    last = cells.buffer[cells.offsets + np.minimum(sizes, np.maximum(cells.lengths - 1, 0))]
    return np.asarray((sizes == cells.lengths) | (last > 0))


def field_numbers(paths: Cells) -> Integers:
    """Read the fields' numbers in the cell paths of a user-defined type; -1: the path holds no number."""
    at = paths.offsets.astype(np.int64)
    numbers = paths.buffer[at].astype(np.int64) << 8 | paths.buffer[at + 1]
    return np.where(paths.lengths == 2, numbers, -1)


def _part(cells: Cells, at: Integers, lengths: Integers) -> Cells:
    return Cells(cells.buffer, at.astype(np.int32), lengths.astype(np.int32))


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _split(
    base: int,
    cell_offsets: int,
    cell_lengths: int,
    rows: int,
    end: int,
    columns: int,
    counts: int,
    offsets: int,
    lengths: int,
    sizes: int,
) -> bool:
    """Find the values in clusterings. Return False if one ends behind the buffer, whose end is the address ``end``."""
    for row in range(rows):
        first = load32_native(cell_offsets + 4 * row)
        p, count = base + first, 0
        if p < base or end - p < 4:
            return False
        if load32_native(cell_lengths + 4 * row) >= 0:
            count = load32_native(p)
        p += 4
        store64(counts + 8 * row, count)
        for column in range(columns):
            place, length = 4 * (column * rows + row), NULL_LENGTH
            if column < count:
                if p < base or end - p < 4:
                    return False
                length = load32_native(p)
                p += 4
                if length > end - p:
                    return False
            store32(offsets + place, p - base)
            store32(lengths + place, length)
            p += max(length, 0)
        store64(sizes + 8 * row, p - base - first)
    return True
