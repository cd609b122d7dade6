"""The streams of tables with tablets, and the virtual tables that tell of them (docs/scylla.md)."""

from __future__ import annotations

import random

from tests.scylla_sim.clock import SECOND
from tests.scylla_sim.metadata import TABLET_STREAMS, TABLET_TIMESTAMPS, Metadata
from tests.scylla_sim.streams import ServerError, StreamSet, operating_at, tablet_streams
from tests.scylla_sim.tables import BaseTable

CURRENT, CLOSED, OPENED = 0, 1, 2
"""States of a stream in ``system.cdc_streams``."""
CREATED_BEFORE_US = 5 * SECOND
LEAD_US = 65 * SECOND


class Tablets:
    """The sets of streams of each table with tablets.

    :ivar sets: by the tables' names, each by their times
    """

    def __init__(self, rng: random.Random, metadata: Metadata) -> None:
        self._rng, self._metadata = rng, metadata
        self.sets: dict[str, list[StreamSet]] = {}

    def __contains__(self, table: BaseTable) -> bool:
        return table.full_name in self.sets

    def create(self, table: BaseTable, tablets: int, now_us: int) -> StreamSet:
        """A table with tablets gets CDC: its first set is stamped 5 s before.

        :param tablets: their number, a power of two
        :param now_us: µs since the epoch
        """
        first = tablet_streams(self._rng, (now_us - CREATED_BEFORE_US) // 1000, tablets)
        self.sets[table.full_name] = [first]
        self._publish(table, 0)
        return first

    def split(self, table: BaseTable, now_us: int) -> StreamSet:
        """Every tablet becomes two, in 65 s."""
        return self._resize(table, len(self.sets[table.full_name][-1].entries) * 2, now_us)

    def merge(self, table: BaseTable, now_us: int) -> StreamSet:
        """Two tablets each become one, in 65 s."""
        return self._resize(table, len(self.sets[table.full_name][-1].entries) // 2, now_us)

    def _resize(self, table: BaseTable, tablets: int, now_us: int) -> StreamSet:
        if tablets < 1:
            raise ValueError(f"{table.full_name} has one tablet")
        sets = self.sets[table.full_name]
        sets.append(tablet_streams(self._rng, max((now_us + LEAD_US) // 1000, sets[-1].time_ms + 1), tablets))
        self._publish(table, len(sets) - 1)
        return sets[-1]

    def collect(self, table: BaseTable, now_us: int, ttl_s: int) -> int:
        """Drop the sets whose rows are all gone, and return how many.

        :param ttl_s: of the log; 0: rows stay for ever
        """
        sets = self.sets[table.full_name]
        if not ttl_s:
            return 0
        dead = sum(later.time_ms * 1000 <= now_us - ttl_s * SECOND for later in sets[1:])
        for one in sets[:dead]:
            self._retract(table, one)
        del sets[:dead]
        if dead:
            self._retract(table, sets[0])
            self._publish(table, 0)
        return dead

    def drop(self, table: BaseTable) -> None:
        """The table, or its CDC, is gone."""
        for one in self.sets.pop(table.full_name):
            self._retract(table, one)

    def stream_of(self, table: BaseTable, token: int, time_us: int) -> bytes:
        """The stream of a write; its timestamp may be as old as the first set."""
        sets = self.sets[table.full_name]
        place = operating_at(sets, time_us)
        if place is None:
            raise ServerError(f"could not find any CDC stream of {table.full_name} for timestamp {time_us}")
        return sets[place].stream_of(token)

    def _publish(self, table: BaseTable, place: int) -> None:
        """Show a set: all its streams, those that it closes, those that it opens. The first one opens all."""
        sets = self.sets[table.full_name]
        now, before = sets[place].streams, sets[place - 1].streams if place else frozenset()
        key = {"keyspace_name": table.keyspace, "table_name": table.name, "timestamp": sets[place].time_ms}
        for state, streams in ((CURRENT, now), (CLOSED, before - now), (OPENED, now - before)):
            for stream in sorted(streams):
                self._metadata.put(TABLET_STREAMS, **key, stream_state=state, stream_id=stream)
        self._metadata.put(TABLET_TIMESTAMPS, **key)

    def _retract(self, table: BaseTable, one: StreamSet) -> None:
        key = {"keyspace_name": table.keyspace, "table_name": table.name, "timestamp": one.time_ms}
        self._metadata.delete(TABLET_TIMESTAMPS, **key)
        self._metadata.delete(TABLET_STREAMS, **key)
