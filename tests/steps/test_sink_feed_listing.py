"""What the feed lists of the streams: not their history, and no topic waits for ever because others are looked at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ringsync.steps.passes import sink_feed
from ringsync.storage.local import LocalStore
from ringsync.storage.port import Stat
from ringsync.streams import relay as relay_module
from ringsync.streams.kafka.client import KafkaTopics
from ringsync.streams.relay import Relayed
from tests.mock_kafka import MockKafka
from tests.steps.test_sink_feed import SECONDS, feeding, pass_, streams_of, told, within
from tests.streams.outbox import notes, publish


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
    monkeypatch.setattr(sink_feed, "LISTED_EVERY_S", 0.2)
    with feeding(Counting(tmp_path), (mock.bootstrap,)) as feed:
        feed.watch(stream.topic)
        within(SECONDS, lambda: told(feed, stream)["messages"] == 3 * 99)
        Counting.listed = 0
        time.sleep(3)
        assert 3 < Counting.listed < 100
        # Of another process: nobody announces it. A pass without messages is between.
        publish(stream, pass_(101), notes(2000, 3))
        within(SECONDS, lambda: told(feed, stream)["messages"] == 3 * 100)
        assert Counting.listed < 150


def test_a_run_that_begins_lists_no_history_either(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did, and what it had no time for never reached Kafka, in any run. What another process published later under
    a lower number, which should not happen, still comes if it is not far back."""
    monkeypatch.setattr(relay_module, "LOOK_BACK", 10)
    (stream,) = streams_of(tmp_path, "a", mock)
    for number in (*range(2, 95), *range(96, 100)):
        publish(stream, pass_(number), notes(number * 10, 3))
    with feeding(stream.store, (mock.bootstrap,)) as feed:
        feed.watch(stream.topic)
        within(SECONDS, lambda: told(feed, stream)["messages"] == 3 * 98)
    publish(stream, pass_(95), notes(3000, 3))
    publish(stream, pass_(100), notes(4000, 3))
    Counting.listed = 0
    with feeding(Counting(tmp_path), (mock.bootstrap,)) as feed:
        feed.watch(stream.topic)
        within(SECONDS, lambda: told(feed, stream)["messages"] == 3 * 2)
    assert Counting.listed < 2 * 3 * 15


def test_what_one_run_does_not_reach_the_next_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run began with the same topics."""
    reached: list[set[str]] = []

    def slow(store: Any, topic: str, kafka: KafkaTopics, **_: Any) -> Relayed:
        reached[-1].add(topic)
        time.sleep(0.2)
        return Relayed()

    monkeypatch.setattr(sink_feed, "relay", slow)
    monkeypatch.setattr(sink_feed, "SENT_UNTIL_S", 0.0)
    store: Any = None
    for _ in range(2):
        reached.append(set())
        with feeding(store, ("x:1",)) as feed:
            for number in range(100):
                feed.watch(f"t{number:03}")
            within(SECONDS, lambda: len(reached[-1]) >= 8)
    assert all(len(run) < 50 for run in reached)
    assert reached[0] != reached[1]
