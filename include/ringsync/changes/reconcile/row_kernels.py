"""The compiled half of :mod:`ringsync.changes.reconcile.rows`.

Change rows about the same thing (a row, a static row, a partition's deletion, a range) are members of one group. Groups
are numbered in the order of the result. Integers are passed as arrays, bytes as addresses and lengths.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.changes.digest import DIGEST_BYTES
from ringsync.changes.schema import NEVER, PARTITION_DELETION, RANGE_DELETION, ROW, STATIC
from ringsync.compiled.arrow import Integers, Places32
from ringsync.compiled.memory import KERNEL, copy16, copy_exactly, load32_native, load64, store8
from ringsync.compiled.sorting import (
    RECORD_BYTES,
    compare_bytes,
    compare_first,
    compare_second,
    put_record,
)
from ringsync.cql.codec.encode_kernels import store_big_endian

_EXPIRED_TTL = 2**31 - 1
"""TTL of a dead liveness, which views write (C: LivenessInfo.EXPIRED_LIVENESS_TTL)."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def _rank(kind: int) -> int:
    """Return the place of this kind of rows in the order within a partition."""
    if kind == PARTITION_DELETION:
        return 0
    if kind == STATIC:
        return 1
    return 2 if kind == RANGE_DELETION else 3


@njit(inline="always")  # type: ignore[untyped-decorator]
def cell(cells: tuple[int, int, int], row: int) -> tuple[int, int]:
    """Return the address and length of a value; null has length 0.

    :param cells: addresses of the bytes, the offsets and the lengths
    """
    base, offsets, lengths = cells
    return base + load32_native(offsets + 4 * row), max(load32_native(lengths + 4 * row), 0)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def describe_rows(
    by_token: Places32,
    tokens: Integers,
    kinds: Integers,
    keys: tuple[int, int, int],
    clusterings: tuple[int, int, int],
    ends: tuple[int, int, int],
    digests: int,
    output: int,
    records: int,
) -> None:
    """Write the sort records of rows: token, key, then rank, clustering (for a range: start and end) and digest.

    :param by_token: rows in the order of their tokens: each gets the next record
    :param keys: addresses of the partition keys' bytes, offsets and lengths; ``clusterings`` and ``ends``: the same for
        the sort keys of clusterings and range ends
    :param output: address with room for the bytes of all records
    """
    for place in range(len(by_token)):
        row = by_token[place]
        q = output
        store8(q, _rank(kinds[row]))
        q += 1
        p, length = cell(clusterings, row)
        copy_exactly(q, p, length)
        q += length
        p, length = cell(ends, row)
        copy_exactly(q, p, length)
        q += length
        copy16(q, digests + DIGEST_BYTES * row)
        q += DIGEST_BYTES
        key, key_length = cell(keys, row)
        put_record(records + RECORD_BYTES * place, tokens[row], key, key_length, output, q - output)
        output = q


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def find_groups(records: int, count: int, order: Places32, starts: Places32, partitions: npt.NDArray[np.uint8]) -> int:
    """Find the groups in ``order``: the start of each, and whether a partition starts there. Return their number."""
    groups = 0
    for place in range(count):
        new_partition = new_group = True
        if place:
            a, b = records + RECORD_BYTES * order[place - 1], records + RECORD_BYTES * order[place]
            new_partition = compare_first(a, b) != 0
            new_group = new_partition or compare_second(a, b, DIGEST_BYTES) != 0
        if new_group:
            starts[groups] = place
            partitions[groups] = new_partition
            groups += 1
    starts[groups] = count
    return groups


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def choose_members(
    order: Places32,
    starts: Places32,
    groups: int,
    write_times: Integers,
    positions: Integers,
    versions: Integers,
    files: tuple[int, int, int],
    nodes: tuple[int, int, int],
    clusterings: tuple[int, int, int],
    ends: tuple[int, int, int],
    digests: int,
    origin: Places32,
    start_of: Places32,
    end_of: Places32,
    merged_digests: int,
) -> None:
    """Choose for each group the rows that give its source, its clustering and its range end. Compute its digest.

    Of equal clusterings with different bytes the least bytes are taken, so the order of the rows does not matter.
    """
    for group in range(groups):
        first = order[starts[group]]
        latest = start = end = first
        high, low = load64(digests + DIGEST_BYTES * first), load64(digests + DIGEST_BYTES * first + 8)
        for place in range(starts[group] + 1, starts[group + 1]):
            row, before = order[place], order[place - 1]
            if _is_later(row, latest, write_times, positions, versions, files, nodes):
                latest = row
            if compare_cells(clusterings, row, start) < 0:
                start = row
            if compare_cells(ends, row, end) < 0:
                end = row
            digest = digests + DIGEST_BYTES * row
            if compare_bytes(digest, DIGEST_BYTES, digests + DIGEST_BYTES * before, DIGEST_BYTES) != 0:
                high += load64(digest)
                low += load64(digest + 8)
        origin[group], start_of[group], end_of[group] = latest, start, end
        digest = merged_digests + DIGEST_BYTES * group
        store_big_endian(digest, high, 8)
        store_big_endian(digest + 8, low, 8)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def compare_cells(cells: tuple[int, int, int], row: int, other: int) -> int:
    """Compare two values of a column by their bytes."""
    p, length = cell(cells, row)
    q, other_length = cell(cells, other)
    order: int = compare_bytes(p, length, q, other_length)
    return order


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _is_later(
    row: int,
    other: int,
    write_times: Integers,
    positions: Integers,
    versions: Integers,
    files: tuple[int, int, int],
    nodes: tuple[int, int, int],
) -> bool:
    """Compare rows by write time, file, position; then by node and version, so that their order does not matter."""
    if write_times[row] != write_times[other]:
        return bool(write_times[row] > write_times[other])
    order: int = compare_cells(files, row, other)
    if order == 0:
        order = positions[row] - positions[other]
    if order == 0:
        order = compare_cells(nodes, row, other)
    if order == 0:
        order = versions[row] - versions[other]
    return order > 0


