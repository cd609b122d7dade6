"""The SELECT of a scan, the pages of its ranges, and conditions, against a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ringsync.cluster.limits import Limiter, Limits
from ringsync.cluster.session import ClusterSettings, close_all
from ringsync.cql.types import Native, SetType
from ringsync.images.from_pages import ResultColumn
from ringsync.ring.splits import ReplicaRange
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.scan.pages import PAGES_AHEAD
from ringsync.sources.scan.scan import read_ranges, scan_query, scan_session
from ringsync.sources.scan.where import WhereError
from servers.cassandra import CassandraNode
from tests.sources.clusters import settings_of
from tests.sources.scans import THIRDS, WHOLE, Counting, Faulty, create_table, expected, kind, prepared, read, timeout

TABLE = TableSchema(
    "My Shop",
    'the "table"',
    "00" * 16,
    (
        Column("a", "partition_key", Native("int")),
        Column("B", "partition_key", Native("int")),
        Column("c", "clustering", Native("int")),
        Column("tags", "regular", SetType(Native("text"))),
        Column("n", "regular", Native("counter")),
    ),
)


def test_the_query_with_all_times() -> None:
    query = scan_query(TABLE, times=True, element_times=True)
    assert query.cql == (
        'SELECT token("a", "B"), "a", "B", "c", "tags", "n", writetime("tags"), ttl("tags"), writetime("n") '
        'FROM "My Shop"."the ""table""" WHERE token("a", "B") > ? AND token("a", "B") <= ?'
    )
    assert query.layout == (
        ResultColumn("token", None),
        *(ResultColumn("value", name) for name in ("a", "B", "c", "tags", "n")),
        ResultColumn("writetime", "tags"),
        ResultColumn("ttl", "tags"),
        ResultColumn("writetime", "n"),
    )


def test_the_query_with_fewer_times() -> None:
    assert "writetime" not in scan_query(TABLE, times=False, element_times=False).cql
    assert 'writetime("n")' in scan_query(TABLE, times=True, element_times=False).cql
    assert 'writetime("tags")' not in scan_query(TABLE, times=True, element_times=False).cql


@pytest.fixture
def settings(cassandra: CassandraNode) -> Iterator[ClusterSettings]:
    yield settings_of(cassandra, page_size=1000)
    close_all()


@pytest.fixture(scope="module")
def table(session: Any, keyspace: str) -> TableSchema:
    return create_table(session, keyspace)


@pytest.mark.server
def test_pages_of_several_ranges(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    faulty = Faulty(scan_session(settings, None), lambda statement: None)
    permits = Counting()
    rows, unread = read(faulty, prepared(faulty, table), settings, THIRDS, permits)
    assert rows == expected(session, table)
    assert not unread
    assert permits.granted == permits.ended == len(faulty.asked)
    assert {kind for kind in faulty.asked if "DISTINCT" in kind[0]} == set()


@pytest.mark.server
@pytest.mark.parametrize(
    ("where", "same"),
    [
        ("k2 = 3", lambda row: row.k2 == 3),
        ("k1 = 0x78 AND k2 = 3", lambda row: row.k2 == 3),
        ("k1 = 0x78 AND k2 IN (9, 3, 8, 3, 1000, 20, 10)", lambda row: row.k2 in (9, 3, 8, 20, 10)),
        ("k2 > 10 AND k2 <= 20", lambda row: 10 < row.k2 <= 20),
        ("a = 2", lambda row: row.a == 2),
        ("a = 2 AND b < 20", lambda row: row.a == 2 and row.b < 20),
        ("b >= 12 AND k2 < 30", lambda row: row.b is not None and row.b >= 12 and row.k2 < 30),
        ("a IN (3, 1)", lambda row: row.a in (1, 3)),
        ("a > 0 AND a < 3 AND c > '0'", lambda row: row.a in (1, 2) and row.c > "0"),
        (
            "k1 = 0x78 AND k2 = 3 AND a IN (0, 3) AND b IN (3, 9, 12)",
            lambda row: row.k2 == 3 and row.a in (0, 3) and row.b in (3, 9, 12),
        ),
        ("c = ''", lambda row: row.c == ""),
    ],
)
def test_conditions(
    session: Any, settings: ClusterSettings, table: TableSchema, where: str, same: Callable[[Any], bool]
) -> None:
    """The same rows whether the ranges are read in one go or break in the middle of a partition."""
    wanted = expected(session, table, same)
    assert wanted
    healthy = scan_session(settings, None)
    scan = prepared(healthy, table, where)
    assert read(healthy, scan, settings, THIRDS) == (wanted, [])
    assert read(healthy, replace(scan, beginning_rows=30), settings, THIRDS) == (wanted, [])
    for good in (0, 1, 3):
        pages = 0

        def fault(statement: Any, good: int = good) -> Exception | None:
            nonlocal pages
            pages += kind(statement) == "range"
            return timeout() if kind(statement) == "range" and pages > good else None

        faulty = Faulty(healthy, fault)
        assert read(faulty, scan, replace(settings, page_size=97)) == (wanted, [])


@pytest.mark.server
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("k2 = 'x'", r'refuses "k2" = \'x\' for .*Invalid STRING constant'),
        ("a = 1 AND a = 2", "more than one relation"),
        ("a > 1 AND a > 2", "More than one restriction"),
        ("a IN (1, 'x')", "Invalid STRING constant"),
    ],
)
def test_conditions_that_the_server_refuses(
    settings: ClusterSettings, table: TableSchema, where: str, message: str
) -> None:
    with pytest.raises(WhereError, match=message):
        prepared(scan_session(settings, None), table, where)


@pytest.mark.server
def test_pages_as_the_limits_allow(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    """One request at a time: ranges that are asked for ahead do not keep each other waiting for ever."""
    limiter = Limiter(Limits(concurrent_requests=1))
    permits = Counting(limiter)
    healthy = scan_session(settings, None)
    rows, unread = read(healthy, prepared(healthy, table), settings, THIRDS, permits)
    assert rows == expected(session, table)
    assert not unread
    assert permits.granted == permits.ended
    assert limiter.running == 0


@pytest.mark.server
def test_a_reader_that_stops_early(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    permits = Counting()
    healthy = scan_session(settings, None)
    scan = prepared(healthy, table)
    parts = [ReplicaRange(part, ()) for part in THIRDS]
    for _, pages in read_ranges(healthy, scan, parts, replace(settings, page_size=10), permits):
        next(pages)
        break
    assert permits.granted >= 3
    deadline = time.monotonic() + 5
    while permits.ended < permits.granted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert permits.ended == permits.granted


@pytest.mark.server
def test_a_slow_reader_has_some_pages_waiting_at_most(settings: ClusterSettings, table: TableSchema) -> None:
    """The driver's own thread asks for the next pages, but does not run away."""
    permits = Counting()
    healthy = scan_session(settings, None)
    parts = [ReplicaRange(WHOLE, ())]
    ((_, pages),) = read_ranges(healthy, prepared(healthy, table), parts, replace(settings, page_size=10), permits)
    for taken in (1, 2, 3):
        next(pages)
        deadline = time.monotonic() + 10
        while permits.granted < taken + PAGES_AHEAD and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert permits.granted == taken + PAGES_AHEAD
