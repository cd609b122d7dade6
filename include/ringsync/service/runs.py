"""``cdcservice bootstrap`` and ``verify``: starts ringsync's DAGs for tables, and follows them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from ringsync.airflow_client import AirflowClient, AirflowUnreachableError, RunState, TaskState
from ringsync.cluster.session import connect
from ringsync.config import Config, ConfigError, load_config
from ringsync.cql.identifiers import TablePattern, parse_table_patterns
from ringsync.orchestration import safe_run_id
from ringsync.progress import duration, follow, read_progress
from ringsync.service.look import client_of
from ringsync.state.bootstrap import BootstrapState
from ringsync.steps.application import ExitCode, StepError
from ringsync.storage.port import ObjectStore, get_json
from ringsync.terminal import say
from ringsync.wiring import cluster_settings, store_of

APPLICATIONS = {
    ("bootstrap_table", "prepare"): "bootstrap_prepare",
    ("bootstrap_table", "scan"): "bootstrap_scan",
    ("bootstrap_table", "drain"): "bootstrap_drain",
    ("bootstrap_table", "verify"): "replica_verify",
    ("replica_verify", "verify"): "replica_verify",
}
"""Application of each task; its report is ``reports/<application>/<run>.json`` (:func:`_report_of`)."""

SNAPSHOT = "snapshot_"
"""What the names of the tasks of ``sstable_snapshot`` begin with; then comes their queue."""

PATIENCE_S = 300.0
"""Seconds that Airflow may be unreachable while we follow a run: it may be restarted."""


@dataclass(frozen=True)
class Run:
    """A DAG run that was started from here.

    :ivar table: name of its table, or a title for several
    """

    client: AirflowClient
    store: ObjectStore
    dag: str
    run: str
    table: str


def bootstrap(arguments: argparse.Namespace, console: Console) -> ExitCode:
    return _cancel(arguments, console) if arguments.cancel else run_dag(arguments, console)


def _cancel(arguments: argparse.Namespace, console: Console) -> ExitCode:
    from ringsync.steps.bootstrap.cancel import cancel
    from ringsync.steps.tables import Outcome, text_of

    config = load_config(arguments.conf)
    store, state = store_of(config), BootstrapState(connect(cluster_settings(config)), config.state.keyspace)
    patterns = _patterns(arguments)
    outcome = Outcome(alone=len(patterns) == 1 and patterns[0].is_name)
    for name, cancelled in cancel(config, store, state, _to_cancel(state, patterns), outcome):
        table = text_of(name)
        say(console, f"bootstrap {cancelled.id} of {table} is cancelled; the replica is what it was before")
    return ExitCode.COMPLETED_WITH_ERRORS if outcome.failures else ExitCode.OK


def _to_cancel(state: BootstrapState, patterns: Sequence[TablePattern]) -> list[tuple[str, str]]:
    """Return the tables that are named, and those with an unfinished bootstrap that a pattern matches.

    :raises StepError: a pattern matches none
    """
    unfinished = state.unfinished() if any(not pattern.is_name for pattern in patterns) else []
    tables: dict[tuple[str, str], None] = {}
    for pattern in patterns:
        found = [pattern.name] if pattern.is_name else [name for name in unfinished if pattern.matches(*name)]
        if not found:
            raise StepError(f"no table that {pattern} matches has an unfinished bootstrap")
        tables |= dict.fromkeys(found)
    return list(tables)


def _patterns(arguments: argparse.Namespace) -> tuple[TablePattern, ...]:
    """Return the names and patterns of ``--table`` and ``--tables-from``, each once.

    :raises ConfigError: the file cannot be read, or a line of it is neither name nor pattern
    """
    texts = [(text, "") for text in arguments.table or ()]
    if path := arguments.tables_from:
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot read the names of tables: {error}") from error
        texts += [(line, f"{path}:{n}: ") for n, line in enumerate(lines, 1) if line.partition("#")[0].strip()]
    found: dict[TablePattern, None] = {}
    for text, place in texts:
        try:
            found |= dict.fromkeys(parse_table_patterns(text.partition("#")[0] if place else text))
        except ValueError as error:
            raise ConfigError(f"{place}{error}") from error
    if not found:
        raise ConfigError(f"{arguments.tables_from} names no table: write one name or pattern a line")
    return tuple(found)


def run_dag(arguments: argparse.Namespace, console: Console) -> ExitCode:
    parameters = {name: getattr(arguments, name) for name in arguments.parameters}
    tables = ", ".join(map(str, _patterns(arguments)))
    run = start(load_config(arguments.conf), arguments.dag, tables, parameters, console)
    page = run.client.run_page(run.dag, run.run)
    if not arguments.wait:
        say(console, f"look at it: {page}\n--wait follows it to the end")
        return ExitCode.OK
    try:
        return report_end(run, wait(run, console), console)
    except KeyboardInterrupt:
        say(console, f"no longer followed, but the run goes on in Airflow: {page}")
        return ExitCode.INTERRUPTED


def start(config: Config, dag: str, table: str, parameters: dict[str, Any], console: Console) -> Run:
    """Trigger a DAG for some tables.

    :param dag: ``bootstrap_table`` or ``replica_verify``
    :param table: names and patterns of tables, with commas between
    :raises AirflowError: Airflow cannot start it
    :raises ConfigError: a key of the configuration is wrong
    """
    client = client_of(config)
    first, *others = map(str, parse_table_patterns(table))
    title = f"{first} and {len(others)} more" if others else first
    run = safe_run_id(f"{title.replace(' ', '_')}__{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    store = store_of(config)
    if client.trigger(dag, run, {"table": table, **parameters}, note=title):
        say(console, f"DAG {dag} was paused in Airflow; it is unpaused now")
    say(console, f"started {dag} for {title}, run {run}")
    return Run(client, store, dag, run, title)


def wait(run: Run, console: Console) -> RunState:
    """Follow a run to its end, and show its progress on the console.

    :raises AirflowError: Airflow forgot the run, or was away for longer than :data:`PATIENCE_S`
    """
    last: RunState | None = None

    def stage() -> str | None:
        nonlocal last
        last = run.client.state(run.dag, run.run)
        if last.finished:
            return None
        return f"{last.current.task} ({last.current.state})" if last.current else last.state

    follow(lambda: read_progress(run.store, run.run), patient(stage), console, run.table)
    assert last is not None
    return last


def patient(stage: Callable[[], str | None]) -> Callable[[], str | None]:
    """Make a stage that waits while Airflow does not answer.

    :param stage: a stage as :func:`ringsync.progress.follow` takes it
    :returns: the stage that waits; it raises AirflowError once Airflow was away for longer than :data:`PATIENCE_S`
    """
    seen = time.monotonic()

    def patient_stage() -> str | None:
        nonlocal seen
        try:
            current = stage()
        except AirflowUnreachableError:
            if time.monotonic() - seen > PATIENCE_S:
                raise
            return "waiting for Airflow"
        seen = time.monotonic()
        return current

    return patient_stage


def report_end(run: Run, end: RunState, console: Console) -> ExitCode:
    """Print the result of each task of a finished run.

    :returns: exit code of the application that failed, or 0
    """
    code = ExitCode.OK
    for task in end.tasks:
        if not _runs_an_application(run, task.task):
            continue
        report = _report_of(run, task.task)
        if task.state == "failed":
            code, why = _why(run, task, report)
            say(console, f"{task.task}: failed: {why}")
        elif task.state == "success":
            say(console, f"{task.task}: {_summary(report)}")
        else:
            say(console, f"{task.task}: {task.state.replace('_', ' ')}")
    if end.state == "failed":
        say(console, f"look at it: {run.client.run_page(run.dag, run.run)}")
        return code or ExitCode.CRASHED
    return ExitCode.OK


def _runs_an_application(run: Run, task: str) -> bool:
    return task.startswith(SNAPSHOT) or (run.dag, task) in APPLICATIONS


def _report_of(run: Run, task: str) -> dict[str, Any]:
    if task.startswith(SNAPSHOT):
        return read_report(run.store, "sstable_snapshot", f"{run.run}.{task.removeprefix(SNAPSHOT)}")
    return read_report(run.store, APPLICATIONS[run.dag, task], run.run)


def read_report(store: ObjectStore, application: str, run: str) -> dict[str, Any]:
    """Read the JSON report of one application in one run; empty if it wrote none."""
    return get_json(store, f"reports/{application}/{run}.json") or {}


def _why(run: Run, task: TaskState, report: dict[str, Any]) -> tuple[ExitCode, str]:
    """Find exit code and reason of a failed task, in the application's report, or in the log if there is none."""
    if code := report.get("exit_code"):
        return ExitCode(code), str(report.get("error") or _summary(report))
    failure = run.client.failure(run.dag, run.run, task)
    return ExitCode.FATAL if failure.final else ExitCode.CRASHED, failure.message


