"""A reading of all users' keyspaces that is whole: from one node, with no change in between.

Each node has its own ``system_schema``, and for a moment after a change nodes have different ones. A reading takes
several queries. So one node is asked, before and after, for its schema version, a digest of all that it knows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from ringsync.cluster.schema import SYSTEM_KEYSPACES, read_tables
from ringsync.cql.types import CqlTypeError, UserType
from ringsync.schema.description import resolve_user_types
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.schema.whole import Keyspace, TableName, WholeSchema

ATTEMPTS = 3
"""Readings of a schema that changes meanwhile; then the next poll tries again."""


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
    """

    down: frozenset[str]

    def execute(self, query: str, parameters: Any = None) -> Any:
        """Execute a query on the node."""


class OneNode:
    """Asks one node only.

    :param session: a ``cassandra.cluster.Session`` with the driver's default row factory
    :param host: the driver's host; None: as the session chooses
    """

    def __init__(self, session: Any, host: Any, down: frozenset[str] = frozenset()) -> None:
        self._session, self._host, self.down = session, host, down

    def execute(self, query: str, parameters: Any = None) -> Any:
        """Execute a query on the node."""
        return self._session.execute(query, parameters, host=self._host)


def one_node(session: Any) -> OneNode:
    """Choose a node to which the session is connected."""
    hosts = list(session.get_pool_state())
    down = (host for host in session.cluster.metadata.all_hosts() if host.is_up is False)
    addresses = frozenset(str(address) for host in down for address in (host.address, host.broadcast_address))
    return OneNode(session, next((host for host in hosts if host.is_up), hosts[0] if hosts else None), addresses)


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
