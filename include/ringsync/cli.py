"""Command line ``cdcservice``: starts ringsync's DAGs and follows them, and looks into commit logs."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from ringsync import __version__
from ringsync.airflow_client import AirflowClient, AirflowError, AirflowUnreachableError, RunState, TaskState
from ringsync.cluster.control import get_limits, put_limits
from ringsync.cluster.limits import LimitsError
from ringsync.cluster.session import ClusterError, connect
from ringsync.config import Config, ConfigError, load_config
from ringsync.cql.identifiers import TablePattern, parse_column_names, parse_table_name, parse_table_patterns, printable
from ringsync.inspect.command import add_inspect, parsed
from ringsync.orchestration import config_path, safe_run_id
from ringsync.progress import duration, follow, read_progress
from ringsync.ring.tokens import parse_token_range
from ringsync.schema.table import SchemaError
from ringsync.service.alarm_list import add_alarms
from ringsync.service.command import add_service, say, say_error
from ringsync.service.errors import add_errors
from ringsync.service.look import client_of
from ringsync.service.schemas import add_schema
from ringsync.state.bootstrap import BootstrapState
from ringsync.state.session import StateError
from ringsync.steps.application import ExitCode, StepError
from ringsync.storage.port import ObjectStore, StorageError, get_json
from ringsync.streams.files import StreamError
from ringsync.wiring import cluster_limits, cluster_settings, store_of

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

EXIT_CODES = """\
exit codes: 0 done; 1 done, with differences or errors; 2 given up, too many errors; 3 fatal: arguments,
configuration, connection or rights; 4 interrupted (the run goes on in Airflow); 5 crashed"""


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


LIMITS: dict[str, tuple[str, str, float]] = {
    "rows_per_s": ("--rows-per-s", "rows a second", 1),
    "bytes_per_s": ("--megabytes-per-s", "megabytes of result pages a second", 1e6),
    "concurrent_requests": ("--concurrent-requests", "pages on their way at once", 1),
}
"""Fields of :class:`ringsync.cluster.limits.Limits`: option, help, and the size of the unit in units of the field."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 3, fatal: argparse's own 2 means too many errors here."""
        self.print_usage(sys.stderr)
        self.exit(ExitCode.FATAL, f"ringsync: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run cdcservice, and return its exit code.

    :param argv: arguments; None: those of the process
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if hasattr(arguments, "tables_from") and not (arguments.table or arguments.tables_from):
        parser.error("the following arguments are required: --table")
    console = Console(soft_wrap=True)
    try:
        code: ExitCode = arguments.command(arguments, console)
        return code
    except (
        *(ConfigError, AirflowError, StorageError, LimitsError),
        *(ClusterError, SchemaError, StateError, StepError, StreamError),
    ) as error:
        say_error(error)
        return ExitCode.FATAL
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _bootstrap(arguments: argparse.Namespace, console: Console) -> ExitCode:
    return _cancel(arguments, console) if arguments.cancel else _run_dag(arguments, console)


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


def _run_dag(arguments: argparse.Namespace, console: Console) -> ExitCode:
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


def _limits(arguments: argparse.Namespace, console: Console) -> ExitCode:
    config = load_config(arguments.conf)
    store = store_of(config)
    amounts = {
        name: value * unit if value else None
        for name, (_, _, unit) in LIMITS.items()
        if (value := getattr(arguments, name)) is not None
    }
    if arguments.reset:
        put_limits(store, None)
    if amounts:
        put_limits(store, replace(get_limits(store) or cluster_limits(config), **amounts))
    kept = get_limits(store)
    say(console, "limits of all runs together, " + ("set here" if kept else "from the configuration") + ":")
    for name, value in asdict(kept or cluster_limits(config)).items():
        _, meaning, unit = LIMITS[name]
        say(console, f"  {meaning}: {'no limit' if value is None else f'{value / unit:,g}'}")
    return ExitCode.OK


def _parser() -> _Parser:
    parser = _Parser(
        prog="cdcservice",
        description="Verified replicas and change streams of Cassandra tables, through Airflow and Spark.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    bootstrap = commands.add_parser(
        "bootstrap",
        help="make verified replicas of tables",
        description="Start the DAG bootstrap_table: plan, read by token ranges, write replica and stream, verify.",
        epilog=EXIT_CODES,
    )
    _common(bootstrap)
    bootstrap.add_argument(
        "--mode",
        choices=("token_range", "sstable"),
        help="where the rows are read: SELECTs, or snapshots of the nodes (default: scan.mode)",
    )
    bootstrap.add_argument("--splits", type=_count, metavar="N", help="pieces of the ring (default: by estimated size)")
    bootstrap.add_argument(
        "--columns",
        type=parsed(_columns),
        metavar="NAME,…",
        help="copy only these value columns, and the key (default: all)",
    )
    bootstrap.add_argument(
        "--token-range", type=parsed(_token_range), metavar="START:END", help="copy only tokens above START, up to END"
    )
    bootstrap.add_argument("--where", metavar="CQL", help="copy only rows whose key fits, e.g. \"day >= '2026-01-01'\"")
    bootstrap.add_argument(
        "--restart", action="store_true", help="begin anew, even if an unfinished bootstrap could be continued"
    )
    bootstrap.add_argument(
        "--no-verify", dest="verify", action="store_false", help="do not compare source and replica afterwards"
    )
    bootstrap.add_argument("--enable-cdc", action="store_true", help="ALTER the table, so that the sync follows it")
    bootstrap.add_argument(
        "--cancel", action="store_true", help="end an unfinished bootstrap of the table; its stream goes on"
    )
    bootstrap.add_argument("--dry-run", action="store_true", help="check and plan only, copy nothing")
    bootstrap.set_defaults(
        command=_bootstrap,
        dag="bootstrap_table",
        parameters=("mode", "splits", "columns", "token_range", "where", "restart", "verify", "enable_cdc", "dry_run"),
    )

    verify = commands.add_parser(
        "verify",
        help="compare replicas with their sources",
        description="Start the DAG replica_verify: compare source and replica cell by cell.",
        epilog=EXIT_CODES,
    )
    _common(verify)
    verify.add_argument("--repair", action="store_true", help="read ranges that differ again, and correct the replica")
    verify.set_defaults(dag="replica_verify", parameters=("repair",))

    limits = commands.add_parser(
        "limits",
        help="show or change the limits of reading from the cluster",
        description="Show or change the limits of all runs together. A change takes effect within seconds; other "
        "limits stay as they are.",
        epilog=EXIT_CODES,
    )
    _conf(limits)
    for name, (option, meaning, _) in LIMITS.items():
        kind = _requests if name == "concurrent_requests" else _amount
        limits.add_argument(option, dest=name, type=kind, metavar="N", help=f"{meaning}; none: no limit")
    limits.add_argument("--reset", action="store_true", help="go back to the limits of the configuration")
    limits.set_defaults(command=_limits)
    add_service(commands, _conf)
    add_alarms(commands, _conf)
    add_errors(commands, _conf)
    add_schema(commands, _conf, parsed(_table))
    add_inspect(commands, config_path())
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table",
        action="append",
        type=parsed(_tables),
        metavar="KEYSPACE.TABLE",
        help="e.g. shop.orders, or a pattern with * and ?, e.g. 'shop.*'; several times for several",
    )
    parser.add_argument(
        "--tables-from", metavar="FILE", help="file with one name or pattern a line; # begins a comment"
    )
    _conf(parser)
    parser.add_argument("--wait", action="store_true", help="follow the run to its end and show its result")
    parser.set_defaults(command=_run_dag)


