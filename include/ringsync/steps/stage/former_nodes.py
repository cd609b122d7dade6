"""Nodes that have left the ring: their logs are read to the end, and are then forgotten.

Nothing is written to such a node any more, and other replicas hold what it held. But what only it had logged, or what
was moved to others without their logging it (``cdc_on_repair_enabled: false``), is in its log alone. So its folder is
read as long as it has the node's claim. A node that was alive when it left (``nodetool decommission``) leaves a gap if
its log cannot be read to the end. Of one that was dead (replaced, or removed) the source has what the others have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ringsync.config import Config
from ringsync.ledger.archive import READ, archive_segment
from ringsync.ledger.gaps import Gap, note_gap
from ringsync.ledger.read_nodes import ReadNode, forget_read_node, get_read_node, put_read_node, read_node
from ringsync.ring.ring import Host
from ringsync.steps.archive.raw_folder import look
from ringsync.steps.stage.claims import Place, claimants, get_place, is_claimed, release
from ringsync.steps.stage.lost_segments import lost_of
from ringsync.steps.stage.node_log import NodeLog
from ringsync.steps.stage.vain_tries import VainTries, trouble_of
from ringsync.steps.sync_plan import FormerHost, SyncPlan
from ringsync.storage.port import ObjectStore


class FormerNodes:
    """The nodes that have left the ring, of all queues."""

    def __init__(self, store: ObjectStore, config: Config) -> None:
        self._store, self._config = store, config
        self._known: dict[str, FormerHost] = {}
        self._vain = VainTries(store)
        self._remembered: dict[str, ReadNode] = {}

    def remember(self, host: Host, log: NodeLog) -> None:
        """Remember a node of the ring if its folder is claimed, for when it has left."""
        known = read_node(host)
        if log.token and host.id not in self._known and self._remembered.get(host.id) != known:
            if get_read_node(self._store, host.id) != known:
                put_read_node(self._store, host.id, known)
            self._remembered[host.id] = known

    def take(self, plan: SyncPlan) -> None:
        """Take over the nodes of a new plan, but for those that another process has done with since it was made."""
        read = {former.host.id: former for former in plan.former if former.host.is_read}
        self._known = {node: former for node, former in read.items() if is_claimed(self._store, node)}
        self._vain.forget_all_but(self._known)
        self._remembered = {node: known for node, known in self._remembered.items() if node not in self._known}

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The nodes; none of them is up."""
        return tuple(replace(former.host, up=False) for former in self._known.values())

    def __contains__(self, node: object) -> bool:
        return node in self._known

    def find(self, log: NodeLog) -> None:
        """Say where a node's log is: where it was read last. It cannot be asked, and gets no new claim.

        :raises ChecksumError: that is damaged
        """
        log.folder, log.token, log.is_shared = None, "", False
        place = get_place(self._store, log.node)
        log.folder = Path(place.folder) if place and place.folder else None
        log.token = (place and place.token) or ""
        log.unclaimed = "its claim there is gone"

    def is_over(self, log: NodeLog, now_ms: int, tables_of: Callable[[NodeLog], Mapping[str, str]]) -> bool:
        """Tell whether a log is done with: it is read to its end, or another node reads its folder, or it was tried
        in vain for long enough. Then its claim is given up, and no further plan has the node.

        :param tables_of: returns the names of the tables whose changes a log may have, by id, for a gap
        """
        former, trouble = self._known[log.node], trouble_of(log)
        if log.is_shared:
            why, lost = "another node reads its folder", self._lost(log)
        elif trouble is None and self._is_read(log, former.since_ms):
            why, lost = "its log is read to its end", self._lost(log)
            if self._config.archive.policy == "always":
                self._archive(log, now_ms)
        elif self._vain.are_enough(log, former.host, now_ms):
            why, lost = f"its log cannot be read to its end: {trouble}", []
            if former.host.up:
                lost = [log.unread[max(log.unread)] if log.unread else "end-of-log"]
        else:
            return False
        for segment in lost:
            known = (log.node, log.endpoint, segment, log.whole_at_ms, now_ms)
            note_gap(self._store, Gap(*known, tables_of(log), ()))
        print(f"ringsync: node {log.endpoint} has left the ring, and is done with: {why}", flush=True)
        release(self._store, log.node, Place(str(log.folder) if log.folder else None, log.token))
        forget_read_node(self._store, log.node)
        del self._known[log.node]
        return True

    def problem(self, log: NodeLog) -> str | None:
        """Tell what is wrong with the log of such a node; None: nothing that anybody has to mend."""
        trouble = trouble_of(log)
        if not trouble or not self._known[log.node].host.up:
            return None
        minutes = self._vain.left_ms(log.node) // 60_000
        return (
            f"it has left the ring, and its log cannot be read to its end, which is tried for {minutes} more minutes: "
            f"{trouble}"
        )

    def _is_read(self, log: NodeLog, since_ms: int) -> bool:
        """Tell whether a log without trouble is read to its end, and what is missing was looked for long enough. The
        index of a missing segment stays if this worker may not remove it."""
        return not log.may_have(since_ms) and (not log.missed or log.refused is not None)

    def _lost(self, log: NodeLog) -> list[str]:
        """Return the names of unread segments that are not in the folder, though nobody has read or archived them: a
        node that uses the folder may have."""
        assert log.folder is not None
        waiting = {one: name for one, name in {**log.unread, **log.missed}.items() if not log.has_finished(one)}
        gone = {one: name for one, name in waiting.items() if not (log.folder / name).exists()}
        return lost_of(self._store, {log.node, *claimants(log.folder)} if gone else (), gone)

    def _archive(self, log: NodeLog, now_ms: int) -> None:
        """Archive the segments that were read, and remove them: ``commitlog_archive`` watches nodes of the ring."""
        assert log.folder is not None
        for segment in look(log.folder, 0).segments:
            if segment.is_complete and log.has_finished(segment.identity):
                archive_segment(
                    *(self._store, log.node, segment.file, segment.index, segment.began_ms, now_ms, READ),
                    log.written.get(segment.identity),
                    even_short=True,
                )
                segment.remove()
