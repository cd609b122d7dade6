"""Compare the relay of a file stream to a real Kafka broker with a bare producer that sends the same bytes.

``python bench/kafka_relay.py`` prints one BENCHMARK_RESULT line. The relay reads the stream's files, decompresses them,
cuts them into messages, and sends each with two headers. The bare producer (confluent-kafka) has keys and values in
memory already, and sends no headers. Both are idempotent, have the same settings, learn which messages fail, and wait
until all others are confirmed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import numpy as np
import pyarrow as pa
from confluent_kafka import Producer
from peers.measure import cpu_seconds

from ringsync.cql.types import Native
from ringsync.images.schema import row_image_schema
from ringsync.schema.table import Column, TableSchema
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics, producer_settings
from ringsync.streams.messages import envelope_schema, key_schema, snapshot_messages
from ringsync.streams.relay import relay
from servers.jars import DEFAULT_CACHE
from servers.kafka import BrokerSettings, KafkaBroker

PARTS, PART_MESSAGES, ROUNDS = 4, 75_000, 3
NOTE_BYTES = 300
TABLE = TableSchema(
    "shop",
    "orders",
    "0" * 32,
    (
        Column("id", "partition_key", Native("text")),
        Column("amount", "regular", Native("bigint")),
        Column("note", "regular", Native("text")),
        Column("score", "regular", Native("double")),
    ),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = BrokerSettings(short_lived=False, heap_mb=512).on_free_ports()
        with KafkaBroker(folder / "kafka", settings, DEFAULT_CACHE) as broker:
            measure(broker, folder / "lake")


def measure(broker: KafkaBroker, lake: Path) -> None:
    kafka_settings = KafkaSettings((broker.bootstrap,))
    bodies = [messages(part * PART_MESSAGES) for part in range(PARTS)]
    keys = [key for body in bodies for key in body.keys.to_pylist()]
    values = [value for body in bodies for value in body.values.to_pylist()]
    results: dict[str, list[tuple[float, float, float]]] = {"relay": [], "bare": []}
    with KafkaTopics(kafka_settings) as kafka:
        for number in range(ROUNDS):
            stream = published(lake, f"relay-{number}", bodies)
            kafka.open(stream.topic)
            results["relay"].append(timed(partial(relayed, stream, kafka), broker))
            kafka.open(f"bare-{number}")
            results["bare"].append(timed(partial(produced, kafka_settings, f"bare-{number}", keys, values), broker))
    count = len(keys)
    told = [
        f"{name}MessagesPerSec={count / min(seconds for seconds, _, _ in found):.0f} "
        f"{name}ClientMicros={min(client for _, client, _ in found) / count * 1e6:.2f} "
        f"{name}BrokerMicros={min(server for _, _, server in found) / count * 1e6:.2f}"
        for name, found in results.items()
    ]
    size = sum(map(len, keys)) + sum(map(len, values))
    print(f"BENCHMARK_RESULT | scenario=kafka_relay messages={count} bytes={size} rounds={ROUNDS} {' '.join(told)}")


def messages(first: int) -> Any:
    count = PART_MESSAGES
    numbers = np.arange(first, first + count)
    random = np.random.default_rng(first)
    letters = random.integers(97, 123, (count, NOTE_BYTES // 3), np.uint8).repeat(3, axis=1).tobytes().decode()
    schema = row_image_schema(TABLE)
    times = {"writetime": 1_790_845_200_000_000, "expires_at": None, "deleted_at": None, "live": None}
    known: dict[str, Any] = {
        "token": pa.array(numbers),
        "id": pa.array([f"customer-{number}" for number in numbers.tolist()]),
        "amount": pa.array(numbers * 1_000_003),
        "note": pa.array([letters[i : i + NOTE_BYTES] for i in range(0, len(letters), NOTE_BYTES)]),
        "score": pa.array(numbers / 3),
        "_row": pa.array([times] * count, schema.field("_row").type),
    }
    arrays = [known.get(field.name, pa.nulls(count, field.type)) for field in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    told: dict[str, Any] = {"hostname": "10.0.0.7", "processed_at_ms": 1, "schema_version": 1, "version": "0.1.0"}
    return snapshot_messages(batch, TABLE, "demo", "exact", **told)


def published(lake: Path, topic: str, bodies: list[Any]) -> FileStream:
    stream = FileStream(LocalStore(lake), topic)
    stream.put_schemas(1, key_schema(TABLE, "demo", "exact"), envelope_schema(TABLE, "demo", "exact"))
    parts = []
    for number, body in enumerate(bodies):
        writer = stream.open_part("pass-000000000001", f"part-{number}", 1)
        writer.add(body)
        parts.append(writer.finish())
    stream.publish("pass-000000000001", parts)
    return stream


def timed(run: Callable[[], int], broker: KafkaBroker) -> tuple[float, float, float]:
    """Measure a call in s: wall clock, CPU of this process, CPU of the broker, which is a child of this process."""
    both, server, began = cpu_seconds(os.getpid()), cpu_seconds(broker.pid), time.monotonic()
    confirmed = run()
    seconds = time.monotonic() - began
    if confirmed != PARTS * PART_MESSAGES:
        raise SystemExit(f"{confirmed} messages were confirmed of {PARTS * PART_MESSAGES}")
    server = cpu_seconds(broker.pid) - server
    return seconds, cpu_seconds(os.getpid()) - both - server, server


def relayed(stream: FileStream, kafka: KafkaTopics) -> int:
    return relay(stream.store, stream.topic, kafka).messages


def produced(settings: KafkaSettings, topic: str, keys: list[bytes], values: list[bytes]) -> int:
    producer = Producer(producer_settings(settings, print))
    failed = 0

    def note(_error: Any, _: Any) -> None:
        nonlocal failed
        failed += 1

    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        while True:
            try:
                producer.produce(topic, value, key, on_delivery=note)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 2000 == 0:
            producer.poll(0)
    return len(keys) - failed - producer.flush()


if __name__ == "__main__":
    main()
