"""Statistics.db: the types and delta bases that Data.db needs, and what is known of the SSTable's content.

See docs/formats.md, 9.3; C: io/sstable/metadata/MetadataSerializer, StatsMetadata; db/SerializationHeader.Component.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from ringsync.cql.marshal import OrderedType, parse_clustering, parse_marshal, parse_partition_key
from ringsync.cql.types import VARIABLE, CqlType, CqlTypeError, stored_length
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


@dataclass(frozen=True)
class LogPosition:
    """A logical position in a segment of the node's commit log."""

    segment_id: int
    position: int


@dataclass(frozen=True)
class Stats:
    """What the node knows of the content. What the version does not have is None, and so is what could not be read.

    :ivar partitions: number of partitions
    :ivar min_timestamp: µs; ``max_timestamp`` likewise
    :ivar min_local_deletion_time: s, up to 2^32 - 1; ``max_local_deletion_time`` likewise. 2^31 - 1, or with
        unsigned times 2^32 - 1: some cells are not deleted and do not expire
    :ivar min_ttl: s; ``max_ttl`` likewise; 0: nothing expires
    :ivar compression_ratio: bytes of Data.db for each byte of content; -1: it is not compressed
    :ivar level: level of the leveled compaction
    :ivar repaired_at: ms since the epoch; 0: it was not repaired
    :ivar has_legacy_counters: whether there are counter shards of Cassandra 2.0
    :ivar cells: number of cells; ``rows``: number of rows
    :ivar commitlog_upto: position in the commit log up to which its mutations may be in the SSTable
    :ivar commitlog_intervals: intervals of the commit log of ``host_id`` that are in it
    :ivar pending_repair: id of the repair session that it takes part in
    :ivar is_transient: whether it is of a transient replica
    :ivar host_id: node that wrote it
    :ivar has_partition_deletions: whether a partition may be deleted
    :ivar first_key: partition key with the lowest token; ``last_key``: with the highest
    :ivar problem: why the fields after some field are None; empty: all is read
    """

    partitions: int | None = None
    min_timestamp: int | None = None
    max_timestamp: int | None = None
    min_local_deletion_time: int | None = None
    max_local_deletion_time: int | None = None
    min_ttl: int | None = None
    max_ttl: int | None = None
    compression_ratio: float | None = None
    level: int | None = None
    repaired_at: int | None = None
    has_legacy_counters: bool | None = None
    cells: int | None = None
    rows: int | None = None
    commitlog_upto: LogPosition | None = None
    commitlog_intervals: tuple[tuple[LogPosition, LogPosition], ...] | None = None
    pending_repair: UUID | None = None
    is_transient: bool | None = None
    host_id: UUID | None = None
    has_partition_deletions: bool | None = None
    first_key: bytes | None = None
    last_key: bytes | None = None
    problem: str = ""


@dataclass(frozen=True)
class Statistics:
    """The content of Statistics.db."""

    header: Header
    stats: Stats


def read_statistics(source: Source) -> Statistics:
    """Read an SSTable's Statistics.db.

    STATS is read as far as possible: only HEADER is needed to read Data.db.

    :raises SSTableError: the file is missing or damaged, a type is not supported, or the partitioner is another one
    """
    path = source.descriptor.path(STATISTICS)
    content = source.read(STATISTICS)
    if content is None:
        raise SSTableError(path, None, "there is no such file", "copy all files of the SSTable: it says the types")
    return parse_statistics(content, source.descriptor.features, path)


def parse_statistics(content: bytes, version: Version, file: str) -> Statistics:
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
    return Statistics(_header(parts[_HEADER]), _stats(parts.get(_STATS), version))


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


def _stats(cursor: Cursor | None, version: Version) -> Stats:
    if cursor is None:
        return Stats(problem="there is no part STATS")
    found: dict[str, Any] = {}
    try:
        _check_part(cursor, version)
        _read_stats(cursor, version, found)
    except SSTableError as error:
        found["problem"] = str(error)
    return Stats(**found)


def _read_stats(cursor: Cursor, version: Version, found: dict[str, Any]) -> None:
    """Put the fields of STATS into ``found``, one by one, until they end."""
    found["partitions"] = _histogram_sum(cursor)
    _histogram_sum(cursor)
    found["commitlog_upto"] = _log_position(cursor)
    found["min_timestamp"], found["max_timestamp"] = cursor.i64(), cursor.i64()
    found["min_local_deletion_time"], found["max_local_deletion_time"] = cursor.u32(), cursor.u32()
    found["min_ttl"], found["max_ttl"] = cursor.i32(), cursor.i32()
    found["compression_ratio"] = cursor.double()
    cursor.i32()
    bin_size = 12 if version.unsigned_times else 16
    cursor.skip(bin_size * cursor.count(bin_size, "bins of tombstones"))
    found["level"], found["repaired_at"] = cursor.i32(), cursor.i64()
    if version.clustering_values:
        for _ in range(2):
            for _ in range(cursor.count(2, "clustering values")):
                cursor.skip(cursor.u16())
    elif version.clustering_slice:
        _skip_slice(cursor)
    found["has_legacy_counters"] = _flag(cursor)
    found["cells"], found["rows"] = cursor.i64(), cursor.i64()
    if version.commitlog_from:
        _log_position(cursor)
    if version.commitlog_intervals:
        intervals = range(cursor.count(24, "intervals of the commit log"))
        found["commitlog_intervals"] = tuple((_log_position(cursor), _log_position(cursor)) for _ in intervals)
    if version.repair:
        found["pending_repair"] = _optional_uuid(cursor)
        found["is_transient"] = _flag(cursor)
    if version.host_id:
        found["host_id"] = _optional_uuid(cursor)
    if version.clustering_slice:
        found["has_partition_deletions"] = _flag(cursor)
        if version.clustering_values:
            _skip_slice(cursor)
        found["first_key"], found["last_key"] = cursor.sized(), cursor.sized()


def _histogram_sum(cursor: Cursor) -> int:
    """Read an EstimatedHistogram; return how many things it counts."""
    number = cursor.count(16, "buckets of a histogram")
    words = struct.unpack_from(f">{2 * number}q", cursor.data, cursor.skip(16 * number))
    return sum(words[1::2])


def _log_position(cursor: Cursor) -> LogPosition:
    return LogPosition(cursor.i64(), cursor.i32())


def _flag(cursor: Cursor) -> bool:
    byte = cursor.u8()
    if byte > 1:
        raise cursor.fail(f"a byte of {byte:#04x} where there is 00 or 01")
    return byte == 1


def _optional_uuid(cursor: Cursor) -> UUID | None:
    return UUID(bytes=cursor.take(16)) if _flag(cursor) else None


def _skip_slice(cursor: Cursor) -> None:
    """Skip the types of the clustering columns, and a Slice: two bounds, each with its values (C: db/Slice)."""
    types = [_type(cursor, parse_clustering).type for _ in range(_count(cursor))]
    for _ in range(2):
        cursor.u8()
        size = cursor.u16()
        if size > len(types):
            raise cursor.fail(f"a bound of {size} values in a table of {len(types)} clustering columns")
        _skip_values(cursor, types[:size])


def _skip_values(cursor: Cursor, types: list[CqlType]) -> None:
    """Skip clustering values: a header of two bits for each of up to 32, then those that are neither empty nor null."""
    for first in range(0, len(types), 32):
        header = cursor.uvint()
        for number, cql_type in enumerate(types[first : first + 32]):
            if header >> 2 * number & 3 == 0:
                length = stored_length(cql_type)
                cursor.skip(cursor.uvint() if length == VARIABLE else length)
