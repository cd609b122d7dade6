"""The whole sync of a table of a real ScyllaDB, if there is one: ``RINGSYNC_SCYLLA=host:port make test-scylla``.

It creates a keyspace of its own and the one of ringsync's state, and drops both.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.scylla import is_scylla
from ringsync.cluster.session import ClusterSettings, close_all, connect
from tests.sync.pipeline import pipeline, wait_until_drained, write_conf

ADDRESS = os.environ.get("RINGSYNC_SCYLLA", "")
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not ADDRESS, reason="no real ScyllaDB: set RINGSYNC_SCYLLA to its host:port"),
]
LOOPS = ("scylla_log_stage", "bucket_close", "out_of_sequence")
STATEMENTS = (
    "INSERT INTO {table} (p, c, a, s, m, l, u) VALUES ({p}, {c}, {x}, {{{x}, 1}}, {{'k{c}': {x}}}, [{x}], {{i: {x}}})",
    "INSERT INTO {table} (p, c, a) VALUES ({p}, {c}, {x}) USING TTL 864000",
    "UPDATE {table} USING TIMESTAMP {past} SET a = {x} WHERE p = {p} AND c = {c}",
    "UPDATE {table} SET s = s + {{{x}}}, m['n'] = {x}, l = l + [{x}], u.t = 'x' WHERE p = {p} AND c = {c}",
    "UPDATE {table} SET s = s - {{1}}, a = null WHERE p = {p} AND c = {c}",
    "UPDATE {table} SET name = 'n{x}' WHERE p = {p}",
    "DELETE m, u FROM {table} WHERE p = {p} AND c = {c}",
    "DELETE FROM {table} WHERE p = {p} AND c = {c}",
    "DELETE FROM {table} WHERE p = {p} AND c > {c}",
    "DELETE FROM {table} WHERE p = {p}",
    "BEGIN BATCH INSERT INTO {table} (p, c, a) VALUES ({p}, {c}, {x}); "
    "INSERT INTO {table} (p, c, a) VALUES ({p}, 99, {x}); APPLY BATCH",
)


@pytest.fixture
def table() -> Iterator[tuple[Any, str]]:
    """A session, and the full name of a table that has cdc."""
    host, port = ADDRESS.rsplit(":", 1)
    session, keyspace = connect(ClusterSettings((host,), int(port))), f"ringsync_live_{uuid.uuid4().hex[:8]}"
    assert is_scylla(session), f"{ADDRESS} is no ScyllaDB"
    session.execute(
        f"CREATE KEYSPACE {keyspace} WITH replication = {{'class': 'NetworkTopologyStrategy', 'replication_factor': 1}}"
    )
    try:
        session.execute(f"CREATE TYPE {keyspace}.pair (i int, t text)")
        session.execute(
            f"CREATE TABLE {keyspace}.things (p int, c int, name text static, a int, s set<int>, m map<text, int>, "
            "l list<int>, u pair, PRIMARY KEY (p, c)) WITH cdc = {'enabled': true}"
        )
        yield session, f"{keyspace}.things"
    finally:
        for name in (keyspace, f"state_{keyspace}"):
            session.execute(f"DROP KEYSPACE IF EXISTS {name}")
        close_all()


def write(session: Any, table: str, chance: random.Random, count: int) -> None:
    for number in range(count):
        past = int(time.time() * 1_000_000) - chance.randrange(60_000_000)
        values = {"p": chance.randrange(30), "c": chance.randrange(10), "x": number, "past": past}
        session.execute(chance.choice(STATEMENTS).format(table=table, **values))


def test_the_replica_is_what_a_real_cluster_has(table: tuple[Any, str], tmp_path: Path, cache: Path) -> None:
    """Writes before, during and after a bootstrap; then every cell is compared, with its writetime and TTL."""
    session, name = table
    keyspace, chance = name.split(".")[0], random.Random(17)
    host, port = ADDRESS.rsplit(":", 1)
    node: Any = SimpleNamespace(contact_point=host, port=int(port))
    conf = write_conf(
        tmp_path,
        [node],
        scylla={"near_sweep_ms": 30_000, "near_reach_ms": 300_000},
        sync={"include": [f"{keyspace}.*"]},
        state={"keyspace": f"state_{keyspace}"},
    )
    with pipeline(conf, tmp_path, cache) as loops:
        write(session, name, chance, 500)
        for loop in LOOPS:
            loops.start(loop)
        loops.run("bootstrap_prepare", "live", "--table", name)
        write(session, name, chance, 500)
        loops.run("bootstrap_scan", "live", "--table", name)
        loops.run("bootstrap_drain", "live", "--table", name)
        write(session, name, chance, 2000)
        wait_until_drained(loops.store, 600, loops.check)
        report = loops.run("replica_verify", "live", "--table", name)
    assert report["differences"] == 0, report
    assert report["cells"] > 100
