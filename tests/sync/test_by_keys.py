"""A consumer that knows only keys, on a real node: deletions of partitions and ranges are expanded, also those that
came while the table was copied, and ``before`` is what it held."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringsync.schema.from_cluster import read_table
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream
from ringsync.streams.pass_log import get_pass, pass_numbers
from ringsync.streams.topics import data_topic
from servers.cassandra import CassandraNode, NodeSettings
from tests.sync.judge import stream_messages
from tests.sync.pipeline import pipeline, wait_until_drained, write_conf
from tests.sync.scenario import bootstrap, kill_and_start, start_loops

pytestmark = [pytest.mark.server, pytest.mark.spark]

TABLES = {"shop.by_replica": {"after_image": "replica"}, "shop.by_source": {"after_image": "source"}}
ROWS = "SELECT id, seq, v FROM {}"


@pytest.fixture
def node(tmp_path: Path, cache: Path) -> Iterator[CassandraNode]:
    settings = NodeSettings(address="127.0.0.61", heap_mb=256, cluster_name="keys")
    with CassandraNode(tmp_path / "node", settings.on_free_ports(), cache) as found:
        yield found


def test_whoever_knows_only_keys_has_the_rows(tmp_path: Path, node: CassandraNode, cache: Path) -> None:
    conf = write_conf(tmp_path, [node], window_ms=3000, sync={"expand_deletions": True, "tables": TABLES})
    cluster, rng = node.cluster(), random.Random(8)
    try:
        session = cluster.connect()
        session.execute("CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
        for table in TABLES:
            session.execute(f"CREATE TABLE {table} (id int, seq int, v text, PRIMARY KEY (id, seq)) WITH cdc = true")

        def write(rounds: int) -> Callable[[], object]:
            return lambda: [change(session, rng) for _ in range(rounds)]

        with pipeline(conf, tmp_path, cache) as running:
            write(300)()
            start_loops(running)
            for table in TABLES:
                bootstrap(running, table, table.replace(".", "-"), [write(60)] * 2)
            for _ in range(20):
                write(20)()
                time.sleep(0.5)
            kill_and_start(running, "bucket_close")
            for _ in range(20):
                write(20)()
                time.sleep(0.5)
            wait_until_drained(running.store, 240, running.check)
            expanded = 0
            for name in TABLES:
                table = read_table(session, *name.split("."))
                messages = stream_messages(running.store, table)
                rows = {(row.id, row.seq): row.v for row in session.execute(ROWS.format(name))}
                assert held(messages, with_before="replica" in name) == rows
                if "replica" in name:
                    assert retold(messages_by_replica(running.store, table)) > 50
                assert len(rows) > 10
                removed = [one for one in messages if one["key"]["seq"] is not None and not one["value"]["after"]]
                expanded += sum(one["value"]["source"]["query"] is None for one in removed)
            assert expanded > 10
    finally:
        cluster.shutdown()


def change(session: Any, rng: random.Random) -> None:
    """The same change of both tables."""
    id_, seq = rng.randrange(8), rng.randrange(12)
    match rng.randrange(12):
        case 0:
            statement = f"DELETE FROM {{}} WHERE id = {id_}"
        case 1 | 2:
            statement = f"DELETE FROM {{}} WHERE id = {id_} AND seq >= {seq} AND seq < {seq + 4}"
        case 3:
            statement = f"DELETE FROM {{}} WHERE id = {id_} AND seq = {seq}"
        case _:
            statement = f"INSERT INTO {{}} (id, seq, v) VALUES ({id_}, {seq}, '{rng.random()}')"
    for table in TABLES:
        session.execute(statement.format(table))


def held(messages: list[dict[str, Any]], *, with_before: bool) -> dict[tuple[int, int], str]:
    """What a consumer has that ignores what is not of one row; with ``before`` where it was asked for."""
    found: dict[tuple[int, int], str] = {}
    bootstrapped, known = False, 0
    for message in messages:
        key, value = (message["key"]["id"], message["key"]["seq"]), message["value"]
        if key[1] is None:
            continue
        bootstrapped |= value["op"] == "r"
        spared = value["op"] == "u" and value["source"]["query"] is None
        if value["before"] is not None and not spared:
            assert with_before or value["op"] == "d"
            assert (value["before"]["id"], value["before"]["seq"]) == key
            known += value["after"] is not None
        if value["after"] is not None:
            found[key] = value["after"]["v"]
        else:
            found.pop(key, None)
    assert bootstrapped
    assert (known > 5) == with_before
    return found


def messages_by_replica(store: ObjectStore, table: TableSchema) -> Iterator[tuple[bool, dict[str, Any]]]:
    """All messages in order, and whether the replica, not the source, said what the row is: not of a bootstrap, nor of
    what was written while it went on, nor late."""
    passes = [get_pass(store, table.table_id, number) for number in pass_numbers(store, table.table_id)]
    by_replica = {one.bucket: one.kind == "changes" and not one.bootstrap and not one.late for one in passes}
    stream = FileStream(store, data_topic("test", table))
    return ((by_replica[bucket], message) for bucket in stream.buckets() for message in stream.read(bucket))


def retold(messages: Iterable[tuple[bool, dict[str, Any]]]) -> int:
    """Check that ``before`` is what the message before has told, where the replica was asked both times.

    :returns: how often
    """
    told: dict[tuple[int, int], dict[str, Any] | None] = {}
    checked = 0
    for by_replica, message in messages:
        key, value = (message["key"]["id"], message["key"]["seq"]), message["value"]
        if key[1] is None:
            continue
        if by_replica and key in told:
            assert value["before"] == told[key], (message, told[key])
            checked += 1
        told.pop(key, None)
        spared = value["op"] == "u" and value["source"]["query"] is None
        if by_replica and not spared:  # it is as the source has it, which may be ahead
            told[key] = value["after"]
    return checked
