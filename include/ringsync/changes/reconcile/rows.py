"""Reconciliation: change rows about the same row become one, by Cassandra's rules.

Reconciled change rows are change rows, too (:data:`ringsync.changes.schema.CHANGE_ROWS`). A partition has, in this
order, at most one deletion, at most one static row, its range deletions, and at most one row per clustering:

* A row's ``deletion`` is the greatest of its own, the partition's and those of the ranges that cover it (no range
  covers a static row). Liveness, complex deletions and cells that are not later are gone. So are cells that a complex
  deletion covers, and cells written to a column before it was dropped. Tombstones of cells stay. A row also stays if
  only its deletion is left.
* Of range deletions with the same bounds the greatest stays, unless the partition's deletion covers it.
* Cells are sorted by the number of their column, elements of collections in Cassandra's order.
* ``write_time`` is the greatest timestamp that is left. ``file``, ``position`` and ``node`` come from the member with
  the greatest (``write_time``, ``file``, ``position``).
* ``digest`` is the sum of the distinct members' digests, as two big-endian numbers that wrap.

Order, duplicates and earlier reconciliation change nothing but ``digest`` and the source (docs/architecture.md, I4).
Counters are as commutative as in Cassandra: a deletion between two reconciliations of one cell may count or not.
The rules: docs/formats.md, 3.1; C: db/rows/{Cells, Row.Merger}, db/{LivenessInfo, DeletionTime}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.columns import columns_of
from ringsync.changes.digest import DIGEST_BYTES
from ringsync.changes.keys.order import END, START, clustering_keys, path_type, value_keys
from ringsync.changes.reconcile import row_kernels as kernels
from ringsync.changes.reconcile.cell_kernels import (
    CellColumns,
    Chosen,
    Members,
    Memory,
    merge_cells,
    merge_complex_deletions,
)
from ringsync.changes.schema import CELL, CHANGE_ROWS, COMPLEX_DELETION, DELETION, LIVENESS
from ringsync.compiled.arrow import Integers, Mask, integers, valid_mask
from ringsync.compiled.memory import PADDING, address
from ringsync.compiled.sorting import RECORD_BYTES, sort_records
from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.cql.codec.split import total_bytes
from ringsync.schema.table import TableSchema

Places = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Groups:
    """The groups of change rows, and the row of the result that each group becomes.

    :ivar order: numbers of the change rows, sorted; ``starts``: place of each group's first row
    :ivar results: number of each group in the result; -1: the result does not have it
    :ivar origin: row from which the result's source comes; ``start_of``, ``end_of``: rows from which its clustering
        and range end come
    :ivar digests: uint8[groups, 16]
    :ivar timestamps: timestamp of the deletion in force, µs; ``NEVER``: none; ``locals_``: its local time, s
    :ivar liveness: row from which the liveness comes; -1: none
    :ivar write_times: greatest timestamp that is left, µs
    """

    order: Places
    starts: Places
    results: Places
    origin: Places
    start_of: Places
    end_of: Places
    digests: npt.NDArray[np.uint8]
    timestamps: Integers
    locals_: Integers
    liveness: Places
    write_times: Integers

    def __len__(self) -> int:
        return len(self.origin)


def merge(rows: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """Reconcile change rows of one table.

    :param rows: batch of ``CHANGE_ROWS``, in any order, reconciled or not; an extra column ``node`` (string) is kept
    :param table: their table
    :returns: reconciled change rows, sorted by token, partition key, kind as above, clustering
    :raises ValueError: some rows belong to another table
    """
    if table.table_id:
        ids = _bytes16(rows["table_id"]).view(np.int64).reshape(-1, 2)
        if (ids != np.frombuffer(bytes.fromhex(table.table_id), np.int64)).any():
            raise ValueError(
                f"not all of these {len(rows)} change rows are of {table.full_name}: merge one table at a time"
            )
    groups = _groups(rows, table)
    complex_deletions = _complex_deletions(rows, table, groups)
    cells = _cells(rows, table, groups, complex_deletions)
    return _merged(rows, groups, cells, complex_deletions)


def _groups(rows: pa.RecordBatch, table: TableSchema) -> _Groups:
    count, tokens = len(rows), integers(rows["token"])
    kinds, write_times = integers(rows["kind"]), integers(rows["write_time"])
    clusterings, ends = cells_of(rows["clustering"]), cells_of(rows["range_end"])
    starts_sorted, ends_sorted = clustering_keys(clusterings, table, START), clustering_keys(ends, table, END)
    digests = _bytes16(rows["digest"])
    keys, files = cells_of(rows["partition_key"]), _texts(rows["file"])
    nodes = _texts(rows["node"]) if "node" in rows.schema.names else _nothing(count)
    room = total_bytes(starts_sorted) + total_bytes(ends_sorted) + count * (1 + DIGEST_BYTES) + PADDING
    output, records = np.empty(room, np.uint8), _records(count)
    by_token = np.argsort(tokens, kind="stable").astype(np.int32)
    kernels.describe_rows(
        by_token,
        tokens,
        kinds,
        keys.arguments[:3],
        starts_sorted.arguments[:3],
        ends_sorted.arguments[:3],
        address(digests),
        address(output),
        address(records),
    )
    order = _sorted(records, count)
    starts, partitions = np.empty(count + 1, np.int32), np.empty(count, np.uint8)
    group_count = kernels.find_groups(address(records), count, order, starts, partitions)
    order = by_token[order]
    origin, start_of, end_of = (np.empty(group_count, np.int32) for _ in range(3))
    merged_digests = np.empty((group_count, DIGEST_BYTES), np.uint8)
    kernels.choose_members(
        order,
        starts,
        group_count,
        write_times,
        integers(rows["position"]),
        integers(rows["schema_version"]),
        files.arguments[:3],
        nodes.arguments[:3],
        clusterings.arguments[:3],
        ends.arguments[:3],
        address(digests),
        origin,
        start_of,
        end_of,
        address(merged_digests),
    )
    deletion, liveness = rows["deletion"], rows["liveness"]
    timestamps, locals_, kept = (
        np.empty(group_count, np.int64),
        np.empty(group_count, np.int64),
        np.empty(group_count, np.uint8),
    )
    kernels.merge_deletions(
        order,
        starts,
        group_count,
        partitions,
        kinds,
        _filled(deletion.field("timestamp"), kernels.NEVER, valid_mask(deletion)),
        _filled(deletion.field("local_deletion_time"), 0, valid_mask(deletion)),
        timestamps,
        locals_,
        kept,
    )
    kernels.cover_rows(
        order,
        starts,
        group_count,
        partitions,
        kinds,
        starts_sorted.arguments[:3],
        ends_sorted.arguments[:3],
        kept,
        timestamps,
        locals_,
    )
    chosen, latest = np.empty(group_count, np.int32), np.empty(group_count, np.int64)
    kernels.merge_liveness(
        order,
        starts,
        group_count,
        _filled(liveness.field("timestamp"), kernels.NEVER, valid_mask(liveness)),
        _filled(liveness.field("ttl"), -1, valid_mask(liveness)),
        _filled(liveness.field("expires_at"), -1, valid_mask(liveness)),
        timestamps,
        chosen,
        latest,
    )
    stays = kept.view(np.bool_)
    results = np.where(stays, np.cumsum(stays) - 1, -1).astype(np.int32)
    per_group = (origin, start_of, end_of, merged_digests, timestamps, locals_, chosen, latest)
    return _Groups(order, starts[: group_count + 1], results, *(values[stays] for values in per_group))


@dataclass(frozen=True)
class _Parts:
    """Cells or complex deletions: all of them, and those that the result has.

    :ivar of: structs of all rows
    :ivar values: values of the chosen cells
    """

    of: pa.StructArray
    chosen: Chosen
    values: Cells


def _complex_deletions(rows: pa.RecordBatch, table: TableSchema, groups: _Groups) -> _Parts:
    lists = rows["complex_deletions"]
    flat = lists.flatten()
    count = len(flat)
    columns, nothing, absent = _Columns.of(table), np.zeros(count, np.int64), _nothing(count)
    cells = CellColumns(
        integers(flat.field("column")),
        columns.dropped,
        columns.counters,
        integers(flat.field("timestamp")),
        nothing,
        integers(flat.field("local_deletion_time")),
        nothing,
        absent.arguments[:3],
        absent.arguments[:3],
        nothing,
        nothing,
    )
    members = _members(groups, lists)
    _kept, memory = _memory(members)
    chosen = _room(count, groups)
    size = merge_complex_deletions(members, cells, memory, chosen)
    return _Parts(flat, _first(chosen, size), _nothing(size))


def _cells(rows: pa.RecordBatch, table: TableSchema, groups: _Groups, complex_deletions: _Parts) -> _Parts:
    lists = rows["cells"]
    flat = lists.flatten()
    paths, values = cells_of(flat.field("path")), cells_of(flat.field("value"))
    columns = _Columns.of(table)
    behind, scratch = 0, np.empty(0, np.uint8)
    if columns.counters.any():
        # A merged context is no longer than its two sources together.
        behind, room = len(values.buffer), total_bytes(values) + PADDING
        values = Cells(np.concatenate([values.buffer, np.zeros(room, np.uint8)]), values.offsets, values.lengths)
        scratch = np.empty(2 * room, np.uint8)
    numbers_of_columns = integers(flat.field("column"))
    sorted_paths = _Paths.of(numbers_of_columns, paths, table)
    cells = CellColumns(
        numbers_of_columns,
        columns.dropped,
        columns.counters,
        integers(flat.field("timestamp")),
        _filled(flat.field("ttl"), -1),
        _filled(flat.field("local_deletion_time"), -1),
        integers(flat.field("kind")),
        paths.arguments[:3],
        values.arguments[:3],
        sorted_paths.addresses,
        sorted_paths.lengths,
    )
    members = _members(groups, lists)
    _kept, memory = _memory(members)
    chosen = _room(len(flat), groups)
    offsets, lengths = np.empty(len(flat), np.int32), np.empty(len(flat), np.int32)
    contexts = (address(scratch), len(scratch) // 2, behind)
    size = merge_cells(members, cells, complex_deletions.chosen, memory, contexts, chosen, offsets, lengths)
    return _Parts(flat, _first(chosen, size), Cells(values.buffer, offsets[:size], lengths[:size]))


def _merged(rows: pa.RecordBatch, groups: _Groups, cells: _Parts, complex_deletions: _Parts) -> pa.RecordBatch:
    """Build the result."""
    count, origin = len(groups), groups.origin
    # A row without any content, not even a deletion, keeps the write time of its source.
    silent = groups.write_times == kernels.NEVER
    write_times = np.where(silent, integers(rows["write_time"])[origin], groups.write_times)
    deleted = groups.timestamps != kernels.NEVER
    deletion = [_array(groups.timestamps), _array(groups.locals_)]
    lives = groups.liveness >= 0
    liveness = _struct(LIVENESS, rows["liveness"], np.maximum(groups.liveness, 0), lives)
    cell = _struct(CELL, cells.of, cells.chosen.parts, values=cells.values)
    columns = {
        "table_id": rows["table_id"].take(_array(origin)),
        "schema_version": _array(integers(rows["schema_version"])[origin].astype(np.int32)),
        "token": _array(integers(rows["token"])[origin]),
        "partition_key": raw_values(cells_of(rows["partition_key"]).take(origin)),
        "kind": _array(integers(rows["kind"])[origin].astype(np.int8)),
        "clustering": raw_values(cells_of(rows["clustering"]).take(groups.start_of)),
        "range_end": raw_values(cells_of(rows["range_end"]).take(groups.end_of)),
        "write_time": _array(write_times),
        "liveness": liveness,
        "deletion": pa.Array.from_buffers(DELETION, count, [_bitmap(deleted)], -1, children=deletion),
        "cells": _list(CELL, cells.chosen.limits, cell),
        "complex_deletions": _list(
            COMPLEX_DELETION,
            complex_deletions.chosen.limits,
            _struct(COMPLEX_DELETION, complex_deletions.of, complex_deletions.chosen.parts),
        ),
        "digest": pa.Array.from_buffers(pa.binary(DIGEST_BYTES), count, [None, pa.py_buffer(groups.digests)], 0),
        "file": raw_values(_texts(rows["file"]).take(origin), pa.string()),
        "position": _array(integers(rows["position"])[origin]),
    }
    schema = CHANGE_ROWS
    if "node" in rows.schema.names:
        columns["node"] = raw_values(_texts(rows["node"]).take(origin), pa.string())
        schema = schema.append(pa.field("node", pa.string()))
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _records(count: int) -> Integers:
    return np.empty(count * RECORD_BYTES // 8, np.int64)


def _sorted(records: Integers, count: int) -> Places:
    order = np.empty(count, np.int32)
    sort_records(address(records), count, order, np.empty(count, np.int32))
    return order


@dataclass(frozen=True)
class _Paths:
    """Addresses and lengths of the paths' sort keys (0: none), and the arrays that keep them in memory."""

    addresses: Integers
    lengths: Integers
    kept: tuple[Cells, ...]

    @classmethod
    def of(cls, columns: Integers, paths: Cells, table: TableSchema) -> _Paths:
        """Encode the paths of cells, each by the type of its column."""
        addresses, lengths = np.zeros(len(columns), np.int64), np.zeros(len(columns), np.int64)
        kept = []
        if (paths.lengths >= 0).any():
            for column in columns_of(table):
                if column.is_multicell and len(chosen := np.flatnonzero(columns == column.number)):
                    keys = value_keys(paths.take(chosen), path_type(column.type))
                    addresses[chosen] = address(keys.buffer) + keys.offsets.astype(np.int64)
                    lengths[chosen] = keys.lengths
                    kept.append(keys)
        return cls(addresses, lengths, tuple(kept))


