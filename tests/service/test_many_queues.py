"""A look of the alarms where each of 300 hosts has a queue, and thus two DAGs and two loops of its own."""

from __future__ import annotations

import json
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ringsync.airflow_client import AirflowClient, AirflowError, DagHealth, RunState, _NotFoundError
from ringsync.config import Config
from ringsync.ledger.gaps import Gaps
from ringsync.service import look as look_module
from ringsync.service.expected import expected_of
from ringsync.service.health import problems
from ringsync.service.look import look
from ringsync.service.problem import Kind
from ringsync.status import READERS
from ringsync.storage.local import LocalStore

HOSTS = 300
NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
CONFIG = Config.model_validate(
    {
        **{"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": "/lake"}},
        "sync": {"queue_of_node": {f"10.0.{n // 250}.{n % 250}": f"q{n}" for n in range(HOSTS)}},
    }
)
DAGS = expected_of(CONFIG, False).all_dags
SELDOM = ("replica_verify", "replica_merge", "archive_reprocess")
LOOPS = [dag for dag in DAGS if dag not in SELDOM]


class Api(AirflowClient):
    """A client whose Airflow is here: it gives 100 rows of a GET at most, as Airflow's default is.

    :ivar runs: all runs, as Airflow gives them, and their tasks under ``tasks``
    """

    def __init__(self, runs: list[dict[str, Any]]) -> None:
        super().__init__("http://x", "a", "b")
        self.runs = sorted(runs, key=lambda run: run["run_after"], reverse=True)
        self.paused, self.broken, self.unknown = set[str](), set[str](), set[str]()
        self.asked: list[str] = []

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        self.asked.append(f"{method} {path}")
        parts, query = urlsplit(path).path.split("/"), parse_qs(urlsplit(path).query)
        if parts == ["dags"]:
            assert query["tags"] == ["ringsync"]
            rows = [self._dag(dag) for dag in sorted({*DAGS} - self.unknown)]
            begin = int(query["offset"][0])
            return {"dags": rows[begin : begin + 100], "total_entries": len(rows)}
        if parts == ["importErrors"]:
            return {"import_errors": [{"filename": "x.py", "stack_trace": "no"}]}
        if parts[0:2] == ["dags", "~"]:
            if method == "GET":  # Airflow keeps each other request for tasks in its audit log
                return self._of_all(query)
            return self._batch(parts[-2], body)
        if len(parts) == 2:
            if parts[1] in self.unknown:
                raise _NotFoundError("no such DAG")
            return self._dag(parts[1])
        runs = [run for run in self.runs if run["dag_id"] == parts[1]]
        if parts[-1] == "taskInstances":
            (run,) = (run for run in runs if run["dag_run_id"] == parts[3])
            return {"task_instances": list(run["tasks"])}
        states = query.get("state", [])
        return {"dag_runs": [run for run in runs if not states or run["state"] in states][:1]}

    def _dag(self, dag: str) -> dict[str, Any]:
        schedule = "At every 5th minute" if dag in SELDOM else "@continuous"
        flags = {"is_paused": dag in self.paused, "has_import_errors": dag in self.broken}
        return {"dag_id": dag, "timetable_summary": schedule, **flags}

    def _of_all(self, query: dict[str, list[str]]) -> dict[str, Any]:
        """Tasks of all DAGs, with a limit of one of their dates."""
        (state,), begin = query["state"], int(query["offset"][0])
        if state == "running":
            latest = datetime.fromisoformat(query["start_date_lte"][0])
            wanted = lambda task: bool(task["start_date"]) and moment(task["start_date"]) <= latest  # noqa: E731
        else:
            earliest = datetime.fromisoformat(query["end_date_gte"][0])
            wanted = lambda task: bool(task["end_date"]) and moment(task["end_date"]) >= earliest  # noqa: E731
        tasks = [task for run in self.runs for task in run["tasks"]]
        rows = [task for task in tasks if task["state"] == state and wanted(task)]
        return {"task_instances": rows[begin : begin + 100], "total_entries": len(rows)}

    def _batch(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        of_dags = [run for run in self.runs if run["dag_id"] in body["dag_ids"]]
        if kind == "dagRuns":
            assert body["order_by"] == "-run_after"
            since = moment(body.get("end_date_gte"))
            rows = [run for run in of_dags if run["state"] in body["states"]]
            rows = [run for run in rows if since is None or moment(run["end_date"]) >= since]  # type: ignore[operator]
        else:
            asked = (run for run in of_dags if run["dag_run_id"] in body["dag_run_ids"])
            rows = [task for run in asked for task in run["tasks"]]
        name = {"dagRuns": "dag_runs", "taskInstances": "task_instances"}[kind]
        begin = body["page_offset"]
        return {name: rows[begin : begin + body["page_limit"]], "total_entries": len(rows)}


def moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def ago(minutes: float | None) -> str | None:
    """A moment as Airflow writes it."""
    return None if minutes is None else (NOW - timedelta(minutes=minutes)).isoformat().replace("+00:00", "Z")


def run_of(
    dag: str, minutes: float, state: str, *tasks: str | None, ended: float = 0.0, began: float | None = None
) -> dict[str, Any]:
    """A run, with tasks of these states.

    :param minutes: so long ago it was due
    :param ended: so long ago it ended, if it has
    :param began: so long ago it, and those of its tasks that work, began; None: as soon as it was due
    """
    began = minutes if began is None else began
    has_ended, has_begun = state in ("success", "failed"), state != "queued"
    run = {
        **{"dag_id": dag, "dag_run_id": f"r{minutes}", "state": state, "run_after": ago(minutes)},
        **{"start_date": ago(began) if has_begun else None, "end_date": ago(ended) if has_ended else None},
    }
    told = [
        {
            **{"dag_id": dag, "dag_run_id": run["dag_run_id"], "try_number": 1, "duration": 2.0, "task_id": f"t{n}"},
            **{"state": task, "start_date": ago(began) if task else None},
            "end_date": ago(ended) if task in ("success", "failed") else None,
        }
        for n, task in enumerate(tasks)
    ]
    return {**run, "tasks": told}


def seldom() -> list[dict[str, Any]]:
    """What runs each hour or day."""
    return [run_of(dag, 60 * n + 50, "success", "success", ended=60 * n + 45) for dag in SELDOM for n in range(3)]


def one_after_the_other(length: float, state: str = "success", since: float = 6.0) -> list[dict[str, Any]]:
    """Runs of loops for five hours, and one of each that has begun.

    :param length: of a run, minutes
    :param state: in which they end
    :param since: so many minutes ago the last ones have begun
    """
    runs = [run_of(dag, since, "running", "running") for dag in LOOPS]
    ends = [since + n * length for n in range(int(300 / length))]
    return runs + [run_of(dag, end + length, state, state, ended=end) for dag in LOOPS for end in ends]


class SlowStore(LocalStore):
    """A store that counts how many are served at once."""

    lock, busy, most = threading.Lock(), 0, 0

    def get(self, key: str) -> bytes:
        with self.lock:
            SlowStore.busy += 1
            SlowStore.most = max(self.most, self.busy)
        try:
            time.sleep(0.001)
            return super().get(key)
        finally:
            with self.lock:
                SlowStore.busy -= 1


CASES = {
    "the loops have worked since the start": ([run_of(dag, 900, "running", "running") for dag in LOOPS], 7 + 1 + 7 + 1),
    "they work for hours": (one_after_the_other(240), 7 + 1 + 7 + 1),
    "they have just begun again": (one_after_the_other(240, since=2), 7 + 1 + 1 + 2),
    "they begin for the first time": ([run_of(dag, 1, "running", "running") for dag in LOOPS], 7 + 1 + 1 + 2),
    "they wait for a worker for the first time": ([run_of(dag, 9, "queued", None) for dag in LOOPS], 7 + 1 + 1 + 2),
}
"""How it stands with the loops, and the number of requests: pages of DAGs, of runs that go on, of tasks that work for
five minutes, and of runs that have ended, of loops that have not worked so long and of all else."""


@pytest.mark.parametrize(("runs", "requests"), CASES.values(), ids=CASES)
def test_a_look_asks_airflow_for_all_dags_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[dict[str, Any]], requests: int
) -> None:
    """It took 1,540 requests to Airflow and 612 to the store, in turn: longer than a loop may be silent."""
    airflow, store = Api(runs + seldom()), SlowStore(tmp_path)
    monkeypatch.setattr(look_module, "client_of", lambda _: airflow)
    for loop in expected_of(CONFIG, False).loops:
        store.say(f"status/{loop}.json", json.dumps({"at_ms": NOW.timestamp() * 1000, "nodes": {}}).encode())
    seen = look(CONFIG, store, NOW.timestamp(), Gaps(store))
    assert len(DAGS) == 2 * HOSTS + 9
    assert len(airflow.asked) == requests
    tasks = [asked for asked in airflow.asked if "/~/taskInstances" in asked]
    assert {asked.split()[0] for asked in tasks} == {"GET"}, "each POST is a row in Airflow's audit log"
    assert set(seen.dags) == set(DAGS)
    assert not [problem for problem in seen.problems if problem.kind in (Kind.AIRFLOW_AWAY, Kind.DAG_FAILED)]
    assert not [problem for problem in seen.problems if problem.kind == Kind.LOOP_SILENT]
    assert READERS / 2 < SlowStore.most <= READERS


