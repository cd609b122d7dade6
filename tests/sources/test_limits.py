"""The limiter with a clock of its own: never above the limit, close to it, gentle after an overload."""

from __future__ import annotations

import heapq
import threading
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cluster.limits import (
    BURST_S,
    FIRST_PAGE_ROWS,
    PAGE_S,
    PAUSE_S,
    RECOVERY_S,
    Account,
    ClosedError,
    Limiter,
    Limits,
    LimitsError,
)


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def limiter(limits: Limits) -> tuple[Limiter, Clock]:
    clock = Clock()
    return Limiter(limits, clock), clock


def test_requests_are_never_above_their_rate() -> None:
    """Of a reader of logs: pages without rows, too, whatever the limits of rows and bytes are."""
    clock = Clock()
    asked = Limiter(Limits(), clock, requests_per_s=50)
    granted = 0
    for _ in range(10_000):
        while asked.ask(8000, wait=False) is not None:
            asked.answered(0, 40)
            granted += 1
        clock.now += 0.001
    assert 0.95 * 500 <= granted <= 500 + 50 * BURST_S


# Limits


def test_limits_to_json_and_back() -> None:
    for limits in (Limits(), Limits(rows_per_s=0.5, concurrent_requests=3), Limits(bytes_per_s=1e9)):
        assert Limits.from_json(limits.to_json()) == limits
    assert Limits.from_json(b'{"rows_per_s": 100}') == Limits(rows_per_s=100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows", "limits must be a JSON object with rows_per_s, bytes_per_s, concurrent_requests: "),
        ("[1]", r"not \[1\]"),
        ('{"rows_per_sec": 1}', "there is no limit rows_per_sec; there are rows_per_s"),
        ('{"rows_per_s": 0}', "rows_per_s must be a number above 0, or null for no limit, not 0"),
        ('{"rows_per_s": true}', "not True"),
        ('{"bytes_per_s": "1"}', "bytes_per_s must be a number above 0, or null for no limit, not '1'"),
        ('{"bytes_per_s": Infinity}', "not inf"),
        ('{"rows_per_s": NaN}', "not nan"),
        (
            '{"concurrent_requests": 0}',
            "concurrent_requests must be a whole number from 1, or null for no limit, not 0",
        ),
        ('{"concurrent_requests": 1.5}', "not 1.5"),
    ],
)
def test_what_are_no_limits(text: str, message: str) -> None:
    with pytest.raises(LimitsError, match=message):
        Limits.from_json(text)


def test_shares() -> None:
    assert Limits(1000, 3e6, 8).share(3) == Limits(1000 / 3, 1e6, 2)
    assert Limits(concurrent_requests=2).share(5) == Limits(concurrent_requests=1)
    assert Limits().share(7) == Limits()
    with pytest.raises(ValueError):
        Limits().share(0)


# A simulated cluster: clients that ask as fast as they can, pages that take a while and are shorter than allowed


@dataclass(frozen=True)
class Scan:
    """What clients did: (seconds, rows, bytes) of each answer, and its rows and bytes that were on the way at most."""

    answers: list[tuple[float, int, int]]
    largest: int

    def rows(self, start: float, end: float) -> int:
        return sum(rows for at, rows, _ in self.answers if start < at <= end)

    def bytes(self, start: float, end: float) -> int:
        return sum(size for at, _, size in self.answers if start < at <= end)


def simulate(
    limits: Limits,
    *,
    clients: int,
    seconds: float,
    latency: float = 0.02,
    page_size: int = 5000,
    fullness: float = 1.0,
    width: int = 100,
    change: tuple[float, Limits] | None = None,
) -> Scan:
    """Let clients ask as fast as the limiter lets them.

    :param latency: seconds that a page takes
    :param fullness: part of the allowed rows that a page has
    :param width: bytes of a row
    :param change: seconds after the start, new limits
    """
    found, clock = limiter(limits)
    start = clock.now
    accounts = [Account(found) for _ in range(clients)]
    events = [(start + i * 1e-4, i, 0) for i in range(clients)]
    answers = []
    largest = 0
    while events:
        clock.now, client, granted = heapq.heappop(events)
        if clock.now - start > seconds:
            break
        if change and clock.now - start >= change[0]:
            found.limits = change[1]
        if granted:
            rows = int(granted * fullness)
            accounts[client].answered(rows, rows * width)
            answers.append((clock.now - start, rows, rows * width))
        more = accounts[client].ask(page_size, wait=False)
        largest = max(largest, more or 0)
        heapq.heappush(events, (clock.now + (latency if more else 0.05), client, more or 0))
    return Scan(answers, largest)


