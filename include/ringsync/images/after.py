"""The row after: images of what changed, from the images before and the merged changes.

The images before become change rows, these and the changes are merged, and the result becomes images: there is only one
merge. Facts that a SELECT could not show take part in it: an unknown liveness, and unknown times of elements, are not
later than the scan that showed the rows. List entries of unknown identity get placeholders. If such a fact decides
about a change, the image is a guess and is reported as such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows, Deletion, concatenated, without_content
from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.flat import FlatCells, by_column, together, tombstones
from ringsync.changes.keys.order import key_numbers, numbered, path_type, value_keys
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import EXPIRING, NEVER, PARTITION_DELETION, ROW, STATIC, TOMBSTONE
from ringsync.compiled.arrow import Integers, Mask, Places, array_of, filled, integers, structs_of, valid_mask
from ringsync.cql.cells import cells_of, cells_of_values, codes, no_cells
from ringsync.images.from_changes import Misfits, images_of
from ringsync.images.merge_column import is_placeholder, tombstone_lists, tombstones_of
from ringsync.images.schema import MERGE, NO_LIVENESS, ROW_TIMES, lake_names, row_image_schema
from ringsync.images.times import struct_of
from ringsync.images.to_cells import value_cells
from ringsync.images.to_changes import MICROS, change_rows_of, has_clustering, image_keys
from ringsync.schema.table import TableSchema

_NONE = -1
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class RowsAfter:
    """The keys that changes touch, as they are after them.

    :ivar images: one per key, in the order of merged change rows; in tables with static columns also an image without
        clustering for each partition, and the static cells on every row
    :ivar unknown: mask of the images that are not certain and must be read from the source
    :ivar of_change: place of each change's image; -1 for deletions of partitions and ranges
    """

    images: pa.RecordBatch
    unknown: Mask
    of_change: npt.NDArray[np.int64]


def rows_after(
    previous: pa.RecordBatch,
    merged: ChangeRows,
    table: TableSchema,
    *,
    live_known_from_us: int,
    misfits: Misfits,
    doubtful: Mask | None = None,
    deletions_known_from_us: int = NEVER,
) -> RowsAfter:
    """Return the rows that changes touch, after these changes.

    :param previous: the newest image of each row in ``merged``, if there is one; all images of partitions with a
        partition deletion, a range deletion or a change of static cells; in tables with static columns also, for each
        partition, the image without clustering, or any other if there is none. The result leaves out images that
        nothing touches
    :param live_known_from_us: moment of the scan that the replica began with, µs; livenesses and times of cells that
        ``previous`` does not know are older
    :param misfits: treatment of values that the Arrow type cannot hold
    :param doubtful: mask of changes that may be hidden by something that ``previous`` does not show; None: none
    :param deletions_known_from_us: µs; deletions that ``previous`` does not show may hide writes before this moment,
        and the liveness of rows that were always seen with cells
    :raises UnrepresentableValueError: there is such a value, with ``misfits="error"``
    """
    known = change_rows_of(previous, table, unknown_at_us=live_known_from_us - 1)
    both = merge(concatenated([known, replace(merged, node=None)]), table)
    row_changes = merged.where(merged.of_row)
    rows = with_expected_rows(both, merged, table)
    rows = rows.where(rows.of_row)
    changed = rows.digest.any(axis=1)  # zero for what comes from images only
    touched = changed | _touched(rows, merged, previous)
    change_of = np.where(changed, np.cumsum(changed) - 1, _NONE)[touched]
    if changed.sum() != len(row_changes):
        raise ValueError(f"{len(row_changes)} merged change rows became {int(changed.sum())}: they were not merged")
    rows = rows.where(touched)
    static_of = static_row_of(rows)
    images = images_of(replace(rows, cells=_named_once(rows.cells, table)), table, misfits, static_of)
    doubts = np.zeros(len(row_changes), np.bool_) if doubtful is None else doubtful[merged.of_row]
    unknown = _unknown(rows, row_changes, change_of, static_of, doubts, table, deletions_known_from_us)
    of_change = np.full(len(merged), _NONE)
    of_change[merged.of_row] = np.flatnonzero(change_of != _NONE)
    return RowsAfter(images, unknown, of_change)


def _named_once(cells: FlatCells, table: TableSchema) -> FlatCells:
    """Leave out list entries of unknown identity if a known entry has the same value and time."""
    numbers = [column.number for column in columns_of(table) if column.is_list]
    entries = np.flatnonzero(np.isin(cells.column, numbers) & (cells.kind != TOMBSTONE))
    nameless = is_placeholder(cells.path.take(entries))
    if not nameless.any() or nameless.all():
        return cells
    lists = cells.take(entries)
    (value,) = codes([lists.value])
    _, entry = np.unique(np.stack([lists.row, lists.column, lists.timestamp, value]), axis=1, return_inverse=True)
    again = nameless & np.isin(entry.reshape(-1), entry.reshape(-1)[~nameless])
    left = np.ones(len(cells.row), np.bool_)
    left[entries[again]] = False
    return cells.where(left)


def with_expected_rows(both: ChangeRows, changes: ChangeRows, table: TableSchema) -> ChangeRows:
    """Add the rows whose images are expected, where they are missing.

    If the table has static columns: a static row for each partition with changes. If it has no clustering: a row for
    each deleted partition, because its deletion must be known later.

    :param both: merged change rows; ``changes``: those among them that are changes
    """
    if not table.clustering:
        wanted, kind = changes.where(changes.kind == PARTITION_DELETION), ROW
    elif table.of_kind("static"):
        wanted, kind = changes, STATIC
    else:
        return both
    partition, wanted_partitions = codes([both.partition_key, wanted.partition_key])
    _, first = np.unique(partition, return_index=True)
    has_it = np.isin(partition[first], partition[both.kind == kind])
    lacking = first[~has_it & np.isin(partition[first], wanted_partitions)]
    if not len(lacking):
        return both
    # The deletion of a partition is its first row; the new row has the same deletion.
    rows = both.take(lacking)
    is_deletion, count = rows.kind == PARTITION_DELETION, len(rows)
    no_columns = cells_of_values([bytes(4)]).take(np.zeros(count, np.int64))
    added = without_content(
        rows,
        kind=np.full(count, kind),
        clustering=no_cells(count) if table.clustering else no_columns,
        deletion=Deletion(np.where(is_deletion, rows.deletion.timestamp, NEVER), rows.deletion.local * is_deletion),
        digest=np.zeros((count, 2), np.uint64),
        position=np.full(count, _NONE),
    )
    places = np.concatenate([np.arange(len(both)) + 0.0, lacking + np.where(is_deletion, 0.5, -0.5)])
    return concatenated([both, added]).take(np.argsort(places, kind="stable"))


def _touched(rows: ChangeRows, changes: ChangeRows, previous: pa.RecordBatch) -> Mask:
    """Find rows that changes of other rows touch: all rows of a partition that was deleted or whose static cells
    changed, rows that a range deletion hits, and the static rows of partitions with changes."""
    whole = (changes.kind == PARTITION_DELETION) | (changes.kind == STATIC)
    partition, changed = codes([rows.partition_key, changes.partition_key])
    before = np.append(filled(pc.struct_field(previous["_row"], "deleted_at"), NEVER), NEVER)
    # A row without a change of its own has the place of its image as position.
    is_image = (rows.position >= 0) & (rows.position < len(previous))
    hit = rows.deletion.timestamp > before[np.where(is_image, rows.position, len(previous))]
    in_any = np.isin(partition, changed)
    return np.asarray(np.isin(partition, changed[whole]) | hit | (in_any & (rows.kind == STATIC)))


def static_row_of(rows: ChangeRows) -> Places:
    """Return the static row of each row's partition; the row itself if there is none."""
    (partition,) = codes([rows.partition_key])
    is_static = rows.kind == STATIC
    static_of = np.full(int(partition.max(initial=-1)) + 1, _NONE)
    static_of[partition[is_static]] = np.flatnonzero(is_static)
    return np.where(static_of[partition] == _NONE, np.arange(len(rows)), static_of[partition])


