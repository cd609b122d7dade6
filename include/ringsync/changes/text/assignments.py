"""The cells of change rows as the assignments of CQL statements, and what was deleted as DELETE names it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.flat import FlatCells
from ringsync.changes.keys.parts import only
from ringsync.changes.schema import EXPIRING, TOMBSTONE
from ringsync.compiled.arrow import Integers, Mask, integers, valid_mask
from ringsync.cql.cells import Cells, cells_of
from ringsync.cql.codec.decode import decode
from ringsync.cql.identifiers import printable
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, UserType
from ringsync.schema.table import Column, TableSchema

_UUID_EPOCH = 0x01B21DD213814000
_MIRROR = 1262304000 * 10_000_000 + _UUID_EPOCH
"""2010-01-01 in 100 ns: entries put before others have times before it (C: cql3/Lists.Prepender)."""

Literals = Callable[[CqlType, Cells], pa.Array]
"""Writes the values of a type; null where there is no literal."""
Unsaid = tuple[Integers, Integers, Integers]


@dataclass(frozen=True)
class Times:
    """Timestamps (µs), TTLs and expiries (s, -1: none)."""

    timestamps: Integers
    ttls: Integers
    expiries: Integers

    @property
    def keys(self) -> list[Integers]:
        """What to sort by: what has equal ones was written at once."""
        return [self.expiries, self.ttls, self.timestamps]

    def take(self, places: npt.NDArray[np.intp]) -> Times:
        """Those at these places."""
        return Times(self.timestamps[places], self.ttls[places], self.expiries[places])


@dataclass(frozen=True)
class LiveCells:
    """The cells that have a value and a literal for it, ordered by row, column and place.

    :ivar columns: number of each one's column
    :ivar items: what stands for it: a value, ``key: value``, an element, a field's value
    :ivar fields: of fields of user-defined types their names, else null
    :ivar prepended: entries put before the others of a list
    :ivar places: where each stands among all cells
    :ivar whole: (row, column) of columns of many cells that are written as a whole, as one number
    :ivar unsaid: row, column and place of cells that have no literal
    """

    rows: Integers
    columns: Integers
    times: Times
    items: pa.Array
    fields: pa.Array
    prepended: Mask
    places: Integers
    table: TableSchema
    whole: Integers
    unsaid: Unsaid


@dataclass(frozen=True)
class Assignments:
    """What is assigned to columns, or added to them.

    :ivar columns: number of each one's column
    :ivar names: of the column, or of the field
    :ivar values: what it is assigned, or what is added
    :ivar are_whole: assigned, so that an INSERT can say it
    :ivar prefixes: what stands between ``name = `` and the value, and ``suffixes`` behind it
    :ivar turns: assignments of greater ones are made later
    """

    rows: Integers
    columns: Integers
    times: Times
    names: pa.Array
    values: pa.Array
    are_whole: Mask
    prefixes: pa.Array
    suffixes: pa.Array
    turns: Integers

    def take(self, places: npt.NDArray[np.intp]) -> Assignments:
        """Those at these places."""
        taken: dict[str, Any] = {
            name: field[places] if isinstance(field, np.ndarray) else field.take(places)
            for name, field in vars(self).items()
        }
        return Assignments(**taken)

    def assignments(self) -> pa.Array:
        """``name = value``, ``name = name + {…}``."""
        return pc.binary_join_element_wise(self.names, " = ", self.prefixes, self.values, self.suffixes, "")


@dataclass(frozen=True)
class Deleted:
    """What DELETEs name, and when (µs).

    :ivar places: where each stood among the row's deletions and cells
    :ivar turns: what has greater ones is deleted by a later statement
    :ivar unsaid: row, column and place of tombstones whose paths have no literal
    """

    rows: Integers
    times: Integers
    names: pa.Array
    places: Integers
    turns: Integers
    unsaid: Unsaid


def live_cells(cells: FlatCells, deletions: FlatCells, table: TableSchema, literals: Literals) -> LiveCells:
    """Find what statements can write.

    :param cells: of change rows, without those of columns that are gone
    :param deletions: the complex deletions of the same rows
    """
    entries, columns = cells.cells, cells.integers("column")
    kinds = integers(entries.field("kind"))
    expiries = np.where(kinds == EXPIRING, integers(pc.fill_null(entries.field("local_deletion_time"), -1)), -1)
    ttls = np.where(kinds == EXPIRING, integers(pc.fill_null(entries.field("ttl"), -1)), -1)
    values, paths = cells_of(entries.field("value")), cells_of(entries.field("path"))
    live = kinds != TOMBSTONE
    nothing = pa.nulls(0, pa.string())
    places, items, fields, prepended = [np.empty(0, np.intp)], [nothing], [nothing], [np.empty(0, np.bool_)]
    for number, column in enumerate(table.value_columns):
        own = np.flatnonzero(live & (columns == number))
        if len(own):
            item, field, before = _items(column, only(values, own), only(paths, own), literals)
            places.append(own)
            items.append(item)
            fields.append(field)
            prepended.append(before)
    every, texts = np.concatenate(places), pa.concat_arrays(items)
    valid = valid_mask(texts)
    said = np.flatnonzero(valid)
    # They are in the order of columns, those of each in the order of rows.
    order = said[np.argsort(cells.row[every[said]], kind="stable")]
    chosen, unsaid = every[order], every[~valid]
    found = LiveCells(
        cells.row[chosen],
        columns[chosen],
        Times(cells.integers("timestamp"), ttls, expiries).take(chosen),
        texts.take(pa.array(order)),
        pa.concat_arrays(fields).take(pa.array(order)),
        np.concatenate(prepended)[order],
        chosen,
        table,
        np.empty(0, np.int64),
        (cells.row[unsaid], columns[unsaid], unsaid),
    )
    return replace(found, whole=_whole(found, deletions, place_of(cells.row, columns)))


def _items(column: Column, values: Cells, paths: Cells, literals: Literals) -> tuple[pa.Array, pa.Array, Mask]:
    """The texts of a column's cells, the fields that they are, and which were put before the others of a list."""
    nothing, nowhere = pa.nulls(len(values), pa.string()), np.zeros(len(values), np.bool_)
    if not column.is_multicell:
        return literals(column.type, values), nothing, nowhere
    match column.type:
        case ListType(element):
            return literals(element, values), nothing, are_prepended(paths)
        case SetType(element):
            return literals(element, paths), nothing, nowhere
        case MapType(key, value):
            pairs = [literals(key, paths), literals(value, values)]
            return pc.binary_join_element_wise(*pairs, ": "), nothing, nowhere
        case UserType(field_types=kinds):
            numbers_, names = _field_names(column.type, paths)
            texts = nothing
            for number, kind in enumerate(kinds):
                own = np.flatnonzero(numbers_ == number)
                if len(own):
                    back = np.full(len(values), -1)
                    back[own] = np.arange(len(own))
                    own_texts = literals(kind, only(values, own)).take(pa.array(back, mask=back < 0))
                    texts = pc.coalesce(own_texts, texts)
            return texts, names, nowhere
    raise AssertionError(f"{column.type} has no cells of its own")