@pytest.mark.parametrize("clients", [1, 2, 5, 40])
@pytest.mark.parametrize(
    "limits", [Limits(rows_per_s=20_000), Limits(bytes_per_s=2e6), Limits(20_000, 2e6), Limits(rows_per_s=10)]
)
def test_a_minute_is_within_ten_percent(limits: Limits, clients: int) -> None:
    scan = simulate(limits, clients=clients, seconds=90)
    for start in (0, 10, 30):
        for found, limit in (
            (scan.rows(start, start + 60), limits.rows_per_s),
            (scan.bytes(start, start + 60), limits.bytes_per_s),
        ):
            if limit:
                assert 0.95 * 60 * limit <= found <= (60 + 2 * BURST_S) * limit


def test_pages_that_are_never_full_reach_the_limit_too() -> None:
    scan = simulate(Limits(rows_per_s=20_000), clients=8, seconds=30, fullness=0.1)
    assert 0.9 * 30 * 20_000 <= scan.rows(0, 30) <= 30 * 20_000


def test_changed_limits_hold_at_once() -> None:
    scan = simulate(Limits(rows_per_s=50_000), clients=5, seconds=20, change=(10, Limits(rows_per_s=1000)))
    on_the_way = 5 * scan.largest
    assert scan.rows(0, 10) >= 0.9 * 10 * 50_000
    assert 0.9 * 9 * 1000 <= scan.rows(11, 20) <= (9 + BURST_S) * 1000
    assert scan.rows(10, 11) <= on_the_way + 1.5 * 1000
    raised = simulate(Limits(rows_per_s=1000), clients=5, seconds=20, change=(10, Limits(rows_per_s=50_000)))
    assert raised.rows(10, 20) >= 0.9 * 10 * 50_000


def test_a_low_limit_makes_few_requests() -> None:
    for rows_per_s in (0.5, 3, 100):
        scan = simulate(Limits(rows_per_s=rows_per_s), clients=10, seconds=60)
        assert len(scan.answers) <= 60 * min(rows_per_s, 1 / PAGE_S) * 1.35
        assert scan.rows(0, 60) >= 0.9 * 59 * rows_per_s - 1


@settings(max_examples=20, deadline=None)
@given(
    rows_per_s=st.floats(0.2, 1e5),
    clients=st.integers(1, 12),
    latency=st.floats(0.001, 3),
    page_size=st.integers(1, 10_000),
    fullness=st.floats(0, 1),
    start=st.floats(0, 9),
    length=st.floats(0.1, 10),
)
def test_rows_are_never_above_the_limit(
    rows_per_s: float, clients: int, latency: float, page_size: int, fullness: float, start: float, length: float
) -> None:
    scan = simulate(
        Limits(rows_per_s=rows_per_s),
        clients=clients,
        seconds=10,
        latency=latency,
        page_size=page_size,
        fullness=fullness,
    )
    assert scan.rows(0, 10) <= 10 * rows_per_s + 1.001
    on_the_way = clients * scan.largest
    assert scan.rows(start, start + length) <= (length + BURST_S) * rows_per_s + on_the_way + 1.001


@settings(max_examples=40, deadline=None)
@given(
    bytes_per_s=st.floats(1e3, 1e8),
    clients=st.integers(1, 12),
    latency=st.floats(0.001, 1),
    width=st.integers(1, 100_000),
)
def test_bytes_are_never_above_the_limit_by_more_than_what_was_on_the_way(
    bytes_per_s: float, clients: int, latency: float, width: int
) -> None:
    scan = simulate(Limits(bytes_per_s=bytes_per_s), clients=clients, seconds=20, latency=latency, width=width)
    first = clients * FIRST_PAGE_ROWS * width
    assert scan.bytes(0, 20) <= 20 * bytes_per_s + max(first, width)


# Steps


def test_pages_are_cut_to_a_part_of_a_second() -> None:
    found, clock = limiter(Limits(rows_per_s=1000))
    assert found.ask(5000, wait=False) is None, "nothing is saved at the start"
    clock.now += 10
    assert found.ask(5000, wait=False) == 1000 * PAGE_S
    assert found.ask(7, wait=False) == 7
    with pytest.raises(ValueError):
        found.ask(0)


def test_under_a_limit_of_bytes_the_first_pages_are_small_and_then_fit() -> None:
    found, clock = limiter(Limits(bytes_per_s=1_000_000))
    clock.now += 1
    assert found.ask(5000, wait=False) == FIRST_PAGE_ROWS
    found.answered(FIRST_PAGE_ROWS, FIRST_PAGE_ROWS * 500)
    clock.now += 1
    assert found.ask(5000, wait=False) == 1_000_000 * PAGE_S / 500


