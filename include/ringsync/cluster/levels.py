"""Reads at another consistency level where a guardrail of the cluster forbids one: one that is as good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from cassandra import ConsistencyLevel as Levels
from cassandra.query import SimpleStatement

from ringsync.cluster.guardrails import LEVELS
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.session import GuardrailError, explained_errors
from ringsync.config.sections import ConsistencyLevel
from ringsync.cql.identifiers import quote
from ringsync.ring.consistency import levels_as_good
from ringsync.ring.ranks import RankedRing
from ringsync.ring.ring import Host
from ringsync.schema.table import TableSchema

Read = TypeVar("Read")

_choosing = threading.Lock()


def check_level(session: Any, table: TableSchema, level: str, host: Any = None) -> None:
    """Have a node check whether reads at a level are permitted. No replica is asked.

    :param session: a ``cassandra.cluster.Session``
    :param host: the driver's host; None: any
    :raises GuardrailError: they are not
    """
    columns = ", ".join(quote(column.name) for column in table.partition_key)
    # No token is in this range.
    cql = f"SELECT {columns} FROM {quote(table.keyspace)}.{quote(table.name)} WHERE token({columns}) > 0 AND "
    statement = SimpleStatement(
        f"{cql}token({columns}) <= 0", consistency_level=Levels.name_to_value[level], is_idempotent=True
    )
    with explained_errors(None):
        session.execute(statement, host=host)


def permitted_level(
    session: Any, table: TableSchema, level: str, replica_sets: Iterable[Sequence[Host]], host: Any = None
) -> ConsistencyLevel:
    """Return a level, or if it is forbidden, the cheapest permitted one that is as good.

    :param replica_sets: the replicas of each token range of the table's keyspace
    :raises GuardrailError: all of them are forbidden
    """
    others = levels_as_good(level, replica_sets)
    for other in (level, *others):
        try:
            check_level(session, table, other, host)
        except GuardrailError as error:
            refusal = error
        else:
            return cast(ConsistencyLevel, other)
    as_good = f"; as good are {', '.join(others)}" if others else ""
    raise GuardrailError(f"reads of {table.full_name} at {level}{as_good}: {refusal}", LEVELS)


def level_to_ask(session: SessionAt, table: TableSchema, level: str, ring: RankedRing) -> ConsistencyLevel:
    """Return the level at which to ask in place of another, which may be forbidden."""
    return cast(ConsistencyLevel, session.facts.get((table.keyspace, level, ring.shapes), level))


def after_refusal(
    session: SessionAt, table: TableSchema, level: str, refused: str, error: GuardrailError, ring: RankedRing
) -> None:
    """Choose what is asked in place of a level from now on, as long as the keyspace has such replicas.

    :param refused: what :func:`level_to_ask` said. If it says something else by now, that stays
    :param error: why a node has refused it
    :raises GuardrailError: there is no other, or nodes permit different ones
    """
    if error.name != LEVELS:
        raise error
    known = table.keyspace, level, ring.shapes
    with _choosing:
        if session.facts.get(known, level) != refused:
            return
        if session.facts.pop(known, None) is not None:
            raise error
        session.facts[known] = permitted_level(session.plain, table, level, ring.hosts)


def at_permitted(
    session: SessionAt,
    table: TableSchema,
    level: str,
    ring: RankedRing,
    read: Callable[[ConsistencyLevel], Read],
) -> Read:
    """Read at a level, or at one that is as good and permitted.

    :raises GuardrailError: none is permitted, or another guardrail forbids the read
    """
    asked = level_to_ask(session, table, level, ring)
    try:
        return read(asked)
    except GuardrailError as error:
        after_refusal(session, table, level, asked, error, ring)
    return read(level_to_ask(session, table, level, ring))
