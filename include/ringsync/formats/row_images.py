"""Row images from result pages of a table scan, and the times of their cells back from a row image.

The select list of a scan is the token, the columns, and ``writetime(c)`` and ``ttl(c)`` of the value columns;
:class:`ResultColumn` says which is where. What ``_row`` and ``_x`` mean: schema/row_image.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.cql.cells import Cells, raw_values, valid_mask
from ringsync.cql.decode import Decoded, misfit_reason
from ringsync.cql.types import CqlType, ListType, Native
from ringsync.formats.page_columns import decode_pages
from ringsync.formats.result_page import Page
from ringsync.formats.row_times import (
    NO_CELL,
    ElementTimes,
    Integers,
    RowTimes,
    bitmap,
    common_times,
    element_times,
    int64_array,
    integers,
    scalar_times,
)
from ringsync.schema.row_image import MERGE, NO_EXPIRY, ROW_TIMES, lake_names, row_image_schema
from ringsync.schema.table import Column, TableSchema

Mask = npt.NDArray[np.bool_]
Role = Literal["token", "value", "writetime", "ttl"]
PageCells = Mapping[tuple[Role, str | None], Cells]
PageValues = Mapping[tuple[Role, str | None], Decoded]

_SHOWN_BYTES = 64

_schema_of = lru_cache(maxsize=16)(row_image_schema)
_names_of = lru_cache(maxsize=16)(lake_names)


@dataclass(frozen=True)
class ResultColumn:
    """One entry of a scan's select list.

    :ivar role: what it is: the partition's token, a column's value, or ``writetime()`` or ``ttl()`` of a column
    :ivar column: the column's CQL name; None for the token
    """

    role: Role
    column: str | None


class UnrepresentableValueError(ValueError):
    """A cell holds a value that its Arrow type cannot hold; the message names the cell and what to do."""


@lru_cache(maxsize=16)
def _types_of(table: TableSchema, layout: tuple[ResultColumn, ...]) -> tuple[CqlType, ...]:
    """The types of the entries of a select list."""
    return tuple(_type_of(table, entry) for entry in layout)


def _type_of(table: TableSchema, entry: ResultColumn) -> CqlType:
    if entry.column is None:
        return Native("bigint")
    column = table.column(entry.column)
    if entry.role == "value":
        return column.type
    kind = Native("bigint" if entry.role == "writetime" else "int")
    return ListType(kind) if column.is_multicell else kind


def row_images(
    pages: Sequence[Page],
    table: TableSchema,
    layout: Sequence[ResultColumn],
    now: int,
    misfits: Literal["error", "raw"],
) -> pa.RecordBatch:
    """Build the row images of some result pages.

    :param pages: bodies of result pages that follow each other
    :param table: the scanned table
    :param layout: the select list in order: token and the value of every column; ``writetime`` and ``ttl`` as far
        as the server gives them. A multi-cell column without both has unknown times; so has every column where
        the list has no writetime at all
    :param now: s since the epoch, the moment for which the server computed the TTLs
    :param misfits: what to do with a value that its Arrow type cannot hold: fail, or keep its bytes in ``_x``
    :return: rows of exactly ``row_image_schema(table)``
    :raises UnrepresentableValueError: for such a value, with ``misfits="error"``
    :raises ValueError: when a page is malformed or the layout lacks a column
    """
    entries = [(entry.role, entry.column) for entry in layout]
    _check_layout(table, entries)
    found = decode_pages(pages, _types_of(table, tuple(layout)))
    rows = found.rows
    all_values: PageValues = dict(zip(entries, found.decoded, strict=True))
    cells: PageCells = dict(zip(entries, found.cells, strict=True)) if found.cells else {}
    decoded = {column.name: all_values["value", column.name] for column in table.columns}
    if misfits == "error":
        _refuse_misfits(table, cells, decoded)
    row, times = _times(table, all_values, rows, now)
    schema, names = _schema_of(table), _names_of(table)
    x_type = schema.field("_x").type
    differences = []
    for column in table.columns:
        raw = _raw(cells.get(("value", column.name)), decoded[column.name])
        parts = [raw] if column.is_key else [*times.get(column.name, (None, None)), raw]
        differences.append(_struct(x_type.field(names[column.name]).type, parts))
    token = all_values["token", None].values
    values = [decoded[column.name].values for column in table.columns]
    x = _struct(x_type, differences)
    arrays = [token, *values, _or_nulls(row, ROW_TIMES, rows), _or_nulls(x, x_type, rows), pa.nulls(rows, MERGE)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _check_layout(table: TableSchema, entries: Collection[tuple[Role, str | None]]) -> None:
    needed: list[tuple[Role, str | None]] = [("token", None)]
    needed += [("value", column.name) for column in table.columns]
    if any(role == "writetime" for role, _ in entries):
        scalars = [column for column in table.value_columns if not column.is_multicell]
        needed += [("writetime", column.name) for column in scalars]
        needed += [("ttl", column.name) for column in scalars if not column.is_counter]
    missing = [f"{role} of {name}" if name else role for role, name in needed if (role, name) not in entries]
    if missing:
        raise ValueError(f"the scan of {table.full_name} does not select: {', '.join(missing)}")


def _refuse_misfits(table: TableSchema, cells: PageCells, decoded: Mapping[str, Decoded]) -> None:
    for column in table.columns:
        misfits = decoded[column.name].misfits
        if misfits is not None:
            row = int(np.flatnonzero(misfits)[0])
            value = cells["value", column.name].value(row) or b""
            key = ", ".join(
                f"{key.name} = {_key_text(decoded[key.name], cells['value', key.name], row)}"
                for key in table.key_columns
            )
            shown = f"0x{value[:_SHOWN_BYTES].hex()}" + (f"… ({len(value)} bytes)" if len(value) > _SHOWN_BYTES else "")
            raise UnrepresentableValueError(
                f"table {table.full_name}, column {column.name}, row {key}: {shown} is "
                f"{misfit_reason(column.type, value)}, which the column's type in the lake cannot hold; "
                f"set replica.unrepresentable_values: raw in the configuration to keep such values "
                f"as bytes in _x.{_names_of(table)[column.name]}.raw"
            )


def _key_text(decoded: Decoded, cells: Cells, row: int) -> str:
    """A key column's value for a message: as text, as bytes where Arrow has no text for it."""
    value = decoded.values.slice(row, 1)
    raw = cells.value(row)
    if raw is None:
        return "null"
    try:
        text = value.cast(pa.string())[0].as_py()
    except pa.ArrowException:
        text = None
    return f"0x{raw.hex()}" if text is None or pa.types.is_binary(value.type) else str(text)


