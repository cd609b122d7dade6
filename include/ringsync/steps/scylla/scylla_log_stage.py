"""The loop that stages what Scylla's CDC logs have: the counterpart of ``commitlog_stage``.

In each cycle Spark tasks read a window of each table's log and put the rows into buckets. Then one commit makes the
files and the new positions of all tables durable at once. A log is read at a consistency level, so there is nothing for
replicas to agree on: what is read is settled at once. Nothing in the cluster is changed or removed: the logs forget
their rows by their own TTL.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import pyarrow as pa

from ringsync.cluster.control import ControlServer
from ringsync.cluster.generations import MOST_ERROR_MS
from ringsync.cluster.scylla import is_scylla
from ringsync.config import Config
from ringsync.ledger.database import CDC_LOGS, note_database
from ringsync.ledger.gaps import Gap, note_gap
from ringsync.ledger.layout import check_layout
from ringsync.ledger.staging import StageCommit, closed_until, decode_rows, put_commit
from ringsync.scylla.progress import ARRIVAL_ERROR_MS, ARRIVAL_MARGIN_MS, NO_SUMS, Kind, Position, added
from ringsync.state.processor_error import ErrorTable
from ringsync.status import age_s, read_status
from ringsync.steps import loop
from ringsync.steps.application import Application, ExitCode, Report, StepError, driver_host, spark_is_gone
from ringsync.steps.own_keyspace import create_state
from ringsync.steps.scylla.followed_logs import (
    UNREADABLE_MS,
    FollowedLogs,
    FollowedTable,
    NotYetError,
)
from ringsync.steps.scylla.log_task import LogResult, LogTask, LogWork, TableResult
from ringsync.steps.scylla.log_work import Planned, affordable, plan_end, plan_work
from ringsync.steps.scylla.positions import read_positions
from ringsync.steps.stage.staged_files import Windows
from ringsync.steps.sync_plan import SyncPlan, interval_at, plan_of
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_limits, cluster_settings

STATUS = "log"
"""Name of the loop's status."""

LONGEST_REST_MS = 5_000

CYCLE_S = 20
"""Seconds of requests, at ``scylla.queries_per_s``, that a cycle has at most, unless a single table needs more: a
longer cycle would look like a loop that hangs."""

LONGEST_WAIT_MS, REST = 60_000, 10
"""Longest time after which a table that fails is tried again; of a sweep, so many times what a try takes, if that is
more."""

WAITED_LONG_MS = 60_000
"""Time for which nodes may disagree about the schema before the loop's status has it as an error."""

ALTERED = "it was altered while its log was read: it is read again"

FAILED_LONG_MS = 300_000
"""Time after which a table that fails, or is not read any further, no longer holds up the closing of buckets: its rows
will be late ones."""


@loop.starts_again()
def run(application: Application) -> tuple[Report, ExitCode]:
    """Stage until the time is over.

    :returns: exit code 1 when a table could not be read at the end, or the last cycle failed
    :raises LayoutError: the state is of a version of ringsync that this one does not know
    :raises AwayError: cluster or object store are away
    :raises ClusterError: the cluster refuses us
    :raises StepError: the cluster is no Scylla
    """
    from ringsync.replica.session import spark_session

    config, store = application.config, application.store
    check_layout(store)
    spark = spark_session(f"scylla_log_stage {application.run}")
    loop.start_workers(spark.sparkContext, "ringsync.steps.scylla.log_task")
    session = loop.connect_patiently(partial(cluster_settings, config))
    if not is_scylla(session):
        raise StepError(
            "this cluster is no ScyllaDB: its commit logs are read by the DAG commitlog_stage; cdcservice start"
        )
    note_database(store, of_scylla=True)
    create_state(session, config)
    errors = ErrorTable(session, config.state.keyspace, store, config.sync.max_errors_per_hour)
    patience = loop.Patience(lambda: spark_is_gone(spark.sparkContext))
    host, queries_per_s = driver_host(spark.sparkContext), config.scylla.queries_per_s
    with ControlServer(host=host, requests_per_s=queries_per_s) as control:
        control.watch_limits(store, application.run, cluster_limits(config))
        stager = LogStager(config, store, session, spark.sparkContext, control, errors)
        error = None
        with loop.SignOfLife(store, "scylla_log_stage", STATUS, lambda: None, {"logs": {}, "error": None}) as life:
            for _ in loop.cycles(application, config.sync.poll_interval_ms):
                error = patience.tried(stager.cycle)
                life.say({**stager.status(), "error": error or stager.waits})
    report = {**stager.report(), **({"error": error} if error else {})}
    return report, ExitCode.COMPLETED_WITH_ERRORS if error or stager.is_failing else ExitCode.OK


