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

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ringsync.changes.batch import ChangeRows, Deletion, Digests, Liveness
from ringsync.changes.columns import columns_of
from ringsync.changes.digest import DIGEST_BYTES
from ringsync.changes.flat import FlatCells, FlatDeletions, Parts
from ringsync.changes.keys.order import clustering_keys, path_type, value_keys
from ringsync.changes.keys.order_kernels import END
from ringsync.changes.reconcile import row_kernels as kernels
from ringsync.changes.reconcile.cell_kernels import (
    CellColumns,
    Chosen,
    Members,
    Memory,
    merge_cells,
    merge_complex_deletions,
)
from ringsync.changes.schema import EXPIRING, NEVER, NO_EXPIRY, NO_TTL
from ringsync.compiled.arrow import Integers, Places32
from ringsync.compiled.memory import PADDING, address
from ringsync.compiled.sorting import RECORD_BYTES, sort_records
from ringsync.cql.cells import Cells, no_cells
from ringsync.cql.codec.split import total_bytes
from ringsync.schema.table import TableSchema


@dataclass(frozen=True)
class _Groups:
    """The groups of change rows, and the row of the result that each group becomes.

    :ivar order: numbers of the change rows, sorted; ``starts``: place of each group's first row
    :ivar results: number of each group in the result; -1: the result does not have it
    :ivar origin: row from which the result's source comes; ``start_of``, ``end_of``: rows from which its clustering
        and range end come
    :ivar digests: both halves of each
    :ivar timestamps: timestamp of the deletion in force, µs; ``NEVER``: none; ``locals_``: its local time, s
    :ivar liveness: row from which the liveness comes; -1: none
    :ivar write_times: greatest timestamp that is left, µs
    """

    order: Places32
    starts: Places32
    results: Places32
    origin: Places32
    start_of: Places32
    end_of: Places32
    digests: Digests
    timestamps: Integers
    locals_: Integers
    liveness: Places32
    write_times: Integers


def merge(rows: ChangeRows, table: TableSchema) -> ChangeRows:
    """Reconcile change rows of one table.

    :param rows: in any order, reconciled or not
    :returns: reconciled change rows, sorted by token, partition key, kind as above, clustering
    :raises ValueError: some rows belong to another table
    """
    if table.table_id and (rows.table_ids != np.frombuffer(bytes.fromhex(table.table_id), np.int64)).any():
        raise ValueError(
            f"not all of these {len(rows)} change rows are of {table.full_name}: merge one table at a time"
        )
    groups = _groups(rows, table)
    deletions, chosen = _complex_deletions(rows, table, groups)
    return _merged(rows, groups, _cells(rows, table, groups, chosen), deletions)


