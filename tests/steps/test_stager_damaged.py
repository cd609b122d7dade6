"""A damaged version of one table holds up the nodes whose log has rows of it, and nobody else. A segment of a node that
has crashed is read again before its end is believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringsync.changes.identity import TableVersion
from ringsync.formats.commitlog.names import segment_id
from ringsync.formats.commitlog.segment import read_segment
from ringsync.ring.ring import Replication
from ringsync.schema.table import TableSchema
from ringsync.steps.stage import commitlog_stage
from ringsync.steps.stage.node_log import PATIENCE_MS, NodeLog
from ringsync.steps.sync_plan import SyncPlan, SyncTable
from tests.steps.test_stager import HOST, NOW_S, TABLES, WELL, Cluster, Sync, written
from tests.steps.test_stager_cdc_off import index_of


def damage(sync: Sync, table: TableSchema, patch: pytest.MonkeyPatch) -> tuple[str, bytes]:
    """Damage the version of a table, before this process has made its first plan; the object, and what it was."""
    rings = {one.keyspace: Replication("SimpleStrategy", (("", 1),)) for one in TABLES}

    def plan_of(store: Any, config: Any, session: Any, interval: Any, before: Any) -> SyncPlan:
        others = [one for one in TABLES if one is not table]
        planned = tuple(SyncTable(TableVersion.first(one), "t", True) for one in others)
        return SyncPlan(interval, sync.hosts, rings, planned)

    patch.setattr(commitlog_stage, "plan_of", plan_of)
    key = f"schemas/{table.full_name}/000001.json"
    whole = sync.store.get(key)
    sync.store.put(key, whole[:-9])
    return key, whole


def test_a_node_whose_log_has_rows_of_the_table_waits_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cycle failed: no node was staged, and no status named one."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    well = sync.add_well(monkeypatch)
    well.with_name(well.name.replace(".log", "_cdc.idx")).unlink()  # nothing of it has rows of the table
    key, whole = damage(sync, written(), monkeypatch)
    for seconds in (1, PATIENCE_MS / 1000, 10):
        log = sync.cycle(seconds)
        assert (log.number, sync.errors, sync.segment.exists()) == (0, 0, True)
        assert f"{written().full_name}: {key} cannot be read" in (log.status()["error"] or "")
        assert sync.stager._logs[WELL.id].status()["error"] is None
    assert capsys.readouterr().out.count(f"{key} cannot be read") == 1
    sync.store.put(key, whole)
    log = sync.cycle(120)
    assert (log.counts["staged"] > 0, log.status()["error"], sync.errors) == (True, None, 0)
    assert not sync.segment.exists()


def test_a_node_whose_log_has_no_row_of_the_table_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(TABLES, TABLES)
    sync = Sync(tmp_path, cluster, monkeypatch)
    other = TableSchema("shop", "other", "7" * 32, written().columns)
    cluster.known = cluster.there = (*TABLES, other)
    sync.store.put("schemas/shop.other/000001.json", b"{")
    sync.store.put(f"schemas/{other.table_id}.json", b'{"histories": {"shop.other": 1}}')
    log = sync.cycle()
    assert (log.number, log.counts["staged"] > 0, log.status()["error"]) == (1, True, None)
    assert HOST.id in sync.stager.status()


def test_a_table_that_lost_cdc_long_ago_holds_up_only_nodes_that_may_have_rows_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one node could not be read whole, the damaged version held up the others, too."""
    cluster = Cluster(TABLES, TABLES)
    cluster.without_cdc, cluster.altered_s = (written(),), NOW_S - 14 * 86400
    sync = Sync(tmp_path, cluster, monkeypatch)
    well = index_of(sync.add_well(monkeypatch))
    index, waiting = index_of(sync.segment), well.read_text()
    index.unlink()
    well.write_text("nothing that can be read")
    for _ in range(3):
        sync.cycle(20)
    damage(sync, written(), monkeypatch)
    sync.stager._versions.clear()
    index.write_text(waiting)
    log = sync.cycle()
    assert (log.number, log.counts["not_cdc"] > 0, log.status()["error"]) == (1, True, None)
    well.write_text(waiting)
    sync.cycle(PATIENCE_MS / 1000)
    assert sync.stager._logs[WELL.id].number == 0


PAGE = 4096


