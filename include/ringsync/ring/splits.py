"""Cut a table's ring into the tasks of a scan.

A split is an equal share of the ring, and thus nearly of the rows, since Murmur3 spreads keys evenly. It is
contiguous, so that what a task writes is contiguous in token order, which lets readers of the replica skip
files. Inside, it is cut where the replicas change, so that every query goes to a node that has the data itself,
and in two where they do not.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringsync.ring.ring import Host, RingSnapshot, replicas
from ringsync.ring.tokens import RING_WIDTH, WHOLE_RING, TokenRange


@dataclass(frozen=True)
class SizeEstimate:
    """What Cassandra believes a table to hold: one copy of it, in the whole ring. May be wrong by any factor."""

    partitions: int
    bytes: int


@dataclass(frozen=True)
class ReplicaRange:
    """A range without wrap, to be read by one query after another.

    :ivar endpoints: ``address:port`` of the hosts that hold it, the one to ask first in front
    """

    range: TokenRange
    endpoints: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """The work of one task: adjacent ranges in token order.

    :ivar estimated_partitions: None when nothing is known
    :ivar estimated_bytes: None when nothing is known
    """

    ranges: tuple[ReplicaRange, ...]
    estimated_partitions: int | None = None
    estimated_bytes: int | None = None

    @property
    def endpoint(self) -> str:
        """The host that is asked for most of the split."""
        widths: defaultdict[str, int] = defaultdict(int)
        for part in self.ranges:
            widths[part.endpoints[0]] += part.range.width
        return max(widths, key=lambda endpoint: (widths[endpoint], endpoint))


def plan_splits(
    ring: RingSnapshot,
    estimate: SizeEstimate | None,
    *,
    split_size_bytes: int,
    minimum: int,
    maximum: int,
    datacenter: str | None = None,
    within: Sequence[TokenRange] = (WHOLE_RING,),
) -> tuple[Split, ...]:
    """Cut the ring, or what is left of it, into tasks; every token is in exactly one.

    :param estimate: the size of the whole table; None gives ``minimum`` splits
    :param split_size_bytes: target size of a split, bytes
    :param minimum: least number of splits
    :param maximum: greatest number of splits, whatever the estimate says; wins over ``minimum``
    :param datacenter: ask hosts of this one first
    :param within: the tokens to read, disjoint ranges: each is at least one split
    :returns: splits in such an order that neighbours ask different hosts as far as possible
    :raises RingError: when the ring's replicas cannot be computed
    """
    width = sum(part.width for part in within)
    wanted = math.ceil(estimate.bytes * width / RING_WIDTH / split_size_bytes) if estimate else minimum
    count = max(1, min(max(wanted, minimum), maximum))
    owned = replicas(ring)
    ends = [token_range.end for token_range, _ in owned]
    hosts = [_preferred(holders, datacenter) for _, holders in owned]
    load: defaultdict[str, int] = defaultdict(int)
    splits = []
    shares = [share for part in within for share in part.split(max(1, round(count * part.width / width)))]
    for share in shares:
        ranges = tuple(
            ReplicaRange(part, _least_loaded_first(holders, part.width, load))
            for piece in share.unwrap()
            for part, holders in _cut_at_replicas(piece, ends, hosts)
        )
        if len(ranges) == 1:
            # A task has two ranges in flight, so that its server need not wait for it.
            ranges = tuple(replace(ranges[0], range=half) for half in ranges[0].range.split(2))
        fraction = share.width / RING_WIDTH
        splits.append(
            Split(
                ranges,
                round(estimate.partitions * fraction) if estimate else None,
                round(estimate.bytes * fraction) if estimate else None,
            )
        )
    return _interleave(splits)


def _preferred(holders: Sequence[Host], datacenter: str | None) -> tuple[Host, ...]:
    """The hosts to read a range from: those alive, of the wanted datacenter; all where there is none such."""
    alive = [host for host in holders if host.up] or list(holders)
    near = [host for host in alive if host.datacenter == datacenter] or alive
    return tuple(sorted(near, key=lambda host: host.endpoint))


def _cut_at_replicas(
    piece: TokenRange, ends: Sequence[int], hosts: Sequence[tuple[Host, ...]]
) -> list[tuple[TokenRange, tuple[Host, ...]]]:
    """The piece (no wrap) as parts that each have one set of replicas, neighbours with equal sets joined."""
    parts: list[tuple[TokenRange, tuple[Host, ...]]] = []
    start = piece.start
    # The owner of a token is the first host token at or after it, or the first of all behind the last.
    index = bisect_left(ends, start + 1)
    while start < piece.end:
        end = min(piece.end, ends[index]) if index < len(ends) else piece.end
        holders = hosts[index % len(hosts)]
        if parts and parts[-1][1] == holders:
            parts[-1] = (TokenRange(parts[-1][0].start, end), holders)
        else:
            parts.append((TokenRange(start, end), holders))
        start = end
        index += 1
    return parts


def _least_loaded_first(holders: Sequence[Host], width: int, load: defaultdict[str, int]) -> tuple[str, ...]:
    """Endpoints of the holders; the one in front is charged with the range, so that all get equal shares."""
    endpoints = sorted((host.endpoint for host in holders), key=lambda endpoint: (load[endpoint], endpoint))
    if endpoints:
        load[endpoints[0]] += width
    return tuple(endpoints)


def _interleave(splits: Sequence[Split]) -> tuple[Split, ...]:
    """Deal the splits out host by host, so that tasks started together ask different hosts."""
    by_host: dict[str, deque[Split]] = defaultdict(deque)
    for split in splits:
        by_host[split.endpoint].append(split)
    dealt: list[Split] = []
    last = None
    while by_host:
        others = [host for host in by_host if host != last] or list(by_host)
        last = max(others, key=lambda host: (len(by_host[host]), host))
        dealt.append(by_host[last].popleft())
        if not by_host[last]:
            del by_host[last]
    return tuple(dealt)


def combine_estimates(rows: dict[tuple[str, str], tuple[int, int]]) -> SizeEstimate | None:
    """Extrapolate per-range estimates to the whole ring.

    :param rows: (partitions, mean bytes of a partition) by (start, end) token as text
    """
    covered = sum(TokenRange(int(start), int(end)).width for start, end in rows)
    partitions = sum(count for count, _ in rows.values())
    if not covered or not partitions:
        return None
    scale = RING_WIDTH / covered
    size = sum(count * mean for count, mean in rows.values())
    return SizeEstimate(round(partitions * scale), round(size * scale))
