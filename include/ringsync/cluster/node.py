"""Questions to one node. Each node has its own ``system_schema``, and for a moment after a change nodes differ.

A session asks another node with each query, so what several queries tell together may never have been true anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from cassandra import DriverException, RequestExecutionException
from cassandra.cluster import NoHostAvailable, Session
from cassandra.protocol import ErrorMessage

Told = TypeVar("Told")

ATTEMPTS = 5
"""Readings of a schema that changes meanwhile."""

NO_ANSWER = (NoHostAvailable, DriverException, RequestExecutionException, ErrorMessage)
"""Errors of a request that was not answered, or to which a node answered that it cannot serve it."""


class ChangingSchemaError(Exception):
    """An error: the schema changed during each of several readings. Try again later."""


class Node:
    """A node that is asked, and no other.

    :ivar session: a ``cassandra.cluster.Session`` with the driver's default row factory
    :param host: the driver's host; None: as the session chooses
    :ivar down: addresses of nodes that are down: nobody waits for their agreement
    :ivar up: addresses of nodes to which the driver is connected. Of all others it only knows what it is told
    """

    def __init__(
        self, session: Any, host: Any, down: frozenset[str] = frozenset(), up: frozenset[str] = frozenset()
    ) -> None:
        self.session, self._host, self.down, self.up = session, host, down, up

    def execute(self, query: str, parameters: Any = None) -> Any:
        """Execute a query on the node."""
        return self.session.execute(query, parameters, host=self._host)


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


def one_node(session: Any) -> Node:
    """Choose a node to which the session is connected."""
    return next(connected_nodes(session))


def connected_nodes(session: Any) -> Iterator[Node]:
    """Yield the nodes to which the session is connected, each first in turn; at least one, as the session chooses."""
    hosts = list(session.get_pool_state())
    up = [host for host in hosts if host.is_up]
    down = _addresses(host for host in session.cluster.metadata.all_hosts() if host.is_up is False)
    addresses = _addresses(up)
    for host in random.sample(up or hosts, len(up or hosts)) or [None]:
        yield Node(session, host, down, addresses)


def node_of(session: Any, host_id: str) -> Node | None:
    """Return a node by its host id; None: the driver does not know it. Whether it answers shows when it is asked."""
    hosts = (host for host in session.cluster.metadata.all_hosts() if str(host.host_id) == host_id)
    host = next(hosts, None)
    return Node(session, host) if host is not None else None


def ask_one(asked: Any, read: Callable[[Any], Told]) -> Told:
    """Read something of the schema of one node, with no change in between.

    :param asked: a session, of whose nodes the first is taken that answers; or a node (:class:`Node`)
    :param read: reads from a node
    :raises ChangingSchemaError: the schema changes all the time
    :raises NoHostAvailable: no node answers
    """
    if not isinstance(asked, Session):
        return _steady(asked, read)
    *others, last = connected_nodes(asked)
    for node in others:
        try:
            return _steady(node, read)
        except NO_ANSWER:
            continue
    return _steady(last, read)


def _steady(node: Any, read: Callable[[Any], Told]) -> Told:
    for _ in range(ATTEMPTS):
        before = schema_version(node)
        told = read(node)
        if schema_version(node) == before:
            return told
    raise ChangingSchemaError(f"the schema changed during each of {ATTEMPTS} readings: it is read again later")


def schema_version(node: Any) -> str:
    """Ask a node for its schema version, a digest of all that it knows."""
    return str(node.execute("SELECT schema_version FROM system.local").one().schema_version)


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


def _addresses(hosts: Iterable[Any]) -> frozenset[str]:
    return frozenset(str(address) for host in hosts for address in (host.address, host.broadcast_address))
