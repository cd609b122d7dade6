"""The uncompressed bytes of a Data.db, in plain Python."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from itertools import pairwise

import pyarrow as pa

Read = Callable[[str], bytes | None]
"""Reads a file of an SSTable, by its component, for example `Data.db`; None: there is none."""
CODECS = {"LZ4Compressor": "lz4_raw", "SnappyCompressor": "snappy", "ZstdCompressor": "zstd"}


def content_of(read: Read, component: str) -> bytes:
    """A file that must be there."""
    found = read(component)
    assert found is not None, component
    return found


def data_of(read: Read) -> bytes:
    """Data.db of an SSTable of Cassandra 4.0 or later; every checksum is checked."""
    data, info = content_of(read, "Data.db"), read("CompressionInfo.db")
    assert zlib.crc32(data) == int(content_of(read, "Digest.crc32"))
    if info is None:
        return data
    length = struct.unpack_from(">H", info)[0]
    name, place = info[2 : 2 + length].decode(), 2 + length
    options = struct.unpack_from(">i", info, place)[0]
    place += 4
    for _ in range(2 * options):
        place += 2 + struct.unpack_from(">H", info, place)[0]
    chunk, longest, total, count = struct.unpack_from(">iiqi", info, place)
    offsets = [*struct.unpack_from(f">{count}q", info, place + 20), len(data)]
    content = b""
    for start, end in pairwise(offsets):
        stored, expected = data[start : end - 4], min(chunk, total - len(content))
        assert struct.unpack_from(">I", data, end - 4) == (zlib.crc32(stored),)
        if expected == 0:
            continue  # the empty chunk at the end
        if len(stored) >= longest or name == "NoopCompressor":
            content += stored[:expected]
        elif name == "DeflateCompressor":
            content += zlib.decompress(stored)
        else:
            skipped = 4 if name == "LZ4Compressor" else 0
            content += pa.decompress(stored[skipped:], expected, CODECS[name], asbytes=True)
    assert len(content) == total
    return content
