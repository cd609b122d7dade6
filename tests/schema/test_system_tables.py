"""Cassandra's own tables, and the ids that a server gives them."""

from __future__ import annotations

from typing import Any

import pytest

from ringsync.cluster.schema import SYSTEM_KEYSPACES
from ringsync.schema.system_tables import system_tables


@pytest.mark.server
def test_every_table_of_its_own_that_a_server_has_is_known_by_id(session: Any) -> None:
    rows = session.execute("SELECT keyspace_name, table_name, id FROM system_schema.tables")
    own = {row.id.hex: (row.keyspace_name, row.table_name) for row in rows if row.keyspace_name in SYSTEM_KEYSPACES}
    assert len(own) > 40
    assert {table_id: system_tables().get(table_id) for table_id in own} == own
