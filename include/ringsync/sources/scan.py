"""Read a table by token ranges: the SELECT, and the pages of one range after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cassandra import (
    ConsistencyLevel,
    InvalidRequest,
    OperationTimedOut,
    ReadFailure,
    ReadTimeout,
    Unavailable,
)
from cassandra.cluster import NoHostAvailable, Session
from cassandra.connection import ConnectionException
from cassandra.protocol import IsBootstrappingErrorMessage, OverloadedErrorMessage, ServerError

from ringsync.cql.identifiers import quote
from ringsync.formats.row_images import ResultColumn
from ringsync.ring.splits import ReplicaRange
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.protocol import scan_protocol
from ringsync.sources.session import SCAN_PROFILE, ClusterError, ClusterSettings, connect, explained_errors

PAGE_BYTES = 8 * 2**20
"""Wanted size of a page: where rows are wide, fewer rows are asked for than the settings allow."""

RETRY_DELAYS_S = (0.5, 2.0, 8.0)
"""Pauses before a page is asked for again."""

PASSING_ERRORS = (
    OperationTimedOut,
    ReadTimeout,
    ReadFailure,
    Unavailable,
    NoHostAvailable,
    ConnectionException,
    OverloadedErrorMessage,
    IsBootstrappingErrorMessage,
    ServerError,
)
"""What may be over a moment later."""


class ScanError(ClusterError):
    """A token range could not be read; the message names the range and the cause."""


@dataclass(frozen=True)
class ScanQuery:
    """The SELECT of a range, with what each column of its result is."""

    cql: str
    layout: tuple[ResultColumn, ...]


def scan_query(table: TableSchema, *, times: bool, element_times: bool) -> ScanQuery:
    """The SELECT of one token range; its two parameters are the range's start (excluded) and end (included).

    :param times: whether to select writetimes and TTLs at all
    :param element_times: whether to select those of the elements of collections and user-defined types, which
        Cassandra can from 5.0 on
    """
    token = f"token({', '.join(quote(column.name) for column in table.partition_key)})"
    selected = [(token, ResultColumn("token", None))]
    selected += [(quote(column.name), ResultColumn("value", column.name)) for column in table.columns]
    for column in table.value_columns if times else ():
        if column.is_multicell and not element_times:
            continue
        selected.append((f"writetime({quote(column.name)})", ResultColumn("writetime", column.name)))
        if not column.is_counter:
            selected.append((f"ttl({quote(column.name)})", ResultColumn("ttl", column.name)))
    cql = (
        f"SELECT {', '.join(expression for expression, _ in selected)} "
        f"FROM {quote(table.keyspace)}.{quote(table.name)} WHERE {token} > ? AND {token} <= ?"
    )
    return ScanQuery(cql, tuple(column for _, column in selected))


def columns_without_element_times(session: Session, table: TableSchema) -> tuple[Column, ...]:
    """The columns whose elements' writetimes and TTLs this server cannot select: none from Cassandra 5.0 on.

    The server is asked by preparing such a query, since version numbers of forks tell little.
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
        if "non-frozen" in str(error):
            return columns
        raise
    return ()


_scan_sessions: dict[tuple[Session, int | None], Session] = {}


def scan_session(settings: ClusterSettings, now: int | None) -> Session:
    """The process's session for scans as of ``now``: it shares the connection's cluster, but yields raw pages.

    :param now: seconds since the epoch, see :func:`ringsync.sources.protocol.scan_protocol`
    :raises ClusterError: as :func:`ringsync.sources.session.connect`
    """
    parent = connect(settings)
    key = (parent, now)
    if key not in _scan_sessions:
        for old in [old for old in _scan_sessions if old[0].is_shutdown or old[0] is parent]:
            _scan_sessions.pop(old).shutdown()
        session = parent.cluster.connect()
        session.client_protocol_handler = scan_protocol(now)
        _scan_sessions[key] = session
    return _scan_sessions[key]


def read_ranges(
    session: Session,
    prepared: Any,
    ranges: Iterable[ReplicaRange],
    settings: ClusterSettings,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[ReplicaRange, Iterator[bytes]]]:
    """The pages of each range, ranges in their order; the next range is asked for while one is being read."""
    started: deque[tuple[ReplicaRange, Iterator[bytes]]] = deque()
    for part in ranges:
        started.append((part, read_range(session, prepared, part, settings, sleep=sleep)))
        if len(started) == 2:
            yield started.popleft()
    yield from started


