"""Rows of a CDC log table as change rows: result pages in, a batch of ``CHANGE_ROWS`` out.

A log row has one write time, that of ``cdc$time``, and becomes one change row; the two rows of a range deletion become
one together. Pre- and postimages are left out, since they are read before the write and not isolated from others. What
Cassandra's commit log says and the CDC log does not:

* the time of a deletion by its coordinator's clock: it is taken from the write time;
* when an expiring cell expires: that is the time of its arrival at a coordinator plus the TTL. Log rows have a TTL of
  their own, which was set at the same moment, so the rest of it gives the arrival (within a second); where that is
  next to the write time, or the log keeps its rows for ever, the write time stands for it. If the log's TTL was altered
  lately, each that a row may have gives another arrival. Digests are always of the write time, so that a log row has
  the same digest whenever it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import LoggedTables, logged_tables
from ringsync.changes.schema import CHANGE_ROWS
from ringsync.compiled.arrow import Integers, Mask, Places, array_of, pooled
from ringsync.compiled.memory import PADDING, address
from ringsync.cql.cells import Cells, cells_of_values, raw_values
from ringsync.formats.commitlog.reader import ERROR_ROWS
from ringsync.formats.result_page import PaddedPage, Page, check_end, join_pages, page_rows
from ringsync.formats.rows import state as at
from ringsync.formats.rows.arrow import change_rows, constant_columns
from ringsync.formats.rows.state import FULL, Capacity, Output
from ringsync.schema.table import TableSchema
from ringsync.scylla import log_kernels as kernels
from ringsync.scylla import log_state as of
from ringsync.scylla.log_schema import ATOMIC, EPOCH_100NS, LogTable
from ringsync.scylla.log_state import CHANGED, EMPTY, HELD, IMAGE, REASONS, UNSET, LogState

UNKNOWN_ARRIVAL = kernels.UNKNOWN_ARRIVAL
ID_BYTES = 16
MOST_BYTES = 2**30
"""Most bytes of pages that are decoded at once: 32 bits must count them."""
_ONE_ROW = (1).to_bytes(4, "big")
"""Begin of a result page with one row."""
_COUNT_BYTES = 4
"""Bytes of a page's number of rows."""
_DIGEST_ROOM = 64
"""More bytes than the digest has of a cell or complex deletion besides path and value."""


@dataclass(frozen=True)
class LogGroups:
    """The writes that the log rows are of: one for each run of rows with the same stream and time.

    :ivar stream: uint8[groups, 16], ids of streams; ``time``: uint8[groups, 16], timeuuids. Zeros: the log row has none
    :ivar complete: whether the last row of each write was there; always true if the log does not mark it
    :ivar rows: log rows of each
    """

    stream: npt.NDArray[np.uint8]
    time: npt.NDArray[np.uint8]
    complete: Mask
    rows: Places

    def __len__(self) -> int:
        return len(self.complete)

    def before(self, number: int) -> LogGroups:
        """Return the first writes, without that of this number and those behind it."""
        return LogGroups(self.stream[:number], self.time[:number], self.complete[:number], self.rows[:number])

    @property
    def write_time(self) -> Integers:
        """Times of the writes, µs; 0: the log row has none."""
        return _write_times(self.time)


@dataclass(frozen=True)
class LogCounts:
    """What became of log rows; ``read`` is the sum of the others.

    :ivar changed: became a change row, or half of one
    :ivar images: pre- and postimages
    :ivar empty: updates that set nothing. With ``delta: keys`` all are like that: such a log cannot be followed
    :ivar held: of writes that are not complete
    :ivar errors: cannot be used
    """

    read: int
    changed: int
    images: int
    empty: int
    held: int
    errors: int


@dataclass(frozen=True)
class LogRows:
    """The content of some log rows.

    :ivar rows: batch of ``CHANGE_ROWS`` in the order of the log rows. ``file`` is the log table's name, ``position``
        the write time of ``cdc$time``, µs
    :ivar group: number of each change row's write in ``groups``
    :ivar arrivals_s: when each change row's write was at its coordinator, s since the epoch, or UNKNOWN_ARRIVAL: by
        each TTL that the log rows may have. By one that is too small for a row, the moment is in the future
    :ivar errors: batch of ``ERROR_ROWS``; ``raw`` is a result page with only the log row, which
        :func:`decode_log` reads again. ``errors_of``: number of each one's write in ``groups``
    """

    rows: pa.RecordBatch
    group: Places
    arrivals_s: tuple[Integers, ...]
    groups: LogGroups
    errors: pa.RecordBatch
    errors_of: Places
    counts: LogCounts

    def errors_before(self, group: int) -> pa.RecordBatch:
        """Return the errors of the writes before that of this number."""
        return self.errors.slice(0, int(np.searchsorted(self.errors_of, group)))


