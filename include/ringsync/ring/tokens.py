"""Tokens, token ranges and sets of tokens of Cassandra's Murmur3Partitioner.

Sets are the parts of the ring that have been read, and those that are left. They are compared by the tokens that they
cover, never by the bounds of ranges. So the work of one run also counts for a run that cuts the ring elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MIN_TOKEN = -(2**63)
"""A token less than that of any key (C: Murmur3Partitioner.MINIMUM), so ``> MIN_TOKEN`` selects all keys."""
MAX_TOKEN = 2**63 - 1
RING_WIDTH = 2**64


@dataclass(frozen=True, order=True, slots=True)
class TokenRange:
    """The tokens in (start, end]: start excluded, end included. A range with start ≥ end wraps around.

    :ivar start: a token, or ``MIN_TOKEN``
    :ivar end: a token, or ``MIN_TOKEN`` for "to the end of the ring"
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        for token in (self.start, self.end):
            if not MIN_TOKEN <= token <= MAX_TOKEN:
                raise ValueError(f"{token} is not a token: it needs more than 64 bits")

    def __str__(self) -> str:
        return f"({self.start}, {self.end}]"

    @property
    def width(self) -> int:
        """The number of tokens; the whole ring has 2^64."""
        return (self.end - self.start) % RING_WIDTH or RING_WIDTH

    def __contains__(self, token: int) -> bool:
        return (token - self.start - 1) % RING_WIDTH < self.width

    def unwrap(self) -> tuple[TokenRange, ...]:
        """Return the same tokens as at most two ranges with start < end, which CQL's comparisons need."""
        if self.start < self.end:
            return (self,)
        upper = (TokenRange(self.start, MAX_TOKEN),) if self.start < MAX_TOKEN else ()
        lower = (TokenRange(MIN_TOKEN, self.end),) if self.end > MIN_TOKEN else ()
        return upper + lower

    def split(self, parts: int) -> tuple[TokenRange, ...]:
        """Cut the range into adjacent parts that differ by at most one token; fewer if there are fewer tokens."""
        if parts < 1:
            raise ValueError(f"a range cannot be cut into {parts} parts")
        parts = min(parts, self.width)
        bounds = [_wrapped(self.start + i * self.width // parts) for i in range(parts)]
        return tuple(TokenRange(*pair) for pair in zip(bounds, [*bounds[1:], self.end], strict=True))


def parse_token_range(text: str) -> TokenRange:
    """Read ``START:END`` as a user types it: tokens above START, up to and including END; START ≥ END wraps.

    :raises ValueError: the text is not two tokens joined by a colon, or they are equal
    """
    start, colon, end = text.partition(":")
    try:
        chosen = TokenRange(int(start), int(end)) if colon else None
    except ValueError:
        chosen = None
    if chosen is None:
        raise ValueError(
            f"{text!r} is not a token range: write START:END, two whole numbers from {MIN_TOKEN} to {MAX_TOKEN}, "
            "e.g. 0:4611686018427387904"
        )
    if chosen.start == chosen.end:
        raise ValueError(f"{text!r} is the whole ring, since START is excluded: leave the option out for all tokens")
    return chosen


WHOLE_RING = TokenRange(MIN_TOKEN, MIN_TOKEN)


def _wrapped(number: int) -> int:
    return (number - MIN_TOKEN) % RING_WIDTH + MIN_TOKEN


TokenSet = tuple[TokenRange, ...]
"""Disjoint token ranges without wrap, in token order."""


def union(ranges: Iterable[TokenRange]) -> TokenSet:
    """Return the tokens in any of the ranges, as the fewest possible ranges."""
    joined: list[TokenRange] = []
    for part in sorted(piece for token_range in ranges for piece in token_range.unwrap()):
        if joined and part.start <= joined[-1].end:
            joined[-1] = TokenRange(joined[-1].start, max(joined[-1].end, part.end))
        else:
            joined.append(part)
    return tuple(joined)


def intersection(ranges: Iterable[TokenRange], others: Iterable[TokenRange]) -> TokenSet:
    """Return the tokens in both sets."""
    return tuple(shared for _, _, shared in overlaps(union(ranges), union(others)))


def overlaps(ranges: Iterable[TokenRange], others: Sequence[TokenRange]) -> Iterator[tuple[int, int, TokenRange]]:
    """Find what some ranges have in common with others. Each is looked up, so that many of both take little time.

    :param ranges: ranges without wrap, in any order
    :param others: a token set, or adjacent ranges in token order; none wraps
    :returns: number of the range, number of the other range, and the tokens in both
    """
    ends = [other.end for other in others]
    for number, part in enumerate(ranges):
        at = bisect_right(ends, part.start)
        while at < len(others) and others[at].start < part.end:
            yield number, at, TokenRange(max(part.start, others[at].start), min(part.end, others[at].end))
            at += 1


def subtract(ranges: Iterable[TokenRange], covered: Iterable[TokenRange]) -> TokenSet:
    """Return the tokens of the ranges that are not covered."""
    holes = union(covered)
    gaps = zip([MIN_TOKEN, *(hole.end for hole in holes)], [*(hole.start for hole in holes), MAX_TOKEN], strict=True)
    return intersection(ranges, [TokenRange(start, end) for start, end in gaps if start < end])


def fraction(ranges: Iterable[TokenRange]) -> float:
    """Return the part of the whole ring that the ranges cover, 0…1."""
    return sum(part.width for part in union(ranges)) / RING_WIDTH
