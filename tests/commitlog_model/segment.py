"""A commit log segment: descriptor, sync markers, sections and records (docs/formats.md, 1.2 to 1.5), in plain Python.

A damaged record is a problem of its own. Where the length of a record cannot be trusted the rest of its section is
lost, and the next section is read. Where a marker is damaged, or a section cannot be unpacked (so that the logical
positions behind it are unknown), the segment ends.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.commitlog_model.mutation import (
    Change,
    MalformedError,
    UnknownColumnError,
    UnknownTableError,
    partition_updates,
)
from tests.commitlog_model.types import Table

_SMALLEST_MUTATION = 10
_EMPTY_BLOCK = 16
"""No codec makes more bytes than this of nothing; Deflate makes none, which zlib would not take."""


class UnreadableSegmentError(Exception):
    """The descriptor is damaged or of an unknown version: nothing in the file can be read."""


class _DamagedSectionError(Exception):
    """A section whose content cannot be unpacked."""


@dataclass
class Segment:
    """What was found in a segment.

    :param version: 6, 7 or 8
    :param id: the descriptor's
    :param parameters: compression and encryption, as the descriptor has them
    :param header_length: bytes of the descriptor; the first logical position
    :param changes: change rows in the jsonl form with ``--raw``
    :param problems: ``position`` (logical: end of a record, else where the damage is), ``length`` (bytes of the record
        with its frame, or of the file that are lost), ``reason``, and for unknown tables and columns ``table_id``,
        ``column`` and the record's ``raw`` bytes
    :param position: the logical position up to which the segment was read
    """

    name: str
    version: int
    id: int
    parameters: dict[str, Any]
    header_length: int
    changes: list[Change] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    position: int = 0

    def problem(self, position: int, length: int, reason: str, **more: str) -> None:
        """Note what could not be read."""
        self.problems.append({"position": position, "length": length, "reason": reason, **more})


def read_segment(
    source: Path | bytes,
    tables: Mapping[str, Table],
    name: str = "",
    start: int = 0,
    end: int | None = None,
    key: bytes | None = None,
) -> Segment:
    """Read a segment.

    :param source: a file, or its bytes
    :param tables: by id
    :param name: of the file, if ``source`` is bytes
    :param start: only records that end after this logical position
    :param end: only records that end at or before this logical position (the idx file's, of a segment that is not
        complete); None: the whole file
    :param key: the AES key of an encrypted segment
    :raises UnreadableSegmentError: the descriptor is damaged, or its version is unknown
    """
    data = source if isinstance(source, bytes) else source.read_bytes()
    segment = _descriptor(data, name or (source.name if isinstance(source, Path) else ""))
    unpack = _unpacker(segment.parameters, key)
    segment.position = segment.header_length
    for at, section_end in _sections(segment, data, end):
        intact = section_end <= len(data)
        try:
            content = unpack(data[at:section_end])
        except _DamagedSectionError as error:
            reason = f"damaged section: {error}" if intact else "truncated"
            segment.problem(segment.position, min(section_end, len(data)) - at, reason)
            return segment
        _records(segment, content, tables, start, end, intact)
        segment.position += len(content)
        if not intact:
            segment.problem(segment.position, section_end - len(data), "truncated")
            return segment
    return segment


def _descriptor(data: bytes, name: str) -> Segment:
    if len(data) < 18:
        raise UnreadableSegmentError(f"{name}: {len(data)} bytes are too few for a commit log segment")
    version, low_first, length = struct.unpack_from(">iQH", data)
    if version not in (6, 7, 8):
        raise UnreadableSegmentError(f"{name}: commit log version {version}; known are 6, 7 and 8")
    parameters = data[14 : 14 + length]
    checked = struct.pack(">iIII", version, low_first & 0xFFFFFFFF, low_first >> 32, length) + parameters
    if data[14 + length : 18 + length] != _crc(checked):
        raise UnreadableSegmentError(f"{name}: the descriptor's CRC is wrong")
    return Segment(name, version, low_first, json.loads(parameters), 18 + length)


def _crc(data: bytes, before: int = 0) -> bytes:
    return struct.pack(">I", zlib.crc32(data, before))


def _sections(segment: Segment, data: bytes, end: int | None) -> Iterator[tuple[int, int]]:
    """Where each section begins (after its marker) and ends in the file; whoever reads it advances the position."""
    at = segment.header_length
    while len(data) - at >= 8 and (end is None or segment.position < end):
        next_marker, claimed = struct.unpack_from(">iI", data, at)
        if next_marker == claimed == 0:
            break
        checked = struct.pack(">III", segment.id & 0xFFFFFFFF, segment.id >> 32, at)
        if zlib.crc32(checked) != claimed:
            segment.problem(segment.position, len(data) - at, "damaged sync marker")
            return
        if next_marker < at + 8:
            segment.problem(segment.position, len(data) - at, f"sync marker points back to {next_marker}")
            return
        segment.position += 8
        yield at + 8, next_marker
        at = next_marker
    if end is not None and segment.position < end:
        segment.problem(segment.position, end - segment.position, "truncated")


def _records(
    segment: Segment, content: bytes, tables: Mapping[str, Table], start: int, end: int | None, intact: bool
) -> None:
    at = 0
    while len(content) - at >= 4:
        position, left = segment.position + at, len(content) - at
        size = struct.unpack_from(">i", content, at)[0]
        if size == 0 and not any(content[at:]):
            return
        if size < _SMALLEST_MUTATION:
            return segment.problem(position, left, f"damaged record: size {size}")
        if left < 8 and not intact:
            return None
        if content[at + 4 : at + 8] != _crc(content[at : at + 4]):
            return segment.problem(position, left, "damaged record: wrong CRC of its size")
        if size + 12 > left:
            if intact:
                segment.problem(position, left, f"damaged record: its {size + 12} bytes run past the section")
            return None
        record_end = position + size + 12
        if end is not None and record_end > end:
            return None
        if record_end > start:
            _record(segment, content[at : at + size + 12], record_end, tables)
        at += size + 12
    return None


def _record(segment: Segment, record: bytes, position: int, tables: Mapping[str, Table]) -> None:
    mutation, claimed = record[8:-4], record[-4:]
    if _crc(mutation, zlib.crc32(record[:4])) != claimed:
        return segment.problem(position, len(record), "damaged record: wrong CRC")
    try:
        for changes in partition_updates(mutation, tables):
            source = {"source": {"file": segment.name, "position": position}}
            segment.changes += [{**change, **source} for change in changes]
    except UnknownTableError as error:
        segment.problem(position, len(record), "unknown table", table_id=error.args[0], raw=mutation.hex())
    except UnknownColumnError as error:
        table_id, column = error.args
        segment.problem(position, len(record), "unknown column", table_id=table_id, column=column, raw=mutation.hex())
    except MalformedError as error:
        segment.problem(position, len(record), f"malformed mutation: {error}", raw=mutation.hex())


def _unpacker(parameters: Mapping[str, Any], key: bytes | None) -> Callable[[bytes], bytes]:
    if "encCipher" in parameters:
        if key is None:
            raise UnreadableSegmentError(f"the segment is encrypted with the key {parameters.get('encKeyAlias')!r}")
        iv = bytes.fromhex(parameters["encIV"])
        return lambda section: _decrypted_section(section, key, iv)
    if not parameters.get("compressionClass"):
        return lambda section: section
    compressor = parameters["compressionClass"].rpartition(".")[2]
    if compressor not in _DECOMPRESSORS:
        raise UnreadableSegmentError(f"the segment is compressed by {compressor}; known are {sorted(_DECOMPRESSORS)}")
    return lambda section: _compressed_section(section, _DECOMPRESSORS[compressor])


def _compressed_section(section: bytes, decompress: Callable[[bytes, int], bytes]) -> bytes:
    (size,) = struct.unpack(">i", _exactly(section[:4], 4))
    if size == 0 and len(section) <= 4 + _EMPTY_BLOCK:
        return b""
    return decompress(section[4:], size)


def _decrypted_section(section: bytes, key: bytes, iv: bytes) -> bytes:
    (total,) = struct.unpack(">i", _exactly(section[:4], 4))
    found, at = b"", 4
    while at < len(section):
        encrypted, plain = struct.unpack(">ii", _exactly(section[at : at + 8], 8))
        block = _decrypted(_exactly(section[at + 8 : at + 8 + encrypted], encrypted), key, iv)
        compressed = _exactly(block[:plain], plain)
        (raw,) = struct.unpack(">i", _exactly(compressed[:4], 4))
        found += _lz4(compressed[4:], raw)
        at += 8 + encrypted
    return _exactly(found, total)


def _decrypted(data: bytes, key: bytes, iv: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.padding import PKCS7

    decryptor, unpadder = Cipher(algorithms.AES(key), modes.CBC(iv)).decryptor(), PKCS7(128).unpadder()
    try:
        padded = decryptor.update(data) + decryptor.finalize()
        return unpadder.update(padded) + unpadder.finalize()
    except ValueError as error:
        raise _DamagedSectionError(f"a block cannot be decrypted: {error}") from error


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise _DamagedSectionError(f"{len(data)} bytes instead of {size}")
    return data


def _codec(name: str, data: bytes, size: int) -> bytes:
    """Decompress by pyarrow, which fills up what is missing: an output that fits into one byte less is too short."""
    codec = pa.Codec(name)
    if size < 0 or size > 1 << 30:
        raise _DamagedSectionError(f"an uncompressed length of {size}")
    try:
        found = codec.decompress(data, size, asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise _DamagedSectionError(str(error)) from error
    try:
        codec.decompress(data, size - 1, asbytes=True)
    except (pa.ArrowException, OSError):
        return bytes(found)
    raise _DamagedSectionError(f"less than {size} bytes after decompression")


def _lz4(data: bytes, size: int) -> bytes:
    if struct.unpack("<i", _exactly(data[:4], 4)) != (size,):
        raise _DamagedSectionError(f"LZ4 says another uncompressed length than {size}")
    return _codec("lz4_raw", data[4:], size)


def _deflate(data: bytes, size: int) -> bytes:
    try:
        return _exactly(zlib.decompress(data), size)
    except zlib.error as error:
        raise _DamagedSectionError(str(error)) from error


_DECOMPRESSORS: dict[str, Callable[[bytes, int], bytes]] = {
    "LZ4Compressor": _lz4,
    "SnappyCompressor": lambda data, size: _codec("snappy", data, size),
    "ZstdCompressor": lambda data, size: _codec("zstd", data, size),
    "DeflateCompressor": _deflate,
    "NoopCompressor": _exactly,
}
