"""Primitives of the compiled kernels: loads and stores at raw addresses.

Kernels take int64 addresses instead of arrays. An array argument costs reference counting and index checks in each
inlined helper, which makes the loops four to five times slower. The price is that nothing checks bounds. A kernel must
compare lengths with the end of its buffer before it reads, by ``n > end - p``, never by ``p + n > end``. Buffers end in
:data:`PADDING` spare bytes.

All integers of Cassandra's formats are big-endian: ``load*`` swap bytes, ``load*_native`` do not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


def _require_cache() -> None:
    """Check numba's cache folder, because numba's own message does not name it.

    :raises RuntimeError: compiled kernels cannot be kept
    """
    folder = os.environ["NUMBA_CACHE_DIR"]
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise RuntimeError(_NO_CACHE.format(folder, error.strerror)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RuntimeError(_NO_CACHE.format(folder, "no right to write there"))


_NO_CACHE = (
    "compiled kernels cannot be kept in {}: {}; set the variable NUMBA_CACHE_DIR to a folder that this user can "
    "write to (docs/commitlog.md)"
)
_require_cache()

PADDING = 64
"""Spare bytes that must be readable after the end of each buffer that a kernel gets."""

KERNEL: dict[str, bool] = {"nogil": True, "cache": True}
"""Options of all kernels: ``@njit(**KERNEL)``."""

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first byte. The caller keeps the array alive while a kernel uses it."""
    return int(array.__array_interface__["data"][0])


def padded(data: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """Copy bytes into a buffer for kernels, with :data:`PADDING` zero bytes at its end."""
    buffer = np.zeros(len(data) + PADDING, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer


def _load(bits: int, swap: bool, signed: bool) -> Callable[[int], int]:
    def typed(_context: Any, _address: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits)
            value = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()), align=1)
            if swap and bits > 8:
                value = builder.bswap(value)
            if bits == 64:
                return value
            return (builder.sext if signed else builder.zext)(value, _WORD)

        return types.int64(types.int64), generate

    return intrinsic(typed)  # type: ignore[no-any-return]


def _store(bits: int) -> Callable[[int, int], None]:
    def typed(_context: Any, _address: Any, _value: Any) -> Any:
        def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits)
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], kind)
            builder.store(value, builder.inttoptr(arguments[0], kind.as_pointer()), align=1)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return intrinsic(typed)  # type: ignore[no-any-return]


load8 = _load(8, swap=False, signed=False)
load16 = _load(16, swap=True, signed=False)
load32 = _load(32, swap=True, signed=False)
load32_signed = _load(32, swap=True, signed=True)
load64 = _load(64, swap=True, signed=True)
load32_native = _load(32, swap=False, signed=True)
load64_native = _load(64, swap=False, signed=True)
store8 = _store(8)
store16 = _store(16)
store32 = _store(32)
store64 = _store(64)


@intrinsic  # type: ignore[untyped-decorator]
def count_leading_zeros(_context: Any, _value: Any) -> Any:
    """Count the leading zero bits of a 64-bit value (64 for zero)."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy16(_context: Any, _destination: Any, _source: Any) -> Any:
    """Copy 16 bytes from the address ``_source`` to the address ``_destination``."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(_BYTE, 16).as_pointer()
        value = builder.load(builder.inttoptr(arguments[1], kind), align=1)
        builder.store(value, builder.inttoptr(arguments[0], kind), align=1)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(inline="always")  # type: ignore[untyped-decorator]
def copy_bytes(destination: int, source: int, length: int) -> None:
    """Copy ``length`` bytes, 16 at a time: up to 15 bytes after both ends are read and written, too."""
    done = 0
    while done < length:
        copy16(destination + done, source + done)
        done += 16


@njit(inline="always")  # type: ignore[untyped-decorator]
def copy_twice(first: int, second: int, source: int, length: int) -> None:
    """Copy like :func:`copy_bytes`, to two addresses."""
    done = 0
    while done < length:
        copy16(first + done, source + done)
        copy16(second + done, source + done)
        done += 16


@njit(inline="always")  # type: ignore[untyped-decorator]
def load_unsigned_vint(p: int) -> tuple[int, int]:
    """Read an unsigned vint at address ``p`` (docs/formats.md, 2.1). Return the value and the address after it."""
    first = load8(p)
    if first < 0x80:
        return first, p + 1
    if first == 0xFF:
        return load64(p + 1), p + 9
    extra = count_leading_zeros(~(first << 56))
    word = load64(p)
    if extra == 8:
        return word, p + 1 + extra
    shifted = np.int64((np.uint64(word) << np.uint64(extra)) >> np.uint64(extra))
    return shifted >> (56 - 8 * extra), p + 1 + extra


@njit(inline="always")  # type: ignore[untyped-decorator]
def copy_exactly(destination: int, source: int, length: int) -> None:
    """Copy ``length`` bytes and touch no other byte. Source and destination must not overlap."""
    if length >= 16:
        for done in range(0, length - 16, 16):
            copy16(destination + done, source + done)
        copy16(destination + length - 16, source + length - 16)
    elif length >= 8:
        store64(destination, load64_native(source))
        store64(destination + length - 8, load64_native(source + length - 8))
    elif length >= 4:
        store32(destination, load32_native(source))
        store32(destination + length - 4, load32_native(source + length - 4))
    else:
        for done in range(length):
            store8(destination + done, load8(source + done))


@njit(inline="always")  # type: ignore[untyped-decorator]
def is_valid(bitmap: int, bit: int) -> bool:
    """Tell whether an Arrow validity bitmap at the address ``bitmap`` (0: nothing is null) has this bit set."""
    return bitmap == 0 or (load8(bitmap + (bit >> 3)) >> (bit & 7)) & 1 == 1
