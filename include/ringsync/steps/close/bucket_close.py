"""The loop that closes buckets and publishes.

In each cycle, the settled rows of each table become a pass: those on which the live replicas agree, and all rows of
closed buckets. A pass has messages of the stream and merged change rows. Then every pass is followed up: stream,
replica, Kafka. A row that comes after its range was settled is published by the next pass over the range; published
rows are known by their digests.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Timer
from typing import Any

from ringsync.cluster.cluster import read_ring
from ringsync.cluster.control import ControlServer
from ringsync.cluster.schema import read_tables
from ringsync.cluster.whole_schema import Agreement
from ringsync.config import Config, ConfigError
from ringsync.ledger.layout import check_layout
from ringsync.ledger.passes import LATE, Pass, TableReplacedError, digest_keys
from ringsync.ledger.staging import Bucket, closed_until
from ringsync.ledger.table_versions import latest_version
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.ring import RingSnapshot
from ringsync.schema.table import TableSchema
from ringsync.status import age_s, read_status
from ringsync.steps import loop
from ringsync.steps.absent_tables import AbsentTables
from ringsync.steps.application import Application, ExitCode, Report, StepError, driver_host, plain, spark_is_gone
from ringsync.steps.close.agreement import Settled, settle_together
from ringsync.steps.close.close_task import CloseTask, SliceResult, cut, forget_waiting
from ringsync.steps.close.closed import close_until
from ringsync.steps.close.closing import UNHEARD_MS, Progress, progress_of
from ringsync.steps.close.followed import Followed
from ringsync.steps.close.staged_commits import StagedCommits
from ringsync.steps.close.table_state import TableState
from ringsync.steps.passes.follow_ups import FollowUps
from ringsync.steps.passes.make import commit
from ringsync.steps.passes.sink_feed import SinkFeed
from ringsync.steps.sync_plan import SyncPlan, interval_at, plan_of, sync_table
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_limits, cluster_settings, sink_of

PASS_ROWS = 250_000
"""A pass has at most about so many rows, the oldest first: Kafka gets one pass while the next is made."""

REPEATED_MS = 600_000
"""Longest time after which a writer that gets no answer repeats a statement."""


@loop.starts_again()
def run(application: Application) -> tuple[Report, ExitCode]:
    """Close and publish until the time is over.

    :returns: exit code 1 when a table could not be served at the end
    :raises LayoutError: the state is of a version of ringsync that this one does not know
    :raises AwayError: cluster or object store are away
    :raises ClusterError: the cluster refuses us
    """
    from ringsync.replica.session import spark_session

    config, store = application.config, application.store
    check_layout(store)
    spark = spark_session(f"bucket_close {application.run}")
    tasks = ("ringsync.steps.close.close_task", "ringsync.steps.passes.replica_task")
    loop.start_workers(spark.sparkContext, "deltalake", *tasks)
    session = loop.connect_patiently(partial(cluster_settings, config))
    with (
        ControlServer(host=driver_host(spark.sparkContext)) as control,
        SinkFeed(store, sink_of(config)) as feed,
    ):
        control.watch_limits(store, application.run, cluster_limits(config))
        closer = Closer(application, session, spark.sparkContext, control, feed)
        patience = loop.Patience(lambda: spark_is_gone(spark.sparkContext))
        ending = Timer(config.sync.run_s, closer.end)
        ending.daemon = True
        ending.start()
        with loop.SignOfLife(store, "bucket_close", "close", closer.at, {"tables": {}, "error": None}) as life:
            for _ in loop.cycles(application, config.sync.poll_interval_ms):
                began_ms = _now_ms()
                error = patience.tried(closer.cycle)
                life.say({"began_ms": began_ms, "tables": closer.status(), "error": error, **closer.problems()})
    report = closer.report()
    return report, exit_code(report)


def exit_code(report: Report) -> ExitCode:
    """Return the exit code of a run with this report."""
    failing = report["others_failed"] or any(table["error"] for table in report["tables"].values())
    return ExitCode.COMPLETED_WITH_ERRORS if failing else ExitCode.OK


def _now_ms() -> int:
    return int(time.time() * 1000)


class Closer:
    """All tables, each on its own: a table that fails is tried again later, and holds up no other."""

    def __init__(
        self, application: Application, session: Any, spark_context: Any, control: ControlServer, feed: SinkFeed
    ) -> None:
        self._application = application
        self._config: Config = application.config
        self._store: ObjectStore = application.store
        self._session = session
        self._spark_context = spark_context
        self._control = control
        self._feed = feed
        self._staged = StagedCommits(self._store)
        self._tables: dict[str, TableState] = {}
        self._absent = AbsentTables()
        self._agree = Agreement(session, time.monotonic)
        self._there: Mapping[str, TableSchema] = {}
        self._followed = Followed(self._store, self._config, feed)
        self._plan: SyncPlan | None = None
        self._looked: SyncPlan | None = None
        self._others_failed: dict[str, str] = {}
        self._rings: dict[str, RankedRing] = {}
        self._other_rings: dict[str, RingSnapshot] = {}
        self._unread: Mapping[str, str] = {}
        self._unheard: frozenset[str] = frozenset()
        self._closed_until = closed_until(self._store)
        self._complete_until: int | None = None
        self._over, self._had_turns = False, False
        self._serving: TableState | None = None
        # A new run goes on counting how long nodes have been unread, unless there was no run for a while.
        before = read_status(self._store, "bucket_close/close")
        lately = before is not None and age_s(before, time.time()) < UNHEARD_MS / 1000
        self._unread_since_ms: Mapping[str, int] = before.get("unread_since_ms", {}) if before and lately else {}

    def cycle(self) -> None:
        """Publish what is settled, each table in turn. Once the run's time is over, a cycle ends with the table that it
        is at; but the first one of a run serves all."""
        self._complete_until = None
        now_ms = _now_ms()
        plan = self._read_plan(now_ms)
        self._close_buckets(plan, now_ms)
        self._staged.read(self._tables, now_ms)
        if plan is not self._looked:
            self._look_for_others(plan)
            self._looked = plan
            self._staged.give(self._tables, now_ms)
        for state in list(self._tables.values()):
            if self._over and self._had_turns:
                return  # the next run begins with a whole cycle, and until then nobody reads the logs
            if state.again_ms <= now_ms and not (self._over and state.failures):
                self._serving = state
                self._serve(state, now_ms)
        self._serving = None
        self._retire()
        self._complete_until, self._had_turns = self._closed_until, True

    def _serve(self, state: TableState, now_ms: int) -> None:
        """Publish the settled rows of a table. A failure concerns this table alone.

        :raises ConfigError: the configuration is wrong, for all tables
        """
        began_ms = _now_ms()
        try:
            if state.gone:
                self._followed.publish_gone(state)
            else:
                self._follow(state, now_ms)
            if self._followed.ends(state):
                del self._tables[state.table.table_id]
        except ConfigError:
            raise
        except TableReplacedError as error:
            # The waiting rows of an absent table are removed soon (_look_for_others). Others must not get lost.
            if state.table.table_id not in self._absent:
                state.failed(error, began_ms, _now_ms())
        except Exception as error:
            if spark_is_gone(self._spark_context):
                raise
            if not (self._over and state.failures):  # else it was cut off, and its own error stays
                state.failed(error, began_ms, _now_ms())
        else:
            state.served()

    def end(self) -> None:
        """End the run's time, from any thread: failing tables are not tried any more, and the work on one is cancelled.
        A healthy table is waited for: it makes progress, and a pass may take longer than a run."""
        self._over = True
        if (state := self._serving) is not None and state.failures:
            self._spark_context.cancelAllJobs()

    def at(self) -> str | None:
        """Return the table that is served just now."""
        return state.table.schema.full_name if (state := self._serving) else None

    def _follow(self, state: TableState, now_ms: int) -> None:
        """Publish what is settled of a table, and what follows from its passes."""
        ring = self._ring_of(state.table.schema.keyspace)
        self._renew(state)
        if state.follow_ups is None:
            self._feed.watch(state.table.topic)
            self._followed.begin(state.table.table_id)
            control, announce = self._control.address, self._feed.announce
            state.follow_ups = FollowUps(self._application, state.table, self._spark_context, control, announce)
        follow_ups = state.follow_ups
        follow_ups.ring = ring
        if not follow_ups.catch_up():
            return  # the next pass may need rows that only the replica will have
        settled = settle_together(state.buckets, ring, now_ms, closed_until=self._closed_until, most=PASS_ROWS)
        if settled and self._publish(state, follow_ups, settled, now_ms):
            follow_ups.catch_up()
        follow_ups.tell_missed()

    def _renew(self, state: TableState) -> None:
        """Take over a version of the table that another process has seen first."""
        if state.failures or state.newest > state.table.version.number:
            newer = latest_version(self._store, state.table.table_id)
            if newer is not None:
                state.follow(replace(state.table, version=newer))

    def _ring_of(self, keyspace: str) -> RankedRing:
        """Return the token ranges of a keyspace, by the present plan.

        :raises RingError: they cannot be had
        """
        assert self._plan is not None
        if keyspace in self._plan.replications:
            ring = self._plan.ring(keyspace)
            ring = ring.without(self._unheard) if self._unheard else ring
        elif keyspace in self._other_rings:
            ring = self._other_rings[keyspace]
        else:
            ring = self._other_rings[keyspace] = read_ring(self._session, keyspace)
        known = self._rings.get(keyspace)
        if known is None or known.ring != ring:
            self._rings[keyspace] = ranked(ring)
        return self._rings[keyspace]

    def _read_plan(self, now_ms: int) -> SyncPlan:
        interval = interval_at(now_ms, self._config.commitlog_processor_window_interval_ms)
        if self._plan is None or self._plan.interval != interval:
            self._plan = plan_of(self._store, self._config, self._session, interval, self._plan)
            self._tables = {table_id: state for table_id, state in self._tables.items() if not state.gone}
            for table in self._plan.tables:
                self._tables.setdefault(table.table_id, TableState(table)).follow(table)
            self._other_rings.clear()
        return self._plan

    def _look_for_others(self, plan: SyncPlan) -> None:
        """Look for tables that are not in the plan, but are followed or have staged rows. A table that has lost cdc is
        published to the end; the rows of a table that is gone are forgotten, and counted. A table that fails stays as
        it is, is reported, and is tried again in the next interval.

        :raises ConfigError: the configuration is wrong, for all tables
        """
        planned = {table.table_id for table in plan.tables}
        begun = (table_id for table_id, state in self._tables.items() if state.follow_ups)
        followed = self._followed.look(planned, begun)
        others = (self._staged.homeless.keys() | self._tables.keys() | followed) - planned
        gone = self._absent.look(others, self._read_schema, self._agree)
        self._others_failed = {}
        for table_id in others:
            try:
                if table_id in self._there and table_id not in self._tables:
                    self._tables[table_id] = TableState(sync_table(self._store, self._config, self._there[table_id]))
                elif table_id in gone:
                    self._forget(table_id)
            except ConfigError:
                raise
            except Exception as error:
                self._others_failed[table_id] = plain(error)
        # A table that is followed to its end, or could not be forgotten, is missed in the next interval, too.
        self._absent.forget(gone - self._tables.keys() - self._others_failed.keys())

    def _read_schema(self) -> frozenset[str]:
        """Read the schema, and return the ids of its tables."""
        schema = read_tables(self._session)
        self._there = schema.by_id()
        return schema.ids

    def _forget(self, table_id: str) -> None:
        """Forget the waiting rows of a table that is gone, and print its last error, which a new table of its name
        would hide. What was published of it is followed to its end. If this fails, nothing has changed."""
        state, gone = self._tables.get(table_id), self._followed.gone(table_id)
        self._staged.forget(table_id, state.buckets.values() if state else ())
        if state and state.error:
            name = f"{state.table.schema.full_name} (table id {table_id})"
            print(f"ringsync: warning: {name} is gone, and failed before: {state.error}", flush=True)
        self._tables.pop(table_id, None)
        if gone is not None:
            self._tables[table_id] = gone

    def _close_buckets(self, plan: SyncPlan, now_ms: int) -> None:
        """Close what is old enough, as far as the logs are staged."""
        length = plan.interval.length
        window = (self._config.commitlog_processor_window_count - 1) * length
        staged = self._progress(plan, now_ms, window + length)
        self._unread, self._unread_since_ms, self._unheard = staged.unread, staged.since_ms, staged.unheard

        def latest(moment_ms: int) -> int:
            return (moment_ms - window) // length * length

        wanted = latest(staged.staged_until)
        self._closed_until = close_until(self._store, self._closed_until, wanted, latest, now_ms)

    def _progress(self, plan: SyncPlan, now_ms: int, patience_ms: int) -> Progress:
        status_of = partial(read_status, self._store)
        return progress_of(plan, self._config.sync, status_of, now_ms, patience_ms, self._unread_since_ms)

    def _publish(
        self, state: TableState, follow_ups: FollowUps, settled: Sequence[Settled], settled_at_ms: int
    ) -> bool:
        """Make a pass, unless all was published before.

        :returns: False: another process has made a pass meanwhile; all is done anew in the next cycle
        :raises StepError: the counts do not reconcile
        """
        reader = follow_ups.reader(self._config.sync.after_image_of(state.table.schema.full_name))
        context = follow_ups.context(reader, self._plan.hosts if self._plan else (), late=False)
        passes, by_arrival = follow_ups.passes, state.table.by_arrival
        published = {part.bucket: published_before(passes, part, by_arrival) for part in settled}
        elsewhere = {part.bucket: published_elsewhere(passes, part, published[part.bucket]) for part in settled}
        slices = cut(settled, published, elsewhere)
        results: list[SliceResult] = []
        try:
            if slices:
                # A task for each core: all slices of one share the files that it has decoded.
                count_of_tasks = min(len(slices), self._spark_context.defaultParallelism)
                tasks = self._spark_context.parallelize(slices, count_of_tasks)
                results = list(tasks.mapPartitions(CloseTask(context, by_arrival)).collect())
            counts = count(settled, results)
        except Exception:
            forget_waiting(self._store, context)
            raise
        outputs = [output for result in results for output in result.outputs]
        if outputs:
            everywhere = all(part.everywhere for part in settled)
            made = commit(self._store, context, outputs, {**counts, "everywhere": everywhere})
            if made is None:
                forget_waiting(self._store, context)
                follow_ups.refresh()
                return False
            follow_ups.made(made)
        ring = self._rings[state.table.schema.keyspace].ring.digest
        for part in settled:
            state.buckets[part.bucket].published(part, ring)
        state.counts.update({**counts, "messages": sum(output.messages for output in outputs)})
        state.lags_ms = [lag for output in outputs for lag in output.lags_ms] or state.lags_ms
        if outputs and not counts["at_close"]:
            state.agreement_ms = [
                lag - (output.made_at_ms - settled_at_ms) for output in outputs for lag in output.lags_ms
            ]
        return True

    def _retire(self) -> None:
        """Forget closed buckets whose blocks are all published, and commits whose blocks are all forgotten."""
        for state in self._tables.values():
            for bucket, staged in list(state.buckets.items()):
                if bucket.end <= self._closed_until and staged.files.keys() <= staged.united:
                    state.counts["copies"] += sum(block.rows for _, block in staged.files.values())
                    del state.buckets[bucket]
        self._staged.retire(
            {place for state in self._tables.values() for staged in state.buckets.values() for place in staged.files}
        )

    def status(self) -> dict[str, Any]:
        """Return the status of each table, by name. If a name was given again, the old table appears with its id until
        its end."""
        tables: dict[str, Any] = {}
        for state in sorted(self._tables.values(), key=lambda state: not state.gone):
            if (before := tables.pop(name := state.table.schema.full_name, None)) is not None:
                tables[f"{name} (table id {before['table_id']})"] = before
            kafka = self._feed.status(state.table.topic) or {}
            tables[name] = state.status(kafka, self._closed_until, self._complete_until)
        return tables

    def problems(self) -> dict[str, Any]:
        """Return what is wrong beside single tables, for ``cdcservice status``."""
        return {
            "unread": dict(self._unread),
            "unread_since_ms": dict(self._unread_since_ms),
            "datacenters_left_out": self._plan.left_out_datacenters() if self._plan else {},
            "left_out": dict(self._plan.left_out) if self._plan else {},
            "others_failed": dict(self._others_failed),
            **self._staged.problems(),
        }

    def report(self) -> Report:
        """Return what was published by this run."""
        return {"tables": self.status(), "closed_until_ms": self._closed_until, **self.problems()}


def published_before(passes: Sequence[Pass], settled: Settled, by_arrival: bool) -> tuple[str, ...]:
    """Return keys of the digests that tell which of a bucket's rows were published before.

    If rows are put into buckets by arrival, copies of a row may have been in any bucket: a hint comes hours after the
    other copies. A slow stage may have put rows into an older bucket than their own. Buckets overlap if their length
    was changed between the copies.

    Where all replicas agree, a row was published before its bucket began only if its writer has repeated it. The
    present time does not matter: a run that begins later reads the bucket again.

    :param passes: all that have not been forgotten
    :param by_arrival: rows belong to the bucket of their arrival; maybe only since lately
    """
    start, end, late_since_ms = settled.bucket.start, math.inf, -math.inf
    if settled.everywhere:
        end, late_since_ms = settled.bucket.end, _repeated_since_ms(passes, settled.bucket)
    elif by_arrival:
        start = 0
    known = map(Bucket.parse, {bucket for made in passes for bucket in made.digests} - {LATE})
    buckets = {str(bucket) for bucket in known if bucket.end > start and bucket.start < end}
    return digest_keys(passes, buckets, late_since_ms)


def published_elsewhere(passes: Sequence[Pass], settled: Settled, asked: Collection[str]) -> tuple[str, ...]:
    """Return keys of the other digests that tell which of a bucket's rows were published as late rows, though they
    wait in the bucket: a backfill reads them again, for example.

    The digest of a late row is kept with the bucket of its write time. A row may wait in another bucket: it is put by
    arrival, or dated ahead. Only for such rows these digests are read. They were published after they came.

    :param passes: all that have not been forgotten
    :param asked: keys that are searched for all rows
    """
    since_ms, known = _repeated_since_ms(passes, settled.bucket), set(asked)
    late = (made for made in passes if made.late and made.created_at_ms >= since_ms)
    return tuple(key for made in late for keys in made.digests.values() for key in keys if key not in known)


def _repeated_since_ms(passes: Sequence[Pass], bucket: Bucket) -> int:
    """Return since when rows of a bucket may have been published before it began, since their writer has repeated them,
    ms since the epoch. If the sync stood still, the time before that counts."""
    before = (made.created_at_ms for made in passes if made.created_at_ms < bucket.start)
    return max(before, default=bucket.start) - REPEATED_MS


def count(settled: Sequence[Settled], results: Iterable[SliceResult]) -> Counter[str]:
    """Add up what tasks have read and what became of it.

    :raises StepError: a row has no outcome, or a range had other rows than its digests say
    """
    total: Counter[str] = Counter()
    for result in results:
        rows = sum(output.rows for output in result.outputs)
        total.update(
            read=result.read,
            repeated=result.repeated,
            published_before=result.published_before,
            only_one=result.only_one,
            open=result.open,
            rows=rows,
        )
    for part in settled:
        for _, reading in part.readings:
            total["at_close" if reading.united else "agreed"] += reading.rows
    expected = total["agreed"] + total["at_close"]
    outcomes = total["rows"] + total["repeated"] + total["published_before"] + total["open"]
    if total["read"] != expected or total["read"] != outcomes:
        raise StepError(
            f"the counts do not reconcile: {expected} rows are staged, {total['read']} were read, {outcomes} "
            "accounted for; nothing was published"
        )
    return total
