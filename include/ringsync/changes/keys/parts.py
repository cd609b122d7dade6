"""The values inside partition keys, clusterings and range ends of change rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from ringsync.compiled.arrow import Integers, Mask
from ringsync.compiled.memory import KERNEL, load32_native
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
    at = cells.offsets.astype(np.int64)
    counts, parts = np.where(cells.lengths >= 0, _int32(cells, at), 0), []
    at += 4
    for column in range(columns):
        there = column < counts
        lengths = np.where(there, _int32(cells, at), NULL_LENGTH)
        parts.append(_part(cells, at + 4, lengths))
        at += np.where(there, 4 + np.maximum(lengths, 0), 0)
    return counts, parts, at - cells.offsets


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


def _int32(cells: Cells, at: Integers) -> Integers:
    found = np.empty(len(at), np.int64)
    # The kernel checks nothing, and the lengths before a value may be wrong.
    if len(at) and (at.min() < 0 or at.max() > len(cells.buffer) - 4):
        raise IndexError("a clustering is not encoded as ringsync.changes.schema says: it ends behind its bytes")
    _load_each(cells.arguments[0], at, found)
    return found


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _load_each(base: int, at: Integers, found: Integers) -> None:
    for row in range(len(at)):
        found[row] = load32_native(base + at[row])
