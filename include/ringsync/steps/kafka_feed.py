"""Kafka fed from the streams' files, beside the loop that writes them: a broker that is away holds up nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ringsync.storage.port import ObjectStore, StorageError
from ringsync.streams.files import StreamError
from ringsync.streams.kafka import relay
from ringsync.streams.kafka_topics import KafkaSettings, KafkaTopics
from ringsync.streams.relay_errors import AnotherRelayError, RelayError

PAUSE_S = 1.0
"""Between two looks at the streams, unless a bucket is announced."""

LISTED_EVERY_S = 60.0
"""So often all buckets of a stream are listed; otherwise only those are looked at that are announced."""


LONGEST_PAUSE_S = 60.0
"""Between two attempts for a topic that another process relays, too: each time twice as long, up to this."""

ALONE_AFTER_S = 600.0
"""After so long without another process the pauses begin with the shortest one again."""


class KafkaFeed:
    """A thread that copies published buckets to Kafka, each topic's in their order.

    :param settings: None: there is no Kafka, and nothing is done
    """

    def __init__(self, store: ObjectStore, settings: KafkaSettings | None) -> None:
        self._store = store
        self._settings = settings
        self._buckets: dict[str, list[str]] = {}
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafka-feed", daemon=True)
        self._status: dict[str, dict[str, Any]] = {}
        self._rivals: dict[str, _Rival] = {}

    def __enter__(self) -> Self:
        if self._settings is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._news.set()
        if self._settings is not None:
            self._thread.join()

    def announce(self, topic: str, bucket: str) -> None:
        """A bucket is published."""
        with self._lock:
            self._buckets.setdefault(topic, []).append(bucket)
        self._news.set()

    def watch(self, topic: str) -> None:
        """There is a stream; what it has published is looked up."""
        with self._lock:
            self._buckets.setdefault(topic, [])

    def status(self, topic: str) -> Mapping[str, Any] | None:
        """How far a topic has come; None: there is no Kafka."""
        return None if self._settings is None else self._status.get(topic, {"messages": 0, "error": None})

    def _run(self) -> None:
        assert self._settings is not None
        listed_at = -LISTED_EVERY_S
        with KafkaTopics(self._settings) as kafka:
            while True:
                ending = self._ended.is_set()
                self._news.clear()
                if listed := time.monotonic() - listed_at >= LISTED_EVERY_S:
                    listed_at = time.monotonic()
                for topic in list(self._buckets):
                    self._relay(kafka, topic, listed=listed)
                if ending:
                    return
                self._news.wait(PAUSE_S)

    def _relay(self, kafka: KafkaTopics, topic: str, *, listed: bool) -> None:
        with self._lock:
            announced = list(self._buckets[topic])
        rival = self._rivals.get(topic)
        if rival is not None and time.monotonic() < rival.until:
            return
        # What another process has published is not announced here.
        whole = listed or topic not in self._seen
        before = self._status.get(topic, {"messages": 0})["messages"]
        try:
            done = relay(self._store, topic, kafka, buckets=None if whole else announced, stop=self._ended.is_set)
        except (RelayError, StreamError, StorageError) as error:
            if isinstance(error, AnotherRelayError):
                self._rivals[topic] = _met(rival, time.monotonic())
                self._seen.discard(topic)
            if self._status.get(topic, {}).get("error") != str(error):
                print(f"ringsync: warning: {error}", flush=True)
            self._status[topic] = {"messages": before, "error": str(error)}
            return
        self._seen.add(topic)
        self._status[topic] = {"messages": before + done.messages, "error": None}
        with self._lock:
            gone = set(announced) if not done.waiting else set(done.buckets)
            self._buckets[topic] = [bucket for bucket in self._buckets[topic] if bucket not in gone]


@dataclass(frozen=True)
class _Rival:
    """Another process that relays a topic, too.

    :ivar met: when it was noticed last, by the monotonic clock
    :ivar pause_s: how long to leave the topic to it
    :ivar until: when to try again: not in step with the other, who waits likewise
    """

    met: float
    pause_s: float
    until: float


def _met(before: _Rival | None, now: float) -> _Rival:
    pause = PAUSE_S if before is None or now - before.met > ALONE_AFTER_S else min(2 * before.pause_s, LONGEST_PAUSE_S)
    return _Rival(now, pause, now + pause * random.uniform(0.5, 1.5))
