"""Mutations and segments as Cassandra writes them (docs/formats.md, 1 and 2), from change rows as jsonl with ``--raw``.

For what real servers seldom write: any timestamps, boundaries, odd encodings. Where Cassandra may write a thing in more
than one way, or may not, a random number decides.
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.commitlog_model.types import Table, Type

Change = dict[str, Any]
LIVE_TIMESTAMP, LIVE_LOCAL_TIME = -(1 << 63), 0x7FFFFFFF
_TIMESTAMP_EPOCH, _LOCAL_TIME_EPOCH = 1442880000000000, 1442880000


def uvint(value: int) -> bytes:
    """An unsigned vint (docs/formats.md, 2.1) of the value modulo 2^64."""
    value %= 1 << 64
    extra = min(8, (max(value.bit_length(), 1) - 1) // 7)
    if extra == 8:
        return b"\xff" + value.to_bytes(8, "big")
    data = value.to_bytes(extra + 1, "big")
    return bytes([data[0] | (0xFF << (8 - extra)) & 0xFF]) + data[1:]


def sized(data: bytes) -> bytes:
    """Bytes with their length before them."""
    return uvint(len(data)) + data


@dataclass(frozen=True)
class UpdateWriter:
    """Writes the changes of one partition of one table.

    :param table: whose partition it is
    :param choice: decides where there is more than one way
    """

    table: Table
    choice: Random

    def write(self, key: bytes, changes: Sequence[Change]) -> bytes:
        """A PartitionUpdate.

        :param key: of the partition
        :param changes: without what all have in common; first a partition deletion and a static row, if there are
            such; then rows and ranges in the order of the log. Rows may be written inside of the range that follows
        """
        minima = self.choice.choice([(0, 0, 0), (_TIMESTAMP_EPOCH, _LOCAL_TIME_EPOCH, 0), (1 << 62, 1 << 31, 5)])
        writer = _Body(self.table, self.choice, *minima)
        kinds = [change["kind"] for change in changes]
        rest = [change for change in changes if change["kind"] in ("row", "range_deletion")]
        static = [change for change in changes if change["kind"] == "static"]
        deletion = [change for change in changes if change["kind"] == "partition_deletion"]
        assert kinds == ["partition_deletion"] * len(deletion) + ["static"] * len(static) + [c["kind"] for c in rest]
        flags = 0x04 * len(deletion) | 0x08 * len(static) | 0x10
        out = [uuid.UUID(self.table.id).bytes, sized(key), bytes([flags]), writer.statistics()]
        static_names, names = self._names(static, self.table.static), self._names(rest, self.table.regular)
        out += [_column_list(static_names)] if static else []
        out.append(_column_list(names))
        out += [writer.deletion(one["deletion"]) for one in deletion]
        out += [writer.row(one, static_names) for one in static]
        return b"".join([*out, uvint(len(rest)), writer.unfiltereds(rest, names), b"\x01"])

    def _names(self, changes: Sequence[Change], of_table: Mapping[str, str]) -> list[str]:
        """The columns that the update lists: those that it touches, and maybe more."""
        used = {cell["column"] for change in changes for cell in change.get("cells", [])}
        used |= {one["column"] for change in changes for one in change.get("complex_deletions", [])}
        if self.choice.random() < 0.3:
            used |= set(of_table)
        return sorted(used, key=lambda name: (self.table.types[name].is_complex, name.encode()))


def _column_list(names: Sequence[str]) -> bytes:
    return uvint(len(names)) + b"".join(sized(name.encode()) for name in names)


@dataclass(frozen=True)
class _Body:
    table: Table
    choice: Random
    min_timestamp: int
    min_local_time: int
    min_ttl: int

    def statistics(self) -> bytes:
        return (
            uvint(self.min_timestamp - _TIMESTAMP_EPOCH)
            + uvint(self.min_local_time - _LOCAL_TIME_EPOCH)
            + uvint(self.min_ttl)
        )

    def timestamp(self, value: int) -> bytes:
        return uvint(value - self.min_timestamp)

    def local_time(self, value: int) -> bytes:
        return uvint(value - self.min_local_time)

    def deletion(self, one: Mapping[str, int]) -> bytes:
        return self.timestamp(one["timestamp"]) + self.local_time(one["local_deletion_time"])

    def unfiltereds(self, changes: Sequence[Change], names: Sequence[str]) -> bytes:
        out, waiting, opened = [], [], False
        for i, change in enumerate(changes):
            if change["kind"] == "row":
                waiting.append(self.row(change, names))
                continue
            bounds, following = change["range"], changes[i + 1 : i + 2]
            if not opened:
                start = self.bound(bounds["start"], 1 if bounds["start"]["inclusive"] else 7)
                waiting.insert(self.choice.randint(0, len(waiting)), start + self.deletion(change["deletion"]))
            opened = bool(following) and self._adjoin(change, following[0]) and self.choice.random() < 0.8
            end = bounds["end"]
            kind = (5 if opened else 6) if end["inclusive"] else (2 if opened else 0)
            out += [*waiting, self.bound(end, kind), self.deletion(change["deletion"])]
            out += [self.deletion(following[0]["deletion"])] if opened else []
            waiting = []
        return b"".join([*out, *waiting])

    @staticmethod
    def _adjoin(first: Change, second: Change) -> bool:
        if second["kind"] != "range_deletion":
            return False
        end, start = first["range"]["end"], second["range"]["start"]
        return end["raw_clustering"] == start["raw_clustering"] and end["inclusive"] != start["inclusive"]

    def bound(self, bound: Mapping[str, Any], kind: int) -> bytes:
        values = bound["raw_clustering"]
        return bytes([0x02, kind]) + struct.pack(">H", len(values)) + self.clustering(values)

    def clustering(self, raws: Sequence[str | None]) -> bytes:
        out = []
        for first in range(0, len(raws), 32):
            block = raws[first : first + 32]
            marks = [2 if raw is None else 1 if raw == "" else 0 for raw in block]
            out.append(uvint(sum(mark << 2 * i for i, mark in enumerate(marks))))
            types = self.table.clustering_types[first : first + 32]
            out += [_value(kind, bytes.fromhex(raw)) for raw, (_, kind) in zip(block, types, strict=False) if raw]
        return b"".join(out)

    def row(self, change: Change, names: Sequence[str]) -> bytes:
        """A row with its flags."""
        cells, deletions = change.get("cells", []), change.get("complex_deletions", [])
        present = {one["column"] for one in [*cells, *deletions]}
        liveness = change.get("liveness")
        with_deletions = bool(deletions) or self.choice.random() < 0.2
        flags = 0x80 if change["kind"] == "static" else 0
        out = [b"\x01"] if flags else [self.clustering(change["raw_clustering"])]
        if liveness is not None:
            flags |= 0x04
            out.append(self.timestamp(liveness["timestamp"]))
        if liveness is not None and "ttl" in liveness:
            flags |= 0x08
            out += [uvint(liveness["ttl"] - self.min_ttl), self.local_time(liveness["expires_at"])]
        if "deletion" in change:
            flags |= 0x10
            out.append(self.deletion(change["deletion"]))
        if len(present) == len(names) and self.choice.random() < 0.8:
            flags |= 0x20
        else:
            out.append(_subset(names, present))
        flags |= 0x40 if with_deletions else 0
        for name in (name for name in names if name in present):
            its_cells = [cell for cell in cells if cell["column"] == name]
            if self.table.types[name].is_complex:
                out.append(self._complex_head(name, deletions, len(its_cells), with_deletions))
            out += [self.cell(cell, self.table.types[name], liveness or {}) for cell in its_cells]
        return bytes([flags]) + b"".join(out)

    def _complex_head(self, name: str, deletions: Iterable[Change], count: int, with_deletions: bool) -> bytes:
        live = {"timestamp": LIVE_TIMESTAMP, "local_deletion_time": LIVE_LOCAL_TIME}
        mine = next((one for one in deletions if one["column"] == name), live)
        return (self.deletion(mine) if with_deletions else b"") + uvint(count)

    def cell(self, cell: Change, kind: Type, liveness: Mapping[str, int]) -> bytes:
        deleted, expiring = cell.get("deleted", False), "ttl" in cell
        raw = bytes.fromhex(cell.get("raw", ""))
        flags = 0x01 * deleted | 0x02 * expiring
        out = []
        if liveness.get("timestamp") == cell["timestamp"] and self.choice.random() < 0.7:
            flags |= 0x08
        else:
            out.append(self.timestamp(cell["timestamp"]))
        if expiring and all(liveness.get(key) == cell[key] for key in ("ttl", "expires_at")):
            flags |= 0x10
        elif expiring:
            out += [self.local_time(cell["expires_at"]), uvint(cell["ttl"] - self.min_ttl)]
        elif deleted:
            out.append(self.local_time(cell["local_deletion_time"]))
        if kind.is_complex:
            out.append(sized(bytes.fromhex(cell["raw_path"])))
        has_length = kind.is_complex or kind.fixed_length is None
        if not raw and (deleted or not has_length or self.choice.random() < 0.5):
            flags |= 0x04
        else:
            out.append(sized(raw) if has_length else raw)
        return bytes([flags]) + b"".join(out)


def _value(kind: Type, raw: bytes) -> bytes:
    return sized(raw) if kind.fixed_length is None else raw


def _subset(names: Sequence[str], present: set[str]) -> bytes:
    missing = [i for i, name in enumerate(names) if name not in present]
    if len(names) < 64:
        return uvint(sum(1 << i for i in missing))
    if not missing:
        return uvint(0)
    there = [i for i, name in enumerate(names) if name in present]
    listed = there if len(there) < len(names) // 2 else missing
    return uvint(len(missing)) + b"".join(uvint(i) for i in listed)


def mutation(updates: Sequence[bytes]) -> bytes:
    """Updates as one mutation."""
    return uvint(len(updates)) + b"".join(updates)


def empty_update(table_id: str, key: bytes) -> bytes:
    """An update that says that it has nothing."""
    return uuid.UUID(table_id).bytes + sized(key) + b"\x01"


def record(content: bytes) -> bytes:
    """A mutation between its size and checksums."""
    size = struct.pack(">I", len(content))
    return size + _crc(size) + content + _crc(content, zlib.crc32(size))


def _crc(data: bytes, before: int = 0) -> bytes:
    return struct.pack(">I", zlib.crc32(data, before))


def descriptor(version: int, segment_id: int, parameters: Mapping[str, Any] | bytes = b"{}") -> bytes:
    """The start of a segment."""
    text = parameters if isinstance(parameters, bytes) else json.dumps(parameters).encode()
    checked = struct.pack(">iIII", version, segment_id & 0xFFFFFFFF, segment_id >> 32 & 0xFFFFFFFF, len(text)) + text
    return struct.pack(">iqH", version, segment_id, len(text)) + text + _crc(checked)


def segment(
    version: int,
    segment_id: int,
    sections: Sequence[bytes],
    parameters: Mapping[str, Any] | bytes = b"{}",
    pack: Callable[[bytes], bytes] = bytes,
    zeros: int = 64,
) -> bytes:
    """A segment file.

    :param sections: records of each, plain
    :param pack: makes of a section's records what is in the file
    :param zeros: bytes behind
    """
    out = descriptor(version, segment_id, parameters)
    for section in sections:
        content = pack(section)
        end, at = len(out) + 8 + len(content), len(out)
        checked = struct.pack(">III", segment_id & 0xFFFFFFFF, segment_id >> 32 & 0xFFFFFFFF, at)
        out += struct.pack(">iI", end, zlib.crc32(checked)) + content
    return out + bytes(zeros)
