"""Segments that leave ``cdc_raw`` unread: the gap is named until all of its tables were verified; nothing else is."""

from __future__ import annotations

import lzma
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.config import load_config
from ringsync.ledger.archive import archive_segment
from ringsync.ledger.gaps import Gaps, note_verified
from ringsync.ledger.staging import StageCommit, put_commit
from ringsync.replica.folders import base_folder
from ringsync.schema.table import TableSchema
from ringsync.service.look import look
from ringsync.service.problem import Kind
from ringsync.steps.stage import commitlog_stage, former_nodes, lost_segments
from ringsync.steps.stage.lost_segments import MISSED_MS, LostSegments
from ringsync.storage.port import UnavailableError
from tests.service.test_alarms import watched, written_conf
from tests.steps.test_former_nodes import PATIENCE_S, leave, pass_time
from tests.steps.test_stager import HOST, TABLES, WELL, Cluster, Sync, written
from tests.steps.test_stager_cdc_off import index_of

LATER_S = MISSED_MS / 1000 + 1


@pytest.fixture
def sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sync:
    """A stage that has seen a segment, of which it could read nothing yet."""
    found = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    index_of(found.segment).write_text("0")
    for table in TABLES:
        found.store.put(f"{base_folder(table.keyspace, table.name)}/_delta_log/{0:020}.json", b"{}")
    found.cycle()
    assert gaps(found) == []
    return found


def gaps(sync: Sync) -> list[str]:
    """What ``status`` and the alarms say of gaps; those that are over are closed."""
    config = load_config(written_conf(sync.store.path.parent))
    watched(config, sync.store, sync.now_s, 0)
    seen = look(config, sync.store, sync.now_s)
    assert seen.gaps_over == ()
    return [one.text for one in seen.problems if one.kind == Kind.SEGMENTS_LOST]


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
    told: str | None = log.status()["error"]
    return told or next(iter(gaps(sync)), None)


def test_a_segment_that_was_removed_unread_is_a_gap(sync: Sync) -> None:
    lose(sync)
    sync.cycle()
    assert gaps(sync) == [], "maybe the folder is stale"
    told = later(sync)
    assert told is not None
    assert f"{sync.segment.name} was removed from its cdc_raw before it was read" in told
    assert "cdcservice verify --repair --table '*.*' corrects all" in told
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
    assert gaps(sync) == []
    assert sync.store.list("gaps/") == []


def left_out(table: TableSchema) -> Any:
    """Planning that leaves a table out, whose recorded version is damaged."""
    made, why = commitlog_stage.plan_of, {table.full_name: "its version is damaged: restore it"}

    def plan_of(*given: Any) -> Any:
        plan = made(*given)
        kept = tuple(one for one in plan.tables if one.table_id != table.table_id)
        return replace(plan, tables=kept, left_out=why)

    return plan_of


def test_a_gap_names_a_table_that_could_not_be_planned_just_then(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs with its rows wait, so it is the one that fills ``cdc_raw``. The gap was closed without it."""
    table = written()
    monkeypatch.setattr(commitlog_stage, "plan_of", left_out(table))
    sync.cycle(61)
    lose(sync)
    assert later(sync)
    (gap,) = Gaps(sync.store).look().values()
    assert gap is not None
    assert table.full_name in gap.tables.values()
    for other in TABLES:
        if other is not table:
            note_verified(sync.store, other.table_id, int(sync.now_s * 1000))
    (told,) = gaps(sync)
    assert told.endswith(f"Correct the replicas: cdcservice verify --repair --table {table.full_name}")
    note_verified(sync.store, table.table_id, int(sync.now_s * 1000))
    assert gaps(sync) == []


def test_a_gap_names_a_table_that_has_cdc_since_the_last_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, table = Cluster(TABLES, TABLES), written()
    sync = Sync(tmp_path, cluster, monkeypatch)
    sync.never_followed(table)
    cluster.alter(sync.now_s - 1000, (table,))
    monkeypatch.setattr(commitlog_stage, "plan_of", left_out(table))
    index_of(sync.segment).write_text("0")
    sync.cycle()
    cluster.alter(sync.now_s, ())
    lose(sync)
    for seconds in (1, LATER_S):
        sync.cycle(seconds)
    ((_, gap),) = Gaps(sync.store).look().items()
    assert gap is not None
    assert gap.tables[table.table_id] == table.full_name


def test_the_gap_of_a_node_that_left_names_a_table_that_could_not_be_planned(
    sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = written()
    monkeypatch.setattr(commitlog_stage, "plan_of", left_out(table))
    leave(sync)
    shutil.rmtree(sync.segment.parent)
    pass_time(sync, PATIENCE_S + 200)
    ((_, gap),) = Gaps(sync.store).look().items()
    assert gap is not None
    assert gap.tables.keys() == {one.table_id for one in TABLES}


def lose_more(sync: Sync, segments: int) -> None:
    """Lose further segments, which the stage has seen."""
    new = [sync.segment.with_name(sync.segment.name.replace(".log", f"{n}.log")) for n in range(segments)]
    for file in new:
        file.write_bytes(b"")
        index_of(file).write_text("0")
    sync.cycle()
    for file in new:
        file.unlink()
        index_of(file).unlink()


def test_many_lost_segments_cost_a_few_requests_each_and_an_open_gap_none(
    sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was told of as it was found, table by table, one request after the other: with 40 segments and 50 tables a
    cycle had 124,020 requests. All stages did that for each gap once in a minute."""
    lose_more(sync, 20)
    sync.cycle()
    asked: Counter[str] = Counter()
    for name in ("get", "stat", "list", "put"):
        real = getattr(sync.store, name)
        monkeypatch.setattr(
            sync.store,
            name,
            lambda *given, _real=real, _name=name, **more: asked.update([_name]) or _real(*given, **more),
        )
    sync.cycle(LATER_S)
    assert len(sync.store.list("gaps/")) == 20
    assert sum(asked.values()) < 20 * 4 + 20, asked
    asked.clear()
    sync.cycle(61)
    sync.cycle(61)
    assert sum(asked.values()) < 20, asked


def test_a_store_that_fails_when_gaps_are_noted_concerns_their_node(
    sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cycle of the whole queue failed."""
    sync.add_well(monkeypatch)
    sync.cycle(61)
    lose(sync)
    sync.cycle()

    def failing(*_: Any) -> None:
        raise UnavailableError("503")

    with monkeypatch.context() as away:
        away.setattr(lost_segments, "note_gap", failing)
        log = sync.cycle(LATER_S)
    assert "503" in str(log.failure)
    assert sync.stager._logs[WELL.id].failure is None
    sync.cycle(61)
    assert sync.segment.name in gaps(sync)[0]


def test_a_store_that_fails_when_a_node_is_done_with_concerns_that_node(
    sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cycle of the whole queue failed."""
    leave(sync)
    shutil.rmtree(sync.segment.parent)

    def failing(*_: Any) -> None:
        raise UnavailableError("503")

    with monkeypatch.context() as away:
        away.setattr(former_nodes, "note_gap", failing)
        pass_time(sync, PATIENCE_S + 200)
    assert sync.store.list("gaps/") == []
    pass_time(sync, 200)
    assert len(sync.store.list("gaps/")) == 1


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
    put_commit(sync.store, StageCommit(HOST.id, 1, (), {}, {identity: 5}, {}, ()))
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
    sync.cycle(60)
    assert not index_of(newest).exists()
    assert f"{newest.name} was removed from its cdc_raw" in gaps(sync)[0]
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
    sync.cycle(60)
    assert gaps(sync) == []
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
