"""A table loses its cdc, gets it, or is dropped, while some of what was written before cannot be read yet."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.ledger.left_tables import LeftTable, left_tables, when_left
from ringsync.schema.table import UnreadableTable
from ringsync.steps.absent_tables import GONE_AFTER_S
from ringsync.steps.stage import commitlog_stage
from ringsync.steps.stage.node_log import PATIENCE_MS, SYNC_MARGIN_MS, UNKNOWN_SYNC_MS
from tests.steps.node_logs import finished
from tests.steps.test_stager import FOLDER, HOST, NOW_S, TABLES, WELL, Cluster, Sync, without, written

SYNC_S = 10
LATER_S = SYNC_S + SYNC_MARGIN_MS / 1000 + 2


def telling(sync: Sync, patch: pytest.MonkeyPatch, period: dict[str, str]) -> None:
    """Have nodes say where their logs are, and HOST also how often it syncs."""
    told = commitlog_stage.read_settings
    patch.setattr(
        commitlog_stage, "read_settings", lambda *given: told(*given) | (period if given[1] == HOST.id else {})
    )


def index_of(segment: Path) -> Path:
    return segment.with_name(segment.name.replace(".log", "_cdc.idx"))


def sync_segment(segment: Path) -> None:
    index_of(segment).write_text(finished(segment.read_bytes()))


def copy(segment: Path, digit: int) -> None:
    """Have Cassandra finish another segment with the same rows."""
    raw = lzma.decompress((FOLDER / f"{segment.name}.xz").read_bytes())
    another = segment.with_name(segment.name.replace(".log", f"{digit}.log"))
    another.write_bytes(raw)
    sync_segment(another)


def test_what_is_logged_before_and_after_cdc_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(TABLES, TABLES)
    sync = Sync(tmp_path, cluster, monkeypatch)
    telling(sync, monkeypatch, {"commitlog_sync_period": "10s"})
    cluster.without_cdc = (written(),)
    assert sync.cycle().counts["not_cdc"] == 0, "it is logged before"
    sync.cycle(LATER_S)
    copy(sync.segment, 1)
    of_table = sync.cycle().counts["not_cdc"]
    assert of_table > 0
    cluster.alter(sync.now_s, ())
    copy(sync.segment, 2)
    assert sync.cycle().counts["not_cdc"] == of_table, "it has cdc again"


def test_that_a_table_lost_cdc_is_noted_before_its_log_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads it again."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    off = (written().table_id, int(NOW_S * 1000))
    stage_all, put_commit = sync.stager._stage, commitlog_stage.put_commit
    monkeypatch.setattr(
        sync.stager,
        "_stage",
        lambda *given: [replace(part, switched_off=frozenset({off})) for part in stage_all(*given)],
    )

    def put(*given: Any) -> Any:
        assert left_tables(sync.store) == {off[0]}
        assert when_left(sync.store, off[0]) == LeftTable(off[1], has_cdc=False)
        return put_commit(*given)

    monkeypatch.setattr(commitlog_stage, "put_commit", put)
    assert sync.cycle().number == 1


def test_a_table_that_was_never_followed_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(TABLES, TABLES)
    cluster.without_cdc = (written(),)
    sync = Sync(tmp_path, cluster, monkeypatch)
    sync.never_followed(written())
    assert sync.cycle().counts["not_cdc"] > 0


@pytest.mark.parametrize(
    ("period", "synced_after_s"),
    [
        ({"commitlog_sync_period": "10s"}, SYNC_S),
        ({"commitlog_sync_period_in_ms": "10000"}, SYNC_S),
        ({"commitlog_sync_period": "2m"}, 120),
        ({}, UNKNOWN_SYNC_MS // 1000),
    ],
)
@pytest.mark.parametrize("stale_s", [0, PATIENCE_MS // 1000])
def test_rows_that_are_synced_after_cdc_was_switched_off_are_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, period: dict[str, str], synced_after_s: int, stale_s: int
) -> None:
    """They were counted as of a table without cdc, once another node's work had shown that cdc is off; also where the
    mounted folder showed their index late."""
    cluster = Cluster(TABLES, TABLES)
    cluster.without_cdc = (written(),)
    sync = Sync(tmp_path, cluster, monkeypatch)
    sync.add_well(monkeypatch)
    telling(sync, monkeypatch, period)
    index_of(sync.segment).unlink()
    while sync.now_s - synced_after_s - stale_s < NOW_S:
        sync.cycle(2)
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


def test_an_earlier_end_of_cdc_is_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off; then nobody looked while it was on, and off again: all rows from the time between counted as not_cdc."""
    cluster = Cluster(TABLES, TABLES)
    cluster.without_cdc = (written(),)
    sync = Sync(tmp_path, cluster, monkeypatch)
    telling(sync, monkeypatch, {"commitlog_sync_period": "10s"})
    sync.cycle()
    for digit in (1, 2):
        sync.cycle(LATER_S)
        copy(sync.segment, digit)
        log = sync.cycle()
    before = log.counts["not_cdc"]
    assert before > 0
    sync.now_s += 3600
    cluster.alter(sync.now_s - 60, cluster.without_cdc)
    copy(sync.segment, 3)
    assert sync.cycle().counts["not_cdc"] == before


