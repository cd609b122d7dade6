"""Conversion between Arrow and NumPy arrays without pandas.

``to_numpy`` and ``pa.array`` with a mask import pandas, which costs a Spark worker a second.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Mask = npt.NDArray[np.bool_]
"""One flag per row, cell or other element."""
Integers = npt.NDArray[np.int64]
"""Numbers that are data: times, tokens, lengths, counts."""
Places = npt.NDArray[np.intp]
"""Positions in an array, as ``take`` expects them."""
Places32 = npt.NDArray[np.int32]
"""Positions in kernels, which take half as much memory."""


def integers(array: pa.Array) -> Integers:
    """Return an integer array as int64, with 0 for null."""
    kind = np.dtype(f"i{array.type.bit_width // 8}")
    if not len(array):
        return np.empty(0, np.int64)
    values = np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind.itemsize).astype(np.int64)
    return np.where(valid_mask(array), values, 0) if array.null_count else values


def filled(array: pa.Array, missing: int) -> Integers:
    """Return an integer array as int64, with ``missing`` for null."""
    values = integers(array)
    return np.where(valid_mask(array), values, missing) if array.null_count else values


def array_of(values: npt.NDArray[np.integer[Any]], valid: Mask | None = None) -> pa.Array:
    """Make an Arrow array of integers, null where they are not ``valid``."""
    buffers = [None if valid is None or valid.all() else bitmap(valid), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def list_of(
    counts: npt.NDArray[np.integer[Any]],
    values: pa.Array,
    valid: Mask | None = None,
    kind: pa.DataType | None = None,
) -> pa.ListArray:
    """Make lists (or maps, by their ``kind``) of ``counts`` values each, null where they are not ``valid``."""
    buffers = [None if valid is None else bitmap(valid), starts_of(counts).buffers()[1]]
    return pa.Array.from_buffers(kind or pa.list_(values.type), len(counts), buffers, children=[values])


def structs_of(kind: pa.StructType, children: Sequence[pa.Array], valid: Mask | None = None) -> pa.StructArray:
    """Make structs of their fields, null where they are not ``valid``."""
    buffers = [None if valid is None or valid.all() else bitmap(valid)]
    return pa.Array.from_buffers(kind, len(children[0]), buffers, children=list(children))


def rows_of_lists(lists: pa.ListArray) -> tuple[Integers, pa.Array]:
    """Flatten lists: the number of each value's list, and the values."""
    counts = np.diff(integers(lists.offsets))
    counts[~valid_mask(lists)] = 0
    return np.repeat(np.arange(len(lists)), counts), lists.flatten()


def placed(values: pa.Array, rows: npt.NDArray[np.integer[Any]], count: int) -> pa.Array:
    """Place values at their rows. The other rows of ``count`` are null."""
    places = np.full(count, -1)
    places[rows] = np.arange(len(rows))
    return values.take(array_of(places, places >= 0))


def only(array: pa.Array, keep: Mask) -> pa.Array:
    """Set the values outside a mask to null."""
    if not (valid_mask(array) & ~keep).any():
        return array
    return array.take(array_of(np.arange(len(array)), keep))


def filtered(rows: pa.RecordBatch, mask: Mask) -> pa.RecordBatch:
    """Filter rows; mostly the mask names all, and nothing is copied."""
    return rows if mask.all() else rows.filter(pa.array(mask))


def bitmap(mask: npt.NDArray[np.bool_]) -> pa.Buffer:
    """Make Arrow's bitmap of a mask."""
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def valid_mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Return the mask of values that are not null, without ``to_numpy``, which would import pandas."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    first = array.offset // 8
    bitmap = np.frombuffer(array.buffers()[0], np.uint8)[first : (array.offset + len(array) + 7) // 8]
    skip = array.offset % 8
    return np.unpackbits(bitmap, bitorder="little")[skip : skip + len(array)].view(np.bool_)


_KEPT_BYTES = 2**29
"""Bytes that are kept at most; a batch touches only a part of the room that it asks for."""
_LEAST_KEPT_BYTES = 2**17
_free: dict[int, list[pa.Buffer]] = {}


def pooled(count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """Allocate an array whose memory is kept for the next one, once nothing refers to it any more.

    The system gives new memory page by page, and clears each page: that takes longer than to fill it.
    """
    size = count * np.dtype(kind).itemsize
    if size < _LEAST_KEPT_BYTES:
        return np.frombuffer(pa.allocate_buffer(size), kind)
    step = 1 << (size.bit_length() - 3)
    room = -(-size // step) * step
    try:
        buffer = _free[room].pop()
    except (KeyError, IndexError):
        buffer = pa.allocate_buffer(room)
    # All views of this array refer to it, also those that Arrow holds.
    owner = np.frombuffer(buffer, np.uint8)
    weakref.finalize(owner, _keep, buffer).atexit = False
    return owner[:size].view(kind)


def _keep(buffer: pa.Buffer) -> None:
    if sum(size * len(kept) for size, kept in list(_free.items())) + buffer.size <= _KEPT_BYTES:
        _free.setdefault(buffer.size, []).append(buffer)


def runs(starts: npt.NDArray[np.integer[Any]], counts: npt.NDArray[np.integer[Any]]) -> Places:
    """List the numbers start, start + 1, … of each run, one run after the other."""
    ends = np.cumsum(counts)
    places: Places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return places


def starts_of(counts: npt.NDArray[np.integer[Any]]) -> pa.Array:
    """Make Arrow's offsets of lists from their numbers of elements."""
    return pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