def test_a_look_reads_not_all_runs_of_loops_that_fail_again_and_again() -> None:
    """Where no worker reaches the cluster, loops fail each minute, whatever their queue: in two hours 73,000 times."""
    airflow = Api(one_after_the_other(10, "failed", since=0.5) + seldom())
    found = airflow.health(DAGS, NOW, all_tasks=False)
    assert len(airflow.asked) == 7 + 1 + 1 + 2 + 13, "at last the tasks that have failed in ten minutes"
    for dag in LOOPS:
        health = found[dag]
        assert isinstance(health, DagHealth)
        assert health.ended is not None
        assert [task.state for task in health.ended.tasks] == ["failed"]


def singly(api: Api, dag: str) -> DagHealth | str:
    """How a DAG stands, asked on its own."""
    try:
        run = api.newest_run(dag)
        ended = run if run is None or run.finished else api.newest_run(dag, ended=True)
        if dag in LOOPS and run is not None and not run.finished and ended is not None:
            (now,) = (one for one in api.runs if (one["dag_id"], one["dag_run_id"]) == (dag, run.run))
            (before,) = (one for one in api.runs if (one["dag_id"], one["dag_run_id"]) == (dag, ended.run))
            works = [
                NOW - datetime.fromisoformat(one["start_date"]) for one in now["tasks"] if one["state"] == "running"
            ]
            is_long_ago = NOW - datetime.fromisoformat(before["end_date"]) > timedelta(hours=2)
            ended = None if is_long_ago or any(lasts >= timedelta(minutes=5) for lasts in works) else ended
        return DagHealth(api.is_paused(dag), run, ended)
    except AirflowError as error:
        return str(error)


