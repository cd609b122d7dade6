"""A table that is in use gets cdc: what its users have prepared before must be captured, too."""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import DriverException, RequestExecutionException, Unauthorized
from cassandra.cluster import NoHostAvailable

import ringsync.cluster.shared
from ringsync.changes.columns import logged_tables
from ringsync.cluster.node import Node, one_node
from ringsync.cluster.schema import read_node_tables, read_table, read_tables
from ringsync.cluster.session import ClusterError, ClusterSettings, connect
from ringsync.cluster.shared import Shared
from ringsync.config import load_config
from ringsync.formats.commitlog.reader import read_log
from ringsync.ledger.gaps import Gaps, close_gap
from ringsync.ledger.left_tables import LeftTable, left_tables, when_left
from ringsync.ledger.table_versions import CdcBegun
from ringsync.schema.table import TableSchema
from ringsync.status import read_status
from ringsync.steps.application import Application, ExitCode, StepError
from ringsync.steps.archive import commitlog_archive
from ringsync.steps.bootstrap import enable_cdc as prepare_cdc
from ringsync.steps.bootstrap.enable_cdc import disable_cdc, enable_cdc
from ringsync.steps.holes import note_holes_of
from ringsync.steps.stage.switched_off import note_switched_off, switched_off
from ringsync.storage.local import LocalStore
from ringsync.wiring import store_of
from servers.cassandra import CassandraNode, NodeSettings
from servers.cluster import begin_segments
from tests.chaos.bootstraps import change_conf, prepare, write_conf

pytestmark = pytest.mark.server

GRACE = "SELECT gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = 'shop' AND table_name = 'orders'"
NAMES = ("one", "two", "three")


@pytest.mark.parametrize("version", ["4.1", "5.0"])
def test_what_was_prepared_before_is_captured(tmp_path: Path, cache: Path, version: str) -> None:
    settings = NodeSettings(version=version, segment_mib=1, cdc_total_mib=4).on_free_ports()  # type: ignore[arg-type]
    with CassandraNode(tmp_path, settings, cache) as node:
        cluster = node.cluster()
        try:
            session = cluster.connect()
            session.execute(
                "CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
            )
            prepared = {}
            for table in ("plain", "orders"):
                session.execute(f"CREATE TABLE shop.{table} (id int PRIMARY KEY, v blob)")
                prepared[table] = session.prepare(f"INSERT INTO shop.{table} (id, v) VALUES (?, ?)")
                session.execute(prepared[table], (1, b""))
            # What is worked around. Where this fails Cassandra has mended it.
            session.execute("ALTER TABLE shop.plain WITH cdc = true")
            session.execute(prepared["plain"], (2, b""))
            time.sleep(3)
            assert not indexes(node)

            grace = session.execute(GRACE).one()
            own = connect(ClusterSettings((settings.address,), settings.native_port))
            orders, shared = read_table(own, "shop", "orders"), Shared(own)
            store = LocalStore(tmp_path / "lake")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(prepare_cdc, "one_node", lambda session: Dies(one_node(session), after=1))
                with pytest.raises(Killed):
                    enable_cdc(shared, store, [orders])
            assert session.execute(GRACE).one() != grace
            assert enable_cdc(shared, store, [orders]) == ["was enabled"]
            assert session.execute(GRACE).one() == grace
            session.execute("ALTER TABLE shop.orders WITH cdc = false")
            assert enable_cdc(shared, store, [orders]) == ["enabled now"]
            assert enable_cdc(shared, store, [orders]) == ["was enabled"]
            assert session.execute(GRACE).one() == grace
            assert not store.list()
            # A run that was killed may have altered the table a moment ago: other nodes may not know of it yet.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ringsync.cluster.shared, "nodes_behind", lambda _: frozenset({"10.0.0.2"}))
                with pytest.raises(ClusterError, match=r"the nodes do not agree on the schema \(10.0.0.2\): try again"):
                    enable_cdc(shared, store, [orders])
            session.execute(prepared["orders"], (2, b""))
            deadline = time.monotonic() + 20
            while not indexes(node):
                assert time.monotonic() < deadline, "the write was not captured"
                time.sleep(0.2)
            has_gap_by_its_log(node, session, own, store)
            # Nobody empties cdc_raw: without cdc no write is refused, by statements that were prepared before either.
            with pytest.raises((DriverException, RequestExecutionException)):
                fill(session, prepared["orders"], megabytes=20)
            assert disable_cdc(shared, store, [orders]) == ["disabled now"]
            assert disable_cdc(shared, store, [orders]) == ["was disabled"]
            assert session.execute(GRACE).one() == grace
            fill(session, prepared["orders"], megabytes=20)
        finally:
            cluster.shutdown()


