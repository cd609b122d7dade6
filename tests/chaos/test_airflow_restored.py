"""Airflow's database is lost and restored from a backup, while the sync runs and old drivers live on: it goes on by
itself, though Airflow thinks that tasks of long ago run, and ids of runs come again."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.airflow_client import AirflowError
from ringsync.config import load_config
from ringsync.ledger.staging import closed_until, commit_keys, get_commit
from ringsync.storage.port import NotFoundError, ObjectStore
from servers.airflow import Airflow
from servers.cassandra import CassandraNode, NodeSettings
from servers.cluster import connected
from servers.process import session_members
from tests.chaos.processes import command_of, is_alive, parent_of
from tests.chaos.under_airflow import BOOTSTRAPPED, SYNC_DAGS, Sync, started, until, writing
from tests.sync.judge import judge
from tests.sync.pipeline import LOOPS, wait_until_drained, with_suppressed
from tests.sync.scenario import TABLES, create_schema, statements

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark, pytest.mark.airflow]

DAGS = (*SYNC_DAGS, "commitlog_archive", "archive_reprocess")
RUN_S = 40
RUNS_BETWEEN = 3
AGAIN = "again"
"""The id of runs that are triggered before and after the database is restored."""
LOOP_DAGS = ("commitlog_stage", "bucket_close", "out_of_sequence", "schema_updater", "commitlog_archive")


def test_a_database_of_yesterday(tmp_path: Path, cache: Path, spark: Any) -> None:
    settings, moments = NodeSettings(heap_mb=384).on_free_ports(), random.Random(22)
    with ExitStack() as servers:
        node = servers.enter_context(CassandraNode(tmp_path / "node", settings, cache))
        session = servers.enter_context(connected([node], ConsistencyLevel.ALL))
        create_schema(session, replicas=1)
        sync = started(*(tmp_path, cache, [node], servers, moments), dags=DAGS, with_kafka=False, sync={"run_s": RUN_S})
        until(lambda: closed_until(sync.store))
        with writing(session, statements(22, 50_000)):
            trigger(sync, "bootstrap_table", "first", BOOTSTRAPPED[0])
            until(lambda: running_tasks(sync.airflow, "bootstrap_table"))
            back_up(sync.airflow, tmp_path / "yesterday.db")
            yesterday = runs(sync, "bucket_close")
            trigger(sync, "bootstrap_table", AGAIN, BOOTSTRAPPED[1])
            for run in ("first", AGAIN):
                until(partial(sync.succeeded, "bootstrap_table", run), 420)
            trigger(sync, "replica_merge", AGAIN, BOOTSTRAPPED[0])
            until(partial(sync.succeeded, "replica_merge", AGAIN))
            until(lambda: len(runs(sync, "bucket_close", "success") - yesterday) >= RUNS_BETWEEN)

            lost = {dag: runs(sync, dag) for dag in DAGS}
            drivers = crash(sync.airflow)
            before = Durable(sync.store)
            restore(sync.airflow, tmp_path / "yesterday.db")
            assert runs(sync, "bucket_close") == yesterday < lost["bucket_close"]
            assert running_tasks(sync.airflow, "bucket_close")
            assert running_tasks(sync.airflow, "bootstrap_table")
            for component in ("api-server", "scheduler", "dag-processor", "triggerer"):
                sync.airflow.revive(component)
            until(partial(answers, sync), 180)
            until(lambda: runs(sync, "bucket_close", "success") - lost["bucket_close"])
            for pid in drivers:
                with_suppressed(os.kill, pid, signal.SIGCONT)
            until(lambda: not any(map(is_alive, drivers)), 120)
            trigger(sync, "bootstrap_table", AGAIN, BOOTSTRAPPED[1])
            trigger(sync, "replica_merge", AGAIN, BOOTSTRAPPED[0])
            for run in ("first", AGAIN):
                until(partial(sync.succeeded, "bootstrap_table", run), 420)
            until(partial(sync.succeeded, "replica_merge", AGAIN))
            for dag in LOOP_DAGS:
                until(partial(went_on, sync, dag, lost[dag]))
        wait_until_drained(sync.store, 420)
        before.check(sync.store)
        rows = judge(sync.store, session, TABLES, BOOTSTRAPPED, load_config(sync.conf).sync)
        print(f"rows: {rows}; old drivers: {len(drivers)}; {before}")
    assert min(rows.values()) > 5


def trigger(sync: Sync, dag: str, run: str, table: str) -> None:
    """Trigger a DAG for a table."""
    parameters = {"table": table} | ({"verify": False} if dag == "bootstrap_table" else {})
    until(partial(sync.trigger, dag, run, parameters))


def went_on(sync: Sync, dag: str, lost: set[str]) -> bool:
    """Whether two runs of a DAG have ended well that are none of those that Airflow has forgotten."""
    return len(runs(sync, dag, "success") - lost) >= 2


def runs(sync: Sync, dag: str, *wanted: str) -> set[str]:
    """The ids of a DAG's runs, as Airflow's database has them.

    :param wanted: only those in these states
    """
    rows = asked(sync.airflow, "SELECT run_id, state FROM dag_run WHERE dag_id = ?", dag)
    return {run for run, state in rows if not wanted or state in wanted}


def running_tasks(airflow: Airflow, dag: str) -> int:
    """How many tasks of a DAG run, as Airflow's database has it."""
    ((count,),) = asked(airflow, "SELECT count(*) FROM task_instance WHERE dag_id = ? AND state = 'running'", dag)
    return int(count)


