"""A table with all that a scan may stumble over, sessions that fail when told to, and what a scan has to give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cassandra import ConsistencyLevel, ReadTimeout

from ringsync.cluster.limits import Permits
from ringsync.cluster.page_size import PageSize, PageSizes
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterSettings
from ringsync.images.from_pages import row_images
from ringsync.ring.splits import ReplicaRange
from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, TokenRange
from ringsync.schema.table import TableSchema
from ringsync.sources.scan.scan import PreparedScan, Unread, prepare_scan, read_ranges, scan_query

WHOLE = TokenRange(MIN_TOKEN, MAX_TOKEN)
THIRDS = [TokenRange(MIN_TOKEN, -(2**62)), TokenRange(-(2**62), 2**62), TokenRange(2**62, MAX_TOKEN)]
FAT = 3
FAT_ROWS = 4000

Row = tuple[Any, ...]
Fault = Callable[[Any], Exception | None]


def create_table(session: Any, keyspace: str) -> TableSchema:
    """Small partitions, one of some thousand rows among them, some with static cells only, and some of one token."""
    session.execute(
        f"CREATE TABLE {keyspace}.t (k1 blob, k2 int, a int, b int, c text, s int static, v int, "
        "PRIMARY KEY ((k1, k2), a, b, c)) WITH CLUSTERING ORDER BY (a ASC, b DESC, c ASC)"
    )
    static = session.prepare(f"INSERT INTO {keyspace}.t (k1, k2, s) VALUES (?, ?, ?)")
    row = session.prepare(f"INSERT INTO {keyspace}.t (k1, k2, a, b, c, v) VALUES (?, ?, ?, ?, ?, ?)")
    waiting = []
    for k in range(60):
        waiting.append(session.execute_async(static, (b"x", k, k)))
        for i in range(FAT_ROWS if k == FAT else 0 if k % 5 == 0 else k % 7):
            waiting.append(session.execute_async(row, (b"x", k, i % 4, i // 4 % 30, str(i // 120 or ""), i)))
            if len(waiting) > 500:
                [future.result() for future in waiting]
                waiting.clear()
    [future.result() for future in waiting]
    return read_table(session, keyspace, "t")


def of_narrow_rows() -> PageSizes:
    """What a process remembers that has read many narrow rows of every table: pages are as large as settings allow."""

    class Grown(PageSize):
        def __init__(self) -> None:
            super().__init__()
            self.came(100_000, 1)

    return PageSizes(Grown)


@dataclass
class Faulty:
    """A session whose requests fail when ``fault`` has an error for their statement."""

    session: Any
    fault: Fault
    asked: list[tuple[str, int]] = field(default_factory=list)
    sizes: PageSizes = field(default_factory=of_narrow_rows)
    coordinators: set[Any] = field(default_factory=set)
    facts: dict[Any, Any] = field(default_factory=dict)

    def prepare(self, cql: str) -> Any:
        return self.session.prepare(cql)

    def execute(self, *arguments: Any, **options: Any) -> Any:
        return self.session.execute(*arguments, **options)

    def execute_async(self, statement: Any, **options: Any) -> Any:
        self.asked.append((statement.prepared_statement.query_string, statement.fetch_size))
        error = self.fault(statement)
        return Failed(error) if error else self.session.execute_async(statement, **options)


@dataclass
class Failed:
    """The driver's future of a request that has failed."""

    error: Exception

    def add_callbacks(self, callback: Any, errback: Callable[[Exception], None]) -> None:
        errback(self.error)

    def result(self) -> Any:
        raise self.error


class _Unlimited:
    """Permits without limits and without back-off."""

    def ask(self, rows: int, wait: bool = True) -> int | None:
        return rows

    def answered(self, rows: int, size: int) -> None:
        pass

    def failed(self, overloaded: bool) -> None:
        pass


UNLIMITED: Permits = _Unlimited()


@dataclass
class Counting:
    """Permits that know whether each has come to an end, how many rows came, and how large the largest page was."""

    inner: Permits = UNLIMITED
    granted: int = 0
    ended: int = 0
    overloads: int = 0
    largest: int = 0
    rows: int = 0

    def ask(self, rows: int, wait: bool = True) -> int | None:
        found = self.inner.ask(rows, wait)
        self.granted += found is not None
        return found

    def answered(self, rows: int, size: int) -> None:
        self.ended += 1
        self.largest = max(self.largest, size)
        self.rows += rows
        self.inner.answered(rows, size)

    def failed(self, overloaded: bool) -> None:
        self.ended += 1
        self.overloads += overloaded
        self.inner.failed(overloaded)


def timeout() -> ReadTimeout:
    return ReadTimeout("injected", consistency=ConsistencyLevel.ONE, required_responses=1, received_responses=0)


def kind(statement: Any) -> str:
    """Which of the scan's SELECTs a statement is."""
    cql = statement.prepared_statement.query_string
    if "DISTINCT" in cql:
        return "names"
    return "range" if "token(" in cql.partition(" WHERE ")[2] else "partition"


def range_of(statement: Any) -> TokenRange:
    start, end = (int.from_bytes(value, "big", signed=True) for value in statement.values)
    return TokenRange(start, end)


def expected(session: Any, table: TableSchema, where: Callable[[Any], bool] = lambda row: True) -> list[Row]:
    """What a plain SELECT says: token, then the columns."""
    keys = ", ".join(column.name for column in table.partition_key)
    columns = ", ".join(column.name for column in table.columns)
    rows = session.execute(f"SELECT token({keys}), {columns} FROM {table.full_name}")
    return [tuple(row) for row in rows if where(row)]


def rows_of(page: bytes, scan: PreparedScan) -> list[Row]:
    batch = row_images([page], scan.query.table, scan.query.layout, 0, "error").drop_columns(["_row", "_x", "_merge"])
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def read(
    session: Any,
    scan: PreparedScan,
    settings: ClusterSettings,
    ranges: Iterable[TokenRange] = (WHOLE,),
    permits: Permits = UNLIMITED,
    sleep: Callable[[float], None] = lambda seconds: None,
) -> tuple[list[Row], list[Unread]]:
    """All rows but those of unread ranges, and these ranges."""
    rows: list[Row] = []
    unread: list[Unread] = []
    parts = [ReplicaRange(part, ("nowhere:1",)) for part in ranges]
    for _, pages in read_ranges(session, scan, parts, settings, permits, sleep=sleep):
        for page in pages:
            if isinstance(page, Unread):
                unread.append(page)
            else:
                rows += rows_of(page, scan)
    return [row for row in rows if not any(row[0] in part.range for part in unread)], unread


def prepared(
    session: Any, table: TableSchema, where: str | None = None, beginning_rows: int | None = None
) -> PreparedScan:
    query = scan_query(table, times=False, element_times=False, where=where)
    return prepare_scan(session, query, beginning_rows=beginning_rows)
