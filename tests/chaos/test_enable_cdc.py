"""Cdc is enabled on many tables of three nodes: what was prepared on any of them before is captured by all replicas."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterSettings, connect
from ringsync.cluster.shared import Shared, Together
from ringsync.steps.bootstrap.enable_cdc import OPTIONS, enable_cdc
from ringsync.storage.local import LocalStore
from servers.cassandra import CassandraNode
from servers.cluster import begin_segments, connected, three_nodes

pytestmark = [pytest.mark.chaos, pytest.mark.server]

TABLES = [f"t{number}" for number in range(24)]
MOST_S = 1.0
"""For a table. With a wait for gossip after each ALTER it was 1.9 s on two cores, without it 0.3 s."""


def test_what_was_prepared_on_any_node_is_captured(tmp_path: Path, cache: Path) -> None:
    with (
        three_nodes(tmp_path / "nodes", cache, 221) as nodes,
        connected(nodes, ConsistencyLevel.ALL) as session,
    ):
        session.execute("CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 3}")
        for table in TABLES:
            session.execute(f"CREATE TABLE shop.{table} (id int PRIMARY KEY, v text)")
        prepared = {table: session.prepare(f"INSERT INTO shop.{table} (id, v) VALUES (?, ?)") for table in TABLES}
        for table in TABLES:
            write(session, prepared[table], "before")
        own = connect(ClusterSettings((nodes[0].contact_point,), nodes[0].port))
        store = LocalStore(tmp_path / "lake")
        cdc = Together(partial(enable_cdc, Shared(own), store))
        tables = [read_table(own, "shop", table) for table in TABLES]
        began_s = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(cdc.do, tables)) == {"enabled now"}
        assert time.monotonic() - began_s < MOST_S * len(TABLES)
        assert {tuple(session.execute(OPTIONS, ("shop", table)).one()) for table in TABLES} == {(True, 864000)}
        assert not store.list()
        for table in TABLES[::6]:
            # A segment with an index may hold anything, so this table is alone in it.
            begin_segments(session, "shop")
            write(session, prepared[table], f"captured {table}")
            for node in nodes:
                assert is_captured(node, f"captured {table}".encode()), f"{node.contact_point} did not capture {table}"


def write(session: Any, prepared: Any, text: str) -> None:
    """Write a row by each node."""
    for host in session.get_pool_state():
        session.execute(prepared, (int(host.address.rpartition(".")[2]), text), host=host)


def is_captured(node: CassandraNode, text: bytes) -> bool:
    """Tell whether a node has the rows that each of three nodes has written in segments with an index, within 20 s."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        segments = [path.with_name(path.name.replace("_cdc.idx", ".log")) for path in node.cdc_raw.glob("*_cdc.idx")]
        if sum(path.read_bytes().count(text) for path in segments) >= 3:
            return True
        time.sleep(0.2)
    return False
