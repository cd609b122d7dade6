"""Segments that are gone from a node's ``cdc_raw`` unread: they are archived, or there is a gap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ringsync.cql.identifiers import parse_table_name
from ringsync.ledger.archive import find
from ringsync.ledger.finished_segments import finished_segments
from ringsync.ledger.gaps import Gap, get_unread, note_gap, put_unread
from ringsync.ledger.staging import commit_keys, get_commit
from ringsync.ring.ranks import RankedRing
from ringsync.ring.ring import replicas
from ringsync.steps.stage.node_log import PATIENCE_MS, NodeLog
from ringsync.storage.port import ObjectStore

MISSED_MS = 10_000
"""How long a segment is missed before that is believed: a mounted folder may be stale, and others may be about to say
that they have read or archived it."""


class LostSegments:
    """Looks after the segments that nodes of a queue have lost."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._kept: dict[str, dict[int, str]] = {}
        self._since_ms: dict[tuple[str, int], int] = {}
        self._told: set[tuple[str, int]] = set()

    def look(
        self,
        log: NodeLog,
        now_ms: int,
        tables_of: Callable[[NodeLog], Mapping[str, str]],
        ring_of: Callable[[str], RankedRing | None],
    ) -> None:
        """Note gaps of a node whose folder was just listed, and keep what waits there.

        :param tables_of: returns the names of the tables whose changes a log may have, by id
        :param ring_of: returns the token ranges of a keyspace
        """
        since = {one: self._since_ms.setdefault((log.node, one), now_ms) for one in log.missed}
        believed = {one: log.missed[one] for one, since_ms in since.items() if now_ms - since_ms >= MISSED_MS}
        new = {one: name for one, name in believed.items() if (log.node, one) not in self._told}
        if lost := lost_of(self._store, (log.node,), new):
            _note(self._store, log, lost, now_ms, tables_of(log), ring_of)
        self._told |= {(log.node, one) for one in new}
        for identity, name in believed.items():
            if now_ms - since[identity] >= PATIENCE_MS:  # it does not come back
                log.remove_index(name)
            if not log.has_index(name):
                self._told.discard((log.node, identity))
                del log.missed[identity], self._since_ms[log.node, identity]
        waiting = {**log.missed, **log.unread}
        if log.node not in self._kept:
            self._kept[log.node] = get_unread(self._store, log.node)
        if waiting != self._kept[log.node]:
            put_unread(self._store, log.node, waiting)
            self._kept[log.node] = waiting


def lost_of(store: ObjectStore, nodes: Iterable[str], missed: Mapping[int, str]) -> list[str]:
    """Return the names of the missed segments that were neither archived nor read, under any of the nodes' ids.

    :param missed: names of segments by id
    """
    left = dict(missed)
    for node in nodes if missed else ():
        folded = finished_segments(store, node)
        keys = commit_keys(store, node)
        finished = get_commit(store, keys[-1]).finished if keys else {}
        left = {one: name for one, name in left.items() if one not in folded and one not in finished}
        left = {one: name for one, name in left.items() if find(store, node, name) is None}
    return list(left.values())


def _note(
    store: ObjectStore,
    log: NodeLog,
    lost: Iterable[str],
    now_ms: int,
    tables: Mapping[str, str],
    ring_of: Callable[[str], RankedRing | None],
) -> None:
    """Note that segments of a node are lost."""
    keyspaces = sorted({parse_table_name(name)[0] for name in tables.values()})
    ranges = _ranges(log.node, map(ring_of, keyspaces))
    gaps = [Gap(log.node, log.endpoint, name, log.whole_at_ms, now_ms, tables, ranges) for name in sorted(lost)]
    for gap in gaps:
        note_gap(store, gap)
    more = f" (and {len(gaps) - 1} other segments)" if len(gaps) > 1 else ""
    print(f"ringsync: warning: node {log.endpoint}: {gaps[0].loss}{more}: cdcservice status", flush=True)


def _ranges(node: str, rings: Iterable[RankedRing | None]) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of which a node has replicas."""
    found: set[tuple[int, int]] = set()
    for ring in rings:
        if ring is not None:
            found |= {
                (one.start, one.end) for one, holders in replicas(ring.ring) if any(host.id == node for host in holders)
            }
    return tuple(sorted(found))
