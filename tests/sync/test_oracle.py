"""The sync on three nodes: whatever is written, and whatever is killed, stream and replica are what SELECT gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from cassandra import ConsistencyLevel

from ringsync.cli import main
from ringsync.config import load_config
from servers.cluster import connected, three_nodes
from tests.sync.judge import judge
from tests.sync.pipeline import pipeline, wait_until_drained, write_conf
from tests.sync.scenario import (
    MIXED,
    TABLES,
    bootstrap,
    create_schema,
    kill_and_start,
    start_loops,
    statements,
    write,
)

pytestmark = [pytest.mark.server, pytest.mark.spark]

BOOTSTRAPPED = ("workload.collections", "workload.single")


def test_stream_and_replica_are_what_the_nodes_hold(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All types and kinds of statements; a table is copied in the middle, and loops are killed."""
    with three_nodes(tmp_path / "nodes", cache, 71) as nodes, connected(nodes, ConsistencyLevel.ALL) as session:
        create_schema(session)
        conf = write_conf(tmp_path, nodes, window_ms=3000, sync={"tables": MIXED})
        workload = statements(14, 600)
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            write(session, workload, 250)
            for table in BOOTSTRAPPED:
                bootstrap(running, table, table, [lambda: write(session, workload, 60)] * 2)
            kill_and_start(running, "commitlog_stage")
            write(session, workload, 60)
            kill_and_start(running, "bucket_close")
            write(session, workload, 600)
            wait_until_drained(running.store, 240, running.check)
            assert main(["wait", "--conf", str(conf), "--timeout", "120"]) == 0
            assert "workload.many has no replica: cdcservice bootstrap" in capsys.readouterr().out
            rows = judge(running.store, session, TABLES, BOOTSTRAPPED, load_config(conf).sync)
    assert min(rows.values()) > 5
