"""The column ``_merge`` of row images: tombstones, the identity of list entries, and more (images/schema.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import columns_of
from ringsync.changes.flat import FlatCells, Places, flat, kept
from ringsync.compiled.arrow import Integers, Mask, bitmap, integers, runs, starts_of, valid_mask
from ringsync.compiled.memory import padded
from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.images.schema import MERGE
from ringsync.schema.table import TableSchema

_PATH_BYTES = 16


def merge_column(
    rows: pa.RecordBatch, table: TableSchema, tombstones: FlatCells, lists: Mapping[str, FlatCells]
) -> pa.Array:
    """Build ``_merge`` of the images of change rows; null if it has no content.

    :param rows: rows and static rows
    :param tombstones: tombstone cells of these rows, without dropped columns
    :param lists: live cells of the non-frozen lists, by column
    """
    count = len(rows)
    _, ttl, live_expires_at = rows["liveness"].flatten()
    live_expires_at = pc.if_else(pc.is_valid(ttl), live_expires_at, pa.scalar(None, pa.int64()))
    _, deletion_local = rows["deletion"].flatten()
    fields = [live_expires_at, deletion_local, pa.nulls(count, pa.int64())]
    deletions = kept(flat(rows["complex_deletions"]), table)
    fields += [tombstone_lists(deletions, tombstones, table, count), _entries(lists, count)]
    valid = np.logical_or.reduce([valid_mask(field) for field in fields])
    return pa.Array.from_buffers(MERGE, count, [bitmap(valid)], children=fields)


def tombstone_lists(deletions: FlatCells, tombstones: FlatCells, table: TableSchema, count: int) -> pa.Array:
    """Build ``_merge.tombstones`` of ``count`` images, null where there are none.

    Complex deletions have no path and come before the tombstones of elements. Columns are in the order of numbers.

    :param deletions: deletions of whole multi-cell columns
    :param tombstones: tombstones of cells
    """
    names = pa.array([column.name for column in columns_of(table)], pa.string())
    row = np.concatenate([deletions.row, tombstones.row])
    column = np.concatenate([deletions.integers("column"), tombstones.integers("column")])
    order = pa.array(np.lexsort((column, row)))
    fields = [
        names.take(pa.array(column)),
        pa.concat_arrays([pa.nulls(len(deletions.row), pa.binary()), tombstones.cells.field("path")]),
        *(
            pa.concat_arrays([part.cells.field(name) for part in (deletions, tombstones)])
            for name in ("timestamp", "local_deletion_time")
        ),
    ]
    kind = MERGE.field("tombstones").type
    ordered = pa.StructArray.from_arrays(fields, fields=list(kind.value_type)).take(order)
    return _lists(kind, np.bincount(row, minlength=count), ordered)


def _entries(lists: Mapping[str, FlatCells], rows: int) -> pa.Array:
    """Build the identities of each list's entries, unless one of them is not known."""
    kind = MERGE.field("entries").type
    parts, row_of_part = [], [np.zeros(0, np.int64)]
    for name, cells in lists.items():
        placeholders = np.bincount(cells.row, is_placeholder(cells.cells.field("path")), rows) > 0
        known = cells.where(~placeholders[cells.row]) if placeholders.any() else cells
        counts = np.bincount(known.row, minlength=rows)
        present = np.flatnonzero(counts)
        paths = pa.ListArray.from_arrays(starts_of(counts[present]), known.cells.field("path"))
        names = pa.array([name], pa.string()).take(pa.array(np.zeros(len(present), np.int64)))
        parts.append(pa.StructArray.from_arrays([names, paths], fields=list(kind.value_type)))
        row_of_part.append(present)
    if not parts:
        return pa.nulls(rows, kind)
    row = np.concatenate(row_of_part)
    ordered = pa.concat_arrays(parts).take(pa.array(np.argsort(row, kind="stable")))
    return _lists(kind, np.bincount(row, minlength=rows), ordered)


def _lists(kind: pa.ListType, counts: Integers, values: pa.Array) -> pa.Array:
    """Build lists of ``counts`` values each, null where there is none."""
    buffers = [bitmap(counts > 0), starts_of(counts).buffers()[1]]
    return pa.Array.from_buffers(kind, len(counts), buffers, children=[values])


@dataclass(frozen=True)
class Tombstones:
    """The content of ``_merge.tombstones``, one entry per tombstone.

    :ivar row: index of the image
    :ivar names: name of the column
    :ivar path: cell path; null: the tombstone is of the column
    :ivar timestamp: time of the deletion, µs
    :ivar local_deletion_time: local deletion time, s
    """

    row: Places
    names: pa.Array
    path: pa.Array
    timestamp: pa.Array
    local_deletion_time: pa.Array


def tombstones_of(merge: pa.Array) -> Tombstones:
    """Return the tombstones of images.

    :param merge: column ``_merge``
    """
    tombstones = flat(merge.flatten()[3])
    return Tombstones(tombstones.row, *tombstones.cells.flatten())


def entries_of(merge: pa.Array, column: str, counts: Integers) -> pa.Array:
    """Return the path of every entry of a list, row after row.

    :param merge: column ``_merge``
    :param column: CQL name of the list
    :param counts: number of entries of each row's list
    :returns: binary paths; placeholders where the image does not know them
    """
    entries = flat(merge.flatten()[4])
    names, paths = entries.cells.flatten()
    of_column = np.flatnonzero(pc.equal(names, column).to_numpy(zero_copy_only=False))
    rows, paths = entries.row[of_column], paths.take(pa.array(of_column))
    lengths = np.diff(integers(paths.offsets))
    told = np.flatnonzero(lengths == counts[rows])
    places = np.full(int(counts.sum()), -1)
    starts = np.cumsum(counts) - counts
    places[runs(starts[rows[told]], lengths[told])] = runs(integers(paths.offsets)[:-1][told], lengths[told])
    own_paths = paths.flatten().take(pa.array(places, mask=places < 0))
    return pc.coalesce(own_paths, placeholders(counts)) if (places < 0).any() else own_paths


def placeholders(counts: Integers) -> pa.Array:
    """Make paths for list entries of unknown identity: in the order of the list, and before all paths of servers.

    They are timeuuids of time 0 whose version is 0, unlike that of any real one.
    """
    index = runs(np.zeros(len(counts), np.int64), counts).astype(">u8")
    made = np.zeros((len(index), _PATH_BYTES), np.uint8)
    # The second half of timeuuids is compared byte by byte, each as a signed number.
    made[:, 8:] = index.view(np.uint8).reshape(-1, 8) ^ 0x80
    starts = np.arange(len(index)) * _PATH_BYTES
    lengths = np.full(len(index), _PATH_BYTES)
    return raw_values(Cells(padded(made.tobytes()), starts.astype(np.int32), lengths.astype(np.int32)))


def is_placeholder(paths: pa.Array) -> Mask:
    """Tell which paths of list cells are :func:`placeholders`."""
    cells = cells_of(paths)
    return np.asarray((cells.lengths == _PATH_BYTES) & (cells.buffer[cells.offsets.astype(np.int64) + 6] >> 4 == 0))
