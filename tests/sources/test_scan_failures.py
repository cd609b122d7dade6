"""What happens when pages of a range cannot be had: every row comes once, or is said to be unread, whatever fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from cassandra import InvalidRequest, OperationTimedOut, ReadFailure, Unavailable
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ConnectionShutdown
from cassandra.protocol import OverloadedErrorMessage

from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterSettings, close_all
from ringsync.images.from_pages import row_images
from ringsync.ring.splits import ReplicaRange
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import TableSchema
from ringsync.sources.scan.pages import RETRY_DELAYS_S
from ringsync.sources.scan.scan import Unread, prepare_scan, read_range, scan_query, scan_session
from servers.cassandra import REQUEST_SECONDS, CassandraNode
from tests.sources.clusters import settings_of
from tests.sources.scans import (
    FAT,
    FAT_ROWS,
    THIRDS,
    UNLIMITED,
    WHOLE,
    Counting,
    Faulty,
    create_table,
    expected,
    kind,
    prepared,
    range_of,
    read,
    timeout,
)

pytestmark = pytest.mark.server


@pytest.fixture
def settings(cassandra: CassandraNode) -> Iterator[ClusterSettings]:
    yield settings_of(cassandra, page_size=1000)
    close_all()


@pytest.fixture(scope="module")
def table(session: Any, keyspace: str) -> TableSchema:
    return create_table(session, keyspace)


def test_times_of_rows_that_come_by_themselves(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    """All statements of a scan have the same columns and the same moment."""
    healthy = scan_session(settings, int(time.time()))
    scan = prepare_scan(healthy, scan_query(table, times=True, element_times=True))
    faulty = Faulty(healthy, lambda statement: timeout() if kind(statement) == "range" else None)
    images = []
    for session_ in (healthy, faulty):
        part = ReplicaRange(WHOLE, ())
        pages = list(read_range(session_, scan, part, settings, UNLIMITED, sleep=lambda seconds: None))
        found = [
            row_images([page], table, scan.query.layout, 0, "error") for page in pages if not isinstance(page, Unread)
        ]
        images.append([row for batch in found for row in batch.to_pylist()])
    assert images[0] == images[1]
    assert images[0][-1]["_row"]["writetime"]


@pytest.mark.parametrize("bearable", [10, 100, 400])
def test_a_partition_in_the_way(session: Any, settings: ClusterSettings, table: TableSchema, bearable: int) -> None:
    """Where the large partition begins, no page of the range comes any more; by itself it comes in small pages."""
    token = next(row[0] for row in expected(session, table) if row[2] == FAT)

    def fault(statement: Any) -> Exception | None:
        if kind(statement) == "range" and token in range_of(statement):
            return timeout()
        return timeout() if kind(statement) == "partition" and statement.fetch_size > bearable else None

    faulty = Faulty(scan_session(settings, None), fault)
    permits = Counting()
    rows, unread = read(faulty, prepared(faulty, table), settings, permits=permits)
    assert rows == expected(session, table)
    assert not unread
    assert permits.granted == permits.ended
    # Pages grow again behind a failure, but too large ones are not tried over and over.
    alone = [
        size for cql, size in faulty.asked if "DISTINCT" not in cql and "token(" not in cql.partition(" WHERE ")[2]
    ]
    assert sum(size > bearable for size in alone) <= 12
    assert len(alone) < 3 * FAT_ROWS / bearable + 200


@pytest.mark.parametrize("beginning_rows", [None, 10, 311])
@pytest.mark.parametrize("good", [1, 2, 5])
def test_a_range_that_breaks_in_the_middle_of_a_partition(
    session: Any, settings: ClusterSettings, table: TableSchema, good: int, beginning_rows: int | None
) -> None:
    """Some pages of the range come, then none: the partition is read on from its last row."""
    pages = 0

    def fault(statement: Any) -> Exception | None:
        nonlocal pages
        if kind(statement) != "range":
            return None
        pages += 1
        return timeout() if pages > good else None

    settings = replace(settings, page_size=311)
    faulty = Faulty(scan_session(settings, None), fault)
    rows, unread = read(faulty, prepared(faulty, table, beginning_rows=beginning_rows), settings)
    assert rows == expected(session, table)
    assert not unread


def test_partitions_that_nobody_can_name(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    """The range is halved, and the halves are read; a small page now and then is all that comes."""

    def fault(statement: Any) -> Exception | None:
        if kind(statement) == "names":
            return ReadFailure("injected", consistency=1, required_responses=1, received_responses=0, failures=1)
        return timeout() if kind(statement) == "range" and range_of(statement).width > 2**61 else None

    faulty = Faulty(scan_session(settings, None), fault)
    rows, unread = read(faulty, prepared(faulty, table), settings)
    assert rows == expected(session, table)
    assert not unread


def test_what_stays_unread_is_said(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    everything = expected(session, table)
    token = next(row[0] for row in everything if row[2] == FAT)
    key = (b"x", FAT.to_bytes(4, "big"))

    def fault(statement: Any) -> Exception | None:
        if kind(statement) == "partition":
            return timeout() if tuple(statement.values[:2]) == key else None
        return timeout() if kind(statement) == "range" and token in range_of(statement) else None

    faulty = Faulty(scan_session(settings, None), fault)
    rows, [unread] = read(faulty, prepared(faulty, table), settings)
    assert unread.range == TokenRange(token - 1, token)
    assert f"token range ({token - 1}, {token}] could not be read at ONE from nowhere:1 in" in unread.reason
    assert "ReadTimeout" in unread.reason
    assert "read_request_timeout" in unread.reason
    assert rows == [row for row in everything if row[0] != token]


def test_nothing_can_be_read_behind_a_token(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    """Neither rows nor names: the pieces are few, and cover what was not read."""
    everything = expected(session, table)
    token = next(row[0] for row in everything if row[2] == FAT)

    def fault(statement: Any) -> Exception | None:
        if kind(statement) == "partition":
            return timeout() if statement.values[1] == FAT.to_bytes(4, "big") else None
        return timeout() if range_of(statement).end >= token else None

    faulty = Faulty(scan_session(settings, None), fault)
    slept: list[float] = []
    rows, unread = read(faulty, prepared(faulty, table), settings, sleep=slept.append)
    assert len(unread) <= 16
    assert token in unread[0].range or token in unread[1].range
    assert any(row[0] < token for row in rows)
    assert rows == [row for row in everything if not any(row[0] in part.range for part in unread)]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert sum(slept) < 60


def test_nobody_to_ask(session: Any, settings: ClusterSettings, keyspace: str) -> None:
    """Three replicas are wanted on one node: smaller pages or ranges are not even tried."""
    wanting = f"{keyspace}_wanting"
    session.execute(
        f"CREATE KEYSPACE {wanting} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 3}}"
    )
    session.execute(f"CREATE TABLE {wanting}.t (id int PRIMARY KEY)")
    faulty = Faulty(scan_session(settings, None), lambda statement: None)
    slept: list[float] = []
    scan = prepared(faulty, read_table(session, wanting, "t"))
    quorum = replace(settings, consistency_level="QUORUM")
    rows, [unread] = read(faulty, scan, quorum, [TokenRange(0, 1)], sleep=slept.append)
    session.execute(f"DROP KEYSPACE {wanting}")
    assert not rows
    assert unread.range == TokenRange(0, 1)
    assert "could not be read at QUORUM from nowhere:1 in 4 attempts" in unread.reason
    assert "nodetool status" in unread.reason
    assert slept == list(RETRY_DELAYS_S)
    assert [size for _, size in faulty.asked] == [1000] * 4


def test_nobody_to_ask_any_more(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    """All replicas go down in the middle of a partition, whose token is then among the unread ones."""
    left = 3

    def fault(statement: Any) -> Exception | None:
        nonlocal left
        left -= 1
        return NoHostAvailable("injected", {"n1": ConnectionShutdown("gone")}) if left < 0 else None

    faulty = Faulty(scan_session(settings, None), fault)
    rows, [unread] = read(faulty, prepared(faulty, table), replace(settings, page_size=100))
    everything = expected(session, table)
    assert rows == [row for row in everything if row[0] <= unread.range.start]
    assert "ConnectionShutdown: gone" in unread.reason


def test_each_attempt_begins_with_another_replica(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    asked: list[tuple[str, ...]] = []

    def fault(statement: Any) -> Exception | None:
        asked.append(statement.endpoints)
        return timeout() if len(asked) <= 3 else None

    healthy = scan_session(settings, None)
    scan = prepared(healthy, table)
    part = ReplicaRange(TokenRange(0, 1), ("a", "b", "c"))
    pages = list(read_range(Faulty(healthy, fault), scan, part, settings, UNLIMITED, sleep=lambda seconds: None))
    assert len(pages) == 1
    assert asked == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


def test_errors_that_do_not_pass(session: Any, settings: ClusterSettings, table: TableSchema) -> None:
    faulty = Faulty(scan_session(settings, None), lambda statement: InvalidRequest("table is gone"))
    permits = Counting()
    with pytest.raises(InvalidRequest, match="gone"):
        read(faulty, prepared(faulty, table), settings, permits=permits)
    assert permits.granted == permits.ended == 1


@pytest.mark.parametrize("seed", range(30))
def test_anything_may_fail_at_any_time(session: Any, settings: ClusterSettings, table: TableSchema, seed: int) -> None:
    """Whatever fails: each row comes once, in order, or is in a range that is said to be unread."""
    choose = random.Random(seed)
    share = {name: choose.choice([0.0, 0.3, 0.7, 0.9]) for name in ("range", "names", "partition")}
    errors: list[Callable[[], Exception]] = [
        timeout,
        lambda: OperationTimedOut("injected"),
        lambda: OverloadedErrorMessage(0x1001, "injected", {}),
        lambda: ReadFailure("injected", consistency=1, required_responses=1, received_responses=0, failures=1),
        lambda: NoHostAvailable("injected", {"n1": OverloadedErrorMessage(0x1001, "injected", {})}),
    ]
    if seed % 4 == 0:
        errors.append(lambda: Unavailable("injected", consistency=1, required_replicas=1, alive_replicas=0))

    def fault(statement: Any) -> Exception | None:
        return choose.choice(errors)() if choose.random() < share[kind(statement)] else None

    where = [None, None, "a IN (0, 1, 3) AND b > 3", "b IN (1, 5, 7, 29) AND a > 0", "k2 >= 3 AND c > '0'"][seed % 5]
    healthy = scan_session(settings, None)
    scan = prepared(healthy, table, where, beginning_rows=[None, 20, 200][seed // 5 % 3])
    faulty = Faulty(healthy, fault)
    permits = Counting()
    rows, unread = read(faulty, scan, replace(settings, page_size=200), THIRDS, permits)
    everything, _ = read(healthy, prepared(healthy, table, where), settings)
    assert rows == [row for row in everything if not any(row[0] in part.range for part in unread)]
    assert permits.granted == permits.ended == len(faulty.asked)


def colliding(count: int, choose: random.Random) -> list[bytes]:
    """Keys of equal token: Murmur3 is invertible, so a second block can make up for the difference of the first."""
    mask = 2**64 - 1
    c1, c2 = 0x87C37B91114253D5, 0x4CF5AD432745937F

    def rotated(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (64 - bits))) & mask

    def block(h1: int, h2: int, k1: int, k2: int) -> tuple[int, int]:
        h1 ^= rotated(k1 * c1 & mask, 31) * c2 & mask
        h1 = ((rotated(h1, 27) + h2) * 5 + 0x52DCE729) & mask
        h2 ^= rotated(k2 * c2 & mask, 33) * c1 & mask
        h2 = ((rotated(h2, 31) + h1) * 5 + 0x38495AB5) & mask
        return h1, h2

    def block_for(h1: int, h2: int, wanted1: int, wanted2: int) -> tuple[int, int]:
        fifth = pow(5, -1, 2**64)
        m1 = rotated(((wanted1 - 0x52DCE729) * fifth - h2) & mask, 64 - 27) ^ h1
        m2 = rotated(((wanted2 - 0x38495AB5) * fifth - wanted1) & mask, 64 - 31) ^ h2
        k1 = rotated(m1 * pow(c2, -1, 2**64) & mask, 64 - 31) * pow(c1, -1, 2**64) & mask
        k2 = rotated(m2 * pow(c1, -1, 2**64) & mask, 64 - 33) * pow(c2, -1, 2**64) & mask
        return k1, k2

    wanted = choose.getrandbits(64), choose.getrandbits(64)
    keys = []
    for _ in range(count):
        first = choose.getrandbits(64), choose.getrandbits(64)
        second = block_for(*block(0, 0, *first), *wanted)
        keys.append(b"".join(part.to_bytes(8, "little") for part in (*first, *second)))
    return keys


@pytest.fixture(scope="module")
def colliding_table(session: Any, keyspace: str) -> TableSchema:
    """Partitions of which always three share a token."""
    session.execute(f"CREATE TABLE {keyspace}.same (k blob, c int, v int, PRIMARY KEY (k, c))")
    insert = session.prepare(f"INSERT INTO {keyspace}.same (k, c, v) VALUES (?, ?, 1)")
    for seed in range(8):
        for key in colliding(3, random.Random(seed)):
            for c in range(30):
                session.execute(insert, (key, c))
    return read_table(session, keyspace, "same")


@pytest.mark.parametrize("good", [0, 1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("names_fail", [False, True])
@pytest.mark.parametrize("beginning_rows", [None, 9])
def test_partitions_of_one_token(
    session: Any,
    settings: ClusterSettings,
    colliding_table: TableSchema,
    good: int,
    names_fail: bool,
    beginning_rows: int | None,
) -> None:
    everything = expected(session, colliding_table)
    assert len({row[0] for row in everything}) == 8
    assert len({row[1] for row in everything}) == 24
    pages = 0

    def fault(statement: Any) -> Exception | None:
        nonlocal pages
        if kind(statement) == "names":
            return timeout() if names_fail and range_of(statement).width > 1 else None
        if kind(statement) == "partition":
            return None
        pages += 1
        return timeout() if pages > good and range_of(statement).width > 2**60 else None

    settings = replace(settings, page_size=35)
    faulty = Faulty(scan_session(settings, None), fault)
    rows, unread = read(faulty, prepared(faulty, colliding_table, beginning_rows=beginning_rows), settings)
    assert rows == [row for row in everything if not any(row[0] in part.range for part in unread)]
    assert not unread


def test_timeouts_of_the_server(
    cassandra: CassandraNode, session: Any, settings: ClusterSettings, table: TableSchema
) -> None:
    """The node gives up every read after a millisecond; a while later it is itself again."""

    def set_timeouts(milliseconds: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            for done in [
                pool.submit(cassandra.nodetool, "settimeout", name, str(milliseconds)) for name in ("range", "read")
            ]:
                done.result()

    everything = expected(session, table)
    faulty = Faulty(scan_session(settings, None), lambda statement: None)
    scan = prepared(faulty, table)
    permits = Counting()
    lifting = threading.Thread(target=set_timeouts, args=(REQUEST_SECONDS * 1000,))
    set_timeouts(1)
    try:
        lifting.start()
        rows, unread = read(faulty, scan, replace(settings, page_size=5000), permits=permits, sleep=time.sleep)
    finally:
        lifting.join()
    assert rows == everything
    assert not unread
    assert permits.overloads > 0
    assert permits.granted == permits.ended
