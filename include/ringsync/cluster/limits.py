"""The limits of queries to the cluster: one limiter for all tasks of a scan, and each task's account with it.

A reader asks permission for every page and reports its size afterwards. Pages cost *seconds of the limit*: a page of
5,000 rows at 20,000 rows/s costs a quarter of a second. Seconds are earned as time passes, at most ``BURST_S`` can be
saved, and a page is granted once there are enough. So a changed limit needs no conversion, and all tasks together
cannot spend more seconds than have passed:

* rows: a page is charged with the most rows that it may have, and gets back the price of rows that did not come. Since
  the limiter's start at most ``limit × time`` rows have come (plus one, if a row costs more than can be saved). In any
  later period at most that many come, plus the burst, plus the pages that were on the way at its beginning.
* bytes: a page's size is not known before it comes. It is charged with the mean size of a row so far, and the rest is
  charged when it comes. That may leave a debt, which later pages wait for. So the limit holds in the mean, and a minute
  exceeds it by no more than the pages that were on the way.

* requests: a page costs the same, however many rows it has. Only readers of ScyllaDB's CDC logs have this limit.

Pages are cut to the rows that ``PAGE_S`` allows, at least one. So a limit, however low, makes at most ``1 / PAGE_S``
requests a second if pages come full. A low limit means long waits, not many requests: 100 rows/s are four pages of 25
rows a second, one row in ten seconds is one page of one row in ten seconds. Without a limit of requests, those for
ranges without rows cost nothing here; ``concurrent_requests`` bounds them.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Protocol

BURST_S = 0.5
"""Most seconds of the limit that can be saved while no page is wanted."""
PAGE_S = 0.25
"""Most seconds of the limit that a page may cost; larger pages are cut."""
FIRST_PAGE_ROWS = 10
"""Rows of a page under a limit of bytes, until the size of a row is known."""

BACK_OFF_INTERVAL_S = 1.0
"""Seconds in which requests are halved at most once: overload errors that come together count as one."""
PAUSE_S = 0.5
"""Seconds without requests after an overload, so that the queues of the nodes drain."""
RECOVERY_S = 2.0
"""Seconds without another overload after which one more concurrent request is allowed."""

_RECHECK_S = 1.0
_TOLERANCE_S = 1e-9
_MEMORY = 0.9


class LimitsError(ValueError):
    """A limit is not valid; the message says which, and what is."""


@dataclass(frozen=True)
class Limits:
    """The limits of queries to a cluster, for all runs together; None: no limit.

    :ivar rows_per_s: rows per second, above 0
    :ivar bytes_per_s: bytes of result pages per second, above 0
    :ivar concurrent_requests: pages on the way at once, at least 1
    :raises LimitsError: a value is not valid
    """

    rows_per_s: float | None = None
    bytes_per_s: float | None = None
    concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows_per_s", "bytes_per_s"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise LimitsError(f"{name} must be a number above 0, or null for no limit, not {value!r}")
        requests = self.concurrent_requests
        if requests is not None and (not isinstance(requests, int) or isinstance(requests, bool) or requests < 1):
            raise LimitsError(
                f"concurrent_requests must be a whole number from 1, or null for no limit, not {requests!r}"
            )

    def share(self, parts: int) -> Limits:
        """Divide the limits among runs; each run may have at least one request at a time.

        :raises ValueError: there are no runs
        """
        if parts < 1:
            raise ValueError(f"limits cannot be shared by {parts} runs")
        return Limits(
            self.rows_per_s and self.rows_per_s / parts,
            self.bytes_per_s and self.bytes_per_s / parts,
            self.concurrent_requests and max(1, self.concurrent_requests // parts),
        )

    def to_json(self) -> str:
        """Write the limits as a JSON object, for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Limits:
        """Read limits that :meth:`to_json` or a person wrote; a missing name means no limit.

        :raises LimitsError: the text is no JSON object, has an unknown name or an invalid value
        """
        names = [field.name for field in fields(Limits)]
        try:
            document = json.loads(text)
        except ValueError as error:
            raise LimitsError(f"limits must be a JSON object with {', '.join(names)}: {error}") from error
        if not isinstance(document, dict):
            raise LimitsError(f"limits must be a JSON object with {', '.join(names)}, not {document!r:.80}")
        if unknown := sorted(document.keys() - set(names)):
            raise LimitsError(f"there is no limit {', '.join(unknown)}; there are {', '.join(names)}")
        return Limits(**document)


