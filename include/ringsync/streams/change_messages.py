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

from ringsync.avro.mapping import Mapping
from ringsync.avro.rows import encode_rows
from ringsync.changes.batch import ChangeRows, fixed16_array
from ringsync.changes.flat import FlatCells, by_column, together
from ringsync.changes.keys.canonical import canonical_cells
from ringsync.changes.keys.parts import clustering_parts, partition_parts
from ringsync.changes.schema import EXPIRING, NO_EXPIRY, RANGE_DELETION, ROW, STATIC, TOMBSTONE
from ringsync.compiled.arrow import Integers, Mask, array_of, integers, placed, valid_mask
from ringsync.cql.cells import Cells, raw_values
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
    changes: ChangeRows,
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

    :param changes: merged change rows of this table
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
    static, shown = changes.kind == STATIC, visible & changes.of_row
    images = _only_shown(after, table, shown, static)
    values = column_values(images, table, mapping)
    envelope = envelope_schema(table, server, mapping)
    now_s = processed_at_ms // 1000
    times = _row_times(changes, images, shown & ~static, now_s)
    cells, _ = cells_record(images, table, values, mapping, times, _deletions(changes, images, table, now_s))
    content = encode_content(envelope, row_record(table, values, pa.array(shown)), cells)
    count = len(changes)
    ops = pa.array(["d", "u", "c"]).take(array_of(np.where(shown, 1 + changes.liveness.there, 0)))
    ts_us, event_ids = array_of(changes.write_time), fixed16_array(changes.digest)
    source = {
        "version": pa.repeat(version, count),
        "hostname": hostnames,
        "file": raw_values(changes.file, pa.string()),
        "pos": array_of(changes.position),
        "ts_ms": milliseconds(ts_us),
        "snapshot": pa.repeat(False, count),
        "query": pa.nulls(count, pa.string()) if queries is None else queries,
        "ts_us": ts_us,
        "token": array_of(changes.token),
        "schema_version": pa.repeat(pa.scalar(schema_version, pa.int32()), count),
        "event_id": hexadecimal(event_ids),
        "late": pa.repeat(late, count),
        "table_id": pa.repeat(table.table_id, count),
    }
    head = {
        "op": ops,
        "source": struct(source),
        "ts_ms": pa.repeat(processed_at_ms, count),
        "range": _ranges(changes, table, mapping),
        "before": pa.nulls(count) if before is None else _before(*before, table, mapping, static),
    }
    keys = encode_rows(key_schema(table, server, mapping), _keys(changes, table, mapping))
    return Messages(keys, encode_head(envelope, head, content), event_ids)


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


def _row_times(changes: ChangeRows, images: pa.RecordBatch, shown: Mask, now_s: int) -> Columns:
    """Of the rows themselves: their liveness, as the image or else the change knows it; what the change deleted.

    Of a row that is there a liveness of the change that has ended says nothing: it lives by something else. Of one that
    is not it hides those that are older.
    """
    liveness, (live, expires_at) = changes.liveness, row_liveness(images)
    ends, known = liveness.expires_at, shown & valid_mask(live)
    told = liveness.there & np.where(shown, ~_has_ended(ends, now_s), _has_ended(ends, now_s + CLOCK_SKEW_S))
    own_ends = np.where(shown, ends, np.minimum(ends, now_s))
    expires = np.where(known, valid_mask(expires_at), told & (ends != NO_EXPIRY))
    return {
        "writetime": array_of(np.where(known, integers(live), liveness.timestamp), known | told),
        "expires_at": array_of(np.where(known, integers(expires_at), own_ends), expires),
        "deleted_at": array_of(changes.deletion.timestamp, changes.deletion.there),
    }


def _has_ended(expires_at: Integers, now_s: int) -> Mask:
    return np.asarray((expires_at != NO_EXPIRY) & (expires_at <= now_s))


