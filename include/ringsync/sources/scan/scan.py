"""The reader of a table by token ranges: the SELECT, the pages of each range, and what to do if a page fails.

A range is read in token order. If a page fails although pages.py has tried smaller pages and other replicas:

1. The partition of the last row is read to its end with its own SELECT, then the next partition with another
   (partitions.py). The rest of the range is read as before. So the partition that failed, mostly a large one, is read
   with its own SELECT, whose pages may have as few as one row.
2. If the server cannot even name the next partition, the rest of the range is halved.
3. A part that still cannot be read becomes an :class:`Unread`, and the rest of the range is read.

Where a table has large partitions, the beginnings of partitions are read first (beginnings.py).
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cassandra import ConsistencyLevel, InvalidRequest
from cassandra.cluster import Session
from cassandra.query import SimpleStatement

from ringsync.cluster.limits import Permits
from ringsync.cluster.protocol import RawSession, SessionAt
from ringsync.cluster.session import (
    SCAN_PROFILE,
    ClusterSettings,
    connect,
    explained_errors,
    opening,
)
from ringsync.cql.identifiers import quote
from ringsync.formats.result_page import Page, page_cells
from ringsync.images.from_pages import ResultColumn
from ringsync.ring.splits import ReplicaRange
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.scan import partitions
from ringsync.sources.scan.beginnings import FIRST_ROWS, Beginnings, ReadAgain
from ringsync.sources.scan.pages import Asked, Pages, Request, Stuck, row_count
from ringsync.sources.scan.partitions import Partition
from ringsync.sources.scan.where import Condition, WhereError, all_of, names_partitions, parse_where

MAX_HALVINGS = 15
"""Most halvings of a range, in total: it is divided into 16 pieces at most."""
MAX_PARTITIONS = 256
"""Most partitions to read one by one before the rest of a range is tried as before."""


@dataclass(frozen=True)
class Unread:
    """A part of a range that could not be read after all attempts.

    Ignore rows of this part that were yielded before.

    :ivar range: token range, without wrap
    :ivar reason: cause, consistency level, nodes and remedy, as text
    """

    range: TokenRange
    reason: str


@dataclass(frozen=True)
class ScanQuery:
    """The SELECT of a range, and the layout of its result.

    :ivar select: beginning of the statement, up to WHERE
    :ivar where: conditions on key columns besides the range
    """

    table: TableSchema
    select: str
    layout: tuple[ResultColumn, ...]
    where: tuple[Condition, ...] = ()

    @property
    def cql(self) -> str:
        """Statement whose two parameters are the range's start (excluded) and end (included)."""
        return f"{self._of_range}{partitions.filtering(self.where)}"

    @property
    def beginnings_cql(self) -> str:
        """The same for the first rows of each partition."""
        return f"{self._of_range} PER PARTITION LIMIT {FIRST_ROWS}{partitions.filtering(self.where)}"

    @property
    def _of_range(self) -> str:
        token = partitions.token_of(self.table)
        conditions = [f"{token} > ?", f"{token} <= ?", *(condition.cql for condition in self.where)]
        return f"{self.select} WHERE {all_of(conditions)}"


def scan_query(
    table: TableSchema, *, times: bool, element_times: bool, where: str | None = None, server_time: bool = False
) -> ScanQuery:
    """Write the SELECT of a table's rows and their times.

    :param times: whether to select writetimes and TTLs at all
    :param element_times: whether to select the times of elements of collections and user-defined types, which needs
        Cassandra 5.0 or later
    :param where: conditions on key columns, see :mod:`ringsync.sources.scan.where`; None: all rows
    :param server_time: whether to select the server's time, too: it does not read as of a moment that we tell
        (:class:`ringsync.cluster.protocol.SessionAt`)
    :raises WhereError: the conditions are not valid, or name other columns
    """
    selected = [(partitions.token_of(table), ResultColumn("token", None))]
    selected += [(quote(column.name), ResultColumn("value", column.name)) for column in table.columns]
    for column in table.value_columns if times else ():
        if column.is_multicell and not element_times:
            continue
        selected.append((f"writetime({quote(column.name)})", ResultColumn("writetime", column.name)))
        if not column.is_counter:
            selected.append((f"ttl({quote(column.name)})", ResultColumn("ttl", column.name)))
    if times and server_time:
        selected.append(("toUnixTimestamp(now())", ResultColumn("now", None)))
    expressions = ", ".join(expression for expression, _ in selected)
    return ScanQuery(
        table,
        f"SELECT {expressions} FROM {quote(table.keyspace)}.{quote(table.name)}",
        tuple(column for _, column in selected),
        parse_where(where, table) if where is not None else (),
    )