def _field_names(cql_type: UserType, paths: Cells) -> tuple[Integers, pa.Array]:
    found = integers(pc.fill_null(decode(Native("smallint"), paths).values, -1))
    names = pa.array([printable(name) for name in cql_type.field_names], pa.string())
    there = (found >= 0) & (found < len(names))
    return found, names.take(pa.array(found, mask=~there))


def are_prepended(paths: Cells) -> Mask:
    """Whether entries of lists were put before the others: by the times of the timeuuids that are their paths.

    Of an entry whose name is not known (version 0) it is not known either.
    """
    eight = paths.buffer[paths.offsets.astype(np.int64)[:, None] + np.arange(8)].astype(np.int64)
    low = eight[:, 0] << 24 | eight[:, 1] << 16 | eight[:, 2] << 8 | eight[:, 3]
    middle = eight[:, 4] << 8 | eight[:, 5]
    high = (eight[:, 6] & 15) << 8 | eight[:, 7]
    found: Mask = ((high << 48 | middle << 32 | low) < _MIRROR) & (eight[:, 6] >> 4 != 0)
    return found


def _whole(cells: LiveCells, deletions: FlatCells, every: Integers) -> Integers:
    """Columns that are written as ``m = {…}``: that deletes what was there 1 µs before.

    :param every: the (row, column) of all cells, also of those that are not live
    """
    key = place_of(cells.rows, cells.columns)
    if not len(key) or not len(deletions.row):
        return np.empty(0, np.int64)
    first = np.flatnonzero(np.diff(key, prepend=-1))
    last = np.append(first[1:], len(key)) - 1
    alike = np.ones(len(first), np.bool_)
    for times in cells.times.keys:
        alike &= np.minimum.reduceat(times, first) == np.maximum.reduceat(times, first)
    alike &= ~np.logical_or.reduceat(cells.prepended, first)
    # All of the column's cells are among these: none is a tombstone, each has a literal.
    all_keys, sizes = np.unique(every, return_counts=True)
    alike &= sizes[np.searchsorted(all_keys, key[first])] == last - first + 1
    deleted = place_of(deletions.row, deletions.integers("column"))
    order = np.argsort(deleted)
    at = np.minimum(np.searchsorted(deleted[order], key[first]), len(deleted) - 1)
    alike &= deleted[order][at] == key[first]
    alike &= deletions.integers("timestamp")[order][at] == cells.times.timestamps[first] - 1
    return key[first][alike]


