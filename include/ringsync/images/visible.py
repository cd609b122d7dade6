"""Whether what was read shows what change rows say: each cell, or something newer in its place.

A SELECT shows no tombstones, and a write that has expired is one. So a value that a newer deletion has hidden looks as
if it had not arrived; whoever asks must stop asking at some time. Nor does it show when a row was inserted, which entry
of a list is which, and of old servers' collections the times of elements. What may be older than the change does not
say that the change is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import columns_of
from ringsync.changes.flat import FlatCells, together
from ringsync.changes.keys.canonical import has_aliases
from ringsync.changes.keys.order import START, clustering_keys, path_type, value_keys
from ringsync.changes.schema import EXPIRING, LIVE, NEVER, NO_EXPIRY, NO_TTL, ROW, TOMBSTONE
from ringsync.compiled.arrow import Integers, Mask, integers, valid_mask
from ringsync.cql.cells import Cells, cells_of, codes, no_cells
from ringsync.cql.types import CqlType, UserType
from ringsync.images.from_changes import change_rows_of
from ringsync.images.times import cell_times
from ringsync.images.to_changes import image_keys
from ringsync.schema.table import TableSchema

_FOREVER = np.iinfo(np.int64).max
_UNKNOWN = NEVER + 1
"""µs: of what is there since nobody knows when."""


@dataclass(frozen=True)
class _Keys:
    """Keys of rows: those without a clustering are of static rows."""

    partition_key: Cells
    clustering: Cells

    @staticmethod
    def of(rows: ChangeRows) -> _Keys:
        return _Keys(rows.partition_key, rows.clustering.without(rows.kind != ROW))


@dataclass(frozen=True)
class _Placed:
    """Cells of columns that can be read, and the place of each: a row or the static row of a partition, from 0."""

    place: Integers
    cells: FlatCells


def visible(changes: ChangeRows, images: pa.RecordBatch, table: TableSchema, now_s: int) -> Mask:
    """Find the change rows of which everything was seen. Deletions of partitions and ranges count as seen.

    :param changes: merged change rows of the table
    :param images: what was read: row images of all that is there under the same keys
    :param now_s: moment of the read, s since the epoch: what expires then or earlier cannot be seen
    """
    seen = change_rows_of(images, table, unknown_at_us=_UNKNOWN)
    counter_keys, counters = _counters(images, table)
    rows, seen_rows, counter_rows = _places(table, _Keys.of(changes), _Keys.of(seen), counter_keys)
    # What a dropped column holds nobody can read.
    cells = changes.cells.where(changes.cells.column < len(table.value_columns))
    wanted = _Placed(rows[cells.row], cells)
    shown = seen.cells.where(seen.cells.kind != TOMBSTONE)
    found = _Placed(np.concatenate([seen_rows[shown.row], counter_rows]), together([shown, counters]))
    found = _dated(wanted, found, table, now_s)
    unseen = np.zeros(len(changes), np.bool_)
    unseen[cells.row[~_cells_seen(wanted, found, table, now_s)]] = True
    unseen |= _deletions_unseen(changes, rows, found)
    unseen |= _rows_unchanged(changes, rows, seen, seen_rows, found, now_s)
    deletions = changes.complex_deletions
    unseen[deletions.row[_complex_deletions_unseen(changes, rows, found, table)]] = True
    # A row was inserted that is not there.
    unseen |= _lives(changes, now_s) & ~np.isin(rows, seen_rows)
    return np.asarray(~unseen | ~changes.of_row)


def same_keys(rows: ChangeRows, merged: ChangeRows, table: TableSchema) -> Integers:
    """For each change row the merged one of its key and kind; -1: there is none, since a deletion has left nothing.

    :param merged: change rows, at most one of each key among rows, and among static rows
    """
    places, merged_places = _places(table, _Keys.of(rows), _Keys.of(merged))
    one_each = np.flatnonzero(merged.of_row)
    of_place = np.full(max(places.max(initial=0), merged_places.max(initial=0)) + 1, -1, np.int64)
    of_place[merged_places[one_each]] = one_each
    return np.where(rows.of_row, of_place[places], -1)


def _places(table: TableSchema, *batches: _Keys) -> list[Integers]:
    """A number for each change row, equal where partition key and clustering are; of static rows without clustering."""
    keys = codes([batch.partition_key for batch in batches])
    # One clustering may be written in several ways (1.0 and 1.00), but has one place in the order.
    clusterings = codes([clustering_keys(batch.clustering, table, START) for batch in batches])
    return _renumbered([key * 2**32 + clustering for key, clustering in zip(keys, clusterings, strict=True)])


def _renumbered(arrays: list[Integers]) -> list[Integers]:
    """Return the same with small numbers."""
    _, numbers = np.unique(np.concatenate(arrays), return_inverse=True)
    return list(np.split(numbers.reshape(-1).astype(np.int64), np.cumsum([len(array) for array in arrays])[:-1]))


def _counters(images: pa.RecordBatch, table: TableSchema) -> tuple[_Keys, FlatCells]:
    """Return the counters in row images, which have no change rows."""
    partition_keys, clusterings = map(cells_of, image_keys(images, table))
    found = []
    for column in columns_of(table):
        if column.is_counter and not column.dropped:
            times = cell_times(images, table, column.name)[0]
            row = np.flatnonzero(valid_mask(times))
            number, nothing, none = np.full(len(row), column.number), no_cells(len(row)), np.full(len(row), NO_EXPIRY)
            kinds = none * 0 + NO_TTL, none * 0 + LIVE
            found.append(FlatCells(row, number, integers(times)[row], none, *kinds, nothing, nothing))
    cells = together(found)
    is_static = np.array([column.is_static for column in columns_of(table)] or [False])[cells.column]
    keys = _Keys(partition_keys.take(cells.row), clusterings.take(cells.row).without(is_static))
    return keys, cells


def _expires(cells: FlatCells) -> Integers:
    """Return the expiry of each cell, s since the epoch."""
    return np.where(cells.kind == EXPIRING, cells.local, _FOREVER)


def _lives(rows: ChangeRows, now_s: int) -> Mask:
    """Tell which rows have a liveness that has not expired."""
    expires_at = rows.liveness.expires_at
    return np.asarray(rows.liveness.there & ((expires_at == NO_EXPIRY) | (expires_at > now_s)))


def _dated(wanted: _Placed, found: _Placed, table: TableSchema, now_s: int) -> _Placed:
    """Elements of unknown times are as new as can be where the change has written the same, which one list entry does
    not say of another; else as old as can be."""
    unknown = found.cells.timestamp == _UNKNOWN
    if not unknown.any():
        return found
    keys = _cell_keys(wanted, found, table)
    values = _value_codes(wanted, found, table, of_fields=True)
    pairs = _renumbered([key * 2**31 + value for key, value in zip(keys, values, strict=True)])
    lives = (wanted.cells.kind != TOMBSTONE) & (_expires(wanted.cells) > now_s)
    written = np.isin(pairs[1], pairs[0][lives]) & ~_in_lists(found.cells, table)
    timestamp = np.where(unknown & written, _FOREVER, found.cells.timestamp)
    return replace(found, cells=replace(found.cells, timestamp=timestamp))


def _in_lists(cells: FlatCells, table: TableSchema) -> Mask:
    return np.isin(cells.column, [column.number for column in columns_of(table) if column.is_list])


def _cell_keys(wanted: _Placed, found: _Placed, table: TableSchema) -> list[Integers]:
    """Return numbers for cells, equal where place, column and path are."""
    paths = [np.zeros(len(one.place), np.int64) for one in (wanted, found)]
    for column in columns_of(table):
        # A SELECT does not tell which entry of a list is which.
        if column.is_multicell and not column.is_list:
            # One value may be written in several ways, but has one place in the order.
            form = partial(_path_keys, path_type(column.type))
            _number(paths, (wanted, found), column.number, form)
    columns = len(columns_of(table))
    return _renumbered(
        [
            (one.place * columns + one.cells.column) * 2**31 + path
            for one, path in zip((wanted, found), paths, strict=True)
        ]
    )


def _cells_seen(wanted: _Placed, found: _Placed, table: TableSchema, now_s: int) -> Mask:
    keys = _cell_keys(wanted, found, table)
    count = max(key.max(initial=0) for key in keys) + 1
    newest, oldest = np.full(count, NEVER), np.full(count, _FOREVER)
    np.maximum.at(newest, keys[1], found.cells.timestamp)
    np.minimum.at(oldest, keys[1], found.cells.timestamp)
    cells = wanted.cells
    there, in_list = newest[keys[0]], _in_lists(cells, table)
    # Of a deletion and a value of the same time the deletion stays. Any older entry of a list may be the deleted one.
    gone = (there == NEVER) | (np.where(in_list, oldest[keys[0]], there) > cells.timestamp)
    newer = (there > cells.timestamp) & ~in_list
    counters = [column.number for column in columns_of(table) if column.is_counter]
    newer |= np.isin(cells.column, counters) & (there == cells.timestamp)
    # What has expired hides older cells; an entry of a list hides none.
    came = newer | ((_expires(cells) <= now_s) & (gone | in_list)) | _same(wanted, found, keys, table)
    return np.asarray(np.where(cells.kind == TOMBSTONE, gone, came))


def _same(wanted: _Placed, found: _Placed, keys: list[Integers], table: TableSchema) -> Mask:
    """Tell where the very cell was found. Of two values of one time either may have won."""
    both = (wanted.cells, found.cells)
    parts = [_value_codes(wanted, found, table)]
    parts += [_renumbered([one.timestamp for one in both]), _renumbered([_expires(one) for one in both])]
    for part in parts:
        keys = _renumbered([key * 2**31 + code for key, code in zip(keys, part, strict=True)])
    return np.isin(keys[0], keys[1])


def _value_codes(wanted: _Placed, found: _Placed, table: TableSchema, *, of_fields: bool = False) -> list[Integers]:
    """Return numbers for the values of cells, equal where values of one column are.

    :param of_fields: those of fields of user-defined types, too, by their bytes, which change when fields are added to
        the types in them; else they are all equal
    """
    both = (wanted, found)
    numbers = codes([one.cells.value for one in both])
    for column in columns_of(table):
        kind = column.value_type
        # What has one form only is equal where its bytes are.
        if (kind and not has_aliases(kind)) or (of_fields and isinstance(column.type, UserType)):
            continue
        _number(numbers, both, column.number, partial(_value_keys, kind))
    return numbers


def _path_keys(kind: CqlType, cells: FlatCells) -> Cells:
    return value_keys(cells.path, kind)


def _value_keys(kind: CqlType | None, cells: FlatCells) -> Cells:
    return value_keys(cells.value, kind) if kind else no_cells(len(cells.row))


def _number(
    numbers: list[Integers], both: tuple[_Placed, _Placed], column: int, form: Callable[[FlatCells], Cells]
) -> None:
    """Number the cells of one column by the form of each: equal ones have equal numbers."""
    places = [np.flatnonzero(one.cells.column == column) for one in both]
    new = codes([form(one.cells.take(place)) for one, place in zip(both, places, strict=True)])
    for of_all, place, number in zip(numbers, places, new, strict=True):
        of_all[place] = number


def _deletions_unseen(changes: ChangeRows, places: Integers, found: _Placed) -> Mask:
    """Tell where something is still there that the row's deletion deletes."""
    oldest = np.full(max(places.max(initial=0), found.place.max(initial=0)) + 1, _FOREVER)
    np.minimum.at(oldest, found.place, found.cells.timestamp)
    return changes.deletion.there & (oldest[places] <= changes.deletion.timestamp)