def columns_without_element_times(session: Session | SessionAt, table: TableSchema) -> tuple[Column, ...]:
    """Find the columns whose elements' writetimes and TTLs this server cannot select; none from Cassandra 5.0 and
    ScyllaDB 2026.2 on.

    This prepares such a query, since version numbers of forks are not reliable.
    """
    columns = tuple(column for column in table.value_columns if column.is_multicell)
    if not columns:
        return ()
    name = quote(columns[0].name)
    try:
        session.prepare(
            f"SELECT writetime({name}), ttl({name}) FROM {quote(table.keyspace)}.{quote(table.name)} LIMIT 1"
        )
    except InvalidRequest as error:
        if "non-frozen" in str(error) or "collection" in str(error):
            return columns
        raise
    return ()


def tells_element_times(session: SessionAt, table: TableSchema) -> bool:
    """Tell whether the server can select the times of elements; it is asked once for each table."""
    if table not in session.facts:
        session.facts[table] = not columns_without_element_times(session, table)
    return bool(session.facts[table])


_raw_sessions: dict[Session, RawSession] = {}


def scan_session(settings: ClusterSettings, now: int | None) -> SessionAt:
    """Return the process's session for scans as of ``now``, with raw pages; it shares the cluster of ``connect``.

    :param now: moment of the scan, seconds since the epoch, see :func:`ringsync.cluster.protocol.scan_protocol`
    :raises ClusterError: as :func:`ringsync.cluster.session.connect`
    """
    with opening:
        parent = connect(settings)
        if parent not in _raw_sessions:
            for old in [old for old in _raw_sessions if old.is_shutdown]:
                del _raw_sessions[old]
            _raw_sessions[parent] = RawSession(parent.cluster.connect(), parent)
        return SessionAt(_raw_sessions[parent], now)


@dataclass(frozen=True)
class PreparedScan:
    """A scan's SELECT prepared on a session (:func:`prepare_scan`).

    :ivar statements: prepared statements by their CQL; more are added if a range cannot be read with one SELECT
    :ivar choices: serialised values of ``IN`` conditions on clustering columns
    :ivar beginning_rows: most rows of a page of beginnings of partitions, which are read first; None: they are not
    """

    query: ScanQuery
    statements: dict[str, Any]
    choices: partitions.Choices
    beginning_rows: int | None = None


def prepare_scan(session: Session, query: ScanQuery, *, beginning_rows: int | None = None) -> PreparedScan:
    """Prepare a scan's SELECT, which lets the server check it.

    :param session: result of :func:`scan_session`
    :param beginning_rows: see :class:`PreparedScan`
    :raises WhereError: the server refuses the conditions
    """
    try:
        prepared = session.prepare(query.cql)
        choices = {
            condition.column: _serialized(session, condition, query.table)
            for condition in query.where
            if condition.operator == "IN" and query.table.column(condition.column).kind == "clustering"
        }
    except InvalidRequest as error:
        if not query.where:
            raise
        shown = all_of(condition.cql for condition in query.where)
        raise WhereError(f"where: the cluster refuses {shown} for {query.table.full_name}: {error}") from error
    return PreparedScan(query, {query.cql: prepared}, choices, beginning_rows)


def _serialized(session: Session, condition: Condition, table: TableSchema) -> tuple[bytes, ...]:
    kind = table.column(condition.column).type
    values = ", ".join(f"({kind}) {literal}" for literal in condition.literals)
    statement = SimpleStatement(f"SELECT {values} FROM system.local", consistency_level=ConsistencyLevel.ONE)
    page = session.execute(statement, execution_profile=SCAN_PROFILE).current_rows[0]
    _, columns = page_cells(page, len(condition.literals))
    return tuple(column.value(0) or b"" for column in columns)


def read_ranges(
    session: Session,
    scan: PreparedScan,
    ranges: Iterable[ReplicaRange],
    settings: ClusterSettings,
    permits: Permits,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[ReplicaRange, Iterator[Page | Unread]]]:
    """Read the pages of each range, in the order of ranges; request the next range while one is being read.

    See :func:`read_range`.
    """
    started: deque[tuple[ReplicaRange, Iterator[Page | Unread]]] = deque()
    for part in ranges:
        started.append((part, read_range(session, scan, part, settings, permits, sleep=sleep)))
        if len(started) == 2:
            yield started.popleft()
    yield from started


