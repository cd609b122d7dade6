"""Whether a replica has what was logged until a moment: what it lacks then is missing, and not on its way.

The writes before the moment are followed: out of the logs, out of the buckets, then into the replica. Rows that are
late are not waited for: they may wait for a node that is down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ringsync.cluster.cluster import SYNC_PERIOD, read_settings, setting_ms
from ringsync.config import Config
from ringsync.ledger.archive import WAITING, archived
from ringsync.ledger.passes import pass_numbers
from ringsync.ledger.staging import decode_rows, late_files
from ringsync.replica.suspects import WaitingRows
from ringsync.schema.table import TableSchema
from ringsync.status import STOP_KEY, Status, read_statuses
from ringsync.steps.application import StepError
from ringsync.steps.close.closing import progress_of
from ringsync.steps.sync_plan import SyncPlan, plan_keys
from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore

CLOCKS_MS = 1_000
"""Greatest difference in ms between the clocks of this host and of the loops' hosts."""

SYNC_PERIOD_MS = 10_000
"""Time between two syncs of a commit log, if no node tells it, ms."""

_LONG_MS = 2**53
_CLOSE = "bucket_close/close"


@dataclass
class CatchUp:
    """A replica on its way to all that was logged until a moment.

    :ivar logged_ms: the moment, ms since the epoch
    :ivar staged_ms: when all of that was staged, or later; None: not yet
    :ivar waiting: rows that waited as late then
    :ivar last_pass: the last pass then
    """

    table: TableSchema
    logged_ms: int
    staged_ms: int | None = None
    waiting: WaitingRows | None = None
    last_pass: int = 0


@dataclass(frozen=True)
class SyncSeen:
    """The sync as its loops tell of it.

    :ivar plan: the newest plan; None: there is none
    :ivar now_ms: ms since the epoch
    """

    store: ObjectStore
    config: Config
    statuses: Mapping[str, Status]
    plan: SyncPlan | None
    is_stopped: bool
    now_ms: int

    @staticmethod
    def look(store: ObjectStore, config: Config, now_ms: int) -> SyncSeen:
        """Look at the sync."""
        return SyncSeen(
            store, config, read_statuses(store), newest_plan(store), store.stat(STOP_KEY) is not None, now_ms
        )

    def of_table(self, table_id: str) -> Status | None:
        """Return what ``bucket_close`` tells of a table; None: nothing."""
        tables = self.statuses.get(_CLOSE, {}).get("tables", {})
        return next((told for told in tables.values() if told["table_id"] == table_id), None)

    def why_not_staged(self, until_ms: int) -> str:
        """Say why not all that was logged until a moment is staged; empty: it is."""
        if self.plan is None:
            return "the sync has made no plan"
        staged = progress_of(self.plan, self.config.sync, self.statuses.get, self.now_ms, _LONG_MS, {})
        if staged.staged_until >= until_ms:
            return self._why_not_read(until_ms)
        reasons = [f"{node}: {reason}" for node, reason in staged.unread.items()]
        return reasons[0] if reasons else "what was logged is not staged yet"

    def _why_not_read(self, until_ms: int) -> str:
        """Say which archived log is still to be read; not those that the last run could not read: nobody knows when
        they will come, and an alarm names them."""
        unread = {*map(str, self.statuses.get("archive_reprocess/archive", {}).get("unreadable", ()))}
        entries = archived(self.store, WAITING, [], unread)
        first = next((entry for entry in entries if entry.began_ms < until_ms), None)
        return f"archived commit logs wait to be read, such as {first.name} of node {first.node}" if first else ""


def newest_plan(store: ObjectStore) -> SyncPlan | None:
    """Read the newest plan of the sync; None: there is none."""
    for key in reversed(plan_keys(store)):
        try:
            return SyncPlan.from_json(store.get(key))
        except NotFoundError:
            continue  # it is old, and was removed since
    return None


def why_behind(seen: SyncSeen, catch_up: CatchUp, applied: Callable[[], int]) -> str:
    """Say what a replica still waits for; empty: it has all that was logged until the moment.

    :param applied: reads the last pass that the replica has
    """
    table_id = catch_up.table.table_id
    if seen.is_stopped:
        return "the sync is stopped: cdcservice start"
    if catch_up.staged_ms is None:
        if why := seen.why_not_staged(catch_up.logged_ms):
            return why
        catch_up.staged_ms = seen.now_ms
    if catch_up.waiting is None:
        if why := _why_not_published(seen, table_id, catch_up.staged_ms):
            return why
        # Rows that leave these files after now are in passes that come after the last one.
        catch_up.waiting = waiting_rows(seen.store, catch_up.table)
        catch_up.last_pass = max(pass_numbers(seen.store, table_id), default=0)
    if (last := applied()) < catch_up.last_pass:
        told: Any = seen.of_table(table_id) or {}
        reason = told.get("replica_error") or told.get("error")
        return f"the replica has pass {last} of {catch_up.last_pass}" + (f": {reason}" if reason else "")
    return ""


def _why_not_published(seen: SyncSeen, table_id: str, staged_ms: int) -> str:
    close, told = seen.statuses.get(_CLOSE, {}), seen.of_table(table_id)
    if close.get("error"):
        return f"bucket_close: {close['error']}"
    if int(close.get("began_ms", 0)) <= staged_ms:
        return "bucket_close has not looked since"
    if told is None:
        return "bucket_close does not follow it"
    if told.get("bootstrap"):
        return f"it is being bootstrapped ({told['bootstrap']}): its changes wait"
    oldest_ms = told.get("oldest_open_bucket_ms")
    if oldest_ms is not None and oldest_ms <= staged_ms:
        return str(told.get("error") or "its oldest bucket is not closed")
    return ""


def waiting_rows(store: ObjectStore, table: TableSchema) -> WaitingRows:
    """Read which rows of a table wait as late.

    :raises StepError: a file of them is damaged
    """
    batches = []
    for key in late_files(store, table.table_id):
        try:
            batches.append(decode_rows(store.get(key)))
        except NotFoundError:
            continue  # its rows are published
        except (ChecksumError, pa.ArrowException, OSError) as error:  # OSError: Arrow's error for damaged lz4
            raise StepError(f"{store.uri(key)} has rows that wait, and cannot be read: {error}") from error
    return WaitingRows.of(batches, table)


def longest_sync_period_ms(session: Any, plan: SyncPlan | None) -> int:
    """Return the longest time from a write until a node can be read for it in its log, ms."""
    if plan is None or plan.of_scylla:
        return 0
    told = (read_settings(session, host.id, SYNC_PERIOD) for host in plan.read_hosts if host.up)
    periods = (setting_ms(settings, SYNC_PERIOD) for settings in told)
    return max((period or SYNC_PERIOD_MS for period in periods), default=0)
