"""How many pages of a scan are decoded at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.formats.result_page import Page
from ringsync.sources.scan import images


@pytest.mark.parametrize(
    ("between_s", "expected"),
    [(0.01, [4, 4, 2]), (0.3, [4, 4, 2]), (0.6, [2, 2, 2, 2, 2]), (2.0, [1] * 10)],
    ids=["fast", "still fast", "slow", "under a low limit"],
)
def test_pages_do_not_wait_long_for_each_other(
    monkeypatch: pytest.MonkeyPatch, between_s: float, expected: list[int]
) -> None:
    """Eight tasks that shared 1,200 rows a second showed and wrote nothing for eight seconds, then all at once."""
    now = [0.0]
    monkeypatch.setattr(images, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def decode(pages: Sequence[Page]) -> Iterator[int]:
        if pages:
            yield len(pages)
            now[0] += 60  # writing them takes its time, in which no page waits

    def came() -> Iterator[bytes]:
        for _ in range(10):
            now[0] += between_s
            yield b"page"

    found: list[Any] = list(images._decoded(came(), decode))  # type: ignore[arg-type]
    assert found == expected