def read_range(
    session: Session,
    prepared: Any,
    part: ReplicaRange,
    settings: ClusterSettings,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bytes]:
    """The result pages of one token range, as bytes (see :class:`ringsync.sources.protocol.RawPage`).

    The first page is asked for at once, each further one before its predecessor is handed out, so that the
    cluster works while the caller decodes.

    :param session: from :func:`scan_session`
    :param prepared: the prepared SELECT of :func:`scan_query`
    :param sleep: waits so many seconds before a page is asked for again
    :raises ScanError: at the page that could not be read, after some attempts; names range and cause
    :raises NoPermissionError: when the user may not read the table
    """
    statement = prepared.bind((part.range.start, part.range.end))
    statement.consistency_level = ConsistencyLevel.name_to_value[settings.consistency_level]
    statement.is_idempotent = True
    statement.fetch_size = settings.page_size
    statement.endpoints = part.endpoints
    first = _ask(session, statement, None)
    return _pages(session, statement, first, part, settings, sleep)


def _pages(
    session: Session,
    statement: Any,
    pending: Any,
    part: ReplicaRange,
    settings: ClusterSettings,
    sleep: Callable[[float], None],
) -> Iterator[bytes]:
    paging_state: bytes | None = None
    while pending is not None:
        page, paging_state = _page(session, statement, pending, paging_state, part, settings, sleep)
        statement.fetch_size = _fetch_size(page, settings.page_size)
        pending = _ask(session, statement, paging_state) if paging_state else None
        yield page


def _ask(session: Session, statement: Any, paging_state: bytes | None) -> Any:
    return session.execute_async(statement, execution_profile=SCAN_PROFILE, paging_state=paging_state)


def _page(
    session: Session,
    statement: Any,
    pending: Any,
    paging_state: bytes | None,
    part: ReplicaRange,
    settings: ClusterSettings,
    sleep: Callable[[float], None],
) -> tuple[bytes, bytes | None]:
    """The page that was asked for, asking again after passing errors, and where the next one starts."""
    delays = iter(RETRY_DELAYS_S)
    while True:
        try:
            with explained_errors(settings.username):
                result = pending.result()
            return result.current_rows[0], result.paging_state
        except PASSING_ERRORS as error:
            delay = next(delays, None)
            if delay is None:
                raise ScanError(_explain(error, part, settings)) from error
            sleep(delay)
            pending = _ask(session, statement, paging_state)


def _fetch_size(page: bytes, limit: int) -> int:
    rows = int.from_bytes(page[:4], "big")
    return max(1, min(limit, rows * PAGE_BYTES // max(len(page), 1))) if rows else limit


def _explain(error: Exception, part: ReplicaRange, settings: ClusterSettings) -> str:
    attempts = len(RETRY_DELAYS_S) + 1
    if isinstance(error, NoHostAvailable) and isinstance(error.errors, dict) and error.errors:
        error = list(error.errors.values())[-1]
    hint = ""
    if isinstance(error, OperationTimedOut | ReadTimeout):
        hint = "; a smaller cassandra.page_size or a longer cassandra.request_timeout_s may help"
    elif isinstance(error, Unavailable):
        hint = "; too few replicas are alive: see nodetool status"
    return (
        f"token range {part.range} could not be read at {settings.consistency_level} from "
        f"{', '.join(part.endpoints)} in {attempts} attempts: {type(error).__name__}: {error}{hint}"
    )


def check_readable(session: Session, table: TableSchema, user: str | None) -> None:
    """Find out before a scan starts whether the user may read the table, by reading one token's range.

    :raises NoPermissionError: naming the GRANT that is missing
    """
    token = f"token({', '.join(quote(column.name) for column in table.partition_key)})"
    key = quote(table.partition_key[0].name)
    name = f"{quote(table.keyspace)}.{quote(table.name)}"
    with explained_errors(user):
        session.execute(f"SELECT {key} FROM {name} WHERE {token} > 0 AND {token} <= 1")
