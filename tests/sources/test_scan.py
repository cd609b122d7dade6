"""The SELECT of a scan, and what happens when a range cannot be read."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ringsync.cql.types import Native, SetType
from ringsync.formats.row_images import ResultColumn
from ringsync.ring.splits import ReplicaRange
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.scan import RETRY_DELAYS_S, ScanError, read_ranges, scan_query, scan_session
from ringsync.sources.session import ClusterSettings, close_all
from servers.cassandra import CassandraNode
from tests.sources.clusters import settings_of

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
    yield settings_of(cassandra, page_size=10)
    close_all()


@pytest.fixture(scope="module")
def table(session: Any, keyspace: str) -> str:
    session.execute(f"CREATE TABLE {keyspace}.t (id int PRIMARY KEY, v text)")
    for i in range(95):
        session.execute(f"INSERT INTO {keyspace}.t (id, v) VALUES ({i}, 'x')")
    return f"{keyspace}.t"


RANGES = [
    ReplicaRange(part, ("nowhere:1",)) for part in (TokenRange(-(2**63), 0), TokenRange(0, 1), TokenRange(1, 2**63 - 1))
]


@pytest.mark.server
def test_pages_of_several_ranges(settings: ClusterSettings, table: str) -> None:
    session = scan_session(settings, None)
    prepared = session.prepare(f"SELECT id FROM {table} WHERE token(id) > ? AND token(id) <= ?")
    rows = [
        [int.from_bytes(page[:4], "big") for page in pages]
        for _, pages in read_ranges(session, prepared, RANGES, settings)
    ]
    assert len(rows) == 3
    assert sum(map(sum, rows)) == 95
    assert max(map(max, rows)) == 10
    assert rows[1] == [0]


@pytest.mark.server
def test_a_range_that_stays_unreadable_is_named(session: Any, settings: ClusterSettings, keyspace: str) -> None:
    """Three replicas are wanted on one node: every read at QUORUM finds too few of them, for as long as it tries."""
    wanting = f"{keyspace}_wanting"
    session.execute(
        f"CREATE KEYSPACE {wanting} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 3}}"
    )
    session.execute(f"CREATE TABLE {wanting}.t (id int PRIMARY KEY)")
    scan = scan_session(settings, None)
    prepared = scan.prepare(f"SELECT id FROM {wanting}.t WHERE token(id) > ? AND token(id) <= ?")
    slept: list[float] = []
    quorum = replace(settings, consistency_level="QUORUM")
    message = (
        r"token range \(0, 1\] could not be read at QUORUM from nowhere:1 in 4 attempts: Unavailable.*nodetool status"
    )
    [(_, pages)] = read_ranges(scan, prepared, RANGES[1:2], quorum, sleep=slept.append)
    with pytest.raises(ScanError, match=message):
        next(pages)
    session.execute(f"DROP KEYSPACE {wanting}")
    assert slept == list(RETRY_DELAYS_S)