def _now_ms() -> int:
    return int(time.time() * 1000)


@dataclass
class TableTrouble:
    """Why a table is not read, since when, and when it is tried again, ms since the epoch."""

    reason: str
    since_ms: int
    tries: int = 1
    again_ms: int = 0


class LogStager:
    """The logs of all followed tables, each on its own: one that fails holds up no other."""

    def __init__(
        self,
        config: Config,
        store: ObjectStore,
        session: Any,
        context: Any,
        control: ControlServer,
        errors: ErrorTable,
    ) -> None:
        self._config, self._store, self._session = config, store, session
        self._context, self._control, self._errors = context, control, errors
        self._plan: SyncPlan | None = None
        self._number, self._positions = read_positions(store)
        self._trouble: dict[tuple[str, Kind], TableTrouble] = {}
        # A new run goes on counting how long tables have failed.
        before = read_status(store, f"scylla_log_stage/{STATUS}") or {}
        lately = before if before and 1000 * age_s(before, time.time()) < FAILED_LONG_MS else {}
        self._watched_ms: int = before.get("watched_ms", 0)
        has_watched = _now_ms() - self._watched_ms < FAILED_LONG_MS
        seen_ms = self._watched_ms + before.get("clock_ahead_ms", 0)
        unwatched_since_ms = None if has_watched else seen_ms
        silent_since_s = lately.get("silent_since_s", {})
        self._followed = FollowedLogs(config, store, session, silent_since_s, unwatched_since_ms, seen_ms or None)
        self._stands: dict[str, tuple[int, int]] = {
            log["table_id"]: (log["until_ms"], log["stands_since_ms"])
            for log in lately.get("logs", {}).values()
            if "stands_since_ms" in log
        }
        self._failing_before: dict[str, int] = {
            log["table_id"]: log["failing_since_ms"]
            for log in lately.get("logs", {}).values()
            if log.get("failing_since_ms")
        }
        self._waits: TableTrouble | None = None
        self._names: dict[str, str] = {}
        self._looked = False
        self._counts: Counter[str] = Counter()
        self._rests_until_ms = 0

    def cycle(self) -> None:
        """Stage what is new."""
        interval = interval_at(_now_ms(), self._config.commitlog_processor_window_interval_ms)
        if self._plan is None or self._plan.interval != interval:
            self._plan = plan_of(self._store, self._config, self._session, interval, self._plan)
        elif _now_ms() < self._rests_until_ms:
            return
        try:
            tables = self._followed.look(self._plan, self._positions, _now_ms())
        except NotYetError as error:
            if self._waits is None:
                print(f"ringsync: warning: {error}", flush=True)
            since_ms = self._waits.since_ms if self._waits else _now_ms()
            self._waits = TableTrouble(str(error), since_ms)
            return
        self._waits = None
        self._names, self._looked = {table.table_id: table.name for table in tables}, True
        self._trouble = {key: one for key, one in self._trouble.items() if key[0] in self._names}
        self._watched_ms = _now_ms()
        for table in tables:
            if table.problem:
                self._note_failure(table.table_id, "window", table.problem)
        seen = {table.table_id: one for table in tables if (one := self._seen(table)) is not None}
        now_ms = _now_ms()
        tables = [replace(table, log=None) if self._is_given_up(table) else table for table in tables]
        tables = [table for table in tables if not table.problem and not self._rests(table.table_id, "window", now_ms)]
        read = [table for table in tables if table.log is not None]
        planned = [
            self._planned(table, seen.get(table.table_id, self._positions.get(table.table_id)), place, now_ms)
            for place, table in enumerate(read)
        ]
        ended = [
            plan_end(table, self._positions[table.table_id], self._followed.rules(table, ()))
            for table in tables
            if table.log is None
        ]
        most = self._config.scylla.queries_per_s * CYCLE_S
        due = affordable([one for one in planned if one.is_due], most, self._number)
        if due or ended or seen:
            results = self._run(read, [work for one in due for work in one.works], self._plan.interval)
            altered = self._followed.have_changed(read) if results else set()
            self._commit([*due, *ended], results, now_ms, seen, altered)
        for table_id, position in self._positions.items():
            if self._stands.get(table_id, (-1, 0))[0] != position.until_ms:
                self._stands[table_id] = position.until_ms, self._cluster_ms()
        self._rests_until_ms = self._rest(planned, now_ms)

    def _seen(self, table: FollowedTable) -> Position | None:
        """Return the position of a table if the look at it has changed that; it counts whatever is read then.

        What was logged under another name of a key column has no key (scylladb #25119): the log begins anew."""
        known, cluster_ms = self._positions.get(table.table_id), self._cluster_ms()
        if known is not None and table.begins_ms is not None:
            begun = self._followed.begun_anew(table, known, table.begins_ms, table.begins_ms)
            return replace(begun, ends_ms=table.ends_ms, has_keys_only=table.has_keys_only)
        if table.problem:
            now = known and replace(known, ends_ms=table.ends_ms)
            now = replace(now, has_keys_only=True) if now and table.has_keys_only else now
            return now if now != known else None
        if known is None or table.log is None:
            return None
        if known.keys in ((), table.keys):
            return None
        # A far sweep takes a little more than it must, by any TTL: nothing of it may be from before.
        ttls_s = known.with_ttl(table.ttl_s, cluster_ms).ttls_s
        begins_ms = cluster_ms + 2 * ARRIVAL_MARGIN_MS
        doubt_ms = 1000 * (max(ttls_s, default=0) - min(ttls_s, default=0))
        searched_ms = begins_ms + ARRIVAL_ERROR_MS + MOST_ERROR_MS + doubt_ms
        self._note_gap(table, known.unread_from_ms, searched_ms)
        return self._followed.begun_anew(table, known, begins_ms, searched_ms)

    def _planned(self, table: FollowedTable, known: Position | None, place: int, now_ms: int) -> Planned:
        cluster_ms = self._cluster_ms()
        position = known or self._followed.begin(table, cluster_ms)
        position = replace(position.with_ttl(table.ttl_s, cluster_ms), ends_ms=table.ends_ms)
        resting = [kind for kind in get_args(Kind) if self._rests(table.table_id, kind, now_ms)]
        rules = self._followed.rules(table, position.ttls_s)
        return plan_work(table, position, place, cluster_ms, rules, resting=resting)

    def _is_given_up(self, table: FollowedTable) -> bool:
        """Tell whether a table that has left the sync could not be read for so long that its end is told as a gap."""
        trouble = self._trouble.get((table.table_id, "window"))
        if table.problem or table.ends_ms is None or trouble is None:
            return False
        failed_ms = min(_now_ms() - trouble.since_ms, self._cluster_ms() - table.ends_ms)
        return failed_ms >= UNREADABLE_MS

    def _cluster_ms(self) -> int:
        """Return the time by the clock of the cluster, ms since the epoch: by it rows are written, and arrive."""
        return _now_ms() + round(self._followed.clocks.ahead_ms)

    def _rests(self, table_id: str, kind: Kind, now_ms: int) -> bool:
        """Tell whether a table is not to be tried now: one that fails makes all others wait for its requests."""
        trouble = self._trouble.get((table_id, kind))
        return trouble is not None and trouble.again_ms > now_ms

    def _rest(self, planned: Sequence[Planned], now_ms: int) -> int:
        """Return when the next window can be read, ms since the epoch: until then nothing is asked."""
        at_ms = now_ms + LONGEST_REST_MS
        for one in planned:
            position = self._positions.get(one.table.table_id, one.position)
            sweeping: dict[Kind, object] = {
                "near": position.near.next_ms,
                "far": position.far.next_ms,
                "again": position.again or None,
            }
            table_id = one.table.table_id
            is_read = position.ends_ms is not None and position.until_ms >= position.ends_ms
            is_busy = any(
                going is not None and not self._rests(table_id, kind, now_ms) for kind, going in sweeping.items()
            )
            next_ms = position.until_ms + one.rules.confidence_ms + one.rules.window_ms - self._cluster_ms() + _now_ms()
            at_ms = min(at_ms, now_ms if is_busy else at_ms if is_read else next_ms)
        return at_ms

    def _note_gap(self, table: FollowedTable, from_ms: int, until_ms: int) -> None:
        gap = Gap(
            *(CDC_LOGS, "", f"{table.name}-{from_ms}-{until_ms}", from_ms, until_ms),
            *({table.table_id: table.name}, ()),
        )
        note_gap(self._store, gap)
        print(f"ringsync: warning: {table.name}: {gap.loss}", flush=True)

    def _run(self, tables: Sequence[FollowedTable], works: Sequence[LogWork], newest: Any) -> list[LogResult]:
        if not works:
            return []
        task = LogTask(
            self._config,
            tuple(table.log for table in tables if table.log is not None),
            Windows(newest, closed_until(self._store)),
            self._control.address,
            self._number + 1,
            self._followed.clocks,
        )
        # Neighbours are dealt out: the streams of one table are spread over the tasks.
        count = min(len(works), self._context.defaultParallelism)
        dealt = [work for first in range(count) for work in works[first::count]]
        return list(self._context.parallelize(dealt, count).mapPartitions(task).collect())

    def _commit(
        self,
        planned: Sequence[Planned],
        results: Sequence[LogResult],
        now_ms: int,
        seen: Mapping[str, Position],
        altered: Collection[str],
    ) -> None:
        """Make durable what was read of the tables that have not failed.

        :param seen: positions that the look at the tables has changed
        :param altered: ids of tables that were altered meanwhile: nothing that was read of them counts
        :raises StepError: the counts do not reconcile
        """
        found = {one.table.table_id: _of_table(results, one.table.table_id) for one in planned}
        for one in planned:
            if one.table.table_id in altered:
                kinds = {"window", *(work.piece.kind for work in one.works)}
                found[one.table.table_id].failures |= dict.fromkeys(kinds, ALTERED)
        failed = {table_id for table_id, result in found.items() if "window" in result.missed}
        positions = {table_id: one for table_id, one in self._positions.items() if self._followed.is_there(table_id)}
        positions |= seen
        for one in planned:
            table_id, result = one.table.table_id, found[one.table.table_id]
            for gap in one.unread(self._cluster_ms(), result):
                self._note_gap(one.table, *gap)
            # What is known of a log, its end and its TTL, counts, too, if it could not be read then.
            positions[table_id] = one.taken(result)
            for kind in get_args(Kind):
                if kind in result.failures:
                    self._note_failure(table_id, kind, result.failures[kind], _now_ms() - now_ms)
                elif kind == "window" or any(work.piece.kind == kind for work in one.works):
                    self._trouble.pop((table_id, kind), None)
            if table_id not in failed:
                self._failing_before.pop(table_id, None)
        for of_task in results:
            _check(of_task)
        for table_id in found.keys() - failed:
            _check_table(self._names[table_id], found[table_id])
        blocks = tuple(block for result in results for block in result.blocks if block.table_id not in failed)
        late = tuple(key for result in results for key in result.late if key.split("/")[2] not in failed)
        commit = StageCommit(
            node=CDC_LOGS,
            number=self._number + 1,
            parts=(),
            ends={},
            finished={},
            counts=dict(sum((found[one].counts for one in found.keys() - failed), Counter())),
            blocks=blocks,
            late=late,
            positions={table_id: position.to_document() for table_id, position in positions.items()},
        )
        self._put_errors(results, failed)
        counting = put_commit(self._store, commit)
        is_ours = (counting.files, counting.late, counting.positions) == (commit.files, late, commit.positions)
        kept = {*commit.files, *late} if is_ours else set()
        for key in {key for result in results for key in result.files} - kept:
            self._store.delete(key)
        self._number = counting.number
        self._positions = {table_id: Position.of(one) for table_id, one in counting.positions.items()}
        self._counts.update(counting.counts)

    def _put_errors(self, results: Sequence[LogResult], failed: Collection[str]) -> None:
        found = [decode_rows(result.errors) for result in results if result.error_count]
        if not found:
            return
        errors = pa.concat_batches(found)
        ids = [bytes.fromhex(table_id) for table_id in failed]
        kept = [row not in ids for row in errors["table_id"].to_pylist()]
        self._errors.put(errors.filter(pa.array(kept, pa.bool_())), CDC_LOGS)

    def _note_failure(self, table_id: str, kind: Kind, reason: str, took_ms: int = 0) -> None:
        """Note why a table is not read.

        :param took_ms: how long the try took: that of a sweep must leave most of the time to all others
        """
        now_ms, known = _now_ms(), self._trouble.get((table_id, kind))
        if known is None or known.reason != reason:
            what = "its log is not read" if kind == "window" else "late rows of its log are not found"
            print(f"ringsync: warning: {self._names[table_id]}: {what}: {reason}", flush=True)
        tries = known.tries + 1 if known else 1
        wait_ms = max(min(LONGEST_WAIT_MS, 1000 << min(tries, 10)), 0 if kind == "window" else REST * took_ms)
        before_ms = self._failing_before.get(table_id, now_ms) if kind == "window" else now_ms
        since_ms = known.since_ms if known else before_ms
        self._trouble[table_id, kind] = TableTrouble(reason, since_ms, tries, now_ms + wait_ms)

    @property
    def waits(self) -> str | None:
        """Why nothing has been read for a while; None: all goes on."""
        waits = self._waits
        is_long = waits is not None and _now_ms() - waits.since_ms >= WAITED_LONG_MS
        return waits.reason if waits is not None and is_long else None

    @property
    def is_failing(self) -> bool:
        """Whether a table could not be read when that was last tried."""
        return bool(self._trouble)

    def status(self) -> dict[str, Any]:
        """Return how far each table's log is read, for ``cdcservice status``."""
        now_ms, cluster_ms, logs = _now_ms(), self._cluster_ms(), {}
        # Before the first look, a backlog must not be taken for nothing.
        clear_at_ms = now_ms if self._looked else min((one.until_ms for one in self._positions.values()), default=0)
        for table_id, name in self._names.items():
            position, trouble = self._positions.get(table_id), self._trouble.get((table_id, "window"))
            of_sweeps = [one for (of, kind), one in self._trouble.items() if of == table_id and kind != "window"]
            until_ms = position.until_ms if position else 0
            ends_ms = position.ends_ms if position and not position.waiting and trouble is None else None
            is_read = ends_ms is not None and until_ms >= ends_ms  # only sweeps go on
            if is_read and not of_sweeps:
                continue
            _, stands_since_ms = self._stands.get(table_id, (until_ms, cluster_ms))
            is_failing_long = trouble is not None and now_ms - trouble.since_ms >= FAILED_LONG_MS
            # It may wait for the streams of a generation: that is no failure.
            stands_long = until_ms > 0 and cluster_ms - max(stands_since_ms, until_ms) >= FAILED_LONG_MS
            if not is_failing_long and not stands_long and not is_read:
                clear_at_ms = min(clear_at_ms, until_ms)
            logs[name] = {
                "until_ms": until_ms,
                "behind_ms": cluster_ms - until_ms if position else None,
                "waiting": len(position.waiting) if position else 0,
                "waiting_from_ms": position.waiting_from_ms if position else None,
                "error": trouble.reason if trouble else None,
                "sweep_error": of_sweeps[0].reason if of_sweeps else None,
                "failing_since_ms": trouble.since_ms if trouble else None,
                "stands_since_ms": stands_since_ms,
                "table_id": table_id,
            }
        counts = {"rows": self._counts["log_read"], "errors": self._counts["log_errors"]}
        ahead_ms = round(self._followed.clocks.ahead_ms)
        seen = {"clear_at_ms": clear_at_ms, "watched_ms": self._watched_ms, "clock_ahead_ms": ahead_ms}
        return {"logs": logs, **seen, **self._followed.status(), **counts}

    def report(self) -> Report:
        """Return what was staged by this run."""
        return {**self.status(), "counts": dict(self._counts)}


