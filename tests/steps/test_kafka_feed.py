"""The feed of Kafka: whatever is away, refused or damaged is the trouble of its own topic, and of no run's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ringsync.steps import kafka_feed
from ringsync.steps.kafka_feed import KafkaFeed
from ringsync.storage.local import LocalStore
from ringsync.storage.port import Stat
from ringsync.streams.files import FileStream
from ringsync.streams.kafka import relay
from ringsync.streams.kafka_topics import KafkaSettings, KafkaTopics
from ringsync.streams.relay_cursor import CursorObject
from ringsync.streams.relay_errors import RelayError
from tests.mock_kafka import MockKafka, mock_kafka
from tests.streams.outbox import notes, outbox, publish

SECONDS = 30.0


@pytest.fixture
def mock(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockKafka]:
    monkeypatch.setattr(KafkaTopics, "_make", lambda *_: None)  # the mock makes none for an admin client
    with mock_kafka() as found:
        yield found


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


def told(feed: KafkaFeed, stream: FileStream) -> dict[str, Any]:
    return dict(feed.status(stream.topic) or {})


def ended(feed: KafkaFeed) -> float:
    """End a feed; how long it took."""
    begun = time.monotonic()
    feed.__exit__(None, None, None)
    return time.monotonic() - begun


class Page(BaseHTTPRequestHandler):
    """A registry whose address first answers with a page."""

    asked: list[str]

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Page.asked.append(self.path)
        body = b"<html>maintenance</html>" if len(Page.asked) == 1 else b'{"id": 1}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    Page.asked = []
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_registry_that_answers_with_a_page_is_told_and_asked_again(
    tmp_path: Path, mock: MockKafka, registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = streams_of(tmp_path, "a b", mock)
    with KafkaFeed(one.store, KafkaSettings((mock.bootstrap,), schema_registry_url=registry)) as feed:
        for stream in (one, other):
            feed.watch(stream.topic)
        within(SECONDS, lambda: told(feed, one)["messages"] == told(feed, other)["messages"] == 3)
    assert "answers no JSON" in capsys.readouterr().out


def test_whatever_happens_to_a_topic_is_its_error(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = streams_of(tmp_path, "a b", mock)

    def fail(store: Any, topic: str, *given: Any, **named: Any) -> Any:
        if topic == one.topic:
            raise ZeroDivisionError("of nobody's doing")
        return relay(store, topic, *given, **named)

    monkeypatch.setattr(kafka_feed, "relay", fail)
    with KafkaFeed(one.store, KafkaSettings((mock.bootstrap,))) as feed:
        for stream in (one, other):
            feed.watch(stream.topic)
        within(SECONDS, lambda: told(feed, other)["messages"] == 3)
        within(SECONDS, lambda: "ZeroDivisionError: of nobody's doing" in str(told(feed, one)["error"]))


def test_a_feed_that_is_gone_says_so(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (stream,) = streams_of(tmp_path, "a", mock)

    def fail(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(KafkaFeed, "_begin_some", fail, raising=False)
    with KafkaFeed(stream.store, KafkaSettings((mock.bootstrap,))) as feed:
        feed.watch(stream.topic)
        within(SECONDS, lambda: "MemoryError" in str(told(feed, stream)["error"]))
    assert "the feed of Kafka has ended: MemoryError" in capsys.readouterr().out


def test_the_end_of_a_run_does_not_wait_for_brokers_that_are_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = streams_of(tmp_path, "a b c d e f")
    feed = KafkaFeed(streams[0].store, KafkaSettings(("127.0.0.1:1",), answer_timeout_s=3.0))
    for stream in streams:
        feed.announce(stream.topic, pass_(1))
    with feed:
        within(SECONDS, lambda: all("not available" in str(told(feed, stream)["error"]) for stream in streams))
        assert ended(feed) < 6.0
    assert "refused" in capsys.readouterr().out


def test_a_topic_that_nobody_leads_is_not_sent_to(tmp_path: Path, mock: MockKafka) -> None:
    (stream,) = streams_of(tmp_path, "a", mock)
    mock.forsake(stream.topic)
    with KafkaFeed(stream.store, KafkaSettings((mock.bootstrap,))) as feed:
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
    with KafkaFeed(good.store, KafkaSettings((mock.bootstrap,), delivery_timeout_s=3.0)) as feed:
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

    monkeypatch.setattr(kafka_feed, "relay", fail)
    monkeypatch.setattr(kafka_feed, "PAUSE_S", 0.1)
    with KafkaFeed(stream.store, KafkaSettings((mock.bootstrap,))) as feed:
        feed.announce(stream.topic, pass_(1))
        time.sleep(3)
    assert 3 <= len(tried) <= 7


def test_what_is_announced_before_the_end_is_relayed(tmp_path: Path, mock: MockKafka) -> None:
    (stream,) = streams_of(tmp_path, "a", mock)
    with KafkaFeed(stream.store, KafkaSettings((mock.bootstrap,))) as feed:
        feed.announce(stream.topic, pass_(1))
    assert pass_(1) in CursorObject(stream.store, stream.topic, stream.topic).load()


class Counting(LocalStore):
    """Counts what it lists."""

    listed = 0

    def list(self, prefix: str = "", start: str = "") -> list[Stat]:
        found = super().list(prefix, start)
        Counting.listed += len(found)
        return found


def test_history_is_not_listed_again(tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    (stream,) = streams_of(tmp_path, "a", mock)
    for number in range(2, 100):
        publish(stream, pass_(number), notes(number * 10, 3))
    monkeypatch.setattr(kafka_feed, "LISTED_EVERY_S", 0.2)
    with KafkaFeed(Counting(tmp_path), KafkaSettings((mock.bootstrap,))) as feed:
        feed.watch(stream.topic)
        within(SECONDS, lambda: told(feed, stream)["messages"] == 3 * 99)
        Counting.listed = 0
        time.sleep(3)
        assert 3 < Counting.listed < 100
        # Of another process: nobody announces it. A pass without messages is between.
        publish(stream, pass_(101), notes(2000, 3))
        within(SECONDS, lambda: told(feed, stream)["messages"] == 3 * 100)
        assert Counting.listed < 150


def test_busy_topics_keep_their_producers_whatever_their_number(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    begin = KafkaTopics._begin
    monkeypatch.setattr(KafkaTopics, "_begin", lambda self, topic: begun.append(topic) or begin(self, topic))
    streams = streams_of(tmp_path, " ".join(f"t{n}" for n in range(40)), mock)
    with KafkaFeed(streams[0].store, KafkaSettings((mock.bootstrap,))) as feed:
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
    monkeypatch.setattr(kafka_feed, "MAX_PRODUCERS", 2)
    monkeypatch.setattr(kafka_feed, "IDLE_S", 1.0)
    streams = streams_of(tmp_path, "a b c d", mock)
    with KafkaFeed(streams[0].store, KafkaSettings((mock.bootstrap,))) as feed:
        for stream in streams:
            feed.announce(stream.topic, pass_(1))
        within(SECONDS, lambda: all(told(feed, stream)["messages"] == 3 for stream in streams))
        within(SECONDS, lambda: feed.producers() <= 2)
        within(SECONDS, lambda: feed.producers() == 0)
