"""Masked columns (CEP-20, Cassandra 5.0): whoever lacks UNMASK is shown other values than those that are there.

No page says that it is masked, so before pages are used the nodes that sent them are asked. Each node masks by the
schema that it knows, and by permissions that it remembers for ``permissions_validity`` and ``roles_validity``: a right
that was granted a moment ago need not hold yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from cassandra import InvalidRequest, Unauthorized

from ringsync.cluster.cluster import duration_ms, settings_of
from ringsync.cluster.node import NO_ANSWER
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.session import ClusterError, UnreachableError, explained_errors
from ringsync.cql.identifiers import quote
from ringsync.schema.table import TableSchema

LONGEST_WAIT_S = 60.0
"""Longest time for which nodes may remember rights, s; if it is longer, masked columns are not read."""

PAUSES_S = (0.0, 0.5, 2.0, 8.0)
"""Pauses before a node is asked again, s; as for pages that do not come."""

_MASKS = "SELECT column_name FROM system_schema.column_masks WHERE keyspace_name = %s AND table_name = %s"
_VALIDITY = ("permissions_validity", "roles_validity")

_granted_s: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()
"""Since when a session may unmask its user's tables, as far as it knows: by name, s of the monotonic clock."""


def check_unmasked(session: Any, table: TableSchema, user: str | None, hosts: Iterable[Any] = (None,)) -> None:
    """Check that nodes show the user a table's values as they are.

    :param session: a ``cassandra.cluster.Session`` with the driver's default row factory
    :param table: with the columns that are read
    :param user: None: who reads without a password, as anybody or with the role that a client's certificate has
    :param hosts: the driver's hosts that are asked; None: any
    :raises ClusterError: columns are masked, and the user lacks UNMASK; or nobody tells the user's rights
    :raises UnreachableError: no node answers, however often they are asked
    """
    if masked := _masked(session, table, hosts):
        _unmasks_since(session, table, user, masked)


def check_pages(
    session: SessionAt, table: TableSchema, user: str | None, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Check that the pages that came since the last check are not masked. To be called before they are used.

    :raises ClusterError, UnreachableError: as :func:`check_unmasked`; or the columns were masked a moment ago: the user
        has UNMASK, but maybe not yet on each node
    """
    hosts, session.coordinators = session.coordinators, set()
    if not (masked := _masked(session.plain, table, hosts, session.facts, sleep)):
        return
    if _left_s(session.plain, table, user, masked) > 0:
        raise ClusterError(
            f"{table.full_name}: {', '.join(masked)} may have been masked when they were read: a node may not know yet "
            f"that {_named(user)} has UNMASK. They must be read again"
        )


def wait_until_unmasked(
    session: SessionAt, table: TableSchema, user: str | None, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait, once for each table of the process, until each node knows that the user has UNMASK if columns are masked.

    :raises ClusterError, UnreachableError: as :func:`check_unmasked`
    """
    if ("unmasked", table.table_id) in session.facts:
        return
    if masked := _masked(session.plain, table, (None,), session.facts, sleep):
        sleep(max(0.0, _left_s(session.plain, table, user, masked)))
    session.facts["unmasked", table.table_id] = True


def _masked(
    session: Any,
    table: TableSchema,
    hosts: Iterable[Any],
    facts: dict[Any, Any] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Return the names of the columns that any of the hosts masks."""
    facts = {} if facts is None else facts
    if not facts.get("masks", True):
        return []
    names = (table.keyspace, table.name)
    try:
        answers = [session.execute_async(_MASKS, names, host=host) for host in hosts]
        masked = {row.column_name for answer in answers for row in _rows(session, table, answer, sleep)}
    except InvalidRequest as error:
        if "column_masks" not in str(error):
            raise
        facts["masks"] = False  # before Cassandra 5.0, and of ScyllaDB
        return []
    return [column.name for column in table.columns if column.name in masked]


def _rows(session: Any, table: TableSchema, answer: Any, sleep: Callable[[float], None]) -> Any:
    """Return what a host says, or another one if it does not answer: what it knew of the schema, others know by now.

    :raises UnreachableError: none answers, however often they are asked
    """
    names = (table.keyspace, table.name)
    for pause_s in (None, *PAUSES_S):
        try:
            if pause_s is None:
                return answer.result()
            sleep(pause_s)
            return session.execute(_MASKS, names)
        except (InvalidRequest, Unauthorized):
            raise
        except NO_ANSWER as error:
            failure = error
    raise UnreachableError(
        f"{table.full_name}: no node says whether columns are masked: {type(failure).__name__}: {failure}. Nothing was "
        "made of the pages that came; they must be read again"
    ) from failure


def _left_s(session: Any, table: TableSchema, user: str | None, masked: list[str]) -> float:
    """Return for how long a node may not know yet that the user has UNMASK, s."""
    since = _unmasks_since(session, table, user, masked)
    with explained_errors(user):
        lasting_s = sum(map(duration_ms, settings_of(session, None, _VALIDITY).values())) / 1000
    if lasting_s > LONGEST_WAIT_S:
        raise ClusterError(
            f"{table.full_name}: {', '.join(masked)} are masked, and nodes remember for {lasting_s:g} s that somebody "
            "lacks UNMASK (permissions_validity and roles_validity of cassandra.yaml, together): lower them to "
            f"{LONGEST_WAIT_S:g} s"
        )
    return since + lasting_s - time.monotonic()


def _unmasks_since(session: Any, table: TableSchema, user: str | None, masked: list[str]) -> float:
    """Return when this session first saw that the user has UNMASK, s of the monotonic clock.

    :raises ClusterError: the user lacks it, or nobody tells
    """
    known = _granted_s.setdefault(session, {})
    try:
        may = _may_unmask(session, table, user)
    except NO_ANSWER as error:
        raise ClusterError(
            f"{table.full_name}: {', '.join(masked)} are masked, and it is unknown whether {_named(user)} has UNMASK: "
            f"LIST UNMASK PERMISSION fails with {error}{'' if user else '. Set cassandra.username and password'}"
        ) from error
    if user is not None and not may:
        known.pop(table.full_name, None)
        raise ClusterError(
            f"{table.full_name}: {', '.join(masked)} are masked, and user {user} would read other values than those "
            f"that are there: GRANT UNMASK ON TABLE {quote(table.keyspace)}.{quote(table.name)} TO {quote(user)};"
        )
    return known.setdefault(table.full_name, time.monotonic())


def _may_unmask(session: Any, table: TableSchema, user: str | None) -> bool:
    cql = f"LIST UNMASK PERMISSION ON TABLE {quote(table.keyspace)}.{quote(table.name)}"
    try:
        if user is None:
            session.execute(cql)
            return True  # a superuser: nobody else is told everybody's rights (C: auth/CassandraAuthorizer.list)
        if session.execute(f"{cql} OF {quote(user)}").one() is not None:
            return True
    except NO_ANSWER as error:
        if "AllowAllAuthorizer" in str(error):
            return True
        raise
    return any(row.super for row in session.execute(f"LIST ROLES OF {quote(user)}"))


def _named(user: str | None) -> str:
    return "the role of the client's certificate" if user is None else f"user {user}"
