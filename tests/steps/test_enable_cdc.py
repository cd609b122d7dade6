"""A table that is in use gets cdc: what its users have prepared before must be captured, too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ringsync.cluster.node import OneNode, one_node
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterError, ClusterSettings, connect
from ringsync.cluster.shared import Shared
from ringsync.steps.bootstrap import enable_cdc as prepare_cdc
from ringsync.steps.bootstrap.enable_cdc import enable_cdc
from ringsync.storage.local import LocalStore
from servers.cassandra import CassandraNode, NodeSettings

pytestmark = pytest.mark.server

GRACE = "SELECT gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = 'shop' AND table_name = 'orders'"


@pytest.mark.parametrize("version", ["4.1", "5.0"])
def test_what_was_prepared_before_is_captured(tmp_path: Path, cache: Path, version: str) -> None:
    settings = NodeSettings(version=version).on_free_ports()  # type: ignore[arg-type]
    with CassandraNode(tmp_path, settings, cache) as node:
        cluster = node.cluster()
        try:
            session = cluster.connect()
            session.execute(
                "CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
            )
            prepared = {}
            for table in ("plain", "orders"):
                session.execute(f"CREATE TABLE shop.{table} (id int PRIMARY KEY)")
                prepared[table] = session.prepare(f"INSERT INTO shop.{table} (id) VALUES (?)")
                session.execute(prepared[table], (1,))
            # What is worked around. Where this fails Cassandra has mended it.
            session.execute("ALTER TABLE shop.plain WITH cdc = true")
            session.execute(prepared["plain"], (2,))
            time.sleep(3)
            assert not indexes(node)

            grace = session.execute(GRACE).one()
            own = connect(ClusterSettings((settings.address,), settings.native_port))
            orders, shared = read_table(own, "shop", "orders"), Shared(own)
            store = LocalStore(tmp_path / "lake")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(prepare_cdc, "one_node", lambda session: DiesAfterOne(one_node(session)))
                with pytest.raises(Killed):
                    enable_cdc(shared, store, orders)
            assert session.execute(GRACE).one() != grace
            assert enable_cdc(shared, store, orders) == "was enabled"
            assert session.execute(GRACE).one() == grace
            session.execute("ALTER TABLE shop.orders WITH cdc = false")
            assert enable_cdc(shared, store, orders) == "enabled now"
            assert enable_cdc(shared, store, orders) == "was enabled"
            assert session.execute(GRACE).one() == grace
            assert not store.list()
            # A run that was killed may have altered the table a moment ago: other nodes may not know of it yet.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(own.cluster.control_connection, "wait_for_schema_agreement", lambda: False)
                with pytest.raises(ClusterError, match="the nodes do not agree on the schema: try again"):
                    enable_cdc(shared, store, orders)
            session.execute(prepared["orders"], (2,))
            deadline = time.monotonic() + 20
            while not indexes(node):
                assert time.monotonic() < deadline, "the write was not captured"
                time.sleep(0.2)
        finally:
            cluster.shutdown()


class Killed(BaseException):
    """The process ends here."""


class DiesAfterOne:
    """A node that is asked once by a process that is killed then."""

    def __init__(self, node: OneNode) -> None:
        self._node, self._asked = node, False

    def execute(self, query: str) -> None:
        if self._asked:
            raise Killed
        self._asked = True
        self._node.execute(query)


def indexes(node: CassandraNode) -> list[Path]:
    """Of segments that have something for us."""
    return list(node.cdc_raw.glob("*_cdc.idx"))
