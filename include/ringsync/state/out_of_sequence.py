"""The queue of late rows: keys and greatest timestamps of rows that came after their bucket had closed (docs/state.md).

The change rows themselves are in files of the object store, ``staging/late/…``. The queue says which of them still wait
to be published, in one partition per :data:`SHARD_ROWS` rows of a file. A partition is filled once, shrinks and is
deleted whole. Only partitions whose file still exists are read. So a read meets only its own partition's tombstones,
however many rows have gone through the table. Admitting a file again writes the same rows.

All rows of a partition are looked at together. Static columns hold their common back-off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from cassandra.cluster import Session

from ringsync.state.session import StateSession

SHARD_ROWS = 5_000
"""Rows of a file in one partition; far fewer than the tombstones at which Cassandra fails a read (100,000)."""

BATCH_ROWS, BATCH_BYTES = 100, 2**20
"""Rows in one mutation, and bytes of their keys: a node refuses one of more than half a segment of its commit log."""

_COLUMNS = ("digest", "table_id", "partition_key", "clustering", "kind", "write_time")


def batches(rows: Iterable[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
    """Cut rows into mutations, by :data:`BATCH_ROWS` and :data:`BATCH_BYTES`; a row may be larger."""
    batch: list[Sequence[Any]] = []
    size = 0
    for row in rows:
        width = sum(len(value) for value in row if isinstance(value, bytes))
        if batch and (len(batch) == BATCH_ROWS or size + width > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += width
    if batch:
        yield batch


@dataclass(frozen=True)
class Shard:
    """Late rows that are looked at together.

    :ivar file: key of the file with the change rows
    :ivar number: number of the shard in the file, from 0
    :ivar due_ms: time of the next look at the rows, ms since the epoch
    """

    file: str
    number: int
    shards: int
    admitted_ms: int
    due_ms: int
    attempts: int
    waiting: int


class OutOfSequence:
    """The table ``out_of_sequence``. Each method raises :class:`ringsync.state.session.StateError` as that module says.

    :param session, keyspace: those of :class:`ringsync.state.session.StateSession`
    """

    def __init__(self, session: Session, keyspace: str) -> None:
        self._state = StateSession(session, keyspace)
        self._table = f"{self._state.keyspace}.out_of_sequence"

    def admit(
        self, file: str, rows: pa.RecordBatch, wanted: npt.NDArray[np.bool_], now_ms: int, due_ms: int
    ) -> tuple[Shard, ...]:
        """Put rows of a file into the queue. Repeating it writes the same rows.

        :param rows: all change rows of the file
        :param wanted: mask of the rows to publish
        :returns: all shards of the file
        """
        cql = f"INSERT INTO {self._table} (late_file, shard, {', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        count = max(1, -(-len(rows) // SHARD_ROWS))
        shards = []
        # Shard 0 comes last: a file counts as admitted once it is there.
        for number in reversed(range(count)):
            part = slice(number * SHARD_ROWS, (number + 1) * SHARD_ROWS)
            chosen = rows.take(pa.array(np.flatnonzero(wanted[part]) + part.start))
            shards.append(Shard(file, number, count, now_ms, due_ms, 1, len(chosen)))
            columns = (chosen[name].to_pylist() for name in _COLUMNS)
            self._write_rows(cql, ((file, number, *row) for row in zip(*columns, strict=True)))
            self._write_times(shards[-1])
        return tuple(reversed(shards))

    def _write_rows(self, cql: str, rows: Iterable[Sequence[Any]]) -> None:
        self._state.write_all(self._state.batch(cql, batch) for batch in batches(rows))

    def _write_times(self, shard: Shard) -> None:
        cql = (
            f"UPDATE {self._table} SET shards = ?, admitted_at = ?, due = ?, attempts = ?, waiting = ? "
            "WHERE late_file = ? AND shard = ?"
        )
        times = (shard.shards, shard.admitted_ms, shard.due_ms, shard.attempts, shard.waiting)
        self._state.write_all([self._state.bind(cql, (*times, shard.file, shard.number))])

    def find(self, files: Sequence[str]) -> Mapping[str, tuple[Shard, ...]]:
        """Read the shards of these files, empty ones included. A file without shards was not admitted."""
        first = self._shards((file, 0) for file in files)
        rest = self._shards((shard.file, number) for shard in first for number in range(1, shard.shards))
        shards_of: dict[str, tuple[Shard, ...]] = {}
        for shard in (*first, *rest):
            shards_of[shard.file] = (*shards_of.get(shard.file, ()), shard)
        return shards_of

    def _shards(self, keys: Iterable[tuple[str, int]]) -> list[Shard]:
        cql = (
            f"SELECT DISTINCT late_file, shard, shards, admitted_at, due, attempts, waiting FROM {self._table} "
            "WHERE late_file = ? AND shard = ?"
        )
        answers = self._state.read_all(self._state.bind(cql, key) for key in keys)
        return [
            Shard(row.late_file, row.shard, row.shards, _ms(row.admitted_at), _ms(row.due), row.attempts, row.waiting)
            for rows in answers
            for row in rows
            if row.shards is not None
        ]

    def digests(self, shards: Sequence[Shard]) -> list[list[bytes]]:
        """Read the digests of each shard's waiting rows."""
        cql = f"SELECT digest FROM {self._table} WHERE late_file = ? AND shard = ?"
        answers = self._state.read_all(self._state.bind(cql, (shard.file, shard.number)) for shard in shards)
        return [[row.digest for row in rows if row.digest is not None] for rows in answers]

    def solve(self, shard: Shard, solved: Sequence[bytes], left: int, due_ms: int) -> Shard:
        """Delete published rows; the others are looked at again later. Repeating it is safe.

        If no row is left, :meth:`forget` deletes the whole partition instead.

        :param solved: digests of the published rows
        :param left: number of rows that still wait
        """
        if left:
            cql = f"DELETE FROM {self._table} WHERE late_file = ? AND shard = ? AND digest = ?"
            self._write_rows(cql, ((shard.file, shard.number, digest) for digest in solved))
        after = replace(shard, due_ms=due_ms, attempts=shard.attempts + 1, waiting=left)
        self._write_times(after)
        return after

    def forget(self, file: str, shards: int) -> None:
        """Delete the partitions of a file without waiting rows. Remove the file afterwards, in this order.

        A kill between both leaves a file that is not admitted, but whose rows are all published.
        """
        cql = f"DELETE FROM {self._table} WHERE late_file = ? AND shard = ?"
        # Shard 0 comes last: without it the others would not be found again.
        for numbers in (range(1, shards), (0,)):
            self._state.write_all(self._state.bind(cql, (file, number)) for number in numbers)


def _ms(moment: datetime) -> int:
    return round(moment.replace(tzinfo=UTC).timestamp() * 1000)
