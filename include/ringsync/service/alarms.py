"""Alarms: a problem that lasts is raised, and cleared when it is over; notifiers are told of both.

The DAG ``alarms`` has one task, which looks every few seconds (:func:`watch`). What it knows is in the object store
(:mod:`ringsync.ledger.alarms`), so it goes on after a restart. While the store is away it goes on from memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ringsync.config import Config
from ringsync.ledger.alarms import Active, Alarm, forget_before, get_active, history, note, put_active
from ringsync.ledger.gaps import Gaps, close_gap
from ringsync.metrics import write_prometheus
from ringsync.service.expected import ALARMS
from ringsync.service.look import Look, look
from ringsync.service.problem import LASTING, Kind, Problem
from ringsync.service.telling import Maker, Teller
from ringsync.status import Status
from ringsync.steps.loop import put_status
from ringsync.storage.port import ObjectStore, StorageError, UnavailableError

SHOWN_TEXTS = 3
"""Problems of one kind at one place that an alarm names; it counts the others."""
RECALLED_MS = 7 * 86_400_000
"""Alarms of the history that are not cleared are looked up again, if they are not older: then nobody has watched."""

_STORE = "object store"
"""Owner of the problem that the store is away: nobody else says anything then."""

LONGEST_S = 3600.0
"""Longest run of the watch, s: it keeps the password of Airflow for a run, and ``cdcservice stop`` does not end it."""


class Watch:
    """All problems that are seen.

    :param notifiers: make those that are told; one that cannot be made holds up no other
    :param after_ms: how long a problem must last to be raised, and be gone to be cleared. Critical ones are raised at
        once, but for those in :data:`ringsync.service.problem.LASTING`
    """

    def __init__(self, store: ObjectStore, notifiers: Sequence[Maker], after_ms: int) -> None:
        self._store, self._after_ms = store, after_ms
        self._tellers = [Teller(f"notifier {n} (alarms.notifiers)", make) for n, make in enumerate(notifiers)]
        self._seen: dict[tuple[str, str], Alarm] = {}
        self._unnoted: dict[str, Alarm] = {}
        self._is_known = False

    @property
    def raised(self) -> list[Alarm]:
        """The alarms that are raised now."""
        return [alarm for alarm in self._seen.values() if alarm.raised_ms is not None]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the notifiers."""
        return [problem for teller in self._tellers if (problem := teller.problem())]

    def look(
        self,
        found: Iterable[Problem],
        now_ms: int,
        is_judge: Callable[[str], bool] = lambda owner: True,
        *,
        store_answers: bool = True,
    ) -> None:
        """Raise and clear alarms, record it, and tell the notifiers.

        :param found: what is wrong now
        :param is_judge: tells whether an owner of problems says now what is wrong; those of others stay as they are
        :param store_answers: False: nothing is recorded, since each request to the store would be tried for a minute
        """
        if store_answers:
            self._recall(now_ms)
        for key, alarm in self._seen.items():
            unknown_ms = 0 if is_judge(alarm.owner) else now_ms - alarm.seen_ms
            # A clock may have gone back.
            since_ms, seen_ms = (min(one + unknown_ms, now_ms) for one in (alarm.since_ms, alarm.seen_ms))
            self._seen[key] = replace(alarm, since_ms=since_ms, seen_ms=seen_ms)
        for problem in _joined(found):
            self._see(problem, now_ms)
        changed = [change for key in list(self._seen) if (change := self._judge(key, now_ms)) is not None]
        for alarm in changed:
            print(f"ringsync: warning: alarm {alarm.summary()}", flush=True)
            self._unnoted[alarm.key] = alarm
        for teller in self._tellers:
            teller.add(changed)
        if store_answers:
            self._record()
        for teller in self._tellers:
            teller.tell()
        if store_answers:
            self._note()
            self._record()

    def _see(self, problem: Problem, now_ms: int) -> None:
        key = (str(problem.kind), problem.where)
        new = Alarm(*key, problem.text, problem.is_critical, now_ms, now_ms, owner=problem.owner)
        old = self._seen.get(key, new)
        self._seen[key] = replace(old, text=problem.text, seen_ms=now_ms, owner=problem.owner)

    def _judge(self, key: tuple[str, str], now_ms: int) -> Alarm | None:
        """Raise or clear an alarm if it is time; None: it stays as it is."""
        alarm = self._seen[key]
        if now_ms - alarm.seen_ms >= max(1, self._after_ms):
            del self._seen[key]
            return None if alarm.raised_ms is None else replace(alarm, cleared_ms=now_ms)
        at_once = alarm.is_critical and alarm.kind not in LASTING
        lasts = at_once or alarm.seen_ms - alarm.since_ms >= self._after_ms
        if alarm.raised_ms is not None or not lasts:
            return None
        self._seen[key] = replace(alarm, raised_ms=now_ms)
        return self._seen[key]

    def _recall(self, now_ms: int) -> None:
        """Read once what the task before has known, and what nobody has cleared."""
        if self._is_known:
            return
        try:
            known = get_active(self._store)
            lasting = [one for one in history(self._store, now_ms - RECALLED_MS) if one.cleared_ms is None]
        except StorageError:
            return
        noted = {alarm.key: alarm for alarm in known.unnoted}
        before = {(one.kind, one.where): one for one in lasting if one.key not in noted}
        before |= {(one.kind, one.where): one for one in known.alarms}
        self._seen |= {key: replace(alarm, seen_ms=now_ms) for key, alarm in before.items()}
        self._unnoted = noted | self._unnoted
        for number, teller in enumerate(self._tellers):
            teller.add([alarm for place, alarm in known.untold if place == number], first=True)
        self._is_known = True

    def _note(self) -> None:
        for key, alarm in list(self._unnoted.items()):
            try:
                note(self._store, alarm)
                del self._unnoted[key]
            except UnavailableError:
                return
            except StorageError as error:
                print(f"ringsync: warning: an alarm is not in the history yet: {error}", flush=True)

    def _record(self) -> None:
        if not self._is_known:
            return
        untold = [(number, one) for number, teller in enumerate(self._tellers) for one in teller.waiting]
        try:
            put_active(self._store, Active((*self._seen.values(),), (*untold,), (*self._unnoted.values(),)))
        except StorageError as error:
            print(f"ringsync: warning: alarms cannot be recorded: {error}", flush=True)


