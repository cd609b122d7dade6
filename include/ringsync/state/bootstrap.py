"""The state of bootstraps in the source cluster: each table's bootstrap, its worker, and the ranges done.

``bootstrap``
    one row per table: its latest bootstrap, the specification and the state.
``bootstrap_range``
    the range ledger, one partition per bootstrap: its owner and attempt (static), and one row per committed range
    with the files that hold the range's rows. A range without a row has not been read, even if files exist.

A run takes over a bootstrap by raising its attempt with a conditional write. Every commit of a range is conditional on
that attempt, so that a run that was thought dead can add nothing after another has taken over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from cassandra import ConsistencyLevel
from cassandra.cluster import Session

from ringsync.ring.tokens import TokenRange
from ringsync.state.session import StateError, StateSession

SCANNING = "scanning"
PUBLISHING = "publishing"
"""State after everything was copied: the bootstrap can only be finished, not cancelled."""
COMPLETED = "completed"
CANCELLED = "cancelled"
UNFINISHED = (SCANNING, PUBLISHING)
"""States in which the next run with the same specification continues the bootstrap."""

HEARTBEAT_TTL_S = 20
"""Seconds without a heartbeat before a run counts as dead."""


class LostOwnershipError(StateError):
    """Another run has taken over this bootstrap: this run must stop and write nothing more.

    :ivar owner: the new owner's name; empty: there is none, or it is not known
    """

    def __init__(self, message: str, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


@dataclass(frozen=True)
class Bootstrap:
    """A table's bootstrap.

    :ivar id: unique id; part of the names of its files
    :ivar state: :data:`SCANNING`, :data:`PUBLISHING`, :data:`COMPLETED` or :data:`CANCELLED`
    :ivar specification: table, selection and form of the copy, as JSON; a run with the same one continues it
    :ivar as_of: time of the start, seconds since the epoch: it may or may not contain cells written later
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
    """A range that has been read, and its result.

    :ivar range: token range, without wrap
    :ivar attempt: number of the attempt that committed it
    :ivar bytes: size of the result pages
    :ivar outputs: files with the range's rows, as JSON
    """

    range: TokenRange
    attempt: int
    rows: int
    cells: int
    pages: int
    bytes: int
    outputs: str


