"""A ScyllaDB cluster without a server: its clocks, its generations of streams, and the log rows of its writes.

The facts are those of docs/scylla.md; no ScyllaDB server has been asked. A write
gives deliveries: log rows that become visible at a moment of their own, see :mod:`tests.scylla_sim.log`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from uuid import UUID

from tests.scylla_model.log_rows import LogRow, log_rows, split
from tests.scylla_model.mutation import Mutation
from tests.scylla_sim.arithmetic import micros_of, timeuuid
from tests.scylla_sim.clock import SECOND, Clock
from tests.scylla_sim.log import Delivery
from tests.scylla_sim.metadata import LOCAL, STREAMS, STREAMS_V1, TIMESTAMPS, Metadata
from tests.scylla_sim.streams import InvalidRequest, Node, ServerError, StreamSet, operating_at, vnode_streams
from tests.scylla_sim.tables import BaseTable, plain
from tests.scylla_sim.tablets import Tablets

LEAD_S = 65
"""A new generation starts so long after its making: 2 ring delays and 5 s (S: cdc/generation.cc)."""
LEEWAY_US = 5 * SECOND


@dataclass(frozen=True)
class Disturbances:
    """What happens to log rows on their way. Probabilities are per group of log rows.

    :ivar delay_s: least and greatest time until a group is visible, s
    :ivar slow: probability of a group that takes ``slow_s``: least and greatest time, s
    :ivar duplicate: probability that a group is written again, with a ``cdc$time`` of its own (scylladb #5900)
    :ivar cut: probability that a group's last rows are visible only later than its first
    :ivar old_times: probability of a ``cdc$time`` as of older releases
    """

    delay_s: tuple[float, float] = (0.0, 0.0)
    slow: float = 0.0
    slow_s: tuple[float, float] = (2.0, 8.0)
    duplicate: float = 0.0
    cut: float = 0.0
    old_times: float = 0.0

    def delay_us(self, rng: random.Random) -> int:
        """Draw how long a group is on its way, in µs."""
        bounds = self.slow_s if rng.random() < self.slow else self.delay_s
        return round(rng.uniform(*bounds) * SECOND)


CALM = Disturbances()
ROUGH = Disturbances((0.0, 1.5), slow=0.05, duplicate=0.05, cut=0.1, old_times=0.3)


@dataclass(frozen=True)
class Written:
    """A write that the cluster took.

    :ivar token: of its partition key
    :ivar streams: the stream by the timestamp of each of its groups
    :ivar groups: the number of its groups, duplicates left out
    """

    table: BaseTable
    mutation: Mutation
    at_us: int
    token: int
    streams: Mapping[int, bytes]
    deliveries: tuple[Delivery, ...]

    @property
    def groups(self) -> int:
        return len(self.streams)


class Cluster:
    """Nodes with clocks of their own, generations, tables with tablets.

    Every coordinator knows a generation when it is made; clients know it when it is published.

    :ivar generations: by their times
    :ivar published: the times of those that a client can find, in ms since the epoch
    :ivar metadata: what clients read
    """

    def __init__(
        self,
        rng: random.Random,
        clock: Clock,
        nodes: Sequence[Node],
        *,
        ignored_bits: int = 12,
        disturbances: Disturbances = CALM,
        legacy: bool = False,
    ) -> None:
        """Start a cluster without a generation.

        :param legacy: generations are published in the table of Scylla 4.3 until :meth:`upgrade`
        """
        self.rng, self.clock, self.nodes, self.ignored_bits = rng, clock, list(nodes), ignored_bits
        self.disturbances, self.legacy = disturbances, legacy
        self.generations: list[StreamSet] = []
        self.published: set[int] = set()
        self.metadata = Metadata()
        self.tablets = Tablets(rng, self.metadata)

    @classmethod
    def of(
        cls,
        rng: random.Random,
        clock: Clock,
        *,
        shards: Sequence[int] = (3, 3, 3),
        vnodes: int = 8,
        skews_s: Sequence[float] = (),
        disturbances: Disturbances = CALM,
        legacy: bool = False,
    ) -> Cluster:
        """A cluster with random tokens, a node for each number of shards; skews are 0 where none is given."""
        skews = [*skews_s, *[0.0] * len(shards)]
        nodes = [Node.random(rng, vnodes, count, skew) for count, skew in zip(shards, skews, strict=False)]
        return cls(rng, clock, nodes, disturbances=disturbances, legacy=legacy)

    def now_us(self, coordinator: int = 0) -> int:
        """The time by the clock of a node, in µs since the epoch."""
        return self.clock.now_us() + self.nodes[coordinator].skew_us

    # Generations.

    def new_generation(self, coordinator: int = 0, *, empty: bool = False, publish: bool = True) -> StreamSet:
        """Make a generation of the ring as it is: in 65 s, the first one at once.

        :param empty: without streams (scylla-cdc-java #144)
        :param publish: tell clients; else :meth:`publish_streams` and :meth:`publish_time` are to be called
        """
        time_ms = self.now_us(coordinator) // 1000
        if self.generations:
            time_ms = max(time_ms + LEAD_S * 1000, self.generations[-1].time_ms + 1)
        made = vnode_streams(self.rng, time_ms, self.nodes, self.ignored_bits)
        made = replace(made, entries=()) if empty else made
        self.generations.append(made)
        if publish:
            self.publish_streams(made)
            self.publish_time(made)
        return made

    def add_node(self, shards: int = 3, vnodes: int = 8, skew_s: float = 0) -> StreamSet:
        """A node joins: the next generation has its ranges."""
        self.nodes.append(Node.random(self.rng, vnodes, shards, skew_s))
        return self.new_generation()

    def remove_node(self, number: int) -> StreamSet:
        """A node leaves."""
        del self.nodes[number]
        return self.new_generation()

    def publish_streams(self, generation: StreamSet, rows: int | None = None) -> None:
        """Publish the streams of a generation, first step.

        :param rows: only so many ranges; None: all
        """
        if self.legacy:
            return
        for entry in generation.entries[:rows]:
            streams = frozenset(entry.streams)
            self.metadata.put(STREAMS, time=generation.time_ms, range_end=entry.end, streams=streams)

    def publish_time(self, generation: StreamSet) -> None:
        """Publish the time of a generation, second step; of a legacy cluster its only one."""
        self.published.add(generation.time_ms)
        if self.legacy:
            self.metadata.put(STREAMS_V1, time=generation.time_ms, streams=generation.streams, expired=None)
        else:
            self.metadata.put(TIMESTAMPS, key="timestamps", time=generation.time_ms, expired=None)

    def upgrade(self) -> None:
        """A legacy cluster gets the tables of today, which have nothing but new generations until :meth:`rewrite`."""
        self.legacy = False

    def rewrite(self, since_ms: int = 0) -> None:
        """Copy what a legacy cluster published into the tables of today, and say that this was done.

        :param since_ms: generations that ended before it are too old
        """
        times = [generation.time_ms for generation in self.generations]
        for generation, end in zip(self.generations, [*times[1:], None], strict=True):
            if generation.time_ms in self.published and (end is None or end > since_ms):
                self.publish_streams(generation)
                self.publish_time(generation)
        self.metadata.put(LOCAL, key="rewritten", streams_timestamp=None, uuid=None)

    def expire(self, before_ms: int) -> None:
        """Forget the generations that ended before a time, here and in the tables."""
        times = [generation.time_ms for generation in self.generations]
        for time_ms, end in pairwise(times):
            if end <= before_ms:
                self.generations = [one for one in self.generations if one.time_ms != time_ms]
                self.published.discard(time_ms)
                # The time goes first: a client must not take a part of the streams for all.
                for table in (TIMESTAMPS, STREAMS, STREAMS_V1):
                    self.metadata.delete(table, time=time_ms)

    # Writes.

    def stream_of(self, table: BaseTable, token: int, time_us: int, now_us: int) -> bytes:
        """The stream of a write with a timestamp at the time that the coordinator's clock shows.

        :raises InvalidRequest: the timestamp is too far in the future, or of a generation that is over
        :raises ServerError: there is no stream
        """
        if time_us > now_us + LEEWAY_US:
            raise InvalidRequest(f"cdc: attempted to get a stream from the future ({time_us} at {now_us})")
        if table in self.tablets:
            return self.tablets.stream_of(table, token, time_us)
        place = operating_at(self.generations, time_us)
        if time_us <= now_us - LEEWAY_US:
            ended = place is not None and operating_at(self.generations, now_us) != place
            if place is None or ended:
                raise InvalidRequest(f"cdc: attempted to get a stream from the past ({time_us} at {now_us})")
        if place is None:
            raise ServerError(f"could not find any CDC stream for timestamp {time_us}")
        return self.generations[place].stream_of(token)

    def write(self, table: BaseTable, mutation: Mutation, coordinator: int = 0) -> Written:
        """Take a write, whose timestamps it brings along.

        :raises InvalidRequest: a timestamp is not accepted; then nothing of it is written
        :raises ServerError: there is no stream
        """
        now_us, token = self.now_us(coordinator), table.token(mutation.key)
        times = [group.timestamp for group in split(mutation)]
        streams = {time: self.stream_of(table, token, time, now_us) for time in times}
        groups = self._groups(mutation, streams)
        for group in list(groups):
            if self.rng.random() < self.disturbances.duplicate:
                again = self._time(micros_of(group[0]["cdc$time"]))
                groups.append([row | {"cdc$time": again} for row in group])
        deliveries = [delivery for group in groups for delivery in self._deliver(table, group, now_us)]
        return Written(table, mutation, now_us, token, streams, tuple(deliveries))

    def _time(self, micros: int) -> UUID:
        return timeuuid(self.rng, micros, self.rng.random() < self.disturbances.old_times)

    def _groups(self, mutation: Mutation, streams: Mapping[int, bytes]) -> list[list[LogRow]]:
        """The log rows of a mutation by their ``cdc$time``."""
        groups: dict[UUID, list[LogRow]] = {}
        for row in log_rows(mutation, self._time):
            values: dict[str, Any] = {name: plain(value) for name, value in row.items()}
            time = row["cdc$time"]
            groups.setdefault(time, []).append({"cdc$stream_id": streams[micros_of(time)]} | values)
        return list(groups.values())

    def _deliver(self, table: BaseTable, rows: list[LogRow], arrived_us: int) -> list[Delivery]:
        """Say when the rows of a group are visible: all at once, or in two parts."""
        visible = self.clock.now_us() + self.disturbances.delay_us(self.rng)
        if len(rows) == 1 or self.rng.random() >= self.disturbances.cut:
            return [Delivery(table, tuple(rows), arrived_us, visible)]
        cut = self.rng.randrange(1, len(rows))
        later = visible + max(1, self.disturbances.delay_us(self.rng))
        parts = (rows[:cut], visible), (rows[cut:], later)
        return [Delivery(table, tuple(part), arrived_us, moment) for part, moment in parts]
