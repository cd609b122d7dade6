"""The oracle of the sync, while every kind of process is killed, thirty times and more."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from cassandra import ConsistencyLevel

from servers.cassandra import CassandraNode
from servers.cluster import connected, three_nodes
from tests.sync.judge import judge
from tests.sync.pipeline import LOOPS, Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import (
    BY_ARRIVAL,
    TABLES,
    bootstrap,
    create_schema,
    kill_and_start,
    start_loops,
    statements,
    write,
)

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

KILLS_OF_LOOPS, KILLS_OF_NODES = 27, 3
BOOTSTRAPPED = ("workload.single", "workload.collections")
SEED = 20261121


def test_nothing_is_lost_or_doubled_by_thirty_kills(tmp_path: Path, cache: Path) -> None:
    """Drivers of all loops and nodes are killed at random moments while a random workload is written at QUORUM."""
    with three_nodes(tmp_path / "nodes", cache, 81) as nodes, connected(nodes, ConsistencyLevel.QUORUM) as session:
        create_schema(session)
        conf = write_conf(tmp_path, nodes, window_ms=3000, sync={"after_image": "source", "tables": BY_ARRIVAL})
        workload = statements(SEED, 4000)
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            for table in BOOTSTRAPPED:
                bootstrap(running, table, table, [lambda: write(session, workload, 40)] * 2)
            ended = threading.Event()
            writing = threading.Thread(target=_write_on, args=(session, workload, ended))
            writing.start()
            kills = _kill(running, nodes)
            ended.set()
            writing.join()
            assert kills >= KILLS_OF_LOOPS + KILLS_OF_NODES
            # What hints have not brought to a node that was away is read by the other two.
            wait_until_drained(running, 600)
            with connected(nodes, ConsistencyLevel.ALL) as reading:
                rows = judge(running.store, reading, TABLES, BOOTSTRAPPED, complete=True)
    assert min(rows.values()) > 5


def _write_on(session: object, workload: object, ended: threading.Event) -> None:
    while not ended.is_set():
        write(session, workload, 5)  # type: ignore[arg-type]
        time.sleep(0.2)


def _kill(running: Pipeline, nodes: list[CassandraNode]) -> int:
    """Kill loops, and now and then a node, at random moments."""
    moments = random.Random(SEED)
    victims = [*(moments.choice(LOOPS) for _ in range(KILLS_OF_LOOPS)), *[""] * KILLS_OF_NODES]
    moments.shuffle(victims)
    for victim in victims:
        # A loop needs some fifteen seconds to begin: some are killed before, some after.
        time.sleep(moments.uniform(2, 25))
        if victim:
            kill_and_start(running, victim)
        else:
            node = moments.choice(nodes)
            node.kill()
            time.sleep(moments.uniform(1, 15))
            node.start()
    return len(victims)