def _groups(rows: ChangeRows, table: TableSchema) -> _Groups:
    count = len(rows)
    keys, nodes = rows.partition_key, no_cells(count) if rows.node is None else rows.node
    clusterings = clustering_keys(rows.clustering, table)
    ends = clustering_keys(rows.range_end, table, END)
    digests = np.ascontiguousarray(rows.digest)
    room = total_bytes(clusterings) + total_bytes(ends) + count * (1 + DIGEST_BYTES) + PADDING
    output, records = np.empty(room, np.uint8), _records(count)
    by_token = np.argsort(rows.token, kind="stable").astype(np.int32)
    kernels.describe_rows(
        by_token,
        rows.token,
        rows.kind,
        keys.arguments[:3],
        clusterings.arguments[:3],
        ends.arguments[:3],
        address(digests),
        address(output),
        address(records),
    )
    order = np.empty(count, np.int32)
    sort_records(address(records), count, order, np.empty(count, np.int32))
    starts, partitions = np.empty(count + 1, np.int32), np.empty(count, np.uint8)
    group_count = kernels.find_groups(address(records), count, order, starts, partitions)
    order = by_token[order]
    origin, start_of, end_of, lives = np.empty((4, group_count), np.int32)
    timestamps, locals_, latest = np.empty((3, group_count), np.int64)
    merged_digests, kept = np.empty((group_count, 2), np.uint64), np.empty(group_count, np.uint8)
    kernels.choose_members(
        order,
        starts,
        group_count,
        rows.write_time,
        rows.position,
        rows.schema_version,
        rows.file.arguments[:3],
        nodes.arguments[:3],
        rows.clustering.arguments[:3],
        rows.range_end.arguments[:3],
        address(digests),
        origin,
        start_of,
        end_of,
        address(merged_digests),
    )
    kernels.merge_deletions(
        order,
        starts,
        group_count,
        partitions,
        rows.kind,
        rows.deletion.timestamp,
        rows.deletion.local,
        timestamps,
        locals_,
        kept,
    )
    kernels.cover_rows(
        order,
        starts,
        group_count,
        partitions,
        rows.kind,
        clusterings.arguments[:3],
        ends.arguments[:3],
        kept,
        timestamps,
        locals_,
    )
    liveness = rows.liveness
    ttls = np.where(liveness.expires_at == NO_EXPIRY, -1, liveness.ttl)
    kernels.merge_liveness(
        order, starts, group_count, liveness.timestamp, ttls, liveness.expires_at, timestamps, lives, latest
    )
    stays = kept.view(np.bool_)
    results = np.where(stays, np.cumsum(stays) - 1, -1).astype(np.int32)
    per_group = (origin, start_of, end_of, merged_digests, timestamps, locals_, lives, latest)
    return _Groups(order, starts[: group_count + 1], results, *(values[stays] for values in per_group))


def _complex_deletions(rows: ChangeRows, table: TableSchema, groups: _Groups) -> tuple[FlatDeletions, Chosen]:
    """Return the complex deletions that the result has, and how they were chosen."""
    deletions = rows.complex_deletions
    count = len(deletions.row)
    if not count:
        none, limits = np.zeros(0, np.int64), np.zeros(len(groups.origin) + 1, np.int32)
        return deletions, Chosen(np.zeros(0, np.int32), none, none, limits, groups.write_times)
    nothing, absent = np.zeros(count, np.int64), no_cells(count).arguments[:3]
    dropped, counters = _limits(table)
    cells = CellColumns(
        deletions.column,
        dropped,
        counters,
        deletions.timestamp,
        nothing,
        deletions.local,
        nothing,
        absent,
        absent,
        nothing,
        nothing,
    )
    members, memory, _kept_records, chosen = _room(rows, groups, deletions)
    size = merge_complex_deletions(members, cells, memory, chosen)
    return _chosen(deletions, chosen, size), chosen._replace(parts=chosen.parts[:size])