def failed_tasks(run: RunState | None) -> Any:
    if run is None:
        return None
    failed = [task.task for task in run.tasks if task.state == "failed"]
    return run.dag, run.run, run.state, failed if run.state != "success" else []


@pytest.mark.parametrize("seed", range(5))
def test_all_at_once_are_as_each_on_its_own(seed: int) -> None:
    random, runs = Random(seed), []
    for dag in DAGS:
        minutes, apart = random.choice([1.0, 30.0, 110.0, 3000.0]), random.choice([5.0, 500.0])
        for n in range(random.choice([0, 1, 3])):
            state = random.choice(["running", "queued", "success", "failed"] if n == 0 else ["success", "failed"])
            tasks = random.choices(["success", "failed", "running", None], k=random.randint(0, 3))
            if dag in LOOPS:
                tasks = [state if state != "queued" else random.choice([None, "queued"])]
            due = minutes + n * apart
            began = due if n else random.uniform(0.0, due)
            runs.append(run_of(dag, due, state, *tasks, ended=began / 2 if n == 0 else due - 4, began=began))
    api = Api(runs)
    api.paused = set(random.sample(DAGS, 9))
    api.broken, api.unknown = {DAGS[3]}, {DAGS[20]}
    expected = {dag: singly(api, dag) for dag in DAGS}
    found = api.health(DAGS, NOW, all_tasks=True)
    assert found == expected
    assert isinstance(found[DAGS[3]], str)
    assert re.search("has errors", str(found[DAGS[3]]))
    for dag, health in api.health(DAGS, NOW, all_tasks=False).items():
        asked = expected[dag]
        assert isinstance(health, DagHealth) == isinstance(asked, DagHealth)
        if isinstance(health, DagHealth) and isinstance(asked, DagHealth):
            assert health.paused == asked.paused
            assert failed_tasks(health.run) == failed_tasks(asked.run)
            assert failed_tasks(health.ended) == failed_tasks(asked.ended)


