"""How far the readers of a table's passes, replica and Kafka, are behind what is published."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ringsync.ledger.passes import Pass


def behind_ms(passes: Iterable[Pass], has: Callable[[Pass], bool], now_ms: int) -> int:
    """Return how long ago the oldest pass was made that a reader lacks, ms; 0: it lacks none.

    :param has: tells whether the reader has a pass with messages
    """
    lacks = (made.created_at_ms for made in passes if made.parts and not has(made))
    return max(0, now_ms - min(lacks, default=now_ms))


def lag_until_ms(made: Pass, at_ms: int) -> int:
    """Return the time from the write of a pass's changes (the median) until a reader had them, ms.

    :param at_ms: when the reader had them, ms since the epoch
    """
    return made.lag_ms + max(0, at_ms - made.created_at_ms)
