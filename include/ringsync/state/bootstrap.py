"""The state of bootstraps, in the source cluster: which one a table has, who works on it, and which ranges are done.

``bootstrap``
    one row per table: its latest bootstrap, what was asked for, whether it has completed.
``bootstrap_range``
    the range ledger, one partition per bootstrap: its owner and attempt (static), and one row per committed range
    with the files that hold the range's rows. A range that is not here has not been read, whatever files exist.

A run owns a bootstrap by having raised its attempt with a conditional write; every commit of a range is conditional
on that attempt, so that nothing of a run that was thought dead is added once another has taken over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from cassandra import (
    ConsistencyLevel,
    DriverException,
    InvalidRequest,
    OperationTimedOut,
    RequestExecutionException,
    Unauthorized,
)
from cassandra.cluster import NoHostAvailable, Session
from cassandra.query import SimpleStatement

from ringsync.cql.identifiers import quote
from ringsync.ring.tokens import TokenRange

SCANNING = "scanning"
COMPLETED = "completed"

HEARTBEAT_TTL_S = 20
"""Seconds after which a run that no longer says so counts as dead."""

RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
"""Pauses before a write whose outcome is unknown, or that did not reach enough replicas, is tried again."""

TABLES = (
    """CREATE TABLE IF NOT EXISTS {keyspace}.bootstrap (
        keyspace_name text, table_name text, id text, state text, specification text, run text,
        as_of timestamp, started_at timestamp, completed_at timestamp,
        PRIMARY KEY ((keyspace_name, table_name)))""",
    """CREATE TABLE IF NOT EXISTS {keyspace}.bootstrap_range (
        bootstrap_id text, start_token bigint, end_token bigint,
        owner text static, attempt int static, alive text static,
        committed_by int, committed_at timestamp, rows bigint, cells bigint, pages bigint, bytes bigint, outputs text,
        PRIMARY KEY (bootstrap_id, start_token))""",
)

STATE_TABLES = ("bootstrap", "bootstrap_range")


class StateError(Exception):
    """The state in the cluster could not be read or written; the message says why and what to do."""


class LostOwnershipError(StateError):
    """Another run has taken this bootstrap over: this one must stop and may write nothing more."""


@dataclass(frozen=True)
class Bootstrap:
    """A table's bootstrap.

    :ivar id: unique; the name of its bucket in the stream and part of the names of its files
    :ivar state: :data:`SCANNING` or :data:`COMPLETED`
    :ivar specification: what is copied and how, as JSON; who wants the same continues it
    :ivar run: which started it
    :ivar as_of: seconds since the epoch, when it began: cells written later may or may not be in it
    """

    keyspace: str
    table: str
    id: str
    state: str
    specification: str
    run: str
    as_of: int


@dataclass(frozen=True)
class CommittedRange:
    """A range that has been read, with what came of it.

    :ivar range: without wrap
    :ivar attempt: of the run that committed it
    :ivar bytes: of result pages
    :ivar outputs: the files, as JSON
    """

    range: TokenRange
    attempt: int
    rows: int
    cells: int
    pages: int
    bytes: int
    outputs: str


class BootstrapState:
    """Both tables.

    :param session: with the driver's default row factory
    :param keyspace: of ringsync's own state
    :param sleep: waits so many seconds
    """

    def __init__(self, session: Session, keyspace: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._session = session
        self._keyspace = quote(keyspace)
        self._sleep = sleep

    def create(self, replication: Mapping[str, str]) -> None:
        """Create keyspace and tables where they are missing.

        :param replication: CQL's replication map
        :raises StateError: they cannot be created; names the permissions
        """
        if self._exists():
            return
        options = ", ".join(f"'{name}': '{value}'" for name, value in replication.items())
        try:
            self._session.execute(f"CREATE KEYSPACE IF NOT EXISTS {self._keyspace} WITH replication = {{{options}}}")
            for table in TABLES:
                self._session.execute(table.format(keyspace=self._keyspace))
        except (Unauthorized, InvalidRequest, RequestExecutionException, DriverException, NoHostAvailable) as error:
            raise StateError(
                f"ringsync's own keyspace {self._keyspace} cannot be created: {error}. Let an administrator create it "
                f"with the statements in docs/state.md, and GRANT SELECT, MODIFY ON KEYSPACE {self._keyspace}"
            ) from error

    def _exists(self) -> bool:
        rows = self._session.execute(
            "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s", (self._keyspace.strip('"'),)
        )
        return set(STATE_TABLES) <= {row.table_name for row in rows}

    def find(self, keyspace: str, table: str) -> Bootstrap | None:
        """The table's latest bootstrap."""
        if not self._exists():
            return None
        row = self._execute(
            f"SELECT id, state, specification, run, as_of FROM {self._keyspace}.bootstrap "
            "WHERE keyspace_name = %s AND table_name = %s",
            (keyspace, table),
        ).one()
        if row is None or row.id is None:
            return None
        as_of = int(row.as_of.replace(tzinfo=UTC).timestamp())
        return Bootstrap(keyspace, table, row.id, row.state, row.specification, row.run, as_of)

    def begin(self, bootstrap: Bootstrap, instead_of: str | None) -> bool:
        """Make this the table's bootstrap, if that is still ``instead_of``.

        :param instead_of: id of the one that :meth:`find` gave; None: there was none
        :returns: False when another run was faster
        """
        milliseconds = bootstrap.as_of * 1000
        return self._conditional(
            f"UPDATE {self._keyspace}.bootstrap SET id = %s, state = %s, specification = %s, run = %s, as_of = %s, "
            "started_at = toTimestamp(now()), completed_at = null "
            "WHERE keyspace_name = %s AND table_name = %s IF id = %s",
            (
                *(bootstrap.id, bootstrap.state, bootstrap.specification, bootstrap.run, milliseconds),
                *(bootstrap.keyspace, bootstrap.table, instead_of),
            ),
            lambda found: found.get("id") == bootstrap.id,
        )

    def complete(self, bootstrap: Bootstrap) -> None:
        """Say that the bootstrap has completed; again is fine.

        :raises LostOwnershipError: the table has another one by now
        """
        if not self._conditional(
            f"UPDATE {self._keyspace}.bootstrap SET state = %s, completed_at = toTimestamp(now()) "
            "WHERE keyspace_name = %s AND table_name = %s IF id = %s",
            (COMPLETED, bootstrap.keyspace, bootstrap.table, bootstrap.id),
            lambda found: found.get("id") == bootstrap.id,
        ):
            raise LostOwnershipError(f"bootstrap {bootstrap.id} was replaced by another of the same table")

    def alive(self, bootstrap_id: str) -> str | None:
        """The run that has worked on this bootstrap in the last :data:`HEARTBEAT_TTL_S` seconds."""
        row = self._execute(
            f"SELECT alive FROM {self._keyspace}.bootstrap_range WHERE bootstrap_id = %s LIMIT 1", (bootstrap_id,)
        ).one()
        return row.alive if row else None

    def take_over(self, bootstrap_id: str, owner: str) -> RangeLedger:
        """Become the one who commits ranges; whoever did before no longer can.

        :param owner: different for every process that calls this
        :raises StateError: the cluster does not let us
        """
        while True:
            row = self._execute(
                f"SELECT attempt FROM {self._keyspace}.bootstrap_range WHERE bootstrap_id = %s LIMIT 1",
                (bootstrap_id,),
            ).one()
            last = row.attempt if row else None
            attempt = (last or 0) + 1
            if self._conditional(
                f"UPDATE {self._keyspace}.bootstrap_range SET owner = %s, attempt = %s WHERE bootstrap_id = %s "
                "IF attempt = %s AND owner != %s",
                (owner, attempt, bootstrap_id, last, owner),
                lambda found, attempt=attempt: (found.get("owner"), found.get("attempt")) == (owner, attempt),  # type: ignore[misc]
            ):
                return RangeLedger(self, bootstrap_id, owner, attempt)

    def _execute(self, cql: str, parameters: tuple[Any, ...]) -> Any:
        """Execute what may be repeated: reads see every conditional write that came to its end before."""
        statement = SimpleStatement(
            cql,
            consistency_level=ConsistencyLevel.SERIAL if cql.startswith("SELECT") else ConsistencyLevel.QUORUM,
            serial_consistency_level=ConsistencyLevel.SERIAL,
            is_idempotent=True,
        )
        delays = iter(RETRY_DELAYS_S)
        while True:
            try:
                return self._session.execute(statement, parameters)
            except Unauthorized as error:
                raise StateError(f"{error}: GRANT SELECT, MODIFY ON KEYSPACE {self._keyspace} to this user") from error
            except InvalidRequest as error:
                raise StateError(
                    f"keyspace {self._keyspace} is not as this version of ringsync made it: {error}"
                ) from error
            except (RequestExecutionException, OperationTimedOut, NoHostAvailable, DriverException) as error:
                delay = next(delays, None)
                if delay is None:
                    raise StateError(
                        f"keyspace {self._keyspace} could not be used in {len(RETRY_DELAYS_S) + 1} attempts: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                self._sleep(delay)

    def _conditional(self, cql: str, parameters: tuple[Any, ...], is_done: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Execute a conditional write.

        :param is_done: whether what was found shows our own write: it may have been done by an attempt of which
            only the answer was lost
        """
        found = self._execute(cql, parameters).one()._asdict()
        return bool(found["applied"]) or is_done(found)


class RangeLedger:
    """The ranges of one bootstrap, in the hands of one owner; see :meth:`BootstrapState.take_over`."""

    def __init__(self, state: BootstrapState, bootstrap_id: str, owner: str, attempt: int) -> None:
        self._state = state
        self._table = f"{state._keyspace}.bootstrap_range"
        self.bootstrap_id = bootstrap_id
        self.owner = owner
        self.attempt = attempt

    def ranges(self) -> tuple[CommittedRange, ...]:
        """All committed ranges, in token order; they do not overlap."""
        rows = self._state._execute(
            f"SELECT start_token, end_token, committed_by, rows, cells, pages, bytes, outputs FROM {self._table} "
            "WHERE bootstrap_id = %s",
            (self.bootstrap_id,),
        )
        return tuple(
            CommittedRange(
                TokenRange(row.start_token, row.end_token),
                *(row.committed_by, row.rows, row.cells, row.pages, row.bytes, row.outputs),
            )
            for row in rows
            if row.start_token is not None
        )

    def commit(self, done: CommittedRange) -> None:
        """Record that a range has been read. The caller sees to it that ranges do not overlap.

        :raises LostOwnershipError: another run has taken over: nothing was recorded
        """
        if not self._state._conditional(
            f"UPDATE {self._table} SET end_token = %s, committed_by = %s, committed_at = toTimestamp(now()), "
            "rows = %s, cells = %s, pages = %s, bytes = %s, outputs = %s WHERE bootstrap_id = %s AND start_token = %s "
            "IF attempt = %s AND owner = %s AND end_token = null",
            (
                *(done.range.end, self.attempt, done.rows, done.cells, done.pages, done.bytes, done.outputs),
                *(self.bootstrap_id, done.range.start, self.attempt, self.owner),
            ),
            lambda found: (found.get("owner"), found.get("end_token")) == (self.owner, done.range.end),
        ):
            self.check()
            raise StateError(f"bootstrap {self.bootstrap_id}: a range from {done.range.start} is recorded already")

    def check(self) -> None:
        """Look whether this bootstrap is still ours.

        :raises LostOwnershipError: it is not
        """
        row = self._state._execute(
            f"SELECT owner, attempt FROM {self._table} WHERE bootstrap_id = %s LIMIT 1", (self.bootstrap_id,)
        ).one()
        if row is None or (row.owner, row.attempt) != (self.owner, self.attempt):
            other = f"attempt {row.attempt} ({row.owner})" if row else "nobody"
            raise LostOwnershipError(
                f"bootstrap {self.bootstrap_id} was taken over by {other}: this one, attempt {self.attempt}, stops"
            )

    def beat(self, run: str) -> None:
        """Say that this run is alive; valid for :data:`HEARTBEAT_TTL_S` seconds."""
        self._state._execute(
            f"UPDATE {self._table} USING TTL {HEARTBEAT_TTL_S} SET alive = %s WHERE bootstrap_id = %s",
            (run, self.bootstrap_id),
        )

    def rest(self) -> None:
        """Say that this run no longer works on it."""
        self._state._execute(f"DELETE alive FROM {self._table} WHERE bootstrap_id = %s", (self.bootstrap_id,))