def told(dag: str, *runs: dict[str, Any]) -> list[str]:
    """What is wrong with a DAG."""
    api = Api(list(runs))
    found = api.health([dag], NOW, all_tasks=False)
    dags = {name: health for name, health in found.items() if isinstance(health, DagHealth)}
    seen = problems({}, dags, expected_of(CONFIG, False), False, NOW.timestamp())
    return [problem.where for problem in seen if problem.kind == Kind.DAG_FAILED]


NEXT = {
    "queued, since no worker is there": (("queued", None, 20.0), True),
    "queued to a worker": (("running", "queued", 20.0), True),
    "begun just now": (("running", "running", 0.5), True),
    "begun four minutes ago": (("running", "running", 4.9), True),
    "begun six minutes ago, and tried again just now": (("running", "up_for_retry", 6.0), True),
    "working for five minutes": (("running", "running", 5.1), False),
    "working for hours": (("running", "running", 100.0), False),
}


@pytest.mark.parametrize(("run", "is_problem"), NEXT.values(), ids=NEXT)
def test_a_loop_has_failed_until_its_next_run_works(run: tuple[str, str | None, float], is_problem: bool) -> None:
    """Its next run begins at once, and fails for the same reason: nearly each look sees one that has not failed."""
    state, task, minutes = run
    failed = run_of("bucket_close", 130.0, "failed", "failed", ended=110.0)
    wrong = ["bucket_close", "bucket_close.t0"] if is_problem else []
    assert told("bucket_close", failed, run_of("bucket_close", 105.0, state, task, began=minutes)) == wrong
    assert told("bucket_close", failed) == ["bucket_close", "bucket_close.t0"]


@pytest.mark.parametrize("minutes", [1.0, 6.0, 100.0])
@pytest.mark.parametrize("ended", [110.0, 1400.0])
def test_what_is_no_loop_has_failed_until_it_has_succeeded(ended: float, minutes: float) -> None:
    """A merge that fails after ten minutes each day was an alarm that came and went."""
    failed = run_of("replica_merge", ended + 20, "failed", "failed", ended=ended)
    wrong = ["replica_merge", "replica_merge.t0"]
    for now in (("running", "running"), ("queued", None)):
        assert told("replica_merge", failed, run_of("replica_merge", minutes, *now)) == wrong
    assert told("replica_merge", failed, run_of("replica_merge", minutes, "success", "success")) == []
    assert told("replica_merge", failed) == wrong
