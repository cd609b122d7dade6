"""Values of native types as Cassandra prints them in JSON, without the quotes (C: AbstractType.toJSONString)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.cql.cells import valid_mask
from ringsync.cql.natives import NATIVES, Text

Texts = list[str | None]
Integers = npt.NDArray[np.int32 | np.int64]
_MS_PER_DAY = 86_400_000
_NS_PER_S = 1_000_000_000
_UNITS = (("h", 3600 * _NS_PER_S), ("m", 60 * _NS_PER_S), ("s", _NS_PER_S), ("ms", 1_000_000), ("us", 1000), ("ns", 1))
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_PLAIN_NUMBER = re.compile(r"(-?(?:0\.(?!000)\d+|[1-9]\d{0,6}\.\d+))")
_SHORT_WHOLE_NUMBER = re.compile(r"-?\d{1,7}")


def native_texts(name: str, values: pa.Array) -> Texts:
    """The text of each value; None where it is null.

    :param name: of a native type
    :param values: of that type's Arrow type, as :func:`ringsync.cql.decode.decode` gives them: without an offset
    """
    write = _WRITERS.get(NATIVES[name].text)
    if write is None:
        return _printed(values)
    found = write(values)
    if values.null_count:
        found = [text if there else None for text, there in zip(found, valid_mask(values), strict=True)]
    return found


def timestamp_texts(milliseconds: Integers) -> Texts:
    """``2023-11-14 22:13:20.000Z``; years BC are counted from 1 and lack their sign (Java's ``yyyy``)."""
    days, rest = np.divmod(milliseconds, _MS_PER_DAY)
    found: Texts = []
    for year, month, day, ms in zip(*_civil(days), rest.tolist(), strict=True):
        seconds, ms = divmod(ms, 1000)
        era = year if year > 0 else 1 - year
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{ms:03}"
        found.append(f"{'+' if era > 9999 else ''}{era:04}-{month:02}-{day:02} {clock}Z")
    return found


def java_number(text: str) -> str:
    """A float's shortest digits in the notation of Java's ``Double.toString``.

    :param text: as Arrow prints it
    """
    if _PLAIN_NUMBER.fullmatch(text):
        return text
    if _SHORT_WHOLE_NUMBER.fullmatch(text):
        return text + ".0"
    if text in _NOT_FINITE:
        return _NOT_FINITE[text]
    sign, digits, exponent = Decimal(text).normalize().as_tuple()
    first, *rest = map(str, digits)
    power = int(exponent) + len(rest)
    if -3 <= power < 7:
        plain = format(Decimal(text), "f")
        return plain if "." in plain else plain + ".0"
    return f"{'-' * sign}{first}.{''.join(rest) or '0'}E{power}"


def duration_text(months: int, days: int, nanoseconds: int) -> str:
    """``1y2mo3d4h5m6s7ms8us9ns``; nothing for a duration of zero (C: cql3/Duration.toString)."""
    parts = [(abs(months) // 12, "y"), (abs(months) % 12, "mo"), (abs(days), "d")]
    rest = abs(nanoseconds)
    for unit, size in _UNITS:
        count, rest = divmod(rest, size)
        parts.append((count, unit))
    sign = "-" if min(months, days, nanoseconds) < 0 else ""
    return sign + "".join(f"{count}{unit}" for count, unit in parts if count)


def _printed(values: pa.Array) -> Texts:
    found: Texts = (values if pa.types.is_string(values.type) else pc.cast(values, pa.string())).to_pylist()
    return found


def _floats(values: pa.Array) -> Texts:
    return [java_number(text) for text in pc.cast(pc.fill_null(values, 0), pa.string()).to_pylist()]


def _blobs(values: pa.Array) -> Texts:
    return [f"0x{(value or b'').hex()}" for value in values.to_pylist()]


def _dates(values: pa.Array) -> Texts:
    return [
        f"{'-' if year < 0 else '+' if year > 9999 else ''}{abs(year):04}-{month:02}-{day:02}"
        for year, month, day in zip(*_civil(_numbers(values, np.int32)), strict=True)
    ]


def _times(values: pa.Array) -> Texts:
    found: Texts = []
    for value in _numbers(values, np.int64).tolist():
        seconds, nanoseconds = divmod(value, _NS_PER_S)
        found.append(f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{nanoseconds:09}")
    return found


def _timestamps(values: pa.Array) -> Texts:
    return timestamp_texts(_numbers(values, np.int64) // 1000)


def _durations(values: pa.Array) -> Texts:
    return [duration_text(*parts) for parts in zip(*(values.field(i).to_pylist() for i in range(3)), strict=True)]


def _inets(values: pa.Array) -> Texts:
    """As Java's getHostAddress: groups of IPv6 are not shortened, an IPv4 address in 16 bytes is an IPv4 address."""
    return [_inet(text) if text and ":" in text else text for text in values.to_pylist()]


def _inet(text: str) -> str:
    found = ipaddress.IPv6Address(text)
    if found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return ":".join(f"{int(group, 16):x}" for group in found.exploded.split(":"))


def _numbers(values: pa.Array, kind: type[np.int32] | type[np.int64]) -> Integers:
    """A fixed-length array's numbers, anything where it is null. (``to_numpy`` would import pandas.)"""
    found: Integers = np.frombuffer(values.buffers()[1], kind, len(values))
    return np.where(valid_mask(values), found, 0) if values.null_count else found


def _civil(days: Integers) -> tuple[list[int], list[int], list[int]]:
    """Years, months and days of the month of days since 1970 in the Gregorian calendar, also before it was made."""
    moments = days.astype("M8[D]")
    months = moments.astype("M8[M]")
    years = months.astype("M8[Y]")
    month = (months - years.astype("M8[M]")).astype(np.int64) + 1
    day = (moments - months.astype("M8[D]")).astype(np.int64) + 1
    return (years.astype(np.int64) + 1970).tolist(), month.tolist(), day.tolist()


_WRITERS: dict[Text, Callable[[pa.Array], Texts]] = {
    "blob": _blobs,
    "date": _dates,
    "duration": _durations,
    "float": _floats,
    "inet": _inets,
    "time": _times,
    "timestamp": _timestamps,
}
"""Those that Arrow does not print in Cassandra's way."""
