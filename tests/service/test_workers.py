"""``cdcservice start`` waits until the worker of each queue has told whether it can use ``cdc_raw`` of its nodes."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ringsync.ring.ring import Host
from ringsync.service.command import _check_workers, _print_reports
from ringsync.service.expected import Expected
from ringsync.service.workers import WorkerReports, wait_for_workers
from ringsync.steps.application import ExitCode
from ringsync.steps.loop import put_status
from ringsync.storage.local import LocalStore
from tests.steps.node_logs import claimed, read_node_log

QUEUES = ("n1", "n2")
EXPECTED = Expected.of_commit_logs(QUEUES)


class Workers:
    """Workers that look at real folders, some seconds after the start."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder / "lake")
        self.now = 0.0
        self.said: list[str] = []
        self.coming: dict[float, Callable[[], None]] = {}
        self.raw = {queue: folder / queue for queue in QUEUES}
        for raw in self.raw.values():
            raw.mkdir()
            (raw / "CommitLog-7-1.log").write_bytes(b"")

    def look(self, queue: str, *, up: bool = True, error: str | None = None) -> None:
        log = read_node_log(self.store, Host(queue, f"10.0.0.{queue[1]}", 9042, "dc", "r", ()), self.raw[queue], 0)
        log.new_work(0, 1, claimed)
        nodes = {} if error else {queue: {"up": up, **log.status()}}
        put_status(self.store, "commitlog_stage", queue, {"nodes": nodes, "error": error})

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.coming if at <= self.now]:
            self.coming.pop(at)()

    def wait(self, before: dict[str, int] | None = None) -> WorkerReports:
        clock = lambda: self.now  # noqa: E731
        return wait_for_workers(self.store, EXPECTED, before or {}, 60.0, self.said.append, clock, self.sleep)


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    return Workers(tmp_path)


def test_what_a_run_before_has_said_does_not_count(workers: Workers) -> None:
    workers.look("n1")
    workers.look("n2")
    before = {"n2": json.loads(workers.store.get("status/commitlog_stage/n2.json"))["at_ms"]}
    assert workers.wait(before).usable == ("10.0.0.1:9042",)


def test_a_check_says_what_those_tell_that_run(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    output = io.StringIO()
    assert _check_workers(workers.store, EXPECTED, Console(file=output, width=200)) == ExitCode.OK
    assert output.getvalue().count("its worker does not run now") == 2
    workers.raw["n2"] = workers.raw["n2"] / "nowhere"
    workers.look("n2")
    assert _check_workers(workers.store, EXPECTED, Console(file=output, width=200)) == ExitCode.COMPLETED_WITH_ERRORS
    assert "queue n2, node 10.0.0.2:9042: cdc_raw cannot be read" in capsys.readouterr().err


def told(found: WorkerReports, capsys: pytest.CaptureFixture[str]) -> tuple[ExitCode, str]:
    console = Console(file=io.StringIO(), width=200)
    return _print_reports(found, console), capsys.readouterr().err


def test_all_is_well_once_each_has_looked(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    workers.coming = {10.0: lambda: workers.look("n1"), 20.0: lambda: workers.look("n2")}
    found = workers.wait()
    assert found == WorkerReports({}, (), ("10.0.0.1:9042", "10.0.0.2:9042"))
    assert workers.now == 20
    assert [line.rpartition(": ")[2] for line in workers.said] == ["n1, n2", "n2"]
    assert told(found, capsys) == (ExitCode.OK, "")


def test_what_is_refused_is_named_with_queue_node_folder_and_remedy(
    workers: Workers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = os.access  # root may do all
    monkeypatch.setattr(
        os, "access", lambda path, mode: real(path, mode) and not (mode == os.W_OK and path == workers.raw["n2"])
    )
    workers.look("n1")
    workers.look("n2")
    found = workers.wait()
    assert found.usable == ("10.0.0.1:9042",)
    code, said = told(found, capsys)
    assert code == ExitCode.COMPLETED_WITH_ERRORS
    assert f"queue n2, node 10.0.0.2:9042: nothing can be deleted in {workers.raw['n2']}" in said
    assert "give the user of this worker the right" in said


def test_a_folder_that_is_not_there_is_named(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    workers.raw["n2"] = workers.raw["n2"] / "nowhere"
    workers.look("n1")
    workers.look("n2")
    code, said = told(workers.wait(), capsys)
    assert code == ExitCode.COMPLETED_WITH_ERRORS
    assert "queue n2, node 10.0.0.2:9042: cdc_raw cannot be read" in said
    assert f"{workers.raw['n2']}': is it mounted, and may this user read there?" in said


def test_a_node_that_is_down_is_not_waited_for(workers: Workers) -> None:
    workers.raw["n2"] = workers.raw["n2"] / "nowhere"
    workers.look("n1")
    workers.look("n2", up=False)
    assert workers.wait() == WorkerReports({}, (), ("10.0.0.1:9042",))


def test_a_worker_that_does_not_come_is_named_in_time(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run before has told is no sign of life, and what a cycle that failed has told says nothing of a node."""
    put_status(workers.store, "commitlog_stage", "n1", {"at_ms": 17, "nodes": {}, "error": None})
    workers.coming = {5.0: lambda: workers.look("n2", error="the cluster does not answer")}
    found = workers.wait({"n1": 17})
    assert workers.now == 60
    code, said = told(found, capsys)
    assert code == ExitCode.COMPLETED_WITH_ERRORS
    assert "queue n1: its worker has not looked at cdc_raw: it has given no sign of life" in said
    assert "queue n2: its worker has not looked at cdc_raw: the cluster does not answer" in said
