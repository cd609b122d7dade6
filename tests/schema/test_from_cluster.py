"""Schemas read from a real cluster, and their plain JSON form."""

import json
import time
from typing import Any

import pytest

from ringsync.cluster.schema import read_table, read_tables
from ringsync.cql.types import ListType, MapType, Native, SetType, TupleType, UserType
from ringsync.schema.description import describe, from_description
from ringsync.schema.table import DroppedColumn, SchemaError

pytestmark = pytest.mark.server

EVERYTHING = """
CREATE TABLE {ks}.everything (
  b int, a text, c timestamp, d uuid, s_two text static, s_one set<int> static,
  "Mixed ""Case" text, zebra frozen<list<frozen<"Outer">>>, apple map<text, frozen<inner>>, bare inner,
  vec vector<float, 3>, pair tuple<int, frozen<"Outer">>, nested frozen<map<frozen<set<int>>, list<decimal>>>,
  PRIMARY KEY ((b, a), d, c)
) WITH CLUSTERING ORDER BY (d DESC, c ASC)
"""


@pytest.fixture(scope="module")
def tables(session: Any, keyspace: str) -> str:
    """A keyspace with one table of each kind."""
    for statement in (
        "CREATE TYPE {ks}.inner (x int, tags frozen<list<text>>)",
        'CREATE TYPE {ks}."Outer" (inside frozen<inner>, "Number" varint)',
        EVERYTHING,
        "CREATE TABLE {ks}.hits (page text PRIMARY KEY, n counter)",
        'CREATE TABLE {ks}."Orders" (id int PRIMARY KEY)',
        "CREATE TABLE {ks}.customers (id int PRIMARY KEY, region text)",
    ):
        session.execute(statement.format(ks=keyspace))
    return keyspace


def test_columns_in_their_order(session: Any, tables: str) -> None:
    table = read_table(session, tables, "everything")
    assert [(column.name, column.kind, column.descending) for column in table.columns] == [
        ("b", "partition_key", False),
        ("a", "partition_key", False),
        ("d", "clustering", True),
        ("c", "clustering", False),
        ("s_one", "static", False),
        ("s_two", "static", False),
        ('Mixed "Case', "regular", False),
        ("apple", "regular", False),
        ("bare", "regular", False),
        ("nested", "regular", False),
        ("pair", "regular", False),
        ("vec", "regular", False),
        ("zebra", "regular", False),
    ]
    assert len(bytes.fromhex(table.table_id)) == 16


def test_user_types_inside_user_types(session: Any, tables: str) -> None:
    table = read_table(session, tables, "everything")
    inner = UserType(
        tables, "inner", ("x", "tags"), (Native("int"), ListType(Native("text"), frozen=True)), frozen=True
    )
    outer = UserType(tables, "Outer", ("inside", "Number"), (inner, Native("varint")), frozen=True)
    assert table.column("zebra").type == ListType(outer, frozen=True)
    assert table.column("apple").type == MapType(Native("text"), inner)
    assert table.column("bare").is_multicell
    assert not table.column("zebra").is_multicell


def test_counters(session: Any, tables: str) -> None:
    assert [column.is_counter for column in read_table(session, tables, "hits").columns] == [False, True]


def test_the_json_form_is_exact(session: Any, tables: str) -> None:
    for name in ("everything", "hits", "Orders"):
        table = read_table(session, tables, name)
        again = from_description(json.loads(json.dumps(describe(table))))
        assert (again, again.since_us) == (table, table.since_us)
        assert again.digest == table.digest


def test_dropped_columns(session: Any, tables: str) -> None:
    session.execute(
        f"CREATE TABLE {tables}.changed (k int, c int, s set<int> static, u frozen<inner>, again int, stays int, "
        "PRIMARY KEY (k, c))"
    )
    before = read_table(session, tables, "changed")
    assert before.dropped == ()
    for change in (
        "DROP s USING TIMESTAMP 1700000000123000",
        "DROP u USING TIMESTAMP 1700000000456000",
        "DROP again USING TIMESTAMP 1700000000789000",
        "ADD again int",
    ):
        session.execute(f"ALTER TABLE {tables}.changed {change}")
    table = read_table(session, tables, "changed")
    spelt_out = TupleType((Native("int"), ListType(Native("text"), frozen=True)))
    assert table.dropped == (
        DroppedColumn("again", "regular", Native("int"), 1_700_000_000_789_000),
        DroppedColumn("s", "static", SetType(Native("int")), 1_700_000_000_123_000),
        DroppedColumn("u", "regular", spelt_out, 1_700_000_000_456_000),
    )
    assert [column.name for column in table.columns] == ["k", "c", "again", "stays"]
    assert from_description(json.loads(json.dumps(describe(table)))) == table
    assert table.digest != before.only(["again", "stays"]).digest, "what was written to `again` before is gone"
    assert table.only(["stays"]).digest == before.only(["stays"]).digest


