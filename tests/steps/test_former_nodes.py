"""The log of a node that has left the ring is read to its end; then nobody hears of the node any more."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.schema import NodeTables
from ringsync.ledger.gaps import Gaps
from ringsync.ledger.staging import Bucket
from ringsync.ring.ring import Host
from ringsync.schema.table import Schema
from ringsync.steps import sync_plan
from ringsync.steps.stage.claims import Place, is_claimed, put_place, release
from ringsync.steps.stage.former_nodes import FORMER_PATIENCE_MS
from ringsync.steps.stage.lost_segments import LostSegments
from ringsync.steps.stage.node_log import SYNC_MARGIN_MS, UNKNOWN_SYNC_MS
from ringsync.steps.sync_plan import FormerHost, SyncPlan, make_plan
from ringsync.storage.local import LocalStore
from tests.steps.test_stager import HOST, TABLES, WELL, Cluster, Sync
from tests.steps.test_stager_cdc_off import index_of

MINUTE_S, PATIENCE_S = 61, FORMER_PATIENCE_MS / 1000
OVER_S = (UNKNOWN_SYNC_MS + SYNC_MARGIN_MS) / 1000 + MINUTE_S


@pytest.fixture
def sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sync:
    """A stage that has seen the log of a node, of which nothing was synced; then the node has logged more."""
    found = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    synced = index_of(found.segment).read_text()
    index_of(found.segment).write_text("0")
    assert found.cycle().status()["error"] is None
    index_of(found.segment).write_text(synced)
    return found


def leave(sync: Sync, *, alive: bool = True, others: tuple[Host, ...] = ()) -> None:
    sync.stager._session.can_be_asked = False
    sync.hosts = others
    sync.former = (FormerHost(replace(HOST, up=alive), int((sync.now_s + MINUTE_S) * 1000)),)


def begin_anew(sync: Sync) -> None:
    """As another process."""
    sync.stager._logs.clear()
    sync.stager._plan = None
    sync.stager._lost = LostSegments(sync.store)


@pytest.mark.parametrize("anew", [False, True])
def test_what_a_node_had_logged_when_it_left_is_staged(sync: Sync, anew: bool) -> None:
    """It was read no more from the moment on: what only it had logged was lost."""
    leave(sync)
    if anew:
        begin_anew(sync)
    log = sync.cycle(MINUTE_S)
    assert log.counts["staged"] > 0
    assert not sync.segment.exists()
    told = sync.stager.status()[HOST.id]
    assert (told["left"], told["up"], told["is_read"], sync.told()) == (True, False, True, [])
    assert is_claimed(sync.store, HOST.id), "it may log more for a while"


@pytest.mark.parametrize("ended", [False, True])
def test_a_node_whose_log_is_staged_is_forgotten(sync: Sync, ended: bool) -> None:
    """``status`` showed it as down, with the error of its last look, until the run ended."""
    leave(sync)
    rows = sync.cycle(MINUTE_S).counts["rows"]
    if ended:  # its last segment is removed, too, and no segment is left
        for file in sync.segment.parent.glob("CommitLog-*"):
            file.unlink()
    for _ in range(2):
        sync.cycle_once(OVER_S / 2)
        assert sync.told() == []
    sync.cycle_once(1)
    assert sync.stager.status() == {}
    assert not is_claimed(sync.store, HOST.id)
    assert not list(sync.segment.parent.glob("ringsync-claim.*"))
    assert sync.stager.report()["rows"] == rows, "what the run has done counts all the same"
    # The plan of this interval still has it.
    begin_anew(sync)
    sync.cycle_once(1)
    assert sync.stager.status() == {}


def test_a_dead_node_whose_log_is_gone_is_nobodys_trouble(sync: Sync) -> None:
    """What it had logged alone, the source does not have either."""
    leave(sync, alive=False)
    shutil.rmtree(sync.segment.parent)
    assert "cdc_raw cannot be read" in str(sync.cycle(MINUTE_S).error)
    assert sync.stager.status()[HOST.id]["left"]
    assert sync.told() == []
    sync.cycle_once(PATIENCE_S)
    sync.cycle_once(MINUTE_S)
    assert sync.stager.status() == {}
    assert sync.store.list("gaps/") == []


def test_a_node_that_left_alive_with_its_log_leaves_a_gap(sync: Sync) -> None:
    leave(sync)
    shutil.rmtree(sync.segment.parent)
    sync.cycle_once(MINUTE_S)
    (told,) = sync.told()
    assert "it has left the ring, and its log cannot be read to its end, which is tried until 20" in told
    assert "cdc_raw cannot be read" in told
    sync.cycle_once(PATIENCE_S)
    sync.cycle_once(MINUTE_S)
    assert sync.stager.status() == {}
    ((_, gap),) = Gaps(sync.store).look().items()
    assert gap is not None
    assert (gap.node, gap.segment) == (HOST.id, sync.segment.name)
    assert "in its token ranges" in gap.describe(["shop.orders"])


def test_a_node_in_the_folder_of_one_that_left_is_read(sync: Sync) -> None:
    """It has replaced it on the same host, where the folder was not emptied: it reads what is there."""
    leave(sync, others=(WELL,))
    sync.cycle_once(MINUTE_S)
    assert sync.told() == sync.told(WELL) == []
    assert sync.stager.status().keys() == {WELL.id}
    assert sync.stager._logs[WELL.id].counts["staged"] > 0
    assert not is_claimed(sync.store, HOST.id)


def test_a_plan_has_a_node_that_left_as_long_as_it_has_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, there = LocalStore(tmp_path), [HOST, WELL, replace(WELL, id="c", datacenter="away")]
    monkeypatch.setattr(sync_plan, "read_tables", lambda session: Schema(()))
    monkeypatch.setattr(sync_plan, "read_hosts", lambda session: tuple(there))
    monkeypatch.setattr(sync_plan, "read_node_tables", lambda node: NodeTables(frozenset(), frozenset(), {}))
    monkeypatch.setattr(sync_plan, "ask_one", lambda session, read: read(session))
    config: Any = SimpleNamespace(sync=SimpleNamespace(datacenters=("dc",)), server_name="test")

    def former(number: int) -> list[tuple[str, int]]:
        plan = make_plan(store, config, None, Bucket(number * 60_000, 60_000))
        store.put(f"plans/sync/{number:013}.json", plan.to_json().encode())
        assert SyncPlan.from_json(plan.to_json()) == plan
        return [(one.host.id, one.since_ms) for one in plan.former]

    assert former(1) == []
    for host in there:
        put_place(store, host.id, Place("/cdc_raw", "token"))
    del there[1:]
    assert former(2) == [(WELL.id, 180_000)], "the log of the other was not read"
    assert former(3) == [(WELL.id, 180_000)]
    there.append(WELL)
    assert former(4) == []
    del there[1:]
    assert former(5) == [(WELL.id, 360_000)]
    release(store, WELL.id, Place("/cdc_raw", "token"))
    assert former(6) == []
