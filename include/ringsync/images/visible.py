"""Whether what was read shows what change rows say: each cell, or something newer in its place.

A SELECT shows no tombstones, and a write that has expired is one. So a value that a newer deletion has hidden looks as
if it had not arrived; whoever asks must stop asking at some time. Nor does it show when a row was inserted, which entry
of a list is which, and of old servers' collections the times of elements. What may be older than the change does not
say that the change is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.flat import flat
from ringsync.changes.keys.canonical import has_aliases
from ringsync.changes.keys.order import clustering_order, path_type, value_order
from ringsync.changes.schema import EXPIRING, ROW, STATIC, TOMBSTONE
from ringsync.compiled.arrow import Integers, Mask, integers, valid_mask
from ringsync.cql.types import ListType, UserType
from ringsync.images.from_changes import change_rows_of
from ringsync.images.times import cell_times
from ringsync.images.to_changes import image_keys
from ringsync.schema.table import TableSchema

_NEVER, _FOREVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_UNKNOWN = _NEVER + 1
"""µs: of what is there since nobody knows when."""
_NOTHING = pa.scalar(None, pa.binary())


@dataclass(frozen=True)
class _Cells:
    """Cells of change rows, of those columns that can be read.

    :ivar row: place of the change row that each belongs to
    :ivar place: where they are, a row or the static row of a partition: a number from 0
    :ivar expires: s since the epoch
    """

    row: Integers
    place: Integers
    column: Integers
    path: pa.Array
    value: pa.Array
    timestamp: Integers
    expires: Integers
    dead: Mask


def visible(changes: pa.RecordBatch, images: pa.RecordBatch, table: TableSchema, now_s: int) -> Mask:
    """Find the change rows of which everything was seen. Deletions of partitions and ranges count as seen.

    :param changes: merged change rows of the table
    :param images: what was read: row images of all that is there under the same keys
    :param now_s: moment of the read, s since the epoch: what expires then or earlier cannot be seen
    """
    seen = change_rows_of(images, table, unknown_at_us=_UNKNOWN)
    counters, column, timestamp = _counters(images, table)
    rows, seen_rows, counter_rows = _places(table, changes, seen, counters)
    wanted, found = _cells(changes, rows, table), _cells(seen, seen_rows, table, only_live=True)
    found = _dated(wanted, _with_counters(found, counter_rows, column, timestamp), table, now_s)
    unseen = np.zeros(changes.num_rows, np.bool_)
    unseen[wanted.row[~_cells_seen(wanted, found, table, now_s)]] = True
    unseen |= _deletions_unseen(changes, rows, found)
    unseen |= _rows_unchanged(changes, rows, seen, seen_rows, found, now_s)
    unseen[_complex_deletions_unseen(changes, rows, table, found)] = True
    unseen |= _liveness_unseen(changes, rows, seen_rows, now_s)
    kinds = integers(changes["kind"])
    found_or_no_row: Mask = ~unseen | ((kinds != ROW) & (kinds != STATIC))
    return found_or_no_row


def same_keys(rows: pa.RecordBatch, merged: pa.RecordBatch, table: TableSchema) -> Integers:
    """For each change row the merged one of its key and kind; -1: there is none, since a deletion has left nothing.

    :param merged: change rows, at most one of each key among rows, and among static rows
    """
    places, merged_places = _places(table, rows, merged)
    kinds, merged_kinds = integers(rows["kind"]), integers(merged["kind"])
    one_each = np.flatnonzero((merged_kinds == ROW) | (merged_kinds == STATIC))
    of_place = np.full(max(places.max(initial=0), merged_places.max(initial=0)) + 1, -1, np.int64)
    of_place[merged_places[one_each]] = one_each
    return np.where((kinds == ROW) | (kinds == STATIC), of_place[places], -1)


def _places(table: TableSchema, *batches: pa.RecordBatch) -> list[Integers]:
    """A number for each change row, equal where partition key and clustering are; of static rows without clustering."""
    keys = _codes([batch["partition_key"] for batch in batches])
    # One clustering may be written in several ways (1.0 and 1.00), but has one place in the order.
    of_rows = [pc.if_else(pc.equal(batch["kind"], ROW), batch["clustering"], _NOTHING) for batch in batches]
    clusterings = _codes([pc.fill_null(clustering_order(one, table), b"") for one in of_rows])
    statics = [~valid_mask(one) for one in of_rows]
    return _renumbered(
        [
            (key * 2 + static) * (2**31) + clustering
            for key, static, clustering in zip(keys, statics, clusterings, strict=True)
        ]
    )


def _codes(arrays: list[pa.Array]) -> list[Integers]:
    """Number values: equal ones have equal numbers, across the arrays."""
    codes = integers(pa.concat_arrays(arrays).dictionary_encode().indices)
    return list(np.split(codes, np.cumsum([len(array) for array in arrays])[:-1]))


def _renumbered(arrays: list[Integers]) -> list[Integers]:
    """Return the same with small numbers."""
    _, codes = np.unique(np.concatenate(arrays), return_inverse=True)
    return list(np.split(codes.reshape(-1).astype(np.int64), np.cumsum([len(array) for array in arrays])[:-1]))


def _cells(rows: pa.RecordBatch, places: Integers, table: TableSchema, *, only_live: bool = False) -> _Cells:
    cells = flat(rows["cells"])
    # What a dropped column holds nobody can read.
    cells = cells.where(cells.integers("column") < len(table.value_columns))
    if only_live:
        cells = cells.where(cells.integers("kind") != TOMBSTONE)
    kinds = cells.integers("kind")
    return _Cells(
        cells.row,
        places[cells.row],
        cells.integers("column"),
        cells.cells.field("path"),
        cells.cells.field("value"),
        cells.integers("timestamp"),
        np.where(kinds == EXPIRING, cells.integers("local_deletion_time"), _FOREVER),
        kinds == TOMBSTONE,
    )


def _counters(images: pa.RecordBatch, table: TableSchema) -> tuple[pa.RecordBatch, Integers, Integers]:
    """Return the counters in row images, which have no change rows: their keys, columns and timestamps."""
    keys, clusterings = image_keys(images, table)
    found = []
    for column in columns_of(table):
        if column.is_counter and not column.dropped:
            times = cell_times(images, table, column.name)[0]
            place = np.flatnonzero(valid_mask(times))
            kind = np.full(len(place), STATIC if column.is_static else ROW, np.int8)
            found.append((place, kind, np.full(len(place), column.number), integers(times.take(pa.array(place)))))
    nothing = np.empty(0, np.int64)
    parts = zip(*found, strict=True) if found else [()] * 4
    place, kind, column_numbers, timestamps = (np.concatenate([nothing, *part]) for part in parts)
    key_columns = [keys.take(pa.array(place)), clusterings.take(pa.array(place)), pa.array(kind.astype(np.int8))]
    return pa.record_batch(key_columns, ["partition_key", "clustering", "kind"]), column_numbers, timestamps


def _with_counters(cells: _Cells, places: Integers, column: Integers, timestamp: Integers) -> _Cells:
    """Return cells of change rows, and counters."""
    count = len(places)
    nothing = pa.nulls(count, pa.binary())
    return _Cells(
        np.concatenate([cells.row, np.full(count, -1)]),
        np.concatenate([cells.place, places]),
        np.concatenate([cells.column, column]),
        pa.concat_arrays([cells.path, nothing]),
        pa.concat_arrays([cells.value, nothing]),
        np.concatenate([cells.timestamp, timestamp]),
        np.concatenate([cells.expires, np.full(count, _FOREVER)]),
        np.concatenate([cells.dead, np.zeros(count, np.bool_)]),
    )


def _dated(wanted: _Cells, found: _Cells, table: TableSchema, now_s: int) -> _Cells:
    """Elements of unknown times are as new as can be where the change has written the same, which one list entry does
    not say of another; else as old as can be."""
    unknown = found.timestamp == _UNKNOWN
    if not unknown.any():
        return found
    keys = _cell_keys(wanted, found, _path_codes(wanted, found, table))
    values = _value_codes(wanted, found, table, of_fields=True)
    pairs = _renumbered([key * 2**31 + value for key, value in zip(keys, values, strict=True)])
    written = np.isin(pairs[1], pairs[0][~wanted.dead & (wanted.expires > now_s)]) & ~_in_lists(found, table)
    return replace(found, timestamp=np.where(unknown & written, _FOREVER, found.timestamp))


def _in_lists(cells: _Cells, table: TableSchema) -> Mask:
    return np.isin(cells.column, [one.number for one in columns_of(table) if one.is_multicell and _is_list(one)])


def _is_list(column: LoggedColumn) -> bool:
    return isinstance(column.type, ListType)


def _cell_keys(wanted: _Cells, found: _Cells, paths: list[Integers]) -> list[Integers]:
    """Return numbers for cells, equal where place, column and path are."""
    columns = int(max(wanted.column.max(initial=0), found.column.max(initial=0))) + 1
    return _renumbered(
        [(one.place * columns + one.column) * (2**31) + path for one, path in zip((wanted, found), paths, strict=True)]
    )


def _path_codes(wanted: _Cells, found: _Cells, table: TableSchema) -> list[Integers]:
    """Return numbers for the paths of cells, equal where paths are equal and of one column."""
    codes = [np.zeros(len(wanted.path), np.int64), np.zeros(len(found.path), np.int64)]
    for column in columns_of(table):
        # A SELECT does not tell which entry of a list is which.
        if not column.is_multicell or _is_list(column):
            continue
        own = [np.flatnonzero(one.column == column.number) for one in (wanted, found)]
        paths = [one.path.take(pa.array(place)) for one, place in zip((wanted, found), own, strict=True)]
        # One value may be written in several ways, but has one place in the order.
        ordered = _codes([value_order(path, path_type(column.type)) for path in paths])
        for of_all, place, code in zip(codes, own, ordered, strict=True):
            of_all[place] = code
    return codes


def _cells_seen(wanted: _Cells, found: _Cells, table: TableSchema, now_s: int) -> Mask:
    keys = _cell_keys(wanted, found, _path_codes(wanted, found, table))
    count = max(key.max(initial=0) for key in keys) + 1
    newest, oldest = np.full(count, _NEVER), np.full(count, _FOREVER)
    np.maximum.at(newest, keys[1], found.timestamp)
    np.minimum.at(oldest, keys[1], found.timestamp)
    there, in_list = newest[keys[0]], _in_lists(wanted, table)
    # Of a deletion and a value of the same time the deletion stays. Any older entry of a list may be the deleted one.
    gone = (there == _NEVER) | (np.where(in_list, oldest[keys[0]], there) > wanted.timestamp)
    newer = (there > wanted.timestamp) & ~in_list
    counters = [column.number for column in columns_of(table) if column.is_counter]
    newer |= np.isin(wanted.column, counters) & (there == wanted.timestamp)
    # What has expired hides older cells; an entry of a list hides none.
    came = newer | ((wanted.expires <= now_s) & (gone | in_list)) | _same(wanted, found, keys, table)
    return np.asarray(np.where(wanted.dead, gone, came))


def _same(wanted: _Cells, found: _Cells, keys: list[Integers], table: TableSchema) -> Mask:
    """Tell where the very cell was found. Of two values of one time either may have won."""
    both = (wanted, found)
    parts = [_value_codes(wanted, found, table)]
    parts += [_renumbered([one.timestamp for one in both]), _renumbered([one.expires for one in both])]
    for part in parts:
        keys = _renumbered([key * 2**31 + code for key, code in zip(keys, part, strict=True)])
    same: Mask = np.isin(keys[0], keys[1])
    return same


def _value_codes(wanted: _Cells, found: _Cells, table: TableSchema, *, of_fields: bool = False) -> list[Integers]:
    """Return numbers for the values of cells, equal where values of one column are.

    :param of_fields: those of fields of user-defined types, too, by their bytes, which change when fields are added to
        the types in them; else they are all equal
    """
    both = (wanted, found)
    codes = _codes([one.value for one in both])
    for column in columns_of(table):
        kind = column.value_type
        # What has one form only is equal where its bytes are.
        if (kind and not has_aliases(kind)) or (of_fields and isinstance(column.type, UserType)):
            continue
        own = [np.flatnonzero(one.column == column.number) for one in both]
        values = [one.value.take(pa.array(place)) for one, place in zip(both, own, strict=True)]
        ordered = _codes([value_order(value, kind) if kind else pa.nulls(len(value), pa.binary()) for value in values])
        for of_all, place, code in zip(codes, own, ordered, strict=True):
            of_all[place] = code
    return codes


def _deletions_unseen(changes: pa.RecordBatch, places: Integers, found: _Cells) -> Mask:
    """Tell where something is still there that the row's deletion deletes."""
    oldest = np.full(max(places.max(initial=0), found.place.max(initial=0)) + 1, _FOREVER)
    np.minimum.at(oldest, found.place, found.timestamp)
    deletion = changes["deletion"]
    timestamps = integers(pc.fill_null(deletion.field("timestamp"), _NEVER))
    unseen: Mask = valid_mask(deletion) & (oldest[places] <= timestamps)
    return unseen