def test_a_node_that_is_ahead_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node was asked whether a table has cdc, which did not know it yet: the rows counted as not_cdc."""
    cluster, execute = Cluster(TABLES, TABLES), Cluster.execute
    sync = Sync(tmp_path, cluster, monkeypatch)
    sync.never_followed(written())

    def behind(asked: Cluster, query: str, parameters: Any = None, host: Any = None) -> Any:
        asked.without_cdc = () if host is not None and host.host_id == HOST.id else (written(),)
        return execute(asked, query, parameters, host)

    monkeypatch.setattr(Cluster, "execute", behind)
    log = sync.cycle()
    assert log.counts["rows"] > log.counts["not_cdc"] == 0


def test_a_log_whose_node_cannot_be_asked_waits_while_nodes_disagree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who answers for it may not know yet that a table has cdc, or that there is a table."""
    for known in (TABLES, without(written())):
        cluster = Cluster(known, known)
        cluster.can_be_asked, cluster.others, cluster.without_cdc = False, 2, (written(),)
        sync = Sync(tmp_path / str(len(known)), cluster, monkeypatch)
        sync.never_followed(written())
        for _ in range(4):
            log = sync.cycle(GONE_AFTER_S)
        assert (log.number, sync.errors, sync.segment.exists()) == (0, 0, True)
        assert log.status()["error"]
        cluster.known = cluster.there = TABLES
        cluster.alter(sync.now_s, ())
        log = sync.cycle(GONE_AFTER_S)
        assert (log.counts["not_cdc"], log.counts["of_dropped_tables"], sync.errors) == (0, 0, 0)
        assert log.counts["staged"] > 0


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


@pytest.mark.parametrize("has_cdc", [False, True])
def test_a_table_that_cannot_be_read_stops_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cdc: bool
) -> None:
    """Its records were taken for those of a table that may be new: the log of each node stood still for ever."""
    cluster = Cluster(without(written()), TABLES)
    cluster.without_cdc = () if has_cdc else (written(),)
    sync = Sync(tmp_path, cluster, monkeypatch)
    sync.never_followed(written())
    table = written()
    sync.unreadable = (UnreadableTable(table.keyspace, table.name, table.table_id, "has a type of the future"),)
    log = sync.cycle()
    assert (log.number, sync.segment.exists(), log.status()["error"]) == (1, False, None)
    assert log.counts["staged"] > 0
    # A record that has rows of other tables, too, is never passed over.
    assert (sync.errors > 10) == has_cdc
    assert log.counts["records_passed_over"] > 10
    assert sync.errors == log.counts["of_unknown_tables"]


def test_schemas_are_read_again_only_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, asked = Cluster(TABLES, TABLES), []
    sync = Sync(tmp_path, cluster, monkeypatch)
    sync.add_well(monkeypatch)
    execute = cluster.execute
    monkeypatch.setattr(cluster, "execute", lambda *given, **named: asked.append(given[0]) or execute(*given, **named))
    sync.cycle()
    assert len([query for query in asked if "FROM system_schema.tables" in query]) == 1, "both nodes have one version"
    asked.clear()
    copy(sync.segment, 1)
    sync.cycle()
    assert [query for query in asked if "system_schema" in query] == []
    cluster.alter(sync.now_s, ())
    copy(sync.segment, 2)
    sync.cycle()
    assert len([query for query in asked if "FROM system_schema.tables" in query]) == 1
