"""An Airflow with edge workers, for tests: what its tasks have left, and waiting for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ringsync.airflow_client import AirflowClient, AirflowError
from servers.airflow import Airflow
from servers.edge import EdgeWorker, edge_airflow
from servers.ports import free_port

DAGS = Path(__file__).parent / "edge_dags"
PASSWORD = "known to the server only"


def server(folder: Path, environment: Mapping[str, str] | None = None) -> Airflow:
    """An Airflow for edge workers, with a connection that its workers do not have."""
    connection = {"AIRFLOW_CONN_FROM_SERVER": json.dumps({"conn_type": "generic", "password": PASSWORD})}
    settings = {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5"}
    environment = connection | settings | dict(environment or {})
    return edge_airflow(folder / "airflow", free_port(), DAGS, environment=environment)


def worker(folder: Path, airflow: Airflow, name: str, queue: str) -> EdgeWorker:
    """A worker with a configuration and a variable of its own."""
    config = folder / f"{name}.yaml"
    config.write_text(f"server_name: {name}\n")
    return EdgeWorker(folder / name, airflow, [queue], DAGS, config, {"ONLY_HERE": name})


def client_of(airflow: Airflow) -> AirflowClient:
    """A client of the API."""
    return AirflowClient(airflow.url, airflow.username, airflow.password)


def notes(worker: EdgeWorker, dag: str, run: str = "") -> list[dict[str, Any]]:
    """What the tasks of a DAG have left on a worker, in the order of their begin."""
    found = sorted((worker.home / "notes").glob(f"{dag}-{run}*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(path.read_text()) for path in found if path.stat().st_size]


def until(found: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait for something that is true, and give it; an Airflow that does not answer is no answer."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if result := found():
                return result
        except AirflowError as error:
            print(error)
        assert time.monotonic() < deadline, f"not after {seconds} s"
        time.sleep(0.3)
