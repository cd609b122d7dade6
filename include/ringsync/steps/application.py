"""The frame of every Spark application: arguments, configuration, report, exit code."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ringsync.config import Config, ConfigError, load_config
from ringsync.config.last_good import Outdated, load_last_good
from ringsync.cql.identifiers import TablePattern, parse_table_patterns
from ringsync.installed import installed
from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore, StorageError
from ringsync.terminal import ExitCode as ExitCode
from ringsync.wiring import store_of

Report = dict[str, Any]


class StepError(Exception):
    """A step cannot go on: the message says what failed and what to do.

    :cvar code: the exit code
    """

    code = ExitCode.FATAL


class TaskFailedError(StepError):
    """A task could not go on with its table, and trying again does not help.

    :param reason, exit_code: as :func:`task_failure` gives them
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.code = ExitCode(exit_code)


@dataclass(frozen=True)
class Application:
    """One run of one application.

    :ivar name: e.g. ``bootstrap_scan``; its reports are under ``reports/<name>/``
    :ivar table: keyspace and table; None: the application works on several tables, or on all with cdc
    :ivar run: id of the run, the same for all steps of one DAG run
    :ivar options: further arguments by name
    :ivar patterns: names and patterns of the tables of a run for several; empty: it is for one, or for all with cdc
    :ivar config_error: what is wrong with the configuration, instead of which the last good one is used
    :ivar lasting: whether it goes on with the last good configuration while the file is wrong
    """

    name: str
    config_path: str
    config: Config
    store: ObjectStore
    table: tuple[str, str] | None
    run: str
    options: argparse.Namespace
    patterns: tuple[TablePattern, ...] = ()
    config_error: str = ""
    lasting: bool = False

    def outdated(self) -> Outdated:
        """Return what tells whether a good configuration other than this run's is there by now."""
        return Outdated(self.config_path, self.config, self.config_error, lasting=self.lasting)

    def of(self, table: tuple[str, str]) -> Application:
        """Return this application as if it were for this table only."""
        return replace(self, table=table, patterns=())

    @property
    def one_table(self) -> tuple[str, str]:
        """Keyspace and table of an application that works on one."""
        assert self.table is not None, f"{self.name} was started without a table"
        return self.table


def run_application(
    name: str,
    description: str,
    step: Callable[[Application], tuple[Report, ExitCode]],
    argv: Sequence[str],
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    *,
    of_table: bool = True,
    lasting: bool = False,
) -> int:
    """Run a step as a program.

    The step's report is written to ``reports/<name>/<run>.json``, also when it fails, and printed. An error is one line
    that begins with ``ringsync: error:``. Our own errors carry their remedy; anything else is a crash and shows its
    traceback.

    :param step: gets the run, returns its report and exit code
    :param options: adds the step's own arguments
    :param of_table: whether the step works on the tables that ``--table`` names
    :param lasting: whether it goes on with the last good configuration while the file is wrong
    """
    installed()  # what this process runs, whatever is installed meanwhile
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--conf", required=True, metavar="PATH", help="ringsync.yaml")
    if of_table:
        described = "name of a table; or several names and patterns, between commas or spaces"
        parser.add_argument("--table", required=True, metavar="KEYSPACE.TABLE,…", help=described)
    parser.add_argument("--run", required=True, type=_run_id, metavar="ID", help="id of the run")
    options(parser)
    arguments = parser.parse_args(argv)
    if GATEWAY in os.environ:
        end_with_parent()
    try:
        config, wrong = load_last_good(arguments.conf, waits=True) if lasting else (load_config(arguments.conf), "")
        patterns = parse_table_patterns(arguments.table) if of_table else ()
        common = (name, arguments.conf, config, store_of(config))
        application = Application(*common, None, arguments.run, arguments, patterns, wrong, lasting)
        is_one = len(patterns) == 1 and patterns[0].is_name
        return _run(application.of(patterns[0].name) if is_one else application, step)
    except (ConfigError, ValueError, StorageError) as error:
        return _fail(str(error), ExitCode.FATAL)


