"""The relay where something of the stream is damaged: what is whole before it comes, and once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringsync.streams.files import FileStream, StreamDamagedError
from ringsync.streams.kafka import relay as relays
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.kafka.cursor import Cursor, CursorObject
from ringsync.streams.kafka.errors import AnotherRelayError
from ringsync.streams.kafka.relay import relay
from tests.mock_kafka import MockKafka, mock_kafka
from tests.streams.outbox import notes, outbox, publish

SERIES = "pass-000000000000"


@pytest.fixture
def mock(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockKafka]:
    monkeypatch.setattr(KafkaTopics, "_make", lambda *_: None)  # the mock makes none for an admin client
    with mock_kafka() as found:
        yield found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is sent."""
    found: list[int] = []
    send = KafkaTopics.send

    def counting(kafka: KafkaTopics, topic: str, keys: Any, *rest: Any) -> None:
        found.append(len(keys))
        send(kafka, topic, keys, *rest)

    monkeypatch.setattr(KafkaTopics, "send", counting)
    return found


def stored(stream: FileStream) -> Cursor:
    return CursorObject(stream.store, stream.topic, stream.topic).load()


def backlog(folder: Path, mock: MockKafka) -> FileStream:
    """Six passes and a part; the part behind is another."""
    stream = outbox(folder, "demo.shop.t")
    mock.make(stream.topic)
    for number in range(1, 7):
        publish(stream, f"pass-{number:012}", notes(number * 10_000, 5000))
    publish(stream, "pass-000000000007", notes(70_000, 5000), notes(80_000, 5000))
    return stream


def test_what_is_whole_before_a_damaged_part_is_confirmed(tmp_path: Path, mock: MockKafka, sent: list[int]) -> None:
    stream = backlog(tmp_path, mock)
    damaged = next(tmp_path.glob("streams/*/pass-000000000007/part-001*.avro"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with KafkaTopics(KafkaSettings((mock.bootstrap,))) as kafka:
        for _ in range(5):
            with pytest.raises(StreamDamagedError, match=r"part-001"):
                relay(stream.store, stream.topic, kafka)
            assert stored(stream) == Cursor(stream.topic, {SERIES: ((1, 6),)}, bucket="pass-000000000007", parts=1)
        assert (kafka.confirmed, sum(sent)) == (35_000, 70_000)


def test_of_a_part_whose_messages_cannot_be_written_nothing_is_confirmed(
    tmp_path: Path, mock: MockKafka, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first blocks are sent before the bad one is met."""
    stream = backlog(tmp_path, mock)
    serialiser = relays._serialiser

    def picky(*given: Any) -> Any:
        serialise = serialiser(*given)

        def checked(block: Any) -> Any:
            if any(b"note 84500 " in value for value in block.values):
                raise ValueError("cannot be written")
            return serialise(block)

        return checked

    monkeypatch.setattr(relays, "_serialiser", picky)
    with KafkaTopics(KafkaSettings((mock.bootstrap,))) as kafka:
        with pytest.raises(StreamDamagedError, match="cannot be written"):
            relay(stream.store, stream.topic, kafka)
        assert stored(stream) == Cursor(stream.topic, {SERIES: ((1, 6),)}, bucket="pass-000000000007", parts=1)
        assert (kafka.confirmed, sum(sent) > 70_000) == (35_000, True)
        sent.clear()
        with pytest.raises(StreamDamagedError, match="cannot be written"):
            relay(stream.store, stream.topic, kafka)
        assert (kafka.confirmed, sum(sent)) == (35_000, 4000)


def test_who_has_lost_the_topic_does_not_take_it_back_at_once(tmp_path: Path, mock: MockKafka, sent: list[int]) -> None:
    stream = backlog(tmp_path, mock)
    with KafkaTopics(KafkaSettings((mock.bootstrap,))) as kafka:

        def claim() -> bool:
            CursorObject(stream.store, stream.topic, stream.topic).claim()
            return False

        with pytest.raises(AnotherRelayError):
            relay(stream.store, stream.topic, kafka, stop=claim)
    assert sum(sent) == 40_000
    assert stored(stream) == Cursor(stream.topic)


def test_a_bucket_that_is_announced_twice_is_sent_once(tmp_path: Path, mock: MockKafka, sent: list[int]) -> None:
    """A cut-over whose moves are interrupted is done again."""
    stream = outbox(tmp_path, "demo.shop.t")
    mock.make(stream.topic)
    buckets = [f"pass-{number:012}" for number in (1, 2, 3)]
    for number, bucket in enumerate(buckets):
        publish(stream, bucket, notes(number * 10, 3))
    with KafkaTopics(KafkaSettings((mock.bootstrap,))) as kafka:
        done = relay(stream.store, stream.topic, kafka, buckets=[buckets[0], *buckets[:2], *buckets])
    assert (done.buckets, sum(sent)) == (tuple(buckets), 9)
