"""The conversion of row images to change rows: the rows, their keys and their content."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import columns_of
from ringsync.changes.digest import DIGEST_BYTES
from ringsync.changes.flat import UNKNOWN_TTL, FlatCells, Places, together
from ringsync.changes.schema import (
    CELL,
    CHANGE_ROWS,
    DELETION,
    LIVENESS,
    PARTITION_DELETION,
    ROW,
    STATIC,
)
from ringsync.compiled.arrow import Integers, Mask, array_of, integers, valid_mask
from ringsync.cql.codec.encode import partition_key_bytes
from ringsync.images.schema import NO_LIVENESS, lake_names, row_image_schema
from ringsync.images.to_cells import serialised, tombstone_cells, value_cells
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


def change_rows_of(images: pa.RecordBatch, table: TableSchema, *, unknown_at_us: int | None = None) -> pa.RecordBatch:
    """Convert row images to equivalent change rows, which can be merged with later changes.

    The static cells of a partition become one static row, its known deletion a partition deletion. Empty rows and
    counters are left out. List entries of unknown identity get placeholders as paths, in the order of the list.
    Expiring cells have TTL 0.

    :param images: row images of the table, one per key
    :param unknown_at_us: latest possible time of writes of unknown time (a row's own liveness, elements of collections
        in Cassandra 4), µs; they get it as timestamp, and UNKNOWN_TTL as mark. None: they are left out
    :returns: ``CHANGE_ROWS``; ``position`` is the image's index, ``digest`` and ``schema_version`` are zero
    :raises ValueError: an image has no partition key
    """
    images = images.select(row_image_schema(table).names).cast(row_image_schema(table))
    keys, clusterings = image_keys(images, table)
    rows = _rows(images, table, keys)
    cells, deletions = tombstone_cells(images, table)
    counters = {column.name for column in table.columns if column.is_counter}
    columns = [column for column in columns_of(table) if not column.dropped and column.name not in counters]
    values = [value_cells(images, table, column, unknown_at_us) for column in columns]
    cells = _placed(together([*values, cells], CELL), rows, table)
    deletions = _placed(deletions, rows, table)
    liveness, deletion = _liveness(images, rows, unknown_at_us), _deletion(images, rows)
    count, image = len(rows.image), pa.array(rows.image)
    columns_found = {
        "table_id": _constant(bytes.fromhex(table.table_id), pa.binary(16), count),
        "schema_version": _constant(0, pa.int32(), count),
        "token": images["token"].take(image),
        "partition_key": keys.take(image),
        "kind": pa.array(rows.kind.astype(np.int8)),
        "clustering": pc.if_else(pa.array(rows.kind == ROW), clusterings.take(image), pa.scalar(None, pa.binary())),
        "range_end": pa.nulls(count, pa.binary()),
        "write_time": pa.array(_write_times(cells, deletions, liveness, deletion)),
        "liveness": liveness,
        "deletion": deletion,
        "cells": cells.lists(count),
        "complex_deletions": deletions.lists(count),
        "digest": _constant(bytes(DIGEST_BYTES), pa.binary(DIGEST_BYTES), count),
        "file": _constant("", pa.string(), count),
        "position": pa.array(rows.image),
    }
    converted = pa.RecordBatch.from_arrays([columns_found[name] for name in CHANGE_ROWS.names], schema=CHANGE_ROWS)
    filled = [pc.greater(pc.list_value_length(converted[name]), 0) for name in ("cells", "complex_deletions")]
    filled += [converted[name].is_valid() for name in ("liveness", "deletion")]
    return converted.filter(pc.or_(pc.or_(filled[0], filled[1]), pc.or_(filled[2], filled[3])))


def image_keys(images: pa.RecordBatch, table: TableSchema) -> tuple[pa.Array, pa.Array]:
    """Return partition keys and clusterings of row images in the form of change rows; a missing one is all nulls."""
    names = lake_names(table)
    key, clustering = (
        [serialised(images, names[column.name], column.type) for column in columns]
        for columns in (table.partition_key, table.clustering)
    )
    return partition_key_bytes(key), _clusterings(clustering, len(images))


def _clusterings(columns: list[pa.Array], rows: int) -> pa.Array:
    """Write the number of columns, and each value with its length (:mod:`ringsync.changes.schema`)."""
    parts = [_constant(len(columns).to_bytes(4, "little"), pa.binary(), rows)]
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


def _placed(parts: FlatCells, rows: _Rows, table: TableSchema) -> FlatCells:
    """Assign cells or complex deletions of images to change rows."""
    is_static = np.array([column.is_static for column in columns_of(table)] + [False])[parts.integers("column")]
    row = np.where(is_static, rows.of_static[parts.row], rows.of_row[parts.row])
    return FlatCells(row, parts.cells).where(row != _NONE)


def _liveness(images: pa.RecordBatch, rows: _Rows, unknown_at_us: int | None) -> pa.StructArray:
    """Return the liveness of rows; an unknown one that no read has refuted gets the latest possible time."""
    image = rows.image
    live = pc.struct_field(images["_row"], "live")
    expires_at, unseen_at = (pc.struct_field(images["_merge"], name) for name in ("live_expires_at", "unseen_at"))
    known = valid_mask(live)[image] & (integers(live)[image] != NO_LIVENESS)
    unknown = ~valid_mask(live)[image] & ~valid_mask(unseen_at)[image]
    if unknown_at_us is None:
        unknown = np.zeros(len(image), np.bool_)
    expiring = known & valid_mask(expires_at)[image]
    fields = [
        pa.array(np.where(known, integers(live)[image], unknown_at_us or 0)),
        array_of(np.where(known, 0, UNKNOWN_TTL), expiring | unknown).cast(pa.int32()),
        array_of(integers(expires_at)[image], expiring),
    ]
    there = (rows.kind == ROW) & (known | unknown)
    return pa.StructArray.from_arrays(fields, fields=list(LIVENESS), mask=pa.array(~there))


def _deletion(images: pa.RecordBatch, rows: _Rows) -> pa.StructArray:
    """Return the deletions of rows and partitions; a static row has its partition's.

    An unknown local time is taken from the deletion's timestamp.
    """
    image = rows.image
    deleted_at = pc.struct_field(images["_row"], "deleted_at")
    local = pc.struct_field(images["_merge"], "deletion_local")
    at = integers(deleted_at)[image]
    fields = [at, np.where(valid_mask(local)[image], integers(local)[image], np.maximum(at // MICROS, 0))]
    there = ((rows.kind != STATIC) | (rows.of_row[image] == _NONE)) & valid_mask(deleted_at)[image]
    return pa.StructArray.from_arrays(
        [pa.array(field) for field in fields], fields=list(DELETION), mask=pa.array(~there)
    )


def _write_times(cells: FlatCells, deletions: FlatCells, liveness: pa.Array, deletion: pa.Array) -> Integers:
    newest = np.full(len(liveness), np.iinfo(np.int64).min)
    for parts in (cells, deletions):
        np.maximum.at(newest, parts.row, parts.integers("timestamp"))
    for struct in (liveness, deletion):
        there = valid_mask(struct)
        newest[there] = np.maximum(newest, integers(struct.field("timestamp")))[there]
    return newest


def _constant(value: bytes | str | int, kind: pa.DataType, count: int) -> pa.Array:
    return pa.array([value], kind).take(pa.array(np.zeros(count, np.int64)))
