"""Which snapshots and copies are removed: those that no bootstrap needs, and never those that were just taken."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.config import Config, load_config
from ringsync.ledger.snapshots import (
    COPIES,
    FOLDER,
    NodeSnapshot,
    SnapshotsOf,
    keep_snapshots_of,
    put_manifest,
    say_begun,
)
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.ring.tokens import WHOLE_RING
from ringsync.state.bootstrap import CANCELLED, COMPLETED, PUBLISHING, SCANNING, Bootstrap
from ringsync.steps.bootstrap import old_snapshots
from ringsync.steps.bootstrap.node_snapshot import Node, tag_of
from ringsync.steps.bootstrap.old_snapshots import ClearsAside, clear_node, clear_old
from ringsync.steps.bootstrap.snapshot import Wanted, snapshot_node, snapshots_to_read
from ringsync.storage.local import LocalStore
from ringsync.storage.port import Stat
from tests.steps.snapshot_folders import nodetool

MAX_AGE_H = 2.0
HOST = Host("0b3e9f0a-0000-4000-8000-000000000001", "10.0.0.1", 9042, "dc1", "r1", (0,))
RING = RingSnapshot((HOST,), Replication("SimpleStrategy", (("", 1),)))


def id_of(hours_ago: float, number: int = 1) -> str:
    """The id of a bootstrap that began so long ago."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(time.time() - 3600 * hours_ago))}-{number:08x}"


@dataclass
class State:
    """What ``cdc`` says of one table's latest bootstrap."""

    latest: Bootstrap | None = None
    run: str | None = None

    def find(self, keyspace: str, table: str) -> Bootstrap | None:
        latest = self.latest
        return latest if latest and (latest.keyspace, latest.table) == (keyspace, table) else None

    def alive(self, bootstrap: str) -> str | None:
        return self.run


@dataclass
class World:
    """A store, a state, and the configuration."""

    config: Config
    store: LocalStore
    state: Any

    def begin(self, hours_ago: float, state: str = SCANNING, table: str = "orders") -> str:
        """A bootstrap, the latest, with a copy of one piece and no manifest yet."""
        bootstrap = id_of(hours_ago)
        self.state.latest = Bootstrap("shop", table, bootstrap, state, "{}", "run", 0)
        keep_snapshots_of(self.store, SnapshotsOf(bootstrap, "shop", table, RING))
        self.store.put(f"{COPIES}{bootstrap}/{HOST.id}/shop/orders-0/nb-1-big-Data.db/0", b"rows")
        return bootstrap

    def taken(self, bootstrap: str, hours_ago: float) -> None:
        """The snapshot of the node was taken."""
        begun_ms = int((time.time() - 3600 * hours_ago) * 1000)
        say_begun(self.store, bootstrap, begun_ms)
        put_manifest(self.store, bootstrap, NodeSnapshot(HOST.id, self.store.url, begun_ms, ()))

    def keys(self, bootstrap: str) -> list[str]:
        """What is left of a bootstrap but who it was."""
        found = [stat for folder in (FOLDER, COPIES) for stat in self.store.list(f"{folder}{bootstrap}/")]
        return [one.key for one in found if not one.key.endswith("/bootstrap.json")]

    def clear(self) -> None:
        clear_old(self.config, self.store, self.state)


