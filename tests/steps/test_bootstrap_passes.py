"""The rows of a bootstrap in the stream: one order with all that is published before, meanwhile and after."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ringsync.changes.identity import TableVersion
from ringsync.config import Config, load_config
from ringsync.ledger.followed import followed_tables
from ringsync.ledger.passes import BootstrapReplacedError, Pass, get_pass, mark, pass_folder, pass_numbers, put_pass
from ringsync.status import STALE_AFTER_S
from ringsync.steps.application import Application, StepError
from ringsync.steps.bootstrap import drain as bootstrap_drain
from ringsync.steps.bootstrap.drain import KafkaFeed, is_followed
from ringsync.steps.loop import put_status
from ringsync.steps.passes.follow_ups import publish_passes
from ringsync.steps.passes.sink_feed import SinkFeed
from ringsync.steps.sync_plan import SyncTable
from ringsync.storage.local import LocalStore
from ringsync.storage.port import Stat
from ringsync.streams.files import FileStream, Part, bootstrap_topic
from ringsync.streams.messages import envelope_schema, key_schema
from ringsync.streams.part_index import MessageBlock
from ringsync.streams.relay import relay
from ringsync.streams.sink import KAFKA, BrokerUnavailableError
from tests.mortal_store import IMMORTAL, Killed, MortalStore
from tests.streams.outbox import NOTES, notes

TOPIC = "test.shop.notes"
TABLE_ID = NOTES.table_id
TABLE = SyncTable(TableVersion.first(NOTES), TOPIC, by_arrival=False)


class Table:
    """A table that is followed and copied, without cluster and Spark."""

    def __init__(self, folder: Path) -> None:
        document = {"server_name": "test", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "lake"}}
        self.path = folder / "ringsync.yaml"
        self.path.write_text(yaml.safe_dump(document))
        self.config: Config = load_config(self.path)
        self.store = MortalStore(folder / "lake")
        schemas = key_schema(NOTES, "test", "exact"), envelope_schema(NOTES, "test", "exact")
        for topic in (TOPIC, bootstrap_topic(TOPIC)):
            FileStream(self.store, topic).put_schemas(1, *schemas)

    def part(self, topic: str, bucket: str, first: int) -> Part:
        writer = FileStream(self.store, topic).open_part(bucket, f"part-{first}", 1)
        writer.add(notes(first, 1))
        return writer.finish()

    def changes(self, first: int, bootstrap: str = "") -> int:
        """A pass with the message of one change."""
        number = max(pass_numbers(self.store, TABLE_ID), default=0) + 1
        part = self.part(bootstrap_topic(TOPIC) if bootstrap else TOPIC, pass_folder(number), first)
        assert put_pass(self.store, Pass(number, "changes", TABLE_ID, 1, bootstrap, parts=(part,)))
        return number

    def begin(self, bootstrap: str) -> int:
        return mark(self.store, TABLE_ID, "begin", bootstrap, 1)

    def rows(self, bootstrap: str, begin: int, first: int) -> int:
        part = self.part(TOPIC, pass_folder(begin), first)
        return mark(self.store, TABLE_ID, "rows", bootstrap, 1, (part,), topic=TOPIC)

    def cutover(self, bootstrap: str) -> int:
        return mark(self.store, TABLE_ID, "cutover", bootstrap, 1)

    def publish(self) -> list[str]:
        """What the closer does after each pass, and a bootstrap at its end; gives the buckets that it announces."""
        announced: list[str] = []
        publish_passes(self.store, self.config, TABLE, lambda topic, bucket: announced.append(bucket))
        return announced

    def messages(self) -> list[str]:
        """The notes of all messages of the stream, in its order."""
        stream = FileStream(self.store, TOPIC)
        return [m["value"]["after"]["note"].split()[1] for b in stream.folders() for m in stream.read(b)]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


class Kafka:
    """Keeps what it is sent."""

    name = KAFKA
    queued_bytes = 0
    sent: list[str]

    def __init__(self) -> None:
        self.waiting = self.confirmed = 0
        self.waits_since = math.inf

    def topic_of(self, stream: str) -> str:
        return stream

    def open(self, topic: str) -> bool:
        return True

    def is_open(self, topic: str) -> bool:
        return False

    def check_answers(self, stop: Any) -> None:
        pass

    def give_up(self, topic: str) -> None:
        pass

    def close(self) -> None:
        pass

    def send(self, topic: str, messages: MessageBlock, schemas: Any) -> None:
        self.waiting += len(messages.keys)
        Kafka.sent += [value.partition(b"note ")[2].partition(b" ")[0].decode() for value in messages.values]

    def is_long(self, topic: str) -> bool:
        return False

    def confirm(self, topic: str) -> int:
        found, self.waiting = self.waiting, 0
        self.confirmed += found
        return found


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> type[Kafka]:
    Kafka.sent = []
    return Kafka


def live_through(table: Table, publish: Any) -> None:
    """A table with changes is copied, twice; the second time while changes of a bootstrap that never ended wait."""
    table.changes(1)
    publish()
    begin = table.begin("b1")
    table.changes(3, "b1")
    publish()
    table.rows("b1", begin, 2)
    table.changes(4, "b1")
    publish()
    table.cutover("b1")
    publish()
    table.changes(5)
    table.begin("b2")
    table.changes(6, "b2")
    publish()
    begin = table.begin("b3")
    table.changes(8, "b3")
    publish()
    table.rows("b3", begin, 7)
    publish()
    table.changes(9, "b3")
    table.cutover("b3")
    table.changes(10)
    publish()


IN_ORDER = [str(n) for n in range(1, 11)]


def test_rows_are_behind_what_was_published_before_and_before_what_waits(table: Table) -> None:
    live_through(table, table.publish)
    assert table.messages() == IN_ORDER
    assert FileStream(table.store, bootstrap_topic(TOPIC)).folders() == []


def test_kafka_has_the_order_of_the_stream(table: Table, kafka: type[Kafka]) -> None:
    """The closer announces what becomes visible; the bootstrap's applications make rows visible, and tell nobody."""
    with SinkFeed(table.store, Kafka) as feed:
        feed.watch(TOPIC)
        known: set[int] = set()

        def closer() -> None:
            publish_passes(table.store, table.config, TABLE)  # as another application that was faster
            for number in pass_numbers(table.store, TABLE_ID):
                if number not in known:
                    known.add(number)
                    for bucket in announced_of(table, number):
                        feed.announce(TOPIC, bucket)

        live_through(table, closer)
        deadline = time.monotonic() + 60
        while len(kafka.sent) < len(IN_ORDER) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert kafka.sent == IN_ORDER


