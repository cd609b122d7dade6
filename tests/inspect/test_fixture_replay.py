"""The statements printed for a committed commit log, executed on a new server: it then shows what the model replays.

Every type, empty values, bounds and boundaries of ranges, counters, quoted names, timestamps before 1970.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringsync.cli import main
from servers.cassandra import CassandraNode
from tests.commitlog_model import cql_schema, replay, segment
from tests.commitlog_model.types import Table
from tests.commitlog_model.values import decode
from tests.commitlogs.capture import captured
from tests.commitlogs.fixtures import fixture_named, unpacked
from tests.commitlogs.make import KEYSPACES, connected
from tests.inspect.replaying import replay as execute
from tests.inspect.test_round_trip import Rows, comparable

FIXTURE = fixture_named("5.0-v8-plain")
LEFT_OUT = ("filler", "gone")
"""Large, and dropped and created again under its name."""
GROWN = ("u", "fu", "ft", "p", "su", "mu")
"""Columns with a type that gets another field while the log is written."""


@pytest.fixture
def empty(session: Any) -> Iterator[None]:
    """The fixture's keyspaces with empty tables."""
    for keyspace in KEYSPACES:
        session.execute(f'DROP KEYSPACE IF EXISTS "{keyspace}"')
    for statement in FIXTURE.described.split(";\n"):
        if statement.strip():
            session.execute(statement)
    session.execute("ALTER TABLE shop.expiring WITH default_time_to_live = 0")  # as docs/inspect.md says
    yield
    for keyspace in KEYSPACES:
        session.execute(f'DROP KEYSPACE "{keyspace}"')


def expected(state: replay.State, table: Table, moment: int) -> Rows:
    """What the model shows, in the form of `captured`."""
    found = []
    for row in replay.rows(state, table, moment):
        cells = {}
        for name, shown in row.items():
            if shown.raw is not None:
                parts = {"raw": shown.raw.hex(), "writetime": shown.writetime, "expires_at": shown.expires_at}
                cells[name] = {key: value for key, value in parts.items() if not is_nothing(value)}
        found.append(cells)
    return found


def without_new_fields(rows: Rows, table: Table) -> Rows:
    """Rows whose user-defined values are as JSON: bytes of before a field was added have no null at their end."""
    return [
        {
            name: {**cell, "raw": decode(table.types[name], bytes.fromhex(cell["raw"]))} if name in GROWN else cell
            for name, cell in row.items()
        }
        for row in rows
    ]


def in_order(row: dict[str, dict[str, Any]]) -> str:
    return json.dumps(row, sort_keys=True)


def is_nothing(times: Any) -> bool:
    return times is None or (isinstance(times, list) and all(one is None for one in times))


@pytest.mark.server
@pytest.mark.usefixtures("empty")
def test_a_server_that_executes_the_statements_shows_what_the_model_replays(
    cassandra: CassandraNode, session: Any, tmp_path: Path
) -> None:
    paths = unpacked(FIXTURE, tmp_path)
    (tmp_path / "schema.cql").write_text(FIXTURE.schema + FIXTURE.dropped)
    target = tmp_path / "log.cql"
    tables = {i: table for i, table in cql_schema.parse_schema(FIXTURE.schema).items() if table.name not in LEFT_OUT}
    arguments = [*map(str, paths), "--schema", str(tmp_path / "schema.cql"), "--output", str(target)]
    for table in tables.values():
        arguments += ["--table", f'"{table.keyspace}"."{table.name}"']
    assert main(["inspect", "commitlog", *arguments, "--format", "cql"]) == 0
    with connected(cassandra) as cluster:
        assert execute(cluster.connect(), target.read_text()) > 500
    known = cql_schema.parse_schema(FIXTURE.schema + FIXTURE.dropped)
    changes = [change for path in paths for change in segment.read_segment(path, known).changes]
    state = replay.replay(changes)
    with connected(cassandra) as reader:
        answer = captured(reader, "5.0", KEYSPACES, without=LEFT_OUT)
    compared = 0
    for table in tables.values():
        texts = {**dict(table.partition_key), **{name: text for name, text, _ in table.clustering}}
        types = texts | dict(table.static) | dict(table.regular)
        shown = [
            {
                name: {part: v for part, v in cell.items() if part != "json" and not is_nothing(v)}
                for name, cell in row.items()
            }
            for row in answer["keyspaces"][table.keyspace][table.name]
        ]
        mine, its = (
            without_new_fields(comparable(rows, types), table)
            for rows in (expected(state, table, answer["moment"]), shown)
        )
        assert len(mine) == len(its), (table.name, mine, its)
        for a, b in zip(*(sorted(rows, key=in_order) for rows in (mine, its)), strict=True):
            assert a == b, table.name
        compared += len(its)
    assert compared > 200
