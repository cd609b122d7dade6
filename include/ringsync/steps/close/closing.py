"""Up to which moment buckets may close: closing follows what has been staged, not only the clock.

A bucket closes one window after its end, and once every node that is read has staged all that it had logged by then: a
backlog, however old, drains through its own buckets. A node that is up but not read holds its ranges up by one window
more at most, and is named; one that is down by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ringsync.ring.ring import Host
from ringsync.status import STALE_AFTER_S, Status, age_s
from ringsync.steps.folders import shared_folders


@dataclass(frozen=True)
class Progress:
    """How far the logs of all nodes are staged.

    :ivar staged_until: ms since the epoch: all that was logged until then is staged, but for nodes in ``unread``
    :ivar unread: why a node that is up is not read, by its address
    :ivar since_ms: since when it is not read (ms since the epoch), by host id
    :ivar shared: what is wrong with nodes that are read from one folder, by host id
    """

    staged_until: int
    unread: Mapping[str, str]
    since_ms: Mapping[str, int]
    shared: Mapping[str, str]


def progress(
    hosts: Iterable[Host],
    statuses: Mapping[str, Status],
    queue_of: Callable[[Host], str],
    now_ms: int,
    patience_ms: int,
    since_ms: Mapping[str, int],
) -> Progress:
    """Tell how far the logs are staged, as the loops of the stage tell.

    :param hosts: nodes whose logs are to be read
    :param statuses: what ``commitlog_stage`` last said, by queue
    :param queue_of: gives the queue whose worker reads a node
    :param now_ms: ms since the epoch
    :param patience_ms: time that a node that is not read is waited for, ms, however old its unstaged rows are
    :param since_ms: ``since_ms`` of the progress before
    """
    staged, unread, since = [now_ms], {}, {}
    hosts = tuple(hosts)
    shared = _shared(hosts, statuses, queue_of, now_ms)
    for host in hosts:
        if not host.up:
            continue
        queue = queue_of(host)
        clear_at, reason = _staged(statuses.get(queue), host.id, queue, now_ms)
        if not reason and host.id in shared:
            reason = f"its log is not read: {shared[host.id]}"
        if reason:
            unread[host.endpoint] = reason
            since[host.id] = since_ms.get(host.id, now_ms)
            if now_ms - since[host.id] >= patience_ms:
                clear_at = max(clear_at, now_ms - patience_ms)
        staged.append(clear_at)
    return Progress(min(staged), unread, since, shared)


def _shared(
    hosts: Iterable[Host], statuses: Mapping[str, Status], queue_of: Callable[[Host], str], now_ms: int
) -> dict[str, str]:
    """Find nodes that workers, maybe of several queues, find in one folder; what is wrong, by host id."""
    alive = {queue: status for queue, status in statuses.items() if age_s(status, now_ms / 1000) <= STALE_AFTER_S}
    told = {host.id: alive.get(queue_of(host), {"nodes": {}})["nodes"].get(host.id, {}) for host in hosts}
    return shared_folders(told)


def _staged(status: Status | None, node: str, queue: str, now_ms: int) -> tuple[int, str]:
    """Up to which moment a node's log is staged, in ms since the epoch; and why it is not read, if it is not."""
    if status is None:
        return 0, f"its log is not read: the worker of queue {queue} has given no sign of life"
    one = status["nodes"].get(node)
    clear_at = int(one["clear_at_ms"]) if one else 0
    if (age := age_s(status, now_ms / 1000)) > STALE_AFTER_S:
        return clear_at, f"its log is not read: the worker of queue {queue} has given no sign of life for {age:.0f} s"
    if one is None:
        return 0, f"its log is not read: the worker of queue {queue} does not know it"
    if status.get("error"):
        return clear_at, f"its log is not read: {status['error']}"
    return clear_at, "" if one["is_read"] else f"its log is not read: {one['error']}"
