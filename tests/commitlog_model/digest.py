"""The digest of a change, computed from its jsonl form with ``--raw``: what the form says is all that counts."""

from __future__ import annotations

import struct
import uuid
from typing import Any

from tests.commitlog_model.murmur3 import murmur3, signed

_KINDS = ("row", "static", "partition_deletion", "range_deletion")


def digest(change: dict[str, Any], time: bytes = b"") -> str:
    """The 128 bits as 32 hex digits.

    :param time: ``cdc$time`` of a row of a CDC log with a TTL
    """
    return "{:016x}{:016x}".format(*murmur3(canonical_bytes(change) + time))


def canonical_bytes(change: dict[str, Any]) -> bytes:
    """The little-endian bytes that are hashed."""
    kind = change["kind"]
    bounds = change.get("range")
    out = [uuid.UUID(change["table_id"]).bytes, bytes([_KINDS.index(kind)])]
    out.append(_sized(change["raw_partition_key"]))
    out.append(_values(bounds["start"]["raw_clustering"] if bounds else change.get("raw_clustering", [])))
    if bounds:
        out += [bytes([bounds["start"]["inclusive"]]), _values(bounds["end"]["raw_clustering"])]
        out.append(bytes([bounds["end"]["inclusive"]]))
    out += [_liveness(change.get("liveness")), _deletion(change.get("deletion"))]
    cells = change.get("cells", [])
    out.append(struct.pack("<i", len(cells)))
    out += [_cell(cell) for cell in cells]
    complex_deletions = change.get("complex_deletions", [])
    out.append(struct.pack("<i", len(complex_deletions)))
    for one in complex_deletions:
        out.append(struct.pack("<qqq", _column(one["column"]), one["timestamp"], one["local_deletion_time"]))
    return b"".join(out)


def _cell(cell: dict[str, Any]) -> bytes:
    head = struct.pack("<q", _column(cell["column"])) + _sized(cell.get("raw_path"))
    if cell.get("deleted"):
        return head + struct.pack("<Bqq", 3, cell["timestamp"], cell["local_deletion_time"])
    if "ttl" in cell:
        times = struct.pack("<Bqiq", 2, cell["timestamp"], cell["ttl"], cell["expires_at"])
    else:
        times = struct.pack("<Bq", 1, cell["timestamp"])
    return head + times + _sized(cell["raw"])


def _column(name: str) -> int:
    return signed(murmur3(name.encode())[0])


def _sized(raw: str | None) -> bytes:
    if raw is None:
        return struct.pack("<i", -1)
    data = bytes.fromhex(raw)
    return struct.pack("<i", len(data)) + data


def _values(raws: list[str | None]) -> bytes:
    return struct.pack("<i", len(raws)) + b"".join(_sized(raw) for raw in raws)


def _liveness(liveness: dict[str, int] | None) -> bytes:
    if liveness is None:
        return b"\0"
    if "ttl" not in liveness:
        return struct.pack("<Bq", 1, liveness["timestamp"])
    return struct.pack("<Bqiq", 2, liveness["timestamp"], liveness["ttl"], liveness["expires_at"])


def _deletion(deletion: dict[str, int] | None) -> bytes:
    if deletion is None:
        return b"\0"
    return struct.pack("<Bqq", 1, deletion["timestamp"], deletion["local_deletion_time"])
