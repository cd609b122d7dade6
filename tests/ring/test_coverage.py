"""Sets of tokens against Python's own sets, on a ring of a few tokens."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ringsync.ring.tokens import (
    MAX_TOKEN,
    MIN_TOKEN,
    RING_WIDTH,
    WHOLE_RING,
    TokenRange,
    fraction,
    intersection,
    subtract,
    union,
)

EDGES = [MIN_TOKEN, MIN_TOKEN + 1, -7, -1, 0, 1, 2, 9, MAX_TOKEN - 1, MAX_TOKEN]
PROBES = sorted(
    {token + step for token in EDGES for step in (-1, 0, 1)} & set(range(MIN_TOKEN + 1, MIN_TOKEN + 4))
    | {t + s for t in EDGES[2:-2] for s in (-1, 0, 1)}
    | {MAX_TOKEN - 1, MAX_TOKEN}
)
RANGES = st.lists(st.builds(TokenRange, st.sampled_from(EDGES), st.sampled_from(EDGES)), max_size=6)


def tokens(ranges: object) -> set[int]:
    return {token for token in PROBES for part in ranges if token in part}  # type: ignore[attr-defined]


@given(RANGES, RANGES)
def test_like_sets(some: list[TokenRange], others: list[TokenRange]) -> None:
    assert tokens(union(some)) == tokens(some)
    assert tokens(intersection(some, others)) == tokens(some) & tokens(others)
    assert tokens(subtract(some, others)) == tokens(some) - tokens(others)


@given(RANGES, RANGES)
def test_the_parts_are_disjoint_ordered_and_add_up(some: list[TokenRange], others: list[TokenRange]) -> None:
    left, common = subtract(some, others), intersection(some, others)
    for found in (union(some), left, common):
        assert all(part.start < part.end for part in found)
        assert all(one.end <= other.start for one, other in pairwise(found))
    assert union(left + common) == union(some)
    assert abs(fraction(left) + fraction(common) - fraction(some)) < 1e-9


def test_the_whole_ring() -> None:
    (whole,) = union([WHOLE_RING])
    assert whole == TokenRange(MIN_TOKEN, MAX_TOKEN)
    assert whole.width == RING_WIDTH - 1
    assert subtract([WHOLE_RING], WHOLE_RING.split(7)) == ()
    assert subtract([WHOLE_RING], WHOLE_RING.split(7)[1:]) == WHOLE_RING.split(7)[:1]
