"""Data.db as one sequence of uncompressed bytes, each checked by the checksum of its chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from ringsync.formats.compression import BlockError
from ringsync.formats.sstable.compression import CHECKSUM_BYTES, Chunks, read_chunks
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
        self._behind = CHECKSUM_BYTES if self.chunks.checksums is None else 0
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
        if self.chunks.stored[first] < 0:
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

    def _read(self, first: int, last: int) -> tuple[memoryview, list[int], list[int]]:
        """Read chunks from the file: at least one, and no more than fit into what is read at once.

        :returns: bytes; the place and size in them of each chunk that the file has wholly
        """
        chunks = self.chunks
        origin = int(chunks.starts[first])
        part = slice(first, last + 1)
        places, sizes = chunks.starts[part] - origin, chunks.stored[part]
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
        chunks, behind = self.chunks, place + size
        stored = raw[place:behind]
        if chunks.checksums is None:
            checksum = int.from_bytes(raw[behind : behind + CHECKSUM_BYTES], "big")
        else:
            checksum = int(chunks.checksums[number])
        if crc32(stored) != checksum:
            raise BlockError("its checksum is wrong")
        if chunks.unpack is not None and size <= chunks.longest_packed:
            return chunks.unpack(stored, expected)
        # Cassandra may fill up the last chunk of a file.
        if size < expected or (size > expected and number + 1 < len(chunks.starts)):
            raise BlockError(f"{size:,} bytes are stored instead of {expected:,}")
        return stored[:expected]

    def _lost(self, number: int, reason: str) -> Loss:
        chunks = self.chunks
        position = number * chunks.chunk_length
        length = min(chunks.chunk_length, chunks.length - position)
        place = f"chunk {number:,} at byte {int(chunks.starts[number]):,} of the file"
        return Loss(self.file, position, length, f"{place} is damaged: {reason}")

    def _cut_off(self, number: int) -> Loss:
        """Return the loss of a chunk that ends behind the end of the file, and of all behind it if they do, too."""
        loss = self._lost(number, "it ends behind the end of the file")
        ends = self.chunks.starts[number:] + self.chunks.stored[number:] + self._behind
        if (ends <= self._size).any():
            return loss
        reason = f"the file was cut off: it has {self._size:,} bytes, and chunk {number:,} ends behind them"
        return Loss(self.file, loss.position, self.length - loss.position, reason)
