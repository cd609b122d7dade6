"""The snapshots of a bootstrap with mode ``sstable``: one of each node, taken on a worker that reaches the node.

Run after ``bootstrap_prepare``, once per queue of workers, as a plain process. From the bootstrap's begin on all writes
are in logs, so it does not matter at which moment after that a node's snapshot is taken: what both have is the same
twice. A node that fails is noted, with its reason; the scan goes on without it if the consistency level allows that.

The worker reads the SSTables' indexes, and remembers a little of each: the driver and the tasks read none. With
``sstable.read: upload`` the files are copied, and the snapshot is cleared at once. A copy that was cut off goes on
where it stopped. Last comes the node's manifest: who finds it finds all files. If some have gone since, or are
damaged, or a snapshot on a node is not complete, the next run of the queue takes it again. Until then others are
read, if they are enough.

A bootstrap that is cancelled meanwhile, or replaced by another, stops within some seconds. Its snapshots and copies are
removed: by this process or by the one that cancels, whichever is later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ringsync.cluster.session import connect
from ringsync.cluster.shared import Shared, read_known_tables
from ringsync.config import Config
from ringsync.ledger.snapshots import (
    PIECE_BYTES,
    NodeSnapshot,
    SnapshotsOf,
    StoredSSTable,
    copied,
    copies_of,
    get_failure,
    get_manifest,
    get_snapshots_of,
    keep_snapshots_of,
    missing_file,
    piece_key,
    pieces,
    put_failure,
    put_manifest,
    put_partitions,
    put_piece,
    remove_damaged,
    remove_manifest,
    say_begun,
)
from ringsync.ring.consistency import asked_hosts, held_by, lacking_hosts
from ringsync.ring.ring import Host, RingSnapshot
from ringsync.ring.tokens import WHOLE_RING
from ringsync.state.bootstrap import SCANNING, BootstrapState
from ringsync.state.session import StateError
from ringsync.steps.application import Application, ExitCode, Report, StepError, plain
from ringsync.steps.archive.upload_pace import UploadPace
from ringsync.steps.bootstrap.collect import BEAT_INTERVAL_S
from ringsync.steps.bootstrap.node_snapshot import (
    IncompleteSnapshotError,
    Node,
    NodeSnapshotError,
    clear_snapshot,
    node_of,
    read_outlines,
    tag_of,
    take_snapshot,
)
from ringsync.steps.bootstrap.old_snapshots import clear_old
from ringsync.steps.bootstrap.plan import SSTABLE, BootstrapPlan, plans_to_follow
from ringsync.steps.bootstrap.prepare import check_not_cancelled, say, wait_until_free
from ringsync.steps.bootstrap.space import Space, check_space, lake_bytes
from ringsync.steps.tables import Outcome, each, in_all
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.wiring import cluster_settings


@dataclass(frozen=True)
class Run:
    """What the tables of a run share.

    :ivar run: id of the bootstrap's run
    :ivar pace: speed limit of all that is read, and uploaded
    :ivar uploads: threads of all uploads: each has a piece in memory
    :ivar one_node: is held while nodetool runs: nodes are not asked for several things at once
    :ivar space: what copies that are not there yet, and the scan of these tables, need in the store
    """

    config: Config
    store: ObjectStore
    run: str
    queue: str
    shared: Shared
    state: BootstrapState
    pace: UploadPace
    uploads: ThreadPoolExecutor
    one_node: threading.Lock
    space: Space


def run(application: Application) -> tuple[Report, ExitCode]:
    """Take the snapshots of a queue's nodes. In a run for several tables each fails for itself.

    :raises StepError: the bootstrap cannot do without a node of this queue that has failed; a snapshot is not complete
    :raises ClusterError: the cluster cannot be reached
    """
    config, store, options = application.config, application.store, application.options
    session = connect(cluster_settings(config))
    outcome = Outcome(alone=not application.patterns)
    plans = plans_to_follow(replace(application, run=options.bootstrap_run), outcome)
    known = None if outcome.alone else read_known_tables(session, [config.state.keyspace])
    rate = config.sstable.megabytes_per_s
    with ThreadPoolExecutor(config.sstable.uploads, thread_name_prefix="upload") as uploads:
        this = Run(
            *(config, store, options.bootstrap_run, options.queue, Shared(session, known)),
            BootstrapState(session, config.state.keyspace),
            *(UploadPace(rate * 2**20 if rate else None), uploads, threading.Lock(), Space()),
        )
        clear_old(config, store, this.state, queue=options.queue)
        each(options.bootstrap_run, plans, lambda name: snapshot_table(this, plans[name]), outcome)
    report, code = in_all(outcome, last=False)
    return {"queue": options.queue, **report}, code


def snapshot_table(this: Run, plan: BootstrapPlan) -> tuple[Report, ExitCode]:
    """Take the snapshots of one table; the errors are those of :func:`run`."""
    report: Report = {"bootstrap": plan.bootstrap.id, "mode": plan.mode, "nodes": {}}
    latest = check_not_cancelled(this.state.find(plan.bootstrap.keyspace, plan.bootstrap.table), plan)
    if plan.mode != SSTABLE or latest.state != SCANNING:
        return report, ExitCode.OK
    wait_until_free(this.state, plan.bootstrap, this.run)
    wanted = Wanted(this.state, plan)
    try:
        with this.space.kept(lake_bytes(plan.estimated_bytes)), signs_of_life(this, plan, wanted):
            report = take_and_copy(this, plan, report, wanted)
        wanted.look()  # who cancels from now on finds all that is to be removed
        wanted.check()
    except NotWantedError:
        with this.one_node:
            clear_old(this.config, this.store, this.state, queue=this.queue)
        raise
    return report, ExitCode.OK


class NotWantedError(StepError):
    """The bootstrap was cancelled, or another one of its table has begun: its snapshots are of no use."""


class Wanted:
    """Knows whether a bootstrap's snapshots are still wanted."""

    def __init__(self, state: BootstrapState, plan: BootstrapPlan) -> None:
        self._state, self._plan = state, plan
        self._over, self._reason = threading.Event(), ""

    def look(self) -> bool:
        """Read the bootstrap's state, and tell whether it is wanted.

        :raises StateError: it cannot be read
        """
        try:
            check_not_cancelled(self._state.find(self._plan.bootstrap.keyspace, self._plan.bootstrap.table), self._plan)
        except StepError as error:
            self._reason = str(error)
            self._over.set()
        return not self._over.is_set()

    def check(self) -> None:
        """Go on, unless a look has shown that it is not wanted any more.

        :raises NotWantedError: it is not
        """
        if self._over.is_set():
            raise NotWantedError(f"{self._reason}. Its snapshots are removed")

    def sleep(self, pause_s: float) -> None:
        """Wait, at most until it is not wanted any more."""
        self._over.wait(pause_s)


