"""Statistics.db: the types and delta bases that Data.db needs.

See docs/formats.md, 9.3; C: io/sstable/metadata/MetadataSerializer; db/SerializationHeader.Component.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ringsync.cql.marshal import OrderedType, parse_clustering, parse_marshal, parse_partition_key
from ringsync.cql.types import CqlType, CqlTypeError
from ringsync.formats.sstable.cursor import DAMAGED, Cursor
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import STATISTICS
from ringsync.formats.sstable.source import Source
from ringsync.formats.sstable.versions import Version

TIMESTAMP_EPOCH = 1_442_880_000_000_000
"""µs: timestamps are counted from 2015-09-22 (C: EncodingStats)."""
LOCAL_TIME_EPOCH = 1_442_880_000
"""s: the same for local deletion times."""
PARTITIONER = "org.apache.cassandra.dht.Murmur3Partitioner"

_VALIDATION, _COMPACTION, _STATS, _HEADER = range(4)
_NAMES = {_VALIDATION: "VALIDATION", _COMPACTION: "COMPACTION", _STATS: "STATS", _HEADER: "HEADER"}
_MOST_COMPONENTS = 64
_STRAY_BYTES = 4
"""Zeros at the end of a HEADER whose least deletion time has overflowed: 5.0.9 reserves more bytes than it writes."""

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class HeaderColumn:
    """A column that has cells in the SSTable."""

    name: bytes
    type: CqlType


@dataclass(frozen=True)
class Header:
    """What Data.db is encoded by.

    :ivar min_timestamp: µs, signed; timestamps in Data.db are differences from it, modulo 2^64
    :ivar min_local_deletion_time: s, from 0 to 2^32 - 1; likewise, modulo 2^32. It may have overflowed
    :ivar min_ttl: s; likewise, modulo 2^32
    :ivar key: types of the partition key's columns
    :ivar clustering: types of the clustering columns
    :ivar static: static columns that occur, in the order of column subsets
    :ivar regular: regular columns, likewise
    """

    min_timestamp: int
    min_local_deletion_time: int
    min_ttl: int
    key: tuple[CqlType, ...]
    clustering: tuple[OrderedType, ...]
    static: tuple[HeaderColumn, ...]
    regular: tuple[HeaderColumn, ...]


def read_statistics(source: Source) -> Header:
    """Read what an SSTable's Statistics.db says of Data.db.

    :raises SSTableError: the file is missing or damaged, a type is not supported, or the partitioner is another one
    """
    path = source.descriptor.path(STATISTICS)
    content = source.read(STATISTICS)
    if content is None:
        raise SSTableError(path, None, "there is no such file", "copy all files of the SSTable: it says the types")
    return parse_statistics(content, source.descriptor.features, path)


def parse_statistics(content: bytes, version: Version, file: str) -> Header:
    """Read the bytes of a Statistics.db, see :func:`read_statistics`.

    :param file: path of the file, for messages
    """
    parts = _components(content, version, file)
    for kind in (_HEADER, _VALIDATION):
        if kind not in parts:
            raise SSTableError(file, None, f"it has no part {_NAMES[kind]}", DAMAGED)
        _check_part(parts[kind], version)
    partitioner = parts[_VALIDATION].text16()
    if partitioner != PARTITIONER:
        advice = f"only tables of the {PARTITIONER.rpartition('.')[2]} can be read"
        raise SSTableError(file, None, f"the SSTable was written with the partitioner {partitioner}", advice)
    return _header(parts[_HEADER])


def _components(content: bytes, version: Version, file: str) -> dict[int, Cursor]:
    """Find the components, by type. Their checksums, if there are any, follow their ends."""
    cursor = Cursor(content, file)
    number = cursor.count(8, "components")
    crc = _checked(cursor, 0, 0) if version.checksums else 0
    if number > _MOST_COMPONENTS:
        raise SSTableError(file, 0, f"{number:,} components", DAMAGED)
    start = cursor.position
    entries = [(cursor.i32(), cursor.i32()) for _ in range(number)]
    if version.checksums:
        _checked(cursor, start, crc)
    first = cursor.position
    ends = [offset for _, offset in entries] + [len(content)]
    found = {}
    for kind, offset in entries:
        end = min((other for other in ends if other > offset), default=0)
        if not first <= offset < end <= len(content):
            raise SSTableError(file, start, f"part {_NAMES.get(kind, kind)} cannot begin at byte {offset:,}", DAMAGED)
        found[kind] = Cursor(content, file, offset, max(end - 4, offset) if version.checksums else end)
    return found


def _check_part(part: Cursor, version: Version) -> None:
    if version.checksums:
        _checked(Cursor(part.data, part.file, part.end), part.position, 0)


def _checked(cursor: Cursor, start: int, crc: int) -> int:
    """Read a checksum of the bytes since ``start``, which continues ``crc``. Return it."""
    end = cursor.position
    crc = zlib.crc32(memoryview(cursor.data)[start:end], crc)
    if cursor.u32() != crc:
        raise SSTableError(cursor.file, start, f"the checksum of bytes {start:,} to {end:,} is wrong", DAMAGED)
    return crc


def _header(cursor: Cursor) -> Header:
    min_timestamp = (cursor.uvint() + TIMESTAMP_EPOCH) % 2**64
    header = Header(
        min_timestamp=min_timestamp - (min_timestamp >> 63 << 64),
        min_local_deletion_time=(cursor.uvint() + LOCAL_TIME_EPOCH) % 2**32,
        min_ttl=cursor.uvint() % 2**32,
        key=_type(cursor, parse_partition_key),
        clustering=tuple(_type(cursor, parse_clustering) for _ in range(_count(cursor))),
        static=_columns(cursor),
        regular=_columns(cursor),
    )
    rest = cursor.take(cursor.left)
    if len(rest) > _STRAY_BYTES or any(rest):
        raise cursor.fail(f"{len(rest)} bytes are left over behind the columns")
    return header


def _columns(cursor: Cursor) -> tuple[HeaderColumn, ...]:
    return tuple(HeaderColumn(cursor.sized(), _type(cursor, parse_marshal)) for _ in range(_count(cursor)))


def _count(cursor: Cursor) -> int:
    number = cursor.uvint()
    if number > cursor.left:
        raise cursor.fail(f"{number:,} columns cannot follow in {cursor.left:,} bytes")
    return number


def _type(cursor: Cursor, parse: Callable[[str], Parsed]) -> Parsed:
    start = cursor.position
    try:
        return parse(cursor.text())
    except CqlTypeError as error:
        advice = "if Cassandra itself reads the SSTable, please report the name of this type"
        raise SSTableError(cursor.file, start, str(error), advice) from error
