"""Bases for tests, written as a bootstrap writes them: files first, then one commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from ringsync.replica.base import base_folder, check_replaceable, replace_base, replica_folder
from ringsync.replica.data_files import DataFileWriter
from ringsync.replica.delta_log import read_snapshot
from ringsync.schema.row_image import row_image_schema
from ringsync.schema.table import TableSchema
from ringsync.storage.local import LocalStore

NOW_MS = 1_800_000_000_000


def replica_uri(store: Path, table: TableSchema) -> str:
    """The replica's folder, for ReplicaTable."""
    return str(store / replica_folder(table.keyspace, table.name))


def write_base(
    store: Path,
    table: TableSchema,
    rows: pa.Table,
    *,
    as_of_us: int = 1,
    properties: Mapping[str, str] | None = None,
    rows_per_file: int = 1_000_000,
    deletion_vectors: bool = True,
) -> int:
    """Replace the base of a table in a local store by these row images; gives the version."""
    objects, folder = LocalStore(store), base_folder(table.keyspace, table.name)
    before = read_snapshot(objects, folder)
    check_replaceable(objects, table, before)
    files = []
    for first in range(0, len(rows), rows_per_file):
        writer = DataFileWriter(row_image_schema(table))
        for batch in rows.slice(first, rows_per_file).to_batches():
            writer.add(batch)
        file, data = writer.finish(f"part-{before.version + 1}-{first}.zstd.parquet", NOW_MS)
        objects.put(f"{folder}/{file.name}", data)
        files.append(file)
    return replace_base(
        objects,
        table,
        before,
        files,
        as_of_us=as_of_us,
        properties=properties or {},
        transaction=f"test-{before.version + 1}",
        now_ms=NOW_MS,
        deletion_vectors=deletion_vectors,
    )
