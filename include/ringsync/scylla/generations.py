"""Generations of Scylla's CDC: which streams there are from a moment on.

A generation operates from its time until that of the next one. Its ring is divided by tokens, each the end of a range
(the one before it, itself]. With vnodes a range has a stream for each shard of its owner; with tablets it has one
(S: cdc/metadata.cc, cdc/generation.hh).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ringsync.scylla.stream_ids import StreamId


@dataclass(frozen=True)
class StreamRange:
    """A token range of a generation.

    :ivar end: its last token
    :ivar streams: with vnodes one for each shard. What a client reads is a set, whose order says nothing
    """

    end: int
    streams: tuple[StreamId, ...]


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


@dataclass(frozen=True)
class Interval:
    """When a generation operates: [start, end), in ms since the epoch; no end: no next one is known."""

    start_ms: int
    end_ms: int | None


def intervals(times_ms: Sequence[int]) -> list[Interval]:
    """Return when each generation operates, in the order of their times. Several may have almost the same time."""
    ordered = sorted(set(times_ms))
    return [Interval(*pair) for pair in zip(ordered, [*ordered[1:], None], strict=True)]
