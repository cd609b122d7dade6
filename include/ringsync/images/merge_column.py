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
    """``_merge`` of the images of change rows; null where it would say nothing.

    :param rows: rows and static rows
    :param tombstones: their cells that are tombstones, those of dropped columns left out
    :param lists: the live cells of the lists that are not frozen, by column
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
    """``_merge.tombstones`` of so many images, null where there are none.

    Complex deletions have no path and stand before the tombstones of elements; columns in the order of numbers.

    :param deletions: of whole multi-cell columns
    :param tombstones: of cells
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
    found = pa.StructArray.from_arrays(fields, fields=list(kind.value_type)).take(order)
    return _lists(kind, np.bincount(row, minlength=count), found)


def _entries(lists: Mapping[str, FlatCells], rows: int) -> pa.Array:
    """Of each list that there is the identity of its entries, unless one of them is not known."""
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
    found = pa.concat_arrays(parts).take(pa.array(np.argsort(row, kind="stable")))
    return _lists(kind, np.bincount(row, minlength=rows), found)


def _lists(kind: pa.ListType, counts: Integers, values: pa.Array) -> pa.Array:
    """Lists of so many values each, null where there is none."""
    buffers = [bitmap(counts > 0), starts_of(counts).buffers()[1]]
    return pa.Array.from_buffers(kind, len(counts), buffers, children=[values])


@dataclass(frozen=True)
class Tombstones:
    """What ``_merge.tombstones`` says.

    :ivar row: the image of each
    :ivar names: columns
    :ivar path: null: of the column
    :ivar timestamp: µs
    :ivar local_deletion_time: s
    """

    row: Places
    names: pa.Array
    path: pa.Array
    timestamp: pa.Array
    local_deletion_time: pa.Array


def tombstones_of(merge: pa.Array) -> Tombstones:
    """The tombstones of images.

    :param merge: the column ``_merge``
    """
    found = flat(merge.flatten()[3])
    return Tombstones(found.row, *found.cells.flatten())


def entries_of(merge: pa.Array, column: str, counts: Integers) -> pa.Array:
    """The path of every entry of a list, those of each row one after another.

    :param merge: the column ``_merge``
    :param column: CQL name
    :param counts: entries of each row's list
    :returns: binary; placeholders where the image does not tell
    """
    found = flat(merge.flatten()[4])
    names, paths = found.cells.flatten()
    own = np.flatnonzero(pc.equal(names, column).to_numpy(zero_copy_only=False))
    rows, paths = found.row[own], paths.take(pa.array(own))
    lengths = np.diff(integers(paths.offsets))
    told = np.flatnonzero(lengths == counts[rows])
    places = np.full(int(counts.sum()), -1)
    starts = np.cumsum(counts) - counts
    places[runs(starts[rows[told]], lengths[told])] = runs(integers(paths.offsets)[:-1][told], lengths[told])
    own_paths = paths.flatten().take(pa.array(places, mask=places < 0))
    return pc.coalesce(own_paths, placeholders(counts)) if (places < 0).any() else own_paths


def placeholders(counts: Integers) -> pa.Array:
    """Paths for list entries whose own are not known: in the order of the list, and before all that a server makes.

    They are timeuuids of time 0 whose version, unlike that of every other, is 0, too.
    """
    index = runs(np.zeros(len(counts), np.int64), counts).astype(">u8")
    made = np.zeros((len(index), _PATH_BYTES), np.uint8)
    # The second half of timeuuids is compared byte by byte, each as a signed number.
    made[:, 8:] = index.view(np.uint8).reshape(-1, 8) ^ 0x80
    starts = np.arange(len(index)) * _PATH_BYTES
    lengths = np.full(len(index), _PATH_BYTES)
    return raw_values(Cells(padded(made.tobytes()), starts.astype(np.int32), lengths.astype(np.int32)))


def is_placeholder(paths: pa.Array) -> Mask:
    """Which paths of list cells are of :func:`placeholders`."""
    cells = cells_of(paths)
    return np.asarray((cells.lengths == _PATH_BYTES) & (cells.buffer[cells.offsets.astype(np.int64) + 6] >> 4 == 0))
