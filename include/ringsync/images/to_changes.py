"""The conversion of row images to change rows: the rows, their keys and their content."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows, Deletion, Liveness
from ringsync.changes.columns import columns_of
from ringsync.changes.flat import FlatCells, FlatDeletions, Parts, together
from ringsync.changes.schema import NEVER, NO_EXPIRY, NO_TTL, PARTITION_DELETION, ROW, STATIC, UNKNOWN_TTL
from ringsync.compiled.arrow import Integers, Mask, Places, array_of, filled, integers, valid_mask
from ringsync.cql.cells import cells_of, cells_of_values, no_cells
from ringsync.cql.codec.encode import partition_key_bytes
from ringsync.images.merge_column import tombstones_of
from ringsync.images.schema import NO_LIVENESS, lake_names, row_image_schema
from ringsync.images.to_cells import serialised, value_cells
from ringsync.schema.table import TableSchema

MICROS = 1_000_000
_NONE = -1


@dataclass(frozen=True)
class _Rows:
    """The change rows that images become.

    :ivar image: index of each change row's image
    :ivar kind: kind of each change row
    :ivar of_row: index of each image's ROW, -1: none; ``of_static``: index of its STATIC
    """

    image: Places
    kind: Integers
    of_row: Places
    of_static: Places


def change_rows_of(
    images: pa.RecordBatch, table: TableSchema, *, unknown_at_us: int | None = None, one_each: bool = False
) -> ChangeRows:
    """Convert row images to equivalent change rows, which can be merged with later changes.

    The static cells of a partition become one static row, its known deletion a partition deletion. Empty rows and
    counters are left out. List entries of unknown identity get placeholders as paths, in the order of the list.
    Expiring cells have TTL 0.

    :param images: row images of the table, one per key
    :param unknown_at_us: latest possible time of writes of unknown time (a row's own liveness, elements of collections
        in Cassandra 4), µs; they get it as timestamp, and UNKNOWN_TTL as mark. None: they are left out
    :param one_each: make one change row of each image, with its static cells, also if there is nothing in it
    :returns: change rows; ``position`` is the image's index, ``digest`` and ``schema_version`` are zero
    :raises ValueError: an image has no partition key
    """
    images = images.select(row_image_schema(table).names).cast(row_image_schema(table))
    keys, clusterings = image_keys(images, table)
    rows = _one_each(images, table) if one_each else _rows(images, table, keys)
    tombstones, deletions = tombstones_of(images["_merge"], table)
    columns = [column for column in columns_of(table) if not column.dropped and not column.is_counter]
    values = [value_cells(images, table, column, unknown_at_us) for column in columns]
    cells, deletions = _placed(together([*values, tombstones]), rows, table), _placed(deletions, rows, table)
    count, image = len(rows.image), rows.image
    clustering = cells_of(clusterings).take(image).without(rows.kind != ROW)
    liveness, deletion = _liveness(images, rows, unknown_at_us), _deletion(images, rows)
    table_id = np.frombuffer(bytes.fromhex(table.table_id), np.int64)
    converted = ChangeRows(
        np.broadcast_to(table_id, (count, 2)),
        np.zeros(count, np.int64),
        integers(images["token"])[image],
        cells_of(keys).take(image),
        rows.kind,
        clustering,
        no_cells(count),
        _write_times(cells, deletions, liveness, deletion),
        liveness,
        deletion,
        cells,
        deletions,
        np.zeros((count, 2), np.uint64),
        cells_of_values([b""]).take(np.zeros(count, np.int64)),
        image,
    )
    if one_each:
        return converted
    has_content = liveness.there | deletion.there
    for parts in (cells, deletions):
        has_content[parts.row] = True
    return converted.where(has_content)


def image_keys(images: pa.RecordBatch, table: TableSchema) -> tuple[pa.Array, pa.Array]:
    """Return partition keys and clusterings of row images in the form of change rows. No clustering: all nulls."""
    names = lake_names(table)
    key, clustering = (
        [serialised(images, names[column.name], column.type) for column in columns]
        for columns in (table.partition_key, table.clustering)
    )
    return partition_key_bytes(key), _clusterings(clustering, len(images))


def _clusterings(columns: list[pa.Array], rows: int) -> pa.Array:
    """Write the number of columns, and each value with its length (:mod:`ringsync.changes.schema`)."""
    parts = [pa.array([len(columns).to_bytes(4, "little")]).take(array_of(np.zeros(rows, np.int64)))]
    for column in columns:
        lengths = pc.fill_null(pc.binary_length(column), -1).cast(pa.int32())
        fixed = pa.Array.from_buffers(pa.binary(4), rows, [None, lengths.buffers()[1]], offset=lengths.offset)
        parts += [fixed.cast(pa.binary()), pc.fill_null(column, b"")]
    return pc.binary_join_element_wise(*parts, b"")


def has_clustering(images: pa.RecordBatch, table: TableSchema) -> Mask:
    """Tell which images are of a row; all others hold static cells only."""
    if not table.clustering:
        return np.ones(len(images), np.bool_)
    name = lake_names(table)[table.clustering[0].name]
    return valid_mask(images[name]) | valid_mask(pc.struct_field(images["_x"], [name, "raw"]))


def _rows(images: pa.RecordBatch, table: TableSchema, keys: pa.Array) -> _Rows:
    """List the change rows; static cells come from the image without clustering, else from the partition's first."""
    of_row = has_clustering(images, table)
    rows, others = np.flatnonzero(of_row), np.flatnonzero(~of_row)
    statics = np.zeros(0, np.int64)
    if table.of_kind("static"):
        preferred = np.concatenate([others, rows])
        partition = integers(pc.dictionary_encode(keys).indices)[preferred]
        statics = preferred[np.unique(partition, return_index=True)[1]]
    deleted = others[valid_mask(pc.struct_field(images["_row"], "deleted_at"))[others]]
    image = np.concatenate([deleted, statics, rows])
    kind = np.repeat([PARTITION_DELETION, STATIC, ROW], [len(deleted), len(statics), len(rows)])
    order = np.argsort(image, kind="stable")
    image, kind = image[order], kind[order]
    of = {}
    for wanted in (ROW, STATIC):
        of[wanted] = np.full(len(images), _NONE)
        of[wanted][image[kind == wanted]] = np.flatnonzero(kind == wanted)
    return _Rows(image, kind, of[ROW], of[STATIC])


