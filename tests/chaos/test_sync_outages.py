"""The oracle of the sync, while nodes are away: what only one replica has, what hints bring, and what queries say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.config import load_config
from servers.cassandra import CassandraNode, NodeSettings
from servers.cluster import connected, three_nodes
from tests.sync.judge import judge, judge_queries
from tests.sync.pipeline import pipeline, wait_until_drained, write_conf
from tests.sync.scenario import (
    TABLES,
    at_one,
    bootstrap,
    create_schema,
    start_loops,
    statements,
    write,
)

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

BOOTSTRAPPED = ("workload.natives", "workload.collections")


@pytest.mark.parametrize("after_image", ["source", "replica", "none"])
def test_nodes_are_away(tmp_path: Path, cache: Path, spark: Any, after_image: str) -> None:
    """Two nodes die and miss writes that no hint keeps; then one is stopped and gets its hints when it returns."""
    with three_nodes(tmp_path / "nodes", cache, 91) as nodes, connected(nodes, ConsistencyLevel.QUORUM) as session:
        create_schema(session)
        conf = write_conf(tmp_path, nodes, sync={"after_image": after_image})
        workload = statements(6, 2000)
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            write(session, workload, 100)
            for table in BOOTSTRAPPED:
                bootstrap(conf, table, table, [lambda: write(session, workload, 40)] * 2)
            only_one_replica_has(nodes, workload)
            nodes[2].stop()
            write(session, workload, 300)
            nodes[2].start()
            write(session, workload, 100)
            wait_until_drained(running.store, 600, running.check)
            with connected(nodes, ConsistencyLevel.ALL) as reading:
                rows = judge(running.store, reading, TABLES, BOOTSTRAPPED, load_config(conf).sync)
                with empty_node(tmp_path / "empty", cache) as empty:
                    assert judge_queries(running.store, reading, empty, TABLES) > 500
    assert min(rows.values()) > 5


def only_one_replica_has(nodes: list[CassandraNode], workload: Iterator[str]) -> None:
    """Write at ONE to the first node, while the others are dead and nobody keeps hints for them."""
    nodes[0].nodetool("disablehandoff")
    for node in nodes[1:]:
        node.kill()
    with connected(nodes[:1], ConsistencyLevel.ONE) as alone:
        write(alone, at_one(workload), 100)
    for node in nodes[1:]:
        node.start()
    nodes[0].nodetool("enablehandoff")


@contextmanager
def empty_node(folder: Path, cache: Path) -> Iterator[Any]:
    """A node with the workload's tables, and nothing in them."""
    settings = NodeSettings(address="127.0.0.95", heap_mb=256, cluster_name="empty")
    with CassandraNode(folder, settings.on_free_ports(), cache) as node:
        cluster = node.cluster()
        try:
            create_schema(cluster.connect(), replicas=1)
        finally:
            cluster.shutdown()
        yield node