def asked(airflow: Airflow, query: str, dag: str) -> list[Any]:
    """Ask Airflow's database."""
    with closing(sqlite3.connect(f"file:{database(airflow)}?mode=ro", uri=True, timeout=60)) as found:
        return found.execute(query, (dag,)).fetchall()


def database(airflow: Airflow) -> Path:
    return airflow.home / "airflow.db"


def back_up(airflow: Airflow, copy: Path) -> None:
    """Copy Airflow's database while it works, as sqlite3's ``.backup`` does."""
    with closing(sqlite3.connect(database(airflow), timeout=60)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def restore(airflow: Airflow, copy: Path) -> None:
    """Put the copy in the place of the database."""
    for suffix in ("-wal", "-shm", "-journal", ""):
        database(airflow).with_name(f"airflow.db{suffix}").unlink(missing_ok=True)
    database(airflow).write_bytes(copy.read_bytes())


def crash(airflow: Airflow) -> list[int]:
    """Kill all of Airflow, but leave the drivers of the loops, as on other hosts; they stand still.

    :returns: the processes that are left
    """
    members = [pid for component in airflow.pids.values() for pid in session_members(component)]
    left = [pid for pid in members if any("spark_apps/" in command_of(one) for one in ancestry(pid))]
    assert all(any(f"{loop}.py" in command_of(pid) for pid in left) for loop in LOOPS)
    for pid in left:
        with_suppressed(os.kill, pid, signal.SIGSTOP)
    for pid in [pid for pid in members if pid not in left]:
        with_suppressed(os.kill, pid, signal.SIGKILL)
    until(lambda: not any(is_alive(pid) for pid in members if pid not in left and pid not in airflow.pids.values()), 30)
    return [pid for pid in left if is_alive(pid)]


def ancestry(pid: int) -> Iterator[int]:
    """A process, its parent, and so on."""
    while pid > 1:
        yield pid
        pid = parent_of(pid)


def answers(sync: Sync) -> bool:
    """Whether Airflow's API answers."""
    with suppress(AirflowError):
        return not sync.client.is_paused("bucket_close")
    return False


class Durable:
    """What the time between has left that must stay: reports, passes, messages, and the positions in the log.

    :ivar kept: objects that are never written again, by key
    """

    def __init__(self, store: ObjectStore) -> None:
        self.kept = {key: data for key, data in _objects(store, "sync/", "streams/") if _is_final(key)}
        self.reports = dict(_objects(store, "reports/"))
        self.commits = _newest_commits(store)
        self.removed = 0
        assert self.kept
        assert self.reports
        assert self.commits

    def check(self, store: ObjectStore) -> None:
        """Check that all of it is there."""
        now = dict(_objects(store, "sync/", "streams/"))
        changed = [key for key, data in self.kept.items() if key in now and now[key] != data]
        assert changed == []
        gone = [key for key in self.kept if key not in now]
        assert not [key for key in gone if key.startswith("streams/")], gone
        self.removed = len(gone)
        reports = {json.loads(data)["run"] + data.decode() for _, data in _objects(store, "reports/")}
        lost = [key for key, data in self.reports.items() if json.loads(data)["run"] + data.decode() not in reports]
        assert lost == []
        for node, (number, finished) in _newest_commits(store).items():
            assert number > self.commits[node][0]
            assert finished >= self.commits[node][1]

    def __str__(self) -> str:
        return f"{len(self.kept)} passes and messages, {len(self.reports)} reports, removed since: {self.removed}"


def _is_final(key: str) -> bool:
    return "/passes/" in key or (key.startswith("streams/") and key.endswith((".avro", "manifest.json")))


def _objects(store: ObjectStore, *folders: str) -> Iterator[tuple[str, bytes]]:
    for folder in folders:
        for stat in store.list(folder):
            with suppress(NotFoundError):
                yield stat.key, store.get(stat.key)


def _newest_commits(store: ObjectStore) -> dict[str, tuple[int, set[int]]]:
    """By node: the number of the newest commit, and the segments that it has finished."""
    found = {}
    for key in commit_keys(store):  # in order
        with suppress(NotFoundError):
            commit = get_commit(store, key)
            found[commit.node] = commit.number, set(commit.finished)
    return found
