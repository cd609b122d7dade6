"""Avro schemas in the form of Kafka Connect's JsonConverter. docs/kafka.md has the form of each type."""

from __future__ import annotations

from typing import Any

from ringsync.avro.mapping import AvroRecord

_CONNECT_TYPES = {
    "boolean": "boolean",
    "bytes": "bytes",
    "double": "double",
    "float": "float",
    "int": "int32",
    "long": "int64",
    "string": "string",
}
_CONNECT_NAMES = {
    "date": "org.apache.kafka.connect.data.Date",
    "timestamp-millis": "org.apache.kafka.connect.data.Timestamp",
}


def connect_schema(schema: AvroRecord) -> dict[str, Any]:
    """Convert the schema of a record of messages, with its logical types. Structs are repeated at each use."""
    return _connect(schema, {})


def not_null(union: list[Any]) -> Any:
    """Return the other branch of a union with null; messages have no other unions."""
    (other,) = (branch for branch in union if branch != "null")
    return other


def full_name(record: AvroRecord) -> str:
    """Return the name by which a schema uses a record again."""
    return f"{record['namespace']}.{record['name']}" if "namespace" in record else str(record["name"])


def _connect(schema: Any, records: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema, list):
        return {**_connect(not_null(schema), records), "optional": True}
    if isinstance(schema, str):
        kind = _CONNECT_TYPES.get(schema)
        return {"type": kind, "optional": False} if kind else _connect(records[schema], records)
    match schema["type"]:
        case "record":
            records[full_name(schema)] = schema
            fields = [{"field": f["name"], **_connect(f["type"], records)} for f in schema["fields"]]
            return {"type": "struct", "name": full_name(schema), "optional": False, "fields": fields}
        case "array":
            return {"type": "array", "items": _connect(schema["items"], records), "optional": False}
        case "map":
            keys = {"type": "string", "optional": False}
            return {"type": "map", "keys": keys, "values": _connect(schema["values"], records), "optional": False}
    logical = schema.get("logicalType")
    if logical == "big-decimal":
        return _connect("string", records)
    name = {"name": _CONNECT_NAMES[logical]} if logical in _CONNECT_NAMES else {}
    return {**_connect(schema["type"], records), **name}
