"""The cells of change rows as the assignments of CQL statements, and what was deleted as DELETE names it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.cells import numbers, only
from ringsync.changes.schema import EXPIRING, TOMBSTONE
from ringsync.cql.cells import Cells, cells_of
from ringsync.cql.decode import decode
from ringsync.cql.identifiers import printable
from ringsync.cql.literals import message_literals
from ringsync.cql.types import ListType, MapType, Native, SetType, UserType
from ringsync.schema.table import Column, TableSchema

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_UUID_EPOCH = 0x01B21DD213814000
_MIRROR = 1262304000 * 10_000_000 + _UUID_EPOCH
"""2010-01-01 in 100 ns: entries put before others have times before it (C: cql3/Lists.Prepender)."""


@dataclass(frozen=True)
class LiveCells:
    """The cells that have a value and a literal for it, ordered by row, column and place.

    :ivar columns: number of each one's column
    :ivar items: what stands for it: a value, ``key: value``, an element, a field's value
    :ivar fields: of fields of user-defined types their names, else null
    :ivar prepended: entries put before the others of a list
    :ivar whole: (row, column) of columns of many cells that are written as a whole, as one number
    """

    rows: Integers
    columns: Integers
    timestamps: Integers
    ttls: Integers
    expiries: Integers
    items: pa.Array
    fields: pa.Array
    prepended: Mask
    table: TableSchema
    whole: Integers


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
    timestamps: Integers
    ttls: Integers
    expiries: Integers
    names: pa.Array
    values: pa.Array
    are_whole: Mask
    prefixes: pa.Array
    suffixes: pa.Array
    turns: Integers

    def assignments(self) -> pa.Array:
        """``name = value``, ``name = name + {…}``."""
        return pc.binary_join_element_wise(self.names, " = ", self.prefixes, self.values, self.suffixes, "")


@dataclass(frozen=True)
class Deleted:
    """What DELETEs name, and when (µs)."""

    rows: Integers
    times: Integers
    names: pa.Array


@dataclass(frozen=True)
class _Flat:
    """Cells or complex deletions of columns that are there, and of which the write still counts."""

    rows: Integers
    columns: Integers
    timestamps: Integers
    entries: pa.StructArray


def _flat(lists: pa.ListArray, table: TableSchema) -> _Flat:
    counts = numbers(pc.fill_null(pc.list_value_length(lists), 0))
    entries = lists.flatten()
    columns, timestamps = numbers(entries.field("column")), numbers(entries.field("timestamp"))
    # Columns that are there come first (changes.tables.columns_of); one may have been dropped and added again.
    dropped_at = {column.name: column.dropped_at for column in table.dropped}
    limits = np.array([dropped_at.get(column.name, -(2**63)) for column in table.value_columns] + [2**63 - 1])
    kept = timestamps > limits[np.minimum(columns, len(limits) - 1)]
    rows = np.repeat(np.arange(len(lists)), counts)
    if kept.all():
        return _Flat(rows, columns, timestamps, entries)
    return _Flat(rows[kept], columns[kept], timestamps[kept], entries.filter(pa.array(kept)))


def live_cells(rows: pa.RecordBatch, table: TableSchema) -> LiveCells:
    """The cells of change rows that statements can write.

    :param rows: of ``CHANGE_ROWS``
    """
    flat = _flat(rows["cells"], table)
    entries = flat.entries
    kinds = numbers(entries.field("kind"))
    expiries = np.where(kinds == EXPIRING, numbers(pc.fill_null(entries.field("local_deletion_time"), -1)), -1)
    ttls = np.where(kinds == EXPIRING, numbers(pc.fill_null(entries.field("ttl"), -1)), -1)
    values, paths = cells_of(entries.field("value")), cells_of(entries.field("path"))
    live = kinds != TOMBSTONE
    places, items, fields, prepended = [], [], [], []
    for number, column in enumerate(table.value_columns):
        own = np.flatnonzero(live & (flat.columns == number))
        if len(own):
            item, field, before = _items(column, only(values, own), only(paths, own))
            places.append(own)
            items.append(item)
            fields.append(field)
            prepended.append(before)
    if not places:
        places, items, fields = [np.empty(0, np.intp)], [pa.nulls(0, pa.string())], [pa.nulls(0, pa.string())]
        prepended = [np.empty(0, np.bool_)]
    every, texts = np.concatenate(places), pa.concat_arrays(items)
    said = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
    order = said[np.lexsort((every[said], flat.columns[every[said]], flat.rows[every[said]]))]
    chosen = every[order]
    found = LiveCells(
        flat.rows[chosen],
        flat.columns[chosen],
        flat.timestamps[chosen],
        ttls[chosen],
        expiries[chosen],
        texts.take(pa.array(order)),
        pa.concat_arrays(fields).take(pa.array(order)),
        np.concatenate(prepended)[order],
        table,
        np.empty(0, np.int64),
    )
    whole = _whole(found, _flat(rows["complex_deletions"], table), flat, kinds)
    return LiveCells(**{**vars(found), "whole": whole})


def _items(column: Column, values: Cells, paths: Cells) -> tuple[pa.Array, pa.Array, Mask]:
    """The texts of a column's cells, the fields that they are, and which were put before the others of a list."""
    nothing, nowhere = pa.nulls(len(values), pa.string()), np.zeros(len(values), np.bool_)
    if not column.is_multicell:
        return message_literals(column.type, values), nothing, nowhere
    match column.type:
        case ListType(element):
            return message_literals(element, values), nothing, _are_prepended(paths)
        case SetType(element):
            return message_literals(element, paths), nothing, nowhere
        case MapType(key, value):
            pairs = [message_literals(key, paths), message_literals(value, values)]
            return pc.binary_join_element_wise(*pairs, ": "), nothing, nowhere
        case UserType(field_types=kinds):
            numbers_, names = _field_names(column.type, paths)
            texts = nothing
            for number, kind in enumerate(kinds):
                own = np.flatnonzero(numbers_ == number)
                if len(own):
                    back = np.full(len(values), -1)
                    back[own] = np.arange(len(own))
                    literals = message_literals(kind, only(values, own)).take(pa.array(back, mask=back < 0))
                    texts = pc.coalesce(literals, texts)
            return texts, names, nowhere
    raise AssertionError(f"{column.type} has no cells of its own")


