"""Reading archived commit logs: what the stage would have read, once, whoever is killed or faster."""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.schema import NodeTables
from ringsync.ledger.archive import READ, WAITING, ArchivedSegment, _put_all, archived
from ringsync.ledger.staging import StageCommit, commit_keys, decode_rows, get_commit, put_commit, read_block
from ringsync.ledger.table_versions import CdcBegun, version_of
from ringsync.replica import session
from ringsync.schema.table import Schema
from ringsync.status import read_statuses
from ringsync.steps.application import ExitCode
from ringsync.steps.archive import archive_reprocess
from ringsync.steps.archive.archive_reprocess import Reprocessor
from ringsync.steps.archive.commitlog_archive import Archiver
from ringsync.steps.sync_plan import SyncPlan
from tests.mortal_store import Killed, MortalStore
from tests.steps.node_logs import finished
from tests.steps.test_archive import SEGMENTS, Nodes, config, failing, names
from tests.steps.test_stager import HOST, TABLES, Cluster, OneByOne, Sync, without, written
from tests.steps.test_stager_cdc_off import index_of, sync_segment
from tests.steps.test_stale_schema import without_column


class Reprocessed:
    """A node's real segment that was archived, and what reading it gives."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.sync = Sync(folder, Cluster(TABLES, TABLES), patch)
        self.store, self.raw = self.sync.store, self.sync.segment.parent
        self.tables, self.without_cdc, self.altered_ms, self.agrees = TABLES, frozenset[str](), 0, True
        patch.setattr(archive_reprocess, "read_tables", lambda node: Schema(self.tables))
        patch.setattr(archive_reprocess, "read_node_tables", lambda node: self.told())
        patch.setattr(archive_reprocess, "ask_one", lambda session, read: read(session))
        patch.setattr(archive_reprocess, "Agreement", lambda *_: lambda: self.agrees)
        patch.setattr(archive_reprocess, "plan_of", lambda *given: SyncPlan(given[3], (HOST,), {}, ()))
        clock = SimpleNamespace(time=lambda: self.sync.now_s, monotonic=lambda: self.sync.now_s)
        patch.setattr(archive_reprocess, "time", clock)
        ring = self.sync.stager._ring_of
        patch.setattr(Reprocessor, "_ring_of", lambda _, keyspace: ring(keyspace))
        self.sync.stager._windows()
        for table in TABLES:
            CdcBegun(self.store).begins(table.table_id, 0)

    def told(self) -> NodeTables:
        ids = frozenset(table.table_id for table in self.tables)
        return NodeTables(ids, ids - self.without_cdc, dict.fromkeys(ids, self.altered_ms))

    def archive(self) -> None:
        nodes = Nodes({HOST.id: self.raw})
        watch = Archiver(config(policy="always"), self.store, "default", nodes)
        watch.cycle()
        assert not failing(watch)

    def reprocessor(self) -> Reprocessor:
        configuration: Any = self.sync.stager._config
        configuration.sync.digest_retention_h = 4.0
        application: Any = SimpleNamespace(config=configuration, store=self.store)
        return Reprocessor(application, None, OneByOne(), lambda errors, node: self.sync.count(errors, node))

    def read(self) -> Counter[str]:
        found = self.reprocessor()
        found.read(list(archived(self.store, WAITING)))
        assert found.left == []
        return found.counts


@pytest.fixture
def of_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reprocessed:
    return Reprocessed(tmp_path, monkeypatch)


def outcomes(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name not in ("read", "read_again") and count}


def test_an_archived_segment_gives_what_the_stage_would_have_read(
    of_node: Reprocessed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_node.archive()
    assert not of_node.sync.segment.exists()
    counts = of_node.read()
    staged = Sync(tmp_path / "staged", Cluster(TABLES, TABLES), monkeypatch).cycle().counts
    assert outcomes(counts) == outcomes(staged)
    assert counts["staged"] > 0
    (key,) = commit_keys(of_node.store, HOST.id)
    assert get_commit(of_node.store, key).blocks
    (entry,) = archived(of_node.store, READ)
    assert entry.first_us is not None
    assert entry.last_us is not None
    assert entry.first_us <= entry.last_us
    assert names(of_node.store, WAITING) == []
    assert of_node.read() == Counter()
    # Cassandra links it again after a crash: it is finished.
    of_node.sync.segment.write_bytes(lzma.decompress(SEGMENTS[0].read_bytes()))
    sync_segment(of_node.sync.segment)
    assert of_node.sync.cycle().counts["rows"] == 0
    assert not of_node.sync.segment.exists()


def test_the_status_names_what_could_not_be_read(of_node: Reprocessed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for that, but for what was archived since."""
    of_node.archive()
    (entry,) = archived(of_node.store, WAITING)
    of_node.store.put(f"cdc/{entry.node}/{entry.name}", b"damaged")
    ours = of_node.reprocessor()
    ours.application.options, ours.application.run = SimpleNamespace(since=None), "r"
    monkeypatch.setattr(session, "spark_session", lambda *_, **__: SimpleNamespace(sparkContext=None))
    for name in ("check_layout", "start_workers", "connect_patiently", "create_state"):
        monkeypatch.setattr(archive_reprocess, name, lambda *_: None)
    monkeypatch.setattr(archive_reprocess, "ErrorTable", lambda *_: SimpleNamespace(put=None))
    monkeypatch.setattr(archive_reprocess, "Reprocessor", lambda *_: ours)
    ours.application.config.sync.stage_cores = ours.application.config.sync.max_errors_per_hour = 1
    ours.application.config.state = SimpleNamespace(keyspace="ringsync")
    read, came = ours.read, replace(entry, name="CommitLog-7-99.log", size=0, crc32c=0)

    def read_while_one_comes(entries: Sequence[ArchivedSegment]) -> None:
        read(entries)
        _put_all(of_node.store, WAITING, came, b"")

    monkeypatch.setattr(ours, "read", read_while_one_comes)
    report, code = archive_reprocess.run.__wrapped__(ours.application)  # type: ignore[attr-defined]
    assert (report["waiting"], code) == (2, ExitCode.COMPLETED_WITH_ERRORS)
    assert read_statuses(of_node.store)["archive_reprocess/archive"]["unreadable"] == [f"{entry.node}/{entry.name}"]


