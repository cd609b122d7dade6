"""Wide rows are read from a node whose heap has 384 MB, at the defaults, and the node does not notice.

A page of 5,000 rows, as the first one of each range was, killed it (OutOfMemoryError).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.cluster.cluster import read_ring
from ringsync.cluster.limits import Limiter
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import close_all, connect
from ringsync.config import Config, load_config
from ringsync.replica.delta_log import read_snapshot, remove
from ringsync.replica.folders import base_folder
from ringsync.ring.ranks import ranked
from ringsync.sources.cassandra_table import read_split
from ringsync.sources.lookup.read import read_rows
from ringsync.sources.scan.beginnings import FIRST_ROWS
from ringsync.sources.scan.planning import make_scan_plan
from ringsync.sources.scan.scan import scan_session
from ringsync.steps.application import Application, ExitCode, Report
from ringsync.wiring import cluster_settings, store_of
from servers.cassandra import CassandraNode, NodeSettings
from tests.chaos.bootstraps import write_conf
from tests.chaos.processes import is_alive
from tests.meter import Meter, meter
from tests.sources.row_key_batches import Key, batch_of
from tests.steps.conftest import DEFAULTS, STEPS

pytestmark = [pytest.mark.chaos, pytest.mark.server]

HEAP_MB = 384
MIB = 2**20
ROW = 2_500_000

Rows = Iterator[tuple[int, int, int]]
"""Key, clustering, bytes of the value."""

TABLES: dict[str, Callable[[], Rows]] = {
    "mixed": lambda: (
        (k, n, size)
        for k in range(20_000)
        for rows, size in [{7: (100, ROW), 8: (10_000, 10_000), 9: (50_000, 100)}.get(k, (1, 100))]
        for n in range(rows)
    ),
    "parts": lambda: ((1, n, ROW) for n in range(100)),
    "events": lambda: ((1, n, 10_000) for n in range(100_000)),
    "pictures": lambda: ((k, 1, 100_000) for k in range(1_300)),
}
"""Large partitions, wide or not, among many of narrow rows; a partition of 100 rows of 2.5 MB; one of 100,000 rows of
10 KB; 1,300 of 100 KB."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[CassandraNode]:
    settings = NodeSettings(heap_mb=HEAP_MB, segment_mib=16, num_tokens=16, cdc=False).on_free_ports()
    with CassandraNode(tmp_path_factory.mktemp("small"), settings, cache) as found:
        yield found


@pytest.fixture(scope="module")
def wire(node: CassandraNode) -> Iterator[Meter]:
    with meter(node.contact_point, node.port) as found:
        yield found
        close_all()


