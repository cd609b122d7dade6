"""The frame of every Spark application: arguments, configuration, report, exit code."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ringsync.config import Config, ConfigError, load_config
from ringsync.cql.identifiers import parse_table_name
from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore, StorageError
from ringsync.wiring import store_of

Report = dict[str, Any]


class ExitCode(IntEnum):
    """Exit codes of applications and of cdcservice, like dsbulk's (docs/airflow.md)."""

    OK = 0
    COMPLETED_WITH_ERRORS = 1
    TOO_MANY_ERRORS = 2
    FATAL = 3
    INTERRUPTED = 4
    CRASHED = 5


class StepError(Exception):
    """A step cannot go on: the message says what failed and what to do.

    :cvar code: the exit code
    """

    code = ExitCode.FATAL


@dataclass(frozen=True)
class Application:
    """One run of one application.

    :ivar name: e.g. ``bootstrap_scan``; its reports are under ``reports/<name>/``
    :ivar table: keyspace and table; None: the application works on all tables with cdc
    :ivar run: id of the run, the same for all steps of one DAG run
    :ivar options: further arguments by name
    """

    name: str
    config_path: str
    config: Config
    store: ObjectStore
    table: tuple[str, str] | None
    run: str
    options: argparse.Namespace

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
) -> int:
    """Run a step as a program.

    The step's report is written to ``reports/<name>/<run>.json``, also when it fails, and printed. An error is one line
    that begins with ``ringsync: error:``. Our own errors carry their remedy; anything else is a crash and shows its
    traceback.

    :param step: gets the run, returns its report and exit code
    :param options: adds the step's own arguments
    :param of_table: whether the step works on one table, which ``--table`` names
    """
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--conf", required=True, metavar="PATH", help="ringsync.yaml")
    if of_table:
        parser.add_argument("--table", required=True, metavar="KEYSPACE.TABLE")
    parser.add_argument("--run", required=True, type=_run_id, metavar="ID", help="id of the run")
    options(parser)
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.conf)
        table = parse_table_name(arguments.table) if of_table else None
        application = Application(name, arguments.conf, config, store_of(config), table, arguments.run, arguments)
        return _run(application, step)
    except (ConfigError, ValueError, StorageError) as error:
        return _fail(str(error), ExitCode.FATAL)


def _run(application: Application, step: Callable[[Application], tuple[Report, ExitCode]]) -> ExitCode:
    from ringsync.cluster.session import ClusterError
    from ringsync.ledger.passes import BootstrapReplacedError, TableReplacedError
    from ringsync.replica.base import ReplicaMismatchError
    from ringsync.replica.delta_log import DeltaLogError
    from ringsync.ring.ring import RingError
    from ringsync.schema.table import SchemaError
    from ringsync.state.bootstrap import LostOwnershipError
    from ringsync.state.session import StateError

    started = time.time()
    try:
        outcome, code = step(application)
        if "error" in outcome:
            _fail(outcome["error"], code)
    except LostOwnershipError as error:
        # No report: the run that has taken over may have the same id, and writes its own.
        return _fail(str(error), ExitCode.FATAL)
    except StepError as error:
        outcome, code = {"error": str(error)}, _fail(str(error), error.code)
    except (
        *(ConfigError, StorageError, ClusterError, SchemaError, StateError, RingError),
        *(ReplicaMismatchError, DeltaLogError, BootstrapReplacedError, TableReplacedError),
    ) as error:
        outcome, code = {"error": str(error)}, _fail(str(error), ExitCode.FATAL)
    except KeyboardInterrupt:
        outcome, code = {"error": "interrupted"}, _fail("interrupted", ExitCode.INTERRUPTED)
    except Exception as error:
        traceback.print_exc()
        known = remedy_inside(error)
        outcome = {"error": known or f"{type(error).__name__}: {error}"}
        code = _fail(known, ExitCode.FATAL) if known else _fail(outcome["error"], ExitCode.CRASHED)
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
        print("ringsync: report:", json.dumps(report, default=str), flush=True)
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


def remedy_inside(error: Exception) -> str | None:
    """Find our own error inside one of Spark's, whose text carries the traceback of the Python worker."""
    texts = re.findall(r"ringsync\.[\w.]*Error: (.*(?:\n(?!\s*(?:at |File |Traceback|$)).*)*)", str(error))
    return texts[-1].strip() if texts else None


def plain(error: Exception) -> str:
    """Return what went wrong; for an error in a Spark task, our own message without the traceback."""
    return (remedy_inside(error) or f"{type(error).__name__}: {error}")[:2000]


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