def _of_table(results: Sequence[LogResult], table_id: str) -> TableResult:
    """Join what all tasks have found of a table."""
    joined = TableResult()
    for result in results:
        if (one := result.tables.get(table_id)) is not None:
            joined.counts.update(one.counts)
            joined.waiting += one.waiting
            for kind, sums in one.sums.items():
                for slot, more in sums.items():
                    joined.sums[kind][slot] = added(joined.sums[kind].get(slot, NO_SUMS), more)
            joined.failures = {**one.failures, **joined.failures}
            joined.too_many |= one.too_many
            joined.largest |= one.largest
    return joined


def _check(result: LogResult) -> None:
    """Check that every change row has one outcome.

    :raises StepError: the counts do not reconcile
    """
    counts = result.counts
    outcomes = sum(counts[name] for name in ("staged", "late", "repeated", "too_old"))
    taken = sum(one.counts["taken"] for one in result.tables.values())
    if not counts["rows"] == outcomes == taken:
        raise StepError(
            f"the counts do not reconcile: {taken} change rows of CDC logs were taken, {counts['rows']} were to be "
            f"staged, {outcomes} are accounted for; nothing was committed"
        )


def _check_table(name: str, result: TableResult) -> None:
    """Check that every log row, and every change row made of them, has one outcome.

    :raises StepError: the counts do not reconcile
    """
    counts = result.counts
    of_log = sum(counts[f"log_{outcome}"] for outcome in ("changed", "images", "empty", "held", "errors"))
    if counts["log_read"] != of_log or counts["change_rows"] != counts["taken"] + counts["read_before"]:
        raise StepError(f"{name}: the counts do not reconcile: {json.dumps(dict(counts))}; nothing was committed")
