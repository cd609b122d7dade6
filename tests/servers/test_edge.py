"""The shape "hosts with edge workers": what the shipped unit starts, and which worker a task comes to."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from ringsync.airflow_client import AirflowClient
from servers.airflow import PROJECT
from servers.edge import EXAMPLE, SECRET, STOP_SECONDS, UNIT, EdgeWorker, moved, read_environment, read_unit
from servers.process import session_members
from tests.edge_airflow import PASSWORD, client_of, notes, server, until, worker


def test_the_unit(tmp_path: Path) -> None:
    (tmp_path / "edge-worker.env").write_text("A=1\n# B=2\n\nC='{\"d\": 3}'\nD=x y\n")
    unit = read_unit(UNIT, {"/etc/ringsync": str(tmp_path), "/var/lib/ringsync": "/elsewhere", "/opt": "/there"})
    assert unit.environment == {
        "AIRFLOW_HOME": "/elsewhere/airflow",
        "PYTHONUNBUFFERED": "1",
        "A": "1",
        "C": '{"d": 3}',
        "D": "x y",
    }
    assert unit.folder == Path("/elsewhere")
    command = unit.words(unit.command, {"RINGSYNC_WORKER": "me", "RINGSYNC_QUEUES": "q 1,q2"})
    assert command[:8] == [
        *("/there/ringsync/.venv/bin/python", "-m", "airflow", "edge", "worker"),
        *("--edge-hostname", "me", "--queues"),
    ]
    assert command[8:] == ["q 1,q2", "--concurrency", ""]
    assert f"\nTimeoutStopSec={STOP_SECONDS}\n" in UNIT.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(moved(UNIT.read_text(), {"/opt/ringsync/.venv/bin/python": "/bin/true"}))
    answer = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_the_example_names_all_that_the_unit_asks_for_and_no_secret() -> None:
    values = read_environment(EXAMPLE.read_text())
    assert values[SECRET] == ""
    for name in ("RINGSYNC_WORKER", "RINGSYNC_QUEUES", "RINGSYNC_CONCURRENCY"):
        assert values[name]
        assert f"${{{name}}}" in UNIT.read_text()


@pytest.mark.airflow
def test_tasks_run_on_the_worker_of_their_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONLY_IN_THE_TEST", "1")
    with ExitStack() as servers:
        airflow = servers.enter_context(server(tmp_path))
        here = servers.enter_context(worker(tmp_path, airflow, "here", "default"))
        one = servers.enter_context(worker(tmp_path, airflow, "host-1", "q1"))
        client, two = client_of(airflow), worker(tmp_path, airflow, "host-2", "q2")
        for queue in ("q2", "q1", "default"):  # q2 has no worker, and is first
            until(partial(triggered, client, queue))
        for found, queue in ((here, "default"), (one, "q1")):
            until(partial(succeeded, client, queue))
            check_note(found, queue)
            check_log(airflow.home, queue)
        assert not succeeded(client, "q2")

        servers.enter_context(two)
        until(partial(succeeded, client, "q2"))
        check_note(two, "q2")
        for found in (here, one, two):
            assert len(notes(found, "once*")) == 1
            check_reaches_no_database(found, airflow.home)


def triggered(client: AirflowClient, queue: str) -> bool:
    """Trigger the DAG of a queue, once Airflow has it."""
    client.set_paused(f"once_{queue}", False)
    client.trigger(f"once_{queue}", "first", {"seconds": 0})
    return True


def succeeded(client: AirflowClient, queue: str) -> bool:
    """Whether the run of a queue's DAG has ended well."""
    state = client.state(f"once_{queue}", "first")
    assert not state.finished or state.state == "success", state
    return state.finished


def check_note(worker: EdgeWorker, queue: str) -> None:
    """The task ran there, in this worker's folder and environment, with its copies, and got what the server has."""
    (note,) = notes(worker, f"once_{queue}", "first")
    environment = note["environment"]
    assert note["folder"] == str(worker.work)
    assert Path(note["file"]).parent == worker.dags
    assert environment["ONLY_HERE"] == environment["RINGSYNC_WORKER"] == worker.name
    assert environment["AIRFLOW_HOME"] == str(worker.home)
    assert Path(environment["RINGSYNC_CONFIG"]).read_text() == f"server_name: {worker.name}\n"
    assert not {"ONLY_IN_THE_TEST", "PYTEST_CURRENT_TEST", "AIRFLOW_CONN_FROM_SERVER"} & set(environment)
    assert environment["PATH"].startswith(f"{PROJECT / '.venv/bin'}{os.pathsep}")
    assert note["password"] == PASSWORD


def check_log(home: Path, queue: str) -> None:
    """The task's log has come to the API server."""
    (log,) = until(lambda: list((home / "logs").glob(f"dag_id=once_{queue}/run_id=first/*/*.log")))
    until(lambda: f"a line of once_{queue}-first-1.json" in log.read_text())


def check_reaches_no_database(worker: EdgeWorker, home: Path) -> None:
    """It has none of its own, nor a file of the server's open, and its settings lead to none."""
    assert not list(worker.home.glob("*.db*"))
    assert read_environment((worker.etc / "edge-worker.env").read_text())[
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
    ].startswith("sqlite:////nowhere/")
    for pid in session_members(worker.pid):
        opened = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
        assert not [name for name in opened if name.startswith(str(home))]
