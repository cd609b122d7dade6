"""The values and cells of messages in the Avro writer's form, from row images and from deletions in changes."""

from __future__ import annotations

from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.avro.mapping import AvroMappingError, Mapping, avro_values
from ringsync.changes.keys.canonical import canonical_cells, canonical_column, has_aliases
from ringsync.changes.keys.order import path_type
from ringsync.compiled.arrow import Integers
from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.cql.codec.decode import Decoded, decode
from ringsync.cql.identifiers import portable_names
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, UserType
from ringsync.images.schema import NO_LIVENESS, lake_names
from ringsync.images.times import cell_times
from ringsync.schema.table import Column, TableSchema

_TIMEUUID = Native("timeuuid")


@dataclass(frozen=True)
class Deletions:
    """The deletions of one column's cells.

    :ivar at: deletion time of each row's cell, or of all its cells in a multi-cell column, µs; null: not deleted
    :ivar rows: row of each deleted single element, ascending
    :ivar paths: binary, Cassandra's cell path of each deleted element
    :ivar times: deletion time of each deleted element, µs
    """

    at: pa.Array
    rows: Integers
    paths: pa.Array
    times: pa.Array


@dataclass(frozen=True)
class ColumnTimes:
    """The writetimes of a column's cells by row (int64 µs, or lists of them), and which rows have a cell."""

    writetimes: pa.Array
    present: pa.Array


@dataclass(frozen=True)
class _Elements:
    """The elements of a multi-cell column, grouped by row; each array has one entry per element.

    :ivar identity: canonical name of the element, the same in all messages
    """

    rows: Integers
    identity: pa.Array
    writetime: pa.Array
    expires_at: pa.Array
    deleted_at: pa.Array
    raw: pa.Array


def column_values(batch: pa.RecordBatch, table: TableSchema, mapping: Mapping) -> dict[str, pa.Array]:
    """Convert the columns of row images to Avro's form, by CQL name.

    :raises AvroMappingError: the mapping cannot express a value; the message names the column
    """
    names = lake_names(table)
    return {c.name: mapped(batch.column(names[c.name]), table, c, mapping) for c in table.columns}


def mapped(values: pa.Array, table: TableSchema, column: Column, mapping: Mapping) -> pa.Array:
    """Convert values of a column, or of the column's type, to Avro's form.

    :raises AvroMappingError: the mapping cannot express a value; the message names the column
    """
    try:
        return avro_values(column.type, mapping, values)
    except AvroMappingError as error:
        raise AvroMappingError(f"table {table.full_name}, column {column.name!r}: {error}") from error


def key_record(
    table: TableSchema, columns: tuple[Column, ...], values: AnyMapping[str, pa.Array], raw: AnyMapping[str, pa.Array]
) -> dict[str, pa.Array]:
    """Return the key columns by their names in the lake, and ``_x``.

    :param values: values in Avro's form, by CQL name
    :param raw: by CQL name, Cassandra's bytes of values that cannot be decoded, else null
    """
    names = lake_names(table)
    bytes_ = {names[column.name]: raw[column.name] for column in columns}
    present = any_of([array.is_valid() for array in bytes_.values()])
    return {**{names[column.name]: values[column.name] for column in columns}, "_x": struct(bytes_, present)}


def raw_of(decoded: Decoded, cells: Cells) -> pa.Array:
    """Return the bytes of cells that could not be decoded, else null."""
    if decoded.misfits is None:
        return pa.nulls(len(cells), pa.binary())
    return raw_values(cells.without(~decoded.misfits))


def raw_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column's raw bytes in row images.

    :param name: name of the column in the lake
    """
    return pc.struct_field(batch.column("_x"), [name, "raw"])


def row_liveness(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Return writetime (µs) and expiry (s) of the rows' own liveness; null: unknown, or none."""
    live = pc.struct_field(batch.column("_row"), "live")
    live = pc.if_else(pc.equal(live, NO_LIVENESS), pa.scalar(None, pa.int64()), live)
    expires_at = pc.struct_field(batch.column("_merge"), "live_expires_at")
    return live, pc.if_else(live.is_valid(), expires_at, pa.scalar(None, pa.int64()))


