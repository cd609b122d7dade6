"""What a Spark task of ``commitlog_stage`` does: decode a part of a segment, and lay its change rows into buckets."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.cells import numbers
from ringsync.changes.tables import logged_tables
from ringsync.config import load_config
from ringsync.cql.cells import cells_of_values, raw_values
from ringsync.formats.commitlog.names import segment_id
from ringsync.formats.commitlog.reader import UNDECODED, read_log
from ringsync.formats.commitlog.segment import Damage, SegmentError, Wanted
from ringsync.formats.keystores.files import keys_in
from ringsync.ring.ranks import RankedRing
from ringsync.schema.system_tables import system_tables
from ringsync.schema.table import TableSchema
from ringsync.state.staging import STAGED_ROWS, Bucket, StageCommit, StagedFile, encode_rows, rows_key
from ringsync.storage.port import ObjectStore
from ringsync.streams.pass_log import digest_halves, first_of_each

ERRORS = UNDECODED.append(pa.field("file", pa.string()))
"""What could not be decoded; of damaged bytes without ``raw``."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StageWork:
    """A part of a segment.

    :ivar node: host id
    :ivar file: path of the segment
    :ivar wanted: behind which position, up to which; a completed segment to its end
    """

    node: str
    file: str
    wanted: Wanted

    @property
    def finishes(self) -> bool:
        """Whether nothing more of the segment will come."""
        return self.wanted.until is None


