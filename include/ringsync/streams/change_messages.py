"""Messages of changes: what was written or deleted, and the row after it (docs/messages.md).

``after`` says what is there, ``cells`` says since when. What a change deleted is in ``cells`` only; so is what it wrote
with a TTL that has ended since, as deleted at its own time. So whoever keeps the greatest time of each cell, element
and deletion has the source's rows, in whatever order messages come.
An event id is the digest of the change row: the same from every replica, whenever it is published.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.avro.mapping import Mapping
from ringsync.avro.rows import encode_rows
from ringsync.changes.flat import FlatCells, by_column, flat, spread, together
from ringsync.changes.keys.canonical import canonical_cells
from ringsync.changes.keys.parts import clustering_parts, composite_parts, only
from ringsync.changes.schema import CELL, EXPIRING, RANGE_DELETION, ROW, STATIC, TOMBSTONE
from ringsync.compiled.arrow import Mask, integers
from ringsync.cql.cells import Cells, cells_of
from ringsync.cql.codec.decode import decode
from ringsync.images.after import tombstones_of_ended
from ringsync.images.schema import lake_names
from ringsync.schema.table import Column, TableSchema
from ringsync.streams.message_cells import (
    Deletions,
    cells_record,
    column_values,
    key_record,
    mapped,
    raw_of,
    row_liveness,
    struct,
)
from ringsync.streams.messages import (
    Messages,
    encode_content,
    encode_head,
    envelope_schema,
    hexadecimal,
    key_schema,
    milliseconds,
    row_record,
)

Columns = dict[str, pa.Array]
"""By CQL name."""

CLOCK_SKEW_S = 60
"""So far ahead of ours a node's clock may be: what it does not show any more may seem to live here."""


def change_messages(
    changes: pa.RecordBatch,
    after: pa.RecordBatch,
    visible: Mask,
    table: TableSchema,
    server: str,
    mapping: Mapping,
    *,
    hostnames: pa.Array,
    processed_at_ms: int,
    schema_version: int,
    version: str,
    late: bool = False,
    queries: pa.Array | None = None,
    before: tuple[pa.RecordBatch, Mask] | None = None,
) -> Messages:
    """Make one message for each change row, in their order.

    ``op`` is ``d`` for deletions of partitions and ranges and where no row is left, ``c`` where the change has
    written the row's own liveness, as INSERT does, else ``u``.

    :param changes: merged change rows (``CHANGE_ROWS``) of this table
    :param after: a row image for each: the row after the change; anything where ``visible`` does not say so
    :param visible: whether the row is there after the change; where images say only what the change says: whether
        that is more than that the row was deleted. Not looked at for deletions of partitions and ranges
    :param hostnames: string by row: the node that it was read from, as ``source.hostname``
    :param processed_at_ms: ms since the epoch
    :param schema_version: version of the table's schemas
    :param version: ringsync's version
    :param late: whether the changes came after their buckets had closed
    :param queries: ``source.query`` by row; None: null
    :param before: by row the table's columns, by their names in the lake, before the change, and whether there was a
        row, or of a change of static cells a static cell; None: unknown
    :raises AvroMappingError: a value that mapping ``classic`` cannot express; names the column
    """
    kinds = integers(changes["kind"])
    shown = visible & ((kinds == ROW) | (kinds == STATIC))
    images = _only_shown(after, table, shown, kinds == STATIC)
    values = column_values(images, table, mapping)
    envelope = envelope_schema(table, server, mapping)
    now_s = processed_at_ms // 1000
    times = _row_times(changes, images, shown & (kinds == ROW), now_s)
    cells, _ = cells_record(images, table, values, mapping, times, _deletions(changes, images, table, now_s))
    content = encode_content(envelope, row_record(table, values, pa.array(shown)), cells)
    count = len(changes)
    has_liveness = changes["liveness"].is_valid().to_numpy(zero_copy_only=False)
    ops = pa.array(["d", "u", "c"]).take(pa.array(np.where(shown, 1 + has_liveness, 0)))
    ts_us = changes["write_time"]
    source = {
        "version": pa.repeat(version, count),
        "hostname": hostnames,
        "file": changes["file"],
        "pos": changes["position"],
        "ts_ms": milliseconds(ts_us),
        "snapshot": pa.repeat(False, count),
        "query": pa.nulls(count, pa.string()) if queries is None else queries,
        "ts_us": ts_us,
        "token": changes["token"],
        "schema_version": pa.repeat(pa.scalar(schema_version, pa.int32()), count),
        "event_id": hexadecimal(changes["digest"]),
        "late": pa.repeat(late, count),
        "table_id": pa.repeat(table.table_id, count),
    }
    head = {
        "op": ops,
        "source": struct(source),
        "ts_ms": pa.repeat(processed_at_ms, count),
        "range": _ranges(changes, table, mapping, kinds == RANGE_DELETION),
        "before": pa.nulls(count) if before is None else _before(*before, table, mapping, kinds == STATIC),
    }
    keys = encode_rows(key_schema(table, server, mapping), _keys(changes, table, mapping, kinds == ROW))
    return Messages(keys, encode_head(envelope, head, content), changes["digest"])


