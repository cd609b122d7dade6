"""Cells of change rows as assignments of CQL statements, and deletions as names in DELETE statements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.flat import FlatCells, FlatDeletions, taken
from ringsync.changes.keys.parts import field_numbers
from ringsync.changes.schema import EXPIRING, TOMBSTONE
from ringsync.compiled.arrow import Integers, Mask, Places, array_of, list_of, placed, valid_mask
from ringsync.cql.cells import Cells
from ringsync.cql.identifiers import printable
from ringsync.cql.types import CqlType, ListType, MapType, SetType, UserType
from ringsync.schema.table import Column, TableSchema

_UUID_EPOCH = 0x01B21DD213814000
_MIRROR = 1262304000 * 10_000_000 + _UUID_EPOCH
"""2010-01-01 in 100 ns: prepended entries of lists have earlier times (C: cql3/Lists.Prepender)."""

Literals = Callable[[CqlType, Cells], pa.Array]
"""Writer of values of a type as literals; null if there is no literal."""
Omitted = tuple[Integers, Integers, Integers]
"""Row, column and place of cells that have no literal, or whose paths have none."""


@dataclass(frozen=True)
class Times:
    """Timestamps (µs), TTLs and expiries (s, -1: none)."""

    timestamps: Integers
    ttls: Integers
    expiries: Integers

    @property
    def keys(self) -> list[Integers]:
        """The sort keys. Cells with equal keys were written at once."""
        return [self.expiries, self.ttls, self.timestamps]


@dataclass(frozen=True)
class LiveCells:
    """Cells that have a value and a literal for it, sorted by row, column and place.

    :ivar columns: number of each cell's column
    :ivar items: text of each cell: a value, ``key: value``, an element, a field's value
    :ivar fields: name of the field if the cell is a field of a user-defined type, else null
    :ivar prepended: whether the cell is an entry that was prepended to a list
    :ivar places: place of each cell among all cells
    :ivar whole: (row, column), as one number, of multi-cell columns that are written as a whole
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
    omitted: Omitted


@dataclass(frozen=True)
class Assignments:
    """Values that are assigned to columns or added to them.

    :ivar columns: number of each assignment's column
    :ivar names: name of the column or field
    :ivar values: value that is assigned or added
    :ivar are_whole: whether the value is assigned, so that an INSERT can write it
    :ivar prefixes: text between ``name = `` and the value; ``suffixes``: text after the value
    :ivar turns: sort key: assignments with greater turns are made later
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

    def assignments(self) -> pa.Array:
        """Write ``name = value`` or ``name = name + {…}``."""
        return pc.binary_join_element_wise(self.names, " = ", self.prefixes, self.values, self.suffixes, "")


@dataclass(frozen=True)
class Deleted:
    """Names in DELETEs, and the times of the deletions (µs).

    :ivar places: place of each among the row's deletions and cells
    :ivar turns: sort key: a later statement deletes names with greater turns
    """

    rows: Integers
    times: Integers
    names: pa.Array
    places: Integers
    turns: Integers
    omitted: Omitted


def live_cells(cells: FlatCells, deletions: FlatDeletions, table: TableSchema, literals: Literals) -> LiveCells:
    """Find the cells that statements can write.

    :param cells: cells of change rows, without those of dropped columns
    :param deletions: complex deletions of the same rows
    """
    columns, ends = cells.column, cells.kind == EXPIRING
    expiries, ttls = np.where(ends, cells.local, -1), np.where(ends, cells.ttl, -1)
    live = cells.kind != TOMBSTONE
    nothing = pa.nulls(0, pa.string())
    places, items, fields, prepended = [np.empty(0, np.intp)], [nothing], [nothing], [np.empty(0, np.bool_)]
    for number, column in enumerate(table.value_columns):
        chosen = np.flatnonzero(live & (columns == number))
        if len(chosen):
            item, field, before = _items(column, cells.value.take(chosen), cells.path.take(chosen), literals)
            places.append(chosen)
            items.append(item)
            fields.append(field)
            prepended.append(before)
    every, texts = np.concatenate(places), pa.concat_arrays(items)
    valid = valid_mask(texts)
    valid_places = np.flatnonzero(valid)
    # The stable sort keeps the order of columns within a row.
    order = valid_places[np.argsort(cells.row[every[valid_places]], kind="stable")]
    chosen, omitted = every[order], every[~valid]
    written = LiveCells(
        cells.row[chosen],
        columns[chosen],
        taken(Times(cells.timestamp, ttls, expiries), chosen),
        texts.take(pa.array(order)),
        pa.concat_arrays(fields).take(pa.array(order)),
        np.concatenate(prepended)[order],
        chosen,
        table,
        np.empty(0, np.int64),
        (cells.row[omitted], columns[omitted], omitted),
    )
    return replace(written, whole=_whole(written, deletions, place_of(cells.row, columns)))


def _items(column: Column, values: Cells, paths: Cells, literals: Literals) -> tuple[pa.Array, pa.Array, Mask]:
    """Return the texts of a column's cells, their field names, and whether each was prepended to a list."""
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
            numbers, names = _field_names(column.type, paths)
            texts = nothing
            for number, kind in enumerate(kinds):
                of_field = np.flatnonzero(numbers == number)
                if len(of_field):
                    of_field_texts = literals(kind, values.take(of_field))
                    texts = pc.coalesce(placed(of_field_texts, of_field, len(values)), texts)
            return texts, names, nowhere
    raise AssertionError(f"{column.type} is not a multi-cell type")


