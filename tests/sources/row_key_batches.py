"""Keys of a real table in the form in which commit logs have them, made in plain Python."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ringsync.schema.table import TableSchema
from tests.commitlog_model.murmur3 import token as murmur3_token
from tests.oracle import Rows

ROW_KEYS = pa.schema(
    [
        ("token", pa.int64()),
        ("partition_key", pa.binary()),
        ("clustering", pa.binary()),
        ("whole_partition", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Key:
    """A key as bytes.

    :ivar plain: its values as the oracle gives them
    :ivar clustering: serialised values; None: the partition's static columns, or all of it
    """

    plain: tuple[Any, ...]
    partition: tuple[bytes, ...]
    clustering: tuple[bytes, ...] | None
    whole: bool = False

    @property
    def partition_key(self) -> bytes:
        if len(self.partition) == 1:
            return self.partition[0]
        return b"".join(struct.pack(">H", len(value)) + value + b"\0" for value in self.partition)


def keys_of(session: Any, table: TableSchema, rows: Rows) -> list[Key]:
    """The keys of all rows, as the driver reads and serialises them; static-only partitions have no clustering.

    :param rows: of the whole table, see :func:`tests.oracle.source_rows`
    """
    columns = ", ".join(f'"{column.name}"' for column in table.key_columns)
    result = session.execute(f'SELECT {columns} FROM {table.keyspace}."{table.name}"')
    kinds, width = result.column_types, len(table.partition_key)
    found = []
    for plain, row in zip(rows, result, strict=True):
        values = [kind.to_binary(value, 5) for kind, value in zip(kinds, row, strict=True) if value is not None]
        found.append(Key(plain, tuple(values[:width]), tuple(values[width:]) or None))
    return found


def batch_of(keys: Sequence[Key]) -> pa.RecordBatch:
    """The keys as Arrow."""
    clusterings = [
        None
        if key.clustering is None
        else struct.pack("<i", len(key.clustering)) + b"".join(struct.pack("<i", len(v)) + v for v in key.clustering)
        for key in keys
    ]
    partition_keys = [key.partition_key for key in keys]
    tokens = [murmur3_token(key) for key in partition_keys]
    columns = [tokens, partition_keys, clusterings, [key.whole for key in keys]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, ROW_KEYS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ROW_KEYS)
