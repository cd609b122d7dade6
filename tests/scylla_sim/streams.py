"""Sets of streams: the generations of a ring of vnodes and the sets of a table with tablets."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from tests.scylla_sim.arithmetic import FIRST, LAST, first_token, shard_of, stream_id, tablet_ends


class InvalidRequest(Exception):
    """A write that a coordinator refuses."""


class ServerError(Exception):
    """A write for which a coordinator finds no stream."""


@dataclass(frozen=True)
class Node:
    """A node of the ring.

    :ivar skew_us: how far its clock is ahead of the true time
    """

    tokens: tuple[int, ...]
    shards: int
    skew_us: int = 0

    @classmethod
    def random(cls, rng: random.Random, vnodes: int, shards: int, skew_s: float = 0) -> Node:
        """A node with random tokens."""
        return cls(tuple(rng.randint(FIRST + 1, LAST) for _ in range(vnodes)), shards, round(skew_s * 1_000_000))


@dataclass(frozen=True)
class Entry:
    """The range of tokens that ends at ``end``, and its streams in the order of the shards."""

    end: int
    streams: tuple[bytes, ...]
    ignored_bits: int


@dataclass(frozen=True)
class StreamSet:
    """The streams from a time on, in ms since the epoch. Entries are by their ends."""

    time_ms: int
    entries: tuple[Entry, ...]

    @property
    def streams(self) -> frozenset[bytes]:
        """All streams."""
        return frozenset(stream for entry in self.entries for stream in entry.streams)

    def stream_of(self, token: int) -> bytes:
        """The stream of a token.

        :raises ServerError: there are none
        """
        if not self.entries:
            raise ServerError("could not find any CDC stream: the generation is empty")
        place = bisect_left(self.entries, token, key=lambda entry: entry.end) % len(self.entries)
        entry = self.entries[place]
        return entry.streams[shard_of(token, len(entry.streams), entry.ignored_bits)]


def vnode_streams(rng: random.Random, time_ms: int, nodes: Sequence[Node], ignored_bits: int) -> StreamSet:
    """A generation of a ring: a range for each token, with a stream for each shard of the node that has the token."""
    owners = {token: node for node in nodes for token in node.tokens}
    ends, entries = sorted(owners), []
    for index, end in enumerate(ends):
        shards = owners[end].shards
        tokens = [first_token(ends[index - 1], end, shard, shards, ignored_bits) for shard in range(shards)]
        entries.append(Entry(end, tuple(stream_id(rng, token, index) for token in tokens), ignored_bits))
    return StreamSet(time_ms, tuple(entries))


def tablet_streams(rng: random.Random, time_ms: int, tablets: int) -> StreamSet:
    """A set of streams of a table with tablets: one for each, at the tablet's last token, all with the index 0."""
    return StreamSet(time_ms, tuple(Entry(end, (stream_id(rng, end, 0),), 0) for end in tablet_ends(tablets)))


def operating_at(sets: Sequence[StreamSet], time_us: int) -> int | None:
    """The place of the set that operates at a time, in µs since the epoch, among sets by their times; None: none."""
    found = [place for place, one in enumerate(sets) if one.time_ms * 1000 <= time_us]
    return found[-1] if found else None