def _one_each(images: pa.RecordBatch, table: TableSchema) -> _Rows:
    every, is_row = np.arange(len(images)), has_clustering(images, table)
    return _Rows(every, np.where(is_row, ROW, STATIC), np.where(is_row, every, _NONE), every)


def _placed(parts: Parts, rows: _Rows, table: TableSchema) -> Parts:
    """Assign cells or complex deletions of images to change rows, in the order of these."""
    is_static = np.array([column.is_static for column in columns_of(table)] + [False])[parts.column]
    row = np.where(is_static, rows.of_static[parts.row], rows.of_row[parts.row])
    there = np.flatnonzero(row != _NONE)
    order = there[np.argsort(row[there], kind="stable")]
    return replace(parts.take(order), row=row[order])


def _liveness(images: pa.RecordBatch, rows: _Rows, unknown_at_us: int | None) -> Liveness:
    """Return the liveness of rows; an unknown one that no read has refuted gets the latest possible time."""
    image, is_row = rows.image, rows.kind == ROW
    live = pc.struct_field(images["_row"], "live")
    expires_at, unseen_at = (pc.struct_field(images["_merge"], name) for name in ("live_expires_at", "unseen_at"))
    known = is_row & valid_mask(live)[image] & (integers(live)[image] != NO_LIVENESS)
    unknown = is_row & ~valid_mask(live)[image] & ~valid_mask(unseen_at)[image] & (unknown_at_us is not None)
    return Liveness(
        np.where(known, integers(live)[image], np.where(unknown, unknown_at_us or 0, NEVER)),
        np.where(unknown, UNKNOWN_TTL, NO_TTL),
        np.where(known, filled(expires_at, NO_EXPIRY)[image], NO_EXPIRY),
    )


def _deletion(images: pa.RecordBatch, rows: _Rows) -> Deletion:
    """Return the deletions of rows and partitions; a static row has its partition's.

    An unknown local time is taken from the deletion's timestamp.
    """
    image = rows.image
    deleted_at = pc.struct_field(images["_row"], "deleted_at")
    local = pc.struct_field(images["_merge"], "deletion_local")
    at = integers(deleted_at)[image]
    there = ((rows.kind != STATIC) | (rows.of_row[image] == _NONE)) & valid_mask(deleted_at)[image]
    locals_ = np.where(valid_mask(local)[image], integers(local)[image], np.maximum(at // MICROS, 0))
    return Deletion(np.where(there, at, NEVER), np.where(there, locals_, 0))


def _write_times(cells: FlatCells, deletions: FlatDeletions, liveness: Liveness, deletion: Deletion) -> Integers:
    newest = np.maximum(liveness.timestamp, deletion.timestamp)
    for parts in (cells, deletions):
        np.maximum.at(newest, parts.row, parts.timestamp)
    return newest
