"""The rows before changes, as the replica had them: ``before`` of messages, and the rows that deletions remove."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows, fixed16_array
from ringsync.changes.keys.order import clustering_keys
from ringsync.changes.schema import ROW, STATIC
from ringsync.compiled.arrow import Mask, Places, array_of, integers
from ringsync.cql.cells import cells_of, no_cells, raw_values
from ringsync.cql.murmur3 import murmur3_128
from ringsync.images.after import RowsAfter
from ringsync.images.live import live_rows
from ringsync.images.to_changes import has_clustering, image_keys
from ringsync.schema.table import TableSchema

Before = tuple[pa.RecordBatch, Mask]
"""Of each change the table's columns before it, by their names in the lake, and whether there was a row."""

_NONE = -1


@dataclass(frozen=True)
class Said:
    """The content of messages.

    :ivar changes: merged change rows; the one of a spared row has only its key
    :ivar images: image of the row after each change; anything where ``visible`` is false
    :ivar visible: whether the row is there
    :ivar at_s: moment at which the rows were read, s since the epoch
    :ivar before: the rows before; None: unknown
    """

    changes: ChangeRows
    images: pa.RecordBatch
    visible: Mask
    at_s: int
    before: Before | None = None


def alive(images: pa.RecordBatch, table: TableSchema, now_s: int) -> Mask:
    """Tell which rows are there; for images without clustering, whether a static cell is."""
    rows = live_rows(images, table, now_s)
    row_alive, static = (rows[name].to_numpy(zero_copy_only=False) for name in ("#alive", "#static"))
    shown: Mask = np.where(has_clustering(images, table), row_alive, static)
    return shown


def rows_before(previous: pa.RecordBatch, merged: ChangeRows, table: TableSchema, now_s: int) -> Before:
    """Return the row before each change; before a change of static cells, the static cells of its partition.

    A partition's deletion has a row only in tables whose partitions are rows; a range's deletion never has.

    :param previous: the newest images, before the changes, of the rows that they touch
    """
    live = live_rows(previous, table, now_s)
    row_alive, static_alive = (live[name].to_numpy(zero_copy_only=False) for name in ("#alive", "#static"))
    partition, clustering = image_keys(previous, table)
    static = merged.kind == STATIC
    place = places_of(raw_values(merged.partition_key), partition)
    if table.clustering:
        is_row = merged.kind == ROW
        keys = _keys(raw_values(merged.partition_key), raw_values(merged.clustering), is_row, table)
        keys_before = _keys(partition, clustering, has_clustering(previous, table), table)
        place = np.where(is_row, places_of(keys, keys_before), np.where(static, place, _NONE))
    there = place != _NONE
    there[there] = np.where(static[there], static_alive[place[there]], row_alive[place[there]])
    return live.take(pa.array(place, mask=place == _NONE)), there


def removed_rows(
    previous: pa.RecordBatch, merged: ChangeRows, after: RowsAfter, table: TableSchema, now_s: int
) -> Said | None:
    """Find the rows that deletions of partitions and ranges have removed, and that no change of their own touches.

    Each gets the deletion as if it were of this row alone: a change row of kind ROW whose digest is made of the
    deletion's digest and the row's clustering.

    :param previous: the newest images, before the changes, of all rows of the partitions with deletions
    :param merged: merged change rows, with their nodes
    :param after: what has become of the previous images
    :returns: None: there are none
    """
    partition, clustering = image_keys(previous, table)
    is_row = has_clustering(previous, table)
    after_partition, after_clustering = image_keys(after.images, table)
    keys = _keys(partition, clustering, is_row, table)
    keys_after = _keys(after_partition, after_clustering, has_clustering(after.images, table), table)
    place = places_of(keys, keys_after)
    gone = ~alive(after.images, table, now_s)
    gone[after.of_change[after.of_change != _NONE]] = False  # they have a message of their own
    removed = is_row & alive(previous, table, now_s) & (place != _NONE)
    removed[removed] = gone[place[removed]]
    # A row has the time of the newest deletion that covers it, which has removed it.
    deletions = merged.where(~merged.of_row)
    deleted_at = pc.struct_field(after.images["_row"], "deleted_at").take(pa.array(place, mask=~removed))
    deletion = places_of(
        _with_times(partition, deleted_at),
        _with_times(raw_values(deletions.partition_key), array_of(deletions.deletion.timestamp)),
    )
    chosen = np.flatnonzero(removed & (deletion != _NONE))
    if not len(chosen):
        return None
    chosen = chosen[np.argsort(place[chosen])]  # in the order of the table
    take = pa.array(chosen)
    images = previous.take(take)
    changes = _of_rows(deletions.take(deletion[chosen]), clustering.take(take))
    there = np.ones(len(chosen), np.bool_)
    return Said(changes, images, ~there, now_s, (live_rows(images, table, now_s), there))


def _of_rows(deletions: ChangeRows, clusterings: pa.Array) -> ChangeRows:
    """Turn deletions into deletions of one row each."""
    count, digests = len(deletions), fixed16_array(deletions.digest).cast(pa.binary())
    halves = murmur3_128(pc.binary_join_element_wise(digests, clusterings, b""))
    return replace(
        deletions,
        kind=np.full(count, ROW),
        clustering=cells_of(clusterings),
        range_end=no_cells(count),
        digest=np.stack(halves, axis=1).astype(">i8").view(np.uint64),
    )


def _keys(partition: pa.Array, clustering: pa.Array, is_row: Mask, table: TableSchema) -> pa.Array:
    """Join partition key and clustering to bytes that are equal for equal rows; null where there is no row."""
    ordered = raw_values(clustering_keys(cells_of(clustering).without(~is_row), table))
    lengths = pc.binary_length(partition).cast(pa.string()).cast(pa.binary())
    return pc.binary_join_element_wise(lengths, partition, ordered, b" ")


def _with_times(partition: pa.Array, times: pa.Array) -> pa.Array:
    """Join partition key and time to bytes; null where there is no time."""
    return pc.binary_join_element_wise(partition, times.cast(pa.string()).cast(pa.binary()), b" ")


def places_of(keys: pa.Array, among: pa.Array) -> Places:
    """Find the first place of each key among others; -1: nowhere, as for null."""
    places = pc.if_else(keys.is_valid(), pc.index_in(keys, value_set=among), None)
    return integers(pc.fill_null(places, _NONE).cast(pa.int64()))
