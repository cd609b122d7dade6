"""The compiled half of :mod:`ringsync.changes.reconcile.rows` for the parts of rows: cells and complex deletions.

The parts of a group are sorted by column and path, in memory that all groups share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.changes.reconcile.counter_kernels import merge_contexts
from ringsync.changes.reconcile.row_kernels import cell, compare_cells, supersedes
from ringsync.changes.schema import TOMBSTONE
from ringsync.compiled.arrow import Integers, Places32
from ringsync.compiled.memory import KERNEL, copy_exactly, load32_native, load64_native
from ringsync.compiled.sorting import RECORD_BYTES, compare_second, put_record, sort_records

_NO_EXPIRY = -1
_BEHIND_COLUMNS = 2**31


class Members(NamedTuple):
    """The groups of rows whose parts are reconciled.

    :ivar order: numbers of the rows, sorted by group
    :ivar starts: place of each group's first row in ``order``
    :ivar results: number of each group in the result; -1: the result does not have it
    :ivar limits: number of each row's first part
    :ivar deleted: timestamp of the deletion in force, µs, by number in the result
    """

    order: Places32
    starts: Places32
    results: Places32
    limits: Integers
    deleted: Integers


class CellColumns(NamedTuple):
    """Cells, or complex deletions.

    :ivar columns: number of each cell's column
    :ivar dropped: by column, µs: cells written then or before are gone
    :ivar counters: by column: whether it is a counter
    :ivar ttls: s; -1: none
    :ivar expiries: local deletion times, s; -1: none
    :ivar paths: addresses of the bytes, offsets and lengths; ``values`` likewise
    :ivar sorted_paths: addresses of the paths' sort keys; ``path_lengths``: bytes of these keys
    """

    columns: Integers
    dropped: Integers
    counters: npt.NDArray[np.uint8]
    timestamps: Integers
    ttls: Integers
    expiries: Integers
    kinds: Integers
    paths: tuple[int, int, int]
    values: tuple[int, int, int]
    sorted_paths: Integers
    path_lengths: Integers


class Memory(NamedTuple):
    """Room for the parts of one group: address of the sort records, number of each record's part, their order."""

    records: int
    parts: Places32
    order: Places32
    spare: Places32


class Chosen(NamedTuple):
    """The parts of the result: their numbers, columns and timestamps, the place of each group's first part, and the
    greatest timestamp of each group, which includes theirs."""

    parts: Places32
    columns: Integers
    timestamps: Integers
    limits: Places32
    write_times: Integers


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _sorted_parts(group: int, members: Members, cells: CellColumns, memory: Memory) -> int:
    """Sort the parts of a group by column and path. Return their number."""
    count = 0
    for place in range(members.starts[group], members.starts[group + 1]):
        row = members.order[place]
        for part in range(members.limits[row], members.limits[row + 1]):
            path, length = cells.sorted_paths[part], cells.path_lengths[part]
            put_record(memory.records + RECORD_BYTES * count, cells.columns[part], 0, 0, path, length)
            memory.parts[count] = part
            count += 1
    sort_records(memory.records, count, memory.order, memory.spare)
    return count


@njit(inline="always")  # type: ignore[untyped-decorator]
def _choose(chosen: Chosen, size: int, part: int, column: int, timestamp: int, result: int) -> int:
    """Append a part to the ``size`` parts of the result. Return their number then."""
    chosen.parts[size], chosen.columns[size], chosen.timestamps[size] = part, column, timestamp
    chosen.write_times[result] = max(chosen.write_times[result], timestamp)
    return size + 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merge_complex_deletions(members: Members, cells: CellColumns, memory: Memory, chosen: Chosen) -> int:
    """Choose the greatest complex deletion of each group and column that still deletes. Return their number."""
    size = 0
    chosen.limits[0] = 0
    for group in range(len(members.results)):
        result = members.results[group]
        if result < 0:
            continue
        count = _sorted_parts(group, members, cells, memory)
        best = -1
        for place in range(count):
            part = memory.parts[memory.order[place]]
            column, timestamp = cells.columns[part], cells.timestamps[part]
            if timestamp > max(members.deleted[result], cells.dropped[column]) and (
                best < 0 or supersedes(timestamp, cells.expiries[part], cells.timestamps[best], cells.expiries[best])
            ):
                best = part
            is_last = place + 1 == count or cells.columns[memory.parts[memory.order[place + 1]]] != column
            if is_last and best >= 0:
                size = _choose(chosen, size, best, column, cells.timestamps[best], result)
                best = -1
        chosen.limits[result + 1] = size
    return size


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merge_cells(
    members: Members,
    cells: CellColumns,
    complex_deletions: Chosen,
    memory: Memory,
    contexts: tuple[int, int, int],
    chosen: Chosen,
    value_offsets: Places32,
    value_lengths: Places32,
) -> int:
    """Choose the cell that wins for each group, column and path. Return their number.

    :param contexts: for counters: address of scratch memory, bytes of half of it, offset after the values at which
        merged contexts can be written
    :param value_offsets: output: offsets of the chosen cells' values; ``value_lengths``: output: their lengths
    """
    size = 0
    chosen.limits[0] = 0
    scratch, scratch_bytes, behind = contexts
    for group in range(len(members.results)):
        result = members.results[group]
        if result < 0:
            continue
        if _are_simple(group, members, cells, len(memory.spare)):
            size = _merge_simple(
                group, result, members, cells, memory.spare, chosen, size, value_offsets, value_lengths
            )
            chosen.limits[result + 1] = size
            continue
        count = _sorted_parts(group, members, cells, memory)
        first = 0
        while first < count:
            end = _same_path(memory, first, count)
            column = cells.columns[memory.parts[memory.order[first]]]
            floor = _floor(members, cells, complex_deletions, result, column)
            best = -1
            for place in range(first, end):
                part = memory.parts[memory.order[place]]
                if cells.timestamps[part] > floor and (best < 0 or _wins(part, best, cells.counters[column], cells)):
                    best = part
            if best >= 0:
                value_offsets[size] = load32_native(cells.values[1] + 4 * best)
                value_lengths[size] = load32_native(cells.values[2] + 4 * best)
                if cells.counters[column] and cells.kinds[best] != TOMBSTONE and end > first + 1:
                    length = _merge_counters(cells, memory, first, end, floor, scratch, scratch_bytes, behind)
                    value_offsets[size], value_lengths[size] = behind, length
                    behind += length
                size = _choose(chosen, size, best, column, cells.timestamps[best], result)
            first = end
        chosen.limits[result + 1] = size
    return size


@njit(inline="always")  # type: ignore[untyped-decorator]
def _are_simple(group: int, members: Members, cells: CellColumns, room: int) -> bool:
    """Tell whether the cells of a group's rows are sorted by column already, one of each: almost all are.

    :param room: number of rows for which there is room
    """
    if members.starts[group + 1] - members.starts[group] > room:
        return False
    for place in range(members.starts[group], members.starts[group + 1]):
        row, before = members.order[place], -1
        for part in range(members.limits[row], members.limits[row + 1]):
            column = cells.columns[part]
            if column <= before or cells.path_lengths[part] or cells.counters[column]:
                return False
            before = column
    return True