def take_and_copy(this: Run, plan: BootstrapPlan, report: Report, wanted: Wanted) -> Report:
    """Take the snapshots of a table on the nodes of this queue; the errors are those of :func:`run`.

    :raises NotWantedError: the bootstrap was cancelled meanwhile
    """
    about = ring_of(this, plan)
    level, ranges = plan.scan.consistency_level, plan.scan.selection.ranges
    hosts = asked_hosts(about.ring, level, ranges)
    # A node may have got another address since; its id stays.
    present = {host.id: host for host in this.shared.ring(plan.bootstrap.keyspace, time.monotonic()).hosts}
    ours = [present.get(host.id, host) for host in hosts]
    ours = [host for host in ours if this.config.sync.queue_of(host.address, host.id) == this.queue]
    failed: dict[str, Exception] = {}
    for host in ours:
        try:
            snapshot = snapshot_node(this, plan, about.ring, host, wanted)
            report["nodes"][host.endpoint] = {"sstables": len(snapshot.sstables), "bytes": snapshot.bytes}
        except NotWantedError:
            raise
        except (StepError, StorageError, OSError) as error:
            failed[host.id] = error
            put_failure(this.store, plan.bootstrap.id, host.id, str(error))
            report["nodes"][host.endpoint] = {"error": plain(error)}
            print(f"ringsync: warning: node {host.endpoint} has no snapshot: {plain(error)}", flush=True)
    for reason in failed.values():
        if isinstance(reason, IncompleteSnapshotError):
            raise reason
    others = {host.id for host in hosts} - failed.keys()
    if lacking := lacking_hosts(about.ring, level, ranges, others):
        raise StepError(_too_few(this.store, plan, about, [host for host in lacking if host.id in failed]))
    return report


