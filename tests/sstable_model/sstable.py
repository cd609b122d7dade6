"""An SSTable as change rows in the jsonl form with ``--raw``, in plain Python: simple and slow.

It shares the bytes of rows with the model of commit logs, and nothing with the package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.commitlog_model.cql_schema import parse_schema
from tests.commitlog_model.murmur3 import signed, token
from tests.commitlog_model.mutation import Change, Input, Update, partition_key, row, unfiltereds
from tests.commitlog_model.types import Table
from tests.sstable_model.data import Read, content_of, data_of

_TIMESTAMP_EPOCH = 1442880000000000
_LOCAL_TIME_EPOCH = 1442880000
_HEADER = 3
_LIVE = (-(1 << 63), (1 << 31) - 1)


@dataclass(frozen=True)
class Header:
    """What the HEADER of Statistics.db says: the bases of times, and the names of the columns."""

    min_timestamp: int
    min_local_time: int
    min_ttl: int
    static: list[str]
    regular: list[str]


@dataclass(frozen=True)
class Partition:
    """
    A partition of an SSTable.

    :param position: where it begins in the uncompressed Data.db.
    :param key: its serialised key.
    :param changes: its content, in the order of the file.
    """

    position: int
    key: bytes
    changes: list[Change]


def read_header(read: Read) -> Header:
    """Read the HEADER of a Statistics.db with checksums."""
    content = content_of(read, "Statistics.db")
    (count,) = struct.unpack_from(">i", content)
    offsets = dict(struct.unpack_from(">ii", content, 8 + 8 * i) for i in range(count))
    data = Input(content, offsets[_HEADER])
    bases = [data.uvint() for _ in range(3)]
    data.sized()
    for _ in range(data.uvint()):
        data.sized()
    names = [[(data.sized().decode(), data.sized())[0] for _ in range(data.uvint())] for _ in range(2)]
    timestamp = signed((bases[0] + _TIMESTAMP_EPOCH) % (1 << 64))
    return Header(timestamp, (bases[1] + _LOCAL_TIME_EPOCH) % (1 << 32), bases[2] % (1 << 32), *names)


def read_sstable(read: Read, table: Table, version: str) -> Iterator[Partition]:
    """
    Yield the partitions of an SSTable.

    :param read: reads its files.
    :param table: its table.
    :param version: `nb`, `oa` or `da`.
    """
    header, data = read_header(read), Input(data_of(read))
    static, regular = ([(name, table.types[name]) for name in names] for names in (header.static, header.regular))
    while data.position < len(data.data):
        position = data.position
        key = data.take(int.from_bytes(data.take(2), "big"))
        common = {
            "keyspace": table.keyspace,
            "table": table.name,
            "table_id": table.id,
            "token": token(key),
            "kind": "",
            "partition_key": partition_key(table, key),
            "raw_partition_key": key.hex(),
        }
        bases = header.min_timestamp, header.min_local_time, header.min_ttl
        update = Update(data, table, common, *bases, in_sstable=True)
        changes = []
        deletion = _unsigned_deletion(data) if version in ("oa", "da") else _signed_deletion(data)
        if deletion is not None:
            times = {"timestamp": deletion[0], "local_deletion_time": deletion[1]}
            changes.append(common | {"kind": "partition_deletion", "deletion": times})
        if static:
            flags = data.u8()
            assert flags & 0x80
            found = row(update, flags, static)
            assert found["kind"] == "static"
            if found.keys() & {"cells", "complex_deletions", "deletion", "liveness"}:
                changes.append(found)
        yield Partition(position, key, changes + unfiltereds(update, regular))


def _signed_deletion(data: Input) -> tuple[int, int] | None:
    local_time, timestamp = struct.unpack(">iq", data.take(12))
    return None if (timestamp, local_time) == _LIVE else (timestamp, local_time % (1 << 32))


def _unsigned_deletion(data: Input) -> tuple[int, int] | None:
    first = data.take(1)
    if first == b"\x80":
        return None
    timestamp, local_time = struct.unpack(">qI", first + data.take(11))
    return timestamp, local_time


def table_beside(folder: Path, table_id: str) -> Table:
    """
    Return a table as the schema.cql of a snapshot describes it.

    :param folder: the snapshot's.
    :param table_id: 32 hexadecimal digits.
    """
    found = parse_schema((folder / "schema.cql").read_text())
    return next(table for table in found.values() if table.id.replace("-", "") == table_id)
