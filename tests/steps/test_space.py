"""The space of a local store that tables take: those that fail leave it to the others."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.state.bootstrap import SCANNING
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap import snapshot
from ringsync.steps.bootstrap.plan import SSTABLE
from ringsync.steps.bootstrap.space import Space, lake_bytes


def test_a_table_whose_snapshot_fails_leaves_its_space_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_and_copy(_: Any, plan: Any, report: Any, *__: Any) -> Any:
        if plan.estimated_bytes > 1000:
            raise StepError("too large")
        return report

    monkeypatch.setattr(snapshot, "take_and_copy", take_and_copy)
    monkeypatch.setattr(snapshot, "signs_of_life", lambda *_: nullcontext())
    bootstrap = SimpleNamespace(id="b", keyspace="shop", table="orders", state=SCANNING)
    state = SimpleNamespace(find=lambda *_: bootstrap, alive=lambda _: None)
    this: Any = SimpleNamespace(state=state, run="run", space=Space())

    def plan(size: int) -> Any:
        return SimpleNamespace(bootstrap=bootstrap, mode=SSTABLE, estimated_bytes=size)

    with pytest.raises(StepError, match="too large"):
        snapshot.snapshot_table(this, plan(5000))
    snapshot.snapshot_table(this, plan(500))
    assert this.space.take(0) == lake_bytes(500)
