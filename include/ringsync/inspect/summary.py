"""Summaries of logs and SSTables, in counts that add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.schema import KINDS
from ringsync.schema.table import TableSchema

OUTCOMES = ("decoded", "system tables", "unknown tables", "unknown columns", "malformed", "damaged")
"""Outcomes of a record, in the words of the summary."""
_NAMES = ("rows", "static rows", "partition deletions", "range deletions")
_BYTES = ("partition_key", "clustering", "range_end")


@dataclass
class TableCounts:
    """Counts of what was written to a table.

    :ivar kinds: number of change rows by kind
    :ivar cells: number of cells, including tombstones
    :ivar bytes: size of keys, paths and values
    :ivar first: the least write time of a change row, µs; None: there are no change rows
    :ivar last: the greatest write time of a change row, µs; None: there are no change rows
    """

    kinds: Counter[int] = field(default_factory=Counter)
    cells: int = 0
    bytes: int = 0
    first: int | None = None
    last: int | None = None


@dataclass
class TableSummary:
    """Counts of what was written to each table, by table id."""

    tables: dict[str, TableCounts] = field(default_factory=dict)

    def add(self, rows: pa.RecordBatch) -> None:
        """Count change rows."""
        ids = rows["table_id"].dictionary_encode()
        for number, table_id in enumerate(ids.dictionary.to_pylist()):
            of_table = rows.filter(pc.equal(ids.indices, number))
            self._count(self.tables.setdefault(table_id.hex(), TableCounts()), of_table)

    def _count(self, counts: TableCounts, rows: pa.RecordBatch) -> None:
        for entry in pc.value_counts(rows["kind"]).to_pylist():
            counts.kinds[entry["values"]] += entry["counts"]
        cells = rows["cells"].flatten()
        counts.cells += len(cells)
        sized = [rows[name] for name in _BYTES] + [cells.field(name) for name in ("path", "value")]
        counts.bytes += sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in sized)
        limits = pc.min_max(rows["write_time"]).as_py()
        counts.first = limits["min"] if counts.first is None else min(counts.first, limits["min"])
        counts.last = limits["max"] if counts.last is None else max(counts.last, limits["max"])

    def text(self, known: Mapping[str, TableSchema]) -> list[str]:
        """Format the counts for people.

        :param known: tables by id
        :returns: lines
        """
        rows: Counter[int] = Counter()
        for counts in self.tables.values():
            rows += counts.kinds
        heading = ("table", *_NAMES, "cells", "bytes", "first write", "last write")
        table_rows = sorted(_table_row(known[table_id], counts) for table_id, counts in self.tables.items())
        aligned = _aligned([heading, *table_rows]) if table_rows else []
        return [f"{rows.total():,} change rows of {len(self.tables)} tables", *aligned]


@dataclass
class Summary(TableSummary):
    """Counts over all segments.

    :ivar records: number of records by outcome; they add up to all records
    :ivar lost_bytes: number of bytes that hold no readable record
    """

    segments: list[str] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)
    damages: int = 0
    lost_bytes: int = 0


@dataclass
class SSTableSummary(TableSummary):
    """Counts over all SSTables of a table.

    :ivar files: a line for each SSTable that is read
    :ivar left_out: number of SSTables and folders that are not read
    :ivar unreadable: number of errors that ended the reading of an SSTable
    :ivar losses: number of parts that cannot be read; ``lost_bytes``: their uncompressed bytes
    """

    files: list[str] = field(default_factory=list)
    left_out: int = 0
    unreadable: int = 0
    losses: int = 0
    lost_bytes: int = 0


def summary_text(summary: Summary, tables: Mapping[str, TableSchema]) -> str:
    """Format the summary of segments for people."""
    lines = [f"{len(summary.segments)} segments", *(f"  {line}" for line in summary.segments)]
    lines += ["", f"{summary.records.total():,} records"]
    lines += [f"  {summary.records[outcome]:>12,} {outcome}" for outcome in OUTCOMES]
    if summary.damages:
        lines.append(f"{summary.damages:,} damaged places, {summary.lost_bytes:,} bytes")
    return "\n".join([*lines, "", *summary.text(tables)]) + "\n"


def sstables_text(summary: SSTableSummary, tables: Mapping[str, TableSchema]) -> str:
    """Format the summary of SSTables for people."""
    lines = [f"{len(summary.files)} SSTables", *(f"  {line}" for line in summary.files)]
    for count, text in (
        (summary.left_out, "left out"),
        (summary.unreadable, "not read, or not to their end"),
        (summary.losses, f"damaged places, {summary.lost_bytes:,} uncompressed bytes"),
    ):
        if count:
            lines.append(f"{count:,} {text}")
    return "\n".join([*lines, "", *summary.text(tables)]) + "\n"


def _table_row(table: TableSchema, counts: TableCounts) -> tuple[str, ...]:
    numbers = [f"{counts.kinds[kind]:,}" for kind in range(len(KINDS))]
    return (
        table.full_name,
        *numbers,
        f"{counts.cells:,}",
        f"{counts.bytes:,}",
        _moment(counts.first),
        _moment(counts.last),
    )


def _moment(microseconds: int | None) -> str:
    """Format a timestamp as a date, or as a number if it is beyond the calendar."""
    if microseconds is None:
        return ""
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
    except OverflowError:
        return f"{microseconds} µs"
    return f"{moment:%Y-%m-%d %H:%M:%S}Z"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align columns: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
