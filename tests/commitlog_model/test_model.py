"""The model against a real server: what it replays from the commit log is what SELECT shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from cassandra.protocol import _ProtocolHandler

from servers.cassandra import CassandraNode
from tests.commitlog_model.mutation import Change
from tests.commitlog_model.replay import replay, rows
from tests.commitlog_model.schema import load_tables
from tests.commitlog_model.segment import read_segment
from tests.commitlog_model.selected import differences, select
from tests.commitlog_model.statements import (
    COMPOSITES,
    EMPTY_VALUES,
    RANDOM_TABLE,
    USER_TYPE,
    VALUES,
    random_statements,
)
from tests.commitlog_model.types import Table

# The model is the oracle of other tests; that it is right by itself need not be shown every time.
pytestmark = [pytest.mark.server, pytest.mark.chaos]
SYNC_SECONDS = 15


@dataclass
class Log:
    """The commit log of the shared node from the moment when this module began."""

    node: CassandraNode
    session: Any
    keyspace: str
    first_segment: int
    sentinels: Iterator[int]

    def changes(self) -> tuple[list[Change], dict[str, Table]]:
        """All changes up to now: those before a sentinel that is written and waited for."""
        sentinel = next(self.sentinels)
        self.session.execute(f"INSERT INTO {self.keyspace}.sentinel (id) VALUES ({sentinel})")
        tables = load_tables(self.session)
        deadline = time.monotonic() + SYNC_SECONDS
        while time.monotonic() < deadline:
            found = [change for path in self._segments() for change in self._read(path, tables)]
            if any(c["table"] == "sentinel" and c["partition_key"] == {"id": sentinel} for c in found):
                return [change for change in found if change["keyspace"] == self.keyspace], tables
            time.sleep(0.3)
        raise AssertionError(f"the commit log did not have the sentinel within {SYNC_SECONDS} s")

    def _segments(self) -> list[Any]:
        paths = sorted(self.node.cdc_raw.glob("*_cdc.idx"))
        logs = [path.with_name(path.name.replace("_cdc.idx", ".log")) for path in paths]
        return [path for path in logs if int(path.stem.rsplit("-", 1)[1]) >= self.first_segment]

    def _read(self, path: Any, tables: dict[str, Table]) -> list[Change]:
        index = path.with_name(path.stem + "_cdc.idx").read_text().split("\n")
        if not index[0]:
            return []
        segment = read_segment(path, tables, end=None if "COMPLETED" in index else int(index[0]))
        # Other modules of the test session drop their tables.
        assert [p for p in segment.problems if p["reason"] != "unknown table"] == []
        return segment.changes


@pytest.fixture(scope="module")
def session(cassandra: CassandraNode) -> Iterator[Any]:
    """A session whose driver decodes in Python: its compiled decoders take no nulls inside of lists of times."""
    cluster = cassandra.cluster()
    try:
        found = cluster.connect()
        found.client_protocol_handler = _ProtocolHandler
        yield found
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def log(cassandra: CassandraNode, session: Any, keyspace: str) -> Log:
    """The commit log, and a table for sentinels."""
    session.execute(f"CREATE TABLE {keyspace}.sentinel (id int PRIMARY KEY) WITH cdc = true")
    session.execute(USER_TYPE.format(ks=keyspace))
    segments = [int(path.stem.rsplit("-", 1)[1]) for path in cassandra.cdc_raw.glob("CommitLog-*.log")]
    # The newest segment is empty: Cassandra has one in store. Ids rise by one.
    return Log(cassandra, session, keyspace, max(segments) - 1, count())


@pytest.fixture
def check(log: Log, session: Any) -> Callable[..., None]:
    """Compare the model with SELECT for all tables whose names begin as given."""

    def compare(*prefixes: str) -> None:
        changes, tables = log.changes()
        state = replay(changes)
        mine = [t for t in tables.values() if t.keyspace == log.keyspace and t.name.startswith(prefixes)]
        assert mine
        for table in mine:
            expected, now = select(session, table)
            assert expected, f"{table.name} is empty, which proves nothing"
            assert differences(table, rows(state, table, now), expected) == []

    return compare


def create(session: Any, name: str, columns: str, options: str = "") -> str:
    session.execute(f"CREATE TABLE {name} ({columns}) WITH cdc = true{options}")
    return name


def test_values_of_every_type(log: Log, session: Any, check: Callable[..., None]) -> None:
    types = VALUES | COMPOSITES
    columns = ", ".join(f"v{i} {name}" for i, name in enumerate(types))
    table = create(session, f"{log.keyspace}.types", f"id int PRIMARY KEY, {columns}")
    for i, (name, literals) in enumerate(types.items()):
        for j, literal in enumerate(literals):
            ttl = " USING TTL 5000" if j % 2 else ""
            session.execute(f"INSERT INTO {table} (id, v{i}) VALUES ({100 * i + j}, {literal}){ttl}")
        if name in EMPTY_VALUES:
            session.execute(f"UPDATE {table} SET v{i} = blobAs{name}(0x) WHERE id = {100 * i + 50}")
    check("types")


@pytest.mark.parametrize("direction", ["ASC", "DESC"])
def test_clusterings_are_in_the_servers_order(
    log: Log, session: Any, check: Callable[..., None], direction: str
) -> None:
    prefix = f"order_{direction.lower()}"
    for i, (name, literals) in enumerate((VALUES | COMPOSITES).items()):
        if direction == "DESC" and name.startswith("frozen<map"):
            # 5.0.9 takes {} for a set where the column is descending (ClassCastException).
            literals = [literal for literal in literals if literal != "{}"]
        if name != "duration" and (name in VALUES or name.startswith(("frozen", "vector"))):
            order = f" AND CLUSTERING ORDER BY (c {direction})"
            table = create(session, f"{log.keyspace}.{prefix}_{i}", f"p int, c {name}, PRIMARY KEY (p, c)", order)
            for p in (1, 2, 3, 4):
                for literal in literals:
                    session.execute(f"INSERT INTO {table} (p, c) VALUES ({p}, {literal})")
            session.execute(f"DELETE FROM {table} WHERE p = 2 AND c > {literals[0]}")
            session.execute(f"DELETE FROM {table} WHERE p = 3 AND c <= {literals[-1]}")
            session.execute(f"DELETE FROM {table} WHERE p = 4 AND c >= {literals[0]} AND c < {literals[-1]}")
    check(prefix)


def test_statics_keys_and_counters(log: Log, session: Any, check: Callable[..., None]) -> None:
    ks = log.keyspace
    columns = 'a text, b int, "C" timestamp, s text STATIC, ss set<int> STATIC, v text, PRIMARY KEY ((a, b), "C")'
    wide = create(session, f"{ks}.keys_wide", columns)
    session.execute(f"INSERT INTO {wide} (a, b, s, ss) VALUES ('only static', 1, 'x', {{1, 2}})")
    session.execute(f"INSERT INTO {wide} (a, b, \"C\", s, v) VALUES ('', 2, 0, 'y', 'v') USING TTL 9000")
    session.execute(f"DELETE s FROM {wide} WHERE a = '' AND b = 2")
    session.execute(f"UPDATE {wide} SET v = 'update only' WHERE a = 'u' AND b = 3 AND \"C\" = 7")
    session.execute(f"UPDATE {wide} SET v = null WHERE a = 'u' AND b = 4 AND \"C\" = 7")
    session.execute(f"INSERT INTO {wide} (a, b, \"C\") VALUES ('if', 5, 1) IF NOT EXISTS")
    session.execute(f"INSERT INTO {wide} (a, b, \"C\", v) VALUES ('if', 5, 1, 'no') IF NOT EXISTS")
    session.execute(f"UPDATE {wide} SET v = 'yes' WHERE a = 'if' AND b = 5 AND \"C\" = 1 IF v = null")
    counters = create(session, f"{ks}.keys_counters", "p text, c int, n counter, m counter, PRIMARY KEY (p, c)")
    for step in (5, -7, 2**62):
        session.execute(f"UPDATE {counters} SET n = n + {step}, m = m - 1 WHERE p = 'c' AND c = 1")
        session.execute(f"UPDATE {counters} SET n = n + {step} WHERE p = 'c' AND c = 2")
    session.execute(f"DELETE n FROM {counters} WHERE p = 'c' AND c = 1")
    session.execute(f"DELETE FROM {counters} WHERE p = 'c' AND c = 2")
    check("keys_")


def test_tokens(log: Log, session: Any, check: Callable[..., None]) -> None:
    table = create(session, f"{log.keyspace}.tokens", "a blob, b blob, v int, PRIMARY KEY ((a, b))")
    for length in range(40):
        a = "0x" + bytes((37 * length + 91 * i) % 256 for i in range(length)).hex()
        session.execute(f"INSERT INTO {table} (a, b, v) VALUES ({a}, {a}, 1)")
    expected = {row.a.hex(): row.t for row in session.execute(f"SELECT a, token(a, b) AS t FROM {table}")}
    changes, _ = log.changes()
    assert {c["partition_key"]["a"][2:]: c["token"] for c in changes if c["table"] == "tokens"} == expected
    check("tokens")


def test_expired_cells_and_rows_are_gone(log: Log, session: Any, check: Callable[..., None]) -> None:
    table = create(session, f"{log.keyspace}.ttls", "id int PRIMARY KEY, v int, m map<int, int>")
    session.execute(f"INSERT INTO {table} (id, v) VALUES (1, 1) USING TTL 1")
    session.execute(f"INSERT INTO {table} (id, v, m) VALUES (2, 1, {{1: 1}}) USING TTL 1")
    session.execute(f"UPDATE {table} USING TTL 3000 SET m[2] = 2 WHERE id = 2")
    session.execute(f"INSERT INTO {table} (id) VALUES (3)")
    session.execute(f"UPDATE {table} USING TTL 1 SET v = 3 WHERE id = 3")
    session.execute(f"INSERT INTO {table} (id, v) VALUES (4, 4) USING TTL 630720000")
    # Of two livenesses of one timestamp the one that expires wins; a deletion of that timestamp wins as well.
    session.execute(f"INSERT INTO {table} (id) VALUES (5) USING TIMESTAMP 1000 AND TTL 1")
    session.execute(f"INSERT INTO {table} (id) VALUES (5) USING TIMESTAMP 1000")
    session.execute(f"INSERT INTO {table} (id) VALUES (8) USING TIMESTAMP 1000")
    session.execute(f"INSERT INTO {table} (id) VALUES (8) USING TIMESTAMP 1000 AND TTL 1")
    session.execute(f"INSERT INTO {table} (id) VALUES (6) USING TIMESTAMP 1000")
    session.execute(f"DELETE FROM {table} USING TIMESTAMP 1000 WHERE id = 6")
    session.execute(f"INSERT INTO {table} (id) VALUES (7) USING TIMESTAMP 1001")
    session.execute(f"DELETE FROM {table} USING TIMESTAMP 1000 WHERE id = 7")
    time.sleep(2.1)
    check("ttls")


def test_dropped_columns(log: Log, session: Any, check: Callable[..., None]) -> None:
    columns = "id int PRIMARY KEY, v int, gone text, m map<text, frozen<address>>, again int"
    table = create(session, f"{log.keyspace}.dropped", columns)
    session.execute(f"INSERT INTO {table} (id, v, gone, m, again) VALUES (1, 1, 'g', {{'k': {{street: 's'}}}}, 1)")
    for column in ("gone", "m", "again"):
        session.execute(f"ALTER TABLE {table} DROP {column}")
    session.execute(f"ALTER TABLE {table} ADD again int")
    session.execute(f"INSERT INTO {table} (id, v, again) VALUES (2, 2, 2)")
    check("dropped")


def test_more_than_64_columns(log: Log, session: Any, check: Callable[..., None]) -> None:
    columns = ", ".join(f"v{i:02} int" for i in range(70))
    table = create(session, f"{log.keyspace}.many", f"p int, c int, {columns}, PRIMARY KEY (p, c)")
    for c, indexes in enumerate((range(70), range(2), range(3, 68), (69,), range(0, 70, 2))):
        names, values = zip(*((f"v{i:02}", str(i)) for i in indexes), strict=True)
        insert = f"INSERT INTO {table} (p, c, {{}}) VALUES (1, {{}}, {{}})"
        session.execute(insert.format(", ".join(names), c, ", ".join(values)))
        # Rows of one batch share one list of columns, of which each has a part.
    rows_of_batch = (
        f"INSERT INTO {table} (p, c, {', '.join(f'v{i:02}' for i in indexes)}) VALUES"
        f" (2, {c}, {', '.join(str(i) for i in indexes)})"
        for c, indexes in enumerate((range(70), range(2), range(3, 68), (69,), range(0, 70, 2)))
    )
    session.execute(f"BEGIN UNLOGGED BATCH {'; '.join(rows_of_batch)}; APPLY BATCH")
    check("many")


@pytest.mark.parametrize("seed", range(4))
def test_random_statements_at_few_timestamps(log: Log, session: Any, check: Callable[..., None], seed: int) -> None:
    table = f"{log.keyspace}.random_{seed}"
    session.execute(RANDOM_TABLE.format(name=table))
    for statement in random_statements(table, 300, seed):
        session.execute(statement)
    check(f"random_{seed}")