def test_a_page_that_is_far_larger_than_expected_is_waited_for() -> None:
    found, clock = limiter(Limits(bytes_per_s=1000))
    clock.now += 1
    found.ask(5000, wait=False)
    found.answered(10, 10_500)
    clock.now += 9.9
    assert found.ask(5000, wait=False) is None
    clock.now += 1
    assert found.ask(5000, wait=False) == 1


def test_of_several_pages_on_the_way_the_smallest_that_fits_is_taken_as_answered() -> None:
    found, clock = limiter(Limits(rows_per_s=1000))
    clock.now += 10
    assert found.ask(100, wait=False) == 100
    assert found.ask(1, wait=False) == 1
    found.answered(1, 10)
    assert found.ask(200, wait=False) == 200
    assert found.ask(200, wait=False) is None, "the page of 100 rows is still charged"
    found.answered(1, 10)
    assert found.ask(250, wait=False) == 250
    assert found.ask(60, wait=False) is None, "the page of 200 rows may still be the one that is to come"


def test_concurrent_requests() -> None:
    found, _ = limiter(Limits(concurrent_requests=2))
    assert found.ask(10, wait=False) == found.ask(10, wait=False) == 10
    assert found.ask(10, wait=False) is None
    found.failed(overloaded=False)
    assert found.ask(10, wait=False) == 10
    found.limits = Limits(concurrent_requests=3)
    assert found.ask(10, wait=False) == 10
    assert found.ask(10, wait=False) is None
    found.limits = Limits()
    assert found.ask(10, wait=False) == 10
    assert found.running == 4


def concurrency(found: Limiter) -> float:
    """Most requests on the way at once, by the limit and the cluster's overloads; infinity: no limit."""
    with found.lock:
        return found._concurrency(found._clock())


def running(found: Limiter) -> int:
    """Ask until there would be a wait."""
    while found.running < 1000 and found.ask(10, wait=False):
        pass
    return found.running


@pytest.mark.parametrize("limits", [Limits(), Limits(concurrent_requests=8)])
def test_back_off_and_recovery(limits: Limits) -> None:
    found, clock = limiter(limits)
    for _ in range(8):
        assert found.ask(10, wait=False)
    found.failed(overloaded=True)
    found.failed(overloaded=True)
    assert concurrency(found) == 4, "errors that come together halve it once"
    for _ in range(6):
        found.answered(10, 100)
    assert running(found) == 0, "a pause"
    clock.now += PAUSE_S
    assert running(found) == 4
    clock.now += RECOVERY_S * 3
    assert running(found) == 7
    found.failed(overloaded=True)
    assert concurrency(found) == 3
    clock.now += 1.1
    found.failed(overloaded=True)
    clock.now += 1.1
    found.failed(overloaded=True)
    clock.now += 1.1
    found.failed(overloaded=True)
    assert concurrency(found) == 1, "never below one"
    clock.now += RECOVERY_S * 20
    assert concurrency(found) == (8 if limits.concurrent_requests else 21)


def test_a_closed_account_gives_its_requests_back() -> None:
    found, _ = limiter(Limits(concurrent_requests=2))
    account = Account(found)
    account.ask(10)
    account.ask(10)
    assert found.ask(10, wait=False) is None
    account.close()
    assert found.running == 0
    assert running(found) == 2
    with pytest.raises(ClosedError):
        account.ask(10)
    with pytest.raises(RuntimeError, match="without a page"):
        account.answered(10, 10)


# Threads, and the real clock


def test_waiting_callers_see_changed_limits_and_closed_accounts() -> None:
    found = Limiter(Limits(rows_per_s=0.001))
    account = Account(found)
    results: list[object] = []

    def wait(permits: Limiter | Account) -> None:
        try:
            results.append(permits.ask(10))
        except ClosedError as error:
            results.append(type(error))

    threads = [threading.Thread(target=wait, args=(permits,)) for permits in (account, found)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert not results
    account.close()
    threads[0].join(5)
    assert results == [ClosedError]
    found.limits = Limits()
    threads[1].join(5)
    assert results == [ClosedError, 10]


def test_who_waits_longest_is_served_first() -> None:
    found = Limiter(Limits(concurrent_requests=1))
    found.ask(1)
    served: list[int] = []

    def take(number: int) -> None:
        found.ask(1)
        served.append(number)
        found.answered(1, 1)

    threads = []
    for number in range(6):
        threads.append(threading.Thread(target=take, args=(number,)))
        threads[-1].start()
        time.sleep(0.02)
    found.answered(1, 1)
    for thread in threads:
        thread.join(5)
    assert served == list(range(6))
