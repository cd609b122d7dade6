"""ringsync speaks to the stand-in of a ScyllaDB as it does to Cassandra."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ringsync.cluster.agreement import nodes_behind
from ringsync.cluster.cluster import read_hosts, read_ring, read_settings, read_size_estimate
from ringsync.cluster.node import one_node
from ringsync.cluster.schema import read_node_tables, read_table, read_tables
from ringsync.cluster.scylla import CdcOptions, CdcOptionsError, cdc_options_of, is_scylla, read_cdc_options
from ringsync.cluster.session import ClusterError, ClusterSettings, close_all, connect
from ringsync.cluster.shared import Shared
from ringsync.cluster.whole_schema import Agreement, read_whole_schema
from ringsync.config.sections import Scylla
from ringsync.schema.table import TableSchema
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap.enable_scylla_cdc import enable_scylla_cdc
from ringsync.steps.own_keyspace import create_state
from ringsync.steps.replica.merge import candidates
from ringsync.storage.local import LocalStore
from servers.cassandra import CassandraNode
from tests.scylla_server.proxy import StandIn, scylla_stand_in

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def scylla(cassandra: CassandraNode) -> Iterator[StandIn]:
    with scylla_stand_in(cassandra) as found:
        yield found
        close_all()


@pytest.fixture
def client(scylla: StandIn) -> Any:
    """A session of ringsync."""
    return connect(ClusterSettings((scylla.host,), scylla.port, consistency_level="ONE"))


@pytest.fixture
def tables(client: Any, keyspace: str) -> list[TableSchema]:
    """Three tables without cdc."""
    for name in ("one", "two", "three"):
        client.execute(f"DROP TABLE IF EXISTS {keyspace}.{name}")
        client.execute(f"CREATE TABLE {keyspace}.{name} (p int, c int, v text, s int static, PRIMARY KEY (p, c))")
    return [read_table(client, keyspace, name) for name in ("one", "two", "three")]


def test_protocol_v4_for_scylla_only(client: Any, session: Any, cassandra: CassandraNode) -> None:
    assert client.cluster.protocol_version == 4
    assert is_scylla(client)
    assert is_scylla(one_node(client))
    own = connect(ClusterSettings((cassandra.contact_point,), cassandra.port))
    assert own.cluster.protocol_version == 5
    assert not is_scylla(own)
    assert not is_scylla(one_node(own))
    assert not is_scylla(session)


def test_an_old_cassandra_is_still_refused(cassandra: CassandraNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cassandra 5 speaks v4 as well: only what it says of itself tells it from ScyllaDB."""
    close_all()
    monkeypatch.setattr("ringsync.cluster.session.NATIVE_PROTOCOL", 65)
    with pytest.raises(ClusterError, match=r"does not speak native protocol 65.*Cassandra 4\.0.*or ScyllaDB"):
        connect(ClusterSettings((cassandra.contact_point,), cassandra.port))


def test_long_results_over_v4(client: Any, tables: list[TableSchema]) -> None:
    """Of several megabytes: in many pieces."""
    name = tables[0].full_name
    for number in range(20):
        client.execute(f"INSERT INTO {name} (p, c, v) VALUES (1, %s, %s)", (number, chr(97 + number) * 200_000))
    rows = list(client.execute(f"SELECT c, v FROM {name} WHERE p = 1"))
    assert [(row.c, row.v) for row in rows] == [(number, chr(97 + number) * 200_000) for number in range(20)]


def test_the_ring_and_the_schema(client: Any, session: Any, scylla: StandIn, tables: list[TableSchema]) -> None:
    (host,) = read_hosts(client)
    assert (host.address, host.port, host.up, host.is_local) == (scylla.host, scylla.port, True, True)
    assert len(host.tokens) == 4
    assert read_ring(client, tables[0].keyspace).hosts == (host,)
    assert read_settings(client, host.id, ["cdc_enabled"]) == {}
    read_size_estimate(client, tables[0].keyspace, "one")
    assert not nodes_behind(client)
    assert Agreement(client, lambda: 0.0)()
    own = {table.full_name: table for table in read_tables(session).tables}
    assert {table.full_name: table for table in read_tables(client).tables if table.keyspace == tables[0].keyspace} == {
        table.full_name: own[table.full_name] for table in tables
    }
    reading = read_whole_schema(one_node(client))
    assert reading is not None
    assert {(table.keyspace, table.name) for table in tables} <= reading.schema.tables.keys()
    assert not [name for name in reading.schema.keyspaces if name.startswith("sim_")]


def test_dropped_columns(client: Any, tables: list[TableSchema]) -> None:
    table = tables[0]
    client.execute(f"ALTER TABLE {table.full_name} DROP v")
    (dropped,) = read_table(client, table.keyspace, table.name).dropped
    assert dropped.name == "v"
    found = {one.full_name: one for one in read_tables(client).tables}
    assert [one.name for one in found[table.full_name].dropped] == ["v"]


