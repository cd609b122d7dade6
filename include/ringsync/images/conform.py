"""Row images of one version of a table, as another version of its schema shows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import columns_of
from ringsync.changes.schema import NEVER
from ringsync.compiled.arrow import array_of, list_of, rows_of_lists, structs_of, valid_mask
from ringsync.cql.types import CqlType
from ringsync.images.from_changes import images_of
from ringsync.images.schema import lake_names, row_image_schema
from ringsync.images.to_cells import serialised
from ringsync.images.to_changes import change_rows_of
from ringsync.schema.table import TableSchema


def conformed_images(images: pa.RecordBatch, old: TableSchema, new: TableSchema) -> pa.RecordBatch:
    """Return row images as a later version of the table shows them.

    Key columns keep their places and may have other names. Cells that were written before their column was dropped and
    added again are left out, and so are those of unknown time: only a read before the drop gives such cells. All others
    keep their bytes: the column may have another type now, to which Cassandra finds them compatible.

    :param images: images with the schema of ``old``
    """
    again = _added_again(old, new)
    shown = _laid_out(images, old, new, without=again)
    has = np.zeros(images.num_rows, np.bool_)
    for name in again:
        has |= valid_mask(serialised(images, lake_names(old)[name], again[name]))
    touched = np.flatnonzero(has)
    if not len(touched):
        return shown
    rows = change_rows_of(images.take(array_of(touched)), old, unknown_at_us=0, one_each=True)
    # What was dropped earlier is in no image: its cells are not looked for by times, of which some are unknown.
    bare = replace(new, dropped=())
    since = {gone.name: gone.dropped_at for gone in new.dropped if gone.name in again}
    left = images_of(_renumbered(rows, old, bare, since), bare, "raw", np.arange(len(rows)))
    order = np.arange(images.num_rows)
    order[touched] = images.num_rows + np.arange(len(rows))
    return pa.concat_batches([shown, left]).take(array_of(order))


def _laid_out(images: pa.RecordBatch, old: TableSchema, new: TableSchema, without: Collection[str]) -> pa.RecordBatch:
    """Return images in the schema of another version.

    :param without: names of columns to leave empty
    """
    schema, count = row_image_schema(new), images.num_rows
    before, names = lake_names(old), lake_names(new)
    keys = {after.name: column.name for column, after in zip(old.key_columns, new.key_columns, strict=True)}
    values = {column.name for column in old.value_columns} - set(without)
    differences = dict(zip([field.name for field in images["_x"].type], images["_x"].flatten(), strict=True))
    columns, x = [], []
    for column, kind in zip(new.columns, schema.field("_x").type, strict=True):
        name = keys.get(column.name) if column.is_key else column.name if column.name in values else None
        place = None if name is None else before[name]
        wanted = schema.field(names[column.name]).type
        columns.append(pa.nulls(count, wanted) if place is None else _extended(images[place], wanted))
        x.append(pa.nulls(count, kind.type) if place is None else _extended(differences[place], kind.type))
    all_x = structs_of(schema.field("_x").type, x, valid_mask(images["_x"]))
    arrays = [images["token"], *columns, images["_row"], all_x, images["_merge"]]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def by_name(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with the columns of a schema, and the entries of ``_x``, found by their names; else null."""
    columns = []
    for field in schema:
        place = rows.schema.get_field_index(field.name)
        if place < 0:
            columns.append(pa.nulls(rows.num_rows, field.type))
        elif field.name == "_x":
            differences = dict(zip([entry.name for entry in rows["_x"].type], rows["_x"].flatten(), strict=True))
            entries = [
                _extended(differences[entry.name], entry.type)
                if entry.name in differences
                else pa.nulls(rows.num_rows, entry.type)
                for entry in field.type
            ]
            columns.append(structs_of(field.type, entries, valid_mask(rows["_x"])))
        else:
            columns.append(_extended(rows.column(place), field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _added_again(old: TableSchema, new: TableSchema) -> dict[str, CqlType]:
    """Return the columns that were dropped and added again since the old version, with their types in it."""
    drops = {gone.name: gone.dropped_at for gone in old.dropped}
    there = {column.name for column in new.value_columns}
    newly = {gone.name for gone in new.dropped if gone.name in there and gone.dropped_at != drops.get(gone.name)}
    return {column.name: column.type for column in old.value_columns if column.name in newly}


def _renumbered(rows: ChangeRows, old: TableSchema, new: TableSchema, since: Mapping[str, int]) -> ChangeRows:
    """Return change rows of the old version as those of the new one.

    :param since: times of the drops of columns that were added again, µs, by name
    """
    places = {column.name: column.number for column in columns_of(new)}
    by = np.array([places.get(column.name, -1) for column in columns_of(old)], np.int64)
    limits = np.array([since.get(column.name, NEVER) for column in columns_of(new)], np.int64)
    parts = {}
    for name in ("cells", "complex_deletions"):
        part: Any = getattr(rows, name)
        part = replace(part, column=by[part.column])
        part = part.where(part.column >= 0)
        parts[name] = part.where(part.timestamp > limits[part.column])
    return replace(rows, **parts)


def _extended(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return values in a type whose structs have more fields at their ends, or other names of fields."""
    if array.type.equals(kind):
        return array
    if pa.types.is_struct(kind):
        fields = array.flatten()
        children = [
            _extended(fields[place], field.type) if place < len(fields) else pa.nulls(len(array), field.type)
            for place, field in enumerate(kind)
        ]
        return structs_of(kind, children, valid_mask(array))
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        row, entries = rows_of_lists(array if pa.types.is_list(kind) else _as_list(array))
        value = kind.value_type if pa.types.is_list(kind) else pa.struct([kind.key_field, kind.item_field])
        counts = np.bincount(row, minlength=len(array))
        return list_of(counts, _extended(entries, value), valid_mask(array), kind)
    return array.cast(kind)


def _as_list(maps: pa.Array) -> pa.Array:
    entry = pa.struct([maps.type.key_field, maps.type.item_field])
    return maps.cast(pa.list_(entry)) if not maps.offset else pa.concat_arrays([maps]).cast(pa.list_(entry))
