"""How hard the cluster may be asked: one limiter for all tasks of a scan, and what each task sees of it.

A reader takes leave for every page and tells how the page went; what it may have is counted in *seconds of the limit*:
a page of 5,000 rows at 20,000 rows/s costs a quarter of a second. Time is earned as it passes, at most ``BURST_S`` of
it can be saved, and a page is granted once there is enough for it. So a changed limit needs no conversion, and no
number of tasks can ask for more than time has passed:

* rows: a page is charged with all the rows that it may have, and what it had less is given back. From the start of
  the limiter never more than ``limit × time`` rows have come (and one, where a row costs more than can be saved); in
  any later stretch of time not more than that, the burst, and what was on the way at its beginning.
* bytes: nobody knows a page's size before it is there. It is charged with the mean bytes of a row so far; the rest is
  booked when it comes, as debt if need be, which the following pages wait for. So the mean is kept, and a minute is
  above the limit by no more than what was on the way.

Pages are cut to what ``PAGE_S`` allow, at least one row. Hence a limit, however low, makes at most ``1 / PAGE_S``
requests a second if their pages come full, and waits long rather than asking for one row often: 100 rows/s are four
pages of 25 rows a second, one row in ten seconds is one page of one row in ten seconds. Requests for ranges without
rows cost nothing here; ``concurrent_requests`` bounds these.
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
"""So much of the limit can be saved up while nobody asks."""
PAGE_S = 0.25
"""A page is cut to what so much of the limit allows."""
FIRST_PAGE_ROWS = 10
"""Rows of a page under a limit of bytes, as long as nobody knows how wide a row is."""

BACK_OFF_INTERVAL_S = 1.0
"""Overload errors that come together are one sign: requests are halved at most once in this time."""
PAUSE_S = 0.5
"""Nobody asks for so long after an overload, so that the queues of the nodes drain."""
RECOVERY_S = 2.0
"""One concurrent request more after each such time without another overload."""

_RECHECK_S = 1.0
_TOLERANCE_S = 1e-9
_MEMORY = 0.9


class LimitsError(ValueError):
    """Limits are no limits; the message says which, and what would be."""


@dataclass(frozen=True)
class Limits:
    """How hard a cluster may be asked, by all that runs; None is no limit.

    :ivar rows_per_s: rows a second, above 0
    :ivar bytes_per_s: bytes of result pages a second, above 0
    :ivar concurrent_requests: pages that are on the way at once, at least 1
    :raises LimitsError: for any other value
    """

    rows_per_s: float | None = None
    bytes_per_s: float | None = None
    concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows_per_s", "bytes_per_s"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise LimitsError(f"{name} is a number above 0, or null for no limit, not {value!r}")
        requests = self.concurrent_requests
        if requests is not None and (not isinstance(requests, int) or isinstance(requests, bool) or requests < 1):
            raise LimitsError(f"concurrent_requests is a whole number from 1, or null for no limit, not {requests!r}")

    def share(self, parts: int) -> Limits:
        """What each of so many runs may do; with more runs than requests each still has one.

        :raises ValueError: when there are no parts
        """
        if parts < 1:
            raise ValueError(f"limits cannot be shared by {parts} runs")
        return Limits(
            self.rows_per_s and self.rows_per_s / parts,
            self.bytes_per_s and self.bytes_per_s / parts,
            self.concurrent_requests and max(1, self.concurrent_requests // parts),
        )

    def to_json(self) -> str:
        """The limits as a JSON object, for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Limits:
        """Read what :meth:`to_json` wrote, or a person; what is left out has no limit.

        :raises LimitsError: when it is no such object, or has an unknown name
        """
        names = [field.name for field in fields(Limits)]
        try:
            document = json.loads(text)
        except ValueError as error:
            raise LimitsError(f"limits are a JSON object with {', '.join(names)}: {error}") from error
        if not isinstance(document, dict):
            raise LimitsError(f"limits are a JSON object with {', '.join(names)}, not {document!r:.80}")
        if unknown := sorted(document.keys() - set(names)):
            raise LimitsError(f"there is no limit {', '.join(unknown)}; there are {', '.join(names)}")
        return Limits(**document)


