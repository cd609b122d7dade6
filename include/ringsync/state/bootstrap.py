"""The state of bootstraps, in the source cluster: which one a table has, who works on it, and which ranges are done.

``bootstrap``
    one row per table: its latest bootstrap, what was asked for, how far it is.
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

from cassandra.cluster import Session

from ringsync.ring.tokens import TokenRange
from ringsync.state.session import StateError, StateSession

SCANNING = "scanning"
PUBLISHING = "publishing"
"""Everything is copied; from here on it can only be finished."""
COMPLETED = "completed"
CANCELLED = "cancelled"
UNFINISHED = (SCANNING, PUBLISHING)
"""States in which the next run that wants the same goes on."""

HEARTBEAT_TTL_S = 20
"""Seconds after which a run that no longer says so counts as dead."""


class LostOwnershipError(StateError):
    """Another run has taken this bootstrap over: this one must stop and may write nothing more."""


@dataclass(frozen=True)
class Bootstrap:
    """A table's bootstrap.

    :ivar id: unique; the name of its bucket in the stream and part of the names of its files
    :ivar state: :data:`SCANNING`, :data:`PUBLISHING`, :data:`COMPLETED` or :data:`CANCELLED`
    :ivar specification: what is copied and how, as JSON; who wants the same continues it
    :ivar run: the run that started it
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
    :ivar attempt: number of the attempt that committed it
    :ivar bytes: size of the result pages
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

    :param session: a session with the driver's default row factory
    :param keyspace: name of ringsync's own keyspace
    :param sleep: waits so many seconds
    """

    def __init__(self, session: Session, keyspace: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._state = StateSession(session, keyspace, sleep)
        self._keyspace = self._state.keyspace
        self.session = session

    def create(self, replication: Mapping[str, str]) -> None:
        """Create keyspace and tables where they are missing: see :meth:`StateSession.create`."""
        self._state.create(replication)

    def find(self, keyspace: str, table: str) -> Bootstrap | None:
        """The table's latest bootstrap."""
        if not self._state.has(("bootstrap",)):
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

    def begin(self, bootstrap: Bootstrap, instead_of: str | None) -> bool:
        """Make this the table's bootstrap, if that is still ``instead_of``.

        :param instead_of: id of the one that :meth:`find` gave; None: there was none
        :returns: False when another run was faster
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
        """Say that everything is copied: it can no longer be cancelled. Again is fine.

        :raises LostOwnershipError: it was cancelled, or the table has another one by now
        """
        if not self._advance(bootstrap, PUBLISHING, (SCANNING, PUBLISHING)):
            raise LostOwnershipError(
                f"bootstrap {bootstrap.id} was cancelled, or replaced by another of the same table: nothing more is "
                "published of it"
            )

    def cancel(self, bootstrap: Bootstrap, *, gone: bool = False) -> bool:
        """Say that it will not be finished; again is fine.

        :param gone: its table was dropped: also one that has copied everything cannot be finished
        :returns: False: everything is copied by now, or the table has another one
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
        """Say that the bootstrap has completed; again is fine.

        :raises LostOwnershipError: the table has another one by now
        """
        if not self._state.conditional(
            f"UPDATE {self._keyspace}.bootstrap SET state = %s, completed_at = toTimestamp(now()) "
            "WHERE keyspace_name = %s AND table_name = %s IF id = %s",
            (COMPLETED, bootstrap.keyspace, bootstrap.table, bootstrap.id),
            lambda found: found.get("id") == bootstrap.id,
        ):
            raise LostOwnershipError(f"bootstrap {bootstrap.id} was replaced by another of the same table")

    def alive(self, bootstrap_id: str) -> str | None:
        """The run that has worked on this bootstrap in the last :data:`HEARTBEAT_TTL_S` seconds."""
        row = self._state.execute(
            f"SELECT alive FROM {self._keyspace}.bootstrap_range WHERE bootstrap_id = %s LIMIT 1", (bootstrap_id,)
        ).one()
        return row.alive if row else None

    def take_over(self, bootstrap_id: str, owner: str) -> RangeLedger:
        """Become the one who commits ranges; whoever did before no longer can.

        :param owner: a name that no other process uses
        :raises StateError: the cluster does not let us
        """
        while True:
            row = self._state.execute(
                f"SELECT attempt FROM {self._keyspace}.bootstrap_range WHERE bootstrap_id = %s LIMIT 1",
                (bootstrap_id,),
            ).one()
            last = row.attempt if row else None
            attempt = (last or 0) + 1
            if self._state.conditional(
                f"UPDATE {self._keyspace}.bootstrap_range SET owner = %s, attempt = %s WHERE bootstrap_id = %s "
                "IF attempt = %s AND owner != %s",
                (owner, attempt, bootstrap_id, last, owner),
                lambda found, attempt=attempt: (found.get("owner"), found.get("attempt")) == (owner, attempt),  # type: ignore[misc]
            ):
                return RangeLedger(self._state, bootstrap_id, owner, attempt)


class RangeLedger:
    """The ranges of one bootstrap, in the hands of one owner; see :meth:`BootstrapState.take_over`."""

    def __init__(self, state: StateSession, bootstrap_id: str, owner: str, attempt: int) -> None:
        self._state = state
        self._table = f"{state.keyspace}.bootstrap_range"
        self.bootstrap_id = bootstrap_id
        self.owner = owner
        self.attempt = attempt

    def ranges(self) -> tuple[CommittedRange, ...]:
        """All committed ranges, in token order; they do not overlap."""
        rows = self._state.execute(
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
        """Look whether this bootstrap is still ours.

        :raises LostOwnershipError: it is not
        """
        row = self._state.execute(
            f"SELECT owner, attempt FROM {self._table} WHERE bootstrap_id = %s LIMIT 1", (self.bootstrap_id,)
        ).one()
        if row is None or (row.owner, row.attempt) != (self.owner, self.attempt):
            other = f"attempt {row.attempt} ({row.owner})" if row else "nobody"
            raise LostOwnershipError(
                f"bootstrap {self.bootstrap_id} was taken over by {other}: this one, attempt {self.attempt}, stops"
            )

    def beat(self, run: str) -> None:
        """Say that this run is alive; valid for :data:`HEARTBEAT_TTL_S` seconds."""
        self._state.execute(
            f"UPDATE {self._table} USING TTL {HEARTBEAT_TTL_S} SET alive = %s WHERE bootstrap_id = %s",
            (run, self.bootstrap_id),
        )

    def rest(self) -> None:
        """Say that this run no longer works on it."""
        self._state.execute(f"DELETE alive FROM {self._table} WHERE bootstrap_id = %s", (self.bootstrap_id,))