@njit(inline="always")  # type: ignore[untyped-decorator]
def supersedes(timestamp: int, local: int, other_timestamp: int, other_local: int) -> bool:
    """Tell whether a deletion supersedes another (C: DeletionTime.supersedes)."""
    return timestamp > other_timestamp or (timestamp == other_timestamp and local > other_local)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merge_deletions(
    order: Places32,
    starts: Places32,
    groups: int,
    partitions: npt.NDArray[np.uint8],
    kinds: Integers,
    row_timestamps: Integers,
    row_locals: Integers,
    timestamps: Integers,
    locals_: Integers,
    kept: npt.NDArray[np.uint8],
) -> None:
    """Find the deletion of each group, including its partition's. Drop ranges that the partition's deletion covers.

    :param row_timestamps: timestamps of the rows' own deletions, µs; NEVER: none
    :param timestamps: output: timestamps of the groups' deletions, likewise
    :param kept: output: whether the group stays
    """
    partition_timestamp, partition_local = NEVER, np.int64(0)
    for group in range(groups):
        if partitions[group]:
            partition_timestamp, partition_local = NEVER, np.int64(0)
        timestamp, local = NEVER, np.int64(0)
        for place in range(starts[group], starts[group + 1]):
            row = order[place]
            if supersedes(row_timestamps[row], row_locals[row], timestamp, local):
                timestamp, local = row_timestamps[row], row_locals[row]
        kind = kinds[order[starts[group]]]
        kept[group] = 1
        if kind == PARTITION_DELETION:
            partition_timestamp, partition_local = timestamp, local
        elif not supersedes(timestamp, local, partition_timestamp, partition_local):
            kept[group] = kind != RANGE_DELETION
            timestamp, local = partition_timestamp, partition_local
        timestamps[group], locals_[group] = timestamp, local


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def cover_rows(
    order: Places32,
    starts: Places32,
    groups: int,
    partitions: npt.NDArray[np.uint8],
    kinds: Integers,
    clusterings: tuple[int, int, int],
    ends: tuple[int, int, int],
    kept: npt.NDArray[np.uint8],
    timestamps: Integers,
    locals_: Integers,
) -> None:
    """Give each row the greatest deletion of the ranges that cover it, if it is greater than the row's.

    The ranges that have begun are a heap with the greatest deletion on top.
    """
    heap, ranges = np.empty(groups, np.int32), np.empty(groups, np.int32)
    heaped = begun = known = 0
    for group in range(groups):
        if partitions[group]:
            heaped = begun = known = 0
        row = order[starts[group]]
        if kinds[row] == RANGE_DELETION and kept[group]:
            ranges[known] = group
            known += 1
        if kinds[row] != ROW or not known:
            continue
        while begun < known and not _is_beyond(clusterings, order[starts[ranges[begun]]], clusterings, row):
            heap[heaped] = ranges[begun]
            heaped += 1
            begun += 1
            _rise(heap, heaped, timestamps, locals_)
        # Ended ranges are removed only when they reach the top.
        while heaped and not _is_beyond(ends, order[starts[heap[0]]], clusterings, row):
            heaped -= 1
            heap[0] = heap[heaped]
            _sink(heap, heaped, timestamps, locals_)
        if heaped and supersedes(timestamps[heap[0]], locals_[heap[0]], timestamps[group], locals_[group]):
            timestamps[group], locals_[group] = timestamps[heap[0]], locals_[heap[0]]


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _is_beyond(bounds: tuple[int, int, int], bound: int, clusterings: tuple[int, int, int], row: int) -> bool:
    """Tell whether a bound is after a row."""
    p, length = cell(bounds, bound)
    q, other_length = cell(clusterings, row)
    order: int = compare_bytes(p, length, q, other_length)
    return order > 0


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _rise(heap: Places32, count: int, timestamps: Integers, locals_: Integers) -> None:
    """Move the last range up to its place in the heap: no range supersedes the one above it."""
    place = count - 1
    while place:
        above = (place - 1) // 2
        a, b = heap[above], heap[place]
        if not supersedes(timestamps[b], locals_[b], timestamps[a], locals_[a]):
            break
        heap[above], heap[place] = b, a
        place = above


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _sink(heap: Places32, count: int, timestamps: Integers, locals_: Integers) -> None:
    """Move the first range down to its place in the heap."""
    place = 0
    while 2 * place + 1 < count:
        below = 2 * place + 1
        if below + 1 < count:
            a, b = heap[below], heap[below + 1]
            if supersedes(timestamps[b], locals_[b], timestamps[a], locals_[a]):
                below += 1
        a, b = heap[place], heap[below]
        if not supersedes(timestamps[b], locals_[b], timestamps[a], locals_[a]):
            break
        heap[place], heap[below] = b, a
        place = below


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merge_liveness(
    order: Places32,
    starts: Places32,
    groups: int,
    row_timestamps: Integers,
    ttls: Integers,
    expiries: Integers,
    deleted: Integers,
    chosen: Places32,
    write_times: Integers,
) -> None:
    """Choose the row whose liveness each group has (-1: none), and the group's greatest timestamp so far.

    :param row_timestamps: timestamps of the rows' liveness, µs; NEVER: none
    :param ttls: s; -1: none
    :param deleted: timestamp of the deletion in force, µs, by group
    """
    for group in range(groups):
        best = -1
        for place in range(starts[group], starts[group + 1]):
            row = order[place]
            if row_timestamps[row] > deleted[group] and (best < 0 or _lives(row, best, row_timestamps, ttls, expiries)):
                best = row
        chosen[group] = best
        write_times[group] = deleted[group] if best < 0 else row_timestamps[best]


@njit(inline="always")  # type: ignore[untyped-decorator]
def _lives(row: int, other: int, timestamps: Integers, ttls: Integers, expiries: Integers) -> bool:
    """Tell whether the liveness of a row wins against that of another one."""
    timestamp, other_timestamp = timestamps[row], timestamps[other]
    return bool(outlives(timestamp, ttls[row], expiries[row], other_timestamp, ttls[other], expiries[other]))


@njit(inline="always")  # type: ignore[untyped-decorator]
def outlives(timestamp: int, ttl: int, expiry: int, other_timestamp: int, other_ttl: int, other_expiry: int) -> bool:
    """Tell whether a liveness wins (C: LivenessInfo.supersedes); the TTL is last, so there is always one answer.

    :param timestamp: µs; ``ttl``: s; -1: none; ``expiry``: s
    """
    if timestamp != other_timestamp:
        return timestamp > other_timestamp
    if (ttl == _EXPIRED_TTL) != (other_ttl == _EXPIRED_TTL):
        return ttl == _EXPIRED_TTL
    if (ttl < 0) != (other_ttl < 0):
        return other_ttl < 0
    if ttl < 0 or expiry == other_expiry:
        return ttl > other_ttl
    return expiry > other_expiry