def _joined(found: Iterable[Problem]) -> list[Problem]:
    """Make one of the problems of a kind at one place."""
    places: dict[tuple[str, str], list[Problem]] = {}
    for problem in found:
        places.setdefault((problem.kind, problem.where), []).append(problem)
    return [_all_of(same) for same in places.values()]


def _all_of(same: Sequence[Problem]) -> Problem:
    texts = [*dict.fromkeys(problem.text for problem in same)]
    more = f" (and {len(texts) - SHOWN_TEXTS} more)" if len(texts) > SHOWN_TEXTS else ""
    return replace(same[0], text="; ".join(texts[:SHOWN_TEXTS]) + more)


def watch(
    config: Config,
    store: ObjectStore,
    notifiers: Sequence[Maker],
    *,
    wrong: Callable[[], str] = str,
    is_outdated: Callable[[], bool] = bool,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Look every few seconds, for as long as a run of the loops takes, and return the number of alarms raised now.

    ``cdcservice stop`` does not end it.

    :param wrong: tells what is wrong with the configuration, instead of which the last good one is used
    :param is_outdated: tells whether another good configuration is there: then the next run reads it
    :param clock: seconds since the epoch
    """
    watching = Watch(store, notifiers, int(config.alarms.after_s * 1000))
    name, _, loop = ALARMS.partition("/")
    keep_from_ms, is_tidy = int((clock() - config.alarms.retention_days * 86_400) * 1000), False
    gaps = Gaps(store)
    end = clock() + min(config.sync.run_s, LONGEST_S)
    while True:
        now_ms = int(clock() * 1000)
        seen, answers = _look(config, store, clock(), gaps)
        watching.look(seen.problems, now_ms, seen.is_judge, store_answers=answers)
        if answers:
            _close(store, seen.gaps_over)
            status = {"raised": len(watching.raised), "problems": watching.problems, "config_error": wrong()}
            put_status(store, name, loop, status)
            is_tidy = is_tidy or _forget_old(store, keep_from_ms)
        _put_metrics(config, {**seen.statuses, ALARMS: {"at_ms": now_ms}}, watching.raised)
        if clock() >= end or is_outdated():
            return len(watching.raised)
        sleep(config.alarms.interval_s)


def _look(config: Config, store: ObjectStore, now_s: float, gaps: Gaps) -> tuple[Look, bool]:
    """Look, and tell whether the store answers."""
    try:
        return look(config, store, now_s, gaps), True
    except StorageError as error:
        away = Problem(Kind.STORE_AWAY, _STORE, str(error), owner=_STORE)
        return Look({}, {}, False, (away,), lambda owner: owner == _STORE), not isinstance(error, UnavailableError)


def _close(store: ObjectStore, gaps: Iterable[str]) -> None:
    try:
        for key in gaps:
            close_gap(store, key)
    except StorageError as error:
        print(f"ringsync: warning: gaps that are over cannot be removed: {error}", flush=True)


def _forget_old(store: ObjectStore, moment_ms: int) -> bool:
    try:
        forget_before(store, moment_ms)
    except StorageError as error:
        print(f"ringsync: warning: old alarms cannot be removed: {error}", flush=True)
        return False
    return True


def _put_metrics(config: Config, statuses: Mapping[str, Status], raised: Sequence[Alarm]) -> None:
    if (path := config.metrics.prometheus_file) is None:
        return
    try:
        write_prometheus(path, statuses, [alarm.labels for alarm in raised])
    except (OSError, AttributeError, TypeError, ValueError) as error:  # also for a status of another version
        print(f"ringsync: warning: metrics.prometheus_file: {error}", flush=True)
