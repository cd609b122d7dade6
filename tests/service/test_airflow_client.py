"""The client against a real Airflow, with an application of the test's own behind the DAG."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ringsync.airflow_client import AirflowClient, AirflowError, AirflowUnreachableError, RunState
from servers.ports import free_port

pytestmark = pytest.mark.airflow

DAG = "replica_verify"


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


def test_what_may_be_repeated_is_asked_again_where_airflow_fails() -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            fails = self.path != "/auth/token" and (self.command == "POST" or len(asked) < 4)
            self.send_response(500 if fails else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"access_token": "t", "is_paused": true, "detail": "Database error"}')

        do_GET = do_POST = answer

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        busy = AirflowClient(f"http://127.0.0.1:{server.server_address[1]}", "admin", "x")
        assert busy.is_paused("x")
        with pytest.raises(AirflowUnreachableError, match=r"fails \(500\): Database error"):
            busy._request("POST", "dags/x/dagRuns", {})
        server.shutdown()
    assert asked == ["POST /auth/token", *["GET /api/v2/dags/x"] * 3, "POST /api/v2/dags/x/dagRuns"]


def test_a_run_is_created_once_where_airflow_fails() -> None:
    """Its database was busy, but the run is there: the second request is told so."""
    answers = iter([500, 409, 409])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200 if self.path == "/auth/token" else next(answers))

        def answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"access_token": "t", "is_paused": false, "detail": "as it is"}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        busy = AirflowClient(f"http://127.0.0.1:{server.server_address[1]}", "admin", "x")
        assert not busy.trigger("x", "run-1", {})
        with pytest.raises(AirflowError, match="409"):
            busy.trigger("x", "run-1", {})
        server.shutdown()


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


def test_a_run_that_has_not_ended_is_ended(client: AirflowClient) -> None:
    client.trigger(DAG, "shop.slow__1", {"table": "shop.slow"})
    end = time.monotonic() + 120
    while not client.busy_tasks(DAG) and time.monotonic() < end:
        time.sleep(0.5)
    assert client.end_unfinished(DAG) == ["shop.slow__1"]
    assert client.state(DAG, "shop.slow__1").finished
    assert client.end_unfinished(DAG) == []


def followed(client: AirflowClient, run: str, seconds: float = 180) -> RunState:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = client.state(DAG, run)
        if state.finished:
            return state
        time.sleep(1)
    raise AssertionError(f"{run} is still {state}")
