"""The pace of writes: none is too early, none is lost, and who writes an object once never waits."""

import threading

import pytest

from ringsync.storage import pace
from ringsync.storage.gcs import GcsStore
from ringsync.storage.pace import Pace
from servers.gcs import GcsEmulator


class Time:
    """A clock that moves only when somebody sleeps, or when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_writes_of_one_object_are_a_second_apart() -> None:
    time = Time()
    found = Pace(1.0, lambda: time.now, time.sleep)
    written = []
    for pause in (0.0, 0.0, 0.25, 0.75, 3.0, 0.0):
        time.now += pause
        found.wait("status")
        written.append(time.now)
    assert written == [100, 101, 102, 103, 106, 107]
    assert time.slept == [1.0, 0.75, 0.25, 1.0]


def test_others_do_not_wait() -> None:
    time = Time()
    found = Pace(1.0, lambda: time.now, time.sleep)
    for number in range(10):
        found.wait(f"row file {number}")
    assert time.slept == []
    found.wrote("created")
    found.wait("created")
    assert time.slept == [1.0]
    unlimited = Pace(0.0, lambda: time.now, time.sleep)
    for _ in range(3):
        unlimited.wait("status")
    assert time.slept == [1.0]


def test_each_thread_has_its_own_turn() -> None:
    turns: list[float] = []
    found = Pace(1.0, lambda: 100.0, turns.append)
    threads = [threading.Thread(target=found.wait, args=("status",)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(turns) == [1, 2, 3, 4]


def test_what_is_long_ago_is_forgotten() -> None:
    time = Time()
    found = Pace(1.0, lambda: time.now, time.sleep)
    for number in range(10 * pace._FEW):
        found.wait(str(number))
        time.now += 0.01
    assert len(found._free_at) <= pace._FEW + 100


@pytest.mark.server
def test_a_bucket_is_written_at_this_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status is put again and again; the last value is there."""
    time = Time()
    with GcsEmulator() as emulator:
        store = GcsStore(emulator.bucket, endpoint=emulator.endpoint)
        store._pace = Pace(store._pace._seconds, lambda: time.now, time.sleep)
        for number in range(4):
            store.say("status/a.json", b"%d" % number)
            store.put(f"once/{number}", b"", if_absent=True)
        assert time.slept == [1.0, 1.0, 1.0]
        assert store.get("status/a.json") == b"3"
        version = store.put("cursor", b"0", if_absent=True).version
        store.put("cursor", b"1", if_version=version)
        assert len(time.slept) == 4
