"""Limits hold over a minute, whatever the number of tasks and runs, and follow a change within seconds."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ringsync.cluster.control import put_limits
from ringsync.cluster.limits import Limits
from ringsync.config import load_config
from ringsync.progress import Progress
from ringsync.wiring import store_of
from servers.cassandra import CassandraNode
from tests.chaos.applications import started
from tests.chaos.bootstraps import change_conf, check, load_partitions, prepare, progress_of, scan_report, write_conf

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

PARTITIONS, PARTITION_ROWS = 2_500, 200
ROWS = PARTITIONS * PARTITION_ROWS
ROWS_PER_S, LOWERED_ROWS_PER_S = 3_000, 1_200
TOLERANCE = 0.1
MINUTE_S, AFTER_S, CHANGE_S = 60.0, 20.0, 4.0
SETTLING_S = 8.0


@pytest.fixture(scope="module")
def tables(session: Any, keyspace: str) -> list[str]:
    """A table of 500,000 small rows, and one of 100,000."""
    names = [f"{keyspace}.first", f"{keyspace}.second"]
    for name, partitions in zip(names, (PARTITIONS, PARTITIONS // 5), strict=True):
        session.execute(f"CREATE TABLE {name} (id int, seq int, v int, PRIMARY KEY (id, seq))")
        load_partitions(session, name, range(partitions), PARTITION_ROWS)
    return names


@pytest.fixture
def conf(cassandra: CassandraNode, tmp_path: Path) -> Path:
    return write_conf(tmp_path, [cassandra], limits={"rows_per_s": ROWS_PER_S}, cassandra={"page_size": 1_000})


class Scan:
    """A scan that runs, and what it reads."""

    def __init__(self, conf: Path, run: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.conf, self.run, self.process, self.log = conf, run, process, log

    @property
    def progress(self) -> Progress:
        """How far it is, while it runs."""
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return progress_of(self.conf, self.run)


@pytest.fixture
def scan(conf: Path, tmp_path: Path) -> Iterator[Callable[..., Scan]]:
    """Start a scan of a table, and wait until it reads."""
    with ExitStack() as running:

        def start(table: str, run: str, tasks: int) -> Scan:
            prepare(conf, table, run, restart=True, splits=2 * tasks)
            log = tmp_path / run
            process = running.enter_context(started(log, "bootstrap_scan", conf, table, run, tasks=tasks))
            found = Scan(conf, run, process, log)
            deadline = time.monotonic() + 120
            while not found.progress.rows:
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.1)
            return found

        yield start


def speed(seconds: float, *scans: Scan) -> tuple[float, float]:
    """Rows and bytes per second of scans together, as their progress says at the ends of a stretch of time.

    Progress is written every two seconds: the stretch begins and ends when it is, so that no part of it is unknown.
    """
    totals, began = _fresh(scans)
    time.sleep(max(0.0, seconds - 1))
    after, ended = _fresh(scans)
    elapsed = [end - begin for begin, end in zip(began, ended, strict=True)]
    rows = sum((b.rows - a.rows) / s for a, b, s in zip(totals, after, elapsed, strict=True))
    size = sum((b.bytes - a.bytes) / s for a, b, s in zip(totals, after, elapsed, strict=True))
    return rows, size


def settle(*scans: Scan) -> None:
    """Wait until rows come at the limit.

    Progress tells what was written: pages that were read while each task loaded its kernels are written all at once.
    """
    for _ in range(10):
        rows_per_s, _ = speed(SETTLING_S, *scans)
        if rows_per_s == is_about(ROWS_PER_S):
            return
    raise AssertionError(f"{rows_per_s:.0f} rows/s after {10 * SETTLING_S:.0f} s, but the limit is {ROWS_PER_S}")


def _fresh(scans: tuple[Scan, ...]) -> tuple[list[Progress], list[float]]:
    """The progress of each scan at the moment when it has just been written, and these moments."""
    found = {number: scan.progress for number, scan in enumerate(scans)}
    moments: dict[int, float] = {}
    while len(moments) < len(scans):
        for number, scan in enumerate(scans):
            if number not in moments and (now := scan.progress) != found[number]:
                found[number], moments[number] = now, time.monotonic()
        time.sleep(0.02)
    return list(found.values()), [moments[number] for number in range(len(scans))]


def is_about(limit: float) -> Any:
    """Within ten percent."""
    return pytest.approx(limit, rel=TOLERANCE)


def test_one_task_and_bytes(conf: Path, tables: list[str], scan: Callable[..., Scan]) -> None:
    running = scan(tables[0], "one-task", tasks=1)
    settle(running)
    rows_per_s, bytes_per_s = speed(MINUTE_S, running)
    print(f"1 task: {rows_per_s:.0f} rows/s, {bytes_per_s / rows_per_s:.1f} bytes a row")
    assert rows_per_s == is_about(ROWS_PER_S)
    limit = 0.4 * bytes_per_s
    put_limits(store_of(load_config(conf)), Limits(bytes_per_s=limit))
    time.sleep(CHANGE_S)
    _, bytes_per_s = speed(AFTER_S, running)
    print(f"1 task: {bytes_per_s:.0f} bytes/s of {limit:.0f}")
    assert bytes_per_s == is_about(limit)


def test_two_tasks_and_then_two_runs(tables: list[str], scan: Callable[..., Scan]) -> None:
    first = scan(tables[0], "first-run", tasks=2)
    settle(first)
    rows_per_s, _ = speed(MINUTE_S, first)
    print(f"2 tasks: {rows_per_s:.0f} rows/s")
    assert rows_per_s == is_about(ROWS_PER_S)
    second = scan(tables[1], "second-run", tasks=2)
    settle(first, second)
    rows_per_s, _ = speed(AFTER_S, first, second)
    print(f"2 runs: {rows_per_s:.0f} rows/s")
    assert rows_per_s == is_about(ROWS_PER_S)


def test_eight_tasks_lowered_and_lifted(conf: Path, tables: list[str], scan: Callable[..., Scan], session: Any) -> None:
    running = scan(tables[0], "eight-tasks", tasks=8)
    settle(running)
    rows_per_s, _ = speed(MINUTE_S, running)
    print(f"8 tasks: {rows_per_s:.0f} rows/s")
    assert rows_per_s == is_about(ROWS_PER_S)
    store = store_of(load_config(conf))
    put_limits(store, Limits(rows_per_s=LOWERED_ROWS_PER_S))
    time.sleep(CHANGE_S)
    rows_per_s, _ = speed(AFTER_S, running)
    print(f"8 tasks, lowered: {rows_per_s:.0f} rows/s")
    assert rows_per_s == is_about(LOWERED_ROWS_PER_S)
    put_limits(store, Limits())
    assert running.process.wait(120) == 0, running.log.read_text()[-3000:]
    check(conf, tables[0], session, scan_report(conf, running.run), ROWS)


def test_concurrent_requests(conf: Path, tables: list[str], scan: Callable[..., Scan], session: Any) -> None:
    """As the server itself counts them, of eight tasks."""
    change_conf(conf, cassandra={"page_size": 200})
    store = store_of(load_config(conf))
    put_limits(store, Limits(concurrent_requests=1))
    running = scan(tables[0], "requests", tasks=8)
    time.sleep(CHANGE_S)
    one = [pages_on_the_way(session) for _ in range(300)]
    put_limits(store, Limits(concurrent_requests=3))
    time.sleep(CHANGE_S)
    three = [0]
    while max(three) < 2 and running.progress.fraction < 1:
        three += [pages_on_the_way(session) for _ in range(50)]
    print(f"1 request: {one.count(1)} of {len(one)} times; 3: {[three.count(n) for n in range(5)]}")
    assert max(one) == 1
    assert 1 < max(three) <= 3


def pages_on_the_way(session: Any) -> int:
    """Prepared SELECTs that the server is working on."""
    queries = session.execute("SELECT thread_id, task FROM system_views.queries")
    return sum(q.thread_id.startswith("Native-Transport") and q.task.startswith("EXECUTE ") for q in queries)
