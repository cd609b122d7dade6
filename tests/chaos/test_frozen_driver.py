"""A driver that stood still while another took over and finished: it wakes up, and must change nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ringsync.cluster.control import put_limits
from ringsync.cluster.limits import Limits
from ringsync.config import load_config
from ringsync.steps.application import ExitCode
from ringsync.wiring import store_of
from servers.cassandra import CassandraNode
from tests.chaos.applications import finished, session_of, started
from tests.chaos.bootstraps import check, check_rows, load_partitions, prepare, progress_of, scan_report, write_conf

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

PARTITIONS, PARTITION_ROWS = 1_000, 10


@pytest.fixture
def table(session: Any, keyspace: str) -> str:
    name = f"{keyspace}.orders"
    session.execute(f"CREATE TABLE {name} (id int, seq int, v int, PRIMARY KEY (id, seq))")
    load_partitions(session, name, range(PARTITIONS), PARTITION_ROWS)
    return name


def test_a_driver_that_wakes_up_too_late(cassandra: CassandraNode, table: str, session: Any, tmp_path: Path) -> None:
    """As when a host is suspended, or starved of memory, and Airflow tries again elsewhere."""
    conf = write_conf(tmp_path, [cassandra], scan={"commit_interval_s": 1.0})
    store = store_of(load_config(conf))
    put_limits(store, Limits(rows_per_s=500))
    prepare(conf, table, "frozen")
    log = tmp_path / "log"
    with started(log, "bootstrap_scan", conf, table, "frozen") as frozen:
        deadline = time.monotonic() + 120
        while not progress_of(conf, "frozen").ranges_done:
            assert frozen.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        processes = session_of(frozen.pid)
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        put_limits(store, Limits())
        assert finished(tmp_path / "second", "bootstrap_scan", conf, table, "frozen") == ExitCode.OK
        report, progress = scan_report(conf, "frozen"), progress_of(conf, "frozen")
        check(conf, table, session, report, PARTITIONS * PARTITION_ROWS)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        assert frozen.wait(120) == ExitCode.FATAL, log.read_text()[-3000:]
    assert "was taken over by attempt 2" in log.read_text()
    # A file that was on its way may lie beside the replica now; nobody reads it.
    check_rows(conf, table, session, report, PARTITIONS * PARTITION_ROWS)
    assert progress_of(conf, "frozen") == progress
    assert scan_report(conf, "frozen") == report