def cells_record(
    batch: pa.RecordBatch,
    table: TableSchema,
    values: AnyMapping[str, pa.Array],
    mapping: Mapping,
    row: AnyMapping[str, pa.Array],
    deletions: AnyMapping[str, Deletions],
) -> tuple[pa.Array, list[ColumnTimes]]:
    """Build the record ``Cells`` of every row, and return the writetimes in it.

    :param batch: row images
    :param values: values of these images (:func:`column_values`)
    :param row: ``writetime``, ``expires_at`` and ``deleted_at`` of the rows themselves
    :param deletions: deletions by CQL name; columns without deletions may be missing
    """
    names = lake_names(table)
    fields = {"_row": struct(dict(row), any_of([array.is_valid() for array in row.values()]))}
    times = []
    nothing = Deletions(
        pa.nulls(len(batch), pa.int64()), np.empty(0, np.int64), pa.nulls(0, pa.binary()), pa.nulls(0, pa.int64())
    )
    for column in table.columns:
        name, value = names[column.name], values[column.name]
        raw = raw_column(batch, name)
        if column.is_key:
            fields[name] = struct({"raw": raw}, raw.is_valid())
            continue
        deleted = deletions.get(column.name, nothing)
        held = pc.or_(value.is_valid(), raw.is_valid())
        present = pc.or_(held, deleted.at.is_valid())
        writetime, expires_at = cell_times(batch, table, column.name)
        times.append(ColumnTimes(writetime, held))
        if column.is_multicell:
            live = _live_elements(batch, column, value, batch.column(name), (writetime, expires_at), mapping)
            every = _together(live, _deleted_elements(column, deleted, mapping)) if len(deleted.rows) else live
            elements = _listed(every, len(batch))
            cell = {"deleted_at": deleted.at, "raw": raw, "elements": elements}
            present = pc.or_(present, elements.is_valid())
        else:
            cell = {"writetime": writetime, "expires_at": expires_at, "deleted_at": deleted.at, "raw": raw}
        fields[name] = struct(cell, present)
    return struct(fields), times


def _live_elements(
    batch: pa.RecordBatch,
    column: Column,
    value: pa.Array,
    typed: pa.Array,
    all_times: tuple[pa.Array, pa.Array],
    mapping: Mapping,
) -> _Elements:
    """List a column's elements with their times; rows with unknown times give none.

    :param value: column in Avro's form (:func:`column_values`); ``typed``: the batch's own column
    :param all_times: writetimes and expiries of the column
    """
    known = pc.and_(value.is_valid(), pc.greater(pc.fill_null(pc.list_value_length(all_times[0]), 0), 0))
    rows = np.flatnonzero(known.to_numpy(zero_copy_only=False))
    value, times = value.filter(known), [array.filter(known) for array in all_times]
    counts, identity, chosen = _identities(column.type, value)
    slots = counts if chosen is None else np.full(len(value), len(value.type.fields))
    for array in times:
        if (pc.list_value_length(array).to_numpy(zero_copy_only=False) != slots).any():
            raise ValueError(f"column {column.name!r}: a row has not as many times as elements")
    flat = [array.flatten() for array in times]
    if chosen is not None:
        flat = [array.filter(chosen) for array in flat]
    row_of = np.repeat(rows, counts)
    if isinstance(column.type, ListType):
        identity = _entry_names(batch, column, rows, counts)
    elif has_aliases(kind := path_type(column.type)):
        _, elements, _ = _identities(column.type, typed.filter(known))
        identity = avro_values(kind, mapping, canonical_column(elements, kind))
    nothing = pa.nulls(len(row_of), pa.int64())
    return _Elements(row_of, identity, flat[0], flat[1], nothing, pa.nulls(len(row_of), pa.binary()))


def _identities(cql_type: CqlType, value: pa.Array) -> tuple[npt.NDArray[np.int32], pa.Array, pa.Array | None]:
    """Return each row's number of elements, each element's identity, and for a UDT which fields are set."""
    if isinstance(cql_type, UserType):
        is_set = np.array([value.field(i).is_valid().to_numpy(zero_copy_only=False) for i in range(len(value.type))])
        names = pa.array([field.name for field in value.type], pa.string())
        field_index = np.tile(np.arange(len(names)), len(value))[is_set.T.ravel()]
        return is_set.sum(axis=0, dtype=np.int32), names.take(pa.array(field_index)), pa.array(is_set.T.ravel())
    offsets = value.offsets.to_numpy()
    counts = np.diff(offsets)
    if pa.types.is_map(value.type):
        items = value.keys
    else:
        items = value.values.field("key") if isinstance(cql_type, MapType) else value.values
    return counts, items[int(offsets[0]) : int(offsets[-1])], None


