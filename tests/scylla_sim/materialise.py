"""Writes what a simulated cluster did into a real Cassandra: base tables, their logs, and the tables that tell of them.

Known to be unlike Scylla: the log's partitions stand in the order of hashed tokens (there is no CDC partitioner), sets
are sorted, log rows have a row marker, a list's elements have other ids in the base table than in the log.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cassandra.cluster import PreparedStatement, Session
from cassandra.concurrent import execute_concurrent
from cassandra.query import UNSET_VALUE, BatchStatement, BatchType

from tests.scylla_model.log_rows import LogRow
from tests.scylla_sim.clock import SECOND
from tests.scylla_sim.cluster import Cluster, Written
from tests.scylla_sim.log import DAY_S, Delivery
from tests.scylla_sim.metadata import KEYS, LOCAL, STREAMS, STREAMS_V1, TIMESTAMPS, Deleted, Put
from tests.scylla_sim.statements import Statements
from tests.scylla_sim.tables import BaseTable

KEYSPACES = {"system_distributed": "sim_distributed", "system": "sim_system"}
"""Where Scylla's own keyspaces are kept: the stand-in renames them (tests/scylla_server)."""
SYSTEM_TABLES = (
    "sim_distributed.cdc_generation_timestamps (key text, time timestamp, expired timestamp, PRIMARY KEY (key, time)) "
    "WITH CLUSTERING ORDER BY (time DESC)",
    "sim_distributed.cdc_streams_descriptions_v2 (time timestamp, range_end bigint, streams frozen<set<blob>>, "
    "PRIMARY KEY (time, range_end))",
    "sim_system.cdc_local (key text PRIMARY KEY, streams_timestamp timestamp, uuid uuid)",
    "sim_system.cdc_timestamps (keyspace_name text, table_name text, timestamp timestamp, "
    "PRIMARY KEY ((keyspace_name, table_name), timestamp)) WITH CLUSTERING ORDER BY (timestamp DESC)",
    "sim_system.cdc_streams (keyspace_name text, table_name text, timestamp timestamp, stream_state tinyint, "
    "stream_id blob, PRIMARY KEY ((keyspace_name, table_name), timestamp, stream_state, stream_id))",
)
LEGACY_TABLE = (
    "sim_distributed.cdc_streams_descriptions (time timestamp PRIMARY KEY, streams frozen<set<blob>>, "
    "expired timestamp)"
)
"""The table of Scylla 4.3; on a server where it stands readers take the cluster for one that was upgraded."""


def create_system_tables(session: Session, *, legacy: bool = False) -> None:
    """Create the tables that tell of streams, where no stand-in does.

    :param legacy: with that of Scylla 4.3
    """
    for keyspace in KEYSPACES.values():
        session.execute(
            f"CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = "
            "{'class': 'SimpleStrategy', 'replication_factor': 1}"
        )
    for table in (*SYSTEM_TABLES, *([LEGACY_TABLE] if legacy else [])):
        session.execute(f"CREATE TABLE IF NOT EXISTS {table}")


def create_tables(session: Session, tables: Iterable[BaseTable], *, logs: bool) -> None:
    """Create base tables in keyspaces that are there.

    :param logs: create their logs too; else ``ALTER TABLE … WITH cdc`` through the stand-in is to make them
    """
    for table in tables:
        for text in (*table.user_types(), table.create_table(), *([table.create_log()] if logs else [])):
            session.execute(text)


