"""SSTables that no server wrote: uncompressed, of version nb, in memory, row by row."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from ringsync.cql.murmur3 import tokens
from ringsync.formats.sstable.names import Descriptor
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema

MARSHAL = "org.apache.cassandra.db.marshal."
TABLE_ID = "5a1c395eb41f11e59f22ba0be0483c18"
_LIVE = struct.pack(">iq", 0x7FFFFFFF, -(2**63))
_CHUNK = 65536


@dataclass(frozen=True)
class MadeSource:
    """The files of an SSTable in memory."""

    descriptor: Descriptor
    files: dict[str, bytes] = field(repr=False, hash=False, compare=False)

    def read(self, component: str) -> bytes | None:
        return self.files.get(component)

    def size(self, component: str) -> int | None:
        return len(self.files[component]) if component in self.files else None

    def read_range(self, component: str, start: int, length: int) -> bytes:
        return self.files[component][start : start + length]


def uvint(number: int) -> bytes:
    number &= 2**64 - 1
    for extra in range(8):
        if number < 1 << (7 * (extra + 1)):
            content = number.to_bytes(extra + 1, "big")
            return bytes([content[0] | (0xFF00 >> extra) & 0xFF]) + content[1:]
    return b"\xff" + number.to_bytes(8, "big")


def sized(content: bytes) -> bytes:
    return uvint(len(content)) + content


def int32(number: int) -> bytes:
    return struct.pack(">i", number)


def table_of(columns: str) -> TableSchema:
    """Return a table `k.t`; its columns are the text between the parentheses of CREATE TABLE, and what follows."""
    (table,) = parse_schema(f"CREATE TABLE k.t ({columns}", "schema.cql").tables
    return table


def statistics(key: str, clustering: Sequence[str], regular: Sequence[tuple[str, str]]) -> bytes:
    """Write a Statistics.db; types are names of Java classes without their package."""
    header = uvint(0) * 3 + sized((MARSHAL + key).encode()) + uvint(len(clustering))
    header += b"".join(sized((MARSHAL + one).encode()) for one in clustering) + uvint(0) + uvint(len(regular))
    header += b"".join(sized(name.encode()) + sized((MARSHAL + one).encode()) for name, one in regular)
    partitioner = b"org.apache.cassandra.dht.Murmur3Partitioner"
    validation = struct.pack(">H", len(partitioner)) + partitioner + struct.pack(">d", 0.01)
    count = struct.pack(">i", 2)
    crc = zlib.crc32(count)
    first = len(count) + 4 + 16 + 4
    places = struct.pack(">iiii", 0, first, 3, first + len(validation) + 4)
    parts = [count, struct.pack(">I", crc), places, struct.pack(">I", zlib.crc32(places, crc))]
    for part in (validation, header):
        parts += [part, struct.pack(">I", zlib.crc32(part))]
    return b"".join(parts)


def row(clustering: bytes, values: Sequence[bytes], timestamp: int) -> bytes:
    """Write a row that INSERT made: all columns, with one timestamp.

    :param clustering: with its header; empty for a table without clustering
    :param values: as they are stored: with their length where it varies
    """
    body = uvint(0) + uvint(timestamp) + b"".join(b"\x08" + value for value in values)
    return b"\x24" + clustering + uvint(len(body)) + body


def partition(key: bytes, rows: Sequence[bytes], deleted_us: int | None = None) -> bytes:
    deletion = _LIVE if deleted_us is None else struct.pack(">iq", 1, deleted_us)
    return struct.pack(">H", len(key)) + key + deletion + b"".join(rows) + b"\x01"


def sstable(partitions: dict[bytes, bytes], stats: bytes, number: int = 1, folder: str = "") -> MadeSource:
    """Write an SSTable of partitions by key."""
    data = index = b""
    for key in sorted(partitions, key=lambda one: (int(tokens(pa.array([one], pa.binary()))[0]), one)):
        index += struct.pack(">H", len(key)) + key + uvint(len(data)) + uvint(0)
        data += partitions[key]
    chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
    checksums = struct.pack(">i", _CHUNK) + b"".join(struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    files = {"Data.db": data, "CRC.db": checksums, "Index.db": index, "Statistics.db": stats}
    return MadeSource(Descriptor("nb", str(number), "big", folder, "k", "t", TABLE_ID), files)
