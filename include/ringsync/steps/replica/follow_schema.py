"""A replica's state, after it has followed its table's schema as far as that needs no rewriting."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ringsync.ledger.table_versions import versions_of
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

if TYPE_CHECKING:
    from ringsync.replica.changes import ReplicaState
    from ringsync.replica.delta_log import KnownSnapshots


def followed_state(
    store: ObjectStore,
    table: TableSchema,
    options: Mapping[str, str],
    known: KnownSnapshots | None = None,
) -> ReplicaState | None:
    """Read the state of a replica; if the table's schema has changed, the replica follows it first.

    :param table: as its history has it (:func:`ringsync.ledger.table_versions.version_of`)
    :param known: cache, as for :func:`ringsync.replica.changes.replica_state`
    :returns: None: the table has no replica
    :raises ReplicaMismatchError: the replica belongs to another table id, or has a schema that nobody knows
    :raises ReplicaWaitsError: the replica waits for a rewriting, or has a later version
    """
    from ringsync.replica import changes
    from ringsync.replica.errors import SchemaChangedError
    from ringsync.replica.evolve import follow_schema

    more = {} if known is None else {"known": known}
    try:
        return changes.replica_state(store, table, options, **more)
    except SchemaChangedError:
        if table.is_selection:
            raise
        follow_schema(store, table, partial(versions_of, store, table), int(time.time() * 1000))
        return changes.replica_state(store, table, options, **more)
