"""The history of the flights after they were loaded: corrections, expiring cells, deletions of every kind.

Flights are chosen by their position among the loaded rows, so any sample has changes of each kind. No TTL is below one
day: nothing expires during the demo. Real flights lose cells and elements, but never a row. Whole rows and partitions
are deleted among the drills only: flights from Newark on the first days of 2014 that never took place.
"""
# ruff: noqa: TID253 - this runs beside the scheduler, never in it

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cassandra.concurrent import execute_concurrent_with_args

from examples.flights.rows import DAY_SECONDS, Rows

HOUR_US = 3_600_000_000
NEW_YEAR_2014_US = 1_388_534_400_000_000
FLIGHT = "origin = ? AND flight_date = ? AND scheduled_departure = ? AND carrier = ? AND flight = ?"
KEY_COLUMNS = 5
WRITTEN, TTL = -2, -1
"""Positions of a row's writetime and TTL."""

Row = tuple[Any, ...]
Run = Callable[[str, Sequence[Row]], None]


def add_history(session: Any, loaded: Mapping[str, Rows]) -> int:
    """
    Change the loaded rows.

    :param session: a session of the Python driver.
    :param loaded: table → the rows that were loaded.
    :returns: number of rows that `flights.flights` has beyond the loaded ones.
    """

    def run(cql: str, arguments: Sequence[Row]) -> None:
        execute_concurrent_with_args(session, session.prepare(cql), arguments, concurrency=64)

    # A third of December expires. These rows are not changed: otherwise a row could live on as a single corrected cell.
    flights = [row for row in loaded["flights"].rows if row[TTL] == 0]
    change_cells(run, flights)
    change_collections(run, flights)
    change_planes_and_airports(run, loaded["planes"].rows, loaded["airports"].rows)
    return hold_drills(run)


def later(row: Row, hours: int) -> int:
    """
    Return a time after a row was written, in µs.

    :param row: the row.
    :param hours: how much later.
    """
    return int(row[WRITTEN]) + hours * HOUR_US


def change_cells(run: Run, flights: Sequence[Row]) -> None:
    """
    Correct, empty, delete and expire single cells.

    :param run: runs a statement with each of its arguments.
    :param flights: the rows.
    """
    run(
        f"UPDATE flights.flights USING TIMESTAMP ? SET arrival_delay = ? WHERE {FLIGHT}",
        [(later(row, 24), number % 60, *row[:KEY_COLUMNS]) for number, row in enumerate(flights[::389])],
    )
    run(
        f"DELETE tail_number FROM flights.flights USING TIMESTAMP ? WHERE {FLIGHT}",
        [(later(row, 24), *row[:KEY_COLUMNS]) for row in flights[2::409]],
    )
    run(
        f"UPDATE flights.flights USING TIMESTAMP ? SET note = '' WHERE {FLIGHT}",
        [(later(row, 2), *row[:KEY_COLUMNS]) for row in flights[4::821]],
    )
    run(
        f"UPDATE flights.flights USING TIMESTAMP ? AND TTL ? SET note = 'crew rested' WHERE {FLIGHT}",
        [
            (later(row, 3), (1 + number % 30) * DAY_SECONDS, *row[:KEY_COLUMNS])
            for number, row in enumerate(flights[6::811])
        ],
    )


def change_collections(run: Run, flights: Sequence[Row]) -> None:
    """
    Add, replace and delete elements of maps, sets and lists, with writetimes and TTLs of their own.

    :param run: runs a statement with each of its arguments.
    :param flights: the rows.
    """
    run(
        "UPDATE flights.flights USING TIMESTAMP ? AND TTL ? SET delays['taxi'] = ?, flags = flags + {'taxi'} "
        f"WHERE {FLIGHT}",
        [
            (later(row, 1), (2 + number % 28) * DAY_SECONDS, 5 + number % 20, *row[:KEY_COLUMNS])
            for number, row in enumerate(flights[1::401])
        ],
    )
    run(
        f"DELETE delays['arrival'] FROM flights.flights USING TIMESTAMP ? WHERE {FLIGHT}",
        [(later(row, 24), *row[:KEY_COLUMNS]) for row in flights[3::419]],
    )
    run(
        f"UPDATE flights.flights USING TIMESTAMP ? SET flags = flags - {{'late', 'long'}} WHERE {FLIGHT}",
        [(later(row, 24), *row[:KEY_COLUMNS]) for row in flights[5::887]],
    )
    run(
        f"DELETE flags FROM flights.flights USING TIMESTAMP ? WHERE {FLIGHT}",
        [(later(row, 24), *row[:KEY_COLUMNS]) for row in flights[7::907]],
    )
    change_remarks(run, flights[3::431])


def change_remarks(run: Run, flights: Sequence[Row]) -> None:
    """
    Write lists element by element. The order of the statements matters: a list has the order of its cells' ids.

    :param run: runs a statement with each of its arguments.
    :param flights: the rows that get remarks.
    """
    keys = [row[:KEY_COLUMNS] for row in flights]
    run(f"UPDATE flights.flights SET remarks = remarks + ['boarding', 'gate changed'] WHERE {FLIGHT}", keys)
    run(f"UPDATE flights.flights SET remarks = ['check-in open'] + remarks WHERE {FLIGHT}", keys[::2])
    run(
        f"UPDATE flights.flights USING TTL {7 * DAY_SECONDS} SET remarks = remarks + ['last call'] WHERE {FLIGHT}",
        keys[1::2],
    )
    run(f"UPDATE flights.flights SET remarks[0] = 'boarding again' WHERE {FLIGHT}", keys[::3])
    run(f"DELETE remarks[1] FROM flights.flights WHERE {FLIGHT}", keys[::5])


