"""Kernel that merges plain rows like :func:`.plain_kernels.merge_rows`, and writes what a SELECT shows at a moment."""

from __future__ import annotations

from numba import njit

from ringsync.changes.reconcile import plain_kernels as at
from ringsync.changes.reconcile.plain_kernels import (
    bytes_of,
    deletion_of,
    find_winners,
    get32,
    get64,
    least_clustering,
    liveness_of,
    member_of,
    merged_deletion,
    merged_liveness,
    put32,
    put_clustering,
    put_key,
    put_value,
)
from ringsync.changes.schema import LIVE, NEVER, NO_EXPIRY, TOMBSTONE
from ringsync.compiled.memory import KERNEL, load8, load32_native, load64_native
from ringsync.cql.cells import NULL_LENGTH


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def show_rows(streams: int, members: int, starts: int, winners: int, result: int, now_s: int) -> int:
    """Merge the rows that ``order_rows`` has found. Return how many are shown.

    :param winners: address of room for two words per column
    :param result: address of the result's block
    :param now_s: the moment, s since the epoch
    """
    key_bytes = clustering_bytes = value_bytes = before = before_row = row = 0
    for found in range(load64_native(result + at.R_ROWS)):
        first, end = load32_native(starts + 4 * found), load32_native(starts + 4 * found + 4)
        stream, number = member_of(streams, members, first)
        if end - first == 1:
            deleted, _ = deletion_of(stream, number)
            is_shown = _is_alive(liveness_of(stream, number, deleted), now_s)
            has_cell, bytes_after = _show_cells(stream, number, result, row, value_bytes, deleted, now_s)
        else:
            deleted, _ = merged_deletion(streams, members, first, end)
            is_shown = _is_alive(merged_liveness(streams, members, first, end, deleted), now_s)
            find_winners(streams, members, first, end, winners, deleted, load64_native(result + at.R_COLUMNS))
            has_cell, bytes_after = _show_winners(winners, result, row, value_bytes, now_s)
        if not (is_shown or has_cell):
            continue
        if end - first == 1:
            p, length = bytes_of(stream, at.CLUSTERINGS, number)
        else:
            p, length = least_clustering(streams, members, first, end)
        value_bytes = bytes_after
        key_bytes = put_key(stream, number, before, before_row, result, row, key_bytes)
        clustering_bytes = put_clustering(p, length, result, row, clustering_bytes)
        before, before_row = stream, number
        row += 1
    return row


@njit(inline="always")  # type: ignore[untyped-decorator]
def _is_alive(liveness: tuple[int, int, int], now_s: int) -> bool:
    timestamp, _, expires = liveness
    return timestamp != NEVER and (expires == NO_EXPIRY or expires > now_s)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _show_cells(
    stream: int, number: int, result: int, row: int, size: int, deleted: int, now_s: int
) -> tuple[bool, int]:
    """Write the cells of a row that only one stream has.

    :returns: whether any is alive, and the bytes of values so far
    """
    next_column, has_cell = 0, False
    for cell in range(get32(stream, at.CELL_STARTS, number), get32(stream, at.CELL_STARTS, number + 1)):
        if get64(stream, at.TIMESTAMP, cell) > deleted and _is_shown(stream, cell, now_s):
            column = get32(stream, at.COLUMN, cell)
            for missing in range(next_column, column):
                _show_nothing(result, missing, row)
            size = put_value(stream, cell, result, load64_native(result + at.R_ROWS) * column + row, size)
            next_column, has_cell = column + 1, True
    for missing in range(next_column, load64_native(result + at.R_COLUMNS)):
        _show_nothing(result, missing, row)
    return has_cell, size


@njit(inline="always")  # type: ignore[untyped-decorator]
def _show_winners(winners: int, result: int, row: int, size: int, now_s: int) -> tuple[bool, int]:
    """Write the cells that win, likewise."""
    has_cell = False
    for column in range(load64_native(result + at.R_COLUMNS)):
        stream, cell = load64_native(winners + 16 * column), load64_native(winners + 16 * column + 8)
        if stream and _is_shown(stream, cell, now_s):
            size = put_value(stream, cell, result, load64_native(result + at.R_ROWS) * column + row, size)
            has_cell = True
        else:
            _show_nothing(result, column, row)
    return has_cell, size


@njit(inline="always")  # type: ignore[untyped-decorator]
def _is_shown(stream: int, cell: int, now_s: int) -> bool:
    """Tell whether a cell is alive: it is no tombstone, and has not expired."""
    kind = load8(load64_native(stream + at.CELL_KIND) + cell)
    return kind == LIVE or (kind != TOMBSTONE and get64(stream, at.LOCAL, cell) > now_s)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _show_nothing(result: int, column: int, row: int) -> None:
    put32(result, at.R_VALUE_LENGTHS, load64_native(result + at.R_ROWS) * column + row, NULL_LENGTH)
