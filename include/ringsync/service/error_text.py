"""Records that could not be decoded, and what a retry made of them, as lines of text."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from ringsync.changes.text.json import json_lines
from ringsync.state.processor_error import ErrorRow
from ringsync.steps.errors.records import KnownTables, Record, decode, with_source
from ringsync.steps.errors.retry import RetryReport

DUMPED = 4096
"""Bytes of a mutation that are shown."""

_MEANINGS = {
    "published": "published as late rows, and removed",
    "was_published": "had been published before, and are removed",
    "waits": "wait to be published by out_of_sequence",
    "of_dropped_tables": "of tables that were dropped: removed, there is nothing to publish",
    "not_followed": "have no rows of a table that is followed: removed",
    "still_undecodable": "still cannot be decoded, and stay",
    "damage": "damaged parts of segments, which have no bytes to decode: they stay",
}


def row_text(row: ErrorRow, waits: int) -> Iterator[str]:
    """Describe a row of ``processor_error``.

    :param waits: number of its records that wait to be published
    """
    yield f"node      {row.key.node}"
    yield f"file      {row.key.file}"
    yield f"position  {row.key.position}"
    yield f"length    {row.length:,} bytes"
    yield f"reason    {row.reason}"
    if row.table_id is not None:
        yield f"table id  {uuid.UUID(bytes=row.table_id)}"
    if row.is_overflow:
        yield f"records   {row.records:,}"
    if row.raw_object is not None:
        yield f"bytes in  {row.raw_object}"
    if waits:
        yield f"{waits:,} records of it were tried again, and wait to be published by out_of_sequence"


def damage_text(damage: Mapping[str, Any]) -> str:
    """Explain a damaged part of a segment."""
    copy = damage["copy"]
    place = f"{damage['node']} {damage['file']} {damage['position']}"
    look = (
        f"a copy of the segment is in {copy} of the object store: cdcservice inspect commitlog shows what can be read"
    )
    return (
        f"{place} is damage, and has no bytes that could be tried again; "
        f"{look if copy else 'no copy of the segment was kept'}. cdcservice verify --repair finds missing rows. "
        "Then: cdcservice errors discard"
    )


def record_text(record: Record, tables: KnownTables) -> Iterator[str]:
    """Describe a record: its bytes, and its change rows if it can be decoded now, as ``cdcservice inspect`` shows them.

    :param record: a record with bytes
    """
    raw = record.raw or b""
    yield from hex_dump(raw[:DUMPED])
    if len(raw) > DUMPED:
        yield f"… and {len(raw) - DUMPED:,} bytes more"
    decoded = decode([record], tables.versions)
    if decoded.undecoded:
        yield f"it still cannot be decoded: {decoded.undecoded[0]}"
        return
    by_id = {table_id: version.table for table_id, version in tables.versions.items()}
    lines, malformed = json_lines(with_source(decoded.rows, [record]), by_id)
    yield f"it can be decoded now, and has {len(lines):,} change rows: cdcservice errors retry"
    yield from lines
    for (table, column), count in malformed.items():
        yield f"{count:,} values of {table} {column} are no values of its type"


def hex_dump(data: bytes) -> Iterator[str]:
    """Write bytes as lines of 16: place, hexadecimal digits, ASCII."""
    for start in range(0, len(data), 16):
        line = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        yield f"{start:08x}  {line.hex(' '):47}  {text}"


def report_lines(report: RetryReport) -> Iterator[str]:
    """Describe the result of a retry."""
    for problem in report.problems:
        yield f"! {problem}"
    if report.earlier:
        yield f"{sum(report.earlier.values()):,} records of earlier retries are solved now, and removed"
    yield f"{report.read:,} records were read"
    for name, meaning in _MEANINGS.items():
        if count := report.outcomes[name]:
            yield f"  {count:,} {meaning}"
    for reason, count in report.undecodable.most_common():
        yield f"! {count:,} still cannot be decoded: {reason}"
    for damage in report.damage:
        yield f"! {damage_text(damage)}"
    if (more := report.outcomes["damage"] - len(report.damage)) > 0:
        yield f"! {more:,} more damaged parts"
    if report.waits_because:
        yield f"! {report.outcomes['waits']:,} records wait: {report.waits_because}"
