"""Bootstraps from the SSTables of clusters of 4.0 and 4.1 whose nodes disagree, each with a queue of its own, into a
bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from cassandra import ConsistencyLevel

from ringsync.config import load_config
from ringsync.wiring import store_of
from servers.cluster import connected, creating, three_nodes
from servers.gcs import GcsEmulator
from tests.chaos.applications import finished_here
from tests.chaos.bootstraps import nodetool_of, prepare, write_conf
from tests.chaos.test_gcs import mirrored
from tests.chaos.test_sstable_bootstrap import disagree, snapshots_of
from tests.commitlogs.workload import random_schema, random_statements
from tests.sync.judge import judge

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

TABLES = ("workload.collections", "workload.single")
SEED = 20261129


@pytest.mark.parametrize(("version", "first"), [("4.0", 221), ("4.1", 231)])
def test_nodes_that_disagree_each_with_a_queue(
    tmp_path: Path, cache: Path, spark: Any, version: Literal["4.0", "4.1"], first: int
) -> None:
    with (
        GcsEmulator() as bucket,
        three_nodes(tmp_path / "nodes", cache, first, version=version) as nodes,
        connected(nodes, ConsistencyLevel.QUORUM) as session,
        connected(nodes, ConsistencyLevel.ALL) as reading,
    ):
        with creating(nodes[0]) as creator:
            for statement in random_schema(version):
                creator.execute(statement.replace("'replication_factor': 1", "'replication_factor': 3"))
            for table in TABLES:
                creator.execute(f"ALTER TABLE {table} WITH cdc = false AND read_repair = 'NONE'")
        disagree(nodes, session, random_statements(SEED, 100_000, version))
        conf = write_conf(
            tmp_path,
            nodes,
            store={"url": bucket.url, "gcs_endpoint": bucket.endpoint},
            replica={"unrepresentable_values": "raw"},
            cassandra={"consistency_level": "QUORUM"},
            scan={"mode": "sstable"},
            sstable={"nodes": {node.contact_point: {"nodetool": nodetool_of(node)} for node in nodes}},
            sync={"queue_of_node": {node.contact_point: f"of{node.contact_point[-1]}" for node in nodes}},
        )
        for table in TABLES:
            prepare(conf, table, table, splits=12)
            for node in nodes:
                queue = f"of{node.contact_point[-1]}"
                options = ("--bootstrap-run", table, "--queue", queue)
                assert finished_here("sstable_snapshot", conf, table, f"{table}.{queue}", *options) == 0
            for name in ("bootstrap_scan", "bootstrap_drain"):
                assert finished_here(name, conf, table, table) == 0
        config = load_config(conf)
        local = mirrored(store_of(config), tmp_path / "mirror")
        rows = judge(local, reading, TABLES, TABLES, config.sync, not_followed=())
        assert [one for node in nodes for one in snapshots_of(node)] == []
    print(rows)
    assert min(rows.values()) > 5
