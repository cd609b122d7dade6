"""Compiled MurmurHash3 of byte strings, for row digests and the tokens of Cassandra's Murmur3Partitioner."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numba import njit

from ringsync.compiled.arrow import Integers
from ringsync.compiled.memory import KERNEL, address, load8, load32_native, load64_native, store64
from ringsync.cql.codec.encode import offsets_of

LOWEST_TOKEN = -(2**63)
HIGHEST_TOKEN = 2**63 - 1

_FIRST = 0x87C37B91114253D5 - 2**64
_SECOND = 0x4CF5AD432745937F
_HIGHEST_BITS = 0x8080808080808080 - 2**64
_MIX_1 = 0xFF51AFD7ED558CCD - 2**64
_MIX_2 = 0xC4CEB9FE1A85EC53 - 2**64


def tokens(partition_keys: pa.Array) -> Integers:
    """Compute the Murmur3Partitioner's token of each partition key.

    A token is the first half of a MurmurHash3 that takes the bytes after the last 16-byte block as signed numbers, a
    mistake kept for compatibility (Cassandra: utils/MurmurHash, CASSANDRA-2975). The lowest token belongs to the empty
    key alone: a hash of this value becomes the highest token.

    :param partition_keys: binary array of serialised partition keys, see :func:`.encode.partition_key_bytes`
    :raises ValueError: a key is null
    """
    hashes, _ = murmur3_128(partition_keys, sign_extend=True)
    hashes[hashes == LOWEST_TOKEN] = HIGHEST_TOKEN
    hashes[np.diff(offsets_of(partition_keys)) == 0] = LOWEST_TOKEN
    return hashes


def murmur3_128(values: pa.Array, *, sign_extend: bool = False) -> tuple[Integers, Integers]:
    """Compute MurmurHash3 x64_128 with seed 0.

    :param values: binary array without nulls
    :param sign_extend: whether to repeat Cassandra's mistake, see :func:`tokens`
    :returns: first and second 64 bits of each hash, as signed numbers
    :raises ValueError: a value is null
    """
    if values.null_count:
        raise ValueError(f"{values.null_count} of {len(values)} values are null: there is nothing to hash")
    if not pa.types.is_binary(values.type):
        values = values.cast(pa.large_binary())
    offsets, data = offsets_of(values), values.buffers()[2]
    first, second = np.empty(len(values), np.int64), np.empty(len(values), np.int64)
    start = data.address if data else 0
    _hash_rows(address(offsets), start, len(values), int(sign_extend), address(first), address(second))
    return first, second


@njit(inline="always")  # type: ignore[untyped-decorator]
def _rotate_left(value: int, bits: int) -> int:
    return (value << bits) | ((value >> (64 - bits)) & ((1 << bits) - 1))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _shift_right(value: int, bits: int) -> int:
    """Shift a number right as if it were unsigned."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _finish(value: int) -> int:
    value = (value ^ _shift_right(value, 33)) * _MIX_1
    value = (value ^ _shift_right(value, 33)) * _MIX_2
    finished: int = value ^ _shift_right(value, 33)
    return finished


@njit(inline="always")  # type: ignore[untyped-decorator]
def _tail(p: int, length: int, sign_extend: int) -> int:
    """Load up to 8 bytes, low byte first. With ``sign_extend`` a byte of 0x80 or above flips all bits above it."""
    if length >= 4:
        # Two loads, of the first four and the last four bytes, are faster than a loop.
        word = (load32_native(p) & 0xFFFFFFFF) | ((load32_native(p + length - 4) & 0xFFFFFFFF) << (8 * length - 32))
        if not sign_extend or word & _HIGHEST_BITS == 0:
            return word
    word = 0
    for index in range(length):
        byte = load8(p + index)
        if sign_extend and byte >= 0x80:
            byte -= 0x100
        word ^= byte << (8 * index)
    return word


@njit(inline="always")  # type: ignore[untyped-decorator]
def murmur_mix(h1: int, h2: int, low: int, high: int) -> tuple[int, int]:
    """Mix one more block of two words, each with its low byte first, into the state of MurmurHash3 x64_128."""
    h1 ^= _rotate_left(low * _FIRST, 31) * _SECOND
    h1 = (_rotate_left(h1, 27) + h2) * 5 + 0x52DCE729
    h2 ^= _rotate_left(high * _SECOND, 33) * _FIRST
    h2 = (_rotate_left(h2, 31) + h1) * 5 + 0x38495AB5
    return h1, h2


@njit(inline="always")  # type: ignore[untyped-decorator]
def murmur_finish(h1: int, h2: int, low: int, high: int, length: int) -> tuple[int, int]:
    """Finish the hash with the last 0 to 15 bytes as two words, filled up with zeros, and the length of all bytes."""
    h2 ^= _rotate_left(high * _SECOND, 33) * _FIRST
    h1 ^= _rotate_left(low * _FIRST, 31) * _SECOND
    h1 ^= length
    h2 ^= length
    h1 += h2
    h2 += h1
    h1 = _finish(h1)
    h2 = _finish(h2)
    h1 += h2
    return h1, h2 + h1


@njit(inline="always")  # type: ignore[untyped-decorator]
def murmur_of(p: int, length: int, sign_extend: int) -> tuple[int, int]:
    """Compute MurmurHash3 x64_128, seed 0, of the bytes at an address; ``sign_extend``: with Cassandra's mistake."""
    h1 = h2 = 0
    for _ in range(length >> 4):
        h1, h2 = murmur_mix(h1, h2, load64_native(p), load64_native(p + 8))
        p += 16
    rest = length & 15
    return murmur_finish(h1, h2, _tail(p, min(rest, 8), sign_extend), _tail(p + 8, rest - 8, sign_extend), length)


@njit(inline="always")  # type: ignore[untyped-decorator]
def token_of(p: int, length: int) -> int:
    """Compute the token of the partition key at an address, see :func:`tokens`."""
    if length == 0:
        return LOWEST_TOKEN
    token, _ = murmur_of(p, length, 1)
    return HIGHEST_TOKEN if token == LOWEST_TOKEN else token


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _hash_rows(offsets: int, data: int, rows: int, sign_extend: int, first: int, second: int) -> None:
    """Hash each byte string by MurmurHash3 x64_128, seed 0; ``first`` and ``second``: addresses of int64[rows]."""
    for row in range(rows):
        start, end = load64_native(offsets + 8 * row), load64_native(offsets + 8 * row + 8)
        h1, h2 = murmur_of(data + start, end - start, sign_extend)
        store64(first + 8 * row, h1)
        store64(second + 8 * row, h2)
