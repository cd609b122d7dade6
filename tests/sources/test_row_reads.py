"""Rows by their keys, against what a plain SELECT of a real server says."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest
from cassandra import InvalidRequest, ReadTimeout, Unavailable

from ringsync.cluster.cluster import read_ring
from ringsync.cluster.limits import Limiter, Limits, Permits
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterSettings, close_all, connect
from ringsync.images.schema import row_image_schema
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.read import IN_FLIGHT, NO_PROGRESS_S, RowsRead, read_rows
from ringsync.sources.scan.scan import scan_session
from servers.cassandra import CassandraNode
from tests.oracle import Rows, differences, image_rows, source_rows
from tests.sources.clusters import settings_of
from tests.sources.row_key_batches import Key, batch_of, keys_of
from tests.sources.scans import FAT, UNLIMITED, Counting, Fault, Faulty, create_table, timeout

pytestmark = pytest.mark.server

NOW = int(time.time()) + 400
"""Some rows have expired by then, others not."""


@dataclass(frozen=True)
class Source:
    """A table, what is in it, and how to read it.

    :ivar rows: of the whole table
    :ivar keys: of the rows, in the same order
    """

    session: SessionAt
    settings: ClusterSettings
    ring: RankedRing
    table: TableSchema
    rows: Rows
    keys: list[Key]

    def read(self, keys: Sequence[Key], permits: Permits = UNLIMITED, session: Any = None, **options: Any) -> RowsRead:
        given = {"element_times": True, "misfits": "raw", "sleep": lambda seconds: None, **options}
        return read_rows(
            session or self.session, self.table, batch_of(keys), self.ring, self.settings, permits, **given
        )

    def check(self, keys: Sequence[Key], permits: Counting | None = None, **options: Any) -> RowsRead:
        """Read keys of rows and compare."""
        permits = permits or Counting()
        found = self.read(keys, permits, **options)
        assert not found.unread
        assert permits.granted == permits.ended
        assert found.images.schema.equals(row_image_schema(self.table))
        found.images.validate(full=True)
        expected = {key.plain: self.rows[key.plain] for key in keys if key.plain in self.rows}
        images = image_rows(pa.Table.from_batches([found.images]), self.table)
        assert differences(expected, images) == []
        assert [keys[place].plain for place in found.places.tolist()] == list(images)
        return found


@pytest.fixture(scope="module")
def source(cassandra: CassandraNode, session: Any, keyspace: str) -> Iterator[Callable[[TableSchema], Source]]:
    settings = settings_of(cassandra, page_size=1000, consistency_level="LOCAL_ONE")

    def made(table: TableSchema) -> Source:
        ring = ranked(read_ring(connect(settings), keyspace))
        rows = source_rows(session, table, NOW)
        return Source(scan_session(settings, NOW), settings, ring, table, rows, keys_of_now(session, table, rows))

    yield made
    close_all()


def keys_of_now(session: Any, table: TableSchema, rows: Rows) -> list[Key]:
    """Keys of the rows that have not expired at ``NOW``."""
    every = source_rows(session, table, int(time.time()))
    return [key for key in keys_of(session, table, every) if key.plain in rows]


@pytest.fixture(scope="module")
def composite(source: Callable[[TableSchema], Source], session: Any, keyspace: str) -> Source:
    """Two columns of each kind of key, a wide partition, static columns."""
    return source(create_table(session, keyspace))


@pytest.fixture(scope="module")
def odd(source: Callable[[TableSchema], Source], session: Any, keyspace: str) -> Source:
    """A clustering that can be written in several ways, collections, times of all kinds."""
    session.execute(f"CREATE TYPE {keyspace}.place (street text, zip int)")
    session.execute(
        f'CREATE TABLE {keyspace}.odd ("Key" text, c decimal, s set<int> static, v varint, l list<int>, '
        'm map<text, double>, p place, d duration, t timestamp, i inet, PRIMARY KEY ("Key", c)) '
        "WITH CLUSTERING ORDER BY (c DESC)"
    )
    pick = random.Random(6)
    for k in range(120):
        if k % 4:
            session.execute(f"INSERT INTO {keyspace}.odd (\"Key\", s) VALUES ('k{k}', {{{k}, 1}})")
        for c in pick.sample(["1.0", "-2.50", "0", "1e-3", "77"], pick.randrange(4)):
            ttl = pick.choice(["", "USING TTL 200", "USING TTL 5000"])
            session.execute(
                f"INSERT INTO {keyspace}.odd (\"Key\", c, v, l, m, p, d, t, i) VALUES ('k{k}', {c}, {10**30 + k}, "
                f"[1, {k}], {{'a': 1.5, 'é': NaN}}, {{street: 'x', zip: {k}}}, 1mo2d3h, {k - 5}, '::{k}') {ttl}"
            )
            if pick.random() < 0.5:
                session.execute(
                    f"UPDATE {keyspace}.odd USING TTL 9000 SET l = l + [7], v = {k}, p.zip = 3, m['b'] = 0 "
                    f"WHERE \"Key\" = 'k{k}' AND c = {c}"
                )
    return source(read_table(session, keyspace, "odd"))


def some(source: Source, seed: int, count: int) -> list[Key]:
    """Keys of rows and as many keys that no row has, in any order, some of them twice."""
    pick = random.Random(seed)
    keys = [key for key in source.keys if key.clustering]
    chosen = pick.sample(keys, min(count, len(keys)))
    partitions = [key.partition for key in source.keys]
    for key in [*chosen]:
        last = pick.choice([pick.choice(partitions)[-1], key.partition[-1][:-1] + b"~"])
        partition = (*pick.choice(partitions)[:-1], last)
        other = Key(("no such row", pick.random()), partition, pick.choice(keys).clustering)
        if not any((other.partition, other.clustering) == (key.partition, key.clustering) for key in keys):
            chosen.append(other)
    pick.shuffle(chosen)
    return chosen


@pytest.mark.parametrize(("seed", "count"), [(1, 1), (2, 30), (3, 300), (4, 3000)])
def test_rows_of_composite_keys(composite: Source, seed: int, count: int) -> None:
    keys = some(composite, seed, count)
    permits = Counting()
    composite.check(keys, permits)
    assert permits.rows <= 2 * len(keys)


@pytest.mark.parametrize("count", [1, 40, 400])
def test_rows_with_values_of_all_kinds_and_their_times(odd: Source, count: int) -> None:
    odd.check(some(odd, count, count))


def test_a_row_is_found_by_another_form_of_its_clustering(odd: Source) -> None:
    keys = [key for key in odd.keys if key.plain[1] == "1"][:3]
    longer = [replace(key, clustering=(b"\0\0\0\3" + (1000).to_bytes(2, "big"),)) for key in keys]
    odd.check([*longer, *[key for key in odd.keys if key.plain[1] != "1"][:20]])


def test_element_times_that_the_server_does_not_tell(odd: Source, session: Any) -> None:
    rows = source_rows(session, odd.table, NOW, element_times=False)
    replace(odd, rows=rows).check([key for key in odd.keys if key.clustering][::3], element_times=False)


def test_tables_without_clustering_and_counters(
    source: Callable[[TableSchema], Source], session: Any, keyspace: str
) -> None:
    session.execute(f"CREATE TABLE {keyspace}.plain (a int, b text, v int, l set<int>, PRIMARY KEY ((a, b)))")
    session.execute(f"CREATE TABLE {keyspace}.hits (page text, day date, n counter, PRIMARY KEY (page, day))")
    for k in range(200):
        session.execute(f"INSERT INTO {keyspace}.plain (a, b, v, l) VALUES ({k % 3}, '{k}', {k}, {{{k}}})")
        session.execute(
            f"UPDATE {keyspace}.hits SET n = n + {k} WHERE page = '{k % 90}' AND day = '2024-01-0{k % 2 + 1}'"
        )
    plain, hits = (source(read_table(session, keyspace, name)) for name in ("plain", "hits"))
    quorum = replace(plain, settings=replace(plain.settings, consistency_level="LOCAL_QUORUM"))
    asking = faulty(plain)
    keys = [key for key in plain.keys if int(key.plain[1]) % 3]
    permits = Counting()
    found = quorum.check(keys, permits, session=asking)
    # Two values of the first column, 66 or 67 of the second; each is listed once, nobody asks whether there is more.
    assert sum(most - 1 for _, most in asking.asked) == len(keys)
    assert len(asking.asked) <= 20
    assert permits.rows == found.images.num_rows
    hits.check(hits.keys[::2])


def test_static_cells_and_whole_partitions(odd: Source) -> None:
    statics = {key.plain[0]: odd.rows[key.plain].get("s") for key in odd.keys}
    by_partition = {key.partition: replace(key, plain=(key.plain[0], None), clustering=None) for key in odd.keys}
    keys = [*by_partition.values(), Key(("nothing", None), (b"nothing",), None)]
    found = odd.read(keys)
    images = image_rows(pa.Table.from_batches([found.images]), odd.table)
    assert found.images.schema.equals(row_image_schema(odd.table))
    assert images == {(name, None): {"s": cell} for name, cell in statics.items() if cell}
    assert [keys[place].plain for place in found.places.tolist()] == list(images)

    whole = [replace(key, whole=True) for key in keys[::2]]
    others = [key for key in odd.keys[::5] if key.partition not in {key.partition for key in whole}]
    found = odd.read([*whole, *others, *whole])
    assert not found.unread
    wanted = {key.plain[0] for key in whole}
    expected = {key: cells for key, cells in odd.rows.items() if key[0] in wanted}
    expected |= {key.plain: odd.rows[key.plain] for key in others}
    assert differences(expected, image_rows(pa.Table.from_batches([found.images]), odd.table)) == []


def test_a_wide_partition_is_read_whole_only_if_wanted(composite: Source) -> None:
    wide = [key for key in composite.keys if key.plain[1] == FAT]
    permits = Counting()
    found = composite.check(wide[::40], permits)
    assert permits.rows == found.images.num_rows == len(wide) // 40
    found = composite.read([replace(wide[0], clustering=None, whole=True)])
    assert found.images.num_rows == len(wide)
    assert set(found.places.tolist()) == {0}


@dataclass
class FaultyAt(Faulty):
    """A session as of a moment whose requests fail when told to."""

    now: int = NOW
    reads_as_of: bool = True
    statements: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> Any:
        return self.session.plain


def faulty(source: Source, fault: Callable[[Any], Exception | None] = lambda statement: None) -> FaultyAt:
    return FaultyAt(source.session, fault)


def test_a_key_that_cannot_be_read_is_the_only_one(composite: Source) -> None:
    keys = some(composite, 5, 200)
    bad = next(key for key in keys if key.plain in composite.rows and key.plain[1] != FAT)
    last = bad.partition[-1]

    def fault(statement: Any) -> Exception | None:
        return timeout() if any(last in value[4:] for value in statement.values[1:2]) else None

    permits = Counting()
    found = composite.read(keys, permits, faulty(composite, fault))
    assert permits.granted == permits.ended
    assert permits.overloads > 4
    hit = [place for place, key in enumerate(keys) if last in key.partition]
    assert [row.place for row in found.unread] == hit
    assert f"k2 = {bad.plain[1]}" in found.unread[0].reason
    assert "could not be read at LOCAL_ONE from" in found.unread[0].reason
    expected = {key.plain for key in keys if key.plain in composite.rows and last not in key.partition}
    assert set(image_rows(pa.Table.from_batches([found.images]), composite.table)) == expected


@pytest.mark.parametrize("error", [timeout(), Unavailable("injected")])
def test_passing_errors_are_passed(odd: Source, error: Exception) -> None:
    requests = itertools.count()
    pauses: list[float] = []
    session = faulty(odd, lambda statement: error if next(requests) % 3 == 0 else None)
    rows = [key for key in odd.keys if key.clustering]
    odd.check(rows, session=session, sleep=pauses.append)
    assert pauses


@dataclass
class Clock:
    """Time that passes with pauses, and with requests that time out."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def slow(clock: Clock, error: Exception, answered: Callable[[int], bool] = lambda number: False) -> Fault:
    """A fault of all requests but those that are answered; a timeout takes 5 s, for all on the way."""
    requests = itertools.count()

    def fault(statement: Any) -> Exception | None:
        if answered(next(requests)):
            return None
        clock.now += 5 / IN_FLIGHT if isinstance(error, ReadTimeout) else 0
        return error

    return fault


