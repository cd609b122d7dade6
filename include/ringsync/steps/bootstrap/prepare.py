"""The first step of a bootstrap: check everything it needs, and decide once how it is done (docs/bootstrap.md).

A table has one bootstrap at a time. The next run with the same parameters continues an unfinished one, even if splits,
topology or the version of this code have changed. A run with other parameters, or after a change of the table's schema,
begins anew.

The plan (plan.py) is written once: a repeated task reads the first one, so all steps of a run agree.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ringsync.cluster.cluster import read_hosts, read_size_estimate
from ringsync.cluster.control import get_limits
from ringsync.cluster.generations import clocks
from ringsync.cluster.limits import Limiter
from ringsync.cluster.schema import read_table
from ringsync.cluster.scylla import cdc_column, has_cdc, is_scylla
from ringsync.cluster.session import connect
from ringsync.cluster.shared import Shared, TableName, Together, read_known_tables
from ringsync.config import Config
from ringsync.ledger.layout import check_layout
from ringsync.ledger.passes import mark, marks_of_latest, pass_folder, pass_numbers
from ringsync.ledger.table_versions import as_recorded, version_of
from ringsync.ledger.topic_owners import take_topic, topic_owners
from ringsync.replica.base import replaced_table
from ringsync.replica.changes import snapshots
from ringsync.ring.tokens import fraction
from ringsync.schema.table import TableSchema
from ringsync.sources.scan.forecast import PLACE_ROWS, PLACES, Forecast, Unknown, sample
from ringsync.sources.scan.plan import ScanPlan, Selection
from ringsync.sources.scan.planning import make_scan_plan
from ringsync.sources.scan.scan import scan_query, scan_session
from ringsync.state import bootstrap as states
from ringsync.status import BOOTSTRAPS, forget
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.bootstrap.copied_gap import note_before_copy, said_before_cdc
from ringsync.steps.bootstrap.emptied import asked_nodes, why_not_emptied
from ringsync.steps.bootstrap.enable_cdc import enable_cdc
from ringsync.steps.bootstrap.enable_scylla_cdc import enable_scylla_cdc
from ringsync.steps.bootstrap.leftovers import remove_leftovers
from ringsync.steps.bootstrap.old_snapshots import clear_old
from ringsync.steps.bootstrap.plan import (
    SSTABLE,
    TOKEN_RANGE,
    BootstrapPlan,
    find_plan,
    keep_plan,
    to_continue,
)
from ringsync.steps.bootstrap.space import Space, check_space, lake_bytes
from ringsync.steps.loop import put_status
from ringsync.steps.own_keyspace import create_state
from ringsync.steps.scylla.positions import note_log_begins
from ringsync.steps.tables import Outcome, chosen, each, in_all
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import data_topic
from ringsync.wiring import cluster_limits, cluster_settings

FORECAST_S = 30.0
"""About how long the forecast may take: if the limits are low, it reads fewer rows."""


@dataclass(frozen=True)
class Preparation:
    """What the tables of a run share.

    :ivar application: of the run
    :ivar permits: the limits of all forecasts together
    :ivar space: the space that all of them need
    :ivar cdc: enables cdc on a table, and says what was done
    :ivar tables: number of tables
    :ivar log_from_ms: of ScyllaDB: what a scan does not see was logged then or later, ms since the epoch
    """

    application: Application
    shared: Shared
    state: states.BootstrapState
    permits: Limiter
    space: Space
    cdc: Together[TableSchema, str]
    now: int
    tables: int = 1
    log_from_ms: int | None = None

    @property
    def are_many(self) -> bool:
        """Whether the run is for several tables."""
        return self.shared.known is not None


def run(application: Application, clock: Callable[[], float] = time.time) -> tuple[Report, ExitCode]:
    """Check and plan. In a run for several tables each fails for itself.

    :raises StepError: too little space; another run works on this table; another plan under the same run id
    :raises ClusterError: unreachable, no login, no rights, a selection that does not fit the table
    :raises SchemaError: no such table
    :raises StateError: ringsync's own keyspace cannot be used
    :raises TableReplacedError: the table was dropped and created again meanwhile
    :raises LayoutError: this version does not know the layout of the sync's state
    :raises ReplicaWaitsError: somebody has switched on in the replica's tables what ringsync does not honour
    """
    config, options, store = application.config, application.options, application.store
    check_layout(store)
    check_mode(application)
    session = connect(cluster_settings(config))
    check_server(application, session)
    state = states.BootstrapState(session, config.state.keyspace)
    permits, now = Limiter(get_limits(store) or cluster_limits(config)), int(clock())
    outcome = Outcome(alone=not application.patterns)
    known, tables = None, [application.table] if application.table else []
    if application.patterns:
        known = read_known_tables(session, [config.state.keyspace])
        tables, outcome.failures = chosen(application.patterns, known)
        if not options.dry_run:
            create_state(session, config)
    if not options.dry_run:
        clear_old(config, store, state)
    shared = Shared(session, known)
    on_scylla = is_scylla(session)
    cdc = Together(
        partial(enable_scylla_cdc, shared, config.scylla)
        if on_scylla
        else partial(enable_cdc, shared, store, why_not=partial(_why_no_cdc, config, store, session, clock))
    )
    log_from_ms = _log_from_ms(session, now, config.scylla.confidence_ms) if on_scylla else None
    preparation = Preparation(application, shared, state, permits, Space(), cdc, now, len(tables), log_from_ms)
    each(application.run, tables, partial(prepare_table, preparation), outcome)
    report, code = in_all(outcome, last=options.dry_run)
    return {**report, "dry_run": options.dry_run}, code


def _why_no_cdc(config: Config, store: ObjectStore, session: Any, clock: Callable[[], float]) -> str:
    with asked_nodes(config) as captures:
        return why_not_emptied(config, store, read_hosts(session), captures, clock())


def _log_from_ms(session: Any, now: int, confidence_ms: int) -> int:
    """Return a moment before that of the scan by the clock of any node, ms since the epoch."""
    told = clocks(session)
    return 1000 * now + (int(told.ahead_ms) - told.delay_ms if told else 0) - confidence_ms


def prepare_table(preparation: Preparation, name: TableName) -> tuple[Report, ExitCode]:
    """Check and plan one table; the errors are those of :func:`run`."""
    application, shared, mode = preparation.application, preparation.shared, mode_of(preparation.application)
    config, options, store, session = application.config, application.options, application.store, shared.session
    scan = make_scan_plan(
        session,
        _with_splits(config, options.splits),
        *name,
        now=preparation.now,
        selection=Selection(options.columns, options.token_range, options.where),
        shared=shared,
        from_sstables=mode == SSTABLE,
    )
    scan = replace(scan, table=as_recorded(store, scan.table))
    check_selection(application, session, scan)
    # The forecast selects: of servers before 5.0 only SSTables tell all times.
    selected = replace(scan, element_times=scan.element_times and mode == TOKEN_RANGE)
    forecast = read_a_little(config, store, selected, preparation.permits, preparation.tables)
    size, before = expected_bytes(session, scan, forecast), " and tables before it" if preparation.tables > 1 else ""
    with preparation.space.kept(lake_bytes(size)) as needed:
        check_space(store, f"{scan.table.full_name}{before}", needed, "set store.url to another place")
        is_to_capture = options.enable_cdc and not options.dry_run
        with said_before_cdc(store, scan.table, application.run) if is_to_capture else nullcontext():
            return plan_table(preparation, name, scan, forecast, size)


def expected_bytes(session: Any, scan: ScanPlan, forecast: Forecast | Unknown) -> int:
    """Return about how many bytes are copied: without a forecast, as the nodes estimate; 0: they do not."""
    if isinstance(forecast, Forecast):
        return forecast.bytes
    estimate = read_size_estimate(session, scan.table.keyspace, scan.table.name)
    return round(estimate.bytes * fraction(scan.selection.ranges)) if estimate else 0


def plan_table(
    preparation: Preparation, name: TableName, scan: ScanPlan, forecast: Forecast | Unknown, size: int
) -> tuple[Report, ExitCode]:
    """Plan one table, and begin its bootstrap; the errors are those of :func:`run`.

    :param size: expected bytes to copy
    """
    application, state, shared = preparation.application, preparation.state, preparation.shared
    config, options, store, session = application.config, application.options, application.store, shared.session
    plan_of, mode = name if preparation.are_many else None, mode_of(application)
    specification = specify(application, scan)
    latest = state.find(*name)
    continued = None
    if not options.restart and (found := to_continue(store, latest, scan.table, specification)):
        continued, specification = found[0], found[0].specification
        scan = replace(scan, table=found[1])
    report = {
        "dry_run": options.dry_run,
        "mode": mode,
        **describe(scan),
        "forecast": tell(forecast, config),
        "continues": continued and continued.id,
        # Both tables are read: what forbids to replace them shall not be found after the copy.
        "replaces": replaced_table(snapshots(store, scan.table)[0], scan.table),
    }
    if not preparation.are_many:
        report["size_estimates"] = (estimate := read_size_estimate(session, *name)) and asdict(estimate)
    if options.dry_run:
        return report, ExitCode.OK
    if options.enable_cdc and not config.sync.follows(scan.table.full_name):
        raise StepError(
            f"{scan.table.full_name} would not be followed, so cdc is not enabled: sync.include or sync.exclude of the "
            "configuration leaves it out"
        )
    if not preparation.are_many:
        create_state(session, config)
    if preparation.log_from_ms is not None:
        # Whenever the log is read for the first time, it is from before what the scan may not see.
        note_log_begins(store, scan.table.table_id, preparation.log_from_ms)
    if options.enable_cdc:
        report["cdc"] = preparation.cdc.do(scan.table)
        note_before_copy(store, config, session, scan.table)
    plan = find_plan(store, application.run, plan_of)
    if plan is None:
        bootstrap = continued or begin(application, state, scan, specification, latest)
        plan = keep_plan(
            store,
            BootstrapPlan(
                run=application.run,
                bootstrap=bootstrap,
                scan=replace(scan, splits=()),
                topic=data_topic(config.server_name, scan.table),
                splits=options.splits,
                estimated_rows=forecast.rows if isinstance(forecast, Forecast) else None,
                estimated_bytes=round(size / fraction(scan.selection.ranges)),
                mode=mode,
            ),
            plan_of,
        )
    if plan.bootstrap.specification != specification:
        raise StepError(
            f"run {application.run} has a plan for {plan.scan.table.full_name} with other parameters or another "
            "schema: use another run id"
        )
    latest = check_not_cancelled(state.find(*name), plan)
    if plan.scan.table.is_selection:  # it belongs to a version of the whole table
        version_of(store, read_table(session, *name))
    number = begin_stream(store, plan, latest, lambda: check_scanning(state.find(*name), plan))
    report |= {"begin_pass": number, "folder": pass_folder(number)}
    return {**report, "bootstrap": plan.bootstrap.id, "topic": plan.topic}, ExitCode.OK


def mode_of(application: Application) -> str:
    """Return the mode of the run: its own, or that of the configuration."""
    return application.options.mode or application.config.scan.mode


def check_mode(application: Application) -> None:
    """:raises StepError: a condition on rows, or a choice of columns, with mode ``sstable``"""
    if mode_of(application) != SSTABLE:
        return
    if application.options.where:
        raise StepError(
            "where is not possible with mode sstable, which reads whole partitions: leave it out, or use mode "
            "token_range"
        )
    if application.options.columns:
        raise StepError(
            "columns is not possible with mode sstable, because a row may live by a column that is left out: leave it "
            "out, or use mode token_range"
        )


def check_server(application: Application, session: Any) -> None:
    """:raises StepError: the SSTables of ScyllaDB are to be read"""
    if mode_of(application) == SSTABLE and is_scylla(session):
        raise StepError("mode sstable reads the files of Cassandra, not of ScyllaDB: use mode token_range")


def check_selection(application: Application, session: Any, scan: ScanPlan) -> None:
    """Refuse to copy a part of a table that is followed: its replica would not be kept in step with the stream.

    :raises StepError: the table has cdc, or is to get it, and only a part is wanted
    """
    table = scan.table
    if not any(json.loads(scan.selection.to_json()).values()) or not application.config.sync.follows(table.full_name):
        return
    query = f"SELECT {cdc_column(session)} FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s"
    if application.options.enable_cdc or has_cdc(session.execute(query, (table.keyspace, table.name)).one()):
        raise StepError(
            f"{table.full_name} is followed, so all of it must be copied: a replica of a part is not kept in sync. "
            "Leave out columns, token_range and where, or name the table in sync.exclude of the configuration"
        )


def check_not_cancelled(latest: states.Bootstrap | None, plan: BootstrapPlan) -> states.Bootstrap:
    """Return the table's latest bootstrap, which must be the plan's, and not cancelled.

    :raises StepError: it is not
    """
    if latest is None or latest.id != plan.bootstrap.id:
        raise StepError(f"another bootstrap of {plan.scan.table.full_name} has begun since: follow that one")
    if latest.state == states.CANCELLED:
        raise StepError(f"bootstrap {latest.id} of {plan.scan.table.full_name} was cancelled: trigger bootstrap_table")
    return latest


def check_scanning(latest: states.Bootstrap | None, plan: BootstrapPlan) -> None:
    """Check that the plan's bootstrap may begin: it is the table's latest, and not everything is copied yet.

    :raises StepError: it may not
    """
    if check_not_cancelled(latest, plan).state != states.SCANNING:
        raise StepError(f"another run has just copied all of {plan.scan.table.full_name}: trigger bootstrap_table")


def begin_stream(store: ObjectStore, plan: BootstrapPlan, latest: states.Bootstrap, check: Callable[[], None]) -> int:
    """Let changes wait in the bootstrap's stream from now on: the new replica will get them.

    Arguments and result are those of :func:`begin_pass`.
    """

    def may_begin() -> None:
        check()
        say(store, plan, "prepare")  # before they wait: whatever ends this run, somebody is told for what

    if number := begin_pass(store, plan, latest, may_begin):
        clear_away(store, plan, number)
    say(store, plan, "prepare")
    return number


def begin_pass(store: ObjectStore, plan: BootstrapPlan, latest: states.Bootstrap, check: Callable[[], None]) -> int:
    """Begin the bootstrap, if it has not begun. A bootstrap that has copied everything does not begin a second time.

    :param check: raises if the bootstrap must not begin any more
    :returns: number of the pass ``begin``; 0: that pass was removed, since everything was published long ago
    :raises TableReplacedError: the table was dropped and created again since
    """
    table_id = plan.scan.table.table_id
    if latest.state in (states.PUBLISHING, states.COMPLETED):
        marks = marks_of_latest(store, table_id, pass_numbers(store, table_id))
        return next((mark.number for mark in marks if (mark.kind, mark.bootstrap) == ("begin", latest.id)), 0)
    now_ms = int(time.time() * 1000)
    # First the version is recorded, then the topic is taken: if the table is dropped, the topic's next owner needs the
    # version to make visible what was published of it.
    version_of(store, plan.scan.table)
    take_topic(store, plan.topic, table_id, now_ms)
    return mark(store, table_id, "begin", plan.bootstrap.id, now_ms, check=check)


def clear_away(store: ObjectStore, plan: BootstrapPlan, begin: int) -> None:
    """Remove what earlier bootstraps have left, also of tables that had this name before. Running it again is safe.

    :param begin: number of this bootstrap's first pass, after which no earlier bootstrap can publish rows
    """
    remove_leftovers(store, plan.scan.table, plan.topic, begin, plan.bootstrap.id)
    for owner in topic_owners(store, plan.topic):
        if owner.table_id != plan.scan.table.table_id:
            forget(store, f"{BOOTSTRAPS}{owner.table_id}")


def say(store: ObjectStore, plan: BootstrapPlan, step: str, share: float = 0.0) -> None:
    """Write the status of an unfinished bootstrap, for ``cdcservice status``; ``bootstrap_drain`` removes it.

    :param share: the part that is copied, from 0 to 1
    """
    table = plan.scan.table
    status = {"table": table.full_name, "table_id": table.table_id, "bootstrap": plan.bootstrap.id, "run": plan.run}
    put_status(store, BOOTSTRAPS.rstrip("/"), table.table_id, {**status, "step": step, "fraction": round(share, 4)})


def read_a_little(
    config: Config, store: ObjectStore, scan: ScanPlan, permits: Limiter | None = None, tables: int = 1
) -> Forecast | Unknown:
    """Forecast the scan by reading some rows at some places, within the limits of the scan.

    :param permits: the limits, shared with the forecasts of other tables; None: those of all runs
    :param tables: number of tables that share them
    """
    settings = cluster_settings(config)
    session = scan_session(settings, scan.now)
    query = scan_query(
        scan.table,
        times=scan.times,
        element_times=scan.element_times,
        where=scan.selection.where,
        server_time=not session.reads_as_of,
    )
    ranges = [part for split in scan.splits for part in split.ranges]
    limits = get_limits(store) or cluster_limits(config)
    permits, rows = permits or Limiter(limits), PLACE_ROWS
    if limits.rows_per_s:
        rows = max(1, min(PLACE_ROWS, int(limits.rows_per_s * FORECAST_S / PLACES / tables)))
    return sample(
        *(session, query, ranges, settings, permits),
        place_rows=rows,
        whole_first=tables > 1,
        beginning_rows=scan.beginning_rows,
    )


def specify(application: Application, scan: ScanPlan) -> str:
    """Return, as JSON, everything that must be the same for one run to continue another's bootstrap."""
    config = application.config
    return json.dumps(
        {
            "mode": mode_of(application),
            "table_id": scan.table.table_id,
            "schema_digest": scan.table.digest,
            "selection": json.loads(scan.selection.to_json()),
            "times": [scan.times, scan.element_times],
            "unrepresentable_values": scan.unrepresentable_values,
            "store": application.store.url,
            "stream": [config.server_name, config.stream.mapping],
        }
    )


