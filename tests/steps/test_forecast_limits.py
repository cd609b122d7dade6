"""The forecast of a bootstrap asks no faster than the bootstrap may: production comes first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.control import LIMITS_KEY
from ringsync.cluster.limits import Limits
from ringsync.steps.bootstrap import prepare
from ringsync.storage.local import LocalStore


@pytest.mark.parametrize("set_later", [False, True])
def test_the_forecast_keeps_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_later: bool) -> None:
    """It read sixteen pages of a thousand rows at full speed, also in a dry run."""
    store = LocalStore(tmp_path)
    configured = {"rows_per_s": None if set_later else 5.0, "megabytes_per_s": None, "concurrent_requests": None}
    config: Any = SimpleNamespace(limits=SimpleNamespace(**configured))
    if set_later:
        store.put(LIMITS_KEY, Limits(rows_per_s=5.0).to_json().encode())
    granted: list[int | None] = []

    def sample(*given: Any, place_rows: int, whole_first: bool, beginning_rows: int) -> Any:
        permits = given[4]
        assert 16 * place_rows / 5.0 < 60, "and they are few, or it takes hours"
        assert not whole_first
        assert beginning_rows == 32, "large partitions are not met unawares"
        granted.extend(permits.ask(1000, wait=False) for _ in range(6))
        return "forecast"

    for name in ("cluster_settings", "scan_query"):
        monkeypatch.setattr(prepare, name, lambda *_, **__: None)
    monkeypatch.setattr(prepare, "scan_session", lambda *_: SimpleNamespace(reads_as_of=True))
    monkeypatch.setattr(prepare, "sample", sample)
    plan: Any = SimpleNamespace(
        table=None,
        times=True,
        element_times=True,
        selection=SimpleNamespace(where=None),
        now=0,
        splits=(),
        beginning_rows=32,
    )
    assert prepare.read_a_little(config, store, plan) == "forecast"
    assert sum(rows or 0 for rows in granted) < 10
