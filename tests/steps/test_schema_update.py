"""The schema updater on a real Cassandra: histories, messages that rebuild the schema, rivals, disagreement, damage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ringsync.cluster.node import Node, node_schema, one_node
from ringsync.cluster.schema import read_node_tables, read_table
from ringsync.cluster.whole_schema import Reading, read_whole_schema
from ringsync.config import Config
from ringsync.ledger.dropped_tables import dropped_of
from ringsync.ledger.gaps import Gaps
from ringsync.ledger.schema_changes import change_numbers
from ringsync.ledger.table_versions import CdcBegun, version_of
from ringsync.schema.table import TableSchema
from ringsync.state.schema_history import SchemaHistory
from ringsync.state.session import StateSession
from ringsync.status import read_status
from ringsync.steps.application import ExitCode
from ringsync.steps.holes import note_holes_of
from ringsync.steps.schema_update import TOLERATED_S, SchemaUpdater
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream
from spark_apps.schema_update import main
from tests.ledger.histories import history_of

pytestmark = pytest.mark.server

SERVER = "test"
REPLICATION = "WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
KEYSPACES = ("su_shop", "su_Other")


@pytest.fixture
def shop(session: Any) -> Iterator[Any]:
    """A session of a cluster with two empty keyspaces."""
    for name in KEYSPACES:
        session.execute(f'DROP KEYSPACE IF EXISTS "{name}"')
        session.execute(f'CREATE KEYSPACE "{name}" {REPLICATION}')
    yield session
    for name in KEYSPACES:
        session.execute(f'DROP KEYSPACE IF EXISTS "{name}"')


class OnlyKeyspaces:
    """A node whose users' keyspaces are these: other tests of the session leave theirs."""

    down: frozenset[str] = frozenset()
    up: frozenset[str] = frozenset(["10.0.0.2"])

    def __init__(self, session: Any, names: tuple[str, ...] = KEYSPACES) -> None:
        self._node, self._names = one_node(session), {*names, "system_schema"}

    def execute(self, query: str, parameters: Any = None) -> Any:
        found = self._node.execute(query, parameters)
        if "schema_version" in query:
            return found
        rows = list(found)
        return [row for row in rows if row.keyspace_name in self._names]


def updater(store: LocalStore, session: Any, **options: Any) -> SchemaUpdater:
    return SchemaUpdater(store, SERVER, lambda: OnlyKeyspaces(session), **options)


def messages(store: LocalStore) -> list[dict[str, Any]]:
    stream = FileStream(store, SERVER)
    folders = stream.folders()
    assert folders == [f"change-{number:012}" for number in change_numbers(store)]
    return [message for folder in folders for message in stream.read(folder)]


STEPS = [
    'CREATE TYPE su_shop.city (name text)',
    'CREATE TYPE su_shop.address (street text, city frozen<city>)',
    'CREATE TYPE su_shop.unused (a int)',
    'CREATE TABLE su_shop.orders (id int, "At" int, home frozen<address>, s int static, PRIMARY KEY (id, "At")) '
    'WITH CLUSTERING ORDER BY ("At" DESC)',
    'CREATE TABLE "su_Other"."T" (id int PRIMARY KEY, note text)',
    "!",
    'ALTER TABLE su_shop.orders ADD note text',
    "!",
    'ALTER TYPE su_shop.city ADD zip int',
    'ALTER TABLE su_shop.orders RENAME "At" TO moment',
    'ALTER TABLE su_shop.orders DROP note',
    "!",
    'ALTER TABLE su_shop.orders ADD note text',
    'DROP TABLE "su_Other"."T"',
    'CREATE TABLE "su_Other"."T" (id text PRIMARY KEY)',
    'DROP TYPE su_shop.unused',
    "!",
    'CREATE TABLE su_shop.counts (id int PRIMARY KEY, n counter)',
    'ALTER KEYSPACE su_shop WITH durable_writes = false',
    'ALTER TABLE su_shop.orders DROP home',
    'DROP TYPE su_shop.address',
    'CREATE TYPE su_shop.address (lines list<text>, city frozen<city>)',
    'ALTER TABLE su_shop.orders ADD away frozen<address>',
    "!",
    'DROP KEYSPACE "su_Other"',
    'DROP TABLE su_shop.counts',
]  # fmt: skip