@pytest.mark.parametrize("error", [timeout(), Unavailable("injected")], ids=["slow", "away"])
@pytest.mark.parametrize("of_all", [False, True])
def test_a_read_that_brings_nothing_ends(odd: Source, error: Exception, of_all: bool) -> None:
    """What the cluster does not give now holds up others for seconds, however many rows are wanted."""
    clock = Clock()
    session = faulty(odd, slow(clock, error))
    rows = [key for key in odd.keys if key.clustering]
    found = odd.read(rows, session=session, sleep=clock.sleep, clock=clock, of_all=of_all)
    assert [row.place for row in found.unread] == list(range(len(rows)))
    assert found.images.num_rows == 0
    assert clock.now < 3 * NO_PROGRESS_S
    assert len(session.asked) < 100
    hint = "longer timeouts may help" if isinstance(error, ReadTimeout) else "too few replicas are alive"
    assert all(hint in row.reason for row in found.unread)


def test_what_comes_only_in_small_portions_comes(odd: Source) -> None:
    clock = Clock()
    timed_out = slow(clock, timeout())

    def fault(statement: Any) -> Exception | None:
        return timed_out(statement) if int.from_bytes(statement.values[0][:4], "big") > 2 else None

    rows = [key for key in odd.keys if key.clustering]
    odd.check(rows, session=faulty(odd, fault), sleep=clock.sleep, clock=clock, of_all=True)


