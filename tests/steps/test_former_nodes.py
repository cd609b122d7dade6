"""The log of a node that has left the ring is read to its end; then nobody hears of the node any more."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.ledger.archive import READ, archived
from ringsync.ledger.gaps import Gap, Gaps
from ringsync.ledger.read_nodes import ReadNode, get_read_node
from ringsync.ring.ring import Host
from ringsync.steps.stage import commitlog_stage
from ringsync.steps.stage.claims import is_claimed
from ringsync.steps.stage.former_nodes import FormerNodes
from ringsync.steps.stage.lost_segments import LostSegments
from ringsync.steps.stage.node_log import SYNC_MARGIN_MS, UNKNOWN_SYNC_MS
from ringsync.steps.stage.vain_tries import FORMER_PATIENCE_MS
from ringsync.steps.sync_plan import FormerHost
from ringsync.storage.port import UnavailableError
from tests.bounded import as_long_as
from tests.steps.test_stager import FOLDER, HOST, TABLES, WELL, Cluster, Sync
from tests.steps.test_stager_cdc_off import index_of

MINUTE_S, PATIENCE_S = 61, FORMER_PATIENCE_MS // 1000
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
    sync.stager._former = FormerNodes(sync.store, sync.stager._config)


def pass_time(sync: Sync, seconds: float) -> None:
    """Let the stage work all the time."""
    end_s = sync.now_s + seconds
    while sync.now_s < end_s:
        sync.cycle_once(min(MINUTE_S, end_s - sync.now_s))


def gaps(sync: Sync) -> list[Gap]:
    return [gap for gap in Gaps(sync.store).look().values() if gap is not None]


def is_forgotten(sync: Sync) -> bool:
    assert (HOST.id in sync.stager.status()) == is_claimed(sync.store, HOST.id)
    return not is_claimed(sync.store, HOST.id)


@contextmanager
def refused(sync: Sync) -> Iterator[None]:
    """What is staged cannot be committed."""

    def refuse(*_: Any) -> None:
        raise UnavailableError("gs://bucket: 503, try again")

    real = sync.stager._commit
    sync.stager._commit = refuse  # type: ignore[method-assign]
    yield
    sync.stager._commit = real  # type: ignore[method-assign]


def add_segments(sync: Sync) -> list[Path]:
    """Have a backlog of some segments, of which each cycle reads one."""
    found = []
    for source in sorted(FOLDER.glob("*.log.xz")):
        file = sync.segment.with_name(source.name.removesuffix(".xz"))
        file.write_bytes(content := lzma.decompress(source.read_bytes()))
        index_of(file).write_text(f"{len(content)}\nCOMPLETED")
        found += [file] if content else []
    return found


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
    pass_time(sync, PATIENCE_S)
    assert sync.stager.status() == {}
    assert sync.store.list("gaps/") == []


def test_a_node_that_left_alive_with_its_log_leaves_a_gap(sync: Sync) -> None:
    leave(sync)
    shutil.rmtree(sync.segment.parent)
    sync.cycle_once(MINUTE_S)
    (told,) = sync.told()
    assert "it has left the ring, and its log cannot be read to its end, which is tried for 60 more minutes" in told
    assert "cdc_raw cannot be read" in told
    pass_time(sync, 600)
    assert "for 50 more minutes" in sync.told()[0]
    pass_time(sync, PATIENCE_S - 600)
    assert is_forgotten(sync)
    (gap,) = gaps(sync)
    assert (gap.node, gap.segment) == (HOST.id, sync.segment.name)
    assert "in its token ranges" in gap.describe(["shop.orders"])


def test_a_node_in_the_folder_of_one_that_left_is_read(sync: Sync) -> None:
    """It has replaced it on the same host, where the folder was not emptied: it reads what is there."""
    leave(sync, others=(WELL,))
    sync.cycle_once(MINUTE_S)
    assert sync.told() == sync.told(WELL) == []
    assert sync.stager.status().keys() == {WELL.id}
    assert sync.stager._logs[WELL.id].counts["staged"] > 0
    assert not sync.segment.exists()
    assert not is_claimed(sync.store, HOST.id)
    assert gaps(sync) == []


def test_what_is_gone_before_another_node_has_the_folder_is_a_gap(sync: Sync) -> None:
    """The host was cleaned, but for the claim: the node was done with, without a word."""
    leave(sync, others=(WELL,))
    for file in (sync.segment, index_of(sync.segment)):
        file.unlink()
    sync.cycle_once(MINUTE_S)
    assert is_forgotten(sync)
    assert [(gap.node, gap.segment) for gap in gaps(sync)] == [(HOST.id, sync.segment.name)]


def test_what_is_gone_before_a_log_was_read_to_its_end_is_a_gap(sync: Sync) -> None:
    """All else was read, and it was long ago that the node left: the first look was the last."""
    leave(sync)
    begin_anew(sync)
    for file in (sync.segment, index_of(sync.segment)):
        file.unlink()
    sync.cycle_once(PATIENCE_S)
    assert not is_forgotten(sync)
    pass_time(sync, 180)
    assert is_forgotten(sync)
    assert [(gap.node, gap.segment) for gap in gaps(sync)] == [(HOST.id, sync.segment.name)]


@pytest.mark.parametrize("alive", [False, True])
def test_a_backlog_is_read_to_its_end_however_long_it_takes(
    sync: Sync, alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour after the node had left, what was not read yet was lost, also if nobody had tried for this hour."""
    monkeypatch.setattr(commitlog_stage, "CYCLE_BYTES", 1)
    segments = add_segments(sync)
    assert len(segments) > 2
    leave(sync, alive=alive)
    begin_anew(sync)
    sync.cycle_once(PATIENCE_S + MINUTE_S)
    for _ in as_long_as(lambda: any(file.exists() for file in segments)):
        assert not is_forgotten(sync)
        sync.cycle_once(PATIENCE_S / 2)
    pass_time(sync, OVER_S)
    assert is_forgotten(sync)
    assert gaps(sync) == []


