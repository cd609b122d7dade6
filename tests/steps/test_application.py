"""The frame of applications: what a run leaves behind."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from ringsync.steps import application
from ringsync.steps.application import Application, ExitCode, Report, run_application
from ringsync.storage.local import LocalStore

KEY = "reports/some/again"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    conf = tmp_path / "ringsync.yaml"
    conf.write_text("server_name: test\ncassandra: {contact_points: [127.0.0.1]}\nstore: {url: lake}\n")
    return ["--conf", str(conf), "--run", "again"]


def test_the_report_of_another_run_of_this_id_stays(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow tries a task again; and if its database was restored, it uses an id of before for another run."""
    seconds = count(1_790_000_000, 60)
    monkeypatch.setattr(application.time, "time", lambda: float(next(seconds)))
    numbers = iter((1, 2, 3))

    def step(_: Application) -> tuple[Report, ExitCode]:
        return {"number": next(numbers)}, ExitCode.OK

    assert [run_application("some", "", step, arguments, of_table=False) for _ in range(3)] == [0, 0, 0]
    store = LocalStore(tmp_path / "lake")
    reports = {stat.key: json.loads(store.get(stat.key)) for stat in store.list("reports/")}
    assert reports[f"{KEY}.json"]["number"] == 3
    others = {key: report["number"] for key, report in reports.items() if key != f"{KEY}.json"}
    assert sorted(others.values()) == [1, 2]
    assert all(key == f"{KEY}~{reports[key]['started_at']}.json" for key in others)


def test_a_damaged_report_holds_up_nothing(tmp_path: Path, arguments: list[str]) -> None:
    store = LocalStore(tmp_path / "lake")
    store.put(f"{KEY}.json", b"{")
    assert run_application("some", "", lambda _: ({}, ExitCode.OK), arguments, of_table=False) == 0
    assert json.loads(store.get(f"{KEY}.json"))["exit_code"] == 0
    assert store.get(f"{KEY}~unknown.json") == b"{"