def _field_names(cql_type: UserType, paths: Cells) -> tuple[Integers, pa.Array]:
    found = numbers(pc.fill_null(decode(Native("smallint"), paths).values, -1))
    names = pa.array([printable(name) for name in cql_type.field_names], pa.string())
    there = (found >= 0) & (found < len(names))
    return found, names.take(pa.array(found, mask=~there))


def _are_prepended(paths: Cells) -> Mask:
    """By the times of timeuuids; of an entry whose name is not known (version 0) it is not known either."""
    eight = paths.buffer[paths.offsets.astype(np.int64)[:, None] + np.arange(8)].astype(np.int64)
    low = eight[:, 0] << 24 | eight[:, 1] << 16 | eight[:, 2] << 8 | eight[:, 3]
    middle = eight[:, 4] << 8 | eight[:, 5]
    high = (eight[:, 6] & 15) << 8 | eight[:, 7]
    found: Mask = ((high << 48 | middle << 32 | low) < _MIRROR) & (eight[:, 6] >> 4 != 0)
    return found


def _whole(cells: LiveCells, deletions: _Flat, every: _Flat, kinds: Integers) -> Integers:
    """Columns that are written as ``m = {…}``: that deletes what was there 1 µs before."""
    key = _place(cells.rows, cells.columns)
    if not len(key) or not len(deletions.rows):
        return np.empty(0, np.int64)
    first = np.flatnonzero(np.diff(key, prepend=-1))
    last = np.append(first[1:], len(key)) - 1
    alike = np.ones(len(first), np.bool_)
    for times in (cells.timestamps, cells.ttls, cells.expiries):
        alike &= np.minimum.reduceat(times, first) == np.maximum.reduceat(times, first)
    alike &= ~np.logical_or.reduceat(cells.prepended, first)
    # All of the column's cells are among these: none is a tombstone, each has a literal.
    all_keys, sizes = np.unique(_place(every.rows, every.columns), return_counts=True)
    alike &= sizes[np.searchsorted(all_keys, key[first])] == last - first + 1
    deleted = _place(deletions.rows, deletions.columns)
    order = np.argsort(deleted)
    at = np.minimum(np.searchsorted(deleted[order], key[first]), len(deleted) - 1)
    alike &= deleted[order][at] == key[first]
    alike &= deletions.timestamps[order][at] == cells.timestamps[first] - 1
    return key[first][alike]


