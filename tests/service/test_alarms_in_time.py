"""Alarms come in the time that the runbook states, also where what is wrong shows itself seldom or slowly."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringsync.airflow_client import DagHealth, RunState, TaskState
from ringsync.config import load_config
from ringsync.config.last_good import Outdated
from ringsync.ledger.alarms import raised_now
from ringsync.service.alarms import watch
from ringsync.service.problem import Kind
from ringsync.storage.port import UnavailableError
from ringsync.wiring import store_of
from tests.service.test_alarms import making, watched, written_conf


class FailingLoop:
    """Airflow with a loop whose runs fail after 35 s, again and again; the next one begins at once."""

    RUN_S = 35

    def __init__(self, clock: Sequence[float]) -> None:
        self._clock, self._began = clock, clock[0]

    def health(self, dags: Sequence[str], since: Any, *, all_tasks: bool) -> dict[str, DagHealth]:
        return {dag: DagHealth(False, self._run(dag), self._run(dag, ended=True)) for dag in dags}

    def _run(self, dag: str, *, ended: bool = False) -> RunState | None:
        number, since_s = divmod(self._clock[0] - self._began, self.RUN_S)
        if dag != "bucket_close" or (ended and not number):
            return None
        if ended or (number and since_s < 1):
            return RunState(dag, f"r{number - ended:.0f}", "failed", (TaskState("close", "failed", 1, 30.0),))
        return RunState(dag, f"r{number:.0f}", "running", (TaskState("close", "running", 1, None),))


def test_a_loop_that_fails_again_and_again_is_an_alarm_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs follow at once, so hardly a look sees one that has failed."""
    monkeypatch.setenv("RINGSYNC_AIRFLOW_PASSWORD", "secret")
    config, began_s = load_config(written_conf(tmp_path)), time.time()
    store = store_of(config)
    clock = [began_s]
    airflow = FailingLoop(clock)
    monkeypatch.setattr("ringsync.service.look.client_of", lambda config: airflow)
    watched(config, store, began_s, FailingLoop.RUN_S + config.alarms.after_s + 2 * config.alarms.interval_s, clock)
    assert {alarm.where for alarm in raised_now(store) if alarm.kind == Kind.DAG_FAILED} == {
        *("bucket_close", "bucket_close.close"),
    }


class Unreachable:
    """An object store that is away: each request takes a minute to fail, since it is tried again for so long."""

    url, REQUEST_S = "gs://bucket", 60

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def _fail(self, *_: object, **__: object) -> Any:
        self._clock[0] += self.REQUEST_S
        raise UnavailableError("the service does not answer")

    put = say = get = get_range = stat = list = delete = _fail

    def uri(self, key: str) -> str:
        return f"{self.url}/{key}"


def test_a_store_that_takes_long_to_fail_is_told_in_time(tmp_path: Path) -> None:
    """While it is away nothing else is asked of it: each request would take a minute."""
    told: list[float] = []
    clock = [1000.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    config = load_config(written_conf(tmp_path))
    short = config.model_copy(update={"sync": config.sync.model_copy(update={"run_s": 200})})
    store: Any = Unreachable(clock)
    watch(short, store, making(lambda alarm: told.append(clock[0])), clock=lambda: clock[0], sleep=sleep)
    assert told
    assert told[0] - 1000.0 <= 150


def test_a_watch_ends_when_the_configuration_has_changed(tmp_path: Path) -> None:
    """Its next run reads it: a new notifier was told hours later."""
    conf = written_conf(tmp_path)
    config, clock = load_config(conf), [time.time()]
    os.utime(conf, (time.time() - 600,) * 2)
    began_s = clock[0]

    def sleep(slept: float) -> None:
        clock[0] += slept
        if clock[0] - began_s >= 100:  # the same in other words, then wrong, and then another
            text = f"{good}# one\n" if clock[0] - began_s < 200 else f"{good}kafca: null\n"
            conf.write_text(text if clock[0] - began_s < 300 else f"{good}sync: {{exclude: [a.b]}}\n")
            os.utime(conf, (time.time() - 600 + clock[0] - began_s,) * 2)

    good = conf.read_text()
    watch(config, store_of(config), [], is_outdated=Outdated(conf, config), clock=lambda: clock[0], sleep=sleep)
    assert 300 <= clock[0] - began_s < 300 + 2 * config.alarms.interval_s
    assert config.sync.run_s > 3600