def _raw(cells: Cells | None, decoded: Decoded) -> pa.Array | None:
    return None if cells is None or decoded.misfits is None else raw_values(cells.without(~decoded.misfits))


def _times(
    table: TableSchema, values: PageValues, rows: int, now: int
) -> tuple[pa.Array | None, dict[str, tuple[pa.Array | None, pa.Array | None]]]:
    """``_row``, and ``d`` and ``e`` by column; None stands for an array of nulls."""
    scalars = [
        column for column in table.value_columns if ("writetime", column.name) in values and not column.is_multicell
    ]
    multicell = [column for column in table.value_columns if column.is_multicell]
    if not any(role == "writetime" for role, _ in values):
        return None, {}
    elements = {column.name: _element_times(column, values, rows, now) for column in multicell}
    writetimes, expiries = scalar_times(
        [(values["writetime", column.name], values.get(("ttl", column.name))) for column in scalars], rows, now
    )
    row = common_times(writetimes, expiries, list(elements.values()), rows)
    found = {}
    for place, column in enumerate(scalars if row.mixed else ()):
        found[column.name] = _scalar_differences(writetimes[place], expiries[place], row)
    for column in multicell:
        value = values["value", column.name]
        found[column.name] = _element_differences(elements[column.name], row, value)
    nothing = pa.nulls(rows, pa.int64())
    common = [_given(row.writetimes, row.expiries != NO_CELL), _given(row.expiries, row.expiries >= 0)]
    arrays = [*[_or_nulls(array, pa.int64(), rows) for array in common], nothing, nothing]
    return pa.StructArray.from_arrays(arrays, fields=list(ROW_TIMES)), found


def _element_times(column: Column, values: PageValues, rows: int, now: int) -> ElementTimes:
    """Times of a multi-cell column; of no elements at all where the scan has none."""
    writetimes, ttls = values.get(("writetime", column.name)), values.get(("ttl", column.name))
    if writetimes is None or ttls is None:
        nothing = np.empty(0, np.int64)
        return ElementTimes(np.zeros(rows + 1, np.int32), nothing, nothing)
    return element_times(writetimes, ttls, now)


def _scalar_differences(
    writetimes: Integers, expiries: Integers, row: RowTimes
) -> tuple[pa.Array | None, pa.Array | None]:
    cell = expiries != NO_CELL
    return (
        _given(writetimes - row.writetimes, cell & (writetimes != row.writetimes)),
        _given(expiries, cell & (expiries != row.expiries)),
    )


def _element_differences(times: ElementTimes, row: RowTimes, value: Decoded) -> tuple[pa.Array | None, pa.Array | None]:
    """``d`` and ``e`` of a multi-cell column.

    A value that is there without times gets ``[]``. A misfit gets its elements' times even where they are the
    row's, since without the typed value nobody could tell how many elements there are.
    """
    misfits = value.misfits
    present = valid_mask(value.values) if misfits is None else valid_mask(value.values) | misfits
    unknown = present & (np.diff(times.starts) == 0)
    if not row.mixed and misfits is None and not unknown.any():
        return None, None
    rows = times.rows
    cell = times.expiries != NO_CELL
    differences = times.writetimes - row.writetimes[rows]
    lists = []
    for values, differs in ((differences, differences != 0), (times.expiries, times.expiries != row.expiries[rows])):
        given = np.zeros(len(present), np.bool_) if misfits is None else misfits.copy()
        given[rows[cell & differs]] = True
        kept = given[rows]
        flat = int64_array(values[kept], cell[kept])
        valid = given | unknown
        counts = np.where(given, np.diff(times.starts), 0)
        lists.append(_list_array(counts, valid, flat) if valid.any() else None)
    return lists[0], lists[1]


