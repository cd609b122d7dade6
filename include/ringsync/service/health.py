"""The health of the sync: by the status of its loops, and by Airflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringsync.airflow_client import RunState
from ringsync.progress import duration
from ringsync.state.processor_error import OVERFLOW
from ringsync.status import BOOTSTRAPS, STALE_AFTER_S, Status, age_s

SCHEMA = "schema_update/schema"
"""Name of the status of the schema updater."""

DAGS = ("commitlog_sync", "out_of_sequence", "replica_merge", "schema_updater", "archive_reprocess")
"""What ``cdcservice start`` switches on, and ``stop`` off."""

ARCHIVE = "commitlog_archive/"
"""Beginning of the names of the archive's statuses."""

HOMELESS_MS = 180_000
"""Rows of an unknown table may wait so long before that is a problem: a new plan may name it, once in an interval."""

ABANDONED_AFTER_S = 300.0
"""Seconds without a sign of life before a bootstrap counts as abandoned: between two of its tasks there are fewer."""


@dataclass(frozen=True)
class DagHealth:
    """A DAG of the sync.

    :ivar run: the one that began last; None: it never ran
    """

    paused: bool
    run: RunState | None


def expected_loops(queues: Sequence[str], *, archives: bool = False) -> tuple[str, ...]:
    """Return keys of the status objects that must be there.

    :param queues: names of the workers' queues, ``config.sync.queues``
    :param archives: whether commit logs are archived: ``archive.policy`` is not off
    """
    stages = tuple(f"commitlog_stage/{queue}" for queue in queues)
    return (
        *stages,
        "bucket_close/close",
        "out_of_sequence/queue",
        SCHEMA,
        *(archive_loops(queues) if archives else ()),
    )


def archive_loops(queues: Sequence[str]) -> tuple[str, ...]:
    """Return keys of the status objects of the loops that archive."""
    return tuple(f"{ARCHIVE}{queue}" for queue in queues)


def problems(
    statuses: Mapping[str, Status],
    dags: Mapping[str, DagHealth],
    queues: Sequence[str],
    stopped: bool,
    now_s: float,
    *,
    archives: bool = False,
) -> list[str]:
    """Return a sentence for each problem; none: all is well.

    :param statuses: the last status of each loop
    :param dags: the DAGs, if Airflow answers
    :param stopped: whether ``cdcservice stop`` was run, and ``start`` not since
    :param archives: whether commit logs are archived
    """
    if stopped:
        where = "commit logs are archived" if archives else "cdc_raw of the nodes fills"
        of_archive = [loop for loop in archive_loops(queues) if archives]
        return [
            f"stopped: {where} until cdcservice start",
            *(problem for dag, health in dags.items() if dag not in DAGS for problem in _of_dag(dag, health)),
            *_silent(of_archive, statuses, now_s),
            *(problem for loop in of_archive for problem in _told(loop, statuses.get(loop, {}))),
        ]
    found = [problem for dag, health in dags.items() for problem in _of_dag(dag, health)]
    found += _silent(expected_loops(queues, archives=archives), statuses, now_s)
    found += [problem for loop, status in statuses.items() for problem in _of_bootstrap(loop, status, now_s)]
    return [*found, *(problem for loop, status in statuses.items() for problem in _told(loop, status))]


def _silent(loops: Iterable[str], statuses: Mapping[str, Status], now_s: float) -> Iterator[str]:
    for loop in loops:
        if loop not in statuses:
            yield f"{loop}: no sign of life yet"
        elif (age := age_s(statuses[loop], now_s)) > STALE_AFTER_S:
            yield f"{loop}: no sign of life for {age:.0f} s"


def _of_dag(dag: str, health: DagHealth) -> Iterator[str]:
    if health.paused:
        yield f"DAG {dag} is paused: cdcservice start"
    if health.run is not None:
        if health.run.state == "failed":
            yield f"DAG {dag}: its last run failed, {health.run.run}"
        for task in health.run.tasks:
            if task.state == "failed":
                yield f"DAG {dag}: task {task.task} failed: see its log in Airflow"


def _of_bootstrap(loop: str, status: Status, now_s: float) -> Iterator[str]:
    """Yield a problem if an unfinished bootstrap is abandoned: the stream of its table waits for it."""
    if loop.startswith(BOOTSTRAPS) and (age := age_s(status, now_s)) > ABANDONED_AFTER_S:
        yield (
            f"{status['table']}: bootstrap {status['bootstrap']} is not finished, and nobody has worked on it for "
            f"{duration(age)}: run cdcservice bootstrap --table {status['table']} again, which goes on with it, or "
            "with --cancel, which ends it"
        )


def _told(loop: str, status: Status) -> Iterator[str]:
    """Yield the problems that the status of a loop names."""
    told = (status.get("error"), *status.get("problems", ()))
    yield from (f"{loop}: {problem}" for problem in told if problem)
    if (busy := status.get("busy")) and (age := (status["at_ms"] - busy["since_ms"]) / 1000) > STALE_AFTER_S:
        where = f", and is at {busy['with']}" if busy["with"] else ""
        yield f"{loop}: its cycle has not ended for {age:.0f} s{where}: all else waits"
    named = status.get("broken", {})
    for file, reason in named.items():
        yield f"{loop}: {file} cannot be used: {reason}"
    if (more := (status.get("files_broken") or 0) - len(named)) > 0:
        yield f"{loop}: {more:,} more files of late rows cannot be used: its report says why"
    for host, node in status.get("nodes", {}).items():
        where = f"{loop}: node {node.get('endpoint', host)}"
        if node.get("error"):
            yield f"{where}: {node['error']}"
        if node.get("errors"):
            yield f"{where}: {node['errors']:,} records cannot be decoded: cdcservice errors list"
        if node.get("errors_surplus"):
            yield (
                f"{where}: {node['errors_surplus']:,} records that cannot be decoded are more than "
                f"sync.max_errors_per_hour: they are in {OVERFLOW}{host}/ of the object store"
            )
    for node, reason in status.get("unread", {}).items():
        yield f"node {node}: {reason}; its token ranges are published one window later"
    yield from unpublished(loop, status, HOMELESS_MS)
    for table, fields in status.get("tables", {}).items():
        for key, value in fields.items():
            if key.endswith("error") and value:
                yield f"{table}: {value}"


def unpublished(loop: str, status: Status, homeless_ms: int = 0) -> Iterator[str]:
    """Yield what ``bucket_close`` cannot publish, except the errors of single tables that it serves.

    :param homeless_ms: shortest wait of an unknown table's rows that is a problem
    """
    for table, reason in status.get("left_out", {}).items():
        yield f"{table}: not followed: {reason}"
    for table_id, reason in status.get("others_failed", {}).items():
        yield f"{loop}: table id {table_id}, which is not planned any more, waits: {reason}"
    for key, reason in status.get("commits_broken", {}).items():
        yield f"{loop}: {key} cannot be read, and what it lists is not published: {reason}"
    since_ms = status.get("homeless_since_ms", {})
    for table, rows in status.get("rows_homeless", {}).items():
        if status["at_ms"] - since_ms.get(table, 0) >= homeless_ms:
            yield f"{loop}: {rows:,} staged rows of table id {table} wait, and the table is unknown"
