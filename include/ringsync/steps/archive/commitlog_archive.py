"""The loop that keeps room in ``cdc_raw``: it moves finished segments to the object store before Cassandra's limit.

It needs neither Spark nor the rest of the sync, and of Cassandra only what it has heard before: where a node's
``cdc_raw`` is, and how large it may get. It goes on while the sync is stopped: then it is needed most. A segment is
deleted only when it is durable in the store, or wholly committed by ``commitlog_stage``.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ringsync.cluster.cluster import read_hosts, read_settings
from ringsync.cluster.session import connect
from ringsync.config import DEFAULT_QUEUE, Config
from ringsync.ledger.archive import READ, WAITING, ShortSegmentError, archive_segment, is_waiting, tidy
from ringsync.ledger.finished_segments import finished_segments
from ringsync.ledger.gaps import get_unread, put_unread
from ringsync.ledger.staging import commit_keys, get_commit
from ringsync.status import forget
from ringsync.steps.application import Application, ExitCode, Report
from ringsync.steps.archive.aside import Aside
from ringsync.steps.archive.committed import Committed
from ringsync.steps.archive.raw_folder import TOTAL_SPACE, RawFolder, RawSegment, look, total_space
from ringsync.steps.archive.upload_pace import UploadPace
from ringsync.steps.bootstrap.old_snapshots import ClearsAside
from ringsync.steps.loop import SignOfLife, cycles
from ringsync.steps.stage.claims import ForeignClaimError, claim, get_place, has_claim, may_be_first, other_claims
from ringsync.steps.stage.rights import what_is_refused
from ringsync.storage.port import ChecksumError, ObjectStore, StorageError, get_json
from ringsync.wiring import cluster_settings

ASK_EVERY_S = 60.0
"""Time between two questions to the cluster: which nodes there are, and where their logs are."""

ANSWER_S = 0.5
"""So long a look waits for the cluster's answer."""

TIDY_EVERY_S = 300.0
"""Longest time between the end of one tidying up and the begin of the next. A run has two: what uploads have left is
seen by one, and removed by the other."""

OLD_PAGES_S = 60.0
"""So long a segment that does not reach what its index says, or may not since its node has crashed, is read again: a
mounted folder may show old pages. Then it is archived as it is."""

TELL_AFTER_S = 600.0
"""Time after which a run ends that has archived what nobody has read: its end lets ``archive_reprocess`` begin."""

KEPT_ENDS = 64
"""Segments that have left of which a node's loop remembers when they were written last."""

SAY_EVERY_S = 10.0
"""Time after which the status is said again, once a segment has left or a node was looked at."""

SETTINGS_EVERY_S = 3600.0
"""Time between two questions to a node for its settings."""

_NODES = "archive/nodes/"


def run(application: Application) -> tuple[Report, ExitCode]:
    """Watch the nodes of a queue until the time is over. While the store is away, it is waited for.

    :returns: exit code 0, whatever node has no room: a failed run rests, and nobody would watch the others meanwhile.
        The status names it
    """
    config, store, queue = application.config, application.store, application.options.queue
    archiver = Archiver(config, store, queue, _Cluster(config))
    old_snapshots = ClearsAside(config, store, queue)

    began_s, is_outdated = time.monotonic(), application.outdated()

    def standing() -> dict[str, Any]:
        return {"nodes": archiver.status(), "problems": archiver.problems, "config_error": is_outdated.wrong}

    def is_over() -> bool:
        worked_s = time.monotonic() - began_s
        must_tell = worked_s >= TELL_AFTER_S and archiver.counts["unread"] > 0
        return worked_s >= config.sync.run_s or must_tell or is_outdated()

    # A turn takes minutes where uploads are slow.
    with SignOfLife(store, "commitlog_archive", queue, lambda: None, standing()) as life:
        for _ in cycles(application, config.archive.poll_interval_ms, heeds_stop=False):
            archiver.cycle(lambda: life.say(standing()), is_over)
            life.say(standing())
            old_snapshots.clear()
            if queue == DEFAULT_QUEUE:  # one queue does it for all
                archiver.tidy_aside()
            if is_over():
                break
    return {"queue": queue, **standing(), **archiver.counts}, ExitCode.OK