@pytest.mark.parametrize("what", ["new", "cdc"])
def test_a_table_that_nobody_has_seen_yet_is_read(of_node: Reprocessed, what: str) -> None:
    """It was created, or got its cdc, while the sync stood still: its rows counted as not_cdc."""
    of_node.archive()
    table = written()
    of_node.store.delete(f"cdc_begun/{table.table_id}.json")
    if what == "new":
        for stat in of_node.store.list("schemas/"):
            if table.table_id in stat.key or f"/{table.full_name}/" in stat.key:
                of_node.store.delete(stat.key)
    counts = of_node.read()
    assert counts["not_cdc"] == 0
    assert counts["staged"] > 200


def test_a_column_that_nobody_has_recorded_yet_is_read(of_node: Reprocessed) -> None:
    """It was added while the sync stood still: its records were errors."""
    of_node.archive()
    table = written()
    for stat in of_node.store.list("schemas/"):
        if table.table_id in stat.key or f"/{table.full_name}/" in stat.key:
            of_node.store.delete(stat.key)
    version_of(of_node.store, without_column(table))
    assert of_node.read()["errors"] == 0
    assert of_node.sync.errors == 0


def test_what_nodes_disagree_about_waits(of_node: Reprocessed) -> None:
    of_node.archive()
    of_node.tables, of_node.agrees = without(written()), False
    for stat in of_node.store.list("schemas/"):
        if written().table_id in stat.key or f"/{written().full_name}/" in stat.key:
            of_node.store.delete(stat.key)
    found = of_node.reprocessor()
    found.read(list(archived(of_node.store, WAITING)))
    assert "and nodes disagree" in found.left[0]
    assert names(of_node.store, WAITING) == [of_node.sync.segment.name]
    assert of_node.store.list("staging/rows/") == []
    of_node.tables, of_node.agrees = TABLES, True
    assert of_node.read()["not_cdc"] == 0


@pytest.mark.parametrize("before", [True, False])
def test_a_table_that_has_lost_its_cdc(of_node: Reprocessed, before: bool) -> None:
    of_node.archive()
    of_node.without_cdc = frozenset((written().table_id,))
    (entry,) = archived(of_node.store, WAITING)
    of_node.altered_ms = entry.ended_ms + 1 if before else entry.ended_ms - 10 * 3_600_000
    found = of_node.reprocessor()
    began = replace(entry, began_ms=entry.ended_ms - 3_600_000)
    found.read([began])
    assert (found.counts["not_cdc"] == 0) == before


