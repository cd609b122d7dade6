"""A replica that could not be used for hours, and one that is idle; a pass that cannot be forgotten."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable

from ringsync.changes.identity import TableVersion
from ringsync.config import load_config
from ringsync.cql.types import Native
from ringsync.ledger.passes import get_pass, pass_numbers
from ringsync.ledger.staging import closed_until, put_closed_until
from ringsync.ledger.table_versions import version_of, versions_of
from ringsync.replica.delta_log import DataFile, read_snapshot, set_schema
from ringsync.replica.evolve import Piece, RewriteTask, rewrite
from ringsync.replica.folders import base_folder
from ringsync.schema.table import Column
from ringsync.steps.application import Application
from ringsync.steps.close.bucket_close import Closer
from ringsync.steps.passes import follow_ups as steps
from ringsync.steps.passes.follow_ups import FollowUps
from ringsync.steps.passes.make import PassContext, commit, make_outputs
from ringsync.steps.passes.rows_after import AfterReader
from ringsync.steps.sync_plan import SyncPlan, SyncTable, interval_at
from ringsync.storage.local import LocalStore
from ringsync.storage.port import UnavailableError
from tests.steps.late_files import Write, change_rows
from tests.steps.test_bootstrap_begins_back import KEPT_MS, again, bootstrap, follow_ups, rows_of_replica
from tests.steps.test_close import NOW, RING, TABLE, Lake

FIRST = TableVersion.first(TABLE)
WIDER = FIRST.followed_by(replace(TABLE, columns=(*TABLE.columns, Column("w", "regular", Native("int")))))
WIDER_RENAMED = replace(
    WIDER.table,
    columns=tuple(replace(one, name="place") if one.kind == "clustering" else one for one in WIDER.table.columns),
)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def change(lake: Lake, found: FollowUps, number: int) -> None:
    """Make a pass of one row, and all that follows from it."""
    found.refresh()
    version = found._table.version
    reader = AfterReader(load_config(lake.conf), version, "none", RING, control=None, replica=None)  # type: ignore[arg-type]
    context = PassContext(reader, found.topic, found.last + 1, f"{number:08x}", "", False, {}, found.schema_version)
    rows = change_rows([Write(number, number, "c", NOW.start * 1000 + number)], version.table)
    made = make_outputs(context, lake.store, {str(NOW): rows}, "0000")
    assert made.outputs is not None
    one = commit(lake.store, context, [made.outputs], {})
    assert one is not None
    found.made(one)
    found.catch_up()


def hours_go_by(lake: Lake) -> None:
    again(lake, lambda one: replace(one, created_at_ms=one.created_at_ms - 2 * KEPT_MS))
    put_closed_until(lake.store, int(time.time() * 1000) - KEPT_MS)


def give_digest(lake: Lake, digest: str) -> None:
    """Let the base name another schema."""
    folder = base_folder(TABLE.keyspace, TABLE.name)
    before = read_snapshot(lake.store, folder)
    schema = before.metadata["schemaString"]
    set_schema(lake.store, folder, before, schema=schema, properties={"ringsync.schema_digest": digest}, now_ms=0)


def test_a_replica_does_not_go_on_behind_passes_that_are_forgotten(lake: Lake) -> None:
    """For some hours nobody knew the replica's schema: what it has missed is not passed over."""
    bootstrap(lake, "b1")
    found = follow_ups(lake)
    change(lake, found, 1)
    give_digest(lake, "another")
    for number in (2, 3):
        change(lake, found, number)
    assert "a schema of shop.t that its history does not know" in found.status()["replica_error"]
    hours_go_by(lake)
    found = follow_ups(lake)
    change(lake, found, 4)
    assert pass_numbers(lake.store, TABLE.table_id)[0] > 4
    give_digest(lake, TABLE.digest)
    change(lake, found, 5)
    assert rows_of_replica(lake) == {(1, 1): "c"}
    status = found.status()
    assert (status["replica_pass"], "are not kept any more: trigger bootstrap_table" in status["replica_error"]) == (
        None,
        True,
    )
    bootstrap(lake, "b2")
    found.catch_up()
    change(lake, found, 6)
    assert (found.status()["replica_error"], found.status()["replica_pass"]) == (None, found.last)


@pytest.mark.parametrize("part", ["base", "changes"])
def test_a_replica_that_somebody_has_forbidden_to_write_waits_alone(lake: Lake, part: str) -> None:
    """The status says why and what to do; the stream goes on, and the passes are kept however long that takes."""
    bootstrap(lake, "b1")
    found = follow_ups(lake)
    change(lake, found, 1)
    delta = DeltaTable(lake.store.uri(f"replica/shop/t/{part}").removeprefix("file://"))
    delta.alter.set_table_properties({"delta.appendOnly": "true"})
    change(lake, found, 2)
    waiting = found.last
    hours_go_by(lake)
    found = follow_ups(lake)
    change(lake, found, 3)
    status = found.status()
    assert re.search(
        rf"/{part}: .* has the property delta.appendOnly .* in Spark: ALTER TABLE", status["replica_error"]
    )
    assert (status["published_pass"], status["last_pass"]) == (found.last, found.last)
    assert waiting in pass_numbers(lake.store, TABLE.table_id)
    delta.alter.set_table_properties({"delta.appendOnly": "false"})
    change(lake, found, 4)
    assert (found.status()["replica_error"], found.status()["replica_pass"]) == (None, found.last)
    assert rows_of_replica(lake) == {(number, number): "c" for number in range(1, 5)}


