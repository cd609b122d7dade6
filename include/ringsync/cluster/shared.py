"""What several tables of one run need to know of the cluster, read once for all of them.

A schema holds as long as the node that is asked has the same schema version, a digest of all that it knows. A ring has
no such version: a reading counts for all who asked before it began.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ringsync.cluster.agreement import nodes_behind
from ringsync.cluster.cluster import read_hosts, read_largest_partitions, read_replications
from ringsync.cluster.node import ask_one, one_node, schema_version
from ringsync.cluster.schema import SYSTEM_KEYSPACES, read_table, tables_of
from ringsync.cluster.scylla import is_scylla
from ringsync.cluster.session import ClusterError
from ringsync.ring.ring import Host, RingSnapshot
from ringsync.schema.table import TableSchema

Asked = TypeVar("Asked")
Read = TypeVar("Read")
TableName = tuple[str, str]
"""Keyspace and table, without quotes."""

LARGE_PARTITION_MIB = 32
"""A node bears a response that has a whole partition of that size."""


class Reading(Generic[Read]):
    """Something that several threads read, once for all that ask at the same time.

    :param read: reads it; is given the moment that it was asked for
    """

    def __init__(self, read: Callable[[float], Read], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._lock = threading.Lock()
        self._latest: tuple[float, Read] | None = None

    def since(self, moment_s: float) -> Read:
        """Return a reading that began at this moment or later.

        :param moment_s: on the clock, in seconds; minus infinity: any reading does
        """
        with self._lock:
            if self._latest is None or self._latest[0] < moment_s:
                began = self._clock()
                self._latest = began, self._read(moment_s)
            return self._latest[1]


class Together(Generic[Asked, Read]):
    """Something that several threads want done, each for its own: what waits is done together, by one of them.

    :param work: does it for some, in the order in which they came; gives for each its result, or why it failed
    """

    def __init__(self, work: Callable[[Sequence[Asked]], Sequence[Read | Exception]]) -> None:
        self._work = work
        self._lock, self._working = threading.Lock(), threading.Lock()
        self._waiting: list[tuple[Asked, Future[Read]]] = []

    def do(self, asked: Asked) -> Read:
        """Have it done, and return the result; raise why it failed. An error of the work is that of all it was for."""
        future: Future[Read] = Future()
        with self._lock:
            self._waiting.append((asked, future))
        with self._working:
            if not future.done():  # another thread may have done it in the meantime
                self._do_all()
        return future.result()

    def _do_all(self) -> None:
        with self._lock:
            group, self._waiting = self._waiting, []
        try:
            results = self._work([asked for asked, _ in group])
        except BaseException as error:
            for _, future in group:
                future.set_exception(error)
            return
        for (_, future), result in zip(group, results, strict=True):
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


@dataclass(frozen=True)
class KnownTables:
    """The users' tables as one node has them.

    :ivar version: the node's schema version
    :ivar names: names of all tables, also of those that cannot be read; views are none
    :ivar tables: those that :func:`ringsync.cluster.schema.read_table` would return
    """

    version: str
    names: tuple[TableName, ...]
    tables: Mapping[TableName, TableSchema]


def read_known_tables(session: Any, own_keyspaces: Collection[str] = ()) -> KnownTables:
    """Read all users' tables.

    :param own_keyspaces: further keyspaces that are not users'
    :raises ChangingSchemaError: the schema changes all the time
    """
    hidden = SYSTEM_KEYSPACES | {*own_keyspaces}

    def read(node: Any) -> KnownTables:
        version, everything = schema_version(node), tables_of(node)
        headers = node.execute("SELECT keyspace_name, table_name, flags FROM system_schema.tables")
        flags = {(row.keyspace_name, row.table_name): row.flags or () for row in headers}
        tables = {(table.keyspace, table.name): table for table in everything.tables}
        names = sorted(name for name in flags if name[0] not in hidden)
        plain = {name: tables[name] for name in names if name in tables and "compound" in flags[name]}
        return KnownTables(version, tuple(names), plain)

    return ask_one(session, read)


class Shared:
    """What the tables of a run share.

    :param session: a ``cassandra.cluster.Session`` with the driver's default row factory
    :param known: all tables; None: for a run of one table, which reads just that one
    """

    def __init__(self, session: Any, known: KnownTables | None = None) -> None:
        self.session, self.known = session, known
        self._lock = threading.Lock()
        self._hosts: Reading[tuple[Host, ...]] = Reading(lambda _: read_hosts(session))
        self._rings: dict[str, Reading[RingSnapshot]] = {}
        self._behind = Reading(lambda _: nodes_behind(session))
        self._largest: Reading[Mapping[TableName, int] | None] = Reading(lambda _: read_largest_partitions(session))

    def table(self, keyspace: str, name: str) -> TableSchema:
        """Return a table as it is now.

        :raises SchemaError: as :func:`ringsync.cluster.schema.read_table`
        """
        found = self.known.tables.get((keyspace, name)) if self.known else None
        if found is None or self.known is None or schema_version(one_node(self.session)) != self.known.version:
            return read_table(self.session, keyspace, name)
        return found

    def ring(self, keyspace: str, moment_s: float = float("-inf")) -> RingSnapshot:
        """Return the ring as a node sees it at a moment, or later.

        :param moment_s: of the monotonic clock, s
        :raises RingError: the ring is not supported, changes now, or the keyspace does not exist
        """
        with self._lock:
            reading = self._rings.setdefault(keyspace, Reading(lambda moment_s: self._read_ring(keyspace, moment_s)))
        return reading.since(moment_s)

    def _read_ring(self, keyspace: str, moment_s: float) -> RingSnapshot:
        hosts = self._hosts.since(moment_s)
        return RingSnapshot(hosts, read_replications(self.session, [keyspace])[keyspace])

    def behind(self, moment_s: float) -> frozenset[str]:
        """Wait until all nodes agree on a schema that is at least as new as the one of a moment; return the addresses
        of those that do not in the end.

        :param moment_s: of the monotonic clock, s; minus infinity: any earlier wait does
        """
        return self._behind.since(moment_s)

    def wait_for_agreement(self, moment_s: float) -> None:
        """Wait until all nodes agree on a schema that is at least as new as the one of a moment.

        :param moment_s: of the monotonic clock, s
        :raises ClusterError: they do not
        """
        if behind := self.behind(moment_s):
            raise ClusterError(
                f"the nodes do not agree on the schema ({', '.join(sorted(behind))}): try again once all of them are up"
            )

    def may_have_large_partitions(self, keyspace: str, name: str) -> bool:
        """Tell whether a table has partitions that no single response should have, or may have some. ScyllaDB bounds
        its responses itself."""
        if is_scylla(self.session):
            return False
        largest = self._largest.since(float("-inf"))
        return largest is None or largest.get((keyspace, name), 0) > LARGE_PARTITION_MIB

    @property
    def datacenter(self) -> str:
        """The local datacenter."""
        # The policy asks only nodes of it.
        return str(self.session.execute("SELECT data_center FROM system.local").one().data_center)
