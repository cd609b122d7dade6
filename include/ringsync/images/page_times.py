"""The cell times of a result page (:mod:`ringsync.changes.common_times`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numba import njit

from ringsync.changes.common_times import NO_CELL, ElementTimes
from ringsync.changes.schema import NO_EXPIRY
from ringsync.compiled.arrow import Integers, integers, valid_mask
from ringsync.compiled.memory import KERNEL, address, is_valid, load32_native, load64_native, store64
from ringsync.cql.codec.decode import Decoded


def element_times(writetimes: Decoded, ttls: Decoded, now: int) -> ElementTimes:
    """Read ``writetime(c)`` and ``ttl(c)`` of a multi-cell column: list<bigint> and list<int> with null elements.

    :param now: moment at which the server computed the TTLs, s since the epoch
    :raises ValueError: these are not lists, or not of the same length
    """
    times, left = writetimes, ttls
    if times.misfits is not None or left.misfits is not None:
        raise ValueError("writetime or ttl of a multi-cell column must be a list of numbers")
    starts = np.frombuffer(times.values.buffers()[1], np.int32)
    counts, ttl_given = np.diff(starts), valid_mask(left.values)
    if np.any(ttl_given & (np.diff(integers(left.values.offsets)) != counts)):
        raise ValueError("writetime and ttl of a multi-cell column have different numbers of elements")
    expiries = np.full(len(times.values.values), NO_EXPIRY, np.int64)
    expiries[np.repeat(ttl_given, counts)] = np.where(
        valid_mask(left.values.values), integers(left.values.values) + now, NO_EXPIRY
    )
    expiries[~valid_mask(times.values.values)] = NO_CELL
    return ElementTimes(starts, integers(times.values.values), expiries)


def scalar_times(columns: Sequence[tuple[Decoded, Decoded | None]], rows: int, now: int) -> tuple[Integers, Integers]:
    """Read ``writetime(c)`` and ``ttl(c)`` of columns of one cell as int64[columns, rows] writetimes and expiries.

    :param columns: decoded bigint and int; None: the column has no TTLs
    :param now: moment at which the server computed the TTLs, s since the epoch
    :raises ValueError: a value is not such a number
    """
    writetimes, expiries = np.empty((2, len(columns), rows), np.int64)
    first_writetime, first_expiry = address(writetimes), address(expiries)
    for place, (times, ttls) in enumerate(columns):
        if times.misfits is not None or (ttls and ttls.misfits is not None):
            raise ValueError("writetime or ttl of a column must be a number")
        shift = 8 * place * rows
        # The most common case: nothing in these pages expires.
        some = ttls is not None and ttls.values.null_count < rows
        ttl_valid, ttl_values = _buffers(ttls.values) if ttls is not None and some else (0, 0)
        time_valid, time_values = _buffers(times.values)
        _gather_times(
            time_values, time_valid, ttl_values, ttl_valid, rows, now, first_writetime + shift, first_expiry + shift
        )
    return writetimes, expiries


def _buffers(array: pa.Array) -> tuple[int, int]:
    """Return the addresses of validity (0: no nulls) and values of an array of numbers without offset."""
    valid, values = array.buffers()
    return valid.address if valid else 0, values.address


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _gather_times(
    times: int, times_valid: int, ttls: int, ttls_valid: int, count: int, now: int, writetimes: int, expiries: int
) -> None:
    """Compute one column's times. ``ttls`` 0: there are none."""
    for row in range(count):
        writetime, expiry = load64_native(times + 8 * row), NO_EXPIRY
        if not is_valid(times_valid, row):
            expiry = NO_CELL
        elif ttls != 0 and is_valid(ttls_valid, row):
            expiry = now + load32_native(ttls + 4 * row)
        store64(writetimes + 8 * row, writetime)
        store64(expiries + 8 * row, expiry)
