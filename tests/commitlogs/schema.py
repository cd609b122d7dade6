"""The schema of the committed commit logs: what each table is there to show."""

from __future__ import annotations

from collections.abc import Iterator

from tests.commitlogs.literals import EDGES

NATIVES = tuple(EDGES)
"""Every native type but counter."""
COMPARED = tuple(name for name in NATIVES if name != "duration")
"""Those that can be keys, set elements and map keys."""
MANY = tuple(f"c{number:02}" for number in range(70))
REPLICATION = "WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
QUOTED = '"MixedCase"."Table"'
ODD_COLUMN = '"an ""odd"" näme ☃"'


def creation(vectors: bool) -> list[str]:
    """
    Return the statements that create keyspaces, types and tables.

    :param vectors: whether the server has vectors (5.0).
    """
    return [*_keyspaces(), *_tables_of_types(vectors), *_tables_of_statements(), *_tables_that_change()]


def _keyspaces() -> Iterator[str]:
    yield f"CREATE KEYSPACE shop {REPLICATION}"
    yield f'CREATE KEYSPACE "MixedCase" {REPLICATION}'
    yield "CREATE TYPE shop.address (street text, number int, tags frozen<set<text>>)"
    yield (
        "CREATE TYPE shop.person (name text, home frozen<address>, phones frozen<map<text, text>>, "
        "size tuple<int, double>)"
    )
    yield 'CREATE TYPE "MixedCase"."Pair" ("Left" int, "right side" text)'


def _tables_of_types(vectors: bool) -> Iterator[str]:
    def columns(prefix: str, form: str, names: tuple[str, ...] = NATIVES) -> str:
        return ", ".join(f"{prefix}_{name} {form.format(name)}" for name in names)

    yield f"CREATE TABLE shop.natives (id int PRIMARY KEY, {columns('c', '{}')}) WITH cdc = true"
    yield f"CREATE TABLE shop.empties (id int PRIMARY KEY, {columns('c', '{}')}) WITH cdc = true"
    names = ", ".join(f"c_{name}" for name in COMPARED)
    order = ", ".join(f"c_{name} {'DESC' if number % 2 else 'ASC'}" for number, name in enumerate(COMPARED))
    yield (
        f"CREATE TABLE shop.clusterings (id int, {columns('c', '{}', COMPARED)}, v text, PRIMARY KEY (id, {names})) "
        f"WITH CLUSTERING ORDER BY ({order}) AND cdc = true"
    )
    names = ", ".join(f"k_{name}" for name in COMPARED)
    yield f"CREATE TABLE shop.keys ({columns('k', '{}', COMPARED)}, v text, PRIMARY KEY (({names}))) WITH cdc = true"
    yield (
        f"CREATE TABLE shop.elements (id int PRIMARY KEY, {columns('l', 'list<{}>')}, "
        f"{columns('s', 'set<{}>', COMPARED)}, {columns('m', 'map<{0}, {0}>', COMPARED)}) WITH cdc = true"
    )
    yield (
        "CREATE TABLE shop.nested (id int PRIMARY KEY, fl frozen<list<int>>, fs frozen<set<text>>, "
        "fm frozen<map<text, int>>, t tuple<int, text, frozen<list<double>>>, u address, fu frozen<address>, p person, "
        "lm list<frozen<map<text, frozen<list<int>>>>>, mt map<frozen<tuple<int, text>>, frozen<set<uuid>>>, "
        "su set<frozen<address>>, mu map<text, frozen<person>>, ft frozen<map<int, tuple<int, address>>>) "
        "WITH cdc = true"
    )
    yield (
        "CREATE TABLE shop.frozen_keys (k frozen<list<int>>, c frozen<map<text, int>>, t frozen<tuple<int, text>>, "
        "u frozen<address>, v int, PRIMARY KEY (k, c, t, u)) WITH CLUSTERING ORDER BY (c ASC, t DESC, u ASC) "
        "AND cdc = true"
    )
    if vectors:
        yield (
            "CREATE TABLE shop.vectors (id int PRIMARY KEY, f vector<float, 3>, t vector<text, 2>, "
            "s vector<smallint, 2>, n vector<frozen<list<int>>, 2>, l list<frozen<vector<double, 2>>>, "
            "m map<text, frozen<vector<int, 1>>>) WITH cdc = true"
        )


def _tables_of_statements() -> Iterator[str]:
    yield (
        "CREATE TABLE shop.counters (id int, seq int, n counter, m counter, s counter STATIC, PRIMARY KEY (id, seq)) "
        "WITH cdc = true"
    )
    yield (
        "CREATE TABLE shop.orders (id int, seq int, status text STATIC, labels map<text, int> STATIC, v text, w int, "
        "m map<text, int>, s set<text>, l list<int>, u address, PRIMARY KEY (id, seq)) "
        "WITH CLUSTERING ORDER BY (seq DESC) AND cdc = true"
    )
    yield "CREATE TABLE shop.plain (id int PRIMARY KEY, v text, w int) WITH cdc = true"
    yield "CREATE TABLE shop.nocdc (id int PRIMARY KEY, v text)"
    for name, order in (("wide", "c ASC, d ASC"), ("mixed", "c DESC, d ASC")):
        yield (
            f"CREATE TABLE shop.{name} (p text, c int, d text, e int, v int, s int STATIC, PRIMARY KEY (p, c, d, e)) "
            f"WITH CLUSTERING ORDER BY ({order}, e ASC) AND cdc = true"
        )
    yield (
        "CREATE TABLE shop.composite (a int, b text, c blob, d text, e blob, v int, PRIMARY KEY ((a, b, c), d, e)) "
        "WITH CLUSTERING ORDER BY (d DESC, e ASC) AND cdc = true"
    )
    columns = ", ".join(f"{name} int" for name in MANY)
    yield f"CREATE TABLE shop.many (id int, c int, {columns}, PRIMARY KEY (id, c)) WITH cdc = true"
    yield "CREATE TABLE shop.times (id int, c int, v text, m map<text, int>, PRIMARY KEY (id, c)) WITH cdc = true"
    yield (
        "CREATE TABLE shop.expiring (id int, c int, v text, w text, m map<text, int>, s text STATIC, "
        "PRIMARY KEY (id, c)) WITH default_time_to_live = 157680000 AND cdc = true"
    )
    yield "CREATE TABLE shop.lwt (id int, c int, v text, s int STATIC, PRIMARY KEY (id, c)) WITH cdc = true"
    yield (
        f'CREATE TABLE {QUOTED} ("Id" int, "select" text, {ODD_COLUMN} map<text, int>, p frozen<"Pair">, q "Pair", '
        'PRIMARY KEY ("Id", "select")) WITH cdc = true'
    )


def _tables_that_change() -> Iterator[str]:
    yield (
        "CREATE TABLE shop.dropping (id int PRIMARY KEY, a int, b map<text, int>, c text, d frozen<address>, e int) "
        "WITH cdc = true"
    )
    yield "CREATE TABLE shop.adding (id int PRIMARY KEY, a int, c int, u frozen<address>) WITH cdc = true"
    yield "CREATE TABLE shop.gone (id int PRIMARY KEY, v text, m map<text, int>) WITH cdc = true"
    yield "CREATE TABLE shop.beyond (id int PRIMARY KEY, v text) WITH cdc = true"
