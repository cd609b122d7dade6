"""Whether the sync works: what its loops say of themselves, and what Airflow says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringsync.airflow_client import RunState
from ringsync.progress import duration
from ringsync.status import BOOTSTRAPS, STALE_AFTER_S, Status, age_s

DAGS = ("commitlog_sync", "out_of_sequence", "replica_merge")
"""What ``cdcservice start`` switches on."""


HOMELESS_MS = 180_000
"""Rows of a table that nobody has named wait so long before that is a problem: plans come once in an interval."""

ABANDONED_AFTER_S = 300.0
"""Nobody works on a bootstrap that has said nothing for so many seconds: between two tasks there are fewer."""


@dataclass(frozen=True)
class DagHealth:
    """A DAG of the sync.

    :ivar run: the one that began last; None: it never ran
    """

    paused: bool
    run: RunState | None


def expected_loops(queues: Sequence[str]) -> tuple[str, ...]:
    """Return keys of the status objects that must be there.

    :param queues: names of the workers' queues, ``config.sync.queues``
    """
    return (*(f"commitlog_stage/{queue}" for queue in queues), "bucket_close/close", "out_of_sequence/queue")


def problems(
    statuses: Mapping[str, Status], dags: Mapping[str, DagHealth], queues: Sequence[str], stopped: bool, now_s: float
) -> list[str]:
    """Return what is wrong, each in a sentence; nothing: all is well.

    :param statuses: what the loops last said
    :param dags: what Airflow says of the DAGs that could be asked
    :param stopped: whether ``cdcservice stop`` was the last word
    """
    if stopped:
        return ["stopped: cdc_raw of the nodes fills until cdcservice start"]
    found = [problem for dag, health in dags.items() for problem in _of_dag(dag, health)]
    for loop in expected_loops(queues):
        if loop not in statuses:
            found.append(f"{loop}: no sign of life yet")
        elif (age := age_s(statuses[loop], now_s)) > STALE_AFTER_S:
            found.append(f"{loop}: no sign of life for {age:.0f} s")
    found += [problem for loop, status in statuses.items() for problem in _of_bootstrap(loop, status, now_s)]
    return [*found, *(problem for loop, status in statuses.items() for problem in _told(loop, status))]


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
    """Return an unfinished bootstrap that nobody works on; the stream of a table that is followed waits behind it."""
    if loop.startswith(BOOTSTRAPS) and (age := age_s(status, now_s)) > ABANDONED_AFTER_S:
        yield (
            f"{status['table']}: bootstrap {status['bootstrap']} is not finished, and nobody has worked on it for "
            f"{duration(age)}: run cdcservice bootstrap --table {status['table']} again, which goes on with it, or "
            "with --cancel, which ends it"
        )


def _told(loop: str, status: Status) -> Iterator[str]:
    """Return what a loop itself says is wrong."""
    if status.get("error"):
        yield f"{loop}: {status['error']}"
    if (busy := status.get("busy")) and (age := (status["at_ms"] - busy["since_ms"]) / 1000) > STALE_AFTER_S:
        where = f", and is at {busy['with']}" if busy["with"] else ""
        yield f"{loop}: has come to no end of its cycle for {age:.0f} s{where}: all else waits"
    named = status.get("broken", {})
    for file, reason in named.items():
        yield f"{loop}: {file} cannot be used: {reason}"
    if (more := (status.get("files_broken") or 0) - len(named)) > 0:
        yield f"{loop}: {more:,} more files of late rows cannot be used: its report says why"
    for node, one in status.get("nodes", {}).items():
        where = f"{loop}: node {one.get('endpoint', node)}"
        if one.get("error"):
            yield f"{where}: {one['error']}"
        if one.get("errors"):
            yield f"{where}: {one['errors']:,} records cannot be decoded: table processor_error"
    for node, reason in status.get("unread", {}).items():
        yield f"node {node}: {reason}; its token ranges are published one window later"
    yield from unpublished(loop, status, HOMELESS_MS)
    for table, one in status.get("tables", {}).items():
        for key, value in one.items():
            if key.endswith("error") and value:
                yield f"{table}: {value}"


def unpublished(loop: str, status: Status, homeless_ms: int = 0) -> Iterator[str]:
    """Return what ``bucket_close`` says of what it cannot publish, but for what a table says itself.

    :param homeless_ms: rows of a table that nobody has named have waited so long
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
            yield f"{loop}: {rows:,} staged rows of table id {table} wait, and nobody knows the table"