@njit(inline="always")  # type: ignore[untyped-decorator]
def _merge_simple(
    group: int,
    result: int,
    members: Members,
    cells: CellColumns,
    cursors: Places32,
    chosen: Chosen,
    size: int,
    value_offsets: Places32,
    value_lengths: Places32,
) -> int:
    """Choose the cells of a group like :func:`merge_cells`, if no row has to be sorted.

    :param cursors: room for a number per row of the group
    """
    start, count = members.starts[group], members.starts[group + 1] - members.starts[group]
    for number in range(count):
        cursors[number] = members.limits[members.order[start + number]]
    while True:
        column = _BEHIND_COLUMNS
        for number in range(count):
            part = cursors[number]
            if part < members.limits[members.order[start + number] + 1]:
                column = min(column, cells.columns[part])
        if column == _BEHIND_COLUMNS:
            return size
        floor, best = max(members.deleted[result], cells.dropped[column]), -1
        for number in range(count):
            part = cursors[number]
            if part < members.limits[members.order[start + number] + 1] and cells.columns[part] == column:
                cursors[number] += 1
                if cells.timestamps[part] > floor and (best < 0 or _wins(part, best, 0, cells)):
                    best = part
        if best >= 0:
            value_offsets[size] = load32_native(cells.values[1] + 4 * best)
            value_lengths[size] = load32_native(cells.values[2] + 4 * best)
            size = _choose(chosen, size, best, column, cells.timestamps[best], result)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _same_path(memory: Memory, first: int, count: int) -> int:
    """Return the place after the parts with the same column and path as the one at ``first``."""
    record = memory.records + RECORD_BYTES * memory.order[first]
    end = first + 1
    while end < count:
        other = memory.records + RECORD_BYTES * memory.order[end]
        if load64_native(other) != load64_native(record) or compare_second(record, other, 0) != 0:
            break
        end += 1
    return end


@njit(inline="always")  # type: ignore[untyped-decorator]
def _floor(members: Members, cells: CellColumns, deletions: Chosen, result: int, column: int) -> int:
    """Return the time of the latest deletion of a row's column, µs: cells written then or before are gone."""
    floor: int = max(members.deleted[result], cells.dropped[column])
    for place in range(deletions.limits[result], deletions.limits[result + 1]):
        if deletions.columns[place] == column:
            floor = max(floor, deletions.timestamps[place])
    return floor


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _merge_counters(
    cells: CellColumns,
    memory: Memory,
    first: int,
    end: int,
    floor: int,
    scratch: int,
    scratch_bytes: int,
    behind: int,
) -> int:
    """Merge the contexts of the cells that are later than ``floor``. Write the result after the values."""
    p = length = side = 0
    for place in range(first, end):
        part = memory.parts[memory.order[place]]
        if cells.timestamps[part] <= floor:
            continue
        q, q_length = cell(cells.values, part)
        if p == 0:
            p, length = q, q_length
            continue
        length = merge_contexts(p, length, q, q_length, scratch + side)
        p = scratch + side
        side = scratch_bytes - side
    copy_exactly(cells.values[0] + behind, p, length)
    return length


@njit(inline="always")  # type: ignore[untyped-decorator]
def compare_times(
    timestamp: int, expiry: int, dead: bool, other_timestamp: int, other_expiry: int, other_dead: bool
) -> int:
    """Compare two cells by all but their values; the greater one wins.

    :param timestamp: µs; ``expiry``: local deletion time, s; -1: none; ``dead``: whether it is a tombstone
    """
    if timestamp != other_timestamp:
        return 1 if timestamp > other_timestamp else -1
    ends, other_ends = expiry != _NO_EXPIRY, other_expiry != _NO_EXPIRY
    if ends != other_ends:
        return 1 if ends else -1
    if dead != other_dead:
        return 1 if dead else -1
    if expiry != other_expiry:
        return 1 if expiry > other_expiry else -1
    return 0


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _wins(part: int, other: int, is_counter: int, cells: CellColumns) -> bool:
    """Tell whether a cell wins against another (C: Cells.resolveRegular and resolveCounter).

    A counter's tombstone always wins; of two live counter cells the later timestamp counts. TTL and bytes of the path
    are compared last, so that there is always one answer.
    """
    dead, other_dead = cells.kinds[part] == TOMBSTONE, cells.kinds[other] == TOMBSTONE
    if is_counter and dead != other_dead:
        return bool(dead)
    timestamp, other_timestamp = cells.timestamps[part], cells.timestamps[other]
    expiry, other_expiry = cells.expiries[part], cells.expiries[other]
    order: int = compare_times(timestamp, expiry, dead, other_timestamp, other_expiry, other_dead)
    if order == 0:
        order = compare_cells(cells.values, part, other)
    if order == 0:
        order = cells.ttls[part] - cells.ttls[other]
    if order == 0:
        order = compare_cells(cells.paths, part, other)
    return order > 0