def test_what_the_stage_has_read_of_it_is_not_read_again(of_node: Reprocessed) -> None:
    raw = of_node.sync.segment.read_bytes()
    index_of(of_node.sync.segment).write_text("400000")
    first = of_node.sync.cycle().counts["rows"]
    assert first > 0
    index_of(of_node.sync.segment).write_text(finished(raw))
    of_node.archive()
    rest = of_node.read()["rows"]
    of_node.sync.cycle()
    whole = 0
    for key in commit_keys(of_node.store, HOST.id):
        whole += get_commit(of_node.store, key).counts["rows"]
    assert rest > 0
    assert whole == first + rest == 241


def test_a_stage_that_is_faster_wins(of_node: Reprocessed, monkeypatch: pytest.MonkeyPatch) -> None:
    of_node.archive()
    real, others = archive_reprocess.put_commit, []

    def late(store: Any, commit: StageCommit) -> StageCommit:
        if not others:
            others.append(put_commit(store, StageCommit(HOST.id, 1, (), {7: 9}, {}, {}, ())))
        return real(store, commit)

    monkeypatch.setattr(archive_reprocess, "put_commit", late)
    counts = of_node.read()
    assert counts["rows"] == 241
    first, second = (get_commit(of_node.store, key) for key in commit_keys(of_node.store, HOST.id))
    assert (first.number, second.number, second.ends) == (1, 2, {7: 9})
    assert {stat.key for stat in of_node.store.list("staging/rows/")} == set(second.files), "no file is left over"


@pytest.mark.parametrize("lives", range(1, 40))
def test_a_reading_that_is_killed_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: int) -> None:
    of_node = Reprocessed(tmp_path, monkeypatch)
    of_node.archive()
    mortal = MortalStore(tmp_path / "lake")
    of_node.store = mortal
    monkeypatch.setattr(mortal, "left", lives)
    with suppress(Killed, AssertionError):
        of_node.read()
    mortal.left = 10**6
    of_node.read()
    rows = sum(get_commit(mortal, key).counts["rows"] for key in commit_keys(mortal, HOST.id))
    assert (rows, names(mortal, WAITING), len(names(mortal, READ))) == (241, [], 1)


def test_a_damaged_segment_is_named_and_holds_up_no_other(of_node: Reprocessed) -> None:
    of_node.archive()
    key = f"cdc/{HOST.id}/{of_node.sync.segment.name}"
    whole = of_node.store.get(key)
    of_node.store.put(key, whole[:-9])
    found = of_node.reprocessor()
    found.read(list(archived(of_node.store, WAITING)))
    assert "has other bytes than were archived" in found.left[0]
    assert names(of_node.store, WAITING) == [of_node.sync.segment.name]
    of_node.store.put(key, whole)
    assert of_node.read()["rows"] == 241


def test_reading_again_gives_late_rows_of_the_time_that_is_known(of_node: Reprocessed) -> None:
    of_node.archive()
    of_node.read()
    (entry,) = archived(of_node.store, READ)
    assert entry.first_us is not None
    found = of_node.reprocessor()
    found.read_again([entry])
    assert found.counts["rows"] == found.counts["late"] + found.counts["too_old"] + found.counts["repeated"]
    assert len(commit_keys(of_node.store, HOST.id)) == 1, "the node's commits stay"
    assert found.counts["late"] > 100
    assert len(of_node.store.list("staging/late/")) > 0
    # What was published of older writes is not known any more.
    assert entry.last_us is not None
    of_node.sync.now_s = entry.last_us / 1e6 + 5 * 3600
    found = of_node.reprocessor()
    found.read_again([entry])
    assert (found.counts["late"], found.counts["read_again"]) == (0, 1)
    assert found.counts["too_old"] == found.counts["rows"] - found.counts["not_cdc"] == 241


def test_which_segments_have_writes_of_an_interval(of_node: Reprocessed) -> None:
    of_node.archive()
    (waiting,) = archived(of_node.store, WAITING)
    assert waiting.touches(0, 2**62)
    assert not waiting.touches(waiting.ended_ms + 1, 2**62)
    of_node.read()
    (entry,) = archived(of_node.store, READ)
    assert entry.first_us is not None
    assert entry.last_us is not None
    first_ms, last_ms = entry.first_us // 1000, entry.last_us // 1000
    assert [entry.touches(*times) for times in ((0, first_ms), (0, first_ms + 1), (last_ms, 2**62))] == [
        False,
        True,
        True,
    ]
    assert not entry.touches(last_ms + 1, 2**62)


