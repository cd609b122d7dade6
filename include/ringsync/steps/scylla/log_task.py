"""The Spark task of ``scylla_log_stage``: it reads streams of CDC logs, and puts their change rows into buckets."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.cluster.control import ControlAddress, ControlClient
from ringsync.cluster.generations import Clocks
from ringsync.cluster.limits import Permits
from ringsync.compiled.arrow import Mask, array_of, filtered, integers
from ringsync.config import Config
from ringsync.cql.murmur3 import murmur3_128
from ringsync.formats.commitlog.reader import ERROR_ROWS
from ringsync.formats.result_page import page_cells
from ringsync.ledger import staging
from ringsync.ledger.database import CDC_LOGS
from ringsync.scylla.log_rows import MOST_BYTES as DECODED_BYTES
from ringsync.scylla.log_rows import UNKNOWN_ARRIVAL, LogGroups, LogRows
from ringsync.scylla.log_schema import METADATA, LogTable
from ringsync.scylla.progress import NO_SUMS, SLOT_MS, Kind, Piece, SlotSums, Waiting, added
from ringsync.sources.cdc_log import LogRead, LogReader, joined
from ringsync.sources.scan.pages import row_count
from ringsync.steps.application import plain
from ringsync.steps.stage.staged_files import Destination, StagedFiles, StagedTable, Windows
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_settings, store_of

READS_AT_ONCE = 8
"""Requests of one task that are on their way at once: most streams have nothing new, and the answer is short. Of each
some pages at most wait in memory."""

MOST_ROWS, MOST_BYTES = 1_000_000, 2**25
"""Log rows of a table that one task reads, and bytes that one request has, whose change rows may take many times as
much: with more, the window is made shorter, and nothing is lost. One of a single ms cannot be: its streams are read one
by one, and each in parts."""

HELD_BYTES = 2**27
"""Bytes of change rows that a task holds in memory; then it writes a file."""

MOST_ERROR_BYTES = 2**25
"""Bytes of log rows of a table that a task gives back since they cannot be decoded: with more, too, the window is made
shorter."""


@dataclass(frozen=True)
class FollowedLog:
    """A table whose log is read.

    :ivar staged: how its rows are staged
    :ivar log: its log table
    :ivar ttl_s: time after which the log forgets its rows; None: never
    :ivar log_id: id of the log table
    """

    staged: StagedTable
    log: LogTable
    ttl_s: int | None
    log_id: str = ""

    @property
    def table_id(self) -> str:
        return self.staged.version.table_id


@dataclass(frozen=True)
class LogWork:
    """Streams to read.

    :ivar table: place of the table among the task's
    :ivar streams: ids of streams that one request asks for
    :ivar endpoints: ``address:port`` of the replicas to ask first
    :ivar only: of a group that waited: its ``cdc$time``; all other rows were staged before
    :ivar patient: whether a group that is not complete waits; False: it has waited long enough
    :ivar alone: whether nothing else is read meanwhile, since there is so much of it
    :ivar from_time: ``cdc$time`` from which on the rest of a stream is read; None: from the begin of the piece
    :ivar times_bytes: how many times the bytes of one request it may have, since one write has more
    :ivar is_part: whether the last write that was read is left to the next part, which may have more of it
    :ivar ttls_s: TTLs that the log rows may have, s, the present one first; empty: they stay for ever
    """

    table: int
    piece: Piece
    streams: tuple[bytes, ...]
    endpoints: tuple[str, ...] = ()
    only: bytes | None = None
    patient: bool = True
    alone: bool = False
    from_time: bytes | None = None
    times_bytes: int = 1
    is_part: bool = False
    ttls_s: tuple[int, ...] = ()

    def without_streams(self) -> LogWork:
        """Return what is to be done with all rows alike, of whatever stream they are."""
        return replace(self, streams=(), endpoints=(), from_time=None)


@dataclass
class TableResult:
    """What a task has found in the log of a table.

    :ivar counts: log rows by outcome
    :ivar waiting: groups that are not complete
    :ivar sums: sums of what was found, by kind and slot
    :ivar failures: why some work failed, by kind: nothing of this kind counts then
    :ivar too_many: kinds of which there were too many rows, or bytes of them, for one task
    :ivar largest: most bytes of one request, by kind; ``error_bytes``: bytes of rows that cannot be decoded
    """

    counts: Counter[str] = field(default_factory=Counter)
    waiting: list[Waiting] = field(default_factory=list)
    sums: dict[str, dict[int, SlotSums]] = field(default_factory=lambda: defaultdict(dict))
    failures: dict[Kind, str] = field(default_factory=dict)
    too_many: set[Kind] = field(default_factory=set)
    largest: Counter[Kind] = field(default_factory=Counter)
    error_bytes: Counter[Kind] = field(default_factory=Counter)

    @property
    def missed(self) -> set[Kind]:
        """Kinds of works that were not all done."""
        return self.too_many | self.failures.keys()

    def came(self, piece: Piece, read: LogRead) -> None:
        """Count what has come. The rows of a near sweep are not kept."""
        rows, kind = f"{piece.kind}_rows", piece.kind
        self.counts[rows] += sum(map(row_count, read.pages))
        has_many = kind != "near" and self.counts[rows] > MOST_ROWS and not _is_shortest(piece)
        if has_many or (read.is_too_large and not _is_shortest(piece)):
            self.too_many.add(kind)
        self.largest[kind] = max(self.largest[kind], read.size)

    def failed(self, piece: Piece, size: int) -> None:
        """Count the bytes of rows that cannot be decoded."""
        self.error_bytes[piece.kind] += size
        if self.error_bytes[piece.kind] > MOST_ERROR_BYTES and not _is_shortest(piece):
            self.too_many.add(piece.kind)


@dataclass(frozen=True)
class LogResult:
    """What a task has staged: files that count once they are committed.

    :ivar tables: by table id
    :ivar counts: change rows by outcome, of all tables
    :ivar errors: batch of ``ERROR_ROWS``, as Arrow IPC
    """

    tables: Mapping[str, TableResult]
    counts: Mapping[str, int]
    blocks: tuple[staging.Block, ...]
    late: tuple[str, ...]
    errors: bytes
    error_count: int

    @property
    def files(self) -> tuple[str, ...]:
        """Keys of all files that were written."""
        return (*dict.fromkeys(block.place.key for block in self.blocks), *self.late)


@dataclass(frozen=True)
class LogTask:
    """Reads and stages the work that Spark gives to one task.

    :ivar commit: number of the commit that is to list the result
    :ivar clocks: those of the cluster's nodes
    """

    config: Config
    tables: tuple[FollowedLog, ...]
    windows: Windows
    control: ControlAddress
    commit: int
    clocks: Clocks

    def __call__(self, works: Iterable[LogWork]) -> Iterator[LogResult]:
        with ControlClient(self.control) as permits:
            yield stage_logs(self, list(works), permits)


def stage_logs(task: LogTask, works: Sequence[LogWork], permits: Permits) -> LogResult:
    """Read streams and write their rows. A table that fails is told, not raised."""
    files = _Files(task, store_of(task.config))
    results: dict[str, TableResult] = defaultdict(TableResult)
    errors: list[pa.RecordBatch] = []
    reader, waiting = LogReader.open(cluster_settings(task.config), permits), deque(works)

    def is_vain(work: LogWork) -> bool:
        return work.piece.kind in results[task.tables[work.table].table_id].missed

    reads = _reads(task, reader, waiting, is_vain)
    for work, read in joined(_usable(task, reads, waiting, results)):
        table = task.tables[work.table]
        result = results[table.table_id]
        try:
            found = _decoded(task, work, read, take_incomplete=not work.patient)
            rows, counts = _taken(task, work, read, found, result)
            files.add(rows)
            result.counts.update(counts)
            if work.piece.kind != "near":
                unusable = found.errors_before(len(found.groups) - work.is_part)
                errors.append(_named(unusable, table))
                result.failed(work.piece, unusable.nbytes)
        except Exception as error:  # a table's failure is its own
            result.failures[work.piece.kind] = plain(error)
        if files.held >= HELD_BYTES:
            files.write()
    undecoded = pa.concat_batches([_NO_ERRORS, *errors])
    files.write()
    encoded = staging.encode_rows(undecoded)
    return LogResult(dict(results), files.counts, tuple(files.blocks), tuple(files.late), encoded, undecoded.num_rows)


def _usable(
    task: LogTask,
    reads: Iterable[tuple[LogWork, LogRead | Exception]],
    waiting: deque[LogWork],
    results: Mapping[str, TableResult],
) -> Iterator[tuple[LogWork, LogRead]]:
    """Yield the reads of which rows are taken, and count all. What is too large, and cannot be of less time, is read in
    parts.

    :param waiting: works, to which what is left is added
    """
    for work, read in reads:
        table = task.tables[work.table]
        result, kind = results[table.table_id], work.piece.kind
        if isinstance(read, Exception):
            result.failures[kind] = plain(read)
            continue
        if read.is_too_large and _is_shortest(work.piece):
            if not work.alone:
                is_one = len(work.streams) == 1
                waiting.extend(replace(work, streams=(stream,), alone=is_one) for stream in work.streams)
                continue
            if (rest := _rest(work, read, table.log)) is not None:
                waiting.appendleft(rest)
            elif read.size <= DECODED_BYTES:
                waiting.appendleft(replace(work, times_bytes=4 * work.times_bytes))
                continue
            else:
                result.failures[kind] = _LARGE_WRITE.format(read.size, work.piece.start_ms)
                continue
            work = replace(work, is_part=True)
        result.came(work.piece, read)
        if kind not in result.missed:
            yield work.without_streams(), read


class _Files:
    """The files of a task: one after the other, so that memory is bounded however much all tables have."""

    def __init__(self, task: LogTask, store: ObjectStore) -> None:
        self._task, self._store = task, store
        self.counts: Counter[str] = Counter()
        self.blocks: list[staging.Block] = []
        self.late: list[str] = []
        self._begin()

    def _begin(self) -> None:
        to = Destination(CDC_LOGS, self._task.commit, secrets.token_hex(8), is_agreed=True)
        staged = [table.staged for table in self._task.tables]
        self._file, self.held = StagedFiles(staged, self._task.windows, self._store, to), 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add change rows."""
        self._file.add(rows)
        self.held += rows.nbytes

    def write(self) -> None:
        """Write what is held."""
        self.counts.update(self._file.finish())
        self.blocks += self._file.blocks
        self.late += self._file.late
        self._begin()