@contextmanager
def signs_of_life(this: Run, plan: BootstrapPlan, wanted: Wanted) -> Iterator[None]:
    """Say now and then that this run works on the bootstrap, and look whether it is wanted: copies may take hours."""
    end = threading.Event()

    def beat() -> None:
        while True:
            try:
                if not wanted.look():
                    return
                say(this.store, plan, "snapshot")
                this.state.beat([plan.bootstrap.id], this.run)
            except (StorageError, StateError) as error:
                print(f"ringsync: warning: {error}", flush=True)
            if end.wait(BEAT_INTERVAL_S):
                return

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        with suppress(StateError):  # it is forgotten by itself
            this.state.rest([plan.bootstrap.id])


def ring_of(this: Run, plan: BootstrapPlan) -> SnapshotsOf:
    """Return the ring of which the snapshots are: all queues' tasks agree on it."""
    table = plan.scan.table
    ring = this.shared.ring(table.keyspace, time.monotonic())
    queues = {host.id: this.config.sync.queue_of(host.address, host.id) for host in ring.hosts}
    return keep_snapshots_of(this.store, SnapshotsOf(plan.bootstrap.id, table.keyspace, table.name, ring, queues))


def snapshot_node(this: Run, plan: BootstrapPlan, ring: RingSnapshot, host: Host, wanted: Wanted) -> NodeSnapshot:
    """Take a node's snapshot, copy it if it is to be copied, and put its manifest. Doing it again is safe.

    :param ring: ring of which the snapshots are
    :raises NotWantedError: the bootstrap was cancelled meanwhile
    :raises NodeSnapshotError: it cannot be taken, is not complete, or an SSTable is damaged
    :raises StepError: the store has too little space for the copy
    :raises StorageError: it cannot be copied
    """
    store, settings, bootstrap = this.store, this.config.sstable, plan.bootstrap.id
    copies, table = settings.read == "upload", this.shared.table(plan.bootstrap.keyspace, plan.bootstrap.table)
    taken_ms = int(time.time() * 1000)
    say_begun(store, bootstrap, taken_ms)
    if (there := snapshot_that_is_whole(store, bootstrap, host)) is not None:
        return there
    with this.one_node:
        wanted.check()
        node = node_of(this.config, this.shared.session, host)
        # Without a manifest there is nothing to go on with, if nothing is copied; and a scan may have found it damaged.
        sstables = take_snapshot(node, table, bootstrap, settings.free_space_factor, anew=not copies)

    def pace(size: int) -> None:
        wanted.check()
        this.pace.wait(size, wanted.sleep)

    try:
        held = held_by(ring, WHOLE_RING.unwrap(), {host.id}).get(host.id, ())
        outlines = read_outlines(node, table, sstables, held, pace)
        if copies:
            _copy(this, bootstrap, host, sstables, wanted)
    except StepError:  # damaged, no room, or not wanted: it would only fill the node
        _clear(this, node, table.keyspace, bootstrap)
        raise
    if copies:
        sstables = [copied(bootstrap, host.id, sstable, PIECE_BYTES) for sstable in sstables]
    snapshot = NodeSnapshot(host.id, store.url if copies else "", taken_ms, tuple(sstables))
    if (missing := missing_file(store, bootstrap, snapshot)) is not None:
        raise NodeSnapshotError(
            f"node {host.endpoint}: {missing} was removed again by a process that took it for an old one: run again"
        )
    put_partitions(store, bootstrap, snapshot, outlines)
    put_manifest(store, bootstrap, snapshot)
    if copies:
        _clear(this, node, table.keyspace, bootstrap)
    return snapshot


def snapshot_that_is_whole(store: ObjectStore, bootstrap: str, host: Host) -> NodeSnapshot | None:
    """Return a node's snapshot if there is one, and all of its files are still there; else forget it."""
    there = get_manifest(store, bootstrap, host.id)
    if there is None or (missing := missing_file(store, bootstrap, there)) is None:
        return there
    print(
        f"ringsync: warning: node {host.endpoint}: {missing} of its snapshot is gone. The snapshot is taken again",
        flush=True,
    )
    remove_manifest(store, bootstrap, host.id)
    return None


def _clear(this: Run, node: Node, keyspace: str, bootstrap: str) -> None:
    with this.one_node:
        clear_snapshot(node, keyspace, tag_of(bootstrap, node.host.id))


