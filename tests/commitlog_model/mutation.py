"""A mutation's bytes as change rows in the jsonl form with ``--raw`` (docs/formats.md, 2), in plain Python."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.commitlog_model.digest import digest
from tests.commitlog_model.murmur3 import signed, token
from tests.commitlog_model.types import Table, Type
from tests.commitlog_model.values import counter_value, decode, partition_key_components, read_uvint

Change = dict[str, Any]
_TIMESTAMP_EPOCH = 1442880000000000
_LOCAL_TIME_EPOCH = 1442880000
_LIVE = -(1 << 63)
"""``markedForDeleteAt`` of a deletion that deletes nothing."""


class UnknownTableError(Exception):
    """A mutation of a table whose description is not there; the id is the first argument."""


class UnknownColumnError(Exception):
    """A mutation names a column that its table does not have: table id and column are the arguments."""


class MalformedError(Exception):
    """The bytes are no mutation."""


@dataclass
class Input:
    """Bytes that are read from front to back."""

    data: bytes
    position: int = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size > len(self.data) - self.position:
            raise MalformedError(f"it ends before the {size} bytes at {self.position}")
        self.position += size
        return self.data[self.position - size : self.position]

    def u8(self) -> int:
        """The next byte as a number."""
        return self.take(1)[0]

    def uvint(self) -> int:
        """The next unsigned vint."""
        try:
            value, self.position = read_uvint(self.data, self.position)
        except (IndexError, ValueError) as error:
            raise MalformedError(f"it ends within the number at {self.position}") from error
        return value

    def sized(self) -> bytes:
        """Bytes with their length before them."""
        return self.take(self.uvint())

    def value(self, cql_type: Type) -> bytes:
        """A value that is not empty: types of fixed length have no length before them."""
        length = cql_type.fixed_length
        return self.sized() if length is None else self.take(length)


@dataclass(frozen=True)
class Update:
    """What all rows of a PartitionUpdate share.

    :param common: the parts of the jsonl form that name table and partition
    :param min_timestamp: µs
    :param min_local_time: s
    :param min_ttl: s
    :param in_sstable: whether rows and markers have their sizes, as in SSTables
    """

    data: Input
    table: Table
    common: Change
    min_timestamp: int
    min_local_time: int
    min_ttl: int
    in_sstable: bool = False

    def timestamp(self) -> int:
        """The next timestamp, in µs."""
        return signed((self.min_timestamp + self.data.uvint()) % (1 << 64))

    def local_time(self) -> int:
        """The next local deletion or expiration time, in s."""
        return (self.min_local_time + self.data.uvint()) % (1 << 32)

    def ttl(self) -> int:
        """The next TTL, in s."""
        ttl = signed((self.min_ttl + self.data.uvint()) % (1 << 64))
        if not 0 <= ttl < 1 << 31:
            raise MalformedError(f"a TTL of {ttl} s")
        return ttl

    def skip_sizes(self) -> int:
        """Skip the size of a row or marker, and that of the one before it. Return where it ends; -1: not told."""
        if not self.in_sstable:
            return -1
        size = self.data.uvint()
        end = self.data.position + size
        self.data.uvint()
        return end

    def deletion(self) -> dict[str, int]:
        """The next deletion."""
        return {"timestamp": self.timestamp(), "local_deletion_time": self.local_time()}


def partition_updates(mutation: bytes, tables: Mapping[str, Table]) -> Iterator[list[Change]]:
    """The change rows of each PartitionUpdate of a mutation, without ``source``.

    :param tables: by id
    :raises UnknownTableError: for a PartitionUpdate of another table; those before it have been given
    :raises UnknownColumnError: the same for a column
    :raises MalformedError: the bytes are no mutation
    """
    data = Input(mutation)
    for _ in range(data.uvint()):
        try:
            changes = _partition_update(data, tables)
        except (ValueError, LookupError, struct.error) as error:
            raise MalformedError(str(error)) from error
        for change in changes:
            change["digest"] = digest(change)
        yield changes
    if data.position != len(mutation):
        raise MalformedError(f"{len(mutation) - data.position} bytes are left over at {data.position}")


def _partition_update(data: Input, tables: Mapping[str, Table]) -> list[Change]:
    table_id = str(uuid.UUID(bytes=data.take(16)))
    if table_id not in tables:
        raise UnknownTableError(table_id)
    table = tables[table_id]
    key = data.sized()
    common = {
        "keyspace": table.keyspace,
        "table": table.name,
        "table_id": table_id,
        "token": token(key),
        "kind": "",
        "partition_key": partition_key(table, key),
        "raw_partition_key": key.hex(),
    }
    flags = data.u8()
    if flags & 0x01:
        return []
    if flags & 0x02:
        raise MalformedError("the rows of the update are in reversed order")
    timestamp = signed((data.uvint() + _TIMESTAMP_EPOCH) % (1 << 64))
    update = Update(data, table, common, timestamp, (data.uvint() + _LOCAL_TIME_EPOCH) % (1 << 32), data.uvint())
    static = _columns(update) if flags & 0x08 else []
    regular = _columns(update)
    changes = []
    if flags & 0x04:
        deletion = update.deletion()
        if deletion["timestamp"] != _LIVE:
            changes.append(common | {"kind": "partition_deletion", "deletion": deletion})
    if flags & 0x08:
        changes.append(row(update, data.u8(), static))
    if flags & 0x10:
        data.uvint()
    return changes + unfiltereds(update, regular)


def partition_key(table: Table, key: bytes) -> dict[str, Any]:
    columns = table.partition_types
    components = partition_key_components(key, len(columns))
    return {name: decode(cql_type, raw) for (name, cql_type), raw in zip(columns, components, strict=True)}


def _columns(update: Update) -> list[tuple[str, Type]]:
    found = []
    for _ in range(update.data.uvint()):
        name = update.data.sized().decode()
        if name not in update.table.types:
            raise UnknownColumnError(update.table.id, name)
        found.append((name, update.table.types[name]))
    return found


def unfiltereds(update: Update, columns: list[tuple[str, Type]]) -> list[Change]:
    changes, opened = [], None
    while not (flags := update.data.u8()) & 0x01:
        if flags & 0x02:
            closed, opened = _marker(update, opened)
            changes += closed
        else:
            changes.append(row(update, flags, columns))
    if opened is not None:
        raise MalformedError("a range deletion has no end")
    return changes


def _marker(update: Update, opened: Change | None) -> tuple[list[Change], Change | None]:
    """A bound or boundary: the range that it closes, and the one that it opens."""
    kind = update.data.u8()
    if kind not in (0, 1, 2, 5, 6, 7):
        raise MalformedError(f"a range tombstone marker of kind {kind}")
    clustering = _clustering(update, int.from_bytes(update.data.take(2), "big"))
    size_end = update.skip_sizes()
    closes, opens = kind in (0, 2, 5, 6), kind in (1, 2, 5, 7)
    if closes != (opened is not None):
        raise MalformedError("bounds of range deletions that do not fit together")
    changes, next_opened = [], None
    deletion = update.deletion()
    if opened is not None:
        if deletion != opened["deletion"]:
            raise MalformedError("start and end of a range deletion have different times")
        end = clustering | {"inclusive": kind in (5, 6)}
        changes = [opened | {"range": opened["range"] | {"end": end}}]
        deletion = update.deletion() if opens else deletion
    if opens:
        start = clustering | {"inclusive": kind in (1, 2)}
        next_opened = update.common | {"kind": "range_deletion", "deletion": deletion, "range": {"start": start}}
    _check_end(update, size_end)
    return changes, next_opened


def _check_end(update: Update, end: int) -> None:
    if end not in (-1, update.data.position):
        raise MalformedError(f"by its size it ends at {end}, not at {update.data.position}")


def _clustering(update: Update, count: int) -> Change:
    columns = update.table.clustering_types
    if count > len(columns):
        raise MalformedError(f"{count} clustering values in a table of {len(columns)} clustering columns")
    raws: list[bytes | None] = []
    for i, (_, cql_type) in enumerate(columns[:count]):
        if i % 32 == 0:
            header = update.data.uvint()
        marks = header >> 2 * (i % 32) & 3
        raws.append(None if marks & 2 else b"" if marks & 1 else update.data.value(cql_type))
    return {
        "clustering": {
            name: None if raw is None else decode(cql_type, raw)
            for (name, cql_type), raw in zip(columns, raws, strict=False)
        },
        "raw_clustering": [None if raw is None else raw.hex() for raw in raws],
    }


def row(update: Update, flags: int, columns: list[tuple[str, Type]]) -> Change:
    data = update.data
    extended = data.u8() if flags & 0x80 else 0
    change = update.common | {"kind": "static" if extended & 0x01 else "row"}
    if change["kind"] == "row" and update.table.clustering:
        change |= _clustering(update, len(update.table.clustering))
    size_end = update.skip_sizes()
    liveness = {}
    if flags & 0x04:
        liveness["timestamp"] = update.timestamp()
        if flags & 0x08:
            liveness |= {"ttl": update.ttl(), "expires_at": update.local_time()}
        change["liveness"] = liveness
    if flags & 0x10:
        change["deletion"] = update.deletion()
    present = columns if flags & 0x20 else _subset(data, columns)
    cells, complex_deletions = [], []
    for name, cql_type in present:
        if not cql_type.is_complex:
            cells.append(_cell(update, name, cql_type, liveness))
            continue
        if flags & 0x40:
            deletion = update.deletion()
            if deletion["timestamp"] != _LIVE:
                complex_deletions.append({"column": name, **deletion})
        cells += [_cell(update, name, cql_type, liveness) for _ in range(data.uvint())]
    if cells:
        change["cells"] = cells
    if complex_deletions:
        change["complex_deletions"] = complex_deletions
    _check_end(update, size_end)
    return change


def _subset(data: Input, columns: list[tuple[str, Type]]) -> list[tuple[str, Type]]:
    encoded = data.uvint()
    if len(columns) < 64:
        return [column for i, column in enumerate(columns) if not encoded >> i & 1]
    present = len(columns) - encoded
    if present < len(columns) // 2:
        return [columns[data.uvint()] for _ in range(present)]
    missing = {data.uvint() for _ in range(encoded)}
    return [column for i, column in enumerate(columns) if i not in missing]


def _cell(update: Update, name: str, cql_type: Type, liveness: dict[str, int]) -> Change:
    data = update.data
    flags = data.u8()
    timestamp = liveness["timestamp"] if flags & 0x08 else update.timestamp()
    cell: Change = {"column": name}
    times: dict[str, int] = {}
    if flags & 0x03:
        local_time = liveness["expires_at"] if flags & 0x10 else update.local_time()
        if flags & 0x02:
            times = {"ttl": liveness["ttl"] if flags & 0x10 else update.ttl(), "expires_at": local_time}
        else:
            times = {"local_deletion_time": local_time}
    if cql_type.is_complex:
        path = data.sized()
        cell |= {"path": _path(cql_type, path), "raw_path": path.hex()}
    raw = b""
    if not flags & 0x04:
        raw = data.sized() if cql_type.is_complex else data.value(cql_type)
    if flags & 0x01:
        return cell | {"deleted": True, "timestamp": timestamp, **times}
    if cql_type.kind != "set" or not cql_type.is_complex:
        cell["value"] = _cell_value(cql_type, cell.get("raw_path"), raw)
    return cell | {"raw": raw.hex(), "timestamp": timestamp, **times}


def _path(cql_type: Type, path: bytes) -> Any:
    if cql_type.kind == "list":
        return str(uuid.UUID(bytes=path))
    if cql_type.kind == "udt":
        return cql_type.fields[int.from_bytes(path, "big")]
    return decode(cql_type.inner[0], path)


def _cell_value(cql_type: Type, raw_path: str | None, raw: bytes) -> Any:
    if cql_type.kind == "counter":
        return counter_value(raw)
    if not cql_type.is_complex:
        return decode(cql_type, raw)
    field = int(raw_path or "0", 16) if cql_type.kind == "udt" else -1
    return decode(cql_type.inner[field], raw)
