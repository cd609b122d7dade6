"""The process of Airflow that watches over a scan is killed, or the scan itself: Airflow tries again, it goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ringsync.cluster.control import put_limits
from ringsync.cluster.limits import Limits
from ringsync.config import load_config
from ringsync.service.runs import Run, start
from ringsync.wiring import store_of
from servers.airflow import Airflow
from servers.cassandra import CassandraNode
from servers.jars import fetch
from servers.ports import free_port
from servers.process import session_members
from servers.spark import lean_java_options
from tests.chaos.bootstraps import check, load_partitions, progress_of, scan_report, write_conf
from tests.chaos.processes import chain, command_of, is_alive, running

PROJECT = Path(__file__).parents[2]
pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.airflow, pytest.mark.spark]

PARTITIONS, PARTITION_ROWS = 4_000, 10
ROWS = PARTITIONS * PARTITION_ROWS
ROWS_PER_S = 200
"""The scan must last until Airflow has noticed and tried again, which takes it more than a minute."""
HEARTBEAT_TIMEOUT_S = 20


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Airflow]:
    """Airflow that soon notices when a worker no longer answers."""
    folder = tmp_path_factory.mktemp("worker")
    jars = sorted(fetch("delta", cache).glob("*.jar"))
    environment = {
        "RINGSYNC_CONFIG": str(folder / "ringsync.yaml"),
        "RINGSYNC_SPARK_JARS": ",".join(map(str, jars)),
        "JDK_JAVA_OPTIONS": lean_java_options(cache, jars),
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S),
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    }
    with Airflow(folder / "airflow", free_port(), PROJECT / "dags", environment=environment) as found:
        yield found


@pytest.fixture(scope="module")
def conf(airflow: Airflow, cassandra: CassandraNode) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGSYNC_AIRFLOW_PASSWORD", airflow.password)
        yield write_conf(
            airflow.home.parent,
            [cassandra],
            scan={"commit_interval_s": 2.0},
            airflow={"url": airflow.url, "username": airflow.username},
        )


@pytest.fixture
def table(session: Any, keyspace: str, request: pytest.FixtureRequest) -> str:
    name = f"{keyspace}.{request.node.name[:40]}"
    session.execute(f"CREATE TABLE {name} (id int, seq int, v int, PRIMARY KEY (id, seq))")
    load_partitions(session, name, range(PARTITIONS), PARTITION_ROWS)
    return name


def test_the_worker_dies_and_leaves_its_driver_alive(conf: Path, airflow: Airflow, table: str, session: Any) -> None:
    run = bootstrap(conf, table)
    driver = until(lambda: progress_of(conf, run.run).rows and driver_of(run.run), 180, run)
    worker, task, *spark = chain(driver, airflow.pids["scheduler"])
    assert "LocalExecutor" in command_of(worker), [command_of(pid) for pid in (worker, task, *spark)]
    print("killed:", command_of(worker), "left:", [command_of(pid)[:60] for pid in (task, *spark)])
    os.kill(worker, signal.SIGKILL)
    second = until(lambda: driver_of(run.run, other_than=driver), 240, run)
    assert is_alive(driver), "the driver did not outlive its worker: there is nothing to take over"
    until(lambda: progress_of(conf, run.run).attempt == 2, 120, run)
    put_limits(run.store, Limits())
    finish(conf, run, table, session, attempts=2)
    until(lambda: not any(map(is_alive, (task, *spark, second))), 60, run)
    assert not leftovers(airflow, run.run)


def test_the_driver_dies(conf: Path, airflow: Airflow, table: str, session: Any) -> None:
    run = bootstrap(conf, table)
    driver = until(lambda: progress_of(conf, run.run).ranges_done and driver_of(run.run), 180, run)
    os.kill(driver, signal.SIGKILL)
    until(lambda: driver_of(run.run, other_than=driver), 240, run)
    put_limits(run.store, Limits())
    report = finish(conf, run, table, session, attempts=2)
    assert report["rows_of_runs_before"] > 0
    assert not leftovers(airflow, run.run)


def bootstrap(conf: Path, table: str) -> Run:
    """Trigger the DAG, at a low limit."""
    config = load_config(conf)
    put_limits(store_of(config), Limits(rows_per_s=ROWS_PER_S))
    return start(config, "bootstrap_table", table, {"verify": False, "splits": 4}, Console(quiet=True))


def finish(conf: Path, run: Run, table: str, session: Any, attempts: int) -> dict[str, Any]:
    """Wait until the run has succeeded, and judge what it did; gives the scan's report."""
    until(lambda: run.client.state(run.dag, run.run).finished, 240, run)
    state = run.client.state(run.dag, run.run)
    assert state.state == "success", state
    scan = next(task for task in state.tasks if task.task == "scan")
    assert scan.try_number == attempts
    report = scan_report(conf, run.run)
    print({name: report[name] for name in ("attempt", "rows_of_runs_before", "rows_read", "seconds")})
    assert report["attempt"] == attempts
    check(conf, table, session, report, ROWS)
    return report


def until(found: Callable[[], Any], seconds: float, run: Run) -> Any:
    """Wait for something that is true, and give it."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, run.client.state(run.dag, run.run)
        time.sleep(0.5)
    return result


def driver_of(run: str, other_than: int | None = None) -> int | None:
    """The Python process that drives the scan of a run."""
    for pid in scans_of(run):
        if pid != other_than and Path(command_of(pid).split(" ")[0]).name.startswith("python"):
            return pid
    return None


def scans_of(run: str) -> list[int]:
    """All processes that have a run's scan in their command: spark-submit's and the driver."""
    return running("bootstrap_scan.py", run)


def leftovers(airflow: Airflow, run: str) -> list[str]:
    """Processes of the run that outlived it."""
    workers = [pid for session in airflow.pids.values() for pid in session_members(session)]
    spark = [pid for pid in workers if "SparkSubmit" in command_of(pid) or "ringsync.spark_daemon" in command_of(pid)]
    return [command_of(pid) for pid in {*scans_of(run), *spark}]
