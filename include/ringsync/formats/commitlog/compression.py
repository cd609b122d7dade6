"""Blocks as Cassandra's compressors write them, (docs/formats.md, 1.3)."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numba import njit

from ringsync.compiled.memory import KERNEL, address, load8

_MOST_FOR_NOTHING = 16
"""Bytes of an empty block, as the closing section of a segment has one; Deflate writes none. No record fits in."""


class BlockError(ValueError):
    """A block that does not decompress to what it should."""


def decompressor(name: str) -> Callable[[memoryview, int], bytes]:
    """A function (block, bytes of the result) → result.

    :param name: of Cassandra's class, simple or with its package
    :raises ValueError: for a compressor that is not known
    """
    simple = name.rpartition(".")[2]
    if simple not in _DECOMPRESSORS:
        raise ValueError(f"compressed by {name}, which is not known; known are {', '.join(_DECOMPRESSORS)}")
    return _checked(_DECOMPRESSORS[simple])


def _checked(decompress: Callable[[memoryview, int], bytes]) -> Callable[[memoryview, int], bytes]:
    def checked(block: memoryview, length: int) -> bytes:
        if length == 0 and len(block) <= _MOST_FOR_NOTHING:
            return b""
        try:
            found = decompress(block, length)
        except (OSError, ValueError, MemoryError, zlib.error) as error:
            raise BlockError(f"{len(block)} bytes do not decompress to {length}: {error}") from error
        if len(found) != length:
            raise BlockError(f"{len(block)} bytes decompress to {len(found)} bytes instead of {length}")
        return found

    return checked


def _arrow(codec: str) -> Callable[[memoryview, int], bytes]:
    def decompress(block: memoryview, length: int) -> bytes:
        return bytes(pa.Codec(codec).decompress(block, decompressed_size=length, asbytes=True))

    return decompress


def _lz4(block: memoryview, length: int) -> bytes:
    """The length once more, little-endian, then a raw LZ4 block, of which Arrow does not say how long it really was."""
    said = int.from_bytes(block[:4], "little")
    if said != length:
        raise BlockError(f"a block that says it has {said} bytes in a section of {length}")
    raw = np.frombuffer(block[4:], np.uint8)
    if _lz4_length(address(raw), address(raw) + len(raw)) != length:
        raise BlockError(f"{len(block)} bytes do not decompress to {length}")
    return bytes(pa.Codec("lz4_raw").decompress(block[4:], decompressed_size=length, asbytes=True))


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _lz4_length(p: int, end: int) -> int:
    """Bytes that a raw LZ4 block has when it is decompressed; -1: it is cut off."""
    size = 0
    while p < end:
        token = load8(p)
        literals, p = _lz4_number(token >> 4, p + 1, end)
        size += literals
        if literals >= end - p:
            return size if literals == end - p else -1
        match, p = _lz4_number(token & 15, p + literals + 2, end)
        size += match + 4
    return -1


@njit(inline="always")  # type: ignore[untyped-decorator]
def _lz4_number(value: int, p: int, end: int) -> tuple[int, int]:
    """A length of four bits and, when these are all set, of the bytes behind: value, address behind them."""
    more = 255 if value == 15 else 0
    while more == 255 and p < end:
        more = load8(p)
        value += more
        p += 1
    return value, p


def _snappy(block: memoryview, length: int) -> bytes:
    """Arrow trusts the length that it is given, so the block's own comes first."""
    said = shift = 0
    for byte in block[:5]:
        said |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if said != length:
        raise BlockError(f"a block that says it has {said} bytes in a section of {length}")
    return bytes(pa.Codec("snappy").decompress(block, decompressed_size=length, asbytes=True))


def _deflate(block: memoryview, length: int) -> bytes:
    inflater = zlib.decompressobj()
    found = inflater.decompress(block, length + 1)
    if not inflater.eof and len(found) <= length:
        raise BlockError("the stream does not end")
    return found


def _plain(block: memoryview, _length: int) -> bytes:
    return bytes(block)


_DECOMPRESSORS: dict[str, Callable[[memoryview, int], bytes]] = {
    "LZ4Compressor": _lz4,
    "SnappyCompressor": _snappy,
    "DeflateCompressor": _deflate,
    "ZstdCompressor": _arrow("zstd"),
    "NoopCompressor": _plain,
}