class Permits(Protocol):
    """Permission to query the cluster for pages, shared by all tasks of a scan.

    Call exactly one ``answered`` or ``failed`` for each ``ask`` that was granted; one too many is a RuntimeError.
    """

    def ask(self, rows: int, wait: bool = True) -> int | None:
        """Ask permission for one page.

        :param rows: rows wanted, at least 1
        :returns: most rows that the page may have (<= rows, >= 1); None: only with ``wait=False``, if the page would
            have to wait
        """

    def answered(self, rows: int, size: int) -> None:
        """Report that the page came.

        :param size: size of the page, bytes
        """

    def failed(self, overloaded: bool) -> None:
        """Report that the page did not come.

        :param overloaded: whether the error was a timeout or an overload, so that all tasks must slow down
        """


class ClosedError(Exception):
    """A closed account was asked for permission."""


@dataclass
class _Savings:
    """The seconds of one limit that can be spent; negative: debt."""

    seconds: float
    at: float

    def earn(self, now: float) -> None:
        self.seconds = min(BURST_S, self.seconds + now - self.at)
        self.at = now

    def wait_for(self, price: float) -> float:
        """Return the seconds until a page of this price is granted. A price above ``BURST_S`` leaves debt."""
        return min(price, BURST_S) - self.seconds

    def spend(self, seconds: float) -> None:
        self.seconds = min(BURST_S, self.seconds - seconds)


@dataclass(frozen=True)
class _Charge:
    """The charge of a page, and the prices at that time: later changes of the limits do not affect it."""

    rows: int
    size: float
    row_price: float
    byte_price: float