def _deletions(changes: ChangeRows, images: pa.RecordBatch, table: TableSchema, now_s: int) -> dict[str, Deletions]:
    """Return what the changes deleted of each column that still is there, and what they wrote that has ended."""
    cells = changes.cells
    gone = together([cells.where(cells.kind == TOMBSTONE), _ended(cells, images, table, now_s)])
    gone = gone.take(np.argsort(gone.row, kind="stable"))
    columns, count = table.value_columns, len(changes)
    found = {}
    # The columns that are there are numbered as they come (changes.columns.columns_of).
    parts = (by_column(of_all, len(columns)) for of_all in (gone, changes.complex_deletions))
    for column, single, whole in zip(columns, *parts, strict=True):
        if not len(single.row) and not len(whole.row):
            continue
        nothing = single.take(np.zeros(0, np.intp))
        of_row, elements = (whole, single) if column.is_multicell else (single, nothing)
        at = placed(array_of(of_row.timestamp), of_row.row, count)
        found[column.name] = Deletions(at, elements.row, raw_values(elements.path), array_of(elements.timestamp))
    return found


def _ended(cells: FlatCells, images: pa.RecordBatch, table: TableSchema, now_s: int) -> FlatCells:
    """Tombstones of what changes wrote that has expired, if the images do not hold it: it hides what is older."""
    expired = cells.where((cells.kind == EXPIRING) & _has_ended(cells.local, now_s + CLOCK_SKEW_S))
    rows, place = np.unique(expired.row, return_inverse=True)
    place_of = np.zeros(len(images), np.int64)
    place_of[expired.row] = place
    return tombstones_of_ended(expired, images.take(pa.array(rows)), place_of, table)


def _keys(changes: ChangeRows, table: TableSchema, mapping: Mapping) -> pa.Array:
    parts = partition_parts(changes.partition_key, table)
    values, raw = _decoded(table, table.partition_key, parts, mapping)
    _, clustering = _clusterings(changes.clustering, table, mapping, changes.kind == ROW)
    return struct(key_record(table, table.key_columns, {**values, **clustering.values}, {**raw, **clustering.raw}))


@dataclass(frozen=True)
class _Clusterings:
    """The clusterings of some rows, null in the others."""

    values: Columns
    raw: Columns
    columns: pa.Array
    inclusive: pa.Array


def _ranges(changes: ChangeRows, table: TableSchema, mapping: Mapping) -> pa.Array:
    is_range = changes.kind == RANGE_DELETION
    if not is_range.any():
        return pa.nulls(len(changes))
    bounds = {}
    for name, cells in (("start", changes.clustering), ("end", changes.range_end)):
        there, found = _clusterings(cells, table, mapping, is_range)
        clustering = struct(key_record(table, table.clustering, found.values, found.raw))
        bounds[name] = struct({"clustering": clustering, "columns": found.columns, "inclusive": found.inclusive}, there)
    return struct(bounds, pa.array(is_range))


def _clusterings(every: Cells, table: TableSchema, mapping: Mapping, wanted: Mask) -> tuple[pa.Array, _Clusterings]:
    """Return clusterings or bounds of ranges in their canonical form, where they are wanted and there."""
    there = wanted & (every.lengths >= 0)
    rows = np.flatnonzero(there)
    cells = every.take(rows)
    counts, parts, ends = clustering_parts(cells, len(table.clustering))
    parts = [canonical_cells(part, column.type) for part, column in zip(parts, table.clustering, strict=True)]
    inclusive = (ends == cells.lengths) | (cells.buffer[cells.offsets + np.minimum(ends, cells.lengths - 1)] > 0)
    values, raw = _decoded(table, table.clustering, parts, mapping)
    values, raw = ({name: placed(array, rows, len(every)) for name, array in one.items()} for one in (values, raw))
    columns, belongs = (
        placed(pa.array(one), rows, len(every)) for one in (counts.astype(np.int32), inclusive.astype(np.bool_))
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
