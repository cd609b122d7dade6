"""A commit log segment file: its descriptor, its sync markers, and its unpacked sections.

See docs/formats.md, 1.2 to 1.4; C: db/commitlog/CommitLogDescriptor, CommitLogSegmentReader.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ringsync.compiled.memory import PADDING, padded
from ringsync.formats.compression import BlockError, decompressor

VERSIONS = (6, 7, 8)

_HEADER = struct.Struct(">iqH")
_MARKER = struct.Struct(">iI")
_LONGEST_DESCRIPTOR = _HEADER.size + 0xFFFF + 4
_SLICE = 1 << 16
"""Places that are searched for a marker at once: those with the same high half."""


class SegmentError(ValueError):
    """An error: the file as a whole cannot be read. The message says why and what to do."""


@dataclass(frozen=True)
class Descriptor:
    """The start of a segment.

    :ivar version: 6: Cassandra 3.x, 7: 4.x and 5.0 with ``storage_compatibility_mode: CASSANDRA_4``, 8: 5.0
    :ivar segment_id: id of the segment; ids of a node's segments rise
    :ivar parameters: parameters of compression and encryption, in Cassandra's JSON
    :ivar size: bytes of the descriptor in the file
    """

    version: int
    segment_id: int
    parameters: dict[str, Any]
    size: int

    @property
    def codec(self) -> str:
        """A name for people: ``plain``, a compressor's simple name, or ``encrypted``."""
        if "encCipher" in self.parameters:
            return "encrypted"
        return str(self.parameters.get("compressionClass") or "plain").rpartition(".")[2]


@dataclass(frozen=True)
class Section:
    """The records that were synced at once, uncompressed.

    :ivar start: start of the records in the segment's buffer; ``end``: their end there
    :ivar position: logical position of ``start``
    """

    start: int
    end: int
    position: int


@dataclass(frozen=True)
class Damage:
    """Bytes that hold no readable record.

    :ivar position: logical position where they begin; for a damaged record, where it ends
    :ivar length: number of uncompressed bytes; if that is unknown, of bytes in the file
    :ivar reason: explanation for people
    """

    position: int
    length: int
    reason: str


@dataclass(frozen=True)
class Segment:
    """A segment's records, uncompressed, in one buffer.

    :ivar buffer: bytes of the sections, followed by spare bytes
    :ivar sections: sections in the order of the log
    :ivar damages: parts that could not be read
    :ivar end: logical position after the last section
    :ivar certain: place in the buffer; positions of records after it depend on the length of a damaged section, so they
        may be wrong
    :ivar file_end: end of the file in the buffer if the segment is plain; otherwise -1
    :ivar unsure: why nobody can tell yet whether it ends there: what was synced may show up later; empty: it does
    """

    descriptor: Descriptor
    buffer: npt.NDArray[np.uint8]
    sections: list[Section]
    damages: list[Damage]
    end: int
    certain: int
    file_end: int
    unsure: str = ""


@dataclass(frozen=True)
class Wanted:
    """The part of a segment to read.

    :ivar after: logical position: only records after it are read. Records after a section that cannot be unpacked are
        all read, because their positions are uncertain
    :ivar until: logical position up to which the segment was synced (``_cdc.idx``): records after it are not read,
        because they may not survive a crash of the node. None: to the end
    :ivar completed_at: offset in the index of a completed segment; None: there is no such index. Only this offset can
        tell that the end of the file is missing
    :ivar reached: logical position up to which the segment was synced by an earlier index. It counts if the node has
        crashed since, because its last index does not tell where the segment ends
    :ivar part: first byte of the file and the one after the last: only sections with a sync marker in between are read,
        so that several readers can share a segment. None: all
    """

    after: int = 0
    until: int | None = None
    completed_at: int | None = None
    reached: int = 0
    part: tuple[int, int] | None = None

    def has(self, marker: int) -> bool:
        """Tell whether the section with the sync marker at this byte of the file is wanted."""
        return self.part is None or self.part[0] <= marker < self.part[1]


WHOLE = Wanted()


