"""Committed commit logs as change rows per table, and the rows that the plain-Python model shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import logged_tables
from ringsync.cql.codec.encode import encode
from ringsync.formats.commitlog.reader import read_log
from ringsync.images.live import live_rows
from ringsync.images.schema import lake_names
from ringsync.images.to_changes import has_clustering, image_keys
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema
from tests.commitlog_model import cql_schema, replay, segment
from tests.commitlog_model.types import Table
from tests.commitlog_model.values import decode
from tests.commitlogs.fixtures import fixture_named, unpacked

Cells = dict[str, tuple[Any, ...]]
"""A row: JSON value, bytes, writetime and expiry, by column."""

GROWN = ("u", "fu", "ft", "p", "su", "mu")
"""Columns with a type that gets a field while the log is written: earlier bytes lack this field."""


@dataclass(frozen=True)
class LoggedTable:
    """A table and its change rows, for ringsync and for the model."""

    table: TableSchema
    rows: pa.RecordBatch
    model: Table
    state: replay.State

    def expected(self, now_s: int) -> list[str]:
        """Return the rows that a SELECT shows, in a form that can be compared."""
        shown = [
            {name: (cell.value, cell.raw, cell.writetime, cell.expires_at) for name, cell in row.items()}
            for row in replay.rows(self.state, self.model, now_s)
        ]
        return comparable(self.model, shown)

    def shown(self, images: pa.RecordBatch, now_s: int) -> list[str]:
        """Return the live rows of images, in the same form."""
        return comparable(self.model, [self._row(row) for row in selected(images, self.table, now_s)])

    def _row(self, row: dict[str, Any]) -> Cells:
        return {
            name: (self._value(name, raw), raw, writetime, expires_at)
            for name, (raw, writetime, expires_at) in row.items()
        }

    def _value(self, name: str, raw: bytes) -> Any:
        is_counter = self.model.types[name].kind == "counter"
        return int.from_bytes(raw, "big", signed=True) if is_counter else decode(self.model.types[name], raw)


def logged(name: str) -> list[LoggedTable]:
    """Return the tables of a fixture that have changes."""
    fixture = fixture_named(name)
    text = fixture.schema + fixture.dropped
    schema, models = parse_schema(text, "schema.cql"), cql_schema.parse_schema(text)
    tables = logged_tables(schema.tables)
    rows, changes = [], []
    with TemporaryDirectory() as folder:
        for path in unpacked(fixture, Path(folder)):
            rows += [batch.rows for batch in read_log(path.read_bytes(), path.name, tables).batches]
            changes += segment.read_segment(path, models).changes
    together, state = pa.concat_batches(rows), replay.replay(changes)
    found = []
    for table in schema.tables:
        of_table = pa.scalar(bytes.fromhex(table.table_id), pa.binary(16))
        own = together.filter(pc.equal(together["table_id"], of_table))
        if own.num_rows:
            model = next(one for one in models.values() if one.id.replace("-", "") == table.table_id)
            found.append(LoggedTable(table, own, model, state))
    return found


def selected(images: pa.RecordBatch, table: TableSchema, now_s: int) -> list[dict[str, tuple[Any, Any, Any]]]:
    """Return what the replica's view shows, without Spark: (bytes, writetime, expiry) by column."""
    live = live_rows(images, table, now_s)
    keys = image_keys(images, table)[0].to_pylist()
    alive, static = (live[mark].to_pylist() for mark in ("#alive", "#static"))
    partitions = {key for key, shown in zip(keys, alive, strict=True) if shown}
    places = [place for place, shown in enumerate(alive) if shown]
    for place in np.argsort(has_clustering(images, table)):
        if static[place] and not alive[place] and keys[place] not in partitions:
            partitions.add(keys[place])
            places.append(int(place))
    names = lake_names(table)
    columns = {}
    for column in table.columns:
        cells, name = live["_cells"].field(names[column.name]), names[column.name]
        raw = pc.coalesce(encode(column.type, live[name]), pc.struct_field(live["_cells"], [name, "raw"]))
        times = [None if column.is_key else cells.field(part).to_pylist() for part in ("writetime", "expires_at")]
        columns[column.name] = (raw.to_pylist(), *times)
    return [
        {
            name: (raw[place], writetimes and writetimes[place], expiries and expiries[place])
            for name, (raw, writetimes, expiries) in columns.items()
            if raw[place] is not None and (alive[place] or table.column(name).kind != "clustering")
        }
        for place in places
    ]


def comparable(model: Table, rows: list[Cells]) -> list[str]:
    """Write each row as a text, and sort them."""
    return sorted(
        repr(
            [
                (name, repr(value), None if name in GROWN else raw, writetime, expires_at)
                for name, (value, raw, writetime, expires_at) in sorted(row.items())
            ]
        )
        for row in rows
    )
