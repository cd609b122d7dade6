"""A table loses its cdc, or is dropped, while some of what was written before is not in the logs that can be read."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from ringsync.steps.stage import commitlog_stage
from ringsync.steps.stage.node_log import PATIENCE_MS, SYNC_MARGIN_MS, UNKNOWN_SYNC_MS
from tests.steps.test_stager import FOLDER, HOST, TABLES, WELL, Cluster, Sync, written

SYNC_S = 10
LATER_S = SYNC_S + SYNC_MARGIN_MS / 1000 + 2


def telling(sync: Sync, patch: pytest.MonkeyPatch, period: dict[str, str]) -> None:
    """Have both nodes say where their logs are, and HOST also how often it syncs."""
    told = commitlog_stage.read_settings
    patch.setattr(
        commitlog_stage, "read_settings", lambda *given: told(*given) | (period if given[1] == HOST.id else {})
    )


def index_of(segment: Path) -> Path:
    return segment.with_name(segment.name.replace(".log", "_cdc.idx"))


def sync_segment(segment: Path) -> None:
    index_of(segment).write_text(f"{segment.stat().st_size}\nCOMPLETED")


def copy(segment: Path, digit: int) -> None:
    """Have Cassandra finish another segment with the same rows."""
    raw = lzma.decompress((FOLDER / f"{segment.name}.xz").read_bytes())
    another = segment.with_name(segment.name.replace(".log", f"{digit}.log"))
    another.write_bytes(raw)
    sync_segment(another)


@pytest.mark.parametrize(
    ("period", "synced_after_s"),
    [
        ({"commitlog_sync_period": "10s"}, SYNC_S),
        ({"commitlog_sync_period_in_ms": "10000"}, SYNC_S),
        ({"commitlog_sync_period": "2m"}, 120),
        ({}, UNKNOWN_SYNC_MS // 1000),
    ],
)
def test_rows_that_are_synced_after_cdc_was_switched_off_are_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, period: dict[str, str], synced_after_s: int
) -> None:
    """They were counted as of a table without cdc, once the other node's work had shown that cdc is off."""
    cluster = Cluster(TABLES, TABLES)
    cluster.without_cdc = (written(),)
    sync = Sync(tmp_path, cluster, monkeypatch)
    sync.add_well(monkeypatch)
    telling(sync, monkeypatch, period)
    index_of(sync.segment).unlink()
    while sync.now_s - synced_after_s < 1_790_000_000:
        sync.cycle(2)
    assert sync.store.list("cdc_ended/"), "the other node's work has marked it"
    sync_segment(sync.segment)
    log = sync.cycle()
    assert log.counts["rows"] > log.counts["not_cdc"] == 0


def test_each_node_has_its_own_end_of_cdc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one node was down, rows of the others were published for ever, also those written long after the end."""
    cluster = Cluster(TABLES, TABLES)
    cluster.without_cdc = (written(),)
    sync = Sync(tmp_path, cluster, monkeypatch)
    well = sync.add_well(monkeypatch)
    telling(sync, monkeypatch, {"commitlog_sync_period": "10s"})
    waiting = index_of(well).read_text()
    index_of(well).write_text("nothing that can be read")
    for _ in range(8):
        log = sync.cycle(LATER_S / 2)
    assert log.counts["not_cdc"] == 0
    copy(sync.segment, 1)
    later = sync.cycle(1).counts["not_cdc"]
    assert later > 0
    # A new run knows it from the commit.
    sync.stager._logs.clear()
    copy(sync.segment, 2)
    assert sync.cycle(1).counts["not_cdc"] == later
    # The other node's segment was written before, whenever it can be read.
    index_of(well).write_text(waiting)
    sync.cycle(PATIENCE_MS / 1000)
    log = sync.stager._logs[WELL.id]
    assert log.counts["rows"] > log.counts["not_cdc"] == 0


def test_dropped_tables_of_two_logs_do_not_hide_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each log's look forgot that the other's table had been missed: neither was ever staged."""
    dropped = {table.name: table for table in TABLES if table.full_name in ("shop.elements", "shop.wide")}
    there = tuple(table for table in TABLES if table.name not in dropped)
    sync = Sync(tmp_path, Cluster(there, there), monkeypatch)
    for table in dropped.values():
        sync.never_followed(table)
    well = sync.add_well(monkeypatch)
    wide = sorted(FOLDER.glob("*.log.xz"))[1]
    well.unlink()
    index_of(well).unlink()
    for _ in range(2):
        sync.cycle(1)
    other = well.with_name(wide.name.removesuffix(".xz"))
    other.write_bytes(lzma.decompress(wide.read_bytes()))
    sync_segment(other)
    for _ in range(200):
        sync.cycle(1)
    logs = [sync.stager._logs[host.id] for host in (HOST, WELL)]
    assert [log.number for log in logs] == [1, 1]
    assert all(log.counts["of_dropped_tables"] > 0 for log in logs)
    assert not sync.segment.exists()
    assert not other.exists()
