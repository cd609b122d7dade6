"""The moment up to which buckets may close: closing follows what has been staged, not only the clock.

A bucket closes one window after its end, and once every node that is read has staged all that it had logged by then.
So a backlog, however old, drains through its own buckets. A node that is down does not delay it. A node that is up
but not read delays closing by one window more at most, and is reported. After two minutes the others agree without
it, and close without it, too, if it had no backlog. When its worker comes back with a long one, it is read, but not
heard before it has nearly caught up: nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringsync.ledger.database import CDC_LOGS
from ringsync.ring.ring import Host
from ringsync.status import STALE_AFTER_S, Status, age_s

if TYPE_CHECKING:  # whoever looks at statuses needs neither driver nor kernels
    from ringsync.config.sync import Sync
    from ringsync.steps.sync_plan import SyncPlan

UNHEARD_MS = 120_000
"""So long a node is waited for that is not read, ms, until the other replicas publish that on which they agree: a loop
that is killed is at work again by then. Who comes back is heard once it is less than that behind."""

ALL_LOGS = "the CDC logs"
"""In place of a node's address in ``Progress.unread``: Scylla's logs belong to no node."""


@dataclass(frozen=True)
class Progress:
    """How far the logs of all nodes are staged.

    :ivar staged_until: ms since the epoch: all that was logged until then is staged, but for nodes in ``unread``
    :ivar unread: why a node that is up is not read, by its address; or why :data:`ALL_LOGS` are not
    :ivar since_ms: time since when it is not read, by host id
    :ivar unheard: ids of the nodes without which the others agree
    """

    staged_until: int
    unread: Mapping[str, str]
    since_ms: Mapping[str, int]
    unheard: frozenset[str] = frozenset()


def progress(
    hosts: Iterable[Host],
    statuses: Mapping[str, Status],
    queue_of: Callable[[Host], str],
    now_ms: int,
    patience_ms: int,
    since_ms: Mapping[str, int],
) -> Progress:
    """Find how far the logs are staged, by the statuses of the stage's loops.

    :param hosts: nodes whose logs are to be read
    :param statuses: last status of ``commitlog_stage``, by queue
    :param queue_of: returns the queue whose worker reads a node
    :param patience_ms: longest wait for a node that is not read, ms, however old its unstaged rows are
    :param since_ms: ``since_ms`` of the progress before
    """
    unread, since = {}, {}
    hosts = tuple(hosts)
    live = [host for host in hosts if host.up]
    stood = {host.id: _staged(statuses.get(queue_of(host)), host.id, queue_of(host), now_ms) for host in hosts}
    heard = (stood[host.id][0] for host in live if not stood[host.id][1] and host.id not in since_ms)
    foremost = min(now_ms, max(heard, default=0))  # a stage's clock may be ahead
    for host in hosts:
        clear_at, reason = stood[host.id]
        if not host.up:
            if reason and host.id in since_ms:  # its worker may come back after the node
                since[host.id] = since_ms[host.id]
            continue
        away_ms, behind_ms = now_ms - since_ms.get(host.id, now_ms), foremost - clear_at
        if not reason and away_ms >= UNHEARD_MS and behind_ms >= UNHEARD_MS:
            reason = "its log is read again, from far behind the others'"
        if reason:
            unread[host.endpoint] = reason
            since[host.id] = since_ms.get(host.id, now_ms)
    nodes = {host.id for host in live}
    unheard = frozenset(node for node in nodes & since.keys() if now_ms - since[node] >= UNHEARD_MS)
    if 2 * len(unheard) >= len(live):  # all that reads is in trouble, not a host: then all are waited for
        unheard = frozenset()
    staged, is_any_read = [now_ms], bool(nodes - since.keys())
    for node in nodes:
        clear_at, _ = stood[node]
        # While nobody reads there is nothing to close, and the backlog of all is to drain through its own buckets.
        if is_long := is_any_read and node in since and now_ms - since[node] >= patience_ms:
            clear_at = max(clear_at, now_ms - patience_ms)
        # Closing makes nothing late that was logged before the node was lost, if it had no backlog then.
        if node not in unheard or not (is_long or clear_at >= since[node] - UNHEARD_MS):
            staged.append(clear_at)
    return Progress(min(staged), unread, since, unheard)


def progress_of(
    plan: SyncPlan,
    sync: Sync,
    status_of: Callable[[str], Status | None],
    now_ms: int,
    patience_ms: int,
    since_ms: Mapping[str, int],
) -> Progress:
    """Find how far the logs of a plan's nodes are staged, or Scylla's CDC logs.

    :param status_of: returns the last status of a loop, by its name
    :param patience_ms, since_ms: as of :func:`progress`
    """
    if plan.of_scylla:
        return log_progress(status_of("scylla_log_stage/log"), now_ms, patience_ms, since_ms)
    found = {queue: status_of(f"commitlog_stage/{queue}") for queue in sync.queues}
    statuses = {queue: status for queue, status in found.items() if status is not None}
    return progress(
        plan.read_hosts, statuses, lambda host: sync.queue_of(host.address, host.id), now_ms, patience_ms, since_ms
    )


def log_progress(status: Status | None, now_ms: int, patience_ms: int, since_ms: Mapping[str, int]) -> Progress:
    """Find how far Scylla's CDC logs are staged, by the status of the loop that reads all of them.

    :param patience_ms: longest wait for a loop that reads nothing, ms
    :param since_ms: ``since_ms`` of the progress before
    """
    clear_at, reason = int(status.get("clear_at_ms") or 0) if status else 0, ""
    if status is None:
        reason = "they are not read: scylla_log_stage has given no sign of life"
    elif (age := age_s(status, now_ms / 1000)) > STALE_AFTER_S:
        reason = f"they are not read: scylla_log_stage has given no sign of life for {age:.0f} s"
    elif status.get("error"):
        reason = f"they are not read: {status['error']}"
    if not reason:
        return Progress(clear_at, {}, {})
    since = since_ms.get(CDC_LOGS, now_ms)
    if now_ms - since >= patience_ms:
        clear_at = max(clear_at, now_ms - patience_ms)
    return Progress(clear_at, {ALL_LOGS: reason}, {CDC_LOGS: since})


def _staged(status: Status | None, node: str, queue: str, now_ms: int) -> tuple[int, str]:
    """Return up to which moment a node's log is staged, and why it is not read (empty: it is)."""
    if status is None:
        return 0, f"its log is not read: the worker of queue {queue} has given no sign of life"
    log = status.get("nodes", {}).get(node)
    clear_at = int(log.get("clear_at_ms") or 0) if log else 0
    if (age := age_s(status, now_ms / 1000)) > STALE_AFTER_S:
        return clear_at, f"its log is not read: the worker of queue {queue} has given no sign of life for {age:.0f} s"
    if log is None:
        return 0, f"its log is not read: the worker of queue {queue} does not know it"
    if status.get("error"):
        return clear_at, f"its log is not read: {status['error']}"
    return clear_at, "" if log.get("is_read") else f"its log is not read: {log.get('error')}"