def place_of(rows: Integers, columns: Integers) -> Integers:
    """Give each row's column one number."""
    return rows.astype(np.int64) << 20 | columns


def assignments(cells: LiveCells, in_log_order: bool) -> Assignments:
    """The cells of a row's column that were written at once, as one assignment.

    :param in_log_order: what was written first comes first, and all of a list that has the same times is one
        assignment; False: columns and times are in their own order, and entries of lists are added one after another
    """
    kinds = _Kinds.of(cells)
    order, first, turns = (_logged_units if in_log_order else _units)(cells, kinds)
    one = order[first]
    names = _names(cells, kinds, one)
    values = _values(cells, kinds, order, first)
    empty = pa.array([""]).take(pa.array(np.zeros(len(one), np.int64)))
    prefixes = suffixes = empty
    added = ~(kinds.scalar | kinds.whole | kinds.field)[one]
    if added.any():
        before = added & cells.prepended[one]
        prefixes = pc.if_else(pa.array(added & ~before), pc.binary_join_element_wise(names, " + ", ""), empty)
        suffixes = pc.if_else(pa.array(before), pc.binary_join_element_wise(" + ", names, ""), empty)
    found = Assignments(
        cells.rows[one],
        cells.columns[one],
        cells.times.take(one),
        names,
        values,
        (kinds.scalar | kinds.whole)[one],
        prefixes,
        suffixes,
        turns,
    )
    if not in_log_order:
        return found
    began = first_places(cells.places, place_of(cells.rows, cells.columns), *cells.times.keys)[one]
    return found.take(np.lexsort((cells.places[one], began, ~found.are_whole)))


def first_places(places: Integers, *keys: Integers) -> Integers:
    """Find for each the first place of those that have the same keys."""
    order = np.lexsort((places, *keys))
    first = np.flatnonzero(changes(order, keys))
    found = np.empty_like(places)
    found[order] = np.repeat(places[order[first]], np.diff(first, append=len(order)))
    return found


def changes(order: Integers, keys: Sequence[Integers]) -> Mask:
    """Find where in an order any key is another than before."""
    found: Mask = np.logical_or.reduce([np.diff(key[order], prepend=key[order[:1]]) != 0 for key in keys])
    found[:1] = True
    return found


@dataclass(frozen=True)
class _Kinds:
    """Which cells are all of their column, part of a column that is written as a whole, a field by itself, entries of
    lists."""

    scalar: Mask
    whole: Mask
    field: Mask
    entry: Mask

    @staticmethod
    def of(cells: LiveCells) -> _Kinds:
        columns = cells.table.value_columns
        scalar = np.array([not column.is_multicell for column in columns] or [True])[cells.columns]
        entry = np.array([isinstance(column.type, ListType) for column in columns] or [False])[cells.columns] & ~scalar
        whole = np.isin(place_of(cells.rows, cells.columns), cells.whole)
        field = cells.fields.is_valid().to_numpy(zero_copy_only=False) & ~whole
        return _Kinds(scalar, whole, field, entry)


def _units(cells: LiveCells, kinds: _Kinds) -> tuple[Integers, Integers, Integers]:
    """The order in which cells that are assigned together follow each other, where each assignment begins in it, and
    the turn of each: entries of a list that have different times are added one after another, so that they keep their
    order."""
    count = len(cells.rows)
    if kinds.scalar.all():
        return np.arange(count), np.arange(count), np.zeros(count, np.int64)
    place = place_of(cells.rows, cells.columns)
    breaks = np.logical_or.reduce([np.diff(one, prepend=one[0]) != 0 for one in (place, *cells.times.keys)])
    breaks[1:] |= cells.prepended[1:] != cells.prepended[:-1]
    runs = np.where(kinds.entry, np.cumsum(breaks), 0)
    sorted_by = [*cells.times.keys, runs, place]
    order = np.lexsort(sorted_by)
    first = np.flatnonzero(changes(order, sorted_by) | (kinds.scalar | kinds.field)[order])
    one = order[first]
    begun = runs[np.searchsorted(place, place[one])]
    turns = runs[one] - begun
    # What is put before the others comes in the opposite order.
    return order, first, np.where(cells.prepended[one], count - turns, turns)


