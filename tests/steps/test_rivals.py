"""Two who make the same pass of a table: one succeeds, the other begins anew, and nothing is published twice."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringsync.config import load_config
from ringsync.steps import late_pass
from ringsync.steps.application import Application, StepError
from ringsync.steps.follow_ups import FollowUps
from ringsync.steps.late_pass import LatePasses
from ringsync.steps.sync_plan import SyncPlan, SyncTable
from ringsync.streams.files import FileStream
from ringsync.streams.pass_log import forget_pass, get_pass, pass_numbers, put_pass
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
            FileStream(lake.store, "test.shop.t").publish(lake.passes[0].bucket, lake.passes[0].parts)
        return make(context, *others)

    monkeypatch.setattr(late_pass, "make_outputs", slow)
    assert late_passes.publish(TABLE, change_rows([LATE_ROW], TABLE)).published == 1
    assert (faster, pass_numbers(lake.store, TABLE.table_id)) == ([1], [1, 2])
    assert get_pass(lake.store, TABLE.table_id, 2).late


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
    with pytest.raises(StepError, match="a pass is there, but not what it has published"):
        late_passes.published(TABLE, change_rows([LATE_ROW], TABLE))
