"""Schemas from CQL text, against what real servers say, against random schemas, and against damaged text."""

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cluster.schema import read_table, read_tables
from ringsync.cql.types import ListType, Native, UserType
from ringsync.schema.description import from_description
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Column, DroppedColumn, Schema, SchemaError, TableSchema
from servers.cassandra import CassandraNode
from tests.schema.printer import printed, schemas
from tests.schema.statements import EVERY_VERSION, VERSION_5, statements

DATA = Path(__file__).parent / "data"
VERSIONS = ("4.0", "4.1", "5.0")
COMPACT = {"compact", "compact_static", "compact_keys"}
ID = "5a1c395e-b41f-11e5-9f22-ba0be0483c18"


def as_stored(table: TableSchema) -> TableSchema:
    """The table with the times of its drops in whole ms: ``system_schema`` forgets the rest, towards zero."""

    def whole(time: int) -> int:
        return time // 1000 * 1000 if time > 0 else -(-time // 1000 * 1000)

    return replace(table, dropped=tuple(replace(old, dropped_at=whole(old.dropped_at)) for old in table.dropped))


def by_name(schema: Schema) -> dict[str, TableSchema]:
    return {table.full_name: table for table in schema.tables}


def recorded(name: str) -> str:
    return (DATA / name).read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["", "-snapshot"])
def test_recorded_texts_say_what_the_server_says(version: str, kind: str) -> None:
    found = parse_schema(recorded(f"{version}{kind}.cql"), "schema.cql")
    expected = [from_description(json.loads(line)) for line in recorded(f"{version}.json").splitlines()]
    tables = {table.name: as_stored(table) for table in found.tables}
    assert tables == {table.name: table for table in expected if table.name not in COMPACT}
    assert len(tables) == (13 if version == "5.0" else 11)
    assert {table.name for table in found.unreadable} == COMPACT
    assert all(len(table.table_id) == 32 and "COMPACT" in table.reason for table in found.unreadable)
    assert set(found.by_id()) == {table.table_id for table in found.tables}


@pytest.fixture(scope="module")
def tables(session: Any, keyspace: str) -> str:
    """A keyspace with tables of every kind."""
    for text in (EVERY_VERSION, VERSION_5):
        for statement in statements(text, keyspace):
            session.execute(statement)
    return keyspace


def described(session: Any, what: str) -> Schema:
    text = "\n\n".join(row.create_statement for row in session.execute(f"DESCRIBE {what}"))
    return parse_schema(text, what)


@pytest.mark.server
def test_describe_keyspace(session: Any, tables: str) -> None:
    found = described(session, f"KEYSPACE {tables} WITH INTERNALS")
    assert len(found.tables) == 10
    for table in found.tables:
        assert as_stored(table) == read_table(session, tables, table.name)
    dropped = {old.name: old for old in by_name(found)[f"{tables}.changed"].dropped}
    assert dropped["s"] == DroppedColumn("s", "static", Native("int"), 1_700_000_000_123_456)
    assert dropped["ss"].dropped_at == -5000


@pytest.mark.server
def test_describe_full_schema_has_all_tables_of_the_cluster(session: Any, tables: str) -> None:
    text, cluster = described(session, "FULL SCHEMA WITH INTERNALS"), read_tables(session)
    compact = {table.table_id for table in text.unreadable}
    assert {table.name for table in cluster.tables if table.table_id in compact} == COMPACT
    assert {table.table_id: as_stored(table) for table in text.tables} == {
        table.table_id: as_stored(table) for table in cluster.tables if table.table_id not in compact
    }
    assert cluster.unreadable == ()
    assert "system.local" in by_name(text)


@pytest.mark.server
def test_describe_without_internals_has_no_ids(session: Any, tables: str) -> None:
    found = described(session, f"KEYSPACE {tables}")
    assert [replace(read_table(session, tables, t.name), table_id="", dropped=()) for t in found.tables] == list(
        found.tables
    )
    with pytest.raises(SchemaError, match=r"the id of .*Orders.* DESCRIBE SCHEMA WITH INTERNALS .*snapshot"):
        found.by_id()


@pytest.mark.server
def test_snapshots(session: Any, tables: str, cassandra: CassandraNode) -> None:
    cassandra.nodetool("snapshot", "-t", "from_cql", tables)
    files = list(cassandra.folder.glob(f"data/{tables}/*/snapshots/from_cql/schema.cql"))
    found = parse_schema("\n".join(file.read_text() for file in files), "schema.cql")
    assert {table.name: as_stored(table) for table in found.tables} == {
        table.name: read_table(session, tables, table.name) for table in found.tables
    }
    assert len(found.tables) == 10
    cassandra.nodetool("clearsnapshot", "-t", "from_cql", "--", tables)


