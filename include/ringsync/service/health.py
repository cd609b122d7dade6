"""The health of the sync: what is wrong, by the status of its loops and by Airflow.

docs/runbook.md has a section for each kind of problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import starmap
from types import MappingProxyType

from ringsync.airflow_client import DagHealth
from ringsync.progress import duration
from ringsync.service.delays import ARCHIVE_WAITS, Limits, delays
from ringsync.service.expected import ARCHIVE, SCHEMA, VERIFY_DAG, Expected
from ringsync.service.problem import Kind, Problem
from ringsync.status import ABANDONED_AFTER_S, BOOTSTRAPS, NODES, STALE_AFTER_S, Status, age_s, cycle_ms
from ringsync.steps.close.closing import ALL_LOGS

ROOMY = 0.25
"""Part of ``cdc_total_space`` that is free while trouble with the archive is not urgent."""

REPROCESS = "archive_reprocess/"
"""Beginning of the name of the status that ``archive_reprocess`` leaves: it is no loop, and says what waits."""

HOMELESS_MS = 180_000
"""Rows of an unknown table may wait so long before that is a problem: a new plan may name it, once in an interval."""

ARCHIVE_STUCK_S = 300.0
"""So long an archive may upload some segments, s: an object store that is slow takes 128 MB at 0.5 MB/s."""


def problems(
    statuses: Mapping[str, Status],
    dags: Mapping[str, DagHealth],
    expected: Expected,
    stopped: bool,
    now_s: float,
    *,
    limits: Limits = Limits(),  # noqa: B008 (it is frozen)
    damaged: Mapping[str, str] = MappingProxyType({}),
) -> list[Problem]:
    """Return what is wrong; nothing: all is well.

    :param statuses: the last status of each loop
    :param dags: the DAGs, if Airflow answers
    :param expected: what has to run
    :param stopped: whether ``cdcservice stop`` was run, and ``start`` not since
    :param limits: how late something may be
    :param damaged: why statuses of other loops cannot be read: they say nothing. Loops that ``stop`` leaves on, or that
        empty ``cdc_raw``, are silent then, too: a dead archive is found within minutes, or cdc_raw fills
    """
    lasting = expected.lasting_loops
    loops = [loop for loop in expected.loops if loop not in damaged or loop in (*lasting, *expected.emptying_loops)]
    told = [problem for loop, status in statuses.items() for problem in told_by(loop, status, limits, now_s)]
    told += starmap(_unreadable, damaged.items())
    if stopped:
        return [
            Problem(Kind.SYNC_STOPPED, "sync", f"stopped: {expected.meanwhile} until cdcservice start"),
            *(problem for dag, health in dags.items() if dag not in expected.dags for problem in _of_dag(dag, health)),
            *_silent(lasting, statuses, expected, now_s),
            *(problem for problem in told if problem.owner in lasting or problem.owner not in (*loops, ARCHIVE_WAITS)),
        ]
    found = [problem for dag, health in dags.items() for problem in _of_dag(dag, health)]
    found += _silent(loops, statuses, expected, now_s)
    return [*found, *told]


def _unreadable(loop: str, reason: str) -> Problem:
    text = (
        f"status/{loop}.json is damaged, or of another version of ringsync ({reason}). A loop that runs writes it "
        "again within seconds; if there is no such loop, cdcservice start removes it"
    )
    return Problem(Kind.STATUS_UNREADABLE, loop, text)


def told_by(loop: str, status: Status, limits: Limits, now_s: float) -> list[Problem]:
    """Return what the status of a loop tells.

    :param limits: how late something may be
    """
    found = [*_of_bootstrap(loop, status, now_s), *_of_proofs(status, now_s)]
    found += [*delays(loop, status, limits, now_s), *_told(loop, status)]
    return [replace(problem, owner=loop) for problem in found]


def judges(
    statuses: Mapping[str, Status],
    dags: Mapping[str, DagHealth],
    expected: Expected,
    stopped: bool,
    now_s: float,
    *,
    damaged: Collection[str] = (),
) -> Callable[[str], bool]:
    """Return a function that tells whether an owner of problems says now what is wrong. What a loop has told stays as
    it is while the loop is silent or stopped, or its status is damaged, and a failed DAG until it has succeeded.

    The arguments are those of :func:`problems`.
    """
    loops, lasting = expected.loops, expected.lasting_loops

    def is_judge(owner: str) -> bool:
        if owner in damaged:
            return False
        if owner in loops:
            is_fresh = owner in statuses and age_s(statuses[owner], now_s) <= STALE_AFTER_S
            return is_fresh and (not stopped or owner in lasting)
        if owner == NODES:
            return "down" in statuses.get(NODES, {})
        if owner.startswith(_PAUSE):
            return owner.removeprefix(_PAUSE) in dags
        if owner.startswith(_DAG):
            dag = owner.removeprefix(_DAG)
            return dag in dags and _counts(dag, dags[dag])
        return True

    return is_judge


_DAG, _PAUSE = "DAG ", "pause of DAG "
"""Beginnings of the names of owners: the end of a DAG's run, and what Airflow says of it."""


