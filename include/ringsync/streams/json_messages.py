"""Avro messages as JSON with schema and payload, as the original CDC design shows them (Kafka Connect's form).

A message is a Python object here: some twenty thousand a second. docs/kafka.md says how each type is written.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import msgspec
from fastavro import parse_schema, schemaless_reader

from ringsync.cql.avro import big_decimal_text, without_logical_types
from ringsync.streams.messages import AvroRecord

Plain = Callable[[Any], Any]
"""A value as fastavro reads it to one that JSON has."""

_written = msgspec.json.Encoder().encode

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


def json_converter(schema: AvroRecord) -> Callable[[bytes], bytes]:
    """What turns an Avro datum of this schema into UTF-8 JSON ``{"schema": …, "payload": …}``.

    :param schema: of a key or an envelope, with its logical types
    """
    reader_schema = parse_schema(without_logical_types(schema))
    plain = _plain(schema, {})
    head = b'{"schema":' + _written(connect_schema(schema)) + b',"payload":'

    def convert(datum: bytes) -> bytes:
        value: Any = schemaless_reader(BytesIO(datum), reader_schema)
        return head + _written(plain(value) if plain else value) + b"}"

    return convert


def connect_schema(schema: Any) -> dict[str, Any]:
    """An Avro schema as Kafka Connect's JsonConverter writes schemas: structs inlined wherever they are used."""
    return _connect(schema, {})


def _connect(schema: Any, records: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema, list):
        return {**_connect(_not_null(schema), records), "optional": True}
    if isinstance(schema, str):
        kind = _CONNECT_TYPES.get(schema)
        return {"type": kind, "optional": False} if kind else _connect(records[schema], records)
    match schema["type"]:
        case "record":
            records[_full_name(schema)] = schema
            fields = [{"field": f["name"], **_connect(f["type"], records)} for f in schema["fields"]]
            return {"type": "struct", "name": _full_name(schema), "optional": False, "fields": fields}
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


def _plain(schema: Any, records: dict[str, Plain | None]) -> Plain | None:
    """What makes a value of this schema one of JSON; None: it is one."""
    if isinstance(schema, list):
        return _nullable(_plain(_not_null(schema), records))
    if isinstance(schema, str):
        return records[schema] if schema in records else _NATIVE.get(schema)
    match schema["type"]:
        case "record":
            records[_full_name(schema)] = found = _struct(schema, records)
            return found
        case "array":
            item = _plain(schema["items"], records)
            return None if item is None else lambda values: [item(value) for value in values]
        case "map":
            inner = _plain(schema["values"], records)
            return None if inner is None else lambda values: {key: inner(value) for key, value in values.items()}
    if schema.get("logicalType") == "big-decimal":
        return big_decimal_text
    return _plain(schema["type"], records)


def _struct(schema: AvroRecord, records: dict[str, Plain | None]) -> Plain | None:
    changed = {
        field["name"]: plain for field in schema["fields"] if (plain := _plain(field["type"], records)) is not None
    }

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        for name, plain in changed.items():
            value[name] = plain(value[name])
        return value

    return convert if changed else None


def _nullable(plain: Plain | None) -> Plain | None:
    return None if plain is None else lambda value: None if value is None else plain(value)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinities."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_NATIVE: Mapping[str, Plain] = {"bytes": _base64, "double": _number, "float": _number}


def _not_null(union: list[Any]) -> Any:
    """The other branch of a union with null; there are no other unions in messages."""
    (found,) = (branch for branch in union if branch != "null")
    return found


def _full_name(schema: AvroRecord) -> str:
    return f"{schema['namespace']}.{schema['name']}" if "namespace" in schema else str(schema["name"])
