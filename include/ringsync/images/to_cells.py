"""The cells of row images: every value split into Cassandra's cells, with their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import LoggedColumn
from ringsync.changes.flat import FlatCells
from ringsync.changes.schema import EXPIRING, LIVE, NO_EXPIRY, NO_TTL, UNKNOWN_TTL
from ringsync.compiled.arrow import Integers, Mask, Places, integers, runs, valid_mask
from ringsync.cql.cells import Cells, cells_of, cells_of_values, joined_cells, no_cells
from ringsync.cql.codec.encode import encode
from ringsync.cql.codec.split import split
from ringsync.cql.types import CqlType, ListType, MapType, SetType, UserType
from ringsync.images.merge_column import entries_of
from ringsync.images.schema import lake_names
from ringsync.images.times import cell_times
from ringsync.schema.table import TableSchema


@dataclass(frozen=True)
class Elements:
    """The elements of a column's values.

    :ivar row: row of each element, ascending
    :ivar place: index of the element in its value; for user-defined types the field
    :ivar path: cell path; null for columns of one cell
    :ivar value: serialised value
    """

    row: Places
    place: Places
    path: Cells
    value: Cells


def value_cells(
    images: pa.RecordBatch, table: TableSchema, column: LoggedColumn, unknown_at_us: int | None
) -> FlatCells:
    """Build the cells of one column, expired ones included.

    :param unknown_at_us: timestamp for cells of unknown times, which UNKNOWN_TTL marks; None: they are left out
    :raises ValueError: the raw bytes of a collection are not valid
    """
    name = lake_names(table)[column.name]
    values = serialised(images, name, column.type)
    elements = _elements(images, column, values)
    writetimes, expiries, known = _times(images, table, column, elements)
    timestamps = writetimes if unknown_at_us is None else np.where(known, writetimes, unknown_at_us)
    expiring = known & (expiries >= 0)
    cells = FlatCells(
        elements.row,
        np.full(len(elements.row), column.number),
        timestamps,
        np.where(expiring, expiries, NO_EXPIRY),
        np.where(known, NO_TTL, UNKNOWN_TTL),
        np.where(expiring, EXPIRING, LIVE),
        elements.path,
        elements.value,
    )
    return cells.where(known) if unknown_at_us is None else cells


def serialised(images: pa.RecordBatch, name: str, cql_type: CqlType) -> pa.Array:
    """Return a column as Cassandra's bytes, from typed and raw values.

    :param name: name of the column in images
    """
    return pc.coalesce(encode(cql_type, images[name]), pc.struct_field(images["_x"], [name, "raw"]))


def _elements(images: pa.RecordBatch, column: LoggedColumn, values: pa.Array) -> Elements:
    cells = cells_of(values)
    if not column.is_multicell:
        there = np.flatnonzero(cells.lengths >= 0)
        return Elements(there, there * 0, no_cells(len(there)), cells.take(there))
    assert isinstance(column.type, ListType | SetType | MapType | UserType)
    parts = split(column.type, cells)
    broken = parts.misfits & (cells.lengths >= 0)
    if broken.any():
        value = cells.value(int(np.flatnonzero(broken)[0])) or b""
        raise ValueError(f"column {column.name} holds 0x{value.hex()[:64]}, which is not a value of type {column.type}")
    if parts.starts is None:
        return _fields(parts.cells)
    counts = np.diff(np.frombuffer(parts.starts, np.int32)).astype(np.int64)
    row = np.repeat(np.arange(len(values)), counts)
    match column.type:
        case SetType():
            paths, items = parts.cells[0], cells_of_values([b""]).take(row * 0)
        case MapType():
            paths, items = parts.cells
        case _:
            paths, items = entries_of(images["_merge"], column.name, counts), parts.cells[0]
    return Elements(row, runs(counts * 0, counts), paths, items)


def _fields(fields: Sequence[Cells]) -> Elements:
    """Return the fields of each row's user-defined type that are set."""
    is_set = np.array([field.lengths >= 0 for field in fields]).T
    row, field = np.nonzero(is_set)
    # The joined cells hold all rows of a field, field after field.
    place = field * len(is_set) + row
    paths = cells_of_values([number.to_bytes(2) for number in range(len(fields))])
    return Elements(row, field, paths.take(field), joined_cells(fields).take(place))


def _times(
    images: pa.RecordBatch, table: TableSchema, column: LoggedColumn, elements: Elements
) -> tuple[Integers, Integers, Mask]:
    """Return writetime and expiry (-1: none) of each element, and the mask of known ones."""
    writetimes, expiries = cell_times(images, table, column.name)
    row = elements.row
    if not column.is_multicell:
        known = valid_mask(writetimes)[row]
        return integers(writetimes)[row], np.where(valid_mask(expiries), integers(expiries), -1)[row], known
    needed = np.bincount(row, minlength=len(images))
    if isinstance(column.type, UserType):
        needed[needed > 0] = len(column.type.field_types)
    known = np.ones(len(row), np.bool_)
    known_times = []
    for times, missing in ((writetimes, 0), (expiries, -1)):
        starts = integers(times.offsets)
        complete = valid_mask(times) & (np.diff(starts) == needed)
        flat = times.values
        values = np.append(np.where(valid_mask(flat), integers(flat), missing), missing)
        places = np.where(complete[row], starts[:-1][row] + elements.place, len(values) - 1)
        known_times.append(values[places])
        known &= complete[row]
    return known_times[0], known_times[1], known
