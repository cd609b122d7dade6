"""JSON messages, read as Kafka Connect's JsonConverter reads them, against fastavro's reading of the Avro."""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from decimal import Decimal
from random import Random
from typing import Any
from unittest.mock import patch

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies

from ringsync.avro import to_json as json_messages
from ringsync.avro.mapping import without_logical_types
from ringsync.avro.to_json import json_converter
from ringsync.schema.table import TableSchema
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
        parsed = fastavro.parse_schema(without_logical_types(schema))
        datums = data.to_pylist()
        for datum, text in zip(datums, json_converter(schema)(datums), strict=True):
            document = json.loads(text)
            value = fastavro.schemaless_reader(io.BytesIO(datum), parsed)
            assert same(by_connect(document["schema"], document["payload"]), of_avro(schema, value, {}))


def test_a_documented_message() -> None:
    """docs/kafka.md names these forms."""
    batch = images(DOCUMENTED, DOCUMENTED_ROW)
    datums = messages_of(DOCUMENTED, batch).values.to_pylist()
    (document,) = map(json.loads, json_converter(envelope_schema(DOCUMENTED, "demo", "exact"))(datums))
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


SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Edges",
    "namespace": "test",
    "fields": [
        {"name": 'a "name" \u00e4', "type": ["null", "long"]},
        {"name": "flag", "type": "boolean"},
        {"name": "text", "type": ["string", "null"]},
        {"name": "data", "type": "bytes"},
        {"name": "single", "type": "float"},
        {"name": "double", "type": ["null", "double"]},
        {
            "name": "items",
            "type": {
                "type": "array",
                "items": [
                    "null",
                    {
                        "type": "record",
                        "name": "Item",
                        "namespace": "test",
                        "fields": [
                            {"name": "map", "type": {"type": "map", "values": ["null", "float"]}},
                            {"name": "lists", "type": {"type": "array", "items": {"type": "array", "items": "int"}}},
                        ],
                    },
                ],
            },
        },
        {"name": "again", "type": ["null", "test.Item"]},
        {"name": "nothing", "type": {"type": "record", "name": "Nothing", "namespace": "test", "fields": []}},
    ],
}

TEXTS = strategies.text(
    strategies.characters(exclude_categories=["Cs"]) | strategies.sampled_from('"\\\x00\x1f\x7f\n/'), max_size=40
)
SINGLES, DOUBLES = strategies.floats(width=32), strategies.floats()
ITEMS = strategies.fixed_dictionaries(
    {
        "map": strategies.dictionaries(TEXTS, strategies.none() | SINGLES, max_size=3),
        "lists": strategies.lists(strategies.lists(strategies.integers(-(2**31), 2**31 - 1), max_size=3), max_size=3),
    }
)
LONGS = strategies.integers(-(2**63), 2**63 - 1) | strategies.integers(-1000, 1000)
EDGES = strategies.fixed_dictionaries(
    {
        'a "name" \u00e4': strategies.none() | LONGS,
        "flag": strategies.booleans(),
        "text": strategies.none() | TEXTS,
        "data": strategies.binary(max_size=20),
        "single": SINGLES,
        "double": strategies.none() | DOUBLES,
        "items": strategies.lists(strategies.none() | ITEMS, max_size=4),
        "again": strategies.none() | ITEMS,
        "nothing": strategies.just({}),
    }
)


@settings(max_examples=100, deadline=None)
@given(strategies.lists(EDGES, min_size=1, max_size=5), strategies.sampled_from([64, 4096, 1 << 20]))
def test_every_value_is_told(rows: list[dict[str, Any]], room: int) -> None:
    """However much is written at once."""
    datums = datums_of(rows)
    with patch.object(json_messages, "_ROOM", room):
        texts = json_converter(SCHEMA)(datums)
        payloads = json_converter(SCHEMA, with_schema=False)(datums)
    for row, text, payload in zip(rows, texts, payloads, strict=True):
        document = json.loads(text)
        assert same(by_connect(document["schema"], document["payload"]), row)
        assert text.endswith(b',"payload":' + payload + b"}")


