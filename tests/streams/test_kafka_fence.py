"""Relays that stand still while another takes over, and wake up: a consumer that takes the newest ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from ringsync.config import Kafka
from ringsync.service.checks import check_kafka
from ringsync.service.table_checks import CheckError
from ringsync.steps.passes.sink_feed import SinkFeed
from ringsync.streams.files import FileStream, StreamDamagedError
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.relay import relay
from ringsync.streams.sink import AnotherRelayError, BrokerUnavailableError, RelayError
from servers import kafka as servers_kafka
from servers.kafka import BrokerSettings, KafkaBroker
from tests.kafka_reading import avro_of, kafka_messages, read_topic
from tests.steps.late_files import Write
from tests.streams.outbox import changes, notes, outbox, publish, published

pytestmark = pytest.mark.server

PASSES = 4
LEVELS = ("read_committed", "read_uncommitted")

CHILD = """
import json, sys
from ringsync.storage.local import LocalStore
from ringsync.streams.relay import relay
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.sink import RelayError

bootstrap, folder, topic, pause_in, pauses = *sys.argv[1:5], int(sys.argv[5])

def pause():
    global pauses
    pauses -= 1
    if pauses == 0:
        print("here", flush=True)
        sys.stdin.readline()
    return False

class Store(LocalStore):
    def put(self, key, data, **conditions):
        if pause_in == "save" and key.endswith("kafka.json") and json.loads(data)["runs"]:
            pause()
        return super().put(key, data, **conditions)

with KafkaTopics(KafkaSettings((bootstrap,))) as kafka:
    try:
        relay(Store(folder), topic, kafka, stop=pause if pause_in == "list" else lambda: False)
        print("relayed")
    except RelayError as error:
        print(type(error).__name__)
"""


def publish_passes(stream: FileStream, *numbers: int) -> None:
    """Passes that each write the same rows anew."""
    for number in numbers:
        publish(stream, f"pass-{number:012}", changes(*(Write(id_, 0, str(number), number) for id_ in range(500))))


class Frozen:
    """A relay that stands still."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child

    def wake(self) -> str:
        """Let it go on to its end; how it ended."""
        self.child.send_signal(signal.SIGCONT)
        said, _ = self.child.communicate("\n", timeout=60)
        return said.strip()


