"""Which tables are read with care: those that have large partitions, or may have some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import OperationTimedOut
from cassandra.policies import HostDistance

from ringsync.cluster.cluster import PARTITION_SIZES, read_largest_partitions
from ringsync.cluster.connection import ScyllaConnection
from ringsync.cluster.limits import Limiter
from ringsync.cluster.shared import LARGE_PARTITION_MIB, KnownTables, Shared, TableName
from ringsync.config import Config
from ringsync.ring.ring import RingSnapshot, parse_replication
from ringsync.ring.splits import SizeEstimate, split_of
from ringsync.schema.table import TableSchema
from ringsync.sources.scan import images, planning
from ringsync.sources.scan.plan import ScanPlan, Selection
from tests.sources.test_levels import HOSTS
from tests.sources.test_page_size import CLUSTERED, TABLE

MOST, LARGE = LARGE_PARTITION_MIB, LARGE_PARTITION_MIB + 1
ESTIMATE = SizeEstimate(1024, 2**30)
CAREFUL = 32
"""Most rows of a page of beginnings, where a partition has 1 MiB in the mean."""
CONFIG = Config.model_validate(
    {"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "/lake"}}
)


class Node:
    """A host of the driver, and what it says of the largest partitions of tables, MiB; None: it does not answer."""

    def __init__(self, largest: dict[TableName, int] | None, *, is_up: bool | None = True, is_far: bool = False):
        self.largest, self.is_up, self.asked = largest, is_up, 0
        self.distance = HostDistance.IGNORED if is_far else HostDistance.LOCAL


class Session:
    """A driver's session with these nodes."""

    def __init__(self, *nodes: Node, connection: type | None = None) -> None:
        policy = SimpleNamespace(distance=lambda node: node.distance)
        metadata = SimpleNamespace(all_hosts=lambda: nodes)
        self.cluster = SimpleNamespace(
            profile_manager=policy, metadata=metadata, connection_class=connection, protocol_version=5
        )

    def execute(self, cql: str, *, host: Node) -> list[Any]:
        assert cql == PARTITION_SIZES
        assert host.is_up is not False
        host.asked += 1
        if host.largest is None:
            raise OperationTimedOut("no answer")
        return [
            SimpleNamespace(keyspace_name=keyspace, table_name=name, mebibytes=size)
            for (keyspace, name), size in host.largest.items()
        ]


def shared_by(*nodes: Node, connection: type | None = None) -> Shared:
    return Shared(Session(*nodes, connection=connection))


def test_the_largest_partition_of_any_node_counts() -> None:
    a, b = ("k", "a"), ("k", "b")
    session: Any = Session(
        Node({a: 1, b: 7}), Node({a: 9, b: 3}), Node({b: 99}, is_up=False), Node({b: 99}, is_far=True)
    )
    assert read_largest_partitions(session) == {a: 9, b: 7}
    silent: Any = Session(Node({a: 1}), Node(None))
    assert read_largest_partitions(silent) is None


def test_a_table_has_large_partitions_or_may_have_some() -> None:
    nodes = Node({("k", "small"): MOST, ("k", "large"): 1}), Node({("k", "large"): LARGE})
    shared = shared_by(*nodes)
    names = ("small", "large", "empty")
    assert [shared.may_have_large_partitions("k", name) for name in names] == [False, True, False]
    assert [node.asked for node in nodes] == [1, 1], "once for all tables of a run"
    assert shared_by(nodes[0], Node(None)).may_have_large_partitions("k", "small"), "nobody knows"
    of_scylla = shared_by(Node(None), connection=ScyllaConnection)
    assert not of_scylla.may_have_large_partitions("k", "large"), "it bounds its responses itself"


class Known(Shared):
    """What is known of a cluster with one table."""

    of: TableSchema
    datacenter = "dc1"

    def table(self, keyspace: str, name: str) -> TableSchema:
        return self.of

    def ring(self, keyspace: str, moment_s: float = 0.0) -> RingSnapshot:
        strategy = {"class": "SimpleStrategy", "replication_factor": "3"}
        return RingSnapshot(HOSTS, parse_replication(strategy))


@pytest.mark.parametrize("many", [False, True], ids=["one table", "many tables"])
@pytest.mark.parametrize(
    ("table", "mebibytes", "expected"),
    [(CLUSTERED, MOST, None), (CLUSTERED, LARGE, CAREFUL), (CLUSTERED, None, CAREFUL), (TABLE, LARGE, None)],
    ids=["small", "large", "unknown", "without clustering"],
)
def test_a_plan_is_careful_where_partitions_are_large(
    monkeypatch: pytest.MonkeyPatch, many: bool, table: TableSchema, mebibytes: int | None, expected: int | None
) -> None:
    """Also in a run of many tables, which asks for no other estimates."""
    monkeypatch.setattr(planning, "read_size_estimate", lambda *_: ESTIMATE)
    monkeypatch.setattr(planning, "check_unmasked", lambda *_: None)
    monkeypatch.setattr(planning.scan, "check_readable", lambda *_: None)
    monkeypatch.setattr(planning.scan, "columns_without_element_times", lambda *_: ())
    session: Any = Session(Node(None if mebibytes is None else {(table.keyspace, table.name): mebibytes}))
    shared = Known(session, KnownTables("v", (), {}) if many else None)
    shared.of = table
    plan = planning.make_scan_plan(session, CONFIG, table.keyspace, table.name, now=0, shared=shared)
    assert plan.beginning_rows == expected
    assert plan.splits


@pytest.mark.parametrize("rows", [None, CAREFUL])
def test_a_scan_reads_as_its_plan_says(monkeypatch: pytest.MonkeyPatch, rows: int | None) -> None:
    read: list[int | None] = []
    session = SimpleNamespace(reads_as_of=True, prepare=lambda cql: cql)
    monkeypatch.setattr(images, "scan_session", lambda *_: session)
    monkeypatch.setattr(images, "wait_until_unmasked", lambda *_: None)
    monkeypatch.setattr(images, "read_ranges", lambda _, scan, *__: read.append(scan.beginning_rows) or ())
    given = (CLUSTERED, Selection(), 0, True, True, "LOCAL_ONE", "error", "", ())
    plan = ScanPlan.from_json(ScanPlan(*given, beginning_rows=rows).to_json())  # as tasks get it
    assert not list(images.read_images(CONFIG, plan, split_of([]), Limiter()))
    assert read == [rows]