def without_ids(reading: Reading) -> Any:
    def plain(table: TableSchema) -> Any:
        return (table.columns, tuple(column for column in table.dropped if column.name == "note"))

    tables = {name: plain(table) for name, table in reading.schema.tables.items()}
    return reading.schema.keyspaces, reading.schema.types, tables


def test_the_messages_rebuild_the_schema(shop: Any, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    looks = updater(store, shop)
    for step in [*STEPS, "!"]:
        if step == "!":
            looks.cycle()
        else:
            shop.execute(step)
    assert looks.problems == []
    expected = without_ids(read_whole_schema(OnlyKeyspaces(shop)))  # type: ignore[arg-type]
    found = messages(store)
    first = [message for message in found if message["value"]["source"]["snapshot"]]
    assert first == found[: len(first)]
    assert {message["value"]["source"]["change"] for message in first} == {1}
    for name in KEYSPACES:
        shop.execute(f'DROP KEYSPACE IF EXISTS "{name}"')
    for message in found:
        assert message["key"]["keyspace"] == message["value"]["keyspace"]
        shop.execute(message["value"]["ddl"])
    assert without_ids(read_whole_schema(OnlyKeyspaces(shop))) == expected  # type: ignore[arg-type]


def test_each_version_is_told_once_and_a_drop_is_marked(shop: Any, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    looks = updater(store, shop)
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    looks.cycle()
    shop.execute("ALTER TABLE su_shop.t ADD a int")
    looks.cycle()
    before = change_numbers(store)
    looks.cycle()
    assert change_numbers(store) == before
    shop.execute("DROP TABLE su_shop.t")
    updater(store, shop).cycle()
    first = history_of(store, "su_shop", "t")[-1].version.table_id
    assert list(dropped_of(store, "su_shop", "t")) == [first]
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    looks.cycle()
    assert [entry.version.number for entry in history_of(store, "su_shop", "t")] == [1, 2, 3]
    told = [(message["value"]["source"]["tables"] or {}).get("su_shop.t") for message in messages(store)]
    assert [number for number in told if number] == [1, 2, 3]
    # Its tables have no cdc.
    assert first not in CdcBegun(store)


def test_versions_that_the_sync_found_first_are_told_by_the_next_look(shop: Any, tmp_path: Path) -> None:
    """Data messages may name a version before its change is told; each is told in its order."""
    store = LocalStore(tmp_path)
    looks = updater(store, shop)
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    looks.cycle()
    for number in range(3):
        shop.execute(f"ALTER TABLE su_shop.t ADD c{number} int")
        assert version_of(store, read_table(shop, "su_shop", "t")).number == number + 2
    before = len(messages(store))
    looks.cycle()
    told = [message["value"] for message in messages(store)[before:]]
    assert [value["ddl"] for value in told] == [f"ALTER TABLE su_shop.t ADD c{number} int;" for number in range(3)]
    assert [value["source"]["tables"] for value in told] == [{"su_shop.t": number} for number in (2, 3, 4)]
    assert [entry.version.number for entry in history_of(store, "su_shop", "t")] == [1, 2, 3, 4]


def test_a_type_that_no_column_shows_is_told_and_a_type_that_tables_share_is_altered_once(
    shop: Any, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path)
    looks = updater(store, shop)
    shop.execute("CREATE TYPE su_shop.k (a int)")
    for name in ("t", "u"):
        shop.execute(f"CREATE TABLE su_shop.{name} (id int PRIMARY KEY, v frozen<k>)")
    looks.cycle()
    before = len(messages(store))
    shop.execute("ALTER TYPE su_shop.k ADD b int")
    looks.cycle()
    (message,) = messages(store)[before:]
    assert message["value"]["ddl"] == "ALTER TYPE su_shop.k ADD b int;"
    assert message["value"]["source"]["tables"] == {"su_shop.t": 2, "su_shop.u": 2}


def test_two_at_once_write_one_log(shop: Any, tmp_path: Path) -> None:
    stopped, errors = threading.Event(), list[Exception]()

    def work() -> None:
        looks = updater(LocalStore(tmp_path), shop)
        try:
            while not stopped.is_set():
                looks.cycle()
        except Exception as error:
            errors.append(error)

    rivals = [threading.Thread(target=work) for _ in range(3)]
    for rival in rivals:
        rival.start()
    try:
        shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
        for number in range(12):
            shop.execute(f"ALTER TABLE su_shop.t ADD c{number} int")
            if number % 3 == 2:
                shop.execute(f"ALTER TABLE su_shop.t DROP c{number - 1}")
    finally:
        stopped.set()
        for rival in rivals:
            rival.join()
    assert errors == []
    store = LocalStore(tmp_path)
    updater(store, shop).cycle()
    replayed(shop, store)


def replayed(shop: Any, store: LocalStore) -> None:
    """Check that each change is in the messages once: a second execution of a statement would fail."""
    expected = read_whole_schema(OnlyKeyspaces(shop))
    assert expected is not None
    for name in KEYSPACES:
        shop.execute(f'DROP KEYSPACE IF EXISTS "{name}"')
    for message in messages(store):
        shop.execute(message["value"]["ddl"])
    found = read_whole_schema(OnlyKeyspaces(shop))
    assert found is not None
    assert {name: table.columns for name, table in found.schema.tables.items()} == {
        name: table.columns for name, table in expected.schema.tables.items()
    }


class Behind(OnlyKeyspaces):
    """A node of a cluster without agreement: the answers are a real node's, but a peer has another version."""

    def execute(self, query: str, parameters: Any = None) -> Any:
        if "system.peers" in query:
            return [SimpleNamespace(peer="10.0.0.2", schema_version="another")]
        return super().execute(query, parameters)


def test_what_needs_agreement_waits_for_it(shop: Any, tmp_path: Path) -> None:
    store, now, agrees = LocalStore(tmp_path), [1000.0], [True]

    def choose() -> Any:
        return (OnlyKeyspaces if agrees[0] else Behind)(shop)

    looks = SchemaUpdater(store, SERVER, choose, now=lambda: now[0])
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    looks.cycle()
    told = len(messages(store))
    agrees[0] = False
    down = Behind(shop)
    down.down = frozenset(["10.0.0.2"])
    assert (node_schema(Behind(shop)).agrees, node_schema(down).agrees) == (False, True)
    shop.execute("ALTER TABLE su_shop.t ADD a int")
    shop.execute('DROP KEYSPACE "su_Other"')
    looks.cycle()
    assert looks.problems == []
    assert [entry.version.number for entry in history_of(store, "su_shop", "t")] == [1, 2]
    now[0] += TOLERATED_S + 1
    looks.cycle()
    assert "different schemas for 61 s, now 10.0.0.2" in looks.problems[0]
    assert len(messages(store)) == told
    agrees[0] = True
    looks.cycle()
    assert looks.problems == []
    assert [message["value"]["ddl"] for message in messages(store)[told:]] == [
        'DROP KEYSPACE "su_Other";',
        "ALTER TABLE su_shop.t ADD a int;",
    ]


def test_a_change_during_the_reading_is_not_mixed(shop: Any) -> None:
    class Altered(OnlyKeyspaces):
        left = 2

        def execute(self, query: str, parameters: Any = None) -> Any:
            found = super().execute(query, parameters)
            if "FROM system_schema.columns" in query and "dropped_columns" not in str(parameters) and self.left:
                self.left -= 1
                shop.execute(f"CREATE TABLE su_shop.new{self.left} (id int PRIMARY KEY)")
            return found

    node = Altered(shop)
    reading = read_whole_schema(node)
    assert reading is not None
    assert node.left == 0
    assert not reading.unreadable
    assert {name for keyspace, name in reading.schema.tables if keyspace == "su_shop"} == {"new0", "new1"}
    node.left = 100
    assert read_whole_schema(node) is None


def test_a_damaged_version_holds_up_its_table_only(shop: Any, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    shop.execute("CREATE TYPE su_shop.k (a int)")
    shop.execute("CREATE TABLE su_shop.bad (id int PRIMARY KEY, v frozen<k>)")
    shop.execute("CREATE TABLE su_shop.good (id int PRIMARY KEY)")
    updater(store, shop).cycle()
    whole = store.get("schemas/su_shop.bad/000001.json")
    store.put("schemas/su_shop.bad/000001.json", b"{")
    shop.execute("DROP TABLE su_shop.bad")
    shop.execute("CREATE TABLE su_shop.bad (id int PRIMARY KEY, v text)")
    shop.execute("ALTER TABLE su_shop.good ADD a int")
    looks = updater(store, shop)
    looks.cycle()
    shop.execute("ALTER TABLE su_shop.bad ADD w text")
    store.put("schemas/su_shop.bad/000002.json", b"{")
    looks.cycle()
    (problem,) = looks.problems
    assert problem.startswith("su_shop.bad: schemas/su_shop.bad/000002.json cannot be read")
    assert history_of(store, "su_shop", "good")[-1].version.number == 2
    assert messages(store)[-1]["value"]["source"]["tables"] is not None
    store.put("schemas/su_shop.bad/000001.json", whole)
    store.delete("schemas/su_shop.bad/000002.json")
    looks.cycle()
    assert looks.problems == []
    assert messages(store)[-1]["value"]["source"]["tables"]["su_shop.bad"] == 2


def test_a_damaged_change_holds_up_the_messages_only(shop: Any, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    updater(store, shop).cycle()
    shop.execute("ALTER TABLE su_shop.t ADD a int")
    updater(store, shop).cycle()
    key = "schema_changes/000000000002.json"
    whole = store.get(key)
    store.put(key, b"{")
    shop.execute("ALTER TABLE su_shop.t ADD b int")
    looks = updater(store, shop)
    looks.cycle()
    (problem,) = looks.problems
    assert problem.startswith(f"{key} cannot be read")
    assert [entry.version.number for entry in history_of(store, "su_shop", "t")] == [1, 2, 3]
    store.put(key, whole)
    looks.cycle()
    assert looks.problems == []
    assert messages(store)[-1]["value"]["ddl"] == "ALTER TABLE su_shop.t ADD b int;"


def test_a_table_of_an_unknown_type_holds_up_nobody_and_costs_nothing(shop: Any, tmp_path: Path) -> None:
    """A type of a later Cassandra, simulated: the schema is not read again before it changes."""

    class Later(OnlyKeyspaces):
        asked = 0

        def execute(self, query: str, parameters: Any = None) -> Any:
            found = super().execute(query, parameters)
            Later.asked += "system_schema.tables" in query
            if "kind, position, type" in query and parameters is None:
                odd = [row._replace(type="decimal128") if row.table_name == "odd" else row for row in found]
                return odd
            return found

    store = LocalStore(tmp_path)
    shop.execute("CREATE TABLE su_shop.odd (id int PRIMARY KEY)")
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    updater(store, shop).cycle()
    shop.execute("ALTER TABLE su_shop.t ADD a int")
    node = Later(shop)
    changed: list[Any] = []
    looks = SchemaUpdater(store, SERVER, lambda: node, changed=changed.append)
    for _ in range(3):
        looks.cycle()
    assert (Later.asked, changed) == (1, [node])
    (problem,) = looks.problems
    assert problem.startswith("su_shop.odd: ")
    assert [message["value"]["ddl"] for message in messages(store)][-1] == "ALTER TABLE su_shop.t ADD a int;"
    assert dropped_of(store, "su_shop", "odd") == {}


def test_a_table_without_cdc_between_two_plans_has_a_gap(shop: Any, tmp_path: Path) -> None:
    """And one that gets cdc for the first time has none."""
    store = LocalStore(tmp_path)
    config = Config.model_validate(
        {"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": "lake"}}
    )
    node = one_node(shop)
    looks = updater(store, shop, changed=lambda _: note_holes_of(store, config, node))

    def alter(cdc: str, name: str = "t") -> int:
        shop.execute(f"ALTER TABLE su_shop.{name} WITH cdc = {cdc}")
        looks.cycle()
        return len(Gaps(store).look())

    for name in ("t", "new"):
        shop.execute(f"CREATE TABLE su_shop.{name} (id int PRIMARY KEY)")
    assert alter("true") == 0
    for table_id in read_node_tables(node).with_cdc:
        CdcBegun(store).begins(table_id, 0)  # as the plan of the next minute does
    assert alter("false") == 0
    assert alter("true") == 1
    assert alter("true", "new") == 1
    (gap,) = Gaps(store).look().values()
    assert gap is not None
    assert list(gap.tables.values()) == ["su_shop.t"]


def test_the_copy_in_the_cluster_is_made_again(shop: Any, keyspace: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    StateSession(shop, keyspace).create({"class": "SimpleStrategy", "replication_factor": "1"})
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    looks = updater(store, shop, copy=SchemaHistory(shop, keyspace))
    looks.cycle()
    shop.execute("ALTER TABLE su_shop.t ADD a int")
    looks.cycle()

    def rows() -> list[Any]:
        return list(shop.execute(f"SELECT * FROM {keyspace}.schema_history"))

    before = rows()
    assert [(row.table_name, row.version, row.ddl) for row in before] == [
        ("t", 1, "CREATE TABLE su_shop.t (\n    id int,\n    PRIMARY KEY ((id))\n);"),
        ("t", 2, "ALTER TABLE su_shop.t ADD a int;"),
    ]
    shop.execute(f"DELETE FROM {keyspace}.schema_history WHERE keyspace_name = 'su_shop' AND table_name = 't'")
    updater(store, shop, copy=SchemaHistory(shop, keyspace)).cycle()
    assert rows() == before


def test_the_loop_runs_and_ends_when_it_is_asked_to(cassandra: Any, shop: Any, tmp_path: Path) -> None:
    document = {
        "server_name": SERVER,
        "cassandra": {"contact_points": [cassandra.contact_point], "port": cassandra.port},
        "store": {"url": str(tmp_path / "lake")},
        "state": {"keyspace": "su_state", "replication": {"class": "SimpleStrategy", "replication_factor": "1"}},
        "sync": {"run_s": 3.0},
        "schema_updater_poll_interval_ms": 500,
    }
    (tmp_path / "ringsync.yaml").write_text(yaml.safe_dump(document))
    shop.execute("CREATE TABLE su_shop.t (id int PRIMARY KEY)")
    arguments = ["--conf", str(tmp_path / "ringsync.yaml"), "--run", "r"]
    try:
        assert main(arguments) == ExitCode.OK
        copied = shop.execute("SELECT keyspace_name, table_name FROM su_state.schema_history")
        assert ("su_shop", "t") in [tuple(row) for row in copied]
    finally:
        shop.execute("DROP KEYSPACE IF EXISTS su_state")
    store = LocalStore(tmp_path / "lake")
    status = read_status(store, "schema_update/schema")
    assert status is not None
    assert (status["error"], status["problems"], status["changes"]) == (None, [], 1)
    statements = [message["value"]["ddl"] for message in messages(store)]
    assert "CREATE TABLE su_shop.t (\n    id int,\n    PRIMARY KEY ((id))\n);" in statements
    assert not any("su_state" in statement for statement in statements)


def test_one_node_is_asked(session: Any) -> None:
    node = one_node(session)
    assert isinstance(node, Node)
    assert read_whole_schema(node) is not None
