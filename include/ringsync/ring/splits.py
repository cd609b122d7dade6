"""The cut of a table's ring into splits, the tasks of a scan.

Splits are equal shares of the ring. Murmur3 spreads keys evenly, so they have nearly equal numbers of rows. A split is
contiguous, and so are the tokens in the files that a task writes: readers of the replica can skip files. Inside, a
split is cut where the replicas change, so that each query goes to a node that has the data itself. If the replicas do
not change, it is cut in two.
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
    """Cassandra's estimate of the size of one copy of a table, in the whole ring. It may be wrong by any factor."""

    partitions: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """A range without wrap that a task reads by one query after another.

    :ivar endpoints: ``address:port`` of the hosts that hold the range; the task asks the first one first
    """

    range: TokenRange
    endpoints: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """The work of one task: adjacent ranges in token order."""

    ranges: tuple[ReplicaRange, ...]

    @property
    def endpoint(self) -> str:
        """The host that serves most of the split."""
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
    """Cut the ring, or the rest of it, into tasks. Each token is in exactly one task.

    :param estimate: size of the whole table; None: there are ``minimum`` splits
    :param split_size_bytes: target size of a split, bytes
    :param minimum: least number of splits
    :param maximum: greatest number of splits; wins over the estimate and ``minimum``
    :param datacenter: datacenter whose hosts are asked first
    :param within: disjoint ranges of the tokens to read; each is at least one split
    :returns: splits, in an order in which neighbours ask different hosts if possible
    :raises RingError: the ring's replicas cannot be computed
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
        splits.append(split_of(ranges))
    return interleaved(splits)


def split_of(ranges: Sequence[ReplicaRange]) -> Split:
    """Return a task that reads some ranges, two of them at a time, so that a server need not wait for the task."""
    if len(ranges) == 1:
        ranges = [replace(ranges[0], range=half) for half in ranges[0].range.split(2)]
    return Split(tuple(sorted(ranges, key=lambda part: part.range)))


def _preferred(holders: Sequence[Host], datacenter: str | None) -> tuple[Host, ...]:
    """Choose the hosts to read a range from: prefer live ones, and among them those of the wanted datacenter."""
    alive = [host for host in holders if host.up] or list(holders)
    near = [host for host in alive if host.datacenter == datacenter] or alive
    return tuple(sorted(near, key=lambda host: host.endpoint))


def _cut_at_replicas(
    piece: TokenRange, ends: Sequence[int], hosts: Sequence[tuple[Host, ...]]
) -> list[tuple[TokenRange, tuple[Host, ...]]]:
    """Cut the piece (no wrap) where the set of replicas changes."""
    parts: list[tuple[TokenRange, tuple[Host, ...]]] = []
    start = piece.start
    # The owner of a token has the first host token at or after it. After the last host token the first one counts.
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
    """Sort the holders' endpoints by load. Add the range to the load of the first one, so that all get equal shares."""
    endpoints = sorted((host.endpoint for host in holders), key=lambda endpoint: (load[endpoint], endpoint))
    if endpoints:
        load[endpoints[0]] += width
    return tuple(endpoints)


def interleaved(splits: Sequence[Split]) -> tuple[Split, ...]:
    """Order the splits so that tasks that start together ask different hosts."""
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
