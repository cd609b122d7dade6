"""Random schema changes, looked at now and then: the messages rebuild the schema, whatever came in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cassandra import InvalidRequest
from cassandra.protocol import ConfigurationException, SyntaxException

from ringsync.cluster.whole_schema import read_whole_schema
from ringsync.storage.local import LocalStore
from tests.steps.test_schema_update import KEYSPACES, OnlyKeyspaces, messages, shop, updater, without_ids

__all__ = ["shop"]

pytestmark = pytest.mark.server

STATEMENTS = 90
TYPES = ('"Select"', "b", "c")
TABLES = ('"T é"', "u")
COLUMNS = ("x", '"Y"', "z")


def statements(chance: random.Random) -> Iterator[str]:
    """Statements, many of which the cluster refuses: a type is in use, a column is there already."""
    while True:
        keyspace = chance.choice(KEYSPACES)
        name = f'"{keyspace}"'
        kind, table, column = (chance.choice(names) for names in (TYPES, TABLES, COLUMNS))
        cql_type = chance.choice(
            ["int", "text", "list<text>", *(f"frozen<{other}>" for other in TYPES), f"map<int, frozen<{kind}>>", kind]
        )
        field = chance.choice(["int", "text", *(f"frozen<{other}>" for other in TYPES if other != kind)])
        key = chance.choice(["int", "text", f"frozen<{kind}>"])
        replication = "replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
        yield chance.choice(
            [
                *[f"CREATE TYPE {name}.{kind} (f{chance.randrange(3)} {field})"] * 3,
                *[f"ALTER TYPE {name}.{kind} ADD f{chance.randrange(9)} {field}"] * 2,
                f"ALTER TYPE {name}.{kind} RENAME f{chance.randrange(3)} TO g{chance.randrange(9)}",
                *[f"DROP TYPE {name}.{kind}"] * 3,
                *[f"CREATE TABLE {name}.{table} (k {key}, r int, {column} {cql_type}, PRIMARY KEY (k, r))"] * 4,
                *[f"ALTER TABLE {name}.{table} ADD {column} {cql_type}"] * 4,
                *[f"ALTER TABLE {name}.{table} DROP {column}"] * 4,
                f"ALTER TABLE {name}.{table} RENAME r TO r{chance.randrange(9)}",
                *[f"DROP TABLE {name}.{table}"] * 2,
                *[f"DROP KEYSPACE {name}"] * (chance.random() < 0.2),
                f"CREATE KEYSPACE {name} WITH {replication}",
                f"ALTER KEYSPACE {name} WITH durable_writes = {chance.choice(['true', 'false'])}",
            ]
        )


@pytest.mark.parametrize("seed", range(3))
def test_any_changes_are_rebuilt(shop: Any, tmp_path: Path, seed: int) -> None:
    chance, store, done = random.Random(seed), LocalStore(tmp_path), list[str]()
    looks = updater(store, shop)
    for statement in statements(chance):
        try:
            shop.execute(statement)
        except (InvalidRequest, ConfigurationException, SyntaxException):
            continue
        except Exception as error:
            if "AlreadyExists" not in type(error).__name__:
                raise
            continue
        done.append(statement)
        if chance.random() < 0.3:
            looks.cycle()
        if len(done) == STATEMENTS:
            break
    looks.cycle()
    assert looks.problems == []
    expected = without_ids(read_whole_schema(OnlyKeyspaces(shop)))  # type: ignore[arg-type]
    for name in KEYSPACES:
        shop.execute(f'DROP KEYSPACE IF EXISTS "{name}"')
    for message in messages(store):
        shop.execute(message["value"]["ddl"])
    assert without_ids(read_whole_schema(OnlyKeyspaces(shop))) == expected  # type: ignore[arg-type]