def _list_array(counts: npt.NDArray[np.integer[Any]], valid: Mask, flat: pa.Array) -> pa.Array:
    """Lists of ``counts`` elements each, null where the mask does not say ``valid``."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    buffers = [bitmap(valid), pa.py_buffer(starts)]
    return pa.Array.from_buffers(pa.list_(flat.type), len(counts), buffers, children=[flat])


def _given(values: Integers, valid: Mask) -> pa.Array | None:
    """These values where the mask says so, else null; None where they are null in all rows."""
    return int64_array(values, valid) if valid.any() else None


def _struct(kind: pa.StructType, children: Sequence[pa.Array | None]) -> pa.Array | None:
    """A struct that is null where all its fields are; None where it is null in all rows."""
    given = [child for child in children if child is not None]
    if not given:
        return None
    valid = np.logical_or.reduce([valid_mask(child) for child in given])
    rows = len(given[0])
    arrays = [_or_nulls(child, field.type, rows) for child, field in zip(children, kind, strict=True)]
    return pa.Array.from_buffers(kind, rows, [bitmap(valid)], children=arrays)


def _or_nulls(array: pa.Array | None, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind) if array is None else array


def cell_times(batch: pa.RecordBatch, table: TableSchema, column: str) -> tuple[pa.Array, pa.Array]:
    """Absolute times of one value column's cells: the inverse of ``_row`` and ``_x``.

    :param batch: row images of the table
    :param column: CQL name of a static or regular column
    :return: writetime (µs) and expires_at (s since the epoch; null: no expiry). int64, null where there is no cell
        or its times are unknown; of a multi-cell column list<int64> with one element per element (null for a UDT
        field that is not set), null where there is no value, ``[]`` where the times are unknown
    """
    name = _names_of(table)[column]
    value = batch.column(name)
    row, x = _fields(batch.column("_row")), _fields(batch.column("_x"))
    own = _fields(x[name])
    there = valid_mask(value) | valid_mask(own["raw"])
    if not table.column(column).is_multicell:
        known = there & valid_mask(row["writetime"])
        writetimes = integers(row["writetime"]) + np.where(valid_mask(own["d"]), integers(own["d"]), 0)
        expiries = np.where(valid_mask(own["e"]), integers(own["e"]), integers(row["expires_at"]))
        expiring = valid_mask(own["e"]) | valid_mask(row["expires_at"])
        return (
            int64_array(writetimes, known),
            int64_array(expiries, known & expiring & (expiries != NO_EXPIRY)),
        )
    elements = valid_mask(value) & valid_mask(row["writetime"])
    writetimes = _absolute(own["d"], row["writetime"], value, there, elements, relative=True)
    return writetimes, _absolute(own["e"], row["expires_at"], value, there, elements, relative=False)


def _absolute(
    own: pa.ListArray, row: pa.Array, value: pa.Array, there: Mask, elements: Mask, relative: bool
) -> pa.Array:
    """Lists of times: a row's own list if it has one, else the row's time for each element of its value.

    :param there: rows that have a value, typed or raw
    :param elements: rows whose value's elements have the row's time, unless they have a list of their own
    :param relative: whether the own times are differences from the row's
    """
    given = valid_mask(own)
    alike = elements & ~given
    counts = np.where(alike, _element_counts(value), 0)
    counts[given] = np.diff(integers(own.offsets))[given]
    rows = np.repeat(np.arange(len(value)), counts)
    times, valid, from_own = integers(row)[rows], valid_mask(row)[rows], given[rows]
    flat = own.flatten()
    times[from_own] = integers(flat) + (times[from_own] if relative else 0)
    valid[from_own] = valid_mask(flat) & (relative | (integers(flat) != NO_EXPIRY))
    if pa.types.is_struct(value.type):
        valid[~from_own] &= np.stack([valid_mask(field) for field in value.flatten()], axis=1)[alike].ravel()
    return _list_array(counts, there, int64_array(times, valid))


def _element_counts(value: pa.Array) -> Integers:
    """Number of elements of each list, set or map; of fields for a UDT. Anything where the value is null."""
    if pa.types.is_struct(value.type):
        return np.full(len(value), value.type.num_fields, np.int64)
    return np.diff(integers(value.offsets))


def _fields(array: pa.StructArray) -> dict[str, pa.Array]:
    """The fields of a struct, null where the struct is."""
    return dict(zip([field.name for field in array.type], array.flatten(), strict=True))
