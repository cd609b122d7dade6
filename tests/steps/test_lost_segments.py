"""Segments that leave ``cdc_raw`` unread: the gap is named until all of its tables were verified; nothing else is."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest

from ringsync.ledger.archive import archive_segment
from ringsync.ledger.gaps import Gap, note_gap, note_verified, open_gaps
from ringsync.ledger.staging import StageCommit, put_commit
from ringsync.replica.base import base_folder
from ringsync.steps.stage import lost_segments
from ringsync.steps.stage.lost_segments import MISSED_MS, LostSegments
from ringsync.storage.local import LocalStore
from ringsync.storage.port import UnavailableError
from tests.steps.test_stager import HOST, TABLES, Cluster, Sync
from tests.steps.test_stager_cdc_off import index_of

LATER_S = MISSED_MS / 1000 + 1


@pytest.fixture
def sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sync:
    """A stage that has seen a segment, of which it could read nothing yet."""
    found = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    index_of(found.segment).write_text("0")
    for table in TABLES:
        found.store.put(f"{base_folder(table.keyspace, table.name)}/_delta_log/{0:020}.json", b"{}")
    assert found.cycle().status()["gap"] is None
    return found


def lose(sync: Sync) -> None:
    sync.segment.unlink()
    index_of(sync.segment).unlink()


def begin_anew(sync: Sync) -> None:
    """As another process."""
    sync.stager._logs.clear()
    sync.stager._lost = LostSegments(sync.store)


def later(sync: Sync) -> str | None:
    for seconds in (1, LATER_S, LATER_S):
        log = sync.cycle(seconds)
    told: str | None = log.status()["error"] or log.status()["gap"]
    return told


def test_a_segment_that_was_removed_unread_is_a_gap(sync: Sync) -> None:
    lose(sync)
    assert sync.cycle().status()["gap"] is None, "maybe the folder is stale"
    told = later(sync)
    assert told is not None
    assert f"{sync.segment.name} was removed from its cdc_raw before it was read" in told
    assert "cdcservice verify --repair --table shop.orders" in told
    assert "2026-" in told
    assert later(sync) == told, "it stays"
    # A new run knows it, too, and so does one that begins after the loss.
    begin_anew(sync)
    assert later(sync) == told
    # It is closed when all tables were verified after it was found.
    for table in TABLES:
        note_verified(sync.store, table.table_id, int(sync.now_s * 1000) - 3_600_000)
    assert later(sync) == told
    for table in TABLES[1:]:
        note_verified(sync.store, table.table_id, int(sync.now_s * 1000))
    assert later(sync) != told
    assert f"--table {TABLES[0].full_name}" in str(later(sync))
    note_verified(sync.store, TABLES[0].table_id, int(sync.now_s * 1000))
    for _ in range(2):
        log = sync.cycle(61)
    assert log.status()["gap"] is None
    assert sync.store.list("gaps/") == []


def test_a_run_that_begins_after_the_loss_notices_it(sync: Sync) -> None:
    begin_anew(sync)
    lose(sync)
    assert "was removed from its cdc_raw" in str(later(sync))


def test_a_segment_that_comes_back_is_no_gap(sync: Sync, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    shutil.copytree(sync.segment.parent, aside)
    lose(sync)
    sync.cycle()
    shutil.copy(aside / sync.segment.name, sync.segment)
    shutil.copy(aside / index_of(sync.segment).name, index_of(sync.segment))
    assert later(sync) is None


def test_what_is_archived_or_read_by_another_is_no_gap(sync: Sync, tmp_path: Path) -> None:
    archive_segment(sync.store, HOST.id, sync.segment, "1\nCOMPLETED", 0, 0)
    lose(sync)
    assert later(sync) is None
    # Another process has read it whole, and removed it.
    another = sync.segment.with_name(sync.segment.name.replace(".log", "9.log"))
    another.write_bytes(lzma.compress(b"x"))
    index_of(another).write_text("0")
    log = sync.cycle()
    assert log.unread
    identity = next(iter(log.unread))
    put_commit(sync.store, StageCommit(HOST.id, 1, 5, (), {}, {identity: 5}, {}, ()))
    another.unlink()
    index_of(another).unlink()
    assert later(sync) is None
    assert sync.store.list("gaps/") == []


def test_an_index_that_is_left_alone_is_a_gap_too_and_is_removed(sync: Sync) -> None:
    """Cassandra writes the index of its newest segment again after the folder was wiped."""
    newest = sync.segment.with_name(sync.segment.name.replace(".log", "9.log"))
    index_of(newest).write_text("100")
    assert f"who has removed {newest.name}?" in str(later(sync))
    assert [stat.key.split("/")[-1] for stat in sync.store.list("gaps/")] == [f"{newest.name}.json"]
    assert index_of(newest).exists(), "it may come back"
    log = sync.cycle(60)
    assert not index_of(newest).exists()
    assert f"{newest.name} was removed from its cdc_raw" in str(log.status()["gap"])
    assert sync.cycle(1).status()["error"] is None
    # As long as Cassandra writes to it, more is lost; that is no other gap.
    index_of(newest).write_text("200")
    later(sync)
    sync.cycle(60)
    assert len(sync.store.list("gaps/")) == 1
    assert not index_of(newest).exists()


def test_an_index_of_what_was_archived_is_removed_without_a_gap(sync: Sync) -> None:
    archive_segment(sync.store, HOST.id, sync.segment, "1\nCOMPLETED", 0, 0)
    sync.segment.unlink()
    index_of(sync.segment).write_text("1\nCOMPLETED")
    later(sync)
    assert sync.cycle(60).status()["gap"] is None
    assert not index_of(sync.segment).exists()
    assert sync.store.list("gaps/") == []


def test_segments_without_changes_may_go(sync: Sync) -> None:
    plain = sync.segment.with_name(sync.segment.name.replace(".log", "8.log"))
    plain.write_bytes(b"")
    sync.cycle()
    plain.unlink()
    assert later(sync) is None


def test_a_folder_that_cannot_be_listed_has_lost_nothing(sync: Sync, tmp_path: Path) -> None:
    sync.segment.parent.rename(tmp_path / "elsewhere")
    assert "cannot be read" in str(later(sync))
    (tmp_path / "elsewhere").rename(sync.segment.parent)
    assert later(sync) is None


def test_a_wiped_folder_is_a_gap_when_the_node_writes_again(sync: Sync) -> None:
    for file in sync.segment.parent.iterdir():
        if not file.name.startswith("ringsync-claim"):
            file.unlink()
    assert "has no segment" in str(later(sync))
    sync.segment.with_name("CommitLog-7-1999999999998.log").write_bytes(b"")
    assert "was removed from its cdc_raw" in str(later(sync))


def test_a_request_that_fails_once_hides_no_gap(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(sync)
    sync.cycle()
    real, failed = lost_segments.find, list[object]()

    def find(*given: Any) -> Any:
        if not failed:
            failed.append(given)
            raise UnavailableError("503")
        return real(*given)

    monkeypatch.setattr(lost_segments, "find", find)
    sync.cycle(LATER_S)
    assert failed
    assert "was removed from its cdc_raw" in str(later(sync) or later(sync))


def test_tables_that_are_gone_or_have_no_replica_keep_no_gap_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    one, gone = "a" * 32, "b" * 32
    note_gap(store, Gap("n", "h:9042", "CommitLog-7-1.log", 0, 1000, {one: "shop.orders", gone: "shop.gone"}, ()))

    def has_replica(table_id: str, name: str) -> bool:
        return table_id == one

    (told,) = open_gaps(store, has_replica)["n"]
    assert "--table shop.orders" in told
    assert "shop.gone" not in told
    note_verified(store, one, 2000)
    assert open_gaps(store, has_replica) == {}
    # Where there is nothing to verify, somebody has to take note of the gap.
    note_gap(store, Gap("n", "h:9042", "CommitLog-7-2.log", 0, 3000, {gone: "shop.gone"}, ()))
    (told,) = open_gaps(store, has_replica)["n"]
    assert "remove this object" in told
