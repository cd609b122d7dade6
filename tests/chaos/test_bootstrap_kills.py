"""The driver of a bootstrap is killed at random moments; the next run, with other splits, goes on where it stopped."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cassandra.concurrent import execute_concurrent_with_args

from ringsync.cluster.control import put_limits
from ringsync.cluster.limits import Limits
from ringsync.config import load_config
from ringsync.progress import read_progress
from ringsync.steps.application import ExitCode
from ringsync.steps.bootstrap.plan import load_plan
from ringsync.wiring import store_of
from servers.cassandra import CassandraNode
from tests.chaos.applications import finished_here, java_of, started
from tests.chaos.bootstraps import change_conf, check, committed_rows, prepare, scan_report, write_conf

pytestmark = [pytest.mark.server, pytest.mark.spark]

PARTITIONS, FAT_ROWS = 20_000, 12_000
COMMIT_INTERVAL_S = 0.5


@pytest.fixture(scope="module")
def table(session: Any, keyspace: str) -> str:
    """32,000 rows, 12,000 of them in one partition; times, TTLs, collections and statics."""
    name = f"{keyspace}.orders"
    session.execute(
        f"CREATE TABLE {name} (id int, seq int, n bigint, v text, tags set<text>, owner text static, "
        "PRIMARY KEY (id, seq))"
    )
    plain = session.prepare(f"INSERT INTO {name} (id, seq, n, v, owner) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP ?")
    expiring = session.prepare(f"INSERT INTO {name} (id, seq, v, tags) VALUES (?, ?, ?, ?) USING TTL 86400")
    rows = [(i, 0, i * i, f"v{i}", f"o{i % 7}", 1_700_000_000_000_000 + i) for i in range(PARTITIONS)]
    rows += [(-1, i, i, "x" * (i % 50), None, 1_700_000_000_000_000 + i) for i in range(FAT_ROWS)]
    execute_concurrent_with_args(session, plain, rows, concurrency=200)
    execute_concurrent_with_args(session, expiring, [(i, 0, "t", {"a", str(i)}) for i in range(0, PARTITIONS, 5)])
    return name


@pytest.fixture
def conf(cassandra: CassandraNode, tmp_path: Path) -> Path:
    return write_conf(
        tmp_path,
        [cassandra],
        cassandra={"page_size": 500},
        scan={"file_size_mb": 1, "commit_interval_s": COMMIT_INTERVAL_S},
    )


def kill_in_the_middle(conf: Path, table: str, run: str, chance: random.Random, log: Path) -> int:
    """Start a scan and kill its Python or its JVM at some moment; gives the rows that it had read and not committed."""
    store = store_of(load_config(conf))
    with started(log, "bootstrap_scan", conf, table, run) as process:
        deadline = time.monotonic() + 120
        while read_progress(store, run).rows_per_s is None and process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        time.sleep(chance.uniform(0, 1.5))
        victim = process.pid if chance.random() < 0.5 else java_of(process.pid)
        if victim is not None and process.poll() is None:
            os.kill(victim, signal.SIGKILL)
        process.wait(60)
    bootstrap = load_plan(store, run).bootstrap.id
    return read_progress(store, run).rows - committed_rows(conf, bootstrap)


def kills_then_the_end(conf: Path, table: str, session: Any, kills: int, tmp_path: Path, rows_per_s: int) -> None:
    """Kill so many drivers, of which none has the time to come to an end at this speed; then let one."""
    change_conf(conf, limits={"rows_per_s": rows_per_s})
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    print(f"seed {seed}")
    log = tmp_path / "log"
    total = PARTITIONS + FAT_ROWS
    done = 0
    ids = set()
    for number in range(kills):
        run = f"killed-{number}"
        ids.add(prepare(conf, table, run, splits=chance.choice([1, 3, 8, 20])))
        lost = kill_in_the_middle(conf, table, run, chance, log)
        # What is read twice is what two tasks had read since their last commit, or while the driver was dying.
        assert lost <= rows_per_s * (COMMIT_INTERVAL_S + 3.0), (seed, lost)
        bootstrap = load_plan(store_of(load_config(conf)), run).bootstrap.id
        now = committed_rows(conf, bootstrap)
        assert now >= done, seed
        done = now
    ids.add(prepare(conf, table, "last", splits=5))
    assert len(ids) == 1, "all runs continue one bootstrap"
    change_conf(conf, limits={})
    assert finished_here("bootstrap_scan", conf, table, "last") == ExitCode.OK
    report = scan_report(conf, "last")
    print({name: report[name] for name in ("attempt", "rows_read", "rows_of_runs_before", "ranges")}, done)
    assert report["rows"] == total
    assert report["rows_of_runs_before"] == done
    assert report["rows_read"] == total - done, "what was committed is not read again"
    check(conf, table, session, report, PARTITIONS + FAT_ROWS)


@pytest.mark.usefixtures("spark")
def test_a_kill(conf: Path, table: str, session: Any, tmp_path: Path) -> None:
    kills_then_the_end(conf, table, session, 1, tmp_path, rows_per_s=3_000)


@pytest.mark.chaos
@pytest.mark.usefixtures("spark")
def test_ten_kills(conf: Path, table: str, session: Any, tmp_path: Path) -> None:
    kills_then_the_end(conf, table, session, 10, tmp_path, rows_per_s=400)


@pytest.mark.chaos
def test_a_driver_that_was_thought_dead_commits_nothing_more(
    conf: Path, table: str, session: Any, tmp_path: Path
) -> None:
    """As when an Airflow worker dies and leaves its driver alive: the same run starts again while the first goes on."""
    prepare(conf, table, "twice")
    store = store_of(load_config(conf))
    put_limits(store, Limits(rows_per_s=500))
    with started(tmp_path / "first", "bootstrap_scan", conf, table, "twice") as first:
        while read_progress(store, "twice").ranges_done < 3:
            assert first.poll() is None, (tmp_path / "first").read_text()[-3000:]
            time.sleep(0.1)
        with started(tmp_path / "second", "bootstrap_scan", conf, table, "twice") as second:
            assert first.wait(120) == ExitCode.FATAL
            put_limits(store, Limits())
            assert second.wait(120) == ExitCode.OK
    assert "was taken over by attempt 2" in (tmp_path / "first").read_text()
    report = scan_report(conf, "twice")
    assert report["attempt"] == 2
    assert report["rows_of_runs_before"] > 0
    check(conf, table, session, report, PARTITIONS + FAT_ROWS)
