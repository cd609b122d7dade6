"""Tokens, shards, stream ids and timeuuids by their own arithmetic (docs/scylla.md).

Nothing of the product is used: its decoder is tested against this.
"""

from __future__ import annotations

import random
from functools import lru_cache
from uuid import UUID

RING = 1 << 64
LAST = (1 << 63) - 1
FIRST = -(1 << 63)
GREGORIAN = 0x01B21DD213814000
"""100 ns between the first day of the Gregorian calendar and that of Unix."""


def shard_of(token: int, shards: int, ignored_bits: int) -> int:
    """The shard of a token: the fraction of the ring that it is at, its upper bits left out, times the shards."""
    place = (token - FIRST << ignored_bits) % RING
    return place * shards // RING


@lru_cache(maxsize=64)
def shard_starts(shards: int, ignored_bits: int) -> tuple[int, ...]:
    """The least token of each shard, counted from the first token of the ring."""
    starts = []
    for shard in range(shards):
        # The least place with place * shards / ring >= shard, rounded up to what is left without the upper bits.
        place = -(-shard * RING // shards)
        starts.append(-(-place >> ignored_bits) if shard else 0)
    return tuple(starts)


def next_of_shard(token: int, shard: int, shards: int, ignored_bits: int) -> int:
    """The least token behind another at which a run of that shard's tokens starts; none: the last of the ring."""
    place = token - FIRST
    stride = RING >> ignored_bits
    start = place // stride * stride + shard_starts(shards, ignored_bits)[shard]
    while start <= place:
        start += stride
    return start + FIRST if start < RING else LAST


def first_token(after: int, end: int, shard: int, shards: int, ignored_bits: int) -> int:
    """The token of a shard's stream in the range (after, end]: the shard's least one there, else the range's end."""

    def least(after: int, end: int) -> int:
        token = after + 1
        if shard_of(token, shards, ignored_bits) != shard:
            token = next_of_shard(token, shard, shards, ignored_bits)
        return min(token, end)

    if after < end:
        return least(after, end)
    token = LAST if after == LAST else least(after, LAST)
    return token if token != LAST else least(FIRST, end)


def tablet_ends(tablets: int) -> list[int]:
    """The last token of each tablet; their number is a power of two."""
    return [RING // tablets * (number + 1) - 1 + FIRST for number in range(tablets)]


def stream_id(rng: random.Random, token: int, index: int) -> bytes:
    """A stream id of version 1 with random bits."""
    return id_of(token, rng.getrandbits(38), index)


def id_of(token: int, bits: int, index: int) -> bytes:
    """A stream id of version 1."""
    return token.to_bytes(8, "big", signed=True) + (bits << 26 | index << 4 | 1).to_bytes(8, "big")


def timeuuid(rng: random.Random, micros: int, old: bool = False) -> UUID:
    """A ``cdc$time``: the time of a write, in µs, and random bytes.

    :param old: as releases before the IETF variant: all eight bytes are random, so their sign bit is free
    """
    time = micros * 10 + GREGORIAN
    high = (time & 0xFFFFFFFF) << 32 | (time >> 32 & 0xFFFF) << 16 | 1 << 12 | time >> 48
    low = rng.getrandbits(64)
    if not old:
        low = low & ~(3 << 62) | 2 << 62
    return UUID(int=high << 64 | low)


def micros_of(time: UUID) -> int:
    """The µs since the epoch that a timeuuid has."""
    return (time.time - GREGORIAN) // 10


def timeuuid_order(time: UUID) -> tuple[int, bytes]:
    """By this timeuuids are sorted in a log: their time, then the other bytes as signed numbers."""
    return time.time, bytes(byte ^ 0x80 for byte in time.bytes[8:])