@pytest.fixture(scope="module")
def conf(node: CassandraNode, wire: Meter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conf(tmp_path_factory.mktemp("lake"), [node], cassandra={"port": wire.port})


class Reads:
    """Reads of one table, each of which notes the largest answer on the wire."""

    def __init__(self, table: str, node: CassandraNode, wire: Meter, conf: Path) -> None:
        self.table, self.conf = table, conf
        self._node, self._wire = node, wire
        self._largest = 0

    def step(self, name: str, **options: Any) -> Report:
        """Run a step of a bootstrap or of a verification."""
        self._wire.largest = self._wire.responses = 0
        config = load_config(self.conf)
        given = argparse.Namespace(**{**DEFAULTS, "table": f"big.{self.table}", **options})
        application = Application(
            name, str(self.conf), config, store_of(config), ("big", self.table), self.table, given
        )
        report, code = STEPS[name].run(application)
        assert code == ExitCode.OK, report
        self.note(f"{name}{' --dry-run' * given.dry_run}")
        return report

    def note(self, what: str) -> None:
        """Note the largest answer, and see that the node lives."""
        print(f"{self.table}, {what}: {self._wire.responses} answers, the largest {self._wire.largest / MIB:.2f} MiB")
        assert is_alive(self._node.pid), "the node has died"
        self._largest = max(self._largest, self._wire.largest)
        self._wire.largest = self._wire.responses = 0

    def check(self) -> None:
        """No answer was larger than a row, or the first rows of a partition that was not known, and a MiB."""
        most = FIRST_ROWS * ROW if self.table == "mixed" else max(ROW, MIB)
        assert self._largest <= most + 1.1 * MIB


@pytest.mark.spark
@pytest.mark.parametrize("table", TABLES)
def test_wide_rows(table: str, node: CassandraNode, wire: Meter, conf: Path, spark: Any) -> None:
    rows, reads = fill(node, table), Reads(table, node, wire, conf)
    assert "unknown" not in reads.step("bootstrap_prepare", dry_run=True)["forecast"]
    config = load_config(conf)
    plan = make_scan_plan(connect(cluster_settings(config)), config, "big", table, now=int(time.time()))
    assert (plan.beginning_rows is None) == (table == "pictures")
    batches = (batch for split in plan.splits for batch in read_split(config, plan, split, Limiter()))
    assert sum(batch.num_rows for batch in batches) == rows
    reads.note("scan")
    for level in ("LOCAL_ONE", "LOCAL_QUORUM"):
        assert look_up(conf, table, level) == min(rows, LOOKED_UP)
        reads.note(f"lookups at {level}")
    reads.step("bootstrap_prepare")
    assert reads.step("bootstrap_scan")["rows"] == rows
    reads.step("bootstrap_drain")
    assert reads.step("replica_verify")["rows"] == rows
    lose_all_rows(config, table)
    repaired = reads.step("replica_verify", repair=True)
    assert (repaired["before_repair"]["replica_rows"], repaired["replica_rows"]) == (0, rows)
    reads.check()


def lose_all_rows(config: Config, table: str) -> None:
    """Remove all rows of a replica."""
    store, folder = store_of(config), base_folder("big", table)
    before = read_snapshot(store, folder)
    remove(store, folder, before, before.files, now_ms=int(time.time() * 1000))


LOOKED_UP = 3_000


def look_up(conf: Path, table: str, level: str) -> int:
    """Read rows by their keys; gives the number of images."""
    config = load_config(conf)
    settings = cluster_settings(config)
    schema = read_table(connect(settings), "big", table)
    ring = ranked(read_ring(connect(settings), "big"))
    rows = list(TABLES[table]())
    chosen = rows[:: max(1, len(rows) // LOOKED_UP)][:LOOKED_UP]
    keys = [Key((k, c), (k.to_bytes(4, "big"),), (c.to_bytes(4, "big"),)) for k, c, _ in chosen]
    found = read_rows(
        scan_session(settings, int(time.time())),
        schema,
        batch_of(keys),
        ring,
        replace(settings, consistency_level=level),
        Limiter(),
        element_times=True,
        misfits="error",
    )
    assert not found.unread
    return len(found.places)


def fill(node: CassandraNode, table: str) -> int:
    """Write the rows of a table; gives their number."""
    began, count = time.monotonic(), 0
    cluster = node.cluster()
    try:
        session = cluster.connect()
        session.execute(
            "CREATE KEYSPACE IF NOT EXISTS big WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
        )
        session.execute(f"CREATE TABLE big.{table} (k int, c int, v blob, PRIMARY KEY (k, c))")
        insert = session.prepare(f"INSERT INTO big.{table} (k, c, v) VALUES (?, ?, ?)")
        insert.consistency_level = ConsistencyLevel.ONE
        rows = TABLES[table]()
        while batch := list(islice(rows, 64)):
            size = 0
            waiting = []
            for k, c, width in batch:
                waiting.append(session.execute_async(insert, (k, c, bytes([c % 251]) * width)))
                size += width
                if size > 2 * MIB:
                    [one.result() for one in waiting]
                    waiting, size = [], 0
            [one.result() for one in waiting]
            count += len(batch)
    finally:
        cluster.shutdown()
    node.nodetool("flush")
    node.nodetool("refreshsizeestimates")  # else they are of the first rows, for up to five minutes
    print(f"{table}: {count} rows after {time.monotonic() - began:.0f} s")
    return count
