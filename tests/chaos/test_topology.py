"""A node joins, one is killed and replaced, one leaves, all while it is written to: nothing is lost or comes twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.ledger.staging import closed_until
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.status import STOP_KEY, read_status, read_statuses
from servers.cassandra import CassandraNode
from servers.cluster import connected, joining, three_nodes
from tests.chaos.applications import session_of
from tests.sync.judge import judge, stream_messages
from tests.sync.pipeline import LOOPS, Pipeline, pipeline, wait_until_drained, with_suppressed, write_conf
from tests.sync.scenario import TABLES, bootstrap, create_schema, modes, start_loops, statements, write

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

FIRST = 111
KEPT, SINGLE = "narrow.kept", "narrow.single"
"""Tables with two replicas: each change of the ring moves some of their rows."""
ALONE = "alone.notes"
"""A table with one replica: what was logged by it alone, nobody else has logged."""
LONELY_ROWS = 300
BOOTSTRAPPED = ("workload.collections", KEPT)
QUICK = (("cassandra.broadcast_interval_ms", "10000"), ("cassandra.batchlog.replay_timeout_in_ms", "20000"))
"""A node that replaces another waits for the first, one that leaves for the second: a minute and two by default."""
PATIENCE_S = 180
OVER_S = 240
"""A former node is done with when all that it may have logged is staged: docs/sync.md."""


@dataclass
class Load:
    """Threads that write until they are told to end; who gets no answer asks again.

    :ivar failed: tries that failed, by kind
    """

    session: Any
    ended: threading.Event = field(default_factory=threading.Event)
    failed: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)

    def write_on(self, name: str, workload: Iterator[str], at_once: int, pause_s: float) -> None:
        while not self.ended.is_set():
            write(self.session, workload, at_once, give_up_s=PATIENCE_S, failed=self.failed)
            self.written[name] += at_once
            time.sleep(pause_s)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """While its ranges lack a replica, nobody can write to a table of two at QUORUM: it has a thread of its own."""
        works = {"wide": (statements(23, 100_000), 4, 0.4), "narrow": (narrow(random.Random(24)), 2, 0.2)}
        threads = [threading.Thread(target=self.write_on, args=(name, *work)) for name, work in works.items()]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.ended.set()
            for thread in threads:
                thread.join()


def narrow(chance: random.Random) -> Iterator[str]:
    """Statements on the tables with two replicas; endless."""
    while True:
        id_, seq, number = chance.randrange(40), chance.randrange(6), chance.randrange(10**6)
        match chance.randrange(8):
            case 0:
                yield f"DELETE FROM {KEPT} WHERE id = {id_} AND seq > {seq}"
            case 1:
                yield f"DELETE FROM {SINGLE} WHERE id = {id_}"
            case 2:
                yield f"UPDATE {KEPT} SET tags = tags + {{'t{number % 9}'}} WHERE id = {id_} AND seq = {seq}"
            case 3 | 4:
                yield f"INSERT INTO {SINGLE} (id, v) VALUES ({id_}, {number})"
            case _:
                yield f"INSERT INTO {KEPT} (id, seq, v) VALUES ({id_}, {seq}, 'v{number}')"


def create_narrow_schema(session: Any) -> None:
    session.execute("CREATE KEYSPACE narrow WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 2}")
    session.execute(f"CREATE TABLE {SINGLE} (id int PRIMARY KEY, v int) WITH cdc = true")
    session.execute(
        f"CREATE TABLE {KEPT} (id int, seq int, v text, tags set<text>, PRIMARY KEY (id, seq)) WITH cdc = true"
    )


def test_a_node_joins_one_leaves_one_is_replaced(tmp_path: Path, cache: Path, spark: Any) -> None:
    with (
        # What is streamed to these nodes is not logged: only the first log of a row has it.
        three_nodes(tmp_path / "nodes", cache, FIRST, cdc_on_repair=False, properties=QUICK) as nodes,
        connected(nodes, ConsistencyLevel.QUORUM) as session,
    ):
        create_schema(session)
        create_narrow_schema(session)
        conf = write_conf(tmp_path, nodes, sync={"tables": modes(0)})
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            # Before the first close, each old timestamp of the workload would get a bucket of its own.
            until(running, lambda: closed_until(running.store) > 0)
            load = Load(session)
            with load.going_on():
                for table in BOOTSTRAPPED:
                    bootstrap(conf, table, table)
                joins(running, nodes, load)
                is_replaced(running, nodes, load)
                lonely = leaves(running, nodes, session, load)
            print(f"written: {dict(load.written)}, failed tries: {dict(load.failed)}", flush=True)
            with timed("drained"):
                wait_until_drained(running.store, 600, running.check)
            with connected([nodes[0]], ConsistencyLevel.ALL) as reading:
                tables = (*TABLES, KEPT, SINGLE, ALONE)
                with timed("judged"):
                    rows = judge(running.store, reading, tables, BOOTSTRAPPED, load_config(conf).sync)
                told = stream_messages(running.store, read_table(reading, *ALONE.split(".")))
            print(f"rows: {rows}", flush=True)
            assert min(rows.values()) > 5
            assert {message["key"]["id"] for message in told} == set(range(LONELY_ROWS))
            print(f"rows that only the log of the node that left has: {lonely}", flush=True)
            assert lonely > 5, "else the log of the node that left had nothing that others lack"
            nobody_is_missed(running, nodes)
            counts_reconcile(running)


def joins(running: Pipeline, nodes: list[CassandraNode], load: Load) -> None:
    """A fourth node joins, which logs what is streamed to it; the worker of the others reads its log."""
    fourth = joining(nodes, cdc_on_repair=True)
    with timed("a node joined"):
        fourth.start()
    until(running, lambda: is_read(running, fourth))
    under_load(running, load)
    print(f"of the node that joined: {of_node(running, fourth)}", flush=True)


def is_replaced(running: Pipeline, nodes: list[CassandraNode], load: Load) -> None:
    """A node dies with its disk, and another one takes its tokens."""
    dead = nodes[2]
    dead.kill()
    shutil.rmtree(dead.cdc_raw)
    under_load(running, load, "wide")
    print(f"while a node is dead: {troubles(running, dead)}", flush=True)
    replaces = ("cassandra.replace_address_first_boot", dead.settings.address)
    fifth = joining(nodes, properties=(*QUICK, replaces))
    with timed("a node was replaced"):
        fifth.start()
    until(running, lambda: is_read(running, fifth))
    until(running, lambda: not troubles(running, dead))
    under_load(running, load)


def leaves(running: Pipeline, nodes: list[CassandraNode], session: Any, load: Load) -> int:
    """A node leaves while its log is not read: what is in it is read later.

    :returns: rows that only its log has
    """
    leaver = nodes[1]
    session.execute("CREATE KEYSPACE alone WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
    session.execute(f"CREATE TABLE {ALONE} (id int PRIMARY KEY, v text) WITH cdc = true")
    with paused(running, "commitlog_stage"):
        for number in range(LONELY_ROWS):
            session.execute(f"INSERT INTO {ALONE} (id, v) VALUES ({number}, 'v{number}')")
        before = [owner(session, number) for number in range(LONELY_ROWS)]
        with timed("a node left"):
            leaver.nodetool("decommission")
        leaver.stop()
        deadline = time.monotonic() + PATIENCE_S
        while len(session.cluster.metadata.all_hosts()) != 3:
            assert time.monotonic() < deadline, session.cluster.metadata.all_hosts()
            time.sleep(0.5)
        after = [owner(session, number) for number in range(LONELY_ROWS)]
    logging = {node.contact_point for node in nodes if node.settings.cdc_on_repair}
    under_load(running, load)
    print(f"the node that left: {of_node(running, leaver)}, {troubles(running, leaver)}", flush=True)
    moved = zip(before, after, strict=True)
    return sum(old == leaver.contact_point and new not in logging for old, new in moved)


def owner(session: Any, number: int) -> str:
    """The only replica of a row."""
    (host,) = session.cluster.metadata.get_replicas("alone", number.to_bytes(4, "big"))
    return str(host.endpoint.address)


@contextmanager
def paused(running: Pipeline, name: str) -> Iterator[None]:
    """A loop stands still, as on a suspended host."""
    pids = session_of(running.running[name].pid)
    for pid in pids:
        with_suppressed(os.kill, pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with_suppressed(os.kill, pid, signal.SIGCONT)


def under_load(running: Pipeline, load: Load, *names: str) -> None:
    """Wait until more was written, some windows long."""
    end, before = time.monotonic() + 10, load.written.copy()
    until(running, lambda: time.monotonic() > end)
    until(running, lambda: all(load.written[name] > before[name] for name in names or ("wide", "narrow")))


def until(running: Pipeline, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait for something while the loops run."""
    deadline = time.monotonic() + seconds
    while not condition():
        running.check()
        assert time.monotonic() < deadline, json.dumps(read_statuses(running.store))[:5000]
        time.sleep(1)


