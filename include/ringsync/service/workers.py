"""Reports of the loops that read what was written, at their start: only they can know whether they can read it.

For Cassandra, the worker of each queue reports on ``cdc_raw`` of its nodes; for ScyllaDB, one loop on the CDC logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringsync.service.expected import LOG_STAGE, Expected
from ringsync.status import Status, read_statuses
from ringsync.storage.port import ObjectStore


@dataclass(frozen=True)
class Words:
    """How the reports are told.

    :ivar waiting: what is waited for, before the names of those that are silent
    :ivar silent: that somebody is silent, with ``{}`` for the name, before the reason
    :ivar idle: that somebody does not run now, likewise
    :ivar usable: what can be read, before its names; ``nothing``: in place of these
    """

    waiting: str
    silent: str
    idle: str
    usable: str
    nothing: str


CDC_RAW = Words(
    "waiting for workers to look at cdc_raw, of queues",
    "queue {}: its worker has not looked at cdc_raw",
    "queue {}: its worker does not run now; it looks at cdc_raw when it is started",
    "cdc_raw can be listed, read and deleted from",
    "no node is read",
)
CDC_TABLES = Words(
    "waiting for the loop that reads the CDC logs: scylla_log_stage",
    "scylla_log_stage/{} has not read the CDC logs",
    "scylla_log_stage/{} does not run now; it reads the CDC logs when it is started",
    "CDC logs that are read",
    "no table has one",
)


@dataclass(frozen=True)
class WorkerReports:
    """The reports of all workers.

    :ivar silent: reason of each queue whose worker has not reported yet
    :ivar refused: a sentence for each folder or log that cannot be used: where it is, and what to do
    :ivar usable: nodes whose ``cdc_raw`` can be listed, read and deleted from; or tables whose logs can be read
    """

    silent: Mapping[str, str]
    refused: tuple[str, ...]
    usable: tuple[str, ...]
    words: Words = CDC_RAW


def worker_reports(statuses: Mapping[str, Status], queues: Sequence[str], before: Mapping[str, int]) -> WorkerReports:
    """Collect the reports of all queues' stages on their nodes; nodes that are down are left out.

    :param queues: ``config.sync.queues``
    :param before: ``at_ms`` of the statuses of an earlier run, by queue: they do not count
    """
    silent: dict[str, str] = {}
    refused: list[str] = []
    usable: list[str] = []
    reports = {
        queue: status
        for queue in queues
        if (status := statuses.get(f"commitlog_stage/{queue}")) and status["at_ms"] != before.get(queue)
    }
    for queue in queues:
        if (report := reports.get(queue)) is None:
            silent[queue] = "it has given no sign of life: does a worker of this queue run, with a free slot?"
        elif report.get("error"):
            silent[queue] = str(report["error"])
        else:
            for log in report.get("nodes", {}).values():
                reason = log.get("refused") or ("" if log.get("is_read") else str(log.get("error")))
                if log.get("up") and reason:
                    refused.append(f"queue {queue}, node {log.get('endpoint')}: {reason}")
                elif log.get("up"):
                    usable.append(str(log.get("endpoint")))
    return WorkerReports(silent, tuple(refused), tuple(usable))


def log_reports(statuses: Mapping[str, Status], before: Mapping[str, int]) -> WorkerReports:
    """Collect what the loop that reads Scylla's CDC logs says of them.

    :param before: as in :func:`worker_reports`
    """
    name = LOG_STAGE.partition("/")[2]
    report = statuses.get(LOG_STAGE)
    if report is None or report["at_ms"] == before.get(name):
        silent = "it has given no sign of life: does the DAG scylla_log_stage run, with a free slot?"
    elif "busy" in report:  # what its last cycle told is told again
        silent = "its first cycle has not ended yet: cdcservice status shows how far it is"
    else:
        silent = str(report.get("error") or "")
    if report is None or silent:
        return WorkerReports({name: silent}, (), (), CDC_TABLES)
    errors = {table: log["error"] for table, log in report.get("logs", {}).items() if log.get("error")}
    refused = tuple(f"{table}: its CDC log is not read: {error}" for table, error in errors.items())
    return WorkerReports(
        {}, refused, tuple(table for table in report.get("logs", {}) if table not in errors), CDC_TABLES
    )


def stage_reports(statuses: Mapping[str, Status], expected: Expected, before: Mapping[str, int]) -> WorkerReports:
    """Collect the reports of the loops that are to read what was written.

    :param before: as in :func:`worker_reports`, by the last part of the loops' names
    """
    if expected.queues:
        return worker_reports(statuses, expected.queues, before)
    return log_reports(statuses, before)


def told_before(statuses: Mapping[str, Status], expected: Expected) -> dict[str, int]:
    """Return when the loops that read have last told something, ms since the epoch, by the last part of their names."""
    return {stage.partition("/")[2]: statuses[stage]["at_ms"] for stage in expected.stages if stage in statuses}


def wait_for_workers(
    store: ObjectStore,
    expected: Expected,
    before: Mapping[str, int],
    timeout_s: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> WorkerReports:
    """Wait until the loops that read have reported: the worker of each queue on ``cdc_raw`` of its nodes, or the one
    that reads CDC logs.

    :param before: :func:`told_before`
    :param tell: function that is called with what is waited for
    :returns: the last reports
    :raises StorageError: the store cannot be read
    """
    end, waiting = clock() + timeout_s, ""
    while True:
        found = stage_reports(read_statuses(store), expected, before)
        if not found.silent or clock() >= end:
            return found
        if (names := ", ".join(found.silent)) != waiting:
            waiting = names
            tell(f"{found.words.waiting}: {names}")
        sleep(1.0)
