"""The oracle of the sync under Airflow, while every kind of process is killed, more than thirty times in one run."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from cassandra import ConsistencyLevel

from ringsync.config import load_config
from servers.cluster import connected, three_nodes
from tests.chaos.under_airflow import BOOTSTRAPPED, Sync, judge_kafka, started, until, writing
from tests.sync.judge import judge
from tests.sync.pipeline import wait_until_drained
from tests.sync.scenario import TABLES, create_schema, statements

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark, pytest.mark.airflow]

VICTIMS = {
    **{"commitlog_stage": 6, "bucket_close": 6, "out_of_sequence": 3, "replica_merge": 2, "schema_update": 3},
    **{"scheduler": 3, "worker": 3, "node": 3, "broker": 3},
}
"""How often each is killed, after one kill of each step of a bootstrap."""
BOOTSTRAP_STEPS = ("bootstrap_prepare", "bootstrap_scan", "bootstrap_drain")
SEED = 20261121


def test_nothing_is_lost_or_doubled_by_thirty_kills(tmp_path: Path, cache: Path) -> None:
    """A random workload is written at QUORUM meanwhile; two tables are bootstrapped."""
    with ExitStack() as servers:
        nodes = servers.enter_context(three_nodes(tmp_path / "nodes", cache, 81))
        session = servers.enter_context(connected(nodes, ConsistencyLevel.QUORUM))
        create_schema(session)
        sync = started(tmp_path, cache, nodes, servers, random.Random(SEED))
        with writing(session, statements(SEED, 20_000)):
            bootstrap_under_fire(sync)
            victims = [name for name, count in VICTIMS.items() for _ in range(count)]
            sync.moments.shuffle(victims)
            for number, victim in enumerate(victims):
                time.sleep(sync.moments.uniform(1, 12))
                print(f"{time.strftime('%H:%M:%S')} kill {number}: {victim}", flush=True)
                sync.kill(victim)
        assert sum(sync.kills.values()) >= 30
        wait_until_drained(sync.store, 600)
        with connected(nodes, ConsistencyLevel.ALL) as reading:
            rows = judge(sync.store, reading, TABLES, BOOTSTRAPPED, load_config(sync.conf).sync)
            judge_kafka(sync, reading)
        print(f"killed: {sync.kills}; rows: {rows}")
    assert min(rows.values()) > 5


def bootstrap_under_fire(sync: Sync) -> None:
    """Bootstrap the tables at once, and kill each step of the first one."""
    for name in BOOTSTRAPPED:
        until(partial(sync.trigger, "bootstrap_table", name, {"table": name, "verify": False}))
    for step in BOOTSTRAP_STEPS:
        sync.kill_driver(step, BOOTSTRAPPED[0])
        sync.kills[step] = 1
    for name in BOOTSTRAPPED:
        until(partial(sync.succeeded, "bootstrap_table", name), 600)
