"""CompressionInfo.db and CRC.db: where the chunks of Data.db are, and how to check and unpack them.

See docs/formats.md, 9.4; C: io/compress/CompressionMetadata, CompressedChunkReader; io/util/ChecksumWriter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ringsync.compiled.arrow import Integers
from ringsync.formats.compression import decompressor
from ringsync.formats.sstable.cursor import DAMAGED, Cursor
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import CHECKSUMS, COMPRESSION, DATA
from ringsync.formats.sstable.source import Source

CHECKSUM_BYTES = 4
"""Bytes of the CRC32 behind each chunk of a compressed Data.db."""

CHUNKS_AT_ONCE = 2**13
"""Chunks whose places are read and kept at once: of 16 KiB each, as by default, they are 128 MiB."""

_HEAD_BYTES = 8 * CHUNKS_AT_ONCE + 4096
_ALWAYS_COMPRESSED = 2**31 - 1
_LARGEST_CHUNK = 1 << 30
_UNKNOWN_ADVICE = "let Cassandra rewrite the SSTable with another compressor: ALTER TABLE, then upgradesstables -a"


@dataclass(frozen=True)
class ChunkPlaces:
    """Where some adjacent chunks are.

    :ivar first: number of the first one
    :ivar starts: int64[n]: first byte of each in the file
    :ivar stored: int64[n]: bytes of each in the file, without its checksum; -1: CompressionInfo.db is damaged there
    :ivar checksums: CRC32 of each, in uncompressed files; in compressed ones it follows the chunk
    """

    first: int
    starts: Integers
    stored: Integers
    checksums: Integers | None

    @property
    def end(self) -> int:
        """Number of the chunk behind them."""
        return self.first + len(self.starts)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a Data.db. Of an SSTable of 100 GB they are millions, so only those that are asked for are read.

    :ivar compressor: simple name of the compressor; empty: the file is not compressed
    :ivar chunk_length: uncompressed bytes of each chunk but the last
    :ivar length: uncompressed bytes of all
    :ivar count: number of chunks
    :ivar longest_packed: chunks with more stored bytes than that are not compressed
    :ivar unpack: function (bytes, uncompressed length) → uncompressed bytes; it raises
        :class:`~ringsync.formats.compression.BlockError`. None: no chunk is compressed
    :ivar places: function from the number of a chunk to where it and some next ones are; it reads them, and raises
        SSTableError if the file ends before
    """

    compressor: str
    chunk_length: int
    length: int
    count: int
    longest_packed: int
    unpack: Callable[[memoryview, int], bytes] | None
    places: Callable[[int], ChunkPlaces] = field(repr=False, compare=False)


def read_chunks(source: Source) -> Chunks:
    """Read what the chunks of an SSTable's Data.db are.

    :raises SSTableError: a file is missing or damaged, or the compressor is unknown
    """
    descriptor = source.descriptor
    size = source.size(DATA)
    if size is None:
        raise SSTableError(descriptor.path(DATA), None, "there is no such file", "copy all files of the SSTable")
    if (own := source.size(COMPRESSION)) is not None:
        return _compressed(_Table(source, COMPRESSION, own), size)
    if (own := source.size(CHECKSUMS)) is not None:
        return _uncompressed(_Table(source, CHECKSUMS, own), size)
    problem = f"there is no such file, nor a {CHECKSUMS} beside it"
    raise SSTableError(descriptor.path(COMPRESSION), None, problem, "copy all files of the SSTable")


class _Table:
    """A file with a head and a number for each chunk. Its begin is read once: of a small file that is all.

    :ivar size: bytes of the file
    """

    def __init__(self, source: Source, component: str, size: int) -> None:
        self.file, self.size, self.version = source.descriptor.path(component), size, source.descriptor.features
        self._source, self._component = source, component
        self.head = source.read_range(component, 0, min(size, _HEAD_BYTES))

    def numbers(self, kind: str, start: int, count: int) -> Integers:
        """Read numbers from a place in the file, as int64.

        :param kind: NumPy's name of their type
        :raises SSTableError: the file ends before
        """
        end = start + count * np.dtype(kind).itemsize
        read = self._source.read_range
        content = self.head[start:end] if end <= len(self.head) else read(self._component, start, end - start)
        if len(content) < end - start:
            raise SSTableError(self.file, start, f"the file ends before byte {end:,}", DAMAGED)
        return np.frombuffer(content, kind).astype(np.int64)