def _silent(
    loops: Iterable[str], statuses: Mapping[str, Status], expected: Expected, now_s: float
) -> Iterator[Problem]:
    for loop in loops:
        if loop not in statuses:
            told = "no sign of life yet"
        elif (age := age_s(statuses[loop], now_s)) > STALE_AFTER_S:
            told = f"no sign of life for {age:.0f} s"
        elif loop.startswith(ARCHIVE) and (age := now_s - cycle_ms(statuses[loop]) / 1000) > ARCHIVE_STUCK_S:
            told = f"nothing has moved for {age:.0f} s"
        else:
            continue
        if loop in expected.emptying_loops and _has_live_node(loop, statuses):
            text = f"{loop}: {told}, and nobody says that its nodes are down: cdc_raw may fill"
            yield Problem(Kind.ARCHIVE_SILENT, loop, text)
        else:
            yield Problem(Kind.LOOP_SILENT, loop, f"{loop}: {told}")


def _has_live_node(loop: str, statuses: Mapping[str, Status]) -> bool:
    """Tell whether a node may be alive whose archive a loop is. Who is cut off may be written to."""
    down = {node for node, told in statuses.get(NODES, {}).get("down", {}).items() if not told.get("is_cut_off")}
    nodes = statuses.get(loop, {}).get("nodes", {})
    return not nodes or not nodes.keys() <= down


def _of_dag(dag: str, health: DagHealth) -> Iterator[Problem]:
    if health.paused:
        yield Problem(Kind.DAG_PAUSED, dag, f"DAG {dag} is paused: cdcservice start", f"{_PAUSE}{dag}")
    if not _counts(dag, health):
        return
    failing = [run for run in (health.run, health.ended) if run is not None and run.state != "success"]
    if health.ended in failing and health.ended is not None:
        text = f"DAG {dag}: its last run failed, {health.ended.run}"
        yield Problem(Kind.DAG_FAILED, dag, text, f"{_DAG}{dag}")
    for task in dict.fromkeys(task.task for run in failing for task in run.tasks if task.state == "failed"):
        text = f"DAG {dag}: task {task} failed: see its log in Airflow"
        yield Problem(Kind.DAG_FAILED, f"{dag}.{task}", text, f"{_DAG}{dag}")


def _counts(dag: str, health: DagHealth) -> bool:
    """Tell whether the end of a DAG's last run says how the DAG stands. Of verifications only those do that run by
    themselves: others fail for differences, which the proofs tell, or name a table that has no replica."""
    return dag != VERIFY_DAG or (health.ended is not None and health.ended.run.startswith("scheduled__"))


def _of_bootstrap(loop: str, status: Status, now_s: float) -> Iterator[Problem]:
    """Yield a problem if an unfinished bootstrap is abandoned: the stream of its table waits for it."""
    if loop.startswith(BOOTSTRAPS) and (age := age_s(status, now_s)) > ABANDONED_AFTER_S:
        text = (
            f"{status['table']}: bootstrap {status['bootstrap']} is not finished, and nobody has worked on it for "
            f"{duration(age)}: run cdcservice bootstrap --table {status['table']} again, which goes on with it, or "
            "with --cancel, which ends it"
        )
        yield Problem(Kind.BOOTSTRAP_ABANDONED, status["table"], text)


