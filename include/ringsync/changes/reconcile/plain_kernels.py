"""The kernel that merges plain rows of sorted streams (:mod:`ringsync.changes.plain`), by the rules of cell_kernels.

It gets addresses of int64 words, one block per stream and one for the result; the constants below are byte offsets.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.reconcile.cell_kernels import compare_times
from ringsync.changes.reconcile.row_kernels import outlives, supersedes
from ringsync.changes.schema import EXPIRING, LIVE, NEVER, NO_EXPIRY, NO_TTL, TOMBSTONE
from ringsync.compiled.memory import KERNEL, copy_bytes, load8, load32_native, load64_native, store32, store64
from ringsync.compiled.sorting import compare_bytes

STREAM_WORDS, RESULT_WORDS = 30, 24
STREAM_BYTES = 8 * STREAM_WORDS
(
    TOKEN,
    KEYS,
    KEY_OFFSETS,
    KEY_LENGTHS,
    ORDERED,
    ORDERED_OFFSETS,
    ORDERED_LENGTHS,
    CLUSTERINGS,
    CLUSTERING_OFFSETS,
    CLUSTERING_LENGTHS,
    LIVENESS,
    LIVENESS_TIMESTAMP,
    LIVENESS_TTL,
    LIVENESS_EXPIRES,
    DELETION,
    DELETION_TIMESTAMP,
    DELETION_LOCAL,
    CELL_STARTS,
    COLUMN,
    TIMESTAMP,
    TTL,
    LOCAL,
    CELL_KIND,
    VALUES,
    VALUE_OFFSETS,
    VALUE_LENGTHS,
    NEXT,
    END,
    CELL,
    CELL_END,
) = range(0, STREAM_BYTES, 8)
"""Columns of the rows, ``ORDERED`` being the clusterings' sort keys; then the next row, the number of rows, and the
next cell of the row that is merged, and the one behind its last."""

(
    R_TOKEN,
    R_KEYS,
    R_KEY_OFFSETS,
    R_KEY_LENGTHS,
    R_CLUSTERINGS,
    R_CLUSTERING_OFFSETS,
    R_CLUSTERING_LENGTHS,
    R_LIVENESS_TIMESTAMP,
    R_LIVENESS_TTL,
    R_LIVENESS_EXPIRES,
    R_DELETION_TIMESTAMP,
    R_DELETION_LOCAL,
    R_VALUES,
    R_VALUE_OFFSETS,
    R_VALUE_LENGTHS,
    R_WRITETIMES,
    R_EXPIRIES,
    R_DEAD_ROW,
    R_DEAD_COLUMN,
    R_DEAD_TIMESTAMP,
    R_DEAD_LOCAL,
    R_ROOM,
    R_COPIES,
    R_DEAD,
) = range(0, 8 * RESULT_WORDS, 8)
"""Columns of the rows. Then the grid: bytes of the values; offset, length, writetime and expiry by column and row.
Then the tombstones. Then how many rows there is room for in a line of the grid, whether values are copied or stay in
the bytes of the only stream, and the number of tombstones."""

_NO_COLUMN = 2**31


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merge_plain(streams: int, count: int, members: int, result: int) -> int:
    """Merge rows; return how many there are; -1: the rows of a stream are not in their order.

    :param streams: address of the blocks of ``count`` streams
    :param members: address of room for a word per stream
    :param result: address of the result's block
    """
    rows = key_bytes = clustering_bytes = value_bytes = 0
    left, before, before_row = count, 0, 0
    for number in range(count):
        store64(members + 8 * (count + number), streams + STREAM_BYTES * number)
    while left:
        found = number = 0
        while number < left:
            stream = load64_native(members + 8 * (count + number))
            if load64_native(stream + NEXT) == load64_native(stream + END):
                left -= 1
                store64(members + 8 * (count + number), load64_native(members + 8 * (count + left)))
                continue
            order = -1
            if found:
                other = load64_native(members)
                order = _compare(stream, load64_native(stream + NEXT), other, load64_native(other + NEXT))
            if order <= 0:
                found = 0 if order < 0 else found
                store64(members + 8 * found, stream)
                found += 1
            number += 1
        if found:
            first = load64_native(members)
            if before and _compare(first, load64_native(first + NEXT), before, before_row) <= 0:
                return -1
            before, before_row = first, load64_native(first + NEXT)
            key_bytes = _put_key(load64_native(members), result, rows, key_bytes)
            clustering_bytes = _put_clustering(members, found, result, rows, clustering_bytes)
            value_bytes = _put_content(members, found, result, rows, value_bytes)
            rows += 1
            for number in range(found):
                stream = load64_native(members + 8 * number)
                store64(stream + NEXT, load64_native(stream + NEXT) + 1)
    return rows


@njit(inline="always")  # type: ignore[untyped-decorator]
def _get32(block: int, column: int, row: int) -> int:
    found: int = load32_native(load64_native(block + column) + 4 * row)
    return found


@njit(inline="always")  # type: ignore[untyped-decorator]
def _get64(block: int, column: int, row: int) -> int:
    found: int = load64_native(load64_native(block + column) + 8 * row)
    return found


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put32(block: int, column: int, row: int, value: int) -> None:
    store32(load64_native(block + column) + 4 * row, value)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put64(block: int, column: int, row: int, value: int) -> None:
    store64(load64_native(block + column) + 8 * row, value)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _bytes(block: int, column: int, row: int) -> tuple[int, int]:
    """Return the address and length of a value, whose offsets and lengths are the next two columns."""
    return load64_native(block + column) + _get32(block, column + 8, row), _get32(block, column + 16, row)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _compare(stream: int, row: int, other: int, other_row: int) -> int:
    """Compare rows of two streams by their place in the order."""
    token, other_token = _get64(stream, TOKEN, row), _get64(other, TOKEN, other_row)
    if token != other_token:
        return -1 if token < other_token else 1
    p, length = _bytes(stream, KEYS, row)
    q, other_length = _bytes(other, KEYS, other_row)
    order: int = compare_bytes(p, length, q, other_length)
    if order == 0:
        p, length = _bytes(stream, ORDERED, row)
        q, other_length = _bytes(other, ORDERED, other_row)
        order = compare_bytes(p, length, q, other_length)
    return order


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_key(stream: int, result: int, row: int, size: int) -> int:
    """Write token and partition key of a row; rows of one partition share the bytes. Return the bytes so far."""
    number = load64_native(stream + NEXT)
    token = _get64(stream, TOKEN, number)
    p, length = _bytes(stream, KEYS, number)
    _put64(result, R_TOKEN, row, token)
    place = size
    if row and _get64(result, R_TOKEN, row - 1) == token:
        q, other_length = _bytes(result, R_KEYS, row - 1)
        if compare_bytes(p, length, q, other_length) == 0:
            place = _get32(result, R_KEY_OFFSETS, row - 1)
    if place == size:
        copy_bytes(load64_native(result + R_KEYS) + size, p, length)
        size += length
    _put32(result, R_KEY_OFFSETS, row, place)
    _put32(result, R_KEY_LENGTHS, row, length)
    return size


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_clustering(members: int, count: int, result: int, row: int, size: int) -> int:
    """Write the clustering: of several forms of one value the least bytes. Return the bytes so far."""
    stream = load64_native(members)
    p, length = _bytes(stream, CLUSTERINGS, load64_native(stream + NEXT))
    for number in range(1, count):
        stream = load64_native(members + 8 * number)
        q, other_length = _bytes(stream, CLUSTERINGS, load64_native(stream + NEXT))
        if compare_bytes(q, other_length, p, length) < 0:
            p, length = q, other_length
    copy_bytes(load64_native(result + R_CLUSTERINGS) + size, p, length)
    _put32(result, R_CLUSTERING_OFFSETS, row, size)
    _put32(result, R_CLUSTERING_LENGTHS, row, length)
    size += length
    return size


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_content(members: int, count: int, result: int, row: int, size: int) -> int:
    """Write deletion, liveness and cells. Return the bytes of values so far."""
    deleted = _put_deletion(members, count, result, row)
    _put_liveness(members, count, result, row, deleted)
    if count > 1:
        size = _merge_cells(members, count, result, row, size, deleted)
        return size
    stream = load64_native(members)
    number = load64_native(stream + NEXT)
    for cell in range(_get32(stream, CELL_STARTS, number), _get32(stream, CELL_STARTS, number + 1)):
        if _get64(stream, TIMESTAMP, cell) > deleted:
            size = _put_cell(stream, cell, result, row, size)
    return size


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_deletion(members: int, count: int, result: int, row: int) -> int:
    """Write the row's deletion; return its timestamp, µs."""
    timestamp, local = NEVER, 0
    for number in range(count):
        stream = load64_native(members + 8 * number)
        place = load64_native(stream + NEXT)
        if load8(load64_native(stream + DELETION) + place):
            found, found_local = _get64(stream, DELETION_TIMESTAMP, place), _get64(stream, DELETION_LOCAL, place)
            if supersedes(found, found_local, timestamp, local):
                timestamp, local = found, found_local
    _put64(result, R_DELETION_TIMESTAMP, row, timestamp)
    _put64(result, R_DELETION_LOCAL, row, local)
    return timestamp


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_liveness(members: int, count: int, result: int, row: int, deleted: int) -> None:
    """Write the row's liveness."""
    timestamp, ttl, expires = NEVER, -1, NO_EXPIRY
    for number in range(count):
        stream = load64_native(members + 8 * number)
        place = load64_native(stream + NEXT)
        has = load8(load64_native(stream + LIVENESS) + place)
        if has == 0:
            continue
        found, found_ttl, found_expires = _get64(stream, LIVENESS_TIMESTAMP, place), -1, NO_EXPIRY
        if has == 2:
            found_ttl, found_expires = _get32(stream, LIVENESS_TTL, place), _get64(stream, LIVENESS_EXPIRES, place)
        if found > deleted and (
            timestamp == NEVER or outlives(found, found_ttl, found_expires, timestamp, ttl, expires)
        ):
            timestamp, ttl, expires = found, found_ttl, found_expires
    _put64(result, R_LIVENESS_TIMESTAMP, row, timestamp)
    _put64(result, R_LIVENESS_TTL, row, NO_TTL if ttl < 0 else ttl)
    _put64(result, R_LIVENESS_EXPIRES, row, expires)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _merge_cells(members: int, count: int, result: int, row: int, size: int, deleted: int) -> int:
    """Write the cell that wins of each column. Return the bytes of values so far."""
    for number in range(count):
        stream = load64_native(members + 8 * number)
        place = load64_native(stream + NEXT)
        store64(stream + CELL, _get32(stream, CELL_STARTS, place))
        store64(stream + CELL_END, _get32(stream, CELL_STARTS, place + 1))
    while True:
        column = _NO_COLUMN
        for number in range(count):
            stream = load64_native(members + 8 * number)
            cell = load64_native(stream + CELL)
            if cell < load64_native(stream + CELL_END):
                column = min(column, _get32(stream, COLUMN, cell))
        if column == _NO_COLUMN:
            return size
        best_stream = best = 0
        for number in range(count):
            stream = load64_native(members + 8 * number)
            cell = load64_native(stream + CELL)
            if cell == load64_native(stream + CELL_END) or _get32(stream, COLUMN, cell) != column:
                continue
            store64(stream + CELL, cell + 1)
            if _get64(stream, TIMESTAMP, cell) > deleted and (
                best_stream == 0 or _wins(stream, cell, best_stream, best)
            ):
                best_stream, best = stream, cell
        if best_stream:
            size = _put_cell(best_stream, best, result, row, size)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _wins(stream: int, cell: int, other: int, other_cell: int) -> bool:
    """Tell whether a cell wins against another one."""
    timestamp, other_timestamp = _get64(stream, TIMESTAMP, cell), _get64(other, TIMESTAMP, other_cell)
    if timestamp != other_timestamp:
        return bool(timestamp > other_timestamp)
    return bool(_wins_a_tie(stream, cell, other, other_cell))


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _wins_a_tie(stream: int, cell: int, other: int, other_cell: int) -> bool:
    """Tell whether a cell wins against another one of the same timestamp."""
    kind, other_kind = (
        load8(load64_native(stream + CELL_KIND) + cell),
        load8(load64_native(other + CELL_KIND) + other_cell),
    )
    expiry, ttl = _times(stream, cell, kind)
    other_expiry, other_ttl = _times(other, other_cell, other_kind)
    order: int = compare_times(0, expiry, kind == TOMBSTONE, 0, other_expiry, other_kind == TOMBSTONE)
    if order == 0 and kind != TOMBSTONE:
        p, length = _bytes(stream, VALUES, cell)
        q, other_length = _bytes(other, VALUES, other_cell)
        order = compare_bytes(p, length, q, other_length)
    if order == 0:
        order = ttl - other_ttl
    return order > 0


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _times(stream: int, cell: int, kind: int) -> tuple[int, int]:
    """Return a cell's local deletion time (s; -1: none) and TTL (s; -1: none)."""
    if kind == LIVE:
        return NO_EXPIRY, -1
    return _get64(stream, LOCAL, cell), _get32(stream, TTL, cell) if kind == EXPIRING else -1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_cell(stream: int, cell: int, result: int, row: int, size: int) -> int:
    """Write a cell; return the bytes of values so far."""
    kind = load8(load64_native(stream + CELL_KIND) + cell)
    column = _get32(stream, COLUMN, cell)
    if kind == TOMBSTONE:
        place = load64_native(result + R_DEAD)
        store64(result + R_DEAD, place + 1)
        _put64(result, R_DEAD_ROW, place, row)
        _put64(result, R_DEAD_COLUMN, place, column)
        _put64(result, R_DEAD_TIMESTAMP, place, _get64(stream, TIMESTAMP, cell))
        _put64(result, R_DEAD_LOCAL, place, _get64(stream, LOCAL, cell))
        return size
    place = load64_native(result + R_ROOM) * column + row
    _put64(result, R_WRITETIMES, place, _get64(stream, TIMESTAMP, cell))
    _put64(result, R_EXPIRIES, place, NO_EXPIRY if kind == LIVE else _get64(stream, LOCAL, cell))
    length = _get32(stream, VALUE_LENGTHS, cell)
    _put32(result, R_VALUE_LENGTHS, place, length)
    if load64_native(result + R_COPIES) == 0:
        _put32(result, R_VALUE_OFFSETS, place, _get32(stream, VALUE_OFFSETS, cell))
        return size
    copy_bytes(
        load64_native(result + R_VALUES) + size,
        load64_native(stream + VALUES) + _get32(stream, VALUE_OFFSETS, cell),
        length,
    )
    _put32(result, R_VALUE_OFFSETS, place, size)
    size += length
    return size
