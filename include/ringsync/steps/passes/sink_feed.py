"""The feed of a sink, e.g. Kafka: threads that copy published folders beside the loop that writes them. A sink that is
away holds up nothing.

Each topic is relayed by itself, in a thread that lasts while there is something to relay. A topic that fails pauses
alone. Whether the sink answers at all is asked once for all of them.

Time, memory and files are scarce. So topics are relayed in two rooms of equal size: one for healthy topics, one for
topics on trial. A topic is on trial until the sink has taken a part of it, and again after it failed; it hands over one
part at a time. Each room limits the topics at work, the bytes that wait for the sink, and the number of its topics.
Healthy topics take turns as soon as one of them finds no place.
"""

from __future__ import annotations

import math
import os
import random
import resource
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self

from ringsync.config import ConfigError
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.streams.cursor import Cursor
from ringsync.streams.files import StreamError
from ringsync.streams.relay import relay
from ringsync.streams.sink import AnotherRelayError, BrokerUnavailableError, RelayError, Sink

PAUSE_S = 1.0
"""Pause after a topic's first failure."""

LONGEST_PAUSE_S = 60.0
"""Longest pause of a topic that fails, or that another process relays, too: each is twice as long as the last."""

ALONE_AFTER_S = 600.0
"""After so long without another process the pauses begin anew with the shortest."""

LISTED_EVERY_S = 60.0
"""Time between two searches for folders of other processes, which announce them elsewhere."""

AT_WORK = 4
"""Topics at work in a room, which share their time with the loop. Topics that wait for the sink do not count."""

QUEUED_BYTES = 256 << 20
"""Bytes of messages that the sink lacks: while a room has more, no topic enters. Topics at work may exceed it."""

AT_ONCE = 32
"""Topics in a room, with those that wait for the sink."""

TURN_S = 2.0
"""A healthy topic's turn while others wait for a place."""

MOMENT_S = 0.5
"""A topic that waits longer for the sink does not count as being at work."""

MAX_PRODUCERS = 500
"""Most producers that are kept, of half a megabyte each. Other topics begin anew each time, which takes 100 ms."""

FILES = 1 / 3
"""Part of the files that the process may open: while more are open, no further topic keeps its producer."""

IDLE_S = 120.0
"""A topic that was not relayed for so long loses its producer."""

SENT_UNTIL_S = 2.0
"""At the end: topics at work stop after this, at the end of a part, and confirm."""

LEFT_AFTER_S = 5.0
"""At the end: topics that still wait are left alone. What is not relayed belongs to the next run."""


class SinkFeed:
    """Threads that copy published folders to a sink, each topic's in their order.

    :param sink: returns a connection to the sink; None: there is no sink, and nothing is done
    """

    def __init__(self, store: ObjectStore, sink: Callable[[], Sink] | None) -> None:
        self._store = store
        self._sink = sink
        self._topics: dict[str, _Topic] = {}
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sink-feed", daemon=True)
        self._ends_at = math.inf
        self._in_doubt = False
        self._is_crowded = False
        self._error: str | None = None

    def __enter__(self) -> Self:
        if self._sink is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends_at = time.monotonic() + SENT_UNTIL_S
        self._news.set()
        if self._sink is not None:
            self._thread.join(LEFT_AFTER_S)
            if self._thread.is_alive():
                left = [topic.name for topic in self._all() if topic.is_running]
                _warn(f"the run ends; still waiting: {', '.join(left) or 'whether the sink answers'}")

    def announce(self, topic: str, folder: str) -> None:
        """Take note of a published folder."""
        self._add(topic, folder)
        self._news.set()

    def watch(self, topic: str) -> None:
        """Take note of a stream, and look up what it has published."""
        self._add(topic)
        self._news.set()

    def status(self, topic: str) -> Mapping[str, Any] | None:
        """Return the progress of a topic; None: there is no sink.

        ``newest`` is the last folder that the sink has confirmed, and ``newest_ms`` when it did, ms since the epoch;
        empty: none. None: not known yet.
        """
        if self._sink is None:
            return None
        known = self._topics.get(topic)
        if known is None:
            return {"messages": 0, "error": self._error, "newest": None, "newest_ms": 0}
        error = (self._error if known.has_work else None) or known.error
        newest, newest_ms = known.reached
        return {"messages": known.sink.confirmed, "error": error, "newest": newest, "newest_ms": newest_ms}

    def producers(self) -> int:
        """Count the topics that have a producer."""
        return sum(topic.sink.is_open(topic.target) for topic in self._all())

    def _is_full(self) -> bool:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = files == resource.RLIM_INFINITY or len(os.listdir("/dev/fd")) < files * FILES
        return not few or self.producers() > MAX_PRODUCERS

    def _add(self, name: str, *folders: str) -> None:
        if self._sink is not None:
            with self._lock:
                if name not in self._topics:
                    self._topics[name] = _Topic(name, self._sink())
                self._topics[name].folders += folders

    def _all(self) -> list[_Topic]:
        with self._lock:
            return list(self._topics.values())

    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_at

    def _run(self) -> None:
        assert self._sink is not None
        any_topic = self._sink()
        while not self._has_ended():
            self._news.wait(MOMENT_S)
            self._news.clear()
            try:
                if not self._in_doubt:
                    self._begin_some(time.monotonic())
                elif math.isinf(self._ends_at):
                    # Does the whole cluster not answer, or only one of its topics?
                    any_topic.check_answers(lambda: not math.isinf(self._ends_at))
                    self._in_doubt = False
                self._error = None
            except Exception as error:  # no other thread begins topics
                self._error = _told(error, self._error)
                time.sleep(PAUSE_S)
        for topic in self._all():
            topic.sink.close()

    def _has_ended(self) -> bool:
        """Tell whether the run is at its end, and no topic is at work, nor could be."""
        if math.isinf(self._ends_at):
            return False
        topics = self._all()
        waiting = not self._in_doubt and not self._is_over() and any(topic.is_due(math.inf, True) for topic in topics)
        return not waiting and not any(topic.is_running for topic in topics)

    def _begin_some(self, now: float) -> None:
        """Begin with the first topics of each queue, as many as there is room for."""
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
                topic.sink.give_up(topic.target)

    def _begin(self, topic: _Topic, now: float) -> None:
        topic.is_running, topic.tried_at = True, now
        try:
            threading.Thread(target=self._relay, args=(topic,), name=f"relay {topic.name}", daemon=True).start()
        except RuntimeError as error:  # there is no thread to be had
            topic.is_running = False
            self._failed(topic, error)

    def _failed(self, topic: _Topic, error: Exception) -> None:
        topic.failed(error, _told(error, topic.error), time.monotonic())
        self._in_doubt = self._in_doubt or isinstance(error, BrokerUnavailableError)

    def _relay(self, topic: _Topic) -> None:
        is_kept = topic.sink.is_open(topic.target)
        try:
            self._try(topic)
            if not is_kept and self._is_full():
                topic.sink.give_up(topic.target)
        except Exception as error:
            self._failed(topic, error)
        finally:
            topic.is_running = False
            self._news.set()

    def _try(self, topic: _Topic) -> None:
        with self._lock:
            announced = tuple(topic.folders)
        begun, is_trial = time.monotonic(), not topic.is_well
        # Folders of another process are not announced here: they are looked for while nothing is announced, and once in
        # a run before anything is relayed.
        done = relay(
            self._store,
            topic.name,
            topic.sink,
            folders=announced if topic.was_looked_at else None,
            tell=topic.has_reached,
            stop=lambda: self._is_over() or is_trial or (self._is_crowded and time.monotonic() - begun > TURN_S),
        )
        if not announced or not topic.was_looked_at:
            topic.look_at = time.monotonic() + LISTED_EVERY_S
        topic.succeeded()
        with self._lock:
            topic.folders = [*done.waiting, *topic.folders[len(announced) :]]