def _reads(
    task: LogTask, reader: LogReader, waiting: deque[LogWork], is_vain: Callable[[LogWork], bool]
) -> Iterator[tuple[LogWork, LogRead | Exception]]:
    """Read the requests in the order of the works, and some ahead, but for those that turn out vain meanwhile.

    :param waiting: works; more may be added at any time
    """
    running: deque[tuple[LogWork, Callable[[], LogRead]]] = deque()
    while waiting or running:
        is_alone = bool(running) and (running[-1][0].alone or (bool(waiting) and waiting[0].alone))
        if waiting and len(running) < READS_AT_ONCE and not is_alone:
            if not is_vain(work := waiting.popleft()):
                running.append((work, _begun(task, reader, work)))
            continue
        work, read = running.popleft()
        try:
            found: LogRead | Exception = read()
        except Exception as error:  # it is told where the table is known
            found = error
        yield work, found


_KEY_BYTES = 52
"""Row count, ``cdc$stream_id``, ``cdc$time`` and ``cdc$batch_seq_no`` of a result page with one log row."""


def _named(errors: pa.RecordBatch, table: FollowedLog) -> pa.RecordBatch:
    """Name the table of log rows that cannot be used, and give each a position of its own: those of one write have the
    same time. It is the same whenever the row is read; what is left of its TTL is not."""
    fields, count = errors.schema, errors.num_rows
    hashes, _ = murmur3_128(pc.binary_slice(errors["raw"], 0, _KEY_BYTES))
    ids = pa.array([bytes.fromhex(table.table_id)] * count, fields.field("table_id").type)
    for name, column in (("table_id", ids), ("position", array_of(hashes & (2**63 - 1)))):
        errors = errors.set_column(fields.get_field_index(name), fields.field(name), column)
    return errors


