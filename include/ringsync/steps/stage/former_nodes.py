"""Nodes that have left the ring: their logs are read to the end, and are then forgotten.

Nothing is written to such a node any more, and other replicas hold what it held. But what only it had logged, or what
was moved to others without their logging it (``cdc_on_repair_enabled: false``), is in its log alone. So its folder is
read as long as it has the node's claim. A node that was alive when it left (``nodetool decommission``) leaves a gap if
its log cannot be read to the end. Of one that was dead (replaced, or removed) the source has what the others have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ringsync.ledger.gaps import Gap, note_gap
from ringsync.ring.ring import Host
from ringsync.steps.stage.claims import get_place, is_claimed, release
from ringsync.steps.stage.node_log import NodeLog
from ringsync.steps.sync_plan import FormerHost, SyncPlan
from ringsync.storage.port import ObjectStore

FORMER_PATIENCE_MS = 3_600_000
"""So long it is tried to read the log of a node that has left the ring to its end: a disk may be mounted elsewhere."""


class FormerNodes:
    """The nodes that have left the ring, of all queues."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: dict[str, FormerHost] = {}

    def take(self, plan: SyncPlan) -> None:
        """Take over the nodes of a new plan, but for those that another process has done with since it was made."""
        self._known = {former.host.id: former for former in plan.former if is_claimed(self._store, former.host.id)}

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The nodes; none of them is up."""
        return tuple(replace(former.host, up=False) for former in self._known.values())

    def __contains__(self, node: object) -> bool:
        return node in self._known

    def find(self, log: NodeLog) -> None:
        """Say where a node's log is: where it was read last. It cannot be asked, and gets no new claim."""
        place = get_place(self._store, log.node)
        log.folder = Path(place.folder) if place and place.folder else None
        log.token = (place and place.token) or ""
        log.unclaimed, log.is_shared = "its claim there is gone", False

    def is_over(self, log: NodeLog, now_ms: int, tables_of: Callable[[NodeLog], Mapping[str, str]]) -> bool:
        """Tell whether a log is done with: it is read to its end, or another node reads its folder, or it was tried
        long enough. Then its claim is given up, and no further plan has the node.

        :param tables_of: returns the names of the tables whose changes a log may have, by id, for a gap
        """
        former = self._known[log.node]
        if log.is_shared or (not _trouble(log) and not log.may_have(former.since_ms)):
            why = "another node reads its folder" if log.is_shared else "its log is read to its end"
        elif now_ms - former.since_ms > FORMER_PATIENCE_MS:
            why = f"its log cannot be read to its end: {_trouble(log)}"
            if former.host.up:
                segment = log.unread[max(log.unread)] if log.unread else "end-of-log"
                known = (log.node, log.endpoint, segment, log.whole_at_ms, now_ms)
                note_gap(self._store, Gap(*known, tables_of(log), (), is_whole=True))
        else:
            return False
        print(f"ringsync: node {log.endpoint} has left the ring, and is done with: {why}", flush=True)
        if (place := get_place(self._store, log.node)) is not None:
            release(self._store, log.node, place)
        del self._known[log.node]
        return True

    def problem(self, log: NodeLog) -> str | None:
        """Tell what is wrong with the log of such a node; None: nothing that anybody has to mend."""
        former, trouble = self._known[log.node], _trouble(log)
        if not trouble or not former.host.up:
            return None
        end = datetime.fromtimestamp((former.since_ms + FORMER_PATIENCE_MS) / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ")
        return f"it has left the ring, and its log cannot be read to its end, which is tried until {end}: {trouble}"


def _trouble(log: NodeLog) -> str | None:
    doubts = (log.doubts[identity].reason for identity in sorted(log.doubts))
    return log.error or log.failure or next(doubts, None)
