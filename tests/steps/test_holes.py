"""A table that loses cdc, or that the configuration leaves out, and that comes back has a gap until it is repaired."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.schema import NodeTables
from ringsync.ledger.archive import archive_segment
from ringsync.ledger.dropped_tables import mark_dropped
from ringsync.ledger.gaps import Gaps, close_gap, note_verified
from ringsync.ledger.left_tables import left_tables, when_left
from ringsync.ledger.table_versions import CdcBegun
from ringsync.ring.ring import Host, Replication
from ringsync.schema.table import Schema
from ringsync.service.expected import CLOSE
from ringsync.service.lost import look_for_lost
from ringsync.service.problem import Kind, Problem
from ringsync.steps import holes, sync_plan
from ringsync.steps.stage.switched_off import note_switched_off
from ringsync.steps.sync_plan import SyncPlan, interval_at
from ringsync.storage.local import LocalStore
from tests.steps.test_close import TABLE

MINUTE_MS = 60_000
HOST = Host("a", "127.0.0.1", 9042, "dc", "r1", (0,), True)
OTHER = replace(TABLE, name="other", table_id="f" * 32)
NAME = TABLE.full_name


@dataclass
class World:
    """A cluster with two tables, whose plans are made once in a minute."""

    store: LocalStore
    now_ms: int = int(time.time() * 1000) // MINUTE_MS * MINUTE_MS - 100 * MINUTE_MS
    with_cdc: set[str] = field(default_factory=lambda: {TABLE.table_id, OTHER.table_id})
    left_out: set[str] = field(default_factory=set)
    of_scylla: bool = False
    altered_ms: int = 0

    def plan(self, minutes: int = 1) -> SyncPlan:
        sync = SimpleNamespace(
            datacenters=(),
            follows=lambda name: name not in self.left_out,
            bucket_by_of=lambda name: "time",
            run_s=14_400.0,
        )
        config: Any = SimpleNamespace(sync=sync, server_name="test")
        for _ in range(minutes):
            self.now_ms += MINUTE_MS
            self.say_read(self.now_ms)
            made = sync_plan.plan_of(self.store, config, None, interval_at(self.now_ms, MINUTE_MS))
        return made

    def say_read(self, clear_at_ms: int) -> None:
        """What the stage says of the node's log."""
        said = {"at_ms": self.now_ms, "nodes": {"a": {"up": True, "clear_at_ms": clear_at_ms}}}
        self.store.say("status/commitlog_stage/default.json", json.dumps(said).encode())

    def gaps(self, **statuses: Any) -> list[Problem]:
        tables = {NAME: {"table_id": TABLE.table_id, "replica_pass": 3}}
        told = {CLOSE: {"tables": tables}, **statuses}
        found = look_for_lost(self.store, told, Gaps(self.store))
        return [lost.problem(self.store) for lost in found if lost.unverified is not None]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(LocalStore(tmp_path))
    ids = frozenset((TABLE.table_id, OTHER.table_id))
    monkeypatch.setattr(sync_plan, "read_tables", lambda session: Schema((TABLE, OTHER)))
    monkeypatch.setattr(sync_plan, "read_hosts", lambda session: (HOST,))
    monkeypatch.setattr(sync_plan, "connected_nodes", lambda session: ())
    simple = Replication("SimpleStrategy", (("", 1),))
    monkeypatch.setattr(sync_plan, "read_replications", lambda session, names: dict.fromkeys(names, simple))
    monkeypatch.setattr(
        sync_plan,
        "read_node_tables",
        lambda node: NodeTables(ids, frozenset(found.with_cdc), dict.fromkeys(ids, found.altered_ms)),
    )
    monkeypatch.setattr(sync_plan, "ask_one", lambda session, read: read(session))
    monkeypatch.setattr(sync_plan, "is_scylla", lambda session: found.of_scylla)
    monkeypatch.setattr("ringsync.steps.holes.time.time", lambda: found.now_ms / 1000 + 5)
    return found


