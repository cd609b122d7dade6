"""The plan of a bootstrap, decided once by ``prepare`` and read by all steps.

It is ``plans/bootstrap/<run>.json``. In a run for several tables each has its own,
``plans/bootstrap/<run>/<keyspace>.<table>.json``.
"""

from __future__ import annotations

import json
import time
from calendar import timegm
from dataclasses import asdict, dataclass

from ringsync.cql.identifiers import parse_table_pattern, portable_name
from ringsync.ledger.table_versions import versions_of
from ringsync.schema.table import TableSchema
from ringsync.sources.scan.plan import ScanPlan
from ringsync.state.bootstrap import COMPLETED, PUBLISHING, UNFINISHED, Bootstrap, BootstrapState
from ringsync.steps.application import Application, StepError
from ringsync.steps.tables import Outcome, failed_before
from ringsync.storage.port import AlreadyExistsError, ObjectStore, get_json, list_named

TOKEN_RANGE, SSTABLE = "token_range", "sstable"
"""Modes: rows are selected from the cluster, or come from snapshots of its nodes."""


@dataclass(frozen=True)
class BootstrapPlan:
    """What all steps of one run agree on.

    :ivar scan: table and moment; its splits are cut when it is read
    :ivar splits: number of splits that the user asked for; None: by size
    :ivar estimated_rows: estimated rows of the selection; None: unknown
    :ivar estimated_bytes: estimated size of the whole table's result pages; 0: unknown
    :ivar mode: TOKEN_RANGE or SSTABLE
    """

    run: str
    bootstrap: Bootstrap
    scan: ScanPlan
    topic: str
    splits: int | None
    estimated_rows: int | None
    estimated_bytes: int
    mode: str = TOKEN_RANGE


TableName = tuple[str, str]
"""Keyspace and table; None instead: the run is for one table only."""


def find_plan(store: ObjectStore, run: str, table: TableName | None = None) -> BootstrapPlan | None:
    """Return the plan of a run, or of one of its several tables; None: there is none."""
    return _read(store, _key(run, table))


def load_plan(store: ObjectStore, run: str, table: TableName | None = None) -> BootstrapPlan:
    """Return the plan of a run, or of one of its several tables.

    :raises StepError: ``bootstrap_prepare`` has not written one
    """
    plan = find_plan(store, run, table)
    if plan is None:
        raise StepError(f"run {run} has no plan: run bootstrap_prepare with the same --run first")
    return plan


def plans_of(store: ObjectStore, run: str) -> dict[TableName, BootstrapPlan]:
    """Return the plans of a run for several tables, by table."""
    keys = [stat.key for stat in list_named(store, f"plans/bootstrap/{run}/", r"[^/ ]+\.json")]
    plans = [plan for key in keys if (plan := _read(store, key)) is not None]
    return {(plan.scan.table.keyspace, plan.scan.table.name): plan for plan in plans}


def plans_to_follow(application: Application, outcome: Outcome) -> dict[TableName, BootstrapPlan]:
    """Return the plans of a run's tables but those that have failed in earlier steps, which the outcome gets.

    :raises StepError: ``bootstrap_prepare`` has not written any
    """
    if outcome.alone:
        return {application.one_table: load_plan(application.store, application.run)}
    outcome.failures = failed_before(application)
    plans = plans_of(application.store, application.run)
    if not plans and not outcome.failures:
        raise StepError(f"run {application.run} has no plan: run bootstrap_prepare with the same --run first")
    return {name: plan for name, plan in plans.items() if outcome.goes_on(name)}


def completed_since(application: Application, state: BootstrapState, outcome: Outcome) -> list[TableName]:
    """Forget the failures of tables in earlier steps of a run whose bootstrap another run has completed since.

    Else the last step of a run, done again, would fail for ever by what its earlier steps have reported once.

    :param outcome: with the failures; those that are forgotten are removed
    :returns: these tables
    """
    report = get_json(application.store, f"reports/bootstrap_prepare/{application.run}.json") or {}
    unplanned, plans = report.get("failed") or {}, plans_of(application.store, application.run)
    found = []
    for text in list(outcome.failures):
        pattern = parse_table_pattern(text)
        latest = state.find(*pattern.name) if pattern.is_name else None
        if latest is None or latest.state != COMPLETED:
            continue
        plan = plans.get(pattern.name)
        if text in unplanned:
            is_since = latest.as_of >= timegm(time.strptime(report["started_at"], "%Y-%m-%dT%H:%M:%SZ"))
        else:
            is_since = plan is not None and (latest.id == plan.bootstrap.id or latest.as_of > plan.bootstrap.as_of)
        if is_since:
            del outcome.failures[text]
            found.append(pattern.name)
    return found


def to_continue(
    store: ObjectStore, latest: Bootstrap | None, table: TableSchema, specification: str
) -> tuple[Bootstrap, TableSchema] | None:
    """Return the unfinished bootstrap that a run goes on with, and the table as that copies it.

    If the table was altered after everything was copied, the rows fit the table as it was then. They are published so,
    and the replica follows the table afterwards.

    :param latest: the table's latest bootstrap
    :param specification: that of a bootstrap that would begin now
    :returns: None: there is none, or it has other parameters; or the table was altered before all was copied, or only
        some columns are copied
    :raises TableVersionError: a version of the table is damaged
    """
    if latest is None or latest.state not in UNFINISHED:
        return None
    if latest.specification == specification:
        return latest, table
    then, now = json.loads(latest.specification), json.loads(specification)
    digest, _ = then.pop("schema_digest"), now.pop("schema_digest")
    if latest.state != PUBLISHING or table.is_selection or then != now:
        return None
    copied = next((version for version in versions_of(store, table) if version.digest == digest), None)
    return None if copied is None else (latest, copied)


def keep_plan(store: ObjectStore, plan: BootstrapPlan, table: TableName | None = None) -> BootstrapPlan:
    """Write the plan, or read the one that another attempt of this run has written meanwhile.

    :param table: the plan's table, if the run is for several
    """
    document = {**asdict(plan), "scan": json.loads(plan.scan.to_json())}
    try:
        store.put(_key(plan.run, table), json.dumps(document, indent=1).encode(), if_absent=True)
        return plan
    except AlreadyExistsError:
        return load_plan(store, plan.run, table)


def _read(store: ObjectStore, key: str) -> BootstrapPlan | None:
    document = get_json(store, key)
    if document is None:
        return None
    scan = ScanPlan.from_json(json.dumps(document.pop("scan")))
    return BootstrapPlan(bootstrap=Bootstrap(**document.pop("bootstrap")), scan=scan, **document)


def _key(run: str, table: TableName | None) -> str:
    return f"plans/bootstrap/{run}.json" if table is None else f"plans/bootstrap/{run}/{portable_name(*table)}.json"
