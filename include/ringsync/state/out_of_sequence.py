"""The queue of late rows: keys and greatest timestamps of what came after its bucket had closed (docs/state.md).

The change rows themselves are in files of the object store, ``staging/late/…``. The queue says which of them are still
to be published, in one partition per :data:`SHARD_ROWS` rows of a file. So a partition is filled once, shrinks and is
deleted whole; the live ones are those whose file is still there, and nothing ever reads another: a read meets no
tombstones but those of its own partition, however many rows have gone through the table. And who admits a file again,
whenever that is, writes the same rows.

All rows of a partition are looked at together: their back-off is said once, in static columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from cassandra.cluster import Session

from ringsync.state.session import StateSession

SHARD_ROWS = 5_000
"""Rows of a file in one partition; far less than the tombstones at which Cassandra gives a read up (100,000)."""

BATCH_ROWS = 100
"""Rows in one mutation."""

_COLUMNS = ("digest", "table_id", "partition_key", "clustering", "kind", "write_time")


@dataclass(frozen=True)
class Shard:
    """Late rows that are looked at together.

    :ivar file: key of the file with the change rows
    :ivar number: the shard's number, from 0
    :ivar shards: number of shards of the file
    :ivar admitted_ms: ms since the epoch
    :ivar due_ms: time of the next look at them, ms since the epoch
    :ivar attempts: how often they have been looked at
    :ivar waiting: rows
    """

    file: str
    number: int
    shards: int
    admitted_ms: int
    due_ms: int
    attempts: int
    waiting: int


class OutOfSequence:
    """The table ``out_of_sequence``.

    :param session: a session with the driver's default row factory
    :param keyspace: name of ringsync's own keyspace
    """

    def __init__(self, session: Session, keyspace: str) -> None:
        self._state = StateSession(session, keyspace)
        self._table = f"{self._state.keyspace}.out_of_sequence"

    def admit(
        self, file: str, rows: pa.RecordBatch, wanted: npt.NDArray[np.bool_], now_ms: int, due_ms: int
    ) -> tuple[Shard, ...]:
        """Put rows of a file into the queue; the same again are the same rows.

        :param file: the file's key
        :param rows: all its change rows
        :param wanted: mask of the rows to publish
        :param now_ms: ms since the epoch
        :param due_ms: time of the next look at them, ms since the epoch
        :returns: all its shards
        :raises StateError: the cluster does not take them
        """
        count = max(1, -(-len(rows) // SHARD_ROWS))
        shards = []
        # Shard 0 comes last: a file counts as admitted once it is there.
        for number in reversed(range(count)):
            part = slice(number * SHARD_ROWS, (number + 1) * SHARD_ROWS)
            chosen = rows.take(pa.array(np.flatnonzero(wanted[part]) + part.start))
            shards.append(Shard(file, number, count, now_ms, due_ms, 1, len(chosen)))
            self._insert(shards[-1], chosen)
            self._write_times([shards[-1]])
        return tuple(reversed(shards))

    def _insert(self, shard: Shard, rows: pa.RecordBatch) -> None:
        cql = f"INSERT INTO {self._table} (late_file, shard, {', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        columns = (rows[name].to_pylist() for name in _COLUMNS)
        self._write_rows(cql, ((shard.file, shard.number, *row) for row in zip(*columns, strict=True)))

    def _write_rows(self, cql: str, rows: Iterable[Sequence[Any]]) -> None:
        each = iter(rows)
        batches = iter(lambda: list(islice(each, BATCH_ROWS)), [])
        self._state.write_all(self._state.batch(cql, batch) for batch in batches)

    def _write_times(self, shards: Sequence[Shard]) -> None:
        cql = (
            f"UPDATE {self._table} SET shards = ?, admitted_at = ?, due = ?, attempts = ?, waiting = ? "
            "WHERE late_file = ? AND shard = ?"
        )
        self._state.write_all(
            self._state.bind(cql, (s.shards, s.admitted_ms, s.due_ms, s.attempts, s.waiting, s.file, s.number))
            for s in shards
        )

    def find(self, files: Sequence[str]) -> Mapping[str, tuple[Shard, ...]]:
        """The shards of these files, also those of which nothing is left; a file that is not here was not admitted.

        :param files: keys
        :raises StateError: the cluster does not give them
        """
        first = self._shards((file, 0) for file in files)
        rest = self._shards((shard.file, number) for shard in first for number in range(1, shard.shards))
        found: dict[str, tuple[Shard, ...]] = {}
        for shard in (*first, *rest):
            found[shard.file] = (*found.get(shard.file, ()), shard)
        return found

    def _shards(self, keys: Iterable[tuple[str, int]]) -> list[Shard]:
        cql = (
            f"SELECT DISTINCT late_file, shard, shards, admitted_at, due, attempts, waiting FROM {self._table} "
            "WHERE late_file = ? AND shard = ?"
        )
        answers = self._state.read_all(self._state.bind(cql, key) for key in keys)
        return [
            Shard(
                *(row.late_file, row.shard, row.shards, _ms(row.admitted_at), _ms(row.due), row.attempts, row.waiting)
            )
            for rows in answers
            for row in rows
            if row.shards is not None
        ]

    def digests(self, shards: Sequence[Shard]) -> list[list[bytes]]:
        """Of each shard the digests of the rows that are waiting.

        :raises StateError: the cluster does not give them
        """
        cql = f"SELECT digest FROM {self._table} WHERE late_file = ? AND shard = ?"
        answers = self._state.read_all(self._state.bind(cql, (shard.file, shard.number)) for shard in shards)
        return [[row.digest for row in rows if row.digest is not None] for rows in answers]

    def solve(self, shard: Shard, solved: Sequence[bytes], left: int, due_ms: int) -> Shard:
        """Delete rows that have been published; those that are left are looked at again later. Again is fine.

        Where nothing is left the rows go when :meth:`forget` deletes the whole partition.

        :param solved: their digests
        :param left: how many others there are
        :param due_ms: time of the next look at these, ms since the epoch
        :raises StateError: the cluster does not take it
        """
        if left:
            cql = f"DELETE FROM {self._table} WHERE late_file = ? AND shard = ? AND digest = ?"
            self._write_rows(cql, ((shard.file, shard.number, digest) for digest in solved))
        after = replace(shard, due_ms=due_ms, attempts=shard.attempts + 1, waiting=left)
        self._write_times([after])
        return after

    def forget(self, file: str, shards: int) -> None:
        """Delete the partitions of a file of which no row is waiting; then the file itself may go, in this order.

        Who is stopped between both finds a file that has not been admitted, and all of whose rows are published.

        :raises StateError: the cluster does not take it
        """
        cql = f"DELETE FROM {self._table} WHERE late_file = ? AND shard = ?"
        # Shard 0 comes last: without it the others would not be found again.
        for numbers in (range(1, shards), (0,)):
            self._state.write_all(self._state.bind(cql, (file, number)) for number in numbers)


def _ms(moment: datetime) -> int:
    """A timestamp as the driver gives it, in ms since the epoch."""
    return round(moment.replace(tzinfo=UTC).timestamp() * 1000)