def test_a_read_that_is_slow_goes_on(odd: Source) -> None:
    """Time is limited only while nothing comes."""
    clock = Clock()
    rows = [key for key in odd.keys if key.clustering]
    session = faulty(odd, slow(clock, timeout(), lambda number: number % 2 == 1))
    odd.check(rows, session=session, sleep=lambda seconds: clock.sleep(10 * seconds), clock=clock, of_all=True)
    assert clock.now > 2 * NO_PROGRESS_S


def test_a_key_that_cannot_be_read_ends_a_read_of_all(composite: Source) -> None:
    keys = some(composite, 5, 200)
    bad = next(key for key in keys if key.plain in composite.rows and key.plain[1] != FAT)
    last = bad.partition[-1]

    def fault(statement: Any) -> Exception | None:
        return timeout() if any(last in value[4:] for value in statement.values[1:2]) else None

    permits = Counting()
    found = composite.read(keys, permits, faulty(composite, fault), of_all=True)
    assert permits.granted == permits.ended
    hit = {place for place, key in enumerate(keys) if last in key.partition}
    assert hit <= {row.place for row in found.unread}
    assert f"k2 = {bad.plain[1]}" in found.unread[0].reason


def test_guardrails_are_kept(odd: Source) -> None:
    def fault(statement: Any) -> Exception | None:
        partitions = int.from_bytes(statement.values[0][:4], "big")
        return InvalidRequest("Guardrail partition_keys_in_select violated") if partitions > 5 else None

    session = faulty(odd, fault)
    rows = [key for key in odd.keys if key.clustering]
    odd.check(rows, session=session)
    assert len(session.asked) < len(rows)


