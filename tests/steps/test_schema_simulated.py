"""Random schema changes, versions that the sync finds, and tables that cannot be read: what is told can be executed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ringsync.ledger.table_versions import version_of
from ringsync.schema.table import TableSchema, UnreadableTable
from tests.ledger.histories import history_of
from tests.steps.schema_looks import Looks, Types, looks, table

__all__ = ["looks"]

STEPS = 120
PLAIN = ("int", "text")


@dataclass
class Cluster:
    """A schema as Cassandra has it: it refuses what Cassandra refuses.

    :ivar types: fields by name
    :ivar tables: columns by name; ``r`` and the like are clustering columns
    """

    types: dict[str, list[list[str]]] = field(default_factory=dict)
    tables: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)

    def execute(self, ddl: str, at: int = 0) -> None:
        text = " ".join(ddl.removesuffix(";").split())
        verb, kind, name, rest = re.fullmatch(r"(\w+) (\w+) (?:IF NOT EXISTS )?(?:k\.)?(\w+) ?(.*)", text).groups()  # type: ignore[union-attr]
        if kind == "TYPE":
            self._type(verb, name, rest)
        elif kind == "TABLE":
            self._table(verb, name, rest, at)

    def _type(self, verb: str, name: str, rest: str) -> None:
        if verb == "CREATE":
            fields = [part.split(" ", 1) for part in rest.strip("( )").split(", ")]
            assert self.types.get(name, fields) == fields
            self._has_types(*(kind for _, kind in fields))
            self.types[name] = fields
        elif verb == "DROP":
            fields_of = [kind for other in self.types.values() for _, kind in other]
            columns = [kind for one in self.tables.values() for kind in one.values()]
            assert not any(f"<{name}>" in kind for kind in (*fields_of, *columns))
            del self.types[name]
        elif rest.startswith("RENAME"):
            names = dict(pair.split(" TO ") for pair in rest.removeprefix("RENAME ").split(" AND "))
            assert names.keys() <= dict(self.types[name]).keys()  # type: ignore[arg-type]
            self.types[name] = [[names.get(one, one), kind] for one, kind in self.types[name]]
        else:
            _, added, kind = rest.split(" ", 2)
            self._has_types(kind)
            assert added not in dict(self.types[name])  # type: ignore[arg-type]
            self.types[name] = [*self.types[name], [added, kind]]

    def _table(self, verb: str, name: str, rest: str, at: int) -> None:
        if verb == "CREATE":
            assert name not in self.tables
            columns = dict(part.split(" ", 1) for part in rest[: rest.index(", PRIMARY")].strip("( ").split(", "))
            (key,) = set(columns) - {"id"} - {one for one in columns if one.startswith("c")}
            self._has_types(*columns.values())
            self.keys[name], self.tables[name], self.dropped[name] = key, columns, {}
            return
        columns = self.tables[name]
        if verb == "DROP":
            del self.tables[name]
            return
        action, column, *others = rest.split(" ", 2)
        if action == "ADD":
            assert column not in columns
            self._has_types(others[0])
            columns[column] = others[0]
        elif action == "DROP":
            assert column.startswith("c")
            self.dropped[name][column] = (columns.pop(column), at)
        else:
            new = others[0].removeprefix("TO ")
            assert column == self.keys[name]
            assert new not in columns
            columns[new], self.keys[name] = columns.pop(column), new

    def _has_types(self, *kinds: str) -> None:
        assert all(one in self.types for kind in kinds for one in re.findall(r"<(\w)>", kind))


class Source(Cluster):
    """The cluster that is changed at random.

    :ivar made: tables by name, as ringsync reads them; ``ids`` likewise
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance, self.now, self.count = chance, 1_700_000_000_000_000, 0
        self.ids: dict[str, str] = {}
        self.since: dict[str, int] = {}

    def change(self) -> None:
        for statement in self._statements():
            self.now += 1000
            name = statement.split("k.")[1].split()[0]
            if statement.startswith("CREATE TABLE") and name in self.tables:
                continue
            if statement.startswith("CREATE TYPE") and name in self.types:
                continue
            column = statement.split()[-2]
            if (
                " ADD " in statement
                and self.dropped.get(name, {}).get(column, (statement.split()[-1], 0))[0] != (statement.split()[-1])
            ):
                continue
            try:
                self.execute(statement, self.now)
            except (AssertionError, KeyError, ValueError):
                continue
            if statement.startswith("CREATE TABLE"):
                self.count += 1
                self.ids[name] = f"0{self.count:03x}"
            # An altered type changes its tables, too.
            self.since = (
                dict.fromkeys(self.tables, self.now) if " TYPE " in statement else {**self.since, name: self.now}
            )
            return

    def _statements(self) -> Iterator[str]:
        choose = self.chance.choice
        while True:
            name, kind, column = choose("tu"), choose("xyz"), f"c{self.chance.randrange(3)}"
            cql = choose([*PLAIN, *(f"frozen<{one}>" for one in "xyz")])
            yield choose(
                [
                    f"CREATE TYPE k.{kind} ( f0 {cql} )",
                    f"ALTER TYPE k.{kind} ADD f{self.chance.randrange(1, 9)} {choose(PLAIN)}",
                    *[f"DROP TYPE k.{kind}"] * 3,
                    f"CREATE TABLE k.{name} ( id int, r int, {column} {cql}, PRIMARY KEY ((id), r) )",
                    *[f"ALTER TABLE k.{name} ADD {column} {cql}"] * 3,
                    *[f"ALTER TABLE k.{name} DROP {column}"] * 3,
                    f"ALTER TABLE k.{name} RENAME {self.keys.get(name, 'r')} TO r{self.chance.randrange(3)}",
                    f"DROP TABLE k.{name}",
                ]
            )

    def table(self, name: str) -> TableSchema:
        columns, key = self.tables[name], self.keys[name]
        values = "; ".join(f"{one} {kind}" for one, kind in sorted(columns.items()) if one.startswith("c"))
        gone = [(one, "blob" if "<" in kind else kind, at) for one, (kind, at) in self.dropped[name].items()]
        types: Types = self.types
        return table(
            *(name, self.ids[name], values),
            clustering=f"{key} int",
            dropped=gone,
            types=types,
            since=self.since[name],
        )


@pytest.mark.parametrize("seed", range(6))
def test_what_is_told_can_be_executed_and_makes_the_schema(looks: Looks, seed: int) -> None:
    chance = random.Random(seed)
    source, copy = Source(chance), Cluster()
    executed = 0

    def look(*held: str) -> None:
        nonlocal executed
        tables = [source.table(name) for name in source.tables if name not in held]
        odd = [UnreadableTable("k", name, "f" * 32, "odd") for name in held if name in source.tables]
        looks.look(*tables, types=source.types, unreadable=odd)
        told = looks.messages()
        for ddl, _ in told[executed:]:
            copy.execute(ddl)
        executed = len(told)

    for _ in range(STEPS):
        source.change()
        for name in source.tables:
            if chance.random() < 0.3:
                version_of(looks.store, source.table(name))
        if chance.random() < 0.2:
            look(*(name for name in "tu" if chance.random() < 0.4))
        if chance.random() < 0.1:
            looks.begin()
    look()
    assert looks.updater.problems == []
    assert (copy.types, copy.tables) == (source.types, source.tables)
    told = [(name, number) for _, tables in looks.messages() for name, number in (tables or {}).items()]
    for name in source.tables:
        numbers = [number for one, number in told if one == f"k.{name}"]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == history_of(looks.store, "k", name)[-1].version.number
