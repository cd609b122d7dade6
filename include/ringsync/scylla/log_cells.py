"""Kernels that make cells of the columns of a log row (:mod:`ringsync.scylla.log_state` explains ``m``).

``s`` is the state of the output and ``q`` an address in its scratch, where the bytes of the digest are collected
(:mod:`ringsync.formats.rows.output`). Functions return the address after what they have written, or an outcome, which
is ``LAST_OUTCOME`` or less.
"""

from __future__ import annotations

from numba import njit

from ringsync.changes.schema import EXPIRING, LIVE, TOMBSTONE
from ringsync.compiled.memory import KERNEL, PADDING, load8, load32_signed, load64_native, store8, store32, store64
from ringsync.formats.rows import state as at
from ringsync.formats.rows.output import append, fits, put_cell, raise_write_time, room
from ringsync.formats.rows.state import FULL
from ringsync.scylla import log_state as of
from ringsync.scylla.log_schema import ATOMIC, FIELDS, SET
from ringsync.scylla.log_state import CELL_BYTES, CONTRADICTION, FOREIGN, LAST_OUTCOME, MISFIT

_FIELD_PATH = 2


@njit(inline="always")  # type: ignore[untyped-decorator]
def cell_length(m: int, place: int) -> int:
    """Return the length of a cell of the log row; -1: null."""
    return load64_native(load64_native(m + of.CELLS) + CELL_BYTES * place + 8)


@njit(inline="always")  # type: ignore[untyped-decorator]
def cell_address(m: int, place: int) -> int:
    """Return the address of a cell of the log row."""
    return load64_native(load64_native(m + of.CELLS) + CELL_BYTES * place)


@njit(inline="always")  # type: ignore[untyped-decorator]
def failed(m: int, outcome: int, place: int) -> int:
    """Remember the column because of which the log row fails. Return the outcome."""
    store64(m + of.CULPRIT, place)
    return outcome


@njit(inline="always")  # type: ignore[untyped-decorator]
def fits_width(m: int, place: int, length: int) -> bool:
    """Tell whether a value of this length can be of the column's type. All types have an empty value."""
    width = load64_native(load64_native(m + of.WIDTHS) + 8 * place)
    return width == 0 or length == width or length == 0


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def put_cells(m: int, s: int, q: int, is_static: int) -> int:
    """Write the cells and complex deletions of all columns that the log row sets."""
    count_at = q
    q += 4
    value = load64_native(m + of.VALUES)
    while value < load64_native(m + of.VALUES_END):
        place = load64_native(value)
        is_atomic = load64_native(value + of.VALUE_FORM) == ATOMIC
        is_set = cell_length(m, place) >= 0 or cell_length(m, place + 1) >= 0
        if is_set or (not is_atomic and cell_length(m, place + 2) >= 0):
            if load64_native(value + of.VALUE_IS_STATIC) != is_static:
                return failed(m, FOREIGN, place)
            q = _put_atomic(m, s, q, value, place) if is_atomic else _put_multicell(m, s, q, value, place)
            if q <= LAST_OUTCOME:
                return q
        value += of.VALUE_BYTES
    store32(count_at, load64_native(s + at.CELLS) - load64_native(s + at.FIRST_CELL))
    return q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _deleted(m: int, place: int) -> int:
    """Return whether a column is deleted: 1 or 0, or MISFIT."""
    length = cell_length(m, place)
    if length < 0:
        return 0
    return int(load8(cell_address(m, place)) != 0) if length == 1 else MISFIT


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_atomic(m: int, s: int, q: int, value: int, place: int) -> int:
    length, deleted = cell_length(m, place), _deleted(m, place + 1)
    if deleted == MISFIT:
        return failed(m, MISFIT, place + 1)
    if length < 0:
        return _put(m, s, q, value, 0, -1, TOMBSTONE, 0, 0) if deleted else q
    if deleted:
        return failed(m, CONTRADICTION, place)
    if not fits_width(m, place, length):
        return failed(m, MISFIT, place)
    return _put_live(m, s, q, value, 0, -1, cell_address(m, place), length)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_live(m: int, s: int, q: int, value: int, path: int, path_length: int, data: int, length: int) -> int:
    kind = EXPIRING if load64_native(m + of.TTL) else LIVE
    return _put(m, s, q, value, path, path_length, kind, data, length)


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put(m: int, s: int, q: int, value: int, path: int, path_length: int, kind: int, data: int, length: int) -> int:
    """Write a cell.

    :param value: address of the column's description
    :param path_length: -1: the column has one cell
    """
    cell = load64_native(s + at.CELLS)
    if room(s, at.CELLS) == 0 or not fits(s, q, path_length + length + 2 * PADDING):
        return FULL
    store32(load64_native(s + at.CELL_COLUMN) + 4 * cell, load64_native(value + of.VALUE_NUMBER))
    store64(q, load64_native(value + of.VALUE_HASH))
    store32(q + 8, path_length)
    q += 12
    if path_length >= 0:
        store8(load64_native(s + at.CELL_HAS_PATH) + cell, 1)
        append(s, at.PATHS, at.PATH_BYTES, q, path, path_length)
        q += path_length
    store32(load64_native(s + at.PATH_ENDS) + 4 * cell + 4, load64_native(s + at.PATH_BYTES))
    ttl, local, time = load64_native(m + of.TTL), load64_native(m + of.LOCAL), load64_native(m + of.TIME)
    if kind == EXPIRING:
        local += ttl
    q = put_cell(s, q, cell, kind, time, ttl, local, data, length)
    store64(s + at.CELLS, cell + 1)
    return q


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_multicell(m: int, s: int, q: int, value: int, place: int) -> int:
    """Write what a log row says of a collection or user-defined type: deletion, elements, deleted elements."""
    deleted = _deleted(m, place + 1)
    if deleted == MISFIT:
        return failed(m, MISFIT, place + 1)
    if deleted and not _put_complex_deletion(m, s, value):
        return FULL
    form = load64_native(value + of.VALUE_FORM)
    if cell_length(m, place) >= 0:
        if form == FIELDS:
            q = _put_fields(m, s, q, value, place)
        else:
            q = _put_elements(m, s, q, value, place, 1 if form == SET else 2)
        if q <= LAST_OUTCOME:
            return q
    if cell_length(m, place + 2) >= 0:
        q = _put_elements(m, s, q, value, place + 2, 0)
    return q


