"""The partitions of an SSTable as change rows, a window of its data at a time.

Memory does not grow with the file, nor with a partition: only with the largest row. What cannot be read is a loss,
which says where and why; the reader goes on at the next partition that the index knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.columns import COLUMN_WORDS, LoggedTables, columns_of, logged_tables
from ringsync.changes.digest import column_hashes
from ringsync.changes.plain import PlainRows, is_plain
from ringsync.compiled.arrow import Integers, pooled
from ringsync.compiled.memory import PADDING, address
from ringsync.cql.types import VARIABLE, is_multicell, stored_length
from ringsync.formats.rows import state as at
from ringsync.formats.rows.arrow import change_rows, constant_columns, plain_rows
from ringsync.formats.rows.state import CUT, DECODED, FULL, MALFORMED, SHADOWABLE, TOO_LARGE, Capacity, Output
from ringsync.formats.sstable import rows as kernel
from ringsync.formats.sstable.data import DataFile, Loss
from ringsync.formats.sstable.names import Descriptor
from ringsync.formats.sstable.schema import file_columns
from ringsync.formats.sstable.statistics import Header
from ringsync.schema.table import TableSchema

_REASONS = {
    MALFORMED: "what begins here is no partition or row of this table: the file is damaged, or the schema is another",
    SHADOWABLE: "a row of a materialised view, whose deletions follow other rules: read its table instead",
    TOO_LARGE: "a row that would need more memory than a batch may have",
}
_WITHOUT_END = "the partition that was read last has no end: the file was cut off, or is damaged"
_SUREST_BYTES = 2**18
"""With so many bytes after it, a partition's header or a clustering is not cut off: it is damaged."""

_SKIPPED = -1
"""Number of a column that is not wanted: the kernels read over its cells."""

