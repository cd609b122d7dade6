"""Alarms: a problem that lasts is raised, and cleared when it is over; notifiers are told of both.

The DAG ``alarms`` has one task, which looks every few seconds (:func:`watch`). What it knows is in the object store
(:mod:`ringsync.ledger.alarms`), so it goes on after a restart. While the store is away it goes on from memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ringsync.config import Config
from ringsync.ledger.alarms import Alarm, Untold, forget_before, get_active, note, put_active
from ringsync.metrics import write_prometheus
from ringsync.service.health import ALARMS, Kind, Problem
from ringsync.service.look import Look, look
from ringsync.status import Status
from ringsync.steps.loop import put_status
from ringsync.storage.port import ObjectStore, StorageError

MOST_UNTOLD = 1000
"""Notifications that wait for notifiers which fail; the history has all alarms."""

Notify = Callable[[Alarm], None]
"""A notifier: it is told when an alarm was raised, and again when it was cleared. It raises what it likes."""


class Watch:
    """All problems that are seen, and what notifiers have not been told yet.

    :param notifiers: whom to tell
    :param after_ms: how long a problem must last to be raised, and be gone to be cleared. Critical ones are raised at
        once
    """

    def __init__(self, store: ObjectStore, notifiers: Sequence[Notify], after_ms: int) -> None:
        self._store, self._notifiers, self._after_ms = store, notifiers, after_ms
        self._seen: dict[tuple[str, str], Alarm] = {}
        self._untold: deque[Untold] = deque()
        self._to_note: dict[str, Alarm] = {}
        self._is_known = False
        self.failures: list[str] = []

    @property
    def raised(self) -> list[Alarm]:
        """The alarms that are raised now."""
        return [alarm for alarm in self._seen.values() if alarm.raised_ms is not None]

    def look(self, found: Sequence[Problem], now_ms: int, unjudged: Collection[Kind] = ()) -> None:
        """Raise and clear alarms, record it, and tell the notifiers.

        :param found: what is wrong now
        :param unjudged: kinds of problems of which nothing is known now: they stay as they are
        """
        self._recall()
        self._seen = {
            key: replace(alarm, seen_ms=now_ms) if alarm.kind in unjudged else alarm
            for key, alarm in self._seen.items()
        }
        for problem in found:
            self._see(problem, now_ms)
        for key, alarm in list(self._seen.items()):
            if now_ms - alarm.seen_ms >= max(1, self._after_ms):
                del self._seen[key]
                if alarm.raised_ms is not None:
                    self._announce(replace(alarm, cleared_ms=now_ms))
            elif alarm.raised_ms is None and self._is_due(alarm):
                self._seen[key] = replace(alarm, raised_ms=now_ms)
                self._announce(self._seen[key])
        self._tell()
        self._record()

    def _see(self, problem: Problem, now_ms: int) -> None:
        key = (str(problem.kind), problem.where)
        new = Alarm(*key, problem.text, problem.is_critical, since_ms=now_ms, seen_ms=now_ms)
        old = self._seen.get(key, new)
        self._seen[key] = replace(old, text=problem.text, seen_ms=now_ms)

    def _is_due(self, alarm: Alarm) -> bool:
        return alarm.is_critical or alarm.seen_ms - alarm.since_ms >= self._after_ms

    def _announce(self, alarm: Alarm) -> None:
        print(f"ringsync: warning: alarm {alarm.summary()}", flush=True)
        self._to_note[alarm.key] = alarm
        self._untold.extend(Untold(number, alarm) for number in range(len(self._notifiers)))
        while len(self._untold) > MOST_UNTOLD:
            lost = self._untold.popleft()
            print(f"ringsync: warning: notifier {lost.notifier} is never told of {lost.alarm.summary()}", flush=True)

    def _tell(self) -> None:
        """Tell each notifier, in order, what it was not told. What one fails to take waits, and delays no other."""
        failed: dict[int, str] = {}
        waiting: deque[Untold] = deque()
        for one in self._untold:
            if one.notifier >= len(self._notifiers):
                continue  # the configuration has fewer now
            if one.notifier not in failed:
                try:
                    self._notifiers[one.notifier](one.alarm)
                    continue
                except Exception as error:
                    failed[one.notifier] = f"notifier {one.notifier} (alarms.notifiers) fails: {error}"
            waiting.append(one)
        self._untold, self.failures = waiting, list(failed.values())

    def _recall(self) -> None:
        """Read once what the task before has known."""
        if self._is_known:
            return
        try:
            known, untold = get_active(self._store)
        except StorageError:
            return
        self._seen = {(alarm.kind, alarm.where): alarm for alarm in known} | self._seen
        self._untold.extendleft(reversed(untold))
        self._is_known = True

    def _record(self) -> None:
        try:
            for key, alarm in list(self._to_note.items()):
                note(self._store, alarm)
                del self._to_note[key]
            if self._is_known:
                put_active(self._store, self._seen.values(), self._untold)
        except StorageError as error:
            print(f"ringsync: warning: alarms cannot be recorded: {error}", flush=True)


def watch(
    config: Config,
    store: ObjectStore,
    notifiers: Sequence[Notify],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Look every few seconds, for as long as a run of the loops takes, and return the number of alarms raised now.

    ``cdcservice stop`` does not end it.

    :param clock: seconds since the epoch
    """
    watching = Watch(store, notifiers, int(config.alarms.after_s * 1000))
    name, _, loop = ALARMS.partition("/")
    _forget_old(store, int((clock() - config.alarms.retention_days * 86_400) * 1000))
    end = clock() + config.sync.run_s
    while True:
        seen = _look(config, store, clock())
        watching.look(seen.problems, int(clock() * 1000), seen.unjudged)
        put_status(store, name, loop, {"raised": len(watching.raised), "problems": watching.failures})
        _put_metrics(config, seen.statuses, watching.raised)
        if clock() >= end:
            return len(watching.raised)
        sleep(config.alarms.interval_s)


def _look(config: Config, store: ObjectStore, now_s: float) -> Look:
    try:
        return look(config, store, now_s)
    except StorageError as error:
        away = Problem(Kind.STORE_AWAY, "object store", str(error))
        return Look({}, {}, False, (away,), frozenset(Kind) - {Kind.STORE_AWAY})


def _forget_old(store: ObjectStore, moment_ms: int) -> None:
    try:
        forget_before(store, moment_ms)
    except StorageError as error:
        print(f"ringsync: warning: old alarms cannot be removed: {error}", flush=True)


def _put_metrics(config: Config, statuses: Mapping[str, Status], raised: Sequence[Alarm]) -> None:
    if (path := config.metrics.prometheus_file) is None:
        return
    try:
        write_prometheus(path, statuses, [alarm.labels for alarm in raised])
    except OSError as error:
        print(f"ringsync: warning: metrics.prometheus_file: {error}", flush=True)
