"""Kernels that merge plain rows of sorted streams (:mod:`ringsync.changes.plain`), by the rules of cell_kernels.

The first finds which rows are one, the second merges them. They get addresses of int64 words, one block per stream and
one for the result; the constants below are byte offsets.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.common_times import NO_CELL
from ringsync.changes.reconcile.cell_kernels import compare_times
from ringsync.changes.reconcile.row_kernels import outlives, supersedes
from ringsync.changes.schema import EXPIRING, LIVE, NEVER, NO_EXPIRY, NO_TTL, TOMBSTONE
from ringsync.compiled.memory import KERNEL, copy_bytes, load8, load32_native, load64_native, store32, store64
from ringsync.compiled.sorting import compare_bytes
from ringsync.cql.cells import NULL_LENGTH

STREAM_WORDS, RESULT_WORDS = 28, 25
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
) = range(0, STREAM_BYTES, 8)
"""Columns of the rows, ``ORDERED`` being the clusterings' sort keys; then the next row, and the number of rows."""

(
    R_ROWS,
    R_COLUMNS,
    R_COPIES,
    R_KEYS,
    R_KEY_OFFSETS,
    R_KEY_LENGTHS,
    R_CLUSTERINGS,
    R_CLUSTERING_OFFSETS,
    R_CLUSTERING_LENGTHS,
    R_VALUES,
    R_VALUE_OFFSETS,
    R_VALUE_LENGTHS,
    R_TOKEN,
    R_LIVENESS_TIMESTAMP,
    R_LIVENESS_TTL,
    R_LIVENESS_EXPIRES,
    R_DELETION_TIMESTAMP,
    R_DELETION_LOCAL,
    R_WRITETIMES,
    R_EXPIRIES,
    R_DEAD_ROW,
    R_DEAD_COLUMN,
    R_DEAD_TIMESTAMP,
    R_DEAD_LOCAL,
    R_DEAD,
) = range(0, 8 * RESULT_WORDS, 8)
"""The numbers of rows and columns, and whether values are copied or stay in the bytes of the only stream. Then keys,
clusterings, and values by column and row. Then what only :func:`merge_rows` writes: times of the rows; writetimes and
expiries by column and row; the tombstones, and their number."""

