"""The demo's data set: what a SELECT gives is what `load` says, and its history is really there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from cassandra import InvalidRequest
from cassandra.protocol import _ProtocolHandler

from examples.flights.changes import KINDS, Change, Writer, changes, read_keys
from examples.flights.load import TABLES, load

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def loaded(session: Any) -> Iterator[dict[str, int]]:
    """One in two hundred flights, in the keyspace that the data set always has."""
    session.execute("DROP KEYSPACE IF EXISTS flights")
    seen: list[tuple[int, int]] = []
    rows = load(session, sample=0.005, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    yield rows
    session.execute("DROP KEYSPACE flights")


def test_the_counts_are_those_of_a_select(session: Any, loaded: dict[str, int]) -> None:
    assert list(loaded) == list(TABLES)
    assert loaded["flights"] == int(336_776 * 0.005) + 10
    assert {table: session.execute(f"SELECT count(*) FROM flights.{table}").one()[0] for table in TABLES} == loaded


def test_every_type_and_kind_of_column_is_used(session: Any, loaded: dict[str, int]) -> None:
    columns = list(
        session.execute(
            "SELECT type, kind, clustering_order FROM system_schema.columns WHERE keyspace_name = 'flights'"
        )
    )
    types = {column.type for column in columns}
    scalar = "ascii bigint blob boolean counter date decimal double duration float inet int smallint text time "
    scalar += "timestamp timeuuid tinyint uuid varint"
    nested = {
        *("engine", "frozen<position>", "frozen<tuple<time, time>>", "vector<float, 3>"),
        *("list<text>", "set<text>", "map<ascii, smallint>"),
        *("frozen<list<ascii>>", "frozen<set<ascii>>", "frozen<map<ascii, int>>"),
    }
    assert set(scalar.split()) | nested <= types
    assert {"static", "clustering", "partition_key"} <= {column.kind for column in columns}
    assert {"asc", "desc"} <= {column.clustering_order for column in columns}


def test_the_history_is_there(session: Any, loaded: dict[str, int]) -> None:
    original, session.client_protocol_handler = session.client_protocol_handler, _ProtocolHandler
    try:
        rows = list(
            session.execute(
                "SELECT note, remarks, delays, distance, ttl(distance) AS life, ttl(note) AS note_life, "
                "ttl(delays) AS delay_lives, writetime(distance) AS written, writetime(arrival_delay) AS corrected "
                "FROM flights.flights"
            )
        )
    finally:
        session.client_protocol_handler = original
    lives = [row.life for row in rows if row.life] + [row.note_life for row in rows if row.note_life]
    assert lives
    assert min(lives) > 86_000  # nothing expires during a demo
    assert any(row.note == "" for row in rows)
    assert any(row.remarks for row in rows)
    assert any("taxi" in (row.delays or {}) and len(set(row.delay_lives)) > 1 for row in rows)
    assert any(row.corrected and row.written and row.corrected > row.written for row in rows)
    assert any(row.distance is None and row.note is None for row in rows)


def test_partitions_of_the_drills(session: Any, loaded: dict[str, int]) -> None:
    def drills(day: int) -> list[Any]:
        query = f"SELECT * FROM flights.flights WHERE origin = 'EWR' AND flight_date = '2014-01-0{day}'"
        return list(session.execute(query))

    assert [row.note for row in drills(1)] == ["again", "drill", "drill", "drill", "drill", "drill"]
    assert drills(2) == []
    assert [(row.scheduled_departure, row.briefing) for row in drills(3)] == [(None, "drill")]
    assert [row.note for row in drills(4)] == ["", "no marker", None]


@pytest.mark.parametrize("sample", [0, -1, 1.5])
def test_a_wrong_sample_is_refused(session: Any, sample: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        load(session, sample=sample)


def test_changes_are_written_without_errors(session: Any, loaded: dict[str, int]) -> None:
    """Every kind; the same seed writes the same. It is the last test of the module: the counts are others now."""
    keys = read_keys(session)
    assert list(islice(changes(7, keys), 200)) == list(islice(changes(7, keys), 200))
    assert list(islice(changes(7, keys), 200)) != list(islice(changes(8, keys), 200))
    with Writer(session, changes(7, keys), 10_000) as writer:
        deadline = time.monotonic() + 120
        while writer.written.keys() != KINDS.keys() and time.monotonic() < deadline and not writer.error:
            time.sleep(0.1)
    assert writer.error is None
    assert writer.written.keys() == KINDS.keys()
    with Writer(session, changes(8, keys), 50) as steady:
        time.sleep(2)
    assert 20 < sum(steady.written.values()) <= 101


def test_a_writer_that_cannot_write_says_why(session: Any) -> None:
    statement = ("INSERT INTO flights.nothing (id) VALUES (?)", (1,))
    with Writer(session, iter([Change("nothing", "insert", (statement,))]), 50) as writer:
        time.sleep(1)
    assert isinstance(writer.error, InvalidRequest)
