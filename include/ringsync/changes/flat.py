"""The cells of many rows side by side, as row images are put together from them and taken apart into them."""

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
"""``ttl`` of a cell, or of a row's liveness, whose time is not known: only that it is not later than ``timestamp``."""

_EVER, _NEVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class FlatCells:
    """Cells, or complex deletions, of many rows.

    :ivar row: the row of each
    :ivar cells: of type ``CELL`` or ``COMPLEX_DELETION``
    """

    row: Places
    cells: pa.StructArray

    def take(self, places: npt.NDArray[np.integer[Any]]) -> FlatCells:
        """Those at these places."""
        return FlatCells(self.row[places], self.cells.take(pa.array(places)))

    def where(self, mask: Mask) -> FlatCells:
        """Those that the mask names."""
        return self.take(np.flatnonzero(mask))

    def integers(self, name: str) -> Integers:
        """A field of integers, 0 where it is null."""
        return integers(self.cells.field(name))

    @property
    def expiries(self) -> Integers:
        """When each cell that is no tombstone expires: s since the epoch, NO_EXPIRY."""
        local = self.cells.field("local_deletion_time")
        return np.where(valid_mask(local), integers(local), NO_EXPIRY)

    @property
    def unknown(self) -> Mask:
        """Cells of unknown times."""
        ttl = self.cells.field("ttl")
        found: Mask = valid_mask(ttl) & (integers(ttl) == UNKNOWN_TTL)
        return found

    def lists(self, rows: int) -> pa.ListArray:
        """Lists by row, each in the order in which its cells are here; nothing else is sorted by."""
        order = np.argsort(self.row, kind="stable")
        return pa.ListArray.from_arrays(
            starts_of(np.bincount(self.row, minlength=rows)), self.cells.take(pa.array(order))
        )


def flat(lists: pa.ListArray) -> FlatCells:
    """The cells, or complex deletions, of change rows, by row."""
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
    """Cells from their fields."""
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
    """Complex deletions from their fields."""
    number = int64_array(column, np.ones(len(column), np.bool_)).cast(pa.int32())
    return pa.StructArray.from_arrays([number, timestamp, local_deletion_time], fields=list(COMPLEX_DELETION))


def kept(cells: FlatCells, table: TableSchema) -> FlatCells:
    """Without what belongs to columns that were dropped."""
    dropped = {column.name: column.dropped_at for column in table.dropped}
    limits = [_NEVER if column.dropped else dropped.get(column.name, _EVER) for column in columns_of(table)]
    if set(limits) <= {_EVER}:
        return cells
    newer = cells.integers("timestamp") > np.array(limits, np.int64)[cells.integers("column")]
    return cells if newer.all() else cells.where(newer)


def by_column(cells: FlatCells, count: int) -> list[FlatCells]:
    """The cells of each of ``count`` columns, in their order."""
    column = cells.integers("column")
    order = np.argsort(column, kind="stable")
    ordered = cells.take(order)
    limits = np.searchsorted(column[order], np.arange(count + 1))
    return [
        FlatCells(ordered.row[start:end], ordered.cells.slice(start, end - start))
        for start, end in itertools.pairwise(limits.tolist())
    ]


def together(parts: Sequence[FlatCells], kind: pa.DataType) -> FlatCells:
    """All of these; of the kind ``CELL`` or ``COMPLEX_DELETION``."""
    rows = [part.row for part in parts]
    arrays = [pa.array([], kind), *(part.cells for part in parts)]
    return FlatCells(np.concatenate([np.zeros(0, np.int64), *rows]), pa.concat_arrays(arrays))


def shown_by(cells: FlatCells, source: Places) -> FlatCells:
    """The cells that each row shows when it shows those of another row.

    :param cells: in the order of their rows
    :param source: for each row the row whose cells it shows
    """
    counts = np.bincount(cells.row, minlength=len(source))
    starts = np.cumsum(counts) - counts
    own = counts[source]
    return FlatCells(np.repeat(np.arange(len(source)), own), cells.cells.take(pa.array(runs(starts[source], own))))


def spread(values: pa.Array, rows: Places, count: int) -> pa.Array:
    """Values at the rows they belong to; null in all other rows of ``count``."""
    places = np.full(count, -1)
    places[rows] = np.arange(len(rows))
    return values.take(pa.array(places, mask=places < 0))
