"""Row images from the result pages of a table scan.

The select list of a scan is the token, the columns, and ``writetime(c)`` and ``ttl(c)`` of the value columns;
:class:`ResultColumn` describes its entries. images/schema.py explains ``_row`` and ``_x``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import pyarrow as pa

from ringsync.changes.common_times import ElementTimes
from ringsync.changes.keys.canonical import decoded_clustering
from ringsync.cql.cells import Cells, raw_values
from ringsync.cql.codec.decode import Decoded
from ringsync.cql.types import CqlType, ListType, Native, arrow_type
from ringsync.formats.page_columns import decode_pages
from ringsync.formats.result_page import Page
from ringsync.images.page_times import element_times, scalar_times
from ringsync.images.schema import MERGE, ROW_TIMES, lake_names, row_image_schema
from ringsync.images.times import (
    Differences,
    differences_of,
    or_nulls,
    row_times,
    struct_of,
    unrepresentable,
)
from ringsync.schema.table import Column, TableSchema

Role = Literal["token", "value", "writetime", "ttl"]
PageCells = dict[tuple[Role, str | None], Cells]
PageValues = dict[tuple[Role, str | None], Decoded]

_schema_of = lru_cache(maxsize=16)(row_image_schema)
_names_of = lru_cache(maxsize=16)(lake_names)


@dataclass(frozen=True)
class ResultColumn:
    """One entry of a scan's select list.

    :ivar role: content of the entry: the partition's token, a column's value, or ``writetime()`` or ``ttl()`` of it
    :ivar column: CQL name of the column; None: the token
    """

    role: Role
    column: str | None


@lru_cache(maxsize=16)
def _types_of(table: TableSchema, layout: tuple[ResultColumn, ...]) -> tuple[CqlType, ...]:
    """Return the types of the entries of a select list."""
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

    :param pages: bodies of consecutive result pages
    :param table: scanned table
    :param layout: select list in order: token and the value of every column; ``writetime`` and ``ttl`` as far as the
        server gives them. A multi-cell column without both has unknown times; if the list has no writetime at all,
        every column has
    :param now: moment for which the server computed the TTLs, s since the epoch
    :param misfits: treatment of values that the Arrow type cannot hold: fail, or keep their bytes in ``_x``
    :return: rows of exactly ``row_image_schema(table)``
    :raises UnrepresentableValueError: there is such a value, with ``misfits="error"``
    :raises ValueError: a page is malformed, or the layout lacks a column
    """
    entries = [(entry.role, entry.column) for entry in layout]
    _check_layout(table, entries)
    page_columns = decode_pages(pages, _types_of(table, tuple(layout)))
    rows = page_columns.rows
    all_values: PageValues = dict(zip(entries, page_columns.decoded, strict=True))
    cells: PageCells = dict(zip(entries, page_columns.cells, strict=True)) if page_columns.cells else {}
    for column in table.clustering:
        entry: tuple[Role, str] = ("value", column.name)
        if all_values[entry].misfits is not None:
            all_values[entry], cells[entry] = decoded_clustering(all_values[entry], cells[entry], column.type)
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
        differences.append(struct_of(x_type.field(names[column.name]).type, parts))
    token = all_values["token", None].values
    values = [decoded[column.name].values for column in table.columns]
    x = struct_of(x_type, differences)
    arrays = [token, *values, or_nulls(row, ROW_TIMES, rows), or_nulls(x, x_type, rows), pa.nulls(rows, MERGE)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def widened(images: pa.RecordBatch, narrow: TableSchema, table: TableSchema) -> pa.RecordBatch:
    """Extend row images of some columns to all columns of a table; the added columns have no cells.

    :param images: images with ``row_image_schema(narrow)``
    :param narrow: table with fewer columns
    :return: images with ``row_image_schema(table)``
    """
    schema, given = _schema_of(table), _names_of(narrow)
    x, x_type, rows = images.column("_x"), schema.field("_x").type, images.num_rows
    values, differences = [], []
    for column in table.columns:
        name = given.get(column.name)
        values.append(pa.nulls(rows, arrow_type(column.type)) if name is None else images.column(name))
        differences.append(None if name is None or x.null_count == rows else x.field(name))
    widened = or_nulls(struct_of(x_type, differences), x_type, rows)
    arrays = [images.column("token"), *values, images.column("_row"), widened, images.column("_merge")]
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
            key = ", ".join(
                f"{key.name} = {_key_text(decoded[key.name], cells['value', key.name], row)}"
                for key in table.key_columns
            )
            raise unrepresentable(table, column, f"row {key}", cells["value", column.name].value(row) or b"")


def _key_text(decoded: Decoded, cells: Cells, row: int) -> str:
    """Write a key column's value for an error message: as text, or as bytes if Arrow has no text for it."""
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
) -> tuple[pa.Array | None, dict[str, Differences]]:
    """Return ``_row``, and ``d`` and ``e`` by column; None stands for an array of nulls."""
    if not any(role == "writetime" for role, _ in values):
        return None, {}
    scalars = [
        column for column in table.value_columns if ("writetime", column.name) in values and not column.is_multicell
    ]
    elements = {
        column.name: _element_times(column, values, rows, now) for column in table.value_columns if column.is_multicell
    }
    writetimes, expiries = scalar_times(
        [(values["writetime", column.name], values.get(("ttl", column.name))) for column in scalars], rows, now
    )
    decoded = {name: values["value", name] for name in elements}
    row, differences = differences_of(
        [column.name for column in scalars], writetimes, expiries, elements, decoded, rows
    )
    return row_times(row), differences


def _element_times(column: Column, values: PageValues, rows: int, now: int) -> ElementTimes:
    """Return the times of a multi-cell column's elements; none if the scan does not select them."""
    writetimes, ttls = values.get(("writetime", column.name)), values.get(("ttl", column.name))
    if writetimes is None or ttls is None:
        nothing = np.empty(0, np.int64)
        return ElementTimes(np.zeros(rows + 1, np.int32), nothing, nothing)
    return element_times(writetimes, ttls, now)
