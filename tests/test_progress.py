"""The progress of a scan as read from the object store, and as shown."""

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from ringsync.progress import Progress, duration, follow, read_progress
from ringsync.storage import open_store
from ringsync.storage.port import ObjectStore

RUN = "shop.orders__1"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "lake"))


def test_nothing_is_there_before_it_has_begun(store: ObjectStore) -> None:
    assert read_progress(store, RUN) == Progress()


def test_what_the_driver_has_written_is_read(store: ObjectStore) -> None:
    written = Progress(attempt=2, ranges_done=7, fraction=0.7, rows=1000, rows_before=300, estimated_rows=1500)
    store.put(f"progress/{RUN}.json", json.dumps(asdict(written)).encode())
    store.put(f"progress/{RUN}0.json", b'{"rows": 7}')
    assert read_progress(store, RUN) == written


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (Progress(), ""),
        (Progress(attempt=1), "0.0 %  0 ranges  0 rows"),
        (
            Progress(2, 6, 1, 0.5, None, 2000, 6000, rows_per_s=200.4, seconds_left=36),
            "50.0 %  6 ranges  6,000 rows (2,000 by earlier runs)  200 rows/s  0:00:36 left  1 failed",
        ),
        (Progress(1, 9, fraction=1.0, rows=5, rows_per_s=3.0, seconds_left=0.0), "100.0 %  9 ranges  5 rows"),
    ],
)
def test_shown_in_one_line(progress: Progress, line: str) -> None:
    assert str(progress) == line


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 61, 3600 * 26 + 5)] == ["0:00:00", "0:01:01", "26:00:05"]


def progress(done: int) -> Progress:
    return Progress(attempt=1, ranges_done=done, fraction=done / 20, rows=100)


@pytest.mark.parametrize("terminal", [False, True])
def test_following_ends_with_the_run_and_shows_lines_only_off_a_terminal(terminal: bool) -> None:
    stages = iter(["prepare", "scan", *["scan"] * 12, None])
    done = iter(range(100))
    now = iter(range(10_000))
    out = io.StringIO()
    end = follow(
        read=lambda: progress(next(done)),
        stage=lambda: next(stages),
        console=Console(file=out, force_terminal=terminal, width=120),
        title="shop.orders",
        clock=lambda: float(next(now)),
        sleep=lambda seconds: None,
    )
    assert end.ranges_done == 14
    lines = [line for line in out.getvalue().splitlines() if line.startswith("0:")]
    if terminal:
        assert not lines
    else:
        assert "prepare" in lines[0]
        assert "1 ranges" in lines[1]
        assert 3 <= len(lines) < 14
