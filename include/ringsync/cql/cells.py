"""One column's values in a buffer, by the offset and length of each. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.compiled.arrow import Integers, Mask, bitmap, integers, valid_mask
from ringsync.compiled.memory import PADDING, address, padded
from ringsync.cql.codec.gather import gather_bytes, sum_lengths

NULL_LENGTH = -1
"""Length of a null; a length of 0 is an empty value."""

_BINARY = pa.binary()


@dataclass(frozen=True)
class Cells:
    """The serialised values of one column.

    :ivar buffer: bytes, followed by :data:`~ringsync.compiled.memory.PADDING` spare bytes
    :ivar offsets: start of each value in the buffer
    :ivar lengths: bytes of each value; -1: null, 0: an empty value
    :ivar arguments: first arguments of each kernel: the three addresses and the number of rows
    """

    buffer: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    arguments: tuple[int, int, int, int] = field(default=(0, 0, 0, -1), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.arguments[3] < 0:
            addresses = address(self.buffer), address(self.offsets), address(self.lengths)
            object.__setattr__(self, "arguments", (*addresses, len(self.lengths)))

    def __len__(self) -> int:
        return len(self.lengths)

    def value(self, row: int) -> bytes | None:
        """Return one value's bytes, for messages. Too slow for hot paths."""
        start, length = int(self.offsets[row]), int(self.lengths[row])
        return None if length < 0 else self.buffer[start : start + length].tobytes()

    def take(self, places: npt.NDArray[np.integer[Any]] | slice) -> Cells:
        """Take the cells at these places."""
        return Cells(self.buffer, self.offsets[places], self.lengths[places])

    def part(self, first: int, end: int) -> Cells:
        """Return the cells from ``first`` on, and before ``end``."""
        return Cells(self.buffer, self.offsets[first:end], self.lengths[first:end])

    def without(self, rows: Mask) -> Cells:
        """Make the cells in these rows null."""
        return Cells(self.buffer, self.offsets, np.where(rows, np.int32(NULL_LENGTH), self.lengths))


def no_cells(count: int) -> Cells:
    """Make cells that are all null."""
    return Cells(padded(b""), np.zeros(count, np.int32), np.full(count, NULL_LENGTH, np.int32))


def joined_cells(parts: Sequence[Cells]) -> Cells:
    """Concatenate cells. Their bytes are copied unless all parts share one buffer.

    :raises ValueError: the values together exceed the 2 GiB that 32-bit offsets reach
    """
    filled = [part for part in parts if len(part)]
    lengths = np.concatenate([part.lengths for part in parts])
    buffers = {address(part.buffer): part.buffer for part in filled if (part.lengths > 0).any()}
    if len(buffers) <= 1:
        (buffer,) = buffers.values() or [padded(b"")]
        parts = [part if address(part.buffer) in buffers else no_cells(len(part)) for part in parts]
        return Cells(buffer, np.concatenate([part.offsets for part in parts]), lengths)
    starts = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0), dtype=np.int64)])
    if starts[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{len(lengths)} values have {starts[-1]} bytes together: pass fewer rows at once")
    data, offsets, at = np.empty(int(starts[-1]) + PADDING, np.uint8), starts[:-1].astype(np.int32), 0
    for part in filled:
        base, part_offsets, part_lengths, count = part.arguments
        gather_bytes(base, part_offsets, part_lengths, count, address(offsets) + 4 * at, address(data))
        at += count
    return Cells(data, offsets, lengths)


def codes(parts: Sequence[Cells]) -> list[Integers]:
    """Number values: equal ones have equal numbers, also in different parts. Null counts as a value."""
    numbers = integers(raw_values(joined_cells(parts)).dictionary_encode("encode").indices)
    return np.split(numbers, np.cumsum([len(part) for part in parts])[:-1])


def gathered(cells: Cells) -> tuple[pa.Buffer, pa.Buffer]:
    """Copy the values into one buffer. Return Arrow's offsets, and the bytes, followed by spare bytes.

    :raises ValueError: the values together exceed the 2 GiB that Arrow's 32-bit offsets reach
    """
    base, offsets, lengths, count = cells.arguments
    starts = pa.allocate_buffer(4 * count + 4)
    total = sum_lengths(lengths, count, starts.address)
    if total > np.iinfo(np.int32).max:
        raise ValueError(f"{count} values have {total} bytes together: pass fewer rows at once (2 GiB at most)")
    data = pa.allocate_buffer(total + PADDING)
    gather_bytes(base, offsets, lengths, count, starts.address, data.address)
    return starts, data.slice(0, total)


def validity(cells: Cells) -> tuple[pa.Buffer | None, int]:
    """Return Arrow's validity bitmap (None: no nulls) and the number of nulls."""
    present = cells.lengths >= 0
    nulls = len(cells) - int(np.count_nonzero(present))
    return (bitmap(present) if nulls else None), nulls


def raw_values(cells: Cells, kind: pa.DataType = _BINARY) -> pa.Array:
    """Return the values as Arrow binary, or as text if they are known to be UTF-8. Null cells stay null."""
    bitmap, nulls = validity(cells)
    return pa.Array.from_buffers(kind, len(cells), [bitmap, *gathered(cells)], null_count=nulls)


def cells_of_values(values: Sequence[bytes]) -> Cells:
    """Make cells of a few values; :func:`raw_values` then makes Arrow of them.

    ``pa.array`` would also do that, but it imports pandas, which takes a new process a second.
    """
    lengths = np.array([len(value) for value in values], np.int32)
    return Cells(padded(b"".join(values)), np.cumsum(lengths, dtype=np.int32) - lengths, lengths)


def cells_of(array: pa.Array) -> Cells:
    """Return the cells of an Arrow array. The bytes are copied unless its buffer has spare bytes at the end.

    :param array: array of type ``pa.binary()``
    """
    count = len(array)
    _, starts, data = array.buffers()
    if count == 0 or data is None:
        nothing = np.zeros(count, np.int32)
        return Cells(padded(b""), nothing, np.where(valid_mask(array), nothing, np.int32(NULL_LENGTH)))
    limits = np.frombuffer(starts, np.int32, count + 1, 4 * array.offset)
    lengths = np.diff(limits)
    if array.null_count:
        lengths[~valid_mask(array)] = NULL_LENGTH
    if data.size - int(limits[-1]) >= PADDING:
        return Cells(np.frombuffer(data, np.uint8), np.ascontiguousarray(limits[:-1]), lengths)
    return Cells(padded(memoryview(data)[limits[0] : limits[-1]]), limits[:-1] - limits[0], lengths)
