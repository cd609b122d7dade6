"""The comparison of source and replica, cell by cell, and the repair of differences (docs/replica.md).

Both sides are seen as of one moment, now: expired cells are gone from both. Each token range is summed up to a checksum
on both sides, those of several tables in one Spark job; only ranges whose checksums differ are read again and compared
row by row. What differs then is looked at again, once the replica has what was logged: no clock tells what is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ringsync.cluster.cluster import read_ring
from ringsync.cluster.levels import permitted_level
from ringsync.cluster.session import connect
from ringsync.cluster.shared import KnownTables, Shared, TableName, read_known_tables
from ringsync.ledger.followed import followed_tables
from ringsync.ledger.gaps import note_verified
from ringsync.ledger.proofs import Examined, due_ranges, get_proof, note_examined, tell_proofs
from ringsync.ledger.table_versions import as_recorded, version_of
from ringsync.replica.folders import base_folder
from ringsync.ring.ranks import ranked
from ringsync.sources.scan.plan import ScanPlan, Selection
from ringsync.sources.scan.planning import make_scan_plan
from ringsync.state.bootstrap import BootstrapState
from ringsync.status import read_status
from ringsync.steps.application import (
    Application,
    ExitCode,
    Report,
    StepError,
    TaskFailedError,
    plain,
)
from ringsync.steps.replica.examine import Examine
from ringsync.steps.replica.follow_schema import followed_state
from ringsync.steps.replica.session import check_session
from ringsync.steps.tables import (
    BackgroundSpark,
    Failure,
    Outcome,
    attempts,
    chosen,
    failed_before,
    in_all,
    text_of,
)
from ringsync.storage import delta_options, spark_options
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_settings

if TYPE_CHECKING:
    from ringsync.replica.changes import ReplicaState
    from ringsync.replica.compare import Comparison
    from ringsync.replica.table import WriteResult
    from ringsync.schema.table import TableSchema
    from ringsync.steps.replica.checksums import Sides

TABLES_OF_A_JOB = 100
"""Most tables that are summed up in one Spark job. All of them are seen as of one moment, which must not be long ago
when the last of them is read: servers forget what expired since."""

SMALL_BYTES = 128 << 20
"""Compressed bytes of a replica up to which all of its token ranges are due each time."""

REPAIRS = 5
"""How often a repair is begun while merges are faster."""


def run(application: Application, clock: Callable[[], float] = time.time) -> tuple[Report, ExitCode]:
    """Verify, and repair if asked. In a run for several tables each fails for itself.

    :returns: exit code 1 when differences are left
    :raises ConfigError: Spark lacks a jar to reach the object store
    :raises StepError: there is no replica
    :raises ClusterError: the source could not be read; for a repair of a table that is followed, from all replicas
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
    with Examine(application, shared, spark.session, clock) as examine:
        for some in (tables[start : start + TABLES_OF_A_JOB] for start in range(0, len(tables), TABLES_OF_A_JOB)):
            work = partial(open_table, application, shared, int(clock()), followed_tables(application.store))
            opened = [sides for _, sides in attempts(application.run, some, work, outcome)]
            if opened:
                compare_tables(application, examine, opened, outcome, clock)
    days = config.replica.verify_days if config.replica.verify_schedule else None
    tell_proofs(application.store, days, int(clock() * 1000))
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
    if is_due(application):
        return due_tables(store, known), {}
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


def due_tables(store: ObjectStore, known: KnownTables) -> list[TableName]:
    """Find the tables that the sync follows, and that have a replica, but for those that are being bootstrapped."""
    followed = followed_tables(store)
    told = (read_status(store, "bucket_close/close") or {}).get("tables", {}).values()
    busy = {one["table_id"] for one in told if one.get("bootstrap")}
    found = [name for name, table in known.tables.items() if table.table_id in followed.keys() - busy]
    return [name for name in found if store.list(f"{base_folder(*name)}/_delta_log/")]


def open_table(application: Application, shared: Shared, now: int, followed: Collection[str], name: TableName) -> Sides:
    """Find out how both sides of a table are read; the errors are those of :func:`run`.

    :param now: moment of the comparison, s since the epoch
    :param followed: ids of the tables that the sync follows
    """
    from ringsync.replica.base import own_properties
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
    seen = state_of(application, table)
    sides = Sides(replace(plan, table=table), seen, table.table_id in followed)
    if is_due(application) and seen.base_bytes + seen.changed_bytes > SMALL_BYTES:
        proof, days = get_proof(store, table.table_id), config.replica.verify_days
        sides = replace(sides, chosen=due_ranges(proof, seen.base, config.verify.ranges, days, now * 1000))
    return sides


def state_of(application: Application, table: TableSchema) -> ReplicaState:
    """Read the state of a replica, after it has followed its table's schema."""
    present = followed_state(application.store, table, delta_options(**application.config.store.model_dump()))
    assert present is not None, f"the replica of {table.full_name} was there a moment ago"
    return present