def read_descriptor(data: bytes | memoryview, name: str) -> Descriptor:
    """Read the start of a segment.

    :param data: bytes of the file, from its start
    :param name: name of the file, for messages
    :raises SegmentError: the data is no start of a segment of a known version, or is damaged
    """
    if len(data) < _HEADER.size:
        raise SegmentError(
            f"{name}: {len(data)} bytes are too few for a commit log segment: it was cut off, or is being created"
        )
    version, segment_id, length = _HEADER.unpack_from(data)
    if version not in VERSIONS:
        raise SegmentError(
            f"{name}: commit log version {version} is unknown; known are {', '.join(map(str, VERSIONS))} "
            "(Cassandra 3.0 to 5.0), so this is not a commit log segment, or its first bytes are damaged"
        )
    size = _HEADER.size + length + 4
    if len(data) < size:
        raise SegmentError(
            f"{name}: the file ends at byte {len(data)} within its descriptor of {size} bytes: it was cut off, or is "
            "being created"
        )
    parameters = bytes(data[_HEADER.size : size - 4])
    checked = struct.pack(">iIIi", version, *_halves(segment_id), length) + parameters
    if zlib.crc32(checked) != int.from_bytes(data[size - 4 : size], "big"):
        raise SegmentError(
            f"{name}: the checksum of the descriptor (bytes 0 to {size}) is wrong: the segment is damaged at its "
            "start and none of it can be trusted; look for the same writes in the segments of another replica"
        )
    try:
        parsed = json.loads(parameters)
    except ValueError as error:
        raise SegmentError(f"{name}: the descriptor's parameters are not JSON: {error}") from error
    return Descriptor(version, segment_id, parsed if isinstance(parsed, dict) else {}, size)


def read_wanted(file: BinaryIO, name: str, wanted: Wanted) -> memoryview:
    """Read what is wanted of a segment, each byte at its place. The rest of a plain segment is not read, and
    takes no memory: Cassandra makes its file as large as it may become.

    :param name: name of the file, for messages
    :raises SegmentError: as :func:`read_descriptor`
    :raises OSError: the file cannot be read
    """
    # The file is not mapped: a signal would end the process if a disk or mount failed to give a page.
    data = np.zeros(os.fstat(file.fileno()).st_size, np.uint8).data

    def read(start: int, end: int) -> memoryview:
        file.seek(start)
        return data[: start + file.readinto(data[start:end])]  # type: ignore[attr-defined]

    descriptor = read_descriptor(read(0, _LONGEST_DESCRIPTOR), name)
    if descriptor.codec != "plain":
        return read(0, len(data))
    begin = wanted.after or descriptor.size
    end = len(data) if wanted.until is None else min(wanted.until, len(data))
    there = read(begin, end)
    if not _is_marker(there, begin, descriptor):
        return read(0, len(data))
    return data if len(there) == end else there


def read_segment(
    data: bytes | memoryview, name: str, wanted: Wanted = WHOLE, key_of: Callable[[str], bytes] | None = None
) -> Segment:
    """Find a segment's sections and unpack them.

    :param data: the whole file, or what :func:`read_wanted` returns
    :param name: name of the file, for messages
    :param wanted: part of the segment to read; sections before ``after`` may be read, too: it concerns records
    :param key_of: function from alias to key, for encrypted segments
    :raises SegmentError: nothing of the segment can be read
    """
    view = memoryview(data)
    descriptor = read_descriptor(view, name)
    unpack = _unpacker(descriptor, name, key_of)
    walk = _Walk(view, descriptor, wanted, unpack is not None)
    if unpack is None:
        for start, end in walk:
            walk.sections.append(Section(start, end, walk.position))
            walk.position += end - start
        buffer, first = _in_place(view, walk.sections)
        sections = [replace(s, start=s.start - first, end=s.end - first) for s in walk.sections]
        file_end = len(view) - first
        return Segment(descriptor, buffer, sections, walk.damages, walk.position, file_end, file_end, walk.unsure)
    parts: list[bytes] = []
    size, certain = 0, None
    for start, end in walk:
        try:
            raw = unpack(view[start:end])
        except BlockError as error:
            walk.lose_section(start, end, str(error))
            certain = size if certain is None else certain
            continue
        walk.sections.append(Section(size, size + len(raw), walk.position))
        parts.append(raw)
        size += len(raw)
        walk.position += len(raw)
    certain = size if certain is None else certain
    buffer = padded(b"".join(parts))
    return Segment(descriptor, buffer, walk.sections, walk.damages, walk.position, certain, -1, walk.unsure)


