"""The removal of snapshots and their copies that no bootstrap needs any more.

They are found by looking: at the object store for copies, into the nodes' data directories for snapshots. So it does
not matter when a process was killed. A bootstrap needs its snapshots until all is copied. One that was abandoned, on
which no run works, needs them no more after ``sstable.max_age_h``, counted from when a run began or used one last: it
may have been begun again long after its begin, and other tables of the run may take hours.

What cannot be read is left alone, and told. It stops neither the others nor the bootstrap that looks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ringsync.cluster.cluster import read_hosts
from ringsync.cluster.session import connect
from ringsync.config import Config
from ringsync.config.sync import DEFAULT_QUEUE
from ringsync.ledger.snapshots import (
    bootstraps_with_snapshots,
    get_manifest,
    get_snapshots_of,
    last_begun_ms,
    remove_snapshots,
)
from ringsync.state.bootstrap import SCANNING, BootstrapState
from ringsync.steps.archive.aside import Aside
from ringsync.steps.bootstrap.node_snapshot import (
    Node,
    NodeSnapshotError,
    SnapshotOnDisk,
    clear_snapshot,
    node_of,
    snapshots_on_disk,
    tag_of,
)
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.wiring import cluster_settings

CLEAR_EVERY_S = 300.0
"""Longest time between two looks for old snapshots."""


def clear_old(
    config: Config, store: ObjectStore, state: BootstrapState, *, queue: str | None = None, copies: bool = True
) -> int:
    """Remove what no bootstrap needs any more: copies, and the snapshots of nodes that this process reaches.

    A bootstrap of which something cannot be read, and a node that cannot be reached, are looked at the next time; that
    is only printed.

    :param queue: whose nodes are looked at; None: none
    :param copies: whether copies are removed
    :returns: snapshots of nodes that were cleared
    :raises StorageError: the store cannot be listed
    :raises StateError: the state of bootstraps cannot be read
    """
    now_s = time.time()
    for bootstrap in bootstraps_with_snapshots(store) if copies else ():
        try:
            _clear_copies(config, store, state, bootstrap, now_s)
        except StorageError as error:
            print(f"ringsync: warning: copies of bootstrap {bootstrap} stay for now: {error}", flush=True)
    nodes = [] if queue is None else _nodes(config, state, queue)
    return sum(clear_node(config, store, state, node, now_s) for node in nodes)


def clear_node(config: Config, store: ObjectStore, state: BootstrapState, node: Node, now_s: float) -> int:
    """Remove the snapshots of a node that no bootstrap needs any more; as :func:`clear_old`.

    :param now_s: s since the epoch
    """
    cleared = 0
    try:
        for one in snapshots_on_disk(node):
            tag = tag_of(one.bootstrap, node.host.id)
            try:
                may_go = _may_go(config, store, state, node, one, now_s)
            except StorageError as error:
                print(f"ringsync: warning: node {node.host.endpoint}: {tag} stays for now: {error}", flush=True)
                continue
            if may_go:
                clear_snapshot(node, one.keyspace, tag)
                cleared += 1
    except (NodeSnapshotError, OSError) as error:
        print(f"ringsync: warning: old snapshots stay for now: {error}", flush=True)
    return cleared


def clear_finished(config: Config, store: ObjectStore, state: BootstrapState) -> None:
    """Remove what is not needed after the end of a bootstrap. With ``sstable.read: in_place`` this machine reaches all
    nodes. Else their snapshots were cleared once they were copied, or the next run of the nodes' queue does it."""
    reaches_all = config.sstable.read == "in_place" and bootstraps_with_snapshots(store)
    if not reaches_all:
        clear_old(config, store, state)
        return
    for queue in config.sync.queues:
        clear_old(config, store, state, queue=queue)


class ClearsAside:
    """Removes old snapshots of a queue's nodes now and then, in a thread of its own. A failure is only printed."""

    def __init__(self, config: Config, store: ObjectStore, queue: str) -> None:
        self._config, self._store, self._queue = config, store, queue
        self._aside = Aside()
        self._cleared_s = float("-inf")

    def clear(self) -> None:
        """Begin, if it is time."""
        if self._aside.is_done():
            self._aside.result()
        pause_s = min(CLEAR_EVERY_S, self._config.sync.run_s / 2)
        if not self._aside.is_busy and time.monotonic() - self._cleared_s >= pause_s:
            self._cleared_s = time.monotonic()
            self._aside.begin(self._clear)

    def _clear(self) -> None:
        try:
            session = connect(cluster_settings(self._config))
            state = BootstrapState(session, self._config.state.keyspace)
            # One queue removes the copies for all.
            copies = self._queue == DEFAULT_QUEUE
            clear_old(self._config, self._store, state, queue=self._queue, copies=copies)
        except Exception as error:  # any: the loop that this is aside of must go on
            print(f"ringsync: warning: old snapshots stay for now: {error}", flush=True)


def _nodes(config: Config, state: BootstrapState, queue: str) -> Iterator[Node]:
    for host in read_hosts(state.session):
        if config.sync.queue_of(host.address, host.id) == queue:
            try:
                yield node_of(config, state.session, host)
            except NodeSnapshotError as error:
                print(f"ringsync: warning: old snapshots may stay for now: {error}", flush=True)


def _clear_copies(config: Config, store: ObjectStore, state: BootstrapState, bootstrap: str, now_s: float) -> None:
    about = get_snapshots_of(store, bootstrap)
    if about is None or not _is_needed(config, store, state, about.keyspace, about.table, bootstrap, now_s):
        # Until then nodes that are away may come back with a snapshot that must be known as ours.
        is_old = _age_s(store, bootstrap, now_s) > 2 * config.sstable.max_age_h * 3600
        remove_snapshots(store, bootstrap, wholly=is_old)


def _may_go(
    config: Config, store: ObjectStore, state: BootstrapState, node: Node, one: SnapshotOnDisk, now_s: float
) -> bool:
    """Tell whether a node's snapshot is ours and is not needed, or was copied."""
    if _is_needed(config, store, state, one.keyspace, one.table, one.bootstrap, now_s):
        manifest = get_manifest(store, one.bootstrap, node.host.id)
        return manifest is not None and bool(manifest.url)
    if get_snapshots_of(store, one.bootstrap) is not None:
        return True
    # It may be that of another ringsync, with another state: that one forgets it long before.
    return now_s - one.taken_s > 2 * config.sstable.max_age_h * 3600


def _is_needed(
    config: Config, store: ObjectStore, state: BootstrapState, keyspace: str, table: str, bootstrap: str, now_s: float
) -> bool:
    latest = state.find(keyspace, table)
    if latest is None or latest.id != bootstrap or latest.state != SCANNING:
        return False
    return state.alive(bootstrap) is not None or _age_s(store, bootstrap, now_s) <= config.sstable.max_age_h * 3600


def _age_s(store: ObjectStore, bootstrap: str, now_s: float) -> float:
    """Return how long ago a bootstrap's snapshots were begun, or used, last; if none was, the bootstrap."""
    return now_s - last_begun_ms(store, bootstrap) / 1000
