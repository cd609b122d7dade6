"""CRC-32 (polynomial 0xEDB88320, as zlib's) in a kernel: for each record a call of zlib would cost more than the work.

Eight bytes at a time by eight tables ("slicing by 8").
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ringsync.cql.kernels import load8, load32_native, load64_native

_POLYNOMIAL = 0xEDB88320
_MASK = 0xFFFFFFFF


def _tables() -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    tables = np.zeros((8, 256), np.uint32)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        tables[0, byte] = value
    for table in range(1, 8):
        tables[table] = (tables[table - 1] >> 8) ^ tables[0][tables[table - 1] & 255]
    return tables


CRC_TABLES = _tables()
"""uint32[8, 256]; kernels take its address."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def _entry(tables: int, table: int, index: int) -> int:
    return load32_native(tables + 1024 * table + 4 * (index & 255)) & _MASK


@njit(inline="always")  # type: ignore[untyped-decorator]
def crc32_continue(tables: int, p: int, length: int, crc: int) -> int:
    """The CRC of what ``crc`` (0 for nothing) stands for and of ``length`` bytes at the address ``p``."""
    state = crc ^ _MASK
    end = p + length
    while end - p >= 8:
        word = load64_native(p) ^ state
        state = (
            _entry(tables, 7, word)
            ^ _entry(tables, 6, word >> 8)
            ^ _entry(tables, 5, word >> 16)
            ^ _entry(tables, 4, word >> 24)
            ^ _entry(tables, 3, word >> 32)
            ^ _entry(tables, 2, word >> 40)
            ^ _entry(tables, 1, word >> 48)
            ^ _entry(tables, 0, word >> 56)
        )
        p += 8
    while p < end:
        state = _entry(tables, 0, state ^ load8(p)) ^ (state >> 8)
        p += 1
    return state ^ _MASK
