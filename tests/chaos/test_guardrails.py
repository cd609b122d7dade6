"""Guardrails of a real Cassandra 4.1, which has no masked columns; those of 5.0: tests/spark_apps/test_guarded.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringsync.cluster.cluster import read_ring
from ringsync.cluster.levels import at_permitted
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import GuardrailError, close_all, connect
from ringsync.cluster.shared import Shared
from ringsync.ring.ranks import ranked
from ringsync.sources.lookup.read import RowsRead, read_rows
from ringsync.sources.scan.scan import scan_session
from ringsync.state.session import StateError, StateSession
from ringsync.steps.bootstrap.enable_cdc import enable_cdc
from ringsync.storage.local import LocalStore
from servers.cassandra import CassandraNode, NodeSettings
from tests.oracle import source_rows
from tests.sources.clusters import settings_of
from tests.sources.row_key_batches import batch_of, keys_of
from tests.sources.scans import UNLIMITED

pytestmark = [pytest.mark.server, pytest.mark.chaos]

GUARDRAILS = (
    ("page_size_fail_threshold", 1000),
    ("partition_keys_in_select_fail_threshold", 5),
    ("read_consistency_levels_disallowed", ["ALL", "LOCAL_ONE"]),
    ("table_properties_ignored", ["gc_grace_seconds"]),
    ("tables_fail_threshold", 3),
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[CassandraNode]:
    settings = NodeSettings(version="4.1", authenticator="password", heap_mb=256, more=GUARDRAILS).on_free_ports()
    with CassandraNode(tmp_path_factory.mktemp("guarded"), settings, cache) as node:
        yield node
    close_all()


def test_4_1(node: CassandraNode, tmp_path: Path) -> None:
    cluster = node.cluster()
    root = cluster.connect()
    root.execute("CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
    root.execute("CREATE TABLE shop.orders (id int PRIMARY KEY, v text)")
    for number in range(300):
        root.execute("INSERT INTO shop.orders (id, v) VALUES (%s, 'v')", (number,))
    root.execute("CREATE ROLE reader WITH PASSWORD = 'sesame' AND LOGIN = true")
    for right in ("SELECT ON shop.orders", "ALTER ON shop.orders", "CREATE ON ALL KEYSPACES"):
        root.execute(f"GRANT {right} TO reader")
    table = read_table(root, "shop", "orders")
    keys = batch_of(keys_of(root, table, source_rows(root, table, int(time.time()), element_times=False)))
    settings = settings_of(node, username="reader", password="sesame")
    with pytest.raises(GuardrailError, match=r"page_size_fail_threshold.*cassandra\.page_size"):
        connect(settings)
    settings = replace(settings, page_size=1000)
    ring, session = ranked(read_ring(connect(settings), "shop")), scan_session(settings, int(time.time()))

    def read(level: str) -> RowsRead:
        asked = replace(settings, consistency_level=level)
        return read_rows(session, table, keys, ring, asked, UNLIMITED, element_times=False, misfits="raw")

    with pytest.raises(GuardrailError, match="read_consistency_levels_disallowed"):
        read("ALL")
    assert len(at_permitted(session, table, "ALL", ring, read).images) == 300
    (told,) = enable_cdc(Shared(connect(settings)), LocalStore(tmp_path), [table])
    assert "table_properties_ignored" in str(told)
    assert not root.execute("SELECT cdc FROM system_schema.tables WHERE keyspace_name = 'shop'").one().cdc
    with pytest.raises(StateError, match=r"tables_fail_threshold.*docs/state\.md"):
        StateSession(connect(settings), "cdc").create({"class": "NetworkTopologyStrategy", "datacenter1": "1"})
    cluster.shutdown()
