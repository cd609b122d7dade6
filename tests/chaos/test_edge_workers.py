"""Edge workers are killed, stay away for long and come back, and so does the API server: each queue goes on alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from ringsync.airflow_client import AirflowClient
from servers.airflow import Airflow
from servers.edge import EdgeWorker
from tests.chaos.processes import is_alive
from tests.edge_airflow import client_of, notes, server, until, worker

pytestmark = [pytest.mark.chaos, pytest.mark.airflow]

QUEUED_S = 40
SETTINGS = {
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": str(QUEUED_S),
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT_CHECK_INTERVAL": "5",
    # Longer than the API server is away in these tests.
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "120",
}
PATIENCE_S = 400
"""On a machine that does much else."""


@dataclass
class Hosts:
    """An Airflow, a worker on its own host, and two on others."""

    airflow: Airflow
    here: EdgeWorker
    one: EdgeWorker
    two: EdgeWorker
    client: AirflowClient

    def trigger(self, dag: str, run: str, seconds: int) -> None:
        """Start a run whose task takes so long."""
        until(partial(self._triggered, dag, run, seconds))

    def _triggered(self, dag: str, run: str, seconds: int) -> bool:
        self.client.set_paused(dag, False)
        self.client.trigger(dag, run, {"seconds": seconds})
        return True

    def ended(self, dag: str, run: str) -> str | None:
        """How a run has ended; None: it has not."""
        state = self.client.state(dag, run)
        return state.state if state.finished else None

    def newest(self, dag: str) -> Any:
        """The newest run of a DAG that has ended."""
        return self.client.newest_run(dag, ended=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """All of it, once for this file."""
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as servers:
        airflow = servers.enter_context(server(folder, SETTINGS))
        named = {"here": "default", "host-1": "q1", "host-2": "q2"}
        workers = [servers.enter_context(worker(folder, airflow, name, queue)) for name, queue in named.items()]
        yield Hosts(airflow, *workers, client_of(airflow))


def test_a_host_that_is_gone_for_long(hosts: Hosts) -> None:
    hosts.one.kill()
    for queue in ("q1", "q2"):
        until(partial(unpaused, hosts.client, f"loop_{queue}"))
    until(lambda: hosts.newest("loop_q1"), PATIENCE_S)
    assert hosts.newest("loop_q1").state == "failed"
    assert notes(hosts.one, "loop_q1") == []
    begun = len(notes(hosts.two, "loop_q2"))
    assert begun > 2
    assert hosts.newest("loop_q2").state == "success"
    assert ended_on(hosts.here, hosts, "default") == "success"

    hosts.one.start()
    until(lambda: notes(hosts.one, "loop_q1"))
    until(lambda: hosts.newest("loop_q1").state == "success", PATIENCE_S)
    until(lambda: len(notes(hosts.two, "loop_q2")) > begun + 1)
    for queue in ("q1", "q2"):
        hosts.client.set_paused(f"loop_{queue}", True)


def test_a_worker_that_is_told_to_end(hosts: Hosts) -> None:
    hosts.trigger("once_q1", "told", 600)
    (note,) = until(lambda: notes(hosts.one, "once_q1", "told"))
    hosts.one.stop()
    assert not is_alive(note["child"])
    assert hosts.ended("once_q1", "told") is None  # it waits for another try
    hosts.one.start()
    again = until(lambda: notes(hosts.one, "once_q1", "told")[1:], PATIENCE_S)
    os.kill(again[0]["child"], signal.SIGKILL)  # the task fails at once
    third = until(lambda: notes(hosts.one, "once_q1", "told")[2:], PATIENCE_S)
    os.kill(third[0]["pid"], signal.SIGKILL)
    until(lambda: notes(hosts.one, "once_q1", "told")[3:], PATIENCE_S)
    until(lambda: hosts.client.end_unfinished("once_q1") == [])
    until(lambda: not is_alive(notes(hosts.one, "once_q1", "told")[-1]["child"]))


def test_the_api_server_is_away(hosts: Hosts) -> None:
    hosts.trigger("once_q1", "away", 45)
    (note,) = until(lambda: notes(hosts.one, "once_q1", "away"))
    os.kill(hosts.airflow.pids["api-server"], signal.SIGKILL)
    time.sleep(30)
    hosts.airflow.revive("api-server")
    assert not hosts.one.ended
    assert until(partial(hosts.ended, "once_q1", "away"), PATIENCE_S) == "success"
    assert notes(hosts.one, "once_q1", "away") == [note]
    assert not hosts.one.ended
    assert ended_on(hosts.two, hosts, "q2") == "success"


def ended_on(worker: EdgeWorker, hosts: Hosts, queue: str) -> str:
    """How another run of a queue has ended, which ran on this worker."""
    hosts.trigger(f"once_{queue}", "other", 0)
    state = until(partial(hosts.ended, f"once_{queue}", "other"), PATIENCE_S)
    assert len(notes(worker, f"once_{queue}", "other")) == 1
    return str(state)


def unpaused(client: AirflowClient, dag: str) -> bool:
    """Let a DAG run."""
    client.set_paused(dag, False)
    return True
