"""Airflow of our own: on the loopback interface only, and gone with all its children when stopped."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from ringsync.airflow_client import AirflowClient
from servers import ServerError
from servers.airflow import Airflow
from servers.process import session_members

pytestmark = pytest.mark.airflow


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, and as spark-submit's JVM says it."""


def listening(pids: list[int]) -> set[str]:
    """The local addresses on which processes listen, in hexadecimal as the kernel prints them."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # a process of a moment
            inodes |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes}


def test_there_is_no_password_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no password yet"):
        _ = Airflow(tmp_path / "home", 1, tmp_path).password


def test_it_runs_a_task_and_leaves_no_process_behind(airflow: Airflow, project: Path) -> None:
    """The last test of the folder: it stops the Airflow of the others."""
    assert airflow.password_file.stat().st_mode & 0o077 == 0
    client = AirflowClient(airflow.url, airflow.username, airflow.password)
    started = project / "slow"
    started.unlink(missing_ok=True)
    client.trigger("replica_verify", "left-behind", {"table": "shop.slow"})
    end = time.monotonic() + 240  # beside other tests, two cores are busy
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < end, f"not begun: {client.state('replica_verify', 'left-behind')}"
        time.sleep(0.3)
    assert started.read_text() == "127.0.0.1"
    sessions = list(airflow.pids.values())
    pids = [pid for session in sessions for pid in session_members(session)]
    assert len(pids) > len(sessions)
    addresses = listening(pids)
    assert "0100007F" in addresses
    assert addresses <= LOOPBACK
    airflow.stop()
    assert [session_members(session) for session in sessions] == [[], [], [], []]
    assert airflow.pids == {}
