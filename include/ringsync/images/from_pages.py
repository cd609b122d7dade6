"""Row images from the result pages of a table scan.

The select list of a scan is the token, the columns, and ``writetime(c)`` and ``ttl(c)`` of the value columns;
:class:`ResultColumn` describes its entries. images/schema.py explains ``_row`` and ``_x``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from ringsync.changes.common_times import NO_CELL, ElementTimes
from ringsync.changes.keys.canonical import decoded_clustering
from ringsync.changes.schema import NO_EXPIRY
from ringsync.compiled.arrow import Integers, integers, valid_mask
from ringsync.compiled.memory import KERNEL, address, is_valid, load32_native, load64_native, store64
from ringsync.cql.cells import Cells, no_cells
from ringsync.cql.codec.decode import Decoded
from ringsync.cql.types import CqlType, ListType, Native, arrow_type
from ringsync.formats.page_columns import decode_pages
from ringsync.formats.result_page import Page
from ringsync.images.schema import MERGE, ROW_TIMES, lake_names, row_image_schema
from ringsync.images.times import Differences, differences_of, refuse_misfits, row_times, struct_of, x_column
from ringsync.schema.table import Column, TableSchema

Role = Literal["token", "now", "value", "writetime", "ttl"]
PageCells = dict[tuple[Role, str | None], Cells]
PageValues = dict[tuple[Role, str | None], Decoded]


@dataclass(frozen=True)
class ResultColumn:
    """One entry of a scan's select list.

    :ivar role: content of the entry: the partition's token, the server's time (ms), a column's value, or
        ``writetime()`` or ``ttl()`` of it
    :ivar column: CQL name of the column; None: the token, or the time
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
    :param layout: select list in order: token and the value of every column; ``writetime`` and ``ttl`` as far as the
        server gives them. A multi-cell column without both has unknown times; if the list has no writetime at all,
        every column has
    :param now: moment for which the server computed the TTLs, s since the epoch. If the layout has the server's time,
        this counts instead: then an expiry is exact to a second
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
    serialised = {name: cells.get(("value", name), no_cells(rows)) for name in decoded}
    if misfits == "error":
        refuse_misfits(table, decoded, serialised, partial(_described, table, decoded, serialised))
    moments = integers(all_values["now", None].values) // 1000 if ("now", None) in all_values else np.full(rows, now)
    row, times = _times(table, all_values, rows, moments)
    raw = {name: values.raw(serialised[name]) for name, values in decoded.items()}
    token = all_values["token", None].values
    values = [decoded[column.name].values for column in table.columns]
    arrays = [token, *values, row, x_column(table, times, raw, rows), pa.nulls(rows, MERGE)]
    return pa.RecordBatch.from_arrays(arrays, schema=row_image_schema(table))


def widened(images: pa.RecordBatch, narrow: TableSchema, table: TableSchema) -> pa.RecordBatch:
    """Extend row images of some columns to all columns of a table; the added columns have no cells.

    :param images: images with ``row_image_schema(narrow)``
    :param narrow: table with fewer columns
    :return: images with ``row_image_schema(table)``
    """
    schema, given, rows = row_image_schema(table), lake_names(narrow), images.num_rows
    values: list[pa.Array] = []
    differences: list[pa.Array | None] = []
    for column in table.columns:
        name = given.get(column.name)
        values.append(pa.nulls(rows, arrow_type(column.type)) if name is None else images[name])
        differences.append(None if name is None else pc.struct_field(images["_x"], name))
    x = struct_of(schema.field("_x").type, differences, rows)
    return pa.RecordBatch.from_arrays([images["token"], *values, images["_row"], x, images["_merge"]], schema=schema)


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


def _described(table: TableSchema, decoded: Mapping[str, Decoded], cells: Mapping[str, Cells], row: int) -> str:
    """Describe a row for an error message, by its key."""
    names = [column.name for column in table.key_columns]
    return "row " + ", ".join(f"{name} = {_key_text(decoded[name], cells[name], row)}" for name in names)


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