class Permits(Protocol):
    """Leave to ask the cluster for pages; shared by all tasks of a scan.

    Each ``ask`` that was granted is ended by exactly one ``answered`` or ``failed``.
    """

    def ask(self, rows: int, wait: bool = True) -> int | None:
        """Take leave for one page.

        :param rows: wanted, at least 1
        :param wait: whether to wait for it
        :returns: rows that the page may have at most (<= rows, >= 1); None only with ``wait=False``, when there would
            be a wait
        """

    def answered(self, rows: int, size: int) -> None:
        """The page came.

        :param rows: that it had
        :param size: its bytes
        """

    def failed(self, overloaded: bool) -> None:
        """The page did not come.

        :param overloaded: it was a timeout or an overload error, so that everybody slows down
        """


class _Unlimited:
    """Permits without any limit and without back-off."""

    def ask(self, rows: int, wait: bool = True) -> int | None:
        return rows

    def answered(self, rows: int, size: int) -> None:
        pass

    def failed(self, overloaded: bool) -> None:
        pass


UNLIMITED: Permits = _Unlimited()
"""For who reads alone and little."""


class ClosedError(Exception):
    """Leave was asked of an account that is closed."""


@dataclass
class _Savings:
    """Seconds of one limit that can be spent; negative: debt."""

    seconds: float
    at: float

    def earn(self, now: float) -> None:
        self.seconds = min(BURST_S, self.seconds + now - self.at)
        self.at = now

    def wait_for(self, price: float) -> float:
        """Seconds until a page of this price is granted: what costs more than can be saved leaves debt."""
        return min(price, BURST_S) - self.seconds

    def spend(self, seconds: float) -> None:
        self.seconds = min(BURST_S, self.seconds - seconds)


@dataclass(frozen=True)
class _Charge:
    """What a page was charged with, and the prices then: a later change of the limits does not touch it."""

    rows: int
    size: float
    row_price: float
    byte_price: float


