"""Sets of tokens: what of the ring has been read, and what is left.

A set is a tuple of token ranges without wrap, disjoint and in token order. Ranges are compared by the tokens that they
cover, never by their bounds: what one run did counts for another that cuts the ring elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringsync.ring.tokens import RING_WIDTH, TokenRange

TokenSet = tuple[TokenRange, ...]


def union(ranges: Iterable[TokenRange]) -> TokenSet:
    """The tokens that are in any of the ranges, as few ranges as possible."""
    found: list[TokenRange] = []
    for part in sorted(piece for token_range in ranges for piece in token_range.unwrap()):
        if found and part.start <= found[-1].end:
            found[-1] = TokenRange(found[-1].start, max(found[-1].end, part.end))
        else:
            found.append(part)
    return tuple(found)


def intersection(ranges: Iterable[TokenRange], others: Iterable[TokenRange]) -> TokenSet:
    """The tokens that are in some range of both."""
    found: list[TokenRange] = []
    waiting = list(reversed(union(others)))
    for part in union(ranges):
        while waiting and waiting[-1].start < part.end:
            other = waiting[-1]
            if max(part.start, other.start) < min(part.end, other.end):
                found.append(TokenRange(max(part.start, other.start), min(part.end, other.end)))
            if other.end > part.end:
                break
            waiting.pop()
    return tuple(found)


def subtract(ranges: Iterable[TokenRange], covered: Iterable[TokenRange]) -> TokenSet:
    """The tokens of the ranges that nothing covers."""
    found: list[TokenRange] = []
    whole = union(ranges)
    holes = intersection(whole, covered)
    index = 0
    for part in whole:
        start = part.start
        while index < len(holes) and holes[index].end <= part.end:
            if start < holes[index].start:
                found.append(TokenRange(start, holes[index].start))
            start = holes[index].end
            index += 1
        if start < part.end:
            found.append(TokenRange(start, part.end))
    return tuple(found)


def fraction(ranges: Iterable[TokenRange]) -> float:
    """The part of the whole ring that the ranges cover, 0…1."""
    return sum(part.width for part in union(ranges)) / RING_WIDTH
