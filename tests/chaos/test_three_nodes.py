"""A bootstrap from three nodes of which one dies, comes back, leaves for good; and with a fourth that joins."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel, OperationTimedOut, ReadFailure, ReadTimeout

from ringsync.config import load_config
from ringsync.replica.folders import base_folder
from ringsync.steps.application import ExitCode
from ringsync.steps.bootstrap.plan import load_plan
from ringsync.streams.files import FileStream
from ringsync.wiring import store_of
from servers.cassandra import REQUEST_SECONDS, CassandraNode
from servers.cluster import connected, joining, three_nodes
from tests.chaos.applications import finished, started
from tests.chaos.bootstraps import (
    change_conf,
    check,
    committed_rows,
    load_partitions,
    prepare,
    progress_of,
    scan_report,
    write_conf,
)

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

SMALL_PARTITIONS, SMALL_ROWS = 6_000, 10
FAT_ID, FAT_ROWS = -1, 1_000_000
ROWS_PER_S = 18_000
REQUEST_TIMEOUT_S = 60
TIMEOUTS_S = 5.0
"""So long a node gives up every read after a millisecond."""
TABLE = "(id int, seq int, v int, owner text static, PRIMARY KEY (id, seq))"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[list[CassandraNode]]:
    """Three nodes of one cluster."""
    with three_nodes(tmp_path_factory.mktemp("three"), cache, 31, num_tokens=16, cdc=False) as found:
        yield found


@pytest.fixture(scope="module")
def quorum(nodes: list[CassandraNode]) -> Iterator[Any]:
    """A session that writes at QUORUM, and the keyspaces ``three`` (three replicas) and ``one`` (one)."""
    with connected(nodes, ConsistencyLevel.QUORUM, REQUEST_TIMEOUT_S) as session:
        for name, factor in (("three", 3), ("one", 1)):
            replication = f"{{'class': 'NetworkTopologyStrategy', 'datacenter1': {factor}}}"
            session.execute(f"CREATE KEYSPACE {name} WITH replication = {replication}")
        yield session


@pytest.fixture
def conf(nodes: list[CassandraNode], tmp_path: Path) -> Path:
    return write_conf(
        tmp_path,
        nodes,
        cassandra={"page_size": 1_000, "request_timeout_s": 5.0},
        scan={"commit_interval_s": 1.0},
        # Compressing would take longer than all else.
        stream={"codec": "null"},
    )


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, seconds: float = 180) -> None:
    """Wait for something while a process runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


def test_a_node_dies_and_comes_back_among_timeouts(
    conf: Path, nodes: list[CassandraNode], quorum: Any, tmp_path: Path
) -> None:
    table, log = "three.events", tmp_path / "log"
    quorum.execute(f"CREATE TABLE {table} {TABLE}")
    load_partitions(quorum, table, range(SMALL_PARTITIONS), SMALL_ROWS)
    load_partitions(quorum, table, [FAT_ID], FAT_ROWS)
    for partition in (FAT_ID, *range(0, SMALL_PARTITIONS, 50)):
        quorum.execute(f"UPDATE {table} SET owner = 'o{partition}' WHERE id = {partition}")
        quorum.execute(f"UPDATE {table} USING TTL 86400 SET v = 7 WHERE id = {partition} AND seq = 7")
    change_conf(conf, limits={"rows_per_s": ROWS_PER_S})
    prepare(conf, table, "dies")
    with started(log, "bootstrap_scan", conf, table, "dies", tasks=2) as process:
        # More than all small partitions have: the fat one is being read.
        until(lambda: progress_of(conf, "dies").rows > 200_000, process, log)
        nodes[2].kill()
        for node in nodes[:2]:
            set_timeouts(node, 1)
        with pytest.raises((ReadTimeout, ReadFailure, OperationTimedOut)):
            quorum.execute(f"SELECT count(*) FROM {table}")
        time.sleep(TIMEOUTS_S)
        for node in nodes[:2]:
            set_timeouts(node, REQUEST_SECONDS * 1000)
        assert process.poll() is None, log.read_text()[-3000:]
        assert progress_of(conf, "dies").fraction < 1
        nodes[2].start()
        assert process.wait(300) == ExitCode.OK, log.read_text()[-3000:]
    report = scan_report(conf, "dies")
    print({name: report[name] for name in ("rows_read", "rows_discarded", "ranges", "seconds_scanning", "rows_per_s")})
    with connected(nodes, ConsistencyLevel.ALL, REQUEST_TIMEOUT_S) as session:
        check(conf, table, session, report, SMALL_PARTITIONS * SMALL_ROWS + FAT_ROWS)


