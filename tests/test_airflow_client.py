"""The client against a real Airflow, with an application of the test's own behind the DAG."""

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringsync.airflow_client import AirflowClient, AirflowError, AirflowUnreachableError, RunState

pytestmark = pytest.mark.airflow

ROOT = Path(__file__).parent.parent
DAG = "replica_verify"

APPLICATION = """
import sys
table = sys.argv[sys.argv.index("--table") + 1]
if table == "shop.good":
    print("ringsync: report: {}", flush=True)
    sys.exit(0)
print(f"ringsync: error: {table} does not exist: check its name", file=sys.stderr, flush=True)
sys.exit(3)
"""
"""Stands for replica_verify.py; spark-submit starts it as it starts the real one, without a Spark session."""


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from servers.airflow import Airflow

    project = tmp_path_factory.mktemp("project")
    for folder in ("spark_apps", "config"):
        (project / folder).mkdir()
    (project / "spark_apps" / "replica_verify.py").write_text(APPLICATION)
    shutil.copy(ROOT / "config" / "spark-log4j2.properties", project / "config")
    (project / "config" / "ringsync.yaml").write_text(
        "server_name: test\ncassandra: {contact_points: [127.0.0.1]}\nstore: {url: lake}\n"
    )
    environment = {"RINGSYNC_HOME": str(project), "RINGSYNC_CONFIG": str(project / "config" / "ringsync.yaml")}
    with Airflow(home=project / "airflow", port=free_port(), dags=ROOT / "dags", environment=environment) as started:
        yield started


@pytest.fixture
def client(airflow: Any) -> AirflowClient:
    return AirflowClient(airflow.url, airflow.username, airflow.password)


def test_a_wrong_login_is_refused_without_showing_it(airflow: Any) -> None:
    with pytest.raises(AirflowError, match="refuses the login of user admin") as error:
        AirflowClient(airflow.url, "admin", "wrong-password").state(DAG, "none")
    assert "wrong-password" not in str(error.value)


def test_nobody_there() -> None:
    with pytest.raises(AirflowUnreachableError, match=r"not reachable at http://127\.0\.0\.1:"):
        AirflowClient(f"http://127.0.0.1:{free_port()}", "admin", "x").state(DAG, "none")


def test_an_unknown_dag_is_named(client: AirflowClient) -> None:
    with pytest.raises(AirflowError, match="has no DAG nothing"):
        client.trigger("nothing", "run-1", {})


def test_wrong_parameters_are_explained(client: AirflowClient) -> None:
    with pytest.raises(AirflowError, match="does not match") as error:
        client.trigger(DAG, "run-2", {"table": "x"})
    assert "table" in str(error.value)


def test_a_run_is_followed_to_its_good_end(client: AirflowClient) -> None:
    client.trigger(DAG, "shop.good__1", {"table": "shop.good"}, note="shop.good")
    end = followed(client, "shop.good__1")
    assert (end.state, [(task.task, task.state) for task in end.tasks]) == ("success", [("verify", "success")])


def test_a_run_id_is_taken_once(client: AirflowClient) -> None:
    with pytest.raises(AirflowError, match="409"):
        client.trigger(DAG, "shop.good__1", {"table": "shop.good"})


def test_a_failed_run_says_why_at_once(client: AirflowClient) -> None:
    client.trigger(DAG, "shop.bad__1", {"table": "shop.bad"})
    end = followed(client, "shop.bad__1")
    assert (end.state, end.tasks[0].try_number) == ("failed", 1)
    failure = client.failure(DAG, "shop.bad__1", end.tasks[0])
    assert failure.message.startswith("shop.bad does not exist: check its name [replica_verify: exit code 3")
    assert failure.final


def followed(client: AirflowClient, run: str, seconds: float = 180) -> RunState:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = client.state(DAG, run)
        if state.finished:
            return state
        time.sleep(1)
    raise AssertionError(f"{run} is still {state}")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
