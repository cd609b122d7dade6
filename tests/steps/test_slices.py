"""Slices: every row is in one, all rows of a key in the same, and none is much larger than the others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.ledger.staging import Bucket
from ringsync.ring.tokens import WHOLE_RING, TokenRange
from ringsync.steps.close import close_task as module
from ringsync.steps.close.agreement import Reading, Settled
from ringsync.steps.close.close_task import cut

TOKENS = st.integers(-(2**63) + 1, 2**63 - 1)


@given(
    ends=st.lists(TOKENS, min_size=2, max_size=6, unique=True).map(sorted),
    rows=st.lists(st.lists(st.integers(1, 500), min_size=6, max_size=6), min_size=1, max_size=3),
    united=st.sets(st.integers(0, 5)),
    tokens=st.lists(TOKENS, max_size=30),
)
@settings(max_examples=200, deadline=None)
def test_every_token_is_in_one_slice(
    ends: list[int], rows: list[list[int]], united: set[int], tokens: list[int]
) -> None:
    ranges = [TokenRange(*pair) for pair in zip([ends[-1], *ends[:-1]], ends, strict=True)]
    settled = []
    for number, counts in enumerate(rows):
        readings = tuple(
            (place, Reading(((f"{number}-{place}", "a"),), one.unwrap(), counts[place], place in united))
            for place, one in enumerate(ranges)
        )
        sums = np.zeros((len(ranges), 3), np.uint64)
        settled.append(Settled(Bucket(number * 60_000, 60_000), readings, sums, frozenset(), everywhere=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_ROWS", 100)
        found = cut(settled, nothing := {one.bucket: () for one in settled}, nothing)
    assert len({name for name, _ in found}) == len(found)
    for token in [*tokens, *ends]:
        holding = [
            (name, bucket.bucket, reading.files)
            for name, buckets in found
            for bucket in buckets
            for reading in bucket.readings
            if any(token in part for part in reading.ranges)
        ]
        assert len({name for name, *_ in holding}) == 1
        assert len(holding) == len(settled) == len({bucket for _, bucket, _ in holding})
    every = sum(map(sum, (counts[: len(ranges)] for counts in rows)))
    assert len(found) <= every / 50 + 2 + len(ranges)


def test_a_range_with_many_rows_is_cut() -> None:
    reading = Reading((("f", "a"),), WHOLE_RING.unwrap(), 10 * module.SLICE_ROWS)
    one = Settled(Bucket(0, 60_000), ((0, reading),), np.zeros((1, 3), np.uint64), frozenset(), everywhere=True)
    found = cut([one], {one.bucket: ("d",)}, {one.bucket: ("e",)})
    assert len(found) == 10
    widths = [sum(part.width for part in buckets[0].readings[0].ranges) for _, buckets in found]
    assert max(widths) - min(widths) <= 2
    assert {(buckets[0].published, buckets[0].elsewhere) for _, buckets in found} == {(("d",), ("e",))}
