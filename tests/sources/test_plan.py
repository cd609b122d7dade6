"""Plans on a server that cannot tell the times of elements: Cassandra before 5.0."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.cluster.cluster import read_ring, read_size_estimate
from ringsync.cluster.session import ClusterError, close_all, connect
from ringsync.config import Config
from ringsync.sources.cassandra_table import read_split
from ringsync.sources.scan.plan import ScanPlan
from ringsync.sources.scan.planning import make_scan_plan
from ringsync.wiring import cluster_settings
from servers.cassandra import CassandraNode, NodeSettings
from tests.sources.scans import UNLIMITED

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[CassandraNode]:
    settings = replace(NodeSettings(version="4.1", heap_mb=256, cdc=False).on_free_ports())
    with CassandraNode(tmp_path_factory.mktemp("old"), settings, cache) as node:
        yield node
    close_all()


def config_of(node: CassandraNode, element_times: str) -> Config:
    return Config.model_validate(
        {
            "server_name": "test",
            "cassandra": {"contact_points": [node.settings.address], "port": node.settings.native_port},
            "store": {"url": "store"},
            "replica": {"element_times": element_times},
        }
    )


@pytest.fixture(scope="module")
def session(old: CassandraNode) -> Any:
    found = connect(cluster_settings(config_of(old, "error")))
    found.execute("CREATE KEYSPACE ks WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
    found.execute("CREATE TABLE ks.plain (id int PRIMARY KEY, v frozen<set<int>>)")
    found.execute("CREATE TABLE ks.sets (id int PRIMARY KEY, s set<int>, v int)")
    found.execute("INSERT INTO ks.sets (id, s, v) VALUES (1, {3, 1}, 9) USING TIMESTAMP 77 AND TTL 1000")
    return found


def test_unknown_times_are_refused_or_marked(old: CassandraNode, session: Any) -> None:
    with pytest.raises(ClusterError, match=r"ks\.sets.* s set<int> .*replica\.element_times: unknown"):
        make_scan_plan(session, config_of(old, "error"), "ks", "sets", now=1)
    config = config_of(old, "unknown")
    now = int(time.time())
    plan = make_scan_plan(session, config, "ks", "sets", now=now)
    assert not plan.element_times
    [row] = images(config, plan)
    assert row["s"] == [1, 3]
    assert row["_x"]["s"]["d"] == row["_x"]["s"]["e"] == []
    assert row["_row"]["writetime"] == 77
    assert now + 990 < row["_row"]["expires_at"] <= now + 1001


def test_frozen_collections_have_times_everywhere(old: CassandraNode, session: Any) -> None:
    assert make_scan_plan(session, config_of(old, "error"), "ks", "plain", now=1).element_times


def test_ring_and_estimates_of_an_older_version(session: Any) -> None:
    ring = read_ring(session, "ks")
    assert [len(host.tokens) for host in ring.hosts] == [4]
    assert ring.hosts[0].up
    assert ring.hosts[0].is_local
    assert read_size_estimate(session, "ks", "plain") is None


def images(config: Config, plan: ScanPlan) -> list[dict[str, Any]]:
    """The plan's row images, read without Spark."""
    return [
        row
        for split in plan.splits
        for batch in read_split(config, plan, split, UNLIMITED)
        for row in batch.to_pylist()
    ]
