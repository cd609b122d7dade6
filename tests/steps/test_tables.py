"""Many tables in one step: who fails, who goes on, and what the run says of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.shared import KnownTables, Reading
from ringsync.cql.identifiers import parse_table_patterns
from ringsync.state.bootstrap import COMPLETED, SCANNING, Bootstrap, LostOwnershipError
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.bootstrap.plan import completed_since, plans_to_follow
from ringsync.steps.tables import Failure, Outcome, at_once, chosen, each, failed_before, halved, in_all, together
from ringsync.storage.local import LocalStore

A, B, C, D = ("shop", "a"), ("shop", "b"), ("shop", "Odd"), ("shop", "d")
KNOWN = KnownTables("v1", (A, B, C, ("crm", "c1"), ("crm", "c22")), {})


def test_patterns_choose_each_table_once_and_what_matches_nothing_has_failed() -> None:
    tables, failures = chosen(parse_table_patterns("shop.a, shop.*, crm.c?, gone.x, tmp.*"), KNOWN)
    assert tables == [A, B, C, ("crm", "c1"), ("gone", "x")]
    assert failures == {"tmp.*": Failure("no table matches tmp.*", ExitCode.FATAL)}


def work(table: tuple[str, str]) -> tuple[Report, ExitCode]:
    if table == B:
        raise StepError("no rights")
    if table == C:
        return {"rows": 3, "error": "2 token ranges could not be read"}, ExitCode.COMPLETED_WITH_ERRORS
    return {"rows": 4, "splits": 1}, ExitCode.OK


def test_a_failure_is_its_own_until_the_last_step() -> None:
    outcome = Outcome()
    each("run", [A, B, C], work, outcome)
    report, code = in_all(outcome, last=False)
    assert (code, "error" in report) == (ExitCode.OK, False)
    assert (report["tables_done"], report["tables_failed"], report["rows"]) == (1, 2, 7)
    report, code = in_all(outcome, last=True)
    assert code == ExitCode.COMPLETED_WITH_ERRORS
    assert report["error"].splitlines() == [
        "2 of 3 tables failed, the other 1 are done:",
        'shop."Odd": 2 token ranges could not be read',
        "shop.b: no rights",
    ]


def test_a_step_fails_at_once_if_no_table_is_left() -> None:
    outcome = Outcome()
    each("run", [B], work, outcome)
    report, code = in_all(outcome, last=False)
    assert (code, report["error"]) == (ExitCode.FATAL, "1 of 1 tables failed, none is done:\nshop.b: no rights")


def test_the_error_of_a_table_that_is_alone_is_raised() -> None:
    with pytest.raises(StepError, match="no rights"):
        each("run", [B], work, Outcome(alone=True))
    outcome = Outcome(alone=True)
    each("run", [C], work, outcome)
    assert in_all(outcome, last=False) == work(C)


def test_a_process_that_another_of_the_same_run_has_replaced_ends() -> None:
    """Else it would say of tables that they had failed, which the other one does."""

    def lost(owner: str) -> Any:
        def fail(_: Any) -> Any:
            raise LostOwnershipError("taken over", owner)

        return fail

    outcome = Outcome()
    each("run-1", [A], lost("run-2 on host, process 7"), outcome)
    assert outcome.failures["shop.a"].error == "taken over"
    with pytest.raises(LostOwnershipError):
        each("run-1", [A, B], lost("run-1 on host, process 8"), outcome)


def test_later_steps_leave_out_what_has_failed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    failed = {"prepare": {"shop.a": Failure("no rights", 3)}, "scan": {"shop.b": Failure("altered", 3)}}
    for step, failures in failed.items():
        report = {"failed": {name: vars(why) for name, why in failures.items()}}
        store.put(f"reports/bootstrap_{step}/run.json", json.dumps(report).encode())
    patterns = parse_table_patterns("shop.*")
    config: Any = SimpleNamespace()

    def application(name: str) -> Application:
        return Application(name, "", config, store, None, "run", argparse.Namespace(), patterns)

    assert failed_before(application("bootstrap_scan")).keys() == {"shop.a"}
    assert failed_before(application("replica_verify")).keys() == {"shop.a", "shop.b"}
    monkeypatch.setattr("ringsync.steps.bootstrap.plan.plans_of", lambda *_: {A: "a", B: "b", C: "c"})
    outcome = Outcome()
    assert plans_to_follow(application("bootstrap_drain"), outcome) == {C: "c"}
    monkeypatch.setattr("ringsync.steps.bootstrap.plan.plans_of", lambda *_: {})
    with pytest.raises(StepError, match="run bootstrap_prepare with the same --run first"):
        plans_to_follow(application("bootstrap_prepare"), Outcome())


def test_what_another_run_has_completed_since_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was completed before the run is old: the run has failed with it."""
    store, day_s = LocalStore(tmp_path), 86_400
    reports = {
        "bootstrap_prepare": {
            "started_at": "1970-01-11T00:00:00Z",
            "failed": ["crm.new", "crm.old", "crm.none", "x.*"],
        },
        "bootstrap_scan": {"failed": ["shop.a", "shop.b", 'shop."Odd"', "shop.d"]},
    }
    for step, report in reports.items():
        failed = {name: {"error": "altered", "exit_code": 3} for name in report["failed"]}
        store.put(f"reports/{step}/run.json", json.dumps({**report, "failed": failed}).encode())

    def latest(bootstrap_id: str, day: int, state: str = COMPLETED) -> Bootstrap:
        return Bootstrap("", "", bootstrap_id, state, "", "", day * day_s)

    found = {
        ("crm", "new"): latest("n", 11),
        ("crm", "old"): latest("o", 9),
        A: latest("a", 10),  # this run's, which another has gone on with
        B: latest("b2", 11),
        C: latest("c2", 11, SCANNING),
        D: latest("d0", 9),
    }
    planned = {name: latest(bootstrap_id, 10) for name, bootstrap_id in ((A, "a"), (B, "b"), (C, "c"), (D, "d"))}
    plans = {name: SimpleNamespace(bootstrap=bootstrap) for name, bootstrap in planned.items()}
    monkeypatch.setattr("ringsync.steps.bootstrap.plan.plans_of", lambda *_: plans)
    state: Any = SimpleNamespace(find=lambda *name: found.get(name))
    config: Any = None
    verify = Application("replica_verify", "", config, store, None, "run", argparse.Namespace())
    outcome = Outcome(failures=failed_before(verify))
    assert completed_since(verify, state, outcome) == [("crm", "new"), A, B]
    assert {*outcome.failures} == {"crm.old", "crm.none", "x.*", 'shop."Odd"', "shop.d"}