def _place(rows: Integers, columns: Integers) -> Integers:
    """A row's column as one number."""
    return rows.astype(np.int64) << 20 | columns


def assignments(cells: LiveCells) -> Assignments:
    """The cells of a row's column that were written at once, as one assignment."""
    kinds = _Kinds.of(cells)
    order, first, turns = _units(cells, kinds)
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
    return Assignments(
        cells.rows[one],
        cells.columns[one],
        cells.timestamps[one],
        cells.ttls[one],
        cells.expiries[one],
        names,
        values,
        (kinds.scalar | kinds.whole)[one],
        prefixes,
        suffixes,
        turns,
    )


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
        whole = np.isin(_place(cells.rows, cells.columns), cells.whole)
        field = cells.fields.is_valid().to_numpy(zero_copy_only=False) & ~whole
        return _Kinds(scalar, whole, field, entry)


def _units(cells: LiveCells, kinds: _Kinds) -> tuple[Integers, Integers, Integers]:
    """The order in which cells that are assigned together follow each other, where each assignment begins in it, and
    the turn of each: entries of a list that have different times are added one after another, so that they keep their
    order."""
    count = len(cells.rows)
    if kinds.scalar.all():
        return np.arange(count), np.arange(count), np.zeros(count, np.int64)
    times = [cells.expiries, cells.ttls, cells.timestamps]
    place = _place(cells.rows, cells.columns)
    breaks = np.logical_or.reduce([np.diff(one, prepend=one[0]) != 0 for one in (place, *times)])
    breaks[1:] |= cells.prepended[1:] != cells.prepended[:-1]
    runs = np.where(kinds.entry, np.cumsum(breaks), 0)
    sorted_by = [*times, runs, place]
    order = np.lexsort(sorted_by)
    starts = np.logical_or.reduce([np.diff(one[order], prepend=one[order[0]] - 1) != 0 for one in sorted_by])
    first = np.flatnonzero(starts | (kinds.scalar | kinds.field)[order])
    one = order[first]
    begun = runs[np.searchsorted(place, place[one])]
    turns = runs[one] - begun
    # What is put before the others comes in the opposite order.
    return order, first, np.where(cells.prepended[one], count - turns, turns)


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


def deleted_names(rows: pa.RecordBatch, table: TableSchema, whole: Integers) -> Deleted:
    """Columns, elements and fields that are deleted; entries of lists have no name.

    :param whole: columns of rows that are written as a whole, which deletes them
    """
    flat, deletions = _flat(rows["cells"], table), _flat(rows["complex_deletions"], table)
    names = [printable(column.name) for column in table.value_columns]
    own = np.flatnonzero(~np.isin(_place(deletions.rows, deletions.columns), whole))
    every_name = pa.array(names, pa.string())
    parts = [(deletions.rows[own], deletions.timestamps[own], every_name.take(pa.array(deletions.columns[own])))]
    gone = numbers(flat.entries.field("kind")) == TOMBSTONE
    paths = cells_of(flat.entries.field("path")) if gone.any() else None
    for number, column in enumerate(table.value_columns if paths is not None else ()):
        places = np.flatnonzero(gone & (flat.columns == number))
        if not len(places) or (column.is_multicell and isinstance(column.type, ListType)):
            continue
        text = every_name.take(pa.array(np.full(len(places), number)))
        if column.is_multicell:
            assert paths is not None
            text = _element_names(column, names[number], only(paths, places))
        parts.append((flat.rows[places], flat.timestamps[places], text))
    row, time = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
    found = Deleted(row, time, pa.concat_arrays([text for *_, text in parts]))
    said = np.flatnonzero(found.names.is_valid().to_numpy(zero_copy_only=False))
    return Deleted(found.rows[said], found.times[said], found.names.take(pa.array(said)))


def _element_names(column: Column, name: str, paths: Cells) -> pa.Array:
    match column.type:
        case UserType():
            _, fields = _field_names(column.type, paths)
            return pc.binary_join_element_wise(f"{name}.", fields, "")
        case SetType(element=kind) | MapType(key=kind):
            return pc.binary_join_element_wise(f"{name}[", message_literals(kind, paths), "]", "")
    raise AssertionError(f"{column.type} has no elements with names")