def of_node(running: Pipeline, node: CassandraNode) -> dict[str, Any]:
    """What the stage says of a node; nothing: it does not know it."""
    status = read_status(running.store, "commitlog_stage/default") or {}
    endpoint = f"{node.contact_point}:{node.port}"
    return next((one for one in status.get("nodes", {}).values() if one["endpoint"] == endpoint), {})


def is_read(running: Pipeline, node: CassandraNode) -> bool:
    """Whether all is staged that a node had logged by now."""
    moment_ms = time.time() * 1000 - 5000
    told = of_node(running, node)
    return bool(told) and told["is_read"] and told["rows"] > 0 and told["clear_at_ms"] > moment_ms


def troubles(running: Pipeline, *nodes: CassandraNode) -> list[str]:
    """What ``cdcservice status`` says is wrong with nodes."""
    endpoints = [f"{node.contact_point}:{node.port}" for node in nodes]
    told = [
        one.text
        for one in problems(read_statuses(running.store), {}, Expected.of_commit_logs(["default"]), False, time.time())
    ]
    return [one for one in told if any(endpoint in one for endpoint in endpoints)]


def nobody_is_missed(running: Pipeline, nodes: list[CassandraNode]) -> None:
    """The node whose log could be read is forgotten; of that whose log is gone, nobody has to do anything."""
    _, leaver, dead, *_ = nodes
    with timed("the node that left was forgotten"):
        until(running, lambda: not of_node(running, leaver), OVER_S)
    assert of_node(running, dead)["left"]
    assert troubles(running, *nodes) == []
    claims = {file.name for node in nodes if node is not dead for file in node.cdc_raw.glob("ringsync-claim.*")}
    assert len(claims) == 3, claims


