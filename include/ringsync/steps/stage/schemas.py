"""The schemas by which the nodes of a queue log.

What a node logs follows the schema that this node has, and another may be ahead or behind. So each node is asked itself
after its index was read: what is in its log, it knows or has known. A node that cannot be asked is answered for by
another, which may not know it yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ringsync.cluster.node import NO_ANSWER, ChangingSchemaError, Node, ask_one, node_of, schema_version
from ringsync.cluster.schema import NodeTables, read_node_tables, read_tables
from ringsync.schema.table import TableSchema, UnreadableTable


@dataclass(frozen=True)
class Told:
    """The schema of a node.

    :ivar version: its schema version, a digest of all that it knows
    :ivar is_own: whether the node itself has told it
    """

    version: str
    tables: NodeTables
    readable: tuple[TableSchema, ...]
    unreadable: tuple[UnreadableTable, ...]
    is_own: bool


class QueueSchemas:
    """The schemas of a queue's nodes, as of the last look. An unchanged schema is not read again.

    :ivar of_node: schemas by host id
    :ivar logged: tables by id, of all nodes, each as its newest ALTER has made it
    :ivar unreadable: tables by id that no node shows in a form that this version can read
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._read_before: dict[str, Told] = {}
        self.of_node: dict[str, Told] = {}
        self.logged: dict[str, TableSchema] = {}
        self.unreadable: dict[str, UnreadableTable] = {}

    def look(self, nodes: Iterable[str]) -> None:
        """Ask these nodes. To be called after their indexes were read."""
        told = {node: self._ask(node) for node in nodes}
        if told == {node: self.of_node.get(node) for node in told}:
            return
        self.of_node |= told
        by_id: dict[str, TableSchema] = {}
        for table in (table for one in self.of_node.values() for table in one.readable):
            known = by_id.get(table.table_id)
            if known is None or known.since_us < table.since_us:
                by_id[table.table_id] = table
        self.logged = by_id
        self.unreadable = {
            table.table_id: table
            for one in self.of_node.values()
            for table in one.unreadable
            if table.table_id not in by_id
        }
        self._read_before = {one.version: one for one in self.of_node.values()}

    def ids(self, nodes: Collection[str]) -> frozenset[str]:
        """Return the ids of all tables that these nodes have."""
        return frozenset().union(*(self.of_node[node].tables.ids for node in nodes))

    def _ask(self, node: str) -> Told:
        own = node_of(self._session, node)
        if own is not None:
            try:
                return self._told(own, is_own=True)
            except NO_ANSWER:
                pass
            except ChangingSchemaError:  # its last answer holds, and is not taken for the last word
                if node in self.of_node:
                    return replace(self.of_node[node], is_own=False)
        return ask_one(self._session, partial(self._told, is_own=False))

    def _told(self, asked: Node, *, is_own: bool) -> Told:
        version = schema_version(asked)
        if version not in self._read_before:
            schema, tables = ask_one(asked, lambda node: (read_tables(node), read_node_tables(node)))
            told = Told(version, tables, tuple(schema.by_id().values()), schema.unreadable, is_own)
            self._read_before[version] = told
        return replace(self._read_before[version], is_own=is_own)
