"""A column that the schema lacks is waited for before its records are errors: maybe a node does not know of it yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ringsync.schema.table import TableSchema
from ringsync.steps.stage.node_log import PATIENCE_MS
from tests.steps.test_stager import TABLES, Cluster, Sync, without, written


def without_column(table: TableSchema) -> TableSchema:
    """The table as a node shows it that is behind: it lacks the columns that were added."""
    return replace(table, columns=table.key_columns, dropped=())


def test_a_column_that_a_node_does_not_know_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes agree, by what this one has heard of them: it has not heard of the change."""
    behind = (*without(written()), without_column(written()))
    cluster = Cluster(behind, TABLES)
    sync = Sync(tmp_path, cluster, monkeypatch)
    for _ in range(3):
        log = sync.cycle(5)
    assert (log.number, sync.errors, sync.segment.exists()) == (0, 0, True)
    assert "names a column that its table does not have in the schema" in log.status()["error"]
    cluster.known, cluster.version, cluster.others = TABLES, 2, 2
    log = sync.cycle(10)
    assert (sync.errors, log.status()["error"]) == (0, None)
    assert log.counts["rows"] == log.counts["staged"] + log.counts["repeated"] + log.counts["not_cdc"] > 0
    assert log.counts["errors"] == 0


def test_a_log_that_waits_for_a_column_is_looked_at_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every try the wait doubled: while a table was altered again and again, other tables waited half a minute."""
    cluster = Cluster((*without(written()), without_column(written())), TABLES)
    sync = Sync(tmp_path, cluster, monkeypatch)
    for _ in range(20):
        log = sync.cycle(2)
    assert log.number == 0
    cluster.known, cluster.version, cluster.others = TABLES, 2, 2
    sync.cycle(2)
    assert sync.cycle(2).counts["staged"] > 0
    assert sync.errors == 0


def test_a_column_about_which_nodes_disagree_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an error after a minute, though the schema that has it was on its way."""
    cluster = Cluster((*without(written()), without_column(written())), TABLES)
    sync = Sync(tmp_path, cluster, monkeypatch)
    cluster.others = 2
    for _ in range(5):
        log = sync.cycle(PATIENCE_MS / 1000)
    assert (log.number, sync.errors, sync.segment.exists()) == (0, 0, True)
    assert "about which nodes disagree" in log.status()["error"]
    cluster.known, cluster.version = TABLES, 2
    log = sync.cycle(PATIENCE_MS / 1000)
    assert (sync.errors, log.counts["errors"], log.status()["error"]) == (0, 0, None)
    assert log.counts["staged"] > 0


def test_a_node_that_is_down_with_an_old_schema_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster((*without(written()), without_column(written())), TABLES)
    sync = Sync(tmp_path, cluster, monkeypatch)
    cluster.others, cluster.up = 2, False
    sync.cycle()
    assert sync.cycle(PATIENCE_MS / 1000).counts["errors"] == sync.errors > 0


def test_a_column_that_nobody_knows_is_an_error_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behind = (*without(written()), without_column(written()))
    sync = Sync(tmp_path, Cluster(behind, TABLES), monkeypatch)
    assert sync.cycle().number == 0
    log = sync.cycle(PATIENCE_MS / 1000)
    assert log.counts["errors"] == sync.errors > 0
    assert log.counts["staged"] > 0
