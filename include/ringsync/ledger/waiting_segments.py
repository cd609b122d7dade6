"""Archived segments that are still to be read, ``cdc/<node>/``, as one listing shows them
(:mod:`ringsync.ledger.archive`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ringsync.storage.port import ObjectStore

WAITING = "cdc/"
"""Their folder."""

ENTRY = re.compile(r"[^/]+/([^/]+)/(CommitLog-[^/]+\.log)\.json")
"""Key of the entry of an archived segment, read or not."""


@dataclass(frozen=True)
class Waiting:
    """The archived segments that are to be read.

    :ivar size: bytes of all their objects
    :ivar oldest_ms: when the first of them was archived, by the store's clock, ms since the epoch; 0: there are none
    """

    segments: int
    size: int
    oldest_ms: int


def waiting_keys(store: ObjectStore) -> list[str]:
    """List the keys of the entries of the archived segments that are to be read."""
    return [stat.key for stat in store.list(WAITING) if ENTRY.fullmatch(stat.key)]


def waiting(store: ObjectStore) -> Waiting:
    """Count the archived segments that are to be read.

    :raises UnavailableError: the store cannot be used
    """
    there = store.list(WAITING)
    written_ms = [stat.written_ms for stat in there if ENTRY.fullmatch(stat.key)]
    return Waiting(len(written_ms), sum(stat.size for stat in there), min(written_ms, default=0))