def _unknown(
    rows: ChangeRows,
    changes: ChangeRows,
    change_of: Places,
    static_of: Places,
    doubtful: Mask,
    table: TableSchema,
    deletions_known_from_us: int,
) -> Mask:
    """Tell which images are not certain.

    :param changes: changes of rows
    :param change_of: place of each row's change, -1: none
    :param doubtful: mask of the changes that something may hide
    """
    if table.has_counters:
        return np.ones(len(rows), np.bool_)
    columns = [column for column in columns_of(table) if not column.dropped]
    alive = by_column(rows.cells.where(rows.cells.kind != TOMBSTONE), len(columns))
    parts = [by_column(all_parts, len(columns)) for all_parts in (changes.cells, changes.complex_deletions)]
    deleted = rows.deletion.there
    unknown, has_cell = np.append(doubtful, False)[change_of], np.zeros(len(rows), np.bool_)
    for column, cells in zip(columns, alive, strict=True):
        if not column.is_static:
            has_cell[cells.row] = True
        changed = np.zeros(len(changes) + 1, np.bool_)
        for of_column in parts:
            changed[of_column[column.number].row] = True
        unknown |= _marked(cells.row, cells.unknown, len(rows)) & (changed[change_of] | deleted)
        if column.is_list:
            unknown |= _marked(cells.row, is_placeholder(cells.path), len(rows)) & changed[change_of]
    liveness = rows.liveness
    unknown |= liveness.unknown & ~has_cell & ((change_of != _NONE) | deleted)
    # A SELECT that showed cells did not prove that the row was inserted. (A change that inserts is doubtful itself.)
    unproven = liveness.there & (liveness.timestamp < deletions_known_from_us)
    takes = np.append(~changes.liveness.there, False)[change_of]
    unknown |= unproven & ~has_cell & takes
    return np.asarray(unknown | unknown[static_of])


