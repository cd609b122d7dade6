"""Two readers that use the Python driver: its own decoding to rows, and pages that stay bytes (the server's limit).

Both keep a given number of token ranges in flight, and drop the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from threading import Event, Lock
from typing import Any

from cassandra import ConsistencyLevel
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
from cassandra.policies import RoundRobinPolicy
from peers.measure import Work

from ringsync.cluster.session import SCAN_PROFILE
from ringsync.config import load_config
from ringsync.ring.splits import ReplicaRange, Split
from ringsync.sources.scan.plan import ScanPlan
from ringsync.sources.scan.scan import scan_query, scan_session
from ringsync.wiring import cluster_settings

READ_SECONDS = 1800


class Pump:
    """Ask for the pages of token ranges, some ranges at a time; each next page before the last one is counted.

    :param start: function that asks for the first page of a range and returns the driver's future
    :param rows_of: function that returns the number of rows of a page
    """

    def __init__(
        self,
        start: Callable[[ReplicaRange], Any],
        rows_of: Callable[[Any], int],
        ranges: Iterable[ReplicaRange],
    ) -> None:
        self._start = start
        self._rows_of = rows_of
        self._ranges = iter(ranges)
        self._lock = Lock()
        self._running = 0
        self._rows = 0
        self._error: BaseException | None = None
        self._done = Event()

    def run(self, in_flight: int) -> Work:
        """Read all ranges.

        :param in_flight: number of ranges that are asked for at once
        """
        self._running = in_flight
        for _ in range(in_flight):
            self._next_range()
        if not self._done.wait(READ_SECONDS):
            raise TimeoutError(f"the driver did not read the table within {READ_SECONDS} s")
        if self._error is not None:
            raise self._error
        return Work(self._rows)

    def _next_range(self) -> None:
        with self._lock:
            part = next(self._ranges, None)
            if part is None or self._error is not None:
                self._running -= 1
                if self._running == 0:
                    self._done.set()
                return
        future = self._start(part)
        future.add_callbacks(self._page, self._failed, callback_args=(future,))

    def _page(self, page: Any, future: Any) -> None:
        more = future.has_more_pages
        if more:
            future.start_fetching_next_page()
        with self._lock:
            self._rows += self._rows_of(page)
        if not more:
            self._next_range()

    def _failed(self, error: BaseException) -> None:
        self._error = error
        self._done.set()


def raw_pages(config_path: str, plan_json: str, splits: Sequence[Split], in_flight: int) -> Callable[[], Work]:
    """Connect; return a read that sends our scan's own query and keeps only the pages' row counts."""
    plan = ScanPlan.from_json(plan_json)
    config = load_config(config_path)
    session = scan_session(cluster_settings(config), plan.now if plan.times else None)
    query = scan_query(plan.table, times=plan.times, element_times=plan.element_times)
    prepared = session.prepare(query.cql)
    prepared.consistency_level = ConsistencyLevel.LOCAL_ONE
    prepared.fetch_size = config.cassandra.page_size

    def start(part: ReplicaRange) -> Any:
        bound = prepared.bind((part.range.start, part.range.end))
        return session.execute_async(bound, execution_profile=SCAN_PROFILE)

    def rows_of(page: Any) -> int:
        return sum(int.from_bytes(body[:4], "big") for body in page)

    return _reader(start, rows_of, splits, in_flight)


def driver_rows(config_path: str, plan_json: str, splits: Sequence[Split], in_flight: int) -> Callable[[], Work]:
    """Connect as any user of the driver does; return a read that gets named tuples from its compiled decoder."""
    plan = ScanPlan.from_json(plan_json)
    source = load_config(config_path).cassandra
    profile = ExecutionProfile(RoundRobinPolicy(), request_timeout=60, consistency_level=ConsistencyLevel.LOCAL_ONE)
    cluster = Cluster(
        list(source.contact_points),
        port=source.port,
        protocol_version=5,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
    )
    session = cluster.connect()
    columns = [column.name for column in plan.table.columns]
    if plan.times:
        columns += [f"{call}({column.name})" for column in plan.table.value_columns for call in ("writetime", "ttl")]
    token = f"token({', '.join(column.name for column in plan.table.partition_key)})"
    prepared = session.prepare(
        f"SELECT {', '.join(columns)} FROM {plan.table.keyspace}.{plan.table.name} WHERE {token} > ? AND {token} <= ?"
    )
    prepared.fetch_size = source.page_size

    def start(part: ReplicaRange) -> Any:
        return session.execute_async(prepared, (part.range.start, part.range.end))

    return _reader(start, len, splits, in_flight)


def _reader(
    start: Callable[[ReplicaRange], Any], rows_of: Callable[[Any], int], splits: Sequence[Split], in_flight: int
) -> Callable[[], Work]:
    """Return the read of the splits, after reading one of them to warm up."""

    def read(some: Sequence[Split]) -> Work:
        return Pump(start, rows_of, [part for split in some for part in split.ranges]).run(in_flight)

    read(splits[:1])
    time.sleep(0.5)  # the server's last work for this read
    return lambda: read(splits)