def _rows_unchanged(
    changes: pa.RecordBatch, places: Integers, seen: pa.RecordBatch, seen_places: Integers, found: _Cells, now_s: int
) -> Mask:
    """Tell where a row that is deleted, or whose INSERT has expired, is still there only by a liveness that is, or may
    be, older."""
    live = np.full(max(one.max(initial=0) for one in (places, seen_places, found.place)) + 1, _NEVER)
    np.maximum.at(live, seen_places, np.where(_lives(seen, now_s), _times(seen, "liveness"), _NEVER))
    live[found.place] = _NEVER  # what they say is enough
    hidden_until = np.maximum(_times(changes, "liveness"), _times(changes, "deletion"))
    return np.asarray(~_lives(changes, now_s) & (live[places] != _NEVER) & (live[places] <= hidden_until))


def _times(rows: pa.RecordBatch, name: str) -> Integers:
    return integers(pc.fill_null(rows[name].flatten()[0], _NEVER))


def _lives(rows: pa.RecordBatch, now_s: int) -> Mask:
    """Tell which rows have a liveness that has not expired."""
    expires_at = integers(pc.fill_null(rows["liveness"].flatten()[2], _FOREVER))
    return valid_mask(rows["liveness"]) & (expires_at > now_s)


def _complex_deletions_unseen(
    changes: pa.RecordBatch, places: Integers, table: TableSchema, found: _Cells
) -> npt.NDArray[np.intp]:
    """Return the change rows that delete what was in a collection before, while some of it is still there."""
    deletions = flat(changes["complex_deletions"])
    row, column, timestamp = deletions.row, deletions.integers("column"), deletions.integers("timestamp")
    columns = len(columns_of(table)) + 1
    keys = _renumbered([places[row] * columns + column, found.place * columns + found.column])
    oldest = np.full(max(key.max(initial=0) for key in keys) + 1, _FOREVER)
    np.minimum.at(oldest, keys[1], found.timestamp)
    unseen: npt.NDArray[np.intp] = row[oldest[keys[0]] <= timestamp]
    return unseen


def _liveness_unseen(changes: pa.RecordBatch, places: Integers, seen_places: Integers, now_s: int) -> Mask:
    """Tell where a row was inserted that is not there."""
    return _lives(changes, now_s) & ~np.isin(places, seen_places)
