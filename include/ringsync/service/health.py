"""The health of the sync: what is wrong, by the status of its loops and by Airflow.

Each problem is of one of the kinds below, and docs/runbook.md has a section for each kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

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


ALARMS = "alarms/alarms"
"""Name of the status of the loop that raises alarms."""


class Kind(StrEnum):
    """What kind of problem it is. The value is the title of its section in docs/runbook.md."""

    SEGMENTS_LOST = "segments-lost"
    CDC_RAW_FULL = "cdc-raw-full"
    NODE_LOG_UNREADABLE = "node-log-unreadable"
    NODE_BEHIND = "node-behind"
    RECORDS_UNDECODABLE = "records-undecodable"
    ARCHIVE_UNREADABLE = "archive-unreadable"
    LATE_ROWS_UNUSABLE = "late-rows-unusable"
    TABLE_FAILING = "table-failing"
    TABLE_LAGGING = "table-lagging"
    TABLE_LEFT_OUT = "table-left-out"
    REPLICA_FAILING = "replica-failing"
    KAFKA_FAILING = "kafka-failing"
    ROWS_UNCLAIMED = "rows-unclaimed"
    SCHEMA_UNSETTLED = "schema-unsettled"
    BOOTSTRAP_ABANDONED = "bootstrap-abandoned"
    SYNC_STOPPED = "sync-stopped"
    LOOP_SILENT = "loop-silent"
    LOOP_STUCK = "loop-stuck"
    LOOP_FAILING = "loop-failing"
    DAG_PAUSED = "dag-paused"
    DAG_FAILED = "dag-failed"
    AIRFLOW_AWAY = "airflow-away"
    STORE_AWAY = "store-away"
    ALARMS_UNTOLD = "alarms-untold"


_CRITICAL = frozenset({Kind.SEGMENTS_LOST, Kind.CDC_RAW_FULL})


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    :ivar where: the loop, node, table or DAG that has it; kind and where together say which problem it is
    :ivar text: a sentence for people
    """

    kind: Kind
    where: str
    text: str

    @property
    def is_critical(self) -> bool:
        """Whether the source is in danger, or changes are missing: somebody must act now."""
        return self.kind in _CRITICAL

    @property
    def page(self) -> str:
        """What to do about it."""
        return f"docs/runbook.md#{self.kind}"


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
    return (*stages, "bucket_close/close", "out_of_sequence/queue", SCHEMA, *lasting_loops(queues, archives))


def lasting_loops(queues: Sequence[str], archives: bool) -> tuple[str, ...]:
    """Return keys of the status objects of the loops that ``cdcservice stop`` leaves on."""
    return (ALARMS, *(f"{ARCHIVE}{queue}" for queue in queues if archives))


def problems(
    statuses: Mapping[str, Status],
    dags: Mapping[str, DagHealth],
    queues: Sequence[str],
    stopped: bool,
    now_s: float,
    *,
    archives: bool = False,
    lag_s: float = math.inf,
) -> list[Problem]:
    """Return what is wrong; nothing: all is well.

    :param statuses: the last status of each loop
    :param dags: the DAGs, if Airflow answers
    :param stopped: whether ``cdcservice stop`` was run, and ``start`` not since
    :param archives: whether commit logs are archived
    :param lag_s: age in seconds of a table's oldest open bucket that is a problem
    """
    lasting = lasting_loops(queues, archives)
    if stopped:
        where = "commit logs are archived" if archives else "cdc_raw of the nodes fills"
        return [
            Problem(Kind.SYNC_STOPPED, "sync", f"stopped: {where} until cdcservice start"),
            *(problem for dag, health in dags.items() if dag not in DAGS for problem in _of_dag(dag, health)),
            *_silent(lasting, statuses, now_s),
            *(problem for loop in lasting for problem in _told(loop, statuses.get(loop, {}))),
        ]
    found = [problem for dag, health in dags.items() for problem in _of_dag(dag, health)]
    found += _silent(expected_loops(queues, archives=archives), statuses, now_s)
    for loop, status in statuses.items():
        found += [*_of_bootstrap(loop, status, now_s), *_lagging(status, lag_s, now_s)]
    return [*found, *(problem for loop, status in statuses.items() for problem in _told(loop, status))]


def _silent(loops: Iterable[str], statuses: Mapping[str, Status], now_s: float) -> Iterator[Problem]:
    for loop in loops:
        if loop not in statuses:
            yield Problem(Kind.LOOP_SILENT, loop, f"{loop}: no sign of life yet")
        elif (age := age_s(statuses[loop], now_s)) > STALE_AFTER_S:
            yield Problem(Kind.LOOP_SILENT, loop, f"{loop}: no sign of life for {age:.0f} s")


def _of_dag(dag: str, health: DagHealth) -> Iterator[Problem]:
    if health.paused:
        yield Problem(Kind.DAG_PAUSED, dag, f"DAG {dag} is paused: cdcservice start")
    if health.run is not None:
        if health.run.state == "failed":
            yield Problem(Kind.DAG_FAILED, dag, f"DAG {dag}: its last run failed, {health.run.run}")
        for task in health.run.tasks:
            if task.state == "failed":
                text = f"DAG {dag}: task {task.task} failed: see its log in Airflow"
                yield Problem(Kind.DAG_FAILED, f"{dag}.{task.task}", text)


