"""Change messages: the Avro key and envelope of a table's stream (DESIGN §10), made from row images.

An event id is the digest of what a message says — key, row, cells — and not of how it came about, so that a
repeated read of an unchanged row gives the same id. docs/messages.md shows a whole message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.cql.avro import (
    AvroMappingError,
    Mapping,
    avro_type,
    avro_values,
    nullable_field,
    record,
)
from ringsync.cql.avro_rows import encode_rows
from ringsync.cql.digest import murmur3_128
from ringsync.cql.identifiers import portable_names
from ringsync.cql.types import CqlType, ListType, MapType, SetType, UserType
from ringsync.formats.row_images import cell_times
from ringsync.schema.row_image import lake_names
from ringsync.schema.table import Column, TableSchema

AvroRecord = dict[str, Any]

_NO_WRITETIME = np.iinfo(np.int64).min
_HEAD_FIELDS = 3
"""Envelope fields before ``after``: they hold the event id, so they are encoded when the rest is digested."""


@dataclass(frozen=True)
class Messages:
    """Messages of one table, in order.

    :ivar keys: binary, one Avro datum of :func:`key_schema` each
    :ivar values: binary, one Avro datum of :func:`envelope_schema` each
    :ivar event_ids: fixed_size_binary(16); equal for equal key, row and cells
    """

    keys: pa.Array
    values: pa.Array
    event_ids: pa.Array


def key_schema(table: TableSchema, server: str, mapping: Mapping) -> AvroRecord:
    """The record ``<server>.<keyspace>.<table>.Key``: the primary key columns, nullable.

    Clustering columns are null where the message is about a partition. ``_x`` holds Cassandra's bytes of key
    values that the columns' types cannot express, so that keys of different rows always differ; almost always null.
    """
    namespace, names = _namespace(table, server), lake_names(table)
    keys = table.key_columns
    raw = record("Raw", f"{namespace}.key", [_nullable(names[column.name], "bytes") for column in keys])
    return record("Key", namespace, [*_columns(table, keys, mapping, f"{namespace}.key"), _nullable("_x", raw)])


def envelope_schema(table: TableSchema, server: str, mapping: Mapping) -> AvroRecord:
    """The record ``<server>.<keyspace>.<table>.Envelope`` with ``op, source, ts_ms, after, cells``."""
    namespace = _namespace(table, server)
    source: list[Any] = [
        {"name": "version", "type": "string"},
        {"name": "hostname", "type": "string"},
        _nullable("file", "string"),
        _nullable("pos", "long"),
        _nullable("ts_ms", "long"),
        {"name": "snapshot", "type": "boolean"},
        _nullable("query", "string"),
        _nullable("ts_us", "long"),
        {"name": "token", "type": "long"},
        {"name": "schema_version", "type": "int"},
        {"name": "event_id", "type": "string"},
        {"name": "late", "type": "boolean"},
    ]
    after = record("Value", namespace, _columns(table, table.columns, mapping, f"{namespace}.value"))
    fields: list[Any] = [
        {"name": "op", "type": "string"},
        {"name": "source", "type": record("Source", namespace, source)},
        {"name": "ts_ms", "type": "long"},
        _nullable("after", after),
        _nullable("cells", _cells_schema(table, mapping, namespace)),
    ]
    return record("Envelope", namespace, fields)


def message_schema(key: AvroRecord, value: AvroRecord) -> AvroRecord:
    """Key and value in one record, ``<server>.<keyspace>.<table>.Message``, for streams without keys of their own."""
    fields = [{"name": "key", "type": key}, {"name": "value", "type": value}]
    return record("Message", key["namespace"], fields)


def snapshot_messages(
    batch: pa.RecordBatch,
    table: TableSchema,
    server: str,
    mapping: Mapping,
    *,
    hostname: str,
    processed_at_ms: int,
    schema_version: int,
    version: str,
) -> Messages:
    """One message of op ``r`` for each row image.

    ``source.ts_us`` is the greatest writetime in the row (µs), ``ts_ms`` the same in ms, rounded down; both null
    for a row without cells. ``file``, ``pos`` and ``query`` are null: the row was read, not written.

    :param batch: row images of the table (:func:`ringsync.schema.row_image.row_image_schema`)
    :param hostname: where the row was read, as ``source.hostname``
    :param processed_at_ms: ms since the epoch
    :param schema_version: of the table, as in the schema history
    :param version: of ringsync
    :raises AvroMappingError: a value that mapping ``classic`` cannot express; names the column
    """
    names = lake_names(table)
    values = {column.name: _values(batch, table, column, mapping) for column in table.columns}
    after = _struct({names[name]: array for name, array in values.items()})
    keys = encode_rows(key_schema(table, server, mapping), _keys(batch, table, values))
    cells, ts_us = _cells(batch, table, values)
    envelope = envelope_schema(table, server, mapping)
    tail = {**envelope, "fields": envelope["fields"][_HEAD_FIELDS:]}
    content = encode_rows(tail, _struct({"after": after, "cells": cells}))
    event_ids = _event_ids(_concatenated(keys, content))
    source = {
        "version": pa.repeat(version, len(batch)),
        "hostname": pa.repeat(hostname, len(batch)),
        "file": pa.nulls(len(batch), pa.string()),
        "pos": pa.nulls(len(batch), pa.int64()),
        "ts_ms": _milliseconds(ts_us),
        "snapshot": pa.repeat(True, len(batch)),
        "query": pa.nulls(len(batch), pa.string()),
        "ts_us": ts_us,
        "token": batch.column("token"),
        "schema_version": pa.repeat(pa.scalar(schema_version, pa.int32()), len(batch)),
        "event_id": _hexadecimal(event_ids),
        "late": pa.repeat(False, len(batch)),
    }
    head = {
        "op": pa.repeat("r", len(batch)),
        "source": _struct(source),
        "ts_ms": pa.repeat(processed_at_ms, len(batch)),
    }
    head_schema = {**envelope, "fields": envelope["fields"][:_HEAD_FIELDS]}
    return Messages(keys, _concatenated(encode_rows(head_schema, _struct(head)), content), event_ids)


def _namespace(table: TableSchema, server: str) -> str:
    """``<server>.<keyspace>.<table>`` made of names that Avro allows; dots in the server's name part it."""
    parts = [*server.split("."), table.keyspace, table.name]
    if not all(parts):
        raise ValueError(f"server name {server!r}: every part between dots must have a letter or digit")
    return ".".join(portable_names([part])[0] for part in parts)


