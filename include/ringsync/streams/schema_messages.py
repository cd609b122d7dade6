"""Schema-change messages: the topic ``<server>``, one message for each statement. docs/messages.md shows them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from ringsync.avro.mapping import AvroRecord, nullable_field, record
from ringsync.avro.rows import encode_rows
from ringsync.cql.identifiers import portable_names
from ringsync.schema.whole_to_cql import Statement
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, StreamConflictError
from ringsync.streams.messages import Messages

FORM = 1
"""Version of the schemas of key and value."""

TOKEN = 0
"""``source.token`` of all messages: so all are in one partition of Kafka, in order."""


def schema_change_schemas(server: str) -> tuple[AvroRecord, AvroRecord]:
    """Build the records ``<server>.SchemaChangeKey`` and ``<server>.SchemaChangeValue``."""
    namespace = ".".join(portable_names([part])[0] for part in server.split("."))
    keyspace: AvroRecord = {"name": "keyspace", "type": "string"}
    source: list[Any] = [
        {"name": "version", "type": "string"},
        {"name": "hostname", "type": "string"},
        {"name": "ts_ms", "type": "long"},
        {"name": "snapshot", "type": "boolean"},
        {"name": "token", "type": "long"},
        {"name": "schema_version", "type": "int"},
        {"name": "event_id", "type": "string"},
        {"name": "change", "type": "long"},
        nullable_field("tables", "tables", {"type": "map", "values": "int"}),
    ]
    value: list[Any] = [
        keyspace,
        {"name": "ddl", "type": "string"},
        {"name": "source", "type": record("Source", namespace, source)},
    ]
    return record("SchemaChangeKey", namespace, [keyspace]), record("SchemaChangeValue", namespace, value)


def publish_schema_change(
    store: ObjectStore,
    server: str,
    number: int,
    statements: Sequence[Statement],
    versions: Mapping[str, Mapping[str, int]],
    **source: Any,
) -> None:
    """Publish the messages of a change as a folder of the topic. Publishing it again is safe.

    :param number: number of the change, from 1; the caller has published all before it
    :param versions: tables with their newest versions, by keyspace: named by the keyspace's last message
    :param source: ``version``, ``hostname``, ``ts_ms``, ``snapshot``: as the change says, so that all make the same
    """
    stream, folder = FileStream(store, server), change_folder(number)
    if stream.parts(folder) is not None:
        return
    stream.put_schemas(FORM, *schema_change_schemas(server))
    try:
        parts = []
        if statements:
            writer = stream.open_part(folder, "ddl", FORM)
            writer.add(_messages(server, number, statements, versions, source))
            parts = [writer.finish()]
        stream.publish(folder, parts)
    except StreamConflictError:
        # Another process, maybe with another library that packs otherwise, was faster.
        if stream.parts(folder) is None:
            raise


def change_folder(number: int) -> str:
    """Name the folder of a change's messages."""
    return f"change-{number:012}"


def _messages(
    server: str,
    number: int,
    statements: Sequence[Statement],
    versions: Mapping[str, Mapping[str, int]],
    source: Mapping[str, Any],
) -> Messages:
    last = {statement.keyspace: place for place, statement in enumerate(statements)}
    ids = [hashlib.blake2b(f"{server}/{number}/{i}".encode(), digest_size=16).digest() for i in range(len(statements))]
    sources = [
        {
            **source,
            "token": TOKEN,
            "schema_version": FORM,
            "event_id": event_id.hex(),
            "change": number,
            "tables": sorted(versions.get(statement.keyspace, {}).items()) if place in last.values() else None,
        }
        for place, (statement, event_id) in enumerate(zip(statements, ids, strict=True))
    ]
    fields = [("version", pa.string()), ("hostname", pa.string()), ("ts_ms", pa.int64()), ("snapshot", pa.bool_())]
    fields += [("token", pa.int64()), ("schema_version", pa.int32()), ("event_id", pa.string()), ("change", pa.int64())]
    kind = pa.struct([*fields, ("tables", pa.map_(pa.string(), pa.int32()))])
    key, value = schema_change_schemas(server)
    keyspaces = pa.array([statement.keyspace for statement in statements], pa.string())
    ddl = pa.array([statement.ddl for statement in statements], pa.string())
    rows = pa.StructArray.from_arrays([keyspaces, ddl, pa.array(sources, kind)], names=["keyspace", "ddl", "source"])
    ids_array = pa.array(ids, pa.binary(16))
    return Messages(encode_rows(key, rows), encode_rows(value, rows), ids_array)