def why_short(data: bytes | memoryview, name: str, completed_at: int) -> str | None:
    """Tell why a completed segment does not reach what its index says, or may not; None: it does. Only sync markers are
    read.

    :param data: the whole file
    :param completed_at: offset in its index
    :raises SegmentError: it has no intact descriptor
    """
    view = memoryview(data)
    descriptor = read_descriptor(view, name)
    is_packed = descriptor.codec != "plain"
    walk = _Walk(view, descriptor, Wanted(completed_at=completed_at), is_packed)
    for start, end in walk:
        walk.position += max(_claimed_length(view[start:end]), 0) if is_packed else end - start
    return walk.damages[0].reason if walk.damages else walk.unsure or None


def _in_place(view: memoryview, sections: list[Section]) -> tuple[npt.NDArray[np.uint8], int]:
    """Return the file itself if enough bytes follow the last section, as in all segments that are not quite full.
    Otherwise return a copy of the sections. Return also the byte of the file at which the buffer begins."""
    if sections and len(view) - sections[-1].end >= PADDING:
        return np.frombuffer(view, np.uint8), 0
    first = sections[0].start if sections else len(view)
    return padded(view[first:]), first


def _unpacker(
    descriptor: Descriptor, name: str, key_of: Callable[[str], bytes] | None
) -> Callable[[memoryview], bytes] | None:
    """Return a function that unpacks a section; None: sections are plain. Encrypted blocks are compressed inside."""
    parameters = descriptor.parameters
    try:
        if "encCipher" in parameters:
            # Few segments are encrypted, and a late import lets workers start faster.
            from ringsync.formats.commitlog.encryption import decryptor

            expand = decryptor(parameters, key_of)
        elif parameters.get("compressionClass"):
            expand = decompressor(str(parameters["compressionClass"]))
        else:
            return None
    except ValueError as error:
        raise SegmentError(f"{name}: {error}") from error

    def unpack(section: memoryview) -> bytes:
        length = _claimed_length(section)
        if length < 0:
            raise BlockError("it does not begin with a valid length")
        return expand(section[4:], length)

    return unpack


def _claimed_length(section: memoryview) -> int:
    """Read the uncompressed length of a section from its first bytes; -1: there is none."""
    return int.from_bytes(section[:4], "big", signed=True) if len(section) >= 4 else -1


def _is_marker(view: memoryview, place: int, descriptor: Descriptor) -> bool:
    """Tell whether there is an intact sync marker at a byte of the file."""
    if not descriptor.size <= place <= len(view) - _MARKER.size:
        return False
    return int(_MARKER.unpack_from(view, place)[1]) == _checksum(descriptor, place)


def _checksum(descriptor: Descriptor, marker: int) -> int:
    return zlib.crc32(struct.pack(">III", *_halves(descriptor.segment_id), marker))


@cache
def _changes_by_low_half() -> npt.NDArray[np.uint32]:
    """Return what each low half of a marker's place changes in the marker's checksum. A CRC is linear: two bytes of its
    input change what each of them changes, together (exclusive or), whatever the other bytes are."""

    def changes(shift: int) -> npt.NDArray[np.uint32]:
        inputs = (struct.pack(">I", byte << shift) for byte in range(256))
        return np.array([zlib.crc32(data) ^ zlib.crc32(bytes(4)) for data in inputs], np.uint32)

    changed: npt.NDArray[np.uint32] = (changes(8)[:, None] ^ changes(0)).ravel()
    return changed


