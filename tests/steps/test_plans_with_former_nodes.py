"""A plan has each node that has left the ring with a claim, whatever became of the plans before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.schema import NodeTables
from ringsync.ledger.read_nodes import ReadNode, put_read_node
from ringsync.ledger.staging import Bucket
from ringsync.ring.ring import Host
from ringsync.schema.table import Schema
from ringsync.steps import sync_plan
from ringsync.steps.stage.claims import Place, put_place, release
from ringsync.steps.sync_plan import FormerHost, SyncPlan, plan_of
from ringsync.storage.local import LocalStore
from tests.steps.test_stager import HOST, WELL

AWAY = replace(WELL, id="c", datacenter="away")
DAY = 1440


class Ring:
    """A ring whose nodes come and go; each interval is a minute."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.store, self.there = LocalStore(folder), [HOST, WELL, AWAY]
        self.config: Any = SimpleNamespace(sync=SimpleNamespace(datacenters=()), server_name="test")
        patch.setattr(sync_plan, "read_tables", lambda session: Schema(()))
        patch.setattr(sync_plan, "read_hosts", lambda session: tuple(self.there))
        patch.setattr(sync_plan, "read_hint_window", lambda session, of_scylla: 0)
        patch.setattr(sync_plan, "connected_nodes", lambda session: ())
        patch.setattr(sync_plan, "read_node_tables", lambda node: NodeTables(frozenset(), frozenset(), {}))
        patch.setattr(sync_plan, "ask_one", lambda session, read: read(session))
        self.claim(HOST, WELL)

    def claim(self, *hosts: Host) -> None:
        for host in hosts:
            put_place(self.store, host.id, Place("/cdc_raw", "token"))

    def former(self, number: int) -> list[FormerHost]:
        plan = plan_of(self.store, self.config, None, Bucket(number * 60_000, 60_000))
        assert SyncPlan.from_json(plan.to_json()) == plan
        return list(plan.former)

    def damage(self, key: str) -> None:
        file = self.store.path / key
        content = bytearray(file.read_bytes())
        content[3] ^= 1
        with file.open("r+b") as damaged:
            damaged.write(content)


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ring:
    return Ring(tmp_path, monkeypatch)


def left(number: int, host: Host = WELL) -> list[FormerHost]:
    """The node, which has left in an interval."""
    return [FormerHost(host, (number + 1) * 60_000)]


def test_a_node_that_left_is_planned_as_long_as_it_has_a_claim(ring: Ring) -> None:
    assert ring.former(1) == []
    del ring.there[1:]
    assert ring.former(2) == left(2), "the log of the other was not read"
    assert ring.former(3) == left(2)
    ring.there.append(WELL)
    assert ring.former(4) == []
    del ring.there[1:]
    assert ring.former(5) == left(5)
    release(ring.store, WELL.id, Place("/cdc_raw", "token"))
    assert ring.former(6) == []


def test_a_node_of_a_datacenter_that_is_not_read_any_more_is_not_read_after_it_has_left(ring: Ring) -> None:
    ring.claim(AWAY)
    ring.former(1)
    ring.config.sync.datacenters = ("dc",)
    del ring.there[1:]
    for number in (2, 3):
        assert [(one.host.id, one.host.is_read) for one in ring.former(number)] == [(WELL.id, True), (AWAY.id, False)]


def test_a_damaged_plan_loses_no_node(ring: Ring) -> None:
    """It was forgotten, with what only its log has."""
    ring.former(1)
    del ring.there[1:]
    ring.former(2)
    ring.damage(f"plans/sync/{120_000:013}.json")
    assert ring.former(3) == left(3), "it waits anew for what the node may log"
    assert ring.former(4) == left(3)


def test_a_plan_by_a_clock_that_is_ahead_loses_no_node(ring: Ring) -> None:
    ring.former(1)
    ring.former(DAY)
    joined = replace(WELL, id="d", address="127.0.0.4")
    ring.there.append(joined)
    ring.claim(joined)
    ring.former(2)
    del ring.there[1:]
    for number in (3, 4, 5):
        assert ring.former(number) == [*left(3), *left(3, joined)]


@pytest.mark.parametrize(("number", "up"), [(2, False), (DAY, True)])
def test_a_node_was_dead_when_it_left_if_that_was_seen_of_late(ring: Ring, number: int, up: bool) -> None:
    """A plan from before a stop had seen it restarting: what it logged later was lost without a word."""
    ring.there[1] = replace(WELL, up=False)
    ring.former(1)
    del ring.there[1:]
    assert ring.former(number) == left(number, replace(WELL, up=up))
    assert ring.former(number + DAY) == left(number, replace(WELL, up=up))


@pytest.mark.parametrize("known", [True, False])
def test_without_any_plan_the_claims_tell_which_nodes_have_left(ring: Ring, known: bool) -> None:
    """A version before remembered none."""
    if known:
        put_read_node(ring.store, WELL.id, ReadNode(WELL.address, WELL.port, "away"))
    del ring.there[1:]
    (former,) = ring.former(7)
    assert (former.host.id, former.host.up, former.host.is_read, former.since_ms) == (WELL.id, True, True, 480_000)
    assert former.host.endpoint == (WELL.endpoint if known else f"{WELL.id}:0")
    ring.config.sync.datacenters = ("dc",)
    (former,) = ring.former(8)
    assert former.host.is_read != known


def cut_off(ring: Ring, key: str) -> None:
    ring.store.put(key, b"{")


def of_a_later_version(ring: Ring, key: str) -> None:
    ring.store.put(key, b'{"folder": "/cdc_raw", "token": "token", "since": 1}')


@pytest.mark.parametrize("damage", [Ring.damage, cut_off, of_a_later_version])
@pytest.mark.parametrize("key", ["staging/nodes", "staging/hosts"])
def test_a_damaged_object_of_a_node_that_left_holds_up_no_plan(
    ring: Ring, damage: Callable[[Ring, str], None], key: str
) -> None:
    """No process could make a plan: all tables and nodes stood still."""
    put_read_node(ring.store, WELL.id, ReadNode(WELL.address, WELL.port, "away"))
    ring.former(1)
    for stat in ring.store.list(f"{key}/{WELL.id}"):
        damage(ring, stat.key)
    del ring.there[1:]
    assert ring.former(2) == left(2)
    for stat in ring.store.list("plans/"):
        ring.store.delete(stat.key)
    assert [one.host.id for one in ring.former(3)] == [WELL.id]