def read_range(
    session: Session,
    scan: PreparedScan,
    part: ReplicaRange,
    settings: ClusterSettings,
    permits: Permits,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Page | Unread]:
    """Read the result pages of one token range, as bytes (see :class:`ringsync.cluster.protocol.RawPage`).

    Rows come in the order of tokens, and of clustering inside a partition. The rows of all pages, except those in an
    :class:`Unread` range, are exactly the rows of the range. The first page is requested at once. Each further page is
    requested before its predecessor is returned, if ``permits`` allow that without a wait, so that the cluster works
    while the caller decodes.

    :param session: result of :func:`scan_session`
    :param scan: result of :func:`prepare_scan` with this session
    :param part: token range without wrap
    :param permits: permits for the pages; each is ended when its page comes or fails, even if the caller stops reading
    :param sleep: function that waits before a page is requested again, given seconds
    :raises ClusterError: the user may not read the table
    :raises cassandra.InvalidRequest: the table is gone
    """
    pages = Pages(session, scan.statements, part.endpoints, settings, permits, sleep)
    reader = _Reader(scan, pages)
    if names_partitions(scan.query.where, scan.query.table):
        return reader.named_partitions(part.range)
    return reader.all_of(part.range, pages.ask(reader.request(part.range), wait=False))


def read_some(pages: Pages, scan: PreparedScan, wanted: TokenRange, most: int) -> Iterator[Page]:
    """Read the pages of one token range in the order of tokens, none ahead, and until one cannot be read.

    :param most: most rows of a page
    :raises Stuck: a page could not be read
    """
    for page in _Reader(scan, pages, most).all_of(wanted, None):
        assert not isinstance(page, Unread)
        yield page


