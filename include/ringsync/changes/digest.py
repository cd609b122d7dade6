"""The digest of a change row's content: 128 bits, equal on all replicas that have the mutation.

MurmurHash3 x64_128 with seed 0 of these bytes, all numbers little-endian::

    table id (16 bytes), u8 kind
    i32 length and bytes of the partition key
    clustering, as in the column of this name; i32 0 for static rows and partition deletions
    range only: range_end, as in the column of this name
    liveness: u8 0 | u8 1, i64 timestamp | u8 2, i64 timestamp, i32 ttl, i64 expires_at
    deletion: u8 0 | u8 1, i64 timestamp, i64 local_deletion_time
    i32 count of cells, each: i64 column, i32 length (-1: none) and bytes of the path, u8 kind, i64 timestamp,
        [expiring: i32 ttl, i64 expires_at] [tombstone: i64 local_deletion_time]
        [else: i32 length and bytes of the value]
    i32 count of complex deletions, each: i64 column, i64 timestamp, i64 local_deletion_time
    only if written with a TTL and read from a CDC log: the 16 bytes of cdc$time. The same write may come again, and
        then expires later; the expiry above counts from the write time, which is the same

A column is the first half of the same hash of its name, because its place among the columns may change.
"""

from __future__ import annotations

from collections.abc import Iterable

from numba import njit

from ringsync.compiled.memory import load64, load64_native, store64
from ringsync.cql.cells import cells_of_values, raw_values
from ringsync.cql.murmur3 import murmur3_128, murmur_finish, murmur_mix

DIGEST_BYTES = 16


def column_hashes(names: Iterable[str]) -> dict[str, int]:
    """Hash the names of columns to the signed 64-bit numbers that stand for them in a digest."""
    names = list(names)
    hashes, _ = murmur3_128(raw_values(cells_of_values([name.encode() for name in names])))
    return dict(zip(names, hashes.tolist(), strict=True))


@njit(inline="always")  # type: ignore[untyped-decorator]
def store_digest(output: int, p: int, length: int) -> None:
    """Store the digest of the ``length`` bytes at ``p``; 16 writable bytes must follow them.

    Both halves are big-endian: the digest's hexadecimal digits are those of the two numbers.
    """
    store64(p + length, 0)
    store64(p + length + 8, 0)
    h1 = h2 = 0
    end = p + length
    while end - p >= 16:
        h1, h2 = murmur_mix(h1, h2, load64_native(p), load64_native(p + 8))
        p += 16
    h1, h2 = murmur_finish(h1, h2, load64_native(p), load64_native(p + 8), length)
    store64(output, h1)
    store64(output + 8, h2)
    store64(output, load64(output))
    store64(output + 8, load64(output + 8))
