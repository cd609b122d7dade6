"""What bootstraps leave that came to nothing: it goes once nobody can publish it any more, removed by whoever comes."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.ledger.passes import BootstrapReplacedError, mark, pass_folder
from ringsync.ledger.table_versions import version_of
from ringsync.replica.delta_log import ConcurrentCommitError, read_snapshot
from ringsync.replica.folders import base_folder
from ringsync.schema.table import TableSchema
from ringsync.state.bootstrap import CANCELLED, PUBLISHING, SCANNING, Bootstrap, CommittedRange, LostOwnershipError
from ringsync.status import BOOTSTRAPS, read_statuses
from ringsync.steps.application import Application, StepError
from ringsync.steps.bootstrap import leftovers as bootstrap_leftovers
from ringsync.steps.bootstrap import prepare as bootstrap_prepare
from ringsync.steps.bootstrap.cancel import end
from ringsync.steps.bootstrap.publish import files_of, publish
from ringsync.streams.files import FileStream, StreamDamagedError
from tests.mortal_store import IMMORTAL, Killed, MortalStore
from tests.steps.test_bootstrap_begins_back import rows_of_replica
from tests.steps.test_bootstrap_marks import COPIED, TOPIC, Lake, now_ms
from tests.steps.test_close import TABLE

ZERO, A, B, C = (f"20260101T00000{n}Z-0000000{n}" for n in range(4))
FOLDER = base_folder(TABLE.keyspace, TABLE.name)


class Replaced(Exception):
    """Another bootstrap is the table's."""


class State:
    """The conditional writes of ``cdc.bootstrap``, of one table."""

    def __init__(self, latest: Bootstrap) -> None:
        self.latest = latest

    def alive(self, bootstrap_id: str) -> None:
        """Who sleeps says nothing."""

    def begin(self, bootstrap: Bootstrap, instead_of: str | None) -> bool:
        if self.latest.id != instead_of:
            raise Replaced
        self.latest = bootstrap
        return True

    def publishing(self, bootstrap_id: str) -> None:
        """Of one that is neither cancelled nor replaced."""
        if self.latest.id != bootstrap_id or self.latest.state not in (SCANNING, PUBLISHING):
            raise LostOwnershipError(bootstrap_id)
        self.latest = replace(self.latest, state=PUBLISHING)

    def cancel(self) -> bool:
        if self.latest.state not in (SCANNING, CANCELLED):
            return False
        self.latest = replace(self.latest, state=CANCELLED)
        return True


