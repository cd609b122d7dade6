"""A cluster of stand-ins: each node is found at its own address, behind its own proxy, with a schema of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringsync.cluster.agreement import nodes_behind
from ringsync.cluster.cluster import read_hosts
from ringsync.cluster.node import Node
from ringsync.cluster.schema import read_node_tables, read_table
from ringsync.cluster.session import ClusterSettings, close_all, connect
from ringsync.cluster.shared import Shared
from ringsync.config.sections import Scylla
from ringsync.steps.bootstrap.enable_scylla_cdc import enable_scylla_cdc
from servers.cassandra import CassandraNode
from servers.cluster import three_nodes
from tests.scylla_server.proxy import StandIn, scylla_stand_ins

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[list[CassandraNode]]:
    with three_nodes(tmp_path_factory.mktemp("three"), cache, 181) as found:
        yield found


@pytest.fixture(scope="module")
def stand_ins(nodes: list[CassandraNode]) -> Iterator[list[StandIn]]:
    with scylla_stand_ins(nodes) as found:
        yield found
        close_all()


def test_all_nodes_are_found_and_asked(nodes: list[CassandraNode], stand_ins: list[StandIn]) -> None:
    first = stand_ins[0]
    client = connect(ClusterSettings((first.host,), first.port, consistency_level="ONE"))
    hosts = read_hosts(client)
    assert {(host.address, host.port) for host in hosts} == {(one.host, one.port) for one in stand_ins}
    assert all(host.up for host in hosts)
    client.execute("CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 3}")
    assert not nodes_behind(client)
    client.execute("CREATE TABLE shop.orders (id int PRIMARY KEY, v text)")
    assert not nodes_behind(client)
    table = read_table(client, "shop", "orders")
    assert enable_scylla_cdc(Shared(client), Scylla(), [table]) == ["enabled now"]
    for host in client.cluster.metadata.all_hosts():
        assert table.table_id in read_node_tables(Node(client, host)).with_cdc
    assert all(one.requests.by_kind["QUERY"] for one in stand_ins)


def test_a_node_that_goes(nodes: list[CassandraNode], stand_ins: list[StandIn]) -> None:
    first = stand_ins[0]
    client = connect(ClusterSettings((first.host,), first.port, consistency_level="ONE"))
    nodes[2].stop()
    deadline = time.monotonic() + 60
    while all(host.up for host in read_hosts(client)):
        assert time.monotonic() < deadline, "the client does not learn that the node is down"
        time.sleep(0.5)
    assert [host.address for host in read_hosts(client) if not host.up] == [stand_ins[2].host]
