"""Counters in commit logs and SSTables: a counter is a context of shards, and its value is their sum.

A context is an int16 number of header elements, the elements (int16 each), then shards of 32 bytes: id, int64 clock,
int64 count (docs/formats.md, 2.6; C: db/context/CounterContext).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numba import njit

from ringsync.compiled.arrow import array_of
from ringsync.compiled.memory import KERNEL, address, load16, load32_native, load64, store64
from ringsync.cql.cells import cells_of

SHARD_BYTES = 32


def counter_totals(contexts: pa.Array) -> pa.Array:
    """Return the value of each context, int64, wrapped as in Java (C: CounterContext.total). Nulls stay null.

    :param contexts: array of type ``pa.binary()``
    """
    cells = cells_of(contexts)
    totals = np.empty(len(cells), np.int64)
    _sum_shards(*cells.arguments, address(totals))
    return array_of(totals, cells.lengths >= 0)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _sum_shards(base: int, offsets: int, lengths: int, count: int, output: int) -> None:
    for row in range(count):
        p = base + load32_native(offsets + 4 * row)
        end = p + max(load32_native(lengths + 4 * row), 0)
        total = 0
        if end - p >= 2:
            elements = load16(p)
            p += 2 + 2 * (elements if elements < 0x8000 else 0x10000 - elements)
            while end - p >= SHARD_BYTES:
                total += load64(p + 24)
                p += SHARD_BYTES
        store64(output + 8 * row, total)