def _entry_names(batch: pa.RecordBatch, column: Column, rows: Integers, counts: npt.NDArray[np.int32]) -> pa.Array:
    """Return the timeuuids of a list column's entries as text, null where the row images do not know them.

    :param rows: rows whose entries are wanted; ``counts``: number of entries of each
    """
    entries = pc.struct_field(batch.column("_merge"), "entries")
    sizes = pc.fill_null(pc.list_value_length(entries), 0).to_numpy(zero_copy_only=False)
    flat = entries.flatten()
    of_column = np.flatnonzero(
        pc.fill_null(pc.equal(flat.field("column"), column.name), False).to_numpy(zero_copy_only=False)
    )
    row_of = np.repeat(np.arange(len(batch)), sizes)[of_column]
    place_of_row = np.full(len(batch), -1)
    place_of_row[row_of] = np.arange(len(of_column))
    paths = flat.field("paths").take(pa.array(of_column))
    lengths = pc.fill_null(pc.list_value_length(paths), 0).to_numpy(zero_copy_only=False)
    places = place_of_row[rows]
    known = places >= 0
    known[known] = lengths[places[known]] == counts[known]
    starts = np.cumsum(lengths) - lengths
    # Where the first entry of each row is among all paths; 0 if its entries are not known.
    first = np.where(known, starts[np.where(known, places, 0)] if len(starts) else 0, 0)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    index = pa.array(np.repeat(first, counts) + within, mask=~np.repeat(known, counts))
    return _timeuuids(paths.flatten().take(index))


def _deleted_elements(column: Column, deleted: Deletions, mapping: Mapping) -> _Elements:
    cells = cells_of(deleted.paths)
    raw = pa.nulls(len(cells), pa.binary())
    match column.type:
        case SetType(element=kind) | MapType(key=kind):
            cells = canonical_cells(cells, kind)
            decoded = decode(kind, cells)
            identity, raw = avro_values(kind, mapping, decoded.values), raw_of(decoded, cells)
        case UserType() as kind:
            identity, raw = _field_names(kind, deleted.paths, cells)
        case _:
            identity = _timeuuids(deleted.paths)
    nothing = pa.nulls(len(cells), pa.int64())
    return _Elements(deleted.rows, identity, nothing, nothing, deleted.times, raw)


def _timeuuids(paths: pa.Array) -> pa.Array:
    """Write the timeuuids of list entries as text; null for version 0, which stands for an unknown one."""
    texts = decode(_TIMEUUID, cells_of(paths)).values
    unknown = pc.equal(pc.utf8_slice_codeunits(texts, 14, 15), "0")
    return pc.if_else(unknown, pa.scalar(None, pa.string()), texts)


def _field_names(kind: UserType, paths: pa.Array, cells: Cells) -> tuple[pa.Array, pa.Array]:
    """Return names of a UDT's fields from their int16 numbers, and the numbers of fields that do not exist."""
    numbers = decode(Native("smallint"), cells).values
    count = len(kind.field_names)
    there = pc.fill_null(pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, count)), False)
    names = pa.array(portable_names(kind.field_names), pa.string())
    nowhere = pa.scalar(None, pa.binary())
    return names.take(pc.if_else(there, numbers, None)), pc.if_else(there, nowhere, paths)


def _together(live: _Elements, deleted: _Elements) -> _Elements:
    """Join the elements of each row: first the live ones, then the deleted ones."""
    rows = np.concatenate([live.rows, deleted.rows])
    order = np.argsort(rows, kind="stable")
    arrays = [
        pa.concat_arrays([alive, dead.cast(alive.type)]).take(pa.array(order))
        for alive, dead in (
            (live.identity, deleted.identity),
            (live.writetime, deleted.writetime),
            (live.expires_at, deleted.expires_at),
            (live.deleted_at, deleted.deleted_at),
            (live.raw, deleted.raw),
        )
    ]
    return _Elements(rows[order], *arrays)


def _listed(elements: _Elements, count: int) -> pa.Array:
    """Make a list of each row's elements, null if there are none."""
    counts = np.bincount(elements.rows, minlength=count)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    entries = {
        "identity": elements.identity,
        "writetime": elements.writetime,
        "expires_at": elements.expires_at,
        "deleted_at": elements.deleted_at,
        "raw": elements.raw,
    }
    return pa.ListArray.from_arrays(pa.array(offsets), struct(entries), mask=pa.array(counts == 0))


def struct(fields: dict[str, pa.Array], present: pa.Array | None = None) -> pa.Array:
    """Build a struct of these fields, null where it is not present."""
    mask = None if present is None else pc.invert(present)
    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields), mask=mask)


def any_of(conditions: list[pa.Array]) -> pa.Array:
    """Tell for each row whether one of the conditions holds."""
    holds = conditions[0]
    for condition in conditions[1:]:
        holds = pc.or_(holds, condition)
    return holds
