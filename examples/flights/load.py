"""Load the flights of 2013 into Cassandra, and change them by updates, TTLs and deletions."""
# ruff: noqa: TID253 - this runs beside the scheduler, never in it

from __future__ import annotations

import gc
import ipaddress
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from cassandra import ConsistencyLevel
from cassandra.concurrent import execute_concurrent, execute_concurrent_with_args
from cassandra.query import BatchStatement, BatchType

from examples.flights import rows as data
from examples.flights.history import add_history

TABLES = ("flights", "weather", "planes", "airports", "route_counts", "airlines")
"""The tables of schema.cql, the largest first."""

BATCH_ROWS = 50
CONCURRENT_BATCHES = 8
CONCURRENT_STATEMENTS = 64

Progress = Callable[[int, int], None]


def load(session: Any, *, sample: float = 1.0, progress: Progress | None = None) -> dict[str, int]:
    """
    Create the keyspace `flights`, fill its tables and give them a history.

    :param session: a session of the Python driver on Cassandra 5.0, protocol 5. The tables must be new or empty.
    :param sample: fraction of flights, weather, planes and airports to load, always the same rows; for tests.
    :param progress: function that is called with the rows written so far and in all.
    :returns: table → rows that a SELECT gives afterwards.
    :raises ValueError: the sample is not above 0 and at most 1.
    :raises cassandra.DriverException: the server refuses or does not answer.
    """
    if not 0 < sample <= 1:
        raise ValueError(f"The sample is {sample}; it must be above 0 and at most 1.")
    create_schema(session)
    with quiet_collector():
        all_flights, all_planes = data.read("flights"), data.read("planes")
        flights = data.sampled(all_flights, sample)
        parts = [
            data.flights(flights),
            data.weather(data.sampled(data.read("weather"), sample)),
            data.planes(data.sampled(all_planes, sample), all_flights),
            data.airports(data.sampled(data.read("airports"), sample)),
            data.airlines(data.read("airlines"), all_flights, all_planes),
        ]
        loaded = {part.table: len(part.rows) for part in parts}
        done, total = 0, sum(loaded.values())
        for part in parts:
            for written in insert(session, part):
                done += written
                if progress is not None:
                    progress(done, total)
        write_statics(session, flights)
        loaded["route_counts"] = count_routes(session, flights)
        loaded["flights"] += add_history(session, {part.table: part for part in parts})
    return {table: loaded[table] for table in TABLES}


def create_schema(session: Any) -> None:
    """
    Create the keyspace, types and tables of schema.cql that are missing.

    :param session: a session of the Python driver.
    """
    text = (Path(__file__).parent / "schema.cql").read_text()
    without_comments = "\n".join(line.split("--")[0] for line in text.splitlines())
    for statement in without_comments.split(";"):
        if statement.strip():
            session.execute(statement)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Switch Python's garbage collector off while millions of values are made that live until the end anyway."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def insert(session: Any, part: data.Rows) -> Iterator[int]:
    """
    Insert rows in unlogged batches of one partition each: for the server such a batch is one mutation.

    :param session: a session of the Python driver.
    :param part: the rows.
    :returns: yields the number of rows of each written batch.
    """
    names, places = ", ".join(part.columns), ", ".join("?" * len(part.columns))
    statement = session.prepare(
        f"INSERT INTO flights.{part.table} ({names}) VALUES ({places}) USING TIMESTAMP ? AND TTL ?"
    )
    sizes: list[int] = []

    def batches() -> Iterator[tuple[BatchStatement, None]]:
        for _, partition in groupby(part.rows, key=lambda row: row[: part.partition_columns]):
            rows = list(partition)
            for first in range(0, len(rows), BATCH_ROWS):
                batch = BatchStatement(BatchType.UNLOGGED, consistency_level=ConsistencyLevel.LOCAL_ONE)
                for row in rows[first : first + BATCH_ROWS]:
                    batch.add(statement, row)
                sizes.append(len(batch))
                yield batch, None

    results = execute_concurrent(session, batches(), CONCURRENT_BATCHES, results_generator=True)
    for number, _ in enumerate(results):
        yield sizes[number]


def write_statics(session: Any, flights: pd.DataFrame) -> None:
    """
    Write the static columns: who flies from an airport on a day, and the address of its weather station.

    :param session: a session of the Python driver.
    :param flights: the flights.
    """
    statement = session.prepare(
        "UPDATE flights.flights USING TIMESTAMP ? SET briefing = ?, carriers = ? WHERE origin = ? AND flight_date = ?"
    )
    days = flights.groupby(["origin", "year", "month", "day"])["carrier"].unique().reset_index()
    arguments: list[tuple[Any, ...]] = []
    for origin, year, month, day, carriers in days.itertuples(index=False, name=None):
        briefing = f"{len(carriers)} airlines fly from {origin} today."
        date = f"{year}-{month:02}-{day:02}"
        arguments.append((data.BEFORE_ALL_FLIGHTS_US, briefing, set(carriers), origin, date))
    run(session, statement, arguments)
    statement = session.prepare("UPDATE flights.weather SET station = ? WHERE origin = ? AND month = ?")
    for number, origin in enumerate(("EWR", "JFK", "LGA")):
        address = str(ipaddress.IPv4Address("10.20.0.1") + number)
        run(session, statement, [(address, origin, month) for month in range(1, 13)])


def count_routes(session: Any, flights: pd.DataFrame) -> int:
    """
    Add each route's flights to its counter, and return the number of routes.

    :param session: a session of the Python driver.
    :param flights: the flights.
    """
    statement = session.prepare("UPDATE flights.route_counts SET flights = flights + ? WHERE origin = ? AND dest = ?")
    arguments = [(count, origin, dest) for origin, dest, count in data.counted(flights, "origin", "dest")]
    run(session, statement, arguments)
    return len(arguments)


def run(session: Any, statement: Any, arguments: Sequence[tuple[Any, ...]]) -> None:
    """
    Run a prepared statement many times.

    :param session: a session of the Python driver.
    :param statement: the prepared statement.
    :param arguments: the values of each run.
    """
    execute_concurrent_with_args(session, statement, arguments, CONCURRENT_STATEMENTS)
