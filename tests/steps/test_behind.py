"""How far replica and Kafka are behind is measured, and told: a broker that is slow and never fails, too."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.ledger.passes import Pass, pass_folder
from ringsync.metrics import exposition
from ringsync.service.delays import Limits
from ringsync.service.expected import CLOSE, Expected
from ringsync.service.health import problems
from ringsync.steps.close.table_state import TableState
from ringsync.steps.passes.sink_feed import SinkFeed
from ringsync.streams.files import FileStream, Part
from tests.streams.outbox import notes, outbox, publish

WRITTEN_MS = 20_000
"""Time from write to message of all passes."""


class SlowBroker:
    """Takes everything, and confirms a folder only when it is let."""

    name = "kafka"

    def __init__(self) -> None:
        self.confirmed, self.waits_since, self.queued_bytes = 0, math.inf, 0
        self.takes = threading.Semaphore(0)
        self._sent = 0

    def topic_of(self, topic: str) -> str:
        return topic

    def check_answers(self, stop: Callable[[], bool]) -> None:
        """It answers."""

    def open(self, topic: str) -> bool:
        return False

    def is_open(self, topic: str) -> bool:
        return True

    def send(self, topic: str, messages: Any, schemas: Any) -> None:
        self._sent += len(messages.keys)

    def is_long(self, topic: str) -> bool:
        return True

    def confirm(self, topic: str) -> int:
        if sent := self._sent:
            assert self.takes.acquire(timeout=30)
            self._sent = 0
            self.confirmed += sent
            return sent
        return 0

    def give_up(self, topic: str) -> None:
        """There is nothing to take back."""

    def close(self) -> None:
        """There is no connection."""


@pytest.fixture
def stream(tmp_path: Path) -> FileStream:
    found = outbox(tmp_path, "demo.shop.t")
    for number in (1, 2, 3):
        publish(found, pass_folder(number), notes(number * 100, 5))
    return found


@pytest.fixture
def feed(stream: FileStream) -> Iterator[tuple[SinkFeed, SlowBroker]]:
    broker = SlowBroker()
    with SinkFeed(stream.store, lambda: broker) as found:  # type: ignore[arg-type, return-value]
        found.watch(stream.topic)
        yield found, broker
        broker.takes.release(100)


def table(age_s: float, replica_pass: int | None, bootstrap: str = "") -> TableState:
    """A table that has published three passes, one second after the other, the last one so long ago."""
    now_ms = int((time.time() - age_s) * 1000)
    passes = [
        Pass(n, "changes", "0" * 32, now_ms - (3 - n) * 1000, parts=(Part("p", 5, 1, 1),), lag_ms=WRITTEN_MS)
        for n in (1, 2, 3)
    ]
    told = {"last_pass": 3, "bootstrap": bootstrap, "replica_error": None, "replica_pass": replica_pass}
    follow_ups = SimpleNamespace(passes=passes, last=3, status=lambda: told, replica_lag_ms=WRITTEN_MS + 700)
    planned = SimpleNamespace(table_id="0" * 32, topic="demo.shop.t", by_arrival=False)
    return TableState(planned, follow_ups)  # type: ignore[arg-type]


def status(state: TableState, kafka: Any) -> dict[str, Any]:
    return state.status(kafka or {}, 0, None)


def told(fields: dict[str, Any]) -> list[str]:
    statuses = {CLOSE: {"at_ms": int(time.time() * 1000), "tables": {"shop.t": fields}}}
    found = problems(statuses, {}, Expected.of_commit_logs(()), False, time.time(), limits=Limits(math.inf, 60))
    return [f"{problem.kind} {problem.where}" for problem in found if "lagging" in problem.kind]


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_broker_that_is_slow_and_never_fails_is_told(stream: FileStream, feed: tuple[SinkFeed, SlowBroker]) -> None:
    ours, broker = feed

    def kafka() -> dict[str, Any]:
        return dict(ours.status(stream.topic) or {})

    until(lambda: kafka()["newest"] is not None)
    assert kafka()["error"] is None
    fields = status(table(90, 3), kafka())
    assert 92_000 <= fields["behind_ms"]["kafka"] < 100_000, "since the first that it lacks"
    assert fields["lag_ms"]["kafka_p50"] is None
    assert told(fields) == ["kafka-lagging shop.t"]
    assert told(status(table(30, 3), kafka())) == [], "it has some time"
    broker.takes.release()
    until(lambda: kafka()["newest"] == pass_folder(1))
    assert kafka()["messages"] == 5, "within one relay, which goes on"
    fields = status(table(90, 3), kafka())
    assert 91_000 <= fields["behind_ms"]["kafka"] < 92_000
    assert WRITTEN_MS + 91_000 <= fields["lag_ms"]["kafka_p50"] < WRITTEN_MS + 100_000, "from the write on"
    broker.takes.release(2)
    until(lambda: kafka()["newest"] == pass_folder(3))
    fields = status(table(90, 3), kafka())
    assert fields["behind_ms"]["kafka"] == 0
    assert told(fields) == []
    text = exposition({CLOSE: {"at_ms": 1, "tables": {"shop.t": fields}}})
    assert 'ringsync_table_behind_seconds{table="shop.t",reader="kafka"} 0.0' in text
    assert 'ringsync_table_lag_seconds{table="shop.t",until="kafka",quantile="0.5"}' in text
    assert 'ringsync_table_lag_seconds{table="shop.t",until="replica",quantile="0.5"} 20.7' in text


def test_a_replica_that_lacks_passes_is_told() -> None:
    fields = status(table(90, 1), None)
    assert 91_000 <= fields["behind_ms"]["replica"] < 92_000
    assert fields["behind_ms"]["kafka"] is None, "there is none"
    assert told(fields) == ["replica-lagging shop.t"]
    for state in (table(90, 3), table(90, None), table(90, 1, bootstrap="b1"), table(30, 1)):
        assert told(status(state, None)) == []