class Materialiser:
    """Writes a cluster's doings into a server: base rows when they are told, log rows when they become visible.

    :ivar waiting: deliveries that are not visible yet, a heap
    :ivar written: number of log rows that were written
    """

    def __init__(
        self,
        session: Session,
        cluster: Cluster,
        *,
        log_ttl_s: int = DAY_S,
        requests: int = 64,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Write nothing yet.

        :param session: of the server itself, not through the stand-in; its tables are there
        :param log_ttl_s: TTL of log rows, s; 0: none
        :param requests: number of requests at a time
        :param sleep: how to wait: it has to make the cluster's clock go on
        """
        self._session, self._cluster, self._requests, self._sleep = session, cluster, requests, sleep
        self.log_ttl_s = log_ttl_s
        self.waiting: list[tuple[int, int, Delivery]] = []
        self.written = 0
        self._number = 0
        self._prepared: dict[str, PreparedStatement] = {}
        self._statements: dict[str, Statements] = {}
        self._altered: dict[str, BaseTable] = {}

    def write(self, written: Iterable[Written]) -> None:
        """Write base mutations now, and remember their log rows; then :meth:`pump`."""
        self.base(one for one in self._remembered(written))
        self.pump()

    def _remembered(self, written: Iterable[Written]) -> Iterable[Written]:
        for one in written:
            for delivery in one.deliveries:
                self._number += 1
                heapq.heappush(self.waiting, (delivery.visible_us, self._number, delivery))
            yield one

    def base(self, written: Iterable[Written]) -> None:
        """Write base mutations, each as one batch. Those with list elements of one partition keep their order."""
        wave: list[BatchStatement] = []
        listed: set[tuple[str, Any]] = set()
        for one in written:
            statements = self._statements.setdefault(one.table.full_name, Statements(one.table))
            statements.table = one.table
            if statements.touches_lists(one.mutation):
                place = one.table.full_name, one.mutation.key
                if place in listed:
                    self._run(wave)
                    wave, listed = [], set()
                listed.add(place)
            batch = BatchStatement(BatchType.UNLOGGED)
            for text, values in statements.of(one.mutation):
                batch.add(self._prepare(text), values)
            if len(batch):
                wave.append(batch)
        self._run(wave)

    def pump(self) -> int:
        """Write what changed in the tables that tell of streams, and the log rows that are visible by now.

        :returns: number of log rows
        """
        self.metadata()
        due: list[Delivery] = []
        while self.waiting and self.waiting[0][0] <= self._cluster.clock.now_us():
            due.append(heapq.heappop(self.waiting)[2])
        rows = self.log(due)
        self.written += rows
        return rows

    def altered(self, table: BaseTable) -> None:
        """A table has other columns now: of log rows that are on their way only these are written."""
        self._altered[table.full_name] = table

    def settle(self) -> None:
        """Wait until all that was written is visible."""
        while self.pump() or self.waiting:
            if self.waiting:
                self._sleep(max(0, self.waiting[0][0] - self._cluster.clock.now_us()) / SECOND)

    def log(self, deliveries: Sequence[Delivery]) -> int:
        """Write log rows now, with what is left of their TTL; those that have none left are not written.

        :returns: how many were written
        """
        now, bound = self._cluster.clock.now_us(), []
        for one in deliveries:
            ttl = one.ttl_left(self.log_ttl_s, now) if self.log_ttl_s else 0
            if ttl > 0 or not self.log_ttl_s:
                now_there = self._altered.get(one.table.full_name, one.table).log_columns()
                columns = [name for name in one.table.log_columns() if name in now_there]
                names = ", ".join(f'"{name}"' for name in columns)
                text = f"INSERT INTO {one.table.log_name} ({names}) VALUES ({', '.join('?' for _ in columns)}) "
                statement = self._prepare(text + "USING TIMESTAMP ? AND TTL ?")
                bound += [statement.bind((*log_values(one.table, row, columns), one.time_us, ttl)) for row in one.rows]
        self._run(bound)
        return len(bound)

    def metadata(self) -> None:
        """Write what changed in the tables that tell of streams: one change after the other where that matters."""
        wave: list[Any] = []
        for change in self._cluster.metadata.drain():
            # A generation's time is written after its streams, and goes before them.
            if change.table in (TIMESTAMPS, STREAMS_V1, LOCAL):
                self._run(wave)
                self._run([self._metadata(change)])
                wave = []
            else:
                if isinstance(change, Deleted) and wave and change.table != STREAMS:
                    self._run(wave)
                    wave = []
                wave.append(self._metadata(change))
        self._run(wave)

    def _metadata(self, change: Put | Deleted) -> Any:
        keyspace, name = change.table.split(".")
        table, row = f"{KEYSPACES[keyspace]}.{name}", change.row
        if isinstance(change, Put):
            text = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' for _ in row)})"
            return self._prepare(text).bind(tuple(row.values()))
        where = " AND ".join(f"{column} = ?" for column in KEYS[change.table])
        return self._prepare(f"DELETE FROM {table} WHERE {where}").bind(tuple(row.values()))

    def _prepare(self, text: str) -> PreparedStatement:
        if text not in self._prepared:
            self._prepared[text] = self._session.prepare(text)
        return self._prepared[text]

    def _run(self, statements: Sequence[Any]) -> None:
        pairs = [(statement, None) for statement in statements]
        execute_concurrent(self._session, pairs, concurrency=self._requests, raise_on_first_error=True)


def log_values(table: BaseTable, row: LogRow, columns: Iterable[str]) -> tuple[Any, ...]:
    """Columns of a log row as the driver takes them: what is None is not written."""
    values = []
    for name in columns:
        value = row[name]
        if isinstance(value, dict) and any(one.name == name and one.kind == "udt" for one in table.columns):
            value = tuple(value.values())
        values.append(UNSET_VALUE if value is None else value)
    return tuple(values)
