"""Messages of changes: what was written or deleted, and the row after it (docs/messages.md).

``after`` holds the values that are there, ``cells`` their times. Deletions are in ``cells`` only. So are writes whose
TTL has ended since: they are shown as deleted at their own time. A reader that keeps the greatest time of each cell,
element and deletion therefore has the source's rows, in whatever order messages come. An event id is the digest of the
change row: it is the same from every replica, whenever the change is published.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

import ringsync
from ringsync.avro.mapping import Mapping
from ringsync.avro.rows import encode_rows
from ringsync.changes.batch import ChangeRows, fixed16_array
from ringsync.changes.flat import FlatCells, by_column, together
from ringsync.changes.keys.canonical import canonical_cells
from ringsync.changes.keys.parts import are_inclusive, clustering_parts, partition_parts
from ringsync.changes.schema import EXPIRING, NO_EXPIRY, RANGE_DELETION, ROW, STATIC, TOMBSTONE
from ringsync.compiled.arrow import Integers, Mask, array_of, integers, only, placed, structs_of, valid_mask
from ringsync.cql.cells import Cells, raw_values
from ringsync.cql.codec.decode import decode
from ringsync.images.after import tombstones_of_ended
from ringsync.images.schema import lake_names
from ringsync.schema.table import Column, TableSchema
from ringsync.streams import message_cells, messages

Columns = dict[str, pa.Array]
"""By CQL name."""

CLOCK_SKEW_S = 60
"""A node's clock may be so far ahead of ours: cells that have expired there may seem to live here."""

_OF_ROWS = ("clustering", "regular")
"""Kinds of columns that static rows do not have."""


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
    late: bool = False,
    queries: pa.Array | None = None,
    before: tuple[pa.RecordBatch, Mask] | None = None,
) -> messages.Messages:
    """Make one message for each change row, in their order.

    ``op`` is ``d`` for deletions of partitions and ranges and if no row is left, ``c`` if the change has written the
    row's own liveness, as INSERT does, else ``u``.

    :param changes: merged change rows of this table
    :param after: image of each row after the change; any image if the row is not ``visible``
    :param visible: whether the row is there after the change; if images hold only what the change says: whether this is
        more than the row's deletion. Not used for deletions of partitions and ranges
    :param hostnames: node that each row was read from, for ``source.hostname``
    :param processed_at_ms: time of processing, ms since the epoch
    :param schema_version: version of the table's schemas
    :param late: whether the changes came after their buckets had closed
    :param queries: ``source.query`` of each row; None: null
    :param before: the table's columns before each change, by their names in the lake, and whether there was a row (for
        a change of static cells: a static cell); None: unknown
    :raises AvroMappingError: mapping ``classic`` cannot express a value; the message names the column
    """
    static, shown = changes.kind == STATIC, visible & changes.of_row
    images = _only_shown(after, table, shown, static)
    values = message_cells.column_values(images, table, mapping)
    envelope = messages.envelope_schema(table, server, mapping)
    now_s = processed_at_ms // 1000
    times = _row_times(changes, images, shown & ~static, now_s)
    cells, _ = message_cells.cells_record(
        images, table, values, mapping, times, _deletions(changes, images, table, now_s)
    )
    content = messages.encode_content(envelope, messages.row_record(table, values, shown), cells)
    count = len(changes)
    ops = pa.array(["d", "u", "c"]).take(array_of(np.where(shown, 1 + changes.liveness.there, 0)))
    ts_us, event_ids = array_of(changes.write_time), fixed16_array(changes.digest)
    source = {
        "version": pa.repeat(ringsync.__version__, count),
        "hostname": hostnames,
        "file": raw_values(changes.file, pa.string()),
        "pos": array_of(changes.position),
        "ts_ms": messages.milliseconds(ts_us),
        "snapshot": pa.repeat(False, count),
        "query": pa.nulls(count, pa.string()) if queries is None else queries,
        "ts_us": ts_us,
        "token": array_of(changes.token),
        "schema_version": pa.repeat(pa.scalar(schema_version, pa.int32()), count),
        "event_id": messages.hexadecimal(event_ids),
        "late": pa.repeat(late, count),
        "table_id": pa.repeat(table.table_id, count),
    }
    head = {
        "op": ops,
        "source": message_cells.struct(source),
        "ts_ms": pa.repeat(processed_at_ms, count),
        "range": _ranges(changes, table, mapping),
        "before": pa.nulls(count) if before is None else _before(*before, table, mapping, static),
    }
    _, clusterings, _ = clustering_parts(changes.clustering.without(changes.kind != ROW), len(table.clustering))
    parts = [*partition_parts(changes.partition_key, table), *clusterings]
    key_records = _key_record(table, table.key_columns, parts, mapping)
    keys = encode_rows(messages.key_schema(table, server, mapping), key_records)
    return messages.Messages(keys, messages.encode_head(envelope, head, content), event_ids)


