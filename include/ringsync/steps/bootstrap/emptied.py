"""Who empties ``cdc_raw`` of each node: where nobody does, a table with cdc ends in refused writes (docs/sync.md).

The loops that delete there say every few seconds in their status whether they can: ``commitlog_archive``, and unless
``archive.policy`` is ``always``, also ``commitlog_stage``. One of them is enough for a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from cassandra.cluster import Session

from ringsync.cluster.cluster import read_settings
from ringsync.cluster.session import ClusterError, ClusterSettings, connect
from ringsync.config import Config
from ringsync.ring.ring import Host
from ringsync.status import LEFT_KEY, STOP_KEY, Status, cycle_ms, read_status
from ringsync.storage.port import ChecksumError, ObjectStore
from ringsync.wiring import cluster_settings

LATELY_S = 300.0
"""So old a loop's status may be, s: it is silent from the end of a run until the next one has started."""


def why_not_emptied(
    config: Config, store: ObjectStore, hosts: Iterable[Host], captures: Callable[[Host], bool], now_s: float
) -> str:
    """Return why ``cdc_raw`` of some nodes would fill, and what to do; empty: all are emptied.

    :param captures: function that asks a node whether it captures changes: one that does not needs nobody
    :param now_s: present time, seconds since the epoch
    :raises StorageError: the store cannot be used
    """
    said: dict[str, list[tuple[str, Status]]] = {}
    nodes, has_left = [], store.stat(LEFT_KEY) is not None
    for host in hosts:
        queue, datacenters = config.sync.queue_of(host.address, host.id), config.sync.datacenters
        if datacenters and host.datacenter not in datacenters:
            why = f"sync.datacenters leaves out {host.datacenter}: set cdc_enabled: false on its nodes"
        elif has_left:  # the archive's last run may go on for minutes, and say that it empties them
            why = "cdcservice leave has been run"
        else:
            if queue not in said:
                said[queue] = list(_said(config, store, queue, now_s))
            reasons = [_reason(loop, status, host.id) for loop, status in said[queue]]
            if "" in reasons:
                continue
            why = f"queue {queue}: {'; '.join(reasons) or 'its workers have said nothing in the last five minutes'}"
        if captures(host):
            nodes.append(f"{host.endpoint} ({why})")
    if not nodes:
        return ""
    return (
        f"nobody empties cdc_raw of {', '.join(nodes)}. Once that is full, Cassandra refuses writes to tables with "
        "cdc: run cdcservice start until it ends with exit code 0, then run this again"
    )


def _said(config: Config, store: ObjectStore, queue: str, now_s: float) -> Iterator[tuple[str, Status]]:
    """Yield what the loops of a queue that delete segments have lately said."""
    loops = ["commitlog_archive"] if config.archive.policy != "off" else []
    if config.archive.policy != "always" and store.stat(STOP_KEY) is None:
        loops.append("commitlog_stage")
    for loop in loops:
        status = None
        with suppress(ChecksumError, ValueError, TypeError, KeyError):  # a damaged one says nothing
            if (newest := read_status(store, f"{loop}/{queue}")) and now_s - cycle_ms(newest) / 1000 <= LATELY_S:
                status = newest
        if status is not None:
            yield loop, status


def _reason(loop: str, status: Status, host: str) -> str:
    """Tell why a loop does not empty a node's ``cdc_raw``; empty: it does."""
    if error := status.get("error"):  # then it has said of its nodes what was so before
        return f"{loop}: {error}"
    if (node := status.get("nodes", {}).get(host)) is None:
        return f"{loop} does not know the node yet"
    if node.get("empties"):
        return ""
    return f"{loop}: {node.get('error') or 'it has not claimed the folder yet'}"


@contextmanager
def asked_nodes(config: Config) -> Iterator[Callable[[Host], bool]]:
    """Give a function that asks a node of any datacenter whether it captures changes: it does if it does not answer.

    A session asks nodes of one datacenter only, and connects to all of them: each datacenter has one, which is closed.
    """
    main, opened = cluster_settings(config), dict[str, tuple[ClusterSettings, Session]]()

    def captures(host: Host) -> bool:
        settings = replace(main, contact_points=(host.address,), port=host.port, local_datacenter=host.datacenter)
        try:
            if host.datacenter not in opened:
                opened[host.datacenter] = settings, connect(settings)
            told = read_settings(opened[host.datacenter][1], host.id, ["cdc_enabled"])
        except ClusterError:
            return True
        return told.get("cdc_enabled") != "false"

    try:
        yield captures
    finally:
        for settings, session in opened.values():
            if settings != main:  # else it is the process's own
                session.cluster.shutdown()