@dataclass(frozen=True)
class _Columns:
    """Properties of columns by number: see ``CellColumns``."""

    dropped: Integers
    counters: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, table: TableSchema) -> _Columns:
        dropped_at = {column.name: column.dropped_at for column in table.dropped}
        columns = columns_of(table)
        return cls(
            np.array([dropped_at.get(column.name, kernels.NEVER) for column in columns], np.int64),
            np.array([column.is_counter for column in columns], np.uint8),
        )


def _members(groups: _Groups, lists: pa.ListArray) -> Members:
    limits = integers(lists.offsets)
    return Members(groups.order, groups.starts, groups.results, limits - limits[0], groups.timestamps)


def _memory(members: Members) -> tuple[Integers, Memory]:
    """Make room for the parts of the largest group. Return also the array that keeps it in memory."""
    ends = np.concatenate(([0], np.cumsum(np.diff(members.limits)[members.order])))[members.starts]
    most = int(np.diff(ends).max(initial=0))
    records, places = _records(most), np.empty((3, most), np.int32)
    return records, Memory(address(records), *places)


def _room(parts: int, groups: _Groups) -> Chosen:
    places, limits = np.empty(parts, np.int32), np.empty(len(groups) + 1, np.int32)
    return Chosen(places, np.empty(parts, np.int64), np.empty(parts, np.int64), limits, groups.write_times)