@dataclass(frozen=True)
class Windows:
    """Which buckets there are.

    :ivar newest: the present interval
    :ivar closed_until: ms since the epoch: buckets that end then or before take nothing more
    """

    newest: Bucket
    closed_until: int

    def starts(self, write_times: Numbers, by_arrival: bool) -> Numbers:
        """Where the bucket of each row begins, in ms; -1: it is closed.

        :param write_times: µs. What is written in the future belongs to the newest bucket
        """
        if by_arrival:
            return np.full(len(write_times), self.newest.start)
        length = self.newest.length
        starts = np.minimum(write_times // 1000 // length * length, self.newest.start)
        return np.where(starts + length <= self.closed_until, -1, starts)


@dataclass(frozen=True)
class StagedTable:
    """A table whose rows are kept.

    :ivar ring: its token ranges
    """

    table_id: str
    by_arrival: bool
    ring: RankedRing


@dataclass(frozen=True)
class Staged:
    """What has come of some work: files that count once the commit is put.

    :ivar errors: of :data:`ERRORS`, as Arrow IPC
    :ivar error_count: how many
    :ivar unknown: ids of tables that the schema does not have, as hexadecimal digits
    :ivar unreadable: why nothing of the segment can be read; empty: it can
    """

    work: StageWork
    commit: StageCommit
    errors: bytes
    error_count: int
    unknown: frozenset[str]
    unreadable: str = ""


@dataclass(frozen=True)
class StageTask:
    """Decodes and stages; Spark calls it with the work of one partition.

    :ivar logged: all tables of the schema: a mutation may have any
    :ivar kept: those that are followed; rows of all others count as ``not_cdc``
    """

    config_path: str
    logged: tuple[TableSchema, ...]
    kept: tuple[StagedTable, ...]
    windows: Windows

    def __call__(self, works: Iterable[StageWork]) -> Iterator[Staged]:
        config = load_config(self.config_path)
        store = config.open_store()
        for work in works:
            yield stage(work, self, store, config.sync.keystore)


def stage(work: StageWork, task: StageTask, store: ObjectStore, keystore: str | None) -> Staged:
    """Read a part of a segment and write its rows.

    :raises OSError: the segment cannot be read
    """
    name = Path(work.file).name
    identity = segment_id(name)
    if identity is None:
        raise ValueError(f"{work.file} is not named like a commit log segment (CommitLog-7-1700000000000.log)")
    with open(work.file, "rb") as file:
        size = file.seek(0, 2)
        data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    files = _Files(task, store, work.node, f"{work.node}-{identity}-{work.wanted.after}-{secrets.token_hex(4)}")
    undecoded: list[pa.RecordBatch] = []
    keys = keys_in(keystore, os.environ) if keystore else None
    try:
        found = read_log(memoryview(data), name, logged_tables(task.logged), work.wanted, key_of=keys)
    except SegmentError as error:
        return Staged(work, files.commit(name, identity, work, work.wanted.after, {}), b"", 0, frozenset(), str(error))
    for changes in found.batches:
        files.add(changes.rows)
        undecoded.append(changes.undecoded)
    errors, passed_over, unknown = _errors(undecoded, found.damages, name)
    counts = {
        "records": found.records,
        "records_of_system_tables": passed_over,
        "damages": len(found.damages),
        "of_unknown_tables": (of_unknown := errors.num_rows - errors["table_id"].null_count),
        "errors": errors.num_rows - of_unknown,
        **files.finish(),
    }
    commit = files.commit(name, identity, work, max(found.end, work.wanted.after), counts)
    return Staged(work, commit, encode_rows(errors), errors.num_rows, unknown)


class _Files:
    """The files of some work in the making."""

    def __init__(self, task: StageTask, store: ObjectStore, node: str, prefix: str) -> None:
        self._task = task
        self._store = store
        self._node = cells_of_values([node.encode()])
        self._prefix = prefix
        self._ids = raw_values(cells_of_values([bytes.fromhex(table.table_id) for table in task.kept]))
        self._waiting: dict[tuple[int, int], list[pa.RecordBatch]] = {}
        self._rows = self._not_cdc = 0
        self._read_at_ms = int(time.time() * 1000)
        self._staged: list[StagedFile] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Sort rows into tables and buckets."""
        self._rows += rows.num_rows
        for number, table in enumerate(self._task.kept):
            of_table = rows.filter(_equal(rows["table_id"], bytes.fromhex(table.table_id)))
            if of_table.num_rows:
                starts = self._task.windows.starts(numbers(of_table["write_time"]), table.by_arrival)
                for start in np.unique(starts).tolist():
                    chosen = of_table.take(_indices(np.flatnonzero(starts == start)))
                    self._waiting.setdefault((number, start), []).append(chosen)

    def finish(self) -> dict[str, int]:
        """Write everything; the counts of rows."""
        counts: Counter[str] = Counter(staged=0, late=0, repeated=0)
        for place, ((number, start), batches) in enumerate(sorted(self._waiting.items())):
            table = self._task.kept[number]
            rows = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
            halves = digest_halves(rows["digest"])
            order = np.argsort(numbers(rows["token"]), kind="stable")
            once = order[first_of_each(halves)[order]]
            counts["repeated"] += len(order) - len(once)
            counts["late" if start < 0 else "staged"] += len(once)
            self._write(table, start, rows.take(_indices(once)), halves[once], place)
        counts["not_cdc"] = self._rows - sum(counts.values())
        return {"rows": self._rows, **counts}

    def commit(self, name: str, identity: int, work: StageWork, end: int, counts: Mapping[str, int]) -> StageCommit:
        """What makes the files count."""
        return StageCommit(
            node=work.node,
            segment=name,
            segment_id=identity,
            start=work.wanted.after,
            end=end,
            finished=work.finishes,
            read_at_ms=self._read_at_ms,
            counts=counts,
            files=tuple(self._staged),
        )

    def _write(self, table: StagedTable, start: int, rows: pa.RecordBatch, halves: Any, place: int) -> None:
        length = self._task.windows.newest.length
        bucket = "" if start < 0 else str(Bucket(start, length))
        key = rows_key(table.table_id, bucket, f"{self._prefix}-{place}")
        node = raw_values(self._node.take(np.zeros(rows.num_rows, np.intp)), pa.string())
        self._store.put(key, encode_rows(pa.RecordBatch.from_arrays([*rows.columns, node], schema=STAGED_ROWS)))
        sums = range_sums(table.ring, numbers(rows["token"]), halves) if bucket else ()
        self._staged.append(StagedFile(key, table.table_id, bucket, rows.num_rows, table.ring.ring.digest, sums))


def range_sums(
    ring: RankedRing, tokens: Numbers, halves: npt.NDArray[np.uint64]
) -> tuple[tuple[int, int, int, int], ...]:
    """For each token range that has rows: its number, rows, and the sums of both halves of their digests."""
    ranges = ring.numbers_of(tokens)
    order = np.argsort(ranges, kind="stable")
    found, starts, rows = np.unique(ranges[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(halves[order], starts, axis=0)
    columns = (found.tolist(), rows.tolist(), sums[:, 0].tolist(), sums[:, 1].tolist())
    return tuple(zip(*columns, strict=True))


def _errors(
    undecoded: list[pa.RecordBatch], damages: list[Damage], file: str
) -> tuple[pa.RecordBatch, int, frozenset[str]]:
    """What could not be decoded, records of Cassandra's own tables left out; their number; ids of unknown tables."""
    own = {bytes.fromhex(table_id) for table_id in system_tables()}
    records = [one for batch in undecoded if batch.num_rows for one in batch.to_pylist()]
    wanted = [one for one in records if one["table_id"] not in own]
    described: list[dict[str, Any]] = [{**one, "file": file} for one in wanted]
    described += [
        {"position": one.position, "length": one.length, "reason": one.reason, "file": file} for one in damages
    ]
    unknown = frozenset(one["table_id"].hex() for one in wanted if one["table_id"])
    return pa.RecordBatch.from_pylist(described, ERRORS), len(records) - len(wanted), unknown


def _equal(ids: pa.Array, wanted: bytes) -> pa.Array:
    """Where a column of binary(16) has this value."""
    halves = digest_halves(ids)
    return _mask((halves == np.frombuffer(wanted, np.uint64)).all(axis=1))


def _mask(values: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(np.packbits(values, bitorder="little"))])


def _indices(places: npt.NDArray[np.intp]) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places.astype(np.int64))])
