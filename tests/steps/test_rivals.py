"""Two who make the same pass of a table: one succeeds, the other begins anew, and nothing is published twice."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringsync.config import load_config
from ringsync.cql.types import Native
from ringsync.ledger.passes import forget_pass, get_pass, pass_numbers, put_pass
from ringsync.ledger.staging import Bucket, decode_rows
from ringsync.schema.table import Column
from ringsync.steps.application import Application, StepError
from ringsync.steps.late import late_pass
from ringsync.steps.late.late_pass import LatePasses
from ringsync.steps.passes.follow_ups import FollowUps
from ringsync.steps.sync_plan import SyncPlan, SyncTable
from ringsync.streams.files import FileStream
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import NOW, RING, TABLE, VERSION, Lake

LATE_ROW = Write(7, 1, "late", NOW.start * 1000 + 3)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    found = Lake(tmp_path)
    document = yaml.safe_load(found.conf.read_text())
    found.conf.write_text(yaml.safe_dump({**document, "sync": {"after_image": "none"}}))
    return found


@pytest.fixture
def late_passes(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> LatePasses:
    config = load_config(lake.conf)
    application = Application("late", str(lake.conf), config, lake.store, None, "run", argparse.Namespace())
    found = LatePasses(application, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(found, "_plan", SyncPlan(NOW, RING.ring.hosts, {}, ()))
    follow_ups = FollowUps(application, SyncTable(VERSION, "test.shop.t", False), None, None)  # type: ignore[arg-type]
    follow_ups.ring = RING
    monkeypatch.setattr(found, "_follow_ups", {TABLE.table_id: follow_ups})
    return found


def test_who_is_slower_than_a_rival_that_has_published_makes_the_next_pass(
    lake: Lake, late_passes: LatePasses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket is there by the time that the part of the slower one is finished."""
    make = late_pass.make_outputs
    faster: list[int] = []

    def slow(context: Any, *others: Any) -> Any:
        if not faster:
            faster.append(context.number)
            lake.publish(NOW, [Write(1, 1, "x", NOW.start * 1000 + 5)], by_arrival=False)
            FileStream(lake.store, "test.shop.t").publish(lake.passes[0].folder, lake.passes[0].parts)
        return make(context, *others)

    monkeypatch.setattr(late_pass, "make_outputs", slow)
    assert late_passes.publish(TABLE, change_rows([LATE_ROW], TABLE)).published == 1
    assert (faster, pass_numbers(lake.store, TABLE.table_id)) == ([1], [1, 2])
    assert get_pass(lake.store, TABLE.table_id, 2).late


def test_late_rows_are_published_by_the_version_that_they_were_resolved_by(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column is added, and the next interval begins, between the two: v came out as the new column."""
    config = load_config(lake.conf)
    application = Application("late", str(lake.conf), config, lake.store, None, "run", argparse.Namespace())
    altered = replace(TABLE, columns=(*TABLE.columns[:2], Column("a", "regular", Native("text")), TABLE.columns[2]))
    versions = [VERSION, VERSION.followed_by(altered)]
    clock = [NOW.start / 1000]

    def plan_of(store: Any, config: Any, session: Any, interval: Bucket, before: Any) -> SyncPlan:
        table = SyncTable(versions[interval.start > NOW.start], "test.shop.t", False)
        return SyncPlan(interval, RING.ring.hosts, {TABLE.keyspace: RING.ring.replication}, (table,))

    monkeypatch.setattr(late_pass, "plan_of", plan_of)
    monkeypatch.setattr(late_pass.time, "time", lambda: clock[0])
    passes = LatePasses(application, None, None)  # type: ignore[arg-type]
    stored = VERSION.to_store(change_rows([LATE_ROW], TABLE))
    version = passes.table(TABLE.table_id)
    assert version is not None
    rows = version.from_store(stored)
    clock[0] += 60
    assert passes.publish(version.table, rows).published == 1
    (made,) = (get_pass(lake.store, TABLE.table_id, number) for number in pass_numbers(lake.store, TABLE.table_id))
    stream = FileStream(lake.store, "test.shop.t")
    stream.publish(made.folder, made.parts)
    (message,) = stream.read(made.folder)
    assert message["value"]["after"] == {"id": 7, "seq": 1, "v": "late"}
    changes = decode_rows(lake.store.get(made.changes[0]))
    assert changes["schema_version"].to_pylist() == [1]
    assert [cell["column"] for cell in changes["cells"][0].as_py()] == [VERSION.names.index("v")]
    assert passes.table(TABLE.table_id) == versions[1], "the next rows are resolved by the version that is known then"


def test_who_wakes_up_when_its_number_is_forgotten_makes_no_pass(lake: Lake) -> None:
    for seq in range(3):
        lake.publish(NOW, [Write(1, seq, "x", NOW.start * 1000 + seq)], by_arrival=False)
    first, second, _ = lake.passes
    assert put_pass(lake.store, second), "again is fine"
    forget_pass(lake.store, first)
    forget_pass(lake.store, second)
    assert not put_pass(lake.store, second)
    assert pass_numbers(lake.store, TABLE.table_id) == [3]


def test_digests_that_are_missing_are_told_and_not_looked_for_for_ever(lake: Lake, late_passes: LatePasses) -> None:
    lake.publish(NOW, [Write(1, 1, "x", NOW.start * 1000 + 5)], by_arrival=False)
    for keys in lake.passes[0].digests.values():
        for key in keys:
            lake.store.delete(key)
    with pytest.raises(StepError, match="a pass is there, but its digests are missing"):
        late_passes.published(TABLE, change_rows([LATE_ROW], TABLE))
