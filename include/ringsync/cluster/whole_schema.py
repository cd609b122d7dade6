"""A reading of all users' keyspaces that is whole: from one node, with no change in between.

Each node has its own ``system_schema``, and for a moment after a change nodes have different ones. A reading takes
several queries. So one node is asked, before and after, for its schema version, a digest of all that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cassandra import DriverException
from cassandra.cluster import NoHostAvailable

from ringsync.cluster.schema import SYSTEM_KEYSPACES, read_tables
from ringsync.cql.types import CqlTypeError, UserType
from ringsync.schema.description import resolve_user_types
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.schema.whole import Keyspace, TableName, WholeSchema

ATTEMPTS = 3
"""Readings of a schema that changes meanwhile; then the next poll tries again."""

SILENT_S = 60.0
"""Time without a heartbeat in Cassandra's gossip after which a node is not waited for. Cassandra itself takes some
20 s."""

UNKNOWN_S = 300.0
"""The same where nobody says whether a node is alive: Cassandra 4.0 shows no gossip."""


@dataclass(frozen=True)
class NodeSchema:
    """What one node says about the schema versions of all nodes.

    :ivar version: its own version
    :ivar node: its address
    :ivar others: versions of the other nodes that it knows as members, by address, where they differ
    """

    version: str
    node: str
    others: dict[str, str]

    @property
    def agrees(self) -> bool:
        """Whether all nodes have the same schema."""
        return not self.others


@dataclass(frozen=True)
class Reading:
    """The schema of a node.

    :ivar views: materialised views, as the tables that they are stored in
    :ivar unreadable: tables, and views, that cannot be read
    :ivar unreadable_types: keyspaces whose types cannot be read, with the reason
    """

    at: NodeSchema
    schema: WholeSchema
    views: tuple[TableSchema, ...]
    unreadable: tuple[UnreadableTable, ...]
    unreadable_types: dict[str, str]


class Node(Protocol):
    """A node that is asked.

    :ivar down: addresses of nodes that are down: nobody waits for their agreement
    :ivar up: addresses of nodes to which the driver is connected. Of all others it only knows what it is told
    """

    down: frozenset[str]
    up: frozenset[str]

    def execute(self, query: str, parameters: Any = None) -> Any:
        """Execute a query on the node."""


class OneNode:
    """Asks one node only.

    :param session: a ``cassandra.cluster.Session`` with the driver's default row factory
    :param host: the driver's host; None: as the session chooses
    """

    def __init__(
        self, session: Any, host: Any, down: frozenset[str] = frozenset(), up: frozenset[str] = frozenset()
    ) -> None:
        self._session, self._host, self.down, self.up = session, host, down, up

    def execute(self, query: str, parameters: Any = None) -> Any:
        """Execute a query on the node."""
        return self._session.execute(query, parameters, host=self._host)


def one_node(session: Any) -> OneNode:
    """Choose a node to which the session is connected."""
    hosts = list(session.get_pool_state())
    up = [host for host in hosts if host.is_up]
    down = (host for host in session.cluster.metadata.all_hosts() if host.is_up is False)
    return OneNode(session, next(iter(up or hosts), None), _addresses(down), _addresses(up))


def _addresses(hosts: Iterable[Any]) -> frozenset[str]:
    return frozenset(str(address) for host in hosts for address in (host.address, host.broadcast_address))


def node_schema(node: Node) -> NodeSchema:
    """Ask a node for the schema versions that it knows."""
    own = node.execute("SELECT schema_version, broadcast_address FROM system.local").one()
    peers = node.execute("SELECT peer, schema_version FROM system.peers")
    others = {
        str(row.peer): str(row.schema_version)
        for row in peers
        if row.schema_version not in (None, own.schema_version) and str(row.peer) not in node.down
    }
    return NodeSchema(str(own.schema_version), str(own.broadcast_address), others)


class Silence:
    """Knows which nodes are silent. The driver does not try the nodes of other datacenters, so it never knows that such
    a node is down if it was when the driver connected. Cassandra knows: gossip brings the heartbeats of all nodes.

    :param now: the time, s
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._heard: dict[str, tuple[tuple[int, int], float]] = {}

    def ignored(self, node: Node, at: NodeSchema) -> NodeSchema:
        """Return what a node says without the silent ones among the others. To be asked at each look."""
        unsure = at.others.keys() - node.up if at.others else set()
        now = self._now()
        beats = _heartbeats(node) if unsure else {}
        patience, heard = SILENT_S if beats else UNKNOWN_S, {}
        for address in unsure:
            beat = beats.get(address, (0, 0))
            last = self._heard.get(address)
            heard[address] = last if last and beat <= last[0] else (beat, now)
        self._heard = heard
        silent = {address for address, (_, since) in heard.items() if now - since > patience}
        return replace(at, others={address: at.others[address] for address in at.others.keys() - silent})


def _heartbeats(node: Node) -> dict[str, tuple[int, int]]:
    """Ask a node for the last heartbeat that it got from each node; empty: it does not say."""
    try:
        rows = node.execute("SELECT address, generation, heartbeat FROM system_views.gossip_info")
        return {str(row.address): (row.generation or 0, row.heartbeat or 0) for row in rows}
    except (NoHostAvailable, DriverException):
        return {}


def read_whole_schema(node: Node, own_keyspaces: Collection[str] = ()) -> Reading | None:
    """Read all users' keyspaces; None: they change all the time.

    :param node: a node (:class:`OneNode`)
    :param own_keyspaces: further keyspaces that are not users'
    """
    for _ in range(ATTEMPTS):
        before = node_schema(node)
        reading = _read(node, before, SYSTEM_KEYSPACES | {*own_keyspaces})
        if node_schema(node).version == before.version:
            return reading
    return None


def _read(node: Node, at: NodeSchema, hidden: Collection[str]) -> Reading:
    everything = read_tables(node)
    views = {(row.keyspace_name, row.view_name) for row in _rows(node, "keyspace_name, view_name", "views")}
    keyspaces = {
        row.keyspace_name: Keyspace(row.keyspace_name, tuple(sorted(row.replication.items())), row.durable_writes)
        for row in _rows(node, "keyspace_name, replication, durable_writes", "keyspaces")
        if row.keyspace_name not in hidden
    }
    fields: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for row in _rows(node, "keyspace_name, type_name, field_names, field_types", "types"):
        if row.keyspace_name in keyspaces:
            pairs = list(zip(row.field_names or (), row.field_types or (), strict=True))
            fields.setdefault(row.keyspace_name, {})[row.type_name] = pairs
    types: dict[str, dict[str, UserType]] = {}
    unreadable_types = {}
    for keyspace, kinds in fields.items():
        try:
            types[keyspace] = resolve_user_types(keyspace, kinds)
        except CqlTypeError as error:
            unreadable_types[keyspace] = str(error)
    own = {(table.keyspace, table.name): table for table in everything.tables if table.keyspace in keyspaces}
    tables: dict[TableName, TableSchema] = {name: table for name, table in own.items() if name not in views}
    unreadable = tuple(table for table in everything.unreadable if table.keyspace in keyspaces)
    return Reading(
        at,
        WholeSchema(keyspaces, types, tables),
        tuple(table for name, table in own.items() if name in views),
        unreadable,
        unreadable_types,
    )


def _rows(node: Node, columns: str, table: str) -> Any:
    return node.execute(f"SELECT {columns} FROM system_schema.{table}")