class Crashed:
    """A stager whose node has crashed: behind the last section nothing was synced, and its index has the file's size.

    :ivar marker: place of the last section's marker; ``end``: end of this section
    :ivar records: records of the segment
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, unsynced: bytes = b"") -> None:
        # Another node, which has not crashed; the last that is made has the clock.
        quiet, self.sync = (Sync(path, Cluster(TABLES, TABLES), patch) for path in (folder.with_name("quiet"), folder))
        self.segment = self.sync.segment
        raw = self.segment.read_bytes()
        sections = read_segment(raw, self.segment.name).sections
        last = max(number for number, one in enumerate(sections) if one.end - one.start > 3 * PAGE)
        self.marker, self.end = sections[last].start - 8, sections[last].end
        self.whole = (raw[: self.end] + bytes(8) + unsynced).ljust(len(raw), b"\0")
        quiet.segment.write_bytes(self.whole[: self.end].ljust(len(raw), b"\0"))
        index_of(quiet.segment).write_text(f"{self.end}\nCOMPLETED")
        self.records = quiet.cycle().counts["records"]

    def show(self, *, from_byte: int, to_byte: int) -> None:
        """Have some bytes be shown as they once were: zeros."""
        shown = bytearray(self.whole)
        shown[from_byte:to_byte] = bytes(to_byte - from_byte)
        self.segment.write_bytes(shown)
        index_of(self.segment).write_text(f"{len(shown)}\nCOMPLETED")

    def outcome(self, log: NodeLog) -> tuple[int, int, int, bool]:
        return log.counts["records"], log.counts["damages"], self.sync.errors, self.segment.exists()


@pytest.mark.parametrize("pages", [1, 10**6])
@pytest.mark.parametrize("unsynced", [b"", b"never synced"])
def test_old_pages_of_a_crashed_segment_are_not_taken_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int, unsynced: bytes
) -> None:
    """The segment was committed as whole and removed, and its last section was gone without a word."""
    crashed = Crashed(tmp_path / "one", monkeypatch, unsynced)
    size = len(crashed.whole)
    crashed.show(from_byte=crashed.marker, to_byte=min((crashed.marker // PAGE + pages) * PAGE, size))
    log = crashed.sync.cycle()
    assert crashed.outcome(log) == (0, 0, 0, True)
    assert "its node crashed, and no sync marker is behind position" in (log.status()["error"] or "")
    crashed.show(from_byte=size, to_byte=size)
    log = crashed.sync.cycle(PATIENCE_MS / 1000)
    assert crashed.outcome(log) == (crashed.records, 0, 0, False)
    assert log.status()["error"] is None


def test_what_was_never_synced_is_no_damage_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = Crashed(tmp_path / "one", monkeypatch, b"never synced")
    size = len(crashed.whole)
    crashed.show(from_byte=size, to_byte=size)
    read: list[int] = []
    real = crashed.sync.stager._stage
    monkeypatch.setattr(crashed.sync.stager, "_stage", lambda *given: read.append(1) or real(*given))
    for _ in range(PATIENCE_MS // 10_000):
        assert crashed.outcome(crashed.sync.cycle(10)) == (0, 0, 0, True)
    assert crashed.outcome(crashed.sync.cycle(10)) == (crashed.records, 0, 0, False)
    assert len(read) == 2, "each reading costs as much as staging it"


def test_what_the_index_said_before_the_crash_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a run that begins later: a commit keeps it in mind."""
    crashed = Crashed(tmp_path / "one", monkeypatch)
    size = len(crashed.whole)
    crashed.show(from_byte=crashed.marker, to_byte=size)
    content = crashed.segment.read_bytes()
    index_of(crashed.segment).write_text(str(crashed.end))
    log = crashed.sync.cycle()
    assert dict(log.reached) == {segment_id(crashed.segment.name): crashed.end}
    log.__dict__.update(NodeLog(HOST.id, HOST.endpoint, None).__dict__)
    index_of(crashed.segment).write_text(f"{size}\nCOMPLETED")
    log = crashed.sync.cycle()
    assert f"by an earlier index the segment reaches {crashed.end}" in (log.status()["error"] or "")
    log = crashed.sync.cycle(PATIENCE_MS / 1000)
    assert (log.counts["damages"], crashed.sync.errors, crashed.segment.exists()) == (1, 1, False)
    assert crashed.sync.store.get(f"cdc_damaged/{HOST.id}/{crashed.segment.name}") == content
    assert dict(log.reached) == {}