def table_of(text: str) -> TableSchema:
    [table] = parse_schema(text, "schema.cql").tables
    return table


def test_what_people_write_by_hand() -> None:
    text = f"""
    -- a comment; CREATE TABLE no.no (a int)
    // another one: it's
    USE "Shop";
    create or replace function f (a int) called on null input returns int language java as $$ ';' $$;
    Create Type IF NOT EXISTS outer (i frozen<"Shop".inner>, n VARCHAR);
    Create Type "Shop".inner (x INT);
    CREATE TABLE if not exists "T" (a int, /* ; */ "b""b" "Shop".outer static, c list<frozen<outer>>,
        d int, PRIMARY KEY (a, d)) with clustering order by (d desc)
        and compaction = {{'class': 'X', 'a)': '}}'}} and id = '{ID.upper()}' and gc_grace_seconds = -1.5e3;
    ALTER TABLE "Shop"."T" WITH comment = ';';
    ALTER TABLE IF EXISTS "T" ADD IF NOT EXISTS (e int, f text STATIC);
    GRANT SELECT ON KEYSPACE "Shop" TO someone;;
    CREATE ROLE someone WITH PASSWORD = 'it''s;' AND OPTIONS = {{'a': 1}}
    """
    table = table_of(text)
    inner = UserType("Shop", "inner", ("x",), (Native("int"),), True)
    outer = UserType("Shop", "outer", ("i", "n"), (inner, Native("text")))
    assert table == TableSchema(
        "Shop",
        "T",
        ID.replace("-", ""),
        (
            Column("a", "partition_key", Native("int")),
            Column("d", "clustering", Native("int"), descending=True),
            Column('b"b', "static", outer),
            Column("f", "static", Native("text")),
            Column("c", "regular", ListType(replace(outer, frozen=True))),
            Column("e", "regular", Native("int")),
        ),
    )


def test_a_missing_comma_between_dropped_columns() -> None:
    """As older patch versions of Cassandra write it."""
    table = table_of(
        "CREATE TABLE k.t (id int PRIMARY KEY,\n a int static\n b text) WITH ID = "
        f"{ID}; ALTER TABLE k.t DROP a USING TIMESTAMP 5; ALTER TABLE k.t DROP b USING TIMESTAMP 6;"
    )
    assert table.columns == (Column("id", "partition_key", Native("int")),)
    assert table.dropped == (
        DroppedColumn("a", "static", Native("int"), 5),
        DroppedColumn("b", "regular", Native("text"), 6),
    )


def test_the_later_one_of_two_equal_ids_counts() -> None:
    one = f"CREATE TABLE k.t (id int PRIMARY KEY, v {{}}) WITH ID = {ID};"
    other = one.replace("5a1c", "0000")
    assert table_of(one.format("int") * 2) == table_of(one.format("int"))
    assert table_of(one.format("int") + one.format("text")) == table_of(one.format("text"))
    both = parse_schema(one.format("int") + other.format("text"), "schema.cql")
    assert len(both.by_id()) == 2
    without_id = "CREATE TABLE k.t (id int PRIMARY KEY);"
    assert len(parse_schema(without_id + one.format("int"), "schema.cql").by_id()) == 1


def test_tables_that_cannot_be_read_say_why() -> None:
    def reason(text: str) -> str:
        [table] = parse_schema(text, "schema.cql").unreadable
        return table.reason

    assert "COMPACT STORAGE" in reason("CREATE TABLE k.t (id int PRIMARY KEY) WITH COMPACT STORAGE")
    view = "CREATE MATERIALIZED VIEW k.v AS SELECT * FROM k.t WHERE id IS NOT NULL PRIMARY KEY (id)"
    assert "view of k.t, whose CREATE TABLE is missing" in reason(view)
    table = "CREATE TABLE k.t (id int PRIMARY KEY, v frozen<u>);"
    assert "column v whose type needs a CREATE TYPE that is missing" in reason(table)
    assert "DESCRIBE KEYSPACE k" in reason(table + "CREATE TYPE k.u (f frozen<other>)")


