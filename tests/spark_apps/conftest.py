"""One Cassandra for the tests of this folder that checks passwords, rights and guardrails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringsync.state.session import StateSession
from servers.cassandra import CassandraNode, NodeSettings

MORE = (
    ("dynamic_data_masking_enabled", True),
    ("permissions_validity", "500ms"),
    ("roles_validity", "500ms"),
    ("page_size_fail_threshold", 5000),
    ("partition_keys_in_select_fail_threshold", 5),
    ("in_select_cartesian_product_fail_threshold", 7),
)
"""The node may mask columns, remembers rights for a short time, and has guardrails."""


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[CassandraNode]:
    """A node with roles: ``reader`` may do what ringsync needs and no more, ``stateless`` may read shop.orders but not
    ringsync's own keyspace, ``nobody`` may log in and nothing else."""
    settings = NodeSettings(authenticator="password", heap_mb=256, more=MORE).on_free_ports()
    with CassandraNode(tmp_path_factory.mktemp("guarded"), settings, cache) as node:
        cluster = node.cluster()
        session = cluster.connect()
        session.execute("CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
        session.execute("CREATE TABLE shop.orders (id int PRIMARY KEY, v text)")
        StateSession(session, "cdc").create({"class": "NetworkTopologyStrategy", "datacenter1": "1"})
        for role in ("reader", "nobody", "stateless"):
            session.execute(f"CREATE ROLE {role} WITH PASSWORD = 'sesame-{role}' AND LOGIN = true")
        for role in ("reader", "stateless"):
            session.execute(f"GRANT SELECT ON shop.orders TO {role}")
        for permission in ("SELECT", "MODIFY"):
            session.execute(f"GRANT {permission} ON KEYSPACE cdc TO reader")
        cluster.shutdown()
        yield node
