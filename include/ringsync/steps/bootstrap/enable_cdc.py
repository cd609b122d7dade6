"""Cdc is enabled on a table before it is copied, so that its changes are captured from then on (docs/sync.md)."""

from __future__ import annotations

import time
from typing import Any

from cassandra import InvalidRequest, Unauthorized
from cassandra.protocol import ConfigurationException

from ringsync.cluster.node import one_node
from ringsync.cluster.shared import Shared
from ringsync.schema.table import TableSchema
from ringsync.steps.application import StepError


def enable_cdc(shared: Shared, table: TableSchema) -> str:
    """Enable cdc on a table, also for statements that were prepared before; then wait until all nodes know of it. This
    wait is also for a table that has cdc already: a run that was killed may have altered it a moment ago.

    A prepared statement keeps the old table options, so its writes would not be captured. Only a change of
    ``gc_grace_seconds`` or ``default_time_to_live`` makes Cassandra prepare statements anew
    (TableMetadata.changeAffectsPreparedStatements, 4.0 to 5.0). So the former is one second longer for a moment.

    :raises StepError: the nodes do not allow it, or do not agree on the schema
    """
    query = "SELECT cdc, gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s"
    options = shared.session.execute(query, (table.keyspace, table.name)).one()
    if options.cdc:
        shared.wait_for_agreement(time.monotonic())
        return "was enabled"
    with shared.schema_changes:
        _alter(shared.session, table, options)
        shared.wait_for_agreement(time.monotonic())
    return "enabled now"


def _alter(session: Any, table: TableSchema, options: Any) -> None:
    grace = int(options.gc_grace_seconds)
    other = grace + 1 if grace < 2**31 - 1 else grace - 1
    # Both on one node: another may not know of cdc yet, and each ALTER writes all options of the table again.
    node = one_node(session)
    try:
        node.execute(f"ALTER TABLE {table.full_name} WITH cdc = true AND gc_grace_seconds = {other}")
        node.execute(f"ALTER TABLE {table.full_name} WITH gc_grace_seconds = {grace}")
    except (InvalidRequest, ConfigurationException, Unauthorized) as error:
        raise StepError(
            f"cdc cannot be enabled on {table.full_name}: {error}. Every node needs cdc_enabled: true in "
            "cassandra.yaml, and this user the right to ALTER the table (docs/sync.md)"
        ) from error
