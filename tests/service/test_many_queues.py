"""A look of the alarms where each of 300 hosts has a queue, and thus a DAG and two loops of its own."""

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
                return self._failed(query)
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
        return {"dag_id": dag, "is_paused": dag in self.paused, "has_import_errors": dag in self.broken}

    def _failed(self, query: dict[str, list[str]]) -> dict[str, Any]:
        since, begin = datetime.fromisoformat(query["run_after_gte"][0]), int(query["offset"][0])
        tasks = [task for run in self.runs if run["run_after"] >= since for task in run["tasks"]]
        rows = [task for task in tasks if task["state"] in query["state"]]
        return {"task_instances": rows[begin : begin + 100], "total_entries": len(rows)}

    def _batch(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        if kind == "dagRuns":
            since = datetime.fromisoformat(body["run_after_gte"])
            rows = [run for run in self.runs if run["dag_id"] in body["dag_ids"] and run["run_after"] >= since]
        else:
            asked = (run for run in self.runs if run["dag_id"] in body["dag_ids"])
            asked = (run for run in asked if run["dag_run_id"] in body["dag_run_ids"])
            states = body.get("state")
            rows = [task for run in asked for task in run["tasks"] if not states or task["state"] in states]
        name = {"dagRuns": "dag_runs", "taskInstances": "task_instances"}[kind]
        begin = body["page_offset"]
        return {name: rows[begin : begin + body["page_limit"]], "total_entries": len(rows)}


def run_of(dag: str, minutes: float, state: str, *tasks: str) -> dict[str, Any]:
    """A run that began some minutes ago, with tasks of these states."""
    run = {"dag_id": dag, "dag_run_id": f"r{minutes}", "state": state, "run_after": NOW - timedelta(minutes=minutes)}
    common = {"dag_id": dag, "dag_run_id": run["dag_run_id"], "try_number": 1, "duration": 2.0}
    told = [
        {**common, "task_id": f"t{n}", "state": task, "start_date": f"2026-11-28T11:{n:02}:00Z"}
        for n, task in enumerate(tasks)
    ]
    return {**run, "tasks": told}


def loops_and_seldom() -> list[dict[str, Any]]:
    """A run of ten minutes after the other, but for what runs each hour or day."""
    runs = []
    for dag in DAGS:
        if dag in ("replica_verify", "replica_merge", "archive_reprocess"):
            runs += [run_of(dag, 60 * n + 50, "success", "success") for n in range(3)]
        else:
            runs += [run_of(dag, 10 * n + 5, "success" if n else "running", "running") for n in range(20)]
    return runs


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


def test_a_look_asks_airflow_for_all_dags_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 1,540 requests to Airflow and 612 to the store, in turn: longer than a loop may be silent."""
    airflow, store = Api(loops_and_seldom()), SlowStore(tmp_path)
    monkeypatch.setattr(look_module, "client_of", lambda _: airflow)
    for loop in expected_of(CONFIG, False).loops:
        store.say(f"status/{loop}.json", json.dumps({"at_ms": NOW.timestamp() * 1000, "nodes": {}}).encode())
    seen = look(CONFIG, store, NOW.timestamp(), Gaps(store))
    assert len(DAGS) == HOSTS + 8
    assert len(airflow.asked) == 12, "4 pages of DAGs, one of runs, one of failed tasks; 3 DAGs that run seldom"
    tasks = [asked for asked in airflow.asked if "/~/taskInstances" in asked]
    assert [asked.split()[0] for asked in tasks] == ["GET"], "each POST is a row in Airflow's audit log"
    assert set(seen.dags) == set(DAGS)
    assert not [problem for problem in seen.problems if problem.kind in (Kind.AIRFLOW_AWAY, Kind.DAG_FAILED)]
    assert not [problem for problem in seen.problems if problem.kind == Kind.LOOP_SILENT]
    assert READERS / 2 < SlowStore.most <= READERS


def singly(api: Api, dag: str) -> DagHealth | str:
    """How a DAG stands, asked on its own."""
    try:
        run = api.newest_run(dag)
        ended = run if run is None or run.finished else api.newest_run(dag, ended=True)
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
        minutes = random.choice([1.0, 30.0, 3000.0])
        for n in range(random.choice([0, 1, 3])):
            states = ["running", "queued", "success", "failed"] if n == 0 else ["success", "failed"]
            tasks = random.choices(["success", "failed", "running", None], k=random.randint(0, 3))  # type: ignore[list-item]
            runs.append(run_of(dag, minutes + n * random.choice([5.0, 500.0]), random.choice(states), *tasks))
    api = Api(runs)
    api.paused = set(random.sample(DAGS, 9))
    api.broken, api.unknown = {DAGS[3]}, {DAGS[20]}
    expected = {dag: singly(api, dag) for dag in DAGS}
    found = api.health(DAGS, NOW - timedelta(minutes=25), all_tasks=True)
    assert found == expected
    assert isinstance(found[DAGS[3]], str)
    assert re.search("has errors", str(found[DAGS[3]]))
    for dag, health in api.health(DAGS, NOW - timedelta(minutes=25), all_tasks=False).items():
        asked = expected[dag]
        assert isinstance(health, DagHealth) == isinstance(asked, DagHealth)
        if isinstance(health, DagHealth) and isinstance(asked, DagHealth):
            assert health.paused == asked.paused
            assert failed_tasks(health.run) == failed_tasks(asked.run)
            assert failed_tasks(health.ended) == failed_tasks(asked.ended)