@pytest.fixture
def world(tmp_path: Path) -> World:
    path = tmp_path / "ringsync.yaml"
    document = {"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "lake"}}
    path.write_text(json.dumps({**document, "sstable": {"max_age_h": MAX_AGE_H}}))
    return World(load_config(path), LocalStore(tmp_path / "lake"), State())


def test_fresh_snapshots_of_an_old_bootstrap_stay(world: World) -> None:
    """It was begun again after ``max_age_h``: its age counts from its newest snapshot, not from its begin."""
    bootstrap = world.begin(hours_ago=50)
    world.taken(bootstrap, hours_ago=1)
    before = world.keys(bootstrap)
    world.clear()
    assert world.keys(bootstrap) == before
    world.taken(bootstrap, hours_ago=3)
    world.clear()
    assert world.keys(bootstrap) == []


def test_a_copy_under_way_stays_though_no_run_says_that_it_lives(world: World) -> None:
    """The process hangs, or was killed and is tried again: no manifest tells that a snapshot was just begun."""
    bootstrap = world.begin(hours_ago=50)
    say_begun(world.store, bootstrap, int(time.time() * 1000))
    before = world.keys(bootstrap)
    world.clear()
    assert world.keys(bootstrap) == before


def test_what_a_run_works_on_stays(world: World) -> None:
    bootstrap = world.begin(hours_ago=50)
    world.state.run = "some run"
    world.clear()
    assert len(world.keys(bootstrap)) == 1
    world.state.run = None
    world.clear()
    assert world.keys(bootstrap) == []


@pytest.mark.parametrize("state", [PUBLISHING, COMPLETED, CANCELLED])
def test_what_is_copied_or_given_up_goes_at_once(world: World, state: str) -> None:
    bootstrap = world.begin(0, state)
    world.taken(bootstrap, 0)
    world.clear()
    assert world.keys(bootstrap) == []


@pytest.mark.parametrize("use", ["snapshot", "scan"])
def test_a_snapshot_that_is_used_again_is_no_old_one(world: World, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on may have other tables to copy for hours, in which it gives no sign of life for this one."""
    bootstrap = world.begin(hours_ago=50)
    (piece,) = world.store.list(f"{COPIES}{bootstrap}/{HOST.id}/")
    world.store.delete(piece.key)
    world.taken(bootstrap, hours_ago=1.9)
    before = world.keys(bootstrap)
    selection = SimpleNamespace(ranges=[WHOLE_RING])
    scan = SimpleNamespace(consistency_level="ONE", selection=selection)
    plan: Any = SimpleNamespace(bootstrap=world.state.latest, scan=scan)
    if use == "snapshot":
        shared = SimpleNamespace(table=lambda *_: None)
        this: Any = SimpleNamespace(store=world.store, config=world.config, shared=shared)
        wanted = Wanted(world.state, plan)
        assert snapshot_node(this, plan, RING, HOST, wanted).host == HOST.id
    else:
        assert [one.host for one in snapshots_to_read(world.store, plan)[1]] == [HOST.id]
    later_s = time.time() + 1800
    monkeypatch.setattr(time, "time", lambda: later_s)
    world.clear()
    assert world.keys(bootstrap) == before


class BegunMeanwhile(LocalStore):
    """A store in which a bootstrap is begun again just when its old copies are to be removed."""

    def list(self, prefix: str = "", start: str = "") -> list[Stat]:
        found = super().list(prefix, start)
        if prefix != FOLDER and prefix.startswith(FOLDER):
            say_begun(self, prefix.removeprefix(FOLDER).rstrip("/"), int(time.time() * 1000))
        return found


def test_a_bootstrap_that_begins_again_while_it_is_cleared_keeps_its_copies(world: World, tmp_path: Path) -> None:
    bootstrap = world.begin(hours_ago=50)
    before = world.keys(bootstrap)
    clear_old(world.config, BegunMeanwhile(tmp_path / "lake"), world.state)
    assert set(before) <= set(world.keys(bootstrap))


def test_a_damaged_leftover_stops_no_other(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    others = [id_of(50, number) for number in (2, 3, 4, 5)]
    damaged: dict[str, Any] = {
        f"{FOLDER}{others[0]}/bootstrap.json": b'{"keyspace": "shop", "tab',
        f"{FOLDER}{others[1]}/bootstrap.json": b'{"keyspace": ["shop"]}',
        f"{FOLDER}{others[2]}/bootstrap.json": b"\xff\xfe",
        f"{FOLDER}{others[3]}/begun.json": b"[]",
    }
    keep_snapshots_of(world.store, SnapshotsOf(others[3], "shop", "orders", RING))
    for key, content in damaged.items():
        world.store.put(key, content)
    world.store.put(f"{FOLDER}99999999T999999Z-00000009/x", b"no moment of any day")
    bootstrap = world.begin(hours_ago=49)
    world.state.latest = replace(world.state.latest, state=COMPLETED)
    world.clear()
    assert world.keys(bootstrap) == []
    said = capsys.readouterr().out
    for key in damaged:
        assert world.store.stat(key) is not None
        assert world.store.uri(key) in said
    assert said.count("ringsync: warning: ") == len(damaged) + 1
    assert "99999999T999999Z-00000009 is no bootstrap's id" in said
    assert "remove" in said
    assert "Traceback" not in said


@pytest.fixture
def node(tmp_path: Path) -> Node:
    data = tmp_path / "data"
    data.mkdir()
    return Node(HOST, nodetool(tmp_path, data), 10.0, (data,))


@pytest.fixture
def snapshot(node: Node) -> Callable[[str], Path]:
    def make(bootstrap: str) -> Path:
        (folder,) = node.directories
        made = folder / "shop" / f"orders-{0:032x}" / "snapshots" / tag_of(bootstrap, HOST.id)
        made.mkdir(parents=True)
        (made / "nb-1-big-Data.db").write_bytes(b"rows")
        return made

    return make


def clear_on(world: World, node: Node) -> int:
    return clear_node(world.config, world.store, world.state, node, time.time())


def test_a_nodes_snapshot_goes_once_it_is_copied_or_not_needed(
    world: World, node: Node, snapshot: Callable[[str], Path]
) -> None:
    bootstrap = world.begin(hours_ago=50)
    say_begun(world.store, bootstrap, int(time.time() * 1000))
    folder = snapshot(bootstrap)
    assert clear_on(world, node) == 0
    assert folder.is_dir()
    world.taken(bootstrap, 0)
    assert clear_on(world, node) == 1
    assert not folder.exists()
    folder = snapshot(bootstrap)
    world.state.latest = None
    assert clear_on(world, node) == 1
    assert not folder.exists()


def test_a_snapshot_of_another_ringsync_stays_as_long_as_it_is_young(
    world: World, node: Node, snapshot: Callable[[str], Path]
) -> None:
    """Our store does not know it, and its bootstrap may have been begun again: only its folder tells its age."""
    folder = snapshot(id_of(hours_ago=50))
    assert clear_on(world, node) == 0
    assert folder.is_dir()
    old_s = time.time() - 2 * MAX_AGE_H * 3600 - 60
    os.utime(folder, (old_s, old_s))
    assert clear_on(world, node) == 1
    assert not folder.exists()


def test_a_damaged_record_keeps_one_snapshot_of_a_node_only(
    world: World, node: Node, snapshot: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stays, goes = snapshot(id_of(50, 2)), snapshot(id_of(49, 3))
    key = f"{FOLDER}{id_of(50, 2)}/bootstrap.json"
    world.store.put(key, b"{")
    keep_snapshots_of(world.store, SnapshotsOf(id_of(49, 3), "shop", "orders", RING))
    assert clear_on(world, node) == 1
    assert stays.is_dir()
    assert not goes.exists()
    assert world.store.uri(key) in capsys.readouterr().out


def test_a_link_is_no_snapshot(world: World, node: Node, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    old_s = time.time() - 2 * MAX_AGE_H * 3600 - 60
    os.utime(elsewhere, (old_s, old_s))
    folder = node.directories[0] / "shop" / f"orders-{0:032x}" / "snapshots"
    folder.mkdir(parents=True)
    (folder / tag_of(id_of(50), HOST.id)).symlink_to(elsewhere)
    assert clear_on(world, node) == 0
    assert elsewhere.is_dir()


@pytest.mark.parametrize("queue", ["default", "other"])
def test_one_queue_removes_the_copies_for_all(world: World, monkeypatch: pytest.MonkeyPatch, queue: str) -> None:
    """Each looks at the snapshots of its own nodes, now and then."""
    cleared: list[dict[str, Any]] = []
    monkeypatch.setattr(old_snapshots, "connect", lambda _: None)
    monkeypatch.setattr(old_snapshots, "clear_old", lambda *_, **given: cleared.append(given))
    clears = ClearsAside(world.config, world.store, queue)
    for _ in range(3):
        clears.clear()
        clears._aside.is_done(10.0)
    assert cleared == [{"queue": queue, "copies": queue == "default"}]
