"""Whether a Kafka cluster answers is asked once for all topics: while it seems not to, none is relayed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ringsync.streams.kafka import client as kafka_topics
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.sink import BrokerUnavailableError
from tests.mock_kafka import MockKafka, mock_kafka


@pytest.fixture
def mock() -> Iterator[MockKafka]:
    with mock_kafka() as found:
        yield found


def test_a_cluster_that_answers_slowly_answers(mock: MockKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked for all topics, and for no longer than a step at a time."""
    monkeypatch.setattr(kafka_topics, "_STEP_S", 0.2)
    mock.answer_after(500)
    KafkaTopics(KafkaSettings((mock.bootstrap,), answer_timeout_s=4.0)).check_answers()


def test_who_asks_hears_that_the_run_ends(mock: MockKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_topics, "_STEP_S", 0.1)
    mock.answer_after(5000)
    begun = time.monotonic()
    with pytest.raises(BrokerUnavailableError, match="all topics"):
        KafkaTopics(KafkaSettings((mock.bootstrap,))).check_answers(lambda: time.monotonic() - begun > 0.5)
    assert time.monotonic() - begun < 3.0


def test_who_does_not_answer_in_time_is_away() -> None:
    begun = time.monotonic()
    with pytest.raises(BrokerUnavailableError, match=r"all topics: .*refused"):
        KafkaTopics(KafkaSettings(("127.0.0.1:1",), answer_timeout_s=2.0)).check_answers()
    assert time.monotonic() - begun < 4.0