class _Reader:
    """The reader of one range; ``pages`` knows how large pages may be.

    :param most: most rows of a page, and the first one that cannot be read ends the reading; None: neither
    :param begins_small: whether the first page has one row (:class:`Request`)
    """

    def __init__(
        self, scan: PreparedScan, pages: Pages, most: int | None = None, *, begins_small: bool = False
    ) -> None:
        self._scan = scan
        self._query = scan.query
        self._choices = scan.choices
        self._pages = pages
        self._most = most
        self._begins_small = begins_small
        self._halvings = 0
        self._fruitless = 0

    def request(self, wanted: TokenRange) -> Request:
        """Return the first request of a range."""
        values = partitions.token_bytes(wanted.start), partitions.token_bytes(wanted.end)
        if (most := self._scan.beginning_rows) is None:
            return Request(self._query.cql, values, limit=self._most, begins_small=self._begins_small)
        return Request(
            self._query.beginnings_cql, values, limit=min(most, self._most or most), ahead=self._most is None
        )

    def all_of(self, wanted: TokenRange, asked: Asked | None) -> Iterator[Page | Unread]:
        """Read the whole range.

        :param asked: request of the first page, if it is on its way
        :raises Stuck: with ``most``: a page could not be read
        """
        left = [wanted]
        go = self._one_go if self._scan.beginning_rows is None else self._with_care
        while left:
            left += yield from go(left.pop(), asked)
            asked = None

    def _with_care(self, wanted: TokenRange, asked: Asked | None) -> Generator[Page | Unread, None, list[TokenRange]]:
        """Read a range by the beginnings of its partitions, and past a failing partition; return the parts left."""
        beginnings = Beginnings(self._query.layout, wanted.start, self._pages.settings.page_size)
        scan = replace(self._scan, beginning_rows=None)
        try:
            for page in self._pages.read(self.request(wanted), asked):
                for part in beginnings.take(page, ended=self._pages.ended):
                    if isinstance(part, ReadAgain):
                        pages = replace(self._pages)  # those of the beginnings may be on their way
                        again = _Reader(scan, pages, self._most, begins_small=part.alone)
                        yield from again.all_of(part.range, None)
                    else:
                        yield part
            return []
        except Stuck as error:
            stuck = error
        if self._most is not None:
            raise stuck
        rest = replace(wanted, start=beginnings.end)
        if stuck.absent:
            yield _unread(rest, stuck)
            return []
        self._fruitless = 0 if rest != wanted else self._fruitless + 1
        return (yield from self._past(None, rest))

    def named_partitions(self, wanted: TokenRange) -> Iterator[Page | Unread]:
        """Read the named partitions of a range with one SELECT each, since they do not come in token order."""
        try:
            named = sorted(self._next_partitions(None, wanted, sys.maxsize))
        except Stuck as stuck:
            yield _unread(wanted, stuck)
            return
        for partition in named:
            yield from self._alone(partition)

    def _one_go(self, wanted: TokenRange, asked: Asked | None) -> Generator[Page | Unread, None, list[TokenRange]]:
        """Read a range with one SELECT, and past a failing partition; return the parts left, the last one first."""
        last = None
        try:
            for page in self._pages.read(self.request(wanted), asked):
                if row_count(page):
                    last = page
                yield page
            return []
        except Stuck as error:
            if self._most is not None:
                raise
            stuck = error
        reached = partitions.last_partition(last, self._query.layout, self._query.table) if last else None
        if stuck.absent:
            start = reached.token - 1 if reached else wanted.start
            yield _unread(TokenRange(start, wanted.end), stuck)
            return []
        self._fruitless = 0 if reached else self._fruitless + 1
        if reached and reached.clustering:
            yield from self._alone(reached)
        return (yield from self._past(reached, wanted))

    def _past(self, reached: Partition | None, wanted: TokenRange) -> Generator[Page | Unread, None, list[TokenRange]]:
        """Read the next partitions with one SELECT each: one partition, or more if one did not help the last time."""
        count = min(2 ** max(0, self._fruitless - 1), MAX_PARTITIONS)
        try:
            following = self._next_partitions(reached, wanted, count)
        except Stuck as stuck:
            return (yield from self._halves(reached, wanted, stuck))
        for partition in following:
            yield from self._alone(partition)
        return _behind(following[-1].token, wanted) if following else []

    def _halves(
        self, reached: Partition | None, wanted: TokenRange, stuck: Stuck
    ) -> Generator[Page | Unread, None, list[TokenRange]]:
        """Halve the rest of a range whose next partition is unknown."""
        left = [wanted]
        if reached:
            yield from self._same_token(reached)
            left = _behind(reached.token, wanted)
        if not left:
            return []
        if stuck.absent or self._halvings == MAX_HALVINGS or left[0].width == 1:
            yield _unread(left[0], stuck)
            return []
        self._halvings += 1
        return list(reversed(left[0].split(2)))

    def _same_token(self, reached: Partition) -> Iterator[Page | Unread]:
        """Read the partitions after a partition that share its token."""
        token = TokenRange(reached.token - 1, reached.token)
        try:
            others = self._next_partitions(reached, token, sys.maxsize)
        except Stuck as stuck:
            yield _unread(token, stuck)
            return
        for partition in others:
            yield from self._alone(partition)

    def _next_partitions(self, reached: Partition | None, wanted: TokenRange, count: int) -> list[Partition]:
        """Find the next ``count`` partitions after the one reached, and all that share the last one's token.

        :raises Stuck: the server cannot name them
        """
        start = reached.token - 1 if reached else wanted.start
        request = Request(
            partitions.partitions_cql(self._query.table, self._query.where),
            (partitions.token_bytes(start), partitions.token_bytes(wanted.end)),
            limit=count + 2,
        )
        following: list[Partition] = []
        for page in self._pages.read(request):
            for partition in partitions.partitions_of(page, self._query.table):
                if reached and partition <= reached:
                    continue
                if len(following) >= count and partition.token != following[-1].token:
                    return following
                following.append(partition)
        return following

    def _alone(self, partition: Partition) -> Iterator[Page | Unread]:
        """Read a partition's rows after the last one read, with their own SELECTs."""
        query = self._query
        try:
            for request in partitions.rest_of_partition(
                query.select, query.table, query.where, self._choices, partition
            ):
                yield from self._pages.read(request)
        except Stuck as stuck:
            yield _unread(TokenRange(partition.token - 1, partition.token), stuck)


def _behind(token: int, wanted: TokenRange) -> list[TokenRange]:
    """Return the part of a range after one of its tokens."""
    return [replace(wanted, start=token)] if token < wanted.end else []


def _unread(wanted: TokenRange, stuck: Stuck) -> Unread:
    return Unread(wanted, f"token range {wanted} {stuck.reason}")


def check_readable(session: Session, table: TableSchema, user: str | None) -> None:
    """Check before a scan that the user may read the table, by reading the range of one token.

    :raises ClusterError: the user may not; the message names the missing GRANT
    """
    token = partitions.token_of(table)
    key = quote(table.partition_key[0].name)
    name = f"{quote(table.keyspace)}.{quote(table.name)}"
    with explained_errors(user):
        session.execute(f"SELECT {key} FROM {name} WHERE {token} > 0 AND {token} <= 1")
