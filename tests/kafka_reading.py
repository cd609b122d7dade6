"""The consumer's side: a Kafka topic read from its beginning to its end, decoded, repeats dropped by event id."""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fastavro
import requests
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from ringsync.avro.mapping import without_logical_types
from ringsync.streams.files import FileStream

SECONDS = 60.0
Decode = Callable[[bytes, int], Any]
"""A key or value as the topic has it, and the schema version in its header, to plain Python."""


@dataclass(frozen=True)
class Record:
    """A record of a topic, as it is there.

    :ivar headers: name to value
    """

    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: dict[str, bytes]

    @property
    def event_id(self) -> str:
        return self.headers["event_id"].decode()


def read_topic(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[Record]:
    """All records of a topic, partition by partition, in order, with all repeats.

    :param isolation: ``read_uncommitted``: also those of transactions that are open or were aborted
    """
    reading = {"group.id": "reading", "enable.auto.commit": False, "enable.partition.eof": True}
    consumer = Consumer({"bootstrap.servers": bootstrap, "isolation.level": isolation, **reading})
    try:
        missing = set(consumer.list_topics(topic, timeout=SECONDS).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in missing])
        found: list[Record] = []
        deadline = time.monotonic() + SECONDS
        while missing:
            assert time.monotonic() < deadline, f"{topic}: partitions {missing} are not at their end after {SECONDS} s"
            for message in consumer.consume(1000, timeout=0.1):
                if (error := message.error()) is None:
                    found.append(_record(message))
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    missing.discard(message.partition())
    finally:
        consumer.close()
    return sorted(found, key=lambda record: (record.partition, record.offset))


def kafka_messages(records: list[Record], key: Decode, value: Decode) -> dict[str, dict[str, Any]]:
    """Messages by event id, ``{"key": …, "value": …}``, the first of each id, in the order of the topic.

    :param key: :func:`avro_of`, :func:`confluent_avro` or :func:`json_payload`; ``value`` likewise
    """
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        version = int(record.headers["schema_version"])
        if record.event_id not in found:
            found[record.event_id] = {"key": key(record.key, version), "value": value(record.value, version)}
    return found


def avro_of(stream: FileStream, kind: int) -> Decode:
    """How plain Avro is read, by the schemas that lie beside the stream; numbers as written.

    :param kind: 0 for keys, 1 for values
    """
    schemas: dict[int, Any] = {}

    def decode(data: bytes, version: int) -> Any:
        if version not in schemas:
            schemas[version] = fastavro.parse_schema(without_logical_types(stream.schemas(version)[kind]))
        return _whole(data, schemas[version])

    return decode


def confluent_avro(registry_url: str) -> Decode:
    """How Avro in Confluent's wire format is read, by the schemas of the registry; numbers as written."""
    schemas: dict[int, Any] = {}

    def decode(data: bytes, _: int) -> Any:
        magic, schema_id = struct.unpack_from(">bI", data)
        assert magic == 0
        if schema_id not in schemas:
            answer = requests.get(f"{registry_url}/schemas/ids/{schema_id}", timeout=10)
            answer.raise_for_status()
            text = json.loads(answer.json()["schema"])
            schemas[schema_id] = fastavro.parse_schema(without_logical_types(text))
        return _whole(data[5:], schemas[schema_id])

    return decode


def json_payload(data: bytes, _: int) -> Any:
    """The payload of a JSON message."""
    document = json.loads(data)
    assert document.keys() == {"schema", "payload"}
    return document["payload"]


def _whole(data: bytes, schema: Any) -> Any:
    stream = io.BytesIO(data)
    found = fastavro.schemaless_reader(stream, schema)
    assert stream.read() == b""
    return found


def _record(message: Any) -> Record:
    headers = dict(message.headers() or ())
    return Record(message.partition(), message.offset(), message.key(), message.value(), headers)
