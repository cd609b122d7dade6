"""The values inside partition keys, clusterings and range ends of change rows."""

from __future__ import annotations

import numpy as np

from ringsync.compiled.arrow import Integers
from ringsync.cql.cells import NULL_LENGTH, Cells
from ringsync.schema.table import TableSchema


def partition_parts(cells: Cells, table: TableSchema) -> list[Cells]:
    """Split partition keys into the values of each column."""
    count = len(table.partition_key)
    return [cells] if count == 1 else composite_parts(cells, count)


def composite_parts(cells: Cells, count: int) -> list[Cells]:
    """Split partition keys into columns: each is a uint16 length, the bytes and a zero (docs/formats.md, 2.6)."""
    at, parts = cells.offsets.astype(np.int64), []
    ends = at + cells.lengths
    for _ in range(count):
        at = np.minimum(at, ends)
        lengths = cells.buffer[at].astype(np.int64) << 8 | cells.buffer[at + 1]
        whole = at + 2 + lengths <= ends
        parts.append(_part(cells, at + 2, np.where(whole, lengths, NULL_LENGTH)))
        at = at + 3 + lengths
    return parts


def clustering_parts(cells: Cells, columns: int) -> tuple[Integers, list[Cells], Integers]:
    """Split clusterings. Return the number of values in each, the values of each column, and the bytes of each.

    :param cells: clusterings in the form of :mod:`ringsync.changes.schema`
    """
    at = cells.offsets.astype(np.int64)
    counts, parts = _int32(cells, at), []
    at += 4
    for column in range(columns):
        there = column < counts
        lengths = np.where(there, _int32(cells, at), NULL_LENGTH)
        parts.append(_part(cells, at + 4, lengths))
        at += np.where(there, 4 + np.maximum(lengths, 0), 0)
    return counts, parts, at - cells.offsets


def _part(cells: Cells, at: Integers, lengths: Integers) -> Cells:
    return Cells(cells.buffer, at.astype(np.int32), lengths.astype(np.int32))


def _int32(cells: Cells, at: Integers) -> Integers:
    four = np.ascontiguousarray(cells.buffer[at[:, None] + np.arange(4)])
    return four.view("<i4").reshape(len(at)).astype(np.int64)
