"""The relay against a real broker: what the file stream has, Kafka has, whoever is killed when."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from ringsync.streams.files import FileStream
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.messages import Messages
from ringsync.streams.relay import relay
from ringsync.streams.sink import BrokerUnavailableError, CursorError, RelayError
from servers.kafka import KafkaBroker
from tests.kafka_reading import Record, avro_of, json_payload, kafka_messages, read_topic
from tests.steps.late_files import RangeDelete, Write
from tests.streams.outbox import changes, notes, outbox, publish, published

pytestmark = pytest.mark.server

CHILD = """
import sys
from ringsync.storage.local import LocalStore
from ringsync.streams.relay import relay
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics

def wait_to_be_killed():
    print("part", flush=True)
    sys.stdin.readline()
    return False

with KafkaTopics(KafkaSettings((sys.argv[1],))) as kafka:
    relay(LocalStore(sys.argv[2]), sys.argv[3], kafka, stop=wait_to_be_killed)
"""


def settings_of(broker: KafkaBroker, **other: Any) -> KafkaSettings:
    return KafkaSettings((broker.bootstrap,), **other)


def delivered(broker: KafkaBroker, stream: FileStream) -> tuple[list[Record], dict[str, dict[str, Any]]]:
    """The records of a topic of plain Avro, and the messages that they are."""
    records = read_topic(broker.bootstrap, stream.topic)
    return records, kafka_messages(records, avro_of(stream, 0), avro_of(stream, 1))


def by_key(messages: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """The values of each key, in order."""
    found: dict[str, list[Any]] = defaultdict(list)
    for message in messages.values():
        found[json.dumps(message["key"])].append(message["value"])
    return found


def test_published_buckets_come_once_each_in_the_order_of_their_keys(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.once")
    publish(stream, "bootstrap-b", notes(0, 5000), notes(5000, 100))
    publish(stream, "pass-000000000001", notes(20, 3000))
    publish(stream, "pass-000000000002")
    with KafkaTopics(settings_of(broker)) as kafka:
        done = relay(stream.store, stream.topic, kafka)
        assert (done.folders, done.messages) == (tuple(stream.folders()), 8100)
        assert relay(stream.store, stream.topic, kafka).messages == 0
        assert by_key(delivered(broker, stream)[1]) == by_key(published(stream))
        publish(stream, "bootstrap-a", notes(10, 50))
        publish(stream, "pass-000000000003", notes(30, 50))
        assert relay(stream.store, stream.topic, kafka, folders=["pass-000000000003"]).messages == 50
        assert relay(stream.store, stream.topic, kafka).folders == ("bootstrap-a",)
    records, found = delivered(broker, stream)
    assert len(records) == 8200
    assert {record.partition for record in records} == {0, 1, 2, 3}
    assert all(message["value"]["source"]["event_id"] == event_id for event_id, message in found.items())
    assert found == published(stream)


def churn(ids: range) -> list[Messages]:
    """Passes over partitions of NOTES: rows, a deletion that hits them, and rows again."""
    rows = [[Write(id_, line, f"{at}", at * 1000 + line) for id_ in ids for line in range(10)] for at in (1, 3, 5)]
    deletions = [Write(id_, None, None, 2000) for id_ in ids], [RangeDelete(id_, 2, 8, 4000) for id_ in ids]
    return [changes(*writes) for writes in (rows[0], deletions[0], rows[1], deletions[1], rows[2])]


@pytest.mark.parametrize("serialisation", ["avro", "json"])
def test_all_messages_of_a_cassandra_partition_are_in_one_of_kafka_s_in_their_order(
    broker: KafkaBroker, tmp_path: Path, serialisation: str
) -> None:
    stream = outbox(tmp_path, f"demo.shop.churned.{serialisation}")
    for number, messages in enumerate(churn(range(200))):
        publish(stream, f"pass-{number:012}", messages)
    with KafkaTopics(settings_of(broker, serialisation=serialisation, partitions=6)) as kafka:
        assert relay(stream.store, stream.topic, kafka).messages == 200 * 32
    records = read_topic(broker.bootstrap, stream.topic)
    decode = (json_payload, json_payload) if serialisation == "json" else (avro_of(stream, 0), avro_of(stream, 1))
    found = kafka_messages(records, *decode)
    assert order_of(found) == order_of(published(stream))
    places: dict[int, set[int]] = defaultdict(set)
    for record in records:
        places[found[record.event_id]["value"]["source"]["token"]].add(record.partition)
    assert len(places) == 200
    assert all(kafka_partitions == {token % 6} for token, kafka_partitions in places.items())
    assert Counter(record.partition for record in records).keys() == set(range(6))


def order_of(messages: dict[str, dict[str, Any]]) -> dict[int, list[str]]:
    """The event ids of each Cassandra partition, in order."""
    found: dict[int, list[str]] = defaultdict(list)
    for event_id, message in messages.items():
        found[message["key"]["id"]].append(event_id)
    return found


def test_a_topic_that_gets_more_partitions_uses_them(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.grown")
    passes = churn(range(50))
    with KafkaTopics(settings_of(broker, partitions=2)) as kafka:
        publish(stream, "pass-000000000001", passes[0])
        relay(stream.store, stream.topic, kafka)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_partitions([NewPartitions(stream.topic, 7)])[stream.topic].result()
        publish(stream, "pass-000000000002", passes[2])
        relay(stream.store, stream.topic, kafka)
    records, found = delivered(broker, stream)
    assert found == published(stream)
    for record in records:
        source = found[record.event_id]["value"]["source"]
        assert record.partition == source["token"] % (2 if source["ts_us"] < 2000 else 7)


def test_by_the_whole_key_as_java_s_producers_do_it(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.by.primary")
    publish(stream, "pass-000000000001", churn(range(20))[0])
    with KafkaTopics(settings_of(broker, partition_by="primary_key")) as kafka:
        relay(stream.store, stream.topic, kafka)
    records = read_topic(broker.bootstrap, stream.topic)
    assert len(records) == 200
    assert all(record.partition == (murmur2(record.key) & 0x7FFF_FFFF) % 4 for record in records)


def murmur2(data: bytes) -> int:
    """As org.apache.kafka.common.utils.Utils computes it, without the sign."""
    seed, mixer, mask = 0x9747B28C, 0x5BD1E995, 0xFFFF_FFFF
    found = (seed ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        mixed = word * mixer & mask
        found = (found * mixer & mask) ^ ((mixed ^ mixed >> 24) * mixer & mask)
    if rest := data[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * mixer & mask
    found = (found ^ found >> 13) * mixer & mask
    return found ^ found >> 15


def test_parts_without_an_index_are_relayed(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.old")
    publish(stream, "bootstrap-a", notes(0, 2500))
    for index in tmp_path.rglob("*.index"):
        index.unlink()
    with KafkaTopics(settings_of(broker)) as kafka:
        assert relay(stream.store, stream.topic, kafka).messages == 2500
    assert delivered(broker, stream)[1] == published(stream)


def test_json(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.json")
    publish(stream, "bootstrap-a", notes(0, 200))
    as_json = settings_of(broker, serialisation="json", partitions=1)
    with KafkaTopics(replace(as_json, topic_name={stream.topic: "other.name"})) as kafka:
        assert relay(stream.store, stream.topic, kafka).messages == 200
    with (
        KafkaTopics(as_json) as kafka,
        pytest.raises(CursorError, match=r"kafka.json is about the topic 'other.name', not 'demo.shop.json'"),
    ):
        relay(stream.store, stream.topic, kafka)
    records = read_topic(broker.bootstrap, "other.name")
    found = kafka_messages(records, json_payload, json_payload)
    expected = published(stream)
    for number, message in enumerate(expected.values()):
        message["value"]["after"]["paid"] = f"{number}.50"
    assert found == expected
    stream.store.delete(f"streams/{stream.topic}/kafka.json")
    with KafkaTopics(replace(as_json, json_schemas=False, topic_name={stream.topic: "without.schemas"})) as kafka:
        relay(stream.store, stream.topic, kafka)
    bare = read_topic(broker.bootstrap, "without.schemas")
    assert [json.loads(record.value) for record in bare] == [json_payload(record.value, 1) for record in records]
    schema = json.loads(records[0].key)["schema"]
    assert (schema["type"], schema["name"], schema["optional"]) == ("struct", "demo.shop.notes.Key", False)
    assert schema["fields"][0] == {"field": "id", "type": "int32", "optional": True}


def test_a_relay_that_stops_goes_on_with_the_next_part(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.stop")
    publish(stream, "bootstrap-a", *(notes(1000 * n, 1000) for n in range(3)))
    publish(stream, "pass-000000000001", notes(5000, 10))
    with KafkaTopics(settings_of(broker)) as kafka:
        stopped = relay(stream.store, stream.topic, kafka, stop=lambda: True)
        assert (stopped.folders, stopped.messages) == ((), 1000)
        assert stopped.waiting == ("bootstrap-a", "pass-000000000001")
        assert relay(stream.store, stream.topic, kafka).messages == 2010
    records, found = delivered(broker, stream)
    assert len(records) == 3010
    assert found == published(stream)


def test_a_killed_relay_is_repeated_under_the_same_event_ids(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.killed")
    publish(stream, "bootstrap-a", *(notes(4000 * n, 4000) for n in range(3)))
    arguments = [sys.executable, "-c", CHILD, broker.bootstrap, str(tmp_path), stream.topic]
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "part\n"
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "part\n"
        deadline = time.monotonic() + 60
        while not read_topic(broker.bootstrap, stream.topic, "read_uncommitted"):
            assert time.monotonic() < deadline, "nothing has come of what was sent"
    finally:
        child.kill()
        child.wait()
        child.communicate()
    with KafkaTopics(settings_of(broker)) as kafka:
        assert relay(stream.store, stream.topic, kafka).messages == 12_000
    records, found = delivered(broker, stream)
    assert len(records) == 12_000
    assert found == published(stream)
    assert len(read_topic(broker.bootstrap, stream.topic, "read_uncommitted")) > 12_000


@pytest.mark.chaos
def test_a_broker_that_is_killed_and_comes_back_loses_nothing(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.restarted")
    publish(stream, "bootstrap-a", *(notes(4000 * n, 4000) for n in range(3)))
    starting: list[threading.Thread] = []

    def kill_once() -> bool:
        if not starting:
            broker.kill()
            starting.append(threading.Thread(target=broker.start))
            starting[0].start()
        return False

    with KafkaTopics(settings_of(broker)) as kafka:
        done = relay(stream.store, stream.topic, kafka, stop=kill_once)
    starting[0].join()
    assert done.messages == 12_000
    assert delivered(broker, stream)[1] == published(stream)


def test_while_the_broker_is_down_nothing_is_lost(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.down")
    publish(stream, "bootstrap-a", notes(0, 4000))
    publish(stream, "bootstrap-b", notes(4000, 4000), notes(8000, 10))
    impatient = settings_of(broker, answer_timeout_s=2.0, delivery_timeout_s=2.0)

    def kill() -> bool:
        broker.kill()
        return False

    with KafkaTopics(impatient) as kafka:
        assert relay(stream.store, stream.topic, kafka, folders=["bootstrap-a"]).messages == 4000
        with pytest.raises(BrokerUnavailableError, match=f"{broker.bootstrap} is not available, topic demo.shop.down"):
            relay(stream.store, stream.topic, kafka, stop=kill)
        with pytest.raises(BrokerUnavailableError, match=r"last: .*refused"):
            relay(stream.store, stream.topic, kafka)
        broker.start()
        assert relay(stream.store, stream.topic, kafka).messages == 4010
    assert delivered(broker, stream)[1] == published(stream)


def test_what_a_broker_refuses_is_said(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.refused")
    publish(stream, "bootstrap-a", notes(0, 1))
    with (
        KafkaTopics(replace(settings_of(broker), replication_factor=3)) as kafka,
        pytest.raises(RelayError, match=r"refuses, topic demo\.shop\.refused: .*replication"),
    ):
        relay(stream.store, stream.topic, kafka)


def test_a_topic_that_kafka_takes_for_another(broker: KafkaBroker, tmp_path: Path) -> None:
    first, second = outbox(tmp_path, "demo.shop.eu_notes"), outbox(tmp_path, "demo.shop_eu.notes")
    for stream in (first, second):
        publish(stream, "bootstrap-a", notes(0, 10))
    with KafkaTopics(settings_of(broker)) as kafka:
        relay(first.store, first.topic, kafka)
        with pytest.raises(RelayError, match=r"collides with .*kafka\.topic_name"):
            relay(second.store, second.topic, kafka)
    with KafkaTopics(replace(settings_of(broker), topic_name={second.topic: "demo.shop-eu.notes"})) as kafka:
        assert relay(second.store, second.topic, kafka).messages == 10
