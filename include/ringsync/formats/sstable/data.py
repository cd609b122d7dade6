"""Data.db as one sequence of uncompressed bytes, each checked by the checksum of its chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal.isal_zlib import crc32

from ringsync.cql.murmur3 import tokens
from ringsync.formats.compression import BlockError
from ringsync.formats.sstable.compression import CHECKSUM_BYTES, ChunkPlaces, Chunks, read_chunks
from ringsync.formats.sstable.names import DATA
from ringsync.formats.sstable.source import Source

READ_BYTES = 2 << 20
"""Bytes of the file that are read at once, if so many are wanted."""


@dataclass(frozen=True)
class Loss:
    """Bytes that cannot be read.

    :ivar file: path of the file
    :ivar position: position of the first one, uncompressed
    :ivar length: number of uncompressed bytes
    :ivar reason: why, with the place in the file
    """

    file: str
    position: int
    length: int
    reason: str


class DataFile:
    """The content of an SSTable's Data.db. Positions are uncompressed bytes, as in its index.

    Each chunk is unpacked once if the file is read from front to back, whatever the sizes of the pieces. Only one
    thread at a time may read.

    :raises SSTableError: CompressionInfo.db or CRC.db is missing or damaged, see :func:`.compression.read_chunks`
    """

    def __init__(self, source: Source, read_bytes: int = READ_BYTES) -> None:
        self.chunks: Chunks = read_chunks(source)
        self.file = source.descriptor.path(DATA)
        self._source = source
        self._read_bytes = read_bytes
        self._size = source.size(DATA) or 0
        self._behind = CHECKSUM_BYTES if self.chunks.compressor else 0
        self._places: ChunkPlaces | None = None
        self._last = -1
        self._content = memoryview(b"")

    @property
    def length(self) -> int:
        """Number of uncompressed bytes."""
        return self.chunks.length

    def read_into(self, buffer: npt.NDArray[np.uint8], at: int, position: int, size: int) -> Loss | None:
        """Copy bytes into a buffer.

        :param buffer: where to
        :param at: place in the buffer of the first byte
        :param position: position of the first byte
        :param size: number of bytes
        :returns: None: all are there; otherwise the first chunk that is lost, or several up to the end of the file. The
            bytes before it are there; the next ones can be read from ``loss.position + loss.length``
        :raises ValueError: the bytes lie beyond the end of the file or of the buffer
        :raises OSError: the file cannot be read
        """
        if position < 0 or size < 0 or size > self.length - position or not 0 <= at <= len(buffer) - size:
            raise ValueError(f"{size} bytes at {position} of {self.length} do not fit at {at} of {len(buffer)}")
        target, end = memoryview(buffer)[at : at + size], position + size  # type: ignore[arg-type]
        start = position
        while position < end:
            number = position // self.chunks.chunk_length
            if number != self._last:
                last = (end - 1) // self.chunks.chunk_length
                position, loss = self._unpack(number, last, target, start, position)
                if loss is not None:
                    return loss
                continue
            first = position - number * self.chunks.chunk_length
            piece = self._content[first : first + end - position]
            target[position - start : position - start + len(piece)] = piece
            position += len(piece)
        return None

    def _unpack(self, first: int, last: int, target: memoryview, start: int, position: int) -> tuple[int, Loss | None]:
        """Read as many chunks as may be read at once, and copy them.

        :param first: first chunk; ``last``: last one that is wanted
        :param target: where the bytes from position ``start`` on belong
        :param position: first byte that is wanted, in the first chunk
        :returns: position behind the copied bytes; the loss that is there
        """
        chunk_length, length, end = self.chunks.chunk_length, self.chunks.length, start + len(target)
        known = self._known(first)
        if known.stored[first - known.first] < 0:
            return position, self._lost(first, "by CompressionInfo.db it ends before it begins, or is too long")
        raw, places, sizes = self._read(first, last)
        if not places:
            return position, self._cut_off(first)
        for number, (place, size) in enumerate(zip(places, sizes, strict=True), first):
            base = number * chunk_length
            expected = min(chunk_length, length - base)
            try:
                content = self._checked(raw, number, place, size, expected)
            except BlockError as error:
                return position, self._lost(number, str(error))
            if base != position or expected > end - position:
                self._last, self._content = number, memoryview(content)
                content = self._content[position - base : end - base]
                expected = len(content)
            target[position - start : position - start + expected] = content
            position += expected
        return position, None

    def _known(self, number: int) -> ChunkPlaces:
        """Return where a chunk, and some of its neighbours, are."""
        if self._places is None or not self._places.first <= number < self._places.end:
            self._places = self.chunks.places(number)
        return self._places

    def _read(self, first: int, last: int) -> tuple[memoryview, list[int], list[int]]:
        """Read chunks from the file: at least one, and no more than fit into what is read at once.

        :returns: bytes; the place and size in them of each chunk that the file has wholly
        """
        known = self._known(first)
        part = slice(first - known.first, last + 1 - known.first)
        origin = int(known.starts[part.start])
        places, sizes = known.starts[part] - origin, known.stored[part]
        ends = places + sizes + self._behind
        fits = (places >= 0) & (sizes >= 0) & (ends <= max(self._read_bytes, int(ends[0])))
        number = len(fits) if fits.all() else int(np.argmin(fits))
        raw = memoryview(self._source.read_range(DATA, origin, int(ends[:number].max())))
        whole = ends[:number] <= len(raw)
        number = number if whole.all() else int(np.argmin(whole))
        return raw, places[:number].tolist(), sizes[:number].tolist()

    def _checked(self, raw: memoryview, number: int, place: int, size: int, expected: int) -> memoryview | bytes:
        """Check and unpack a chunk.

        :raises BlockError: it is damaged
        """
        chunks, known, behind = self.chunks, self._known(number), place + size
        stored = raw[place:behind]
        if known.checksums is None:
            checksum = int.from_bytes(raw[behind : behind + CHECKSUM_BYTES], "big")
        else:
            checksum = int(known.checksums[number - known.first])
        if crc32(stored) != checksum:
            raise BlockError("its checksum is wrong")
        if chunks.unpack is not None and size <= chunks.longest_packed:
            return chunks.unpack(stored, expected)
        # Cassandra may fill up the last chunk of a file.
        if size < expected or (size > expected and number + 1 < chunks.count):
            raise BlockError(f"{size:,} bytes are stored instead of {expected:,}")
        return stored[:expected]

    def _lost(self, number: int, reason: str) -> Loss:
        chunks, known = self.chunks, self._known(number)
        position = number * chunks.chunk_length
        length = min(chunks.chunk_length, chunks.length - position)
        place = f"chunk {number:,} at byte {int(known.starts[number - known.first]):,} of the file"
        return Loss(self.file, position, length, f"{place} is damaged: {reason}")

    def _cut_off(self, number: int) -> Loss:
        """Return the loss of a chunk that ends behind the end of the file, and of all behind it if they do, too."""
        loss = self._lost(number, "it ends behind the end of the file")
        behind = number
        while behind < self.chunks.count:
            known = self._known(behind)
            ends = (known.starts + known.stored)[behind - known.first :] + self._behind
            if (ends <= self._size).any():
                return loss
            behind = known.end
        reason = f"the file was cut off: it has {self._size:,} bytes, and chunk {number:,} ends behind them"
        return Loss(self.file, loss.position, self.length - loss.position, reason)


def token_at(data: DataFile, position: int) -> int | None:
    """Return the token of the partition that begins at a position; None: it cannot be read."""
    size = _read(data, position, 2)
    key = _read(data, position + 2, int.from_bytes(size, "big")) if size else None
    return None if key is None else int(tokens(pa.array([key], pa.binary()))[0])


def _read(data: DataFile, position: int, size: int) -> bytes | None:
    """Read some bytes; None: they are lost, or there are not so many."""
    if size > data.length - position:
        return None
    buffer: npt.NDArray[np.uint8] = np.empty(size, np.uint8)
    return buffer.tobytes() if data.read_into(buffer, 0, position, size) is None else None