def _has_marker(view: memoryview, start: int, descriptor: Descriptor) -> bool:
    """Tell whether an intact sync marker is at a byte of the file or behind it, anywhere."""
    for first in range(start - start % _SLICE, len(view) - _MARKER.size + 1, _SLICE):
        expected = _changes_by_low_half() ^ np.uint32(_checksum(descriptor, first))
        checksums = view[first + 4 : first + 4 + _SLICE + 3]
        for shift in range(4):
            there = np.frombuffer(checksums, ">u4", max(len(checksums) - shift, 0) // 4, shift)
            for found in np.flatnonzero(there == expected[shift::4][: len(there)]).tolist():
                place = first + shift + 4 * found
                # The end that a marker names lies behind it, in the file.
                if place >= start and place < _MARKER.unpack_from(view, place)[0] <= len(view):
                    return True
    return False


def _halves(number: int) -> tuple[int, int]:
    return number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF


class _Walk:
    """An iterator from sync marker to sync marker. It yields the start and end of each section in the file.

    After each section the caller must advance ``position`` to its end, or call ``lose_section``.
    """

    def __init__(self, view: memoryview, descriptor: Descriptor, wanted: Wanted, is_packed: bool) -> None:
        self._view = view
        self._descriptor = descriptor
        self._wanted = wanted
        self._is_packed = is_packed
        self._is_own = True
        self.sections: list[Section] = []
        self.damages: list[Damage] = []
        self.unsure = ""
        self.position = descriptor.size
        if not is_packed and _is_marker(view, wanted.after, descriptor):
            self.position = wanted.after  # in a plain segment this is also the place in the file

    def __iter__(self) -> Iterator[tuple[int, int]]:
        size = len(self._view)
        marker = self.position
        while self._wanted.until is None or self.position < self._wanted.until:
            end, checksum = _MARKER.unpack_from(self._view, marker) if size - marker >= _MARKER.size else (0, 0)
            self._is_own = self._wanted.has(marker)
            if end == 0 and checksum == 0:
                self._check_rest(marker)
                return
            if checksum != _checksum(self._descriptor, marker):
                self._stop(size - marker, f"the sync marker at byte {marker} of the file has a wrong checksum")
                return
            self.position += _MARKER.size
            start = marker + _MARKER.size
            if end < start:
                self._stop(size - start, f"the sync marker at byte {marker} of the file points back to byte {end}")
                return
            if end > size:
                missing = end - size
                if not self._is_packed and self._is_own:
                    yield start, size  # safe: each record has its own checksums
                else:
                    missing = max(_claimed_length(self._view[start:]), missing)
                self._stop(missing, f"the file was cut off: it has {size} bytes, and a section ends at byte {end}")
                return
            if self._is_own:
                yield start, end
            else:
                self.position += max(_claimed_length(self._view[start:end]), 0) if self._is_packed else end - start
            marker = end

    def lose_section(self, start: int, end: int, reason: str) -> None:
        """Skip a section that cannot be unpacked. Stop if it is unknown what was synced after it."""
        reason = f"the section in bytes {start} to {end} of the file cannot be unpacked: {reason}"
        if self._wanted.until is not None:
            # The section's length is untrusted, too. So it is unknown which later bytes were synced.
            self._stop(end - start, reason)
            self.position = self._wanted.until
            return
        length = _claimed_length(self._view[start:end])
        self.damages.append(Damage(self.position, length if length > 0 else end - start, reason))
        self.position += max(length, 0)

    def _stop(self, length: int, reason: str) -> None:
        """Record that nothing after the position can be read.

        :param length: bytes of the file after the position; by the index there may have been more
        """
        if self._wanted.until is not None:
            length = self._wanted.until - self.position
        elif self._wanted.completed_at is not None:
            length = max(length, self._wanted.completed_at - self.position)
        if length > 0 and self._is_own:
            self.damages.append(Damage(self.position, length, f"{reason}; nothing behind it can be read"))

    def _check_rest(self, marker: int) -> None:
        """Check that only zeros follow the last section: Cassandra fills a new segment with them.

        After a crash, records may follow that were never synced, under a sync marker that was never written. They are
        no damage: Cassandra does not replay them either, so the node does not have them any more. But an old page of a
        mounted folder looks the same, with a marker or without: the last section has no marker behind it.
        """
        rest = np.frombuffer(self._view[marker:], np.uint8)
        wanted, reached = self._wanted, self._wanted.until
        # After a crash Cassandra writes the size of the file into the index, even if less was synced.
        has_crashed = wanted.completed_at == len(self._view)
        if wanted.completed_at is not None:
            reached = max(wanted.reached, wanted.after) if has_crashed else wanted.completed_at
        if reached is not None and self.position < reached:
            index = "an earlier index" if has_crashed else "its index"
            reason = f"the last section ends at position {self.position}, but by {index} the segment reaches {reached}"
            self._stop(reached - self.position, f"{reason}: it was cut off or overwritten")
        elif has_crashed and not (rest.any() and _has_marker(self._view, marker + 1, self._descriptor)):
            if len(rest) >= _MARKER.size:
                self.unsure = (
                    f"its node crashed, and no sync marker is behind position {self.position}: nothing more was "
                    "synced, or a mounted folder shows old pages"
                )
        elif rest.any():
            first = marker + int(np.flatnonzero(rest)[0])
            self._stop(len(rest), f"zeros, and then bytes that belong to no section, at byte {first} of the file")
