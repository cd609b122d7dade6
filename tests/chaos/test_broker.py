"""The broker is killed twice, for two minutes each time, while rows are written. Files and replicas go on, and status
names the broker. In the end Kafka has everything, for each key in the order of the file stream."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.ledger.staging import closed_until
from ringsync.service.expected import ALARMS
from ringsync.service.problem import Kind
from ringsync.status import read_statuses
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, data_topic
from servers.cassandra import CassandraNode, NodeSettings
from servers.cluster import connected
from servers.kafka import BrokerSettings, KafkaBroker
from tests.chaos.under_airflow import until, writing
from tests.kafka_reading import Record, avro_of, kafka_messages, read_topic
from tests.streams.outbox import published
from tests.sync.judge import judge
from tests.sync.pipeline import Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import TABLES, bootstrap, create_schema, start_loops, statements

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

AWAY_S = float(os.environ.get("RINGSYNC_BROKER_AWAY_S", "120"))
KILLS = 2
BOOTSTRAPPED = ("workload.single", "workload.collections")
OTHER_LOOPS = ("schema_update", "commitlog_archive")
"""The loops of the sync besides those that :func:`start_loops` starts."""
OF_AIRFLOW = ("Airflow", ALARMS)
"""What status misses where there is no Airflow."""


def test_the_broker_is_killed_twice(tmp_path: Path, cache: Path, spark: Any) -> None:
    moments = random.Random(20)
    with (
        CassandraNode(tmp_path / "node", NodeSettings(heap_mb=384).on_free_ports(), cache) as node,
        connected([node], ConsistencyLevel.ALL) as session,
        KafkaBroker(tmp_path / "kafka", BrokerSettings().on_free_ports(), cache) as broker,
    ):
        create_schema(session, replicas=1)
        conf = write_conf(tmp_path, [node], kafka={"bootstrap_servers": [broker.bootstrap]})
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            for name in OTHER_LOOPS:
                running.start(name)
            # Rows with old timestamps are late from here on. Before, each of their buckets would be closed by itself.
            until(lambda: closed_until(running.store))
            with writing(session, statements(20, 50_000)):
                for table in BOOTSTRAPPED:
                    bootstrap(conf, table, table)
                until(partial(is_well, running), 180)
                for _ in range(KILLS):
                    time.sleep(moments.uniform(5, 20))
                    broker.kill()
                    went_on_without_kafka(running, broker.bootstrap, AWAY_S)
                    broker.start()
                    back = time.monotonic()
                    until(partial(is_well, running), 180)
                    print(f"well again {time.monotonic() - back:.0f} s after the broker has come back", flush=True)
            wait_until_drained(running.store, 600, running.check)
            rows = judge(running.store, session, TABLES, BOOTSTRAPPED, load_config(conf).sync)
            counts = {name: relayed(running.store, session, name, broker.bootstrap) for name in TABLES}
            print(f"rows: {rows}; messages, and how many came again: {counts}")
    assert min(rows.values()) > 5
    assert min(messages for messages, _ in counts.values()) > 20


def status(running: Pipeline) -> tuple[int, dict[str, str]]:
    """What ``cdcservice status`` says: its exit code, and what is wrong by kind. There is no Airflow: left out."""
    command = [sys.executable, "-m", "ringsync.cli", "status", "--json", "--conf", str(running.conf)]
    said = subprocess.run(command, env=running.environment, capture_output=True, text=True, timeout=120, check=False)
    wrong: dict[str, str] = defaultdict(str)
    for problem in json.loads(said.stdout)["problems"]:
        if problem["where"] not in OF_AIRFLOW:
            wrong[problem["kind"]] += f"{problem['text']}; "
    return said.returncode, wrong


def is_well(running: Pipeline) -> bool:
    """Whether nothing is wrong."""
    running.check()
    _, problems = status(running)
    print(problems, flush=True)
    return not problems


def went_on_without_kafka(running: Pipeline, address: str, seconds: float) -> None:
    """Wait for so long; files and replicas must have gone on meanwhile, and the status must say what is wrong.

    :param address: the broker's, which the status names
    """

    def passes() -> dict[str, tuple[int, int]]:
        tables = read_statuses(running.store)["bucket_close/close"]["tables"]
        of_file = {name: len(FileStream(running.store, tables[name]["topic"]).folders()) for name in BOOTSTRAPPED}
        return {name: (of_file[name], tables[name]["replica_pass"]) for name in BOOTSTRAPPED}

    before, end = passes(), time.monotonic() + seconds
    until(lambda: Kind.KAFKA_FAILING in status(running)[1], seconds)
    time.sleep(max(0.0, end - time.monotonic()))
    running.check()
    code, problems = status(running)
    assert (code, problems.keys() & {Kind.TABLE_FAILING, Kind.REPLICA_FAILING}) == (1, set()), problems
    assert address in problems[Kind.KAFKA_FAILING], problems
    after = passes()
    assert all(after[name][place] > before[name][place] for name in BOOTSTRAPPED for place in (0, 1)), (before, after)


def relayed(store: ObjectStore, session: Any, name: str, bootstrap: str) -> tuple[int, int]:
    """Wait until Kafka has all messages of a table: exactly those of the file stream, each key's in its order.

    :returns: how many messages there are, and how many of them came again
    """
    stream = FileStream(store, data_topic("test", read_table(session, *name.split("."))))
    wanted = published(stream)

    def all_records() -> list[Record] | None:
        found = read_topic(bootstrap, stream.topic)
        return found if len({record.event_id for record in found}) >= len(wanted) else None

    records = until(all_records)
    messages = kafka_messages(records, avro_of(stream, 0), avro_of(stream, 1))
    # As text: NaN is not equal to itself.
    assert {one: repr(message) for one, message in messages.items()} == {
        one: repr(message) for one, message in wanted.items()
    }
    assert by_key(messages) == by_key(wanted)
    return len(wanted), repeats(records, list(wanted))


def by_key(messages: dict[str, Any]) -> dict[str, list[str]]:
    """The event ids of each key, in their order."""
    found = defaultdict(list)
    for event_id, message in messages.items():
        found[repr(message["key"])].append(event_id)
    return dict(found)


def repeats(records: list[Record], order: list[str]) -> int:
    """Check that each message comes once, in the order of the file stream, in each of Kafka's partitions; unless nobody
    knows whether a transaction was committed when the broker was killed: then all of it may come again, with the same
    bytes.

    :returns: how many messages came again
    """
    places = {event_id: place for place, event_id in enumerate(order)}
    again = Counter(record.event_id for record in records)
    for partition in {record.partition for record in records}:
        of_partition = [record for record in records if record.partition == partition]
        steps = [places[record.event_id] for record in of_partition]
        back = [place for place in range(1, len(steps)) if steps[place] <= steps[place - 1]]
        assert len(back) <= KILLS, (partition, [steps[place - 1 : place + 1] for place in back])
        known: dict[str, tuple[bytes, bytes]] = {}
        for record in of_partition:
            assert known.setdefault(record.event_id, (record.key, record.value)) == (record.key, record.value)
    return sum(count - 1 for count in again.values())