def _has_place(room: Collection[_Topic], now: float) -> bool:
    """Tell whether one more topic can be relayed beside these."""
    at_work = sum(now - topic.sink.waits_since < MOMENT_S for topic in room)
    queued = sum(topic.sink.queued_bytes for topic in room)
    return at_work < AT_WORK and queued < QUEUED_BYTES and len(room) < AT_ONCE


class _Topic:
    """A topic and how it fares. Times are by the monotonic clock.

    :ivar target: the sink's topic
    :ivar sink: connection of the topic, for the thread that relays it
    :ivar folders: folders that are known and not relayed yet
    :ivar look_at: time of the next look for others; minus infinity: the first is still to come
    :ivar tried_at: time when the last attempt began
    :ivar reached: the last folder that the sink has, and when it was first known to have it, ms since the epoch
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self.name, self.target = name, sink.topic_of(name)
        self.sink = sink
        self.folders: list[str] = []
        self.look_at = self.tried_at = -math.inf
        self.is_running = False
        self.error: str | None = None
        self.reached: tuple[str | None, int] = None, 0
        self._failures = 0
        self._pause_s = 0.0
        self._again_at = -math.inf
        self._rival_at = -math.inf
        self._lot = random.random()

    @property
    def was_looked_at(self) -> bool:
        """Whether all that was published before the run is relayed or known."""
        return not math.isinf(self.look_at)

    @property
    def has_work(self) -> bool:
        """Whether the sink may lack something."""
        return bool(self.folders) or not self.was_looked_at

    @property
    def is_well(self) -> bool:
        """Whether the sink has taken something of it, in this run and since it failed."""
        return self.error is None and self.sink.confirmed > 0

    def has_reached(self, cursor: Cursor) -> None:
        """Take note of how far the sink is."""
        if cursor.newest != self.reached[0]:
            self.reached = cursor.newest, int(time.time() * 1000)

    def place_in_queue(self) -> tuple[int, float, float]:
        """Return the place in the queue: first the fewest failures, then the longest wait, then by lot: the topics that
        a run does not reach are not the same in the next."""
        return self._failures, self.tried_at, self._lot

    def is_due(self, now: float, ending: bool) -> bool:
        """Tell whether to relay it now.

        :param ending: whether only announced folders are relayed, and nothing is tried again
        """
        if ending:
            return not self.is_running and self.error is None and bool(self.folders)
        return not self.is_running and now >= self._again_at and (bool(self.folders) or now >= self.look_at)

    def failed(self, error: Exception, told: str, now: float) -> None:
        """Pause for a random time, so that topics do not wait in step.

        :param told: error for the status
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
        """End the pauses; but topics that another process relays, too, are taken in ever longer turns."""
        self.error = None
        self._failures = 0
        if time.monotonic() - self._rival_at > ALONE_AFTER_S:
            self._pause_s = 0.0


def _told(error: Exception, before: str | None) -> str:
    """Return an error as status says it, and print it if it is new; with its place if it was not foreseen."""
    is_foreseen = isinstance(error, ConfigError | RelayError | StreamError | StorageError)
    told = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
    if told != before:
        _warn(told)
        if not is_foreseen:
            traceback.print_exception(error)
    return told


def _warn(told: str) -> None:
    print(f"ringsync: warning: {told}", flush=True)
