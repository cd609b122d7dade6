"""How long it was tried in vain to read the log of a node that has left the ring.

Only tries count, and the time between them. When something was read, or nothing is wrong, all begins anew. A run is
shorter than an hour, so the store knows how long it was (:mod:`ringsync.ledger.read_nodes`), to the minute.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ringsync.ledger.read_nodes import get_read_node, put_read_node, read_node
from ringsync.ring.ring import Host
from ringsync.steps.stage.node_log import LONGEST_WAIT_MS, NodeLog
from ringsync.storage.port import ObjectStore

FORMER_PATIENCE_MS = 3_600_000
"""So long it is tried: a disk may be mounted elsewhere."""

_MINUTE_MS = 60_000

_STILL_MS = 2 * LONGEST_WAIT_MS
"""Tries that are further apart count as if they were so far apart: in between, nobody worked."""

_FORGOTTEN_MS = 10 * _MINUTE_MS
"""What another process has tried longer ago does not count."""


@dataclass
class _Tries:
    """Tries that were in vain, one after the other.

    :ivar lasted_ms: how long they took
    :ivar kept_ms: as much of it as the store knows
    :ivar tried_ms: time of the last one, ms since the epoch; 0: this process has made none
    :ivar again_ms: when the log was to be tried again then: each try changes it
    :ivar number: number of the node's last commit then
    """

    lasted_ms: int
    kept_ms: int
    tried_ms: int = 0
    again_ms: int = 0
    number: int = 0


class VainTries:
    """The tries of all nodes that have left."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._of: dict[str, _Tries] = {}

    def are_enough(self, log: NodeLog, host: Host, now_ms: int) -> bool:
        """Take note of a cycle, in which the log was tried or not, and tell whether it need not be tried any more."""
        if log.node not in self._of:
            self._of[log.node] = self._before(log.node, now_ms)
        tries = self._of[log.node]
        is_well = trouble_of(log) is None
        if is_well or (tries.tried_ms and log.number > tries.number):
            tries.lasted_ms = 0
        elif log.again_ms == tries.again_ms:
            return False  # it was not tried
        elif tries.tried_ms:
            tries.lasted_ms += min(now_ms - tries.tried_ms, _STILL_MS)
        tries.tried_ms, tries.again_ms, tries.number = (0 if is_well else now_ms), log.again_ms, log.number
        if tries.lasted_ms >= tries.kept_ms + _MINUTE_MS or tries.lasted_ms < tries.kept_ms:
            known = replace(read_node(host), vain_ms=tries.lasted_ms, tried_ms=now_ms)
            put_read_node(self._store, log.node, known)
            tries.kept_ms = tries.lasted_ms
        return tries.lasted_ms >= FORMER_PATIENCE_MS

    def left_ms(self, node: str) -> int:
        """Return how long the log of a node is still to be tried."""
        return FORMER_PATIENCE_MS - (self._of[node].lasted_ms if node in self._of else 0)

    def forget_all_but(self, nodes: Collection[str]) -> None:
        """Forget nodes that have not left, or are done with."""
        self._of = {node: tries for node, tries in self._of.items() if node in nodes}

    def _before(self, node: str, now_ms: int) -> _Tries:
        known = get_read_node(self._store, node)
        kept_ms = known.vain_ms if known and now_ms - known.tried_ms < _FORGOTTEN_MS else 0
        return _Tries(kept_ms, kept_ms)


def trouble_of(log: NodeLog) -> str | None:
    """Return why a log cannot be read to its end; None: it can be."""
    doubts = (log.doubts[identity].reason for identity in sorted(log.doubts))
    return log.error or log.failure or next(doubts, None)
