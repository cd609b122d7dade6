"""The relay where something of the stream is damaged: what is whole before it comes, and once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringsync.streams import relay as relays
from ringsync.streams.cursor import Cursor, CursorObject
from ringsync.streams.files import FileStream, StreamDamagedError
from ringsync.streams.kafka import client as kafka_topics
from ringsync.streams.kafka import sender as kafka_sender
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.part_index import MessageBlock
from ringsync.streams.relay import relay
from ringsync.streams.sink import AnotherRelayError
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

    def counting(kafka: KafkaTopics, topic: str, messages: MessageBlock, *rest: Any) -> None:
        send(kafka, topic, messages, *rest)
        found.append(len(messages.keys))

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
            assert stored(stream) == Cursor(stream.topic, {SERIES: ((1, 6),)}, folder="pass-000000000007", parts=1)
        assert (kafka.confirmed, sum(sent)) == (35_000, 70_000)


def test_of_a_part_whose_messages_cannot_be_written_nothing_is_confirmed(
    tmp_path: Path, mock: MockKafka, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first blocks are sent before the bad one is met."""
    stream = backlog(tmp_path, mock)
    serialiser = KafkaTopics._serialiser

    def picky(*given: Any) -> Any:
        serialise = serialiser(*given)

        def checked(block: Any) -> Any:
            if any(b"note 84500 " in value for value in block.values):
                raise ValueError("cannot be written")
            return serialise(block)

        return checked

    monkeypatch.setattr(KafkaTopics, "_serialiser", picky)
    with KafkaTopics(KafkaSettings((mock.bootstrap,))) as kafka:
        with pytest.raises(StreamDamagedError, match="cannot be written"):
            relay(stream.store, stream.topic, kafka)
        assert stored(stream) == Cursor(stream.topic, {SERIES: ((1, 6),)}, folder="pass-000000000007", parts=1)
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


@pytest.fixture
def slow(mock: MockKafka, monkeypatch: pytest.MonkeyPatch) -> MockKafka:
    """A cluster that takes some hundred messages a second."""
    settings = kafka_topics.producer_settings
    one_by_one = {"batch.num.messages": 40, "max.in.flight.requests.per.connection": 1}
    monkeypatch.setattr(kafka_topics, "producer_settings", lambda *given: {**settings(*given), **one_by_one})
    monkeypatch.setattr(kafka_topics, "COMMIT_AFTER_S", 0.5)
    monkeypatch.setattr(kafka_sender, "FIRST_BYTES", 100_000)
    monkeypatch.setattr(relays, "PIECE_BYTES", 50_000)
    mock.answer_after(100)
    return mock


def test_a_broker_that_takes_less_than_a_part_in_the_time_for_delivery_gets_it(
    tmp_path: Path, slow: MockKafka, sent: list[int]
) -> None:
    """All of it was handed over at once; what was not taken in time was an error, and everything was sent again."""
    stream = outbox(tmp_path, "demo.shop.t")
    slow.make(stream.topic)
    publish(stream, "pass-000000000001", notes(0, 2500))
    with KafkaTopics(KafkaSettings((slow.bootstrap,), delivery_timeout_s=2.0)) as kafka:
        begun = time.monotonic()
        assert relay(stream.store, stream.topic, kafka).messages == 2500
        assert time.monotonic() - begun > 3
    assert sum(sent) == 2500


def test_what_a_slow_broker_has_of_a_part_is_kept(tmp_path: Path, slow: MockKafka, sent: list[int]) -> None:
    """Else no run would come to the end of a part that takes longer than a run."""
    stream = outbox(tmp_path, "demo.shop.t")
    slow.make(stream.topic)
    publish(stream, "pass-000000000001", notes(0, 10), notes(10, 1500))
    places = [stored(stream)]
    while not places[-1].newest:
        with KafkaTopics(KafkaSettings((slow.bootstrap,))) as kafka:
            relay(stream.store, stream.topic, kafka, stop=lambda: bool(kafka.is_long(stream.topic)))
        places.append(stored(stream))
        assert places[-1] != places[-2], "it comes further"
    assert len({place.messages for place in places}) > 2
    assert sum(sent) == 1510


def test_a_bucket_that_is_announced_twice_is_sent_once(tmp_path: Path, mock: MockKafka, sent: list[int]) -> None:
    """A cut-over whose moves are interrupted is done again."""
    stream = outbox(tmp_path, "demo.shop.t")
    mock.make(stream.topic)
    folders = [f"pass-{number:012}" for number in (1, 2, 3)]
    for number, folder in enumerate(folders):
        publish(stream, folder, notes(number * 10, 3))
    with KafkaTopics(KafkaSettings((mock.bootstrap,))) as kafka:
        done = relay(stream.store, stream.topic, kafka, folders=[folders[0], *folders[:2], *folders])
    assert (done.folders, sum(sent)) == (tuple(folders), 9)
