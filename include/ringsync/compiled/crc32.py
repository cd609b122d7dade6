"""CRC-32 (polynomial 0xEDB88320, like zlib's) in kernels: a call of zlib per record would cost more than the work.

If the processor multiplies without carries (x86-64 with PCLMULQDQ), the state is folded with 16 bytes at a time
(V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009, for reflected CRCs).
Other processors, and shorter data, use eight tables for eight bytes at a time ("slicing by 8").
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ringsync.compiled.memory import load8, load32_native, load64_native

_POLYNOMIAL = 0xEDB88320
_MASK = 0xFFFFFFFF

_QWORD = ir.IntType(64)
_WORDS = ir.VectorType(_QWORD, 2)
_WIDE = ir.IntType(128)
_FOLD_LOW, _FOLD_HIGH = 0x1751997D0, 0x0CCAA009E
_FOLD_64 = 0x163CD6124
_BARRETT_QUOTIENT, _BARRETT_POLYNOMIAL = 0x1F7011641, 0x1DB710641
"""Constants, bit-reflected: x^(128+32) and x^(128-32), x^64, floor(x^64 / P) and P itself, modulo P and times x."""


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
"""Tables uint32[8, 256]; kernels take their address."""


def can_fold() -> bool:
    """Tell whether kernels are compiled for a processor that multiplies without carries."""
    if platform.machine().lower() not in ("x86_64", "amd64") or config.CPU_NAME or config.CPU_FEATURES is not None:
        return False  # numba may compile for another processor than this one
    return bool(llvm.get_host_cpu_features().get("pclmul"))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _entry(tables: int, table: int, index: int) -> int:
    return load32_native(tables + 1024 * table + 4 * (index & 255)) & _MASK


@njit(inline="always")  # type: ignore[untyped-decorator]
def crc32_by_tables(tables: int, p: int, length: int, crc: int) -> int:
    """Continue the CRC ``crc`` (0: no bytes yet) with ``length`` bytes at the address ``p``."""
    state = crc ^ _MASK
    end = p + length
    while end - p >= 8:
        word = load64_native(p) ^ state
        state = 0
        for byte in range(8):
            state ^= _entry(tables, 7 - byte, word >> (8 * byte))
        p += 8
    if end - p >= 4:
        word = load32_native(p) ^ state
        state = 0
        for byte in range(4):
            state ^= _entry(tables, 3 - byte, word >> (8 * byte))
        p += 4
    while p < end:
        state = _entry(tables, 0, state ^ load8(p)) ^ (state >> 8)
        p += 1
    return state ^ _MASK


@intrinsic  # type: ignore[untyped-decorator]
def _fold(_context: Any, _p: Any, _length: Any, _state: Any) -> Any:
    """Return the state of the CRC (int64) after ``length`` bytes, 16 or more."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        p, length, state = arguments
        multiply = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_WORDS, [_WORDS, _WORDS, ir.IntType(8)]), "llvm.x86.pclmulqdq"
        )

        def times(x: Any, constants: Any, which: int) -> Any:
            return builder.call(multiply, [x, constants, ir.Constant(ir.IntType(8), which)])

        def pair(low: int, high: int) -> Any:
            return ir.Constant(_WORDS, [low, high])

        def number(value: int, kind: Any = _QWORD) -> Any:
            return ir.Constant(kind, value)

        def load(address: Any) -> Any:
            return builder.load(builder.inttoptr(address, _WIDE.as_pointer()), align=1)

        def words(wide: Any) -> Any:
            return builder.bitcast(wide, _WORDS)

        # The first block has 1 to 16 bytes after zeros, which change nothing, so that all other blocks are full. The
        # state belongs to the first four bytes. If the first block has fewer, the rest of the state spills into the
        # second block.
        first = builder.add(builder.and_(builder.sub(length, number(1)), number(15)), number(1))
        wide_state = builder.zext(state, _WIDE)
        shift = builder.zext(builder.shl(builder.sub(number(16), first), number(3)), _WIDE)
        block = builder.shl(builder.xor(load(p), wide_state), shift)
        shift = builder.zext(builder.shl(first, number(3)), _WIDE)
        # A shift by all 128 bits is undefined.
        shift = builder.select(builder.icmp_unsigned("<", first, number(4)), shift, number(32, _WIDE))
        folded = cgutils.alloca_once_value(builder, words(block))
        spilt = cgutils.alloca_once_value(builder, words(builder.lshr(wide_state, shift)))
        at = cgutils.alloca_once_value(builder, builder.add(p, first))
        constants = pair(_FOLD_LOW, _FOLD_HIGH)
        with cgutils.for_range(builder, builder.lshr(builder.sub(length, first), number(4)), intp=_QWORD):
            x, here = builder.load(folded), builder.load(at)
            block = builder.xor(words(load(here)), builder.load(spilt))
            x = builder.xor(times(x, constants, 0x00), times(x, constants, 0x11))
            builder.store(builder.xor(x, block), folded)
            builder.store(pair(0, 0), spilt)
            builder.store(builder.add(here, number(16)), at)
        x = builder.load(folded)
        low_half = pair(_MASK, 0)

        def shifted(value: Any, bits: int) -> Any:
            return words(builder.lshr(builder.bitcast(value, _WIDE), number(bits, _WIDE)))

        # 128 bits to 64, then Barrett's reduction to 32.
        x = builder.xor(times(x, constants, 0x10), shifted(x, 64))
        x = builder.xor(times(builder.and_(x, low_half), pair(_FOLD_64, 0), 0x00), shifted(x, 32))
        barrett = pair(_BARRETT_POLYNOMIAL, _BARRETT_QUOTIENT)
        quotient = builder.and_(times(builder.and_(x, low_half), barrett, 0x10), low_half)
        x = builder.xor(x, times(quotient, barrett, 0x00))
        return builder.lshr(builder.extract_element(x, ir.Constant(ir.IntType(32), 0)), number(32))

    return types.int64(types.int64, types.int64, types.int64), generate


@njit(inline="always")  # type: ignore[untyped-decorator]
def crc32_by_folding(tables: int, p: int, length: int, crc: int) -> int:
    """Continue a CRC like :func:`crc32_by_tables`, 16 bytes at a time. Needs :func:`can_fold`."""
    if length < 16:
        return crc32_by_tables(tables, p, length, crc)
    return _fold(p, length, crc ^ _MASK) ^ _MASK


crc32_continue = crc32_by_folding if can_fold() else crc32_by_tables