def _only_shown(images: pa.RecordBatch, table: TableSchema, shown: Mask, static: Mask) -> pa.RecordBatch:
    """Return row images without rows that are not there, and without what is not static in static rows."""
    if shown.all() and not static.any():
        return images
    names = lake_names(table)
    hidden = {names[c.name]: ~shown | static if c.kind in ("clustering", "regular") else ~shown for c in table.columns}
    x_type = images.schema.field("_x").type
    x = dict(zip([field.name for field in x_type], images["_x"].flatten(), strict=True))
    parts = [_without(x[field.name], hidden[field.name]) for field in x_type]
    replaced = {
        **{name: _without(images[name], rows) for name, rows in hidden.items()},
        "_x": pa.StructArray.from_arrays(parts, fields=list(x_type)),
        **{name: _without(images[name], ~shown) for name in ("_row", "_merge")},
    }
    arrays = [replaced.get(name, images[name]) for name in images.schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=images.schema)


def _before(rows: pa.RecordBatch, there: Mask, table: TableSchema, mapping: Mapping, static: Mask) -> pa.Array:
    """Return the field ``before``; of static cells without what is not static."""
    values = column_values(rows, table, mapping)
    shown = {c.name: _without(values[c.name], static) for c in table.columns if c.kind in ("clustering", "regular")}
    return row_record(table, {**values, **shown}, pa.array(there))


def _without(array: pa.Array, hidden: Mask) -> pa.Array:
    """Return the array, null where it is hidden."""
    if not hidden.any():
        return array
    return array.take(pa.array(np.arange(len(array)), mask=hidden))


def _row_times(changes: pa.RecordBatch, images: pa.RecordBatch, shown: Mask, now_s: int) -> Columns:
    """Of the rows themselves: their liveness, as the image or else the change knows it; what the change deleted.

    Of a row that is there a liveness of the change that has ended says nothing: it lives by something else. Of one that
    is not it hides those that are older.
    """
    is_shown, nothing = pa.array(shown), pa.scalar(None, pa.int64())
    live, expires_at = row_liveness(images)
    written, ends = (pc.struct_field(changes["liveness"], name) for name in ("timestamp", "expires_at"))
    told = pa.array(np.where(shown, ~_has_ended(ends, now_s), _has_ended(ends, now_s + CLOCK_SKEW_S)))
    writes = pc.if_else(told, written, nothing)
    ends = pc.if_else(is_shown, ends, pc.min_element_wise(ends, pa.scalar(now_s, pa.int64()), skip_nulls=False))
    known = pc.and_(is_shown, live.is_valid())
    return {
        "writetime": pc.if_else(known, live, writes),
        "expires_at": pc.if_else(known, expires_at, pc.if_else(writes.is_valid(), ends, nothing)),
        "deleted_at": pc.struct_field(changes["deletion"], "timestamp"),
    }


def _has_ended(expires_at: pa.Array, now_s: int) -> Mask:
    ends = pc.fill_null(pc.less_equal(expires_at, now_s), False)
    return np.asarray(ends.to_numpy(zero_copy_only=False), np.bool_)