def test_a_bucket_that_appears_while_the_stream_is_listed_is_not_overtaken(
    table: Table, kafka: type[Kafka], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing is past the place of the first when both are published."""
    listed = LocalStore.list
    table.publish()
    passed_by: list[bool] = []

    def slow(store: LocalStore, prefix: str = "", start: str = "") -> list[Stat]:
        found = listed(store, prefix, start)
        if prefix != f"streams/{TOPIC}/" or passed_by:
            return found
        passed_by.append(True)
        table.changes(1)
        table.changes(2)
        table.publish()
        return [stat for stat in listed(store, prefix, start) if pass_folder(1) not in stat.key]

    monkeypatch.setattr(LocalStore, "list", slow)
    for _ in range(2):
        relay(table.store, TOPIC, Kafka())
    assert kafka.sent == ["1", "2"]


def announced_of(table: Table, number: int) -> list[str]:
    from ringsync.steps.passes.follow_ups import publish_pass

    found: list[str] = []
    passes = {known: get_pass(table.store, TABLE_ID, known) for known in pass_numbers(table.store, TABLE_ID)}
    publish_pass(table.store, table.config, TABLE, passes, number, lambda topic, bucket: found.append(bucket))
    return found


def test_a_relay_in_between_keeps_the_order(table: Table, kafka: type[Kafka]) -> None:
    """One that looks through the whole stream after each step, as that of a restarted closer does."""

    def publish() -> None:
        table.publish()
        relay(table.store, TOPIC, Kafka())

    live_through(table, publish)
    assert kafka.sent == IN_ORDER == table.messages()


def test_who_is_killed_anywhere_comes_to_the_same_end(tmp_path: Path) -> None:
    for lives in range(10**6):
        folder = tmp_path / str(lives)
        folder.mkdir()
        table = Table(folder)
        table.changes(1)
        begin = table.begin("b1")
        table.changes(3, "b1")
        table.publish()

        def end(table: Table = table, begin: int = begin) -> None:
            table.rows("b1", begin, 2)
            table.publish()
            table.cutover("b1")
            table.publish()

        table.store.left = lives
        try:
            end()
        except Killed:
            table.store.left = IMMORTAL
            end()
            assert table.messages() == ["1", "2", "3"], lives
            assert [get_pass(table.store, TABLE_ID, n).kind for n in pass_numbers(table.store, TABLE_ID)] == [
                *("changes", "begin", "changes", "rows", "cutover")
            ]
        else:
            assert lives > 10, "nothing was killed"
            return


def test_a_bootstrap_that_was_replaced_or_cancelled_publishes_nothing(table: Table) -> None:
    first = table.begin("b1")
    second = table.begin("b2")
    for late in (lambda: table.rows("b1", first, 1), lambda: table.cutover("b1")):
        with pytest.raises(BootstrapReplacedError, match="b1 was replaced by b2"):
            late()
    cancelled = table.cutover("b2")
    with pytest.raises(BootstrapReplacedError, match="b2 was cancelled"):
        table.rows("b2", second, 1)
    assert table.cutover("b2") == cancelled
    table.changes(2)
    assert table.cutover("b2") == cancelled
    table.publish()
    assert table.messages() == ["2"]


def test_what_a_version_before_has_left_is_read(table: Table) -> None:
    """It published rows under the bootstrap's name, without a pass."""
    stream = FileStream(table.store, TOPIC)
    table.begin("b1")
    table.changes(2, "b1")
    bucket = "bootstrap-20260101T000000Z-aaaa"
    stream.publish(bucket, [table.part(TOPIC, bucket, 1)])
    table.publish()
    table.cutover("b1")
    table.publish()
    assert table.messages() == ["1", "2"]


def test_two_move_what_waits_at_once(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain and the closer: the other one finishes while this one reads."""
    table.begin("b1")
    number = table.changes(1, "b1")
    table.publish()
    table.cutover("b1")
    waiting, stream = FileStream(table.store, bootstrap_topic(TOPIC)), FileStream(table.store, TOPIC)
    one = get_pass(table.store, TABLE_ID, number)
    looked: list[Any] = []

    class Slower(FileStream):
        def parts(self, bucket: str) -> list[Part] | None:
            found = super().parts(bucket)
            if not looked:
                looked.append(found)
                waiting.move(bucket, one.parts, stream)
            return found

    waiting.move(one.folder, one.parts, Slower(table.store, TOPIC))
    assert (looked, table.messages()) == ([None], ["1"])


def test_the_drain_feeds_kafka_where_no_loop_does(
    table: Table, kafka: type[Kafka], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a loop is at work, and follows the table, its status says."""
    monkeypatch.setattr(bootstrap_drain, "sink_of", lambda _: Kafka)
    begin = table.begin("b1")
    table.rows("b1", begin, 1)
    table.cutover("b1")
    table.publish()
    document = yaml.safe_load(table.path.read_text())
    table.path.write_text(yaml.safe_dump({**document, "kafka": {"bootstrap_servers": ["x:1"]}}))
    given: tuple[Any, ...] = (load_config(table.path), table.store, None, "run", argparse.Namespace())
    application = Application("bootstrap_drain", str(table.path), *given)
    plan: Any = SimpleNamespace(topic=TOPIC, scan=SimpleNamespace(table=NOTES))
    told = {"tables": {NOTES.full_name: {"table_id": TABLE_ID}}}
    put_status(table.store, "bucket_close", "close", told)
    assert (KafkaFeed(application).feed(plan), kafka.sent) == (None, [])
    assert followed_tables(table.store).keys() == {TABLE_ID}, "so that the loop does it, should it end or be killed now"
    put_status(table.store, "bucket_close", "close", {"tables": {}})
    assert (KafkaFeed(application).feed(plan), kafka.sent) == (1, ["1"])
    assert KafkaFeed(application).feed(plan) == 0
    assert is_followed(table.store, TABLE_ID, time.time() + 2 * STALE_AFTER_S) is False

    def refuse(kafka: Kafka, topic: str) -> int:
        raise BrokerUnavailableError("Kafka at x:1 is not available")

    table.changes(2)
    table.publish()
    monkeypatch.setattr(Kafka, "confirm", refuse)
    with pytest.raises(StepError, match=r"x:1 is not available\. The replica and the file stream are complete"):
        KafkaFeed(application).feed(plan)