def _nullable(name: str, avro: Any) -> AvroRecord:
    return nullable_field(name, name, avro)


def _columns(table: TableSchema, columns: tuple[Column, ...], mapping: Mapping, path: str) -> list[AvroRecord]:
    names = lake_names(table)
    return [
        nullable_field(names[c.name], c.name, avro_type(c.type, mapping, f"{path}.{names[c.name]}")) for c in columns
    ]


def _cells_schema(table: TableSchema, mapping: Mapping, namespace: str) -> AvroRecord:
    """The record ``Cells``: ``_row`` and one field per column. Scalars share the record ``Cell``."""
    names = lake_names(table)
    times: list[Any] = [_nullable(name, "long") for name in ("writetime", "expires_at", "deleted_at")]
    once = {
        "KeyCell": record("KeyCell", namespace, [_nullable("raw", "bytes")]),
        "Cell": record("Cell", namespace, [*times, _nullable("raw", "bytes")]),
    }
    fields = [_nullable("_row", record("Row", namespace, times))]
    for column in table.columns:
        name, path = names[column.name], f"{namespace}.cells.{names[column.name]}"
        if column.is_multicell:
            element = record("Element", path, [_identity(column.type, mapping, path), *times])
            elements = _nullable("elements", {"type": "array", "items": element})
            avro: Any = record("Cells", path, [_nullable("deleted_at", "long"), _nullable("raw", "bytes"), elements])
        else:
            # Defined where it is first used, named afterwards.
            shared = "KeyCell" if column.is_key else "Cell"
            avro = once.pop(shared, f"{namespace}.{shared}")
        fields.append(nullable_field(name, column.name, avro))
    return record("Cells", namespace, fields)


def _identity(cql_type: CqlType, mapping: Mapping, path: str) -> AvroRecord:
    """What tells an element from the others of its collection or UDT."""
    match cql_type:
        case SetType(element):
            return {"name": "identity", "type": avro_type(element, mapping, f"{path}.identity")}
        case MapType(key):
            return {"name": "identity", "type": avro_type(key, mapping, f"{path}.identity")}
        case UserType():
            return {"name": "identity", "type": "string"}
    return _nullable("identity", {"type": "string", "logicalType": "uuid"})


def _values(batch: pa.RecordBatch, table: TableSchema, column: Column, mapping: Mapping) -> pa.Array:
    try:
        return avro_values(column.type, mapping, batch.column(lake_names(table)[column.name]))
    except AvroMappingError as error:
        raise AvroMappingError(f"table {table.full_name}, column {column.name!r}: {error}") from error


def _keys(batch: pa.RecordBatch, table: TableSchema, values: dict[str, pa.Array]) -> pa.Array:
    names = lake_names(table)
    raw = {names[column.name]: _raw(batch, names[column.name]) for column in table.key_columns}
    has_raw = _any([array.is_valid() for array in raw.values()])
    fields = {names[column.name]: values[column.name] for column in table.key_columns}
    return _struct({**fields, "_x": _struct(raw, present=has_raw)})


