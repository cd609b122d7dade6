"""A table that is dropped and created again under its name: its stream goes on, behind all of the old one."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ringsync.changes.identity import TableVersion
from ringsync.config import load_config
from ringsync.cql.types import Native
from ringsync.ledger.passes import (
    Pass,
    TableReplacedError,
    get_pass,
    mark,
    pass_folder,
    pass_numbers,
    put_pass,
)
from ringsync.ledger.table_versions import latest_version, version_of
from ringsync.ledger.topic_owners import take_topic, topic_owners
from ringsync.schema.table import Column, TableSchema
from ringsync.state.bootstrap import SCANNING
from ringsync.steps.application import Application
from ringsync.steps.bootstrap.prepare import begin_pass
from ringsync.steps.late.late_pass import LatePasses
from ringsync.steps.passes.follow_ups import FollowUps, publish_passes, put_schemas
from ringsync.steps.sync_plan import SyncPlan, SyncTable
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, bootstrap_topic
from tests.mortal_store import IMMORTAL, Killed, MortalStore
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import NOW, RING, TABLE
from tests.stream_model import of_the_last_table

TOPIC = "test.shop.t"
OLD = replace(TABLE, table_id="a" * 32)
NEW = replace(
    TABLE,
    table_id="b" * 32,
    columns=(*TABLE.columns[:2], Column("w", "regular", Native("text"))),
)
THIRD = replace(TABLE, table_id="c" * 32)


class Lake:
    """A store, in which tables of one name follow each other."""

    def __init__(self, folder: Path, store: ObjectStore | None = None) -> None:
        self.conf = folder / "ringsync.yaml"
        document = {"server_name": "test", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "lake"}}
        self.conf.write_text(yaml.safe_dump({**document, "sync": {"after_image": "none"}}))
        self.config = load_config(self.conf)
        self.store = store or LocalStore(folder / "lake")
        self.announced: list[str] = []

    @property
    def application(self) -> Application:
        return Application("late", str(self.conf), self.config, self.store, None, "run", argparse.Namespace())

    def version(self, table: TableSchema) -> TableVersion:
        return version_of(self.store, table)

    def followed(self, table: TableSchema) -> SyncTable:
        return SyncTable(self.version(table), TOPIC, False)

    def process(self, table: TableSchema) -> Process:
        return Process(self, table)

    def messages(self) -> list[tuple[str, int]]:
        """Of the stream in its order: the table's id, and the row's ``seq``."""
        stream = FileStream(self.store, TOPIC)
        found = [message for bucket in stream.folders() for message in stream.read(bucket)]
        return [(one["value"]["source"]["table_id"], one["key"]["seq"]) for one in found]


class Process:
    """Who publishes the changes of a table."""

    def __init__(self, lake: Lake, table: TableSchema) -> None:
        self.lake, self.table = lake, table
        announce = lambda topic, bucket: lake.announced.append(bucket)  # noqa: E731
        self.follow_ups = FollowUps(lake.application, lake.followed(table), None, None, announce)  # type: ignore[arg-type]
        self.follow_ups.ring = RING
        self.late = LatePasses(lake.application, None, None)  # type: ignore[arg-type]
        self.late._plan = SyncPlan(NOW, RING.ring.hosts, {}, ())
        self.late._follow_ups = {table.table_id: self.follow_ups}

    def commit(self, seq: int) -> None:
        """Make a pass of one row, of which nobody sees anything yet."""
        write = Write(1, seq, "x", NOW.start * 1000 + seq)
        assert self.late.publish(self.table, change_rows([write], self.table)).published == 1

    def publish(self, seq: int) -> None:
        self.commit(seq)
        self.follow_ups.catch_up()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def test_the_new_tables_passes_come_behind_all_of_the_old_ones(lake: Lake) -> None:
    old = lake.process(OLD)
    for seq in (1, 2):
        old.publish(seq)
    old.commit(3)
    for table, first in ((NEW, 4), (THIRD, 6)):
        again = lake.process(table)
        again.publish(first)
        lake.process(table).publish(first + 1)
    ids = [OLD.table_id] * 3 + [NEW.table_id] * 2 + [THIRD.table_id] * 2
    assert lake.messages() == list(zip(ids, range(1, 8), strict=True))
    assert lake.announced == FileStream(lake.store, TOPIC).folders(), "Kafka is told of them in their order"


def test_a_consumer_in_order_keeps_the_rows_of_the_new_table_only(lake: Lake) -> None:
    lake.process(OLD).publish(1)
    lake.process(NEW).publish(2)
    stream = FileStream(lake.store, TOPIC)
    old, new = (list(stream.read(bucket)) for bucket in stream.folders())
    assert of_the_last_table([*old, *new, *old]) == new, "a partition of Kafka that is behind changes nothing"


def test_schemas_of_the_new_table_are_a_version_of_their_own(lake: Lake) -> None:
    versions = [put_schemas(lake.store, lake.config, lake.followed(table), TOPIC) for table in (OLD, NEW, THIRD)]
    assert versions == [1, 2, 3]


def test_who_still_serves_the_old_table_is_told_and_adds_nothing(lake: Lake) -> None:
    old = lake.process(OLD)
    old.publish(1)
    asleep = Pass(2, "changes", OLD.table_id, 1)
    lake.process(NEW).publish(2)
    for late in (lambda: old.publish(3), lambda: old.follow_ups.refresh(), lambda: lake.process(OLD)):
        with pytest.raises(TableReplacedError, match=f"table id {OLD.table_id} was dropped"):
            late()
    assert not put_pass(lake.store, asleep), "its number was taken"
    with pytest.raises(TableReplacedError):
        put_pass(lake.store, replace(asleep, number=3))
    for kind in ("begin", "cutover"):
        with pytest.raises(TableReplacedError):
            mark(lake.store, OLD.table_id, kind, "b1", 1, check=lambda: None)  # type: ignore[arg-type]
    assert [seq for _, seq in lake.messages()] == [1, 2]


def test_what_waits_for_a_bootstrap_of_the_old_table_comes_before_the_new_ones(lake: Lake) -> None:
    old = lake.process(OLD)
    old.publish(1)
    mark(lake.store, OLD.table_id, "begin", "b1", 1)
    old.publish(2)
    assert [seq for _, seq in lake.messages()] == [1]
    new = lake.process(NEW)
    mark(lake.store, NEW.table_id, "begin", "b2", 1)
    new.publish(3)
    publish_passes(lake.store, lake.config, lake.followed(NEW))
    assert [seq for _, seq in lake.messages()] == [1, 2]
    mark(lake.store, NEW.table_id, "cutover", "b2", 1)
    new.publish(4)
    assert lake.messages() == [(OLD.table_id, 1), (OLD.table_id, 2), (NEW.table_id, 3), (NEW.table_id, 4)]
    assert FileStream(lake.store, bootstrap_topic(TOPIC)).folders() == []


def test_a_table_between_that_nobody_has_planned_keeps_nothing_back(lake: Lake) -> None:
    """Its bootstrap had begun, so that it has the topic; but of its versions nobody had heard when it was dropped."""
    old = lake.process(OLD)
    old.publish(1)
    mark(lake.store, OLD.table_id, "begin", "b1", 1)
    old.publish(2)
    old.commit(3)
    take_topic(lake.store, TOPIC, NEW.table_id, 1)
    mark(lake.store, NEW.table_id, "begin", "b2", 1, check=lambda: None)
    lake.process(THIRD).publish(4)
    assert lake.messages() == [*((OLD.table_id, seq) for seq in (1, 2, 3)), (THIRD.table_id, 4)]
    assert FileStream(lake.store, bootstrap_topic(TOPIC)).folders() == []


def test_a_bootstrap_that_begins_makes_its_table_known(lake: Lake) -> None:
    """Or what it has published would not become visible, were the table dropped before anybody has planned it."""
    bootstrap: Any = SimpleNamespace(id="b1", state=SCANNING)
    plan: Any = SimpleNamespace(scan=SimpleNamespace(table=NEW), topic=TOPIC, bootstrap=bootstrap)
    begin_pass(lake.store, plan, bootstrap, lambda: None)
    known = latest_version(lake.store, NEW.table_id)
    assert known is not None
    assert known.table == NEW


def lives(folder: Path) -> Iterator[int]:
    """Run it with ever more writes before the kill, until nobody is killed; each time somebody repeats it."""
    for writes in range(10**6):
        (folder / f"{writes}").mkdir()
        lake = Lake(folder / f"{writes}", MortalStore(folder / f"{writes}" / "lake"))
        old = lake.process(OLD)
        old.publish(1)
        mark(lake.store, OLD.table_id, "begin", "b1", 1)
        old.publish(2)
        old.commit(3)
        lake.store.left = writes  # type: ignore[attr-defined]
        try:
            lake.process(NEW).publish(4)
            killed = False
        except Killed:
            killed = True
        lake.store.left = IMMORTAL  # type: ignore[attr-defined]
        if killed:
            # Whoever serves the old table still does, until he is told.
            with suppress(TableReplacedError):
                old.publish(5)
        third = lake.process(THIRD) if writes % 2 else lake.process(NEW)
        third.publish(6)
        told = lake.messages()
        ids = [table_id for table_id, _ in told]
        assert ids == sorted(ids), (writes, told)
        assert {seq for _, seq in told} >= {1, 2, 3, 6}, (writes, told)
        assert len(set(told)) == len(told), (writes, told)
        yield writes
        if not killed:
            return


def test_a_kill_between_any_two_writes_loses_and_disorders_nothing(tmp_path: Path) -> None:
    assert max(lives(tmp_path)) > 10


def test_many_at_once_come_to_one_order(lake: Lake) -> None:
    old = lake.process(OLD)
    old.publish(1)
    errors: list[BaseException] = []

    def serve_old() -> None:
        try:
            for seq in range(100, 140):
                old.publish(seq)
        except TableReplacedError:
            pass
        except BaseException as error:
            errors.append(error)

    def serve_new(seq: int) -> None:
        try:
            time.sleep(0.05)
            lake.process(NEW).publish(seq)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve_old)]
    threads += [threading.Thread(target=serve_new, args=(200 + n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lake.process(NEW).publish(300)
    assert not errors
    told = lake.messages()
    assert [table_id for table_id, _ in told] == sorted(table_id for table_id, _ in told)
    committed = [
        n for n in pass_numbers(lake.store, OLD.table_id) if get_pass(lake.store, OLD.table_id, n).kind == "changes"
    ]
    assert sum(table_id == OLD.table_id for table_id, _ in told) == len(committed)
    assert {seq for _, seq in told} >= {200, 201, 202, 203, 300}
    assert len(topic_owners(lake.store, TOPIC)) == 2


def test_a_stream_of_a_version_before_goes_on(lake: Lake) -> None:
    """There nobody has said whose it is."""
    old = lake.process(OLD)
    for seq in (1, 2):
        old.publish(seq)
    lake.store.delete(f"streams/{TOPIC}/tables/000001.json")
    lake.process(NEW).publish(3)
    assert [table_id[0] for table_id, _ in lake.messages()] == ["a", "a", "b"]


def test_the_stream_of_a_version_before_stays_the_tables_own(lake: Lake) -> None:
    old = lake.process(OLD)
    old.publish(1)
    lake.store.delete(f"streams/{TOPIC}/tables/000001.json")
    lake.process(OLD).publish(2)
    assert FileStream(lake.store, TOPIC).folders() == [pass_folder(1), pass_folder(2)]


def test_a_node_that_has_not_heard_of_the_new_table_does_not_bring_the_old_one_back(lake: Lake) -> None:
    """Ids that Cassandra gives tell when the table was created."""
    older, newer = "1d3c5e005c9211f08de9f3bd2ad0d1ff", "2d3c5e005c9211f08de9f3bd2ad0d1ff"
    take_topic(lake.store, TOPIC, newer, 1)
    with pytest.raises(TableReplacedError, match=f"table id {older} .* a newer table"):
        take_topic(lake.store, TOPIC, older, 1)
    assert [one.table_id for one in topic_owners(lake.store, TOPIC)] == [newer]