_OPEN_RANGE = slice(at.OPEN // 8, at.OPEN_LOCAL // 8 + 1)


@dataclass(frozen=True)
class Layout:
    """How the rows of an SSTable are laid out, in the form that the kernels read.

    :ivar tables: the table
    :ivar columns: addresses of the descriptions of the static columns, and of the regular columns, of the SSTable
    :ivar is_plain: whether :func:`read_plain_rows` can read it: all columns are plain, in the order of their numbers
    :ivar kept: arrays to which the addresses point
    """

    descriptor: Descriptor
    header: Header
    tables: LoggedTables
    columns: tuple[Integers, Integers]
    is_plain: bool
    kept: tuple[npt.NDArray[np.int64], ...] = field(repr=False)


def layout_of(descriptor: Descriptor, header: Header, table: TableSchema, shown: TableSchema | None = None) -> Layout:
    """Describe an SSTable to the kernels.

    :param header: header of the SSTable
    :param table: the table; it has all columns of the header, present or dropped
    :param shown: the table with those columns only that are read (:meth:`TableSchema.only`); None: all
    :raises SSTableError: the SSTable is not of this table, see :func:`~ringsync.formats.sstable.schema.file_columns`
    """
    shown = shown or table
    numbers = {column.name: column.number for column in columns_of(shown)}
    hashes = column_hashes({column.name for column in columns_of(table)})
    found = file_columns(descriptor, header, table)
    addresses, kept = [], []
    plain = is_plain(table) and not found.static
    for columns in (found.static, found.regular):
        described = np.zeros((len(columns), COLUMN_WORDS), np.int64)
        for entry, (column, cql_type) in zip(described, ((one.column, one.type) for one in columns), strict=True):
            number = numbers.get(column.name, _SKIPPED)
            is_complex = is_multicell(cql_type)
            width = VARIABLE if is_complex else stored_length(cql_type)
            # An SSTable names its columns once, not in each partition: the kernels do not need their names.
            entry[:] = 0, 0, number, width, is_complex, hashes[column.name]
            plain &= not is_complex
        places = described[:, at.COLUMN_NUMBER // 8]
        plain &= bool((np.diff(places[places >= 0]) > 0).all())
        kept.append(described)
        addresses.append(address(described) + at.COLUMN_BYTES * np.arange(len(columns) + 1, dtype=np.int64))
    return Layout(descriptor, header, logged_tables([shown]), (addresses[0], addresses[1]), plain, tuple(kept))


Rows = TypeVar("Rows", pa.RecordBatch, PlainRows)


@dataclass(frozen=True)
class SSTableRows(Generic[Rows]):
    """Some rows of an SSTable, in its order: by token and partition key, then by clustering.

    In a partition come its deletion, its static row, then rows and range deletions, each range behind the rows that it
    covers, and before the next batch.

    :ivar rows: batch of ``CHANGE_ROWS``, or plain rows; ``position`` is where a row begins in the uncompressed data
    :ivar end: position in the uncompressed data up to which everything was read
    :ivar losses: what could not be read since the batch before
    """

    rows: Rows
    end: int
    losses: tuple[Loss, ...] = ()


def read_rows(
    data: DataFile,
    layout: Layout,
    first: int,
    end: int,
    next_partition: Callable[[int], int | None],
    capacity: Capacity | None = None,
    *,
    compact: bool = False,
) -> Iterator[SSTableRows[pa.RecordBatch]]:
    """Read the partitions that begin at ``first`` or later, and before ``end``.

    :param first: position of a partition in the uncompressed data; ``end``: likewise, or the end of the data
    :param next_partition: function that returns the first position, not before the given one, at which the index knows
        a partition; None: there is none. It is called after a loss
    :param capacity: capacity of a batch, and of the window; a single row that needs more gets it
    :param compact: whether a batch is copied, so that it keeps no more memory than it needs: for many readers at once
    """
    reading = _Reading(data, layout, first, end, capacity or Capacity())

    def rows(output: Output) -> pa.RecordBatch:
        found = reading.change_rows(output)
        return pa.ipc.read_record_batch(found.serialize(), found.schema) if compact else found

    return reading.batches(next_partition, rows)


def read_plain_rows(
    data: DataFile,
    layout: Layout,
    first: int,
    end: int,
    next_partition: Callable[[int], int | None],
    capacity: Capacity | None = None,
    *,
    compact: bool = False,
) -> Iterator[SSTableRows[PlainRows]]:
    """Do the same as :func:`read_rows` for a plain layout, without copying values or computing digests."""
    reading = _Reading(data, layout, first, end, capacity or Capacity(), plain=True)

    def rows(output: Output) -> PlainRows:
        found = reading.plain_rows(output)
        return found.copied() if compact else found

    return reading.batches(next_partition, rows)


class _Reading:
    """The state of :func:`read_rows`: the window, and the kernel's place in it.

    The window holds the bytes of the data from ``_start`` to ``_stop``. It stops at ``_broken``, what cannot be read.
    Plain rows point into it, so that each of their windows is a new one.
    """

    def __init__(
        self, data: DataFile, layout: Layout, first: int, end: int, capacity: Capacity, *, plain: bool = False
    ) -> None:
        self._data, self._layout, self._end, self._plain = data, layout, end, plain
        self._capacity = self._room = capacity
        self._position = self._start = self._stop = first
        self._window = np.empty(0, np.uint8)
        self._broken: Loss | None = None
        self._open_range = np.zeros(_OPEN_RANGE.stop - _OPEN_RANGE.start, np.int64)
        self._constants = constant_columns(0, data.file)
        self._table_id = bytes.fromhex(layout.tables.tables[0].table_id)
        table_id = np.frombuffer(self._table_id + bytes(PADDING), np.uint8)
        key, bound = np.zeros((2, kernel.ROOM + PADDING), np.uint8)
        self._kept = (table_id, key, bound)
        self._place = np.zeros(kernel.WORDS, np.int64)
        self._put(kernel.TABLE_ID, address(table_id))
        self._put(kernel.KEY, address(key))
        self._put(kernel.BOUND, address(bound))
        self._put(kernel.HAS_STATIC, len(layout.header.static) > 0)
        self._put(kernel.HAS_SHORT_DELETIONS, layout.descriptor.features.unsigned_times)

    def batches(
        self, next_partition: Callable[[int], int | None], rows: Callable[[Output], Rows]
    ) -> Iterator[SSTableRows[Rows]]:
        """Yield what was read.

        :param rows: function that makes rows of what the kernels have written
        """
        self._fill()
        while self._position < self._end:
            before = self._position
            output, outcome = self._decode()
            missing, found = int(output.state[at.BYTES_MISSING // 8]), rows(output)
            # While this waits, its rows alone keep memory.
            del output
            if self._position > before:
                is_cut = self._position == self._end and self._get(kernel.INSIDE)
                losses = (self._lose(_WITHOUT_END, next_partition),) if is_cut else ()
                yield SSTableRows(found, self._position, losses)
                if outcome != FULL or self._room != self._capacity:
                    self._room = self._capacity
                    self._fill()
            elif reason := self._obstacle(outcome, missing):
                loss = self._lose(reason, next_partition)
                yield SSTableRows(found, self._position, (loss,))
                self._fill()

    def _fill(self) -> None:
        """Let the window begin where the kernel stopped, and fill it."""
        wanted = min(self._room.bytes, self._end - self._position)
        window = self._window
        is_too_large = self._room == self._capacity and len(window) > self._room.bytes + PADDING
        if self._plain or len(window) < wanted + PADDING or is_too_large:
            window = pooled(wanted + PADDING, np.uint8)
        kept = min(max(self._stop - self._position, 0), wanted)
        window[:kept] = self._window[self._position - self._start :][:kept]
        self._window, self._start, self._stop = window, self._position, self._position + wanted
        self._broken = self._data.read_into(window, kept, self._position + kept, wanted - kept)
        if self._broken:
            self._stop = max(self._broken.position, self._position + kept)
        window[self._stop - self._start :][:PADDING] = 0

    def _decode(self) -> tuple[Output, int]:
        """Decode what fits into a batch; return the batch, and the kernel's outcome."""
        output = Output.new(self._window, self._layout.tables, self._room, plain=self._plain)
        state, header, base = output.state, self._layout.header, address(self._window)
        for place, columns in ((at.STATIC_MAP, self._layout.columns[0]), (at.REGULAR_MAP, self._layout.columns[1])):
            state[place // 8], state[place // 8 + 1] = address(columns), len(columns) - 1
        state[at.MIN_TIMESTAMP // 8], state[at.MIN_TTL // 8] = header.min_timestamp, header.min_ttl
        state[at.MIN_LOCAL // 8] = header.min_local_deletion_time
        state[at.HAS_SIZES // 8] = 1
        state[_OPEN_RANGE] = self._open_range
        self._put(kernel.NEXT, base + self._position - self._start)
        self._put(kernel.END, base + self._stop - self._start)
        self._put(kernel.IS_LAST, self._stop == self._end)
        self._put(kernel.DATA_POSITION, self._start - base)
        outcome = kernel.decode_partitions(address(state), address(self._place))
        self._position = self._start + self._get(kernel.NEXT) - base
        self._open_range[:] = state[_OPEN_RANGE]
        return output, outcome

    def _obstacle(self, outcome: int, missing: int) -> str | None:
        """Make room for what did not fit into the window or the batch; return why that cannot help, if it cannot.

        :param missing: bytes of a row that lie behind the window
        """
        there = self._stop - self._position
        if outcome in (CUT, DECODED):
            if self._broken:
                return self._broken.reason
            if self._position > self._start and self._stop < self._end:
                self._fill()
                return None
            if self._stop == self._end or (not missing and there >= _SUREST_BYTES):
                return _REASONS[MALFORMED]
            outcome, missing = FULL, max(missing, 1)
        if outcome != FULL:
            return _REASONS[outcome]
        room = self._room
        while room == self._room or room.bytes < there + missing:
            if room.is_largest:
                return _REASONS[TOO_LARGE]
            room = room.doubled()
        self._room = room
        self._fill()
        return None

    def _lose(self, reason: str, next_partition: Callable[[int], int | None]) -> Loss:
        """Leave out the rest of a partition, and what follows up to the next one that is known."""
        lost = self._position
        behind = self._broken.position + self._broken.length if self._broken else lost + 1
        found = next_partition(max(behind, lost + 1))
        self._position = self._end if found is None else min(found, self._end)
        self._put(kernel.INSIDE, 0)
        self._open_range[:] = 0
        # Behind the end of the data, the mark of a partition's end is lost: one byte.
        return Loss(self._data.file, lost, max(self._position - lost, 1), reason)

    def plain_rows(self, output: Output) -> PlainRows:
        """Wrap what the kernels have written, before the next batch."""
        return plain_rows(output, self._window, self._table_id, self._data.file)

    def change_rows(self, output: Output) -> pa.RecordBatch:
        """Wrap what the kernels have written."""
        if len(self._constants[0]) < output.count(at.ROWS):
            self._constants = constant_columns(self._room.rows, self._data.file)
        return change_rows(output, *self._constants)

    def _put(self, word: int, value: int) -> None:
        self._place[word // 8] = value

    def _get(self, word: int) -> int:
        return int(self._place[word // 8])