@dataclass(frozen=True)
class _Found:
    """What the kernels tell of log rows besides the change rows; the order is that of ``kernels.OUTCOMES`` ….

    :ivar starts: first byte of each log row in the page, and of what is behind the last
    """

    outcomes: npt.NDArray[np.uint8]
    culprits: npt.NDArray[np.int16]
    group_of: npt.NDArray[np.int32]
    change_groups: Places
    change_arrivals: Integers
    groups: npt.NDArray[np.uint8]
    complete: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int32]

    @classmethod
    def new(cls, rows: int) -> _Found:
        return cls(
            pooled(rows, np.uint8),
            pooled(rows, np.int16),
            pooled(rows, np.int32),
            pooled(rows, np.intp),
            pooled(rows, np.int64),
            pooled(rows * kernels.GROUP_BYTES, np.uint8).reshape(rows, kernels.GROUP_BYTES),
            pooled(rows, np.uint8),
            pooled(rows + 1, np.int32),
        )


def decode_log(
    pages: Sequence[Page],
    table: LogTable,
    *,
    read_at_s: int | Sequence[int],
    log_ttls_s: Sequence[int],
    take_incomplete: bool = False,
    took_s: int = 0,
    error_s: int = 0,
) -> LogRows:
    """Decode rows of a CDC log.

    :param pages: bodies of result pages of :meth:`LogTable.select`, in their order. A write that is cut at the end of
        the last one is not complete: pass its pages together
    :param read_at_s: when the pages were asked for, all or each, s since the epoch, by the clock of the servers
    :param log_ttls_s: the log's present TTL, and those that it had when some of the rows were written, s; empty: they
        stay for ever. A row that lasts longer than the largest has no known arrival
    :param took_s: longest time that a page took to come, s
    :param error_s: how wrong the clock of a server may be, s
    :param take_incomplete: whether to decode writes of which the last row is missing; else they are held back
    :raises ValueError: a page is malformed or cut off: the message names the byte position; or they are too large
    """
    together = sum(map(len, pages))
    if together > MOST_BYTES:
        raise ValueError(f"{len(pages)} pages of {table.full_name} have {together} bytes: pass fewer pages at once")
    page = join_pages(pages)
    size, columns = len(page) - PADDING, len(table.layout)
    count = page_rows(page[:size], columns)
    if not count:
        check_end(_COUNT_BYTES, size, count, columns)
        return _NOTHING
    ends = np.cumsum([int.from_bytes(one[:4], "big") for one in pages], dtype=np.int64)
    asked_s = np.broadcast_to(np.array(read_at_s, np.int64), len(pages)).copy()
    largest_s = max(log_ttls_s, default=-1)
    state, found = LogState.new(table, largest_s), _Found.new(count)
    output = Output.new(page, _logged(table.base), _capacity(state, table, page, count))
    state.write_to(output)
    arrays = np.array([address(array) for array in vars(found).values()], np.int64)
    words, first = address(state.words), address(page)
    stop = kernels.decode_rows(
        words, address(arrays), first, size, count, int(take_incomplete), address(ends), address(asked_s)
    )
    check_end(stop, size, count, columns)
    # By a smaller TTL a row has arrived so much later.
    later_s = largest_s - np.array(log_ttls_s, np.int64)
    if log_ttls_s:
        arrivals, newest_s = address(found.change_arrivals), int(asked_s.max()) + took_s
        kernels.expire(address(output.state), arrivals, took_s, error_s, address(later_s), len(later_s), newest_s)
    return _log_rows(page, table, output, found, int(state.words[of.GROUPS // 8]), later_s)


def _capacity(state: LogState, table: LogTable, page: PaddedPage, count: int) -> Capacity:
    """Return the room that the change rows of a page can need."""
    size, columns = len(page) - PADDING, len(table.columns)
    cells, deletions, most = count * columns, 0, columns
    if any(column.form != ATOMIC for column in table.columns):
        totals = np.zeros(3, np.int64)
        stop = kernels.measure(address(state.words), address(page), size, count, address(totals))
        check_end(stop, size, count, len(table.layout))
        cells, deletions, most = totals.tolist()
    room = size + _DIGEST_ROOM * most
    return Capacity(_rounded(count + 2), _rounded(cells + 2), _rounded(deletions + 2), _rounded(room + 2**12))


@lru_cache(maxsize=64)
def _logged(base: TableSchema) -> LoggedTables:
    return logged_tables([base])


@lru_cache(maxsize=16)
def _constants(rows: int, name: str) -> tuple[pa.Array, pa.Array]:
    return constant_columns(rows, name)


def _rounded(number: int) -> int:
    """Round up, so that memory is of few sizes, which are kept for the next pages."""
    step = 1 << max(number.bit_length() - 3, 0)
    return -(-number // step) * step


def _log_rows(
    page: PaddedPage, table: LogTable, output: Output, found: _Found, groups: int, later_s: Integers
) -> LogRows:
    count, rows = len(found.outcomes), output.count(at.ROWS)
    if any(column.form != ATOMIC for column in table.columns):
        _excuse(output, found, rows, groups)
    by_outcome = np.bincount(found.outcomes, minlength=HELD + 1)
    changed, images, empty, held = by_outcome[[CHANGED, IMAGE, EMPTY, HELD]].tolist()
    failed = np.flatnonzero((found.outcomes == FULL) | (found.outcomes > HELD))
    counts = LogCounts(count, changed, images, empty, held, len(failed))
    if changed + images + empty + held + len(failed) != count:
        raise RuntimeError(f"log rows of {table.full_name} got lost: {counts}")
    ids = found.groups[:groups].reshape(-1, 2, ID_BYTES)
    return LogRows(
        change_rows(output, *_constants(1 << rows.bit_length(), table.full_name)),
        found.change_groups[:rows],
        _arrivals(found.change_arrivals[:rows], later_s),
        LogGroups(
            ids[:, 0], ids[:, 1], found.complete[:groups] > 0, np.bincount(found.group_of[:count], minlength=groups)
        ),
        _errors(page, table, found, failed),
        found.group_of[failed].astype(np.intp),
        counts,
    )


def _excuse(output: Output, found: _Found, rows: int, groups: int) -> None:
    """Let log rows be empty that set nothing, in a write of which others set something: a statement that changes no
    element of a collection is logged if it is in a batch (S: cql3/lists.cc, cdc/change_visitor.hh)."""
    unset = np.flatnonzero(found.outcomes == UNSET)
    if not len(unset):
        return
    parts = (np.diff(output.arrays[starts][: rows + 1]) > 0 for starts in (at.ROW_CELLS, at.ROW_COMPLEX))
    has_content = np.zeros(groups, np.bool_)
    has_content[found.change_groups[:rows][np.logical_or(*parts)]] = True
    found.outcomes[unset[has_content[found.group_of[unset]]]] = EMPTY


def _arrivals(by_largest: Integers, later_s: Integers) -> tuple[Integers, ...]:
    is_known = by_largest != UNKNOWN_ARRIVAL
    return tuple(by_largest + later * is_known if later else by_largest for later in later_s.tolist())


def _errors(page: PaddedPage, table: LogTable, found: _Found, failed: Places) -> pa.RecordBatch:
    """Collect the log rows that cannot be used."""
    if not len(failed):
        return _NO_ERRORS
    kinds = [*zip(found.outcomes[failed].tolist(), found.culprits[failed].tolist(), strict=True)]
    places = {kind: place for place, kind in enumerate(sorted(set(kinds)))}
    reasons = cells_of_values([_reason(table, *kind).encode() for kind in places])
    of_kind = np.array([places[kind] for kind in kinds], np.intp)
    lengths = np.diff(found.starts)[failed]
    raw = raw_values(Cells(page, found.starts[failed], lengths))
    arrays = [
        array_of(_write_times(found.groups[found.group_of[failed], ID_BYTES:])),
        array_of(lengths.astype(np.int64)),
        raw_values(reasons.take(of_kind), pa.string()),
        pa.nulls(len(failed), pa.binary(ID_BYTES)),
        pc.binary_join_element_wise(_ONE_ROW, raw, b""),
        constant_columns(len(failed), table.full_name)[1],
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=ERROR_ROWS)


_NO_ERRORS, _NO_ROWS = (
    pa.RecordBatch.from_arrays([pa.nulls(0, one.type) for one in kind], schema=kind)
    for kind in (ERROR_ROWS, CHANGE_ROWS)
)
_NO_IDS = np.empty((0, ID_BYTES), np.uint8)
_NOTHING = LogRows(
    _NO_ROWS,
    np.empty(0, np.intp),
    (),
    LogGroups(_NO_IDS, _NO_IDS, np.empty(0, np.bool_), np.empty(0, np.intp)),
    _NO_ERRORS,
    np.empty(0, np.intp),
    LogCounts(0, 0, 0, 0, 0, 0),
)
"""What pages without rows have: most have none, since few streams get a row in a window."""


def _reason(table: LogTable, outcome: int, culprit: int) -> str:
    column, kind = table.layout[culprit]
    return REASONS[outcome].format(column=column, type=kind)


def _write_times(timeuuids: npt.NDArray[np.uint8]) -> Integers:
    """Return the times of timeuuids, µs; what is no timeuuid has the time 0."""
    halves = np.ascontiguousarray(timeuuids[:, :8]).view(">u8")[:, 0].astype(np.uint64)
    low, middle, high = halves >> np.uint64(32), halves >> np.uint64(16) & np.uint64(0xFFFF), halves & np.uint64(0xFFF)
    ticks = (high << np.uint64(48) | middle << np.uint64(32) | low).astype(np.int64)
    is_one = halves >> np.uint64(12) & np.uint64(0xF) == 1
    return np.where(is_one, (ticks - EPOCH_100NS) // 10, 0)
