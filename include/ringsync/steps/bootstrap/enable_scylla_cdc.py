"""Cdc is enabled on tables of ScyllaDB before they are copied.

ScyllaDB forgets what was prepared on a table when it is altered, so one ALTER is enough. A table that has cdc keeps its
options: others may read its log as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cassandra import InvalidRequest, Unauthorized
from cassandra.protocol import ConfigurationException, SyntaxException

from ringsync.cluster.node import NO_ANSWER, Node, one_node
from ringsync.cluster.scylla import CdcOptions, options_in
from ringsync.cluster.shared import Shared
from ringsync.config.sections import Scylla
from ringsync.schema.table import TableSchema
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap.enable_cdc import gone_error

OPTIONS = "SELECT extensions FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s"


def enable_scylla_cdc(shared: Shared, wanted: Scylla, tables: Sequence[TableSchema]) -> list[str | Exception]:
    """Enable cdc on tables, then wait until all nodes know of it, and read it back. A run that was killed may have
    altered a table a moment ago, so this wait is also for one that has cdc already.

    One thread of a run does this at a time (:class:`ringsync.cluster.shared.Together`).

    :param wanted: options of tables that have no cdc yet
    :returns: for each table what was done, with a warning where its options differ from the wanted; or why that
        failed: a ``StepError`` if the cluster refuses it, or the log does not have what changed; else the driver's
        error
    :raises ClusterError: the nodes do not agree on the schema
    :raises CdcOptionsError: a table has options that this version does not know
    """
    options = CdcOptions(True, wanted.preimage, wanted.postimage, "full", wanted.log_ttl_s)
    shared.wait_for_agreement(time.monotonic())
    node = one_node(shared.session)
    done = [_enable_one(node, table, options) for table in tables]
    if "enabled now" not in done:
        return done
    shared.wait_for_agreement(time.monotonic())
    other = one_node(shared.session)
    return [
        _confirmed(other, table, options) if one == "enabled now" else one
        for table, one in zip(tables, done, strict=True)
    ]


def alter(table: TableSchema, options: CdcOptions) -> str:
    """Write the ALTER TABLE that gives a table cdc. What it does not name becomes the server's default."""
    return (
        f"ALTER TABLE {table.full_name} WITH cdc = {{'enabled': true, 'preimage': '{options.preimage}', "
        f"'postimage': {str(options.postimage).lower()}, 'delta': '{options.delta}', 'ttl': {options.ttl_s}}}"
    )


def differences(found: CdcOptions, wanted: CdcOptions) -> list[str]:
    """Say in which options a table differs from the configuration."""
    pairs = {
        "preimage": (found.preimage, wanted.preimage),
        "postimage": (str(found.postimage).lower(), str(wanted.postimage).lower()),
        "ttl": (found.ttl_s, wanted.ttl_s),
    }
    return [f"{name} is {own}, not {other}" for name, (own, other) in pairs.items() if own != other]


def _enable_one(node: Node, table: TableSchema, wanted: CdcOptions) -> str | Exception:
    try:
        row = _row(node, table)
        if row is None:
            return gone_error(table)
        found = options_in(row)
        if found is not None and found.enabled:
            return _as_it_is(table, found, wanted)
        node.execute(alter(table, wanted))
    except (InvalidRequest, ConfigurationException, SyntaxException, Unauthorized) as error:
        return StepError(
            f"cdc cannot be enabled on {table.full_name}: {error}. This user needs the right to ALTER the table; "
            "counters have no cdc"
        )
    except NO_ANSWER as error:
        failure: Exception = error
        return failure
    return "enabled now"


def _as_it_is(table: TableSchema, found: CdcOptions, wanted: CdcOptions) -> str | Exception:
    """Judge the cdc that a table has."""
    if found.delta != "full":
        return StepError(
            f"{table.full_name} has cdc with delta = keys: its log does not say what was written. Alter it to "
            "'delta': 'full', or name the table in sync.exclude of the configuration"
        )
    differing = differences(found, wanted)
    if not differing:
        return "was enabled"
    return (
        f"was enabled, and keeps its options; warning: they are not those of the configuration: {'; '.join(differing)}"
    )


def _confirmed(node: Node, table: TableSchema, wanted: CdcOptions) -> str | Exception:
    """Read back what was altered."""
    try:
        row = _row(node, table)
    except NO_ANSWER as error:
        failure: Exception = error
        return failure
    if row is None:
        return gone_error(table)
    if (found := options_in(row)) != wanted:
        return StepError(
            f"a node does not know of the cdc of {table.full_name}, which was enabled just now: it has "
            f"{found or 'none'}. Run again once all nodes are up"
        )
    return "enabled now"


def _row(node: Node, table: TableSchema) -> Any:
    return node.execute(OPTIONS, (table.keyspace, table.name)).one()