def _begun(task: LogTask, reader: LogReader, work: LogWork) -> Callable[[], LogRead]:
    piece, log = work.piece, task.tables[work.table].log
    most_bytes = min(MOST_BYTES * work.times_bytes, DECODED_BYTES)
    options: dict[str, Any] = {"most_bytes": most_bytes, "endpoints": work.endpoints, "from_time": work.from_time}
    return reader.begin(log, work.streams, piece.start_ms, piece.end_ms, **options)


_LARGE_WRITE = "more than {:,} bytes of its log in the ms {} are of one write: that is more than is decoded at once"


def _rest(work: LogWork, read: LogRead, log: LogTable) -> LogWork | None:
    """Return what is left of a stream of which a part was read: from its last write on, of which there may be more; it
    is left out of this part. None: all is one write."""
    pages = [page for page in read.pages if row_count(page)]
    times = [page_cells(page, len(log.layout))[1][METADATA.index("cdc$time")] for page in (pages[0], pages[-1])]
    first, last = times[0].value(0), times[1].value(len(times[1]) - 1)
    return replace(work, from_time=last, times_bytes=1) if first != last else None


def _is_shortest(piece: Piece) -> bool:
    return piece.end_ms - piece.start_ms <= 1


def _decoded(task: LogTask, work: LogWork, read: LogRead, *, take_incomplete: bool) -> LogRows:
    log = task.tables[work.table].log
    return read.decoded(log, work.ttls_s, clocks=task.clocks, take_incomplete=take_incomplete)


