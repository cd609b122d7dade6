"""Segments that are gone from a node's ``cdc_raw`` unread: they are archived, or there is a gap."""

from __future__ import annotations

from collections.abc import Mapping

from ringsync.cql.identifiers import parse_table_name
from ringsync.ledger.archive import find
from ringsync.ledger.dropped_tables import dropped_of
from ringsync.ledger.finished_segments import finished_segments
from ringsync.ledger.gaps import Gap, get_unread, note_gap, open_gaps, put_unread
from ringsync.ledger.staging import commit_keys, get_commit
from ringsync.replica.base import base_folder
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
        self, log: NodeLog, now_ms: int, tables: Mapping[str, str], rings: Mapping[str, RankedRing | None]
    ) -> None:
        """Note gaps of a node whose folder was just listed, and keep what waits there.

        :param tables: names of the followed tables, by id
        :param rings: token ranges of their keyspaces
        """
        for identity, name in list(log.missed.items()):
            since_ms = self._since_ms.setdefault((log.node, identity), now_ms)
            if now_ms - since_ms < MISSED_MS:
                continue
            if (log.node, identity) not in self._told and not is_safe(self._store, log.node, identity, name):
                gap = Gap(log.node, log.endpoint, name, log.whole_at_ms, now_ms, dict(tables), _ranges(log.node, rings))
                note_gap(self._store, gap)
                self.tell(log)
                print(f"ringsync: warning: node {log.endpoint}: {log.gap}", flush=True)
            self._told.add((log.node, identity))
            if now_ms - since_ms >= PATIENCE_MS:  # it does not come back
                log.remove_index(name)
            if not log.has_index(name):
                self._told.discard((log.node, identity))
                del log.missed[identity], self._since_ms[log.node, identity]
        waiting = {**log.missed, **log.unread}
        if log.node not in self._kept:
            self._kept[log.node] = get_unread(self._store, log.node)
            self.tell(log)
        if waiting != self._kept[log.node]:
            put_unread(self._store, log.node, waiting)
            self._kept[log.node] = waiting

    def tell(self, *logs: NodeLog) -> None:
        """Have logs name their open gaps."""
        gaps = open_gaps(self._store, self._has_replica)
        for log in logs:
            of_node = gaps.get(log.node, [])
            more = f" (and {len(of_node) - 1} other segments)" if len(of_node) > 1 else ""
            log.gap = f"{of_node[0]}{more}" if of_node else None

    def _has_replica(self, table_id: str, name: str) -> bool:
        """Tell whether a table is there, as far as the schema updater knows, and has a replica."""
        keyspace, table = parse_table_name(name)
        if table_id in dropped_of(self._store, keyspace, table):
            return False
        return bool(self._store.list(f"{base_folder(keyspace, table)}/_delta_log/"))


def is_safe(store: ObjectStore, node: str, identity: int, name: str) -> bool:
    """Tell whether a segment that is gone was read by another process, or archived."""
    if find(store, node, name) is not None or identity in finished_segments(store, node):
        return True
    keys = commit_keys(store, node)
    return bool(keys) and identity in get_commit(store, keys[-1]).finished


def _ranges(node: str, rings: Mapping[str, RankedRing | None]) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of which a node has replicas."""
    found: set[tuple[int, int]] = set()
    for ring in rings.values():
        if ring is not None:
            found |= {
                (one.start, one.end) for one, holders in replicas(ring.ring) if any(host.id == node for host in holders)
            }
    return tuple(sorted(found))