@contextmanager
def frozen(broker: KafkaBroker, stream: FileStream, pause_in: str, pauses: int = 1) -> Iterator[Frozen]:
    """A process that relays and is stopped in the middle.

    :param pause_in: ``list``: after a part that it has sent; ``save``: when it is about to store the cursor
    """
    folder = stream.store.url.removeprefix("file://")
    arguments = [sys.executable, "-c", CHILD, broker.bootstrap, folder, stream.topic, pause_in, str(pauses)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(arguments, **pipes) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "here\n"
            deadline = time.monotonic() + 60
            while not read_topic(broker.bootstrap, stream.topic, "read_uncommitted"):
                assert time.monotonic() < deadline, "nothing has come of what was sent"
            child.send_signal(signal.SIGSTOP)
            yield Frozen(child)
        finally:
            child.kill()


def newest(broker: KafkaBroker, stream: FileStream, isolation: str) -> set[str]:
    """The notes that a consumer ends with who takes what it reads last of each row; all rows have the same."""
    key, value = avro_of(stream, 0), avro_of(stream, 1)
    rows: dict[str, str] = {}
    for record in read_topic(broker.bootstrap, stream.topic, isolation):
        version = int(record.headers["schema_version"])
        rows[json.dumps(key(record.key, version))] = value(record.value, version)["after"]["note"]
    assert len(rows) == 500
    return set(rows.values())


@pytest.mark.parametrize(("pause_in", "pauses"), [("list", 1), ("list", 3), ("save", 1)])
def test_a_relay_that_wakes_up_disorders_nothing(
    broker: KafkaBroker, tmp_path: Path, pause_in: str, pauses: int
) -> None:
    stream = outbox(tmp_path, f"demo.shop.frozen.{pause_in}.{pauses}")
    publish_passes(stream, *range(1, PASSES + 1))
    with frozen(broker, stream, pause_in, pauses) as old, KafkaTopics(KafkaSettings((broker.bootstrap,))) as kafka:
        publish_passes(stream, PASSES + 1)
        assert relay(stream.store, stream.topic, kafka).messages == 500 * (PASSES + 1)
        said = old.wake()
        assert [newest(broker, stream, isolation) for isolation in LEVELS] == [{"5"}, {"5"}]
        assert said == "AnotherRelayError"
        # The new one goes on as if nothing had been.
        publish_passes(stream, PASSES + 2)
        assert relay(stream.store, stream.topic, kafka).messages == 500
    assert newest(broker, stream, "read_committed") == {"6"}


def test_what_an_old_relay_has_sent_is_repeated_to_its_end(broker: KafkaBroker, tmp_path: Path) -> None:
    """It has sent all, and wakes up to save this when the new one has repeated a part of it."""
    stream = outbox(tmp_path, "demo.shop.frozen.middle")
    publish_passes(stream, *range(1, PASSES + 1))
    with frozen(broker, stream, "save") as old, KafkaTopics(KafkaSettings((broker.bootstrap,))) as kafka:
        assert relay(stream.store, stream.topic, kafka, stop=lambda: True).messages == 500
        said = old.wake()
        relay(stream.store, stream.topic, kafka)
    assert [newest(broker, stream, isolation) for isolation in LEVELS] == [{"4"}, {"4"}]
    assert said == "AnotherRelayError"


def test_who_wakes_up_first_cannot_move_the_cursor_of_who_has_begun(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.frozen.first")
    publish_passes(stream, *range(1, PASSES + 1))
    woken: list[str] = []
    with frozen(broker, stream, "save") as old, KafkaTopics(KafkaSettings((broker.bootstrap,))) as kafka:

        def wake() -> bool:
            if not woken:
                woken.append(old.wake())
            return False

        assert relay(stream.store, stream.topic, kafka, stop=wake).messages
    assert [newest(broker, stream, isolation) for isolation in LEVELS] == [{"4"}, {"4"}]
    assert woken == ["AnotherRelayError"]


def test_who_is_refused_takes_over_with_the_next_call(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.turns")
    settings = KafkaSettings((broker.bootstrap,))
    refused = 0
    with KafkaTopics(settings) as one, KafkaTopics(settings) as other:
        for number in range(1, 13):
            publish_passes(stream, number)
            kafka = (one, other)[number // 2 % 2]
            try:
                relay(stream.store, stream.topic, kafka)
            except AnotherRelayError as error:
                refused += "another process relays too, topic demo.shop.turns" in str(error)
                assert relay(stream.store, stream.topic, kafka).messages == 500
    assert refused == 5
    assert len(read_topic(broker.bootstrap, stream.topic)) == 12 * 500
    assert newest(broker, stream, "read_committed") == {"12"}


def test_two_feeds_that_stay_alive_take_turns(broker: KafkaBroker, tmp_path: Path) -> None:
    """Each is told only of what it has published itself."""
    stream = outbox(tmp_path, "demo.shop.feeds")
    settings = KafkaSettings((broker.bootstrap,))
    said: set[str] = set()
    sink = partial(KafkaTopics, settings)
    with SinkFeed(stream.store, sink) as one, SinkFeed(stream.store, sink) as other:
        for number in range(1, 25):
            publish_passes(stream, number)
            (one, other)[number % 2].announce(stream.topic, f"pass-{number:012}")
            time.sleep(0.3)
            said |= {str((feed.status(stream.topic) or {}).get("error")) for feed in (one, other)}
    assert any("another process relays" in error for error in said), said
    with KafkaTopics(settings) as kafka:
        relay(stream.store, stream.topic, kafka)
    assert newest(broker, stream, "read_committed") == {"24"}
    assert len({record.event_id for record in read_topic(broker.bootstrap, stream.topic)}) == 24 * 500


def test_consumers_do_not_wait_for_a_relay_that_gave_up(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.damaged")
    publish(stream, "pass-000000000001", notes(0, 500), notes(500, 500))
    damaged = next(path for path in tmp_path.rglob("*part-001*.avro*") if path.is_file())
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-100])
    with KafkaTopics(KafkaSettings((broker.bootstrap,))) as kafka:
        for _ in range(2):
            with pytest.raises(StreamDamagedError, match=r"part-001"):
                relay(stream.store, stream.topic, kafka)
            assert len(read_topic(broker.bootstrap, stream.topic)) == 500
        damaged.write_bytes(whole)
        assert relay(stream.store, stream.topic, kafka).messages == 500
    records = read_topic(broker.bootstrap, stream.topic)
    assert len(records) == 1000
    assert kafka_messages(records, avro_of(stream, 0), avro_of(stream, 1)) == published(stream)


def test_of_a_part_that_fails_in_its_middle_consumers_see_nothing(
    broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = outbox(tmp_path, "demo.shop.middle")
    publish(stream, "pass-000000000001", notes(0, 5000))
    publish(stream, "pass-000000000002", notes(5000, 5000))
    serialiser, broken = KafkaTopics._serialiser, [True]

    def await_some_beyond(records: int) -> None:
        deadline = time.monotonic() + 60
        while len(read_topic(broker.bootstrap, stream.topic, "read_uncommitted")) <= records:
            assert time.monotonic() < deadline, "nothing has come of what was sent"

    def picky(*given: Any) -> Any:
        serialise = serialiser(*given)

        def checked(block: Any) -> Any:
            if broken and any(b"note 9500 " in value for value in block.values):
                await_some_beyond(5000)
                raise ValueError("cannot be written")
            return serialise(block)

        return checked

    monkeypatch.setattr(KafkaTopics, "_serialiser", picky)
    with KafkaTopics(KafkaSettings((broker.bootstrap,))) as kafka:
        for _ in range(3):
            with pytest.raises(StreamDamagedError, match="cannot be written"):
                relay(stream.store, stream.topic, kafka)
            assert len(read_topic(broker.bootstrap, stream.topic)) == 5000
        broken.clear()
        assert relay(stream.store, stream.topic, kafka).messages == 5000
    records = read_topic(broker.bootstrap, stream.topic)
    assert len(records) == 10_000
    assert kafka_messages(records, avro_of(stream, 0), avro_of(stream, 1)) == published(stream)
    assert len(read_topic(broker.bootstrap, stream.topic, "read_uncommitted")) > 10_000


def test_a_message_that_is_refused_is_named_as_such(broker: KafkaBroker, tmp_path: Path) -> None:
    stream = outbox(tmp_path, "demo.shop.small")
    publish(stream, "pass-000000000001", notes(0, 5000))
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(stream.topic, 1, config={"max.message.bytes": "100"})])[stream.topic].result()
    with KafkaTopics(KafkaSettings((broker.bootstrap,))) as kafka:
        for _ in range(2):
            with pytest.raises(RelayError, match=r"refuses a message, topic demo.shop.small: .*max.message.bytes"):
                relay(stream.store, stream.topic, kafka)


def test_brokers_without_transactions_are_named(
    broker: KafkaBroker, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(one: KafkaBroker) -> list[str]:
        config: Any = SimpleNamespace(kafka=Kafka(bootstrap_servers=(one.bootstrap,)), kafka_topics={})
        return check_kafka(config)

    assert checked(broker) == [f"1 brokers answer at {broker.bootstrap}, and take transactions"]
    stream, factor = outbox(tmp_path / "lake", "demo.shop.without"), "transaction.state.log.replication.factor="
    publish(stream, "pass-000000000001", notes(0, 10))
    usual = servers_kafka.properties
    monkeypatch.setattr(servers_kafka, "properties", lambda *told: usual(*told).replace(f"{factor}1", f"{factor}3"))
    with KafkaBroker(tmp_path / "kafka", BrokerSettings().on_free_ports(), cache) as wrong:
        with pytest.raises(CheckError, match=r"begins no transactions: .*transaction\.state\.log"):
            checked(wrong)
        impatient = KafkaSettings((wrong.bootstrap,), answer_timeout_s=2.0)
        with (
            KafkaTopics(impatient) as kafka,
            pytest.raises(BrokerUnavailableError, match=r"topic demo.shop.without: Timed out"),
        ):
            relay(stream.store, stream.topic, kafka)
