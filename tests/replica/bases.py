"""Bases and passes for tests, written as a bootstrap and the sync write them: files first, then one commit."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from ringsync.images.schema import row_image_schema
from ringsync.replica.base import replace_base
from ringsync.replica.changes import VERSION, ReplicaState, append_pass, changes_schema, replica_state
from ringsync.replica.checksum import CHECKSUM_FIELDS, check_boundaries, partial_checksums, sum_up
from ringsync.replica.data_files import DataFileWriter
from ringsync.replica.delta_log import DataFile, read_snapshot
from ringsync.replica.folders import base_folder, changes_folder, replica_folder
from ringsync.schema.table import TableSchema
from ringsync.storage.local import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    from_pass: int = 1,
    deletion_vectors: bool = True,
) -> int:
    """Replace the base of a table in a local store by these row images; gives the version."""
    objects, folder = LocalStore(store), base_folder(table.keyspace, table.name)
    before = read_snapshot(objects, folder)
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
        from_pass=from_pass,
        deletion_vectors=deletion_vectors,
    )


def state_of(store: Path, table: TableSchema) -> ReplicaState:
    found = replica_state(LocalStore(store), table)
    assert found is not None
    return found


def write_file(store: Path, table: TableSchema, rows: pa.Table, number: int) -> DataFile:
    """A file of a pass's images, which no commit names yet."""
    writer = DataFileWriter(changes_schema(table))
    version = pa.array([number] * len(rows), pa.int64())
    for batch in rows.sort_by("token").append_column(VERSION, version).combine_chunks().to_batches():
        writer.add(batch)
    file, data = writer.finish(f"part-{number}-{uuid.uuid4().hex}.zstd.parquet", NOW_MS)
    LocalStore(store).put(f"{changes_folder(table.keyspace, table.name)}/{file.name}", data)
    return file


def write_pass(store: Path, table: TableSchema, rows: pa.Table, number: int) -> int:
    """Add a pass with these row images to the replica; gives the version of its table of changes."""
    seen = state_of(store, table)
    files = [write_file(store, table, rows, number)] if len(rows) else []
    return append_pass(LocalStore(store), table, number, files, NOW_MS, seen=seen)


PARTIAL = ", ".join(f"`{name}` bigint" for name in ("range", *CHECKSUM_FIELDS))


def checksums_of(rows: DataFrame, table: TableSchema, boundaries: Sequence[int]) -> pa.Table:
    """The checksums of rows as the view of a replica shows them (:func:`ringsync.replica.view.live`)."""
    edges = check_boundaries(boundaries)

    def checksum(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield partial_checksums(batches, table, edges)

    return sum_up(rows.mapInArrow(checksum, PARTIAL).toArrow(), edges)
