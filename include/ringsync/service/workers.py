"""Whether the worker of each queue can use ``cdc_raw`` of its nodes: only it can know, and it tells in its status."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringsync.status import Status, read_statuses
from ringsync.storage.port import ObjectStore


@dataclass(frozen=True)
class Told:
    """What the workers have told.

    :ivar silent: queues whose workers have told nothing yet, and why
    :ivar refused: what cannot be used: queue, node, folder and what to do, a sentence each
    :ivar usable: nodes whose ``cdc_raw`` can be listed, read and deleted from
    """

    silent: Mapping[str, str]
    refused: tuple[str, ...]
    usable: tuple[str, ...]


def told_by_workers(statuses: Mapping[str, Status], queues: Sequence[str], before: Mapping[str, int]) -> Told:
    """What the stages of all queues say of their nodes. A node that is down is not looked at.

    :param statuses: what all loops last said
    :param queues: ``config.sync.queues``
    :param before: ``at_ms`` of statuses that do not count, by queue: they are of a run before
    """
    silent: dict[str, str] = {}
    refused: list[str] = []
    usable: list[str] = []
    for queue in queues:
        status = statuses.get(f"commitlog_stage/{queue}")
        if status is None or status["at_ms"] == before.get(queue):
            silent[queue] = "it has given no sign of life: does a worker of this queue run, and has it a free slot?"
        elif status.get("error"):
            silent[queue] = str(status["error"])
        else:
            for node in (one for one in status.get("nodes", {}).values() if one["up"]):
                reason = node["refused"] or ("" if node["is_read"] else node["error"])
                if reason:
                    refused.append(f"queue {queue}, node {node['endpoint']}: {reason}")
                else:
                    usable.append(node["endpoint"])
    return Told(silent, tuple(refused), tuple(usable))


def wait_for_workers(
    store: ObjectStore,
    queues: Sequence[str],
    before: Mapping[str, int],
    timeout_s: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Told:
    """Wait until the worker of each queue has looked at ``cdc_raw`` of its nodes.

    :param before: see :func:`told_by_workers`
    :param timeout_s: seconds
    :param tell: called with what is waited for
    :returns: what was told last
    :raises StorageError: the store cannot be read
    """
    end, waiting = clock() + timeout_s, ""
    while True:
        found = told_by_workers(read_statuses(store), queues, before)
        if not found.silent or clock() >= end:
            return found
        if (names := ", ".join(found.silent)) != waiting:
            waiting = names
            tell(f"waiting for workers to look at cdc_raw, of queues: {names}")
        sleep(1.0)
