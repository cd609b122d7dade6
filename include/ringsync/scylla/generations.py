"""Generations of Scylla's CDC: which streams there are from a moment on, and which stream a token's changes go to.

A generation operates from its time until that of the next one. Its ring is divided by tokens, each the end of a range
(the one before it, itself]. With vnodes a range has a stream for each shard of its owner; with tablets it has one
(S: cdc/metadata.cc, cdc/generation.hh).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ringsync.scylla.stream_ids import StreamId

IGNORED_BITS = 12
"""Scylla's default for ``murmur3_partitioner_ignore_msb_bits``."""

_RING, _SIGN = 2**64, 2**63


def shard_of(token: int, shards: int, ignored_bits: int = IGNORED_BITS) -> int:
    """Return the shard of a node that owns a token (S: dht/token.cc).

    :param ignored_bits: number of the token's upper bits that do not count
    """
    unbiased = (token + _SIGN) % _RING
    return ((unbiased << ignored_bits) % _RING * shards) >> 64


@dataclass(frozen=True)
class StreamRange:
    """A token range of a generation.

    :ivar end: its last token
    :ivar streams: with vnodes in the order of the shards, as Scylla has them. What a client reads is a set, whose order
        says nothing: then :meth:`Generation.streams_of` tells what can be told
    :ivar ignored_bits: see :func:`shard_of`
    """

    end: int
    streams: tuple[StreamId, ...]
    ignored_bits: int = IGNORED_BITS


@dataclass(frozen=True)
class Generation:
    """The streams of a cluster, or of a table with tablets, from a moment on.

    :ivar time_ms: the moment, ms since the epoch
    :ivar ranges: by their ends; none: Scylla published an empty generation (scylla-cdc-java #144)
    """

    time_ms: int
    ranges: tuple[StreamRange, ...]

    def __post_init__(self) -> None:
        if any(one.end >= other.end for one, other in pairwise(self.ranges)):
            raise ValueError(f"the token ranges of generation {self.time_ms} are not in the order of their ends")

    @property
    def streams(self) -> Iterable[StreamId]:
        return (stream for one in self.ranges for stream in one.streams)

    def streams_of(self, token: int) -> tuple[StreamId, ...]:
        """Return the streams one of which has the changes of a token; none: the generation is empty."""
        if not self.ranges:
            return ()
        place = bisect_left(self.ranges, token, key=lambda one: one.end)
        return self.ranges[place % len(self.ranges)].streams

    def stream_of(self, token: int) -> StreamId:
        """Return the stream that has the changes of a token, if the streams are in the order of the shards.

        :raises LookupError: there is none
        """
        if not self.streams_of(token):
            raise LookupError(f"generation {self.time_ms} has no stream for the token {token}")
        place = bisect_left(self.ranges, token, key=lambda one: one.end) % len(self.ranges)
        one = self.ranges[place]
        return one.streams[shard_of(token, len(one.streams), one.ignored_bits)]


@dataclass(frozen=True)
class Interval:
    """When a generation operates: [start, end), in ms since the epoch; no end: no next one is known."""

    start_ms: int
    end_ms: int | None

    def __contains__(self, time_ms: int) -> bool:
        return self.start_ms <= time_ms and (self.end_ms is None or time_ms < self.end_ms)


def intervals(times_ms: Sequence[int]) -> list[Interval]:
    """Return when each generation operates, in the order of their times. Several may have almost the same time."""
    ordered = sorted(set(times_ms))
    return [Interval(*pair) for pair in zip(ordered, [*ordered[1:], None], strict=True)]