def change_planes_and_airports(run: Run, planes: Sequence[Row], airports: Sequence[Row]) -> None:
    """
    Change fields of a user-defined type and elements of a list, and delete some.

    :param run: runs a statement with each of its arguments.
    :param planes: the rows of planes.
    :param airports: the rows of airports.
    """
    run(
        "UPDATE flights.planes USING TIMESTAMP ? AND TTL ? SET engine.speed = ? WHERE tail_number = ?",
        [
            (later(row, 1), (1 + number % 30) * DAY_SECONDS, 400 + number % 100, row[0])
            for number, row in enumerate(planes[::11])
        ],
    )
    run("UPDATE flights.planes SET engine.count = 2 WHERE tail_number = ?", [(row[0],) for row in planes[1::13]])
    run("DELETE engine.kind FROM flights.planes WHERE tail_number = ?", [(row[0],) for row in planes[2::17]])
    run("DELETE engine FROM flights.planes WHERE tail_number = ?", [(row[0],) for row in planes[3::97]])
    run(
        "UPDATE flights.airports SET words = words + ['(closed)'] WHERE faa = ?",
        [(row[0],) for row in airports[::40]],
    )
    run("UPDATE flights.airports SET time_zone = '' WHERE faa = ?", [(row[0],) for row in airports[1::200]])


def hold_drills(run: Run) -> int:
    """
    Write flights that never took place, and delete rows, ranges and partitions of them.

    :param run: runs a statement with each of its arguments.
    :returns: number of rows that are left; a partition with only static values counts as one.
    """
    start = NEW_YEAR_2014_US
    days = [f"2014-01-0{day}" for day in range(1, 5)]
    hours = [f"{hour:02}:30:00" for hour in range(6, 22)]
    drills = [("EWR", day, hour, "UA", 9000 + number) for day in days[:3] for number, hour in enumerate(hours)]
    run(
        "INSERT INTO flights.flights (origin, flight_date, scheduled_departure, carrier, flight, distance, note) "
        f"VALUES (?, ?, ?, ?, ?, 0, 'drill') USING TIMESTAMP {start}",
        drills,
    )
    run(
        f"UPDATE flights.flights USING TIMESTAMP {start} SET briefing = 'drill', carriers = {{'UA'}} "
        "WHERE origin = 'EWR' AND flight_date = ?",
        [(day,) for day in days[:3]],
    )
    return (
        delete_row_and_range(run, drills[:16], start + HOUR_US)
        + delete_partition(run, days[1], start + HOUR_US)
        + leave_statics(run, drills[32:], start + HOUR_US)
        + write_rows_without_values(run, days[3], start)
    )


def delete_row_and_range(run: Run, drills: Sequence[Row], at: int) -> int:
    """
    Delete one flight, and all flights that depart at noon or later; write one of these again.

    :param run: runs a statement with each of its arguments.
    :param drills: the rows of one partition, departing at half past 6, 7, … 21 o'clock.
    :param at: time of the deletions, µs.
    :returns: number of rows that are left: 6 before noon, minus one, plus the one that was written again.
    """
    run(f"DELETE FROM flights.flights USING TIMESTAMP {at} WHERE {FLIGHT}", drills[2:3])
    run(
        f"DELETE FROM flights.flights USING TIMESTAMP {at} "
        "WHERE origin = ? AND flight_date = ? AND scheduled_departure >= '12:00:00'",
        [drills[0][:2]],
    )
    run(
        f"UPDATE flights.flights USING TIMESTAMP {at + HOUR_US} SET note = 'again', remarks = ['again'] WHERE {FLIGHT}",
        drills[-1:],
    )
    return 6


def delete_partition(run: Run, day: str, at: int) -> int:
    """
    Delete a partition with all its rows and static values.

    :param run: runs a statement with each of its arguments.
    :param day: the partition's day.
    :param at: time of the deletion, µs.
    :returns: number of rows that are left.
    """
    run(
        f"DELETE FROM flights.flights USING TIMESTAMP {at} WHERE origin = ? AND flight_date = ?",
        [("EWR", day)],
    )
    return 0


def leave_statics(run: Run, drills: Sequence[Row], at: int) -> int:
    """
    Delete every row of a partition, but not its static values.

    :param run: runs a statement with each of its arguments.
    :param drills: the rows.
    :param at: time of the deletions, µs.
    :returns: number of rows that a SELECT gives: one, with null for clustering and regular columns.
    """
    run(f"DELETE FROM flights.flights USING TIMESTAMP {at} WHERE {FLIGHT}", drills)
    return 1


def write_rows_without_values(run: Run, day: str, at: int) -> int:
    """
    Write a row with only a key, a row by UPDATE (without row marker), and a row that dies with its only cell.

    :param run: runs a statement with each of its arguments.
    :param day: the day of their partition.
    :param at: time of the writes, µs.
    :returns: number of rows that are left.
    """
    keys = [("EWR", day, f"0{hour}:00:00", "UA", 9100 + hour) for hour in range(1, 5)]
    columns = "origin, flight_date, scheduled_departure, carrier, flight"
    run(f"INSERT INTO flights.flights ({columns}) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP {at}", keys[:1])
    run(f"UPDATE flights.flights USING TIMESTAMP {at} SET note = 'no marker' WHERE {FLIGHT}", keys[1:3])
    run(f"DELETE note FROM flights.flights USING TIMESTAMP {at + HOUR_US} WHERE {FLIGHT}", keys[2:3])
    run(
        f"INSERT INTO flights.flights ({columns}, note) VALUES (?, ?, ?, ?, ?, '') "
        f"USING TIMESTAMP {at} AND TTL {30 * DAY_SECONDS}",
        keys[3:],
    )
    return 3
