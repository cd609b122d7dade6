"""Decompression of the blocks in commit logs and SSTables that Cassandra's compressors wrote (docs/formats.md, 1.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from numba import njit

from ringsync.compiled.memory import KERNEL, address, load8

_INFLATE_ERROR: Any = isal_zlib.error
_LONGEST_EMPTY_BLOCK = 16
"""Most bytes of a block without content (Deflate writes none at all). The last section of a segment has such a block.
No record fits into so few bytes."""


class BlockError(ValueError):
    """An error: a block does not decompress to the expected bytes."""


def decompressor(name: str, *, has_checksum: bool = False) -> Callable[[memoryview, int], bytes]:
    """Return a function (block, length of the result in bytes) → result. It raises :class:`BlockError`.

    :param name: name of Cassandra's class, with or without its package
    :param has_checksum: whether blocks come with a checksum of their compressed bytes, which the caller has checked:
        then an LZ4 block is not measured before it is unpacked, which would take longer than to unpack it
    :raises ValueError: the compressor is unknown
    """
    simple = name.rpartition(".")[2]
    if simple not in _DECOMPRESSORS:
        raise ValueError(f"the compressor {name} is unknown; known are {', '.join(_DECOMPRESSORS)}")
    decompress = _lz4 if simple == "LZ4Compressor" and has_checksum else _DECOMPRESSORS[simple]
    return partial(_checked, decompress)


def _checked(decompress: Callable[[memoryview, int], bytes], block: memoryview, length: int) -> bytes:
    if length == 0 and len(block) <= _LONGEST_EMPTY_BLOCK:
        return b""
    try:
        content = decompress(block, length)
    except (OSError, ValueError, MemoryError, _INFLATE_ERROR) as error:
        raise BlockError(f"{len(block)} bytes do not decompress to {length}: {error}") from error
    if len(content) != length:
        raise BlockError(f"{len(block)} bytes decompress to {len(content)} bytes instead of {length}")
    return content


@cache
def _codec(name: str) -> Any:
    return pa.Codec(name)


def _zstd(block: memoryview, length: int) -> bytes:
    return _codec("zstd").decompress(block, length, asbytes=True)


def _lz4(block: memoryview, length: int) -> bytes:
    """Decompress a raw LZ4 block, after a second, little-endian length."""
    claimed = int.from_bytes(block[:4], "little")
    if claimed != length:
        raise BlockError(f"a block claims {claimed} bytes in a section of {length}")
    return _codec("lz4_raw").decompress(block[4:], length, asbytes=True)


def _measured_lz4(block: memoryview, length: int) -> bytes:
    """Decompress like :func:`_lz4`, after a check of the true length, which Arrow does not report."""
    raw = np.frombuffer(block[4:], np.uint8)
    if _lz4_length(address(raw), address(raw) + len(raw)) != length:
        raise BlockError(f"{len(block)} bytes do not decompress to {length}")
    return _lz4(block, length)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _lz4_length(p: int, end: int) -> int:
    """Count the bytes that a raw LZ4 block decompresses to; -1: it is cut off."""
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
    """Read a length of four bits; if all are set, more bytes follow. Return the value and the address after it."""
    more = 255 if value == 15 else 0
    while more == 255 and p < end:
        more = load8(p)
        value += more
        p += 1
    return value, p


def _snappy(block: memoryview, length: int) -> bytes:
    """Decompress a block after a check of its own length, because Arrow trusts the length that it is given."""
    claimed = shift = 0
    for byte in block[:5]:
        claimed |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if claimed != length:
        raise BlockError(f"a block claims {claimed} bytes in a section of {length}")
    return _codec("snappy").decompress(block, length, asbytes=True)


def _deflate(block: memoryview, length: int) -> bytes:
    inflater = isal_zlib.decompressobj()
    content = inflater.decompress(block, length + 1)
    if not inflater.eof and len(content) <= length:
        raise BlockError("the stream does not end")
    return content


def _plain(block: memoryview, _length: int) -> bytes:
    return bytes(block)


_DECOMPRESSORS: dict[str, Callable[[memoryview, int], bytes]] = {
    "LZ4Compressor": _measured_lz4,
    "SnappyCompressor": _snappy,
    "DeflateCompressor": _deflate,
    "ZstdCompressor": _zstd,
    "NoopCompressor": _plain,
}