def test_a_table_that_is_gone_is_an_error(source: Callable[[TableSchema], Source], session: Any, keyspace: str) -> None:
    session.execute(f"CREATE TABLE {keyspace}.gone (a int PRIMARY KEY, v int)")
    session.execute(f"INSERT INTO {keyspace}.gone (a, v) VALUES (1, 2)")
    gone = source(read_table(session, keyspace, "gone"))
    gone.check(gone.keys)
    session.execute(f"DROP TABLE {keyspace}.gone")
    with pytest.raises(InvalidRequest, match="gone"):
        gone.read(gone.keys)


def test_the_rate_is_limited_by_rows(odd: Source) -> None:
    rows = [key for key in odd.keys if key.clustering]
    began, permits = time.monotonic(), Counting(Limiter(Limits(rows_per_s=200)))
    found = odd.read(rows, permits)
    assert time.monotonic() - began >= permits.rows / 200
    assert not found.unread


def test_keys_of_another_table_are_refused(odd: Source, composite: Source) -> None:
    with pytest.raises(ValueError, match="partition key"):
        composite.read([replace(key, clustering=None) for key in odd.keys[:3]])
    with pytest.raises(ValueError, match="clustering"):
        odd.read([key for key in composite.keys if key.clustering][:3])
    assert odd.read([]).images.num_rows == 0
