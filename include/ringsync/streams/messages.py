"""Messages of a table's stream: the Avro schemas of key and envelope, and the messages of rows that a scan read.

The event id of such a message is the digest of its key, row and cells, not of the circumstances of the read. So
reading an unchanged row again gives the same id. docs/messages.md shows whole messages;
:mod:`ringsync.streams.change_messages` makes the messages of changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import ringsync
from ringsync.avro.mapping import AvroRecord, Mapping, avro_type, nullable_field, record
from ringsync.avro.rows import encode_rows
from ringsync.changes.batch import fixed16_array
from ringsync.changes.keys.canonical import canonical_column, has_aliases
from ringsync.compiled.arrow import Integers, Mask, array_of, filled, integers, rows_of_lists, valid_mask
from ringsync.cql.identifiers import portable_names
from ringsync.cql.murmur3 import murmur3_128
from ringsync.cql.types import CqlType, MapType, SetType, UserType
from ringsync.images.schema import every_lake_name, lake_names
from ringsync.schema.table import Column, TableSchema
from ringsync.streams.message_cells import cells_record, column_values, key_record, mapped, row_liveness, struct

_NO_WRITETIME = -(2**63)


@dataclass(frozen=True)
class Messages:
    """Messages of one table, in order.

    :ivar keys: binary, one Avro datum of :func:`key_schema` each
    :ivar values: binary, one Avro datum of :func:`envelope_schema` each
    :ivar event_ids: fixed_size_binary(16); a message that is made again has the same event id
    """

    keys: pa.Array
    values: pa.Array
    event_ids: pa.Array


def key_schema(table: TableSchema, server: str, mapping: Mapping) -> AvroRecord:
    """Build the record ``<server>.<keyspace>.<table>.Key``: the primary key columns, nullable.

    Clustering columns are canonical (:mod:`ringsync.changes.keys.canonical`), so that a row has one key. They are null
    if the message is about a partition. ``_x`` holds Cassandra's bytes of key values that the columns' types cannot
    express, so that keys of different rows always differ; it is almost always null.
    """
    namespace = _namespace(table, server)
    return record("Key", namespace, _key_columns(table, table.key_columns, mapping, f"{namespace}.key"))


def envelope_schema(table: TableSchema, server: str, mapping: Mapping) -> AvroRecord:
    """Build the record ``<server>.<keyspace>.<table>.Envelope``: ``op, source, ts_ms, range, before, after, cells``.

    A table without clustering columns has no ``range``.
    """
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
        _nullable("table_id", "string"),
    ]
    row = record("Value", namespace, _columns(table, table.columns, mapping, f"{namespace}.value"))
    fields: list[Any] = [
        {"name": "op", "type": "string"},
        {"name": "source", "type": record("Source", namespace, source)},
        {"name": "ts_ms", "type": "long"},
        *([_nullable("range", _range_schema(table, mapping, namespace))] if table.clustering else []),
        # Avro defines a record at its first use and names it afterwards.
        _nullable("before", row),
        _nullable("after", f"{namespace}.Value"),
        _nullable("cells", _cells_schema(table, mapping, namespace)),
    ]
    return record("Envelope", namespace, fields)


def message_schema(key: AvroRecord, value: AvroRecord) -> AvroRecord:
    """Join key and value in one record, ``<server>.<keyspace>.<table>.Message``, for streams without separate keys."""
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
    queries: pa.Array | None = None,
) -> Messages:
    """Make one message of op ``r`` for each row image.

    ``source.ts_us`` is the greatest writetime in the row (µs), ``ts_ms`` the same in ms, rounded down; both are null
    for a row without cells. ``file`` and ``pos`` are null: a scan read the row, not a commit log.

    :param batch: row images of the table (:func:`ringsync.images.schema.row_image_schema`)
    :param hostname: host that was read, for ``source.hostname``
    :param processed_at_ms: time of processing, ms since the epoch
    :param schema_version: version of the table's schema in the schema history
    :param queries: ``source.query`` of each row; None: null
    :raises AvroMappingError: mapping ``classic`` cannot express a value; the message names the column
    """
    values = column_values(batch, table, mapping)
    keys = encode_rows(key_schema(table, server, mapping), _keys(batch, table, values, mapping))
    live, expires_at = row_liveness(batch)
    deleted_at = pc.struct_field(batch.column("_row"), "deleted_at")
    row = {"writetime": live, "expires_at": expires_at, "deleted_at": deleted_at}
    cells, writetimes = cells_record(batch, table, values, mapping, row, {})
    content = encode_content(envelope_schema(table, server, mapping), row_record(table, values), cells)
    event_ids = fixed16_array(
        np.stack(murmur3_128(pc.binary_join_element_wise(keys, content, b"")), axis=1).astype(">i8")
    )
    ts_us = _greatest(live, writetimes)
    count = len(batch)
    source = {
        "version": pa.repeat(ringsync.__version__, count),
        "hostname": pa.repeat(hostname, count),
        "file": pa.nulls(count, pa.string()),
        "pos": pa.nulls(count, pa.int64()),
        "ts_ms": milliseconds(ts_us),
        "snapshot": pa.repeat(True, count),
        "query": pa.nulls(count, pa.string()) if queries is None else queries,
        "ts_us": ts_us,
        "token": batch.column("token"),
        "schema_version": pa.repeat(pa.scalar(schema_version, pa.int32()), count),
        "event_id": hexadecimal(event_ids),
        "late": pa.repeat(False, count),
        "table_id": pa.repeat(table.table_id, count),
    }
    head = {
        "op": pa.repeat("r", count),
        "source": struct(source),
        "ts_ms": pa.repeat(processed_at_ms, count),
        "range": pa.nulls(count),
        "before": pa.nulls(count),
    }
    return Messages(keys, encode_head(envelope_schema(table, server, mapping), head, content), event_ids)


def row_record(table: TableSchema, values: dict[str, pa.Array], present: Mask | None = None) -> pa.Array:
    """Build the field ``after`` or ``before``: all columns by their names in the lake, null where it is not present."""
    names = lake_names(table)
    return struct({names[name]: array for name, array in values.items()}, present)


def encode_content(envelope: AvroRecord, after: pa.Array, cells: pa.Array) -> pa.Array:
    """Encode the last fields of envelopes, ``after`` and ``cells``: the content of a row."""
    types = {field["name"]: field["type"] for field in envelope["fields"]}
    fields = [{"name": "after", "type": types["before"]}, {"name": "cells", "type": types["cells"]}]
    return encode_rows({**envelope, "fields": fields}, struct({"after": after, "cells": cells}))


def encode_head(envelope: AvroRecord, head: dict[str, pa.Array], content: pa.Array) -> pa.Array:
    """Encode the first fields of envelopes and append the content.

    :param head: first fields, by name
    :param content: result of :func:`encode_content`
    """
    content_begins = [field["name"] for field in envelope["fields"]].index("after")
    fields = envelope["fields"][:content_begins]
    return pc.binary_join_element_wise(encode_rows({**envelope, "fields": fields}, struct(head)), content, b"")


def _namespace(table: TableSchema, server: str) -> str:
    """Make ``<server>.<keyspace>.<table>`` of names that Avro allows; dots divide the server's name."""
    parts = [*server.split("."), table.keyspace, table.name]
    if not all(parts):
        raise ValueError(f"server name {server!r}: every part between dots must have a letter or digit")
    return ".".join(portable_names([part])[0] for part in parts)


