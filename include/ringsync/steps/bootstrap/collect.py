"""The driver's side of a bootstrap's tasks: it commits their ranges, and adds up their progress.

Each table of a run has a collector of its own. The tasks name the bootstrap in each call.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from ringsync.progress import Progress, combined
from ringsync.ring.tokens import RING_WIDTH, TokenRange, TokenSet, fraction, subtract
from ringsync.state.bootstrap import BootstrapState, CommittedRange, LostOwnershipError, RangeLedger
from ringsync.state.session import StateError
from ringsync.steps.application import ExitCode, StepError, TaskFailedError
from ringsync.storage.port import ObjectStore, StorageError

BEAT_INTERVAL_S = 5.0
TABLES_A_BEAT = 20
"""Tables that are looked after one by one at a beat, so that many tables are no load: the others' turns come later."""
ROUND_S = 100.0
"""Longest time until each table has had its turn: ``status`` takes those for abandoned that are silent for longer."""
PROGRESS_INTERVAL_S = 2.0
LINE_INTERVAL_S = 10.0
COUNTS = ("rows", "cells", "pages", "bytes")
WINDOW_S = 20.0
"""Seconds over which the speed is measured."""

_log = logging.getLogger(__name__)


class TooManyErrorsError(StepError):
    """More ranges than allowed cannot be read."""

    code = ExitCode.TOO_MANY_ERRORS


