"""The plan of an interval, made while one table's history is damaged, or while the schema changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.node import ChangingSchemaError
from ringsync.cluster.schema import NodeTables
from ringsync.ledger.staging import Bucket
from ringsync.ledger.table_versions import CdcBegun, version_of
from ringsync.ring.ring import Host, Replication
from ringsync.schema.table import Schema
from ringsync.steps import sync_plan
from ringsync.storage.local import LocalStore
from tests.steps.test_close import TABLE

HOST = Host("a", "127.0.0.1", 9042, "dc", "r1", (0,), True)
SIMPLE = Replication("SimpleStrategy", (("", 1),))


def test_a_table_whose_history_is_damaged_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table had a plan."""
    store, other = LocalStore(tmp_path), replace(TABLE, name="other", table_id="f" * 32)
    version_of(store, TABLE)
    store.put(f"schemas/{TABLE.keyspace}.{TABLE.name}/000001.json", b"{")
    monkeypatch.setattr(sync_plan, "read_tables", lambda session: Schema((TABLE, other)))
    monkeypatch.setattr(sync_plan, "read_hosts", lambda session: (HOST,))
    monkeypatch.setattr(sync_plan, "connected_nodes", lambda session: ())
    monkeypatch.setattr(sync_plan, "read_replications", lambda session, names: dict.fromkeys(names, SIMPLE))
    ids = frozenset((TABLE.table_id, other.table_id))
    monkeypatch.setattr(sync_plan, "read_node_tables", lambda node: NodeTables(ids, ids, {}))
    monkeypatch.setattr(sync_plan, "ask_one", lambda session, read: read(session))
    sync = SimpleNamespace(datacenters=(), follows=lambda name: True, bucket_by_of=lambda name: "time")
    config: Any = SimpleNamespace(sync=sync, server_name="test")
    plan = sync_plan.make_plan(store, config, None, Bucket(0, 60_000))
    assert [table.schema for table in plan.tables] == [other]
    assert "000001.json cannot be read" in plan.left_out[TABLE.full_name]
    # What is logged while it is planned is kept, though its cdc may be off before anything is staged.
    assert {TABLE.table_id, other.table_id} <= CdcBegun(store)._begun, "also of one that is left out"


def test_the_sync_goes_on_while_the_schema_changes_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Migrations stopped the stage of all nodes, and the closing."""

    def changing(*_: Any) -> Any:
        raise ChangingSchemaError

    monkeypatch.setattr(sync_plan, "ask_one", changing)
    store, now = LocalStore(tmp_path), Bucket(60_000, 60_000)
    before = sync_plan.SyncPlan(Bucket(0, 60_000), (HOST,), {}, ())
    config: Any = None
    plan = sync_plan.plan_of(store, config, None, now, before)
    assert plan == replace(before, interval=now), "what is staged meanwhile is of the present"
    with pytest.raises(ChangingSchemaError):
        sync_plan.plan_of(store, config, None, now)
    assert store.list("plans/") == []
