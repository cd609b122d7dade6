"""The scan of tables by token ranges into their replicas and change streams (docs/bootstrap.md).

The source is read once. Tasks write files and have each range committed in the ledger. What is left of the ring, or
could not be read, is planned anew and read in the next wave, until nothing is left. So a killed run, a split that was
too large, a range that failed, and a changed ring are one case: tokens that are in no committed range. At the end the
files of all committed ranges become the replica, in one commit, and a pass of the stream; until then they are hidden.

A wave reads what is left of all tables of the run, in one Spark job. A thread of the driver publishes a table as soon
as all of it is committed, while others are read. All that decides what is done is a table's own, and so is its failure.

A Spark worker may die of a table's rows, and takes what it reads of other tables with it, or even ends the job. All
tables that were just being read are suspects. They are read after all others, each alone, so the guilty one is found.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ringsync.cluster.control import ControlServer
from ringsync.cluster.session import connect
from ringsync.cluster.shared import Shared, TableName, read_known_tables
from ringsync.config import Config
from ringsync.ledger.passes import pass_folder
from ringsync.ledger.table_versions import as_recorded
from ringsync.progress import Progress
from ringsync.ring.splits import SizeEstimate, Split
from ringsync.ring.tokens import TokenSet, fraction, intersection, subtract
from ringsync.schema.table import TableSchema
from ringsync.sources.scan.plan import split_to_json
from ringsync.sources.scan.planning import cut
from ringsync.state.bootstrap import COMPLETED, PUBLISHING, Bootstrap, BootstrapState
from ringsync.status import BOOTSTRAPS, forget
from ringsync.steps.application import Application, ExitCode, Report, StepError, driver_host, plain, spark_is_gone
from ringsync.steps.bootstrap.collect import Collector, handlers, is_owned, reported
from ringsync.steps.bootstrap.drain import cut_over
from ringsync.steps.bootstrap.plan import SSTABLE, BootstrapPlan, plans_to_follow
from ringsync.steps.bootstrap.prepare import begin_pass, check_not_cancelled, check_scanning, say, wait_until_free
from ringsync.steps.bootstrap.publish import describe_published, publish
from ringsync.steps.bootstrap.rows_of_split import RowsOfSplit, SelectedRows
from ringsync.steps.bootstrap.snapshot_splits import check_ring, cut_snapshots
from ringsync.steps.bootstrap.task import BootstrapTask, Piece, TableTask
from ringsync.steps.passes.follow_ups import put_schemas
from ringsync.steps.sync_plan import sync_table
from ringsync.steps.tables import (
    TABLES_AT_ONCE,
    BackgroundSpark,
    Outcome,
    attempts,
    check_not_replaced,
    in_all,
    together,
)
from ringsync.wiring import cluster_limits, cluster_settings

IDLE_WAVES = 3
"""After so many waves in a row that began to read a table and read no range of it, its ranges that are left count as
unreadable. A wave in which a worker has died counts only if the table was alone in it."""

COPIED = (PUBLISHING, COMPLETED)
"""States of a bootstrap that has copied everything."""

MOST_IN_A_WAVE = 1_000_000
"""A wave takes no further tables once so many parts of SSTables, or ranges, are to be read: the driver has some hundred
bytes for each."""

IDLE_PAUSE_S = 5.0
"""Pause before what failed is tried again."""

TRUSTED_PART = 0.01
"""Part of the ring: once so much has been read, its size is a better estimate of the rest than a forecast."""


@dataclass(frozen=True)
class Run:
    """What the tables of a run share.

    :ivar owner: unique name of this process, as the owner of the bootstraps
    """

    application: Application
    shared: Shared
    state: BootstrapState
    owner: str


@dataclass
class TableScan:
    """The scan of one table in this run.

    :ivar latest: the bootstrap, as the state had it at the begin
    :ivar begin: number of the pass ``begin``
    :ivar task: what tasks need; None: everything is committed already
    :ivar ring_digest: digest of the ring for which the last wave was cut
    :ivar in_snapshots: the whole table, as it is in the snapshots that are read with mode ``sstable``; None: the
        cluster is read
    :ivar idle: number of waves in a row that read no range
    :ivar died: how a worker has died that was reading it; empty: none has. Then it is read alone
    :ivar seconds: how long the table was read
    """

    plan: BootstrapPlan
    latest: Bootstrap
    begin: int
    collector: Collector
    task: TableTask | None
    ring_digest: str
    in_snapshots: TableSchema | None = None
    idle: int = 0
    died: str = ""
    began_s: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def name(self) -> TableName:
        """Keyspace and table."""
        return self.plan.scan.table.keyspace, self.plan.scan.table.name

    @property
    def must_read(self) -> bool:
        """Whether a further wave is to read what is left."""
        collector = self.collector
        return self.task is not None and not collector.over and self.idle < IDLE_WAVES and bool(collector.left)


def run(application: Application) -> tuple[Report, ExitCode]:
    """Scan, write, publish. In a run for several tables each fails for itself.

    :returns: exit code 1 when some ranges could not be read; nothing of the table is published then, and all others are
        kept
    :raises StepError: the schema changed since the plan or while scanning; the counts do not reconcile; another run
        works on this bootstrap
    :raises StateError: the ledger cannot be used; its subclass LostOwnershipError when another run has taken over
    """
    config, store = application.config, application.store
    session = connect(cluster_settings(config))
    outcome = Outcome(alone=not application.patterns)
    plans = plans_to_follow(application, outcome)
    known = None if outcome.alone else read_known_tables(session, [config.state.keyspace])
    # In a container the next process may have the same number.
    owner = f"{application.run} on {socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
    shared = Shared(session, known)
    this = Run(application, shared, BootstrapState(session, config.state.keyspace), owner)
    title = next(iter(plans.values())).scan.table.full_name if outcome.alone else f"{len(plans)} tables"
    spark = BackgroundSpark(f"bootstrap_scan {title} {application.run}", begin=not outcome.alone and bool(plans))
    opened = attempts(application.run, plans, lambda name: open_table(this, plans[name]), outcome)
    scans = [scan for _, scan in opened]
    by_id = {scan.plan.bootstrap.id: scan for scan in scans}

    def say_progress(collector: Collector, progress: Progress) -> None:
        scan = by_id[collector.ledger.bootstrap_id]
        if scan.latest.state != COMPLETED:
            say(store, scan.plan, "scan", progress.fraction)
            if not is_owned(collector):  # it was cancelled at this very moment
                forget(store, f"{BOOTSTRAPS}{scan.plan.scan.table.table_id}")

    collectors = [scan.collector for scan in scans]
    with (
        reported(collectors, this.state, store, application.run, say_progress),
        Publisher(this) as publisher,
    ):
        if any(scan.must_read for scan in scans):
            read_all(this, scans, spark.session().sparkContext, outcome, publisher)
        for scan in scans:
            publisher.finish(scan)
        publisher.note(outcome)
    return in_all(outcome, last=False)


def open_table(this: Run, plan: BootstrapPlan) -> TableScan:
    """Begin or continue the bootstrap of a table, and become its owner; the errors are those of :func:`run`."""
    config, store, state = this.application.config, this.application.store, this.state
    found = state.find(plan.bootstrap.keyspace, plan.bootstrap.table)
    check_schema(this.shared, plan, is_copied=found is not None and found.state in COPIED)
    latest = check_not_cancelled(found, plan)
    begin = begin_pass(store, plan, latest, lambda: check_scanning(state.find(latest.keyspace, latest.table), plan))
    wait_until_free(state, plan.bootstrap, this.application.run)
    ledger = state.take_over(plan.bootstrap.id, this.owner)
    collector = Collector(ledger, plan.scan.selection.ranges, plan.estimated_rows, config.scan.max_failed_ranges)
    task = in_snapshots = None
    if collector.left and latest.state != COMPLETED:
        if plan.mode == SSTABLE:
            check_ring(store, plan, this.shared.ring(plan.scan.table.keyspace, time.monotonic()))
            in_snapshots = as_recorded(store, this.shared.table(plan.scan.table.keyspace, plan.scan.table.name))
        schemas = put_schemas(store, config, sync_table(store, config, plan.scan.table), plan.topic)
        task = TableTask(plan, ledger.attempt, pass_folder(begin), schemas)
    return TableScan(plan, latest, begin, collector, task, plan.scan.ring_digest, in_snapshots)


class Publisher:
    """Publishes tables in some threads, each once nothing more is read of it.

    It is a context: at its end all threads have ended.
    """

    def __init__(self, this: Run) -> None:
        self._this = this
        self._pool = ThreadPoolExecutor(TABLES_AT_ONCE, thread_name_prefix="publish")
        self._futures: dict[TableName, Future[tuple[Report, ExitCode]]] = {}

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def finish(self, scan: TableScan) -> None:
        """Begin to publish a table, unless that was begun, or the table has failed."""
        if not scan.collector.over:
            scan.collector.over = True
            scan.seconds = time.monotonic() - scan.began_s
            self._futures[scan.name] = self._pool.submit(self._finish, scan)

    def _finish(self, scan: TableScan) -> tuple[Report, ExitCode]:
        code = ExitCode.FATAL
        try:
            report, code = finish_table(self._this, scan)
            return report, code
        finally:
            if code:
                scan.collector.fail()

    def note(self, outcome: Outcome) -> None:
        """Wait for all tables, and note what became of them."""
        for name, future in self._futures.items():
            try:
                outcome.done(name, *future.result())
            except Exception as error:
                check_not_replaced(self._this.application.run, error)
                outcome.failed(name, error)


def finish_table(this: Run, scan: TableScan) -> tuple[Report, ExitCode]:
    """Publish a table of which everything is committed; the errors are those of :func:`run`."""
    config, store, plan, collector = this.application.config, this.application.store, scan.plan, scan.collector

    def may_publish() -> None:
        collector.ledger.check()
        this.state.publishing(plan.bootstrap)

    check_schema(this.shared, plan, is_copied=scan.latest.state in COPIED)
    report = describe(collector, scan.seconds, scan.died)
    if collector.left:
        return report, ExitCode.COMPLETED_WITH_ERRORS
    if scan.latest.state != COMPLETED and scan.begin:
        # Read after all that was copied: a change meanwhile shows.
        now = this.shared.ring(plan.scan.table.keyspace, time.monotonic()).digest
        ring = now if now == plan.scan.ring_digest else ""
        publish(store, config, plan, may_publish, collector.ranges, scan.begin, ring)
        if this.shared.known is not None:
            # Its changes must not wait until all other tables are copied, too.
            report |= cut_over(store, config, plan)
    return {**report, **describe_published(store, plan, collector.ranges, scan.begin)}, ExitCode.OK


def read_all(this: Run, scans: Sequence[TableScan], spark_context: Any, outcome: Outcome, publisher: Publisher) -> None:
    """Read in waves until nothing is left of any table, or nothing more can be read."""
    application, config = this.application, this.application.config
    by_id = {scan.plan.bootstrap.id: scan for scan in scans}
    calls = handlers(
        [scan.collector for scan in scans], lambda collector: publisher.finish(by_id[collector.ledger.bootstrap_id])
    )
    with ControlServer(host=driver_host(spark_context), handlers=calls) as control:
        control.watch_limits(application.store, application.run, cluster_limits(config))
        task = BootstrapTask(config, control.address)
        for wave in itertools.count():
            for scan in scans:
                if not scan.must_read:  # all of it is there, or it has failed, and must not seem alive
                    publisher.finish(scan)
            wanted = next_to_read(scans)
            if not wanted:
                return
            if all(scan.idle for scan in wanted):
                time.sleep(IDLE_PAUSE_S)
            _read_wave(this, wave, wanted, task, spark_context, outcome)


def next_to_read(scans: Sequence[TableScan]) -> list[TableScan]:
    """Return the tables of the next wave: all of which no worker has died; then each other alone, by turns."""
    wanted = [scan for scan in scans if scan.must_read]
    suspects = sorted((scan for scan in wanted if scan.died), key=lambda scan: scan.idle)
    return [scan for scan in wanted if not scan.died] or suspects[:1]


def _read_wave(
    this: Run, wave: int, wanted: Sequence[TableScan], task: BootstrapTask, spark_context: Any, outcome: Outcome
) -> None:
    """Read once what is left of some tables, in one Spark job. Some may have to wait for the next wave.

    :raises Exception: Spark has ended; or a Spark task has failed, and the run is for one table
    """
    left = {scan.name: scan.collector.left for scan in wanted}
    wanted, sized = _plan(this, wave, wanted, left, spark_context.defaultParallelism, outcome)
    reason = "a Spark worker has died that was reading it"
    try:
        if groups := together(sized, spark_context.defaultParallelism):
            spark_context.parallelize(groups, len(groups)).foreachPartition(task)
    except Exception as error:
        if spark_is_gone(spark_context) or (outcome.alone and wanted[0].collector.fatal is None):
            raise
        # A worker has died, maybe for one table's rows. What is left of all is tried again, as after unread ranges.
        reason = f"{reason}: {plain(error)}"
        print(f"ringsync: warning: a Spark task failed: {plain(error)}", flush=True)
    ends = {scan.name: scan.collector.end_wave() for scan in wanted}
    # If nothing at all was begun, Spark is at fault: this must not go on for ever.
    all_count = len(wanted) == 1 or not any(was_begun for was_begun, _ in ends.values())
    for scan in wanted:
        was_begun, has_died = ends[scan.name]
        scan.died = reason if has_died else scan.died
        if not scan.collector.over:
            _settle(this, scan, outcome)
        if scan.collector.left != left[scan.name]:
            scan.idle = 0
        elif all_count or (was_begun and not has_died):
            scan.idle += 1


def _plan(
    this: Run,
    wave: int,
    wanted: Sequence[TableScan],
    left: Mapping[TableName, TokenSet],
    parallelism: int,
    outcome: Outcome,
) -> tuple[list[TableScan], list[tuple[float, Piece]]]:
    """Cut what is left of tables into pieces, some tables at once, until the wave is large enough.

    :returns: the tables of the wave, also those that have failed; and its pieces, each with its bytes
    """
    splits = max(this.application.config.scan.min_splits, 2 * parallelism)
    least, began_s = math.ceil(splits / len(wanted)), time.monotonic()
    by_name = {scan.name: scan for scan in wanted}

    def planned(name: TableName) -> tuple[list[Piece], float]:
        try:
            return plan_pieces(this, wave, by_name[name], left[name], least, began_s)
        except Exception:
            by_name[name].collector.fail()
            raise

    begun: list[TableScan] = []
    sized: list[tuple[float, Piece]] = []
    for start in range(0, len(wanted), TABLES_AT_ONCE):
        begun += wanted[start : start + TABLES_AT_ONCE]
        names = [scan.name for scan in begun[start:]]
        for name, (pieces, size) in attempts(this.application.run, names, planned, outcome):
            by_name[name].collector.failed.clear()
            by_name[name].collector.begin(piece.name for piece in pieces)
            sized += [(size / len(pieces), piece) for piece in pieces]
        if sum(piece.split.count for _, piece in sized) >= MOST_IN_A_WAVE:
            break
    return begun, sized


def _settle(this: Run, scan: TableScan, outcome: Outcome) -> None:
    """After a wave, note if a table has failed."""
    collector = scan.collector
    try:
        if collector.fatal is not None:
            check_not_replaced(this.application.run, collector.fatal)
        # A change of the schema is the cause of most other errors.
        check_schema(this.shared, scan.plan)
        if collector.fatal is not None:
            raise collector.fatal
    except Exception as error:
        check_not_replaced(this.application.run, error)
        collector.fail()
        outcome.failed(scan.name, error)


def plan_pieces(
    this: Run, wave: int, scan: TableScan, left: TokenSet, least: int, moment_s: float
) -> tuple[list[Piece], float]:
    """Cut what is left of a table into pieces for tasks, by the present ring.

    :param least: least number of splits
    :param moment_s: begin of the wave, on the monotonic clock
    :returns: the pieces, and the estimated bytes of their result pages, or the bytes of SSTables
    :raises StepError: nodes have joined or left, and the configuration wants to stop then
    """
    rows: Sequence[RowsOfSplit]
    if scan.in_snapshots is not None:
        store, most = this.application.store, scan.plan.splits or this.application.config.scan.max_splits
        rows, size = cut_snapshots(store, scan.plan, scan.in_snapshots, left, scan.plan.splits or least, most)
    else:
        splits, digest, size = plan_wave(this, scan.plan, scan.collector, left, least, moment_s)
        if digest != scan.ring_digest:
            _topology_changed(this.application.config, scan.ring_digest, digest)
            scan.ring_digest = digest
        rows = [SelectedRows(split_to_json(split)) for split in splits]
    assert scan.task is not None, "a table of which nothing is left is not read"
    return [Piece(scan.task, f"{wave:03d}-{number:05d}", one) for number, one in enumerate(rows)], size


def plan_wave(
    this: Run, plan: BootstrapPlan, collector: Collector, left: TokenSet, least: int, moment_s: float
) -> tuple[tuple[Split, ...], str, float]:
    """Cut what is left into splits by the best estimate of the table's size; failed ranges get splits of their own.

    :returns: the splits, the digest of the ring that they were cut for, and the estimated bytes of what is left
    """
    config, shared = this.application.config, this.shared
    size, part = collector.estimate()
    whole = round(size / part) if part >= TRUSTED_PART else plan.estimated_bytes
    failed = intersection(left, collector.failed)
    minimum = plan.splits or least
    if plan.splits:
        config = config.model_copy(update={"scan": config.scan.model_copy(update={"max_splits": plan.splits})})
    ring, datacenter = shared.ring(plan.scan.table.keyspace, moment_s), shared.datacenter
    splits: list[Split] = []
    for ranges, number in ((subtract(left, failed), minimum), (failed, len(failed))):
        if ranges:
            estimate = SizeEstimate(0, whole)
            splits += cut(ring, datacenter, config, plan.scan, ranges, estimate, minimum=number).splits
    return tuple(splits), ring.digest, whole * fraction(left)


def _topology_changed(config: Config, before: str, now: str) -> None:
    """:raises StepError: nodes have joined or left, and the configuration wants to stop then."""
    if config.scan.on_topology_change == "fail":
        raise StepError(
            f"nodes have joined or left since the bootstrap was planned (ring {before[:12]} is {now[:12]} now) and "
            "scan.on_topology_change is fail: run again once the ring has settled; what was read is kept"
        )
    print(f"ringsync: the ring has changed ({before[:12]} is {now[:12]} now): the rest is planned anew", flush=True)


def check_schema(shared: Shared, plan: BootstrapPlan, *, is_copied: bool = False) -> None:
    """Check that the table still is what the plan says.

    :param is_copied: whether this was checked after all was copied: the rows fit the plan, whatever is altered since
    :raises StepError: it is not
    """
    planned = plan.scan.table
    now = shared.table(planned.keyspace, planned.name)
    columns = {column.name for column in now.columns}
    wanted = [column.name for column in planned.columns]
    if is_copied:
        same = now.table_id == planned.table_id
    elif plan.scan.selection.columns is None:
        same = now.digest == planned.digest
    else:
        same = columns >= set(wanted) and now.only(wanted).digest == planned.digest
    if not same:
        raise StepError(
            f"the schema of {planned.full_name} changed since the bootstrap was planned: trigger bootstrap_table again"
        )


def describe(collector: Collector, seconds: float, died: str = "") -> Report:
    """Return the report of what was read, by this run and by those before it.

    :param died: how a worker has died that was reading the table; empty: none has
    :raises StepError: rows of this run are unaccounted for
    """
    ranges, ledger = collector.ranges, collector.ledger
    read, committed = collector.rows_read, collector.rows_committed
    recorded = sum(done.rows for done in ranges if done.attempt == ledger.attempt)
    if committed != recorded:
        raise StepError(
            f"the counts do not reconcile: {read} rows read, {committed} committed by tasks, "
            f"{read - committed} discarded, {recorded} recorded in the ledger"
        )
    report = {
        "bootstrap": ledger.bootstrap_id,
        "attempt": ledger.attempt,
        "ranges": len(ranges),
        "rows": sum(done.rows for done in ranges),
        "rows_read": read,
        "rows_committed": committed,
        "rows_discarded": read - committed,
        "rows_of_runs_before": sum(done.rows for done in ranges) - recorded,
        "cells": sum(done.cells for done in ranges),
        "pages": sum(done.pages for done in ranges),
        "bytes_read": sum(done.bytes for done in ranges),
        "seconds_scanning": round(seconds, 3),
        "rows_per_s": round(read / seconds) if seconds else None,
        "left": [[part.start, part.end] for part in collector.left],
        "failed_ranges": [[r.start, r.end, reason] for r, reason in sorted(collector.failed.items())],
    }
    if collector.left:
        found = collector.failed
        first = found[min(found)] if found else f"{collector.left[0]} is the first{died and '; '}{died}"
        report["error"] = (
            f"{len(collector.left)} token ranges could not be read: {first}. "
            "Nothing was published; what was read is kept: mend the cause and run bootstrap_table again"
        )
    return report