def _summary(report: dict[str, Any]) -> str:
    parts = []
    if (done := report.get("tables_done")) is not None:
        failed = report["tables_failed"]
        parts.append(f"{done:,} tables" + (f" ({failed:,} failed)" if failed else ""))
    if report.get("dry_run"):
        return ", ".join([*parts, *_forecast(report)])
    names = [name for name in ("ranges", "rows", "cells", "differences") if isinstance(report.get(name), int)]
    parts += [f"{report[name]:,} {name}" for name in names]
    if seconds := report.get("seconds") or 0:
        parts.append(duration(seconds) if seconds >= 60 else f"{seconds:.1f} s")
    if "rows" in names and seconds:
        parts.append(f"{report['rows'] / seconds:,.0f} rows/s")
    return ", ".join(parts) or "done"


def _forecast(report: dict[str, Any]) -> list[str]:
    """Say what a dry run expects, of all its tables together."""
    tables = list(report["tables"].values()) if "tables" in report else [report]
    every = [table["forecast"] for table in tables]
    unknown = [forecast["unknown"] for forecast in every if "unknown" in forecast]
    forecasts = [forecast for forecast in every if "unknown" not in forecast]
    total = {name: sum(forecast[name] for forecast in forecasts) for name in ("rows", "rows_low", "bytes")}
    rows = f"{total['rows']:,} rows"
    if any(forecast["at_least"] for forecast in forecasts):
        rows = f"at least {rows}: there are partitions too large to see their end"
    elif not all(forecast["exact"] for forecast in forecasts):
        high = sum(forecast["rows_high"] for forecast in forecasts)
        rows = f"about {rows} ({total['rows_low']:,} to {high:,})"
    parts = [rows, f"{total['bytes'] / 1e6:,.1f} MB"] if forecasts else []
    if unknown:
        parts.insert(0, f"size unknown{f' of {len(unknown):,} tables' if forecasts else ''}: {unknown[0]}")
    parts.append(f"{sum(table['splits'] for table in tables):,} splits")
    if seconds := sum(forecast["seconds_at_the_limits"] or 0 for forecast in forecasts):
        parts.append(f"{duration(seconds)} at the configured limits")
    continued = [table["continues"] for table in tables if table["continues"]]
    if "tables" in report and continued:
        parts.append(f"would continue {len(continued):,} bootstraps")
    elif continued:
        parts.append(f"would continue bootstrap {continued[0]}")
    return parts
