"""The schema updater is killed at any moment: the log has no gap, and the messages have each change once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringsync.ledger.schema_changes import change_numbers
from ringsync.schema.whole_to_cql import Statement
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.relay import relay
from ringsync.streams.schema_messages import publish_schema_change
from tests.kafka_reading import avro_of, json_payload, kafka_messages, read_topic
from tests.ledger.histories import history_of
from tests.mock_kafka import mock_kafka
from tests.mortal_store import Killed, MortalStore
from tests.steps.test_schema_update import KEYSPACES, SERVER, messages, replayed, shop, updater

__all__ = ["shop"]

ROOT = Path(__file__).parents[2]
KILLS = 10
FOUND = {"version": "1", "hostname": "10.0.0.1", "ts_ms": 5, "snapshot": False}


@pytest.mark.server
def test_killed_before_any_of_its_writes_it_comes_to_the_same_messages(shop: Any, tmp_path: Path) -> None:
    """Each try has a change of its own to record, and is killed before its first, second … write."""
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    updater(LocalStore(tmp_path), shop).cycle()
    number, killed = 0, True
    while killed:
        shop.execute(f"ALTER TABLE su_shop.t ADD c{number:03} int")
        shop.execute(f"CREATE TABLE su_shop.t{number} (id int PRIMARY KEY)")
        if number:
            shop.execute(f"DROP TABLE su_shop.t{number - 1}")
        store = MortalStore(tmp_path)
        store.left = number
        killed = False
        try:
            updater(store, shop).cycle()
        except Killed:
            killed = True
        assert number < 40
        number += 1
    assert number > 8
    updater(LocalStore(tmp_path), shop).cycle()
    numbers = [entry.version.number for entry in history_of(LocalStore(tmp_path), "su_shop", "t")]
    assert numbers == list(range(1, len(numbers) + 1))
    replayed(shop, LocalStore(tmp_path))


@pytest.mark.server
def test_ten_kills_while_the_schema_changes_leave_one_history(cassandra: Any, shop: Any, tmp_path: Path) -> None:
    document = {
        "server_name": SERVER,
        "cassandra": {"contact_points": [cassandra.contact_point], "port": cassandra.port},
        "store": {"url": str(tmp_path / "lake")},
        "state": {"keyspace": "su_state", "replication": {"class": "SimpleStrategy", "replication_factor": "1"}},
        "schema_updater_poll_interval_ms": 100,
    }
    (tmp_path / "ringsync.yaml").write_text(yaml.safe_dump(document))
    program = [sys.executable, str(ROOT / "spark_apps" / "schema_update.py")]
    program += ["--conf", str(tmp_path / "ringsync.yaml"), "--run", "r"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "include")}
    store = LocalStore(tmp_path / "lake")
    chance, number = random.Random(20261124), 0
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    started = [subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL) for _ in range(2)]
    try:
        for _ in range(KILLS):
            before = len(change_numbers(store))
            wait_until = time.monotonic() + 60
            while len(change_numbers(store)) < before + 2 and time.monotonic() < wait_until:
                shop.execute(f"ALTER TABLE su_shop.t ADD c{number:03} int")
                number += 1
                time.sleep(chance.uniform(0, 0.2))
            assert len(change_numbers(store)) >= before + 2
            victim = started.pop(0)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            started.append(subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL))
        store.put("control/stop.json", json.dumps({}).encode())
        assert [process.wait(120) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
        shop.execute("DROP KEYSPACE IF EXISTS su_state")
    numbers = [entry.version.number for entry in history_of(store, "su_shop", "t")]
    assert numbers == list(range(1, len(numbers) + 1))
    added = [
        message["value"]["ddl"]
        for message in messages(store)
        if message["value"]["ddl"].startswith("ALTER TABLE su_shop.t ")
    ]
    created = [message["value"]["ddl"] for message in messages(store) if " su_shop.t (" in message["value"]["ddl"]]
    assert len(created) == 1
    # Columns that were there when the table was first seen are in CREATE TABLE.
    names = [statement.split()[4] for statement in added]
    assert names == [f"c{place:03}" for place in range(number - len(names), number)]
    assert len(messages(store)) == len({message["value"]["source"]["event_id"] for message in messages(store)})


@pytest.mark.parametrize("serialisation", ["avro", "json"])
def test_the_messages_go_to_kafka_in_one_partition(tmp_path: Path, serialisation: Any) -> None:
    store = LocalStore(tmp_path)
    statements = [Statement(name, f"DROP TABLE {name}.t{place};") for place in range(5) for name in KEYSPACES]
    publish_schema_change(store, SERVER, 1, statements, {"su_shop": {"su_shop.t4": 7}}, **FOUND)
    publish_schema_change(store, SERVER, 2, [], {}, **FOUND)
    publish_schema_change(store, SERVER, 3, statements[:1], {}, **FOUND)
    stream = FileStream(store, SERVER)
    expected = [message for folder in stream.folders() for message in stream.read(folder)]
    with mock_kafka() as broker:
        broker.make(SERVER)
        with KafkaTopics(KafkaSettings((broker.bootstrap,), serialisation=serialisation)) as sink:
            sink._known.add(SERVER)  # mock brokers make no topics for an admin client
            assert relay(store, SERVER, sink).messages == 11
        records = read_topic(broker.bootstrap, SERVER)
    assert len({record.partition for record in records}) == 1
    if serialisation == "avro":
        found = kafka_messages(records, avro_of(stream, 0), avro_of(stream, 1))
    else:
        found = kafka_messages(records, json_payload, json_payload)
    by_id = {message["value"]["source"]["event_id"]: message for message in expected}
    assert [one["value"]["ddl"] for one in found.values()] == [one["value"]["ddl"] for one in expected]
    assert found.keys() == by_id.keys()
    assert expected[8]["value"]["source"]["tables"] == {"su_shop.t4": 7}
    assert expected[9]["value"]["source"]["tables"] == {}
