"""The scan of a table by token ranges into the replica and the change stream (docs/bootstrap.md).

The source is read once. Tasks write files and have each range committed in the ledger. What is left of the ring, or
could not be read, is planned anew and read in the next wave, until nothing is left. So a killed run, a split that was
too large, a range that failed, and a changed ring are one case: tokens that are in no committed range. At the end the
files of all committed ranges become the replica, in one commit, and a pass of the stream; until then they are hidden.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from typing import Any

from ringsync.cluster.cluster import read_ring
from ringsync.cluster.control import ControlServer
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import connect
from ringsync.config import Config
from ringsync.ledger.passes import pass_folder
from ringsync.progress import Progress
from ringsync.ring.splits import SizeEstimate, Split
from ringsync.ring.tokens import TokenSet, intersection, subtract
from ringsync.sources.scan.plan import split_to_json
from ringsync.sources.scan.planning import cut
from ringsync.state.bootstrap import COMPLETED, BootstrapState, RangeLedger
from ringsync.steps.application import Application, ExitCode, Report, StepError, driver_host
from ringsync.steps.bootstrap.collect import Collector, reported
from ringsync.steps.bootstrap.plan import BootstrapPlan, load_plan
from ringsync.steps.bootstrap.prepare import begin_pass, check_not_cancelled, check_scanning, say, wait_until_free
from ringsync.steps.bootstrap.publish import describe_published, publish
from ringsync.steps.bootstrap.task import BootstrapTask, SplitResult
from ringsync.steps.passes.follow_ups import put_schemas
from ringsync.steps.sync_plan import sync_table
from ringsync.wiring import cluster_limits, cluster_settings

IDLE_WAVES = 3
"""After so many waves in a row that read no range, the ranges that are left count as unreadable."""

IDLE_PAUSE_S = 5.0
"""Pause before what failed is tried again."""

TRUSTED_PART = 0.01
"""Part of the ring: once so much has been read, its size is a better estimate of the rest than a forecast."""


def run(application: Application) -> tuple[Report, ExitCode]:
    """Scan, write, publish.

    :returns: exit code 1 when some ranges could not be read; nothing is published then, and all others are kept
    :raises StepError: the schema changed since the plan or while scanning; the counts do not reconcile; another run
        works on this bootstrap
    :raises StateError: the ledger cannot be used; its subclass LostOwnershipError when another run has taken over
    """
    from ringsync.replica.session import spark_session

    config, store = application.config, application.store
    plan = load_plan(store, application.run)
    check_schema(config, plan)
    session = connect(cluster_settings(config))
    state = BootstrapState(session, config.state.keyspace)
    latest = check_not_cancelled(state.find(plan.bootstrap.keyspace, plan.bootstrap.table), plan)
    begin = begin_pass(store, plan, latest, lambda: check_scanning(state.find(latest.keyspace, latest.table), plan))
    wait_until_free(state, plan.bootstrap, application.run)
    ledger = state.take_over(plan.bootstrap.id, f"{application.run} on {socket.gethostname()}, process {os.getpid()}")
    collector = Collector(ledger, plan.scan.selection.ranges, plan.estimated_rows, config.scan.max_failed_ranges)
    started = time.monotonic()
    results: list[SplitResult] = []

    def may_publish() -> None:
        ledger.check()
        state.publishing(plan.bootstrap)

    def say_progress(progress: Progress) -> None:
        if latest.state != COMPLETED:
            say(store, plan, "scan", progress.fraction)

    with reported(collector, ledger, store, application.run, say_progress):
        if collector.left and latest.state != COMPLETED:
            spark = spark_session(f"bootstrap_scan {plan.scan.table.full_name} {plan.run}")
            results = read_all(application, plan, collector, ledger, spark.sparkContext, pass_folder(begin))
        seconds = time.monotonic() - started
        check_schema(config, plan)
        report = describe(collector, ledger, results, seconds)
        if collector.left:
            return report, ExitCode.COMPLETED_WITH_ERRORS
        if latest.state != COMPLETED and begin:
            now = read_ring(session, plan.scan.table.keyspace).digest
            ring = now if now == plan.scan.ring_digest else ""
            publish(store, config, plan, may_publish, collector.ranges, begin, ring)
        report |= describe_published(store, plan, collector.ranges, begin)
    return report, ExitCode.OK


def read_all(
    application: Application,
    plan: BootstrapPlan,
    collector: Collector,
    ledger: RangeLedger,
    spark_context: Any,
    folder: str,
) -> list[SplitResult]:
    """Read in waves until nothing is left or nothing more can be read.

    :param folder: the stream's folder for the rows
    """
    config, store = application.config, application.store
    results: list[SplitResult] = []
    idle = 0
    ring_digest = plan.scan.ring_digest
    with ControlServer(host=driver_host(spark_context), handlers=collector.handlers) as control:
        control.watch_limits(store, application.run, cluster_limits(config))
        schemas = put_schemas(store, config, sync_table(store, config, plan.scan.table), plan.topic)
        task = BootstrapTask(config, plan, control.address, ledger.attempt, folder, schemas)
        for wave in itertools.count():
            left = collector.left
            if not left or idle == IDLE_WAVES:
                return results
            if idle:
                time.sleep(IDLE_PAUSE_S)
            splits, digest = plan_wave(config, plan, collector, left, spark_context.defaultParallelism)
            if digest != ring_digest:
                _topology_changed(config, ring_digest, digest)
                ring_digest = digest
            collector.failed.clear()
            results += _read_wave(spark_context, task, wave, splits, collector)
            check_schema(config, plan)
            idle = idle + 1 if collector.left == left else 0
    return results


def plan_wave(
    config: Config, plan: BootstrapPlan, collector: Collector, left: TokenSet, parallelism: int
) -> tuple[tuple[Split, ...], str]:
    """Cut what is left into splits by the best estimate of the table's size; failed ranges get splits of their own.

    :param parallelism: tasks that run at the same time
    :returns: the splits, and the digest of the ring that they were cut for
    """
    session = connect(cluster_settings(config))
    size, part = collector.estimate()
    whole = round(size / part) if part >= TRUSTED_PART else plan.estimated_bytes
    failed = intersection(left, collector.failed)
    minimum = plan.splits or max(config.scan.min_splits, 2 * parallelism)
    if plan.splits:
        config = config.model_copy(update={"scan": config.scan.model_copy(update={"max_splits": plan.splits})})
    splits: list[Split] = []
    digest = ""
    for ranges, least in ((subtract(left, failed), minimum), (failed, len(failed))):
        if ranges:
            scan = cut(session, config, plan.scan, ranges, SizeEstimate(0, whole), minimum=least)
            splits += scan.splits
            digest = scan.ring_digest
    return tuple(splits), digest


def _read_wave(
    spark_context: Any, task: BootstrapTask, wave: int, splits: tuple[Split, ...], collector: Collector
) -> list[SplitResult]:
    described = [(f"{wave:03d}-{number:05d}", split_to_json(split)) for number, split in enumerate(splits)]
    try:
        return list(spark_context.parallelize(described, len(described)).mapPartitions(task).collect())
    except Exception:
        if collector.fatal:
            raise collector.fatal from None
        raise
    finally:
        collector.forget_readers()


def _topology_changed(config: Config, before: str, now: str) -> None:
    """:raises StepError: nodes have joined or left, and the configuration wants to stop then."""
    if config.scan.on_topology_change == "fail":
        raise StepError(
            f"nodes have joined or left since the bootstrap was planned (ring {before[:12]} is {now[:12]} now) and "
            "scan.on_topology_change is fail: run again once the ring has settled; what was read is kept"
        )
    print(f"ringsync: the ring has changed ({before[:12]} is {now[:12]} now): the rest is planned anew", flush=True)


def check_schema(config: Config, plan: BootstrapPlan) -> None:
    """Check that the table still is what the plan says.

    :raises StepError: it is not
    """
    planned = plan.scan.table
    now = read_table(connect(cluster_settings(config)), planned.keyspace, planned.name)
    columns = {column.name for column in now.columns}
    wanted = [column.name for column in planned.columns]
    same = (
        now.digest == planned.digest
        if plan.scan.selection.columns is None
        else (columns >= set(wanted) and now.only(wanted).digest == planned.digest)
    )
    if not same:
        raise StepError(
            f"the schema of {planned.full_name} changed since the bootstrap was planned: trigger bootstrap_table again"
        )


def describe(collector: Collector, ledger: RangeLedger, results: list[SplitResult], seconds: float) -> Report:
    """Return the report of what was read, by this run and by those before it.

    :raises StepError: rows of this run are unaccounted for
    """
    ranges = collector.ranges
    read = sum(split.rows_read for split in results)
    committed = sum(split.rows_committed for split in results)
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
        first = collector.failed[min(collector.failed)] if collector.failed else f"{collector.left[0]} is the first"
        report["error"] = (
            f"{len(collector.left)} token ranges could not be read: {first}. "
            "Nothing was published; what was read is kept: mend the cause and run bootstrap_table again"
        )
    return report
