"""Reports of the queues' workers on ``cdc_raw`` of their nodes: only a worker can know whether it can use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringsync.status import Status, read_statuses
from ringsync.storage.port import ObjectStore


@dataclass(frozen=True)
class WorkerReports:
    """The reports of all workers.

    :ivar silent: reason of each queue whose worker has not reported yet
    :ivar refused: a sentence for each folder that cannot be used: queue, node, folder and what to do
    :ivar usable: nodes whose ``cdc_raw`` can be listed, read and deleted from
    """

    silent: Mapping[str, str]
    refused: tuple[str, ...]
    usable: tuple[str, ...]


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
                reason = log["refused"] or ("" if log["is_read"] else log["error"])
                if log["up"] and reason:
                    refused.append(f"queue {queue}, node {log['endpoint']}: {reason}")
                elif log["up"]:
                    usable.append(log["endpoint"])
    return WorkerReports(silent, tuple(refused), tuple(usable))


def wait_for_workers(
    store: ObjectStore,
    queues: Sequence[str],
    before: Mapping[str, int],
    timeout_s: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> WorkerReports:
    """Wait until the worker of each queue has looked at ``cdc_raw`` of its nodes.

    :param tell: function that is called with what is waited for
    :returns: the last reports
    :raises StorageError: the store cannot be read
    """
    end, waiting = clock() + timeout_s, ""
    while True:
        found = worker_reports(read_statuses(store), queues, before)
        if not found.silent or clock() >= end:
            return found
        if (names := ", ".join(found.silent)) != waiting:
            waiting = names
            tell(f"waiting for workers to look at cdc_raw, of queues: {names}")
        sleep(1.0)
