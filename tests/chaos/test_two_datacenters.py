"""Two datacenters, in both of which is written, and one of which has logs that nobody reads."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.config import load_config
from ringsync.ledger.staging import closed_until
from ringsync.service.checks import check_cluster
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.service.problem import Kind
from ringsync.service.show import UNREAD, status_lines
from ringsync.status import read_statuses
from servers.cassandra import CassandraNode
from servers.cluster import connected, three_nodes
from tests.sync.judge import judge
from tests.sync.pipeline import Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import TABLES, bootstrap, create_schema, modes, start_loops, statements, write

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

FIRST = 121
BOTH = "both.orders"
BOOTSTRAPPED = ("workload.collections", BOTH)
REPLICATION = "{'class': 'NetworkTopologyStrategy', 'dc1': 2, 'dc2': 1}"


def orders(seed: int) -> Iterator[str]:
    """Statements on a table of which each datacenter writes the same rows; endless."""
    chance = random.Random(seed)
    while True:
        id_, seq, number = chance.randrange(20), chance.randrange(8), chance.randrange(10**6)
        match chance.randrange(6):
            case 0:
                yield f"DELETE FROM {BOTH} WHERE id = {id_} AND seq = {seq}"
            case 1:
                yield f"UPDATE {BOTH} SET tags = tags + {{'t{number % 9}'}} WHERE id = {id_} AND seq = {seq}"
            case _:
                yield f"INSERT INTO {BOTH} (id, seq, v) VALUES ({id_}, {seq}, 'v{number}')"


def create_both(session: Any) -> None:
    """The tables, in both datacenters."""
    create_schema(session)
    session.execute(f"ALTER KEYSPACE workload WITH replication = {REPLICATION}")
    session.execute(f"CREATE KEYSPACE both WITH replication = {REPLICATION}")
    columns = "id int, seq int, v text, tags set<text>, PRIMARY KEY (id, seq)"
    session.execute(f"CREATE TABLE {BOTH} ({columns}) WITH cdc = true")


def test_the_logs_of_one_of_two_datacenters_are_not_read(tmp_path: Path, cache: Path, spark: Any) -> None:
    datacenters = tuple({"datacenter": name} for name in ("dc1", "dc1", "dc2"))
    with (
        three_nodes(tmp_path / "nodes", cache, FIRST, datacenters) as nodes,
        connected(nodes[:2], ConsistencyLevel.LOCAL_QUORUM) as near,
        connected(nodes[2:], ConsistencyLevel.LOCAL_QUORUM) as far,
        connected(nodes[:2], ConsistencyLevel.ALL) as reading,
    ):
        create_both(reading)
        conf = write_conf(tmp_path, nodes[:2], sync={"tables": modes(0), "datacenters": ["dc1"]})
        away = f"{nodes[2].contact_point}:{nodes[2].port}"
        assert any(f"not read (sync.datacenters): {away}" in told for told in check_cluster(load_config(conf)))
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            while closed_until(running.store) == 0:  # before that, each old timestamp gets a bucket of its own
                running.check()
                time.sleep(1)
            tries = written_in_both(running, nodes[1], near, far)
            print(f"failed tries: {dict(tries['near'])} near, {dict(tries['far'])} far", flush=True)
            began = time.monotonic()
            wait_until_drained(running.store, 600, running.check)
            print(f"drained: {time.monotonic() - began:.0f} s", flush=True)
            rows = judge(running.store, reading, (*TABLES, BOTH), BOOTSTRAPPED, load_config(conf).sync)
            print(f"rows: {rows}", flush=True)
            assert min(rows.values()) > 5
            says_what_is_not_read(running, nodes[2])
        assert not list(nodes[2].cdc_raw.glob("ringsync-claim.*"))


def written_in_both(running: Pipeline, mortal: CassandraNode, near: Any, far: Any) -> dict[str, Counter[str]]:
    """Write in both datacenters while tables are copied, while a node that is read is dead, and after it is back.

    :param mortal: this node; meanwhile its datacenter has no quorum, and only the other one takes writes
    :returns: tries that failed, by kind, of both sessions
    """
    failed: dict[str, Counter[str]] = {"near": Counter(), "far": Counter()}
    ended, written = threading.Event(), Counter[str]()

    def write_on(session: Any, name: str, seed: int) -> None:
        works = statements(seed, 100_000), orders(seed)
        while not ended.is_set():
            for work in works:
                write(session, work, 3, give_up_s=180, failed=failed[name])
                written[name] += 3
            time.sleep(0.3)

    threads = [threading.Thread(target=write_on, args=work) for work in ((near, "near", 31), (far, "far", 32))]
    for thread in threads:
        thread.start()
    try:
        for table in BOOTSTRAPPED:
            bootstrap(running.conf, table, table)
        mortal.kill()
        before = written["far"]
        time.sleep(25)
        assert written["far"] - before > 50, "else the dead node gets nothing by hints"
        mortal.start()
        time.sleep(40)
        running.check()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    return failed


def says_what_is_not_read(running: Pipeline, away: CassandraNode) -> None:
    """``cdcservice status`` names the datacenter that is left out, and takes it for no problem."""
    statuses, now_s = read_statuses(running.store), time.time()
    lines = list(status_lines(statuses, {}, now_s))
    endpoint = f"{away.contact_point}:{away.port}"
    assert ["dc2", endpoint] in [line.split() for line in lines]
    assert any(UNREAD in line for line in lines)
    told = problems(statuses, {}, Expected.of_commit_logs(["default"]), False, now_s)
    assert {one.kind for one in told} <= {Kind.LOOP_SILENT}, told  # of loops that this test does not start
    assert all(node["endpoint"] != endpoint for node in statuses["commitlog_stage/default"]["nodes"].values())