def counts_reconcile(running: Pipeline) -> None:
    """Each row has one outcome, over all loops."""
    running.store.put(STOP_KEY, b"{}")
    assert {name: running.running.pop(name).wait(120) for name in LOOPS} == dict.fromkeys(LOOPS, 0)
    staged, closed, late = (only_report(running, name) for name in LOOPS)
    outcomes = ("staged", "late", "repeated", "of_dropped_tables", "too_old", "not_cdc")
    print(
        f"staged: { ({name: staged.get(name, 0) for name in ('rows', *outcomes)}) }, late: {late['counts']}", flush=True
    )
    assert staged["rows"] == sum(staged.get(name, 0) for name in outcomes)
    assert staged["late"] > 0, "else no row was late"
    postponed = 0
    for name, table in closed["tables"].items():
        taken, settled = table["rows_agreed"] + table["rows_read_at_close"], table["rows_published"]
        postponed += taken - settled - table["duplicates"]
        print(f"{name}: {taken} taken, {settled} published, {table['duplicates']} duplicates", flush=True)
    counts = Counter(late["counts"])
    assert counts["read"] - counts["of_passes"] == staged["late"]
    # A pass that fails removes the late rows that it has put; they may have been read before.
    assert counts["of_passes"] >= postponed
    assert counts["read"] + counts["due"] == counts["published"] + counts["repeated"] + counts["postponed"]
    assert late["waiting"] == 0


def only_report(running: Pipeline, name: str) -> dict[str, Any]:
    (stat,) = running.store.list(f"reports/{name}/")
    report: dict[str, Any] = json.loads(running.store.get(stat.key))
    return report


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)
