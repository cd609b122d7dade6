"""Guardrails: what a cluster forbids to all users but superusers, by settings of each node (Cassandra 4.1 and later).

The node that is asked refuses, and would refuse again: nobody repeats such a request. An administrator may change a
guardrail at any time, through JMX or by a restart; it need not be the same on all nodes. So none is read beforehand:
ringsync goes by refusals. ``C: db/guardrails/Guardrails``.
"""

from __future__ import annotations

import re

OF_LISTS = ("partition_keys_in_select", "in_select_cartesian_product")
"""Guardrails on the number of keys in a request: fewer at once are permitted."""

LEVELS = "read_consistency_levels"
"""The guardrail on the consistency levels of reads."""

_REMEDIES = {
    "page_size": (
        "page_size_fail_threshold",
        "set cassandra.page_size of ringsync to at most this threshold, or raise it",
    ),
    LEVELS: (
        "read_consistency_levels_disallowed",
        "allow the level; that of scans and verification is cassandra.consistency_level of ringsync "
        "(docs/sync.md#rights-and-guardrails says what needs which)",
    ),
    "write_consistency_levels": (
        "write_consistency_levels_disallowed",
        "allow QUORUM and SERIAL, at which ringsync writes to its own keyspace, and nowhere else",
    ),
    "table_properties": (
        "table_properties_disallowed, table_properties_ignored",
        "allow cdc and gc_grace_seconds, or let an administrator enable cdc",
    ),
    "zero_ttl_on_twcs": (
        "zero_ttl_on_twcs_enabled",
        "let a superuser enable cdc on this table",
    ),
    "allow_filtering": ("allow_filtering_enabled", "choose another condition, or none"),
    "partition_keys_in_select": ("partition_keys_in_select_fail_threshold", "raise it to 1 or more"),
    "in_select_cartesian_product": ("in_select_cartesian_product_fail_threshold", "raise it to 1 or more"),
    **{
        name: (setting, "raise it, or let a superuser create ringsync's own keyspace (docs/state.md)")
        for name, setting in (
            ("keyspaces", "keyspaces_fail_threshold"),
            ("tables", "tables_fail_threshold"),
            ("columns_per_table", "columns_per_table_fail_threshold"),
            ("minimum_replication_factor", "minimum_replication_factor_fail_threshold; or set state.replication"),
            ("maximum_replication_factor", "maximum_replication_factor_fail_threshold; or set state.replication"),
        )
    },
}
"""By the guardrail's name: its settings in cassandra.yaml, and what to do."""


def guardrail_of(text: str) -> str | None:
    """Return the name of the guardrail that a node's error or warning tells of; None: it tells of none."""
    match = re.search(r"Guardrail (\w+) violated", text)
    return match[1] if match else None


def explained(error: Exception | str) -> str:
    """Return what a node says, an error or a warning, and the setting and the remedy if a guardrail makes it say so."""
    match = re.search(r'message="(.*)"$', str(error), re.DOTALL)
    text = match[1] if match else str(error)
    setting, remedy = _REMEDIES.get(guardrail_of(text) or "", ("", ""))
    return f"{text.rstrip('.')} ({setting} in cassandra.yaml): {remedy}" if setting else text
