"""Kafka fed from the streams' files, beside the loop that writes them: a broker that is away holds up nothing.

Each topic is relayed by itself, in a thread that lasts as long as there is something to relay: what goes wrong is its
own trouble, and its own pause. Whether the cluster answers at all is asked once for all of them.

What is scarce is time, memory and files. So there is a room for topics that are well, and one, as large, for those on
trial: Kafka has taken nothing of them yet, or they have failed since. Each has place for so many at work, so many bytes
that wait for Kafka, and so many topics. Who is on trial hands over one part, and is well when Kafka has it. Those who
are well take turns as soon as one of them finds no place.
"""

from __future__ import annotations

import math
import os
import random
import resource
import threading
import time
import traceback
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Self

from ringsync.storage.port import ObjectStore, StorageError
from ringsync.streams.files import StreamError
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.kafka.errors import AnotherRelayError, BrokerUnavailableError, RelayError
from ringsync.streams.kafka.relay import relay

PAUSE_S = 1.0
"""After a topic's first failure."""

LONGEST_PAUSE_S = 60.0
"""Between two attempts for a topic that fails, or that another process relays, too: each twice as long, up to this."""

ALONE_AFTER_S = 600.0
"""After so long without another process the pauses begin with the shortest one again."""

LISTED_EVERY_S = 60.0
"""So often it is looked for buckets that nobody has announced: of another process."""

AT_WORK = 4
"""Topics at work in a room; they share their time with the loop. Those who wait for Kafka do not count."""

QUEUED_BYTES = 256 << 20
"""Of messages that Kafka does not have yet: where a room has more nobody enters. Who is at work may exceed it."""

AT_ONCE = 32
"""Topics in a room, with those who wait for Kafka."""

TURN_S = 2.0
"""Who is well goes on for so long while others wait for a place."""

MOMENT_S = 0.5
"""Who waits for Kafka for longer does not count as being at work."""

MAX_PRODUCERS = 500
"""Topics that keep their producers, of half a megabyte each; those beyond begin anew each time, which takes 100 ms."""

FILES = 1 / 3
"""Of the files that the process may open: where more are open no further topic keeps its producer."""

IDLE_S = 120.0
"""Topics that were not relayed for so long keep none."""

SENT_UNTIL_S = 2.0
"""At the end: who is at work stops after this, at the end of a part, and confirms."""

LEFT_AFTER_S = 5.0
"""At the end: who still waits is left alone. What is not relayed belongs to the next run."""


