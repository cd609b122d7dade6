"""A reading of all users' keyspaces that is whole: from one node, with no change in between.

A reading takes several queries. So one node is asked, before and after, for its schema version, a digest of all that it
knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ringsync.cluster.gossip import SILENT_S, Heard, hear, heartbeats
from ringsync.cluster.node import NO_ANSWER, ChangingSchemaError, Node, NodeSchema, ask_one, node_schema, one_node
from ringsync.cluster.schema import SYSTEM_KEYSPACES, tables_of
from ringsync.cluster.scylla import is_scylla, read_cdc_options
from ringsync.cql.types import CqlTypeError, UserType
from ringsync.schema.description import resolve_user_types
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.schema.whole import Keyspace, TableName, WholeSchema
from ringsync.scylla.log_schema import LOG_SUFFIX

UNKNOWN_S = 300.0
"""Time after which a node is not waited for where nobody says whether it is alive: Cassandra 4.0 shows no gossip."""


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


class Silence:
    """Knows which nodes are silent (:mod:`ringsync.cluster.gossip`).

    :param now: the time, s
    :param since_s: since when nothing was heard of nodes, by address, as another process knows
    """

    def __init__(self, now: Callable[[], float], since_s: Mapping[str, float] = MappingProxyType({})) -> None:
        self._now = now
        self._heard = {address: Heard(0, 0, at_s) for address, at_s in since_s.items()}

    @property
    def since_s(self) -> dict[str, float]:
        """Since when nothing was heard of nodes that nobody calls alive, by address."""
        return {address: heard.since for address, heard in self._heard.items()}

    def ignored(self, node: Node, at: NodeSchema) -> NodeSchema:
        """Return what a node says without the silent ones among the others. To be asked at each look."""
        unsure = at.others.keys() - node.up if at.others else set()
        now = self._now()
        beats = heartbeats((node,), now) if unsure else {}
        self._heard = hear(beats, unsure, self._heard, now)
        patience = SILENT_S if beats else UNKNOWN_S
        silent = {address for address, heard in self._heard.items() if now - heard.since > patience}
        return replace(at, others={address: at.others[address] for address in at.others.keys() - silent})


class Agreement:
    """Tells whether all nodes have the same schema, but for those that are down or silent.

    :param session: a ``cassandra.cluster.Session``
    :param now: the time, s
    :param silent_since_s: what this said at the end of a run that ended a moment ago
    """

    def __init__(
        self, session: Any, now: Callable[[], float], silent_since_s: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self._session = session
        self._silence = Silence(now, silent_since_s)

    @property
    def silent_since_s(self) -> dict[str, float]:
        """Since when nothing was heard of nodes that nobody calls alive, by address."""
        return self._silence.since_s

    def __call__(self) -> bool:
        """Ask a node; False also if it does not answer."""
        try:
            node = one_node(self._session)
            return self._silence.ignored(node, node_schema(node)).agrees
        except NO_ANSWER:
            return False


def read_whole_schema(node: Node, own_keyspaces: Collection[str] = ()) -> Reading | None:
    """Read all users' keyspaces; None: they change all the time.

    :param node: a node (:class:`ringsync.cluster.node.Node`)
    :param own_keyspaces: further keyspaces that are not users'
    """
    hidden = SYSTEM_KEYSPACES | {*own_keyspaces}
    try:
        return ask_one(node, lambda node: _read(node, node_schema(node), hidden))
    except ChangingSchemaError:
        return None


def _read(node: Node, at: NodeSchema, hidden: Collection[str]) -> Reading:
    everything = tables_of(node)
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
    logs = _logs(node, everything.tables)
    own = {
        (table.keyspace, table.name): table
        for table in everything.tables
        if table.keyspace in keyspaces and (table.keyspace, table.name) not in logs
    }
    tables: dict[TableName, TableSchema] = {name: table for name, table in own.items() if name not in views}
    unreadable = tuple(table for table in everything.unreadable if table.keyspace in keyspaces)
    return Reading(
        at,
        WholeSchema(keyspaces, types, tables),
        tuple(table for name, table in own.items() if name in views),
        unreadable,
        unreadable_types,
    )


def _logs(node: Node, tables: Collection[TableSchema]) -> set[TableName]:
    """Return the names of ScyllaDB's CDC logs, which are part of their base tables; of Cassandra nothing."""
    if not is_scylla(node):
        return set()
    logged = read_cdc_options(node).keys()
    return {(table.keyspace, table.name + LOG_SUFFIX) for table in tables if table.table_id in logged}


def _rows(node: Node, columns: str, table: str) -> Any:
    return node.execute(f"SELECT {columns} FROM system_schema.{table}")
