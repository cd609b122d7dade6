"""The tables of a run, and their work: each table's is its own, and so is its failure (docs/bootstrap.md).

A step for several tables does each one's work in a few threads of the driver. If a table fails, the others go on. As
long as a table is left for the next step, the step itself does not fail; the last step of the run names all tables that
have failed in any step, and fails for them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ringsync.cluster.shared import KnownTables, TableName
from ringsync.cql.identifiers import TablePattern, printable
from ringsync.state.bootstrap import LostOwnershipError
from ringsync.steps.application import Application, ExitCode, Report, explain, plain
from ringsync.steps.loop import start_workers
from ringsync.storage.port import get_json

Result = TypeVar("Result")
Piece = TypeVar("Piece")

TABLES_AT_ONCE = 8
"""Threads of the driver: the work of a table is mostly waiting for the cluster and the object store."""

LINE_INTERVAL_S = 10.0

TOLD = 10
"""Most failed tables that an error line names; the report lists all."""

BEFORE = {
    "sstable_snapshot": ("bootstrap_prepare",),
    "bootstrap_scan": ("bootstrap_prepare",),
    "bootstrap_drain": ("bootstrap_prepare", "bootstrap_scan"),
    "replica_verify": ("bootstrap_prepare", "bootstrap_scan", "bootstrap_drain"),
}
"""The steps before a step in the same run."""

SUMMED = (
    *("ranges", "rows", "cells", "pages", "bytes_read", "rows_read", "rows_committed", "rows_discarded"),
    *("rows_of_runs_before", "rows_written", "messages_published", "replica_rows", "replica_cells", "differences"),
    *("ranges_differing", "splits"),
)
"""Numbers of the tables' reports that the report of the run adds up."""


WORKERS_NEED = ("ringsync.steps.bootstrap.task", "ringsync.steps.replica.checksums")
"""What Spark's Python workers import before there is work."""

SMALL_BYTES = 1 << 20
"""A piece of work of fewer bytes costs less than a Spark task of its own."""

MOST_TOGETHER = 8
"""Most small pieces that one Spark task does."""


PIECES_AT_ONCE = 4
"""Threads of a task for the pieces of a group."""


@dataclass(frozen=True)
class Failure:
    """Why a table is not done.

    :ivar exit_code: exit code of a run for this table alone
    """

    error: str
    exit_code: int


@dataclass
class Outcome:
    """What became of the tables in a step.

    :ivar alone: whether the run is for one table: its errors are the run's
    :ivar reports: reports of the tables that are done, by name
    :ivar codes: the exit codes of these tables
    :ivar failures: by name of the table, or pattern
    """

    alone: bool = False
    reports: dict[str, Report] = field(default_factory=dict)
    codes: dict[str, ExitCode] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    def goes_on(self, table: TableName) -> bool:
        """Tell whether a table has not failed yet."""
        return text_of(table) not in self.failures

    def done(self, table: TableName, report: Report, code: ExitCode) -> None:
        """Note the end of a table's work; an exit code that is not 0 is a failure, with a report."""
        name = text_of(table)
        self.reports[name], self.codes[name] = report, code
        if code:
            self.failures[name] = Failure(str(report.get("error") or _differs(report)), int(code))

    def failed(self, table: TableName, error: Exception) -> None:
        """Note the failure of a table, and say it at once; if it is alone, raise it."""
        if self.alone:
            raise error
        message, code = explain(error)
        self.failures[text_of(table)] = Failure(message, int(code))
        print(f"ringsync: warning: {text_of(table)} fails, the other tables go on: {message}", flush=True)


def text_of(table: TableName) -> str:
    """Write a table's name as ``keyspace.table``, with quotes only where CQL needs them."""
    return ".".join(map(printable, table))


