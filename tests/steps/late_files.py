"""Late rows of a small table ``(id int, seq int, v text, PRIMARY KEY (id, seq))``, as the stage leaves them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ringsync.changes.identity import TableVersion
from ringsync.changes.schema import LIVE, PARTITION_DELETION, RANGE_DELETION, ROW
from ringsync.ledger.staging import STAGED_ROWS, encode_rows, late_key
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore
from tests.commitlog_model.murmur3 import token

_ONE_INT = (1).to_bytes(4, "little") + (4).to_bytes(4, "little")


@dataclass(frozen=True)
class Write:
    """``INSERT`` of a row, or with ``v`` being None its ``DELETE``, USING TIMESTAMP ``at`` (µs).

    :ivar seq: None: the whole partition is deleted
    """

    id: int
    seq: int | None
    v: str | None
    at: int

    @property
    def digest(self) -> bytes:
        return hashlib.md5(repr(self).encode()).digest()

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        key = self.id.to_bytes(4, "big")
        clustering = None if self.seq is None else _ONE_INT + self.seq.to_bytes(4, "big")
        found = {
            **{"table_id": bytes.fromhex(table.table_id), "schema_version": 0, "token": token(key)},
            **{
                "partition_key": key,
                "kind": PARTITION_DELETION if self.seq is None else ROW,
                "write_time": self.at,
                "digest": self.digest,
            },
            "clustering": clustering,
            **{"cells": [], "complex_deletions": [], "file": "CommitLog-8-1.log", "position": self.at % 10**6},
            "node": node,
        }
        if self.v is None:
            return found | {"deletion": {"timestamp": self.at, "local_deletion_time": self.at // 10**6}}
        cell = {"column": 0, "value": self.v.encode(), "timestamp": self.at, "kind": LIVE}
        return found | {"liveness": {"timestamp": self.at}, "cells": [cell]}

    def cql(self, table: str) -> str:
        if self.v is None:
            of_row = "" if self.seq is None else f" AND seq = {self.seq}"
            return f"DELETE FROM {table} USING TIMESTAMP {self.at} WHERE id = {self.id}{of_row}"
        return f"INSERT INTO {table} (id, seq, v) VALUES ({self.id}, {self.seq}, '{self.v}') USING TIMESTAMP {self.at}"


@dataclass(frozen=True)
class RangeDelete:
    """``DELETE … WHERE id = … AND seq >= start AND seq < end`` USING TIMESTAMP ``at`` (µs)."""

    id: int
    start: int
    end: int
    at: int

    @property
    def digest(self) -> bytes:
        return hashlib.md5(repr(self).encode()).digest()

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        row = Write(self.id, None, None, self.at).row(table, node)
        bounds = [_ONE_INT + seq.to_bytes(4, "big", signed=True) for seq in (self.start, self.end)]
        own = {"clustering": bounds[0] + b"\x01", "range_end": bounds[1] + b"\x00", "digest": self.digest}
        return row | {"kind": RANGE_DELETION} | own


def change_rows(writes: Sequence[Write | RangeDelete], table: TableSchema, node: str = "node-1") -> pa.RecordBatch:
    """The change rows of some writes, sorted by token."""
    rows = sorted((write.row(table, node) for write in writes), key=lambda row: row["token"])
    return pa.RecordBatch.from_pylist(rows, schema=STAGED_ROWS)


def put_late(store: ObjectStore, writes: Sequence[Write], table: TableSchema, name: str, node: str = "node-1") -> str:
    """Put a file of late rows; its key."""
    key = late_key(table.table_id, name)
    store.put(key, encode_rows(TableVersion.first(table).to_store(change_rows(writes, table, node))))
    return key