def test_the_replica_follows_the_schema_and_passes_that_wait_for_it_are_kept(lake: Lake) -> None:
    """A process with an earlier version adds nothing meanwhile, and all passes come in their order."""
    bootstrap(lake, "b1")
    found, behind = follow_ups(lake), follow_ups(lake)
    change(lake, found, 1)
    versions = [version_of(lake.store, table) for table in (TABLE, WIDER.table, WIDER_RENAMED)]
    found.follow(SyncTable(versions[1], "test.shop.t", False))
    change(lake, found, 2)
    assert (found.status()["replica_error"], found.status()["replica_pass"]) == (None, found.last)
    behind.catch_up()
    assert "later version of the schema of shop.t" in behind.status()["replica_error"]

    found.follow(SyncTable(versions[2], "test.shop.t", False))
    change(lake, found, 3)
    assert "waits until replica_merge has written its base again" in found.status()["replica_error"]
    waiting = found.last
    hours_go_by(lake)
    found = follow_ups(lake)
    found.follow(SyncTable(versions[2], "test.shop.t", False))
    change(lake, found, 4)
    assert waiting in pass_numbers(lake.store, TABLE.table_id), "it waits, however long that takes"

    def run(task: RewriteTask, pieces: Sequence[Piece]) -> list[DataFile]:
        return list(task(pieces))

    history = partial(versions_of, lake.store, TABLE)
    rewrite(lake.store, WIDER_RENAMED, history, run, lambda: lake.store, {}, int(time.time() * 1000))
    change(lake, found, 5)
    assert (found.status()["replica_error"], found.status()["replica_pass"]) == (None, found.last)
    assert rows_of_replica(lake, WIDER_RENAMED) == {(number, number): "c" for number in range(1, 6)}


@pytest.mark.parametrize("changes", [0, 1])
def test_an_idle_table_costs_one_request_in_each_cycle(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """Also one of which nothing was ever published but its bootstrap."""
    found = follow_ups(lake)
    bootstrap(lake, "b1")
    found.catch_up()
    for number in range(changes):
        change(lake, found, number)
    found.catch_up()
    requests: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(LocalStore, name)

        def method(store: LocalStore, *arguments: Any, **others: Any) -> Any:
            requests[name] += 1
            return real(store, *arguments, **others)

        return method

    for name in ("list", "get", "stat", "put", "delete"):
        monkeypatch.setattr(LocalStore, name, counted(name))
    for _ in range(10):
        found.catch_up()
        assert found.status()["replica_pass"] == found.last
    assert requests == {"stat": 10}


def test_a_pass_that_cannot_be_forgotten_keeps_its_files(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    found = follow_ups(lake)
    change(lake, found, 1)
    hours_go_by(lake)
    real = LocalStore.delete

    def delete(store: LocalStore, key: str) -> None:
        if "/passes/" in key:
            raise UnavailableError("the store is away")
        real(store, key)

    found = follow_ups(lake)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", delete)
        for _ in range(2):
            with pytest.raises(UnavailableError):
                change(lake, found, 2 + found.last)
    one = get_pass(lake.store, TABLE.table_id, 1)
    named = [*one.changes, *(key for keys in one.digests.values() for key in keys)]
    assert all(lake.store.stat(key) for key in named)
    found.catch_up()
    assert not any(lake.store.stat(key) for key in named)


def test_nobody_has_waited_while_nothing_ran(lake: Lake) -> None:
    """An hour in which all stood still is no hour of patience with a node that was just not read: nothing is late."""
    now_ms = int(time.time() * 1000)
    hour_ago_ms = now_ms - 3_600_000
    node = {"clear_at_ms": hour_ago_ms - 61_000, "is_read": True, "error": None}
    put_status(lake, "commitlog_stage/default", {"at_ms": hour_ago_ms - 60_000, "error": None, "nodes": {"a": node}})
    put_status(lake, "bucket_close/close", {"at_ms": hour_ago_ms, "unread_since_ms": {"a": hour_ago_ms - 15_000}})
    application = Application(
        "close", str(lake.conf), load_config(lake.conf), lake.store, None, "run", argparse.Namespace()
    )
    closer = Closer(application, None, None, SimpleNamespace(address=None), SimpleNamespace())  # type: ignore[arg-type]
    closer._close_buckets(SyncPlan(interval_at(now_ms, 60_000), RING.ring.hosts, {}, ()), now_ms)
    assert closed_until(lake.store) <= hour_ago_ms


def put_status(lake: Lake, loop: str, status: dict[str, Any]) -> None:
    lake.store.put(f"status/{loop}.json", json.dumps(status).encode())


def test_what_has_waited_for_a_bootstrap_is_added_in_turns(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other tables wait for each turn; the table itself publishes nothing until its replica has all."""
    for number in range(7):
        lake.publish(NOW, [Write(1, number, "c", NOW.start * 1000 + number)], by_arrival=False)
    bootstrap(lake, "b1")
    clock, added = [0.0], []
    real = steps.append_pass

    def slow(*arguments: Any, **others: Any) -> Any:
        clock[0] += 0.4
        added.append(arguments[2])
        return real(*arguments, **others)

    monkeypatch.setattr(steps, "append_pass", slow)
    monkeypatch.setattr(steps, "time", SimpleNamespace(time=time.time, monotonic=lambda: clock[0]))
    found = follow_ups(lake)
    turns = []
    while not turns or not turns[-1][0]:
        assert len(turns) < 10
        turns.append((found.catch_up(), len(added)))
        assert turns[-1][0] or not found.is_done()
    assert turns == [(False, 3), (False, 6), (False, 9), (True, 10)]
    assert added == sorted(added)
    assert len(rows_of_replica(lake)) == 7
    assert found.catch_up()
    found.tell_missed()
    assert found.is_done()
