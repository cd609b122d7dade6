"""The column ``_merge`` of row images: tombstones, identities of list entries and more (images/schema.py)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import columns_of
from ringsync.changes.flat import FlatCells, FlatDeletions, kept, together
from ringsync.changes.flat import tombstones as tombstones_of_cells
from ringsync.changes.schema import NO_EXPIRY
from ringsync.compiled.arrow import Integers, Mask, array_of, filled, integers, list_of, rows_of_lists, runs, structs_of
from ringsync.compiled.memory import padded
from ringsync.cql.cells import Cells, cells_of, joined_cells, no_cells, raw_values
from ringsync.images.schema import ENTRIES, MERGE, TOMBSTONE
from ringsync.images.times import struct_of
from ringsync.schema.table import TableSchema

_PATH_BYTES = 16


def merge_column(
    rows: ChangeRows, table: TableSchema, tombstones: FlatCells, lists: Mapping[str, FlatCells]
) -> pa.Array:
    """Build ``_merge`` of the images of change rows; null if it has no content.

    :param rows: rows and static rows
    :param tombstones: tombstone cells of these rows, without dropped columns
    :param lists: live cells of the non-frozen lists, by column
    """
    count, expires_at = len(rows), rows.liveness.expires_at
    fields = [
        array_of(expires_at, expires_at != NO_EXPIRY),
        array_of(rows.deletion.local, rows.deletion.there),
        pa.nulls(count, pa.int64()),
        tombstone_lists(kept(rows.complex_deletions, table), tombstones, table, count),
        _entries(lists, count),
    ]
    return struct_of(MERGE, fields, count)


def tombstone_lists(deletions: FlatDeletions, tombstones: FlatCells, table: TableSchema, count: int) -> pa.Array:
    """Build ``_merge.tombstones`` of ``count`` images, null where there are none.

    Complex deletions have no path and come before the tombstones of elements. Columns are in the order of numbers.

    :param deletions: deletions of whole multi-cell columns
    :param tombstones: tombstones of cells
    """
    names = pa.array([column.name for column in columns_of(table)], pa.string())
    path = no_cells(len(deletions.row))
    whole = tombstones_of_cells(deletions.row, deletions.column, deletions.timestamp, deletions.local, path)
    every = together([whole, tombstones])
    every = every.take(np.lexsort((every.column, every.row)))
    numbers = [array_of(every.timestamp), array_of(every.local)]
    counts = np.bincount(every.row, minlength=count)
    structs = structs_of(TOMBSTONE, [names.take(array_of(every.column)), raw_values(every.path), *numbers])
    return list_of(counts, structs, counts > 0)


def _entries(lists: Mapping[str, FlatCells], rows: int) -> pa.Array:
    """Build the identities of entries, for each list whose entries are all known."""
    parts, row_of_part = [], [np.zeros(0, np.int64)]
    for name, cells in lists.items():
        placeholders = np.bincount(cells.row, is_placeholder(cells.path), rows) > 0
        known = cells.where(~placeholders[cells.row])
        counts = np.bincount(known.row, minlength=rows)
        present = np.flatnonzero(counts)
        names = pa.array([name], pa.string()).take(array_of(np.zeros(len(present), np.int64)))
        parts.append(structs_of(ENTRIES, [names, list_of(counts[present], raw_values(known.path))]))
        row_of_part.append(present)
    if not parts:
        return pa.nulls(rows, pa.list_(ENTRIES))
    row = np.concatenate(row_of_part)
    ordered = pa.concat_arrays(parts).take(array_of(np.argsort(row, kind="stable")))
    counts = np.bincount(row, minlength=rows)
    return list_of(counts, ordered, counts > 0)


def tombstones_of(merge: pa.Array, table: TableSchema) -> tuple[FlatCells, FlatDeletions]:
    """Return the tombstones that images keep, of cells and of whole multi-cell columns, without dropped columns.

    :param merge: column ``_merge``
    """
    row, structs = rows_of_lists(merge.flatten()[3])
    names, path, timestamp, local = structs.flatten()
    columns = [column for column in columns_of(table) if not column.dropped]
    known = pa.array([column.name for column in columns], pa.string())
    number = filled(pc.index_in(names, known), -1)
    paths = cells_of(path)
    multicell = np.array([column.is_multicell for column in columns] + [False])[number]
    every = tombstones_of_cells(row, number, integers(timestamp), integers(local), paths).where(number >= 0)
    whole = (multicell & (paths.lengths < 0))[number >= 0]
    complex_ = every.where(whole)
    deletions = FlatDeletions(complex_.row, complex_.column, complex_.timestamp, complex_.local)
    return every.where(~whole), deletions


def entries_of(merge: pa.Array, column: str, counts: Integers) -> Cells:
    """Return the path of every entry of a list, row after row.

    :param merge: column ``_merge``
    :param column: CQL name of the list
    :param counts: number of entries of each row's list
    :returns: paths; placeholders where the image does not know them
    """
    row, entries = rows_of_lists(merge.flatten()[4])
    names, paths = entries.flatten()
    of_column = np.flatnonzero(pc.equal(names, column).to_numpy(zero_copy_only=False))
    rows, paths = row[of_column], paths.take(array_of(of_column))
    lengths = np.diff(integers(paths.offsets))
    complete = np.flatnonzero(lengths == counts[rows])
    places = np.full(int(counts.sum()), -1)
    starts = np.cumsum(counts) - counts
    first, of_each = integers(paths.offsets)[:-1][complete], lengths[complete]
    places[runs(starts[rows[complete]], of_each)] = runs(first, of_each)
    known = cells_of(paths.flatten())
    # The placeholders come after all known paths, one for each entry.
    with_placeholders = joined_cells([known, placeholders(counts)])
    return with_placeholders.take(np.where(places < 0, len(known) + np.arange(len(places)), places))


def placeholders(counts: Integers) -> Cells:
    """Make paths for list entries of unknown identity. They keep the list's order and sort before all real paths.

    They are timeuuids of time 0 with version 0, which no real timeuuid has.
    """
    index = runs(np.zeros(len(counts), np.int64), counts).astype(">u8")
    uuids = np.zeros((len(index), _PATH_BYTES), np.uint8)
    # The second half of timeuuids is compared byte by byte, each as a signed number.
    uuids[:, 8:] = index.view(np.uint8).reshape(-1, 8) ^ 0x80
    starts = np.arange(len(index)) * _PATH_BYTES
    lengths = np.full(len(index), _PATH_BYTES)
    return Cells(padded(uuids.tobytes()), starts.astype(np.int32), lengths.astype(np.int32))


def is_placeholder(paths: Cells) -> Mask:
    """Tell which paths of list cells are :func:`placeholders`."""
    version = paths.buffer[paths.offsets.astype(np.int64) + 6] >> 4
    return np.asarray((paths.lengths == _PATH_BYTES) & (version == 0))
