"""What becomes of late rows: files under ``staging/late/`` → the queue ``out_of_sequence`` → a pass of their table.

A row leaves one place only once it is safe in the next: its file stays until its pass is committed and the queue has
forgotten it. So each step may be killed and repeated; what was published in between is known by its digest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.cells import numbers
from ringsync.changes.identity import TableVersion, UnresolvedRowsError
from ringsync.changes.merge import merge
from ringsync.changes.schema import ROW, STATIC
from ringsync.changes.visible import same_keys, visible
from ringsync.schema.table import TableSchema
from ringsync.state.out_of_sequence import SHARD_ROWS, OutOfSequence, Shard
from ringsync.state.staging import decode_rows
from ringsync.status import LATE_ROWS
from ringsync.steps.application import StepError
from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore
from ringsync.streams.pass_log import among, digest_halves, first_of_each, sorted_digests

FOLDER = LATE_ROWS

BATCH_ROWS = 20_000
"""About so many rows of a table are read and published together …"""
BATCH_BYTES = 128 * 2**20
"""… or so many bytes of them."""

FIRST_WAIT_S, LONGEST_WAIT_S = 10, 600
"""A row that a quorum does not show is looked at again after 10 s, 20 s, 40 s …"""
ATTEMPTS = 6
"""… until it has been looked at so often. Then it is published all the same: the log proves that it was written."""

Mask = npt.NDArray[np.bool_]


class UnreadableRowsError(Exception):
    """Rows could not be read at quorum: the nodes that have them do not answer."""


class Effects(Protocol):
    """What late rows need of the cluster, and what they do to the stream."""

    def table(self, table_id: str) -> TableVersion | None:
        """The table of an id (32 hexadecimal digits); None: it is unknown, or has no cdc any more."""

    def published(self, table: TableSchema, rows: pa.RecordBatch) -> Mask:
        """Which change rows have been published."""

    def read(self, table: TableSchema, keys: pa.RecordBatch) -> pa.RecordBatch:
        """The images of rows, and of static rows, at quorum.

        :param keys: ``token``, ``partition_key``, ``clustering`` of change rows; each once
        :raises UnreadableRowsError: nobody knows of some of them
        """

    def publish(self, table: TableSchema, rows: pa.RecordBatch) -> int:
        """Commit a pass of late rows.

        :param rows: change rows, each once
        :returns: how many of them were in it; the others had been published since :meth:`published`
        :raises UnreadableRowsError: the rows after the changes could not be read
        """


@dataclass(frozen=True)
class _Batch:
    """Rows of some shards of one table.

    :ivar shard: which shard each row belongs to: its place among ``shards``
    """

    shards: tuple[Shard, ...]
    rows: pa.RecordBatch
    shard: npt.NDArray[np.int64]


class LateRows:
    """All late rows of all tables.

    :param clock: s since the epoch
    :param goes_on: asked between files and batches: False ends the cycle early
    """

    def __init__(
        self,
        store: ObjectStore,
        queue: OutOfSequence,
        effects: Effects,
        clock: Callable[[], float] = time.time,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._queue = queue
        self._effects = effects
        self._clock = clock
        self._goes_on = goes_on
        self._shards: dict[str, dict[int, Shard]] = {}
        self._broken: dict[str, str] = {}
        self._tables_unknown: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.error: str | None = None

    def cycle(self) -> None:
        """Admit what is new, and publish what is due.

        :raises StepError: the counts do not reconcile
        """
        self.error = None
        self._tables_unknown.clear()
        self._admit()
        due: dict[str, list[Shard]] = {}
        for shard in sorted(self._waiting(), key=lambda shard: (shard.due_ms, shard.file, shard.number)):
            if shard.due_ms <= self._now_ms():
                due.setdefault(_table_id(shard.file), []).append(shard)
        for table_id, shards in due.items():
            version = self._table(table_id)
            if version is None:
                continue
            try:
                for batch in self._batches(shards, version):
                    self._publish(version.table, batch)
            except (UnreadableRowsError, UnresolvedRowsError) as error:
                self.error = f"{version.table.full_name}: {error}"
        check_counts(self.counts)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _table(self, table_id: str) -> TableVersion | None:
        """The table; what belongs to one that is dropped, or not known yet, stays where it is."""
        table = self._effects.table(table_id)
        if table is None:
            self._tables_unknown.add(table_id)
        return table

    def _waiting(self) -> Iterator[Shard]:
        return (shard for shards in self._shards.values() for shard in shards.values() if shard.waiting)

    def _admit(self) -> None:
        there = [stat.key for stat in self._store.list(FOLDER) if stat.key.endswith(".arrow")]
        new = [key for key in there if key not in self._shards and key not in self._broken]
        admitted = self._queue.find(new)
        for file in new:
            version = self._table(_table_id(file))
            if version is None or not self._goes_on():
                continue
            shards = admitted[file] if file in admitted else self._admit_file(file, version.table)
            if shards is not None:
                self._shards[file] = {shard.number: shard for shard in shards}
                self._finish(file)

    def _admit_file(self, file: str, table: TableSchema) -> Sequence[Shard] | None:
        """Put what is still to be published of a file into the queue; None: it cannot be read."""
        rows = self._decode(file)
        if rows is None:
            return None
        wanted = first_of_each(digest_halves(rows["digest"])) & ~self._effects.published(table, rows)
        count = int(np.count_nonzero(wanted))
        shards = self._queue.admit(file, rows, wanted, self._now_ms()) if count else ()
        admitted = sum(shard.waiting for shard in shards)
        self.counts.update(files=1, read=len(rows), duplicates=len(rows) - count, admitted=admitted)
        return shards

    def _decode(self, file: str) -> pa.RecordBatch | None:
        """The rows of a file; None: it cannot be read, or is not there any more."""
        try:
            return decode_rows(self._store.get(file))
        except NotFoundError:
            self._shards.pop(file, None)
        except (ChecksumError, pa.ArrowInvalid) as error:
            self._broken[file] = str(error)
        return None

    def _batches(self, shards: Sequence[Shard], version: TableVersion) -> Iterator[_Batch]:
        """The rows that are waiting in these shards, some shards together.

        :raises UnresolvedRowsError: rows follow a version of the table that this one does not know
        """
        taken: list[Shard] = []
        parts: list[pa.RecordBatch] = []
        decoded: tuple[str, pa.RecordBatch | None] = ("", None)
        for shard in shards:
            if decoded[0] != shard.file:
                decoded = shard.file, self._decode(shard.file)
            if decoded[1] is None:
                continue
            if not self._goes_on():
                return
            taken.append(shard)
            parts.append(version.from_store(self._rows_of(shard, decoded[1])))
            rows, size = sum(len(part) for part in parts), sum(part.nbytes for part in parts)
            if rows >= BATCH_ROWS or size >= BATCH_BYTES:
                yield _batch(taken, parts)
                taken, parts = [], []
        if taken:
            yield _batch(taken, parts)

    def _rows_of(self, shard: Shard, file_rows: pa.RecordBatch) -> pa.RecordBatch:
        waiting = self._queue.digests([shard])[0]
        rows = file_rows.slice(shard.number * SHARD_ROWS, SHARD_ROWS)
        halves = digest_halves(rows["digest"])
        known = sorted_digests(np.frombuffer(b"".join(waiting), np.uint64).reshape(-1, 2))
        return rows.filter(pa.array(first_of_each(halves) & among(halves, known)))

    def _publish(self, table: TableSchema, batch: _Batch) -> None:
        """Publish what a quorum shows of a batch, and what has been looked at often enough."""
        rows = batch.rows
        fresh = first_of_each(digest_halves(rows["digest"])) & ~self._effects.published(table, rows)
        attempts = np.array([shard.attempts for shard in batch.shards] or [0])[batch.shard]
        shown = np.zeros(len(rows), np.bool_)
        shown[fresh] = self._shown(table, rows.filter(pa.array(fresh)))
        ready = fresh & (shown | (attempts + 1 >= ATTEMPTS))
        published = self._effects.publish(table, rows.filter(pa.array(ready))) if ready.any() else 0
        waiting = fresh & ~ready
        self._solve(batch, waiting)
        self.counts.update(
            due=len(rows),
            published=published,
            unseen=int(np.count_nonzero(ready & ~shown)),
            repeated=int(np.count_nonzero(~fresh)) + int(np.count_nonzero(ready)) - published,
            postponed=int(np.count_nonzero(waiting)),
        )

    def _shown(self, table: TableSchema, rows: pa.RecordBatch) -> Mask:
        """Of which change rows a quorum shows all, or something newer in its place."""
        if not len(rows):
            return np.zeros(0, np.bool_)
        merged = merge(rows, table)
        kinds = numbers(merged["kind"])
        keys = merged.filter(pa.array((kinds == ROW) | (kinds == STATIC)))
        images = self._effects.read(table, keys.select(["token", "partition_key", "clustering"]))
        seen = visible(merged, images, table, int(self._clock()))
        place = same_keys(rows, merged, table)
        # What later rows of the batch have deleted is shown when these are.
        found: Mask = (place < 0) | seen[place]
        return found

    def _solve(self, batch: _Batch, waiting: Mask) -> None:
        """Take rows out of the queue that wait no more, and files none of whose rows do."""
        now_ms = self._now_ms()
        for place, shard in enumerate(batch.shards):
            own = batch.shard == place
            solved = batch.rows["digest"].filter(pa.array(own & ~waiting)).to_pylist()
            left = int(np.count_nonzero(own & waiting))
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**shard.attempts)
            self._shards.setdefault(shard.file, {})[shard.number] = self._queue.solve(
                shard, solved, left, now_ms + wait_s * 1000
            )
        for file in {shard.file for shard in batch.shards}:
            self._finish(file)

    def _finish(self, file: str) -> None:
        """Remove a file that has no rows waiting, from the queue first."""
        shards = self._shards.get(file)
        if shards is None or any(shard.waiting for shard in shards.values()):
            return
        if shards:
            self._queue.forget(file, max(shard.shards for shard in shards.values()))
        self._store.delete(file)
        del self._shards[file]

    def status(self) -> dict[str, int | str | None]:
        """How things stand; ``oldest_ms`` is when the row was admitted that has waited longest, ms since the epoch."""
        waiting = list(self._waiting())
        return {
            "waiting": sum(shard.waiting for shard in waiting),
            "published": self.counts["published"],
            "duplicates": self.counts["duplicates"] + self.counts["repeated"],
            "oldest_ms": min((shard.admitted_ms for shard in waiting), default=None),
            "tables_unknown": len(self._tables_unknown),
            "files_broken": len(self._broken),
            "error": self.error,
        }

    @property
    def problems(self) -> list[str]:
        """What keeps rows from being published, for people."""
        found = [f"{file} cannot be read: {reason}" for file, reason in self._broken.items()]
        found += [
            f"rows of table id {table_id} are left in {FOLDER}{table_id}/: it is dropped, or has no cdc any more"
            for table_id in sorted(self._tables_unknown)
        ]
        return [*found, *([self.error] if self.error else [])]


def check_counts(of: Mapping[str, int]) -> None:
    """Look whether every row has one outcome.

    :raises StepError: some have none, or two
    """
    outcomes = of["published"] + of["repeated"] + of["postponed"]
    if of["read"] != of["duplicates"] + of["admitted"] or of["due"] != outcomes:
        raise StepError(f"the counts of late rows do not reconcile: {dict(of)}")


def _batch(shards: Sequence[Shard], parts: Sequence[pa.RecordBatch]) -> _Batch:
    places = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return _Batch(tuple(shards), pa.concat_batches(parts), places)


def _table_id(file: str) -> str:
    """The table id in the key of a file of late rows."""
    return file.removeprefix(FOLDER).partition("/")[0]
