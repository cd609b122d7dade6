"""Sets of tokens: the parts of the ring that have been read, and those that are left.

A set is a tuple of disjoint token ranges without wrap, in token order. Ranges are compared by the tokens that they
cover, never by their bounds. So the work of one run also counts for a run that cuts the ring elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringsync.ring.tokens import RING_WIDTH, TokenRange

TokenSet = tuple[TokenRange, ...]


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
    shared: list[TokenRange] = []
    waiting = list(reversed(union(others)))
    for part in union(ranges):
        while waiting and waiting[-1].start < part.end:
            other = waiting[-1]
            if max(part.start, other.start) < min(part.end, other.end):
                shared.append(TokenRange(max(part.start, other.start), min(part.end, other.end)))
            if other.end > part.end:
                break
            waiting.pop()
    return tuple(shared)


def subtract(ranges: Iterable[TokenRange], covered: Iterable[TokenRange]) -> TokenSet:
    """Return the tokens of the ranges that are not covered."""
    left: list[TokenRange] = []
    whole = union(ranges)
    holes = intersection(whole, covered)
    index = 0
    for part in whole:
        start = part.start
        while index < len(holes) and holes[index].end <= part.end:
            if start < holes[index].start:
                left.append(TokenRange(start, holes[index].start))
            start = holes[index].end
            index += 1
        if start < part.end:
            left.append(TokenRange(start, part.end))
    return tuple(left)


def fraction(ranges: Iterable[TokenRange]) -> float:
    """Return the part of the whole ring that the ranges cover, 0…1."""
    return sum(part.width for part in union(ranges)) / RING_WIDTH