def _copy(this: Run, bootstrap: str, host: Host, sstables: Sequence[StoredSSTable], wanted: Wanted) -> None:
    """Copy the files of a snapshot to the object store, several pieces at once. What is there is not copied again,
    unless a scan has found it damaged.

    Pieces of large files are not even read for that. A snapshot that is taken again may have another Statistics.db, or,
    if Cassandra has used a number twice, another SSTable of the same name: the small files tell, and then the checksums
    in them do not fit to what is there of the large ones.

    :raises StepError: a local store has too little space
    :raises NotWantedError: the bootstrap was cancelled meanwhile
    """
    targets = [copied(bootstrap, host.id, sstable, PIECE_BYTES) for sstable in sstables]
    remove_damaged(this.store, bootstrap, host.id, targets)
    there = {stat.key: stat.size for stat in copies_of(this.store, bootstrap, host.id)}
    parts = [
        (Path(sstable.descriptor.path(name)), key, position, part)
        for sstable, target in zip(sstables, targets, strict=True)
        for name, size in sstable.files.items()
        for position, part in pieces(size, PIECE_BYTES)
        for key in [piece_key(target.descriptor.path(name), position)]
        if size <= PIECE_BYTES or there.get(key) != part
    ]
    missing = sum(part for _, key, _, part in parts if key not in there)

    def copy(path: Path, key: str, position: int, size: int) -> None:
        wanted.check()
        this.pace.wait(size, wanted.sleep)  # before it is read: who waits holds no piece in memory
        wanted.check()
        with path.open("rb") as file:
            file.seek(position)
            data = file.read(size)
        put_piece(this.store, key, data)

    needed, copying = this.space.take(missing), list[Future[None]]()
    try:
        if missing:
            what = f"copies of SSTables of node {host.endpoint}, and all that is copied of these tables"
            check_space(this.store, what, needed, "set store.url to another place, or sstable.read to in_place")
        copying += [this.uploads.submit(copy, *one) for one in parts]
        for done in copying:
            done.result()
    finally:
        for one in copying:
            one.cancel()
        wait(copying)
        this.space.give_back(missing)


def snapshots_to_read(store: ObjectStore, plan: BootstrapPlan) -> tuple[SnapshotsOf, list[NodeSnapshot]]:
    """Find the snapshots of a bootstrap: of as many replicas of each token as its consistency level asks for.

    From now on they are no old ones. Nodes that have none are named in a line, if there are enough others.

    :raises StepError: there are too few; the message names the nodes, their queues and the reasons
    """
    about = snapshots_of(store, plan)
    say_begun(store, plan.bootstrap.id, int(time.time() * 1000))
    level, ranges = plan.scan.consistency_level, plan.scan.selection.ranges
    asked = asked_hosts(about.ring, level, ranges)
    found = [one for host in asked if (one := get_manifest(store, plan.bootstrap.id, host.id)) is not None]
    there = {snapshot.host for snapshot in found}
    if lacking := lacking_hosts(about.ring, level, ranges, there):
        raise StepError(_too_few(store, plan, about, lacking))
    if without := [host for host in asked if host.id not in there]:
        reasons = _reasons(store, about, without)
        print(f"ringsync: warning: {plan.scan.table.full_name} is read without {reasons}", flush=True)
    return about, found


def snapshots_of(store: ObjectStore, plan: BootstrapPlan) -> SnapshotsOf:
    """Read whose snapshots a bootstrap has.

    :raises StepError: it has none
    """
    about = get_snapshots_of(store, plan.bootstrap.id)
    if about is None:
        raise StepError(
            f"bootstrap {plan.bootstrap.id} of {plan.scan.table.full_name} has no snapshots: run sstable_snapshot "
            "first, on a worker of each queue of sync.queue_of_node"
        )
    return about


def _too_few(store: ObjectStore, plan: BootstrapPlan, about: SnapshotsOf, lacking: Sequence[Host]) -> str:
    return (
        f"{plan.scan.table.full_name}: too few replicas have a snapshot for {plan.scan.consistency_level} "
        f"(cassandra.consistency_level): {_reasons(store, about, lacking)}. Mend the cause and run again, which takes "
        "those that are missing"
    )


def _reasons(store: ObjectStore, about: SnapshotsOf, hosts: Sequence[Host]) -> str:
    return "; ".join(
        get_failure(store, about.bootstrap, host.id)
        or f"node {host.endpoint} ({host.id}): no snapshot was taken yet by a worker of its queue "
        f"{about.queues.get(host.id, '')!r}: is one running, or was its task stopped?"
        for host in hosts
    )