def compare_tables(
    application: Application, examine: Examine, opened: Sequence[Sides], outcome: Outcome, clock: Callable[[], float]
) -> None:
    """Compare some tables, and repair them if asked; note what became of each."""
    for sides, result in zip(opened, examine(opened), strict=True):
        name = sides.plan.table.keyspace, sides.plan.table.name
        try:
            if isinstance(result, Exception):
                raise result if outcome.alone else as_own(result)
            outcome.done(name, *conclude(application, examine, sides, result, clock))
        except Exception as error:
            outcome.failed(name, error)


def as_own(error: Exception) -> StepError:
    """Return the failure of one of several tables: its own error, or that of a Spark job for this table alone."""
    if isinstance(error, StepError):
        return error
    reason = f"the Spark job that compares only this table fails, maybe for want of memory: {plain(error)}"
    return TaskFailedError(reason, ExitCode.CRASHED)


def conclude(
    application: Application, examine: Examine, sides: Sides, found: Comparison, clock: Callable[[], float]
) -> tuple[Report, ExitCode]:
    """Report what was found of a table, and repair it if asked."""
    from ringsync.replica.changes import outdate_merges

    store, table, plan = application.store, sides.plan.table, sides.plan
    report = {**describe(found, plan), "replica_pass": sides.seen.applied}
    if application.options.repair and not found.is_equal:
        written, level = correct(application, examine, sides, found)
        outdate_merges(store, table, int(clock() * 1000))
        (again,) = examine([replace(sides, seen=state_of(application, table))])
        if isinstance(again, Exception):
            raise again
        found = again
        report = {
            **describe(found, plan),
            "before_repair": report,
            "repair": {**asdict(written), "consistency_level": level},
        }
    proof = note_examined(store, examined(application, sides, found))
    if proof.proved_ms and found.is_equal:
        note_verified(store, table.table_id, proof.proved_ms)
    if not found.is_equal and not found.rows_differing:
        report["error"] = f"{found.rows['not_judged']:,} rows could not be judged: {found.why_not_judged}"
    # A run of what is due has done its work, whatever it has found: the proofs tell it.
    return report, ExitCode.OK if found.is_equal or is_due(application) else ExitCode.COMPLETED_WITH_ERRORS


def examined(application: Application, sides: Sides, found: Comparison) -> Examined:
    """Return what was found of a replica, for its proof."""
    table = sides.plan.table
    now_ms = int(sides.plan.now * 1000)
    return Examined(
        table_id=table.table_id,
        table=text_of((table.keyspace, table.name)),
        base=sides.seen.base,
        count=found.ranges,
        chosen=range(found.ranges) if sides.chosen is None else sides.chosen,
        differing=found.wrong,
        unjudged=found.unjudged | found.late,
        rows_differing=found.rows_differing,
        # A copy that nobody follows shows its own moment only.
        began_ms=now_ms if sides.is_followed else min(now_ms, sides.seen.as_of_us // 1000),
        run=application.run,
        is_part=is_due(application),
        is_followed=sides.is_followed,
    )


def is_due(application: Application) -> bool:
    """Tell whether a run compares what is due, of the tables that the sync follows."""
    return bool(getattr(application.options, "due", False))


def correct(application: Application, examine: Examine, sides: Sides, found: Comparison) -> tuple[WriteResult, str]:
    """Replace the rows of the token ranges that are wrong by the source's.

    :returns: what was written, and the consistency level at which the source was read
    :raises StepError: merges were faster each time
    """
    from ringsync.replica.changes import check_base
    from ringsync.replica.compare import repair
    from ringsync.replica.folders import replica_folder
    from ringsync.replica.table import ReplicaTable

    store, table, plan, first = application.store, sides.plan.table, sides.plan, sides.seen
    replica = ReplicaTable(store.uri(replica_folder(table.keyspace, table.name)), table)
    level = permitted(connect(cluster_settings(application.config)), plan, repair_level(store, plan))

    def write() -> WriteResult:
        return repair(
            replica,
            examine.source_images(sides, found.source_rows, found.wrong_ranges, level),
            found.wrong_ranges,
            up_to_pass=state_of(application, table).applied,
            properties={"run_id": application.run},
            check=lambda: check_base(store, table, first),
        )

    return again_after_conflicts(write), level


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


def permitted(session: Any, plan: ScanPlan, level: str) -> str:
    """Return the level for a repair, or one that is as good if the cluster forbids it.

    :raises GuardrailError: the cluster forbids all of them
    """
    return permitted_level(session, plan.table, level, ranked(read_ring(session, plan.table.keyspace)).hosts)


def describe(found: Comparison, plan: ScanPlan) -> Report:
    """Return a comparison as the report shows it."""
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
        "not_judged": found.why_not_judged,
        "listed": [asdict(difference) for difference in found.differences],
        "times_unknown_for_elements": not plan.element_times,
    }
