"""The cells of many rows in one flat array: row images are built from it and taken apart into it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.columns import columns_of
from ringsync.changes.common_times import NO_EXPIRY
from ringsync.changes.schema import CELL, COMPLEX_DELETION
from ringsync.compiled.arrow import Integers, Mask, int64_array, integers, runs, starts_of, valid_mask
from ringsync.schema.table import TableSchema

Places = npt.NDArray[np.int64]

UNKNOWN_TTL = -1
"""``ttl`` of a cell, or of a row's liveness, whose write time is unknown: it is ``timestamp`` or earlier."""

_EVER, _NEVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class FlatCells:
    """Cells, or complex deletions, of many rows.

    :ivar row: number of each cell's row
    :ivar cells: structs of type ``CELL`` or ``COMPLEX_DELETION``
    """

    row: Places
    cells: pa.StructArray

    def take(self, places: npt.NDArray[np.integer[Any]]) -> FlatCells:
        """Take the cells at these places."""
        return FlatCells(self.row[places], self.cells.take(pa.array(places)))

    def where(self, mask: Mask) -> FlatCells:
        """Keep the cells for which the mask is true."""
        return self.take(np.flatnonzero(mask))

    def integers(self, name: str) -> Integers:
        """Return a field of integers, with 0 for null."""
        return integers(self.cells.field(name))

    @property
    def expiries(self) -> Integers:
        """The expiry of each cell that is no tombstone: s since the epoch, or NO_EXPIRY."""
        local = self.cells.field("local_deletion_time")
        return np.where(valid_mask(local), integers(local), NO_EXPIRY)

    @property
    def unknown(self) -> Mask:
        """Whether the write time of each cell is unknown."""
        ttl = self.cells.field("ttl")
        unknown: Mask = valid_mask(ttl) & (integers(ttl) == UNKNOWN_TTL)
        return unknown

    def lists(self, rows: int) -> pa.ListArray:
        """Collect the cells of each of ``rows`` rows in a list. Cells of one row keep their order."""
        order = np.argsort(self.row, kind="stable")
        return pa.ListArray.from_arrays(
            starts_of(np.bincount(self.row, minlength=rows)), self.cells.take(pa.array(order))
        )


def flat(lists: pa.ListArray) -> FlatCells:
    """Flatten the cells, or complex deletions, of change rows, sorted by row."""
    counts = np.diff(integers(lists.offsets))
    counts[~valid_mask(lists)] = 0
    return FlatCells(np.repeat(np.arange(len(lists)), counts), lists.flatten())


def cell_array(
    column: Integers,
    path: pa.Array,
    value: pa.Array,
    timestamp: Integers,
    ttl: pa.Array,
    local_deletion_time: pa.Array,
    kind: Integers,
) -> pa.StructArray:
    """Make cells from their fields."""
    everywhere = np.ones(len(column), np.bool_)
    arrays = [
        int64_array(column, everywhere).cast(pa.int32()),
        path,
        value,
        int64_array(timestamp, everywhere),
        ttl,
        local_deletion_time,
        int64_array(kind, everywhere).cast(pa.int8()),
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(CELL))


def deletion_array(column: Integers, timestamp: pa.Array, local_deletion_time: pa.Array) -> pa.StructArray:
    """Make complex deletions from their fields."""
    number = int64_array(column, np.ones(len(column), np.bool_)).cast(pa.int32())
    return pa.StructArray.from_arrays([number, timestamp, local_deletion_time], fields=list(COMPLEX_DELETION))


def kept(cells: FlatCells, table: TableSchema) -> FlatCells:
    """Leave out cells of dropped columns, and cells from before their column was dropped and added again."""
    dropped = {column.name: column.dropped_at for column in table.dropped}
    limits = [_NEVER if column.dropped else dropped.get(column.name, _EVER) for column in columns_of(table)]
    if set(limits) <= {_EVER}:
        return cells
    newer = cells.integers("timestamp") > np.array(limits, np.int64)[cells.integers("column")]
    return cells if newer.all() else cells.where(newer)


def by_column(cells: FlatCells, count: int) -> list[FlatCells]:
    """Split the cells by column, for ``count`` columns. Cells of one column keep their order."""
    column = cells.integers("column")
    order = np.argsort(column, kind="stable")
    ordered = cells.take(order)
    limits = np.searchsorted(column[order], np.arange(count + 1))
    return [
        FlatCells(ordered.row[start:end], ordered.cells.slice(start, end - start))
        for start, end in itertools.pairwise(limits.tolist())
    ]


def together(parts: Sequence[FlatCells], kind: pa.DataType) -> FlatCells:
    """Concatenate cells of type ``CELL``, or complex deletions of type ``COMPLEX_DELETION``."""
    rows = [part.row for part in parts]
    arrays = [pa.array([], kind), *(part.cells for part in parts)]
    return FlatCells(np.concatenate([np.zeros(0, np.int64), *rows]), pa.concat_arrays(arrays))


def shown_by(cells: FlatCells, source: Places) -> FlatCells:
    """Give each row a copy of the cells of its source row.

    :param cells: cells sorted by row
    :param source: for each row, the row whose cells it gets
    """
    counts = np.bincount(cells.row, minlength=len(source))
    starts = np.cumsum(counts) - counts
    shown = counts[source]
    return FlatCells(np.repeat(np.arange(len(source)), shown), cells.cells.take(pa.array(runs(starts[source], shown))))


def spread(values: pa.Array, rows: Places, count: int) -> pa.Array:
    """Place values at their rows. The other rows of ``count`` are null."""
    places = np.full(count, -1)
    places[rows] = np.arange(len(rows))
    return values.take(pa.array(places, mask=places < 0))
