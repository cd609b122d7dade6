"""The cells of many rows in flat arrays: row images are built from them and taken apart into them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.columns import columns_of
from ringsync.changes.schema import NEVER, NO_EXPIRY, NO_TTL, TOMBSTONE, UNKNOWN_TTL
from ringsync.compiled.arrow import Integers, Mask, Places, array_of, runs
from ringsync.cql.cells import Cells, joined_cells, no_cells
from ringsync.schema.table import TableSchema

Chosen = npt.NDArray[np.integer[Any]]

_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class FlatDeletions:
    """Complex deletions of many rows.

    :ivar row: number of each deletion's row
    :ivar column: number of the column (:func:`ringsync.changes.columns.columns_of`)
    :ivar timestamp: µs
    :ivar local: local deletion time, s since the epoch
    """

    row: Places
    column: Integers
    timestamp: Integers
    local: Integers

    def take(self, places: Chosen) -> Self:
        """Take the parts at these places."""
        chosen: Self = taken(self, places)
        return chosen

    def where(self, mask: Mask) -> Self:
        """Keep the parts for which the mask is true."""
        return self if mask.all() else self.take(np.flatnonzero(mask))

    def moved(self, shift: int) -> Self:
        """Renumber the rows: each comes ``shift`` rows later."""
        return replace(self, row=self.row + shift)


@dataclass(frozen=True)
class FlatCells(FlatDeletions):
    """Cells of many rows.

    :ivar local: s since the epoch: a tombstone's local deletion time, or an expiring cell's expiry; else NO_EXPIRY
    :ivar ttl: s; NO_TTL, or UNKNOWN_TTL: the write time is not known, it is ``timestamp`` or earlier
    :ivar kind: LIVE, EXPIRING or TOMBSTONE
    :ivar path: null for columns of one cell
    :ivar value: null for tombstones
    """

    ttl: Integers
    kind: Integers
    path: Cells
    value: Cells

    @property
    def unknown(self) -> Mask:
        """Whether the write time of each cell is unknown."""
        return np.asarray(self.ttl == UNKNOWN_TTL)


def taken(columns: Any, places: Chosen | slice) -> Any:
    """Take the rows at these places.

    :param columns: a dataclass of columns of equal length: arrays, :class:`Cells`, other such dataclasses, or None
    """
    if columns is None:
        return None
    if isinstance(columns, pa.Array):
        return columns[places] if isinstance(places, slice) else columns.take(array_of(places))
    if isinstance(columns, np.ndarray):
        return columns[places]
    if isinstance(columns, Cells):
        return columns.take(places)
    return type(columns)(*(taken(getattr(columns, field.name), places) for field in fields(columns)))


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate at least one part: such columns as :func:`taken` takes."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, Cells):
        return joined_cells(parts)
    return type(first)(*(joined([getattr(part, field.name) for part in parts]) for field in fields(first)))


def together(parts: Sequence[FlatCells]) -> FlatCells:
    """Concatenate cells; without parts the result is empty."""
    nothing = np.zeros(0, np.int64)
    none = FlatCells(nothing, nothing, nothing, nothing, nothing, nothing, no_cells(0), no_cells(0))
    cells: FlatCells = joined([none, *parts])
    return cells


def tombstones(row: Places, column: Integers, timestamp: Integers, local: Integers, path: Cells) -> FlatCells:
    """Make tombstones of cells."""
    count = len(row)
    none, kind = np.full(count, NO_TTL), np.full(count, TOMBSTONE)
    return FlatCells(row, column, timestamp, local, none, kind, path, no_cells(count))


def expiries(cells: FlatCells) -> Integers:
    """Return the expiry of each cell that is no tombstone: s since the epoch, or NO_EXPIRY."""
    return np.where(cells.kind == TOMBSTONE, NO_EXPIRY, cells.local)


Parts = TypeVar("Parts", bound=FlatDeletions)


def kept(parts: Parts, table: TableSchema) -> Parts:
    """Leave out cells of dropped columns, and cells from before their column was dropped and added again."""
    dropped = {column.name: column.dropped_at for column in table.dropped}
    limits = [_FOREVER if column.dropped else dropped.get(column.name, NEVER) for column in columns_of(table)]
    if set(limits) <= {NEVER}:
        return parts
    return parts.where(parts.timestamp > np.array(limits, np.int64)[parts.column])


def by_column(parts: Parts, count: int) -> list[Parts]:
    """Split cells or complex deletions by column, for ``count`` columns. Those of one column keep their order."""
    order = np.argsort(parts.column, kind="stable")
    limits = np.searchsorted(parts.column[order], np.arange(count + 1))
    return [parts.take(order[start:end]) for start, end in itertools.pairwise(limits.tolist())]


def of_rows(parts: Parts, rows: Chosen, count: int) -> Parts:
    """Take the cells or complex deletions of some rows, which become the rows 0, 1, …

    :param parts: cells or complex deletions of ``count`` rows, sorted by row
    :param rows: numbers of the rows; a row may be taken several times
    """
    counts = np.bincount(parts.row, minlength=count)
    starts = np.cumsum(counts) - counts
    taken_counts = counts[rows]
    return replace(parts.take(runs(starts[rows], taken_counts)), row=np.repeat(np.arange(len(rows)), taken_counts))


def spread(values: Cells, rows: Places, count: int) -> Cells:
    """Place values at their rows. The other rows of ``count`` are null."""
    cells = no_cells(count)
    offsets, lengths = cells.offsets, cells.lengths
    offsets[rows], lengths[rows] = values.offsets, values.lengths
    return Cells(values.buffer, offsets, lengths)
