"""Write to the flights while they are copied and followed: statements of every kind, at a steady rate.

The changes follow from a seed and the existing keys. No row is both updated and deleted: an UPDATE of a deleted row
makes a row without a liveness of its own, and no SELECT shows this difference (docs/replica.md). For the same reason no
change touches the drills of the history.
"""
# ruff: noqa: TID253 - this runs beside the scheduler, never in it

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from itertools import count
from random import Random
from types import TracebackType
from typing import Any, Self

from cassandra.util import Duration, Time

from examples.flights.history import FLIGHT, NEW_YEAR_2014_US
from examples.flights.rows import DAY_SECONDS, MINUTE_NS, time_uuid

Key = tuple[Any, ...]
Statement = tuple[str, tuple[Any, ...]]

KEYS = {
    "flights": "origin, flight_date, scheduled_departure, carrier, flight FROM flights.flights PER PARTITION LIMIT 6",
    "weather": "origin, month, day, observed FROM flights.weather PER PARTITION LIMIT 200",
    "planes": "tail_number FROM flights.planes",
    "airports": "faa FROM flights.airports",
    "airlines": "carrier FROM flights.airlines",
}
"""Columns to SELECT, and from where, by table: keys are chosen from the result."""

PARTITION_COLUMNS = {"flights": 2, "weather": 2}
"""Number of partition key columns, for tables with clustering columns."""

DELETED_EVERY = 12
"""Of this many partitions one is for deletions; the others are for updates."""

NEW_CARRIER = "RS"
REAL_FLIGHTS = range(9_000)
"""Numbers of real flights; drills have greater ones."""
FIRST_NUMBER = 20_000
"""First number of new flights and planes."""

LIVES_S = (20, 40, 60, 2 * DAY_SECONDS, 30 * DAY_SECONDS)
"""TTLs, s: some end during the demo, some long after."""


@dataclass(frozen=True)
class Change:
    """
    Statements that are written together.

    :param table: name of the table.
    :param kind: kind of the change, one of :data:`KINDS`.
    :param statements: CQL with its values, one after the other.
    """

    table: str
    kind: str
    statements: tuple[Statement, ...]


@dataclass
class Draw:
    """
    Source of random choices for changes.

    :param random: source of all choices.
    :param updated: table → keys of rows that are updated and stay.
    :param deleted: table → keys of rows that are deleted, and inserted again.
    :param numbers: unused numbers for new rows.
    """

    random: Random
    updated: Mapping[str, Sequence[Key]]
    deleted: Mapping[str, Sequence[Key]]
    numbers: Iterator[int] = field(default_factory=lambda: count(FIRST_NUMBER))

    def key(self, table: str) -> Key:
        """Return the key of a row that stays."""
        return self.random.choice(self.updated[table])

    def doomed(self, table: str) -> Key:
        """Return the key of a row that may be deleted, or is deleted already."""
        return self.random.choice(self.deleted[table])

    def life(self) -> int:
        """Return a TTL in seconds."""
        return self.random.choice(LIVES_S)

    def minutes(self) -> int:
        """Return a delay in minutes."""
        return self.random.randrange(-20, 240)


def read_keys(session: Any) -> dict[str, list[Key]]:
    """
    Return the keys of existing rows, by table, in token order; of flights only real ones.

    :param session: a session of the Python driver.
    """
    keys = {
        # A partition with only static values has no clustering.
        table: [tuple(row) for row in session.execute(f"SELECT {query}") if None not in row]
        for table, query in KEYS.items()
    }
    return keys | {"flights": [key for key in keys["flights"] if key[-1] in REAL_FLIGHTS]}


def changes(seed: int, keys: Mapping[str, Sequence[Key]]) -> Iterator[Change]:
    """
    Yield changes without end, the same for the same seed and keys.

    :param seed: seed of all choices.
    :param keys: the keys that `read_keys` returns.
    """
    parts = {table: apart(table, keys_of_table) for table, keys_of_table in keys.items()}
    draw = Draw(
        Random(seed),
        {table: updated for table, (updated, _) in parts.items()},
        {table: deleted for table, (_, deleted) in parts.items()},
    )
    makers = [(*kind, make) for kind, (_, make) in KINDS.items()]
    weights = [weight for weight, _ in KINDS.values()]
    while True:
        table, kind, make = draw.random.choices(makers, weights)[0]
        yield Change(table, kind, tuple(make(draw)))


def apart(table: str, keys: Sequence[Key]) -> tuple[list[Key], list[Key]]:
    """
    Divide keys into those to update and those to delete; all keys of a partition go to the same side.

    :param table: name of the table.
    :param keys: all keys of the table.
    """
    columns = PARTITION_COLUMNS.get(table, 1)
    partitions = {partition: number for number, partition in enumerate(dict.fromkeys(key[:columns] for key in keys))}
    updated = [key for key in keys if partitions[key[:columns]] % DELETED_EVERY]
    return updated, [key for key in keys if not partitions[key[:columns]] % DELETED_EVERY]


