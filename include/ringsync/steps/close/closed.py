"""The end of the closed buckets: it follows the logs, and the store's clock."""

from __future__ import annotations

from collections.abc import Callable

from ringsync.ledger.staging import put_closed_until
from ringsync.storage.clock import store_ms
from ringsync.storage.port import ObjectStore


def close_until(store: ObjectStore, known_ms: int, wanted_ms: int, latest: Callable[[int], int], now_ms: int) -> int:
    """Move the end of the closed buckets, and record it. It never lies in the future by the store's clock, however far
    the clocks of workers are ahead; one that does, since a clock was ahead before, comes back.

    That is safe: buckets that are open once more take rows, and digests tell which were published.

    :param known_ms: the present end, ms since the epoch
    :param wanted_ms: the end that the logs allow
    :param latest: returns the latest end that is right at a moment
    :param now_ms: present time by this host's clock
    :returns: the new end
    """
    if wanted_ms <= known_ms <= latest(now_ms):
        return known_ms
    last_ms = latest(store_ms(store, now_ms))
    until_ms = max(known_ms if known_ms <= last_ms else 0, min(wanted_ms, last_ms))
    if until_ms != known_ms:
        put_closed_until(store, until_ms)
    return until_ms
