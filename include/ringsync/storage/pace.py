"""The pace at which one process writes an object again and again: Google Cloud Storage takes one write in a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

_FEW = 1024


class Pace:
    """Keeps two writes of an object apart. Whoever comes too early waits, so the last of many writes is never lost.

    :param seconds: between two writes of one object; 0: no limit
    :param clock: returns seconds that only grow
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds, self._clock, self._sleep = seconds, clock, sleep
        self._free_at: dict[str, float] = {}
        self._most = _FEW
        self._lock = Lock()

    def wait(self, key: str) -> None:
        """Wait until the object may be written, and take this turn: of many threads each has its own."""
        with self._lock:
            now = self._clock()
            turn = max(now, self._free_at.get(key, now))
            self._note(key, turn, now)
        if turn > now:
            self._sleep(turn - now)

    def wrote(self, key: str) -> None:
        """Note that the object was written just now, without a turn."""
        with self._lock:
            now = self._clock()
            self._note(key, now, now)

    def _note(self, key: str, at: float, now: float) -> None:
        if not self._seconds:
            return
        self._free_at[key] = at + self._seconds
        if len(self._free_at) > self._most:
            self._free_at = {key: free_at for key, free_at in self._free_at.items() if free_at > now}
            self._most = max(_FEW, 2 * len(self._free_at))
