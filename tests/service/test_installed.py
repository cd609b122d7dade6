"""Loops that run other versions than the one that publishes what they stage are named."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ringsync.installed import differences, installed
from ringsync.service import look as look_module
from ringsync.service.look import look
from ringsync.service.problem import Kind, Problem
from ringsync.steps.loop import put_status
from ringsync.storage.local import LocalStore
from tests.service.test_damaged_statuses import CONFIG, Airflow


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setattr(look_module, "client_of", lambda _: Airflow())
    put_status(LocalStore(tmp_path), "bucket_close", "close", {"tables": {}})
    return LocalStore(tmp_path)


def say(store: LocalStore, installed: dict[str, str], late_s: float = 0) -> None:
    said = {"at_ms": int((time.time() - late_s) * 1000), "host": "db-7", "installed": installed}
    store.say("status/commitlog_stage/default.json", json.dumps(said).encode())


def differing(store: LocalStore) -> list[Problem]:
    return [problem for problem in look(CONFIG, store, time.time()).problems if problem.kind == Kind.INSTALLED_DIFFERS]


def test_a_stage_of_another_version_is_named_with_its_host(store: LocalStore) -> None:
    ours = dict(installed())
    say(store, {**ours, "ringsync": "0123456789ab", "python": "3.12"})
    (problem,) = differing(store)
    assert problem.where == "commitlog_stage/default"
    assert f"on host db-7 runs ringsync 0123456789ab, not {ours['ringsync']}; python 3.12, not 3.11" in problem.text
    say(store, ours)
    assert differing(store) == []


def test_who_is_silent_or_says_less_is_not_compared(store: LocalStore) -> None:
    say(store, {"ringsync": "0123456789ab"}, late_s=600)
    assert differing(store) == [], "a loop that is silent is another alarm"
    say(store, {"java": "17"} if "java" not in installed() else {})
    assert differing(store) == []


def test_what_is_installed_has_a_digest_of_the_source() -> None:
    ours = installed()
    assert len(ours["ringsync"]) == 12
    assert {"python", "pyarrow", "numpy", "numba"} <= set(ours)
    assert differences(ours, {**ours, "pyarrow": "0"}) == [f"pyarrow {ours['pyarrow']}, not 0"]