GATEWAY = "PYSPARK_GATEWAY_PORT"
"""Variable that spark-submit sets for the driver's Python process, which it starts."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let Linux kill this process as soon as the JVM of spark-submit ends that started it, killed or not: without it,
    a driver that Airflow has stopped would go on with whatever needs no JVM (man 2 prctl)."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended in between
        os.kill(os.getpid(), signal.SIGKILL)


def _run(application: Application, step: Callable[[Application], tuple[Report, ExitCode]]) -> ExitCode:
    from ringsync.state.bootstrap import LostOwnershipError

    started = time.time()
    try:
        outcome, code = step(application)
        if "error" in outcome:
            _fail(outcome["error"], code)
    except LostOwnershipError as error:
        # No report: the run that has taken over may have the same id, and writes its own.
        return _fail(str(error), ExitCode.FATAL)
    except KeyboardInterrupt:
        outcome, code = {"error": "interrupted"}, _fail("interrupted", ExitCode.INTERRUPTED)
    except Exception as error:
        message, code = explain(error)
        outcome, code = {"error": message}, _fail(message, code)
    report = {
        "application": application.name,
        "run": application.run,
        **(dict(zip(("keyspace", "table"), application.table, strict=True)) if application.table else {}),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "exit_code": int(code),
        **outcome,
    }
    try:
        _put_report(application, json.dumps(report, indent=2, default=str).encode())
        # Several tables have long reports: who wants them reads the object.
        shown = {name: value for name, value in report.items() if name != "tables"} if application.patterns else report
        print("ringsync: report:", json.dumps(shown, default=str), flush=True)
    except StorageError as error:
        # The first error decides whether the application is tried again.
        return code or _fail(str(error), ExitCode.FATAL)
    return code


def _put_report(application: Application, report: bytes) -> None:
    """Put a run's report. One that is there stays, under the time when its run began: it is of an earlier try, or of a
    run of which Airflow knows nothing any more, because its database was restored."""
    path = f"reports/{application.name}/{application.run}"
    with suppress(NotFoundError, ChecksumError):
        before = application.store.get(f"{path}.json")
        began = re.search(rb'"started_at": "([^"/]+)"', before)
        application.store.put(f"{path}~{began[1].decode() if began else 'unknown'}.json", before)
    application.store.put(f"{path}.json", report)


def _fail(message: str, code: ExitCode) -> ExitCode:
    print(f"ringsync: error: {message}", file=sys.stderr, flush=True)
    return code


def explain(error: Exception) -> tuple[str, ExitCode]:
    """Return the message and the exit code of an error; if it is none of ours, show its traceback."""
    from ringsync.cluster.session import ClusterError
    from ringsync.cql.types import CqlTypeError
    from ringsync.ledger.passes import BootstrapReplacedError, TableReplacedError
    from ringsync.replica.delta_log import DeltaLogError
    from ringsync.replica.errors import ReplicaMismatchError
    from ringsync.ring.ring import RingError
    from ringsync.schema.table import SchemaError
    from ringsync.state.session import StateError

    if isinstance(error, StepError):
        return str(error), error.code
    ours = (
        *(ConfigError, StorageError, ClusterError, SchemaError, CqlTypeError, StateError, RingError),
        *(ReplicaMismatchError, DeltaLogError, BootstrapReplacedError, TableReplacedError),
    )
    if isinstance(error, ours):
        return str(error), ExitCode.FATAL
    traceback.print_exception(error)
    known = remedy_inside(error)
    return known or f"{type(error).__name__}: {error}", ExitCode.FATAL if known else ExitCode.CRASHED


def remedy_inside(error: Exception) -> str | None:
    """Find our own error inside one of Spark's, whose text carries the traceback of the Python worker."""
    texts = re.findall(r"ringsync\.[\w.]*Error: (.*(?:\n(?!\s*(?:at |File |Traceback|$)).*)*)", str(error))
    return texts[-1].strip() if texts else None


def plain(error: Exception) -> str:
    """Return what went wrong; for an error in a Spark task, our own message, or Spark's, without the traceback."""
    text = remedy_inside(error) or f"{type(error).__name__}: {error}"
    return re.split(r"\n\s+at |\n+Driver stacktrace:", text)[0].strip()[:2000]


def task_failure(error: Exception) -> dict[str, Any]:
    """Describe an error of a task for the driver; if it is none of ours, show its traceback in the task's log."""
    if type(error).__module__.startswith("ringsync."):
        return {"reason": str(error), "exit_code": int(ExitCode.FATAL)}
    traceback.print_exception(error)
    return {"reason": f"{type(error).__name__}: {error}"[:2000], "exit_code": int(ExitCode.CRASHED)}


def driver_host(context: Any) -> str:
    """Return the address on which executors find the Spark driver."""
    return str(context.getConf().get("spark.driver.host", "127.0.0.1"))


def spark_is_gone(context: Any) -> bool:
    """Tell whether Spark itself has ended: then no table can be served."""
    try:
        return bool(context._jsc.sc().isStopped())
    except Exception:  # any error: a JVM that does not answer does no work
        return True


def _run_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,200}", text):
        raise argparse.ArgumentTypeError("letters, digits and _ . : + - only, beginning with a letter or digit")
    return text
