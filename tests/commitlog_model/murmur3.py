"""MurmurHash3 x64_128 in plain Python: for tokens (with Cassandra's tail) and for digests (without)."""

from __future__ import annotations

import struct

_MASK = (1 << 64) - 1
_C1, _C2 = 0x87C37B91114253D5, 0x4CF5AD432745937F


def murmur3(data: bytes, signed_tail: bool = False) -> tuple[int, int]:
    """The two unsigned halves of the hash with seed 0.

    :param signed_tail: as C: utils/MurmurHash.hash3_x64_128 has it: the bytes after the last block of 16 are
        sign-extended before they are shifted
    """
    h1 = h2 = 0
    blocks = len(data) // 16
    for k1, k2 in struct.iter_unpack("<QQ", data[: 16 * blocks]):
        h1 ^= _mix(k1, _C1, 31, _C2)
        h1 = (_rotate(h1, 27) + h2) * 5 + 0x52DCE729 & _MASK
        h2 ^= _mix(k2, _C2, 33, _C1)
        h2 = (_rotate(h2, 31) + h1) * 5 + 0x38495AB5 & _MASK
    tail = data[16 * blocks :]
    h1 ^= _mix(_tail(tail[:8], signed_tail), _C1, 31, _C2)
    h2 ^= _mix(_tail(tail[8:], signed_tail), _C2, 33, _C1)
    h1, h2 = h1 ^ len(data), h2 ^ len(data)
    h1 = h1 + h2 & _MASK
    h2 = h2 + h1 & _MASK
    h1, h2 = _final(h1), _final(h2)
    h1 = h1 + h2 & _MASK
    return h1, h2 + h1 & _MASK


def token(partition_key: bytes) -> int:
    """The token of a serialised partition key (C: dht/Murmur3Partitioner.getToken)."""
    if not partition_key:
        return -(1 << 63)
    found = signed(murmur3(partition_key, signed_tail=True)[0])
    return (1 << 63) - 1 if found == -(1 << 63) else found


def signed(value: int) -> int:
    """An unsigned 64-bit number read as a signed one."""
    return value - (1 << 64) if value >> 63 else value


def _tail(tail: bytes, is_signed: bool) -> int:
    found = 0
    for i, byte in enumerate(tail):
        found ^= ((byte - 256 if is_signed and byte > 127 else byte) << 8 * i) & _MASK
    return found


def _mix(k: int, first: int, turn: int, second: int) -> int:
    return _rotate(k * first & _MASK, turn) * second & _MASK


def _rotate(value: int, turn: int) -> int:
    return (value << turn | value >> (64 - turn)) & _MASK


def _final(h: int) -> int:
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & _MASK
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return h ^ h >> 33
