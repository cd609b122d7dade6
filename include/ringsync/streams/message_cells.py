"""The values and cells of messages in the Avro writer's form, from row images and from deletions in changes."""

from __future__ import annotations

from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.avro.mapping import AvroMappingError, Mapping, avro_values
from ringsync.changes.flat import FlatCells, together
from ringsync.changes.keys.canonical import canonical_cells, canonical_column, has_aliases
from ringsync.changes.keys.order import path_type
from ringsync.changes.keys.parts import field_numbers
from ringsync.compiled.arrow import Integers, Mask, array_of, integers, list_of, structs_of, valid_mask
from ringsync.cql.cells import Cells, raw_values
from ringsync.cql.codec.decode import decode
from ringsync.cql.identifiers import portable_names
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, UserType
from ringsync.images.merge_column import entries_of, is_placeholder
from ringsync.images.schema import NO_LIVENESS, lake_names
from ringsync.images.times import cell_times
from ringsync.schema.table import Column, TableSchema

_TIMEUUID = Native("timeuuid")


@dataclass(frozen=True)
class Deletions:
    """The deletions of one column's cells.

    :ivar at: deletion time of each row's cell, or of all its cells in a multi-cell column, µs; null: not deleted
    :ivar elements: tombstones of single elements, sorted by row
    """

    at: pa.Array
    elements: FlatCells


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
) -> pa.StructArray:
    """Build the record of key columns by their names in the lake, and ``_x``.

    :param values: values in Avro's form, by CQL name
    :param raw: by CQL name, Cassandra's bytes of values that cannot be decoded, else null
    """
    names = lake_names(table)
    return struct(
        {names[column.name]: values[column.name] for column in columns}
        | {"_x": struct_of_some({names[column.name]: raw[column.name] for column in columns})}
    )