def chosen(patterns: Sequence[TablePattern], known: KnownTables) -> tuple[list[TableName], dict[str, Failure]]:
    """Find the tables that a run is for.

    :returns: the tables, each once: all that are named, also those that do not exist, and all that a pattern matches;
        and a failure for each pattern that matches none
    """
    tables: dict[TableName, None] = {}
    failures: dict[str, Failure] = {}
    for pattern in patterns:
        found = [pattern.name] if pattern.is_name else [name for name in known.names if pattern.matches(*name)]
        tables |= dict.fromkeys(found)
        if not found:
            failures[str(pattern)] = Failure(f"no table matches {pattern}", int(ExitCode.FATAL))
    return list(tables), failures


def each(
    run: str, tables: Iterable[TableName], work: Callable[[TableName], tuple[Report, ExitCode]], outcome: Outcome
) -> None:
    """Do the work of all tables, some at once, and note what became of each.

    :param work: does a table's work
    :raises LostOwnershipError: another process of this very run works on the tables: this one must end
    """
    for table, (report, code) in attempts(run, tables, work, outcome):
        outcome.done(table, report, code)


def attempts(
    run: str, tables: Iterable[TableName], work: Callable[[TableName], Result], outcome: Outcome
) -> Iterator[tuple[TableName, Result]]:
    """Yield what some work returns for each table, in the tables' order, and note the failures of the others. Now and
    then a line says how many tables are done.

    :raises LostOwnershipError: as :func:`each`
    """
    if outcome.alone:
        yield from ((table, work(table)) for table in tables)
        return
    pool = ThreadPoolExecutor(TABLES_AT_ONCE, thread_name_prefix="table")
    try:
        futures = [(table, pool.submit(work, table)) for table in tables]
        said_s = time.monotonic()
        for number, (table, future) in enumerate(futures):
            if time.monotonic() - said_s >= LINE_INTERVAL_S:
                said_s = time.monotonic()
                print(f"ringsync: {number:,} of {len(futures):,} tables", flush=True)
            try:
                result = future.result()
            except Exception as error:
                check_not_replaced(run, error)
                outcome.failed(table, error)
            else:
                yield table, result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def halved(
    work: Callable[[Sequence[Piece]], Sequence[Result]], pieces: Sequence[Piece], is_over: Callable[[], bool]
) -> list[Result | Exception]:
    """Do the work of several tables together. If that fails, do it again for halves of them, and so on.

    A worker that dies ends the Spark job of all tables; so only that table fails whose rows have killed it.

    :param work: gives the results of some pieces, in their order
    :param pieces: one for each table
    :param is_over: whether nobody can do the work any more, e.g. because Spark has ended: then its error is raised
    :returns: for each piece its result, or why the work fails for it alone
    """
    try:
        return [*work(pieces)]
    except Exception as error:
        if is_over():
            raise
        if len(pieces) == 1:
            return [error]
        print(f"ringsync: warning: {len(pieces)} tables are divided, since they fail: {plain(error)}", flush=True)
    middle = len(pieces) // 2
    return [*halved(work, pieces[:middle], is_over), *halved(work, pieces[middle:], is_over)]


class BackgroundSpark:
    """A Spark session that starts, with its Python workers, while the driver does other work.

    :param title: the name that Spark shows
    :param begin: whether to start it now; else it starts once it is asked for
    :param store: how Spark reaches the object store (:func:`ringsync.storage.spark_options`); None: it need not
    """

    def __init__(self, title: str, *, begin: bool, store: Mapping[str, str] | None = None) -> None:
        self._title, self._store = title, store
        self._session: Future[Any] | None = None
        if begin:
            # Two threads that import pyspark at once may find it half imported.
            importlib.import_module("ringsync.replica.session")
            self._session = ThreadPoolExecutor(1, thread_name_prefix="spark").submit(self._start)

    def session(self) -> Any:
        """Return the session, once it is there."""
        return self._session.result() if self._session else self._make()

    def _make(self) -> Any:
        from ringsync.replica.session import spark_session

        return spark_session(self._title, store=self._store)

    def _start(self) -> Any:
        session = self._make()
        start_workers(session.sparkContext, *WORKERS_NEED)
        return session