def lose_cdc(world: World) -> None:
    world.with_cdc.remove(TABLE.table_id)


def lose_configuration(world: World) -> None:
    world.left_out.add(NAME)


def come_back(world: World) -> None:
    world.with_cdc.add(TABLE.table_id)
    world.left_out.clear()


@pytest.mark.parametrize("lose", [lose_cdc, lose_configuration])
@pytest.mark.parametrize("minutes", [1, 60])
def test_a_table_that_comes_back_has_a_gap_until_it_is_repaired(world: World, lose: Any, minutes: int) -> None:
    world.plan(2)
    followed_ms = world.now_ms
    lose(world)
    assert NAME not in [table.schema.full_name for table in world.plan(minutes).tables]
    assert world.gaps() == [], "while it is away, it is not to be followed"
    come_back(world)
    world.plan()
    (problem,) = world.gaps()
    assert (problem.kind, problem.where, problem.is_critical) == (Kind.TABLE_GAP, NAME, True)
    assert f"what was written to {NAME} from " in problem.text
    assert f"cdcservice verify --repair --table {NAME}" in problem.text
    (gap,) = Gaps(world.store).look().values()
    assert gap is not None
    assert gap.since_ms <= followed_ms, "from then on it may lack something"
    assert gap.found_ms >= world.now_ms
    assert not left_tables(world.store)
    world.plan(3)
    assert len(world.gaps()) == 1, "it is told once"
    note_verified(world.store, TABLE.table_id, gap.found_ms)
    assert len(world.gaps()) == 1, "what came at that moment was maybe not compared"
    note_verified(world.store, TABLE.table_id, gap.found_ms + 1)
    assert world.gaps() == []


def test_tables_that_are_followed_for_the_first_time_have_none(world: World) -> None:
    """Also one that had cdc before and was left out by the configuration from the beginning."""
    world.with_cdc.clear()
    world.plan(3)
    world.with_cdc |= {TABLE.table_id, OTHER.table_id}
    world.left_out.add(OTHER.full_name)
    world.plan(3)
    world.left_out.clear()
    world.plan(3)
    assert world.store.list("gaps/") == []
    assert not left_tables(world.store)


def test_what_the_stage_had_not_read_when_the_table_left_counts(world: World) -> None:
    """A backlog of a table that the configuration leaves out is never read."""
    world.plan(2)
    behind_ms = world.now_ms - 30 * MINUTE_MS
    lose_configuration(world)
    say_read = world.say_read
    world.say_read = lambda clear_at_ms: say_read(behind_ms)  # type: ignore[method-assign]
    world.plan()
    come_back(world)
    world.plan()
    (gap,) = Gaps(world.store).look().values()
    assert gap is not None
    assert gap.since_ms == behind_ms


@pytest.mark.parametrize("stands_still", [False, True])
def test_it_leaves_twice(world: World, monkeypatch: pytest.MonkeyPatch, stands_still: bool) -> None:
    """While a node is down, all is captured until the same moment each time. The second gap was lost in the first."""
    if stands_still:
        monkeypatch.setattr(holes, "_captured_until_ms", lambda *_: 5)
    for _ in range(2):
        world.plan(2)
        lose_cdc(world)
        world.plan(5)
        come_back(world)
        world.plan()
    assert ["1970-01-01T00:00:00Z" in problem.text for problem in world.gaps()] == [stands_still] * 2


def test_while_it_is_bootstrapped_anew_nobody_is_woken(world: World) -> None:
    world.plan(2)
    lose_cdc(world)
    world.plan(5)
    come_back(world)
    world.plan()
    assert world.gaps(**{f"bootstrap/{TABLE.table_id}": {"at_ms": 0}}) == []
    assert len(world.gaps()) == 1, "the verification at its end closes it"