@dataclass
class ArchivedNode:
    """A node whose ``cdc_raw`` is watched.

    :ivar folder: path of its ``cdc_raw``; empty: unknown
    :ivar total_bytes: its ``cdc_total_space``
    :ivar captures: whether it captures changes
    :ivar token: token of its claim to the folder; empty: the folder is not claimed
    :ivar asked_s: monotonic time when it has told its settings, s
    :ivar free_bytes: room in the folder at the last look; 0: none, or nobody knows
    :ivar disk_full: whether others have filled its disk, so that it is the disk that ends first
    :ivar waiting: finished segments there
    :ivar archived: segments that this run has archived
    :ivar left_ms: when segments that have left were written last, ms since the epoch, by id
    :ivar short_s: monotonic time when a segment was first seen not to reach what its index says for sure, s, by id
    :ivar unread: names of segments with changes that were seen and have not left, by id
    :ivar noted: what of them is recorded; None: unknown yet
    :ivar error: why it cannot be looked at, or archived
    """

    node: str
    endpoint: str
    address: str
    folder: str = ""
    total_bytes: int = 0
    captures: bool = True
    token: str = field(default="", compare=False)
    asked_s: float = field(default=float("-inf"), compare=False)
    free_bytes: int = field(default=0, compare=False)
    disk_full: bool = field(default=False, compare=False)
    waiting: int = field(default=0, compare=False)
    archived: int = field(default=0, compare=False)
    left_ms: dict[int, int] = field(default_factory=dict, compare=False)
    short_s: dict[int, float] = field(default_factory=dict, compare=False)
    unread: dict[int, str] = field(default_factory=dict, compare=False)
    noted: dict[int, str] | None = field(default=None, compare=False)
    error: str | None = field(default=None, compare=False)

    def began_ms(self, segment: RawSegment) -> int:
        """Return when the segment before one was written last, ms since the epoch; 0: unknown."""
        before = [ended_ms for identity, ended_ms in self.left_ms.items() if identity < segment.identity]
        return segment.began_ms or max(before, default=0)

    def leaves(self, segment: RawSegment) -> None:
        """Remember a segment that has left."""
        self.left_ms[segment.identity] = segment.ended_ms
        self.short_s.pop(segment.identity, None)
        self.unread.pop(segment.identity, None)
        for identity in sorted(self.left_ms)[:-KEPT_ENDS]:
            del self.left_ms[identity]


