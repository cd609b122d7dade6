"""CompressionInfo.db and CRC.db: where the chunks of Data.db are, and how to check and unpack them.

See docs/formats.md, 9.4; C: io/compress/CompressionMetadata, CompressedChunkReader; io/util/ChecksumWriter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringsync.compiled.arrow import Integers
from ringsync.formats.compression import decompressor
from ringsync.formats.sstable.cursor import DAMAGED, Cursor
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import CHECKSUMS, COMPRESSION, DATA
from ringsync.formats.sstable.source import Source
from ringsync.formats.sstable.versions import Version

CHECKSUM_BYTES = 4
"""Bytes of the CRC32 behind each chunk of a compressed Data.db."""

_ALWAYS_COMPRESSED = 2**31 - 1
_LARGEST_CHUNK = 1 << 30
_UNKNOWN_ADVICE = "let Cassandra rewrite the SSTable with another compressor: ALTER TABLE, then upgradesstables -a"


@dataclass(frozen=True)
class Chunks:
    """The chunks of a Data.db.

    :ivar compressor: simple name of the compressor; empty: the file is not compressed
    :ivar chunk_length: uncompressed bytes of each chunk but the last
    :ivar length: uncompressed bytes of all
    :ivar starts: int64[chunks]: first byte of each in the file
    :ivar stored: int64[chunks]: bytes of each in the file, without its checksum; -1: CompressionInfo.db is damaged
        there
    :ivar longest_packed: chunks with more stored bytes than that are not compressed
    :ivar checksums: CRC32 of each, in uncompressed files; in compressed ones it follows the chunk
    :ivar unpack: function (bytes, uncompressed length) → uncompressed bytes; it raises
        :class:`~ringsync.formats.compression.BlockError`. None: no chunk is compressed
    """

    compressor: str
    chunk_length: int
    length: int
    starts: Integers
    stored: Integers
    longest_packed: int
    checksums: Integers | None
    unpack: Callable[[memoryview, int], bytes] | None


def read_chunks(source: Source) -> Chunks:
    """Read where the chunks of an SSTable's Data.db are.

    :raises SSTableError: a file is missing or damaged, or the compressor is unknown
    """
    descriptor = source.descriptor
    size = source.size(DATA)
    if size is None:
        raise SSTableError(descriptor.path(DATA), None, "there is no such file", "copy all files of the SSTable")
    content = source.read(COMPRESSION)
    if content is not None:
        return parse_compression(content, descriptor.features, size, descriptor.path(COMPRESSION))
    content = source.read(CHECKSUMS)
    if content is None:
        problem = f"there is no such file, nor a {CHECKSUMS} beside it"
        raise SSTableError(descriptor.path(COMPRESSION), None, problem, "copy all files of the SSTable")
    return parse_checksums(content, size, descriptor.path(CHECKSUMS))


def parse_compression(content: bytes, version: Version, size: int, file: str) -> Chunks:
    """Read the bytes of a CompressionInfo.db.

    Compacted files have an empty chunk at the end, which is left out.

    :param size: bytes of Data.db
    :param file: path of the file, for messages
    :raises SSTableError: the bytes are damaged, or the compressor is unknown
    """
    cursor = Cursor(content, file)
    name = cursor.text16()
    for _ in range(cursor.count(4, "options of the compressor")):
        cursor.text16(), cursor.text16()
    chunk_length = cursor.i32()
    if not 0 < chunk_length <= _LARGEST_CHUNK:
        raise SSTableError(file, cursor.position - 4, f"chunks of {chunk_length:,} bytes", DAMAGED)
    packed_below = cursor.i32() if version.checksums else _ALWAYS_COMPRESSED
    length = cursor.i64()
    number = cursor.count(8, "chunks")
    needed = -(-length // chunk_length)
    if length < 0 or needed > number:
        problem = f"{number:,} chunks of {chunk_length:,} bytes cannot hold {length:,} bytes"
        raise SSTableError(file, cursor.position - 12, problem, DAMAGED)
    places = np.frombuffer(content, ">i8", number, cursor.skip(8 * number)).astype(np.int64)
    starts, ends = places[:needed], np.append(places[1:], size)[:needed]
    try:
        unpack = decompressor(name, has_checksum=True)
    except ValueError as error:
        raise SSTableError(file, 0, str(error), _UNKNOWN_ADVICE) from error
    stored = ends - starts - CHECKSUM_BYTES
    # A chunk is never stored in many more bytes than it has: compressors add some percent to noise.
    stored[(starts < 0) | (stored < 0) | (stored > chunk_length + (chunk_length >> 2) + 1024)] = -1
    return Chunks(name.rpartition(".")[2], chunk_length, length, starts, stored, packed_below - 1, None, unpack)


def parse_checksums(content: bytes, size: int, file: str) -> Chunks:
    """Read the bytes of a CRC.db, which belongs to an uncompressed Data.db of ``size`` bytes.

    Compacted files have a checksum of nothing at the end, which is left out. If Data.db was cut off, its chunks
    behind the end are lost, but it is unknown how many bytes the last one had.

    :param file: path of the file, for messages
    :raises SSTableError: the bytes are damaged
    """
    cursor = Cursor(content, file)
    chunk_length = cursor.i32()
    if not 0 < chunk_length <= _LARGEST_CHUNK:
        raise SSTableError(file, 0, f"chunks of {chunk_length:,} bytes", DAMAGED)
    checksums = np.frombuffer(content, ">u4", cursor.left // 4, 4).astype(np.int64)
    if len(checksums) and checksums[-1] == 0 and size <= (len(checksums) - 1) * chunk_length:
        checksums = checksums[:-1]
    length = max(size, (len(checksums) - 1) * chunk_length + 1 if len(checksums) else 0)
    if -(-length // chunk_length) > len(checksums):
        problem = f"it has {len(checksums):,} checksums of {chunk_length:,} bytes each, and {DATA} has {size:,} bytes"
        raise SSTableError(file, None, problem, DAMAGED)
    starts = np.arange(len(checksums), dtype=np.int64) * chunk_length
    stored = np.minimum(chunk_length, length - starts)
    return Chunks("", chunk_length, length, starts, stored, -1, checksums, None)
