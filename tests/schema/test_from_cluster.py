"""Schemas read from a real cluster, and their plain JSON form."""

import json
from typing import Any

import pytest

from ringsync.cql.types import ListType, MapType, Native, UserType
from ringsync.schema.description import describe, from_description
from ringsync.schema.from_cluster import UnknownTableError, read_table, read_tables
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
        assert again == table
        assert again.digest == table.digest


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
    with pytest.raises(UnknownTableError, match=f"no table {tables}.{name}; did you mean .*{tables}.{hint}"):
        read_table(session, tables, name)


def test_a_wrong_keyspace_gets_a_suggestion(session: Any, tables: str) -> None:
    with pytest.raises(UnknownTableError, match=f"nor a keyspace shop.*did you mean {tables}.customers"):
        read_table(session, "shop", "customers")


def test_system_tables_are_refused(session: Any) -> None:
    for keyspace in ("system", "system_schema", "system_views"):
        with pytest.raises(SchemaError, match="belongs to Cassandra itself"):
            read_table(session, keyspace, "local")


def test_compact_storage_is_refused(session: Any, tables: str) -> None:
    session.execute(f"CREATE TABLE {tables}.compact (id int, c int, PRIMARY KEY (id, c)) WITH COMPACT STORAGE")
    with pytest.raises(SchemaError, match=rf"ALTER TABLE {tables}\.compact DROP COMPACT STORAGE"):
        read_table(session, tables, "compact")
