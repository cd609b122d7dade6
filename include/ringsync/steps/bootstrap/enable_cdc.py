"""Cdc is enabled on a table before it is copied, so that its changes are captured from then on (docs/sync.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from cassandra import InvalidRequest, Unauthorized
from cassandra.protocol import ConfigurationException

from ringsync.cluster.node import one_node
from ringsync.cluster.shared import Shared
from ringsync.schema.table import TableSchema
from ringsync.steps.application import StepError
from ringsync.storage.port import ObjectStore, get_json


def enable_cdc(shared: Shared, store: ObjectStore, table: TableSchema) -> str:
    """Enable cdc on a table, also for statements that were prepared before; then wait until all nodes know of it. This
    wait is also for a table that has cdc already: a run that was killed may have altered it a moment ago.

    A prepared statement keeps the old table options, so its writes would not be captured. Only a change of
    ``gc_grace_seconds`` or ``default_time_to_live`` makes Cassandra prepare statements anew
    (TableMetadata.changeAffectsPreparedStatements, 4.0 to 5.0). So the former is one second longer for a moment.
    ``cdc_enabling/<table id>.json`` says what it was: after a kill in this moment the next run restores it.

    :raises StepError: the nodes do not allow it
    :raises ClusterError: they do not agree on the schema
    """
    query = "SELECT cdc, gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s"
    options, key = shared.session.execute(query, (table.keyspace, table.name)).one(), _key(table)
    begun = get_json(store, key)
    if options.cdc and begun is None:
        shared.wait_for_agreement(time.monotonic())
        return "was enabled"
    grace = int(options.gc_grace_seconds)
    other = grace + 1 if grace < 2**31 - 1 else grace - 1
    with shared.schema_changes:
        if not options.cdc:
            store.put(key, json.dumps({"gc_grace_seconds": grace, "for_a_moment": other}).encode())
            alterations = [f"cdc = true AND gc_grace_seconds = {other}", f"gc_grace_seconds = {grace}"]
        else:
            was_killed = begun is not None and begun["for_a_moment"] == grace
            alterations = [f"gc_grace_seconds = {begun['gc_grace_seconds']}"] if begun and was_killed else []
        _alter(shared.session, table, alterations)
        shared.wait_for_agreement(time.monotonic())
    store.delete(key)
    return "was enabled" if options.cdc else "enabled now"


def _key(table: TableSchema) -> str:
    return f"cdc_enabling/{table.table_id}.json"


def _alter(session: Any, table: TableSchema, alterations: Sequence[str]) -> None:
    # All on one node: another may not know of cdc yet, and each ALTER writes all options of the table again.
    node = one_node(session)
    try:
        for alteration in alterations:
            node.execute(f"ALTER TABLE {table.full_name} WITH {alteration}")
    except (InvalidRequest, ConfigurationException, Unauthorized) as error:
        raise StepError(
            f"cdc cannot be enabled on {table.full_name}: {error}. Every node needs cdc_enabled: true in "
            "cassandra.yaml, and this user the right to ALTER the table (docs/sync.md)"
        ) from error