def _taken(
    task: LogTask, work: LogWork, read: LogRead, found: LogRows, result: TableResult
) -> tuple[pa.RecordBatch, Counter[str]]:
    """Return the rows that are to be staged, and the counts of all."""
    groups, kind, wanted = found.groups, work.piece.kind, np.ones(found.rows.num_rows, np.bool_)
    if work.is_part:
        groups = groups.before(len(groups) - 1)
        wanted = found.group < len(groups)
    held = ~groups.complete if work.patient else np.zeros(len(groups), np.bool_)
    if work.only is not None:
        is_asked = (groups.time == np.frombuffer(work.only, np.uint8)).all(axis=1)
        wanted &= np.append(is_asked, False)[np.minimum(found.group, len(groups))]
        held &= is_asked
    elif kind in ("window", "near"):
        # Whatever else is there when it is read once more is new, be it the rest of a group.
        add_sums(result.sums[kind], groups)
    if kind == "far":
        wanted &= _came_late(work.piece, found, read.took_s)
        held &= _late_groups(task, work, read)[: len(groups)] if held.any() else False
    elif kind == "near":
        wanted[:], held[:] = False, False
    now_ms = int(time.time() * 1000 + task.clocks.ahead_ms)
    for place in np.flatnonzero(held).tolist():
        stream, moment = groups.stream[place].tobytes().hex(), groups.time[place].tobytes().hex()
        piece = work.piece
        result.waiting.append(
            Waiting(piece.generation_ms, stream, moment, now_ms, max(piece.start_ms, piece.arrived_from_ms))
        )
    counts = Counter({f"log_{name}": number for name, number in vars(found.counts).items()})
    counts.update(
        change_rows=found.rows.num_rows,
        taken=int(np.count_nonzero(wanted)),
        read_before=int(np.count_nonzero(~wanted)),
    )
    return filtered(found.rows, wanted), counts


def _late_groups(task: LogTask, work: LogWork, read: LogRead) -> Mask:
    """Tell which groups came late, complete or not; of half a range deletion, nothing says when it came."""
    found = _decoded(task, work, read, take_incomplete=True)
    late, count = found.group[_came_late(work.piece, found, read.took_s)], len(found.groups)
    is_late, has_arrival = (np.bincount(of, minlength=count) > 0 for of in (late, found.group))
    return np.asarray(is_late | ~has_arrival)


def _came_late(piece: Piece, found: LogRows, took_s: float) -> Mask:
    """Tell which rows of a far sweep came so late that the near ones have missed them, and after the sweep before.
    While rows may have several TTLs, each tells of another arrival: by a wrong one a row may be taken twice."""
    times_ms, late = integers(found.rows["position"]) // 1000, np.zeros(found.rows.num_rows, np.bool_)
    is_compared = times_ms >= piece.compared_from_ms
    from_ms = np.maximum(piece.arrived_from_ms, times_ms + np.where(is_compared, piece.late_ms, 0))
    for arrivals_s in found.arrivals_s:
        earliest_ms = arrivals_s * 1000
        # The time that is left of a TTL has no fractions, and is of a moment while the request was under way.
        latest_ms = earliest_ms + 999 + math.ceil(1000 * took_s)
        is_known = arrivals_s != UNKNOWN_ARRIVAL
        late |= is_known & (latest_ms >= from_ms) & (earliest_ms < piece.arrived_until_ms)
    return late


def add_sums(sums: dict[int, SlotSums], groups: LogGroups) -> None:
    """Add log rows to the sums of their slots. The ids of their groups are summed up: change rows have other digests
    once a column is dropped."""
    if not len(groups):
        return
    slots = groups.write_time // 1000 // SLOT_MS * SLOT_MS
    ids = np.concatenate([groups.stream, groups.time], axis=1).view(np.uint64)
    rows = groups.rows.astype(np.uint64)
    halves = (ids[:, None, :] * _FACTORS).sum(axis=2, dtype=np.uint64) * rows[:, None]
    order = np.argsort(slots, kind="stable")
    found, starts = np.unique(slots[order], return_index=True)
    counts, totals = np.add.reduceat(rows[order], starts), np.add.reduceat(halves[order], starts, axis=0)
    for slot, count, (first, second) in zip(found.tolist(), counts.tolist(), totals.tolist(), strict=True):
        sums[slot] = added(sums.get(slot, NO_SUMS), (count, first, second))


_FACTORS = np.array(
    [
        [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93],
        [0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3],
    ],
    np.uint64,
)
"""Odd numbers: a log row more or less changes both sums."""


_NO_ERRORS = pa.RecordBatch.from_arrays([pa.nulls(0, one.type) for one in ERROR_ROWS], schema=ERROR_ROWS)
