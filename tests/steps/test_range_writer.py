"""What a task has committed: exactly the rows of the ranges that it says, wherever files and pages end."""

from __future__ import annotations

import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.ring.tokens import TokenRange, fraction, intersection, union
from ringsync.steps.bootstrap.task import Behind, RangeWriter

Row = tuple[int, int]
"""Token, and a number that no other row has."""


class RecordedFiles:
    """Keeps rows in lists where the real ones keep them in files; full when the test says so."""

    def __init__(self, full: list[bool]) -> None:
        self.full = full
        self.rows: list[Row] = []

    @property
    def are_full(self) -> bool:
        return self.full.pop(0) if self.full else False

    def write(self, batch: pa.RecordBatch, shown: pa.RecordBatch) -> int:
        self.rows += zip(batch["token"].to_pylist(), batch["n"].to_pylist(), strict=True)
        return batch.num_rows

    def close(self) -> None:
        """A file ends here; the rows still wait to be taken."""

    def take(self) -> Any:
        rows, self.rows = self.rows, []
        return SimpleNamespace(to_json=lambda: rows)

    def discard(self) -> None:
        self.rows = []


class RecordedControl:
    def __init__(self) -> None:
        self.commits: list[tuple[TokenRange, list[Row], int]] = []

    def call(self, name: str, /, **content: Any) -> dict[str, Any]:
        if name == "commit":
            token_range = TokenRange(content["start"], content["end"])
            self.commits.append((token_range, content["outputs"], content["rows"]))
        return {}


@st.composite
def scans(draw: st.DrawFn) -> tuple[list[tuple[TokenRange, list[Any]]], list[bool]]:
    """Ranges in token order, some adjacent, each with its pages of rows and tokens that cannot be read."""
    edges = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=8)))
    numbers = iter(range(10_000))
    found = []
    for start, end in pairwise(edges):
        if draw(st.integers(0, 4)) == 0:
            continue
        tokens = sorted(draw(st.lists(st.integers(start + 1, end), max_size=12)))
        if draw(st.booleans()) and tokens:
            tokens = sorted(tokens + [draw(st.sampled_from(tokens))] * 9)
        events: list[Any] = []
        for token in tokens:
            if not events or draw(st.integers(0, 2)) == 0:
                events.append([])
            events[-1].append((token, next(numbers)))
        if draw(st.integers(0, 2)) == 0:
            events = broken_off(events, draw(st.integers(start + 1, end)), draw(st.booleans()))
        found.append((TokenRange(start, end), [event for event in events if event]))
    return found, draw(st.lists(st.booleans(), max_size=60))


def broken_off(pages: list[list[Row]], token: int, partly: bool) -> list[Any]:
    """The rows of one token cannot be read; the first of them may have come before that was known."""
    before = [[row for row in page if row[0] < token] for page in pages]
    if partly:
        before.append([row for page in pages for row in page if row[0] == token][:1])
    after = [[row for row in page if row[0] > token] for page in pages]
    return [*before, TokenRange(token - 1, token), *after]


def page(rows: list[Row]) -> pa.RecordBatch:
    return pa.record_batch({"token": pa.array([t for t, _ in rows], pa.int64()), "n": [n for _, n in rows]})


@given(scans(), st.integers(0, 40))
@settings(max_examples=400, deadline=None)
def test_a_committed_range_has_its_rows_and_no_others(scan: Any, stop_after: int) -> None:
    ranges, full = scan
    control = RecordedControl()
    writer = RangeWriter(RecordedFiles(list(full)), control.call, "s", 1e9, clock=lambda: 0.0)  # type: ignore[arg-type]
    unread, handed, stopped = [], 0, None
    for token_range, events in ranges:
        writer.begin(token_range.start)
        for event in events:
            if isinstance(event, TokenRange):
                unread.append(event)
                writer.skip(event.start, event.end)
                continue
            handed += 1
            boundary = next(i for i, row in enumerate(event) if row[0] == event[-1][0])
            if handed > stop_after and boundary:
                writer.add(page(event[:boundary]), 1, 7)
                writer.stop(event[-1][0] - 1, len(event) - boundary)
                stopped = event[-1][0] - 1
                break
            writer.add(page(event), 1, 7)
        if stopped is not None:
            break
        writer.reached(token_range.end)
    else:
        writer.finish()

    committed = [token_range for token_range, _, _ in control.commits]
    assert fraction(committed) == pytest.approx(sum(part.width for part in committed) / 2**64), "they overlap"
    assert not intersection(committed, unread)
    rows = [row for _, events in ranges for event in events if isinstance(event, list) for row in event]
    for token_range, found, count in control.commits:
        assert found == [row for row in rows if row[0] in token_range]
        assert count == len(found)
    result = writer
    assert result.rows_committed == sum(count for _, _, count in control.commits)
    assert result.rows_read >= result.rows_committed
    if not unread and stopped is None:
        assert union(committed) == union(token_range for token_range, _ in ranges)
    if not unread and stopped is not None:
        read = [TokenRange(r.start, min(r.end, stopped)) for r, _ in ranges if r.start < stopped]
        assert union(committed) == union(read)


def test_nothing_is_done_after_a_failure_behind() -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError("the disk is full")

    def work() -> None:
        with Behind(8) as behind:
            behind.do(done.append, 1)
            behind.do(fail)
            for number in range(50):
                behind.do(done.append, number)

    with pytest.raises(OSError, match="disk is full"):
        work()
    assert done == [1]


def test_nothing_is_done_behind_after_a_failure_in_front() -> None:
    done: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait(10)

    def work() -> None:
        with Behind(8) as behind:
            behind.do(slow)
            behind.do(done.append, 1)
            begun.wait(10)
            threading.Timer(0.2, go_on.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert done == []
