"""Plans, and the buckets of rows by arrival, follow the store's clock, whatever a worker's clock says."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringsync.ledger.staging import Bucket
from ringsync.status import cycle_ms, look_at_statuses, read_status, read_statuses
from ringsync.steps import sync_plan
from ringsync.steps.scylla import scylla_log_stage
from ringsync.steps.scylla.followed_logs import NotYetError
from ringsync.steps.scylla.scylla_log_stage import LogStager
from ringsync.steps.stage import commitlog_stage
from ringsync.steps.stage.commitlog_stage import Stager
from ringsync.steps.stage.staged_files import Windows
from ringsync.steps.sync_plan import SyncPlan, interval_at, plan_keys, plan_of
from ringsync.storage.local import LocalStore
from ringsync.storage.port import Stat

MINUTE_MS, DAY_MS = 60_000, 86_400_000
NOW_MS = 1_700_000_000_000 // MINUTE_MS * MINUTE_MS + 30_000
CONFIG: Any = SimpleNamespace(commitlog_processor_window_interval_ms=MINUTE_MS)


class Lake(LocalStore):
    """A store that has its own clock, and counts what it is told only to learn the time."""

    now_ms, says = NOW_MS, 0

    def say(self, key: str, data: bytes) -> None:
        super().say(key, data)
        self.says += not key.startswith("status/")

    def stat(self, key: str) -> Stat | None:
        found = super().stat(key)
        return found and replace(found, written_ms=self.now_ms)

    def list(self, prefix: str = "", start: str = "") -> list[Stat]:
        return [replace(stat, written_ms=self.now_ms) for stat in super().list(prefix, start)]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """The intervals of which plans were made."""
    found: list[Bucket] = []

    def make_plan(store: Any, config: Any, session: Any, interval: Bucket, before: Any = None) -> SyncPlan:
        found.append(interval)
        return SyncPlan(interval, (), {}, ())

    monkeypatch.setattr(sync_plan, "make_plan", make_plan)
    return found


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def at(moment_ms: int) -> Bucket:
    return interval_at(moment_ms, MINUTE_MS)


def kept(lake: Lake) -> list[Bucket]:
    return [SyncPlan.from_json(lake.get(key)).interval for key in plan_keys(lake)]


def test_a_clock_that_is_ahead_makes_no_plan_of_the_future(lake: Lake, planned: list[Bucket]) -> None:
    """A day ahead for two hours: no plan of the present was kept, and each process made one in each cycle."""
    before = None
    for _ in range(120):
        before = plan_of(lake, CONFIG, None, at(lake.now_ms + DAY_MS), before)
        assert before.interval == at(lake.now_ms)
        lake.now_ms += MINUTE_MS
    planned.clear()
    for _ in range(3):
        for _ in range(4):
            plan_of(lake, CONFIG, None, at(lake.now_ms))
        lake.now_ms += MINUTE_MS
    assert planned == [at(lake.now_ms - minutes * MINUTE_MS) for minutes in (3, 2, 1)]
    assert kept(lake)[-1] == planned[-1]
    assert len(kept(lake)) == sync_plan.KEPT_PLANS


def test_plans_of_the_future_go(lake: Lake, planned: list[Bucket]) -> None:
    """The store's own clock was ahead."""
    lake.now_ms += DAY_MS
    for _ in range(105):
        plan_of(lake, CONFIG, None, at(lake.now_ms))
        lake.now_ms += MINUTE_MS
    lake.now_ms = NOW_MS
    plan_of(lake, CONFIG, None, at(NOW_MS))
    assert kept(lake) == [at(NOW_MS)]


def test_who_is_slow_removes_no_plan_of_others(lake: Lake, planned: list[Bucket]) -> None:
    lake.now_ms += MINUTE_MS
    plan_of(lake, CONFIG, None, at(lake.now_ms))
    lake.now_ms -= MINUTE_MS
    plan_of(lake, CONFIG, None, at(NOW_MS))
    assert kept(lake) == [at(NOW_MS), at(NOW_MS + MINUTE_MS)]


