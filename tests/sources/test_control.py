"""A server in this process, clients in others: limits that hold for all of them, calls, and deaths on either side."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ringsync.cluster.control import (
    DEAD_AFTER_S,
    FORGOTTEN_AFTER_S,
    LIMITS_KEY,
    RUNS_PREFIX,
    ControlAddress,
    ControlClient,
    ControlError,
    ControlServer,
    DriverGoneError,
    LimitsWatch,
    get_limits,
    put_limits,
)
from ringsync.cluster.limits import Limiter, Limits, LimitsError
from ringsync.storage.local import LocalStore
from tests.sources.test_limits import concurrency

spawn = multiprocessing.get_context("spawn")


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


# Limits, with real processes


def read_as_fast_as_possible(address: ControlAddress, seconds: float, width: int) -> None:
    """A task whose cluster answers at once: reports (time, rows) of its pages at the end."""
    with ControlClient(address) as client:
        client.call("ready")
        pages = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            rows = client.ask(5000)
            assert rows is not None
            client.answered(rows, rows * width)
            pages.append((time.monotonic(), rows))
        client.call("report", pages=pages)


@pytest.mark.parametrize(
    ("clients", "limits", "rows_per_s"),
    [(1, Limits(rows_per_s=20_000), 20_000), (2, Limits(bytes_per_s=3e6), 30_000), (5, Limits(40_000, 1e7), 40_000)],
)
def test_limits_hold_for_any_number_of_processes(clients: int, limits: Limits, rows_per_s: float) -> None:
    """Four seconds; then the limits are a quarter, take effect within two seconds, and hold again."""
    ready: list[float] = []
    pages: list[tuple[float, int]] = []

    def report(content: dict[str, Any]) -> dict[str, Any]:
        pages.extend((at, rows) for at, rows in content["pages"])
        return {}

    def start(_: dict[str, Any]) -> dict[str, Any]:
        ready.append(time.monotonic())
        return {}

    with ControlServer(limits, {"report": report, "ready": start}) as server:
        tasks = [
            spawn.Process(target=read_as_fast_as_possible, args=(server.address, 9.5, 100)) for _ in range(clients)
        ]
        for task in tasks:
            task.start()
        wait_until(lambda: len(ready) == clients, 30)
        began = time.monotonic() + 0.5
        time.sleep(4.5)
        server.limiter.limits = limits.share(4)
        lowered = time.monotonic()
        for task in tasks:
            task.join(30)
            assert task.exitcode == 0

    def rate(since: float, until: float) -> float:
        return sum(rows for at, rows in pages if since < at <= until) / (until - since)

    assert rate(began, began + 4) == pytest.approx(rows_per_s, rel=0.1)
    assert rate(lowered + 1, lowered + 4.5) == pytest.approx(rows_per_s / 4, rel=0.1)


def take_and_die(address: ControlAddress) -> None:
    client = ControlClient(address)
    client.ask(10)
    client.ask(10)
    os.kill(os.getpid(), signal.SIGKILL)


def test_requests_of_a_killed_client_are_given_back() -> None:
    with ControlServer(Limits(concurrent_requests=2)) as server, ControlClient(server.address) as client:
        task = spawn.Process(target=take_and_die, args=(server.address,))
        task.start()
        task.join(30)
        assert task.exitcode == -signal.SIGKILL
        assert client.ask(10) == 10
        assert client.ask(10) == 10
        assert client.ask(10, wait=False) is None


def test_threads_of_a_client() -> None:
    """One waits for leave while another calls; a page is answered by another thread than asked for it."""
    with (
        ControlServer(Limits(concurrent_requests=1), {"double": lambda content: {"n": 2 * content["n"]}}) as server,
        ControlClient(server.address) as client,
    ):
        first = threading.Thread(target=client.ask, args=(10,))
        first.start()
        first.join(5)
        assert server.limiter.running == 1, "a thread that ends takes nothing with it"
        second = threading.Thread(target=client.ask, args=(10,))
        second.start()
        for n in range(100):
            assert client.call("double", n=n) == {"n": 2 * n}
        assert second.is_alive()
        client.answered(10, 1000)
        second.join(5)
        assert not second.is_alive()
        client.failed(overloaded=True)
        wait_until(lambda: server.limiter.running == 0)
        assert concurrency(server.limiter) == 1


def test_a_client_that_is_closed_while_it_waits() -> None:
    with ControlServer(Limits(concurrent_requests=1)) as server:
        server.limiter.ask(1)
        client = ControlClient(server.address)
        raised: list[Exception] = []

        def wait() -> None:
            try:
                client.ask(10)
            except ControlError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.2)
        client.close()
        waiting.join(5)
        assert [str(error) for error in raised] == ["this client of the driver is closed"]
        server.limiter.answered(1, 1)
        wait_until(lambda: server.limiter.running == 0)


# Calls


def test_calls_and_errors_of_handlers() -> None:
    def refuse(content: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"range {content['range']} belongs to another attempt")

    with ControlServer(handlers={"echo": dict, "refuse": refuse}) as server, ControlClient(server.address) as client:
        content = {"text": "é\n", "numbers": [1, 2.5, None], "name": "x" * 10_000_000}
        assert client.call("echo", **content) == content
        with pytest.raises(ControlError, match=r"^range \[1, 2\] belongs to another attempt$"):
            client.call("refuse", range=[1, 2])
        with pytest.raises(ControlError, match="no handler commit; it has echo, refuse"):
            client.call("commit")
        with pytest.raises(ControlError, match="a page of 0 rows"):
            client.ask(0)
        with pytest.raises(ControlError, match="without a page being on the way"):
            client.answered(1, 1)
        assert client.call("echo") == {}, "an error ends nothing"
    with pytest.raises(ValueError, match="may not be called ask"):
        ControlServer(handlers={"ask": dict})
    with (
        pytest.raises(ControlError, match=r"cannot listen at 192\.0\.2\.1: .*; give an address"),
        ControlServer(host="192.0.2.1"),
    ):
        raise AssertionError("that address is for documentation")


def test_the_key(caplog: pytest.LogCaptureFixture) -> None:
    with ControlServer() as server:
        address = server.address
        assert repr(address) == f"ControlAddress(host='127.0.0.1', port={address.port})"
        with pytest.raises(ControlError, match="has another key"):
            ControlClient(replace(address, authkey=b"guessed"))
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(10)
            # The server closes it; as there are bytes that it has not read, that may come as a reset.
            with suppress(ConnectionResetError):
                while stranger.recv(1000):
                    continue
        silent = socket.create_connection((address.host, address.port))
        with ControlClient(address) as client:
            assert client.ask(7) == 7, "neither strangers nor who says nothing disturb others"
        silent.close()
        wait_until(lambda: caplog.text.count("refused a connection from 127.0.0.1") == 3)
    assert repr(address.authkey) not in caplog.text


# The driver's end


def test_the_end_of_the_server_is_told_to_all() -> None:
    raised: list[Exception] = []

    def wait(client: ControlClient) -> None:
        try:
            client.ask(10)
        except DriverGoneError as error:
            raised.append(error)

    with ControlServer(Limits(rows_per_s=0.001)) as server:
        address = server.address
        clients = [ControlClient(address) for _ in range(3)]
        threads = [threading.Thread(target=wait, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert not raised
    for thread in threads:
        thread.join(5)
    assert len(raised) == 3
    with pytest.raises(DriverGoneError, match=f"the driver at 127.0.0.1:{address.port} is gone"):
        clients[0].call("anything")
    with pytest.raises(DriverGoneError, match="refused"):
        ControlClient(address)


def drive(pipe: Connection) -> None:
    with ControlServer(Limits(concurrent_requests=1)) as server:
        pipe.send(server.address)
        time.sleep(60)


def test_a_killed_driver_is_noticed_at_once() -> None:
    ours, theirs = spawn.Pipe()
    driver = spawn.Process(target=drive, args=(theirs,), daemon=True)
    driver.start()
    client = ControlClient(ours.recv())
    client.ask(10)
    killer = threading.Timer(0.3, driver.kill)
    killer.start()
    began = time.monotonic()
    with pytest.raises(DriverGoneError):
        client.ask(10)
    assert time.monotonic() - began < 10
    killer.join()
    driver.join(10)


# Limits in the object store


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_put_and_get_limits(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert get_limits(store) is None
    put_limits(store, Limits(rows_per_s=5))
    assert get_limits(store) == Limits(rows_per_s=5)
    store.put(LIMITS_KEY, b"{")
    with pytest.raises(LimitsError):
        get_limits(store)


def test_runs_share_the_limits(tmp_path: Path) -> None:
    store, clock = LocalStore(tmp_path), Clock()
    limiters = [Limiter() for _ in range(3)]
    watches = [
        LimitsWatch(store, limiter, f"run-{i}", Limits(rows_per_s=600), clock) for i, limiter in enumerate(limiters)
    ]

    def look(*indexes: int, seconds: int = 1) -> list[float | None]:
        for _ in range(seconds):
            clock.now += 1
            for i in indexes:
                watches[i].look()
        return [limiters[i].limits.rows_per_s for i in indexes]

    assert look(0) == [600]
    assert look(0, 1) == [600, 300], "the first looked before the second was there"
    assert look(0, 1) == [300, 300]
    assert look(0, 1, 2, seconds=2) == [200, 200, 200]
    put_limits(store, Limits(rows_per_s=60, concurrent_requests=2))
    assert look(0, 1, 2) == [20, 20, 20]
    watches[2].end()
    assert look(0, 1) == [30, 30], "one said that it ends"
    assert look(0, seconds=int(DEAD_AFTER_S) - 3) == [30]
    assert look(0, seconds=6) == [60], "one died"
    assert look(0, 1, seconds=2) == [30, 30], "and was only slow"
    look(0, seconds=int(FORGOTTEN_AFTER_S) + 5)
    assert [stat.key for stat in store.list(RUNS_PREFIX)] == [f"{RUNS_PREFIX}run-0.json"]


def test_an_error_of_the_store_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store, clock, limiter = LocalStore(tmp_path / "store"), Clock(), Limiter()
    watch = LimitsWatch(store, limiter, "run", Limits(), clock)
    put_limits(store, Limits(rows_per_s=7))
    watch.look()
    assert limiter.limits == Limits(rows_per_s=7)

    def look_and_count(text: str, times: int) -> None:
        for _ in range(3):
            clock.now += 3
            watch.look()
        assert limiter.limits == Limits(rows_per_s=7)
        assert caplog.text.count(text) == times

    store.put(LIMITS_KEY, b'{"rows_per_s": -1}')
    look_and_count("the last known ones hold: rows_per_s must be a number above 0", 1)
    put_limits(store, Limits(rows_per_s=7))
    look_and_count("can be read again", 1)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("no folder")
    look_and_count("the last known ones hold", 2)
    watch.end()
    with pytest.raises(ValueError):
        LimitsWatch(store, limiter, "a//b", Limits())


def test_servers_follow_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with ControlServer() as one:
        one.watch_limits(store, "one", Limits(rows_per_s=100))
        assert one.limiter.limits == Limits(rows_per_s=100)
        with ControlServer() as two:
            two.watch_limits(store, "two", Limits(rows_per_s=100))
            assert two.limiter.limits == Limits(rows_per_s=50)
            put_limits(store, Limits(rows_per_s=10))
            wait_until(lambda: one.limiter.limits == two.limiter.limits == Limits(rows_per_s=5))
        wait_until(lambda: one.limiter.limits == Limits(rows_per_s=10))
    assert store.list(RUNS_PREFIX) == []