def row_liveness(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Return writetime (µs) and expiry (s) of the rows' own liveness; null: unknown, or none."""
    live = pc.struct_field(batch.column("_row"), "live")
    expires_at = pc.struct_field(batch.column("_merge"), "live_expires_at")
    known = valid_mask(live) & (integers(live) != NO_LIVENESS)
    return array_of(integers(live), known), array_of(integers(expires_at), known & valid_mask(expires_at))


def cells_record(
    batch: pa.RecordBatch,
    table: TableSchema,
    values: AnyMapping[str, pa.Array],
    mapping: Mapping,
    row: dict[str, pa.Array],
    deletions: AnyMapping[str, Deletions],
) -> tuple[pa.StructArray, list[pa.Array]]:
    """Build the record ``Cells`` of every row. Return it with the writetimes of each column that is not a key.

    :param batch: row images
    :param values: values of these images (:func:`column_values`)
    :param row: ``writetime``, ``expires_at`` and ``deleted_at`` of the rows themselves
    :param deletions: deletions by CQL name; columns without deletions may be missing
    """
    names = lake_names(table)
    fields = {"_row": struct_of_some(row)}
    all_writetimes = []
    nothing = Deletions(pa.nulls(len(batch), pa.int64()), together([]))
    for column in table.columns:
        name, value = names[column.name], values[column.name]
        raw = pc.struct_field(batch["_x"], [name, "raw"])
        if column.is_key:
            fields[name] = struct_of_some({"raw": raw})
            continue
        deleted = deletions.get(column.name, nothing)
        present = valid_mask(value) | valid_mask(raw) | valid_mask(deleted.at)
        writetime, expires_at = cell_times(batch, table, column.name)
        all_writetimes.append(writetime)
        if column.is_multicell:
            rows, elements = _live_elements(batch, column, value, batch[name], (writetime, expires_at), mapping)
            if len(deleted.elements.row):
                rows = np.concatenate([rows, deleted.elements.row])
                dead = _deleted_elements(column, deleted.elements, mapping).cast(elements.type)
                # The live elements of a row come before the deleted ones.
                order = np.argsort(rows, kind="stable")
                elements = pa.concat_arrays([elements, dead]).take(array_of(order))
            counts = np.bincount(rows, minlength=len(batch))
            present |= counts > 0
            cell = {"deleted_at": deleted.at, "raw": raw, "elements": list_of(counts, elements, counts > 0)}
        else:
            cell = {"writetime": writetime, "expires_at": expires_at, "deleted_at": deleted.at, "raw": raw}
        fields[name] = struct(cell, present)
    return struct(fields), all_writetimes


def _live_elements(
    batch: pa.RecordBatch,
    column: Column,
    value: pa.Array,
    typed: pa.Array,
    times: tuple[pa.Array, pa.Array],
    mapping: Mapping,
) -> tuple[Integers, pa.StructArray]:
    """Return the row of each element of a column, and its record. Rows with unknown times give none.

    :param value: column in Avro's form (:func:`column_values`); ``typed``: the batch's own column
    :param times: writetimes and expiries of the column
    """
    known = valid_mask(value) & (integers(pc.list_value_length(times[0])) > 0)
    of_known = pa.array(known)
    value = value.filter(of_known)
    counts, identity, chosen = _identities(column.type, value)
    slots = counts if chosen is None else np.full(len(value), len(value.type.fields))
    flat = []
    for lists in (array.filter(of_known) for array in times):
        if (integers(pc.list_value_length(lists)) != slots).any():
            raise ValueError(f"column {column.name!r}: a row has not as many times as elements")
        flat.append(lists.flatten() if chosen is None else lists.flatten().filter(chosen))
    all_counts = np.zeros(len(batch), np.int64)
    all_counts[known] = counts
    if isinstance(column.type, ListType):
        identity = _timeuuids(entries_of(batch["_merge"], column.name, all_counts))
    elif has_aliases(kind := path_type(column.type)):
        _, elements, _ = _identities(column.type, typed.filter(of_known))
        identity = avro_values(kind, mapping, canonical_column(elements, kind))
    return np.repeat(np.arange(len(batch)), all_counts), _elements(identity, writetime=flat[0], expires_at=flat[1])


def _identities(cql_type: CqlType, value: pa.Array) -> tuple[npt.NDArray[np.integer], pa.Array, pa.Array | None]:
    """Return each row's number of elements, each element's identity, and for a UDT which fields are set."""
    if isinstance(cql_type, UserType):
        is_set = np.array([valid_mask(field) for field in value.flatten()]).T
        names = pa.array([field.name for field in value.type], pa.string())
        return is_set.sum(axis=1), names.take(array_of(np.nonzero(is_set)[1])), pa.array(is_set.ravel())
    offsets = integers(value.offsets)
    if pa.types.is_map(value.type):
        items = value.keys
    else:
        items = value.values.field("key") if isinstance(cql_type, MapType) else value.values
    return np.diff(offsets), items[int(offsets[0]) : int(offsets[-1])], None


def _deleted_elements(column: Column, deleted: FlatCells, mapping: Mapping) -> pa.StructArray:
    paths, raw = deleted.path, None
    match column.type:
        case SetType(element=kind) | MapType(key=kind):
            paths = canonical_cells(paths, kind)
            decoded = decode(kind, paths)
            identity, raw = avro_values(kind, mapping, decoded.values), decoded.raw(paths)
        case UserType(field_names=field_names):
            numbers = field_numbers(paths)
            there = (numbers >= 0) & (numbers < len(field_names))
            identity = pa.array(portable_names(field_names), pa.string()).take(array_of(numbers, there))
            raw = raw_values(paths.without(there))
        case _:
            identity = _timeuuids(paths)
    return _elements(identity, deleted_at=array_of(deleted.timestamp), raw=raw)


def _timeuuids(paths: Cells) -> pa.Array:
    """Write the timeuuids of list entries as text, null for unknown ones."""
    return decode(_TIMEUUID, paths.without(is_placeholder(paths))).values


def _elements(
    identity: pa.Array,
    *,
    writetime: pa.Array | None = None,
    expires_at: pa.Array | None = None,
    deleted_at: pa.Array | None = None,
    raw: pa.Array | None = None,
) -> pa.StructArray:
    """Build the records ``Element``; None: null for all of them.

    :param identity: canonical name of each element, the same in all messages
    """
    count = len(identity)
    times = {"writetime": writetime, "expires_at": expires_at, "deleted_at": deleted_at}
    given = {name: pa.nulls(count, pa.int64()) if array is None else array for name, array in times.items()}
    return struct({"identity": identity, **given, "raw": pa.nulls(count, pa.binary()) if raw is None else raw})


def struct(fields: dict[str, pa.Array], present: Mask | None = None) -> pa.StructArray:
    """Build a struct of these fields, null where it is not present."""
    kind = pa.struct([(name, array.type) for name, array in fields.items()])
    return structs_of(kind, list(fields.values()), present)


def struct_of_some(fields: dict[str, pa.Array]) -> pa.StructArray:
    """Build a struct of these fields, null where all of them are."""
    return struct(fields, np.logical_or.reduce([valid_mask(array) for array in fields.values()]))
