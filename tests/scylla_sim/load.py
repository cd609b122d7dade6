"""A cluster whose tables are written at random, with what they have to hold and where it can be read.

In memory: ``Load(cluster, tables)`` and :meth:`Load.write`; the clock is a fake one and :attr:`Load.logs` has the rows.
On a server: give it a :class:`~tests.scylla_sim.materialise.Materialiser`, the system's clock and :meth:`Load.run`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tests.scylla_model.mutation import Key
from tests.scylla_sim.base_model import Living, Rows, apply
from tests.scylla_sim.clock import SECOND, FakeClock
from tests.scylla_sim.cluster import Cluster, Written
from tests.scylla_sim.log import DAY_S, Log
from tests.scylla_sim.materialise import Materialiser
from tests.scylla_sim.streams import InvalidRequest, ServerError
from tests.scylla_sim.tables import BaseTable, CqlColumn
from tests.scylla_sim.workload import Habits, Workload


class Load:
    """Random writes to the tables of a cluster.

    :ivar tables: by their full names, as they are now
    :ivar base: what each table has to hold, by full name
    :ivar logs: what each table's log has, by full name
    :ivar written: what the cluster took
    :ivar refused: reasons of what it did not take
    """

    def __init__(
        self,
        cluster: Cluster,
        tables: Iterable[BaseTable],
        rng: random.Random,
        *,
        habits: Habits | None = None,
        materialiser: Materialiser | None = None,
        log_ttl_s: int = DAY_S,
    ) -> None:
        """Write nothing yet.

        :param materialiser: what is written goes to its server too
        :param log_ttl_s: of the logs in memory, s
        """
        self.cluster, self.rng, self.materialiser = cluster, rng, materialiser
        self.tables = {table.full_name: table for table in tables}
        self.base = {name: Rows(table) for name, table in self.tables.items()}
        self.logs = {name: Log(log_ttl_s) for name in self.tables}
        self._workloads = {name: Workload(rng, table, habits) for name, table in self.tables.items()}
        self.written: list[Written] = []
        self.refused: Counter[str] = Counter()

    def write(self, count: int, per_second: float = 2.0) -> list[Written]:
        """Write so many mutations.

        :param per_second: how fast a fake clock goes meanwhile; another one goes by itself
        :returns: those that the cluster took
        """
        taken = []
        for _ in range(count):
            if isinstance(self.cluster.clock, FakeClock):
                self.cluster.clock.advance(self.rng.expovariate(per_second))
            if written := self._one():
                taken.append(written)
        if self.materialiser:
            self.materialiser.write(taken)
        self.written += taken
        return taken

    def run(self, seconds: float, per_second: float = 200.0) -> list[Written]:
        """Write for some time by the system's clock, with a server; log rows come as they become visible.

        :param per_second: mutations per second, if the server is as fast
        """
        started, taken = time.monotonic(), 0
        done: list[Written] = []
        while (passed := time.monotonic() - started) < seconds:
            due = int(passed * per_second) - taken
            taken += due
            done += self.write(due)
            time.sleep(0.05)
        return done

    def expected(self, name: str) -> Mapping[tuple[Key, Key], Living]:
        """The living rows that a table, by its full name, has to hold; what expired since is there still."""
        return self.base[name].living()

    def end_us(self) -> int:
        """A moment, in µs, behind all timestamps that were written and all moments at which log rows are visible."""
        times = [time for one in self.written for time in one.streams]
        visible = [log.all_visible_us() for log in self.logs.values()]
        return max(*times, *visible, self.cluster.clock.now_us()) + SECOND

    def add_column(self, name: str, column: CqlColumn) -> str:
        """A table gets a column.

        :returns: the statement, which is to be executed before the next write
        """
        table = self.tables[name]
        self._altered(replace(table, columns=(*table.columns, column)))
        return f"ALTER TABLE {name} ADD {column.name} {column.cql_type}{' static' * column.static}"

    def drop_column(self, name: str, column: str) -> str:
        """A table loses a column; do not add it again: late writes to it would be hidden by the server.

        :returns: the statement, which is to be executed before the next write
        """
        table = self.tables[name]
        self._altered(replace(table, columns=tuple(one for one in table.columns if one.name != column)))
        return f"ALTER TABLE {name} DROP {column}"

    def _altered(self, table: BaseTable) -> None:
        name = table.full_name
        self.tables[name] = self.base[name].table = self._workloads[name].table = table
        if self.materialiser:
            self.materialiser.altered(table)

    def _one(self) -> Written | None:
        """Draw a mutation and give it to a node."""
        name = self.rng.choice(list(self.tables))
        table, node = self.tables[name], self.rng.randrange(len(self.cluster.nodes))
        mutation = self._workloads[name].mutation(self.cluster.now_us(node))
        try:
            written = self.cluster.write(table, mutation, node)
        except (InvalidRequest, ServerError) as error:
            self.refused[str(error).split(" (")[0].split(" for ")[0]] += 1
            return None
        apply(self.base[name], mutation)
        self.logs[name].add(*written.deliveries)
        return written