def test_a_description_from_before_dropped_columns(session: Any, tables: str) -> None:
    table = read_table(session, tables, "everything")
    description = {key: value for key, value in describe(table).items() if key != "dropped"}
    assert from_description(description) == table


def test_all_tables_of_a_cluster(session: Any, tables: str) -> None:
    session.execute(f"CREATE TABLE {tables}.thrift (id int PRIMARY KEY, v int) WITH COMPACT STORAGE")
    schema = read_tables(session)
    assert schema.unreadable == ()
    found = {(table.keyspace, table.name): table for table in schema.tables}
    assert found[tables, "everything"] == read_table(session, tables, "everything")
    assert [(c.name, c.kind, str(c.type)) for c in found[tables, "thrift"].columns] == [
        ("id", "partition_key", "int"),
        ("column1", "clustering", "text"),
        ("v", "static", "int"),
        ("value", "regular", "blob"),
    ]
    assert {keyspace for keyspace, _ in found} >= {tables, "system", "system_schema", "system_auth"}
    [thrift_version] = found["system", "local"].dropped
    assert thrift_version.dropped_at == (2**63 - 1) // 1000 * 1000
    assert len(schema.by_id()) == len(schema.tables)


def test_a_schema_tells_which_statement_made_it(session: Any, keyspace: str) -> None:
    name = f"{keyspace}.dated"
    types = (f"CREATE TYPE {keyspace}.leaf (one int)", f"CREATE TYPE {keyspace}.branch (leaf frozen<leaf>)")
    for statement in types:
        session.execute(statement)
    before = 0
    for statement in (
        f"CREATE TABLE {name} (k int, c int, v int, b frozen<branch>, PRIMARY KEY (k, c))",
        f"ALTER TABLE {name} ADD w int",
        f"ALTER TABLE {name} DROP v USING TIMESTAMP 1700000000123000",
        f"ALTER TABLE {name} ADD v int",
        f"ALTER TABLE {name} RENAME c TO clustered",
        f"ALTER TYPE {keyspace}.leaf ADD two int",
        f"ALTER TYPE {keyspace}.leaf RENAME one TO first",
    ):
        began_us = int(time.time() * 1_000) * 1_000  # the server dates statements in whole ms
        session.execute(statement)
        table = read_table(session, keyspace, "dated")
        assert max(began_us, before) <= table.since_us <= time.time() * 1_000_000, statement
        assert next(t for t in read_tables(session).tables if t.name == "dated").since_us == table.since_us
        before = table.since_us
    session.execute(f"ALTER TABLE {name} WITH comment = 'not a change of the schema'")
    session.execute(f"CREATE TYPE {keyspace}.unused (one int)")
    assert read_table(session, keyspace, "dated").since_us == before


def test_a_changed_type_changes_the_digest(session: Any, tables: str) -> None:
    session.execute(f"CREATE TYPE {tables}.growing (one int)")
    session.execute(f"CREATE TABLE {tables}.grown (id int PRIMARY KEY, v frozen<growing>)")
    before = read_table(session, tables, "grown")
    session.execute(f"ALTER TYPE {tables}.growing ADD two int")
    assert read_table(session, tables, "grown").digest != before.digest


@pytest.mark.parametrize(
    ("name", "hint"),
    [("order", '"Orders"'), ("orders", '"Orders"'), ("custmers", "customers"), ("everythin", "everything")],
)
def test_a_wrong_name_gets_a_suggestion(session: Any, tables: str, name: str, hint: str) -> None:
    with pytest.raises(SchemaError, match=f'no table {tables}."?{name}"?; did you mean .*{tables}.{hint}'):
        read_table(session, tables, name)


def test_a_wrong_keyspace_gets_a_suggestion(session: Any, tables: str) -> None:
    with pytest.raises(SchemaError, match=f"nor a keyspace shop.*did you mean {tables}.customers"):
        read_table(session, "shop", "customers")


def test_system_tables_are_refused(session: Any) -> None:
    for keyspace in ("system", "system_schema", "system_views"):
        with pytest.raises(SchemaError, match="belongs to Cassandra itself"):
            read_table(session, keyspace, "local")


def test_compact_storage_is_refused(session: Any, tables: str) -> None:
    session.execute(f"CREATE TABLE {tables}.compact (id int, c int, PRIMARY KEY (id, c)) WITH COMPACT STORAGE")
    with pytest.raises(SchemaError, match=rf"ALTER TABLE {tables}\.compact DROP COMPACT STORAGE"):
        read_table(session, tables, "compact")