def insert(table: str, values: Mapping[str, Any], ttl: int = 0) -> Statement:
    """
    Return an INSERT.

    :param table: name of the table.
    :param values: column → value.
    :param ttl: seconds; 0: for ever.
    """
    places = ", ".join("?" * len(values))
    cql = f"INSERT INTO flights.{table} ({', '.join(values)}) VALUES ({places}) USING TTL ?"
    return cql, (*values.values(), ttl)


def insert_flight(draw: Draw, ttl: int = 0) -> list[Statement]:
    """Insert a flight on a day that has, or had, other flights."""
    origin, flight_date, *_ = draw.random.choice((draw.key, draw.doomed))("flights")
    number, hour, delay = next(draw.numbers), draw.random.randrange(5, 23), draw.minutes()
    scheduled = Time(hour * 60 * MINUTE_NS)
    written = NEW_YEAR_2014_US + number * 60_000_000
    values = {
        **{"origin": origin, "flight_date": flight_date, "scheduled_departure": scheduled, "carrier": NEW_CARRIER},
        **{"flight": number, "event": time_uuid(written, number), "tail_number": f"N{number}RS"},
        **{"route": [origin, draw.random.choice(("BOS", "SFO", "HNL"))], "departure": (scheduled, None)},
        **{"departed": written // 1000, "departure_delay": delay, "arrival_delay": delay - 5},
        **{"delays": {"departure": delay, "arrival": delay - 5}, "air_time": Duration(0, 0, 90 * MINUTE_NS)},
        **{"distance": 200 + number % 4000, "speed": 400.5, "cancelled": False, "note": ""},
        **{"flags": {"new", "late" if delay > 15 else "early"}, "remarks": ["check-in open", f"gate {number % 40}"]},
    }
    return [insert("flights", values, ttl)]


def insert_expiring_flight(draw: Draw) -> list[Statement]:
    """Insert a flight that expires as a whole."""
    return insert_flight(draw, draw.life())


def update_cells(draw: Draw) -> list[Statement]:
    """Set one cell to a value, another to null."""
    cql = f"UPDATE flights.flights SET arrival_delay = ?, tail_number = ? WHERE {FLIGHT}"
    return [(cql, (draw.minutes(), None, *draw.key("flights")))]


def write_expiring_cells(draw: Draw) -> list[Statement]:
    """Write a cell and elements that expire, in a row that does not."""
    cql = f"UPDATE flights.flights USING TTL ? SET note = ?, flags = flags + ?, delays['taxi'] = ? WHERE {FLIGHT}"
    return [(cql, (draw.life(), "boarding", {"boarding"}, draw.minutes(), *draw.key("flights")))]


def delete_cells(draw: Draw) -> list[Statement]:
    """Delete a cell, an entry of a map, and a whole set."""
    return [(f"DELETE note, delays['arrival'], flags FROM flights.flights WHERE {FLIGHT}", draw.key("flights"))]


def change_map(draw: Draw) -> list[Statement]:
    """Write another map, or other entries."""
    assignment = draw.random.choice(("delays = ?", "delays = delays + ?"))
    delays = {"arrival": draw.minutes(), "taxi": draw.minutes()}
    return [(f"UPDATE flights.flights SET {assignment} WHERE {FLIGHT}", (delays, *draw.key("flights")))]


def change_set(draw: Draw) -> list[Statement]:
    """Write another set, or add and remove elements."""
    assignment = draw.random.choice(("flags = ?", "flags = flags + ?", "flags = flags - ?"))
    flags = set(draw.random.sample(("late", "early", "long", "night", "full"), 2))
    return [(f"UPDATE flights.flights SET {assignment} WHERE {FLIGHT}", (flags, *draw.key("flights")))]


def change_list(draw: Draw) -> list[Statement]:
    """Write another list, let it grow at both ends, and change and delete elements by their places."""
    key = draw.key("flights")
    steps: list[Statement] = [
        ("UPDATE flights.flights SET remarks = ? WHERE", (["boarding", "gate changed"],)),
        ("UPDATE flights.flights SET remarks = remarks + ? WHERE", (["last call"],)),
        ("UPDATE flights.flights SET remarks = ? + remarks WHERE", (["check-in open"],)),
        ("UPDATE flights.flights SET remarks[1] = 'boarding again' WHERE", ()),
        ("DELETE remarks[2] FROM flights.flights WHERE", ()),
    ]
    return [(f"{cql} {FLIGHT}", (*values, *key)) for cql, values in steps[: draw.random.randrange(1, 6)]]


def change_statics(draw: Draw) -> list[Statement]:
    """Write the static columns of a day, or delete one of them."""
    partition, where = draw.key("flights")[:2], "WHERE origin = ? AND flight_date = ?"
    if draw.random.random() < 0.3:
        return [(f"DELETE briefing FROM flights.flights {where}", partition)]
    cql = f"UPDATE flights.flights SET briefing = ?, carriers = carriers + ? {where}"
    return [(cql, (f"Delays of {draw.minutes()} minutes.", {NEW_CARRIER}, *partition))]


def delete_row(draw: Draw) -> list[Statement]:
    """Delete a flight."""
    return [(f"DELETE FROM flights.flights WHERE {FLIGHT}", draw.doomed("flights"))]


def delete_range(draw: Draw) -> list[Statement]:
    """Delete the flights that depart in two hours of a day."""
    hour = draw.random.randrange(5, 22)
    departures = "scheduled_departure >= ? AND scheduled_departure < ?"
    cql = f"DELETE FROM flights.flights WHERE origin = ? AND flight_date = ? AND {departures}"
    return [(cql, (*draw.doomed("flights")[:2], *(Time(at * 60 * MINUTE_NS) for at in (hour, hour + 2))))]


def delete_partition(draw: Draw) -> list[Statement]:
    """Delete a day with its static columns."""
    return [("DELETE FROM flights.flights WHERE origin = ? AND flight_date = ?", draw.doomed("flights")[:2])]


def insert_weather(draw: Draw) -> list[Statement]:
    """Insert an observation between existing ones."""
    origin, month, day, observed = draw.doomed("weather")
    values = {
        **{"origin": origin, "month": month, "day": day, "temperature": 40.5, "humidity": 61.25, "alerts": {"rain"}},
        **{"observed": observed + timedelta(minutes=draw.random.randrange(60)), "local_time": Time(7 * MINUTE_NS)},
        **{"wind_speed": Decimal(draw.minutes()) / 10, "reading": [40.5, 61.25, 1.0]},
    }
    return [insert("weather", values)]


def update_weather(draw: Draw) -> list[Statement]:
    """Update a vector, a decimal and an element of a set; or the station, which is static."""
    key = draw.key("weather")
    if draw.random.random() < 0.2:
        station = f"10.20.1.{draw.random.randrange(1, 250)}"
        return [("UPDATE flights.weather SET station = ? WHERE origin = ? AND month = ?", (station, *key[:2]))]
    cql = "UPDATE flights.weather SET reading = ?, wind_gust = ?, alerts = alerts + ? "
    values = ([float(draw.minutes()), 1.5, 2.5], Decimal(draw.minutes()) / 10, {"storm"})
    return [(cql + "WHERE origin = ? AND month = ? AND day = ? AND observed = ?", (*values, *key))]


def delete_weather(draw: Draw) -> list[Statement]:
    """Delete the observations of six hours."""
    *day, observed = draw.doomed("weather")
    cql = "DELETE FROM flights.weather WHERE origin = ? AND month = ? AND day = ? AND observed > ? AND observed <= ?"
    return [(cql, (*day, observed, observed + timedelta(hours=6)))]


def insert_plane(draw: Draw) -> list[Statement]:
    """Insert a new plane, or one that was deleted."""
    tail_number = draw.random.choice((f"N{next(draw.numbers)}RS", *draw.doomed("planes")))
    values = {
        **{"tail_number": tail_number, "built": "2013-06-01", "model": "A350", "seats": 300, "miles": 0},
        **{
            "engine": ("Turbo-fan", 2, None),
            "carriers": {NEW_CARRIER},
            "departures": {"EWR": draw.random.randrange(9)},
        },
    }
    return [insert("planes", values)]


def update_plane(draw: Draw) -> list[Statement]:
    """Update fields of a user-defined type, one of them expiring or deleted; or all of it, and a frozen map."""
    key, speed = draw.key("planes"), 300 + draw.minutes()
    of_plane = "WHERE tail_number = ?"
    choices: list[Statement] = [
        (f"UPDATE flights.planes USING TTL ? SET engine.speed = ? {of_plane}", (draw.life(), speed, *key)),
        (f"UPDATE flights.planes SET engine = ?, departures = ? {of_plane}", (("Jet", 2, speed), {"EWR": 1}, *key)),
        (f"DELETE engine.kind FROM flights.planes {of_plane}", key),
    ]
    return [draw.random.choice(choices)]


def delete_plane(draw: Draw) -> list[Statement]:
    """Delete a partition without clustering."""
    return [("DELETE FROM flights.planes WHERE tail_number = ?", draw.doomed("planes"))]


def insert_airport(draw: Draw) -> list[Statement]:
    """Insert an airport, which may exist or be deleted."""
    name = f"Field {next(draw.numbers)}"
    values = {
        **{"faa": draw.doomed("airports")[0], "name": name, "words": name.split(), "position": (40.5, -74.25)},
        **{"altitude": Decimal("12.5"), "gateway": "fd00::1", "checksum": name.encode(), "runways": [4, 22]},
    }
    return [insert("airports", values)]


def update_airport(draw: Draw) -> list[Statement]:
    """Update a list, a blob and a frozen value; the blob may expire."""
    cql = "UPDATE flights.airports USING TTL ? SET checksum = ? WHERE faa = ?"
    expiring: Statement = (cql, (draw.life(), draw.random.randbytes(16), *draw.key("airports")))
    cql = "UPDATE flights.airports SET words = words + ?, position = ?, time_zone = ? WHERE faa = ?"
    moved: Statement = (cql, (["(moved)"], (float(draw.minutes()), 0.5), "", *draw.key("airports")))
    return [draw.random.choice((expiring, moved))]


def delete_airport(draw: Draw) -> list[Statement]:
    """Delete a partition without clustering."""
    return [("DELETE FROM flights.airports WHERE faa = ?", draw.doomed("airports"))]


def insert_airline(draw: Draw) -> list[Statement]:
    """Insert an airline, which may exist or be deleted."""
    values = {
        **{"carrier": draw.doomed("airlines")[0], "name": "Ring Airlines", "seat_miles": 10**20 + draw.minutes()},
        **{"on_time_share": Decimal("0.5"), "mean_delay": 1.5, "departures": {"EWR": draw.random.randrange(99)}},
    }
    return [insert("airlines", values)]


def update_airline(draw: Draw) -> list[Statement]:
    """Update a varint and an entry of a map."""
    cql = "UPDATE flights.airlines SET seat_miles = ?, departures['JFK'] = ? WHERE carrier = ?"
    return [(cql, (-(10**21) - draw.minutes(), draw.minutes(), *draw.key("airlines")))]


def delete_airline(draw: Draw) -> list[Statement]:
    """Delete a partition without clustering."""
    return [("DELETE FROM flights.airlines WHERE carrier = ?", draw.doomed("airlines"))]


KINDS: Mapping[tuple[str, str], tuple[int, Callable[[Draw], list[Statement]]]] = {
    ("flights", "insert"): (12, insert_flight),
    ("flights", "insert with TTL"): (5, insert_expiring_flight),
    ("flights", "update"): (15, update_cells),
    ("flights", "update with TTL"): (6, write_expiring_cells),
    ("flights", "cell deletion"): (5, delete_cells),
    ("flights", "map"): (5, change_map),
    ("flights", "set"): (5, change_set),
    ("flights", "list"): (5, change_list),
    ("flights", "static"): (4, change_statics),
    ("flights", "row deletion"): (6, delete_row),
    ("flights", "range deletion"): (2, delete_range),
    ("flights", "partition deletion"): (1, delete_partition),
    ("weather", "insert"): (4, insert_weather),
    ("weather", "update"): (4, update_weather),
    ("weather", "range deletion"): (2, delete_weather),
    ("planes", "insert"): (3, insert_plane),
    ("planes", "update"): (4, update_plane),
    ("planes", "partition deletion"): (2, delete_plane),
    ("airports", "insert"): (2, insert_airport),
    ("airports", "update"): (3, update_airport),
    ("airports", "partition deletion"): (1, delete_airport),
    ("airlines", "insert"): (1, insert_airline),
    ("airlines", "update"): (2, update_airline),
    ("airlines", "partition deletion"): (1, delete_airline),
}
"""Table and kind → weight (all together 100), and the function that makes such a change."""


class Writer:
    """
    Write changes in a thread of its own: `with Writer(session, changes(7, read_keys(session)), 30) as writer: …`.

    :param session: a session of the Python driver, protocol 5.
    :param source: source of the changes.
    :param per_s: changes a second, if the server keeps up.
    """

    def __init__(self, session: Any, source: Iterator[Change], per_s: float) -> None:
        self._session = session
        self._source = source
        self._pause_s = 1 / per_s
        self._prepared: dict[str, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer of changes", daemon=True)
        self.written: Counter[tuple[str, str]] = Counter()
        """Changes by table and kind."""
        self.error: Exception | None = None
        """The error that has stopped the writer."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def write(self, change: Change) -> None:
        """
        Write one change.

        :raises cassandra.DriverException: the server refuses or does not answer.
        """
        for cql, values in change.statements:
            if cql not in self._prepared:
                self._prepared[cql] = self._session.prepare(cql)
            self._session.execute(self._prepared[cql], values)
        self.written[change.table, change.kind] += 1

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                self.write(next(self._source))
                # A delay is not made up for by faster writes later.
                due = max(due + self._pause_s, time.monotonic())
        except Exception as error:
            self.error = error