def test_cdc_options_of_all_tables(client: Any, tables: list[TableSchema], tmp_path: Path) -> None:
    one, two, three = tables
    assert not {table.table_id for table in tables} & read_cdc_options(client).keys()
    client.execute(f"ALTER TABLE {one.full_name} WITH cdc = {{'enabled': true, 'preimage': 'full', 'ttl': 7}}")
    client.execute(f"ALTER TABLE {two.full_name} WITH cdc = {{'enabled': true, 'postimage': true, 'delta': 'keys'}}")
    before = read_node_tables(one_node(client))
    assert {one.table_id, two.table_id} <= before.with_cdc
    assert three.table_id in before.ids - before.with_cdc
    client.execute(f"ALTER TABLE {two.full_name} WITH cdc = {{'enabled': false}}")
    found, told = read_cdc_options(client), read_node_tables(one_node(client))
    assert found[one.table_id] == CdcOptions(True, "full", False, "full", 7)
    assert found[two.table_id] == CdcOptions(False)
    logs = {t.table_id for t in read_tables(client).tables if t.keyspace == one.keyspace} - {t.table_id for t in tables}
    assert len(logs) == 2, "the log stays when cdc is switched off"
    assert logs <= told.ids
    assert not logs & told.with_cdc
    assert one.table_id in told.with_cdc
    assert two.table_id not in told.with_cdc
    assert told.altered_ms[two.table_id] > before.altered_ms[two.table_id]
    in_step = {table.table_id for table, _ in candidates(client, LocalStore(tmp_path), None)}
    assert one.table_id in in_step
    assert not in_step & (logs | {two.table_id, three.table_id})


def test_enabling(client: Any, scylla: StandIn, tables: list[TableSchema]) -> None:
    one, two, three = tables
    shared, wanted = Shared(client), Scylla(log_ttl_s=3600, preimage="true", postimage=True)
    client.execute(f"ALTER TABLE {two.full_name} WITH cdc = {{'enabled': true, 'ttl': 3600}}")
    client.execute(f"ALTER TABLE {three.full_name} WITH cdc = {{'enabled': true, 'delta': 'keys'}}")
    done = enable_scylla_cdc(shared, wanted, tables)
    assert done[0] == "enabled now"
    assert done[1] == (
        "was enabled, and keeps its options; warning: they are not those of the configuration: preimage is false, not "
        "true; postimage is false, not true"
    )
    assert isinstance(done[2], StepError)
    assert "delta = keys" in str(done[2])
    found = read_cdc_options(client)
    assert found[one.table_id] == CdcOptions(True, "true", True, "full", 3600)
    assert found[two.table_id] == CdcOptions(True, ttl_s=3600)
    assert enable_scylla_cdc(shared, wanted, [one]) == ["was enabled"]
    client.execute(f"ALTER TABLE {one.full_name} WITH cdc = {{'enabled': false}}")
    assert enable_scylla_cdc(shared, wanted, [one]) == ["enabled now"]
    log = read_table(client, one.keyspace, "one_scylla_cdc_log")
    assert {column.name for column in log.columns} >= {"p", "c", "v", "cdc$deleted_v", "cdc$deleted_s", "cdc$time"}