def test_the_time_is_asked_for_once_in_an_interval(lake: Lake, planned: list[Bucket]) -> None:
    for _ in range(5):
        for _ in range(4):
            plan_of(lake, CONFIG, None, at(lake.now_ms))
        lake.now_ms += MINUTE_MS
    assert lake.says == 5


def test_a_clock_that_is_behind_reads_its_plan_again(lake: Lake, planned: list[Bucket]) -> None:
    plan_of(lake, CONFIG, None, at(NOW_MS))
    lake.now_ms += 5 * MINUTE_MS
    assert plan_of(lake, CONFIG, None, at(NOW_MS)).interval == at(NOW_MS)
    assert len(planned) == 1


def windows_of_stage(lake: Lake) -> Windows:
    stager = object.__new__(Stager)
    stager._store, stager._config, stager._session, stager._plan = lake, CONFIG, None, None
    stager._versions, stager._logs = {}, {}
    stager._former = SimpleNamespace(take=lambda plan: None, hosts=())  # type: ignore[assignment]
    return stager._windows()


def windows_of_scylla(lake: Lake, patch: pytest.MonkeyPatch) -> Windows:
    stager = object.__new__(LogStager)
    stager._store, stager._config, stager._session, stager._plan = lake, CONFIG, None, None
    stager._control, stager._number, stager._waits = SimpleNamespace(address=None), 0, None  # type: ignore[assignment]
    stager._positions, stager._context = {}, SimpleNamespace(defaultParallelism=0)

    def look(*_: Any) -> Any:
        raise NotYetError("the plan is all that is wanted")

    stager._followed = SimpleNamespace(look=look, clocks=None)  # type: ignore[assignment]
    stager.cycle()
    given: list[Windows] = []
    patch.setattr(scylla_log_stage, "LogTask", lambda config, logs, windows, *_: given.append(windows))
    with suppress(AttributeError):  # there is no Spark
        stager._run([], [object()], stager._plan.interval)  # type: ignore[list-item, union-attr]
    return given[0]


@pytest.mark.parametrize("ahead_ms", [0, DAY_MS])
@pytest.mark.parametrize("of_scylla", [False, True])
def test_rows_by_arrival_are_of_the_present(
    lake: Lake, planned: list[Bucket], monkeypatch: pytest.MonkeyPatch, ahead_ms: int, of_scylla: bool
) -> None:
    """They stood still in a bucket of tomorrow, and nothing told it."""
    for module in (commitlog_stage, scylla_log_stage):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: (NOW_MS + ahead_ms) / 1000))
    windows = windows_of_scylla(lake, monkeypatch) if of_scylla else windows_of_stage(lake)
    for by_arrival in (True, False):
        starts = windows.starts(np.array([(NOW_MS + ahead_ms) * 1000]), by_arrival)
        assert starts.tolist() == [at(NOW_MS).start]


def test_a_loop_that_is_dead_is_not_fresh_for_as_long_as_its_clock_was_ahead(tmp_path: Path) -> None:
    """The last word of an archive whose host's RTC is in local time counted as news for an hour."""
    store = LocalStore(tmp_path)
    now_ms = int(time.time() * 1000)
    ahead_ms = now_ms + 3_600_000
    store.say("status/commitlog_archive/default.json", json.dumps({
        "at_ms": ahead_ms, "host": "h", "busy": {"since_ms": ahead_ms - 5_000}
    }).encode())  # fmt: skip
    for status in (read_status(store, "commitlog_archive/default"), *read_statuses(store).values()):
        assert status is not None
        assert abs(status["at_ms"] - now_ms) < 60_000
        assert status["at_ms"] - cycle_ms(status) == 5_000
    assert look_at_statuses(store).ahead_ms["h"] > 3_000_000
