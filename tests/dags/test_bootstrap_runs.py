"""Runs of the DAG ``bootstrap_table`` by Airflow's own rules, whatever becomes of the snapshots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DAGS = ROOT / "dags"

SNAPSHOTS = ["snapshot_default", "snapshot_rack-1", "snapshot_rack-2"]
AFTER = ["scan", "drain", "verify"]
ENDS: dict[str, dict[str, list[str]]] = {
    "one fails": {"fail": ["snapshot_rack-1"], "skip": ["snapshot_default"]},
    "too many fail": {"fail": [*SNAPSHOTS, "scan"], "skip": []},
    "one hangs": {"fail": [], "skip": ["snapshot_default"], "hang": ["snapshot_rack-1"]},
    "no plan": {"fail": ["prepare"], "skip": []},
    "no snapshots": {"fail": [], "skip": SNAPSHOTS},
}
"""How tasks end."""

RUNS = """
import json, sys
from airflow.dag_processing.dagbag import BundleDagBag
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

dags, ends, hangs = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
dag = BundleDagBag(dags, bundle_path=dags, bundle_name="dags").dags["bootstrap_table"]

def execute(self, context):
    ran.append(self.task_id)
    if self.task_id in end["fail"]:
        raise AirflowFailException(self.task_id)
    if self.task_id in end["skip"]:
        raise AirflowSkipException(self.task_id)
    if self.task_id in end.get("hang", ()):
        executed(self, context)

def executed(self, context):
    # A real process, which waits for ever, and Airflow's own clock.
    module = sys.modules[type(self).__module__]
    module.prepare_environment = lambda *_, **__: None
    self.path, self.arguments, self.skip_if = hangs, [], ""
    return processes(self, context)

processes = type(dag.get_task("snapshot_default")).execute
for operator in {type(task) for task in dag.tasks if task.task_id != "snapshots_ended"}:
    operator.execute = execute
found = {}
for name, end in ends.items():
    ran = []
    run = dag.test(run_conf={"table": "shop.orders"})
    states = {one.task_id: str(one.state) for one in run.get_task_instances()}
    found[name] = [ran, states, str(run.state)]
print("RESULT", json.dumps(found))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], dict[str, str], str]]:
    """What Airflow makes of runs of ``bootstrap_table`` with three queues: tasks that ran, all states, the run's."""
    folder = tmp_path_factory.mktemp("runs")
    nodes = {"10.0.0.1": "rack-1", "10.0.0.2": "rack-2"}
    document = {"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "lake"}}
    (folder / "ringsync.yaml").write_text(
        json.dumps({**document, "sync": {"queue_of_node": nodes}, "sstable": {"task_timeout_h": 3 / 3600}})
    )
    environment = os.environ | {
        **{"AIRFLOW_HOME": str(folder), "RINGSYNC_CONFIG": str(folder / "ringsync.yaml")},
        **{"AIRFLOW__CORE__LOAD_EXAMPLES": "false", "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS)},
        "PYTHONPATH": f"{ROOT / 'include'}:{DAGS}",
    }
    migrate = [sys.executable, "-m", "airflow", "db", "migrate"]
    subprocess.run(migrate, env=environment, check=True, capture_output=True)
    hangs = folder / "hangs.py"
    hangs.write_text("import time\nprint('asking the node', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-c", RUNS, str(DAGS), json.dumps(ENDS), str(hangs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, tuple[list[str], dict[str, str], str]] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def test_a_queue_without_its_snapshot_does_not_stop_the_scan(runs: Any) -> None:
    """The scan itself knows whether the others are enough; and the failure stays to be seen."""
    ran, states, state = runs["one fails"]
    assert sorted(ran[1:4]) == SNAPSHOTS
    assert ran[4:] == AFTER
    assert (states["snapshot_rack-1"], states["snapshot_default"]) == ("failed", "skipped")
    assert states["scan"] == state == "success"
    ran, states, state = runs["too many fail"]
    assert ran[4:] == ["scan"]
    assert (states["drain"], state) == ("upstream_failed", "failed")


def test_a_snapshot_that_hangs_is_stopped_and_the_scan_decides(runs: Any) -> None:
    ran, states, state = runs["one hangs"]
    assert ran.count("snapshot_rack-1") == 1  # it would only hang again
    assert ran[4:] == AFTER
    assert states["snapshot_rack-1"] == "failed"
    assert states["scan"] == state == "success"


def test_without_a_plan_nothing_runs(runs: Any) -> None:
    ran, states, state = runs["no plan"]
    assert ran == ["prepare"]
    assert {states[task] for task in (*SNAPSHOTS, *AFTER)} == {"upstream_failed"}
    assert state == "failed"


def test_with_mode_token_range_all_snapshots_are_skipped_and_the_scan_runs(runs: Any) -> None:
    ran, states, state = runs["no snapshots"]
    assert ran[4:] == AFTER
    assert states["scan"] == state == "success"
