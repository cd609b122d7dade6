"""JSON messages, read as Kafka Connect's JsonConverter reads them, against fastavro's reading of the Avro."""

from __future__ import annotations

import base64
import io
import json
import math
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
from hypothesis import HealthCheck, given, settings

from ringsync.cql.avro import without_logical_types
from ringsync.schema.table import TableSchema
from ringsync.streams.json_messages import json_converter
from ringsync.streams.messages import envelope_schema, key_schema
from tests.streams.test_messages import DOCUMENTED, DOCUMENTED_ROW, images, messages_of, random_images

KINDS: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "bytes": str,
    "double": (int, float, str),
    "float": (int, float, str),
    "int32": int,
    "int64": int,
    "string": str,
}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_images())
def test_json_says_what_avro_says(drawn: tuple[TableSchema, pa.RecordBatch]) -> None:
    table, batch = drawn
    messages = messages_of(table, batch)
    for schema, data in (
        (key_schema(table, "demo", "exact"), messages.keys),
        (envelope_schema(table, "demo", "exact"), messages.values),
    ):
        convert = json_converter(schema)
        parsed = fastavro.parse_schema(without_logical_types(schema))
        for datum in data.to_pylist():
            document = json.loads(convert(datum))
            value = fastavro.schemaless_reader(io.BytesIO(datum), parsed)
            assert same(by_connect(document["schema"], document["payload"]), of_avro(schema, value, {}))


def test_a_documented_message() -> None:
    """docs/kafka.md names these forms."""
    batch = images(DOCUMENTED, DOCUMENTED_ROW)
    (datum,) = messages_of(DOCUMENTED, batch).values.to_pylist()
    document = json.loads(json_converter(envelope_schema(DOCUMENTED, "demo", "exact"))(datum))
    assert document["payload"]["after"] == {
        "id": "5b6962dd-3f90-4c93-8f61-eabfa4a803e2",
        "line": 1,
        "Ship_to": "Ann",
        "amount": "12.50",
        "placed": 1_790_845_200_000,
        "tags": ["gift", "new"],
    }
    (after,) = (field for field in document["schema"]["fields"] if field["field"] == "after")
    placed = {"field": "placed", "type": "int64", "optional": True, "name": "org.apache.kafka.connect.data.Timestamp"}
    assert after["fields"][4] == placed
    assert after["fields"][3] == {"field": "amount", "type": "string", "optional": True}


def by_connect(schema: dict[str, Any], value: Any) -> Any:
    """A payload as its schema describes it (C: JsonConverter.convertToConnect)."""
    if value is None:
        assert schema["optional"]
        return None
    match schema["type"]:
        case "struct":
            assert [field["field"] for field in schema["fields"]] == list(value)
            return {field["field"]: by_connect(field, value[field["field"]]) for field in schema["fields"]}
        case "array":
            return [by_connect(schema["items"], item) for item in value]
        case "map":
            return {key: by_connect(schema["values"], item) for key, item in value.items()}
    assert isinstance(value, KINDS[schema["type"]])
    if schema["type"] == "bytes":
        return base64.b64decode(value, validate=True)
    return float(value) if schema["type"] in ("double", "float") else value


def of_avro(schema: Any, value: Any, records: dict[str, Any]) -> Any:
    """The same of an Avro value: only big-decimals are written otherwise."""
    if isinstance(schema, list):
        inner = of_avro_schema(schema[1], records)
        return None if value is None else of_avro(inner, value, records)
    schema = of_avro_schema(schema, records)
    if isinstance(schema, str):
        return value
    match schema["type"]:
        case "record":
            # Named records are seen even where this value has none of them.
            return {f["name"]: of_avro(f["type"], value[f["name"]], records) for f in schema["fields"]}
        case "array":
            return [of_avro(schema["items"], item, records) for item in value]
        case "map":
            return {key: of_avro(schema["values"], item, records) for key, item in value.items()}
    if schema.get("logicalType") != "big-decimal":
        return value
    stream = io.BytesIO(value)
    unscaled: Any = fastavro.schemaless_reader(stream, fastavro.parse_schema("bytes"))
    scale: Any = fastavro.schemaless_reader(stream, fastavro.parse_schema("int"))
    digits = Decimal(int.from_bytes(unscaled, "big", signed=True)).as_tuple()
    return str(Decimal((digits.sign, digits.digits, -scale)))


def of_avro_schema(schema: Any, records: dict[str, Any]) -> Any:
    if isinstance(schema, dict) and schema["type"] == "record":
        records[f"{schema['namespace']}.{schema['name']}"] = schema
    return records.get(schema, schema) if isinstance(schema, str) else schema


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or one == other
    return bool(one == other)
