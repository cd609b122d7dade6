"""Clocks: a fake one that tests move, and that of the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

SECOND = 1_000_000
"""A second in µs."""


class Clock(Protocol):
    """What the simulator asks for the time."""

    def now_us(self) -> int:
        """The true time, in µs since the epoch."""


@dataclass
class FakeClock:
    """A clock that stands still until it is moved."""

    time_us: int = 1_700_000_000 * SECOND

    def now_us(self) -> int:
        """The time that was set, in µs since the epoch."""
        return self.time_us

    def advance(self, seconds: float) -> None:
        """Let time pass.

        :param seconds: how long; never back
        """
        if seconds < 0:
            raise ValueError(f"time does not go back {-seconds} s")
        self.time_us += round(seconds * SECOND)


class SystemClock:
    """The machine's clock."""

    def now_us(self) -> int:
        """The time now, in µs since the epoch."""
        return time.time_ns() // 1000