def test_a_table_that_had_no_cdc_for_some_seconds_has_a_gap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan was made meanwhile; but the schema updater looks when the schema has changed."""
    world.plan(2)
    monkeypatch.setattr(holes, "read_tables", sync_plan.read_tables)
    monkeypatch.setattr(holes, "read_node_tables", lambda node: sync_plan.read_node_tables(node))
    sync = SimpleNamespace(follows=lambda name: True, run_s=14_400.0)
    config: Any = SimpleNamespace(sync=sync, commitlog_processor_window_interval_ms=MINUTE_MS)
    node: Any = None
    for change in (lose_cdc, come_back):
        change(world)
        holes.note_holes_of(world.store, config, node)
    assert len(world.gaps()) == 1
    world.plan(2)
    assert len(world.gaps()) == 1


def test_a_table_without_cdc_while_nobody_looked_has_a_gap(world: World) -> None:
    """The sync stood still, or cdc was back a moment later: only the log tells it, that of each node."""
    world.altered_ms = begun_ms = world.now_ms
    world.plan(2)
    off_ms, world.altered_ms = world.now_ms + 1000, world.now_ms + 2000

    def read_logs(*off: int) -> None:
        note_switched_off(world.store, CdcBegun(world.store), {(TABLE.table_id, at_ms) for at_ms in off})

    read_logs(begun_ms - 5000, begun_ms)
    world.plan()
    assert world.gaps() == [], "it was not followed before"
    read_logs(begun_ms, off_ms + 500, off_ms)
    world.plan()
    (problem,) = world.gaps()
    assert problem.kind == Kind.TABLE_GAP
    (gap,) = Gaps(world.store).look().values()
    assert gap is not None
    assert (gap.since_ms, left_tables(world.store)) == (off_ms, set())
    note_verified(world.store, TABLE.table_id, gap.found_ms + 1)
    close_gap(world.store, gap.key)
    read_logs(off_ms, off_ms + 500)  # of a node that was down
    world.plan()
    assert world.gaps() == []
    read_logs(world.altered_ms + 1)
    world.plan()
    assert len(world.gaps()) == 1, "it has lost it once more"


@pytest.mark.parametrize("note", [b"", b"{}", b"[]", b'{"altered_ms": "x"}'])
def test_a_damaged_note_of_when_a_table_began_is_no_silence(world: World, note: bytes) -> None:
    world.plan(2)
    world.store.put(f"cdc_begun/{TABLE.table_id}.json", note)
    note_switched_off(world.store, CdcBegun(world.store), {(TABLE.table_id, world.now_ms)})
    world.plan()
    assert len(world.gaps()) == 1


def test_a_table_that_was_never_followed_may_lose_cdc(world: World) -> None:
    note_switched_off(world.store, CdcBegun(world.store), {("e" * 32, world.now_ms)})
    assert not left_tables(world.store)


def test_a_damaged_note_is_a_gap_since_nobody_knows_when(world: World) -> None:
    world.plan(2)
    lose_cdc(world)
    world.plan()
    world.store.put(f"staging/left/{TABLE.table_id}.json", b"{")
    come_back(world)
    world.plan()
    (problem,) = world.gaps()
    assert "from an unknown time to" in problem.text


def test_scylla_s_logs_have_gaps_of_their_own(world: World) -> None:
    world.of_scylla = True
    world.plan(2)
    lose_cdc(world)
    world.plan(5)
    come_back(world)
    world.plan()
    assert world.store.list("gaps/") == []


def test_while_nodes_disagree_a_table_leaves_once(world: World) -> None:
    """Each plan asks another node: an hour of disagreement made dozens of gaps."""
    world.plan(2)

    def say(since_ms: int | None) -> None:
        said = {"at_ms": world.now_ms + MINUTE_MS, "disagreement_since_ms": since_ms}
        world.store.say("status/schema_update/schema.json", json.dumps(said).encode())

    followed_ms = world.now_ms
    for _ in range(10):
        for look in (lose_cdc, come_back):
            say(followed_ms)
            look(world)
            world.plan()
    assert world.gaps() == []
    say(None)
    world.plan()
    (gap,) = Gaps(world.store).look().values()
    assert gap is not None
    assert gap.since_ms <= followed_ms < world.now_ms <= gap.found_ms
    assert not left_tables(world.store)


def test_a_node_that_is_behind_makes_no_table_leave(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan had asked a node that knows of ALTER TABLE … WITH cdc = true, and the schema updater asked one that did
    not, 0.2 s later: a critical alarm for a table that never had less cdc."""
    monkeypatch.setattr(holes, "read_tables", sync_plan.read_tables)
    monkeypatch.setattr(holes, "read_node_tables", lambda node: sync_plan.read_node_tables(node))
    sync = SimpleNamespace(follows=lambda name: True, run_s=14_400.0)
    config: Any = SimpleNamespace(sync=sync, commitlog_processor_window_interval_ms=MINUTE_MS)
    node: Any = None
    lose_cdc(world)
    world.altered_ms = created_ms = world.now_ms
    world.plan(3)
    come_back(world)
    world.altered_ms = with_cdc_ms = world.now_ms
    world.plan()
    lose_cdc(world)
    world.altered_ms = created_ms
    holes.note_holes_of(world.store, config, node)
    assert not left_tables(world.store)
    come_back(world)
    world.altered_ms = with_cdc_ms
    world.plan(2)
    assert world.gaps() == []
    lose_cdc(world)
    world.altered_ms = world.now_ms
    holes.note_holes_of(world.store, config, node)
    come_back(world)
    world.plan()
    assert len(world.gaps()) == 1, "it has lost it now"


