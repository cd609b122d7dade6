"""A commit log segment file: its descriptor, its sync markers, and its sections made plain.

Facts: specs/cassandra-formats.md §1.2 to §1.4 (C: db/commitlog/CommitLogDescriptor, CommitLogSegmentReader).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringsync.cql.kernels import PADDING, padded
from ringsync.formats.commitlog.compression import BlockError, decompressor
from ringsync.formats.commitlog.encryption import decryptor

VERSIONS = (6, 7, 8)
NAME = re.compile(r"CommitLog-(\d+)-(\d+)\.log")

_HEADER = struct.Struct(">iqH")
_MARKER = struct.Struct(">iI")
_LENGTH_BYTES = 4
_LONGEST_SECTION = 2**31 - 1
_CUT_OFF = "a section ends behind the end of the file: the file was cut off"


class SegmentError(ValueError):
    """The file as a whole cannot be read; the message says why and what to do."""


@dataclass(frozen=True)
class Descriptor:
    """The start of a segment.

    :ivar version: 6: Cassandra 3.x, 7: 4.x and 5.0 with ``storage_compatibility_mode: CASSANDRA_4``, 8: 5.0
    :ivar segment_id: rising per node
    :ivar parameters: of compression and encryption, as Cassandra's JSON has them
    :ivar size: bytes in the file
    """

    version: int
    segment_id: int
    parameters: dict[str, Any]
    size: int

    @property
    def codec(self) -> str:
        """For people: ``plain``, a compressor's simple name, or ``encrypted``."""
        if "encCipher" in self.parameters:
            return "encrypted"
        return str(self.parameters.get("compressionClass") or "plain").rpartition(".")[2]


@dataclass(frozen=True)
class Section:
    """What was synced at once, uncompressed.

    :ivar start: where in the segment's buffer its records begin
    :ivar end: where they end
    :ivar position: logical position of ``start``
    """

    start: int
    end: int
    position: int


@dataclass(frozen=True)
class Damage:
    """Bytes that hold no readable record.

    :ivar position: logical, where they begin; of a damaged record, where it ends
    :ivar length: bytes; of a compressed section, in the file
    :ivar reason: for people
    """

    position: int
    length: int
    reason: str


@dataclass(frozen=True)
class Segment:
    """A segment's records, uncompressed, in one buffer.

    :ivar buffer: followed by spare bytes; of a plain segment it may be the file's own
    :ivar sections: in the order of the log
    :ivar damages: what could not be read
    :ivar end: logical position behind the last section
    """

    descriptor: Descriptor
    buffer: npt.NDArray[np.uint8]
    sections: list[Section]
    damages: list[Damage]
    end: int


def read_descriptor(data: bytes | memoryview, name: str) -> Descriptor:
    """Read the start of a segment.

    :param data: of the file, from its beginning
    :param name: of the file, for messages
    :raises SegmentError: when it is not the start of a segment of a known version, or is damaged
    """
    if len(data) < _HEADER.size:
        raise SegmentError(f"{name}: {len(data)} bytes are too few for a commit log segment")
    version, segment_id, length = _HEADER.unpack_from(data)
    if version not in VERSIONS:
        raise SegmentError(
            f"{name}: commit log version {version} is unknown; known are {', '.join(map(str, VERSIONS))} "
            "(Cassandra 3.0 to 5.0), so this is not a commit log segment, or its first bytes are damaged"
        )
    size = _HEADER.size + length + 4
    if len(data) < size:
        raise SegmentError(f"{name}: the file ends at byte {len(data)} within its descriptor of {size} bytes")
    parameters = bytes(data[_HEADER.size : size - 4])
    low, high = segment_id & 0xFFFFFFFF, segment_id >> 32 & 0xFFFFFFFF
    checked = struct.pack(">iIIi", version, low, high, length) + parameters
    if zlib.crc32(checked) != int.from_bytes(data[size - 4 : size], "big"):
        raise SegmentError(
            f"{name}: the checksum of the descriptor (bytes 0 to {size}) is wrong: the segment is damaged at its "
            "start and none of it can be trusted; look for the same writes in the segments of another replica"
        )
    try:
        found = json.loads(parameters)
    except ValueError as error:
        raise SegmentError(f"{name}: the descriptor's parameters are not JSON: {error}") from error
    return Descriptor(version, segment_id, found if isinstance(found, dict) else {}, size)


@dataclass(frozen=True)
class Wanted:
    """Which part of a segment to read.

    :ivar after: logical position: sections that end before it are passed over
    :ivar until: logical position up to which the segment was synced (``_cdc.idx``): what comes behind it is not read,
        since it may not survive the node. None: to the end
    :ivar synced: logical position that a segment reaches at least, if it is whole; None: not known
    :ivar part: bytes of the file, from and to: only sections whose sync marker lies there, so that several readers
        can share a segment. None: all
    """

    after: int = 0
    until: int | None = None
    synced: int | None = None
    part: tuple[int, int] | None = None

    def has(self, marker: int) -> bool:
        """Whether the sync marker at this byte of the file is wanted."""
        return self.part is None or self.part[0] <= marker < self.part[1]


WHOLE = Wanted()