def has_gap_by_its_log(node: CassandraNode, session: Any, own: Any, store: LocalStore) -> None:
    """A table loses cdc and gets it again while nobody looks. And all of its options are written at each ALTER."""
    asked, table = one_node(own), read_table(own, "shop", "plain")
    CdcBegun(store).begins(table.table_id, read_node_tables(asked).altered_ms[table.table_id])
    session.execute("ALTER TABLE shop.plain WITH comment = 'other'")
    before_ms = int(time.time() * 1000)
    session.execute("ALTER TABLE shop.plain WITH cdc = false")
    after_ms = int(time.time() * 1000)
    for statement in ("cdc = true", "comment = 'another'"):
        session.execute(f"ALTER TABLE shop.plain WITH {statement}")
    tables, found, deadline = read_tables(own).tables, set[tuple[str, int]](), time.monotonic() + 20
    while not (found := found_in_log(node, tables, table)) or max(found)[1] < before_ms:
        assert time.monotonic() < deadline, "the log does not tell it"
        session.execute("INSERT INTO shop.plain (id, v) VALUES (3, 0x00)")
        time.sleep(0.2)
    assert before_ms <= max(found)[1] <= after_ms
    assert len(found) == 2, "the table was created without cdc, and lost it"
    note_switched_off(store, CdcBegun(store), found)
    assert when_left(store, *left_tables(store)) == LeftTable(max(found)[1], has_cdc=False)
    sync = SimpleNamespace(follows=lambda name: name == table.full_name, run_s=600.0)
    config: Any = SimpleNamespace(sync=sync, commitlog_processor_window_interval_ms=60_000)
    note_holes_of(store, config, asked)
    (gap,) = Gaps(store).look().values()
    assert gap is not None
    assert (gap.since_ms, left_tables(store)) == (max(found)[1], set())
    close_gap(store, gap.key)
    note_switched_off(store, CdcBegun(store), found)  # of another node's log, which is read later
    assert not left_tables(store)
    store.delete(f"cdc_begun/{table.table_id}.json")


def found_in_log(node: CassandraNode, tables: tuple[TableSchema, ...], table: TableSchema) -> set[tuple[str, int]]:
    """The statements of the node's log after which a table has no cdc."""
    found = set[tuple[str, int]]()
    for index in indexes(node):
        segment = index.with_name(index.name.replace("_cdc.idx", ".log"))
        for changes in read_log(segment.read_bytes(), segment.name, logged_tables(tables)).batches:
            found |= {one for one in switched_off(changes.rows, tables) if one[0] == table.table_id}
    return found


def fill(session: Any, insert: Any, megabytes: int) -> None:
    """Write so much. Each write waits for the disk, so they are few."""
    for number in range(10 * megabytes):
        session.execute(insert, (number, bytes(100_000)))


@pytest.fixture(scope="module")
def own(cassandra: CassandraNode) -> Any:
    """A session of ringsync."""
    return connect(ClusterSettings((cassandra.contact_point,), cassandra.port))


@pytest.fixture
def tables(session: Any, own: Any, keyspace: str) -> list[TableSchema]:
    """Three tables without cdc."""
    for name in NAMES:
        session.execute(f"DROP TABLE IF EXISTS {keyspace}.{name}")
        session.execute(f"CREATE TABLE {keyspace}.{name} (id int PRIMARY KEY) WITH gc_grace_seconds = 7")
    return [read_table(own, keyspace, name) for name in NAMES]


