"""Once nobody empties ``cdc_raw`` any more, no table has cdc: ``leave`` without a cluster (see test_leave.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cli import main
from ringsync.config import load_config
from ringsync.ring.ring import Host
from ringsync.schema.table import UnreadableTable
from ringsync.service import leave
from ringsync.service.published import Waited
from ringsync.status import LEFT_KEY, STOP_KEY
from ringsync.steps.loop import put_status
from ringsync.storage.local import LocalStore

BOOTSTRAP = {"table": "shop.b", "table_id": "b", "bootstrap": "x", "run": "r", "step": "scan", "fraction": 0.5}
WELL = {"endpoint": "10.0.0.1:9042", "folder": "/raw", "waiting": 0}
A, B, OTHER = (UnreadableTable("shop", name, name, "") for name in ("a", "b", "other"))


def captures(host: Host) -> bool:
    return host.id != "deaf"


class World:
    """A cluster with tables that have cdc, and what happens while ``leave`` waits."""

    def __init__(self, conf: Path) -> None:
        self.conf, self.store = conf, LocalStore(conf.parent / "lake")
        self.with_cdc, self.others, self.paused = [A], [OTHER], list[str]()
        self.hosts = [Host("h", "10.0.0.1", 9042, "dc1", "r1", (1,))]
        self.meanwhile: Callable[[], Any] = lambda: None

    def archive_says(self, **status: Any) -> None:
        put_status(self.store, "commitlog_archive", "default", {"nodes": {"h": WELL}, **status})

    def disable(self, _: Any, __: Any, tables: Any, missed: set[str] | None) -> list[str]:
        assert missed is None
        assert self.store.stat(LEFT_KEY) is not None, "a bootstrap may switch it on again"
        self.with_cdc = [table for table in self.with_cdc if table not in tables]
        return ["disabled now" for _ in tables]

    def waits(self, *_: Any, **__: Any) -> Waited:
        self.meanwhile()
        self.archive_says(at_ms=int(time.time() * 1000) + 1000)
        return Waited("", ())

    def leave(self, *options: str) -> int:
        return main(["leave", "--conf", str(self.conf), "--yes", "--others", "keep", "--timeout", "0", *options])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    conf = tmp_path / "ringsync.yaml"
    conf.write_text("server_name: s\nstore: {url: lake}\ncassandra: {contact_points: [a]}\n")
    it = World(conf)
    client = SimpleNamespace(set_paused=lambda dag, _: it.paused.append(dag), busy_tasks=lambda _: [])
    fakes = {
        "connect": lambda _: None,
        "is_scylla": lambda _: False,
        "Shared": lambda _: None,
        "client_of": lambda _: client,
        "tables_with_cdc": lambda *_: (tuple(it.with_cdc), tuple(it.others)),
        "disable_cdc": it.disable,
        "wait_until_published": it.waits,
        "longest_sync_period_ms": lambda _: 0,
        "read_hosts": lambda _: it.hosts,
        "asked_nodes": lambda _: nullcontext(captures),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(leave, name, fake)
    return it


@pytest.mark.parametrize(
    ("meanwhile", "told"),
    [
        (lambda world: world.with_cdc.append(B), "shop.b has cdc"),
        (lambda world: world.others.append(B), "shop.b has cdc"),
        (lambda world: put_status(world.store, "bootstrap", "b", BOOTSTRAP), "the bootstrap of shop.b is not finished"),
    ],
)
def test_what_began_while_it_waited_keeps_the_dags_on(
    world: World, capsys: pytest.CaptureFixture[str], meanwhile: Any, told: str
) -> None:
    world.meanwhile = lambda: meanwhile(world)
    assert world.leave() == 1
    assert told in capsys.readouterr().err
    assert (world.paused, world.store.stat(STOP_KEY)) == ([], None)


@pytest.mark.parametrize(
    ("with_cdc", "statements"),
    [
        (
            [A, B],
            "ALTER TABLE shop.a WITH cdc = {'enabled': false}; ALTER TABLE shop.b WITH cdc = {'enabled': false};",
        ),
        ([], "nothing, since no followed table has cdc"),
    ],
)
def test_on_scylla_each_statement_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], with_cdc: Any, statements: str
) -> None:
    world.with_cdc = with_cdc
    monkeypatch.setattr(leave, "is_scylla", lambda _: True)
    assert world.leave() == 3
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"run cdcservice wait, then cdcservice stop, then in cqlsh: {statements} See docs/scylla.md#leaving" in said
    assert (world.paused, world.store.stat(LEFT_KEY)) == ([], None)


def test_no_bootstrap_may_switch_cdc_on_from_then_on(world: World) -> None:
    assert world.leave() == 0
    assert "commitlog_archive" in world.paused
    assert world.store.stat(LEFT_KEY) is not None


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (
            {"nodes": {"h": {**WELL, "error": "its cdc_raw cannot be archived: Stale file handle"}}},
            "10.0.0.1:9042: its cdc_raw cannot be archived: Stale file handle",
        ),
        ({"nodes": {}}, "10.0.0.1:9042: its archive has not looked at it yet"),
        ({"nodes": {"h": {**WELL, "waiting": 3}}}, "3 finished segments are in /raw"),
        ({"busy": {"since_ms": 0}}, "queue default: its archive has not looked yet"),
        ({}, ""),
    ],
)
def test_a_log_that_nobody_could_look_at_is_not_empty(world: World, status: Any, told: str) -> None:
    world.archive_says(**status)
    world.hosts.append(Host("deaf", "10.0.0.2", 9042, "dc1", "r1", (2,)))
    assert leave.segments_left(load_config(world.conf), world.store, world.hosts, captures, 0) == told