class World(Lake):
    """A table that has a replica; bootstrap A has copied all of it again, and nothing is published of that.

    :ivar ledger: what is committed of each bootstrap
    :ivar changed: ids of the rows that were changed
    """

    store: MortalStore

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ledger: dict[str, list[CommittedRange]] = {}
        self.change(1)
        self.state = State(replace(self.plan(ZERO).bootstrap, specification=specification(TABLE)))
        self.finish(ZERO)
        self.change(2)
        self.changed = [1, 2]
        self.copy(A)

    def copy(self, name: str) -> int:
        """What ``prepare`` and ``scan`` do before they publish anything."""
        begin = self.prepare(name)
        if name not in self.ledger:
            left, self.store.left = self.store.left, IMMORTAL
            self.ledger[name] = self.scan(name, begin)
            self.store.left = left
        return begin

    def publish(self, name: str, check: Callable[[], object] = lambda: None) -> None:
        """What ``scan`` does at its end."""

        def may_publish() -> None:
            self.state.publishing(name)
            check()

        begin = self.copy(name)
        publish(self.store, self.config, self.plan(name), may_publish, self.ledger[name], begin, "")

    def prepare(self, name: str, table: TableSchema = TABLE) -> int:
        """What ``prepare`` does, or who repeats it after a kill, with ``restart`` the first time."""
        if self.state.latest.id != name:
            options = argparse.Namespace()
            app = Application("bootstrap_prepare", str(self.conf), self.config, self.store, None, "run", options)
            scan: Any = SimpleNamespace(table=table, now=int(time.time()))
            state: Any = self.state
            bootstrap_prepare.begin(app, state, scan, specification(table), self.state.latest)
            self.state.latest = replace(self.state.latest, id=name)

        def check() -> None:
            if self.state.latest.id != name:
                raise Replaced

        plan = self.plan(name)
        plan.scan.table = table
        number = bootstrap_prepare.begin_pass(self.store, plan, self.state.latest, check)
        bootstrap_prepare.clear_away(self.store, plan, number)
        return number

    def cancel(self) -> None:
        """``cdcservice bootstrap --cancel``."""
        assert self.state.cancel()
        end(self.config, self.store, TABLE, self.state.latest.id, lambda: None)

    def finish(self, name: str) -> None:
        self.publish(name)
        self.cutover(name)

    def files(self, name: str) -> list[str]:
        """What is there of a bootstrap."""
        parts = [stat.key for stat in self.store.list(f"streams/{TOPIC}/") if f"-{name}-" in stat.key]
        return [stat.key for stat in self.store.list(f"{FOLDER}/part-{name}-")] + parts

    def check_tidy(self) -> None:
        """Nothing is there of a bootstrap that nothing names, once another was completed."""
        base = read_snapshot(self.store, FOLDER)
        in_base = {f"{FOLDER}/{file['path']}" for file in base.files}
        once = tuple(f"{FOLDER}/part-{one.removeprefix('bootstrap-')}-" for one in base.transactions)
        for stat in self.store.list(f"{FOLDER}/part-"):
            assert stat.key in in_base or stat.key.startswith(once)
        published = {f"streams/{TOPIC}/{bucket}" for bucket in FileStream(self.store, TOPIC).folders()}
        for stat in self.store.list(f"streams/{TOPIC}/pass-"):
            assert stat.key.rpartition("/")[0] in published

    def check_goes_on(self) -> None:
        """The replica can be read, and the stream goes on."""
        for file in read_snapshot(self.store, FOLDER).files:
            assert self.store.stat(f"{FOLDER}/{file['path']}"), file["path"]
        self.close.refresh()
        self.changed.append(len(self.changed) + 1)
        self.change(self.changed[-1])
        assert {row for row, _ in rows_of_replica(self)} == {*self.changed, COPIED}
        # A bootstrap whose base nobody has made tells once more what it may have missed.
        assert [row for row in dict.fromkeys(self.messages()) if row != COPIED] == self.changed


def specification(table: TableSchema) -> str:
    return json.dumps({"table_id": table.table_id})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def worlds(tmp_path: Path) -> Iterator[tuple[int, World]]:
    """As many as are wanted, and the number of writes after which something happens in each."""
    for number in itertools.count():
        folder = tmp_path / f"{number}"
        folder.mkdir(parents=True)
        yield number, World(folder)


REFUSED = (BootstrapReplacedError, LostOwnershipError, ConcurrentCommitError)


def test_what_a_vacuum_has_removed_before_it_was_published_is_noticed(world: World) -> None:
    """To Delta, files that no version names are left over."""
    before = rows_of_replica(world)
    lost = next(key for key in world.files(A) if key.startswith(FOLDER))
    world.store.delete(lost)
    with pytest.raises(StepError, match=f"1 files of this bootstrap are gone, the first is part-{A}-.* VACUUM"):
        world.publish(A)
    assert rows_of_replica(world) == before
    world.finish(B)
    world.check_goes_on()


def test_who_wakes_up_behind_its_check_publishes_nothing(world: World) -> None:
    before = world.base_version()
    with pytest.raises(BootstrapReplacedError, match=f"{A} was replaced by {B}"):
        world.publish(A, lambda: world.prepare(B))
    assert (world.base_version(), world.files(A)) == (before, [])
    world.cancel()
    world.check_goes_on()


@pytest.mark.parametrize("fate", ["begun", "cancelled", "finished"])
def test_who_sleeps_anywhere_in_publishing_does_no_harm(tmp_path: Path, fate: str) -> None:
    """Another begins meanwhile, and comes to this."""
    for number, world in worlds(tmp_path):

        def others(world: World = world) -> None:
            world.prepare(B)
            if fate == "cancelled":
                world.cancel()
            elif fate == "finished":
                world.finish(B)
            if fate != "begun":
                world.check_goes_on()

        world.store.left, world.store.others = number, others
        with suppress(*REFUSED):
            world.publish(A)
        if world.store.others:
            assert number > 3, "nobody slept"
            return
        if fate == "begun":
            world.finish(B)
        world.check_goes_on()
        world.finish(C)
        world.check_goes_on()
        world.check_tidy()