@pytest.mark.parametrize("staged", [0, 400_000, 10**9])
def test_an_entry_has_the_write_times_of_the_whole_segment(of_node: Reprocessed, staged: int) -> None:
    """The stage may have read all of it, a part or nothing before it is archived: an interval must find it."""
    raw, config_ = of_node.sync.segment.read_bytes(), of_node.sync.stager._config
    config_.archive = SimpleNamespace(policy="always")
    if staged:
        synced = f"{staged}" if staged < len(raw) else finished(raw)
        index_of(of_node.sync.segment).write_text(synced)
        assert of_node.sync.cycle().counts["rows"] > 0
        index_of(of_node.sync.segment).write_text(finished(raw))
    of_node.archive()
    of_node.read()
    (entry,) = archived(of_node.store, READ)
    changes = [row for key in commit_keys(of_node.store, HOST.id) for row in times(of_node.store, key)]
    assert len(changes) > 200
    assert (entry.first_us, entry.last_us) == (min(changes), max(changes))


def times(store: Any, key: str) -> list[int]:
    """The write times of the rows that a commit lists."""
    commit = get_commit(store, key)
    batches = [read_block(store, block.place) for block in commit.blocks]
    batches += [decode_rows(store.get(late)) for late in commit.late]
    return [time for batch in batches for time in batch["write_time"].to_pylist()]


def test_an_interval_leaves_out_what_has_no_rows_of_followed_tables(
    of_node: Reprocessed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cassandra's own tables have rows in each segment, some of them with a write time of 0."""
    monkeypatch.setattr(of_node.sync.stager._config.sync, "follows", lambda name: False, raising=False)
    of_node.archive()
    counts = of_node.read()
    assert counts["not_cdc"] == counts["rows"] == 241
    (entry,) = archived(of_node.store, READ)
    assert not entry.touches(0, 2**62)


def test_what_fails_as_a_whole_holds_up_no_other(of_node: Reprocessed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment at which Spark's workers crash ended each run at the same place."""
    of_node.archive()
    (entry,) = archived(of_node.store, WAITING)
    data = of_node.store.get(f"{WAITING}{entry.node}/{entry.name}")
    behind = replace(entry, node="z")
    _put_all(of_node.store, WAITING, behind, data)
    found = of_node.reprocessor()
    found.context._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
    real = found._stage

    def stage(works: Any, *others: Any, **named: Any) -> Any:
        if works[0].node == HOST.id:
            raise RuntimeError("Python worker exited unexpectedly (crashed)")
        return real(works, *others, **named)

    monkeypatch.setattr(found, "_stage", stage)
    found.read(list(archived(of_node.store, WAITING)))
    assert [one.node for one in archived(of_node.store, WAITING)] == [HOST.id]
    assert [one.node for one in archived(of_node.store, READ)] == ["z"]
    (why,) = found.left
    assert entry.name in why
    assert "crashed" in why


def test_a_damaged_history_of_one_table_holds_up_only_its_rows(of_node: Reprocessed) -> None:
    """It ended each run; and by what was recorded before, its rows would have counted as not_cdc."""
    of_node.archive()
    table = written()
    for stat in of_node.store.list("schemas/"):
        if f"/{table.full_name}/" in stat.key or table.table_id in stat.key:
            of_node.store.put(stat.key, b"{damaged")
    found = of_node.reprocessor()
    found.read(list(archived(of_node.store, WAITING)))
    assert len(names(of_node.store, WAITING)) == 1
    assert found.counts["staged"] == found.counts["not_cdc"] == 0
    assert any("schema of a record's table is unknown" in why for why in found.left)


def test_what_another_run_has_read_meanwhile_is_no_problem(of_node: Reprocessed) -> None:
    of_node.archive()
    entries = list(archived(of_node.store, WAITING))
    assert of_node.read()["read"] == 1
    late = of_node.reprocessor()
    late.read(entries)
    assert late.left == []
    # Its segment alone is gone: that is one.
    (entry,) = archived(of_node.store, READ)
    of_node.store.delete(f"{READ}{entry.node}/{entry.name}")
    late.read_again([entry])
    assert len(late.left) == 1
