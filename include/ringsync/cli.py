"""``cdcservice``: starts ringsync's DAGs from a command line and follows them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from rich.console import Console

from ringsync import __version__
from ringsync.airflow_client import AirflowClient, AirflowError, AirflowUnreachableError, RunState, TaskState
from ringsync.config import Config, ConfigError, load_config
from ringsync.cql.identifiers import parse_table_name, printable
from ringsync.orchestration import config_path, safe_run_id
from ringsync.progress import ProgressReader, duration, follow
from ringsync.steps.application import ExitCode
from ringsync.storage.port import NotFoundError, ObjectStore, StorageError

APPLICATIONS = {
    ("bootstrap_table", "prepare"): "bootstrap_prepare",
    ("bootstrap_table", "scan"): "bootstrap_scan",
    ("bootstrap_table", "verify"): "replica_verify",
    ("replica_verify", "verify"): "replica_verify",
}
"""Spark application of each task, whose report is ``reports/<application>/<run>.json``."""

PATIENCE_S = 300.0
"""Seconds that Airflow may be unreachable while a run is followed: it may be restarted."""

EXIT_CODES = """\
exit codes: 0 done; 1 done, with differences or errors; 2 given up, too many errors; 3 fatal: arguments,
configuration, connection or rights; 4 interrupted (the run goes on in Airflow); 5 crashed"""


@dataclass(frozen=True)
class Run:
    """A DAG run that was started from here."""

    client: AirflowClient
    store: ObjectStore
    dag: str
    run: str
    table: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Wrong arguments are fatal: code 3, not argparse's own 2, which means too many errors here."""
        self.print_usage(sys.stderr)
        self.exit(ExitCode.FATAL, f"ringsync: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run cdcservice.

    :param argv: arguments; those of the process if not given
    :returns: the exit code
    """
    arguments = _parser().parse_args(argv)
    console = Console(soft_wrap=True)
    try:
        run = start(
            load_config(arguments.conf), arguments.dag, arguments.table, arguments.parameters(arguments), console
        )
        page = run.client.run_page(run.dag, run.run)
        if not arguments.wait:
            _say(console, f"look at it: {page}\n--wait follows it to the end")
            return ExitCode.OK
        try:
            return report_end(run, wait(run, console), console)
        except KeyboardInterrupt:
            _say(console, f"no longer followed, but the run goes on in Airflow: {page}")
            return ExitCode.INTERRUPTED
    except (ConfigError, AirflowError, StorageError) as error:
        print(f"ringsync: error: {error}", file=sys.stderr)
        return ExitCode.FATAL
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _parser() -> _Parser:
    parser = _Parser(
        prog="cdcservice",
        description="Verified replicas and change streams of Cassandra and ScyllaDB tables, through Airflow and Spark.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    bootstrap = commands.add_parser(
        "bootstrap",
        help="make a verified replica of a table",
        description="Start the DAG bootstrap_table: plan, read by token ranges, write replica and stream, verify.",
        epilog=EXIT_CODES,
    )
    _common(bootstrap)
    bootstrap.add_argument("--splits", type=_count, metavar="N", help="pieces of the ring (default: by estimated size)")
    bootstrap.add_argument("--no-verify", action="store_true", help="do not compare source and replica afterwards")
    bootstrap.add_argument("--dry-run", action="store_true", help="check and plan only, copy nothing")
    bootstrap.set_defaults(
        dag="bootstrap_table",
        parameters=lambda given: {"splits": given.splits, "verify": not given.no_verify, "dry_run": given.dry_run},
    )

    verify = commands.add_parser(
        "verify",
        help="compare a replica with its source",
        description="Start the DAG replica_verify: compare source and replica cell by cell.",
        epilog=EXIT_CODES,
    )
    _common(verify)
    verify.add_argument("--repair", action="store_true", help="read what differs again and mend the replica")
    verify.set_defaults(dag="replica_verify", parameters=lambda given: {"repair": given.repair})
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", required=True, type=_table, metavar="KEYSPACE.TABLE", help="e.g. shop.orders")
    parser.add_argument(
        "--conf",
        default=config_path(),
        metavar="PATH",
        help="ringsync.yaml with the same store that Airflow uses (default: $RINGSYNC_CONFIG, or config/ringsync.yaml)",
    )
    parser.add_argument("--wait", action="store_true", help="follow the run to its end and show its result")


def _table(text: str) -> str:
    try:
        return ".".join(printable(name) for name in parse_table_name(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def start(config: Config, dag: str, table: str, parameters: dict[str, Any], console: Console) -> Run:
    """Trigger a DAG for a table.

    :param dag: ``bootstrap_table`` or ``replica_verify``
    :param table: ``keyspace.table``
    :param parameters: the DAG's other parameters
    :raises AirflowError: Airflow cannot start it
    :raises ConfigError: a key of the configuration is wrong
    """
    airflow = config.airflow
    client = AirflowClient(airflow.url, airflow.username, airflow.password.resolve("airflow.password"))
    run = safe_run_id(f"{table}__{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    store = config.open_store()
    if client.trigger(dag, run, {"table": table, **parameters}, note=table):
        _say(console, f"DAG {dag} was paused in Airflow; it is unpaused now")
    _say(console, f"started {dag} for {table}, run {run}")
    return Run(client, store, dag, run, table)


def wait(run: Run, console: Console, poll_s: float = 1.0) -> RunState:
    """Follow a run to its end, with its progress on the console.

    :param poll_s: seconds between two looks
    :raises AirflowError: Airflow forgot the run, or was away for longer than :data:`PATIENCE_S`
    """
    last: RunState | None = None
    seen = time.monotonic()

    def stage() -> str | None:
        nonlocal last, seen
        try:
            last = run.client.state(run.dag, run.run)
        except AirflowUnreachableError:
            if time.monotonic() - seen > PATIENCE_S:
                raise
            return "waiting for Airflow"
        seen = time.monotonic()
        if last.finished:
            return None
        return f"{last.current.task} ({last.current.state})" if last.current else last.state

    follow(ProgressReader(run.store, run.run).read, stage, console, run.table, poll_s)
    assert last is not None
    return last


def report_end(run: Run, end: RunState, console: Console) -> ExitCode:
    """Print what came out of each task of a finished run.

    :returns: that of the application that failed, or 0
    """
    code = ExitCode.OK
    for task in end.tasks:
        application = APPLICATIONS.get((run.dag, task.task), "")
        report = read_report(run.store, application, run.run)
        if task.state == "failed":
            code, why = _why(run, task, report)
            _say(console, f"{task.task}: failed: {why}")
        elif task.state == "success":
            _say(console, f"{task.task}: {_summary(report)}")
        else:
            _say(console, f"{task.task}: {task.state.replace('_', ' ')}")
    if end.state == "failed":
        _say(console, f"look at it: {run.client.run_page(run.dag, run.run)}")
        return code or ExitCode.CRASHED
    return ExitCode.OK


def read_report(store: ObjectStore, application: str, run: str) -> dict[str, Any]:
    """The JSON report of one application in one run; empty if it wrote none."""
    try:
        report: dict[str, Any] = json.loads(store.get(f"reports/{application}/{run}.json"))
    except NotFoundError:
        return {}
    return report


def _why(run: Run, task: TaskState, report: dict[str, Any]) -> tuple[ExitCode, str]:
    """Exit code and reason of a failed task: the application's own report, or the log where it wrote none."""
    if code := report.get("exit_code"):
        return ExitCode(code), str(report.get("error") or _summary(report))
    failure = run.client.failure(run.dag, run.run, task)
    return ExitCode.FATAL if failure.final else ExitCode.CRASHED, failure.message


def _summary(report: dict[str, Any]) -> str:
    """The numbers of a report that matter to everybody."""
    parts = [f"{report[name]:,} {name}" for name in ("ranges", "rows", "cells", "differences") if _number(report, name)]
    seconds = report.get("seconds") or 0
    if seconds:
        parts.append(duration(seconds) if seconds >= 60 else f"{seconds:.1f} s")
    if _number(report, "rows") and seconds:
        parts.append(f"{report['rows'] / seconds:,.0f} rows/s")
    return ", ".join(parts) or "done"


def _number(report: dict[str, Any], name: str) -> bool:
    return isinstance(report.get(name), int) and not isinstance(report.get(name), bool)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