class BootstrapState:
    """The tables ``bootstrap`` and ``bootstrap_range``. Repeating what is recorded here is safe.

    :param session, keyspace, sleep: those of :class:`StateSession`
    """

    def __init__(self, session: Session, keyspace: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._state = StateSession(session, keyspace, sleep)
        self._keyspace = self._state.keyspace
        self._is_there = False
        self.session = session

    def find(self, keyspace: str, table: str) -> Bootstrap | None:
        """Read the table's latest bootstrap; None: it has none."""
        self._is_there = self._is_there or self._state.has(("bootstrap",))
        if not self._is_there:
            return None
        row = self._state.execute(
            f"SELECT id, state, specification, run, as_of FROM {self._keyspace}.bootstrap "
            "WHERE keyspace_name = %s AND table_name = %s",
            (keyspace, table),
        ).one()
        if row is None or row.id is None:
            return None
        as_of = int(row.as_of.replace(tzinfo=UTC).timestamp())
        return Bootstrap(keyspace, table, row.id, row.state, row.specification, row.run, as_of)

    def unfinished(self) -> list[tuple[str, str]]:
        """List the tables, as keyspace and name, whose latest bootstrap is unfinished."""
        if not self._state.has(("bootstrap",)):
            return []
        cql = f"SELECT keyspace_name, table_name, state FROM {self._keyspace}.bootstrap"
        (rows,) = self._state.read_all([self._state.bind(cql, ())])
        return sorted((row.keyspace_name, row.table_name) for row in rows if row.state in UNFINISHED)

    def begin(self, bootstrap: Bootstrap, instead_of: str | None) -> bool:
        """Make this the table's bootstrap, if the present one is still ``instead_of``.

        :param instead_of: id of the bootstrap that :meth:`find` returned; None: there was none
        :returns: False: another run was faster
        """
        milliseconds = bootstrap.as_of * 1000
        return self._state.conditional(
            f"UPDATE {self._keyspace}.bootstrap SET id = %s, state = %s, specification = %s, run = %s, as_of = %s, "
            "started_at = toTimestamp(now()), completed_at = null "
            "WHERE keyspace_name = %s AND table_name = %s IF id = %s",
            (
                *(bootstrap.id, bootstrap.state, bootstrap.specification, bootstrap.run, milliseconds),
                *(bootstrap.keyspace, bootstrap.table, instead_of),
            ),
            lambda found: found.get("id") == bootstrap.id,
        )

    def publishing(self, bootstrap: Bootstrap) -> None:
        """Record that everything is copied: the bootstrap can no longer be cancelled.

        :raises LostOwnershipError: the bootstrap was cancelled, or the table has another one now
        """
        if not self._advance(bootstrap, PUBLISHING, (SCANNING, PUBLISHING)):
            raise LostOwnershipError(
                f"bootstrap {bootstrap.id} was cancelled or replaced by another of the same table: it publishes "
                "nothing more"
            )

    def cancel(self, bootstrap: Bootstrap, *, gone: bool = False) -> bool:
        """Record that the bootstrap is cancelled.

        :param gone: whether the table was dropped: then even a bootstrap that has copied everything cannot be finished
        :returns: False: everything is copied already, or the table has another bootstrap
        """
        return self._advance(bootstrap, CANCELLED, (SCANNING, CANCELLED, *((PUBLISHING,) if gone else ())))

    def _advance(self, bootstrap: Bootstrap, to: str, of: tuple[str, ...]) -> bool:
        return self._state.conditional(
            f"UPDATE {self._keyspace}.bootstrap SET state = %s WHERE keyspace_name = %s AND table_name = %s "
            f"IF id = %s AND state IN ({', '.join(['%s'] * len(of))})",
            (to, bootstrap.keyspace, bootstrap.table, bootstrap.id, *of),
            lambda found: (found.get("id"), found.get("state")) == (bootstrap.id, to),
        )

    def complete(self, bootstrap: Bootstrap) -> None:
        """Record that the bootstrap has completed.

        :raises LostOwnershipError: the table has another bootstrap now
        """
        if not self._state.conditional(
            f"UPDATE {self._keyspace}.bootstrap SET state = %s, completed_at = toTimestamp(now()) "
            "WHERE keyspace_name = %s AND table_name = %s IF id = %s",
            (COMPLETED, bootstrap.keyspace, bootstrap.table, bootstrap.id),
            lambda found: found.get("id") == bootstrap.id,
        ):
            raise LostOwnershipError(f"bootstrap {bootstrap.id} was replaced by another of the same table")

    def alive(self, bootstrap_id: str) -> str | None:
        """Return the run that worked on this bootstrap in the last :data:`HEARTBEAT_TTL_S` seconds; None: no run."""
        row = _static(self._state, "alive", bootstrap_id)
        return row.alive if row else None

    def beat(self, bootstrap_ids: Iterable[str], run: str) -> None:
        """Record that this run works on these bootstraps, for :data:`HEARTBEAT_TTL_S` seconds."""
        cql = (
            f"UPDATE {self._keyspace}.bootstrap_range USING TTL {HEARTBEAT_TTL_S} SET alive = ? WHERE bootstrap_id = ?"
        )
        self._state.write_all(self._state.bind(cql, (run, bootstrap_id)) for bootstrap_id in bootstrap_ids)

    def rest(self, bootstrap_ids: Iterable[str]) -> None:
        """Record that this run no longer works on these bootstraps."""
        cql = f"DELETE alive FROM {self._keyspace}.bootstrap_range WHERE bootstrap_id = ?"
        self._state.write_all(self._state.bind(cql, (bootstrap_id,)) for bootstrap_id in bootstrap_ids)

    def take_over(self, bootstrap_id: str, owner: str) -> RangeLedger:
        """Become the owner that commits ranges; the former owner no longer can.

        :param owner: unique name of this process
        :raises StateError: the cluster refuses or fails
        """
        while True:
            row = _static(self._state, "attempt", bootstrap_id)
            last = row.attempt if row else None
            attempt = (last or 0) + 1
            if self._state.conditional(
                f"UPDATE {self._keyspace}.bootstrap_range SET owner = %s, attempt = %s WHERE bootstrap_id = %s "
                "IF attempt = %s AND owner != %s",
                (owner, attempt, bootstrap_id, last, owner),
                lambda found, attempt=attempt: (found.get("owner"), found.get("attempt")) == (owner, attempt),  # type: ignore[misc]
            ):
                return RangeLedger(self._state, bootstrap_id, owner, attempt)


def _static(state: StateSession, columns: str, bootstrap_id: str) -> Any:
    cql = f"SELECT {columns} FROM {state.keyspace}.bootstrap_range WHERE bootstrap_id = %s LIMIT 1"
    return state.execute(cql, (bootstrap_id,)).one()


class RangeLedger:
    """The range ledger of one bootstrap, for one owner; see :meth:`BootstrapState.take_over`."""

    def __init__(self, state: StateSession, bootstrap_id: str, owner: str, attempt: int) -> None:
        self._state = state
        self._table = f"{state.keyspace}.bootstrap_range"
        self.bootstrap_id = bootstrap_id
        self.owner = owner
        self.attempt = attempt

    def ranges(self) -> tuple[CommittedRange, ...]:
        """Read all committed ranges, in token order; they do not overlap."""
        statement = self._state.bind(
            f"SELECT start_token, end_token, committed_by, rows, cells, pages, bytes, outputs FROM {self._table} "
            "WHERE bootstrap_id = ?",
            (self.bootstrap_id,),
        )
        statement.consistency_level = ConsistencyLevel.SERIAL  # it sees every commit that ended before
        return tuple(
            CommittedRange(
                TokenRange(row.start_token, row.end_token),
                *(row.committed_by, row.rows, row.cells, row.pages, row.bytes, row.outputs),
            )
            for rows in self._state.pages(statement, lambda row: 100 + len(row.outputs or ""))
            for row in rows
            if row.start_token is not None
        )

    def commit(self, done: CommittedRange) -> None:
        """Record that a range has been read. The caller makes sure that ranges do not overlap.

        :raises LostOwnershipError: another run has taken over; nothing was recorded
        """
        if not self._state.conditional(
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
        """Check that this owner still has the bootstrap.

        :raises LostOwnershipError: another run has taken over
        """
        row = _static(self._state, "owner, attempt", self.bootstrap_id)
        if row is None or (row.owner, row.attempt) != (self.owner, self.attempt):
            lost = f"was taken over by attempt {row.attempt} ({row.owner})" if row else "has no owner any more"
            raise LostOwnershipError(
                f"bootstrap {self.bootstrap_id} {lost}: this run, attempt {self.attempt}, stops",
                (row.owner or "") if row else "",
            )
