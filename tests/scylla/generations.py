"""What tests ask of the product's generations."""

from __future__ import annotations

from ringsync.scylla.generations import Generation, Interval


def streams_of(one: Generation) -> list[bytes]:
    """The ids of all its streams, in the order of its ranges."""
    return [stream.data for part in one.ranges for stream in part.streams]


def operates(when: Interval, time_ms: int) -> bool:
    """Whether a generation operates at a moment."""
    return when.start_ms <= time_ms and (when.end_ms is None or time_ms < when.end_ms)