class KafkaFeed:
    """Threads that copy published buckets to Kafka, each topic's in their order.

    :param settings: None: there is no Kafka, and nothing is done
    """

    def __init__(self, store: ObjectStore, settings: KafkaSettings | None) -> None:
        self._store = store
        self._settings = settings
        self._topics: dict[str, _Topic] = {}
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafka-feed", daemon=True)
        self._ends_at = math.inf
        self._in_doubt = False
        self._is_crowded = False
        self._error: str | None = None

    def __enter__(self) -> Self:
        if self._settings is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends_at = time.monotonic() + SENT_UNTIL_S
        self._news.set()
        if self._settings is not None:
            self._thread.join(LEFT_AFTER_S)
            if self._thread.is_alive():
                left = [topic.name for topic in self._all() if topic.is_running]
                _warn(f"the run ends; still waiting for Kafka: {', '.join(left) or 'the cluster'}")

    def announce(self, topic: str, bucket: str) -> None:
        """Take note that a bucket is published."""
        self._add(topic, bucket)
        self._news.set()

    def watch(self, topic: str) -> None:
        """There is a stream; what it has published is looked up."""
        self._add(topic)
        self._news.set()

    def status(self, topic: str) -> Mapping[str, Any] | None:
        """Tell how far a topic has come; None: there is no Kafka."""
        if self._settings is None:
            return None
        one = self._topics.get(topic)
        if one is None:
            return {"messages": 0, "error": self._error}
        return {"messages": one.kafka.confirmed, "error": (self._error if one.has_work else None) or one.error}

    def producers(self) -> int:
        """Tell how many topics have one."""
        return sum(topic.kafka.is_open(topic.name) for topic in self._all())

    def _is_full(self) -> bool:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = files == resource.RLIM_INFINITY or len(os.listdir("/dev/fd")) < files * FILES
        return not few or self.producers() > MAX_PRODUCERS

    def _add(self, name: str, *buckets: str) -> None:
        if self._settings is not None:
            with self._lock:
                if name not in self._topics:
                    self._topics[name] = _Topic(name, self._settings)
                self._topics[name].buckets += buckets

    def _all(self) -> list[_Topic]:
        with self._lock:
            return list(self._topics.values())

    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_at

    def _run(self) -> None:
        assert self._settings is not None
        cluster = KafkaTopics(self._settings)
        while not self._has_ended():
            self._news.wait(MOMENT_S)
            self._news.clear()
            try:
                if self._in_doubt:
                    self._ask(cluster)
                else:
                    self._begin_some(time.monotonic())
                self._error = None
            except Exception as error:  # whatever it is: nobody else would begin a topic any more
                self._error = _told(error, self._error)
                time.sleep(PAUSE_S)
        for topic in self._all():
            topic.kafka.close()

    def _has_ended(self) -> bool:
        """Tell whether the run is at its end, and nobody is at work, nor could be."""
        if math.isinf(self._ends_at):
            return False
        topics = self._all()
        waiting = not self._in_doubt and not self._is_over() and any(topic.is_due(math.inf, True) for topic in topics)
        return not waiting and not any(topic.is_running for topic in topics)

    def _ask(self, cluster: KafkaTopics) -> None:
        """Find out whether it is the cluster that does not answer, or only a topic of it.

        :raises BrokerUnavailableError: it is the cluster
        """
        if math.isinf(self._ends_at):
            cluster.check_answers(lambda: not math.isinf(self._ends_at))
            self._in_doubt = False

    def _begin_some(self, now: float) -> None:
        """Begin with those that come first, as many as there is room for."""
        if self._is_over():
            return
        topics = self._all()
        due = [topic for topic in topics if topic.is_due(now, ending=not math.isinf(self._ends_at))]
        for is_well in (True, False):
            room = [topic for topic in topics if topic.is_running and topic.is_well == is_well]
            queue = sorted((topic for topic in due if topic.is_well == is_well), key=_Topic.place_in_queue)
            while queue and _has_place(room, now):
                room.append(queue.pop(0))
                self._begin(room[-1], now)
            if is_well:
                self._is_crowded = bool(queue)
        for topic in topics:
            if not topic.is_running and now - topic.tried_at > IDLE_S:
                topic.kafka.give_up(topic.name)

    def _begin(self, topic: _Topic, now: float) -> None:
        topic.is_running, topic.tried_at = True, now
        try:
            threading.Thread(target=self._relay, args=(topic,), name=f"kafka {topic.name}", daemon=True).start()
        except RuntimeError as error:  # there is no thread to be had
            topic.is_running = False
            self._failed(topic, error)

    def _failed(self, topic: _Topic, error: Exception) -> None:
        topic.failed(error, _told(error, topic.error), time.monotonic())
        self._in_doubt = self._in_doubt or isinstance(error, BrokerUnavailableError)

    def _relay(self, topic: _Topic) -> None:
        is_kept = topic.kafka.is_open(topic.name)
        try:
            self._try(topic)
            if not is_kept and self._is_full():
                topic.kafka.give_up(topic.name)
        except Exception as error:
            self._failed(topic, error)
        finally:
            topic.is_running = False
            self._news.set()

    def _try(self, topic: _Topic) -> None:
        with self._lock:
            announced = tuple(topic.buckets)
        begun, is_trial = time.monotonic(), not topic.is_well
        # What another process has published is not announced here: it is looked for where nothing is. What no process
        # announces any more lies before the newest bucket that Kafka has: it is looked for once in a run.
        done = relay(
            self._store,
            topic.name,
            topic.kafka,
            buckets=announced if topic.was_looked_at else None,
            stop=lambda: self._is_over() or is_trial or (self._is_crowded and time.monotonic() - begun > TURN_S),
        )
        if not announced or not topic.was_looked_at:
            topic.look_at = time.monotonic() + LISTED_EVERY_S
        topic.succeeded()
        with self._lock:
            topic.buckets = [*done.waiting, *topic.buckets[len(announced) :]]