def read_segment(
    data: bytes | memoryview, name: str, wanted: Wanted = WHOLE, key_of: Callable[[str], bytes] | None = None
) -> Segment:
    """Find a segment's sections and make them plain.

    :param data: the whole file
    :param name: of the file, for messages
    :param wanted: which part of it
    :param key_of: the key of an alias, for encrypted segments
    :raises SegmentError: when nothing of the segment can be read
    """
    view = memoryview(data)
    descriptor = read_descriptor(view, name)
    expand = _expander(descriptor, name, key_of)
    sections: list[Section] = []
    damages: list[Damage] = []
    parts: list[bytes] = []
    size = end = 0
    for stored in _stored_sections(view, descriptor, wanted, expand is not None):
        end = stored.position
        if isinstance(stored, Damage):
            damages.append(stored)
            continue
        end += stored.length
        if expand is None:
            sections.append(Section(stored.start, stored.end, stored.position))
            continue
        try:
            raw = expand(view[stored.start + _LENGTH_BYTES : stored.end], stored.length)
        except BlockError as error:
            damages.append(Damage(stored.position, stored.end - stored.start, f"a section cannot be read: {error}"))
            continue
        sections.append(Section(size, size + stored.length, stored.position))
        parts.append(raw)
        size += stored.length
    if expand is None:
        buffer, sections = _in_place(view, sections)
    else:
        buffer = padded(b"".join(parts))
    return Segment(descriptor, buffer, sections, damages, end or descriptor.size)


def _in_place(view: memoryview, sections: list[Section]) -> tuple[npt.NDArray[np.uint8], list[Section]]:
    """Plain sections where they are, if enough bytes follow the last one, as in every segment that is not quite full;
    otherwise a copy."""
    if not sections or len(view) - sections[-1].end >= PADDING:
        return np.frombuffer(view, np.uint8), sections
    first = sections[0].start
    moved = [replace(one, start=one.start - first, end=one.end - first) for one in sections]
    return padded(view[first : sections[-1].end]), moved


def _expander(
    descriptor: Descriptor, name: str, key_of: Callable[[str], bytes] | None
) -> Callable[[memoryview, int], bytes] | None:
    """What makes a section plain; None: it is. Encryption wins: it compresses within its own blocks."""
    parameters = descriptor.parameters
    try:
        if "encCipher" in parameters:
            return decryptor(parameters, key_of)
        codec = parameters.get("compressionClass")
        return decompressor(str(codec)) if codec else None
    except ValueError as error:
        raise SegmentError(f"{name}: {error}") from error


@dataclass(frozen=True)
class _Stored:
    """A section as it lies in the file.

    :ivar start: its first byte behind the sync marker
    :ivar end: the byte behind its last
    :ivar position: logical, of its first record
    :ivar length: bytes, made plain
    """

    start: int
    end: int
    position: int
    length: int


def _stored_sections(
    view: memoryview, descriptor: Descriptor, wanted: Wanted, is_packed: bool
) -> Iterator[_Stored | Damage]:
    """Go from sync marker to sync marker.

    :param is_packed: sections are compressed or encrypted, and begin with their length
    """
    size = len(view)
    marker = position = descriptor.size
    synced = wanted.synced if wanted.until is None else wanted.until
    while size - marker >= _MARKER.size and (wanted.until is None or position < wanted.until):
        end, checksum = _MARKER.unpack_from(view, marker)
        start = marker + _MARKER.size
        reason = _marker_damage(view, descriptor, marker, end, checksum)
        if reason or checksum == end == 0:
            if wanted.has(marker):
                yield from _last_damage(view, marker, position, synced, reason)
                if end > size and reason == _CUT_OFF and not is_packed:
                    # Each record has checksums of its own.
                    yield _Stored(start, size, position + _MARKER.size, size - start)
            return
        position += _MARKER.size
        length = end - start
        if is_packed:
            length = int.from_bytes(view[start : start + _LENGTH_BYTES], "big", signed=True)
            if end - start < _LENGTH_BYTES or not 0 <= length <= _LONGEST_SECTION:
                yield Damage(position, size - start, f"a section says that it has {length} bytes: the rest is lost")
                return
        if wanted.has(marker) and position + length > wanted.after:
            yield _Stored(start, end, position, length)
        position += length
        marker = end
    if synced is not None and position < synced and wanted.has(marker):
        yield from _last_damage(view, marker, position, synced, "")


def _marker_damage(view: memoryview, descriptor: Descriptor, marker: int, end: int, checksum: int) -> str:
    """What is wrong with a sync marker; empty: nothing, or it is zeros, where nothing has been written."""
    low, high = descriptor.segment_id & 0xFFFFFFFF, descriptor.segment_id >> 32 & 0xFFFFFFFF
    if checksum == end == 0:
        return ""
    if checksum != zlib.crc32(struct.pack(">III", low, high, marker)):
        return "the checksum of a sync marker is wrong, so nobody can tell where the next section begins"
    return "" if marker + _MARKER.size <= end <= len(view) else _CUT_OFF


def _last_damage(view: memoryview, marker: int, position: int, synced: int | None, reason: str) -> Iterator[Damage]:
    """Where the chain of sync markers ends too early, or bytes follow that nobody can explain."""
    length = len(view) - marker
    if reason:
        yield Damage(position, length, reason)
    elif synced is not None and position < synced:
        yield Damage(position, length, f"the segment ends here, but was synced up to position {synced}")
    elif np.frombuffer(view[marker:], np.uint8).any():
        yield Damage(position, length, "bytes that are neither a section nor zeros")