def _first(chosen: Chosen, count: int) -> Chosen:
    return chosen._replace(parts=chosen.parts[:count])


def _bytes16(array: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of ``binary(16)``: digests, table ids."""
    data = np.frombuffer(array.buffers()[1], np.uint8) if len(array) else np.empty(0, np.uint8)
    return data[16 * array.offset : 16 * (array.offset + len(array))]


def _texts(array: pa.Array) -> Cells:
    return cells_of(array.view(pa.binary()))


def _nothing(count: int) -> Cells:
    """Make ``count`` nulls."""
    return cells_of(pa.nulls(count, pa.binary()))


def _filled(array: pa.Array, missing: int, valid: Mask | None = None) -> Integers:
    """Return the numbers of an array, with ``missing`` for those that are null (or not ``valid``)."""
    known = valid_mask(array) if valid is None else valid & valid_mask(array)
    return np.where(known, integers(array), missing)


def _array(values: npt.NDArray[np.integer[Any]], valid: Mask | None = None) -> pa.Array:
    bitmap = None if valid is None else _bitmap(valid)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [bitmap, pa.py_buffer(np.ascontiguousarray(values))], -1)


def _bitmap(valid: Mask) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _struct(
    kind: pa.StructType, of: pa.StructArray, places: Places, valid: Mask | None = None, values: Cells | None = None
) -> pa.StructArray:
    """Take the structs at these places.

    :param valid: whether each is not null
    :param values: replacement for the field ``value``
    """
    fields = []
    for field in kind:
        if field.name == "value" and values is not None:
            fields.append(raw_values(values))
        elif field.type == pa.binary():
            fields.append(raw_values(cells_of(of.field(field.name)).take(places)))
        elif of.field(field.name).null_count == len(of):
            fields.append(pa.nulls(len(places), field.type))
        else:
            source = of.field(field.name)
            width = np.dtype(f"i{field.type.bit_width // 8}")
            known = valid_mask(source)[places] if source.null_count else None
            fields.append(_array(integers(source)[places].astype(width), known))
    bitmap = None if valid is None else _bitmap(valid)
    return pa.Array.from_buffers(kind, len(places), [bitmap], -1, children=fields)


def _list(kind: pa.DataType, limits: Places, structs: pa.StructArray) -> pa.ListArray:
    return pa.Array.from_buffers(pa.list_(kind), len(limits) - 1, [None, pa.py_buffer(limits)], 0, children=[structs])