def test_who_sleeps_anywhere_in_preparing_removes_nothing_of_the_next(tmp_path: Path) -> None:
    for number, world in worlds(tmp_path):
        world.store.left, world.store.others = number, partial(world.copy, C)
        with suppress(Replaced):
            world.prepare(B)
        if world.store.others:
            assert number > 3, "nobody slept"
            return
        assert len(world.files(C)) == 3
        world.finish(C)
        world.check_goes_on()
        world.check_tidy()


def test_who_has_listed_files_and_sleeps_removes_nothing_of_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or lists them when the next is at work."""
    begin = world.prepare(B)
    plan, asked = world.plan(B), bootstrap_leftovers.topic_owners
    sleeps = [True]

    def slow(store: Any, topic: str) -> Any:
        if sleeps and sleeps.pop():
            world.copy(C)
        return asked(store, topic)

    world.scan(A, begin - 1)  # a task of it that nobody has told
    monkeypatch.setattr(bootstrap_leftovers, "topic_owners", slow)
    bootstrap_prepare.clear_away(world.store, plan, begin)
    there = world.files(C)
    assert len(there) == 3
    bootstrap_prepare.clear_away(world.store, plan, begin)
    assert world.files(C) == there


@pytest.mark.parametrize(("published", "fate"), [(False, "finished"), (True, "cancelled")])
def test_who_is_killed_anywhere_leaves_what_the_next_one_removes(tmp_path: Path, published: bool, fate: str) -> None:
    """In publishing it or behind its scan, in beginning another, and in cancelling or finishing that."""
    for number, world in worlds(tmp_path):
        world.store.left = number
        try:
            if published:
                world.publish(A)
            world.copy(B)
            if fate == "finished":
                world.finish(B)
            else:
                world.cancel()
        except Killed:
            world.store.left = IMMORTAL
            # It is done again, or another begins at once.
            if number % 2 and fate == "finished":
                world.finish(B)
            elif number % 2 and world.state.latest.state == CANCELLED:
                world.cancel()
            world.finish(C)
        else:
            assert number > 4, "nobody was killed"
            return
        world.check_goes_on()
        world.check_tidy()


def test_a_cancel_that_was_killed_behind_its_state_is_tidied_up_by_the_next(world: World) -> None:
    assert world.state.cancel()
    assert len(world.files(A)) == 3
    world.prepare(B)
    assert world.files(A) == []


def test_a_table_that_was_created_again_removes_what_the_old_one_has_left(world: World) -> None:
    bootstrap_prepare.say(world.store, world.plan(A), "scan")
    new = replace(TABLE, table_id="b" * 32)
    version_of(world.store, new)
    world.prepare(B, new)
    assert world.files(A) == []
    assert not any(key.startswith(BOOTSTRAPS) for key in read_statuses(world.store))
    assert [row for row in world.messages() if row != COPIED] == [1, 2]


def test_what_others_write_beside_it_stays(world: World) -> None:
    """Files of Spark, and parts of changes that wait to become visible."""
    keys = [f"{FOLDER}/part-00000-7a1d6b1e-0000-4000-8000-000000000000-c000.snappy.parquet"]
    keys += [f"streams/{TOPIC}/{pass_folder(1)}/0badcafe-0000-00000000.avro", f"streams/{TOPIC}/schemas/part-1.avsc"]
    for key in keys:
        world.store.put(key, b"x")
    world.prepare(B)
    assert all(world.store.stat(key) for key in keys)
    assert len(world.files(ZERO)) == 3


@pytest.mark.parametrize("published", [False, True])
def test_rows_whose_parts_are_gone_wait_for_the_next_bootstrap_only(
    world: World, published: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A version before removed parts and let the pass be put that names them."""
    parts = files_of(world.ledger[A])[1]
    mark(world.store, TABLE.table_id, "rows", A, now_ms(), tuple(parts), topic=TOPIC)
    for key in world.files(A)[1:]:
        world.store.delete(key)
    with pytest.raises(StreamDamagedError, match=r"is not there.*shop.t .* goes on when it is bootstrapped anew"):
        world.close.catch_up()
    if published:
        world.state.publishing(A)
    world.copy(B)
    world.change(3)
    world.finish(B)
    assert f"rows of bootstrap {A} of shop.t" in capsys.readouterr().out
    world.change(4)
    assert world.messages() == [1, COPIED, 2, COPIED, 3, 4]
    assert {row for row, _ in rows_of_replica(world)} == {1, 2, 3, 4, COPIED}
