"""The clock of a host that is ahead or behind is told, by the clock of the store."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ringsync.ledger.alarms import Alarm
from ringsync.service import look as look_module
from ringsync.service.alarms import Watch
from ringsync.service.look import look
from ringsync.service.problem import Kind, Problem
from ringsync.steps.loop import put_status
from ringsync.storage.local import LocalStore
from tests.service.test_damaged_statuses import CONFIG, Airflow


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setattr(look_module, "client_of", lambda _: Airflow())
    return LocalStore(tmp_path)


def say(store: LocalStore, loop: str, host: str, ahead_s: float) -> None:
    """What a loop says whose host's clock is ahead."""
    said = {"at_ms": int((time.time() + ahead_s) * 1000), "host": host}
    store.say(f"status/{loop}.json", json.dumps(said).encode())


def clocks(store: LocalStore) -> list[Problem]:
    return [problem for problem in look(CONFIG, store, time.time()).problems if problem.kind == Kind.CLOCK_OFF]


@pytest.mark.parametrize(("ahead_s", "told"), [(7200, "7,200.0 s ahead of"), (3, "3.0 s ahead of"), (-60, "behind")])
def test_a_clock_that_is_off_is_named_with_its_host(store: LocalStore, ahead_s: float, told: str) -> None:
    put_status(store, "bucket_close", "close", {"tables": {}})
    say(store, "commitlog_stage/a", "node-a", ahead_s)
    (problem,) = clocks(store)
    assert problem.where == "node-a"
    assert told in problem.text
    assert not problem.is_critical
    say(store, "commitlog_stage/a", "node-a", 0)
    assert clocks(store) == []


def test_one_wrong_process_is_enough(store: LocalStore) -> None:
    """All loops of a machine have its name, and any of them may have written last."""
    for order in (("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")):
        for loop in order:
            say(store, f"commitlog_stage/{loop}", "node-a", 7200 if loop == "b" else 0)
        assert [problem.where for problem in clocks(store)] == ["node-a"]


def test_its_alarm_is_raised_and_clears(store: LocalStore) -> None:
    told: list[Alarm] = []
    watch = Watch(store, [lambda: told.append], after_ms=60_000)
    for second in range(0, 400, 10):
        say(store, "commitlog_stage/a", "node-a", 7200 if second < 100 else 0)
        put_status(store, "bucket_close", "close", {"tables": {}})
        watch.look(clocks(store), second * 1000)
    assert [(alarm.kind, alarm.where, alarm.cleared_ms is None) for alarm in told] == [
        ("clock-off", "node-a", True),
        ("clock-off", "node-a", False),
    ]
    assert told[0].raised_ms == 60_000
    assert told[1].cleared_ms == 150_000


def test_a_status_of_long_ago_says_nothing_of_a_clock(store: LocalStore, monkeypatch: Any) -> None:
    say(store, "commitlog_stage/gone", "node-a", 7200)
    there = store.list("status/")
    assert len(clocks(store)) == 1
    put_status(store, "bucket_close", "close", {"tables": {}})
    monkeypatch.setattr("ringsync.status.LATELY_MS", -1)
    assert there
    assert clocks(store) == []
