"""A replica's state, after it has followed its table's schema as far as that needs no rewriting."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ringsync.ledger.table_versions import history_of, version_of
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

if TYPE_CHECKING:
    from ringsync.replica.changes import ReplicaState
    from ringsync.replica.delta_log import KnownSnapshots


def versions_of(store: ObjectStore, table: TableSchema) -> list[TableSchema]:
    """Read all versions of a table, in their order.

    :raises TableVersionError: a version is damaged
    """
    entries = history_of(store, table.keyspace, table.name)
    return [entry.version.table for entry in entries if entry.version.table_id == table.table_id]


def followed_state(
    store: ObjectStore,
    table: TableSchema,
    options: Mapping[str, str],
    known: KnownSnapshots | None = None,
    *,
    is_new: bool = False,
) -> ReplicaState | None:
    """Read the state of a replica; if the table's schema has changed, the replica follows it first.

    :param known: cache, as for :func:`ringsync.replica.changes.replica_state`
    :param is_new: whether the caller has just read the schema: then the history may lack it, and gets it
    :returns: None: the table has no replica
    :raises ReplicaMismatchError: the replica belongs to another table id, or has a schema that nobody knows
    :raises ReplicaWaitsError: the replica waits for a rewriting, or has a later version
    """
    from ringsync.replica import changes
    from ringsync.replica.base import SchemaChangedError
    from ringsync.replica.evolve import follow_schema

    more = {} if known is None else {"known": known}
    try:
        return changes.replica_state(store, table, options, **more)
    except SchemaChangedError:
        if table.is_selection:
            raise
        if is_new:
            version_of(store, table)
        follow_schema(store, table, partial(versions_of, store, table), int(time.time() * 1000))
        return changes.replica_state(store, table, options, **more)
