"""Airflow of our own: healthy, on the loopback interface only, and gone with all its children when stopped."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from servers import ServerError
from servers.airflow import Airflow
from servers.ports import free_port
from servers.process import session_members

pytestmark = pytest.mark.airflow

DAG = """
from airflow.sdk import dag, task

@dag(schedule=None)
def waits():
    @task
    def wait():
        import os, pathlib, time
        pathlib.Path(os.environ["STARTED"]).write_text(os.environ["SPARK_LOCAL_IP"])
        time.sleep(600)
    wait()

waits()
"""


def call(airflow: Airflow, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    """POST to Airflow's API."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(airflow.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


def listening(pids: list[int]) -> set[str]:
    """The local addresses on which processes listen, in hexadecimal as the kernel prints them."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # a process of a moment
            inodes |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes}


def test_it_runs_a_task_and_leaves_no_process_behind(tmp_path: Path) -> None:
    dags, started = tmp_path / "dags", tmp_path / "started"
    dags.mkdir()
    (dags / "waits.py").write_text(DAG)
    with pytest.raises(ServerError, match="no password yet"):
        _ = Airflow(tmp_path / "home", 1, dags).password
    airflow = Airflow(tmp_path / "home", free_port(), dags, environment={"STARTED": str(started)})
    with airflow:
        assert airflow.password_file.stat().st_mode & 0o077 == 0
        token = call(airflow, "/auth/token", {"username": "admin", "password": airflow.password})["access_token"]
        until(lambda: run_dag(airflow, token), 60)
        until(lambda: started.exists() and started.read_text(), 60)
        assert started.read_text() == "127.0.0.1"
        pids = [pid for session in airflow.pids.values() for pid in session_members(session)]
        assert len(pids) > len(airflow.pids)
        assert listening(pids) == {"0100007F"}
        sessions = list(airflow.pids.values())
    assert [session_members(session) for session in sessions] == [[], [], [], []]
    assert airflow.pids == {}


def run_dag(airflow: Airflow, token: str) -> bool:
    """Trigger the DAG; False while Airflow has not parsed it yet."""
    try:
        call(airflow, "/api/v2/dags/waits/dagRuns", {"logical_date": None}, token)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return False
    return True


def until(condition: Any, seconds: float) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.3)
