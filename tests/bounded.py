"""Loops of tests that end: one that waits for what never comes fails, where it would fill the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def as_long_as(holds: Callable[[], Any], most: int = 1000) -> Iterator[int]:
    """Yield numbers from 0 while a condition holds.

    :raises AssertionError: it still holds after ``most`` times
    """
    for number in range(most):
        if not holds():
            return
        yield number
    raise AssertionError(f"it holds still, after {most} times")