def test_enabling_that_fails(client: Any, tables: list[TableSchema], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, _ = tables
    client.execute(f"DROP TABLE {one.full_name}")
    gone, done = enable_scylla_cdc(Shared(client), Scylla(), [one, two])
    assert "is gone" in str(gone)
    assert done == "enabled now"
    # The server takes the ALTER, but the node that is asked then has other options.
    monkeypatch.setattr(
        "ringsync.steps.bootstrap.enable_scylla_cdc.alter",
        lambda table, options: f"ALTER TABLE {table.full_name} WITH cdc = {{'enabled': true, 'ttl': 5}}",
    )
    client.execute(f"ALTER TABLE {two.full_name} WITH cdc = {{'enabled': false}}")
    (failed,) = enable_scylla_cdc(Shared(client), Scylla(), [two])
    assert isinstance(failed, StepError)
    assert "ttl_s=5" in str(failed)
    monkeypatch.setattr(
        "ringsync.steps.bootstrap.enable_scylla_cdc.alter",
        lambda table, options: f"ALTER TABLE {table.full_name} WITH cdc = {{'wrong': true}}",
    )
    client.execute(f"ALTER TABLE {two.full_name} WITH cdc = {{'enabled': false}}")
    (refused,) = enable_scylla_cdc(Shared(client), Scylla(), [two])
    assert isinstance(refused, StepError)
    assert "Invalid CDC option: wrong" in str(refused)


def test_the_log_follows_its_table(client: Any, tables: list[TableSchema]) -> None:
    one = tables[0]
    enable_scylla_cdc(Shared(client), Scylla(), [one])
    client.execute(f"ALTER TABLE {one.full_name} ADD w set<int>")
    client.execute(f"ALTER TABLE {one.full_name} DROP v")
    names = {column.name for column in read_table(client, one.keyspace, "one_scylla_cdc_log").columns}
    assert {"w", "cdc$deleted_w", "cdc$deleted_elements_w"} <= names
    assert not {"v", "cdc$deleted_v"} & names
    client.execute(f"DROP TABLE {one.full_name}")
    assert not [t for t in read_tables(client).tables if t.name == "one_scylla_cdc_log"]


def test_the_state_keyspace_has_no_tablets(client: Any, scylla: StandIn) -> None:
    """The stand-in refuses conditional writes where tablets are, as ScyllaDB did before 2025.4."""
    from ringsync.state.bootstrap import BootstrapState

    client.execute("DROP KEYSPACE IF EXISTS scylla_state")
    config = SimpleNamespace(state=SimpleNamespace(keyspace="scylla_state", replication=None))
    create_state(client, config)  # type: ignore[arg-type]
    assert not scylla.schema.has_tablets("scylla_state")
    state = BootstrapState(client, "scylla_state")
    assert state.find("shop", "orders") is None
    client.execute("DROP KEYSPACE scylla_state")
    client.execute(
        "CREATE KEYSPACE scylla_state WITH replication = {'class': 'NetworkTopologyStrategy', 'datacenter1': 1}"
    )
    assert scylla.schema.has_tablets("scylla_state")
    client.execute("CREATE TABLE scylla_state.t (p int PRIMARY KEY, v int)")
    with pytest.raises(Exception, match="LWT is not yet supported with tablets"):
        client.execute("UPDATE scylla_state.t SET v = 1 WHERE p = 1 IF v = 2")
    client.execute("DROP KEYSPACE scylla_state")


def test_scans_over_v4(client: Any, scylla: StandIn, tables: list[TableSchema]) -> None:
    """A page is read as of the server's clock, whatever moment was asked for."""
    from ringsync.images.from_pages import row_images
    from ringsync.images.to_changes import image_keys
    from ringsync.ring.ranks import ranked
    from ringsync.ring.splits import ReplicaRange
    from ringsync.sources.lookup.read import read_rows
    from ringsync.sources.scan import scan as scans
    from tests.sources.scans import UNLIMITED, WHOLE

    name = tables[0].full_name
    client.execute(f"ALTER TABLE {name} ADD w set<int>")
    table = read_table(client, tables[0].keyspace, tables[0].name)
    assert [column.name for column in scans.columns_without_element_times(client, table)] == ["w"]
    written = int(time.time())
    for number in range(3):
        client.execute(f"INSERT INTO {name} (p, c, v) VALUES ({number}, 0, 'x') USING TTL 1000")
    settings = ClusterSettings((scylla.host,), scylla.port, consistency_level="ONE", page_size=1)
    session = scans.scan_session(settings, written - 10_000_000)
    assert not session.reads_as_of
    query = scans.scan_query(table, times=True, element_times=False, server_time=True)
    ranges = [ReplicaRange(WHOLE, ())]
    scan = scans.prepare_scan(session, query)
    ((_, part),) = scans.read_ranges(session, scan, ranges, settings, UNLIMITED)
    pages: Any = [*part]
    assert sum(int.from_bytes(page[:4], "big") for page in pages) == 3
    images = row_images(pages, table, query.layout, written - 10_000_000, "error")
    expiries = images["_row"].field("expires_at").to_pylist()
    assert len(expiries) == 3
    assert all(written + 1000 <= expiry <= written + 1010 for expiry in expiries)
    partition_keys, clusterings = (keys.cast(pa.binary()) for keys in image_keys(images, table))
    keys = pa.record_batch([images["token"], partition_keys, clusterings], ["token", "partition_key", "clustering"])
    ring = ranked(read_ring(client, table.keyspace))
    assert not scans.tells_element_times(session, table)
    found = read_rows(session, table, keys, ring, settings, UNLIMITED, element_times=False, misfits="error")
    assert sorted(found.places.tolist()) == [0, 1, 2]


def test_requests_are_counted(client: Any, scylla: StandIn, tables: list[TableSchema]) -> None:
    statement = client.prepare(f"SELECT v FROM {tables[0].full_name} WHERE p = ? BYPASS CACHE")
    scylla.requests.clear()
    for number in range(3):
        client.execute(statement, (number,))
        client.execute(f"SELECT c FROM {tables[0].full_name} WHERE p = {number}")
    counted = scylla.requests.by_statement
    assert counted[f"SELECT v FROM {tables[0].full_name} WHERE p = ? BYPASS CACHE"] == 3
    assert counted[f"SELECT c FROM {tables[0].full_name} WHERE p = ?"] == 3
    assert scylla.requests.by_kind["EXECUTE"] == 3


# `{'enabled': 'true', 'ttl': '10'}`, written down by hand.
SOME = bytes.fromhex("0200000007000000656e61626c656404000000747275650300000074746c020000003130")


def test_the_bytes_of_options() -> None:
    assert cdc_options_of(SOME) == CdcOptions(True, ttl_s=10)
    assert cdc_options_of(b"\0\0\0\0") == CdcOptions(False)
    for wrong in (b"", SOME[:-1], SOME + b"\0", SOME[:4] + b"\xff" * 4 + SOME[8:]):
        with pytest.raises(CdcOptionsError):
            cdc_options_of(wrong)
