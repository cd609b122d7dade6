"""A commit log segment file: its descriptor, its sync markers, and its sections made plain.

Facts: specs/cassandra-formats.md §1.2 to §1.4 (C: db/commitlog/CommitLogDescriptor, CommitLogSegmentReader).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
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


def read_segment(
    data: bytes | memoryview, name: str, until: int | None = None, key_of: Callable[[str], bytes] | None = None
) -> Segment:
    """Find a segment's sections and make them plain.

    :param data: the whole file
    :param name: of the file, for messages
    :param until: logical position up to which the segment was synced (``_cdc.idx``): what comes behind it is not
        read, since it may not survive the node. None: to the end
    :param key_of: the key of an alias, for encrypted segments
    :raises SegmentError: when nothing of the segment can be read
    """
    view = memoryview(data)
    descriptor = read_descriptor(view, name)
    expand = _expander(descriptor, name, key_of)
    walk = _Walk(view, descriptor, until)
    if expand is None:
        for start, end in walk:
            walk.sections.append(Section(start, end, walk.position))
            walk.position += end - start
        return Segment(descriptor, _with_spare_bytes(view, walk.sections), walk.sections, walk.damages, walk.position)
    parts: list[bytes] = []
    size = 0
    for start, end in walk:
        length = int.from_bytes(view[start : start + 4], "big", signed=True)
        try:
            if end - start < 4 or length < 0:
                raise BlockError(f"a section that says it has {length} bytes")
            raw = expand(view[start + 4 : end], length)
        except BlockError as error:
            walk.damages.append(Damage(walk.position, end - start, f"a section cannot be decompressed: {error}"))
            walk.position += max(length, 0)
            continue
        walk.sections.append(Section(size, size + length, walk.position))
        parts.append(raw)
        size += length
        walk.position += length
    return Segment(descriptor, padded(b"".join(parts)), walk.sections, walk.damages, walk.position)


def _with_spare_bytes(view: memoryview, sections: list[Section]) -> npt.NDArray[np.uint8]:
    """The file itself if enough follows its last section, as in every segment that is not full to the last byte."""
    if sections and len(view) - sections[-1].end < PADDING:
        return padded(view)
    return np.frombuffer(view, np.uint8)


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


class _Walk:
    """Go from sync marker to sync marker; yields where each section's bytes lie in the file."""

    def __init__(self, view: memoryview, descriptor: Descriptor, until: int | None) -> None:
        self._view = view
        self._descriptor = descriptor
        self._until = until
        self.sections: list[Section] = []
        self.damages: list[Damage] = []
        self.position = descriptor.size

    def __iter__(self) -> Any:
        size = len(self._view)
        marker = self._descriptor.size
        while size - marker >= _MARKER.size and (self._until is None or self.position < self._until):
            end, checksum = _MARKER.unpack_from(self._view, marker)
            if end == 0 and checksum == 0:
                self._check_rest(marker)
                return
            if checksum != self._checksum(marker):
                self._stop(marker, "the checksum of a sync marker is wrong")
                return
            self.position += _MARKER.size
            start = marker + _MARKER.size
            if not start <= end <= size:
                self._stop(start, f"the file has {size} bytes, but a section ends at byte {end}: it was cut off")
                if self._descriptor.codec == "plain" and end > size:
                    yield start, size  # each record has checksums of its own
                return
            yield start, end
            marker = end

    def _checksum(self, marker: int) -> int:
        segment_id = self._descriptor.segment_id
        return zlib.crc32(struct.pack(">III", segment_id & 0xFFFFFFFF, segment_id >> 32 & 0xFFFFFFFF, marker))

    def _stop(self, at: int, reason: str) -> None:
        if self._until is None or self.position < self._until:
            self.damages.append(Damage(self.position, len(self._view) - at, reason))

    def _check_rest(self, marker: int) -> None:
        """Behind the last marker a segment is zeros, which were there before anything was written."""
        rest = np.frombuffer(self._view[marker:], np.uint8)
        if self._until is not None:
            self.damages.append(
                Damage(
                    self.position,
                    len(rest),
                    f"the segment ends at position {self.position}, but was synced up to {self._until}",
                )
            )
        elif rest.any():
            first = marker + int(np.flatnonzero(rest)[0])
            self.damages.append(
                Damage(self.position, len(rest), f"bytes that are no section follow at byte {first} of the file")
            )