def _rows_unchanged(
    changes: ChangeRows, places: Integers, seen: ChangeRows, seen_places: Integers, found: _Placed, now_s: int
) -> Mask:
    """Tell where a row that is deleted, or whose INSERT has expired, is still there only by a liveness that is, or may
    be, older."""
    live = np.full(max(one.max(initial=0) for one in (places, seen_places, found.place)) + 1, NEVER)
    np.maximum.at(live, seen_places, np.where(_lives(seen, now_s), seen.liveness.timestamp, NEVER))
    live[found.place] = NEVER  # what they say is enough
    hidden_until = np.maximum(changes.liveness.timestamp, changes.deletion.timestamp)
    return np.asarray(~_lives(changes, now_s) & (live[places] != NEVER) & (live[places] <= hidden_until))


def _complex_deletions_unseen(changes: ChangeRows, places: Integers, found: _Placed, table: TableSchema) -> Mask:
    """Tell of which complex deletions some of what they delete is still there."""
    deletions, columns = changes.complex_deletions, len(columns_of(table)) + 1
    keys = _renumbered([places[deletions.row] * columns + deletions.column, found.place * columns + found.cells.column])
    oldest = np.full(max(key.max(initial=0) for key in keys) + 1, _FOREVER)
    np.minimum.at(oldest, keys[1], found.cells.timestamp)
    return np.asarray(oldest[keys[0]] <= deletions.timestamp)
