"""Whether a read shows what change rows say: each cell, or something newer in its place.

A SELECT shows no tombstones, and an expired write is one. A value that a newer deletion has hidden therefore looks as
if it had not arrived, so a caller must stop asking at some time. Nor does a SELECT show when a row was inserted, which
entry of a list is which, or, on old servers, the times of collections' elements. What may be older than the change does
not prove that the change is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import columns_of
from ringsync.changes.flat import FlatCells, FlatDeletions, together
from ringsync.changes.keys.canonical import has_aliases
from ringsync.changes.keys.order import key_numbers, numbered, path_type, value_keys
from ringsync.changes.schema import EXPIRING, LIVE, NEVER, NO_EXPIRY, NO_TTL, ROW, TOMBSTONE
from ringsync.compiled.arrow import Integers, Mask, integers, valid_mask
from ringsync.cql.cells import Cells, cells_of, codes, no_cells
from ringsync.cql.types import UserType
from ringsync.images.times import cell_times
from ringsync.images.to_changes import change_rows_of, image_keys
from ringsync.schema.table import TableSchema

_FOREVER = np.iinfo(np.int64).max
_UNKNOWN = NEVER + 1
"""Timestamp, µs, of cells that a read shows without their times."""

_Keys = tuple[Cells, Cells]
"""Partition keys and clusterings of rows; a static row has no clustering."""


@dataclass(frozen=True)
class _Cells:
    """First the cells of changes that a read can show, then the cells that it shows. ``row`` is the number of the key.

    :ivar wanted: number of cells of changes
    """

    cells: FlatCells
    wanted: int

    @property
    def shown(self) -> FlatDeletions:
        """Rows, columns and times of the cells that the read shows."""
        numbers = (self.cells.row, self.cells.column, self.cells.timestamp, self.cells.local)
        return FlatDeletions(*(values[self.wanted :] for values in numbers))


def visible(
    changes: ChangeRows, images: pa.RecordBatch, table: TableSchema, now_s: int, *, exact_expiry: bool = True
) -> Mask:
    """Find the change rows that a read shows completely. Deletions of partitions and ranges count as shown.

    :param changes: merged change rows of the table
    :param images: the result of the read: row images of everything under the same keys
    :param now_s: moment of the read, s since the epoch: a read does not show cells that expire then or earlier
    :param exact_expiry: whether both sides tell exactly when cells expire; else any expiry is as good
    """
    seen = change_rows_of(images, table, unknown_at_us=_UNKNOWN)
    counter_keys, counters = _counters(images, table)
    rows, seen_rows, counter_rows = key_numbers(table, _keys(changes), _keys(seen), counter_keys)
    # A SELECT does not show dropped columns.
    wanted = changes.cells.where(changes.cells.column < len(table.value_columns))
    live = seen.cells.where(seen.cells.kind != TOMBSTONE)
    row = np.concatenate([rows[wanted.row], seen_rows[live.row], counter_rows])
    cells = _dated(_Cells(replace(together([wanted, live, counters]), row=row), len(wanted.row)), table, now_s)
    shown = cells.shown
    unseen = np.zeros(len(changes), np.bool_)
    unseen[wanted.row[~_cells_seen(cells, table, now_s, exact_expiry)]] = True
    unseen |= _deletions_unseen(changes, rows, shown)
    unseen |= _rows_unchanged(changes, rows, seen, seen_rows, shown, now_s)
    deletions = changes.complex_deletions
    if len(deletions.row):
        unseen[deletions.row[_complex_deletions_unseen(changes, rows, shown)]] = True
    unseen |= _lives(changes, now_s) & ~np.isin(rows, seen_rows)  # an inserted row is not there
    return np.asarray(~unseen | ~changes.of_row)


def same_keys(rows: ChangeRows, merged: ChangeRows, table: TableSchema) -> Integers:
    """Find for each change row the merged one of its key and kind; -1: a deletion has left none.

    :param merged: change rows, at most one of each key among rows, and among static rows
    """
    numbers, merged_numbers = key_numbers(table, _keys(rows), _keys(merged))
    one_each = np.flatnonzero(merged.of_row)
    place_of = np.full(max(numbers.max(initial=0), merged_numbers.max(initial=0)) + 1, -1, np.int64)
    place_of[merged_numbers[one_each]] = one_each
    return np.where(rows.of_row, place_of[numbers], -1)


def _keys(rows: ChangeRows) -> _Keys:
    return rows.partition_key, rows.clustering.without(rows.kind != ROW)


def _counters(images: pa.RecordBatch, table: TableSchema) -> tuple[_Keys, FlatCells]:
    """Return the counters in row images, which have no change rows, and the keys of their rows."""
    partition_keys, clusterings = map(cells_of, image_keys(images, table))
    counters = []
    for column in columns_of(table):
        if column.is_counter and not column.dropped:
            times = cell_times(images, table, column.name)[0]
            row = np.flatnonzero(valid_mask(times))
            count, nothing = len(row), no_cells(len(row))
            number, none, ttl, kind = (np.full(count, value) for value in (column.number, NO_EXPIRY, NO_TTL, LIVE))
            counters.append(FlatCells(row, number, integers(times)[row], none, ttl, kind, nothing, nothing))
    cells = together(counters)
    is_static = np.array([column.is_static for column in columns_of(table)] or [False])[cells.column]
    return (partition_keys.take(cells.row), clusterings.take(cells.row).without(is_static)), cells


def _expires(cells: FlatCells) -> Integers:
    """Return the expiry of each cell, s since the epoch."""
    return np.where(cells.kind == EXPIRING, cells.local, _FOREVER)


def _lives(rows: ChangeRows, now_s: int) -> Mask:
    """Tell which rows have a liveness that has not expired."""
    expires_at = rows.liveness.expires_at
    return np.asarray(rows.liveness.there & ((expires_at == NO_EXPIRY) | (expires_at > now_s)))


def _dated(cells: _Cells, table: TableSchema, now_s: int) -> _Cells:
    """Give shown elements of unknown times a time.

    An element that equals one that a change wrote counts as newer than all others. Every other element counts as the
    oldest. So do all entries of lists, because an equal entry may be another one.
    """
    every, count = cells.cells, cells.wanted
    unknown = every.timestamp == _UNKNOWN
    unknown[:count] = False
    if not unknown.any():
        return cells
    pairs = numbered(_cell_keys(every, table) << 32 | _value_codes(every, table, of_fields=True))
    lives = (every.kind != TOMBSTONE) & (_expires(every) > now_s)
    written = np.isin(pairs, pairs[:count][lives[:count]]) & ~_in_lists(every, table)
    timestamp = np.where(unknown & written, _FOREVER, every.timestamp)
    return replace(cells, cells=replace(every, timestamp=timestamp))


def _in_lists(cells: FlatCells, table: TableSchema) -> Mask:
    return np.isin(cells.column, [column.number for column in columns_of(table) if column.is_list])


def _cell_keys(cells: FlatCells, table: TableSchema) -> Integers:
    """Number cells: those with equal row, column and path have equal numbers. Entries of a list are all equal."""
    paths = np.zeros(len(cells.row), np.int64)
    for column in columns_of(table):
        # A SELECT does not show which entry of a list is which.
        if column.is_multicell and not column.is_list:
            of_column = np.flatnonzero(cells.column == column.number)
            # One path may be written in several ways, but it has one place in the order.
            (paths[of_column],) = codes([value_keys(cells.path.take(of_column), path_type(column.type))])
    return numbered((cells.row * len(columns_of(table)) + cells.column) << 32 | paths)


def _cells_seen(cells: _Cells, table: TableSchema, now_s: int, exact_expiry: bool) -> Mask:
    """Tell for each cell of the changes whether the read showed it, or something newer in its place."""
    every, count = cells.cells, cells.wanted
    keys = _cell_keys(every, table)
    number = keys.max(initial=0) + 1
    newest, oldest = np.full(number, NEVER), np.full(number, _FOREVER)
    np.maximum.at(newest, keys[count:], every.timestamp[count:])
    np.minimum.at(oldest, keys[count:], every.timestamp[count:])
    there, timestamp, expires = newest[keys[:count]], every.timestamp[:count], _expires(every)
    in_list = _in_lists(every, table)[:count]
    # If a deletion and a value have the same time, the deletion wins. Any older entry of a list may be the deleted one.
    gone = (there == NEVER) | (np.where(in_list, oldest[keys[:count]], there) > timestamp)
    newer = (there > timestamp) & ~in_list
    counters = [column.number for column in columns_of(table) if column.is_counter]
    newer |= np.isin(every.column[:count], counters) & (there == timestamp)
    # An expired cell hides older ones; an entry of a list hides none.
    expired = (expires[:count] <= now_s) & (gone | in_list)
    # If two values have the same time, either may have won: only the very same cell proves that it was seen.
    compared = expires if exact_expiry else np.asarray(expires != _FOREVER, np.int64)
    for part in (_value_codes(every, table), numbered(every.timestamp), numbered(compared)):
        keys = numbered(keys << 32 | part)
    came = newer | expired | np.isin(keys[:count], keys[count:])
    return np.asarray(np.where(every.kind[:count] == TOMBSTONE, gone, came))


def _value_codes(cells: FlatCells, table: TableSchema, *, of_fields: bool = False) -> Integers:
    """Number the values of cells: equal values of a column have equal numbers.

    :param of_fields: whether to compare fields of user-defined types, by their bytes, which change when the types
        inside get new fields; False: all fields are equal
    """
    (numbers,) = codes([cells.value])
    for column in columns_of(table):
        kind = column.value_type
        # Values of most types are equal only if their bytes are.
        if (kind and not has_aliases(kind)) or (of_fields and isinstance(column.type, UserType)):
            continue
        of_column = np.flatnonzero(cells.column == column.number)
        values = value_keys(cells.value.take(of_column), kind) if kind else no_cells(len(of_column))
        (numbers[of_column],) = codes([values])
    return numbers


def _deletions_unseen(changes: ChangeRows, rows: Integers, shown: FlatDeletions) -> Mask:
    """Tell which rows still show something that their deletion deletes."""
    oldest = np.full(max(rows.max(initial=0), shown.row.max(initial=0)) + 1, _FOREVER)
    np.minimum.at(oldest, shown.row, shown.timestamp)
    return changes.deletion.there & (oldest[rows] <= changes.deletion.timestamp)


def _rows_unchanged(
    changes: ChangeRows, rows: Integers, seen: ChangeRows, seen_rows: Integers, shown: FlatDeletions, now_s: int
) -> Mask:
    """Tell which deleted rows, and rows whose INSERT has expired, still live by a liveness that is or may be older."""
    live = np.full(max(numbers.max(initial=0) for numbers in (rows, seen_rows, shown.row)) + 1, NEVER)
    np.maximum.at(live, seen_rows, np.where(_lives(seen, now_s), seen.liveness.timestamp, NEVER))
    live[shown.row] = NEVER  # it is enough to compare their cells
    hidden_until = np.maximum(changes.liveness.timestamp, changes.deletion.timestamp)
    return np.asarray(~_lives(changes, now_s) & (live[rows] != NEVER) & (live[rows] <= hidden_until))


def _complex_deletions_unseen(changes: ChangeRows, rows: Integers, shown: FlatDeletions) -> Mask:
    """Tell which complex deletions have left something that they delete."""
    deletions, count = changes.complex_deletions, len(changes.complex_deletions.row)
    row = np.concatenate([rows[deletions.row], shown.row])
    keys = numbered(row << 32 | np.concatenate([deletions.column, shown.column]))
    oldest = np.full(keys.max(initial=0) + 1, _FOREVER)
    np.minimum.at(oldest, keys[count:], shown.timestamp)
    return np.asarray(oldest[keys[:count]] <= deletions.timestamp)
