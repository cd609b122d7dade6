"""The feed of Kafka: whatever is away, refused or damaged is the trouble of its own topic, and of no run's end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from ringsync.steps.passes import sink_feed
from ringsync.steps.passes.sink_feed import SinkFeed
from ringsync.storage.port import ObjectStore
from ringsync.streams.cursor import CursorObject
from ringsync.streams.files import FileStream
from ringsync.streams.kafka import client as kafka_topics
from ringsync.streams.kafka import sender as kafka_sender
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.relay import Relayed, relay
from ringsync.streams.sink import BrokerUnavailableError, RelayError
from tests.mock_kafka import MockKafka
from tests.streams.outbox import notes, outbox, publish

SECONDS = 30.0


def feeding(store: ObjectStore, servers: tuple[str, ...], **settings: Any) -> SinkFeed:
    """A feed of Kafka."""
    return SinkFeed(store, lambda: KafkaTopics(KafkaSettings(servers, **settings)))


def streams_of(folder: Path, names: str, mock: MockKafka | None = None) -> list[FileStream]:
    """Streams with a pass of three messages each; their topics are there."""
    found = [outbox(folder, f"demo.shop.{name}") for name in names.split()]
    for stream in found:
        publish(stream, pass_(1), notes(0, 3))
        if mock:
            mock.make(stream.topic)
    return found


def pass_(number: int) -> str:
    return f"pass-{number:012}"


def within(seconds: float, done: Callable[[], Any]) -> float:
    """Wait until something is so; how long it took."""
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - begun


def told(feed: SinkFeed, stream: FileStream) -> dict[str, Any]:
    status = feed.status(stream.topic) or {}
    return {name: status[name] for name in ("messages", "error")}


def ended(feed: SinkFeed) -> float:
    """End a feed; how long it took."""
    begun = time.monotonic()
    feed.__exit__(None, None, None)
    return time.monotonic() - begun


def test_whatever_happens_to_a_topic_is_its_error(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = streams_of(tmp_path, "a b", mock)

    def fail(store: Any, topic: str, *given: Any, **named: Any) -> Any:
        if topic == one.topic:
            raise ZeroDivisionError("of nobody's doing")
        return relay(store, topic, *given, **named)

    monkeypatch.setattr(sink_feed, "relay", fail)
    with feeding(one.store, (mock.bootstrap,)) as feed:
        for stream in (one, other):
            feed.watch(stream.topic)
        within(SECONDS, lambda: told(feed, other)["messages"] == 3)
        within(SECONDS, lambda: "ZeroDivisionError: of nobody's doing" in str(told(feed, one)["error"]))


def test_whatever_happens_to_the_feed_is_told_and_passes(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (stream,) = streams_of(tmp_path, "a", mock)
    begin_some, fails = SinkFeed._begin_some, [True]

    def fail(*given: Any) -> Any:
        if fails:
            raise MemoryError
        return begin_some(*given)

    monkeypatch.setattr(SinkFeed, "_begin_some", fail)
    with feeding(stream.store, (mock.bootstrap,)) as feed:
        feed.watch(stream.topic)
        within(SECONDS, lambda: "MemoryError" in str(told(feed, stream)["error"]))
        fails.clear()
        within(SECONDS, lambda: told(feed, stream) == {"messages": 3, "error": None})
    assert "warning: MemoryError" in capsys.readouterr().out


def test_certificates_that_are_just_being_replaced_stop_nothing(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client can be made meanwhile, neither to send nor to ask whether the cluster answers."""
    (stream,) = streams_of(tmp_path, "a", mock)
    missing = {"Producer": [True], "AdminClient": [True, True]}

    def made(name: str) -> Any:
        make = getattr(kafka_topics, name)

        def make_later(*given: Any) -> Any:
            if missing[name]:
                missing[name].pop()
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "ssl.key.location failed"))
            return make(*given)

        return make_later

    for name in missing:
        monkeypatch.setattr(kafka_topics, name, made(name))
    with feeding(stream.store, (mock.bootstrap,)) as feed:
        feed.watch(stream.topic)
        within(SECONDS, lambda: "ssl.key.location failed" in str(told(feed, stream)["error"]))
        within(SECONDS, lambda: told(feed, stream) == {"messages": 3, "error": None})
    assert missing == {"Producer": [], "AdminClient": []}


