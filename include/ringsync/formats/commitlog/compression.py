"""Blocks as Cassandra's compressors write them, in commit logs and SSTables (specs/cassandra-formats.md §1.3)."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pyarrow as pa
from numba import njit

from ringsync.cql.kernels import KERNEL, address, load8, padded


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
        if length == 0:  # the closing section of a segment; Deflate writes no byte for it
            return b""
        try:
            found = decompress(block, length)
        except (OSError, ValueError, zlib.error) as error:
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
    """The length once more, little-endian, then a raw LZ4 block."""
    said = int.from_bytes(block[:4], "little")
    if said != length:
        raise BlockError(f"a block that says it has {said} bytes in a section of {length}")
    data = padded(block[4:])
    found = _lz4_length(address(data), len(block) - 4)
    if found != length:
        raise BlockError(f"a block of {found} bytes in a section of {length}" if found >= 0 else "not an LZ4 block")
    return bytes(pa.Codec("lz4_raw").decompress(block[4:], decompressed_size=length, asbytes=True))


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _lz4_length(p: int, size: int) -> int:
    """Bytes of a raw LZ4 block made plain; -1: it is none.

    Arrow gives as many as it is asked for, however few there are.
    """
    end, total = p + size, 0
    while p < end:
        token = load8(p)
        p += 1
        literals, p = _lz4_run(p, end, token >> 4)
        total += literals
        p += literals
        if p >= end:
            return total if p == end else -1
        matched, p = _lz4_run(p + 2, end, token & 15)
        total += matched + 4
    return -1


@njit(inline="always")  # type: ignore[untyped-decorator]
def _lz4_run(p: int, end: int, length: int) -> tuple[int, int]:
    if length == 15:
        more = 255
        while more == 255 and p < end:
            more = load8(p)
            length += more
            p += 1
    return length, p


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
