"""The broker is killed twice, for two minutes each time, while rows are written. Files and replicas go on. In the end
Kafka has everything, for each key in the order of the file stream."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.service.health import Kind, problems
from ringsync.status import read_statuses
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, data_topic
from servers.cassandra import CassandraNode, NodeSettings
from servers.cluster import connected
from servers.kafka import BrokerSettings, KafkaBroker
from tests.chaos.under_airflow import until, writing
from tests.kafka_reading import avro_of, kafka_messages, read_topic
from tests.streams.outbox import published
from tests.sync.judge import judge
from tests.sync.pipeline import Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import TABLES, bootstrap, create_schema, start_loops, statements

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

AWAY_S = float(os.environ.get("RINGSYNC_BROKER_AWAY_S", "120"))
BOOTSTRAPPED = ("workload.single", "workload.collections")


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
            with writing(session, statements(20, 50_000)):
                for table in BOOTSTRAPPED:
                    bootstrap(conf, table, table)
                for _ in range(2):
                    time.sleep(moments.uniform(5, 20))
                    broker.kill()
                    went_on_without_kafka(running, AWAY_S)
                    broker.start()
                    until(lambda: not of_kafka(running.store), 180)
            wait_until_drained(running.store, 600, running.check)
            rows = judge(running.store, session, TABLES, BOOTSTRAPPED, load_config(conf).sync)
            counts = {name: relayed(running.store, session, name, broker.bootstrap) for name in TABLES}
            print(f"rows: {rows}; messages: {counts}")
    assert min(rows.values()) > 5
    assert min(counts.values()) > 20


def of_kafka(store: ObjectStore) -> list[str]:
    """What the status says of Kafka."""
    found = problems(read_statuses(store), {}, ("default",), False, time.time())
    return [problem.text for problem in found if problem.kind == Kind.KAFKA_FAILING]


def went_on_without_kafka(running: Pipeline, seconds: float) -> None:
    """Wait for so long; files and replicas must have gone on meanwhile, and the status must say what is wrong."""

    def passes() -> dict[str, tuple[int, int]]:
        tables = read_statuses(running.store)["bucket_close/close"]["tables"]
        return {name: (tables[name]["last_pass"], tables[name]["replica_pass"] or 0) for name in BOOTSTRAPPED}

    before, end = passes(), time.monotonic() + seconds
    until(partial(of_kafka, running.store), seconds)
    time.sleep(max(0.0, end - time.monotonic()))
    running.check()
    assert of_kafka(running.store)
    after = passes()
    assert all(after[name][place] > before[name][place] for name in BOOTSTRAPPED for place in (0, 1)), (before, after)


def relayed(store: ObjectStore, session: Any, name: str, bootstrap: str) -> int:
    """Wait until Kafka has all messages of a table; each key's must be in order. How many there are."""
    stream = FileStream(store, data_topic("test", read_table(session, *name.split("."))))
    wanted = published(stream)

    def found() -> Mapping[str, Any] | None:
        messages = kafka_messages(read_topic(bootstrap, stream.topic), avro_of(stream, 0), avro_of(stream, 1))
        return messages if len(messages) >= len(wanted) else None

    messages = until(found)
    assert by_key(messages) == by_key(wanted)
    return len(wanted)


def by_key(messages: Mapping[str, Any]) -> dict[str, list[str]]:
    """The messages of each key in their order. As text: NaN is not equal to itself."""
    found = defaultdict(list)
    for event_id, message in messages.items():
        found[repr(message["key"])].append(f"{event_id} {message['value']!r}")
    return dict(found)
