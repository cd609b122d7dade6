"""File streams to be relayed, of a small table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.changes.schema import ROW
from ringsync.cql.types import Native
from ringsync.images.from_changes import row_images_of
from ringsync.images.schema import row_image_schema
from ringsync.schema.table import Column, TableSchema
from ringsync.storage.local import LocalStore
from ringsync.streams.change_messages import change_messages
from ringsync.streams.files import FileStream
from ringsync.streams.messages import Messages, envelope_schema, key_schema, snapshot_messages
from tests.reconciled import merged
from tests.steps.late_files import RangeDelete, Write, change_rows

SERVER = "demo"
NOTES = TableSchema(
    "shop",
    "notes",
    "0" * 32,
    (
        Column("id", "partition_key", Native("int")),
        Column("line", "clustering", Native("int")),
        Column("note", "regular", Native("text")),
        Column("paid", "regular", Native("decimal")),
    ),
)
LINES = 50
"""Rows of a partition, one after the other: messages of one partition must keep their order."""


def outbox(folder: Path, topic: str) -> FileStream:
    """An empty stream with version 1 of the schemas of NOTES."""
    stream = FileStream(LocalStore(folder), topic)
    stream.put_schemas(1, key_schema(NOTES, SERVER, "exact"), envelope_schema(NOTES, SERVER, "exact"))
    return stream


def notes(first: int, count: int, tokens: list[int] | None = None) -> Messages:
    """Messages of rows; all of different rows are different."""
    numbers = np.arange(first, first + count)
    schema = row_image_schema(NOTES)
    row = {"writetime": 1_790_845_200_000_000 + first, "expires_at": None, "deleted_at": None, "live": None}
    known: dict[str, Any] = {
        "token": pa.array(numbers // LINES if tokens is None else tokens, pa.int64()),
        "id": pa.array(numbers // LINES, pa.int32()),
        "line": pa.array(numbers % LINES, pa.int32()),
        "note": pa.array([f"note {n} {'x' * (n % 40)}" for n in numbers.tolist()]),
        "paid": pa.array([f"{n}.50" for n in numbers.tolist()]),
        "_row": pa.array([row] * count, schema.field("_row").type),
    }
    arrays = [known.get(field.name, pa.nulls(count, field.type)) for field in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    told: dict[str, Any] = {"hostname": "10.0.0.7", "processed_at_ms": 1, "schema_version": 1}
    return snapshot_messages(batch, NOTES, SERVER, "exact", **told)


def changes(*writes: Write | RangeDelete) -> Messages:
    """Messages of changes of NOTES that say what the changes say; ``v`` is the note."""
    rows = merged(change_rows(writes, NOTES), NOTES)
    is_row = rows.kind == ROW
    images = row_images_of(rows, NOTES, "error").take(pa.array(np.cumsum(is_row) - 1, mask=~is_row))
    visible = np.bincount(rows.cells.row, minlength=len(rows)) > 0
    told: dict[str, Any] = {"processed_at_ms": 1, "schema_version": 1}
    return change_messages(rows, images, visible, NOTES, SERVER, "exact", hostnames=rows.to_arrow()["node"], **told)


def publish(stream: FileStream, folder: str, *parts: Messages) -> None:
    """Publish a folder of parts."""
    written = []
    for number, messages in enumerate(parts):
        writer = stream.open_part(folder, f"part-{number:03}", 1)
        writer.add(messages)
        written.append(writer.finish())
    stream.publish(folder, written)


def published(stream: FileStream) -> dict[str, dict[str, Any]]:
    """All messages of a stream by event id, in order."""
    read = [message for folder in stream.folders() for message in stream.read(folder)]
    return {message["value"]["source"]["event_id"]: message for message in read}
