"""The ring: which hosts there are, which tokens they own, and which of them hold a range's replicas.

A :class:`RingSnapshot` is the cluster at one moment. Everything computed from it is a pure function, so that
every task that holds the same snapshot comes to the same answer.
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
    """The ring cannot be understood; the message says why."""


@dataclass(frozen=True)
class Host:
    """A node that owns tokens.

    :ivar id: the node's host id, a UUID as text
    :ivar address: where the node speaks CQL, with ``port``
    :ivar up: whether the driver believes it alive
    :ivar is_local: it is of the datacenter that is asked for rows
    :ivar is_read: its log is read
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
        """``address:port``: the name by which plans and the driver know it."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Replication:
    """How a keyspace is replicated.

    :ivar strategy: the class's simple name
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
        """All tokens in ring order, each with the host that owns it."""
        return tuple(sorted(((t, host) for host in self.hosts for t in host.tokens), key=lambda pair: pair[0]))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the topology, the "ring epoch": hosts, tokens, replication, but not who is alive."""
        description = [
            sorted([h.id, h.address, h.port, h.datacenter, h.rack, sorted(h.tokens)] for h in self.hosts),
            [self.replication.strategy, sorted(self.replication.factors)],
        ]
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def token_ranges(ring: RingSnapshot) -> tuple[TokenRange, ...]:
    """The ranges between neighbouring tokens, each owned by the host of its end; the first one wraps.

    :raises RingError: when no host owns a token, or two own the same
    """
    tokens = [token for token, _ in ring.owners]
    if not tokens:
        raise RingError("no node of the ring owns a token")
    if len(set(tokens)) != len(tokens):
        twice = next(a for a, b in pairwise(tokens) if a == b)
        raise RingError(f"two nodes claim token {twice}: the ring is changing or its metadata is broken")
    return tuple(TokenRange(start, end) for start, end in zip([tokens[-1], *tokens[:-1]], tokens, strict=True))


def replicas(ring: RingSnapshot) -> tuple[tuple[TokenRange, tuple[Host, ...]], ...]:
    """Every token range with the hosts that hold it, the owner of its token first.

    :raises RingError: for an unknown replication strategy, a keyspace that no node holds, or a broken ring
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
    """What the strategies need to know of the whole ring, by datacenter ("": all of it)."""

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
    """The next different hosts around the ring (C: SimpleStrategy.calculateNaturalReplicas)."""
    found: list[Host] = []
    for host in clockwise:
        if len(found) == limits.replicas[""]:
            break
        if host not in found:
            found.append(host)
    return found


def _by_topology(clockwise: Iterable[Host], limits: _Limits) -> list[Host]:
    """In each datacenter the next hosts on different racks (C: NetworkTopologyStrategy.DatacenterEndpoints).

    A rack may repeat only as often as the datacenter has fewer racks than replicas.
    """
    missing = dict(limits.replicas)
    repeats = {datacenter: count - limits.racks[datacenter] for datacenter, count in missing.items()}
    racks: set[tuple[str, str]] = set()
    found: list[Host] = []
    for host in clockwise:
        datacenter = host.datacenter
        if missing.get(datacenter, 0) <= 0 or host in found:
            continue
        if (datacenter, host.rack) in racks:
            if repeats[datacenter] <= 0:
                continue
            repeats[datacenter] -= 1
        racks.add((datacenter, host.rack))
        missing[datacenter] -= 1
        found.append(host)
        if not any(missing.values()):
            break
    return found


def _everywhere(clockwise: Iterable[Host], limits: _Limits) -> list[Host]:
    """Every host, nearest first."""
    return list(dict.fromkeys(clockwise))


def parse_replication(options: Mapping[str, str]) -> Replication:
    """Read the replication options of ``system_schema.keyspaces``, e.g. ``{'class': …, 'dc1': '3'}``.

    Transient replicas (``'3/1'``: three, one of them transient) count, since they hold unrepaired data.
    """
    strategy = options["class"].rpartition(".")[2]
    factors = {
        ("" if strategy == "SimpleStrategy" else name): int(value.partition("/")[0])
        for name, value in options.items()
        if name != "class" and (strategy != "SimpleStrategy" or name == "replication_factor")
    }
    return Replication(strategy, tuple(sorted(factors.items())))