def _times(table: TableSchema, values: PageValues, rows: int, now: Integers) -> tuple[pa.Array, dict[str, Differences]]:
    """Return ``_row``, and ``d`` and ``e`` by column.

    :param now: moment of each row's TTLs, s since the epoch
    """
    if not any(role == "writetime" for role, _ in values):
        return pa.nulls(rows, ROW_TIMES), {}
    scalars = [
        column for column in table.value_columns if ("writetime", column.name) in values and not column.is_multicell
    ]
    elements = {
        column.name: _element_times(column, values, rows, now) for column in table.value_columns if column.is_multicell
    }
    writetimes, expiries = _scalar_times(
        [(values["writetime", column.name], values.get(("ttl", column.name))) for column in scalars], rows, now
    )
    decoded = {name: values["value", name] for name in elements}
    row, differences = differences_of(
        [column.name for column in scalars], writetimes, expiries, elements, decoded, rows
    )
    return row_times(row), differences


def _element_times(column: Column, values: PageValues, rows: int, now: Integers) -> ElementTimes:
    """Read ``writetime(c)`` and ``ttl(c)`` of a multi-cell column: list<bigint> and list<int> with null elements.

    :returns: the elements' times; none if the scan does not select them
    :raises ValueError: these are not lists, or not of the same length
    """
    times, left = values.get(("writetime", column.name)), values.get(("ttl", column.name))
    if times is None or left is None:
        nothing = np.empty(0, np.int64)
        return ElementTimes(np.zeros(rows + 1, np.int32), nothing, nothing)
    if times.misfits is not None or left.misfits is not None:
        raise ValueError("writetime or ttl of a multi-cell column must be a list of numbers")
    starts = np.frombuffer(times.values.buffers()[1], np.int32)
    counts, ttl_given = np.diff(starts), valid_mask(left.values)
    if np.any(ttl_given & (np.diff(integers(left.values.offsets)) != counts)):
        raise ValueError("writetime and ttl of a multi-cell column have different numbers of elements")
    expiries, moments = np.full(len(times.values.values), NO_EXPIRY, np.int64), np.repeat(now, counts)
    given = np.repeat(ttl_given, counts)
    expiries[given] = np.where(valid_mask(left.values.values), integers(left.values.values) + moments[given], NO_EXPIRY)
    expiries[~valid_mask(times.values.values)] = NO_CELL
    return ElementTimes(starts, integers(times.values.values), expiries)


def _scalar_times(
    columns: Sequence[tuple[Decoded, Decoded | None]], rows: int, now: Integers
) -> tuple[Integers, Integers]:
    """Read ``writetime(c)`` and ``ttl(c)`` of columns of one cell as int64[columns, rows] writetimes and expiries.

    :param columns: decoded bigint and int; None: the column has no TTLs
    :raises ValueError: a value is not such a number
    """
    writetimes, expiries = np.empty((2, len(columns), rows), np.int64)
    first_writetime, first_expiry = address(writetimes), address(expiries)
    for place, (times, ttls) in enumerate(columns):
        if times.misfits is not None or (ttls and ttls.misfits is not None):
            raise ValueError("writetime or ttl of a column must be a number")
        shift = 8 * place * rows
        # The most common case: nothing in these pages expires.
        some = ttls is not None and ttls.values.null_count < rows
        ttl_valid, ttl_values = _buffers(ttls.values) if ttls is not None and some else (0, 0)
        time_valid, time_values = _buffers(times.values)
        _gather_times(
            *(time_values, time_valid, ttl_values, ttl_valid, rows, address(now)),
            *(first_writetime + shift, first_expiry + shift),
        )
    return writetimes, expiries


def _buffers(array: pa.Array) -> tuple[int, int]:
    """Return the addresses of validity (0: no nulls) and values of an array of numbers without offset."""
    valid, values = array.buffers()
    return valid.address if valid else 0, values.address


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _gather_times(
    times: int, times_valid: int, ttls: int, ttls_valid: int, count: int, now: int, writetimes: int, expiries: int
) -> None:
    """Compute one column's times. ``ttls`` 0: there are none. ``now`` is the address of int64[count]."""
    for row in range(count):
        writetime, expiry = load64_native(times + 8 * row), NO_EXPIRY
        if not is_valid(times_valid, row):
            expiry = NO_CELL
        elif ttls != 0 and is_valid(ttls_valid, row):
            expiry = load64_native(now + 8 * row) + load32_native(ttls + 4 * row)
        store64(writetimes + 8 * row, writetime)
        store64(expiries + 8 * row, expiry)
