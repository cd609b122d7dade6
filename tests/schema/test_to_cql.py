"""Tables as CQL: our own parser reads the same table again, and a real server makes it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.cluster.schema import read_table
from ringsync.cql.types import Native, UserType
from ringsync.schema.description import describe, from_description
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Column, DroppedColumn, TableSchema
from ringsync.schema.to_cql import change_statements, create_statements
from tests.schema.printer import schemas

INT = Native("int")


@given(tables=schemas())
def test_what_is_written_is_read_again(tables: list[TableSchema]) -> None:
    for table in tables:
        text = "\n".join(create_statements(table, internals=True))
        assert parse_schema(text, "schema.cql").tables == (table,)
        plain = "\n".join(create_statements(table))
        assert parse_schema(plain, "schema.cql").tables == (replace(table, table_id="", dropped=()),)


@given(tables=schemas())
def test_an_equal_version_takes_no_statement(tables: list[TableSchema]) -> None:
    assert all(change_statements(table, table) == [] for table in tables)


def in_keyspace(table: TableSchema, keyspace: str) -> TableSchema:
    """Return a table, and its user-defined types, as they would be in another keyspace."""
    return from_description(json.loads(json.dumps({**describe(table), "keyspace": keyspace})))


CHANGES = [
    "CREATE TYPE {ks}.leaf (one int)",
    'CREATE TYPE {ks}."Branch" (leaf frozen<leaf>, "select" frozen<set<int>>)',
    """CREATE TABLE {ks}."Tree" (a int, b text, "C" uuid, d timestamp, s int static, v "Branch",
       w map<text, frozen<leaf>>, x list<int>,
       PRIMARY KEY ((a, b), "C", d)) WITH CLUSTERING ORDER BY ("C" DESC, d ASC)""",
    'ALTER TABLE {ks}."Tree" ADD y vector<float, 3>',
    'ALTER TABLE {ks}."Tree" ADD z text static',
    'ALTER TABLE {ks}."Tree" DROP x',
    'ALTER TABLE {ks}."Tree" ADD x list<int>',
    'ALTER TABLE {ks}."Tree" DROP x USING TIMESTAMP 1700000000123000',
    'ALTER TABLE {ks}."Tree" DROP w',
    'ALTER TABLE {ks}."Tree" RENAME "C" TO "order" AND b TO c',
    "ALTER TYPE {ks}.leaf ADD two tuple<int, text>",
    'ALTER TYPE {ks}."Branch" RENAME leaf TO "Leaf" AND "select" TO chosen',
    'DROP TABLE {ks}."Tree"',
    'DROP TYPE {ks}."Branch"',
    "DROP TYPE {ks}.leaf",
    "CREATE TYPE {ks}.leaf (one text)",
    'CREATE TYPE {ks}."Branch" ("Leaf" frozen<leaf>, chosen frozen<set<int>>)',
    'CREATE TABLE {ks}."Tree" (a bigint PRIMARY KEY, b frozen<"Branch">)',
    'ALTER TABLE {ks}."Tree" DROP b',
    'ALTER TABLE {ks}."Tree" ADD c frozen<"Branch">',
    'DROP TABLE {ks}."Tree"',
    'CREATE TABLE {ks}."Tree" (a bigint PRIMARY KEY, n counter)',
]


@pytest.fixture(scope="module")
def history(session: Any, keyspace: str) -> list[TableSchema]:
    """The table after each change."""
    found: list[TableSchema] = []
    for change in CHANGES:
        session.execute(change.format(ks=keyspace))
        if (found and not change.startswith(("CREATE TYPE", "DROP"))) or change.startswith("CREATE TABLE"):
            found.append(read_table(session, keyspace, "Tree"))
    return found


@pytest.fixture
def elsewhere(session: Any, keyspace: str) -> Any:
    name = f"{keyspace}_again"
    session.execute(f"CREATE KEYSPACE {name} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 1}}")
    yield name
    session.execute(f"DROP KEYSPACE {name}")


@pytest.mark.server
@pytest.mark.parametrize("every", [1, 3, 100], ids=["each change", "three at once", "the first and the last"])
def test_a_server_that_executes_the_changes_has_the_same_table(
    session: Any, history: list[TableSchema], elsewhere: str, every: int
) -> None:
    steps = [in_keyspace(table, elsewhere) for table in history]
    for statement in create_statements(steps[0]):
        session.execute(statement)
    before = steps[0]
    for after in [*steps[every:-1:every], steps[-1]]:
        for statement in change_statements(before, after):
            session.execute(statement)
        made = read_table(session, elsewhere, "Tree")
        # What was added and dropped between two versions is not told.
        seen = {column.name for column in before.columns} | {column.name for column in after.columns}
        dropped, expected = (tuple(c for c in t.dropped if c.name in seen) for t in (made, after))
        assert replace(made, dropped=dropped) == replace(after, table_id=made.table_id, dropped=expected)
        before = after


@pytest.mark.server
def test_a_server_makes_it_with_its_id_and_what_was_dropped(
    session: Any, history: list[TableSchema], elsewhere: str
) -> None:
    table = replace(in_keyspace(history[-2], elsewhere), table_id="5a1c395eb41f11e59f22ba0be0483c18")
    for statement in create_statements(table, internals=True):
        session.execute(statement)
    assert read_table(session, elsewhere, "Tree") == table


V1 = TableSchema("ks", "t", "a" * 32, (Column("id", "partition_key", INT), Column("v", "regular", INT)))
INSIDE = (UserType("ks", "k", ("a",), (INT,)), UserType("ks", "k", ("a",), (Native("text"),)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (V1, replace(V1, columns=(V1.columns[0], replace(V1.columns[1], type=Native("blob"))))),
        (V1, replace(V1, columns=(V1.columns[0], replace(V1.columns[1], kind="static")))),
        (V1, replace(V1, columns=(replace(V1.columns[0], type=Native("text")), V1.columns[1]))),
        (V1, replace(V1, columns=(V1.columns[0], Column("c", "clustering", INT), V1.columns[1]))),
        [replace(V1, columns=(V1.columns[0], replace(V1.columns[1], type=inside))) for inside in INSIDE],
    ],
)
def test_a_table_that_no_alter_makes_is_another_one_with_the_old_id(before: TableSchema, after: TableSchema) -> None:
    drop, *_, create = change_statements(before, after)
    assert (drop, create.split(" (")[0]) == ("DROP TABLE ks.t;", "CREATE TABLE ks.t")


@given(st.data())
def test_any_version_turns_into_any_other_of_the_same_key(data: st.DataObject) -> None:
    """The statements, applied by our own parser to the first version, give the columns of the second."""
    names = st.sets(st.sampled_from("vwxyz"))
    one, other = (
        TableSchema(
            "ks",
            "t",
            "a" * 32,
            (Column("id", "partition_key", INT), *(Column(n, "regular", INT) for n in sorted(data.draw(names)))),
        )
        for _ in range(2)
    )
    changes = [
        text if "USING" in text or "DROP" not in text else f"{text[:-1]} USING TIMESTAMP 1;"
        for text in change_statements(one, other)
    ]
    (made,) = parse_schema("\n".join([*create_statements(one, internals=True), *changes]), "changes").tables
    assert made.columns == other.columns


def renamed(first: str, second: str, *others: str, dropped: tuple[DroppedColumn, ...] = ()) -> TableSchema:
    keys = (Column(first, "partition_key", Native("int")), Column(second, "clustering", Native("int")))
    return TableSchema("ks", "t", "f" * 32, (*keys, *(Column(n, "regular", Native("int")) for n in others)), dropped)


@pytest.mark.parametrize(
    ("before", "after", "statements"),
    [
        (("a", "b"), ("b", "c"), ["RENAME b TO c", "RENAME a TO b"]),
        (("a", "b"), ("b", "a"), ["RENAME a TO a_0", "RENAME b TO a", "RENAME a_0 TO b"]),
        (("a", "b"), ("x", "b"), ["RENAME a TO x"]),
    ],
)
def test_keys_are_renamed_one_by_one_to_names_that_are_free(
    before: tuple[str, str], after: tuple[str, str], statements: list[str]
) -> None:
    assert change_statements(renamed(*before), renamed(*after)) == [f"ALTER TABLE ks.t {text};" for text in statements]


def test_a_key_gets_the_name_of_a_column_after_that_was_dropped() -> None:
    gone = DroppedColumn("x", "regular", Native("int"), 5)
    assert change_statements(renamed("a", "b", "x"), renamed("x", "b", dropped=(gone,))) == [
        "ALTER TABLE ks.t DROP x USING TIMESTAMP 5;",
        "ALTER TABLE ks.t RENAME a TO x;",
    ]


def test_a_type_named_by_a_reserved_word_has_quotes() -> None:
    kind = UserType("ks", "order", ("a",), (Native("int"),), frozen=True)
    table = TableSchema(
        "ks", "t", "f" * 32, (Column("id", "partition_key", Native("int")), Column("v", "regular", kind))
    )
    assert '    v frozen<"order">' in create_statements(table)[-1]
