"""A simulated cluster whose rows are in Cassandra, behind a stand-in: a client finds a ScyllaDB that is written to."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from ringsync.cluster.session import ClusterSettings, connect
from tests.scylla_server.proxy import StandIn
from tests.scylla_sim.clock import SystemClock
from tests.scylla_sim.cluster import CALM, Cluster, Disturbances, Written
from tests.scylla_sim.materialise import Materialiser
from tests.scylla_sim.streams import InvalidRequest, ServerError
from tests.scylla_sim.tables import BaseTable
from tests.scylla_sim.workload import Habits, Workload


class World:
    """A simulated cluster whose rows are in Cassandra."""

    def __init__(
        self,
        stand_in: StandIn,
        chance: random.Random,
        vnodes: Sequence[BaseTable],
        tablets: Sequence[BaseTable] = (),
        *,
        shards: int = 8,
        tokens: int = 256,
        skews_s: Sequence[float] = (),
        disturbances: Disturbances = CALM,
    ) -> None:
        """Three nodes.

        :param vnodes: tables without tablets, all in one keyspace; ``tablets``: with them, likewise
        :param tokens: of each node
        """
        self.chance, self.stand_in, self.direct = chance, stand_in, stand_in.session()
        self.shards, self.tokens = shards, tokens
        self.cluster = Cluster.of(
            *(chance, SystemClock()),
            shards=(shards,) * 3,
            vnodes=tokens,
            skews_s=skews_s,
            disturbances=disturbances,
        )
        self.vnodes, self.tablets, self.tables = list(vnodes), list(tablets), [*vnodes, *tablets]
        self.counts: Counter[str] = Counter()

    def create(self) -> None:
        """Keyspaces and tables as a user makes them, through the stand-in."""
        client = connect(ClusterSettings((self.stand_in.host,), self.stand_in.port))
        keyspaces = {table.keyspace: "false" for table in self.vnodes}
        for keyspace, enabled in (keyspaces | {table.keyspace: "true" for table in self.tablets}).items():
            client.execute(
                f"CREATE KEYSPACE {keyspace} WITH replication = {{'class': 'NetworkTopologyStrategy', "
                f"'datacenter1': 1}} AND tablets = {{'enabled': {enabled}}}"
            )
        self.cluster.new_generation()
        for table in self.tables:
            for text in table.user_types():
                client.execute(text)
            client.execute(f"{table.create_table()} AND cdc = {{'enabled': true}}")
        for table in self.tablets:
            self.cluster.tablets.create(table, 4, self.cluster.now_us())
        self.materialiser = Materialiser(self.direct, self.cluster)
        self.materialiser.pump()

    def write(self, seconds: float, habits: Habits, *, change_every_s: float, at_once: int = 20) -> None:
        """Write at random, change the ring and the tablets now and then, until the time is over.

        :param at_once: mutations between two pauses of 50 ms
        """
        workloads = {table: Workload(self.chance, table, habits) for table in self.tables}
        end, next_change = time.monotonic() + seconds, time.monotonic() + 5
        while time.monotonic() < end:
            if time.monotonic() >= next_change:
                self.change()
                next_change = time.monotonic() + change_every_s
            self.materialiser.write(list(self._written(workloads, at_once)))
            time.sleep(0.05)
        self.materialiser.settle()

    def _written(self, workloads: dict[BaseTable, Workload], count: int) -> Iterator[Written]:
        for _ in range(count):
            table, coordinator = self.chance.choice(self.tables), self.chance.randrange(3)
            mutation = workloads[table].mutation(self.cluster.now_us(coordinator))
            try:
                yield self.cluster.write(table, mutation, coordinator)
                self.counts["written"] += 1
            except (InvalidRequest, ServerError):
                self.counts["refused"] += 1  # too old for its generation, as a real one refuses it

    def change(self) -> None:
        """A node joins or leaves, and tablets split or merge: new streams in a minute."""
        if len(self.cluster.nodes) > 3:
            self.cluster.remove_node(len(self.cluster.nodes) - 1)
        else:
            self.cluster.add_node(self.shards, self.tokens)
        for table in self.tablets:
            sets = self.cluster.tablets.sets[table.full_name]
            resize = self.cluster.tablets.merge if len(sets) % 3 == 0 else self.cluster.tablets.split
            resize(table, self.cluster.now_us())
        self.counts["changes"] += 1