def test_all_escapes_and_numbers_of_digits() -> None:
    characters = "".join(map(chr, range(0x300)))
    numbers = [sign * (10**digits + offset) for digits in range(19) for sign in (1, -1) for offset in (-1, 0, 1)]
    rows = [
        {**EMPTY, "text": characters[start:], 'a "name" \u00e4': number}
        for start, number in enumerate([-(2**63), 2**63 - 1, *numbers])
    ]
    payloads = [json.loads(text)["payload"] for text in json_converter(SCHEMA)(datums_of(rows))]
    assert payloads == rows


def test_floats_keep_their_form() -> None:
    """A whole number stays a float for who reads without the schema; a float has the digits of 32 bits."""
    row = {**EMPTY, "single": 0.1, "double": -3.0}
    (text,) = json_converter(SCHEMA)(datums_of([row]))
    assert b'"single":0.1,"double":-3.0,' in text


def test_what_does_not_follow_its_schema_is_refused() -> None:
    whole, *_ = datums_of([{**EMPTY, "text": "twelve chars", "items": [{"map": {"a": 1.0}, "lists": [[1, 2], []]}]}])
    convert = json_converter(SCHEMA)
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="message 1 of 2 does not follow its Avro schema"):
            convert([whole, whole[:end]])
    for damaged in (whole + b"\0", b"\xff" * 40, b"\0\0\0\x7f" + whole):
        with pytest.raises(ValueError, match="message 0 of 1"):
            convert([damaged])
    assert convert([]) == []


@pytest.mark.parametrize("documented", [True, False])
def test_damage_is_refused_or_read_but_never_leaves_the_datum(documented: bool) -> None:
    """The kernel checks all that it reads; where it did not, this process would end."""
    draw = Random(7)
    if documented:  # has a decimal
        convert = json_converter(envelope_schema(DOCUMENTED, "demo", "exact"))
        (whole,) = messages_of(DOCUMENTED, images(DOCUMENTED, DOCUMENTED_ROW)).values.to_pylist()
    else:
        item = {"map": {"a": 1.0, "b": None}, "lists": [[1, 2], []]}
        row = {**EMPTY, "text": "twelve chars", "data": b"12345", "items": [item, None, item], "again": item}
        convert, (whole,) = json_converter(SCHEMA), datums_of([row])
    outcomes = Counter[str]()
    for _ in range(5000):
        damaged = bytearray(whole)
        for place in draw.sample(range(len(whole)), draw.randint(1, 4)):
            damaged[place] = draw.choice([0, 1, 2, 3, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        try:
            outcomes["read"] += len(convert([bytes(damaged)]))
        except ValueError as error:
            outcomes[str(error)] += 1
    assert outcomes.keys() == {"read", "message 0 of 1 does not follow its Avro schema"}
    assert min(outcomes.values()) > 500


def test_a_message_longer_than_the_room() -> None:
    row = {**EMPTY, "text": "\x01" * 3_000_000}
    texts = json_converter(SCHEMA)(datums_of([EMPTY, row, EMPTY]))
    assert [json.loads(text)["payload"] for text in texts] == [EMPTY, row, EMPTY]


EMPTY: dict[str, Any] = {
    'a "name" \u00e4': None,
    "flag": False,
    "text": None,
    "data": "",
    "single": 0.0,
    "double": None,
    "items": [],
    "again": None,
    "nothing": {},
}


def datums_of(rows: list[dict[str, Any]]) -> list[bytes]:
    parsed = fastavro.parse_schema(SCHEMA)
    found = []
    for row in rows:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, {**row, "data": row["data"] or b""})
        found.append(stream.getvalue())
    return found


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
    if schema["type"] == "float":
        return float(np.float32(value))
    return float(value) if schema["type"] == "double" else value


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
