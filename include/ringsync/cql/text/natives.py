"""Values of native types in Cassandra's JSON form, without the quotes (C: AbstractType.toJSONString)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.compiled.arrow import Integers, Mask, integers
from ringsync.cql.natives import NATIVES, Text

FIRST_DAY, LAST_DAY = -719162, 2932896
"""0001-01-01 and 9999-12-31, days since 1970."""
_MS_PER_DAY = 86_400_000
LAST_TIMESTAMP_MS = (LAST_DAY + 1) * _MS_PER_DAY - 1
_NS_PER_S = 1_000_000_000
_UNITS = (("h", 3600 * _NS_PER_S), ("m", 60 * _NS_PER_S), ("s", _NS_PER_S), ("ms", 1_000_000), ("us", 1000), ("ns", 1))
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_PLAIN_NUMBER = r"^-?(?:0\.(?:[1-9]|0[1-9]|00[1-9])\d*|[1-9]\d{0,6}\.\d+)$"
_SHORT_WHOLE_NUMBER = re.compile(r"-?\d{1,7}")


def native_texts(name: str, values: pa.Array) -> pa.Array:
    """Write each value. The text of a null is undefined.

    :param name: name of a native type
    :param values: array of the type's Arrow type without an offset, as :func:`ringsync.cql.codec.decode.decode` returns
    """
    return _WRITERS.get(NATIVES[name].text, _printed)(values)


def replaced(texts: pa.Array, rows: npt.NDArray[np.intp], others: Sequence[str | None]) -> pa.Array:
    """Replace the texts in these rows by others."""
    if not len(rows):
        return texts
    places = np.arange(len(texts))
    places[rows] = len(texts) + np.arange(len(rows))
    return pa.concat_arrays([texts, pa.array(others, pa.string())]).take(pa.array(places))


def joined(*parts: pa.Array | str) -> pa.Array:
    """Join parts of texts; the result is null if one of them is null."""
    return pc.binary_join_element_wise(*parts, "")


def chosen(condition: pa.Array) -> Mask:
    """Return the mask of a condition; null counts as false."""
    mask: Mask = pc.fill_null(condition, False).to_numpy(zero_copy_only=False)
    return mask


def timestamp_texts(milliseconds: Integers) -> list[str]:
    """Write ``2023-11-14 22:13:20.000Z``; years BC are counted from 1 and lack their sign (Java's ``yyyy``)."""
    days, rest = np.divmod(milliseconds, _MS_PER_DAY)
    texts = []
    for year, month, day, ms in zip(*_civil(days), rest.tolist(), strict=True):
        seconds, ms = divmod(ms, 1000)
        era = year if year > 0 else 1 - year
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{ms:03}"
        texts.append(f"{'+' if era > 9999 else ''}{era:04}-{month:02}-{day:02} {clock}Z")
    return texts


def _java_number(text: str) -> str:
    """Write a float's shortest digits in the notation of Java's ``Double.toString``."""
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


def _duration_text(months: int, days: int, nanoseconds: int) -> str:
    """Write ``1y2mo3d4h5m6s7ms8us9ns``; an empty text for a duration of zero (C: cql3/Duration.toString)."""
    parts = [(abs(months) // 12, "y"), (abs(months) % 12, "mo"), (abs(days), "d")]
    rest = abs(nanoseconds)
    for unit, size in _UNITS:
        count, rest = divmod(rest, size)
        parts.append((count, unit))
    sign = "-" if min(months, days, nanoseconds) < 0 else ""
    return sign + "".join(f"{count}{unit}" for count, unit in parts if count)


def _printed(values: pa.Array) -> pa.Array:
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def _floats(values: pa.Array) -> pa.Array:
    texts = values.cast(pa.string())  # the shortest digits that give the same number
    rows = np.flatnonzero(chosen(pc.invert(pc.match_substring_regex(texts, _PLAIN_NUMBER))))
    return replaced(texts, rows, [_java_number(text) for text in texts.take(pa.array(rows)).to_pylist()])


def _blobs(values: pa.Array) -> pa.Array:
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    limits = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, 4 * values.offset)
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)[limits[0] : limits[-1]]
    text = digits[np.stack([data >> 4, data & 15], axis=1)] if len(data) else data
    offsets = pa.py_buffer(((limits - limits[0]) * 2).astype(np.int32))
    return joined("0x", pa.Array.from_buffers(pa.string(), len(values), [None, offsets, pa.py_buffer(text)]))


def _dates(values: pa.Array) -> pa.Array:
    days = integers(values)
    usual = (days >= FIRST_DAY) & (days <= LAST_DAY)
    rows = np.flatnonzero(~usual)
    others = [
        f"{'-' if year < 0 else '+' if year > 9999 else ''}{abs(year):04}-{month:02}-{day:02}"
        for year, month, day in zip(*_civil(days[rows]), strict=True)
    ]
    return replaced(
        pa.array(np.where(usual, days, 0).astype(np.int32)).view(pa.date32()).cast(pa.string()), rows, others
    )


def _times(values: pa.Array) -> pa.Array:
    texts = []
    for value in integers(values).tolist():
        seconds, nanoseconds = divmod(value, _NS_PER_S)
        texts.append(f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{nanoseconds:09}")
    return pa.array(texts, pa.string())


def _timestamps(values: pa.Array) -> pa.Array:
    milliseconds = integers(values) // 1000
    usual = (milliseconds >= FIRST_DAY * _MS_PER_DAY) & (milliseconds <= LAST_TIMESTAMP_MS)
    rows = np.flatnonzero(~usual)
    moments = pa.array(np.where(usual, milliseconds, 0)).view(pa.timestamp("ms"))
    return replaced(joined(moments.cast(pa.string()), "Z"), rows, timestamp_texts(milliseconds[rows]))


def _durations(values: pa.Array) -> pa.Array:
    parts = zip(*(values.field(i).to_pylist() for i in range(3)), strict=True)
    return pa.array([_duration_text(*numbers) for numbers in parts], pa.string())


def _inets(values: pa.Array) -> pa.Array:
    """Write addresses like Java's getHostAddress: zero groups of IPv6 stay, IPv4 in 16 bytes is written as IPv4."""
    rows = np.flatnonzero(chosen(pc.match_substring(values, ":")))
    return replaced(values, rows, [_inet(text) for text in values.take(pa.array(rows)).to_pylist()])


def _inet(text: str) -> str:
    address = ipaddress.IPv6Address(text)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return ":".join(f"{int(group, 16):x}" for group in address.exploded.split(":"))


def _civil(days: Integers) -> tuple[list[int], list[int], list[int]]:
    """Split days since 1970 into years, months and days of the month, by the Gregorian calendar for all times."""
    moments = days.astype("M8[D]")
    months = moments.astype("M8[M]")
    years = months.astype("M8[Y]")
    month = (months - years.astype("M8[M]")).astype(np.int64) + 1
    day = (moments - months.astype("M8[D]")).astype(np.int64) + 1
    return (years.astype(np.int64) + 1970).tolist(), month.tolist(), day.tolist()


_WRITERS: dict[Text, Callable[[pa.Array], pa.Array]] = {
    "blob": _blobs,
    "date": _dates,
    "duration": _durations,
    "float": _floats,
    "inet": _inets,
    "time": _times,
    "timestamp": _timestamps,
}
"""Writers of the values that Arrow prints in another way than Cassandra."""
