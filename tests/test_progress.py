"""The progress of a scan as read from the object store, and as shown."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ringsync.progress import Progress, ProgressReader, Speed, describe, duration, follow, read_progress
from ringsync.storage import open_store
from ringsync.storage.port import ObjectStore

RUN = "shop.orders__1"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "lake"))


def put_plan(store: ObjectStore, ranges: int, rows: int | None = None) -> None:
    store.put(f"plans/bootstrap/{RUN}.json", json.dumps({"ranges": ranges, "estimated_rows": rows}).encode())


def put_partition(store: ObjectStore, partition: int, ranges: int, done: int, rows: int) -> None:
    counts = {"partition": partition, "ranges": ranges, "ranges_done": done, "rows": rows, "cells": 3 * rows}
    store.put(f"progress/{RUN}/{partition}.json", json.dumps(counts).encode())


def test_nothing_is_there_before_it_has_begun(store: ObjectStore) -> None:
    assert read_progress(store, RUN) == Progress()


def test_partitions_are_summed_up(store: ObjectStore) -> None:
    put_plan(store, ranges=10, rows=5000)
    put_partition(store, 0, 5, 2, 100)
    put_partition(store, 1, 5, 5, 900)
    found = read_progress(store, RUN)
    assert found == Progress(ranges=10, ranges_done=7, rows=1000, cells=3000, estimated_rows=5000)
    assert found.fraction == 0.7


def test_a_verification_has_no_bootstrap_plan(store: ObjectStore) -> None:
    put_partition(store, 0, 4, 1, 10)
    assert read_progress(store, RUN).ranges == 4


def test_a_reader_sees_what_changes(store: ObjectStore) -> None:
    reader = ProgressReader(store, RUN)
    assert reader.read() == Progress()
    put_plan(store, ranges=2)
    put_partition(store, 0, 2, 0, 5)
    assert reader.read().rows == 5
    put_partition(store, 0, 2, 2, 50)
    put_partition(store, 1, 0, 0, 1)
    assert (reader.read().rows, reader.read().ranges_done) == (51, 2)


def test_other_runs_do_not_count(store: ObjectStore) -> None:
    store.put(f"progress/{RUN}0/0.json", b'{"rows": 7}')
    assert read_progress(store, RUN).rows == 0


def test_speed_is_that_of_the_last_moments_and_the_rest_by_ranges() -> None:
    speed = Speed()
    for now, rows in [(0, 0), (10, 1000), (20, 2000), (30, 4000), (40, 6000)]:
        speed.add(now, Progress(ranges=12, ranges_done=rows // 1000, rows=rows))
    assert speed.rows_per_second == 200
    assert speed.seconds_left == pytest.approx(36)
    assert describe(speed.samples[-1][1], speed) == "6/12 ranges  6,000 rows  200 rows/s  0:00:36 left"


def test_without_data_nothing_is_claimed() -> None:
    speed = Speed()
    speed.add(0, Progress(ranges=3))
    assert describe(Progress(ranges=3), speed) == "0/3 ranges  0 rows"


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 61, 3600 * 26 + 5)] == ["0:00:00", "0:01:01", "26:00:05"]


@pytest.mark.parametrize("terminal", [False, True])
def test_following_ends_with_the_run_and_shows_lines_only_off_a_terminal(terminal: bool) -> None:
    stages = iter(["prepare", "scan", *["scan"] * 12, None])
    done = iter(range(100))
    now = iter(range(10_000))
    out = io.StringIO()
    end = follow(
        read=lambda: Progress(ranges=20, ranges_done=next(done), rows=100),
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
        assert "1/20 ranges" in lines[1]
        assert 3 <= len(lines) < 14