def set_timeouts(node: CassandraNode, milliseconds: int) -> None:
    """After so many milliseconds the node gives up a read that it coordinates."""
    for kind in ("range", "read"):
        node.nodetool("settimeout", kind, str(milliseconds))


def test_a_node_is_away_for_good(conf: Path, nodes: list[CassandraNode], quorum: Any, tmp_path: Path) -> None:
    """Its ranges have no other replica: they are named, and nothing is published until it is back."""
    table, log = "one.orders", tmp_path / "log"
    quorum.execute(f"CREATE TABLE {table} {TABLE}")
    load_partitions(quorum, table, range(2_000), 10)
    bootstrap = prepare(conf, table, "away")
    nodes[2].stop()
    change_conf(conf, scan={"max_failed_ranges": 2})
    assert finished(log, "bootstrap_scan", conf, table, "away", tasks=8) == ExitCode.TOO_MANY_ERRORS
    assert "more than scan.max_failed_ranges allows" in scan_report(conf, "away")["error"]

    change_conf(conf, scan={"max_failed_ranges": 1000})
    assert finished(log, "bootstrap_scan", conf, table, "away", tasks=8) == ExitCode.COMPLETED_WITH_ERRORS
    report = scan_report(conf, "away")
    print(len(report["failed_ranges"]), "failed ranges,", report["rows"], "rows; ", report["error"])
    store = store_of(load_config(conf))
    assert not list(store.list(f"{base_folder(*table.split('.'))}/_delta_log/"))
    assert FileStream(store, load_plan(store, "away").topic).folders() == []
    left = report["left"]
    assert all(any(start <= s and e <= end for start, end in left) for s, e, _ in report["failed_ranges"])
    committed = committed_rows(conf, bootstrap)
    assert 0 < committed < 20_000

    nodes[2].start()
    with connected(nodes, ConsistencyLevel.ALL, REQUEST_TIMEOUT_S) as session:
        tokens = session.execute(f"SELECT DISTINCT id, token(id) AS place FROM {table}").all()
        lost = {row.id for row in tokens if any(start < row.place <= end for start, end in left)}
        assert committed == 10 * (2_000 - len(lost))
        replicas = session.cluster.metadata.get_replicas
        address = nodes[2].contact_point
        assert lost == {
            row.id for row in tokens if replicas("one", row.id.to_bytes(4, "big"))[0].endpoint.address == address
        }
        assert prepare(conf, table, "back") == bootstrap
        assert finished(log, "bootstrap_scan", conf, table, "back") == ExitCode.OK, log.read_text()[-3000:]
        report = scan_report(conf, "back")
        assert (report["rows_of_runs_before"], report["rows_read"]) == (committed, 20_000 - committed)
        check(conf, table, session, report, 20_000)


def test_a_node_joins_before_a_killed_run_goes_on(
    conf: Path, nodes: list[CassandraNode], quorum: Any, tmp_path: Path
) -> None:
    """With the policy ``fail`` the run stops there, and loses nothing; with ``continue`` it goes on."""
    table, log = "three.orders", tmp_path / "log"
    quorum.execute(f"CREATE TABLE {table} {TABLE}")
    load_partitions(quorum, table, range(SMALL_PARTITIONS), SMALL_ROWS)
    change_conf(conf, scan={"on_topology_change": "fail"}, limits={"rows_per_s": 3_000})
    bootstrap = prepare(conf, table, "joins")
    with started(log, "bootstrap_scan", conf, table, "joins") as process:
        until(lambda: committed_rows(conf, bootstrap) > 10_000, process, log)
        os.kill(process.pid, signal.SIGKILL)
    committed = committed_rows(conf, bootstrap)
    assert committed < SMALL_PARTITIONS * SMALL_ROWS

    joining(nodes).start()
    assert finished(log, "bootstrap_scan", conf, table, "joins") == ExitCode.FATAL
    assert "nodes have joined or left since the bootstrap was planned" in scan_report(conf, "joins")["error"]
    assert committed_rows(conf, bootstrap) == committed

    change_conf(conf, scan={"on_topology_change": "continue"}, limits={})
    assert finished(log, "bootstrap_scan", conf, table, "joins") == ExitCode.OK, log.read_text()[-3000:]
    assert "the ring has changed" in log.read_text()
    report = scan_report(conf, "joins")
    assert (report["attempt"], report["rows_of_runs_before"]) == (3, committed)
    with connected(nodes, ConsistencyLevel.ALL, REQUEST_TIMEOUT_S) as session:
        assert len(session.cluster.metadata.all_hosts()) == 4
        check(conf, table, session, report, SMALL_PARTITIONS * SMALL_ROWS)