def _cells(rows: ChangeRows, table: TableSchema, groups: _Groups, complex_deletions: Chosen) -> FlatCells:
    """Return the cells that the result has."""
    all_cells, (dropped, counters) = rows.cells, _limits(table)
    values, count = all_cells.value, len(all_cells.row)
    behind, scratch = 0, np.empty(0, np.uint8)
    if counters.any():
        # A merged context is no longer than its two sources together.
        behind, room = len(values.buffer), total_bytes(values) + PADDING
        values = Cells(np.concatenate([values.buffer, np.zeros(room, np.uint8)]), values.offsets, values.lengths)
        scratch = np.empty(2 * room, np.uint8)
    path_addresses, path_lengths, _kept_keys = _path_keys(all_cells, table)
    cells = CellColumns(
        all_cells.column,
        dropped,
        counters,
        all_cells.timestamp,
        np.where(all_cells.kind == EXPIRING, all_cells.ttl, -1),
        all_cells.local,
        all_cells.kind,
        all_cells.path.arguments[:3],
        values.arguments[:3],
        path_addresses,
        path_lengths,
    )
    members, memory, _kept_records, chosen = _room(rows, groups, all_cells)
    offsets, lengths = np.empty((2, count), np.int32)
    contexts = (address(scratch), len(scratch) // 2, behind)
    size = merge_cells(members, cells, complex_deletions, memory, contexts, chosen, offsets, lengths)
    return replace(_chosen(all_cells, chosen, size), value=Cells(values.buffer, offsets[:size], lengths[:size]))


def _merged(rows: ChangeRows, groups: _Groups, cells: FlatCells, complex_deletions: FlatDeletions) -> ChangeRows:
    """Build the result."""
    # A row without any content, not even a deletion, keeps the write time of its source.
    silent = groups.write_times == NEVER
    source, lives = groups.origin, groups.liveness >= 0
    times = [
        np.where(lives, values[np.maximum(groups.liveness, 0)], missing)
        for values, missing in zip(vars(rows.liveness).values(), (NEVER, NO_TTL, NO_EXPIRY), strict=True)
    ]
    return ChangeRows(
        rows.table_ids[source],
        rows.schema_version[source],
        rows.token[source],
        rows.partition_key.take(source),
        rows.kind[source],
        rows.clustering.take(groups.start_of),
        rows.range_end.take(groups.end_of),
        np.where(silent, rows.write_time[source], groups.write_times),
        Liveness(*times),
        Deletion(groups.timestamps, groups.locals_),
        cells,
        complex_deletions,
        groups.digests,
        rows.file.take(source),
        rows.position[source],
        None if rows.node is None else rows.node.take(source),
    )


def _records(count: int) -> Integers:
    return np.empty(count * RECORD_BYTES // 8, np.int64)


def _path_keys(cells: FlatCells, table: TableSchema) -> tuple[Integers, Integers, list[Cells]]:
    """Encode the paths of cells, each by the type of its column.

    :returns: addresses and lengths of the paths' sort keys (0: none), and the arrays that keep them in memory
    """
    addresses, lengths = np.zeros((2, len(cells.row)), np.int64)
    kept = []
    if (cells.path.lengths >= 0).any():
        for column in columns_of(table):
            if column.is_multicell and len(chosen := np.flatnonzero(cells.column == column.number)):
                keys = value_keys(cells.path.take(chosen), path_type(column.type))
                addresses[chosen] = address(keys.buffer) + keys.offsets.astype(np.int64)
                lengths[chosen] = keys.lengths
                kept.append(keys)
    return addresses, lengths, kept


def _limits(table: TableSchema) -> tuple[Integers, npt.NDArray[np.uint8]]:
    """Return ``dropped`` and ``counters`` of ``CellColumns``."""
    dropped_at = {column.name: column.dropped_at for column in table.dropped}
    columns = columns_of(table)
    dropped = np.array([dropped_at.get(column.name, NEVER) for column in columns], np.int64)
    return dropped, np.array([column.is_counter for column in columns], np.uint8)


def _room(rows: ChangeRows, groups: _Groups, parts: FlatDeletions) -> tuple[Members, Memory, Integers, Chosen]:
    """Describe which parts belong to which group, and make room for the parts of the largest group and the result.

    :returns: groups, room for one group, the array that keeps this room in memory, room for the result
    """
    count = len(parts.row)
    sizes = np.bincount(parts.row, minlength=len(rows))
    members = Members(
        groups.order, groups.starts, groups.results, np.concatenate([[0], np.cumsum(sizes)]), groups.timestamps
    )
    ends = np.concatenate([[0], np.cumsum(sizes[groups.order])])[groups.starts]
    most = int(np.diff(ends).max(initial=0))
    records = _records(most)
    memory = Memory(address(records), *np.empty((3, most), np.int32))
    places, limits = np.empty(count, np.int32), np.empty(len(groups.origin) + 1, np.int32)
    columns, timestamps = np.empty((2, count), np.int64)
    return members, memory, records, Chosen(places, columns, timestamps, limits, groups.write_times)


def _chosen(parts: Parts, chosen: Chosen, size: int) -> Parts:
    """Return the parts that were chosen, each in its row of the result."""
    row = np.repeat(np.arange(len(chosen.limits) - 1), np.diff(chosen.limits))
    is_all = size == len(parts.row) and bool((np.diff(chosen.parts) == 1).all())
    return replace(parts if is_all else parts.take(chosen.parts[:size]), row=row)