def test_the_type_of_a_dropped_column_may_be_gone() -> None:
    table = table_of(
        "CREATE TABLE k.t (id int PRIMARY KEY, v list<vector<frozen<u>, 2>>); ALTER TABLE k.t DROP v USING TIMESTAMP 5"
    )
    assert str(table.dropped[0].type) == "list<vector<blob, 2>>"
    assert table.dropped[0].is_multicell


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CREATE TABLE k.t (\n  id int PRIMARY KEY,\n  v ?\n)", "s:3:5: expected a type, found ?"),
        ("CREATE TABLE k.t (id int PRIMARY KEY; ", r"s:1:37: expected a comma or \), found ;"),
        ("CREATE TABLE k.t (id int)", "s:1:14: k.t has no PRIMARY KEY"),
        ("CREATE TABLE k.t (id int PRIMARY KEY, PRIMARY KEY (id))", "s:1:51: k.t has a second PRIMARY KEY"),
        ("CREATE TABLE k.t (id int, PRIMARY KEY (it))", "s:1:14: k.t has no column it"),
        ("CREATE TABLE k.t (id int PRIMARY KEY, id int)", "s:1:39: k.t has two columns id"),
        ("CREATE TABLE t (id int PRIMARY KEY)", "s:1:14: .*write the keyspace before t and a dot, or USE"),
        ("CREATE TABLE k.t (id int PRIMARY KEY, v list<int, int>)", "s:1:39: column v of k.t: .*does not take 2"),
        ("CREATE TABLE k.t (id int PRIMARY KEY, v other.u)", "s:1:41: a type of keyspace other"),
        ("CREATE TYPE k.t (v map<int>)", "s:1:13: user-defined type k.t: .*does not take 1"),
        ("CREATE TABLE k.t (id int PRIMARY KEY) WITH ID = 7", "s:1:49: expected a table's id such as"),
        ("CREATE TABLE k.t (id int PRIMARY KEY) WITH CLUSTERING ORDER BY (id)", "id is no clustering column"),
        ("CREATE TABLE k.t (id int PRIMARY KEY) WITH a = {'b': 1", r"s:1:48: this \{ is never closed"),
        ("CREATE TABLE k.t (id int PRIMARY KEY) WITH a = 'b", "s:1:48: this string never ends"),
        ('CREATE TABLE k."t', "s:1:16: this quoted name never ends"),
        ("/* CREATE", "s:1:1: this comment never ends"),
        ("ALTER TABLE k.t ADD v int", "s:1:13: there is no CREATE TABLE of k.t before"),
        ("CREATE TABLE k.t (i int PRIMARY KEY, v int); ALTER TABLE k.t DROP v", "USING TIMESTAMP and the µs.*the end"),
        ("CREATE TABLE k.t (i int PRIMARY KEY); ALTER TABLE k.t DROP i USING TIMESTAMP 5", "no static or regular"),
        ("CREATE TABLE k.t (i int PRIMARY KEY); ALTER TABLE k.t RENAME i TO j", "expected ADD, DROP or WITH"),
        ("DROP TABLE k.t", "s:1:1: expected a statement that DESCRIBE or a snapshot writes"),
        ("ALTER TYPE k.t ADD v int", "after ALTER: TABLE"),
        ("CREATE NONSENSE", "after CREATE: TABLE, TYPE"),
    ],
)
def test_errors_name_the_place(text: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        parse_schema(text, "s")


def test_deep_types_do_not_exhaust_the_stack() -> None:
    with pytest.raises(SchemaError, match="nested more than"):
        parse_schema(f"CREATE TABLE k.t (id {'list<' * 100_000}int", "s")


@settings(max_examples=50, deadline=None)
@given(schemas(), st.integers(0, 10_000))
def test_a_printed_schema_is_read_again(tables: list[TableSchema], layout: int) -> None:
    text = printed(tables, random.Random(layout).choice)
    assert parse_schema(text, "schema.cql") == Schema(tuple(tables))


def read_or_fail_clearly(text: str) -> None:
    with contextlib.suppress(SchemaError):
        parse_schema(text, "schema.cql").by_id()


@settings(max_examples=75, deadline=None)
@given(st.sampled_from(VERSIONS), st.integers(0, 20_000), st.integers(0, 2_000))
def test_cut_texts(version: str, start: int, length: int) -> None:
    text = recorded(f"{version}.cql")
    read_or_fail_clearly(text[:start])
    read_or_fail_clearly(text[start:])
    read_or_fail_clearly(text[:start] + text[start + length :])


WORDS = [
    "'",
    '"',
    "$$",
    "/*",
    "*/",
    "--",
    "<",
    ">",
    "(",
    ")",
    ";",
    ",",
    ".",
    "{",
    "frozen",
    "PRIMARY KEY",
    "\0",
    "9" * 30,
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(VERSIONS),
    st.lists(st.tuples(st.integers(0, 16_000), st.one_of(st.sampled_from(WORDS), st.characters())), max_size=5),
)
def test_changed_texts(version: str, changes: list[tuple[int, str]]) -> None:
    text = recorded(f"{version}-snapshot.cql")
    for offset, word in changes:
        text = text[:offset] + word + text[offset + len(word) :]
    read_or_fail_clearly(text)