def test_small_pieces_share_tasks_and_few_do_not() -> None:
    small = [(10.0, f"s{n}") for n in range(64)]
    groups = together([*small, (5e6, "large"), (9e6, "larger")], 2)
    assert groups[:2] == [["larger"], ["large"]]
    assert {len(group) for group in groups[2:]} == {8}
    assert sorted(piece for group in groups for piece in group) == sorted(["large", "larger", *(s for _, s in small)])
    assert [len(group) for group in together(small[:7], 2)] == [1] * 7
    assert together([(1.0, "a"), (5e6, "b")], 1, large_first=False) == [["a"], ["b"]]
    assert list(at_once(lambda number: number * number, [3, 1, 2])) == [9, 1, 4]


@pytest.mark.parametrize("poison", [set(), {0}, {6}, {2, 3}, set(range(7))])
def test_only_those_fail_whose_work_fails_alone(poison: set[int], capsys: pytest.CaptureFixture[str]) -> None:
    jobs: list[list[int]] = []

    def work(some: Sequence[int]) -> list[int]:
        jobs.append([*some])
        if dead := poison & {*some}:
            raise RuntimeError(f"a worker has died of {dead}\n\tat org.apache.spark")
        return [one * one for one in some]

    found = halved(work, range(7), lambda: False)
    assert [isinstance(one, RuntimeError) or one for one in found] == [n in poison or n * n for n in range(7)]
    assert len(jobs) <= 13
    assert "org.apache" not in capsys.readouterr().out
    assert halved(work, [], lambda: False) == []


def test_nobody_tries_again_once_spark_has_ended() -> None:
    jobs: list[Sequence[int]] = []

    def work(some: Sequence[int]) -> list[int]:
        jobs.append(some)
        raise RuntimeError("Spark has ended")

    with pytest.raises(RuntimeError, match="Spark has ended"):
        halved(work, range(7), lambda: True)
    assert len(jobs) == 1


def test_a_reading_counts_for_all_who_asked_before_it_began() -> None:
    now = iter(range(100))
    seen: list[int] = []

    def read(_: float) -> int:
        seen.append(len(seen))
        return seen[-1]

    reading = Reading(read, clock=lambda: float(next(now)))
    assert [reading.since(float("-inf")), reading.since(float("-inf")), reading.since(0.0)] == [0, 0, 0]
    assert reading.since(0.5) == 1
    assert reading.since(1.0) == 1