def _deletions(changes: pa.RecordBatch, images: pa.RecordBatch, table: TableSchema, now_s: int) -> dict[str, Deletions]:
    """Return what the changes deleted of each column that still is there, and what they wrote that has ended."""
    every = flat(changes["cells"])
    gone = together([every.where(every.integers("kind") == TOMBSTONE), _ended(every, images, table, now_s)], CELL)
    gone = gone.take(np.argsort(gone.row, kind="stable"))
    whole = flat(changes["complex_deletions"])
    columns = table.value_columns
    found = {}
    # The columns that are there are numbered as they come (changes.tables.columns_of).
    parts = (by_column(one, len(columns)) for one in (gone, whole))
    for column, own, of_all in zip(columns, *parts, strict=True):
        if not len(own.row) and not len(of_all.row):
            continue
        times = own.cells.field("timestamp")
        if column.is_multicell:
            at = spread(of_all.cells.field("timestamp"), of_all.row, len(changes))
            found[column.name] = Deletions(at, own.row, own.cells.field("path"), times)
        else:
            at = spread(times, own.row, len(changes))
            found[column.name] = Deletions(at, own.row[:0], pa.nulls(0, pa.binary()), pa.nulls(0, pa.int64()))
    return found


def _ended(cells: FlatCells, images: pa.RecordBatch, table: TableSchema, now_s: int) -> FlatCells:
    """Tombstones of what changes wrote that has expired, if the images do not hold it: it hides what is older."""
    ends = _has_ended(cells.cells.field("local_deletion_time"), now_s + CLOCK_SKEW_S)
    expired = cells.where((cells.integers("kind") == EXPIRING) & ends)
    rows, place = np.unique(expired.row, return_inverse=True)
    place_of = np.zeros(len(images), np.int64)
    place_of[expired.row] = place
    return tombstones_of_ended(expired, images.take(pa.array(rows)), place_of, table)


def _keys(changes: pa.RecordBatch, table: TableSchema, mapping: Mapping, is_row: Mask) -> pa.Array:
    cells = cells_of(changes["partition_key"])
    parts = [cells] if len(table.partition_key) == 1 else composite_parts(cells, len(table.partition_key))
    values, raw = _decoded(table, table.partition_key, parts, mapping)
    _, clustering = _clusterings(changes["clustering"], table, mapping, is_row)
    return struct(key_record(table, table.key_columns, {**values, **clustering.values}, {**raw, **clustering.raw}))


@dataclass(frozen=True)
class _Clusterings:
    """The clusterings of some rows, null in the others."""

    values: Columns
    raw: Columns
    columns: pa.Array
    inclusive: pa.Array


def _ranges(changes: pa.RecordBatch, table: TableSchema, mapping: Mapping, is_range: Mask) -> pa.Array:
    if not is_range.any():
        return pa.nulls(len(changes))
    bounds = {}
    for name, encoded in (("start", changes["clustering"]), ("end", changes["range_end"])):
        there, found = _clusterings(encoded, table, mapping, is_range)
        clustering = struct(key_record(table, table.clustering, found.values, found.raw))
        bounds[name] = struct({"clustering": clustering, "columns": found.columns, "inclusive": found.inclusive}, there)
    return struct(bounds, pa.array(is_range))


def _clusterings(
    encoded: pa.Array, table: TableSchema, mapping: Mapping, wanted: Mask
) -> tuple[pa.Array, _Clusterings]:
    """Return clusterings or bounds of ranges in their canonical form, where they are wanted and there."""
    every = cells_of(encoded)
    there = wanted & (every.lengths >= 0)
    rows = np.flatnonzero(there)
    cells = only(every, rows)
    counts, parts, ends = clustering_parts(cells, len(table.clustering))
    parts = [canonical_cells(part, column.type) for part, column in zip(parts, table.clustering, strict=True)]
    inclusive = (ends == cells.lengths) | (cells.buffer[cells.offsets + np.minimum(ends, cells.lengths - 1)] > 0)
    values, raw = _decoded(table, table.clustering, parts, mapping)
    values, raw = ({name: spread(array, rows, len(encoded)) for name, array in one.items()} for one in (values, raw))
    columns, belongs = (
        spread(pa.array(one), rows, len(encoded)) for one in (counts.astype(np.int32), inclusive.astype(np.bool_))
    )
    return pa.array(there), _Clusterings(values, raw, columns, belongs)


def _decoded(
    table: TableSchema, columns: tuple[Column, ...], parts: list[Cells], mapping: Mapping
) -> tuple[Columns, Columns]:
    """Return key columns for Avro, and their bytes where there is no value for them."""
    values, raw = {}, {}
    for column, cells in zip(columns, parts, strict=True):
        found = decode(column.type, cells)
        values[column.name] = mapped(found.values, table, column, mapping)
        raw[column.name] = raw_of(found, cells)
    return values, raw