def begin(
    application: Application,
    state: states.BootstrapState,
    scan: ScanPlan,
    specification: str,
    latest: states.Bootstrap | None,
) -> states.Bootstrap:
    """Make a new bootstrap, the table's latest.

    :raises StepError: another run works on the table
    """
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(scan.now))
    bootstrap = states.Bootstrap(
        keyspace=scan.table.keyspace,
        table=scan.table.name,
        id=f"{moment}-{secrets.token_hex(4)}",
        state=states.SCANNING,
        specification=specification,
        run=application.run,
        as_of=scan.now,
    )
    if latest is not None:
        wait_until_free(state, latest, application.run)
    if not state.begin(bootstrap, latest.id if latest else None):
        raise StepError(f"another run has just begun a bootstrap of {scan.table.full_name}: follow that one")
    return bootstrap


def wait_until_free(state: states.BootstrapState, bootstrap: states.Bootstrap, run: str) -> None:
    """Wait until no other run works on a bootstrap: a killed run counts as alive for some seconds more.

    :raises StepError: another run is alive
    """
    for _ in range(2 * states.HEARTBEAT_TTL_S):
        other = state.alive(bootstrap.id)
        if other in (None, run):
            return
        time.sleep(1.0)
    raise StepError(
        f"{bootstrap.keyspace}.{bootstrap.table} is being bootstrapped by run {other}: follow or stop that one"
    )


def describe(scan: ScanPlan) -> Report:
    """Return what will be read, and how."""
    return {
        "columns": {column.name: str(column.type) for column in scan.table.columns},
        "selection": json.loads(scan.selection.to_json()),
        "schema_digest": scan.table.digest,
        "ring_digest": scan.ring_digest,
        "consistency_level": scan.consistency_level,
        "element_times": scan.element_times,
        "splits": len(scan.splits),
        "ranges": sum(len(split.ranges) for split in scan.splits),
    }


def tell(forecast: Forecast | Unknown, config: Config) -> Report:
    """Return the forecast, and how long the scan takes at the configured limits."""
    if isinstance(forecast, Unknown):
        return forecast.as_report()
    limits = cluster_limits(config)
    seconds = [forecast.rows / limits.rows_per_s] if limits.rows_per_s else []
    seconds += [forecast.bytes / limits.bytes_per_s] if limits.bytes_per_s else []
    return {**forecast.as_report(), "seconds_at_the_limits": round(max(seconds)) if seconds else None}


def _with_splits(config: Config, splits: int | None) -> Config:
    if splits is None:
        return config
    return config.model_copy(
        update={"scan": config.scan.model_copy(update={"min_splits": splits, "max_splits": splits})}
    )