def options(session: Any, tables: list[TableSchema]) -> list[tuple[bool, int]]:
    return [tuple(session.execute(prepare_cdc.OPTIONS, (one.keyspace, one.name)).one()) for one in tables]


@pytest.mark.parametrize("after", range(7))
def test_a_kill_between_any_two_statements_is_mended(
    session: Any, own: Any, tables: list[TableSchema], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    shared, store = Shared(own), LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_cdc, "one_node", lambda session: Dies(one_node(session), after))
        if after < 6:
            with pytest.raises(Killed):
                enable_cdc(shared, store, tables)
        else:
            enable_cdc(shared, store, tables)
    altered = min(after, 3)
    assert [cdc for cdc, _ in options(session, tables)] == [True] * altered + [False] * (3 - altered)
    done = enable_cdc(shared, store, tables)
    again = max(0, after - 3) % 3  # after a kill nobody knows whether all nodes have seen the moment that is over
    kept = ["was enabled"] * (altered - again)
    assert done == ["enabled now"] * again + kept + ["enabled now"] * (3 - altered)
    assert options(session, tables) == [(True, 7)] * 3
    assert not store.list()


@pytest.mark.parametrize("after", range(7))
def test_a_kill_while_cdc_is_disabled_is_mended(
    session: Any, own: Any, tables: list[TableSchema], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    shared, store = Shared(own), LocalStore(tmp_path)
    enable_cdc(shared, store, tables)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_cdc, "one_node", lambda session: Dies(one_node(session), after))
        if after < 6:
            with pytest.raises(Killed):
                disable_cdc(shared, store, tables)
        else:
            disable_cdc(shared, store, tables)
    altered = min(after, 3)
    assert [cdc for cdc, _ in options(session, tables)] == [False] * altered + [True] * (3 - altered)
    assert disable_cdc(shared, store, tables) == ["was disabled"] * altered + ["disabled now"] * (3 - altered)
    assert options(session, tables) == [(False, 7)] * 3
    assert not store.list()


def test_cdc_that_was_switched_off_after_a_kill_costs_no_gc_grace_seconds(
    session: Any, own: Any, tables: list[TableSchema], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds that a killed run had set for a moment were taken for the table's own."""
    shared, store = Shared(own), LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_cdc, "one_node", lambda session: Dies(one_node(session), after=1))
        with pytest.raises(Killed):
            enable_cdc(shared, store, tables[:1])
    session.execute(f"ALTER TABLE {tables[0].full_name} WITH cdc = false")
    assert enable_cdc(shared, store, tables[:1]) == ["enabled now"]
    assert options(session, tables[:1]) == [(True, 7)]