def _has_place(room: Collection[_Topic], now: float) -> bool:
    """Tell whether one more topic can be relayed beside these."""
    at_work = sum(now - topic.kafka.waits_since < MOMENT_S for topic in room)
    queued = sum(topic.kafka.queued_bytes for topic in room)
    return at_work < AT_WORK and queued < QUEUED_BYTES and len(room) < AT_ONCE


class _Topic:
    """A topic and how it fares.

    :ivar kafka: the topic's producer, for the thread that relays it
    :ivar buckets: buckets that are known and not relayed yet
    :ivar look_at: time of the next look for others, by the monotonic clock; minus infinity: not done yet
    :ivar tried_at: time when the last attempt began, by the monotonic clock
    :ivar is_running: whether there is an attempt
    :ivar error: how the last one has failed; None: it has not
    """

    def __init__(self, name: str, settings: KafkaSettings) -> None:
        self.name = name
        self.kafka = KafkaTopics(settings)
        self.buckets: list[str] = []
        self.look_at = self.tried_at = -math.inf
        self.is_running = False
        self.error: str | None = None
        self._failures = 0
        self._pause_s = 0.0
        self._again_at = -math.inf
        self._rival_at = -math.inf

    @property
    def was_looked_at(self) -> bool:
        """Whether all that was published before the run is relayed, or known."""
        return not math.isinf(self.look_at)

    @property
    def has_work(self) -> bool:
        """Whether there may be something that Kafka does not have."""
        return bool(self.buckets) or not self.was_looked_at

    @property
    def is_well(self) -> bool:
        """Whether Kafka has taken something of it, in this run and since it failed."""
        return self.error is None and self.kafka.confirmed > 0

    def place_in_queue(self) -> tuple[int, float]:
        """Return the place in the queue: who failed least often comes first, and of these who waited longest."""
        return self._failures, self.tried_at

    def is_due(self, now: float, ending: bool) -> bool:
        """Tell whether to relay it.

        :param now: the time, by the monotonic clock
        :param ending: whether only what is announced is relayed, and nothing tried again
        """
        if ending:
            return not self.is_running and self.error is None and bool(self.buckets)
        return not self.is_running and now >= self._again_at and (bool(self.buckets) or now >= self.look_at)

    def failed(self, error: Exception, told: str, now: float) -> None:
        """Pause: not in step with others, who wait likewise.

        :param told: what status says
        """
        is_rival = isinstance(error, AnotherRelayError)
        if self._pause_s and (not is_rival or now - self._rival_at < ALONE_AFTER_S):
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        else:
            self._pause_s = PAUSE_S
        if is_rival:
            self._rival_at = now
            self.look_at = min(self.look_at, now)
        self._again_at = now + self._pause_s * random.uniform(0.5, 1.5)
        self._failures += 1
        self.error = told

    def succeeded(self) -> None:
        """Pause no more; but with another process the topic is taken in turns, ever longer ones."""
        self.error = None
        self._failures = 0
        if time.monotonic() - self._rival_at > ALONE_AFTER_S:
            self._pause_s = 0.0


def _told(error: Exception, before: str | None) -> str:
    """Return what status says of an error; it is printed when it is new, with its place if nobody has foreseen it."""
    is_foreseen = isinstance(error, RelayError | StreamError | StorageError)
    told = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
    if told != before:
        _warn(told)
        if not is_foreseen:
            traceback.print_exception(error)
    return told


def _warn(told: str) -> None:
    print(f"ringsync: warning: {told}", flush=True)