def _of_bootstrap(loop: str, status: Status, now_s: float) -> Iterator[Problem]:
    """Yield a problem if an unfinished bootstrap is abandoned: the stream of its table waits for it."""
    if loop.startswith(BOOTSTRAPS) and (age := age_s(status, now_s)) > ABANDONED_AFTER_S:
        text = (
            f"{status['table']}: bootstrap {status['bootstrap']} is not finished, and nobody has worked on it for "
            f"{duration(age)}: run cdcservice bootstrap --table {status['table']} again, which goes on with it, or "
            "with --cancel, which ends it"
        )
        yield Problem(Kind.BOOTSTRAP_ABANDONED, status["table"], text)


def _lagging(status: Status, lag_s: float, now_s: float) -> Iterator[Problem]:
    for table, fields in status.get("tables", {}).items():
        since_ms = fields.get("oldest_open_bucket_ms")
        if since_ms is not None and (age := now_s - since_ms / 1000) > lag_s:
            text = f"{table}: changes written {duration(age)} ago are not published yet"
            yield Problem(Kind.TABLE_LAGGING, table, text)


_OF_LOOP = {
    SCHEMA.partition("/")[0]: Kind.SCHEMA_UNSETTLED,
    "archive_reprocess": Kind.ARCHIVE_UNREADABLE,
    "alarms": Kind.ALARMS_UNTOLD,
}
"""What it is that a loop tells of itself, where it is more than its own failure."""


def _told(loop: str, status: Status) -> Iterator[Problem]:
    """Yield the problems that the status of a loop names."""
    if error := status.get("error"):
        yield Problem(Kind.LOOP_FAILING, loop, f"{loop}: {error}")
    for told in status.get("problems", ()):
        yield Problem(_OF_LOOP.get(loop.partition("/")[0], Kind.LOOP_FAILING), loop, f"{loop}: {told}")
    if (busy := status.get("busy")) and (age := (status["at_ms"] - busy["since_ms"]) / 1000) > STALE_AFTER_S:
        where = f", and is at {busy['with']}" if busy["with"] else ""
        text = f"{loop}: its cycle has not ended for {age:.0f} s{where}: all else waits"
        yield Problem(Kind.LOOP_STUCK, loop, text)
    named = status.get("broken", {})
    for file, reason in named.items():
        yield Problem(Kind.LATE_ROWS_UNUSABLE, file, f"{loop}: {file} cannot be used: {reason}")
    if (more := (status.get("files_broken") or 0) - len(named)) > 0:
        text = f"{loop}: {more:,} more files of late rows cannot be used: its report says why"
        yield Problem(Kind.LATE_ROWS_UNUSABLE, loop, text)
    for host, node in status.get("nodes", {}).items():
        yield from _of_node(loop, host, node)
    for host, reason in status.get("unread", {}).items():
        text = f"node {host}: {reason}; its token ranges are published one window later"
        yield Problem(Kind.NODE_BEHIND, f"node {host}", text)
    yield from unpublished(loop, status, HOMELESS_MS)
    for table, fields in status.get("tables", {}).items():
        for field, kind in _OF_TABLE.items():
            if error := fields.get(field):
                yield Problem(kind, table, f"{table}: {error}")


_OF_TABLE = {
    "error": Kind.TABLE_FAILING,
    "replica_error": Kind.REPLICA_FAILING,
    "kafka_error": Kind.KAFKA_FAILING,
}


def _of_node(loop: str, host: str, node: Status) -> Iterator[Problem]:
    name = f"node {node.get('endpoint', host)}"
    if error := node.get("error"):
        kind = Kind.CDC_RAW_FULL if loop.startswith(ARCHIVE) else Kind.NODE_LOG_UNREADABLE
        yield Problem(kind, name, f"{loop}: {name}: {error}")
    if gap := node.get("gap"):
        yield Problem(Kind.SEGMENTS_LOST, name, f"{loop}: {name}: {gap}")
    if errors := node.get("errors"):
        text = f"{loop}: {name}: {errors:,} records cannot be decoded: cdcservice errors list"
        yield Problem(Kind.RECORDS_UNDECODABLE, name, text)
    if surplus := node.get("errors_surplus"):
        text = (
            f"{loop}: {name}: {surplus:,} records that cannot be decoded are more than "
            f"sync.max_errors_per_hour: they are in {OVERFLOW}{host}/ of the object store"
        )
        yield Problem(Kind.RECORDS_UNDECODABLE, name, text)


def unpublished(loop: str, status: Status, homeless_ms: int = 0) -> Iterator[Problem]:
    """Yield what ``bucket_close`` cannot publish, except the errors of single tables that it serves.

    :param homeless_ms: shortest wait of an unknown table's rows that is a problem
    """
    for table, reason in status.get("left_out", {}).items():
        yield Problem(Kind.TABLE_LEFT_OUT, table, f"{table}: not followed: {reason}")
    for table_id, reason in status.get("others_failed", {}).items():
        text = f"{loop}: table id {table_id}, which is not planned any more, waits: {reason}"
        yield Problem(Kind.ROWS_UNCLAIMED, table_id, text)
    for key, reason in status.get("commits_broken", {}).items():
        text = f"{loop}: {key} cannot be read, and what it lists is not published: {reason}"
        yield Problem(Kind.ROWS_UNCLAIMED, key, text)
    since_ms = status.get("homeless_since_ms", {})
    for table_id, rows in status.get("rows_homeless", {}).items():
        if status["at_ms"] - since_ms.get(table_id, 0) >= homeless_ms:
            text = f"{loop}: {rows:,} staged rows of table id {table_id} wait, and the table is unknown"
            yield Problem(Kind.ROWS_UNCLAIMED, table_id, text)
