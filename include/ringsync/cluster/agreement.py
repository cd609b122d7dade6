"""The agreement of all nodes on the schema, after it was changed.

A node that is altered tells the others at once, but what ``system.peers`` says of them comes with gossip, a second
later. So each node to which we are connected is asked for its own version; of the rest another tells. The driver waits
by gossip alone, after each statement: our sessions do not let it (:func:`ringsync.cluster.session.connect`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ringsync.cluster.node import NO_ANSWER, NodeSchema, connected_nodes, node_schema

AGREEMENT_S = 30.0
"""Longest time until all nodes know of a change."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2
_VERSION = "SELECT schema_version FROM system.local"


def nodes_behind(
    session: Any,
    wait_s: float = AGREEMENT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> frozenset[str]:
    """Wait until all nodes have the same schema, but for those that are down.

    :param session: a ``cassandra.cluster.Session`` with the driver's default row factory
    :param wait_s: longest time to wait, s
    :returns: addresses of nodes that still differ from the one that was asked for the others; empty: all agree
    """
    deadline, pause_s, seen = clock() + wait_s, _FIRST_PAUSE_S, set[tuple[Any, str]]()
    while (behind := _behind(session, seen)) and clock() < deadline:
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return behind


def _behind(session: Any, seen: set[tuple[Any, str]]) -> frozenset[str]:
    """Look once.

    :param seen: hosts, and versions that they have had since the wait began; gets those that are found. Who has had a
        version knows all of it, whatever came then
    """
    at = _one_view(session)
    hosts = [host for host in session.get_pool_state() if host.is_up]
    if at is None:
        return frozenset(str(host.address) for host in hosts) or frozenset({"all"})
    asked = [host for host in hosts if (host, at.version) not in seen]
    answers = [(host, session.execute_async(_VERSION, host=host)) for host in asked]
    for host, answer in answers:
        try:
            seen.add((host, str(answer.result().one().schema_version)))
        except NO_ANSWER:
            continue
    told = {host for host, _ in seen}
    behind = {str(host.address) for host in hosts if host in told and (host, at.version) not in seen}
    known = {str(address) for host in told for address in (host.address, host.broadcast_address)}
    return frozenset(behind | (at.others.keys() - known))


def _one_view(session: Any) -> NodeSchema | None:
    """Ask the first node that answers for all versions that it knows; None: none answers."""
    for node in connected_nodes(session):
        try:
            return node_schema(node)
        except NO_ANSWER:
            continue
    return None
