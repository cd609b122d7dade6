"""Checksums of live rows per token range, with one definition for source and replica.

A row's digest (:mod:`ringsync.images.digests`) covers every column and each cell's writetime, expiry and raw bytes. For
keys it covers the value, not its spelling (:func:`ringsync.images.keys.comparable`). A range's checksum consists of the
numbers of rows and live cells, and of the exclusive or and the sum (mod 2^64) of both halves of the digests. It is the
same under any order and partitioning. The counts and sums detect a row that is there twice; an exclusive or alone does
not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.compiled.arrow import Integers
from ringsync.images.digests import row_digests
from ringsync.images.keys import comparable
from ringsync.images.schema import lake_names
from ringsync.schema.table import TableSchema

CHECKSUM_FIELDS = ("rows", "cells", "xor_low", "xor_high", "sum_low", "sum_high")


def partial_checksums(rows: Iterable[pa.RecordBatch], table: TableSchema, edges: Integers) -> pa.RecordBatch:
    """Compute the partial checksums of these rows, by range; :func:`sum_up` adds them up.

    :param rows: result of :func:`ringsync.images.live.shown_rows`
    """
    names = lake_names(table)
    counted = [names[column.name] for column in table.value_columns]
    sums = np.zeros((len(CHECKSUM_FIELDS), len(edges) - 1), np.int64)
    for batch in rows:
        _add_batch(sums, comparable(batch, table), edges, counted)
    ranges = np.flatnonzero(sums[0])
    columns = [pa.array(ranges), *(pa.array(field[ranges]) for field in sums)]
    return pa.record_batch(columns, names=["range", *CHECKSUM_FIELDS])


def sum_up(partial: pa.Table, edges: Integers) -> pa.Table:
    """Add up partial checksums, given in any order, to the checksums of all ranges."""
    total = np.zeros((len(CHECKSUM_FIELDS), len(edges) - 1), np.int64)
    ranges = partial["range"].to_numpy()
    for name, sums in zip(CHECKSUM_FIELDS, total, strict=True):
        combine = np.bitwise_xor if name.startswith("xor") else np.add
        combine.at(sums, ranges, partial[name].to_numpy())
    return pa.table([np.arange(len(edges) - 1), *total], names=["range", *CHECKSUM_FIELDS])


def check_boundaries(boundaries: Sequence[int]) -> Integers:
    """Return the boundaries as an array.

    :raises ValueError: the boundaries are not two or more rising tokens
    """
    edges = np.array(boundaries, np.int64)
    if len(edges) < 2 or not (edges[1:] > edges[:-1]).all():
        raise ValueError(f"boundaries must be two or more rising tokens, not {list(boundaries)[:5]}")
    return edges


def _add_batch(sums: Integers, batch: pa.RecordBatch, edges: Integers, counted: Sequence[str]) -> None:
    """Add the checksums of a batch's rows to the sums so far, range by range."""
    # The start of a range is excluded, the end included.
    ranges = np.searchsorted(edges, batch["token"].to_numpy(zero_copy_only=False), side="left") - 1
    inside = np.flatnonzero((ranges >= 0) & (ranges < len(edges) - 1))
    if not len(inside):
        return
    low, high = row_digests(batch)
    cells = _live_cells(batch, counted)
    order = inside[np.argsort(ranges[inside], kind="stable")]
    sorted_ranges = ranges[order]
    starts = np.flatnonzero(np.diff(sorted_ranges, prepend=-1))
    touched = sorted_ranges[starts]
    sums[0, touched] += np.diff(np.append(starts, len(order)))
    sums[1, touched] += np.add.reduceat(cells[order], starts)
    for half, digests in enumerate((low[order], high[order])):
        sums[2 + half, touched] ^= np.bitwise_xor.reduceat(digests, starts)
        sums[4 + half, touched] += np.add.reduceat(digests, starts)


def _live_cells(batch: pa.RecordBatch, columns: Sequence[str]) -> Integers:
    """Count the live cells of each row: one per column with a value, or one per element of a multi-cell column."""
    total = np.zeros(batch.num_rows, np.int64)
    times = batch["_cells"]
    for name in columns:
        cell = times.field(name)
        if pa.types.is_list(cell.type.field("writetime").type):
            total += _elements(batch[name])
            present = pc.and_(cell.is_valid(), pc.is_valid(pc.struct_field(cell, "raw")))
        else:
            present = cell.is_valid()
        total += present.to_numpy(zero_copy_only=False)
    return total


def _elements(values: pa.Array) -> Integers:
    """Count the elements of a list or map, or the fields of a user-defined type that are set; 0 for null."""
    if pa.types.is_struct(values.type):
        total = np.zeros(len(values), np.int64)
        for field in values.flatten():
            total += field.is_valid().to_numpy(zero_copy_only=False)
        return total
    lengths: Integers = np.diff(values.offsets.to_numpy()).astype(np.int64)
    lengths[values.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths
