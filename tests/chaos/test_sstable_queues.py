"""Bootstraps from the SSTables of clusters of 4.0 and 4.1 whose nodes disagree, each with a queue of its own, into a
bucket."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import pytest
from cassandra import ConsistencyLevel

from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.replica.folders import base_folder, changes_folder
from ringsync.storage.port import ObjectStore
from ringsync.wiring import store_of
from servers.cluster import connected, creating, three_nodes
from servers.gcs import GcsEmulator
from tests.chaos.applications import finished_here
from tests.chaos.bootstraps import nodetool_of, prepare, write_conf
from tests.chaos.test_gcs import mirrored
from tests.chaos.test_sstable_bootstrap import disagree, snapshots_of
from tests.commitlogs.workload import random_schema, random_statements
from tests.oracle import differences, source_rows, synced_rows
from tests.stream_model import StreamModel
from tests.sync.judge import stream_messages

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
        local = mirrored(store_of(load_config(conf)), tmp_path / "mirror")
        rows = [judge_at(local, reading, table) for table in TABLES]
        assert [one for node in nodes for one in snapshots_of(node)] == []
    print(rows)
    assert min(rows) > 5


def judge_at(store: ObjectStore, reading: Any, name: str) -> int:
    """Replica and stream are what SELECT shows; before 5.0 that is not when elements of collections were written."""
    table, now = read_table(reading, *name.split(".")), int(time.time())
    source = source_rows(reading, table, now, element_times=False)
    uris = [store.uri(folder(table.keyspace, table.name)) for folder in (base_folder, changes_folder)]
    streamed = StreamModel(table, True).apply_all(stream_messages(store, table)).rows(now)
    many = {column.name for column in table.value_columns if column.is_multicell}
    for told in (synced_rows(*uris, table, now), streamed):
        shown = {
            key: {column: (cell[0], None, None) if column in many else cell for column, cell in cells.items()}
            for key, cells in told.items()
        }
        assert differences(source, shown)[:5] == []
    return len(source)
