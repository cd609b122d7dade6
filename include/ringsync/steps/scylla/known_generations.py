"""The generations of CDC streams that some tables need: each is read once, and stays until nothing needs it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringsync.cluster.generations import Streams, read_generation, read_times
from ringsync.cluster.node import NO_ANSWER
from ringsync.ring.ranks import RankedRing
from ringsync.scylla.generations import Generation, Interval, intervals
from ringsync.scylla.progress import OVERLAP_MS
from ringsync.sources.cdc_log import Requests, grouped

TIMES_EVERY_S = 15.0
"""Time between two looks at the generations of a table with tablets."""

_UNSEEN = (
    "new generations of CDC streams are not seen, since system_distributed cannot be read at QUORUM: rows of theirs "
    "will be late: {}"
)


@dataclass(frozen=True)
class Needed:
    """Which generations some tables need.

    :ivar from_ms: write time from which on something may be read, ms since the epoch
    :ivar known: times of generations whose streams were read
    """

    from_ms: int
    known: frozenset[int] = frozenset()

    def has(self, generation: Interval) -> bool:
        """Tell whether something may be read that was written while a generation operated."""
        return generation.end_ms is None or generation.end_ms + OVERLAP_MS >= self.from_ms


_ALL = Needed(0)


class KnownGenerations:
    """Reads generations, and remembers them.

    :ivar problem: why new generations are not seen; empty: they are
    :ivar empty: times of last generations without streams
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._needed: Mapping[Streams, Needed] = {}
        self._times: dict[Streams, tuple[float, list[int]]] = {}
        self._generations: dict[tuple[Streams, int], Generation] = {}
        self._looked: dict[Streams, tuple[Generation, ...]] = {}
        self._unread: dict[Streams, Exception] = {}
        self._grouped: dict[tuple[Streams, int, str], tuple[Generation, Requests]] = {}
        self.problem = ""
        self.empty: set[int] = set()

    def look(self, needed: Mapping[Streams, Needed]) -> None:
        """Begin a new look at the cluster.

        :param needed: what is needed, by where it is described
        """
        self._needed, self._looked, self._unread, self.problem, self.empty = needed, {}, {}, "", set()

    @property
    def shared_count(self) -> int:
        """Number of generations that all tables without tablets share."""
        return len({time_ms for streams, time_ms in self._generations if streams.table is None})

    def of(self, streams: Streams) -> tuple[Generation, ...]:
        """Read the generations that are new, once in a look. One without streams is read again: they may come later.

        :raises NO_ANSWER: they cannot be read now
        """
        if streams in self._looked:
            return self._looked[streams]
        if streams in self._unread:
            raise self._unread[streams]
        try:
            times = self._described_times(streams)
        except NO_ANSWER as error:
            self._unread[streams] = error  # not to be asked for each table
            raise
        self._generations = {key: one for key, one in self._generations.items() if key[0] != streams or key[1] in times}
        self._grouped = {key: one for key, one in self._grouped.items() if key[:2] in self._generations}
        found = self._looked[streams] = tuple(self._generations[streams, time_ms] for time_ms in times)
        if found and not found[-1].ranges:
            self.empty.add(found[-1].time_ms)
        return found

    def requests(self, streams: Streams, generation: Generation, ring: RankedRing | None) -> Requests:
        """Return what is asked for of a generation, as :func:`ringsync.sources.cdc_log.grouped`."""
        key = (streams, generation.time_ms, ring.ring.digest if ring else "")
        known = self._grouped.get(key)
        if known is None or known[0] is not generation:
            known = self._grouped[key] = generation, grouped(generation, ring)
        return known[1]

    def _described_times(self, streams: Streams) -> list[int]:
        """Read the generations that are new. Return the times of all, without those that cannot be read and that nobody
        has noticed yet: they may wait."""
        times, noticed = self._times_of(streams), self._needed.get(streams, _ALL).known
        for place, time_ms in enumerate(times):
            known = self._generations.get((streams, time_ms))
            if known is not None and known.ranges:
                continue
            try:
                self._generations[streams, time_ms] = read_generation(self._session, streams, time_ms)
            except NO_ANSWER as error:
                if not place or not noticed.isdisjoint(times[place:]):
                    raise
                self.problem = _UNSEEN.format(error)
                return times[:place]
        return times

    def _times_of(self, streams: Streams) -> list[int]:
        """Read when the generations begin that are needed; those that are known if that cannot be read: what is logged
        meanwhile to a new one is read again as soon as it is known.

        A known generation stays, whether or not the node that answers lists it: the lists of tablets' generations are
        each node's own (S: db/virtual_tables.cc), and one node may lag.
        """
        looked_s, times = self._times.get(streams, (-math.inf, []))
        now_s, needed = time.monotonic(), self._needed.get(streams, _ALL)
        # With tablets each table has its own.
        if streams.table is not None and now_s - looked_s < TIMES_EVERY_S:
            return times
        try:
            listed = read_times(self._session, streams)
        except NO_ANSWER as error:
            if not times:
                raise
            self.problem = _UNSEEN.format(error)
            return times
        # A write time of long ago may still come into any of a table's own generations, which Scylla forgets itself.
        always = listed if streams.table is not None else ()
        every = intervals([*listed, *times, *needed.known])
        times = [one.start_ms for one in every if one.start_ms in always or needed.has(one)]
        self._times[streams] = now_s, times
        return times