class Account:
    """What one client asked for and has not yet got; from :meth:`Limiter.account`, for any number of threads."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self.charges: list[_Charge] = []
        self.closed = False

    def ask(self, rows: int, wait: bool = True) -> int | None:
        """See :meth:`Permits.ask`.

        :raises ClosedError: the account is closed, perhaps while this waited
        """
        return self._limiter.grant(self, rows, wait)

    def answered(self, rows: int, size: int) -> None:
        """See :meth:`Permits.answered`.

        :raises RuntimeError: nothing is on the way
        """
        self._limiter.settle(self, rows, size)

    def failed(self, overloaded: bool) -> None:
        """See :meth:`Permits.failed`; the page stays charged, since the cluster may have worked for it.

        :raises RuntimeError: nothing is on the way
        """
        self._limiter.give_back(self, overloaded)

    def close(self) -> None:
        """The client is gone: its requests are given back, and who waits for it is told."""
        self._limiter.close_account(self)


class Limiter:
    """Keeps the limits for all threads that ask it; fair: who waits longest is served first.

    An overload halves the number of requests that may be on the way, at most once in ``BACK_OFF_INTERVAL_S``, and
    stops asking for ``PAUSE_S``; it recovers by one in ``RECOVERY_S``. That works without configured limits, too.
    It starts with nothing saved, so that many short scans do not add up to many bursts.

    :param clock: seconds, monotonic
    """

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or Limits()
        self._clock = clock
        self._lock = threading.Lock()
        self._turns: deque[threading.Condition] = deque()
        self._running = 0
        now = clock()
        self._rows = _Savings(0.0, now)
        self._bytes = _Savings(0.0, now)
        self._seen_rows = self._seen_bytes = 0.0
        self._bearable = math.inf
        self._bearable_at = now
        self._backed_off_at = self._paused_until = -math.inf
        self._own = Account(self)

    @property
    def limits(self) -> Limits:
        """The limits; may be set at any time, and then hold at once, also for those that wait."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        with self._lock:
            self._earn()
            self._limits = limits
            self._call_next()

    @property
    def running(self) -> int:
        """Requests that are on the way."""
        return self._running

    @property
    def concurrency(self) -> float:
        """Requests that may be on the way at once, by the limit and by what the cluster bore; infinity: no limit."""
        with self._lock:
            return self._concurrency(self._clock())

    def account(self) -> Account:
        """Permits for one client, which can be given back together."""
        return Account(self)

    def ask(self, rows: int, wait: bool = True) -> int | None:
        """See :meth:`Permits.ask`."""
        return self._own.ask(rows, wait)

    def answered(self, rows: int, size: int) -> None:
        """See :meth:`Permits.answered`."""
        self._own.answered(rows, size)

    def failed(self, overloaded: bool) -> None:
        """See :meth:`Permits.failed`."""
        self._own.failed(overloaded)

    def grant(self, account: Account, rows: int, wait: bool) -> int | None:
        """:meth:`Account.ask`."""
        if rows < 1:
            raise ValueError(f"a page of {rows} rows cannot be asked for")
        with self._lock:
            turn = threading.Condition(self._lock)
            self._turns.append(turn)
            try:
                while True:
                    if account.closed:
                        raise ClosedError("leave to ask for a page was asked of a closed account")
                    charge = self._charge(rows)
                    delay = self._delay(charge) if self._turns[0] is turn else _RECHECK_S
                    if delay <= _TOLERANCE_S:
                        self._spend(charge)
                        account.charges.append(charge)
                        return charge.rows
                    if not wait:
                        return None
                    turn.wait(min(delay, _RECHECK_S))
            finally:
                self._turns.remove(turn)
                self._call_next()

    def settle(self, account: Account, rows: int, size: int) -> None:
        """:meth:`Account.answered`."""
        with self._lock:
            # Nobody says which page it was. The smallest that allowed so many rows: then what stays charged is
            # never less than what may still come.
            fitting = [charge for charge in account.charges if charge.rows >= rows]
            charge = self._end(account, fitting)
            self._earn()
            self._rows.spend((rows - charge.rows) * charge.row_price)
            self._bytes.spend((size - charge.size) * charge.byte_price)
            if rows:
                self._seen_rows = _MEMORY * self._seen_rows + rows
                self._seen_bytes = _MEMORY * self._seen_bytes + size
            self._call_next()

    def give_back(self, account: Account, overloaded: bool) -> None:
        """:meth:`Account.failed`."""
        with self._lock:
            if overloaded:
                self._back_off(self._clock())
            self._end(account, account.charges)
            self._call_next()

    def close_account(self, account: Account) -> None:
        """:meth:`Account.close`."""
        with self._lock:
            account.closed = True
            self._running -= len(account.charges)
            account.charges.clear()
            for turn in self._turns:
                turn.notify()

    def _charge(self, rows: int) -> _Charge:
        """The page that is granted to who asks for so many rows now."""
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

    def _delay(self, charge: _Charge) -> float:
        """Seconds until the page may be asked for, if nothing else happens."""
        now = self._earn()
        if self._running >= self._concurrency(now):
            return _RECHECK_S
        return max(
            self._paused_until - now,
            self._rows.wait_for(charge.rows * charge.row_price),
            self._bytes.wait_for(charge.size * charge.byte_price),
        )

    def _spend(self, charge: _Charge) -> None:
        self._rows.spend(charge.rows * charge.row_price)
        self._bytes.spend(charge.size * charge.byte_price)
        self._running += 1

    def _end(self, account: Account, among: list[_Charge]) -> _Charge:
        if not account.charges:
            raise RuntimeError("answered or failed was called without a page being on the way")
        charge = min(among, key=lambda charge: charge.rows) if among else account.charges[0]
        account.charges.remove(charge)
        self._running -= 1
        return charge

    def _earn(self) -> float:
        now = self._clock()
        # Without a limit time is neither earned nor spent, so that a limit that comes later begins as a new one.
        if self._limits.rows_per_s:
            self._rows.earn(now)
        if self._limits.bytes_per_s:
            self._bytes.earn(now)
        self._rows.at = self._bytes.at = now
        return now

    def _concurrency(self, now: float) -> float:
        recovered = (now - self._bearable_at) // RECOVERY_S
        self._bearable += recovered
        self._bearable_at += recovered * RECOVERY_S
        return min(self._bearable, self._limits.concurrent_requests or math.inf)

    def _back_off(self, now: float) -> None:
        if now - self._backed_off_at < BACK_OFF_INTERVAL_S:
            return
        self._bearable = max(1.0, min(self._concurrency(now), self._running) // 2)
        self._bearable_at = self._backed_off_at = now
        self._paused_until = now + PAUSE_S

    def _call_next(self) -> None:
        if self._turns:
            self._turns[0].notify()