def _conf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conf",
        default=config_path(),
        metavar="PATH",
        help="ringsync.yaml with the same store that Airflow uses (default: $RINGSYNC_CONFIG, or config/ringsync.yaml)",
    )


def _table(text: str) -> str:
    return ".".join(printable(name) for name in parse_table_name(text))


def _tables(text: str) -> str:
    return ", ".join(map(str, parse_table_patterns(text)))


def _amount(text: str) -> float:
    """Parse a limit; 0 stands for ``none``."""
    try:
        amount = 0.0 if text == "none" else float(text)
    except ValueError:
        amount = math.nan
    if text != "none" and not 0 < amount < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, nor none")
    return amount


def _requests(text: str) -> int:
    return 0 if text == "none" else _count(text)


def _columns(text: str) -> str:
    return ",".join(printable(name) for name in parse_column_names(text))


def _token_range(text: str) -> str:
    parse_token_range(text)
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


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
    forecasts = [table["forecast"] for table in tables]
    total = {name: sum(forecast[name] for forecast in forecasts) for name in ("rows", "rows_low", "bytes")}
    rows = f"{total['rows']:,} rows"
    if any(forecast["at_least"] for forecast in forecasts):
        rows = f"at least {rows}: there are partitions too large to see their end"
    elif not all(forecast["exact"] for forecast in forecasts):
        high = sum(forecast["rows_high"] for forecast in forecasts)
        rows = f"about {rows} ({total['rows_low']:,} to {high:,})"
    parts = [rows, f"{total['bytes'] / 1e6:,.1f} MB", f"{sum(table['splits'] for table in tables):,} splits"]
    if seconds := sum(forecast["seconds_at_the_limits"] or 0 for forecast in forecasts):
        parts.append(f"{duration(seconds)} at the configured limits")
    continued = [table["continues"] for table in tables if table["continues"]]
    if "tables" in report and continued:
        parts.append(f"would continue {len(continued):,} bootstraps")
    elif continued:
        parts.append(f"would continue bootstrap {continued[0]}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