def check_not_replaced(run: str, error: Exception) -> None:
    """Raise the error if another process of the same run has taken over: it does all, and writes the report."""
    if isinstance(error, LostOwnershipError) and error.owner.startswith(f"{run} on "):
        raise error


def failed_before(application: Application) -> dict[str, Failure]:
    """Read which tables have failed in earlier steps of this run, by the steps' reports."""
    failures: dict[str, Failure] = {}
    for step in BEFORE.get(application.name, ()):
        report = get_json(application.store, f"reports/{step}/{application.run}.json") or {}
        failures |= {name: Failure(**why) for name, why in (report.get("failed") or {}).items()}
    return failures


def in_all(outcome: Outcome, *, last: bool) -> tuple[Report, ExitCode]:
    """Make the report of a step from its tables'.

    :param outcome: with the failures of earlier steps, too
    :param last: whether this is the run's last step
    :returns: exit code 1 if a table has failed, and no step follows or no table is left for it
    """
    reports, failures = outcome.reports, outcome.failures
    if outcome.alone:
        return next(iter(reports.values())), next(iter(outcome.codes.values()))
    done = [name for name in reports if name not in failures]
    report: Report = {
        "tables": reports,
        "tables_done": len(done),
        "tables_failed": len(failures),
        "failed": {name: vars(failures[name]) for name in sorted(failures)},
        **_sums(reports.values()),
    }
    if not failures or (done and not last):
        return report, ExitCode.OK
    codes = {failure.exit_code for failure in failures.values()}
    code = ExitCode.COMPLETED_WITH_ERRORS if done or len(codes) > 1 else ExitCode(codes.pop())
    return {**report, "error": _told(failures, len(done))}, code


def _sums(reports: Iterable[Mapping[str, Any]]) -> Report:
    found = list(reports)
    sums = {name: [report[name] for report in found if isinstance(report.get(name), int)] for name in SUMMED}
    return {name: sum(numbers) for name, numbers in sums.items() if numbers}


def _told(failures: Mapping[str, Failure], done: int) -> str:
    lines = [f"{name}: {failures[name].error}" for name in sorted(failures)]
    more = [f"and {len(lines) - TOLD} more: the report lists them"] if len(lines) > TOLD else []
    rest = f"the other {done} are done" if done else "none is done"
    return "\n".join([f"{len(failures)} of {len(failures) + done} tables failed, {rest}:", *lines[:TOLD], *more])


def _differs(report: Mapping[str, Any]) -> str:
    return f"{report.get('differences', 0)} differences between source and replica: the report lists them"


def together(sized: Iterable[tuple[float, Piece]], parallelism: int, *, large_first: bool = True) -> list[list[Piece]]:
    """Group small pieces of work for Spark's tasks.

    :param sized: approximate bytes of each piece, and the piece
    :param parallelism: tasks that run at the same time
    :param large_first: whether the largest pieces, which take longest, come first; else they come last
    """
    ordered = sorted(sized, key=lambda one: -one[0])
    large = [[piece] for size, piece in ordered if size >= SMALL_BYTES]
    small = [piece for size, piece in ordered if size < SMALL_BYTES]
    number = max(1, min(MOST_TOGETHER, len(small) // (4 * parallelism)))
    groups = large + [small[start : start + number] for start in range(0, len(small), number)]
    return groups if large_first else groups[::-1]


def at_once(work: Callable[[Piece], Result], group: Sequence[Piece]) -> Iterator[Result]:
    """Do the pieces of a group in a task, some at once: small ones mostly wait for the cluster and the object store.

    :returns: the results, in the order of the pieces
    """
    with ThreadPoolExecutor(min(PIECES_AT_ONCE, len(group))) as pool:
        yield from pool.map(work, group)
