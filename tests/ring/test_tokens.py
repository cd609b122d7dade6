"""Token ranges: membership, wrapping, splitting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, RING_WIDTH, WHOLE_RING, TokenRange
from tests.ring.strategies import ranges, tokens


def plainly_contains(token_range: TokenRange, token: int) -> bool:
    """The definition, as words say it."""
    if token_range.start < token_range.end:
        return token_range.start < token <= token_range.end
    return token > token_range.start or token <= token_range.end


@given(ranges, tokens)
def test_membership(token_range: TokenRange, token: int) -> None:
    assert (token in token_range) == plainly_contains(token_range, token)


@given(ranges, tokens)
def test_unwrapping_keeps_every_token(token_range: TokenRange, token: int) -> None:
    parts = token_range.unwrap()
    assert all(part.start < part.end for part in parts)
    assert sum(part.start < token <= part.end for part in parts) == (token in token_range)


@given(ranges, st.integers(1, 70), tokens)
def test_splitting_puts_each_token_in_one_part(token_range: TokenRange, count: int, token: int) -> None:
    parts = token_range.split(count)
    assert len(parts) == min(count, token_range.width)
    assert parts[0].start == token_range.start
    assert parts[-1].end == token_range.end
    assert sum(part.width for part in parts) == token_range.width
    assert max(part.width for part in parts) - min(part.width for part in parts) <= 1
    assert sum(token in part for part in parts) == (token in token_range)


def test_the_whole_ring() -> None:
    assert WHOLE_RING.width == RING_WIDTH
    assert WHOLE_RING.unwrap() == (TokenRange(MIN_TOKEN, MAX_TOKEN),)
    assert TokenRange(5, 5).width == RING_WIDTH
    assert TokenRange(5, 5).unwrap() == (TokenRange(5, MAX_TOKEN), TokenRange(MIN_TOKEN, 5))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="not a token"):
        TokenRange(0, 2**63)
    with pytest.raises(ValueError, match="0 parts"):
        WHOLE_RING.split(0)
