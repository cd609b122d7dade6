"""What is settled, cut into slices by token: all rows of a key are in one, and all have about as many rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringsync.ledger.staging import Bucket
from ringsync.steps.close.agreement import Reading, Settled
from ringsync.steps.close.close_task import Slice, SliceOfBucket

SLICE_ROWS = 50_000
"""A slice has about so many rows: their arrays fit into the processor's caches, or nearly."""


def cut(settled: Sequence[Settled], published: Mapping[Bucket, tuple[str, ...]]) -> list[Slice]:
    """Cut what is settled.

    What no quorum need show goes to slices of its own: its rows are read from all replicas.

    :param published: keys of the digests among which those of the rows may be, by bucket
    """
    rows: Counter[int] = Counter()
    for one in settled:
        for number, reading in one.readings:
            rows[number] += reading.rows
    few = {number for one in settled for number, reading in one.readings if reading.level == "ALL"}
    groups = group_ranges({number: rows[number] for number in rows.keys() - few}, SLICE_ROWS)
    groups += group_ranges({number: rows[number] for number in few}, SLICE_ROWS)
    found: list[tuple[SliceOfBucket, ...]] = []
    for group in groups:
        pieces = -(-sum(rows[number] for number in group) // SLICE_ROWS)
        for piece in range(pieces):
            found.append(
                tuple(
                    SliceOfBucket(str(one.bucket), readings, published[one.bucket])
                    for one in settled
                    if (readings := _readings(one, group, piece, pieces))
                )
            )
    return [(f"{place:04}", buckets) for place, buckets in enumerate(found) if buckets]


def _readings(one: Settled, group: frozenset[int], piece: int, pieces: int) -> tuple[Reading, ...]:
    """A piece of each token range of the group: tokens are hashes, pieces of the same width have about as many rows."""
    found = []
    for number, reading in one.readings:
        if number in group:
            ranges = tuple(part for whole in reading.ranges for part in whole.split(pieces)[piece : piece + 1])
            found.append(replace(reading, ranges=ranges))
    return tuple(found)


def group_ranges(rows: Mapping[int, int], size: int) -> list[frozenset[int]]:
    """Numbers of token ranges in groups of neighbours that have at most so many rows together, or are alone."""
    groups: list[frozenset[int]] = []
    present: set[int] = set()
    total = 0
    for number in sorted(rows):
        if present and total + rows[number] > size:
            groups.append(frozenset(present))
            present, total = set(), 0
        present.add(number)
        total += rows[number]
    return [*groups, frozenset(present)] if present else groups
