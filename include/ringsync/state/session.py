"""ringsync's own keyspace in the source cluster: creating, reading and writing its tables.

Every statement here may be repeated. If its outcome is unknown or it did not reach enough replicas, it is tried again
until :data:`RETRY_DELAYS_S` are used up.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from cassandra import (
    ConsistencyLevel,
    InvalidRequest,
    OperationTimedOut,
    Unauthorized,
)
from cassandra.cluster import Session
from cassandra.query import BatchStatement, BatchType, BoundStatement, PreparedStatement, SimpleStatement

from ringsync.cluster.guardrails import explained, guardrail_of
from ringsync.cluster.node import NO_ANSWER
from ringsync.cluster.page_size import PageSize
from ringsync.cluster.scylla import is_scylla
from ringsync.cql.identifiers import quote

RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
"""Pauses before further tries of a statement whose outcome is unknown or that did not reach enough replicas."""

SCHEMA_DELAYS_S = RETRY_DELAYS_S[:5]
"""Pauses before further tries if the node does not know the keyspace or table yet; another node may know it."""

MOST_ROWS = 5000
"""Most rows of a page."""

CONCURRENT_REQUESTS = 32
"""Statements of :meth:`StateSession.read_all` under way at once."""

_NOT_THERE = re.compile("does not exist|doesn't exist")
_UNCERTAIN = (OperationTimedOut, *NO_ANSWER)


class StateError(Exception):
    """The state in the cluster could not be read or written; the message says why and what to do."""


class StateUnavailableError(StateError):
    """Too few nodes answered, in all attempts: this may be temporary."""


class StateSession:
    """A session for ringsync's own keyspace.

    :param session: session with the driver's default row factory
    :param keyspace: name of ringsync's own keyspace
    :param sleep: function that waits, given seconds
    """

    def __init__(self, session: Session, keyspace: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._session = session
        self.keyspace = quote(keyspace)
        self._sleep = sleep
        self._prepared: dict[str, PreparedStatement] = {}

    def create(self, replication: Mapping[str, str], wait: Callable[[], object] = lambda: None) -> None:
        """Create missing tables, and the keyspace if it is missing.

        :param replication: replication map of the keyspace, as in CQL
        :param wait: waits until all nodes know of a change, before the next one goes to another node; the default is
            for sessions that do so themselves
        :raises StateError: they cannot be created; the message names the permissions
        """
        existing = self._existing()
        statements = [text.format(keyspace=self.keyspace) for name, text in TABLES.items() if name not in existing]
        if not existing:
            options = ", ".join(f"'{name}': '{value}'" for name, value in replication.items())
            # Conditional writes to tablets are refused before ScyllaDB 2025.4.
            vnodes = " AND tablets = {'enabled': false}" if is_scylla(self._session) else ""
            create = f"CREATE KEYSPACE IF NOT EXISTS {self.keyspace} WITH replication = {{{options}}}{vnodes}"
            statements.insert(0, create)
        try:
            for statement in statements:
                self._repeat(partial(self._session.execute, statement))
                wait()
        except StateError as error:
            raise type(error)(
                f"ringsync's own keyspace {self.keyspace} cannot be created: {_reason(error)}. Let an administrator "
                f"create it with the statements in docs/state.md, and GRANT SELECT, MODIFY ON KEYSPACE {self.keyspace}"
            ) from error

    def has(self, tables: Collection[str]) -> bool:
        """Tell whether all these tables exist."""
        return set(tables) <= self._existing()

    def _existing(self) -> set[str]:
        rows = self._session.execute(
            "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s", (self.keyspace.strip('"'),)
        )
        return {row.table_name for row in rows}

    def execute(self, cql: str, parameters: Sequence[Any]) -> Any:
        """Execute a repeatable statement. Reads see every conditional write that ended before.

        :raises StateError: the cluster refuses, or fails in all attempts
        """
        statement = SimpleStatement(
            cql,
            consistency_level=ConsistencyLevel.SERIAL if cql.startswith("SELECT") else ConsistencyLevel.QUORUM,
            serial_consistency_level=ConsistencyLevel.SERIAL,
            is_idempotent=True,
        )
        return self._repeat(lambda: self._session.execute(statement, parameters))

    def conditional(self, cql: str, parameters: Sequence[Any], is_done: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Execute a conditional write.

        :param is_done: function that tells whether the row found shows our own write: an attempt may have succeeded
            although its answer was lost
        :raises StateError: as :meth:`execute`
        """
        row = self.execute(cql, parameters).one()._asdict()
        return bool(row["applied"]) or is_done(row)

    def bind(self, cql: str, parameters: Sequence[Any]) -> BoundStatement:
        """Bind a statement for :meth:`read_all`, at QUORUM; the first call prepares it.

        :param cql: statement with ``?`` for the parameters
        """
        prepared = self._prepared.get(cql)
        if prepared is None:
            prepared = self._prepared[cql] = self._repeat(lambda: self._session.prepare(cql))
            prepared.consistency_level = ConsistencyLevel.QUORUM
            prepared.is_idempotent = True
        return prepared.bind(parameters)

    def batch(self, cql: str, rows: Iterable[Sequence[Any]]) -> BatchStatement:
        """Make one statement for many rows of one partition: one request, and one mutation for the cluster."""
        batch = BatchStatement(BatchType.UNLOGGED, consistency_level=ConsistencyLevel.QUORUM)
        for row in rows:
            batch.add(self.bind(cql, row))
        batch.is_idempotent = True
        return batch

    def read_all(self, statements: Iterable[BoundStatement | BatchStatement]) -> Iterator[list[Any]]:
        """Execute repeatable, independent statements, some at once.

        :returns: rows of each statement, in the order of the statements
        :raises StateError: as :meth:`execute`
        """
        under_way: deque[tuple[Any, Any]] = deque()

        def finish() -> list[Any]:
            statement, future = under_way.popleft()
            first = iter((future.result,))
            rows: list[Any] = self._repeat(lambda: next(first, lambda: self._session.execute(statement))().all())
            return rows

        for statement in statements:
            if len(under_way) == CONCURRENT_REQUESTS:
                yield finish()
            under_way.append((statement, self._session.execute_async(statement)))
        while under_way:
            yield finish()

    def pages(self, statement: BoundStatement, width: Callable[[Any], int]) -> Iterator[list[Any]]:
        """Execute a read page by page, and bound each page by bytes: neither a node nor we shall have all rows at once.

        :param width: function that returns about how many bytes a row has
        :raises StateError: as :meth:`execute`
        """
        size, state = PageSize(), None

        def attempt() -> Any:
            statement.fetch_size = rows = size.rows(min(MOST_ROWS, self._session.default_fetch_size))
            try:
                return self._session.execute(statement, paging_state=state)
            except _UNCERTAIN:
                size.failed(rows)
                raise

        while True:
            found = self._repeat(attempt)
            rows = list(found.current_rows)
            size.came(len(rows), sum(map(width, rows)))
            yield rows
            if (state := found.paging_state) is None:
                return

    def write_all(self, statements: Iterable[BoundStatement | BatchStatement]) -> None:
        """Execute statements without results as :meth:`read_all` does."""
        deque(self.read_all(statements), maxlen=0)

    def _repeat(self, attempt: Callable[[], Any]) -> Any:
        delays, schema_delays = iter(RETRY_DELAYS_S), iter(SCHEMA_DELAYS_S)
        while True:
            try:
                return attempt()
            except Unauthorized as error:
                raise StateError(f"{error}: GRANT SELECT, MODIFY ON KEYSPACE {self.keyspace} to this user") from error
            except InvalidRequest as error:
                if guardrail_of(str(error)):
                    raise StateError(f"keyspace {self.keyspace}: {explained(error)}") from error
                delay = next(schema_delays, None) if _NOT_THERE.search(str(error)) else None
                if delay is None:
                    raise StateError(
                        f"keyspace {self.keyspace} has other tables than this version of ringsync makes: {error}"
                    ) from error
            except _UNCERTAIN as error:
                delay = next(delays, None)
                if delay is None:
                    raise StateUnavailableError(
                        f"keyspace {self.keyspace} could not be used in {len(RETRY_DELAYS_S) + 1} attempts: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            self._sleep(delay)


def _reason(error: StateError) -> str:
    return explained(error.__cause__) if isinstance(error.__cause__, InvalidRequest) else str(error.__cause__)


TABLES = {
    "bootstrap": """CREATE TABLE IF NOT EXISTS {keyspace}.bootstrap (
        keyspace_name text, table_name text, id text, state text, specification text, run text,
        as_of timestamp, started_at timestamp, completed_at timestamp,
        PRIMARY KEY ((keyspace_name, table_name)))""",
    "bootstrap_range": """CREATE TABLE IF NOT EXISTS {keyspace}.bootstrap_range (
        bootstrap_id text, start_token bigint, end_token bigint,
        owner text static, attempt int static, alive text static,
        committed_by int, committed_at timestamp, rows bigint, cells bigint, pages bigint, bytes bigint, outputs text,
        PRIMARY KEY (bootstrap_id, start_token))""",
    "processor_error": """CREATE TABLE IF NOT EXISTS {keyspace}.processor_error (
        node text, file text, position bigint, length bigint, reason text, table_id blob, raw blob, raw_object text,
        PRIMARY KEY ((node, file), position))""",
    "out_of_sequence": """CREATE TABLE IF NOT EXISTS {keyspace}.out_of_sequence (
        late_file text, shard int,
        shards int static, admitted_at timestamp static, due timestamp static, attempts int static, waiting int static,
        digest blob, table_id blob, partition_key blob, clustering blob, kind tinyint, write_time bigint,
        PRIMARY KEY ((late_file, shard), digest))""",
    "schema_history": """CREATE TABLE IF NOT EXISTS {keyspace}.schema_history (
        keyspace_name text, table_name text, version int,
        since timestamp, found timestamp, table_id text, ddl text,
        PRIMARY KEY ((keyspace_name, table_name), version))""",
}
"""CREATE TABLE by name; ``{keyspace}`` stands for the keyspace."""