def _compressed(table: _Table, size: int) -> Chunks:
    """Read the head of a CompressionInfo.db.

    Compacted files have an empty chunk at the end, which is left out.

    :param size: bytes of Data.db
    :raises SSTableError: the bytes are damaged, or the compressor is unknown
    """
    file = table.file
    cursor = Cursor(table.head, file)
    name = cursor.text16()
    for _ in range(cursor.count(4, "options of the compressor")):
        cursor.text16(), cursor.text16()
    chunk_length = cursor.i32()
    if not 0 < chunk_length <= _LARGEST_CHUNK:
        raise SSTableError(file, cursor.position - 4, f"chunks of {chunk_length:,} bytes", DAMAGED)
    packed_below = cursor.i32() if table.version.checksums else _ALWAYS_COMPRESSED
    length, number = cursor.i64(), cursor.i32()
    begin, needed = cursor.position, -(-length // chunk_length)
    if number < 0 or 8 * number > table.size - begin:
        raise cursor.fail(f"{number:,} chunks cannot follow in {table.size - begin:,} bytes")
    if length < 0 or needed > number:
        problem = f"{number:,} chunks of {chunk_length:,} bytes cannot hold {length:,} bytes"
        raise SSTableError(file, begin - 12, problem, DAMAGED)
    try:
        unpack = decompressor(name, has_checksum=True)
    except ValueError as error:
        raise SSTableError(file, 0, str(error), _UNKNOWN_ADVICE) from error

    def places(chunk: int) -> ChunkPlaces:
        first = chunk // CHUNKS_AT_ONCE * CHUNKS_AT_ONCE
        end = min(first + CHUNKS_AT_ONCE, needed)
        starts = table.numbers(">i8", begin + 8 * first, min(end + 1, number) - first)
        if end == number:
            starts = np.append(starts, size)
        stored = np.diff(starts) - CHECKSUM_BYTES
        starts = starts[:-1]
        # A chunk is never stored in many more bytes than it has: compressors add some percent to noise.
        stored[(starts < 0) | (stored < 0) | (stored > chunk_length + (chunk_length >> 2) + 1024)] = -1
        return ChunkPlaces(first, starts, stored, None)

    return Chunks(name.rpartition(".")[2], chunk_length, length, needed, packed_below - 1, unpack, places)


def _uncompressed(table: _Table, size: int) -> Chunks:
    """Read the head of a CRC.db, which belongs to an uncompressed Data.db of ``size`` bytes.

    Compacted files have a checksum of nothing at the end, which is left out. If Data.db was cut off, its chunks
    behind the end are lost, but it is unknown how many bytes the last one had.

    :raises SSTableError: the bytes are damaged
    """
    file = table.file
    chunk_length = Cursor(table.head, file).i32()
    if not 0 < chunk_length <= _LARGEST_CHUNK:
        raise SSTableError(file, 0, f"chunks of {chunk_length:,} bytes", DAMAGED)
    count = (table.size - 4) // 4
    if count and size <= (count - 1) * chunk_length and table.numbers(">u4", 4 * count, 1)[0] == 0:
        count -= 1
    length = max(size, (count - 1) * chunk_length + 1 if count else 0)
    if -(-length // chunk_length) > count:
        problem = f"it has {count:,} checksums of {chunk_length:,} bytes each, and {DATA} has {size:,} bytes"
        raise SSTableError(file, None, problem, DAMAGED)

    def places(chunk: int) -> ChunkPlaces:
        first = chunk // CHUNKS_AT_ONCE * CHUNKS_AT_ONCE
        end = min(first + CHUNKS_AT_ONCE, count)
        starts = np.arange(first, end, dtype=np.int64) * chunk_length
        checksums = table.numbers(">u4", 4 + 4 * first, end - first)
        return ChunkPlaces(first, starts, np.minimum(chunk_length, length - starts), checksums)

    return Chunks("", chunk_length, length, count, -1, None, places)
