"""A node's ``cdc_raw`` is wiped before all of it was read: there is a gap, and the command that it names closes it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.ledger.gaps import close_gap
from ringsync.replica.folders import base_folder, changes_folder
from ringsync.service.look import look
from ringsync.service.problem import Kind
from ringsync.status import read_status
from servers.cassandra import CassandraNode, NodeSettings
from servers.cluster import connected
from tests.chaos.applications import PROJECT
from tests.oracle import differences, source_rows, synced_rows
from tests.sync.pipeline import Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import bootstrap, start_loops

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

TABLES = ("shop.orders", "shop.items")
COMMAND = re.compile(r"cdcservice verify --repair --table (\w+\.\w+)")


def write(session: Any, first: int, rows: int) -> None:
    """Write rows, and delete a few of those before."""
    for number in range(first, first + rows):
        for table in TABLES:
            session.execute(f"INSERT INTO {table} (id, v) VALUES (%s, %s)", (number, bytes(10_000)))
            if number % 7 == 0:
                session.execute(f"DELETE FROM {table} WHERE id = %s", (number - 50,))


def told(running: Pipeline, is_right: Callable[[str | None], bool]) -> str | None:
    """Wait until what is told of the only node is right: by its status, and of gaps. Those that are over are closed."""
    until = time.monotonic() + 240
    while True:
        running.check()
        nodes = (read_status(running.store, "commitlog_stage/default") or {}).get("nodes", {})
        seen = look(load_config(running.conf), running.store, time.time())
        for key in seen.gaps_over:
            close_gap(running.store, key)
        lost = [problem.text for problem in seen.problems if problem.kind == Kind.SEGMENTS_LOST]
        (error,) = [node["error"] or next(iter(lost), None) for node in nodes.values()] or [None]
        if nodes and is_right(error):
            return error
        assert time.monotonic() < until, error
        time.sleep(1)


def verify(running: Pipeline, table: str, *options: str) -> dict[str, Any]:
    """Verify a table; the report."""
    run = f"verify-{time.time_ns()}"
    command = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]"]
    command += ["--conf", f"spark.jars={running.environment['RINGSYNC_SPARK_JARS']}"]
    command += [str(PROJECT / "spark_apps" / "replica_verify.py"), "--conf", str(running.conf), "--run", run]
    command += ["--table", table, *options]
    done = subprocess.run(command, env=running.environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode in (0, 1), (done.stdout + done.stderr)[-3000:]
    report: dict[str, Any] = json.loads(running.store.get(f"reports/replica_verify/{run}.json"))
    return report


def test_the_command_that_a_gap_names_closes_it(tmp_path: Path, cache: Path, spark: Any) -> None:
    settings = NodeSettings(heap_mb=384).on_free_ports()
    with (
        CassandraNode(tmp_path / "node", settings, cache) as node,
        connected([node], ConsistencyLevel.ALL) as session,
    ):
        session.execute("CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
        for table in TABLES:
            session.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v blob) WITH cdc = true")
        conf = write_conf(tmp_path, [node])
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            write(session, 0, 60)
            for table in TABLES:
                bootstrap(conf, table, table)
            write(session, 60, 60)
            wait_until_drained(running.store, 300, running.check)
            told(running, lambda error: error is None)

            running.kill("commitlog_stage")
            write(session, 120, 120)
            time.sleep(3)
            gone = [file.name for file in node.cdc_raw.glob("CommitLog-*")]
            for name in gone:
                (node.cdc_raw / name).unlink()
            running.start("commitlog_stage")
            # An empty folder may be another one: only a new segment shows that it is the node's.
            write(session, 240, 240)
            gap = told(running, lambda error: error is not None and "was removed from its cdc_raw" in error) or ""
            assert any(name in gap for name in gone)
            assert set(COMMAND.findall(gap)) == set(TABLES), gap

            wait_until_drained(running.store, 300, running.check)
            for table in TABLES:
                assert verify(running, table)["differences"] > 50, "else nothing was lost"
            for table in COMMAND.findall(gap):
                report = verify(running, table, "--repair")
                assert (report["differences"], report["before_repair"]["differences"] > 50) == (0, True)
            told(running, lambda error: error is None)
            assert running.store.list("gaps/") == []
            assert exact(running, session) > 200


def exact(running: Pipeline, session: Any) -> int:
    """Compare the replicas with what SELECT gives; return the least number of rows."""
    found = []
    for name in TABLES:
        table, now = read_table(session, *name.split(".")), int(time.time())
        source = source_rows(session, table, now)
        uris = [running.store.uri(folder(table.keyspace, table.name)) for folder in (base_folder, changes_folder)]
        assert list(differences(source, synced_rows(*uris, table, now))) == []
        found.append(len(source))
    return min(found)
