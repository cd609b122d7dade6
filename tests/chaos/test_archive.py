"""The sync is stopped, writes go on, and ``cdc_raw`` is small: the archive alone keeps all writes going."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel, OperationTimedOut, WriteFailure, WriteTimeout

from ringsync.config import load_config
from ringsync.ledger.archive import READ, WAITING, archived
from ringsync.status import read_statuses
from servers.cassandra import CassandraNode
from servers.cluster import connected, three_nodes
from tests.chaos.applications import PROJECT
from tests.sync.judge import judge
from tests.sync.pipeline import Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import TABLES, bootstrap, create_schema, start_loops, statements, write

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

MINUTES = float(os.environ.get("RINGSYNC_ARCHIVE_MINUTES", "10"))
CDC_MIB = 8
BULK = "workload.bulk"
ROW_BYTES = 20_000
BOOTSTRAPPED = ("workload.natives", BULK)


@pytest.fixture
def nodes(tmp_path: Path, cache: Path) -> Iterator[list[CassandraNode]]:
    with three_nodes(tmp_path / "nodes", cache, 101, cdc_total_mib=CDC_MIB) as found:
        yield found


def bulk(session: Any, numbers: Iterator[int], rows: int) -> None:
    """Write rows that fill the nodes' logs, each to all replicas: a node that rejects one is noticed."""
    for _ in range(rows):
        number = next(numbers)
        value = random.Random(number).randbytes(ROW_BYTES)
        session.execute(f"INSERT INTO {BULK} (id, v) VALUES (%s, %s)", (number % 300, value))


def until_all_take_writes(session: Any, numbers: Iterator[int]) -> None:
    """A segment that was made ready while ``cdc_raw`` was full takes writes only after it has rejected one."""
    taken, end = 0, time.monotonic() + 120
    while taken < 250:  # five segments
        assert time.monotonic() < end, "writes are rejected though there is room"
        try:
            bulk(session, numbers, 1)
            taken += 1
        except (WriteFailure, WriteTimeout, OperationTimedOut):
            taken = 0
            time.sleep(0.3)


def used(node: CassandraNode) -> int:
    """Bytes in a node's ``cdc_raw``."""
    return sum(file.stat().st_size for file in node.cdc_raw.iterdir() if file.exists())


def reprocess(running: Pipeline, run: str, *options: str) -> str:
    """Run ``archive_reprocess``, and give what it says."""
    script = str(PROJECT / "spark_apps" / "archive_reprocess.py")
    command = [sys.executable, script, "--conf", str(running.conf), "--run", run, *options]
    done = subprocess.run(command, env=running.environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_no_write_is_rejected_while_only_the_archive_works(
    tmp_path: Path, cache: Path, spark: Any, nodes: list[CassandraNode]
) -> None:
    workload, numbers = statements(17, 20_000), count()
    with connected(nodes, ConsistencyLevel.ALL) as session:
        create_schema(session)
        session.execute(f"CREATE TABLE {BULK} (id int PRIMARY KEY, v blob) WITH cdc = true")
        archive = {"poll_interval_ms": 500}
        conf = write_conf(tmp_path, nodes, archive=archive)
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            write(session, workload, 100)
            for table in BOOTSTRAPPED:
                bootstrap(conf, table, table, [])
            for name in list(running.running):
                running.kill(name)

            # Without the archive the nodes do reject writes: else this test would show nothing.
            with pytest.raises((WriteFailure, WriteTimeout, OperationTimedOut)):
                bulk(session, numbers, 2000)
            running.start("commitlog_archive")
            until = time.monotonic() + 60
            while max(map(used, nodes)) > CDC_MIB * 2**20 * 0.6:
                assert time.monotonic() < until, "the archive makes no room"
                running.check()
                time.sleep(0.5)
            until_all_take_writes(session, numbers)

            fullest, written = 0, 0
            end = time.monotonic() + MINUTES * 60
            while time.monotonic() < end:
                bulk(session, numbers, 10)
                write(session, workload, 5)
                written += 15
                fullest = max(fullest, *map(used, nodes))
                running.check()
                time.sleep(0.5)
            waiting = list(archived(running.store, WAITING))
            assert sum(entry.size for entry in waiting) > 3 * CDC_MIB * 2**20, "they would have been full"
            (status,) = [one for name, one in read_statuses(running.store).items() if "commitlog_archive" in name]
            assert [node["error"] for node in status["nodes"].values()] == [None] * 3
            print(f"{written} writes, fullest cdc_raw {fullest / 2**20:.1f} of {CDC_MIB} MiB, {len(waiting)} archived")

            start_loops(running)
            reprocess(running, "after")
            assert list(archived(running.store, WAITING)) == []
            wait_until_drained(running.store, 1200, running.check)
            tables = (*TABLES, BULK)
            assert min(judge(running.store, session, tables, BOOTSTRAPPED, load_config(conf).sync).values()) > 5

            # Once more, for an interval: it changes nothing that was right.
            some = sorted(archived(running.store, READ), key=lambda entry: entry.last_us or 0)[len(waiting) // 2]
            assert some.first_us is not None
            first, last = (time.gmtime((some.first_us or 0) / 1e6 + seconds) for seconds in (0, 1))
            since, until_ = (time.strftime("%Y-%m-%dT%H:%M:%SZ", moment) for moment in (first, last))
            said = reprocess(running, "again", f"--since={since}", f"--until={until_}")
            assert '"read_again": ' in said
            wait_until_drained(running.store, 600, running.check)
            judge(running.store, session, tables, BOOTSTRAPPED, load_config(conf).sync)