def test_all_nodes_agree_before_and_after_the_moment_once_for_all_tables(
    own: Any, tables: list[TableSchema], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    behind = ringsync.cluster.shared.nodes_behind

    def agreed(session: Any) -> frozenset[str]:
        done.append("agreed")
        return behind(session)

    monkeypatch.setattr(ringsync.cluster.shared, "nodes_behind", agreed)
    monkeypatch.setattr(prepare_cdc, "one_node", lambda session: Tells(one_node(session), done))
    enable_cdc(Shared(own), LocalStore(tmp_path), tables)
    begun, over = ["cdc = true AND gc_grace_seconds = 8"] * 3, ["gc_grace_seconds = 7"] * 3
    assert done == ["agreed", *begun, "agreed", *over, "agreed"]


def test_a_table_that_may_not_be_altered_fails_alone(
    session: Any, own: Any, tables: list[TableSchema], tmp_path: Path
) -> None:
    gone = replace(tables[1], name="gone")
    store = LocalStore(tmp_path)
    first, failure, last = enable_cdc(Shared(own), store, [tables[0], gone, tables[2]])
    assert (first, last) == ("enabled now", "enabled now")
    assert isinstance(failure, StepError)
    assert str(failure).endswith("gone is gone: it was dropped")
    assert options(session, [tables[0], tables[2]]) == [(True, 7)] * 2
    assert not store.list()


def test_cdc_is_not_switched_on_where_nobody_empties_cdc_raw(
    session: Any, own: Any, tables: list[TableSchema], tmp_path: Path
) -> None:
    shared, store = Shared(own), LocalStore(tmp_path)
    assert enable_cdc(shared, store, tables[:1]) == ["enabled now"]
    had, *new = enable_cdc(shared, store, tables, why_not=lambda: "nobody empties cdc_raw of 10.0.0.1:9042")
    assert had == "was enabled"
    for error, table in zip(new, tables[1:], strict=True):
        assert isinstance(error, StepError)
        assert str(error) == f"cdc is not enabled on {table.full_name}: nobody empties cdc_raw of 10.0.0.1:9042"
    assert options(session, tables) == [(True, 7), (False, 7), (False, 7)]
    assert not store.list()


def test_cdc_that_is_switched_on_while_ringsync_leaves_is_switched_off_again(
    own: Any, session: Any, tables: list[TableSchema], tmp_path: Path
) -> None:
    """A bootstrap that stood still for the time of a ``leave`` went on, and nobody emptied cdc_raw any more."""
    store, answers = LocalStore(tmp_path), iter(["", "cdcservice leave has been run"])
    (error,) = enable_cdc(Shared(own), store, tables[:1], why_not=lambda: next(answers))
    assert str(error) == f"cdc is not enabled on {tables[0].full_name}: cdcservice leave has been run"
    assert options(session, tables[:1]) == [(False, 7)]
    assert not store.list()


def test_a_bootstrap_enables_cdc_once_an_archive_has_looked(
    cassandra: CassandraNode, session: Any, tables: list[TableSchema], tmp_path: Path
) -> None:
    """On a real node: first nobody is there, then the archive, which finds that it may delete."""
    conf, name = write_conf(tmp_path, [cassandra]), tables[0].full_name
    change_conf(conf, sync={"run_s": 1.0})
    with pytest.raises(StepError, match=r"not enabled on .*: nobody empties cdc_raw of .*: run cdcservice start"):
        prepare(conf, name, "one", enable_cdc=True)
    assert options(session, tables[:1]) == [(False, 7)]
    config = load_config(conf)
    given = (config, store_of(config), None, "run", argparse.Namespace(queue="default"))
    begin_segments(session, tables[0].keyspace)  # other tests may have emptied the folder,
    for claim in cassandra.cdc_raw.glob("ringsync-claim.*"):  # or claimed it
        claim.unlink()
    try:
        for _ in range(30):  # on a busy machine one short run may end before its first look
            assert commitlog_archive.run(Application("commitlog_archive", str(conf), *given))[1] == ExitCode.OK
            status = read_status(store_of(config), "commitlog_archive/default") or {}
            if any(node["empties"] for node in status.get("nodes", {}).values()):
                break
    finally:
        for claim in cassandra.cdc_raw.glob("ringsync-claim.*"):
            claim.unlink()
    prepare(conf, name, "two", enable_cdc=True)
    assert options(session, tables[:1]) == [(True, 7)]


@pytest.mark.parametrize("looks", [1, 2])
def test_no_node_may_be_down_in_the_moment(
    session: Any, own: Any, tables: list[TableSchema], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """A node that starts later learns of both changes at once, and keeps the statements that it knows."""
    shared, store, asked = Shared(own), LocalStore(tmp_path), itertools.count(-1)

    def look(session: Any) -> Node:
        node = one_node(session)
        node.down = frozenset({"10.0.0.9"} if next(asked) == looks - 1 else ())
        return node

    with monkeypatch.context() as patch:
        patch.setattr(prepare_cdc, "one_node", look)
        for error in enable_cdc(shared, store, tables):
            assert isinstance(error, StepError)
            assert r"while nodes are down (10.0.0.9)" in str(error)
    assert options(session, tables) == [(False, 7) if looks == 1 else (True, 8)] * 3
    assert len(store.list()) == (0 if looks == 1 else 3)
    assert enable_cdc(shared, store, tables) == ["enabled now" if looks == 1 else "was enabled"] * 3
    assert options(session, tables) == [(True, 7)] * 3
    assert not store.list()


@pytest.mark.parametrize("alteration", ["cdc = true", "gc_grace_seconds = 7"])
@pytest.mark.parametrize("error", [NoHostAvailable("a server error", {}), Unauthorized("no")])
def test_what_a_node_refuses_one_table_concerns_no_other(
    session: Any,
    own: Any,
    tables: list[TableSchema],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alteration: str,
    error: Exception,
) -> None:
    """The driver tells a server's own error like one of a node that does not answer."""
    shared, store = Shared(own), LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        refused = f"{tables[1].full_name} WITH {alteration}"
        patch.setattr(prepare_cdc, "one_node", lambda session: Refuses(one_node(session), refused, error))
        first, failure, last = enable_cdc(shared, store, tables)
    assert (first, last) == ("enabled now", "enabled now")
    assert isinstance(failure, Exception)
    # What was begun must be ended by the next run, and what was not begun leaves nothing, if that is sure.
    begun = alteration != "cdc = true"
    assert options(session, tables) == [(True, 7), (begun, 8 if begun else 7), (True, 7)]
    assert len(store.list()) == (begun or isinstance(error, NoHostAvailable))
    enable_cdc(shared, store, tables)
    assert options(session, tables) == [(True, 7)] * 3
    assert not store.list()


def test_a_moment_that_is_found_is_awaited_too(
    own: Any, tables: list[TableSchema], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may have begun it just now."""
    shared, store, done = Shared(own), LocalStore(tmp_path), list[str]()
    behind = ringsync.cluster.shared.nodes_behind
    with monkeypatch.context() as patch:
        patch.setattr(prepare_cdc, "one_node", lambda session: Dies(one_node(session), after=1))
        with pytest.raises(Killed):
            enable_cdc(shared, store, tables[:1])
    monkeypatch.setattr(
        ringsync.cluster.shared, "nodes_behind", lambda session: done.append("agreed") or behind(session)
    )
    monkeypatch.setattr(prepare_cdc, "one_node", lambda session: Tells(one_node(session), done))
    enable_cdc(shared, store, tables[:1])
    assert done == ["agreed", "agreed", "gc_grace_seconds = 7", "agreed"]


class Killed(BaseException):
    """The process ends here."""


class Dies:
    """A node that a process asks to alter tables, until it is killed."""

    down = frozenset[str]()

    def __init__(self, node: Node, after: int) -> None:
        self._node, self._left = node, after

    def execute(self, query: str, parameters: Any = None) -> Any:
        if query.startswith("ALTER"):
            if not self._left:
                raise Killed
            self._left -= 1
        return self._node.execute(query, parameters)


class Tells:
    """A node that tells how tables were altered."""

    down = frozenset[str]()

    def __init__(self, node: Node, told: list[str]) -> None:
        self._node, self._told = node, told

    def execute(self, query: str, parameters: Any = None) -> Any:
        if query.startswith("ALTER"):
            self._told.append(query.partition(" WITH ")[2])
        return self._node.execute(query, parameters)


class Refuses:
    """A node that refuses one statement."""

    down = frozenset[str]()

    def __init__(self, node: Node, refused: str, error: Exception) -> None:
        self._node, self._refused, self._error = node, refused, error

    def execute(self, query: str, parameters: Any = None) -> Any:
        if self._refused in query:
            raise self._error
        return self._node.execute(query, parameters)


def indexes(node: CassandraNode) -> list[Path]:
    """Of segments that have something for us."""
    return list(node.cdc_raw.glob("*_cdc.idx"))
