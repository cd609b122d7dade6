"""A damaged version of one table holds up the nodes whose log has rows of it, and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringsync.changes.identity import TableVersion
from ringsync.ring.ring import Replication
from ringsync.schema.table import TableSchema
from ringsync.steps.stage import commitlog_stage
from ringsync.steps.stage.node_log import PATIENCE_MS
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