class Account:
    """One client's open requests, which can be given back together; for any number of threads."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._charges: list[_Charge] = []
        self._closed = False

    def ask(self, rows: int, wait: bool = True) -> int | None:
        """Do :meth:`Permits.ask`.

        :raises ClosedError: the account is closed, perhaps since this call began to wait
        """
        if rows < 1:
            raise ValueError(f"a page of {rows} rows cannot be asked for")
        limiter = self._limiter
        with limiter.lock:
            turn = threading.Condition(limiter.lock)
            limiter.turns.append(turn)
            try:
                while True:
                    if self._closed:
                        raise ClosedError("a closed account was asked for permission to read a page")
                    charge = limiter.charge(rows)
                    delay = limiter.delay(charge) if limiter.turns[0] is turn else _RECHECK_S
                    if delay <= _TOLERANCE_S:
                        limiter.spend(charge)
                        self._charges.append(charge)
                        return charge.rows
                    if not wait:
                        return None
                    turn.wait(min(delay, _RECHECK_S))
            finally:
                limiter.turns.remove(turn)
                limiter.call_next()

    def answered(self, rows: int, size: int) -> None:
        """Do :meth:`Permits.answered`."""
        with self._limiter.lock:
            # The caller does not say which page it was. Take the smallest that allowed so many rows: then the charges
            # left cover all rows that may still come.
            charge = self._end([charge for charge in self._charges if charge.rows >= rows])
            self._limiter.settle(charge, rows, size)
            self._limiter.call_next()

    def failed(self, overloaded: bool) -> None:
        """Do :meth:`Permits.failed`; the page stays charged, since the cluster may have worked for it."""
        with self._limiter.lock:
            if overloaded:
                self._limiter.back_off()
            self._end(self._charges)
            self._limiter.call_next()

    def close(self) -> None:
        """Give back the requests of a client that is gone, and wake its waiting threads."""
        with self._limiter.lock:
            self._closed = True
            self._limiter.running -= len(self._charges)
            self._charges.clear()
            for turn in self._limiter.turns:
                turn.notify()

    def _end(self, among: list[_Charge]) -> _Charge:
        if not self._charges:
            raise RuntimeError("answered or failed was called without a page being on the way")
        charge = min(among or self._charges[:1], key=lambda charge: charge.rows)
        self._charges.remove(charge)
        self._limiter.running -= 1
        return charge


class Limiter:
    """A limiter for many threads. It serves the thread that has waited longest first.

    An overload halves the number of requests that may be on the way, at most once in ``BACK_OFF_INTERVAL_S``, and stops
    requests for ``PAUSE_S``. The number recovers by one in ``RECOVERY_S``. This works without configured limits, too.
    The limiter starts with nothing saved, so that many short scans do not add up to many bursts. It is an account
    itself, for a reader that does not share it. Accounts hold its lock while they use it.

    :param requests_per_s: most requests a second of this limiter's clients, whatever the limits are; None: any number
    :ivar running: number of requests on the way
    """

    def __init__(
        self,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        requests_per_s: float | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._request_price = 1 / requests_per_s if requests_per_s else 0.0
        self._clock = clock
        self.lock = threading.Lock()
        self.turns: deque[threading.Condition] = deque()
        self.running = 0
        now = clock()
        self._rows = _Savings(0.0, now)
        self._bytes = _Savings(0.0, now)
        self._requests = _Savings(0.0, now)
        self._seen_rows = self._seen_bytes = 0.0
        self._bearable = math.inf
        self._bearable_at = now
        self._backed_off_at = self._paused_until = -math.inf
        own = Account(self)
        self.ask, self.answered, self.failed = own.ask, own.answered, own.failed

    @property
    def limits(self) -> Limits:
        """The limits. They may be set at any time and hold at once, also for waiting threads."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        with self.lock:
            self._earn()
            self._limits = limits
            self.call_next()

    def charge(self, rows: int) -> _Charge:
        """Return the charge of the page that a request for so many rows gets now."""
        row_price = 1 / self._limits.rows_per_s if self._limits.rows_per_s else 0.0
        byte_price = 1 / self._limits.bytes_per_s if self._limits.bytes_per_s else 0.0
        if row_price:
            rows = min(rows, max(1, int(PAGE_S / row_price)))
        if not byte_price:
            return _Charge(rows, 0.0, row_price, 0.0)
        if not self._seen_rows:
            return _Charge(min(rows, FIRST_PAGE_ROWS), PAGE_S / byte_price, row_price, byte_price)
        width = self._seen_bytes / self._seen_rows
        rows = min(rows, max(1, int(PAGE_S / (byte_price * width)))) if width else rows
        return _Charge(rows, rows * width, row_price, byte_price)

    def delay(self, charge: _Charge) -> float:
        """Return the seconds until the page may be requested, if nothing else happens."""
        now = self._earn()
        if self.running >= self._concurrency(now):
            return _RECHECK_S
        return max(
            self._paused_until - now,
            self._rows.wait_for(charge.rows * charge.row_price),
            self._bytes.wait_for(charge.size * charge.byte_price),
            self._requests.wait_for(self._request_price),
        )

    def spend(self, charge: _Charge) -> None:
        """Begin a page."""
        self._rows.spend(charge.rows * charge.row_price)
        self._bytes.spend(charge.size * charge.byte_price)
        self._requests.spend(self._request_price)
        self.running += 1

    def settle(self, charge: _Charge, rows: int, size: int) -> None:
        """Correct the charge of a page to what it really cost, and update the mean size of a row."""
        self._earn()
        self._rows.spend((rows - charge.rows) * charge.row_price)
        self._bytes.spend((size - charge.size) * charge.byte_price)
        if rows:
            self._seen_rows = _MEMORY * self._seen_rows + rows
            self._seen_bytes = _MEMORY * self._seen_bytes + size

    def _earn(self) -> float:
        now = self._clock()
        # Without a limit nothing is earned or spent, so that a limit set later starts like a new one.
        if self._limits.rows_per_s:
            self._rows.earn(now)
        if self._limits.bytes_per_s:
            self._bytes.earn(now)
        if self._request_price:
            self._requests.earn(now)
        self._rows.at = self._bytes.at = now
        return now

    def _concurrency(self, now: float) -> float:
        recovered = (now - self._bearable_at) // RECOVERY_S
        self._bearable += recovered
        self._bearable_at += recovered * RECOVERY_S
        return min(self._bearable, self._limits.concurrent_requests or math.inf)

    def back_off(self) -> None:
        """Halve the requests that may be on the way, and pause, unless that was done a moment ago."""
        now = self._clock()
        if now - self._backed_off_at < BACK_OFF_INTERVAL_S:
            return
        self._bearable = max(1.0, min(self._concurrency(now), self.running) // 2)
        self._bearable_at = self._backed_off_at = now
        self._paused_until = now + PAUSE_S

    def call_next(self) -> None:
        """Wake the thread whose turn it is."""
        if self.turns:
            self.turns[0].notify()
