"""The cells of row images: every value split into Cassandra's cells, with their times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.flat import UNKNOWN_TTL, FlatCells, Places, cell_array, deletion_array
from ringsync.changes.schema import EXPIRING, LIVE, TOMBSTONE
from ringsync.compiled.arrow import Integers, Mask, array_of, integers, runs, valid_mask
from ringsync.cql.cells import cells_of, raw_values
from ringsync.cql.codec.encode import encode
from ringsync.cql.codec.split import split
from ringsync.cql.types import CqlType, ListType, MapType, SetType, UserType
from ringsync.images.merge_column import entries_of, tombstones_of
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
    path: pa.Array
    value: pa.Array


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
    count = len(elements.row)
    timestamps = writetimes if unknown_at_us is None else np.where(known, writetimes, unknown_at_us)
    expiring = known & (expiries >= 0)
    ttl = np.where(known, 0, UNKNOWN_TTL)
    cells = cell_array(
        np.full(count, column.number),
        elements.path,
        elements.value,
        timestamps,
        array_of(ttl, expiring | ~known).cast(pa.int32()),
        array_of(expiries, expiring),
        np.where(expiring, EXPIRING, LIVE),
    )
    flat_cells = FlatCells(elements.row, cells)
    return flat_cells.where(known) if unknown_at_us is None and not known.all() else flat_cells


def serialised(images: pa.RecordBatch, name: str, cql_type: CqlType) -> pa.Array:
    """Return a column as Cassandra's bytes, from typed and raw values.

    :param name: name of the column in images
    """
    return pc.coalesce(encode(cql_type, images[name]), pc.struct_field(images["_x"], [name, "raw"]))


def _elements(images: pa.RecordBatch, column: LoggedColumn, values: pa.Array) -> Elements:
    if not column.is_multicell:
        there = np.flatnonzero(valid_mask(values))
        return Elements(there, there * 0, pa.nulls(len(there), pa.binary()), values.take(pa.array(there)))
    assert isinstance(column.type, ListType | SetType | MapType | UserType)
    parts = split(column.type, cells_of(values))
    broken = parts.misfits & valid_mask(values)
    if broken.any():
        value = values[int(np.flatnonzero(broken)[0])].as_py()
        raise ValueError(f"column {column.name} holds 0x{value.hex()[:64]}, which is not a value of type {column.type}")
    if parts.starts is None:
        return _fields([raw_values(cells) for cells in parts.cells])
    counts = np.diff(np.frombuffer(parts.starts, np.int32)).astype(np.int64)
    row = np.repeat(np.arange(len(values)), counts)
    arrays = [raw_values(cells) for cells in parts.cells]
    match column.type:
        case SetType():
            paths, items = arrays[0], pa.array([b""], pa.binary()).take(pa.array(row * 0))
        case MapType():
            paths, items = arrays
        case _:
            paths, items = entries_of(images["_merge"], column.name, counts), arrays[0]
    return Elements(row, runs(counts * 0, counts), paths, items)


def _fields(fields: list[pa.Array]) -> Elements:
    """Return the fields of each row's user-defined type that are set."""
    is_set = np.array([valid_mask(field) for field in fields]).T
    row, field = np.nonzero(is_set)
    # The concatenated array holds all rows of a field, field after field.
    place = pa.array(field * len(is_set) + row)
    numbers_ = np.arange(len(fields)).astype(">u2")
    paths = pa.Array.from_buffers(pa.binary(2), len(fields), [None, pa.py_buffer(numbers_)]).cast(pa.binary())
    return Elements(row, field, paths.take(pa.array(field)), pa.concat_arrays(fields).take(place))


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
        told = valid_mask(times) & (np.diff(starts) == needed)
        flat = times.values
        values = np.append(np.where(valid_mask(flat), integers(flat), missing), missing)
        places = np.where(told[row], starts[:-1][row] + elements.place, len(values) - 1)
        known_times.append(values[places])
        known &= told[row]
    return known_times[0], known_times[1], known


def tombstone_cells(images: pa.RecordBatch, table: TableSchema) -> tuple[FlatCells, FlatCells]:
    """Return the tombstones that images keep, of cells and of whole multi-cell columns, without dropped columns."""
    tombstones = tombstones_of(images["_merge"])
    columns = [column for column in columns_of(table) if not column.dropped]
    names = pa.array([column.name for column in columns], pa.string())
    number = integers(pc.fill_null(pc.index_in(tombstones.names, names), -1))
    multicell = np.array([column.is_multicell for column in columns] + [False])[number]
    complex_ = multicell & ~valid_mask(tombstones.path)
    simple = np.flatnonzero((number >= 0) & ~complex_)
    take = pa.array(simple)
    cells = cell_array(
        number[simple],
        tombstones.path.take(take),
        pa.nulls(len(simple), pa.binary()),
        integers(tombstones.timestamp)[simple],
        pa.nulls(len(simple), pa.int32()),
        tombstones.local_deletion_time.take(take),
        np.full(len(simple), TOMBSTONE),
    )
    whole = np.flatnonzero(complex_)
    take = pa.array(whole)
    deletions = deletion_array(
        number[whole], tombstones.timestamp.take(take), tombstones.local_deletion_time.take(take)
    )
    return FlatCells(tombstones.row[simple], cells), FlatCells(tombstones.row[whole], deletions)