def test_an_updater_that_is_dead_holds_up_no_gap(world: World) -> None:
    said = {"at_ms": world.now_ms, "disagreement_since_ms": world.now_ms}
    world.store.say("status/schema_update/schema.json", json.dumps(said).encode())
    world.plan(2)
    lose_cdc(world)
    world.plan()
    come_back(world)
    world.plan()
    assert len(world.gaps()) == 1


@pytest.mark.parametrize("began_ms", [0, 180 * MINUTE_MS])
def test_archived_segments_that_wait_count(world: World, tmp_path: Path, began_ms: int) -> None:
    """When the configuration leaves a table out, its rows in them are never read."""
    world.plan(2)
    began_ms = began_ms and world.now_ms - began_ms
    (file := tmp_path / "CommitLog-7-1001.log").write_bytes(b"log")
    archive_segment(world.store, "a", file, "3\nCOMPLETED", began_ms=began_ms, now_ms=world.now_ms, even_short=True)
    lose_configuration(world)
    world.plan()
    left = when_left(world.store, *left_tables(world.store))
    assert left is not None
    assert left.since_ms == began_ms


def test_what_a_node_logged_that_is_down_counts(world: World) -> None:
    world.plan(2)
    read_ms = world.now_ms - 30 * MINUTE_MS
    nodes = {"a": {"up": True, "clear_at_ms": world.now_ms}, "b": {"up": False, "clear_at_ms": read_ms}, "c": {}}
    said = json.dumps({"at_ms": world.now_ms, "nodes": nodes}).encode()
    world.say_read = lambda _: world.store.say("status/commitlog_stage/default.json", said)  # type: ignore[method-assign]
    lose_configuration(world)
    world.plan()
    left = when_left(world.store, *left_tables(world.store))
    assert left is not None
    assert left.since_ms == read_ms


def test_the_note_of_a_dropped_table_goes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan read it, for ever."""
    world.plan(2)
    lose_cdc(world)
    world.plan()
    monkeypatch.setattr(sync_plan, "read_tables", lambda session: Schema((OTHER,)))
    world.plan()
    assert left_tables(world.store), "the node may be behind"
    mark_dropped(world.store, TABLE.keyspace, TABLE.name, TABLE.table_id, world.now_ms)
    world.plan()
    assert not left_tables(world.store)
