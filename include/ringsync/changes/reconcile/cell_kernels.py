"""The compiled half of :mod:`ringsync.changes.reconcile.rows` for the parts of rows: cells and complex deletions.

A group's parts are sorted by column and path in memory that the next group uses again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.changes.reconcile.counter_kernels import merge_contexts
from ringsync.changes.reconcile.row_kernels import Places, cell, compare_cells, supersedes
from ringsync.changes.schema import TOMBSTONE
from ringsync.compiled.arrow import Integers
from ringsync.compiled.memory import KERNEL, copy_exactly, load32_native, load64_native
from ringsync.compiled.sorting import RECORD_BYTES, compare_second, put_record, sort_records

_NO_EXPIRY = -1


class Members(NamedTuple):
    """Whose parts are merged.

    :ivar order: rows, those of a group one behind the other; ``starts``: where each group begins
    :ivar results: number of each group in the result; -1: it is not there
    :ivar limits: whose parts are whose, by row
    :ivar deleted: timestamp of the deletion in force, by number in the result
    """

    order: Places
    starts: Places
    results: Places
    limits: Integers
    deleted: Integers


class CellColumns(NamedTuple):
    """Cells, or complex deletions.

    :ivar columns: their numbers; ``dropped``: µs, by column: what was written then or before is gone
    :ivar counters: whether a column is one
    :ivar ttls: s; -1: none
    :ivar expiries: s, local deletion times; -1: none
    :ivar paths: addresses of bytes, offsets and lengths, as of ``values``
    :ivar sorted_paths: addresses of paths as they sort, and ``path_lengths``
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
    """Room for the parts of one group: what is sorted, by address; which part each is; its order."""

    records: int
    parts: Places
    order: Places
    spare: Places


class Chosen(NamedTuple):
    """The parts of the result: which ones, their columns and timestamps, where those of each group begin, and the
    greatest timestamp of each group, which theirs are counted for."""

    parts: Places
    columns: Integers
    timestamps: Integers
    limits: Places
    write_times: Integers


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _sorted_parts(group: int, members: Members, cells: CellColumns, memory: Memory) -> int:
    """Sort the parts of a group by column and path; how many there are."""
    found = 0
    for place in range(members.starts[group], members.starts[group + 1]):
        row = members.order[place]
        for part in range(members.limits[row], members.limits[row + 1]):
            path, length = cells.sorted_paths[part], cells.path_lengths[part]
            put_record(memory.records + RECORD_BYTES * found, cells.columns[part], 0, 0, path, length)
            memory.parts[found] = part
            found += 1
    sort_records(memory.records, found, memory.order, memory.spare)
    return found


@njit(inline="always")  # type: ignore[untyped-decorator]
def _choose(chosen: Chosen, found: int, part: int, column: int, timestamp: int, result: int) -> int:
    """Put a part into the result; how many there are then."""
    chosen.parts[found], chosen.columns[found], chosen.timestamps[found] = part, column, timestamp
    chosen.write_times[result] = max(chosen.write_times[result], timestamp)
    return found + 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merge_complex_deletions(members: Members, cells: CellColumns, memory: Memory, chosen: Chosen) -> int:
    """The greatest complex deletion of each group and column that counts still; how many there are."""
    found = 0
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
                found = _choose(chosen, found, best, column, cells.timestamps[best], result)
                best = -1
        chosen.limits[result + 1] = found
    return found


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merge_cells(
    members: Members,
    cells: CellColumns,
    complex_deletions: Chosen,
    memory: Memory,
    contexts: tuple[int, int, int],
    chosen: Chosen,
    value_offsets: Places,
    value_lengths: Places,
) -> int:
    """The cell that wins of each group, column and path; how many there are.

    :param contexts: for those of counters: an address with twice as many bytes as then follows, and where behind the
        other values merged ones can be written
    :param value_offsets: gets where the values of the chosen cells are, ``value_lengths`` their bytes
    """
    found = 0
    chosen.limits[0] = 0
    scratch, scratch_bytes, behind = contexts
    for group in range(len(members.results)):
        result = members.results[group]
        if result < 0:
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
                value_offsets[found] = load32_native(cells.values[1] + 4 * best)
                value_lengths[found] = load32_native(cells.values[2] + 4 * best)
                if cells.counters[column] and cells.kinds[best] != TOMBSTONE and end > first + 1:
                    length = _merge_counters(cells, memory, first, end, floor, scratch, scratch_bytes, behind)
                    value_offsets[found], value_lengths[found] = behind, length
                    behind += length
                found = _choose(chosen, found, best, column, cells.timestamps[best], result)
            first = end
        chosen.limits[result + 1] = found
    return found


@njit(inline="always")  # type: ignore[untyped-decorator]
def _same_path(memory: Memory, first: int, count: int) -> int:
    """The place behind those of the same column and path as the one at ``first``."""
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
    """µs: what was written to a column of a row then or before is gone."""
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
    """Merge the contexts of the cells that are later than ``floor`` and write the result behind the values."""
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


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _wins(one: int, other: int, is_counter: int, cells: CellColumns) -> bool:
    """C: Cells.resolveRegular and resolveCounter; TTL and bytes of the path last, so that there is always one answer.

    A counter's tombstone wins always; of two live cells the later one's timestamp counts.
    """
    dead, other_dead = cells.kinds[one] == TOMBSTONE, cells.kinds[other] == TOMBSTONE
    if is_counter and dead != other_dead:
        return bool(dead)
    if cells.timestamps[one] != cells.timestamps[other]:
        return bool(cells.timestamps[one] > cells.timestamps[other])
    ends, other_ends = cells.expiries[one] != _NO_EXPIRY, cells.expiries[other] != _NO_EXPIRY
    if ends != other_ends:
        return bool(ends)
    if dead != other_dead:
        return bool(dead)
    if cells.expiries[one] != cells.expiries[other]:
        return bool(cells.expiries[one] > cells.expiries[other])
    found: int = compare_cells(cells.values, one, other)
    if found == 0:
        found = cells.ttls[one] - cells.ttls[other]
    if found == 0:
        found = compare_cells(cells.paths, one, other)
    return found > 0
