"""The row after: images of what changed, from the images before and the merged changes.

The images before become change rows, these and the changes are merged, and the result becomes images. So there is one
merge. What a SELECT could not tell goes through it as well: a liveness or the times of elements that are not known
are not later than the scan that showed the rows, list entries of unknown identity get placeholders. Where one of
these meets a change that it decides about, the image is a guess and is reported as such.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.digest import DIGEST_BYTES
from ringsync.changes.flat import UNKNOWN_TTL, FlatCells, Places, by_column, cell_array, flat, together
from ringsync.changes.keys.order import clustering_order, path_type, value_order
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import (
    CELL,
    CHANGE_ROWS,
    COMPLEX_DELETION,
    DELETION,
    EXPIRING,
    LIVENESS,
    PARTITION_DELETION,
    ROW,
    STATIC,
    TOMBSTONE,
)
from ringsync.compiled.arrow import Mask, array_of, integers, valid_mask
from ringsync.cql.types import ListType
from ringsync.images.from_changes import Misfits, change_rows_of, images_of
from ringsync.images.merge_column import is_placeholder, tombstone_lists
from ringsync.images.schema import MERGE, NO_LIVENESS, ROW_TIMES, lake_names, row_image_schema
from ringsync.images.times import or_nulls, struct_of
from ringsync.images.to_cells import tombstone_cells, value_cells
from ringsync.images.to_changes import MICROS, has_clustering, image_keys
from ringsync.schema.table import TableSchema

_NONE = -1
_NEVER, _FOREVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class RowsAfter:
    """The keys that changes touch, as they are after them.

    :ivar images: one per key, in the order of merged change rows; in tables with static columns one without
        clustering for each partition, and static cells on every row
    :ivar unknown: mask of the images that are not certain and must be read from the source
    :ivar of_change: place of each change's image; -1 for deletions of partitions and ranges
    """

    images: pa.RecordBatch
    unknown: Mask
    of_change: npt.NDArray[np.int64]


def rows_after(
    previous: pa.RecordBatch,
    merged: pa.RecordBatch,
    table: TableSchema,
    *,
    live_known_from_us: int,
    misfits: Misfits,
    doubtful: Mask | None = None,
    deletions_known_from_us: int = _NEVER,
) -> RowsAfter:
    """Return the rows that changes touch, after them.

    :param previous: the newest image of every row that ``merged`` has, as far as there are such; of partitions with a
        partition deletion, a range deletion or a change of static cells all images; and in tables with static columns
        the image without clustering of every partition, or if there is none any image of it. Images that nothing
        touches may be among them, and are not in the result
    :param merged: merged change rows
    :param live_known_from_us: µs; livenesses, and times of cells, that ``previous`` does not know are older: the
        moment of the scan that the replica began with
    :param misfits: what to do with a value that its Arrow type cannot hold
    :param doubtful: which changes something may hide that ``previous`` does not show; None: none
    :param deletions_known_from_us: µs; what was written before may be hidden by deletions that ``previous`` does not
        show. So may a row's own liveness, for as long as the row was seen with cells
    :raises UnrepresentableValueError: for such a value, with ``misfits="error"``
    """
    known = change_rows_of(previous, table, unknown_at_us=live_known_from_us - 1)
    changes = merged.select(CHANGE_ROWS.names)
    both = merge(pa.concat_batches([known, changes]), table)
    own = _rows_only(changes)
    rows = _rows_only(_with_expected(both, changes, table))
    changed = _digests(rows).any(axis=1)
    touched = changed | _touched(rows, changes, previous)
    change_of = np.where(changed, np.cumsum(changed) - 1, _NONE)[touched]
    if changed.sum() != len(own):
        raise ValueError(f"{len(own)} merged change rows became {int(changed.sum())}: they were not merged")
    rows = rows.take(pa.array(np.flatnonzero(touched)))
    static_of = _static_of(rows)
    images = images_of(rows, table, misfits, static_of)
    of_row = _is_row(changes)
    doubts = np.zeros(len(own), np.bool_) if doubtful is None else doubtful[of_row]
    unknown = _unknown(rows, own, change_of, static_of, doubts, table, deletions_known_from_us)
    of_change = np.full(len(changes), _NONE)
    of_change[of_row] = np.flatnonzero(change_of != _NONE)
    return RowsAfter(images, unknown, of_change)


def _is_row(rows: pa.RecordBatch) -> Mask:
    kinds = integers(rows["kind"])
    return np.asarray((kinds == ROW) | (kinds == STATIC))


def _rows_only(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.take(pa.array(np.flatnonzero(_is_row(rows))))


def _digests(rows: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    """Zero for what comes from images only."""
    data = np.frombuffer(rows["digest"].buffers()[1], np.uint8) if len(rows) else np.empty(0, np.uint8)
    start = DIGEST_BYTES * rows["digest"].offset
    return data[start : start + DIGEST_BYTES * len(rows)].reshape(-1, DIGEST_BYTES)


def _with_expected(both: pa.RecordBatch, changes: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """With a static row for every partition that has changes, if the table has static columns; and where partitions
    are rows with a row for every partition that was deleted: its deletion must be known later."""
    keys = both["partition_key"]
    if not table.clustering:
        wanted, kind = changes["partition_key"].filter(pc.equal(changes["kind"], PARTITION_DELETION)), ROW
    elif table.of_kind("static"):
        wanted, kind = changes["partition_key"], STATIC
    else:
        return both
    kinds = integers(both["kind"])
    partition = integers(pc.dictionary_encode(keys).indices)
    _, first = np.unique(partition, return_index=True)
    has_it = np.zeros(len(first), np.bool_)
    has_it[partition[kinds == kind]] = True
    lacking = first[~has_it]
    lacking = lacking[pc.is_in(keys.take(pa.array(lacking)), wanted).to_numpy(zero_copy_only=False)]
    if not len(lacking):
        return both
    # A partition's deletion comes first in it, and is the deletion of what is made here.
    rows = both.take(pa.array(lacking))
    count = len(rows)
    is_deletion = pc.equal(rows["kind"], PARTITION_DELETION)
    clustering = pa.array([None if table.clustering else bytes(4)], pa.binary())
    made = {
        "kind": pa.array(np.full(count, kind, np.int8)),
        "clustering": clustering.take(pa.array(np.zeros(count, np.int64))),
        "range_end": pa.nulls(count, pa.binary()),
        "liveness": pa.nulls(count, LIVENESS),
        "deletion": pc.if_else(is_deletion, rows["deletion"], pa.scalar(None, DELETION)),
        "cells": _empty_lists(CELL, count),
        "complex_deletions": _empty_lists(COMPLEX_DELETION, count),
        "digest": pa.array([bytes(DIGEST_BYTES)], pa.binary(DIGEST_BYTES)).take(pa.array(np.zeros(count, np.int64))),
        "position": pa.array(np.full(count, _NONE)),
    }
    arrays = [made.get(name, rows[name]) for name in rows.schema.names]
    together = pa.concat_batches([both, pa.RecordBatch.from_arrays(arrays, schema=rows.schema)])
    places = np.concatenate([np.arange(len(both)) + 0.0, lacking + np.where(is_deletion, 0.5, -0.5)])
    return together.take(pa.array(np.argsort(places, kind="stable")))


def _empty_lists(kind: pa.DataType, count: int) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), pa.array([], kind))


def _touched(rows: pa.RecordBatch, changes: pa.RecordBatch, previous: pa.RecordBatch) -> Mask:
    """Rows that none of the changes is of: all of a partition that was deleted or whose static cells changed, what a
    range deletion hits, and the static cells of partitions with changes."""
    kinds = integers(changes["kind"])
    whole = changes["partition_key"].take(pa.array(np.flatnonzero((kinds == PARTITION_DELETION) | (kinds == STATIC))))
    keys, position = rows["partition_key"], integers(rows["position"])
    in_whole, in_any = (
        pc.is_in(keys, value_set).to_numpy(zero_copy_only=False) for value_set in (whole, changes["partition_key"])
    )
    deleted_at = pc.struct_field(previous["_row"], "deleted_at")
    before = np.append(np.where(valid_mask(deleted_at), integers(deleted_at), _NEVER), _NEVER)
    # Of a row that no change is of, the position is the place of its image.
    is_image = (position >= 0) & (position < len(previous))
    hit = _deleted_at(rows) > before[np.where(is_image, position, len(previous))]
    return np.asarray(in_whole | hit | (in_any & (integers(rows["kind"]) == STATIC)))


def _deleted_at(rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
    timestamp = rows["deletion"].flatten()[0]
    return np.where(valid_mask(timestamp), integers(timestamp), _NEVER)


def _static_of(rows: pa.RecordBatch) -> Places:
    """For each row the static row of its partition, itself where there is none."""
    partition = integers(pc.dictionary_encode(rows["partition_key"]).indices)
    is_static = integers(rows["kind"]) == STATIC
    found = np.full(int(partition.max(initial=-1)) + 1, _NONE)
    found[partition[is_static]] = np.flatnonzero(is_static)
    return np.where(found[partition] == _NONE, np.arange(len(rows)), found[partition])


def _unknown(
    rows: pa.RecordBatch,
    own: pa.RecordBatch,
    change_of: Places,
    static_of: Places,
    doubtful: Mask,
    table: TableSchema,
    deletions_known_from_us: int,
) -> Mask:
    """Tell which images are not certain.

    :param own: the changes that are of rows
    :param change_of: place of each row's change, -1: none
    :param doubtful: mask of the changes that something may hide
    """
    if table.has_counters:
        return np.ones(len(rows), np.bool_)
    columns = [column for column in columns_of(table) if not column.dropped]
    cells = flat(rows["cells"])
    alive = by_column(cells.where(cells.integers("kind") != TOMBSTONE), len(columns))
    parts = [by_column(flat(own[name]), len(columns)) for name in ("cells", "complex_deletions")]
    deleted = valid_mask(rows["deletion"])
    unknown, has_cell = np.append(doubtful, False)[change_of], np.zeros(len(rows), np.bool_)
    for column, its in zip(columns, alive, strict=True):
        if not column.is_static:
            has_cell[its.row] = True
        changed = np.zeros(len(own) + 1, np.bool_)
        for part in parts:
            changed[part[column.number].row] = True
        untimed = _marked(its.row, its.unknown, len(rows))
        unknown |= untimed & (changed[change_of] | deleted)
        if column.is_multicell and isinstance(column.type, ListType):
            nameless = _marked(its.row, is_placeholder(its.cells.field("path")), len(rows))
            unknown |= nameless & changed[change_of]
    timestamp, ttl, _ = rows["liveness"].flatten()
    liveness_unknown = valid_mask(ttl) & (integers(ttl) == UNKNOWN_TTL)
    unknown |= liveness_unknown & ~has_cell & ((change_of != _NONE) | deleted)
    # A SELECT that showed it with cells did not prove that the row was inserted. (What inserts is doubtful itself.)
    unproven = valid_mask(timestamp) & (integers(timestamp) < deletions_known_from_us)
    takes = np.append(~valid_mask(own["liveness"]), False)[change_of]
    unknown |= unproven & ~has_cell & takes
    return np.asarray(unknown | unknown[static_of])


def _marked(rows: Places, marks: Mask, count: int) -> Mask:
    found = np.zeros(count, np.bool_)
    found[rows[marks]] = True
    return found


def seen_instead(after: pa.RecordBatch, seen: pa.RecordBatch, read_at_us: int, table: TableSchema) -> pa.RecordBatch:
    """Return what a read of the source showed, in the place of images that are not certain.

    Values and times are those that were seen; deletions and tombstones are kept, and so is a liveness, unless it is
    refuted: what is seen without a regular cell lives by a liveness. A row that was not seen has no cells. What expires
    and was not seen has expired, or something newer hides it: of cells a tombstone is left, of a row's liveness when it
    was and that it has ended, since both hide what is older.

    :param after: images of the keys that were read
    :param seen: images that the read gave, in any order; of a partition without rows one without clustering
    :param read_at_us: µs, moment of the read, or before it
    :returns: images of the keys of ``after``, in its order
    """
    names, schema = lake_names(table), row_image_schema(table)
    is_row = has_clustering(after, table)
    of_key, of_partition = _places(after, seen, table)
    place = np.where(is_row, of_key, of_partition)
    found = place != _NONE
    all_seen = pa.array(place, mask=~found)
    rows_seen = pa.array(place, mask=~(found & is_row))
    x_type, values, differences = schema.field("_x").type, [], []
    has_cell = np.zeros(len(after), np.bool_)
    for column in table.columns:
        name = names[column.name]
        batch, take = (seen, all_seen if column.kind == "static" else rows_seen)
        if column.is_key:
            batch, take = after, pa.array(np.arange(len(after)))
        values.append(batch[name].take(take))
        differences.append(pc.struct_field(batch["_x"], name).take(take))
        if column.kind == "regular":
            has_cell |= valid_mask(values[-1]) | valid_mask(pc.struct_field(differences[-1], "raw"))
    live = _live_when_seen(after, found & is_row, has_cell, read_at_us)
    live |= ~found & is_row
    merge = dict(zip(MERGE.names, after["_merge"].flatten(), strict=True))
    live_expires_at = integers(merge["live_expires_at"])
    may_hide = live & (found | valid_mask(merge["live_expires_at"]))
    row = [pc.struct_field(seen["_row"], name).take(all_seen) for name in ("writetime", "expires_at")]
    row += [pc.struct_field(after["_row"], "deleted_at"), _live(after, may_hide, live)]
    ended = np.where(found, live_expires_at, np.minimum(live_expires_at, read_at_us // MICROS))
    merge["live_expires_at"] = array_of(ended, may_hide & valid_mask(merge["live_expires_at"]))
    merge["unseen_at"] = array_of(np.full(len(after), read_at_us), ~found)
    if _may_expire(after, table):
        tombstones, deletions = tombstone_cells(after, table)
        tombstones = together([tombstones, _ended_cells(after, is_row, seen, place, table)], CELL)
        merge["tombstones"] = tombstone_lists(deletions, tombstones, table, len(after))
    merge["entries"] = pa.nulls(len(after), MERGE.field("entries").type)
    arrays = [
        pa.StructArray.from_arrays(row, fields=list(ROW_TIMES)),
        or_nulls(struct_of(x_type, differences), x_type, len(after)),
        or_nulls(struct_of(MERGE, list(merge.values())), MERGE, len(after)),
    ]
    return pa.RecordBatch.from_arrays([after["token"], *values, *arrays], schema=schema)


def _places(after: pa.RecordBatch, seen: pa.RecordBatch, table: TableSchema) -> tuple[Places, Places]:
    """Tell where among the images seen those of each key are, and any of each partition; -1: nowhere."""
    keys, partitions = [], []
    for images in (after, seen):
        partition, clustering = image_keys(images, table)
        # Equal clusterings need not have equal bytes.
        ordered = clustering_order(clustering, table)
        lengths = pc.binary_length(partition).cast(pa.string()).cast(pa.binary())
        keys.append(pc.binary_join_element_wise(lengths, partition, ordered, b" "))
        partitions.append(partition)
    places = [pc.fill_null(pc.index_in(mine, value_set=its), _NONE) for mine, its in (keys, partitions)]
    return integers(places[0]), integers(places[1])


def _live_when_seen(after: pa.RecordBatch, seen: Mask, has_cell: Mask, read_at_us: int) -> Mask:
    """Return rows that were seen whose liveness, or that there is none, stays known."""
    deleted_at, live = (pc.struct_field(after["_row"], name) for name in ("deleted_at", "live"))
    expires_at = pc.struct_field(after["_merge"], "live_expires_at")
    times = integers(live)
    deleted = valid_mask(deleted_at) & (times <= integers(deleted_at))
    expired = valid_mask(expires_at) & (integers(expires_at) <= read_at_us // MICROS)
    explains = (times != NO_LIVENESS) & ~deleted & ~expired
    return np.asarray(seen & valid_mask(live) & (has_cell | explains))


def _live(after: pa.RecordBatch, kept: Mask, known: Mask) -> pa.Array:
    """``_row.live``: where it is known and not kept there is none."""
    live = integers(pc.struct_field(after["_row"], "live"))
    return array_of(np.where(kept, live, NO_LIVENESS), known)


def _may_expire(images: pa.RecordBatch, table: TableSchema) -> bool:
    """Tell whether there is any cell that expires."""
    names = lake_names(table)
    ends = [pc.struct_field(images["_row"], "expires_at")]
    ends += [pc.struct_field(images["_x"], [names[column.name], "e"]) for column in table.value_columns]
    return any(one.null_count < len(one) for one in ends)


def _ended_cells(
    after: pa.RecordBatch, is_row: Mask, seen: pa.RecordBatch, place: Places, table: TableSchema
) -> FlatCells:
    """Return tombstones of the cells that expire and were not seen.

    :param is_row: mask of the images of ``after`` that are of rows: the others have the static cells
    :param place: place of each one's image among those that were seen, -1: none
    """
    found = []
    for column in columns_of(table):
        if column.dropped or column.is_counter:
            continue
        cells = value_cells(after, table, column, None)
        cells = cells.where((cells.integers("kind") == EXPIRING) & (is_row[cells.row] != column.is_static))
        if column.is_multicell and isinstance(column.type, ListType):
            cells = cells.where(~is_placeholder(cells.cells.field("path")))
        found.append(cells)
    return tombstones_of_ended(together(found, CELL), seen, place, table)


def tombstones_of_ended(cells: FlatCells, seen: pa.RecordBatch, place: Places, table: TableSchema) -> FlatCells:
    """Return tombstones of cells that expire and are not seen: they have ended, or something newer hides them.

    :param cells: the cells that expire
    :param seen: images
    :param place: place in ``seen`` of the image of each row of the cells, -1: none
    """
    columns = [column for column in columns_of(table) if not column.dropped]
    found = []
    for column, its in zip(columns, by_column(cells, len(columns)), strict=True):
        if len(its.row):
            # What was seen at an unknown time is as new as can be.
            shown = value_cells(seen, table, column, _FOREVER)
            found.append(its.where(~_is_shown(its, place[its.row], shown, column)))
    ended = together(found, CELL)
    count = len(ended.row)
    tombstones = cell_array(
        ended.integers("column"),
        ended.cells.field("path"),
        pa.nulls(count, pa.binary()),
        ended.integers("timestamp"),
        pa.nulls(count, pa.int32()),
        ended.cells.field("local_deletion_time"),
        np.full(count, TOMBSTONE),
    )
    return FlatCells(ended.row, tombstones)


def _is_shown(cells: FlatCells, place: Places, shown: FlatCells, column: LoggedColumn) -> Mask:
    """Tell which cells of a column were seen, or something in their place that is not older.

    :param place: the row of each among those of ``shown``, -1: none
    """
    row, path = np.concatenate([place, shown.row]), np.zeros(len(place) + len(shown.row), np.int64)
    # A SELECT does not tell which entry of a list is which.
    if column.is_multicell and not isinstance(column.type, ListType):
        paths = pa.concat_arrays([one.cells.field("path") for one in (cells, shown)])
        path = integers(pc.dictionary_encode(value_order(paths, path_type(column.type))).indices)
    keys, key = np.unique(row * (path.max(initial=0) + 1) + path, return_inverse=True)
    newest = np.full(len(keys), _NEVER)
    np.maximum.at(newest, key[len(place) :], shown.integers("timestamp"))
    return np.asarray(newest[key[: len(place)]] >= cells.integers("timestamp"))