def test_the_end_of_a_run_does_not_wait_for_brokers_that_are_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = streams_of(tmp_path, "a b c d e f")
    feed = feeding(streams[0].store, ("127.0.0.1:1",), answer_timeout_s=3.0)
    for stream in streams:
        feed.announce(stream.topic, pass_(1))
    with feed:
        within(SECONDS, lambda: all("not available" in str(told(feed, stream)["error"]) for stream in streams))
        assert ended(feed) < 6.0
    assert "refused" in capsys.readouterr().out


def test_a_topic_that_nobody_leads_is_not_sent_to(tmp_path: Path, mock: MockKafka) -> None:
    (stream,) = streams_of(tmp_path, "a", mock)
    mock.forsake(stream.topic)
    with feeding(stream.store, (mock.bootstrap,)) as feed:
        feed.watch(stream.topic)
        within(8.0, lambda: "Leader not available" in str(told(feed, stream)["error"]))


def test_a_topic_that_nobody_takes_holds_up_no_other(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with fewer replicas in sync than asked for: it has leaders, and it takes until the time for delivery."""
    monkeypatch.setattr(KafkaTopics, "_count_partitions", lambda *_: 4)
    good, *bad = streams_of(tmp_path, "good bad1 bad2 bad3 bad4 bad5 bad6", mock)
    for stream in bad:
        mock.forsake(stream.topic)
    with feeding(good.store, (mock.bootstrap,), delivery_timeout_s=3.0) as feed:
        for stream in (*bad, good):
            feed.watch(stream.topic)
        begun = time.monotonic()
        for number in range(1, 16):
            if number > 1:
                publish(good, pass_(number), notes(number * 10, 3))
                feed.announce(good.topic, pass_(number))
            within(5.0, lambda n=number: told(feed, good)["messages"] == 3 * n)  # type: ignore[misc]
            time.sleep(0.5)
        assert time.monotonic() - begun > 6
        assert "not available" in told(feed, bad[0])["error"]
        assert ended(feed) < 8.0


def test_a_topic_that_fails_is_tried_ever_more_seldom(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stream,) = streams_of(tmp_path, "a", mock)
    tried: list[float] = []

    def fail(*_: Any, **__: Any) -> Any:
        tried.append(time.monotonic())
        raise RelayError("refused")

    monkeypatch.setattr(sink_feed, "relay", fail)
    monkeypatch.setattr(sink_feed, "PAUSE_S", 0.1)
    with feeding(stream.store, (mock.bootstrap,)) as feed:
        feed.announce(stream.topic, pass_(1))
        time.sleep(3)
    assert 3 <= len(tried) <= 7


def test_what_is_announced_before_the_end_is_relayed(tmp_path: Path, mock: MockKafka) -> None:
    (stream,) = streams_of(tmp_path, "a", mock)
    with feeding(stream.store, (mock.bootstrap,)) as feed:
        feed.announce(stream.topic, pass_(1))
    assert pass_(1) in CursorObject(stream.store, stream.topic, stream.topic).load()


def test_busy_topics_keep_their_producers_whatever_their_number(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    begin = KafkaTopics._begin
    monkeypatch.setattr(KafkaTopics, "_begin", lambda self, topic: begun.append(topic) or begin(self, topic))
    streams = streams_of(tmp_path, " ".join(f"t{n}" for n in range(40)), mock)
    with feeding(streams[0].store, (mock.bootstrap,)) as feed:
        for number in (1, 2, 3):
            for stream in streams:
                if number > 1:
                    publish(stream, pass_(number), notes(number * 10, 3))
                feed.announce(stream.topic, pass_(number))
            for stream in streams:
                within(SECONDS, lambda s=stream, n=number: told(feed, s)["messages"] == 3 * n)  # type: ignore[misc]
    assert len(begun) == 40


def test_idle_topics_and_those_beyond_the_limit_keep_none(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_feed, "MAX_PRODUCERS", 2)
    monkeypatch.setattr(sink_feed, "IDLE_S", 1.0)
    streams = streams_of(tmp_path, "a b c d", mock)
    with feeding(streams[0].store, (mock.bootstrap,)) as feed:
        for stream in streams:
            feed.announce(stream.topic, pass_(1))
        within(SECONDS, lambda: all(told(feed, stream)["messages"] == 3 for stream in streams))
        within(SECONDS, lambda: feed.producers() <= 2)
        within(SECONDS, lambda: feed.producers() == 0)


def test_messages_that_nobody_takes_do_not_fill_the_memory(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaTopics, "_count_partitions", lambda *_: 4)
    monkeypatch.setattr(sink_feed, "QUEUED_BYTES", int(3.5 * kafka_sender.FIRST_BYTES))
    streams = streams_of(tmp_path, "a b c d e f g h", mock)
    for stream in streams:
        publish(stream, pass_(2), notes(10, 5000))
        relay(stream.store, stream.topic, KafkaTopics(KafkaSettings((mock.bootstrap,))), stop=lambda: True)
        mock.forsake(stream.topic)
    with SinkFeed(
        streams[0].store, lambda: KafkaTopics(KafkaSettings((mock.bootstrap,), delivery_timeout_s=3.0))
    ) as feed:
        for stream in streams:
            feed.watch(stream.topic)
        time.sleep(1.5)
        queued = [topic.sink.queued_bytes for topic in feed._all() if topic.is_running]
        assert sink_feed.AT_WORK <= len(queued) < len(streams)
        assert kafka_sender.FIRST_BYTES * 0.9 < min(queued) <= max(queued) < kafka_sender.FIRST_BYTES * 1.1


class Backlogs:
    """Relays of topics that have many parts, each of which takes its time."""

    PART_S = 0.05

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.left: dict[str, list[str]] = {}
        self.order: list[str] = []

    def relay(self, store: Any, topic: str, kafka: KafkaTopics, *, folders: Any, stop: Any, tell: Any) -> Relayed:
        if topic not in self.left:
            self.left[topic] = [pass_(n) for n in range(self.parts)] if topic.startswith("big") else [pass_(1)]
            assert folders is None
        else:
            assert list(folders) == self.left[topic], "what is left is known, and not listed again"
        while self.left[topic]:
            time.sleep(self.PART_S)
            self.order.append(topic)
            self.left[topic].pop(0)
            kafka.confirmed += 1
            if stop():
                break
        return Relayed((), 1, tuple(self.left[topic]))


def test_backlogs_take_turns_with_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Backlogs(parts=40)
    monkeypatch.setattr(sink_feed, "relay", world.relay)
    monkeypatch.setattr(sink_feed, "TURN_S", 0.2, raising=False)
    monkeypatch.setattr(sink_feed, "MOMENT_S", 0.1)
    store: Any = None
    with feeding(store, ("x:1",)) as feed:
        feed.watch("small")
        within(SECONDS, lambda: world.order == ["small"])
        for number in range(6):
            feed.watch(f"big{number}")
        within(SECONDS, lambda: len(world.order) > 6 * 3)
        world.left["small"] = [pass_(2)]
        feed.announce("small", pass_(2))
        within(1.5, lambda: world.order.count("small") == 2)
        assert all(world.left[f"big{number}"] for number in range(6))
        within(10.0, lambda: len(world.order) == 6 * 40 + 2)
    assert all(world.order.count(f"big{number}") == 40 for number in range(6))


def test_who_has_failed_hands_over_one_part_and_is_well_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Backlogs(parts=30)
    tried: list[int] = []

    def fail(store: Any, topic: str, kafka: KafkaTopics, **named: Any) -> Relayed:
        tried.append(len(world.order))
        if len(tried) == 1:
            raise RelayError("refused")
        return world.relay(store, topic, kafka, **named)

    monkeypatch.setattr(sink_feed, "relay", fail)
    store: Any = None
    with feeding(store, ("x:1",)) as feed:
        feed.watch("big")
        within(SECONDS, lambda: (feed.status("big") or {})["error"] == "refused")
        within(SECONDS, lambda: (feed.status("big") or {})["error"] is None)
        assert len(world.order) < 10
        within(SECONDS, lambda: len(world.order) == 30)
    assert tried == [0, 0, 1]


def test_who_has_failed_once_does_not_wait_for_those_that_always_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: dict[str, int] = {}
    tried: list[float] = []

    def fail(store: Any, topic: str, kafka: KafkaTopics, **_: Any) -> Relayed:
        if topic == "good":
            tried.append(time.monotonic())
            if len(tried) == 1:
                raise RelayError("refused for a moment")
            return Relayed()
        with kafka.waits():
            time.sleep(0.6)
        failed[topic] = failed.get(topic, 0) + 1
        raise BrokerUnavailableError(topic)

    monkeypatch.setattr(sink_feed, "relay", fail)
    monkeypatch.setattr(KafkaTopics, "check_answers", lambda *_: None)
    for name, seconds in {"PAUSE_S": 0.05, "LONGEST_PAUSE_S": 0.3, "MOMENT_S": 0.05}.items():
        monkeypatch.setattr(sink_feed, name, seconds)
    store: Any = None
    with feeding(store, ("x:1",)) as feed:
        for number in range(48):
            feed.announce(f"bad{number}", pass_(1))
        within(SECONDS, lambda: len(failed) == 48)
        time.sleep(1.5)
        feed.announce("good", pass_(1))
        within(SECONDS, lambda: len(tried) > 1)
        assert tried[1] - tried[0] < 1.0


def test_nothing_is_begun_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though somebody still hangs: the next run's feed has the topics by then."""
    begun: list[str] = []

    def hang(store: Any, topic: str, kafka: KafkaTopics, **_: Any) -> Relayed:
        begun.append(topic)
        if topic == "bad":
            with kafka.waits():
                time.sleep(2)
        return Relayed()

    monkeypatch.setattr(sink_feed, "relay", hang)
    monkeypatch.setattr(sink_feed, "SENT_UNTIL_S", 0.1)
    monkeypatch.setattr(sink_feed, "LEFT_AFTER_S", 0.3)
    store: Any = None
    feed = feeding(store, ("x:1",))
    feed.__enter__()
    feed.announce("bad", pass_(1))
    within(SECONDS, lambda: begun == ["bad"])
    ended(feed)
    feed.announce("good", pass_(1))
    time.sleep(0.8)
    assert begun == ["bad"]


def test_a_topic_that_is_deleted_during_a_run_is_made_again(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stream,) = streams_of(tmp_path, "a", mock)
    made: list[str] = []
    count = KafkaTopics._count_partitions

    def count_if_made(*given: Any) -> int:
        if len(made) < 2:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        return count(*given)

    monkeypatch.setattr(KafkaTopics, "_make", lambda self, topic: made.append(topic))
    with (
        feeding(stream.store, (mock.bootstrap,)) as feed,
        monkeypatch.context() as patch,
    ):
        patch.setattr(KafkaTopics, "_count_partitions", count_if_made)
        feed.watch(stream.topic)
        within(10.0, lambda: told(feed, stream)["messages"] == 3)
    assert made == [stream.topic] * 2