def _field_names(cql_type: UserType, paths: Cells) -> tuple[Integers, pa.Array]:
    fields = field_numbers(paths)
    names = pa.array([printable(name) for name in cql_type.field_names], pa.string())
    return fields, names.take(array_of(fields, (fields >= 0) & (fields < len(names))))


def are_prepended(paths: Cells) -> Mask:
    """Tell which entries were prepended to lists, by the times of the timeuuids in their paths.

    A path of version 0 stands for an unknown timeuuid; its entry counts as not prepended.
    """
    eight = paths.buffer[paths.offsets.astype(np.int64)[:, None] + np.arange(8)].astype(np.int64)
    low = eight[:, 0] << 24 | eight[:, 1] << 16 | eight[:, 2] << 8 | eight[:, 3]
    middle = eight[:, 4] << 8 | eight[:, 5]
    high = (eight[:, 6] & 15) << 8 | eight[:, 7]
    prepended: Mask = ((high << 48 | middle << 32 | low) < _MIRROR) & (eight[:, 6] >> 4 != 0)
    return prepended


def _whole(cells: LiveCells, deletions: FlatDeletions, every: Integers) -> Integers:
    """Find columns that were written as ``m = {…}``: such a write deletes the old content 1 µs before its own time.

    :param every: (row, column) of all cells, also of those that are not live
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
    # A column is whole only if no cell is missing here: none is a tombstone, each has a literal.
    all_keys, sizes = np.unique(every, return_counts=True)
    alike &= sizes[np.searchsorted(all_keys, key[first])] == last - first + 1
    deleted = place_of(deletions.row, deletions.column)
    order = np.argsort(deleted)
    at = np.minimum(np.searchsorted(deleted[order], key[first]), len(deleted) - 1)
    alike &= deleted[order][at] == key[first]
    alike &= deletions.timestamp[order][at] == cells.times.timestamps[first] - 1
    return key[first][alike]


def place_of(rows: Integers, columns: Integers) -> Integers:
    """Return one number for each pair of row and column."""
    return rows.astype(np.int64) << 20 | columns


def assignments(cells: LiveCells, in_log_order: bool) -> Assignments:
    """Make one assignment of the cells of a row's column that were written at once.

    :param in_log_order: True: the order is that of the log, and entries of a list with the same times are one
        assignment. False: the order is that of columns and times, and entries of lists are added one after another
    """
    kinds = _Kinds.of(cells)
    order, first, turns = (_logged_units if in_log_order else _units)(cells, kinds)
    first_cells = order[first]
    names = _names(cells, kinds, first_cells)
    values = _values(cells, kinds, order, first)
    empty = pa.array([""]).take(pa.array(np.zeros(len(first_cells), np.int64)))
    prefixes = suffixes = empty
    added = ~(kinds.scalar | kinds.whole | kinds.field)[first_cells]
    if added.any():
        before = added & cells.prepended[first_cells]
        prefixes = pc.if_else(pa.array(added & ~before), pc.binary_join_element_wise(names, " + ", ""), empty)
        suffixes = pc.if_else(pa.array(before), pc.binary_join_element_wise(" + ", names, ""), empty)
    units = Assignments(
        cells.rows[first_cells],
        cells.columns[first_cells],
        taken(cells.times, first_cells),
        names,
        values,
        (kinds.scalar | kinds.whole)[first_cells],
        prefixes,
        suffixes,
        turns,
    )
    if not in_log_order:
        return units
    began = first_places(cells.places, place_of(cells.rows, cells.columns), *cells.times.keys)[first_cells]
    ordered: Assignments = taken(units, np.lexsort((cells.places[first_cells], began, ~units.are_whole)))
    return ordered


def first_places(places: Integers, *keys: Integers) -> Integers:
    """Find for each cell the first place among the cells with the same keys."""
    order = np.lexsort((places, *keys))
    first = np.flatnonzero(changes(order, keys))
    first_of = np.empty_like(places)
    first_of[order] = np.repeat(places[order[first]], np.diff(first, append=len(order)))
    return first_of


def changes(order: Integers, keys: Sequence[Integers]) -> Mask:
    """Find the places in an order where any key differs from the one before."""
    differ: Mask = np.logical_or.reduce([np.diff(key[order], prepend=key[order[:1]]) != 0 for key in keys])
    differ[:1] = True
    return differ


@dataclass(frozen=True)
class _Kinds:
    """The kinds of cells, as masks.

    :ivar scalar: the only cell of its column
    :ivar whole: part of a column that is written as a whole
    :ivar field: a field that is written by itself
    :ivar entry: an entry of a list
    """

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
    """Sort cells so that those of one assignment are neighbours. Return the order, the place in it where each
    assignment begins, and its turn. Entries of a list with different times are added one after another, so that they
    keep their order."""
    count = len(cells.rows)
    if kinds.scalar.all():
        return np.arange(count), np.arange(count), np.zeros(count, np.int64)
    place = place_of(cells.rows, cells.columns)
    breaks = np.logical_or.reduce([np.diff(key, prepend=key[0]) != 0 for key in (place, *cells.times.keys)])
    breaks[1:] |= cells.prepended[1:] != cells.prepended[:-1]
    runs = np.where(kinds.entry, np.cumsum(breaks), 0)
    sorted_by = [*cells.times.keys, runs, place]
    order = np.lexsort(sorted_by)
    first = np.flatnonzero(changes(order, sorted_by) | (kinds.scalar | kinds.field)[order])
    first_cells = order[first]
    begun = runs[np.searchsorted(place, place[first_cells])]
    turns = runs[first_cells] - begun
    # Prepending reverses the order.
    return order, first, np.where(cells.prepended[first_cells], count - turns, turns)


def _logged_units(cells: LiveCells, kinds: _Kinds) -> tuple[Integers, Integers, Integers]:
    """Do the same in the order of the log. One statement cannot both prepend and append entries to a list."""
    before = kinds.entry & cells.prepended
    at_once = [*cells.times.keys, place_of(cells.rows, cells.columns)]
    order = np.lexsort((cells.places, before, *at_once))
    first = np.flatnonzero(changes(order, [before.astype(np.int64), *at_once]) | (kinds.scalar | kinds.field)[order])
    first_cells = order[first]
    again = before[first_cells] & ~changes(first_cells, at_once)
    began, column_began = (
        first_places(cells.places, *keys)[first_cells] for keys in ([*cells.times.keys, cells.rows], at_once)
    )
    return order, first, began << 32 | np.where(again, column_began + 1, 0)


def _names(cells: LiveCells, kinds: _Kinds, first_cells: Integers) -> pa.Array:
    names = pa.array([printable(column.name) for column in cells.table.value_columns], pa.string())
    names = names.take(pa.array(cells.columns[first_cells]))
    if not kinds.field[first_cells].any():
        return names
    dotted = pc.binary_join_element_wise(names, cells.fields.take(pa.array(first_cells)), ".")
    return pc.if_else(pa.array(kinds.field[first_cells]), dotted, names)


def _values(cells: LiveCells, kinds: _Kinds, order: Integers, first: Integers) -> pa.Array:
    """Return the value of each assignment; several cells make a collection or a user-defined type."""
    items = cells.items
    if kinds.scalar.all():
        return items
    named = kinds.whole & cells.fields.is_valid().to_numpy(zero_copy_only=False)
    if named.any():
        items = pc.if_else(pa.array(named), pc.binary_join_element_wise(cells.fields, items, ": "), items)
    values = joined_texts(items.take(array_of(order)), first, ", ")
    entry = pa.array(kinds.entry[order[first]])
    opened, closed = (pc.if_else(entry, of_list, other) for of_list, other in (("[", "{"), ("]", "}")))
    single = (kinds.scalar | kinds.field)[order[first]]
    return pc.if_else(pa.array(single), values, pc.binary_join_element_wise(opened, values, closed, ""))


def joined_texts(texts: pa.Array, first: Places, separator: str) -> pa.Array:
    """Join each run of texts to one text; runs begin at the places ``first``."""
    return pc.binary_join(list_of(np.diff(first, append=len(texts)), texts), separator)


def deleted_names(
    cells: FlatCells, deletions: FlatDeletions, table: TableSchema, whole: Integers, literals: Literals
) -> Deleted:
    """Name the columns, elements and fields that are deleted; entries of lists have no name.

    :param whole: (row, column) of columns that are written as a whole: the write itself deletes the old content
    """
    names = pa.array([printable(column.name) for column in table.value_columns], pa.string())
    explicit = np.flatnonzero(~np.isin(place_of(deletions.row, deletions.column), whole))
    deletions = deletions.take(explicit)
    gone, columns = cells.kind == TOMBSTONE, cells.column
    tombstones, texts = [np.empty(0, np.intp)], [names.take(pa.array(deletions.column))]
    for number, column in enumerate(table.value_columns if gone.any() else ()):
        places = np.flatnonzero(gone & (columns == number))
        if not len(places) or (column.is_multicell and isinstance(column.type, ListType)):
            continue
        text = names.take(pa.array(np.full(len(places), number)))
        if column.is_multicell:
            text = _element_names(column, names[number].as_py(), cells.path.take(places), literals)
        tombstones.append(places)
        texts.append(text)
    place, text = np.concatenate(tombstones), pa.concat_arrays(texts)
    rows = np.concatenate([deletions.row, cells.row[place]])
    times = np.concatenate([deletions.timestamp, cells.timestamp[place]])
    # Deletions of whole columns come before all cells.
    every = np.concatenate([np.arange(-len(explicit), 0), place])
    valid = valid_mask(text)
    valid_places, omitted = np.flatnonzero(valid), every[~valid]
    return Deleted(
        rows[valid_places],
        times[valid_places],
        text.take(pa.array(valid_places)),
        every[valid_places],
        times[valid_places],
        (cells.row[omitted], columns[omitted], omitted),
    )


def _element_names(column: Column, name: str, paths: Cells, literals: Literals) -> pa.Array:
    match column.type:
        case UserType():
            _, fields = _field_names(column.type, paths)
            return pc.binary_join_element_wise(f"{name}.", fields, "")
        case SetType(element=kind) | MapType(key=kind):
            return pc.binary_join_element_wise(f"{name}[", literals(kind, paths), "]", "")
    raise AssertionError(f"{column.type} has no elements with names")
