"""Which nodes a consistency level asks for: what reads as much as a SELECT at this level would."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ringsync.ring.ring import Host, RingError, RingSnapshot, replicas
from ringsync.ring.tokens import TokenRange, TokenSet, overlaps, union

_FIXED = {"ONE": 1, "TWO": 2, "THREE": 3, "LOCAL_ONE": 1}


def asked_hosts(ring: RingSnapshot, level: str, ranges: Iterable[TokenRange]) -> tuple[Host, ...]:
    """List the nodes that a level may ask for these tokens, by their ids.

    :param level: consistency level; those that begin with LOCAL ask only nodes of the local datacenter
    :raises RingError: see :func:`ringsync.ring.ring.replicas`
    """
    found = {host.id: host for _, hosts in _replicas(ring, ranges) for host in _asked(hosts, level)}
    return tuple(found[identity] for identity in sorted(found))


def lacking_hosts(
    ring: RingSnapshot, level: str, ranges: Iterable[TokenRange], there: Collection[str]
) -> tuple[Host, ...]:
    """List the nodes that are not there, where too few are there for the level.

    :param level: consistency level
    :param there: ids of nodes
    :returns: empty: the level is met in all ranges
    :raises RingError: a row has fewer replicas than the level needs; or see :func:`ringsync.ring.ring.replicas`
    """
    found: dict[str, Host] = {}
    for _, hosts in _replicas(ring, ranges):
        for group, needed in _needed(hosts, level):
            if len(group) < max(needed, 1):
                raise RingError(
                    f"{level} needs {max(needed, 1)} replicas of each row, and the keyspace has {len(group)} there: "
                    "choose another cassandra.consistency_level, or cassandra.local_datacenter"
                )
            if sum(host.id in there for host in group) < needed:
                found |= {host.id: host for host in group if host.id not in there}
    return tuple(found[identity] for identity in sorted(found))


def levels_as_good(level: str, replica_sets: Iterable[Sequence[Host]]) -> tuple[str, ...]:
    """List the other levels at which those who answer are always enough for a level too, the cheapest first.

    :param replica_sets: the replicas of each token range
    """
    alike = {tuple(sorted((host.datacenter, host.is_local) for host in hosts)): hosts for hosts in replica_sets}
    return tuple(
        other
        for other in ("LOCAL_ONE", "ONE", "LOCAL_QUORUM", "TWO", "QUORUM", "THREE", "EACH_QUORUM", "ALL")
        if other != level and all(_includes(hosts, other, level) for hosts in alike.values())
    )


def _includes(hosts: Sequence[Host], level: str, other: str) -> bool:
    """Tell whether a level can be met, and whoever answers at it includes as many as another asks for."""
    asked = _needed(hosts, level)
    if any(needed > len(group) for group, needed in asked):
        return False
    return all(
        sum(max(0, number - sum(host not in wanted for host in group)) for group, number in asked) >= needed
        for wanted, needed in _needed(hosts, other)
    )


def _replicas(ring: RingSnapshot, ranges: Iterable[TokenRange]) -> list[tuple[TokenRange, tuple[Host, ...]]]:
    """List the tokens as ranges without wrap, each with the hosts that hold it."""
    held = [(part, hosts) for token_range, hosts in replicas(ring) for part in token_range.unwrap()]
    return [(tokens, held[number][1]) for number, _, tokens in overlaps([part for part, _ in held], union(ranges))]


def _asked(hosts: Sequence[Host], level: str) -> list[Host]:
    return [host for host in hosts if host.is_local or not level.startswith("LOCAL_")]


def _needed(hosts: Sequence[Host], level: str) -> list[tuple[list[Host], int]]:
    """Divide replicas into groups, each with the number that the level asks for (C: db/ConsistencyLevel.blockFor)."""
    if level == "EACH_QUORUM":
        datacenters = sorted({host.datacenter for host in hosts})
        groups = [[host for host in hosts if host.datacenter == datacenter] for datacenter in datacenters]
        return [(group, len(group) // 2 + 1) for group in groups]
    asked = _asked(hosts, level)
    if level in ("QUORUM", "LOCAL_QUORUM"):
        return [(asked, len(asked) // 2 + 1)]
    return [(asked, len(asked) if level == "ALL" else _FIXED[level])]


def held_by(ring: RingSnapshot, ranges: Iterable[TokenRange], there: Collection[str]) -> dict[str, TokenSet]:
    """Find the tokens that each node holds.

    :param there: ids of the nodes that count
    :returns: by id, of the nodes that hold any of these tokens
    """
    held: dict[str, list[TokenRange]] = {}
    for tokens, hosts in _replicas(ring, ranges):
        for host in hosts:
            if host.id in there:
                held.setdefault(host.id, []).append(tokens)
    return {node: union(parts) for node, parts in held.items()}
