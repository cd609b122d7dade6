"""The ring: the hosts, the tokens that they own, and the replicas of each token range.

A :class:`RingSnapshot` is the cluster at one moment. All functions of it are pure, so that all tasks with the same
snapshot get the same answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ringsync.ring.tokens import TokenRange


class RingError(ValueError):
    """An error: the ring's replicas cannot be computed. The message says why."""


@dataclass(frozen=True)
class Host:
    """A node that owns tokens.

    :ivar id: host id of the node, a UUID as text
    :ivar address: address at which the node takes CQL connections; ``port``: its port
    :ivar up: whether the driver considers the node alive
    :ivar is_local: whether the node is in the datacenter that is asked for rows
    :ivar is_read: whether the node's log is read
    """

    id: str
    address: str
    port: int
    datacenter: str
    rack: str
    tokens: tuple[int, ...]
    up: bool = True
    is_local: bool = True
    is_read: bool = True

    @property
    def is_heard(self) -> bool:
        """Whether its log tells now what it has."""
        return self.up and self.is_read

    @property
    def endpoint(self) -> str:
        """``address:port``: the node's name in plans and in the driver."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Replication:
    """The replication of a keyspace.

    :ivar strategy: simple name of the strategy's class
    :ivar factors: (datacenter, replicas) for NetworkTopologyStrategy, ("", replicas) for SimpleStrategy
    """

    strategy: str
    factors: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class RingSnapshot:
    """Hosts, tokens and liveness at one moment, and one keyspace's replication."""

    hosts: tuple[Host, ...]
    replication: Replication

    @cached_property
    def owners(self) -> tuple[tuple[int, Host], ...]:
        """All tokens in ring order, each with its owner."""
        return tuple(sorted(((t, host) for host in self.hosts for t in host.tokens), key=lambda pair: pair[0]))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the topology, the "ring epoch": hosts, tokens, replication, but not which hosts are up."""
        description = [
            sorted([h.id, h.address, h.port, h.datacenter, h.rack, sorted(h.tokens)] for h in self.hosts),
            [self.replication.strategy, sorted(self.replication.factors)],
        ]
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def token_ranges(ring: RingSnapshot) -> tuple[TokenRange, ...]:
    """List the ranges between neighbouring tokens. The owner of its end owns a range. The first range wraps.

    :raises RingError: no host owns a token, or two hosts own the same token
    """
    tokens = [token for token, _ in ring.owners]
    if not tokens:
        raise RingError("no node of the ring owns a token")
    if len(set(tokens)) != len(tokens):
        twice = next(a for a, b in pairwise(tokens) if a == b)
        raise RingError(f"two nodes claim token {twice}: the ring is changing or its metadata is broken")
    return tuple(TokenRange(start, end) for start, end in zip([tokens[-1], *tokens[:-1]], tokens, strict=True))


def replicas(ring: RingSnapshot) -> tuple[tuple[TokenRange, tuple[Host, ...]], ...]:
    """List the token ranges, each with the hosts that hold it, its owner first.

    :raises RingError: the replication strategy is unknown, no node holds the keyspace, or the ring is broken
    """
    choose = {"SimpleStrategy": _simple, "NetworkTopologyStrategy": _by_topology, "EverywhereStrategy": _everywhere}
    strategy = ring.replication.strategy
    if strategy not in choose:
        raise RingError(f"replication strategy {strategy} is not supported: its replicas cannot be computed")
    ranges = token_ranges(ring)
    hosts = [host for _, host in ring.owners]
    limits = _limits(ring)
    if strategy != "EverywhereStrategy" and not any(limits.replicas.values()):
        named = ", ".join(name for name, _ in ring.replication.factors if name) or "nothing"
        existing = ", ".join(sorted({host.datacenter for host in hosts}))
        raise RingError(f"no node holds the keyspace: it is replicated to {named}; the cluster has {existing}")
    return tuple(
        (token_range, tuple(choose[strategy](_clockwise(hosts, i), limits))) for i, token_range in enumerate(ranges)
    )


def _clockwise(hosts: Sequence[Host], first: int) -> Iterator[Host]:
    return (hosts[(first + i) % len(hosts)] for i in range(len(hosts)))


@dataclass(frozen=True)
class _Limits:
    """The number of replicas and of racks in each datacenter ("": the whole ring)."""

    replicas: Mapping[str, int]
    racks: Mapping[str, int]


def _limits(ring: RingSnapshot) -> _Limits:
    wanted: dict[str, int] = {}
    racks: dict[str, int] = {}
    owners = [host for host in ring.hosts if host.tokens]
    for datacenter, factor in ring.replication.factors:
        members = [host for host in owners if datacenter in ("", host.datacenter)]
        wanted[datacenter] = min(factor, len(members))
        racks[datacenter] = len({host.rack for host in members})
    return _Limits(wanted, racks)


def _simple(clockwise: Iterable[Host], limits: _Limits) -> list[Host]:
    """Take the next different hosts around the ring (C: SimpleStrategy.calculateNaturalReplicas)."""
    holders: list[Host] = []
    for host in clockwise:
        if len(holders) == limits.replicas[""]:
            break
        if host not in holders:
            holders.append(host)
    return holders


def _by_topology(clockwise: Iterable[Host], limits: _Limits) -> list[Host]:
    """Take the next hosts on different racks in each datacenter (C: NetworkTopologyStrategy.DatacenterEndpoints).

    Racks repeat only if the datacenter has fewer racks than replicas, as often as racks are missing.
    """
    missing = dict(limits.replicas)
    repeats = {datacenter: count - limits.racks[datacenter] for datacenter, count in missing.items()}
    racks: set[tuple[str, str]] = set()
    holders: list[Host] = []
    for host in clockwise:
        datacenter = host.datacenter
        if missing.get(datacenter, 0) <= 0 or host in holders:
            continue
        if (datacenter, host.rack) in racks:
            if repeats[datacenter] <= 0:
                continue
            repeats[datacenter] -= 1
        racks.add((datacenter, host.rack))
        missing[datacenter] -= 1
        holders.append(host)
        if not any(missing.values()):
            break
    return holders


def _everywhere(clockwise: Iterable[Host], limits: _Limits) -> list[Host]:
    """Take all hosts, nearest first."""
    return list(dict.fromkeys(clockwise))


def parse_replication(options: Mapping[str, str]) -> Replication:
    """Read the replication options of ``system_schema.keyspaces``, e.g. ``{'class': …, 'dc1': '3'}``.

    Transient replicas (``'3/1'``: three, one of them transient) count, because they hold unrepaired data.
    """
    strategy = options["class"].rpartition(".")[2]
    factors = {
        ("" if strategy == "SimpleStrategy" else name): int(value.partition("/")[0])
        for name, value in options.items()
        if name != "class" and (strategy != "SimpleStrategy" or name == "replication_factor")
    }
    return Replication(strategy, tuple(sorted(factors.items())))