class Collector:
    """The ranges of a bootstrap: those committed, which the ledger keeps, those being read, and those that failed.

    :param selected: the tokens to read
    :param estimated_rows: estimated rows of these ranges; None: unknown
    :param max_failed_ranges: most ranges that may be unreadable
    :ivar over: whether nothing more is read of the table, by this run
    :ivar has_failed: whether this run does nothing more for the table at all
    :ivar rows_read: rows that the tasks of this run have read, once their splits have ended; ``rows_committed``: rows
        of these that the tasks had committed
    """

    def __init__(
        self, ledger: RangeLedger, selected: TokenSet, estimated_rows: int | None, max_failed_ranges: int
    ) -> None:
        self.ledger = ledger
        self._selected = selected
        self._estimated_rows = estimated_rows
        self._max_failed_ranges = max_failed_ranges
        self._lock = threading.Lock()
        self._done = list(ledger.ranges())
        self._rows_before = sum(done.rows for done in self._done)
        self._reading: dict[str, dict[str, float]] = {}  # what tasks have read and not yet committed
        self._splits: dict[str, int] = {}  # of this wave, those that have not ended, with the rows committed of each
        self._begun: set[str] = set()  # splits of this wave of which a task has begun to read
        self._samples: deque[tuple[float, int, float]] = deque()
        self.over = self.has_failed = False
        self.rows_read = self.rows_committed = 0
        self.failed: dict[TokenRange, str] = {}
        # Why all tasks must stop; a task only knows that it could not go on.
        self.fatal: LostOwnershipError | StepError | None = None

    @property
    def ranges(self) -> tuple[CommittedRange, ...]:
        """The committed ranges, in token order."""
        with self._lock:
            return tuple(self._done)

    @property
    def left(self) -> TokenSet:
        """The selected tokens that are in no committed range."""
        return subtract(self._selected, [done.range for done in self.ranges])

    def commit(self, message: dict[str, Any]) -> dict[str, Any]:
        """Record a range that a task has read, with its files.

        :raises LostOwnershipError: another run has taken the bootstrap over
        :raises StateError: the range overlaps with a recorded one: two tasks have read the same; or the task's wave is
            over: another task of it has died, and what was left is read by others
        """
        done = CommittedRange(
            TokenRange(message["start"], message["end"]),
            self.ledger.attempt,
            *(message["rows"], message["cells"], message["pages"], message["bytes"], message["outputs"]),
        )
        with self._lock:
            if message["name"] not in self._splits:
                raise StateError(f"the wave of split {message['name']} is over: others read what it has not committed")
            index = bisect.bisect(self._done, done.range.start, key=lambda known: known.range.start)
            before, after = self._done[index - 1 : index], self._done[index : index + 1]
            if any(known.range.end > done.range.start for known in before) or any(
                known.range.start < done.range.end for known in after
            ):
                raise StateError(f"token range {done.range} is recorded already, in whole or in part")
            try:
                self.ledger.commit(done)
            except LostOwnershipError as error:
                self.fatal = error
                raise
            self._done.insert(index, done)
            self._splits[message["name"]] += done.rows
            self._reading.pop(message["name"], None)
        return {}

    def progress(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note what a task has read since its last commit.

        :raises LostOwnershipError: another run has taken the bootstrap over
        """
        if self.fatal:
            raise self.fatal
        part = (message["token"] - message["start"]) / RING_WIDTH
        with self._lock:
            self._reading[message["name"]] = {"part": part, **{name: message[name] for name in COUNTS}}
        return {}

    def unread(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note a range that cannot be read.

        :raises TooManyErrorsError: there are too many of them
        """
        with self._lock:
            self.failed[TokenRange(message["start"], message["end"])] = message["reason"]
            count = len(self.failed)
        _log.warning("%s", message["reason"])
        if count > self._max_failed_ranges:
            self.fatal = TooManyErrorsError(
                f"{count} token ranges could not be read, more than scan.max_failed_ranges allows; the last: "
                f"{message['reason']}. What was read is kept: mend the cause and run again"
            )
            raise self.fatal
        return {}

    def fail(self) -> None:
        """Note that this run has failed with the table: it reads nothing more, and gives no sign of life."""
        self.over = self.has_failed = True

    def begin(self, splits: Iterable[str]) -> None:
        """Note the names of the splits of a wave: each ends, or its task dies, or has no turn."""
        with self._lock:
            self._splits, self._begun = dict.fromkeys(splits, 0), set()

    def began(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note that a task begins to read a split."""
        with self._lock:
            self._begun.add(message["name"])
        return {}

    def gave_up(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note that a task cannot go on with the table; an error of before is the cause."""
        with self._lock:
            if message["name"] in self._splits:
                self.fatal = self.fatal or TaskFailedError(message["reason"], message["exit_code"])
        return {}

    def ended(self, message: dict[str, Any]) -> bool:
        """Note the end of a split, and what became of its rows.

        :returns: whether it was the last one, and all is committed
        """
        with self._lock:
            if self._splits.pop(message["name"], None) is None:
                return False
            self.rows_read += message["rows_read"]
            self.rows_committed += message["rows_committed"]
            if self._splits:
                return False
        return self.fatal is None and not self.left

    def end_wave(self) -> tuple[bool, bool]:
        """Forget what tasks have read and not committed: no task of this wave may commit any more.

        :returns: whether a task has begun to read a split of the table, and whether one of these tasks has died
        """
        with self._lock:
            self._reading.clear()
            was_begun, has_died = bool(self._begun), not self._begun.isdisjoint(self._splits)
            # Of tasks that have died nobody knows what else they had read.
            died = sum(self._splits.values())
            self.rows_read += died
            self.rows_committed += died
            self._splits.clear()
            self._begun.clear()
        return was_begun, has_died

    def estimate(self) -> tuple[int, float]:
        """Return the bytes of the committed ranges, and their part of the ring."""
        ranges = self.ranges
        return sum(done.bytes for done in ranges), fraction(done.range for done in ranges)

    def now(self) -> Progress:
        """Return the progress of the bootstrap, including the work of earlier runs."""
        with self._lock:
            done, reading = list(self._done), list(self._reading.values())
        selected = fraction(self._selected)
        parts = fraction(committed.range for committed in done) + sum(task["part"] for task in reading)
        counts = {
            name: sum(getattr(committed, name) for committed in done) + sum(int(task[name]) for task in reading)
            for name in COUNTS
        }
        complete = not subtract(self._selected, [committed.range for committed in done])
        share = 1.0 if complete else min(parts / selected, 0.9999)
        rows_per_s, seconds_left = self._speed(counts["rows"], share)
        return Progress(
            attempt=self.ledger.attempt,
            ranges_done=len(done),
            ranges_failed=len(self.failed),
            fraction=share,
            estimated_rows=self._estimated_rows,
            rows_before=self._rows_before,
            rows_per_s=rows_per_s,
            seconds_left=seconds_left,
            **counts,
        )

    def _speed(self, rows: int, share: float) -> tuple[float | None, float | None]:
        """Return rows per second over the last moments, and the seconds that the rest takes at this run's speed."""
        now = time.monotonic()
        self._samples.append((now, rows, share))
        while now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        start, rows_then, share_then = self._samples[0]
        if now <= start or rows <= rows_then:
            return None, None
        gained = (share - share_then) / (now - start)
        return (rows - rows_then) / (now - start), (1 - share) / gained if gained > 0 else None


def handlers(
    collectors: Iterable[Collector], complete: Callable[[Collector], None]
) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """Return the calls of the tasks, for :class:`ringsync.cluster.control.ControlServer`.

    :param complete: called once all of a table is committed and its tasks have ended
    """
    known = {collector.ledger.bootstrap_id: collector for collector in collectors}

    def handler(work: Callable[[Collector, dict[str, Any]], dict[str, Any]]) -> Any:
        return lambda message: work(known[message["bootstrap"]], message)

    def ended(collector: Collector, message: dict[str, Any]) -> dict[str, Any]:
        if collector.ended(message):
            complete(collector)
        return {}

    calls = {"began": Collector.began, "commit": Collector.commit, "progress": Collector.progress}
    calls |= {"unread": Collector.unread, "gave_up": Collector.gave_up}
    return {name: handler(work) for name, work in {**calls, "ended": ended}.items()}


@contextmanager
def reported(
    collectors: Sequence[Collector],
    state: BootstrapState,
    store: ObjectStore,
    run: str,
    say: Callable[[Collector, Progress], None],
) -> Iterator[None]:
    """Report every few seconds that the run is alive, and its progress: in the ledger, the object store and the log.

    The reports of a table end once it has failed, was cancelled, or another run has taken it over: a repeated task has
    the run id of the one before it. While a table that is copied waits to be published, and while it waits for the
    others, they go on.

    :param say: called now and then with a table's progress
    """
    end = threading.Event()
    turns = itertools.cycle(collectors)
    turns_a_beat = max(TABLES_A_BEAT, math.ceil(len(collectors) * BEAT_INTERVAL_S / ROUND_S))

    def report() -> None:
        beaten_s = printed_s = float("-inf")
        while True:
            now = time.monotonic()
            if now - beaten_s >= BEAT_INTERVAL_S:
                beaten_s = now
                for collector in itertools.islice(turns, min(turns_a_beat, len(collectors))):
                    if not collector.has_failed and is_owned(collector):
                        say(collector, collector.now())
                mine = [one.ledger.bootstrap_id for one in collectors if not (one.has_failed or _is_lost(one))]
                _tell(partial(state.beat, mine, run))
                if all(map(_is_lost, collectors)):
                    return
            progress = combined([collector.now() for collector in collectors])
            put(progress)
            if now - printed_s >= LINE_INTERVAL_S:
                printed_s = now
                print(f"ringsync: {progress}", flush=True)
            if end.wait(PROGRESS_INTERVAL_S):
                return

    def put(progress: Progress) -> None:
        try:
            store.say(f"progress/{run}.json", json.dumps(asdict(progress)).encode())
        except StorageError as error:
            _log.warning("%s", error)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        mine = [collector for collector in collectors if is_owned(collector)]
        if mine or not collectors:
            put(combined([collector.now() for collector in collectors]))
            _tell(lambda: state.rest(collector.ledger.bootstrap_id for collector in mine))


def is_owned(collector: Collector) -> bool:
    """Tell whether this run still owns the bootstrap; if not, the next message of each task fails."""
    if _is_lost(collector):
        return False
    try:
        collector.ledger.check()
    except LostOwnershipError as error:
        collector.fatal = error
        return False
    except StateError as error:
        _log.warning("%s", error)
    return True


def _is_lost(collector: Collector) -> bool:
    return isinstance(collector.fatal, LostOwnershipError)


def _tell(message: Callable[[], None]) -> None:
    """Write to the ledger; a failure is only logged, since nothing but commits must arrive."""
    try:
        message()
    except StateError as error:
        _log.warning("%s", error)
