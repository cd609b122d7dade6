"""The way of late rows: files under ``staging/late/`` → (the queue ``out_of_sequence`` →) a pass of their table.

New rows are published at once, unless replicas that may know more are down. Then they wait in the queue, and are tried
again. A row leaves one place only once it is safe in the next: its file stays until its pass is committed and the
queue has forgotten it. So each step may be killed and repeated: rows that were published meanwhile are known by their
digests. A file of ``cdcservice errors retry`` gets a mark before it is removed (error_tries.py): a file that is gone
without one was removed by somebody.

A file that cannot be read, or whose rows follow an unknown version of the table, is set aside alone: it stays, the
status names it, and it is tried again after longer and longer pauses. All other files of its table go on.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.changes.identity import TableVersion, UnresolvedRowsError
from ringsync.compiled.arrow import Mask
from ringsync.config import ConfigError
from ringsync.ledger.error_tries import FileOutcome, mark_taken
from ringsync.ledger.passes import among, digest_halves, first_of_each, sorted_digests
from ringsync.ledger.staging import STAGED_ROWS, decode_rows, is_of_pass, late_files, late_stats
from ringsync.state.out_of_sequence import SHARD_ROWS, OutOfSequence, Shard
from ringsync.state.session import StateError
from ringsync.status import LATE_ROWS
from ringsync.steps.application import StepError
from ringsync.steps.late.late_pass import LatePasses
from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore, Stat

BATCH_ROWS = 20_000
"""About how many rows of a table are published together …"""
BATCH_BYTES = 128 * 2**20
"""… or how many bytes of them."""

FIRST_WAIT_S, LONGEST_WAIT_S = 10, 120
"""A row whose present state cannot be known now is tried again after 10 s, 20 s, 40 s …"""

BROKEN_NAMED = 20
"""Most unusable files that the status names, with their reasons."""

_FETCHERS = ThreadPoolExecutor(8)
_FETCHED_TOGETHER = 64
"""Stages leave many small files: an object store answers many requests at once …"""
FETCHED_BYTES = 16 * 2**20
"""… and so many bytes of files are in memory at most, or one file. They are decoded one by one."""


@dataclass(frozen=True)
class _Broken:
    """A file that cannot be used, or a table that fails.

    :ivar attempts: tries so far
    :ivar again_s: time of the next try
    """

    reason: str
    attempts: int
    again_s: float


class LateRows:
    """All late rows of all tables.

    :param clock: s since the epoch
    :param goes_on: called between files and batches; False ends the cycle early
    """

    def __init__(
        self,
        store: ObjectStore,
        queue: OutOfSequence,
        effects: LatePasses,
        clock: Callable[[], float] = time.time,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._queue = queue
        self._effects = effects
        self._clock = clock
        self._goes_on = goes_on
        self._shards: dict[str, dict[int, Shard]] = {}
        self._unread: dict[str, tuple[int, int]] = {}
        self._broken: dict[str, _Broken] = {}
        self._tables_unknown: set[str] = set()
        self._failing: dict[str, _Broken] = {}
        self._not_forgotten: tuple[str, ...] = ()
        self.counts: Counter[str] = Counter()

    def cycle(self) -> None:
        """Publish the rows of new files and the due rows of the queue; remove waiting rows of tables that are gone.

        :raises StepError: the counts do not reconcile
        :raises ConfigError: the configuration is wrong, for all tables
        :raises StateError: the queue cannot be read or written, for all tables
        """
        new = self._new_files()
        for table_id in dict.fromkeys([*new, *(_table_id(shard.file) for shard in self._due())]):
            self._each(table_id, new.get(table_id, ()))
        self._not_forgotten = ()
        try:
            for table_id in self._effects.gone(self._tables_unknown):
                self._forget(table_id)
        except (ConfigError, StateError):
            raise
        except Exception as error:
            self._not_forgotten = (f"tables that the schema does not have: {error}",)
        check_counts(self.counts)

    def _due(self) -> list[Shard]:
        """Return the shards to look at again, in the order of their due times."""
        shards = (
            shard for shard in self._waiting() if shard.due_ms <= self._now_ms() and self._may_be_tried(shard.file)
        )
        return sorted(shards, key=lambda shard: (shard.due_ms, shard.file, shard.number))

    def _each(self, table_id: str, files: Sequence[Stat]) -> None:
        """Publish batches of a table until one fails. A failure concerns this table alone: it is tried again later, and
        the others go on. A batch is counted when all of it is done. If a batch fails halfway, the next try finds
        which of its rows were published."""
        began_s, before, name = self._clock(), self._failing.get(table_id), f"table id {table_id}"
        if before is not None and before.again_s > began_s:
            return
        try:
            self._tables_unknown.discard(table_id)
            if (version := self._effects.table(table_id)) is None:
                self._tables_unknown.add(table_id)  # its rows stay where they are
            else:
                name = version.table.full_name
                for new in self._new_batches(version, files):
                    self.counts.update(self._publish_new(version, new))
                due = [shard for shard in self._due() if _table_id(shard.file) == table_id]
                for batch in self._batches(version, due):
                    self.counts.update(self._publish_due(version, batch))
        except (ConfigError, StateError):
            raise
        except Exception as error:
            self._failing[table_id] = _broken(before, f"{name}: {error}", began_s, self._clock())
        else:
            self._failing.pop(table_id, None)

    @property
    def error(self) -> str | None:
        """The errors of whole tables; None: there are none."""
        return "; ".join([*(broken.reason for broken in self._failing.values()), *self._not_forgotten]) or None

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _forget(self, table_id: str) -> None:
        """Remove and count the waiting rows of a table that is gone."""
        self._tables_unknown.discard(table_id)
        for key in late_files(self._store, table_id):
            rows = self._read(key)
            self._forget_admitted(key)
            self._lose_sight_of(key)
            self._remove(key, "of_dropped_tables")
            count = rows.num_rows if rows is not None else 0
            self.counts.update(of_dropped_tables=count)
            print(f"ringsync: warning: table id {table_id} was dropped: {count} late rows of it are not published")

    def _waiting(self) -> Iterator[Shard]:
        return (shard for shards in self._shards.values() for shard in shards.values() if shard.waiting)

    def _new_files(self) -> dict[str, list[Stat]]:
        """Find the unknown files of each table id, and remember those that are in the queue."""
        there = {stat.key: stat for stat in late_stats(self._store)}
        for key in self._broken.keys() - there.keys():
            self._lose_sight_of(key)
        tables = {_table_id(key) for key in there}
        self._tables_unknown &= tables
        self._failing = {table_id: broken for table_id, broken in self._failing.items() if table_id in tables}
        new = [key for key in there if key not in self._shards and self._may_be_tried(key)]
        admitted = self._queue.find(new)
        files: dict[str, list[Stat]] = {}
        for file in new:
            if file in admitted:
                self._shards[file] = {shard.number: shard for shard in admitted[file]}
                self._finish(file)
            else:
                files.setdefault(_table_id(file), []).append(there[file])
        return files

    def _new_batches(self, version: TableVersion, files: Sequence[Stat]) -> Iterator[dict[str, pa.RecordBatch]]:
        """Read the rows of files, some files together."""
        batch: dict[str, pa.RecordBatch] = {}
        size = 0.0
        for some in _fetched_together(files):
            if not self._goes_on():
                return
            fetched = deque(_FETCHERS.submit(self._store.get, stat.key) for stat in some)
            for file in some:
                rows = self._read(file.key, version, fetched.popleft().result)
                if rows is None:
                    continue
                batch[file.key] = rows
                size += _part_of_batch(rows)
                if size >= 1:
                    yield batch
                    batch, size = {}, 0.0
        if batch:
            yield batch

    def _publish_new(self, version: TableVersion, files: Mapping[str, pa.RecordBatch]) -> Counter[str]:
        """Publish the rows of new files, put those that have to wait into the queue, and count."""
        for file, rows in files.items():
            self._unread.setdefault(file, (rows.num_rows, self._now_ms()))
        waiting, counts = self._publish(version, list(files.values()))
        done = []
        for (file, rows), waits in zip(files.items(), waiting, strict=True):
            if waits.any():
                now_ms = self._now_ms()
                shards = self._queue.admit(file, rows, waits, now_ms, now_ms + FIRST_WAIT_S * 1000)
                self._shards[file] = {shard.number: shard for shard in shards}
            else:
                done.append(file)
            del self._unread[file]
        for _ in _FETCHERS.map(self._remove, done):
            pass
        of_passes = sum(len(rows) for file, rows in files.items() if is_of_pass(file))
        counts.update(files=len(files), read=sum(map(len, files.values())), of_passes=of_passes)
        return counts

    def _read(
        self, file: str, version: TableVersion | None = None, fetched: Callable[[], bytes] | None = None
    ) -> pa.RecordBatch | None:
        """Read the rows of a file; None: it is gone, or it cannot be used and is set aside.

        :param version: version whose places of columns are wanted; None: as stored
        :param fetched: gives the file's bytes; None: they are fetched now
        """
        try:
            rows = decode_rows(fetched() if fetched else self._store.get(file))
            if rows.schema != STAGED_ROWS:
                raise pa.ArrowInvalid("its fields are not those of change rows")
        except NotFoundError:
            self._forget_admitted(file)
            self._lose_sight_of(file)
            return None
        except (ChecksumError, pa.ArrowException, OSError) as error:  # OSError: Arrow's error for damaged lz4
            self._set_aside(file, str(error))
            return None
        try:
            resolved = version.from_store(rows) if version else rows
        except UnresolvedRowsError as error:
            if file not in self._shards:
                self._unread.setdefault(file, (rows.num_rows, self._now_ms()))
            self._set_aside(file, str(error))
            return None
        self._broken.pop(file, None)
        return resolved

    def _lose_sight_of(self, file: str) -> None:
        for known in (self._shards, self._unread, self._broken):
            known.pop(file, None)

    def _set_aside(self, file: str, reason: str) -> None:
        now_s = self._clock()
        self._broken[file] = _broken(self._broken.get(file), reason, now_s, now_s)

    def _may_be_tried(self, file: str) -> bool:
        """Tell whether a file is not set aside, or has been for long enough."""
        return file not in self._broken or self._broken[file].again_s <= self._clock()

    def _batches(self, version: TableVersion, shards: Sequence[Shard]) -> Iterator[list[tuple[Shard, pa.RecordBatch]]]:
        """Read the waiting rows of these shards, some shards together."""
        batch: list[tuple[Shard, pa.RecordBatch]] = []
        size = 0.0
        decoded: tuple[str, pa.RecordBatch | None] = ("", None)
        for shard in shards:
            if decoded[0] != shard.file:
                decoded = shard.file, self._read(shard.file, version)
            if decoded[1] is None:
                continue
            if not self._goes_on():
                return
            rows = self._rows_of(shard, decoded[1])
            batch.append((shard, rows))
            size += _part_of_batch(rows)
            if size >= 1:
                yield batch
                batch, size = [], 0.0
        if batch:
            yield batch

    def _rows_of(self, shard: Shard, file_rows: pa.RecordBatch) -> pa.RecordBatch:
        waiting = self._queue.digests([shard])[0]
        rows = file_rows.slice(shard.number * SHARD_ROWS, SHARD_ROWS)
        halves = digest_halves(rows["digest"])
        known = sorted_digests(np.frombuffer(b"".join(waiting), np.uint64).reshape(-1, 2))
        return rows.filter(pa.array(first_of_each(halves) & among(halves, known)))

    def _publish_due(self, version: TableVersion, batch: Sequence[tuple[Shard, pa.RecordBatch]]) -> Counter[str]:
        """Publish rows that have waited, remove files that have none left, and count."""
        waiting, counts = self._publish(version, [rows for _, rows in batch])
        now_ms = self._now_ms()
        for (shard, rows), waits in zip(batch, waiting, strict=True):
            solved = rows["digest"].filter(pa.array(~waits)).to_pylist()
            due_ms = now_ms + _wait_s(shard.attempts) * 1000
            after = self._queue.solve(shard, solved, int(np.count_nonzero(waits)), due_ms)
            self._shards.setdefault(shard.file, {})[shard.number] = after
        for file in {shard.file for shard, _ in batch}:
            self._finish(file)
        counts.update(due=sum(len(rows) for _, rows in batch))
        return counts

    def _publish(self, version: TableVersion, batches: Sequence[pa.RecordBatch]) -> tuple[list[Mask], Counter[str]]:
        """Publish rows; return which of each batch have to wait, and what is to be counted."""
        rows = pa.concat_batches(batches)
        first = first_of_each(digest_halves(rows["digest"]))
        outcome = self._effects.publish(version.table, rows.filter(pa.array(first)))
        waiting = np.zeros(len(rows), np.bool_)
        waiting[first] = outcome.waiting
        postponed = int(np.count_nonzero(waiting))
        repeated = len(rows) - outcome.published - postponed
        counts = Counter(published=outcome.published, postponed=postponed, repeated=repeated)
        return np.split(waiting, np.cumsum([len(batch) for batch in batches])[:-1]), counts

    def _finish(self, file: str) -> None:
        """Remove a file that has no rows waiting, from the queue first."""
        shards = self._shards.get(file)
        if shards is None or any(shard.waiting for shard in shards.values()):
            return
        self._forget_admitted(file)
        self._remove(file)
        del self._shards[file]

    def _remove(self, file: str, outcome: FileOutcome = "published") -> None:
        """Remove a file, after what has become of its rows is recorded for ``cdcservice errors``."""
        mark_taken(self._store, file, outcome)
        self._store.delete(file)

    def _forget_admitted(self, file: str) -> None:
        if shards := self._shards.get(file):
            self._queue.forget(file, max(shard.shards for shard in shards.values()))

    def status(self) -> dict[str, Any]:
        """Return the status of the loop.

        ``oldest_ms`` is when the longest waiting row was admitted. ``broken`` has the first of ``files_broken``
        unusable files, with reasons.
        """
        waiting = [(shard.waiting, shard.admitted_ms) for shard in self._waiting()]
        waiting += self._unread.values()
        return {
            "waiting": sum(rows for rows, _ in waiting),
            "published": self.counts["published"],
            "duplicates": self.counts["repeated"],
            "oldest_ms": min((since_ms for _, since_ms in waiting), default=None),
            "tables_unknown": len(self._tables_unknown),
            "files_broken": len(self._broken),
            "broken": {file: self._broken[file].reason for file in sorted(self._broken)[:BROKEN_NAMED]},
            "error": self.error,
        }

    @property
    def problems(self) -> list[str]:
        """Sentences on why rows are not published."""
        problems = [f"{file} cannot be used: {broken.reason}" for file, broken in self._broken.items()]
        problems += [
            f"rows of table id {table_id} are left in {LATE_ROWS}{table_id}/: the schema does not have it"
            for table_id in sorted(self._tables_unknown)
        ]
        return [*problems, *([self.error] if self.error else [])]


def check_counts(of: Mapping[str, int]) -> None:
    """Check that each row has one outcome.

    :raises StepError: some have none, or two
    """
    if of["read"] + of["due"] != of["published"] + of["repeated"] + of["postponed"]:
        raise StepError(f"the counts of late rows do not reconcile: {dict(of)}")


def _broken(before: _Broken | None, reason: str, began_s: float, now_s: float) -> _Broken:
    """Record one more failure: the pause before the next try is at least as long as this try was.

    :param before: the failures before; None: none
    """
    attempts = before.attempts + 1 if before else 1
    return _Broken(reason, attempts, now_s + max(_wait_s(attempts - 1), now_s - began_s))


def _wait_s(attempts: int) -> int:
    return min(LONGEST_WAIT_S, FIRST_WAIT_S << min(attempts, 10))


def _fetched_together(files: Sequence[Stat]) -> Iterator[list[Stat]]:
    """Group files that are fetched together."""
    some: list[Stat] = []
    for file in files:
        is_full = len(some) == _FETCHED_TOGETHER or sum(stat.size for stat in [*some, file]) > FETCHED_BYTES
        if some and is_full:
            yield some
            some = []
        some.append(file)
    if some:
        yield some


def _part_of_batch(rows: pa.RecordBatch) -> float:
    return float(max(len(rows) / BATCH_ROWS, rows.nbytes / BATCH_BYTES))


def _table_id(file: str) -> str:
    return file.removeprefix(LATE_ROWS).partition("/")[0]
