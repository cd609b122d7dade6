"""The comparison of source and replica, cell by cell, and the repair of differences (docs/replica.md).

Both sides are seen as of one moment, now: expired cells are gone from both. Each token range is summed up to a checksum
on both sides, those of several tables in one Spark job; only ranges whose checksums differ are read again and compared
row by row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ringsync.cluster.session import connect
from ringsync.cluster.shared import KnownTables, Shared, TableName, read_known_tables
from ringsync.config import Config
from ringsync.ledger.gaps import note_verified
from ringsync.ledger.table_versions import as_recorded, version_of
from ringsync.ring.tokens import WHOLE_RING
from ringsync.sources.scan.plan import ScanPlan, Selection, within
from ringsync.sources.scan.planning import make_scan_plan
from ringsync.state.bootstrap import BootstrapState
from ringsync.status import Status, read_statuses
from ringsync.steps.application import (
    Application,
    ExitCode,
    Report,
    StepError,
    TaskFailedError,
    plain,
    spark_is_gone,
)
from ringsync.steps.replica.follow_schema import followed_state
from ringsync.steps.replica.session import check_session
from ringsync.steps.tables import (
    BackgroundSpark,
    Failure,
    Outcome,
    attempts,
    chosen,
    failed_before,
    halved,
    in_all,
    text_of,
)
from ringsync.storage import delta_options, spark_options
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_settings

if TYPE_CHECKING:
    from ringsync.replica.changes import ReplicaState
    from ringsync.schema.table import TableSchema
    from ringsync.steps.replica.checksums import Sides

Ranges = Sequence[tuple[int, int]]

TABLES_OF_A_JOB = 100
"""Most tables that are summed up in one Spark job. All of them are seen as of one moment, which must not be long ago
when the last of them is read: servers forget what expired since."""

REPAIRS = 5
"""How often a repair is begun while merges are faster."""


@dataclass(frozen=True)
class Verified:
    """A table whose replica is compared.

    :ivar table: as its history has it
    :ivar sides: both sides as of the moment of the comparison
    """

    table: TableSchema
    sides: Sides


def run(application: Application, clock: Callable[[], float] = time.time) -> tuple[Report, ExitCode]:
    """Verify, and repair if asked. In a run for several tables each fails for itself.

    :returns: exit code 1 when differences are left
    :raises ConfigError: Spark lacks a jar to reach the object store
    :raises StepError: there is no replica
    :raises ScanError: the source could not be read; for a repair of a table that is followed, from all replicas
    :raises ReplicaMismatchError: the replica is of another table id, or cannot follow the table's schema yet
    """
    config = application.config
    check_session(application)
    session = connect(cluster_settings(config))
    outcome, known = Outcome(alone=not application.patterns), None
    more: Report = {}
    if outcome.alone:
        tables = [application.one_table]
    else:
        known = read_known_tables(session, [config.state.keyspace])
        tables, more = tables_of(application, BootstrapState(session, config.state.keyspace), known, outcome)
    shared = Shared(session, known)
    title = f"{len(tables)} tables" if application.patterns else ".".join(tables[0])
    store_options = spark_options(**config.store.model_dump())
    title = f"replica_verify {title} {application.run}"
    spark = BackgroundSpark(title, begin=not outcome.alone and bool(tables), store=store_options)
    for some in (tables[start : start + TABLES_OF_A_JOB] for start in range(0, len(tables), TABLES_OF_A_JOB)):
        now, statuses = int(clock()), read_statuses(application.store)
        work = partial(open_table, application, shared, now, statuses)
        opened = [verified for _, verified in attempts(application.run, some, work, outcome)]
        if opened:
            compare_tables(application, spark.session(), opened, outcome, clock)
    report, code = in_all(outcome, last=True)
    return {**report, **more}, code


def tables_of(
    application: Application, state: BootstrapState, known: KnownTables, outcome: Outcome
) -> tuple[list[TableName], dict[str, Any]]:
    """Find the tables of a run for several: those of its bootstrap, or all that are named and have a replica.

    :returns: the tables, and more for the report: the tables that other runs have completed since they failed in this
        one; or those that a pattern matches, and that have no replica
    """
    from ringsync.steps.bootstrap.plan import completed_since, plans_of

    store = application.store
    outcome.failures = failed_before(application)
    if (plans := plans_of(store, application.run)) or outcome.failures:
        since = completed_since(application, state, outcome)
        tables = [name for name in dict.fromkeys((*plans, *since)) if outcome.goes_on(name)]
        return tables, {"completed_since": [*map(text_of, since)]}
    tables, outcome.failures = chosen(application.patterns, known)
    keys = {stat.key.split("/base/")[0] for stat in store.list("replica/") if "/base/_delta_log/" in stat.key}
    named = {pattern.name for pattern in application.patterns if pattern.is_name}
    without = [name for name in tables if name not in named and f"replica/{'/'.join(name)}" not in keys]
    for pattern in application.patterns:
        matched = [name for name in tables if pattern.matches(*name)]
        if matched and not pattern.is_name and all(name in without for name in matched):
            reason = f"none of the {len(matched)} tables that match {pattern} has a replica in {store.url}"
            outcome.failures[str(pattern)] = Failure(reason, int(ExitCode.FATAL))
    return [name for name in tables if name not in without], {"without_replica": [".".join(name) for name in without]}


def open_table(
    application: Application, shared: Shared, now: int, statuses: Mapping[str, Status], name: TableName
) -> Verified:
    """Find out how both sides of a table are read; the errors are those of :func:`run`.

    :param now: moment of the comparison, s since the epoch
    :param statuses: of the loops
    """
    from ringsync.replica.base import base_folder, own_properties
    from ringsync.replica.delta_log import read_snapshot
    from ringsync.steps.replica.checksums import Sides

    config, store = application.config, application.store
    folder = base_folder(*name)
    properties = own_properties(read_snapshot(store, folder).metadata.get("configuration") or {})
    if not properties:
        raise StepError(f"{store.uri(folder)}: there is no replica of {'.'.join(name)}: trigger bootstrap_table first")
    selection = Selection.from_json(properties["selection"])
    plan = make_scan_plan(shared.session, config, *name, now=now, selection=selection, shared=shared)
    # Recorded before it is used: the history gives columns their names in the lake.
    table = as_recorded(store, plan.table) if plan.table.is_selection else version_of(store, plan.table).table
    return Verified(table, Sides(replace(plan, table=table), state_of(application, table, statuses)))


def state_of(
    application: Application, table: TableSchema, statuses: Mapping[str, Status] | None = None
) -> ReplicaState:
    """Read the state of a replica.

    :param statuses: of the loops, read before; None: they are read now
    """
    config, store = application.config, application.store
    # Read first: the replica has all of this by then.
    complete_until_us = synced_until_us(read_statuses(store) if statuses is None else statuses, table.table_id)
    present = followed_state(store, table, delta_options(**config.store.model_dump()))
    assert present is not None, f"the replica of {table.full_name} was there a moment ago"
    return replace(present, as_of_us=max(present.as_of_us, complete_until_us))


def compare_tables(
    application: Application, spark: Any, opened: Sequence[Verified], outcome: Outcome, clock: Callable[[], float]
) -> None:
    """Compare some tables, and repair them if asked; note what became of each."""
    from ringsync.replica.compare import differing_ranges
    from ringsync.steps.replica.checksums import SmallTable, checksums, compared_rows, is_small

    context, run = spark.sparkContext, f"verify-{application.run}"
    edges, limit = boundaries(application.config), application.config.verify.max_listed_differences

    def compared(some: Sequence[SmallTable]) -> Sequence[Any]:
        found = compared_rows(context, application, run, some)
        return [found[one.number] for one in some]

    is_gone = partial(spark_is_gone, context)
    sums: list[Any] = checksums(context, application, run, [one.sides for one in opened], edges, is_gone)
    small = [
        SmallTable(number, verified.sides, ranges, limit)
        for number, (verified, of) in enumerate(zip(opened, sums, strict=True))
        if isinstance(of, tuple)
        and is_small(verified.sides, sum(of[0]["rows"].to_pylist()))
        and (ranges := differing_ranges(of[0], of[1], edges))
    ]
    # A failure of the job, maybe for want of memory, is none of the table: Spark compares what does not fit.
    lines = {
        one.number: found
        for one, found in zip(small, halved(compared, small, is_gone), strict=True)
        if isinstance(found, TaskFailedError) or not isinstance(found, Exception)
    }
    for number, verified in enumerate(opened):
        name = verified.table.keyspace, verified.table.name
        try:
            for result in (sums[number], lines.get(number)):
                if isinstance(result, Exception):
                    raise result if outcome.alone else as_own(result)
            outcome.done(name, *compare_table(application, spark, verified, sums[number], lines.get(number), clock))
        except Exception as error:
            outcome.failed(name, error)


def as_own(error: Exception) -> StepError:
    """Return the failure of one of several tables: its own error, or that of a Spark job for this table alone."""
    if isinstance(error, StepError):
        return error
    reason = f"the Spark job that compares only this table fails, maybe for want of memory: {plain(error)}"
    return TaskFailedError(reason, ExitCode.CRASHED)


def compare_table(
    application: Application, spark: Any, verified: Verified, sums: Any, lines: Any, clock: Callable[[], float]
) -> tuple[Report, ExitCode]:
    """Compare the rows of the ranges whose checksums differ, and repair them if asked.

    :param sums: pair of the checksums of source and replica
    :param lines: what the comparison of the rows has found (:func:`ringsync.replica.compare.compare_rows`); None: the
        rows do not fit into a task's memory, and Spark compares them, or there is nothing to compare
    """
    from ringsync.replica.base import replica_folder
    from ringsync.replica.changes import check_base, outdate_merges
    from ringsync.replica.compare import Comparison, compare_ranges, comparison, differing_ranges, repair
    from ringsync.replica.session import limit_batches
    from ringsync.replica.table import ReplicaTable, token_condition
    from ringsync.replica.view import as_selected, live
    from ringsync.sources.cassandra_table import CassandraTable
    from ringsync.steps.replica.checksums import Sides, checksums, slack_of

    config, store, table, plan = application.config, application.store, verified.table, verified.sides.plan
    replica = ReplicaTable(store.uri(replica_folder(table.keyspace, table.name)), table)
    edges = boundaries(config)

    def source_images(ranges: Ranges, of: ScanPlan, level: str = plan.consistency_level) -> Any:
        spark.dataSource.register(CassandraTable)
        reader = spark.read.format("cassandra_table").option("config", application.config_path)
        asked = replace(within(of, ranges), consistency_level=level)
        return reader.option("plan", asked.to_json()).load()

    def replica_images(seen: ReplicaState, ranges: Ranges, of: ScanPlan) -> Any:
        limit_batches(spark, seen.base_rows + seen.changed_rows, seen.base_bytes + seen.changed_bytes)
        # The condition comes first: otherwise all rows would go through the functions in Python.
        return live(replica.images_at(spark, seen).where(token_condition(ranges)), table, of.now)

    def compare(seen: ReplicaState, sums: tuple[Any, Any], of: ScanPlan = plan) -> Comparison:
        return compare_ranges(
            *sums,
            lambda ranges: as_selected(source_images(ranges, of), table, of.now),
            lambda ranges: replica_images(seen, ranges, of),
            edges,
            table,
            changed_after_us=seen.as_of_us,
            limit=config.verify.max_listed_differences,
            slack=slack_of(of),
        )

    seen = verified.sides.seen
    if lines is None:
        found = compare(seen, sums)
    else:
        limit = config.verify.max_listed_differences
        source_sums, replica_sums = sums
        ranges = differing_ranges(source_sums, replica_sums, edges)
        found = comparison(source_sums, replica_sums, ranges, [lines], limit)
    if not plan.exact_expiry and not found.is_equal:
        # What has expired between the moment and its reading is no difference: few ranges are read in no time.
        found = compare(seen, sums, replace(plan, now=int(clock())))
    report = {**describe(found, plan), "replica_pass": seen.applied}
    if application.options.repair and not found.is_equal:
        level, first, differing = repair_level(store, plan), seen, found.differing_ranges

        def correct() -> Any:
            return repair(
                replica,
                source_images(differing, plan, level),
                differing,
                up_to_pass=state_of(application, table).applied,
                properties={"run_id": application.run},
                check=lambda: check_base(store, table, first),
            )

        written = again_after_conflicts(correct)
        outdate_merges(store, table, int(clock() * 1000))
        now = state_of(application, table)
        (again,) = checksums(spark.sparkContext, application, f"verify-{application.run}", [Sides(plan, now)], edges)
        if isinstance(again, Exception):
            raise again
        found = compare(now, again)
        report = {
            **describe(found, plan),
            "before_repair": report,
            "repair": {**asdict(written), "consistency_level": level},
        }
    if found.is_equal:
        # Later rows were not compared: they may be on their way.
        note_verified(store, table.table_id, min(int(plan.now * 1000), seen.as_of_us // 1000))
    return report, ExitCode.OK if found.is_equal else ExitCode.COMPLETED_WITH_ERRORS


def again_after_conflicts(repair: Callable[[], Any]) -> Any:
    """Repair, and again if a merge has written to the same files meanwhile.

    :raises StepError: merges were faster each time
    """
    from ringsync.replica.table import CONFLICTS

    for _ in range(REPAIRS):
        try:
            return repair()
        except CONFLICTS as error:
            print(f"ringsync: a merge was faster, and the repair begins anew: {error}", flush=True)
    raise StepError(f"{REPAIRS} times a merge was faster than the repair: repair again when no merge runs")


def repair_level(store: ObjectStore, plan: ScanPlan) -> str:
    """Return the consistency level of a repair's reads: ALL for a table that is followed.

    A row that was published is in the replica, but maybe only one node has it yet. A repair that does not read from
    this node would remove the row for ever: the other nodes get copies later, but these count as published before.
    """
    published = store.list(f"sync/{plan.table.table_id}/published/")
    return "ALL" if published else plan.consistency_level


def synced_until_us(statuses: Mapping[str, Status], table_id: str) -> int:
    """Return the moment until which the sync has brought all rows but late ones to a replica, µs since the epoch.

    Without it, any difference written after the bootstrap would count as a change that is on its way.

    :returns: 0: unknown
    """
    tables = statuses.get("bucket_close/close", {}).get("tables", {})
    moments = [table.get("complete_until_ms") for table in tables.values() if table["table_id"] == table_id]
    return max((moment * 1000 for moment in moments if moment), default=0)


def boundaries(config: Config) -> list[int]:
    """Return the bounds of ``verify.ranges`` equal token ranges over the whole ring."""
    ranges = WHOLE_RING.split(config.verify.ranges)
    return [ranges[0].start, *(token_range.end for token_range in ranges[:-1]), 2**63 - 1]


def describe(found: Any, plan: ScanPlan) -> Report:
    """Return a comparison as the report shows it.

    :param found: :class:`ringsync.replica.compare.Comparison`
    """
    return {
        "consistency_level": plan.consistency_level,
        "ranges": found.ranges,
        "ranges_differing": len(found.differing_ranges),
        "rows": found.source_rows,
        "cells": found.source_cells,
        "replica_rows": found.replica_rows,
        "replica_cells": found.replica_cells,
        "rows_of_differing_ranges": dict(found.rows),
        "differences": sum(found.differences_by_kind.values()),
        "differences_by_kind": dict(found.differences_by_kind),
        "listed": [asdict(difference) for difference in found.differences],
        "times_unknown_for_elements": not plan.element_times,
    }
