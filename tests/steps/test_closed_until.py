"""What is closed never lies in the future, whatever a clock says, and comes back if it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.config import Config
from ringsync.ledger.staging import closed_until, put_closed_until
from ringsync.steps.close.bucket_close import Closer
from ringsync.steps.close.closing import Progress
from ringsync.steps.stage.staged_files import Windows
from ringsync.steps.sync_plan import interval_at
from ringsync.storage.local import LocalStore
from ringsync.storage.port import Stat

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
NOW_MS = 1_800_000_000_000 // MINUTE_MS * MINUTE_MS
WINDOW_MS = 4 * MINUTE_MS
"""An interval closes when so much time has passed since its end."""
CONFIG = Config.model_validate(
    {"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": "lake"}, "kafka": None}
)


class Lake(LocalStore):
    """A store whose clock is right."""

    now_ms = NOW_MS

    def stat(self, key: str) -> Stat | None:
        found = super().stat(key)
        return found and replace(found, written_ms=self.now_ms)


class Sync:
    """Close loops, one run after the other, on hosts whose clocks may be wrong."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.store = Lake(folder)
        self.begin()

    def begin(self) -> None:
        self.closer = object.__new__(Closer)
        self.closer._store, self.closer._config = self.store, CONFIG
        self.closer._closed_until = closed_until(self.store)

    def cycle(self, ahead_ms: int = 0, behind_ms: int = 15_000) -> int:
        """A cycle of a host whose clock, and that of all stages, is ahead.

        :param behind_ms: what the nodes have logged in this time is not staged yet
        """
        now_ms = self.store.now_ms + ahead_ms
        staged = Progress(now_ms - behind_ms, {}, {})
        self.closer._progress = lambda *_: staged  # type: ignore[method-assign]
        self.closer._close_buckets(SimpleNamespace(interval=interval_at(now_ms, MINUTE_MS)), now_ms)  # type: ignore[arg-type]
        assert self.closer._closed_until == closed_until(self.store)
        return closed_until(self.store)


@pytest.fixture
def sync(tmp_path: Path) -> Sync:
    return Sync(tmp_path)


def test_a_clock_that_is_ahead_closes_no_future(sync: Sync) -> None:
    closed_ms = sync.cycle()
    assert closed_ms == NOW_MS - WINDOW_MS - MINUTE_MS
    assert sync.cycle(ahead_ms=2 * HOUR_MS) <= NOW_MS - WINDOW_MS
    for minutes in range(1, 10):
        sync.store.now_ms = NOW_MS + minutes * MINUTE_MS
        assert sync.cycle(ahead_ms=2 * HOUR_MS) == sync.store.now_ms - WINDOW_MS, "it goes on with the store's time"
    for _ in range(2):
        assert sync.cycle() == sync.store.now_ms - WINDOW_MS
        sync.begin()


def test_what_a_past_process_has_closed_in_the_future_comes_back(sync: Sync) -> None:
    """Until then every change was late."""
    put_closed_until(sync.store, NOW_MS + 2 * HOUR_MS)
    sync.begin()
    written_us = np.array([(NOW_MS - 3000) * 1000])

    def is_late() -> bool:
        windows = Windows(interval_at(NOW_MS, MINUTE_MS), closed_until(sync.store))
        return bool(windows.starts(written_us, False)[0] == -1)

    assert is_late()
    assert sync.cycle() == NOW_MS - WINDOW_MS - MINUTE_MS
    assert not is_late()


def test_a_clock_that_is_behind_opens_nothing(sync: Sync) -> None:
    closed_ms = sync.cycle()
    for behind_ms in (5_000, HOUR_MS):
        assert sync.cycle(ahead_ms=-behind_ms) == closed_ms


def test_a_backlog_closes_its_own_buckets(sync: Sync) -> None:
    put_closed_until(sync.store, NOW_MS - 9 * HOUR_MS)
    sync.begin()
    for hours in range(8, 0, -1):
        assert sync.cycle(behind_ms=hours * HOUR_MS) == NOW_MS - hours * HOUR_MS - WINDOW_MS


def test_what_is_closed_is_recorded_only_when_it_moves(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle cycle asks for nothing."""
    sync.cycle()
    asked: list[str] = []
    monkeypatch.setattr(sync.store, "say", lambda key, data: asked.append(key))
    for _ in range(5):
        sync.cycle()
    assert asked == []


def test_a_damaged_object_is_written_again(sync: Sync, tmp_path: Path) -> None:
    closed_ms = sync.cycle()
    path = tmp_path / "staging" / "closed.json"
    for damaged in (b"{", b"[]", b'{"closed_until_ms": null}'):
        sync.store.put("staging/closed.json", damaged)
        sync.begin()
        assert sync.cycle() == closed_ms
    path.write_bytes(b"X" + path.read_bytes()[1:])
    sync.begin()
    assert sync.cycle() == closed_ms


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 5_000, 61_000, 600_000]), st.sampled_from([0, 0, -HOUR_MS, HOUR_MS]))))
def test_any_clocks(tmp_path_factory: Any, steps: list[tuple[int, int]]) -> None:
    sync = Sync(tmp_path_factory.mktemp("lake"))
    before_ms = 0
    for later_ms, ahead_ms in steps:
        sync.store.now_ms += later_ms
        closed_ms = sync.cycle(ahead_ms)
        assert before_ms <= closed_ms <= sync.store.now_ms - WINDOW_MS
        before_ms = closed_ms
    if steps:
        sync.store.now_ms += 2 * MINUTE_MS
        assert sync.cycle() >= sync.store.now_ms - WINDOW_MS - 2 * MINUTE_MS
