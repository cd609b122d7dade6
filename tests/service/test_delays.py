"""Whatever is late is told in time and clears: tables, late rows, archived segments, an archive without a worker."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from ringsync.config import Config
from ringsync.config.sections import Alarms
from ringsync.ledger.alarms import Alarm
from ringsync.ledger.archive import archive_segment
from ringsync.metrics import exposition
from ringsync.service import look as look_module
from ringsync.service.alarms import Watch
from ringsync.service.delays import ARCHIVE_WAITS, Limits, counted
from ringsync.service.expected import ARCHIVE, CLOSE, Expected
from ringsync.service.health import judges, problems
from ringsync.service.look import look
from ringsync.service.problem import Kind, Problem
from ringsync.service.show import status_lines
from ringsync.status import NODES, known_now
from ringsync.storage.local import LocalStore
from tests.service.test_damaged_statuses import CONFIG, Airflow

DAY_S = 86_400
EXPECTED = Expected.of_commit_logs(("default", "host-a"), archives=True)
BEGIN_MS = 1_800_000_000_000 // 60_000 * 60_000
"""The first bucket begins then."""


def config(**alarms: Any) -> Config:
    return CONFIG.model_copy(update={"alarms": Alarms(**alarms)})


def told(statuses: dict[str, Any], now_s: float, kind: Kind, *, stopped: bool = False) -> list[Problem]:
    found = problems(statuses, {}, EXPECTED, stopped, now_s, limits=Limits.of(config()))
    return [problem for problem in found if problem.kind == kind]


def raised_after(statuses: Any, kind: Kind, until_s: int) -> tuple[int | None, int | None]:
    """When the alarm of a kind is raised and cleared, s since the beginning, at a look every ten seconds.

    :param statuses: function that returns the statuses of a second
    """
    said: list[Alarm] = []
    store: Any = None
    watch = Watch(store, [lambda: said.append], int(config().alarms.after_s * 1000))
    watch._is_known = True  # type: ignore[attr-defined]
    watch._record = lambda: None  # type: ignore[method-assign]
    watch._note = lambda: None  # type: ignore[method-assign]
    for second in range(0, until_s, 10):
        now_ms = BEGIN_MS + second * 1000
        watch.look(told(statuses(second), now_ms / 1000, kind), now_ms)
    moments = [(alarm.cleared_ms or alarm.raised_ms or 0) - BEGIN_MS for alarm in said]
    assert [alarm.cleared_ms is None for alarm in said] in ([], [True], [True, False])
    return (*(moment // 1000 for moment in moments), None, None)[:2]  # type: ignore[return-value]


def table(oldest_ms: int | None) -> dict[str, Any]:
    return {CLOSE: {"at_ms": 0, "tables": {"shop.orders": {"oldest_open_bucket_ms": oldest_ms}}}}


def test_a_table_later_than_five_minutes_is_told() -> None:
    def stands_still(second: int) -> dict[str, Any]:
        return table(BEGIN_MS if second < 1000 else None)

    assert raised_after(stands_still, Kind.TABLE_LAGGING, 1200) == (430, 1050)


def test_a_table_whose_buckets_live_as_long_as_usual_is_not_told() -> None:
    """Its rows disagree all the time, and each bucket closes only at its end, 20 s later."""

    def closes_late(second: int) -> dict[str, Any]:
        oldest = (second - 20) // 60 * 60 - 240 if second >= 320 else 0
        return table(BEGIN_MS + max(0, oldest) * 1000)

    assert raised_after(closes_late, Kind.TABLE_LAGGING, 3600) == (None, None)


def test_late_rows_that_wait_are_told() -> None:
    def waits(second: int) -> dict[str, Any]:
        waiting = {"waiting": 5_000_000, "oldest_ms": BEGIN_MS} if second < 4000 else {"waiting": 0, "oldest_ms": None}
        return {"out_of_sequence/queue": {"at_ms": 0, **waiting}}

    assert raised_after(waits, Kind.LATE_ROWS_WAITING, 4200) == (3670, 4050)
    (problem,) = told(waits(0), BEGIN_MS / 1000 + 20 * DAY_S, Kind.LATE_ROWS_WAITING)
    assert "5,000,000 late rows are not published, the oldest has waited for" in problem.text


def test_archived_segments_that_wait_are_told() -> None:
    def waits(second: int) -> dict[str, Any]:
        waiting = {"waiting": 3, "bytes": 96_000_000, "oldest_ms": BEGIN_MS}
        return {ARCHIVE_WAITS: waiting} if second < 600 else {}

    assert raised_after(waits, Kind.ARCHIVE_WAITING, 800) == (430, 650)
    (problem,) = told(waits(0), BEGIN_MS / 1000 + DAY_S, Kind.ARCHIVE_WAITING)
    assert problem.text.startswith("3 archived segments (96 MB) are not read, the oldest has waited for")
    assert told(waits(0), BEGIN_MS / 1000 + DAY_S, Kind.ARCHIVE_WAITING, stopped=True) == [], "sync-stopped says it"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setattr(look_module, "client_of", lambda _: Airflow())
    return LocalStore(tmp_path / "lake")


def test_who_looks_counts_what_is_archived(store: LocalStore, tmp_path: Path) -> None:
    """In status, metrics and alarms. Another's object in the folder is no segment."""
    now_s = time.time()
    assert counted(store) == {}
    for number in (1, 2):
        segment = tmp_path / f"CommitLog-7-170000000000{number}.log"
        segment.write_bytes(b"x" * 1000)
        archive_segment(store, "node-1", segment, "1000\nCOMPLETED", 0, int(now_s * 1000), even_short=True)
    (tmp_path / "lake" / "cdc" / ".DS_Store").write_bytes(b"x")
    os.utime(tmp_path / "lake" / "cdc" / "node-1" / "CommitLog-7-1700000000001.log.json", (now_s - 3 * DAY_S,) * 2)
    found = counted(store)[ARCHIVE_WAITS]
    assert (found["waiting"], found["oldest_ms"] // 1000) == (2, int(now_s - 3 * DAY_S))
    assert found["bytes"] > 2000
    seen = look(CONFIG, store, now_s)
    (problem,) = [problem for problem in seen.problems if problem.kind == Kind.ARCHIVE_WAITING]
    assert "2 archived segments" in problem.text
    lines = list(status_lines(seen.statuses, seen.dags, now_s))
    head = lines.index("archived segments waiting  MB   oldest")
    assert lines[head + 1].split()[:2] == ["2", "0.0"]
    text = exposition(counted(store))
    assert "ringsync_archive_waiting 2" in text
    assert "ringsync_archive_oldest_timestamp_seconds" in text


def archive(at_ms: int, down: Any = (), down_until_ms: int = BEGIN_MS + 10**9) -> dict[str, Any]:
    return {
        f"{ARCHIVE}default": {"at_ms": BEGIN_MS + 10**9, "nodes": {}},
        f"{ARCHIVE}host-a": {"at_ms": at_ms, "nodes": {"n1": {"endpoint": "a"}, "n2": {"endpoint": "b"}}},
        NODES: {
            **{"at_ms": 0, "down_until_ms": down_until_ms, "hint_window_ms": 3_600_000},
            "down": {host: {"endpoint": host, "since_ms": 0} for host in down},
        },
    }


@pytest.mark.parametrize("down", [(), ("n1",), ("n1", "n2")])
def test_an_archive_that_is_silent_while_a_node_lives_is_critical(down: tuple[str, ...]) -> None:
    """A dead host takes its node and its worker along: then nothing is written there."""
    now_s = BEGIN_MS / 1000 + 50
    critical = told(archive(BEGIN_MS, down), now_s, Kind.ARCHIVE_SILENT)
    warned = [one for one in told(archive(BEGIN_MS, down), now_s, Kind.LOOP_SILENT) if one.where == f"{ARCHIVE}host-a"]
    assert (len(critical), len(warned)) == ((0, 1) if len(down) == 2 else (1, 0))
    assert all(problem.is_critical and problem.where == f"{ARCHIVE}host-a" for problem in critical)
    stopped = told(archive(BEGIN_MS, down), now_s, Kind.ARCHIVE_SILENT, stopped=True)
    assert stopped == critical, "stop leaves it on"


@pytest.mark.parametrize("stopped", [False, True])
def test_who_was_down_by_an_old_plan_excuses_no_dead_archive(stopped: bool) -> None:
    """Its node came back, its worker did not: only loop-silent said so, for as long as the sync was stopped. And nobody
    says that it has been down since then: it is not to be removed from the cluster."""
    now_s = BEGIN_MS / 1000
    before = archive(BEGIN_MS - 2 * DAY_S * 1000, ("n1", "n2"), BEGIN_MS - 1)
    statuses = known_now(before, now_s)
    (problem,) = told(statuses, now_s, Kind.ARCHIVE_SILENT, stopped=stopped)
    assert problem.where == f"{ARCHIVE}host-a"
    assert problem.is_critical
    assert told(statuses, now_s, Kind.NODE_PAST_HINTS, stopped=stopped) == []
    assert not any("node that is down" in line for line in status_lines(statuses, {}, now_s))
    assert "ringsync_node_down" not in exposition(statuses)
    assert not judges(statuses, {}, EXPECTED, stopped, now_s)(NODES), "what was told stays as it is"
    fresh = known_now(before, now_s - 1)
    assert len(told(fresh, now_s, Kind.NODE_PAST_HINTS)) == 2
    assert any("node that is down" in line for line in status_lines(fresh, {}, now_s))
    assert "ringsync_node_down" in exposition(fresh)
    assert judges(fresh, {}, EXPECTED, stopped, now_s)(NODES)


def test_an_archive_that_was_never_heard_is_critical_too() -> None:
    assert len(told({}, 0.0, Kind.ARCHIVE_SILENT)) == 2


def test_between_two_runs_nobody_is_woken() -> None:
    def silent(second: int) -> dict[str, Any]:
        return archive(BEGIN_MS if second < 200 else BEGIN_MS + second * 1000)

    assert raised_after(silent, Kind.ARCHIVE_SILENT, 400) == (110, 250)

    def restarts(second: int) -> dict[str, Any]:
        return archive(BEGIN_MS + (second - max(0, second % 660 - 600)) * 1000)

    assert raised_after(restarts, Kind.ARCHIVE_SILENT, 2000) == (None, None)


def test_an_archive_that_is_slow_is_not_silent_and_one_that_hangs_is() -> None:
    def busy(age_s: float) -> dict[str, Any]:
        statuses = archive(BEGIN_MS)
        statuses[f"{ARCHIVE}host-a"]["busy"] = {"since_ms": BEGIN_MS - age_s * 1000}
        return statuses

    kinds = (Kind.ARCHIVE_SILENT, Kind.LOOP_SILENT, Kind.LOOP_STUCK)
    slow = [problem for kind in kinds for problem in told(busy(250), BEGIN_MS / 1000, kind)]
    assert [problem for problem in slow if problem.where == f"{ARCHIVE}host-a"] == []
    (stuck,) = told(busy(310), BEGIN_MS / 1000, Kind.ARCHIVE_SILENT)
    assert (
        stuck.text
        == f"{ARCHIVE}host-a: nothing has moved for 310 s, and nobody says that its nodes are down: cdc_raw may fill"
    )


def test_the_reprocessing_does_not_wait_behind_bootstraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGSYNC_SPARK_POOL", "spark_jvms")
    import importlib

    from ringsync import orchestration

    try:
        fresh = importlib.reload(orchestration)
        assert fresh.BOOTSTRAP_SCAN.task_arguments["pool"] == "spark_jvms"
        assert fresh.ARCHIVE_REPROCESS.task_arguments["pool"] == fresh.BUCKET_CLOSE.task_arguments["pool"]
        assert fresh.ARCHIVE_REPROCESS.task_arguments["priority_weight"] == fresh.LOOP_PRIORITY
    finally:
        monkeypatch.undo()
        importlib.reload(orchestration)