def _marked(rows: Places, marks: Mask, count: int) -> Mask:
    marked = np.zeros(count, np.bool_)
    marked[rows[marks]] = True
    return marked


def seen_instead(after: pa.RecordBatch, seen: pa.RecordBatch, read_at_us: int, table: TableSchema) -> pa.RecordBatch:
    """Replace images that are not certain by what a read of the source showed.

    Values and times are those that were seen. Deletions and tombstones stay. A liveness stays unless the read refutes
    it: a row that is seen without regular cells lives by a liveness. A row that was not seen has no cells. If something
    expires and was not seen, it has expired, or something newer hides it. An expired cell leaves a tombstone, and an
    expired liveness keeps its time and gets an end, because both hide older writes.

    :param after: images of the keys that were read
    :param seen: images that the read gave, in any order; for a partition without rows one without clustering
    :param read_at_us: moment of the read or earlier, µs
    :returns: images of the keys of ``after``, in its order
    """
    names, schema = lake_names(table), row_image_schema(table)
    is_row = has_clustering(after, table)
    of_key, of_partition = _places(after, seen, table)
    place = np.where(is_row, of_key, of_partition)
    was_seen = place != _NONE
    all_seen, rows_seen = array_of(place, was_seen), array_of(place, was_seen & is_row)
    values, differences = [], []
    has_cell = np.zeros(len(after), np.bool_)
    for column in table.columns:
        name = names[column.name]
        batch, take = (seen, all_seen if column.kind == "static" else rows_seen)
        if column.is_key:
            batch, take = after, array_of(np.arange(len(after)))
        values.append(batch[name].take(take))
        differences.append(pc.struct_field(batch["_x"], name).take(take))
        if column.kind == "regular":
            has_cell |= valid_mask(values[-1]) | valid_mask(pc.struct_field(differences[-1], "raw"))
    live = _live_when_seen(after, was_seen & is_row, has_cell, read_at_us)
    live |= ~was_seen & is_row
    merge = dict(zip(MERGE.names, after["_merge"].flatten(), strict=True))
    live_expires_at = integers(merge["live_expires_at"])
    may_hide = live & (was_seen | valid_mask(merge["live_expires_at"]))
    row = [pc.struct_field(seen["_row"], name).take(all_seen) for name in ("writetime", "expires_at")]
    times = integers(pc.struct_field(after["_row"], "live"))
    row += [pc.struct_field(after["_row"], "deleted_at"), array_of(np.where(may_hide, times, NO_LIVENESS), live)]
    ended = np.where(was_seen, live_expires_at, np.minimum(live_expires_at, read_at_us // MICROS))
    merge["live_expires_at"] = array_of(ended, may_hide & valid_mask(merge["live_expires_at"]))
    merge["unseen_at"] = array_of(np.full(len(after), read_at_us), ~was_seen)
    if _may_expire(after, table).any():
        kept_tombstones, deletions = tombstones_of(after["_merge"], table)
        every = together([kept_tombstones, _ended_cells(after, is_row, seen, place, table)])
        merge["tombstones"] = tombstone_lists(deletions, every, table, len(after))
    merge["entries"] = pa.nulls(len(after), MERGE.field("entries").type)
    x = struct_of(schema.field("_x").type, differences, len(after))
    structs = [structs_of(ROW_TIMES, row), x, struct_of(MERGE, list(merge.values()), len(after))]
    return pa.RecordBatch.from_arrays([after["token"], *values, *structs], schema=schema)


def without_deleted_livenesses(
    images: pa.RecordBatch, table: TableSchema, dead_until_us: int, there: Mask
) -> pa.RecordBatch:
    """Clear unknown livenesses of deleted rows: if the log is believed, a row without cells must not live by one.

    :param dead_until_us: moment of the scan that the replica began with, µs: unknown livenesses were written before,
        so later deletions have deleted them
    :param there: whether a read has shown each row; a row that it does not show has no liveness
    """
    deleted_at, live = (pc.struct_field(images["_row"], name) for name in ("deleted_at", "live"))
    deleted = valid_mask(deleted_at) & ((integers(deleted_at) >= dead_until_us) | ~there)
    dead = deleted & ~valid_mask(live) & has_clustering(images, table)
    fields = dict(zip(ROW_TIMES.names, images["_row"].flatten(), strict=True))
    fields["live"] = array_of(np.where(dead, NO_LIVENESS, integers(live)), valid_mask(live) | dead)
    times = structs_of(ROW_TIMES, list(fields.values()), valid_mask(images["_row"]))
    return images.set_column(images.schema.get_field_index("_row"), images.schema.field("_row"), times)


def _places(after: pa.RecordBatch, seen: pa.RecordBatch, table: TableSchema) -> tuple[Places, Places]:
    """Find the first image of each key among those seen, and the first of each partition; -1: there is none."""
    keys, seen_keys = (map(cells_of, image_keys(images, table)) for images in (after, seen))
    (partition, clustering), (seen_partition, seen_clustering) = keys, seen_keys
    of_keys = key_numbers(table, (partition, clustering), (seen_partition, seen_clustering))
    return _first_places(*of_keys), _first_places(*codes([partition, seen_partition]))


def _first_places(numbers: Integers, among: Integers) -> Places:
    places = np.full(max(numbers.max(initial=0), among.max(initial=0)) + 1, _NONE)
    places[among[::-1]] = np.arange(len(among))[::-1]
    return np.asarray(places[numbers])


def _live_when_seen(after: pa.RecordBatch, seen: Mask, has_cell: Mask, read_at_us: int) -> Mask:
    """Find seen rows whose liveness, or its absence, stays known."""
    deleted_at, live = (pc.struct_field(after["_row"], name) for name in ("deleted_at", "live"))
    expires_at = pc.struct_field(after["_merge"], "live_expires_at")
    times = integers(live)
    deleted = valid_mask(deleted_at) & (times <= integers(deleted_at))
    expired = valid_mask(expires_at) & (integers(expires_at) <= read_at_us // MICROS)
    explains = (times != NO_LIVENESS) & ~deleted & ~expired
    return np.asarray(seen & valid_mask(live) & (has_cell | explains))


def without_expired(images: pa.RecordBatch, table: TableSchema, now_s: int) -> pa.RecordBatch:
    """Remove expired cells from images: the rest is what a SELECT shows of rows that are there."""
    may_end = np.flatnonzero(_may_expire(images, table))
    rows = change_rows_of(images.take(array_of(may_end)), table, unknown_at_us=0, one_each=True)
    ended = (rows.cells.kind == EXPIRING) & (rows.cells.local <= now_s)
    if not ended.any():
        return images
    left = images_of(replace(rows, cells=rows.cells.where(~ended)), table, "raw", np.arange(len(rows)))
    order = np.arange(len(images))
    order[may_end] = len(images) + np.arange(len(rows))
    (batch,) = pa.Table.from_batches([images, left]).take(array_of(order)).combine_chunks().to_batches()
    return batch


def _may_expire(images: pa.RecordBatch, table: TableSchema) -> Mask:
    """Tell which images have a cell that expires, or may have one."""
    names = lake_names(table)
    ends = [pc.struct_field(images["_row"], "expires_at")]
    ends += [pc.struct_field(images["_x"], [names[column.name], "e"]) for column in table.value_columns]
    return np.asarray(np.logical_or.reduce([valid_mask(expiries) for expiries in ends]))


def _ended_cells(
    after: pa.RecordBatch, is_row: Mask, seen: pa.RecordBatch, place: Places, table: TableSchema
) -> FlatCells:
    """Make tombstones of the cells that expire and were not seen.

    :param is_row: mask of the images of rows in ``after``; all others hold static cells
    :param place: place of each image among those that were seen, -1: none
    """
    expiring = []
    for column in columns_of(table):
        if column.dropped or column.is_counter:
            continue
        cells = value_cells(after, table, column, None)
        cells = cells.where((cells.kind == EXPIRING) & (is_row[cells.row] != column.is_static))
        expiring.append(cells.where(~is_placeholder(cells.path)) if column.is_list else cells)
    return tombstones_of_ended(together(expiring), seen, place, table)


def tombstones_of_ended(cells: FlatCells, seen: pa.RecordBatch, place: Places, table: TableSchema) -> FlatCells:
    """Make tombstones of cells that expire and are not seen: they have ended, or something newer hides them.

    :param cells: the cells that expire
    :param seen: images
    :param place: place in ``seen`` of the image of each row of the cells, -1: none
    """
    columns = [column for column in columns_of(table) if not column.dropped]
    hidden = []
    for column, expiring in zip(columns, by_column(cells, len(columns)), strict=True):
        if len(expiring.row):
            # A cell that was seen with unknown times counts as newer than all others.
            shown = value_cells(seen, table, column, _FOREVER)
            hidden.append(expiring.where(~_is_shown(expiring, place[expiring.row], shown, column)))
    ended = together(hidden)
    return tombstones(ended.row, ended.column, ended.timestamp, ended.local, ended.path)


def _is_shown(cells: FlatCells, place: Places, shown: FlatCells, column: LoggedColumn) -> Mask:
    """Tell for which cells of a column the read showed the cell, or something in its place that is not older.

    :param place: row of each cell among the rows of ``shown``, -1: none
    """
    row, path = np.concatenate([place, shown.row]), np.zeros(len(place) + len(shown.row), np.int64)
    # A SELECT does not show which entry of a list is which.
    if column.is_multicell and not column.is_list:
        kind = path_type(column.type)
        path = np.concatenate(codes([value_keys(part.path, kind) for part in (cells, shown)]))
    keys = numbered(row * (path.max(initial=0) + 1) + path)
    newest = np.full(keys.max(initial=0) + 1, NEVER)
    np.maximum.at(newest, keys[len(place) :], shown.timestamp)
    return np.asarray(newest[keys[: len(place)]] >= cells.timestamp)
