"""Ranks of replicas: the order in which the replicas of a token range are read.

All tasks with the same ring snapshot compute the same ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from ringsync.compiled.arrow import Integers, Mask
from ringsync.ring.ring import Host, RingSnapshot, replicas
from ringsync.ring.tokens import TokenRange

Level = Literal["LOCAL_ONE", "LOCAL_QUORUM", "ALL"]


@dataclass(frozen=True)
class RankedRing:
    """The token ranges of a ring, numbered from 0 in token order, each with its replicas by rank.

    Range 0 wraps. Live replicas come before those that are down. Among the live ones, those whose logs are read come
    first. Otherwise replicas have their natural order: the owner of the range's end comes first, so that primaries are
    spread like the tokens.

    :ivar hosts: replicas, by number of the range, then by rank
    """

    ring: RingSnapshot
    ranges: tuple[TokenRange, ...]
    hosts: tuple[tuple[Host, ...], ...]

    @cached_property
    def ends(self) -> Integers:
        """The last token of each range."""
        return np.array([token_range.end for token_range in self.ranges], np.int64)

    def numbers_of(self, tokens: Integers) -> Integers:
        """Find the number of each token's range."""
        return np.searchsorted(self.ends, tokens, side="left") % len(self.ranges)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The ids of all hosts that replicate any range."""
        return tuple(sorted({host.id for hosts in self.hosts for host in hosts}))

    @cached_property
    def shapes(self) -> frozenset[tuple[tuple[str, bool], ...]]:
        """What consistency levels go by: datacenters of a range's replicas, and whether they are local."""
        return frozenset(tuple(sorted((host.datacenter, host.is_local) for host in hosts)) for hosts in self.hosts)

    @cached_property
    def live(self) -> Integers:
        """Live replicas whose logs are read, by number of the range, then by rank: places in ``nodes``, then −1."""
        places = {node: place for place, node in enumerate(self.nodes)}
        table = np.full((len(self.hosts), max(map(len, self.hosts), default=0)), -1, np.int64)
        for number, hosts in enumerate(self.hosts):
            live = [places[host.id] for host in hosts if host.is_heard]
            table[number, : len(live)] = live
        return table

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The consistency level, by number of the range, at which a read meets one or more replicas in ``live``.

        It is LOCAL_ONE only where the logs of all local replicas are read, and all replicas with such logs are up.
        """
        return tuple(map(_level, self.hosts))

    @cached_property
    def most_live(self) -> Mask:
        """Whether LOCAL_QUORUM can be reached, by number of the range."""
        return np.array([_are_most([host.up for host in hosts if host.is_local]) for hosts in self.hosts], np.bool_)

    @cached_property
    def all_live(self) -> Mask:
        """Whether ALL can be reached, by number of the range: no replica is down, in any datacenter."""
        return np.array([all(host.up for host in hosts) for hosts in self.hosts], np.bool_)


def _level(hosts: Sequence[Host]) -> Level:
    if all(host.is_heard for host in hosts if host.is_local or host.is_read):
        return "LOCAL_ONE"
    return "LOCAL_QUORUM" if _are_most([host.is_heard for host in hosts if host.is_local]) else "ALL"


def _are_most(which: Sequence[bool]) -> bool:
    return 2 * sum(which) > len(which)


def ranked(ring: RingSnapshot) -> RankedRing:
    """Rank the replicas of each token range.

    :raises RingError: see :func:`ringsync.ring.ring.replicas`
    """
    owned = replicas(ring)
    return RankedRing(
        ring,
        tuple(token_range for token_range, _ in owned),
        tuple(tuple(sorted(hosts, key=lambda host: (not host.up, not host.is_heard))) for _, hosts in owned),
    )