def test_one_refusal_an_hour_later_loses_nothing(sync: Sync) -> None:
    leave(sync)
    begin_anew(sync)
    with refused(sync):
        sync.cycle_once(PATIENCE_S + MINUTE_S)
        assert "503" in sync.told()[0]
    pass_time(sync, 120)
    assert not sync.segment.exists()
    assert gaps(sync) == []


def test_the_hour_begins_anew_whenever_something_was_read(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitlog_stage, "CYCLE_BYTES", 1)
    segments = add_segments(sync)
    leave(sync)
    for _ in segments:
        with refused(sync):
            pass_time(sync, PATIENCE_S - 180)
        there = sum(file.exists() for file in segments)
        for _ in as_long_as(lambda there=there: sum(file.exists() for file in segments) == there):
            sync.cycle_once(1)
    assert gaps(sync) == []
    pass_time(sync, OVER_S)
    assert is_forgotten(sync)


def test_an_hour_in_which_nobody_tries_does_not_count(sync: Sync) -> None:
    """The loop stood still, or its run had ended."""
    leave(sync)
    away = sync.segment.parent.rename(sync.segment.parent.with_name("not mounted"))
    sync.cycle_once(MINUTE_S)
    sync.cycle_once(2 * PATIENCE_S)
    begin_anew(sync)
    sync.cycle_once(2 * PATIENCE_S)
    assert not is_forgotten(sync)
    away.rename(sync.segment.parent)
    pass_time(sync, 120)
    assert not sync.segment.exists()


def test_the_hour_goes_on_in_the_next_run(sync: Sync) -> None:
    """A run is shorter than an hour."""
    leave(sync)
    shutil.rmtree(sync.segment.parent)
    tries = 0
    for tries in as_long_as(lambda: not is_forgotten(sync), 75):
        if tries % 10 == 0:
            begin_anew(sync)
        sync.cycle_once(MINUTE_S)
    assert 60 < tries + 1 < 75
    assert get_read_node(sync.store, HOST.id) is None


def test_where_the_log_of_a_node_is_may_be_damaged(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stopped all: each new plan failed, then each cycle."""
    sync.add_well(monkeypatch)
    leave(sync, others=(WELL,))
    sync.store.put(f"staging/nodes/{HOST.id}", b"{")
    sync.cycle_once(MINUTE_S)
    assert sync.stager._logs[WELL.id].counts["staged"] > 0
    (told,) = sync.told()
    assert f"staging/nodes/{HOST.id}, where the node's log is, cannot be read" in told
    assert "restore it" in told
    pass_time(sync, PATIENCE_S + MINUTE_S)
    assert is_forgotten(sync)
    assert [gap.node for gap in gaps(sync)] == [HOST.id]


def test_what_must_be_known_of_a_node_that_leaves_is_remembered_while_it_is_there(sync: Sync) -> None:
    assert get_read_node(sync.store, HOST.id) == ReadNode(HOST.address, HOST.port, HOST.datacenter)
    sync.hosts = (replace(HOST, address="127.0.0.9"),)
    begin_anew(sync)
    sync.cycle_once(MINUTE_S)
    assert get_read_node(sync.store, HOST.id) == ReadNode("127.0.0.9", HOST.port, HOST.datacenter)


def test_the_last_segments_of_a_node_that_left_are_archived(sync: Sync) -> None:
    """``commitlog_archive`` watches it no more: with the policy ``always`` they stayed, and a backfill lacked them."""
    sync.stager._config.archive.policy = "always"
    content = sync.segment.read_bytes()
    leave(sync)
    pass_time(sync, OVER_S)
    assert sync.segment.exists(), "commitlog_archive may still be at it"
    pass_time(sync, 2 * MINUTE_S)
    assert is_forgotten(sync)
    assert not sync.segment.exists()
    assert not index_of(sync.segment).exists()
    (entry,) = archived(sync.store, READ)
    assert (entry.node, entry.name) == (HOST.id, sync.segment.name)
    assert entry.first_us is not None, "write times of its rows"
    assert sync.store.get(f"{READ}{HOST.id}/{entry.name}") == content