def _of_proofs(status: Status, now_s: float) -> Iterator[Problem]:
    """Yield what verifications tell of replicas that differ, or are not proved for long."""
    for table, proof in status.get("proofs", {}).items():
        if ranges := proof["ranges_differing"]:
            text = (
                f"{table}: {proof['rows_differing']:,} rows of its replica differed from the source "
                f"{duration(now_s - proof['found_ms'] / 1000)} ago, in {ranges:,} of {proof['ranges']:,} token ranges "
                f"(reports/replica_verify/{proof['run']}.json): cdcservice verify --repair --table {table}"
            )
            yield Problem(Kind.REPLICA_DIFFERS, table, text)
        if proof.get("overdue_ms") is not None and now_s * 1000 > proof["overdue_ms"]:
            text = (
                f"{table}: its replica was last proved equal, all of it, {_when(proof['proved_ms'], now_s)}: "
                f"cdcservice verify --table {table}, and see why the DAG replica_verify does not"
            )
            yield Problem(Kind.PROOF_OVERDUE, table, text)


def _when(moment_ms: int, now_s: float) -> str:
    return f"{duration(now_s - moment_ms / 1000)} ago" if moment_ms else "never"


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
    if error := status.get("config_error"):
        yield Problem(Kind.CONFIG_WRONG, loop, f"{loop}: {error}")
    for told in status.get("problems", ()):
        yield Problem(_OF_LOOP.get(loop.partition("/")[0], Kind.LOOP_FAILING), loop, f"{loop}: {told}")
    busy = None if loop.startswith(ARCHIVE) else status.get("busy")  # some uploads take long: see _silent
    if busy and (age := (status["at_ms"] - busy["since_ms"]) / 1000) > STALE_AFTER_S:
        where = f", and is at {busy['with']}" if busy.get("with") else ""
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
    if "logs" in status:
        yield from _of_logs(loop, status)
    yield from map(_unread, status.get("unread", {}).items())
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
        kind = _of_archive(node) if loop.startswith(ARCHIVE) else Kind.NODE_LOG_UNREADABLE
        yield Problem(kind, name, f"{loop}: {name}: {error}")


def _unread(told: tuple[str, str]) -> Problem:
    """Return the problem that a node's log, or all CDC logs, are not read, as ``bucket_close`` tells it."""
    host, reason = told
    if host == ALL_LOGS:
        return Problem(Kind.LOG_UNREADABLE, host, f"{host}: {reason}; buckets close without their rows")
    text = f"node {host}: {reason}; after two minutes the others publish without it"
    return Problem(Kind.NODE_BEHIND, f"node {host}", text)


def _of_logs(loop: str, status: Status) -> Iterator[Problem]:
    """Yield what the loop that reads Scylla's CDC logs tells of them."""
    for table, log in status["logs"].items():
        if error := log.get("error"):
            yield Problem(Kind.LOG_UNREADABLE, table, f"{table}: its CDC log is not read: {error}")
        if error := log.get("sweep_error"):
            yield Problem(Kind.LOG_UNREADABLE, table, f"{table}: late rows of its CDC log are not looked for: {error}")
    for time_ms in status.get("empty_generations_ms", ()):
        began = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
        text = f"{loop}: the generation of CDC streams of {began} has no streams: what was written to them is not found"
        yield Problem(Kind.GENERATION_EMPTY, f"generation {time_ms}", text)


def _of_archive(node: Status) -> Kind:
    """Tell whether what fails is urgent: there is little room, or nobody knows."""
    free, total = node.get("free_bytes"), node.get("total_bytes")
    if free and total and free > total * ROOMY:
        return Kind.ARCHIVE_FAILING
    return Kind.DISK_FULL if node.get("disk_full") else Kind.CDC_RAW_FULL


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
