"""Who is alive, as gossip tells a node.

The driver does not try the nodes of other datacenters: it never knows that such a node is down if it was when the
driver connected. The database knows: gossip brings the heartbeats of all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from ringsync.cluster.node import NO_ANSWER, Node
from ringsync.cluster.scylla import is_scylla

SILENT_S = 60.0
"""Time without a heartbeat after which a node is not waited for. Cassandra itself takes some 20 s."""

MOST_ASKED = 3
"""Nodes that are asked until one answers: while a cluster is upgraded, some do not know of it, and others are slow."""


class Heard(NamedTuple):
    """What was heard of a node last.

    :ivar generation: s since the epoch, when it was started
    :ivar heartbeat: number of its last heartbeat since then
    :ivar since: time of the last look with news of the node, in the looks' unit
    :ivar silent_since: time of the first look without news after that; 0: the last one had some
    """

    generation: int
    heartbeat: int
    since: float
    silent_since: float = 0


def hear(
    beats: Mapping[str, tuple[int, int]], names: Iterable[str], before: Mapping[str, Heard], now: float
) -> dict[str, Heard]:
    """Return what was heard of nodes by now. A node asked later may know less: that is no heartbeat.

    :param beats: what a node has told (:func:`heartbeats`); of nodes that it does not know nothing is heard
    :param before: what the last look has returned
    """
    heard = {}
    for name in names:
        last, beat = before.get(name), beats.get(name, (0, 0))
        if last is None or beat > last[:2]:
            heard[name] = Heard(*beat, now)
        else:
            heard[name] = last._replace(silent_since=last.silent_since or now)
    return heard


def heartbeats(nodes: Iterable[Node], now_s: float) -> dict[str, tuple[int, int]]:
    """Ask nodes for the last heartbeat that they got from each node, by host id and by address; empty: they do not say,
    as Cassandra 4.0. (C: db/virtual/GossipInfoTable, since 4.1; ScyllaDB tells in ``system.cluster_status`` who is up.)

    :param nodes: the first that answers tells
    :param now_s: present time, s since the epoch
    """
    for node in islice(nodes, MOST_ASKED):
        with suppress(*NO_ANSWER):
            beats: dict[str, tuple[int, int]] = {}
            for names, beat in _told(node, now_s):  # a host has two rows for a while after it has changed its address
                beats |= {str(name): max(beat, beats.get(str(name), beat)) for name in names if name}
            return beats
    return {}


def _told(node: Node, now_s: float) -> list[tuple[tuple[Any, Any], tuple[int, int]]]:
    if is_scylla(node):
        rows = node.execute("SELECT peer, host_id, up FROM system.cluster_status")
        return [((row.peer, row.host_id), (int(now_s), 0)) for row in rows if row.up]
    rows = node.execute("SELECT address, host_id, generation, heartbeat FROM system_views.gossip_info")
    return [((row.address, row.host_id), (row.generation or 0, row.heartbeat or 0)) for row in rows]