ROW_BITS = 32
_ROW = 2**ROW_BITS - 1


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def order_rows(streams: int, count: int, scratch: int, members: int, starts: int) -> int:
    """Find the rows of all streams that are one; return how many there are; -1: a stream's are not in their order.

    :param streams: address of the blocks of ``count`` streams
    :param scratch: address of room for three words per stream
    :param members: output, address of int64 per row: number of the stream and of the row; those that are one together
    :param starts: output, address of int32: place in ``members`` of the first member of each row, and the end
    """
    left = 0
    for number in range(count):
        stream = streams + STREAM_BYTES * number
        if load64_native(stream + NEXT) < load64_native(stream + END):
            store64(scratch + 8 * left, stream)
            store64(scratch + 8 * (count + left), get64(stream, TOKEN, load64_native(stream + NEXT)))
            left += 1
    rows = place = before = before_row = before_token = 0
    while left:
        token, found = _find_first(scratch, count, left)
        first = load64_native(scratch + 8 * load64_native(scratch + 16 * count))
        first_row = load64_native(first + NEXT)
        if before and (
            before_token > token or (before_token == token and _compare(before, before_row, first, first_row) >= 0)
        ):
            return -1
        before, before_row, before_token = first, first_row, token
        store32(starts + 4 * rows, place)
        rows += 1
        for member in range(found - 1, -1, -1):  # the last stream takes the place of one that ends
            number = load64_native(scratch + 8 * (2 * count + member))
            stream = load64_native(scratch + 8 * number)
            row = load64_native(stream + NEXT)
            store64(members + 8 * place, (stream - streams) // STREAM_BYTES << ROW_BITS | row)
            place += 1
            store64(stream + NEXT, row + 1)
            if row + 1 == load64_native(stream + END):
                left -= 1
                store64(scratch + 8 * number, load64_native(scratch + 8 * left))
                store64(scratch + 8 * (count + number), load64_native(scratch + 8 * (count + left)))
            else:
                store64(scratch + 8 * (count + number), get64(stream, TOKEN, row + 1))
    store32(starts + 4 * rows, place)
    return rows


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _find_first(scratch: int, count: int, left: int) -> tuple[int, int]:
    """Find the streams whose next row is the first one in the order; return its token, and their number.

    :param scratch: address of ``left`` streams; ``count`` words behind, of their tokens; then of the output: places
    """
    tokens, places = scratch + 8 * count, scratch + 16 * count
    token = load64_native(tokens)
    for number in range(1, left):
        token = min(token, load64_native(tokens + 8 * number))
    found = 0
    for number in range(left):
        if load64_native(tokens + 8 * number) != token:
            continue
        order = -1
        if found:
            stream, other = load64_native(scratch + 8 * number), load64_native(scratch + 8 * load64_native(places))
            order = _compare(stream, load64_native(stream + NEXT), other, load64_native(other + NEXT))
        if order <= 0:
            found = 0 if order < 0 else found
            store64(places + 8 * found, number)
            found += 1
    return token, found


@njit(inline="always")  # type: ignore[untyped-decorator]
def get32(block: int, column: int, row: int) -> int:
    found: int = load32_native(load64_native(block + column) + 4 * row)
    return found


@njit(inline="always")  # type: ignore[untyped-decorator]
def get64(block: int, column: int, row: int) -> int:
    found: int = load64_native(load64_native(block + column) + 8 * row)
    return found


@njit(inline="always")  # type: ignore[untyped-decorator]
def put32(block: int, column: int, row: int, value: int) -> None:
    store32(load64_native(block + column) + 4 * row, value)


@njit(inline="always")  # type: ignore[untyped-decorator]
def put64(block: int, column: int, row: int, value: int) -> None:
    store64(load64_native(block + column) + 8 * row, value)


@njit(inline="always")  # type: ignore[untyped-decorator]
def bytes_of(block: int, column: int, row: int) -> tuple[int, int]:
    """Return the address and length of a value, whose offsets and lengths are the next two columns."""
    return load64_native(block + column) + get32(block, column + 8, row), get32(block, column + 16, row)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _compare(stream: int, row: int, other: int, other_row: int) -> int:
    """Compare rows of the same token by partition key, then by clustering."""
    p, length = bytes_of(stream, KEYS, row)
    q, other_length = bytes_of(other, KEYS, other_row)
    order = 0 if p == q else compare_bytes(p, length, q, other_length)
    if order == 0:
        p, length = bytes_of(stream, ORDERED, row)
        q, other_length = bytes_of(other, ORDERED, other_row)
        order = compare_bytes(p, length, q, other_length)
    return order


@njit(inline="always")  # type: ignore[untyped-decorator]
def member_of(streams: int, members: int, place: int) -> tuple[int, int]:
    """Return the address of a member's stream, and its row."""
    member = load64_native(members + 8 * place)
    return streams + STREAM_BYTES * (member >> ROW_BITS), member & _ROW


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merge_rows(streams: int, members: int, starts: int, winners: int, result: int) -> None:
    """Merge the rows that :func:`order_rows` has found.

    :param winners: address of room for two words per column
    :param result: address of the result's block
    """
    key_bytes = clustering_bytes = value_bytes = before = before_row = 0
    for row in range(load64_native(result + R_ROWS)):
        first, end = load32_native(starts + 4 * row), load32_native(starts + 4 * row + 4)
        stream, number = member_of(streams, members, first)
        key_bytes = put_key(stream, number, before, before_row, result, row, key_bytes)
        before, before_row = stream, number
        put64(result, R_TOKEN, row, get64(stream, TOKEN, number))
        if end - first == 1:
            p, length = bytes_of(stream, CLUSTERINGS, number)
            deleted, local = deletion_of(stream, number)
            lives = liveness_of(stream, number, deleted)
            value_bytes = _put_cells(stream, number, result, row, value_bytes, deleted)
        else:
            p, length = least_clustering(streams, members, first, end)
            deleted, local = merged_deletion(streams, members, first, end)
            lives = merged_liveness(streams, members, first, end, deleted)
            find_winners(streams, members, first, end, winners, deleted, load64_native(result + R_COLUMNS))
            value_bytes = _put_winners(winners, result, row, value_bytes)
        clustering_bytes = put_clustering(p, length, result, row, clustering_bytes)
        put64(result, R_DELETION_TIMESTAMP, row, deleted)
        put64(result, R_DELETION_LOCAL, row, local)
        timestamp, ttl, expires = lives
        put64(result, R_LIVENESS_TIMESTAMP, row, timestamp)
        put64(result, R_LIVENESS_TTL, row, NO_TTL if ttl < 0 else ttl)
        put64(result, R_LIVENESS_EXPIRES, row, expires)


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_key(stream: int, number: int, before: int, before_row: int, result: int, row: int, size: int) -> int:
    """Write the partition key of a row; rows of one partition share the bytes. Return the bytes so far.

    :param before: stream of the row before, whose row there is ``before_row``; 0: there is none
    """
    p, length = bytes_of(stream, KEYS, number)
    place = size
    if before:
        q, other_length = bytes_of(before, KEYS, before_row)
        if p == q or compare_bytes(p, length, q, other_length) == 0:
            place = get32(result, R_KEY_OFFSETS, row - 1)
    if place == size:
        copy_bytes(load64_native(result + R_KEYS) + size, p, length)
        size += length
    put32(result, R_KEY_OFFSETS, row, place)
    put32(result, R_KEY_LENGTHS, row, length)
    return size


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_clustering(p: int, length: int, result: int, row: int, size: int) -> int:
    """Write the clustering of a row. Return the bytes so far."""
    copy_bytes(load64_native(result + R_CLUSTERINGS) + size, p, length)
    put32(result, R_CLUSTERING_OFFSETS, row, size)
    put32(result, R_CLUSTERING_LENGTHS, row, length)
    size += length
    return size


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def least_clustering(streams: int, members: int, first: int, end: int) -> tuple[int, int]:
    """Return address and length of the clustering: of several forms of one value the least bytes."""
    stream, number = member_of(streams, members, first)
    p, length = bytes_of(stream, CLUSTERINGS, number)
    for place in range(first + 1, end):
        stream, number = member_of(streams, members, place)
        q, other_length = bytes_of(stream, CLUSTERINGS, number)
        if compare_bytes(q, other_length, p, length) < 0:
            p, length = q, other_length
    return p, length


@njit(inline="always")  # type: ignore[untyped-decorator]
def deletion_of(stream: int, number: int) -> tuple[int, int]:
    """Return the deletion of a row of a stream: its timestamp (µs), and local time (s)."""
    if load8(load64_native(stream + DELETION) + number) == 0:
        return NEVER, 0
    return get64(stream, DELETION_TIMESTAMP, number), get64(stream, DELETION_LOCAL, number)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merged_deletion(streams: int, members: int, first: int, end: int) -> tuple[int, int]:
    timestamp, local = NEVER, 0
    for place in range(first, end):
        stream, number = member_of(streams, members, place)
        found, found_local = deletion_of(stream, number)
        if found != NEVER and supersedes(found, found_local, timestamp, local):
            timestamp, local = found, found_local
    return timestamp, local


@njit(inline="always")  # type: ignore[untyped-decorator]
def liveness_of(stream: int, number: int, deleted: int) -> tuple[int, int, int]:
    """Return the liveness of a row of a stream: timestamp (µs), TTL (s; -1: none), expiry (s)."""
    has = load8(load64_native(stream + LIVENESS) + number)
    if has == 0:
        return NEVER, -1, NO_EXPIRY
    timestamp = get64(stream, LIVENESS_TIMESTAMP, number)
    if timestamp <= deleted:
        return NEVER, -1, NO_EXPIRY
    if has == 1:
        return timestamp, -1, NO_EXPIRY
    return timestamp, get32(stream, LIVENESS_TTL, number), get64(stream, LIVENESS_EXPIRES, number)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def merged_liveness(streams: int, members: int, first: int, end: int, deleted: int) -> tuple[int, int, int]:
    timestamp, ttl, expires = NEVER, -1, NO_EXPIRY
    for place in range(first, end):
        stream, number = member_of(streams, members, place)
        found, found_ttl, found_expires = liveness_of(stream, number, deleted)
        if found != NEVER and (
            timestamp == NEVER or outlives(found, found_ttl, found_expires, timestamp, ttl, expires)
        ):
            timestamp, ttl, expires = found, found_ttl, found_expires
    return timestamp, ttl, expires


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_cells(stream: int, number: int, result: int, row: int, size: int, deleted: int) -> int:
    """Write the cells of a row that only one stream has. Return the bytes of values so far."""
    next_column = 0
    for cell in range(get32(stream, CELL_STARTS, number), get32(stream, CELL_STARTS, number + 1)):
        if get64(stream, TIMESTAMP, cell) > deleted:
            column = get32(stream, COLUMN, cell)
            for missing in range(next_column, column):
                _put_nothing(result, missing, row)
            size = _put_cell(stream, cell, column, result, row, size)
            next_column = column + 1
    for missing in range(next_column, load64_native(result + R_COLUMNS)):
        _put_nothing(result, missing, row)
    return size


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def find_winners(streams: int, members: int, first: int, end: int, winners: int, deleted: int, columns: int) -> None:
    """Find the cell that wins of each column: its stream, 0 if there is none, and its number."""
    for column in range(columns):
        store64(winners + 16 * column, 0)
    for place in range(first, end):
        stream, number = member_of(streams, members, place)
        for cell in range(get32(stream, CELL_STARTS, number), get32(stream, CELL_STARTS, number + 1)):
            if get64(stream, TIMESTAMP, cell) > deleted:
                winner = winners + 16 * get32(stream, COLUMN, cell)
                other = load64_native(winner)
                if other == 0 or _wins(stream, cell, other, load64_native(winner + 8)):
                    store64(winner, stream)
                    store64(winner + 8, cell)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_winners(winners: int, result: int, row: int, size: int) -> int:
    """Write the cells that win. Return the bytes of values so far."""
    for column in range(load64_native(result + R_COLUMNS)):
        stream, cell = load64_native(winners + 16 * column), load64_native(winners + 16 * column + 8)
        if stream:
            size = _put_cell(stream, cell, column, result, row, size)
        else:
            _put_nothing(result, column, row)
    return size


@njit(inline="always")  # type: ignore[untyped-decorator]
def _wins(stream: int, cell: int, other: int, other_cell: int) -> bool:
    """Tell whether a cell wins against another one."""
    timestamp, other_timestamp = get64(stream, TIMESTAMP, cell), get64(other, TIMESTAMP, other_cell)
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
        p, length = bytes_of(stream, VALUES, cell)
        q, other_length = bytes_of(other, VALUES, other_cell)
        order = compare_bytes(p, length, q, other_length)
    if order == 0:
        order = ttl - other_ttl
    return order > 0


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _times(stream: int, cell: int, kind: int) -> tuple[int, int]:
    """Return a cell's local deletion time (s; -1: none) and TTL (s; -1: none)."""
    if kind == LIVE:
        return NO_EXPIRY, -1
    return get64(stream, LOCAL, cell), get32(stream, TTL, cell) if kind == EXPIRING else -1


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_nothing(result: int, column: int, row: int) -> None:
    """Say that a row has no cell of a column that is no tombstone."""
    place = load64_native(result + R_ROWS) * column + row
    put32(result, R_VALUE_LENGTHS, place, NULL_LENGTH)
    put64(result, R_EXPIRIES, place, NO_CELL)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_cell(stream: int, cell: int, column: int, result: int, row: int, size: int) -> int:
    """Write a cell; return the bytes of values so far."""
    kind = load8(load64_native(stream + CELL_KIND) + cell)
    if kind == TOMBSTONE:
        place = load64_native(result + R_DEAD)
        store64(result + R_DEAD, place + 1)
        put64(result, R_DEAD_ROW, place, row)
        put64(result, R_DEAD_COLUMN, place, column)
        put64(result, R_DEAD_TIMESTAMP, place, get64(stream, TIMESTAMP, cell))
        put64(result, R_DEAD_LOCAL, place, get64(stream, LOCAL, cell))
        _put_nothing(result, column, row)
        return size
    place = load64_native(result + R_ROWS) * column + row
    put64(result, R_WRITETIMES, place, get64(stream, TIMESTAMP, cell))
    put64(result, R_EXPIRIES, place, NO_EXPIRY if kind == LIVE else get64(stream, LOCAL, cell))
    size = put_value(stream, cell, result, place, size)
    return size


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_value(stream: int, cell: int, result: int, place: int, size: int) -> int:
    """Write the value of a cell. Return the bytes of values so far."""
    offset, length = get32(stream, VALUE_OFFSETS, cell), get32(stream, VALUE_LENGTHS, cell)
    put32(result, R_VALUE_LENGTHS, place, length)
    if load64_native(result + R_COPIES) == 0:
        put32(result, R_VALUE_OFFSETS, place, offset)
        return size
    copy_bytes(load64_native(result + R_VALUES) + size, load64_native(stream + VALUES) + offset, length)
    put32(result, R_VALUE_OFFSETS, place, size)
    size += length
    return size