def _only_shown(images: pa.RecordBatch, table: TableSchema, shown: Mask, static: Mask) -> pa.RecordBatch:
    """Clear the images of rows that are not shown, and columns in static rows that are not static."""
    if shown.all() and not static.any():
        return images
    names = lake_names(table)
    masks = {names[c.name]: shown & ~static if c.kind in _OF_ROWS else shown for c in table.columns}
    x_type = images.schema.field("_x").type
    x = [only(part, masks[field.name]) for field, part in zip(x_type, images["_x"].flatten(), strict=True)]
    columns = dict(zip(images.schema.names, images.columns, strict=True))
    columns |= {name: only(columns[name], mask) for name, mask in masks.items()}
    columns |= {name: only(columns[name], shown) for name in ("_row", "_merge")}
    columns["_x"] = structs_of(x_type, x)
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=images.schema)


def _before(rows: pa.RecordBatch, there: Mask, table: TableSchema, mapping: Mapping, static: Mask) -> pa.Array:
    """Return the field ``before``; static rows have only static columns."""
    values = message_cells.column_values(rows, table, mapping)
    shown = {c.name: only(values[c.name], ~static) for c in table.columns if c.kind in _OF_ROWS}
    return messages.row_record(table, {**values, **shown}, there)


def _row_times(changes: ChangeRows, images: pa.RecordBatch, shown: Mask, now_s: int) -> Columns:
    """Return the times of the rows themselves: their liveness, from the image or else the change, and their deletion.

    A row that is there does not live by an expired liveness of the change, so its message leaves that out. If the row
    is not there, the expired liveness hides older ones.
    """
    liveness, (live, expires_at) = changes.liveness, message_cells.row_liveness(images)
    ends, known = liveness.expires_at, shown & valid_mask(live)
    told = liveness.there & np.where(shown, ~_has_ended(ends, now_s), _has_ended(ends, now_s + CLOCK_SKEW_S))
    change_ends = np.where(shown, ends, np.minimum(ends, now_s))
    expires = np.where(known, valid_mask(expires_at), told & (ends != NO_EXPIRY))
    return {
        "writetime": array_of(np.where(known, integers(live), liveness.timestamp), known | told),
        "expires_at": array_of(np.where(known, integers(expires_at), change_ends), expires),
        "deleted_at": array_of(changes.deletion.timestamp, changes.deletion.there),
    }


def _has_ended(expires_at: Integers, now_s: int) -> Mask:
    return np.asarray((expires_at != NO_EXPIRY) & (expires_at <= now_s))


def _deletions(
    changes: ChangeRows, images: pa.RecordBatch, table: TableSchema, now_s: int
) -> dict[str, message_cells.Deletions]:
    """Return the cells of each present column that the changes deleted, or that have expired."""
    cells = changes.cells
    gone = together([cells.where(cells.kind == TOMBSTONE), _ended(cells, images, table, now_s)])
    gone = gone.take(np.argsort(gone.row, kind="stable"))
    columns, count = table.value_columns, len(changes)
    deletions = {}
    # Present columns have the first numbers, in their order (changes.columns.columns_of).
    parts = (by_column(of_all, len(columns)) for of_all in (gone, changes.complex_deletions))
    for column, single, whole in zip(columns, *parts, strict=True):
        if not len(single.row) and not len(whole.row):
            continue
        of_row, elements = (whole, single) if column.is_multicell else (single, together([]))
        deletions[column.name] = message_cells.Deletions(
            placed(array_of(of_row.timestamp), of_row.row, count), elements
        )
    return deletions


def _ended(cells: FlatCells, images: pa.RecordBatch, table: TableSchema, now_s: int) -> FlatCells:
    """Make tombstones of expired writes that the images do not hold, because these writes hide older ones."""
    expired = cells.where((cells.kind == EXPIRING) & (cells.local <= now_s + CLOCK_SKEW_S))
    rows, place = np.unique(expired.row, return_inverse=True)
    place_of = np.zeros(len(images), np.int64)
    place_of[expired.row] = place
    return tombstones_of_ended(expired, images.take(pa.array(rows)), place_of, table)


def _key_record(
    table: TableSchema, columns: tuple[Column, ...], parts: list[Cells], mapping: Mapping
) -> pa.StructArray:
    """Build the record of key columns from their serialised values; clustering columns become canonical."""
    values, raw = {}, {}
    for column, cells in zip(columns, parts, strict=True):
        cells = canonical_cells(cells, column.type) if column.kind == "clustering" else cells
        decoded = decode(column.type, cells)
        values[column.name] = message_cells.mapped(decoded.values, table, column, mapping)
        raw[column.name] = decoded.raw(cells)
    return message_cells.key_record(table, columns, values, raw)


def _ranges(changes: ChangeRows, table: TableSchema, mapping: Mapping) -> pa.Array:
    is_range = changes.kind == RANGE_DELETION
    if not is_range.any():
        return pa.nulls(len(changes))
    bounds = {}
    for name, cells in (("start", changes.clustering), ("end", changes.range_end)):
        cells = cells.without(~is_range)
        counts, parts, sizes = clustering_parts(cells, len(table.clustering))
        fields = {
            "clustering": _key_record(table, table.clustering, parts, mapping),
            "columns": array_of(counts.astype(np.int32)),
            "inclusive": pa.array(are_inclusive(cells, sizes)),
        }
        bounds[name] = message_cells.struct(fields, cells.lengths >= 0)
    return message_cells.struct(bounds, is_range)
