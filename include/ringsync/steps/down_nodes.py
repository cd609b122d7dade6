"""Nodes that are down, and since when: what gossip, the driver and the plan before tell together.

Each plan of the sync says it, and goes on from the newest plan before, whichever process made that. So no process has a
memory of its own, and a look that knows nothing makes no dead node alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ringsync.cluster.cluster import DEFAULT_HINT_WINDOW_MS, HINT_WINDOW, setting_ms, settings_of
from ringsync.cluster.gossip import SILENT_S, Heard
from ringsync.cluster.node import NO_ANSWER
from ringsync.ledger.staging import Bucket
from ringsync.ring.ring import Host

FRESH_MS = 300_000
"""How long after its interval a plan says who is down, and gossip who is alive."""


def down_since(
    hosts: Iterable[Host],
    connected: Collection[str],
    heard: Mapping[str, Heard],
    before: Mapping[str, int],
    interval: Bucket,
) -> dict[str, int]:
    """Return since when nodes are down, ms since the epoch, by host id.

    A node is alive if the driver is connected to it, or the last look at gossip had news of it. Else it is down if the
    driver has lost it, if two looks had no news, or (as long as the driver will find out) if it was down before.

    :param hosts: ``up`` is False if the driver has lost a node. It does not try nodes of other datacenters, and in its
        first seconds it knows nobody
    :param connected: addresses of nodes to which the driver is connected
    :param heard: what gossip has told, ms since the epoch
    :param before: who was down in the plan before, since when; empty if it is old
    :param interval: interval of the plan
    """
    now_ms = interval.start
    told_ms = max((max(last.since, last.silent_since) for last in heard.values()), default=0)
    patience_ms = 2 * max(SILENT_S * 1000, interval.length)
    is_told = now_ms - told_ms <= max(FRESH_MS, patience_ms)
    down = {}
    for host in hosts:
        last = heard.get(host.id) if is_told else None
        if host.address in connected or (last and not last.silent_since):
            continue
        silent = last is not None and told_ms > last.silent_since and told_ms - last.since >= patience_ms
        if silent or not host.up or (host.is_local and host.id in before):
            since_ms = int(last.silent_since) if last and silent else now_ms
            down[host.id] = min(before.get(host.id, now_ms), since_ms)
    return down


def read_hint_window(session: Any, *, of_scylla: bool) -> int:
    """Ask a node for how long it keeps hints, ms; 0: it does not say, as ScyllaDB."""
    told: Mapping[str, str] = {}
    with suppress(*NO_ANSWER):
        told = {} if of_scylla else settings_of(session, None, HINT_WINDOW)
    return setting_ms(told, HINT_WINDOW)


def status_of(hosts: Collection[Host], down: Mapping[str, int], interval: Bucket, window_ms: int) -> dict[str, Any]:
    """Return who is down, until when that counts, and for how long hints are kept, for ``cdcservice status``.

    :param down: since when, ms since the epoch, by host id. Nodes may be cut off, and work, if nobody of their
        datacenter is up
    """
    up = {host.datacenter for host in hosts if host.up}
    told = {
        host.id: {"endpoint": host.endpoint, "since_ms": down[host.id], "is_cut_off": host.datacenter not in up}
        for host in hosts
        if host.id in down
    }
    window_ms = window_ms or DEFAULT_HINT_WINDOW_MS
    return {"down": told, "down_until_ms": interval.end + FRESH_MS, "hint_window_ms": window_ms}