def _logged_units(cells: LiveCells, kinds: _Kinds) -> tuple[Integers, Integers, Integers]:
    """The same in the order of the log. One statement cannot put entries both before and behind those of a list."""
    before = kinds.entry & cells.prepended
    at_once = [*cells.times.keys, place_of(cells.rows, cells.columns)]
    order = np.lexsort((cells.places, before, *at_once))
    first = np.flatnonzero(changes(order, [before.astype(np.int64), *at_once]) | (kinds.scalar | kinds.field)[order])
    one = order[first]
    again = before[one] & ~changes(one, at_once)
    began, column_began = (
        first_places(cells.places, *keys)[one] for keys in ([*cells.times.keys, cells.rows], at_once)
    )
    return order, first, began << 32 | np.where(again, column_began + 1, 0)


def _names(cells: LiveCells, kinds: _Kinds, one: Integers) -> pa.Array:
    names = pa.array([printable(column.name) for column in cells.table.value_columns], pa.string())
    names = names.take(pa.array(cells.columns[one]))
    if not kinds.field[one].any():
        return names
    dotted = pc.binary_join_element_wise(names, cells.fields.take(pa.array(one)), ".")
    return pc.if_else(pa.array(kinds.field[one]), dotted, names)


def _values(cells: LiveCells, kinds: _Kinds, order: Integers, first: Integers) -> pa.Array:
    """The value of each assignment: of several cells a collection, or a user-defined type."""
    items = cells.items
    if kinds.scalar.all():
        return items
    named = kinds.whole & cells.fields.is_valid().to_numpy(zero_copy_only=False)
    if named.any():
        items = pc.if_else(pa.array(named), pc.binary_join_element_wise(cells.fields, items, ": "), items)
    limits = np.append(first, len(order)).astype(np.int32)
    values = pc.binary_join(pa.ListArray.from_arrays(pa.array(limits), items.take(pa.array(order))), ", ")
    entry = pa.array(kinds.entry[order[first]])
    opened, closed = (pc.if_else(entry, of_list, other) for of_list, other in (("[", "{"), ("]", "}")))
    one = (kinds.scalar | kinds.field)[order[first]]
    return pc.if_else(pa.array(one), values, pc.binary_join_element_wise(opened, values, closed, ""))


def deleted_names(
    cells: FlatCells, deletions: FlatCells, table: TableSchema, whole: Integers, literals: Literals
) -> Deleted:
    """Columns, elements and fields that are deleted; entries of lists have no name.

    :param whole: columns of rows that are written as a whole, which deletes them
    """
    names = pa.array([printable(column.name) for column in table.value_columns], pa.string())
    own = np.flatnonzero(~np.isin(place_of(deletions.row, deletions.integers("column")), whole))
    deletions = deletions.take(own)
    gone, columns = cells.integers("kind") == TOMBSTONE, cells.integers("column")
    paths = cells_of(cells.cells.field("path")) if gone.any() else None
    found, texts = [np.empty(0, np.intp)], [names.take(pa.array(deletions.integers("column")))]
    for number, column in enumerate(table.value_columns if paths is not None else ()):
        places = np.flatnonzero(gone & (columns == number))
        if not len(places) or (column.is_multicell and isinstance(column.type, ListType)):
            continue
        text = names.take(pa.array(np.full(len(places), number)))
        if column.is_multicell:
            assert paths is not None
            text = _element_names(column, names[number].as_py(), only(paths, places), literals)
        found.append(places)
        texts.append(text)
    place, text = np.concatenate(found), pa.concat_arrays(texts)
    rows = np.concatenate([deletions.row, cells.row[place]])
    times = np.concatenate([deletions.integers("timestamp"), cells.integers("timestamp")[place]])
    # Deletions of whole columns come before all cells.
    every = np.concatenate([np.arange(-len(own), 0), place])
    valid = valid_mask(text)
    said, unsaid = np.flatnonzero(valid), every[~valid]
    return Deleted(
        rows[said],
        times[said],
        text.take(pa.array(said)),
        every[said],
        times[said],
        (cells.row[unsaid], columns[unsaid], unsaid),
    )


def _element_names(column: Column, name: str, paths: Cells, literals: Literals) -> pa.Array:
    match column.type:
        case UserType():
            _, fields = _field_names(column.type, paths)
            return pc.binary_join_element_wise(f"{name}.", fields, "")
        case SetType(element=kind) | MapType(key=kind):
            return pc.binary_join_element_wise(f"{name}[", literals(kind, paths), "]", "")
    raise AssertionError(f"{column.type} has no elements with names")
