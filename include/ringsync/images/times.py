"""The conversion of cell times to the columns ``_row`` and ``_x`` of row images, and back.

:mod:`ringsync.images.schema` explains these columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from ringsync.changes.common_times import NO_CELL, ElementTimes, RowTimes, common_times
from ringsync.changes.schema import NO_EXPIRY
from ringsync.compiled.arrow import Integers, Mask, array_of, integers, list_of, structs_of, valid_mask
from ringsync.cql.cells import Cells
from ringsync.cql.codec.decode import Decoded, misfit_reason
from ringsync.images.schema import ROW_TIMES, lake_names, row_image_schema
from ringsync.schema.table import TableSchema

Differences = tuple[pa.Array | None, pa.Array | None]
"""``d`` and ``e`` of a column; None stands for an array of nulls."""

_SHOWN_BYTES = 64


class UnrepresentableValueError(ValueError):
    """An error: an Arrow type cannot hold the value of a cell. The message names the cell and what to do."""


def refuse_misfits(
    table: TableSchema,
    decoded: Mapping[str, Decoded],
    cells: Mapping[str, Cells],
    where: Callable[[int], str],
    remedy: str = "",
) -> None:
    """Make sure that the types in the lake can hold all values.

    :param cells: values of each column, serialised
    :param where: function that describes a row
    :param remedy: what to do then; empty: keep such values as bytes in images
    :raises UnrepresentableValueError: a type cannot hold a value
    """
    for column in table.columns:
        misfits = decoded[column.name].misfits
        if misfits is None:
            continue
        row = int(np.flatnonzero(misfits)[0])
        value = cells[column.name].value(row) or b""
        shown = f"0x{value[:_SHOWN_BYTES].hex()}" + (f"… ({len(value)} bytes)" if len(value) > _SHOWN_BYTES else "")
        keep = (
            "set replica.unrepresentable_values: raw in the configuration to keep such values "
            f"as bytes in _x.{lake_names(table)[column.name]}.raw"
        )
        raise UnrepresentableValueError(
            f"table {table.full_name}, column {column.name}, {where(row)}: {shown} is "
            f"{misfit_reason(column.type, value)}, which the column's type in the lake cannot hold; {remedy or keep}"
        )


def differences_of(
    scalars: Sequence[str],
    writetimes: Integers,
    expiries: Integers,
    elements: Mapping[str, ElementTimes],
    values: Mapping[str, Decoded],
    rows: int,
) -> tuple[RowTimes, dict[str, Differences]]:
    """Find the times that most cells of each row share, and each column's differences from them.

    :param scalars: names of the columns of one cell
    :param writetimes: writetimes of these columns, int64[columns, rows], µs
    :param expiries: expiries of these columns, s since the epoch; NO_CELL where there is no cell
    :param elements: times of multi-cell columns by name; a value without times has unknown times
    :param values: values of the multi-cell columns
    """
    row = common_times(writetimes, expiries, list(elements.values()), rows)
    differences = {}
    for place, name in enumerate(scalars if row.mixed else ()):
        differences[name] = _scalar_differences(writetimes[place], expiries[place], row)
    for name, times in elements.items():
        differences[name] = _element_differences(times, row, values[name])
    return row, differences


def row_times(row: RowTimes, deleted_at: pa.Array | None = None, live: pa.Array | None = None) -> pa.Array:
    """Build the column ``_row``.

    :param deleted_at: int64, µs; None: unknown in all rows
    :param live: int64, µs; None: unknown in all rows
    """
    common = [array_of(row.writetimes, row.expiries != NO_CELL), array_of(row.expiries, row.expiries >= 0)]
    unknown = pa.nulls(len(row.expiries), pa.int64())
    others = [unknown if times is None else times for times in (deleted_at, live)]
    return structs_of(ROW_TIMES, [*common, *others])


def x_column(table: TableSchema, times: Mapping[str, Differences], raw: Mapping[str, pa.Array], rows: int) -> pa.Array:
    """Build the column ``_x``.

    :param times: differences by column; columns without any may be missing
    :param raw: bytes of values that the column's type in the lake cannot hold, by column
    """
    kind = row_image_schema(table).field("_x").type
    fields = []
    for column, field in zip(table.columns, kind, strict=True):
        differences = () if column.is_key else times.get(column.name, (None, None))
        fields.append(struct_of(field.type, [*differences, raw[column.name]], rows))
    return struct_of(kind, fields, rows)


def _scalar_differences(writetimes: Integers, expiries: Integers, row: RowTimes) -> Differences:
    cell = expiries != NO_CELL
    return (
        _given(writetimes - row.writetimes, cell & (writetimes != row.writetimes)),
        _given(expiries, cell & (expiries != row.expiries)),
    )


def _element_differences(times: ElementTimes, row: RowTimes, value: Decoded) -> Differences:
    """Build ``d`` and ``e`` of a multi-cell column.

    A value without times gets ``[]``. A misfit always gets the times of its elements, because only the typed value
    tells how many elements there are.
    """
    misfits = value.misfits
    present = valid_mask(value.values) if misfits is None else valid_mask(value.values) | misfits
    unknown = present & (np.diff(times.starts) == 0)
    if not row.mixed and misfits is None and not unknown.any():
        return None, None
    rows = np.repeat(np.arange(len(present)), np.diff(times.starts))
    cell = times.expiries != NO_CELL
    differences = times.writetimes - row.writetimes[rows]
    lists = []
    for values, differs in ((differences, differences != 0), (times.expiries, times.expiries != row.expiries[rows])):
        given = np.zeros(len(present), np.bool_) if misfits is None else misfits.copy()
        given[rows[cell & differs]] = True
        kept = given[rows]
        flat = array_of(values[kept], cell[kept])
        valid = given | unknown
        counts = np.where(given, np.diff(times.starts), 0)
        lists.append(list_of(counts, flat, valid) if valid.any() else None)
    return lists[0], lists[1]


def _given(values: Integers, valid: Mask) -> pa.Array | None:
    """Return the values inside the mask, and null outside; None: the mask is empty."""
    return array_of(values, valid) if valid.any() else None


def struct_of(kind: pa.StructType, children: Sequence[pa.Array | None], rows: int) -> pa.StructArray:
    """Build ``rows`` structs, null where all their fields are null. A child that is None stands for nulls."""
    arrays = [
        pa.nulls(rows, field.type) if child is None else child for child, field in zip(children, kind, strict=True)
    ]
    valid = np.zeros(rows, np.bool_)
    for array in arrays:
        if array.null_count < rows:
            valid |= valid_mask(array)
    return structs_of(kind, arrays, valid)


def cell_times(batch: pa.RecordBatch, table: TableSchema, column: str) -> tuple[pa.Array, pa.Array]:
    """Compute the absolute times of a value column's cells: the inverse of ``_row`` and ``_x``.

    :param column: CQL name of a static or regular column
    :return: writetime (µs) and expires_at (s since the epoch; null: no expiry), as int64, null where there is no cell
        or its times are unknown; for a multi-cell column as list<int64> with one entry per element (null for a UDT
        field that is not set), null where there is no value, ``[]`` where the times are unknown
    """
    name = lake_names(table)[column]
    value = batch.column(name)
    row, x = _fields(batch.column("_row")), _fields(batch.column("_x"))
    differences = _fields(x[name])
    there = valid_mask(value) | valid_mask(differences["raw"])
    if not table.column(column).is_multicell:
        known = there & valid_mask(row["writetime"])
        writetimes = integers(row["writetime"]) + np.where(valid_mask(differences["d"]), integers(differences["d"]), 0)
        expiries = np.where(valid_mask(differences["e"]), integers(differences["e"]), integers(row["expires_at"]))
        expiring = valid_mask(differences["e"]) | valid_mask(row["expires_at"])
        return array_of(writetimes, known), array_of(expiries, known & expiring & (expiries != NO_EXPIRY))
    elements = valid_mask(value) & valid_mask(row["writetime"])
    writetimes = _absolute(differences["d"], row["writetime"], value, there, elements, relative=True)
    return writetimes, _absolute(differences["e"], row["expires_at"], value, there, elements, relative=False)


def _absolute(
    lists: pa.ListArray, row: pa.Array, value: pa.Array, there: Mask, elements: Mask, relative: bool
) -> pa.Array:
    """Build lists of times: the list that ``_x`` has for a value, else the row's time for each element.

    :param there: mask of rows that have a value, typed or raw
    :param elements: mask of rows whose elements have the row's time, unless ``_x`` has a list
    :param relative: whether the lists' times are differences from the row's
    """
    if pa.types.is_struct(value.type):
        lists = _for_all_fields(lists, value.type.num_fields)
    given = valid_mask(lists)
    alike = elements & ~given
    counts = np.where(alike, _element_counts(value), 0)
    counts[given] = np.diff(integers(lists.offsets))[given]
    rows = np.repeat(np.arange(len(value)), counts)
    times, valid, listed = integers(row)[rows], valid_mask(row)[rows], given[rows]
    flat = lists.flatten()
    times[listed] = integers(flat) + (times[listed] if relative else 0)
    valid[listed] = valid_mask(flat) & (relative | (integers(flat) != NO_EXPIRY))
    if pa.types.is_struct(value.type):
        valid[~listed] &= np.stack([valid_mask(field) for field in value.flatten()], axis=1)[alike].ravel()
    return list_of(counts, array_of(times, valid), there)


def _for_all_fields(lists: pa.ListArray, width: int) -> pa.ListArray:
    """Give lists of times of a UDT's fields an entry for each field: those of fields that it got later are null."""
    counts = np.where(valid_mask(lists), np.diff(integers(lists.offsets)), 0)
    short = (counts > 0) & (counts < width)
    if not short.any():
        return lists
    wanted = np.where(short, width, counts)
    flat = lists.flatten()
    within = np.arange(wanted.sum()) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    there = within < np.repeat(counts, wanted)
    places = np.zeros(len(there), np.int64)
    places[there] = np.arange(len(flat))
    return list_of(wanted, flat.take(array_of(places, there)), valid_mask(lists))


def _element_counts(value: pa.Array) -> Integers:
    """Count the elements of each list, set or map, or the fields of a UDT; any number where the value is null."""
    if pa.types.is_struct(value.type):
        return np.full(len(value), value.type.num_fields, np.int64)
    return np.diff(integers(value.offsets))


def _fields(array: pa.StructArray) -> dict[str, pa.Array]:
    """Return the fields of a struct by name, null where the struct is."""
    return dict(zip([field.name for field in array.type], array.flatten(), strict=True))