class _Cluster:
    """Asks the cluster; it may be away."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def nodes(self, wants: Callable[[ArchivedNode], bool]) -> Iterator[tuple[ArchivedNode, Mapping[str, str]]]:
        """Yield the nodes, those that are wanted with their settings, as far as they answer; but not those of
        datacenters that ``sync.datacenters`` leaves out: no worker reaches their folders.

        :raises Exception: the cluster does not answer
        """
        session = connect(cluster_settings(self._config))
        names = ("cdc_enabled", "cdc_raw_directory", *TOTAL_SPACE)
        datacenters = self._config.sync.datacenters
        for host in read_hosts(session):
            if datacenters and host.datacenter not in datacenters:
                continue
            node = ArchivedNode(host.id, host.endpoint, host.address)
            yield node, read_settings(session, host.id, names) if wants(node) else {}


class Archiver:
    """The nodes of a queue, each on its own.

    :param cluster: asks the cluster (:class:`_Cluster`)
    """

    def __init__(self, config: Config, store: ObjectStore, queue: str, cluster: Any) -> None:
        self._config, self._store, self._queue, self._cluster = config, store, queue, cluster
        self._settings = config.archive
        rate = self._settings.megabytes_per_s
        self._pace = UploadPace(rate * 2**20 if rate else None)
        self._nodes: dict[str, ArchivedNode] | None = None
        self._endpoints: dict[str, str] = {}
        self._asked_s = self._tidied_s = float("-inf")
        self._unknown = ""
        self._asking, self._tidying = Aside(), Aside()
        self._without_entry: frozenset[str] = frozenset()
        self.counts: Counter[str] = Counter(segments=0, bytes=0, removed=0, unread=0)

    def cycle(self, say: Callable[[], None] = lambda: None, is_over: Callable[[], bool] = lambda: False) -> None:
        """Look at all nodes, and archive what is to be archived: some segments of each node in turn, first of the one
        with the least room.

        :param say: called between the turns, and in long ones every :data:`SAY_EVERY_S` when something has moved
        :param is_over: function that tells whether to end before all is archived: the next run goes on
        """
        self._find_nodes()
        waiting = [node for node in (self._nodes or {}).values() if node.captures or os.path.exists(node.folder)]
        errors = {node.node: node.error for node in waiting}
        failed: dict[str, dict[int, Exception]] = {node.node: {} for node in waiting}
        for node in waiting:
            if not (node.free_bytes or node.error):
                self._measure(node)
        said_s = time.monotonic()

        def moved() -> None:
            nonlocal said_s
            if time.monotonic() - said_s >= SAY_EVERY_S:
                say()
                said_s = time.monotonic()

        while waiting and not is_over():
            waiting.sort(key=lambda node: node.free_bytes / max(node.total_bytes, 1))
            # One turn of many nodes may take longer than a run has left.
            waiting = [node for node in waiting if is_over() or self._takes_turn(node, failed[node.node], moved)]
            say()
        for node in (self._nodes or {}).values():
            if node.error and node.error != errors.get(node.node):
                print(f"ringsync: warning: node {node.endpoint}: {node.error}", flush=True)

    def _measure(self, node: ArchivedNode) -> None:
        """Find out how much room a node has, which this process does not know yet."""
        try:
            if node.folder:
                self._look(node)
        except Exception as error:
            node.error = f"its cdc_raw cannot be looked at: {error}"

    def _takes_turn(self, node: ArchivedNode, failed: dict[int, Exception], moved: Callable[[], None]) -> bool:
        """Archive some segments of a node. Any failure concerns this node alone: the others need their room, too.

        :param failed: what cannot be archived now, by segment id; it makes way for later segments
        :param moved: called when a segment has left, or failed, and at the end
        :returns: whether more is to be archived
        """
        try:
            node.error, is_done = self._serve(node, failed, moved)
        except Exception as error:
            node.error, is_done = f"its cdc_raw cannot be archived: {error}", True
        moved()
        return not is_done

    def _serve(
        self, node: ArchivedNode, failed: dict[int, Exception], moved: Callable[[], None]
    ) -> tuple[str | None, bool]:
        """Archive some segments of a node.

        :returns: why there is too little room, or a segment stays (None: neither), and whether that is all for now
        """
        if not node.folder:
            return "it does not say where its cdc_raw is: sync.cdc_raw can name it", True
        found = self._look(node)
        room, refused = found.room_in(node.folder, self._limit(node)), self._not_ours(node)
        chosen = self._chosen(node, found, failed)[: self._settings.uploads]
        if not refused:
            self._note_unread(node, found)
        elif chosen or node.captures:  # said before there is no room left
            node.free_bytes, node.disk_full = 0, False  # nobody knows whose room that is
            return f"nothing is archived: {refused}", True
        if chosen:
            failed |= self._archive(node, chosen, moved)
            return node.error, False
        if failed:
            more = f" (and {len(failed) - 1} other segments)" if len(failed) > 1 else ""
            why = f"{room}, and a segment cannot be archived: {next(iter(failed.values()))}{more}"
            return why, True
        if found.free < self._needed(node, found) and self._settings.policy != "off":
            return f"{room}: {found.why_nothing_leaves}", True
        if not self._limit(node):
            return "it does not tell this worker its cdc_total_space: archive.total_mb can say it", True
        return what_is_refused(Path(node.folder)), True

    def tidy_aside(self) -> None:
        """Tidy up if it is time, in a thread of its own: thousands of segments may have to go."""
        if self._tidying.is_done():
            self._tidied_s = time.monotonic()
            try:
                self._tidying.result()
            except Exception as error:  # any: the nodes need their room first
                print(f"ringsync: warning: the archive cannot be tidied up: {error}", flush=True)
        pause_s = min(TIDY_EVERY_S, self._config.sync.run_s / 2)
        if not self._tidying.is_busy and time.monotonic() - self._tidied_s >= pause_s:
            self._tidying.begin(self.tidy)

    def tidy(self) -> None:
        """Remove what is kept no longer, of all nodes.

        :raises StorageError: the store cannot be used
        """
        oldest_ms = time.time() * 1000 - self._settings.retention_days * 86_400_000
        removed, self._without_entry = tidy(
            *(self._store, oldest_ms, lambda node, identity: self._committed(node).has(identity)),
            self._without_entry,
        )
        self.counts["forgotten"] += removed
        if not is_waiting(self._store):
            forget(self._store, "archive_reprocess/archive")

    def _look(self, node: ArchivedNode) -> RawFolder:
        folder, node.free_bytes, node.disk_full = Path(node.folder), 0, False  # so it is if nobody can look
        found = look(folder, self._limit(node) or total_space({}, folder))
        node.free_bytes, node.disk_full = found.free, found.is_disk_full
        node.waiting = sum(segment.is_complete for segment in found.segments)
        return found

    def _note_unread(self, node: ArchivedNode, found: RawFolder) -> None:
        """Record which segments with changes wait, as the stage does while it works: should one of them be gone, the
        stage misses it. What cannot be recorded now is recorded later."""
        there = {segment.identity: segment.file.name for segment in found.segments if segment.index}
        if node.noted == node.unread and there.items() <= node.unread.items():
            return
        with suppress(StorageError):
            node.unread |= there
            if node.noted is None:
                node.noted = get_unread(self._store, node.node)
                node.unread = {**node.noted, **node.unread}
            if node.unread != node.noted:
                put_unread(self._store, node.node, node.unread)
                node.noted = dict(node.unread)

    def _limit(self, node: ArchivedNode) -> int:
        """Return how large a node's ``cdc_raw`` may get, bytes; 0: nobody has said it."""
        return node.total_bytes or self._settings.total_mb * 2**20

    def _needed(self, node: ArchivedNode, found: RawFolder) -> float:
        """Return the room that must be free, bytes."""
        total = self._limit(node) or found.used + found.free
        return max(total * self._settings.free_percent / 100, self._settings.free_mb * 2**20)

    def _chosen(self, node: ArchivedNode, found: RawFolder, failed: Collection[int]) -> list[RawSegment]:
        """Choose the segments that leave the node now, the oldest first. Those without an index hold nothing for us.

        :param failed: ids of segments that cannot be archived now
        """
        complete = [segment for segment in found.segments if segment.is_complete and segment.identity not in failed]
        if self._settings.policy == "off":
            return []
        if self._settings.policy == "always":
            return complete
        missing, chosen = self._needed(node, found) - found.free, []
        for segment in complete:
            if missing <= 0:
                break
            chosen.append(segment)
            missing -= segment.size
        return chosen

    def _archive(
        self, node: ArchivedNode, segments: Sequence[RawSegment], moved: Callable[[], None]
    ) -> dict[int, Exception]:
        """Archive segments and remove them from the node.

        :returns: what has failed, by segment id
        """
        committed, keeps_all = self._committed(node.node), self._settings.policy == "always"

        def move(segment: RawSegment) -> int | Exception:
            is_read, uploaded = committed.has(segment.identity), 0
            try:
                if keeps_all or not is_read:
                    self._pace.wait(segment.size)
                    now_ms, folder = int(time.time() * 1000), READ if is_read else WAITING
                    since_s = node.short_s.get(segment.identity, time.monotonic())
                    archive_segment(
                        *(self._store, node.node, segment.file, segment.index, node.began_ms(segment), now_ms, folder),
                        committed.written.get(segment.identity) if is_read else None,
                        even_short=time.monotonic() - since_s >= OLD_PAGES_S,
                    )
                    uploaded = segment.size
                segment.remove()
            except Exception as error:
                if isinstance(error, FileNotFoundError) and not segment.file.exists():
                    return 0  # the stage has read it whole and removed it meanwhile
                return error
            return uploaded

        failed: dict[int, Exception] = {}
        with ThreadPoolExecutor(self._settings.uploads) as pool:
            for segment, result in zip(segments, pool.map(move, segments), strict=True):
                if isinstance(result, Exception):
                    failed[segment.identity] = result
                    if isinstance(result, ShortSegmentError):
                        node.short_s.setdefault(segment.identity, time.monotonic())
                else:
                    node.leaves(segment)
                    node.archived += result > 0
                    unread = int(result > 0 and not committed.has(segment.identity))
                    self.counts.update(segments=int(result > 0), bytes=result, removed=1, unread=unread)
                moved()
        return failed

    def _committed(self, node: str) -> Committed:
        """Return what ``commitlog_stage`` has committed of a node's log."""
        with suppress(ChecksumError):  # the stage reports it; whatever it has read is archived once more
            if keys := commit_keys(self._store, node):
                last = get_commit(self._store, keys[-1])
                return Committed(last.finished, finished_segments(self._store, node), last.written)
        return Committed()

    def _not_ours(self, node: ArchivedNode) -> str | None:
        """Tell why a folder is not this node's, by the claims of ``commitlog_stage``; claim it if nobody has."""
        folder = Path(node.folder)
        try:
            if not node.token or not has_claim(folder, node.node, node.token):
                told = node.asked_s > float("-inf")
                anew = node.captures if told else may_be_first(node.folder, get_place(self._store, node.node))
                node.token = claim(self._store, node.node, folder, anew=anew)
        except (ForeignClaimError, OSError) as error:
            return str(error)
        if not node.token:
            return f"{folder} has no claim of the node: is it the node's cdc_raw, mounted? (docs/sync.md, Queues)"
        return other_claims(self._store, folder, os.listdir(folder), node.node, self._endpoints)

    def _find_nodes(self) -> None:
        """Ask which nodes there are, once in a minute; while cluster or store are away, those of before are watched,
        also while the cluster is asked."""
        try:
            if self._nodes is None:
                self._nodes = {node.node: node for node in self._remembered()}
            if not self._asking.is_busy and time.monotonic() - self._asked_s >= ASK_EVERY_S:
                self._asked_s = time.monotonic()
                self._asking.begin(lambda: list(self._cluster.nodes(self._wants)))
            if not self._asking.is_done(ANSWER_S):
                return
            answer = self._asking.result()
            self._endpoints = {told.node: told.endpoint for told, _ in answer}
            for told, settings in answer:
                if self._config.sync.queue_of(told.address, told.node) == self._queue:
                    self._take(told, settings)
            for gone in self._nodes.keys() - self._endpoints.keys():
                self._store.delete(f"{_NODES}{gone}.json")
                del self._nodes[gone]
            self._unknown = ""
        except Exception as error:  # any: the nodes' room does not depend on it
            if str(error) != self._unknown:
                print(
                    f"ringsync: warning: the nodes cannot be looked up, and are watched as before: {error}", flush=True
                )
            self._unknown = str(error)

    def _wants(self, node: ArchivedNode) -> bool:
        """Tell whether a node's settings are to be asked: it is of this queue, and not known, or known for an hour."""
        assert self._nodes is not None
        known = self._nodes.get(node.node)
        is_ours = self._config.sync.queue_of(node.address, node.node) == self._queue
        return is_ours and (known is None or not known.folder or time.monotonic() - known.asked_s > SETTINGS_EVERY_S)

    def _take(self, told: ArchivedNode, settings: Mapping[str, str]) -> None:
        assert self._nodes is not None
        before = self._nodes.get(told.node)
        place = get_place(self._store, told.node) if before is None else None
        known = before.folder if before else (place.folder if place else None) or ""
        folder = str(self._config.sync.cdc_raw or settings.get("cdc_raw_directory") or known)
        total = before.total_bytes if before else 0
        with suppress(OSError):
            total = total_space(settings, Path(folder)) if settings else total
        captures = settings.get("cdc_enabled") != "false" if settings else (before.captures if before else True)
        new = replace(before or told, endpoint=told.endpoint, folder=folder, total_bytes=total, captures=captures)
        if settings:
            new.asked_s = time.monotonic()
        self._nodes[told.node] = new
        if new != before:
            names = ("node", "endpoint", "address", "folder", "total_bytes", "captures")
            document = {name: value for name, value in asdict(new).items() if name in names}
            self._store.put(f"{_NODES}{new.node}.json", json.dumps(document).encode())

    def _remembered(self) -> Iterator[ArchivedNode]:
        for stat in self._store.list(_NODES):
            with suppress(ChecksumError, ValueError, TypeError):  # the cluster tells it again
                node = ArchivedNode(**get_json(self._store, stat.key))
                self._endpoints[node.node] = node.endpoint
                if self._config.sync.queue_of(node.address, node.node) == self._queue:
                    yield node

    @property
    def problems(self) -> list[str]:
        """What is wrong besides single nodes."""
        seen = "new nodes are not watched" if self._nodes else "no node is known yet, so nobody watches cdc_raw"
        return [f"{seen}: {self._unknown}"] if self._unknown else []

    def status(self) -> dict[str, Any]:
        """Return how each node stands."""
        names = ("endpoint", "folder", "free_bytes", "disk_full", "waiting", "archived", "error")
        nodes = [node for node in (self._nodes or {}).values() if node.captures or node.folder]
        known = {node.node: {name: getattr(node, name) for name in names} for node in nodes}
        for node in nodes:
            known[node.node] |= {"total_bytes": self._limit(node), "empties": bool(node.token) and not node.error}
        return known