def _nullable(name: str, avro: Any) -> AvroRecord:
    return nullable_field(name, name, avro)


def _key_columns(table: TableSchema, keys: tuple[Column, ...], mapping: Mapping, path: str) -> list[AvroRecord]:
    """Build the fields of key columns, and ``_x`` for values that the columns' types cannot express."""
    names, aliases = lake_names(table), _aliases(table)
    raw_fields = (names[column.name] for column in keys)
    raw = record("Raw", path, [nullable_field(name, name, "bytes", aliases.get(name, ())) for name in raw_fields])
    return [*_columns(table, keys, mapping, path), _nullable("_x", raw)]


def _columns(table: TableSchema, columns: tuple[Column, ...], mapping: Mapping, path: str) -> list[AvroRecord]:
    names, aliases = lake_names(table), _aliases(table)
    return [
        nullable_field(name, c.name, avro_type(c.type, mapping, f"{path}.{name}"), aliases.get(name, ()))
        for c in columns
        for name in [names[c.name]]
    ]


def _aliases(table: TableSchema) -> dict[str, list[str]]:
    """Return the former names of renamed key columns, by their present names. A name that another column has is none:
    readers would take its values for the key's."""
    every, taken = every_lake_name(table), set(lake_names(table).values())
    found = {}
    for column, former in zip(table.key_columns, table.former_keys, strict=False):
        if earlier := [every[label] for label in dict.fromkeys(former) if every[label] not in taken]:
            found[every[table.label(column.name)]] = earlier
    return found


