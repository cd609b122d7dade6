"""Telling a notifier: in a thread of its own, so one that hangs or refuses holds up nobody."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from ringsync.ledger.alarms import Alarm

MOST_UNTOLD = 1000
"""Notifications that wait for one notifier; the history has all alarms."""
MOST_REFUSALS = 5
"""How often a notification is refused, while others are taken, until it is given up."""
FAILURES_IN_A_ROW = 10
"""So many, and the notifier is away: it is tried again at the next look."""
JOIN_S = 1.0
"""So long a look waits for each notifier, in seconds."""
HANGS_S = 60.0
"""Seconds for a single notification after which a notifier counts as hanging."""

Notify = Callable[[Alarm], None]
"""A notifier: it is told when an alarm was raised, and again when it was cleared. It raises what it likes."""

Maker = Callable[[], Notify]
"""Makes a notifier."""


class UnmadeError(Exception):
    """A notifier cannot be made. The message names it, without a secret; the cause has the details."""


class Teller:
    """One notifier, and what it has not been told yet, in order.

    :param name: how messages name it
    :param make: makes it, when it is told for the first time; if that fails, again at each look
    """

    def __init__(self, name: str, make: Maker) -> None:
        self._name, self._make = name, make
        self._notify: Notify | None = None
        self._waiting: deque[Alarm] = deque()
        self._refusals: Counter[Alarm] = Counter()
        self._given_up = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._since_s = 0.0
        self._failure = ""

    @property
    def waiting(self) -> list[Alarm]:
        """What it was not told yet."""
        with self._lock:
            return list(self._waiting)

    def add(self, alarms: Iterable[Alarm], *, first: bool = False) -> None:
        """Let it be told of alarms. If too many wait, the oldest that are not critical are given up.

        :param first: whether they are older than those that wait
        """
        with self._lock:
            self._waiting = deque([*alarms, *self._waiting] if first else [*self._waiting, *alarms])
            while len(self._waiting) > MOST_UNTOLD:
                self._give_up(next((one for one in self._waiting if not one.is_critical), self._waiting[0]))

    def tell(self) -> None:
        """Make it, and tell it what waits, unless it is still busy; wait a moment for it."""
        if self._thread is None or not self._thread.is_alive():
            if self._notify is not None and not self.waiting:
                return
            self._since_s = time.monotonic()
            self._thread = threading.Thread(target=self._tell_all, daemon=True)
            self._thread.start()
        self._thread.join(JOIN_S)

    def problem(self) -> str | None:
        """What is wrong with it, without what it says itself: that may hold secrets."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if is_busy and (seconds := time.monotonic() - self._since_s) > HANGS_S:
            return f"{self._name} has not answered for {seconds:.0f} s; {len(self.waiting):,} notifications wait"
        if self._failure and self._notify is None:
            return f"{self._name} cannot be made: {self._failure}; {len(self.waiting):,} notifications wait"
        if self._failure:
            return f"{self._name} fails ({self._failure}); {len(self.waiting):,} notifications wait"
        return f"{self._name} was not told of {self._given_up:,} alarms: cdcservice alarms" if self._given_up else None

    def _made(self) -> Notify | None:
        """Make the notifier, unless it was made; None: that fails."""
        try:
            self._notify = self._notify or self._make()
        except (Exception, SystemExit) as error:
            if not self._failure:
                print(f"ringsync: warning: {self._name} cannot be made: {error}: {error.__cause__}", flush=True)
            self._failure = str(error) if isinstance(error, UnmadeError) else type(error).__name__
            return None
        self._failure = ""
        return self._notify

    def _tell_all(self) -> None:
        if (notify := self._made()) is None:
            return
        refused: list[Alarm] = []
        in_a_row = 0
        for alarm in self.waiting:
            self._since_s = time.monotonic()
            try:
                notify(alarm)
            except Exception as error:
                # Its text may be a URL with a password in it; Airflow logs it, with secrets masked.
                self._failure, in_a_row = type(error).__name__, in_a_row + 1
                refused.append(alarm)
                if in_a_row == FAILURES_IN_A_ROW:
                    return
                continue
            in_a_row = 0
            self._told(alarm, refused)
        if not refused:
            self._failure = ""

    def _told(self, alarm: Alarm, refused: list[Alarm]) -> None:
        """Record that it took a notification: those that it has refused before it are at fault themselves."""
        with self._lock:
            if alarm in self._waiting:
                self._waiting.remove(alarm)
            for one in refused:
                self._refusals[one] += 1
                if self._refusals[one] >= MOST_REFUSALS and one in self._waiting:
                    self._give_up(one)
            refused.clear()

    def _give_up(self, alarm: Alarm) -> None:
        self._waiting.remove(alarm)
        self._given_up += 1
        print(f"ringsync: warning: {self._name} is never told of {alarm.summary()}", flush=True)
