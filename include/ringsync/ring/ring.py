"""The ring: the hosts, the tokens that they own, and the replicas of each token range.

A :class:`RingSnapshot` is the cluster at one moment. All functions of it are pure, so that all tasks with the same
snapshot get the same answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from ringsync.ring.tokens import TokenRange


class RingError(ValueError):
    """An error: the ring's replicas cannot be computed. The message says why."""


@dataclass(frozen=True)
class Host:
    """A node that owns tokens.

    :ivar id: host id of the node, a UUID as text
    :ivar address: address at which the node takes CQL connections; ``port``: its port
    :ivar up: whether the node is alive, as far as anybody says
    :ivar is_local: whether the node is in the datacenter that is asked for rows
    :ivar is_read: whether the node's log is read
    :ivar is_away: whether it is to be read, and nobody does just now: the others agree without it
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
    is_away: bool = False

    @property
    def is_heard(self) -> bool:
        """Whether the node is up and its log is read, also just now."""
        return self.up and self.is_read and not self.is_away

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
class Epoch:
    """What must stay the same for the replicas of all rows to stay the same nodes, of which all have what one has.

    :ivar ring: digest of the ring snapshot
    :ivar replication: the keyspace's replication, as text
    :ivar datacenters: those whose nodes are asked for rows, or whose logs are read: such replicas are compared
    """

    ring: str
    replication: str = ""
    datacenters: tuple[str, ...] = ()


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
        return self._digest([h.id, h.address, h.port, h.datacenter, h.rack, sorted(h.tokens)] for h in self.hosts)

    @cached_property
    def ownership(self) -> str:
        """Digest of what decides which node holds what. It stays the same if a node only gets another address."""
        return self._digest([h.id, h.datacenter, h.rack, sorted(h.tokens)] for h in self.hosts)

    def _digest(self, hosts: Iterable[list[object]]) -> str:
        description = [sorted(hosts), [self.replication.strategy, sorted(self.replication.factors)]]
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()

    def without(self, nodes: Collection[str]) -> RingSnapshot:
        """Return the ring as it is if nobody reads the logs of some nodes just now.

        :param nodes: their ids
        """
        return replace(self, hosts=tuple(replace(host, is_away=host.id in nodes) for host in self.hosts))

    @cached_property
    def epoch(self) -> Epoch:
        """What tells later whether replicas are still the same."""
        factors = (f"{datacenter}:{factor}" for datacenter, factor in sorted(self.replication.factors))
        datacenters = {host.datacenter for host in self.hosts if host.is_local or host.is_read}
        return Epoch(self.digest, " ".join([self.replication.strategy, *factors]), tuple(sorted(datacenters)))


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


@lru_cache(maxsize=8)
def replicas(ring: RingSnapshot) -> tuple[tuple[TokenRange, tuple[Host, ...]], ...]:
    """List the token ranges, each with the hosts that hold it, its owner first.

    A ring with many tokens takes a second, and hundreds of tables have the same one: so the last ones are remembered.

    :raises RingError: the replication strategy is unknown, no node holds the keyspace, or the ring is broken
    """
    strategy = ring.replication.strategy
    if strategy not in ("SimpleStrategy", "NetworkTopologyStrategy", "EverywhereStrategy"):
        raise RingError(f"replication strategy {strategy} is not supported: its replicas cannot be computed")
    ranges = token_ranges(ring)
    clockwise = [host for _, host in ring.owners]
    owners = [host for host in ring.hosts if host.tokens]
    factors = (("", len(owners)),) if strategy == "EverywhereStrategy" else ring.replication.factors
    members = {name: [host for host in owners if name in ("", host.datacenter)] for name, _ in factors}
    wanted = {name: min(factor, len(members[name])) for name, factor in factors}
    if not any(wanted.values()):
        named = ", ".join(name for name, _ in factors if name) or "nothing"
        existing = ", ".join(sorted({host.datacenter for host in owners}))
        raise RingError(f"no node holds the keyspace: it is replicated to {named}; the cluster has {existing}")
    racks = {name: len({host.rack for host in members[name]}) if name else 0 for name in wanted}
    return tuple((part, tuple(_holders(clockwise, i, wanted, racks))) for i, part in enumerate(ranges))


def _holders(hosts: Sequence[Host], first: int, wanted: Mapping[str, int], racks: Mapping[str, int]) -> list[Host]:
    """Take the next hosts around the ring, in each datacenter on different racks.

    Racks repeat only if the datacenter has fewer racks than replicas, as often as racks are missing. Without
    datacenters racks do not count (C: NetworkTopologyStrategy.DatacenterEndpoints,
    SimpleStrategy.calculateNaturalReplicas).

    :param hosts: owners of all tokens in ring order
    :param first: place of the first host to take
    :param wanted: number of replicas by datacenter; "": in the whole ring
    :param racks: number of racks by datacenter; "": 0
    """
    missing = dict(wanted)
    repeats = {name: count - racks[name] for name, count in wanted.items()}
    used: set[tuple[str, str]] = set()
    holders: list[Host] = []
    for i in range(len(hosts)):
        host = hosts[(first + i) % len(hosts)]
        name = "" if "" in missing else host.datacenter
        if missing.get(name, 0) <= 0 or host in holders:
            continue
        if (name, host.rack) in used:
            if repeats[name] <= 0:
                continue
            repeats[name] -= 1
        used.add((name, host.rack))
        missing[name] -= 1
        holders.append(host)
        if not any(missing.values()):
            break
    return holders


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