def _cells_schema(table: TableSchema, mapping: Mapping, namespace: str) -> AvroRecord:
    """Build the record ``Cells``: ``_row`` and one field per column. Scalars share the record ``Cell``."""
    names, aliases = lake_names(table), _aliases(table)
    times: list[Any] = [_nullable(name, "long") for name in ("writetime", "expires_at", "deleted_at")]
    once = {
        "KeyCell": record("KeyCell", namespace, [_nullable("raw", "bytes")]),
        "Cell": record("Cell", namespace, [*times, _nullable("raw", "bytes")]),
    }
    fields = [_nullable("_row", record("Row", namespace, times))]
    for column in table.columns:
        name, path = names[column.name], f"{namespace}.cells.{names[column.name]}"
        if column.is_multicell:
            identity = _nullable("identity", _identity(column.type, mapping, path))
            element = record("Element", path, [identity, *times, _nullable("raw", "bytes")])
            elements = _nullable("elements", {"type": "array", "items": element})
            avro: Any = record("Cells", path, [_nullable("deleted_at", "long"), _nullable("raw", "bytes"), elements])
        else:
            # Avro defines a record at its first use and names it afterwards.
            shared = "KeyCell" if column.is_key else "Cell"
            avro = once.pop(shared, f"{namespace}.{shared}")
        fields.append(nullable_field(name, column.name, avro, aliases.get(name, ())))
    return record("Cells", namespace, fields)


def _identity(cql_type: CqlType, mapping: Mapping, path: str) -> Any:
    """Return the Avro type of what distinguishes the elements of a collection or UDT."""
    match cql_type:
        case SetType(element):
            return avro_type(element, mapping, f"{path}.identity")
        case MapType(key):
            return avro_type(key, mapping, f"{path}.identity")
        case UserType():
            return "string"
    return {"type": "string", "logicalType": "uuid"}


def _range_schema(table: TableSchema, mapping: Mapping, namespace: str) -> AvroRecord:
    """Build the record ``Range``: two bounds, each with as many of the first clustering columns as count."""
    path = f"{namespace}.range"
    clustering = record("Clustering", path, _key_columns(table, table.clustering, mapping, path))
    bound = record(
        "Bound",
        path,
        [
            {"name": "clustering", "type": clustering},
            {"name": "columns", "type": "int"},
            {"name": "inclusive", "type": "boolean"},
        ],
    )
    return record("Range", path, [{"name": "start", "type": bound}, {"name": "end", "type": f"{path}.Bound"}])


def _keys(batch: pa.RecordBatch, table: TableSchema, values: dict[str, pa.Array], mapping: Mapping) -> pa.Array:
    names = lake_names(table)
    raw = {column.name: pc.struct_field(batch["_x"], [names[column.name], "raw"]) for column in table.key_columns}
    canonical = {
        column.name: mapped(canonical_column(batch[names[column.name]], column.type), table, column, mapping)
        for column in table.clustering
        if has_aliases(column.type)
    }
    return key_record(table, table.key_columns, {**values, **canonical}, raw)


def _greatest(live: pa.Array, writetimes: list[pa.Array]) -> pa.Array:
    """Return the greatest writetime of each row, µs; null: none."""
    greatest = filled(live, _NO_WRITETIME)
    for of_column in writetimes:
        np.maximum(greatest, _greatest_of(of_column), out=greatest)
    return array_of(greatest, greatest != _NO_WRITETIME)


def _greatest_of(writetimes: pa.Array) -> Integers:
    """Return the greatest writetime of a column's cells in each row, or _NO_WRITETIME."""
    if not pa.types.is_list(writetimes.type):
        return filled(writetimes, _NO_WRITETIME)
    greatest = np.full(len(writetimes), _NO_WRITETIME)
    rows, times = rows_of_lists(writetimes)
    np.maximum.at(greatest, rows, filled(times, _NO_WRITETIME))
    return greatest


def milliseconds(micros: pa.Array) -> pa.Array:
    """Convert microseconds to milliseconds, rounded down."""
    return array_of(integers(micros) // 1000, valid_mask(micros))


def hexadecimal(event_ids: pa.Array) -> pa.Array:
    """Write 16 bytes as 32 hexadecimal digits."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    data = np.frombuffer(event_ids.buffers()[1], np.uint8)[16 * event_ids.offset :][: 16 * len(event_ids)]
    text = digits[np.stack([data >> 4, data & 15], axis=1)]
    offsets = np.arange(len(event_ids) + 1, dtype=np.int32) * 32
    return pa.StringArray.from_buffers(len(event_ids), pa.py_buffer(offsets), pa.py_buffer(text))
