"""The time by the store's clock, on which hosts agree whose own clocks differ."""

from __future__ import annotations

from ringsync.storage.port import ObjectStore

_CLOCK = "control/clock.json"
"""Object that is written to learn what time it is."""


def store_ms(store: ObjectStore, otherwise_ms: int) -> int:
    """Return the time by the store's clock, ms since the epoch. It takes two requests.

    :param otherwise_ms: what is returned if the store does not tell, ms since the epoch
    """
    store.say(_CLOCK, b"{}")
    written = store.stat(_CLOCK)
    return (written and written.written_ms) or otherwise_ms