@njit(inline="always")  # type: ignore[untyped-decorator]
def _put_complex_deletion(m: int, s: int, value: int) -> bool:
    """Write a deletion of all elements. Return whether there was room.

    Scylla writes an overwrite's deletion 1 µs before its elements, and logs each such deletion 1 µs after its own time,
    so that both stand in one log row. This also holds for a deletion alone (S: cdc/split.cc, #6070).
    """
    place, time = load64_native(s + at.COMPLEX), load64_native(m + of.TIME) - 1
    if room(s, at.COMPLEX) == 0:
        return False
    store32(load64_native(s + at.COMPLEX_COLUMN) + 4 * place, load64_native(value + of.VALUE_NUMBER))
    store64(load64_native(s + at.COMPLEX_HASH) + 8 * place, load64_native(value + of.VALUE_HASH))
    store64(load64_native(s + at.COMPLEX_TIMESTAMP) + 8 * place, time)
    store64(load64_native(s + at.COMPLEX_LOCAL) + 8 * place, load64_native(m + of.LOCAL))
    store64(s + at.COMPLEX, place + 1)
    raise_write_time(s, time)
    return True


@njit(inline="always")  # type: ignore[untyped-decorator]
def _part(p: int, end: int) -> int:
    """Return the length of the element or field at ``p``, after which it follows; -1: null, -2: it is cut off."""
    if end - p < 4:
        return -2
    length = load32_signed(p)
    return length if -1 <= length <= end - p - 4 else -2


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_elements(m: int, s: int, q: int, value: int, place: int, parts: int) -> int:
    """Write a cell for each element of a frozen collection.

    :param parts: 2: each is a path and a value; 1: a path; 0: the path of a tombstone
    """
    p, length = cell_address(m, place), cell_length(m, place)
    end = p + length
    count = load32_signed(p) if length >= 4 else -1
    if count < 0:
        return failed(m, MISFIT, place)
    p += 4
    fields = load64_native(value + of.VALUE_FIELDS)
    for _ in range(count):
        path, path_length = p + 4, _part(p, end)
        p = path + max(path_length, 0)
        if path_length < 0 or (fields and not _is_field(path, path_length, fields)):
            return failed(m, MISFIT, place)
        data, data_length = p, 0
        if parts == 2:
            data, data_length = p + 4, _part(p, end)
            if data_length < 0:
                return failed(m, MISFIT, place)
            p = data + data_length
        if parts:
            q = _put_live(m, s, q, value, path, path_length, data, data_length)
        else:
            q = _put(m, s, q, value, path, path_length, TOMBSTONE, 0, 0)
        if q <= LAST_OUTCOME:
            return q
    return q if p == end else failed(m, MISFIT, place)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _is_field(path: int, length: int, fields: int) -> bool:
    """Tell whether a path is the number of a field of a user-defined type."""
    return length == _FIELD_PATH and (load8(path) << 8 | load8(path + 1)) < fields


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _put_fields(m: int, s: int, q: int, value: int, place: int) -> int:
    """Write a cell for each field of a user-defined type that is not null: those that are null were not touched."""
    p = cell_address(m, place)
    end = p + cell_length(m, place)
    path = load64_native(value + of.VALUE_PATHS)
    for _ in range(load64_native(value + of.VALUE_FIELDS)):
        if p == end:
            break
        length = _part(p, end)
        if length < -1:
            return failed(m, MISFIT, place)
        p += 4
        if length >= 0:
            q = _put_live(m, s, q, value, path, _FIELD_PATH, p, length)
            if q <= LAST_OUTCOME:
                return q
            p += length
        path += _FIELD_PATH
    return q if p == end else failed(m, MISFIT, place)
