"""A bootstrap from the SSTables of three nodes that disagree, while others write, with every step killed; afterwards
come writes and deletions that are older than it. The whole history before it is in no log."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.config import load_config
from ringsync.ledger.snapshots import COPIES, FOLDER
from ringsync.storage.port import ObjectStore
from servers.cassandra import CassandraNode
from servers.cluster import connected, three_nodes
from tests.chaos.applications import finished, started
from tests.chaos.bootstraps import nodetool_of, say_emptied
from tests.sync.judge import judge
from tests.sync.pipeline import Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import create_schema, start_loops, statements, write

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

TABLES = ("workload.collections", "workload.single")
SEED = int(os.environ.get("RINGSYNC_CHAOS_SEED", "20261126"))
AWAY = 400
"""Statements while each node is away."""
DRAINED_S = 900


def test_nodes_that_disagree_and_late_writes(tmp_path: Path, cache: Path) -> None:
    chance = random.Random(SEED)
    with (
        three_nodes(tmp_path / "nodes", cache, 201) as nodes,
        connected(nodes, ConsistencyLevel.QUORUM) as session,
        connected(nodes, ConsistencyLevel.ALL) as reading,
    ):
        create_schema(session)
        for table in TABLES:
            session.execute(f"ALTER TABLE {table} WITH cdc = false AND read_repair = 'NONE'")
        workload = statements(SEED, 100_000)
        disagree(nodes, session, workload)
        conf = write_conf(
            tmp_path,
            nodes,
            replica={"unrepresentable_values": "raw"},
            cassandra={"consistency_level": "QUORUM"},
            scan={"mode": "sstable"},
            sstable={
                "megabytes_per_s": 0.5,
                "nodes": {node.contact_point: {"nodetool": nodetool_of(node)} for node in nodes},
            },
        )
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            with writing(session, workload) as failed:
                for table in TABLES:
                    bootstrap_under_fire(running, table, chance, tmp_path / "log")
            assert not failed
            write(session, workload, 1_500)  # half of them have explicit times, also before the bootstrap
            wait_until_drained(running.store, DRAINED_S, running.check)
            assert [stat.key for stat in running.store.list(FOLDER) if "/bootstrap.json" not in stat.key] == []
            assert running.store.list(COPIES) == []
            assert [one for node in nodes for one in snapshots_of(node)] == []
            rows = judge(running.store, reading, TABLES, TABLES, load_config(conf).sync)
    print(rows)
    assert min(rows.values()) > 5


def disagree(nodes: Sequence[CassandraNode], session: Any, workload: Iterator[str]) -> None:
    """Write at QUORUM while one node after another is away; nobody gives it hints, or repairs it."""
    for node in nodes:
        node.nodetool("disablehandoff")
    write(session, workload, AWAY)
    for node in nodes[1:]:
        node.nodetool("flush", "workload")
        node.stop()
        write(session, workload, AWAY)
        node.start()
        node.nodetool("disablehandoff")
    write(session, workload, AWAY)


def snapshots_of(node: CassandraNode) -> list[Path]:
    """What a node still has of ringsync's snapshots."""
    return list((node.folder / "data").glob("*/*/snapshots/ringsync_*"))


@contextmanager
def writing(session: Any, workload: Iterator[str]) -> Iterator[list[BaseException]]:
    """Statements go on and on; gives what ended them."""
    over, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not over.wait(0.05):
                write(session, workload, 1)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield failed
    finally:
        over.set()
        thread.join()


def bootstrap_under_fire(running: Pipeline, table: str, chance: random.Random, log: Path) -> None:
    """Each step is killed once when it has done some of its work, and done again, as Airflow does."""
    conf, store, run = running.conf, running.store, table
    say_emptied(conf)  # the stage may not have said so yet
    assert finished(log, "bootstrap_prepare", conf, table, run, "--enable-cdc", "--splits=12") == 0, tail(log)
    options = ("--bootstrap-run", run)
    killed = kill_when(lambda: len(copies(store)) > 5, log, "sstable_snapshot", conf, table, f"{run}.default", *options)
    assert killed, "the copy was not killed in its middle"
    assert finished(log, "sstable_snapshot", conf, table, f"{run}.default", *options) == 0, tail(log)
    written = len(store.list("replica/"))
    kill_when(lambda: len(store.list("replica/")) > written, log, "bootstrap_scan", conf, table, run)
    for name in ("bootstrap_scan", "bootstrap_drain"):
        # A step fails, say, when a loop publishes the table just now.
        assert 0 in (finished(log, name, conf, table, run) for _ in range(3)), tail(log)
        time.sleep(chance.uniform(0, 3))


def copies(store: ObjectStore) -> list[str]:
    """Pieces of files that were copied."""
    return [stat.key for stat in store.list(COPIES)]


def kill_when(condition: Callable[[], bool], log: Path, *arguments: Any) -> bool:
    """Start an application, and kill all of its processes once something is so; tells whether it was still running."""
    with started(log, *arguments) as process:
        deadline = time.monotonic() + 300
        while not condition() and process.poll() is None:
            assert time.monotonic() < deadline, tail(log)
            time.sleep(0.05)
        return process.poll() is None


def tail(log: Path) -> str:
    """The last lines of a log."""
    return log.read_text()[-3000:]