def _cells(batch: pa.RecordBatch, table: TableSchema, values: dict[str, pa.Array]) -> tuple[pa.Array, pa.Array]:
    """The record ``Cells`` of every row, and every row's greatest writetime (µs, null: none)."""
    names = lake_names(table)
    unknown = pa.nulls(len(batch), pa.int64())
    deleted_at, live = (pc.struct_field(batch.column("_row"), name) for name in ("deleted_at", "live"))
    row = {"writetime": live, "expires_at": unknown, "deleted_at": deleted_at}
    fields = {"_row": _struct(row, present=_any([live.is_valid(), deleted_at.is_valid()]))}
    greatest = _greatest(live, live.is_valid())
    for column in table.columns:
        name, value = names[column.name], values[column.name]
        raw = _raw(batch, name)
        if column.is_key:
            fields[name] = _struct({"raw": raw}, present=raw.is_valid())
            continue
        present = pc.or_(value.is_valid(), raw.is_valid())
        writetime, expires_at = cell_times(batch, table, column.name)
        greatest = np.maximum(greatest, _greatest(writetime, present))
        if column.is_multicell:
            elements = _elements(column, value, writetime, expires_at)
            cell = {"deleted_at": unknown, "raw": raw, "elements": elements}
        else:
            cell = {"writetime": writetime, "expires_at": expires_at, "deleted_at": unknown, "raw": raw}
        fields[name] = _struct(cell, present=present)
    return _struct(fields), pa.array(greatest, mask=greatest == _NO_WRITETIME)


def _elements(column: Column, value: pa.Array, writetime: pa.Array, expires_at: pa.Array) -> pa.Array:
    """The elements of a multi-cell column, each with its times; null where the times are not known.

    :param value: the column as :func:`avro_values` gives it
    """
    known = pc.and_(value.is_valid(), pc.greater(pc.fill_null(pc.list_value_length(writetime), 0), 0))
    value, times = value.filter(known), [array.filter(known) for array in (writetime, expires_at)]
    counts, identity, chosen = _identities(column.type, value)
    slots = counts if chosen is None else np.full(len(value), len(value.type.fields))
    for array in times:
        if (pc.list_value_length(array).to_numpy(zero_copy_only=False) != slots).any():
            raise ValueError(f"column {column.name!r}: a row's times are not as many as its elements")
    flat = [array.flatten() for array in times]
    if chosen is not None:
        flat = [array.filter(chosen) for array in flat]
    entries = {
        "identity": identity,
        "writetime": flat[0],
        "expires_at": flat[1],
        "deleted_at": pa.nulls(len(identity), pa.int64()),
    }
    every_count = np.zeros(len(known), np.int32)
    every_count[known.to_numpy(zero_copy_only=False)] = counts
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(every_count, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), _struct(entries), mask=pc.invert(known))


def _identities(cql_type: CqlType, value: pa.Array) -> tuple[npt.NDArray[np.int32], pa.Array, pa.Array | None]:
    """Per row the number of elements; the identity of each; for a UDT, which of all its fields are set."""
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
    items = items[int(offsets[0]) : int(offsets[-1])]
    return counts, pa.nulls(len(items), pa.string()) if isinstance(cql_type, ListType) else items, None


def _raw(batch: pa.RecordBatch, name: str) -> pa.Array:
    return pc.struct_field(batch.column("_x"), [name, "raw"])


def _greatest(writetime: pa.Array, present: pa.Array) -> npt.NDArray[np.int64]:
    """Per row the greatest writetime of a column's cells, or _NO_WRITETIME."""
    if not pa.types.is_list(writetime.type):
        return _numbers(pc.if_else(present, writetime, None))
    found = np.full(len(writetime), _NO_WRITETIME)
    lengths = pc.fill_null(pc.list_value_length(writetime), 0).to_numpy(zero_copy_only=False)
    times = _numbers(writetime.flatten())
    if len(times):
        starts = np.cumsum(lengths) - lengths
        found[lengths > 0] = np.maximum.reduceat(times, starts[lengths > 0])
    found[~present.to_numpy(zero_copy_only=False)] = _NO_WRITETIME
    return found


def _numbers(values: pa.Array) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = pc.fill_null(values, int(_NO_WRITETIME)).to_numpy(zero_copy_only=False)
    return numbers


def _milliseconds(micros: pa.Array) -> pa.Array:
    """Microseconds to milliseconds, rounded down."""
    return pa.array(_numbers(micros) // 1000, mask=micros.is_null().to_numpy(zero_copy_only=False))


def _struct(fields: dict[str, pa.Array], present: pa.Array | None = None) -> pa.Array:
    mask = None if present is None else pc.invert(present)
    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields), mask=mask)


def _any(conditions: list[pa.Array]) -> pa.Array:
    """Row by row: whether one of the conditions holds."""
    found = conditions[0]
    for condition in conditions[1:]:
        found = pc.or_(found, condition)
    return found


def _concatenated(first: pa.Array, second: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(first, second, b"")


def _event_ids(content: pa.Array) -> pa.Array:
    halves = np.stack(murmur3_128(content), axis=1).astype(">i8")
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(content), [None, pa.py_buffer(halves)])


def _hexadecimal(event_ids: pa.Array) -> pa.Array:
    """16 bytes as 32 digits."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    data = np.frombuffer(event_ids.buffers()[1], np.uint8)
    text = digits[np.stack([data >> 4, data & 15], axis=1)]
    offsets = np.arange(len(event_ids) + 1, dtype=np.int32) * 32
    return pa.StringArray.from_buffers(len(event_ids), pa.py_buffer(offsets), pa.py_buffer(text))
