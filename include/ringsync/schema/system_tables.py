"""Cassandra's own tables. Their ids follow from their names, so their records in a commit log can be recognised.

C: schema/TableId.forSystemTable, since 3.0 (there config/CFMetaData.generateLegacyCfId).
"""

from __future__ import annotations

import hashlib
import uuid
from functools import lru_cache

_NAMES = {
    "system": """
        IndexInfo available_ranges available_ranges_v2 batches batchlog built_views compaction_history
        compactions_in_progress hints local paxos paxos_repair_history peer_events peer_events_v2 peers peers_v2
        prepared_statements range_xfers repairs schema_aggregates schema_columnfamilies schema_columns schema_functions
        schema_keyspaces schema_triggers schema_usertypes size_estimates sstable_activity sstable_activity_v2
        table_estimates top_partitions transferred_ranges transferred_ranges_v2 view_builds_in_progress
        views_builds_in_progress
    """,
    "system_auth": """
        cidr_groups cidr_permissions credentials identity_to_role network_permissions permissions
        resource_role_permissons_index role_members role_permissions roles users
    """,
    "system_distributed": """
        auto_repair_history auto_repair_priority parent_repair_history partition_denylist repair_history
        view_build_status
    """,
    "system_schema": """
        aggregates column_masks columns dropped_columns functions indexes keyspaces tables triggers types views
    """,
    "system_traces": "events sessions",
}
"""Tables of Cassandra 3.0 to 5.0, by keyspace."""


@lru_cache(maxsize=1)
def system_tables() -> dict[str, tuple[str, str]]:
    """Return keyspace and name of Cassandra's own tables, 3.0 to 5.0, by id (32 hexadecimal digits).

    The id is Java's ``UUID.nameUUIDFromBytes`` of both names.
    """
    tables = [(keyspace, table) for keyspace, names in _NAMES.items() for table in names.split()]
    digests = [hashlib.md5("".join(table).encode(), usedforsecurity=False).digest() for table in tables]
    return {uuid.UUID(bytes=digest, version=3).hex: table for digest, table in zip(digests, tables, strict=True)}
