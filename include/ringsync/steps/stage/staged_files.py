"""Change rows on their way into the staging: sorted into tables and buckets, then written as files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.identity import TableVersion
from ringsync.compiled.arrow import Integers, integers
from ringsync.ledger import staging
from ringsync.ledger.passes import digest_halves, first_of_each
from ringsync.ring.ranks import RankedRing
from ringsync.storage.port import ObjectStore

CLOSED, TOO_OLD = -1, -2
"""In place of the start of a bucket."""


@dataclass(frozen=True)
class Windows:
    """The open buckets.

    :ivar newest: the present interval
    :ivar closed_until: ms since the epoch: buckets that end then or before take nothing more
    :ivar known_from_us: rows written before are left out: nobody would know whether they were published; µs since the
        epoch. None: none is left out
    """

    newest: staging.Bucket
    closed_until: int
    known_from_us: int | None = None

    def starts(self, write_times: Integers, by_arrival: bool) -> Integers:
        """Return the start of each row's bucket, in ms; CLOSED: it is closed; TOO_OLD: the row is left out.

        :param write_times: µs; rows written in the future belong to the newest bucket
        """
        if by_arrival:
            return np.full(len(write_times), self.newest.start)
        length = self.newest.length
        starts = np.minimum(write_times // 1000 // length * length, self.newest.start)
        starts = np.where(starts + length <= self.closed_until, CLOSED, starts)
        return starts if self.known_from_us is None else np.where(write_times < self.known_from_us, TOO_OLD, starts)


@dataclass(frozen=True)
class StagedTable:
    """A table whose rows are kept.

    :ivar ring: the table's token ranges; None: unknown, so its rows are not summed up
    """

    version: TableVersion
    by_arrival: bool
    ring: RankedRing | None


@dataclass(frozen=True)
class Destination:
    """Where files go.

    :ivar node: whose commit is to list them: a host id, or the name of a log that no node owns
    :ivar commit: number of this commit
    :ivar name: unique name of the files
    :ivar is_agreed: whether nothing has to agree with the rows: they were read at a consistency level
    """

    node: str
    commit: int
    name: str
    is_agreed: bool = False


class StagedFiles:
    """The files of some work: one for all rows that are in time, and one for each table's late rows.

    :param kept: tables whose rows are kept; rows of all others are counted only
    :param left_out: ids of those that had no cdc when these rows were logged
    :param held_up: ids of tables whose rows cannot be staged yet
    :param gone: ids of tables that were dropped
    """

    def __init__(
        self,
        kept: Sequence[StagedTable],
        windows: Windows,
        store: ObjectStore,
        to: Destination,
        *,
        left_out: frozenset[str] = frozenset(),
        held_up: frozenset[str] = frozenset(),
        gone: frozenset[str] = frozenset(),
    ) -> None:
        self._kept, self._windows, self._store, self._to, self._gone = kept, windows, store, to, gone
        ids = [table.version.table_id for table in kept]
        self._tables = {bytes.fromhex(one): number for number, one in enumerate(ids) if one not in left_out}
        self._held_up = {bytes.fromhex(one) for one in held_up - left_out}
        self._waiting: dict[tuple[int, int], list[pa.RecordBatch]] = defaultdict(list)
        self._rows = self._of_dropped = self._too_old = self._foreign = 0
        self.blocks: list[staging.Block] = []
        self.late: list[str] = []
        self.held_up: frozenset[str] = frozenset()
        self.written = staging.NOTHING

    def add(self, rows: pa.RecordBatch) -> None:
        """Sort rows into tables and buckets."""
        if not rows.num_rows:
            return
        ids = rows["table_id"].dictionary_encode()
        of_id = integers(ids.indices)
        of_dropped = too_old = 0
        sorted_rows: list[tuple[tuple[int, int], pa.RecordBatch]] = []
        for place, table_id in enumerate(ids.dictionary.to_pylist()):
            number = self._tables.get(table_id)
            if table_id in self._held_up:
                self.held_up |= {table_id.hex()}
            if number is None:
                is_gone = table_id.hex() in self._gone
                of_dropped += int(np.count_nonzero(of_id == place)) if is_gone else 0
                continue
            of_table = rows.take(pa.array(np.flatnonzero(of_id == place)))
            times = integers(of_table["write_time"])
            self.written = staging.together(self.written, (int(times.min()), int(times.max())))
            starts = self._windows.starts(times, self._kept[number].by_arrival)
            too_old += int(np.count_nonzero(starts == TOO_OLD))
            for start in np.unique(starts[starts != TOO_OLD]).tolist():
                sorted_rows.append(((number, start), of_table.take(pa.array(np.flatnonzero(starts == start)))))
        # All or nothing: who gives rows may go on without them if this fails.
        self._rows += rows.num_rows
        self._of_dropped += of_dropped
        self._too_old += too_old
        for bucket_of_table, part in sorted_rows:
            self._waiting[bucket_of_table].append(part)

    def finish(self) -> dict[str, int]:
        """Write everything, and count the rows; those are ``foreign``, too, that the node does not replicate."""
        counts: Counter[str] = Counter(staged=0, late=0, repeated=0, of_dropped_tables=self._of_dropped)
        counts.update(too_old=self._too_old)
        batches: list[pa.RecordBatch] = []
        described: list[tuple[StagedTable, str, Any, Integers]] = []
        for (number, start), parts in sorted(self._waiting.items()):
            table = self._kept[number]
            rows = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
            halves = digest_halves(rows["digest"])
            order = np.argsort(integers(rows["token"]), kind="stable")
            once = order[first_of_each(halves)[order]]
            counts["repeated"] += len(order) - len(once)
            counts["late" if start == CLOSED else "staged"] += len(once)
            stored = table.version.to_store(rows.take(pa.array(once)))
            node = pa.repeat(pa.scalar(self._to.node), len(once))
            chosen = pa.RecordBatch.from_arrays([*stored.columns, node], schema=staging.STAGED_ROWS)
            if start == CLOSED:
                self.late.append(key := staging.late_key(table.version.table_id, f"{self._to.node}-{self._to.name}"))
                self._store.put(key, staging.encode_rows(chosen))
                continue
            bucket = str(staging.Bucket(start, self._windows.newest.length))
            batches.append(chosen)
            described.append((table, bucket, halves[once], integers(chosen["token"])))
        if batches:
            key = staging.rows_key(self._to.node, self._to.commit, self._to.name)
            data, places = staging.encode_blocks(batches, key)
            self._store.put(key, data)
            for place, (table, bucket, halves, tokens) in zip(places, described, strict=True):
                self.blocks.append(self._block(place, table, bucket, halves, tokens))
        not_cdc = self._rows - sum(counts.values())
        return {"rows": self._rows, **counts, "not_cdc": not_cdc, "foreign": self._foreign}

    def _block(
        self,
        place: staging.Place,
        table: StagedTable,
        bucket: str,
        halves: npt.NDArray[np.uint64],
        tokens: Integers,
    ) -> staging.Block:
        agreed, version = self._to.is_agreed, table.version
        ring = table.ring.ring.digest if table.ring and not agreed else ""
        sums = range_sums(table.ring, tokens, halves) if table.ring and not agreed else ()
        self._foreign += _foreign_rows(self._to.node, table.ring, sums) if table.ring else 0
        return staging.Block(place, version.table_id, version.number, bucket, len(tokens), ring, sums, agreed)


def _foreign_rows(node: str, ring: RankedRing, sums: Iterable[tuple[int, int, int, int]]) -> int:
    """Count the rows of token ranges that a node of the ring does not replicate."""
    if node not in ring.nodes:
        return 0  # it has left: it replicates nothing any more
    return sum(rows for number, rows, *_ in sums if all(host.id != node for host in ring.hosts[number]))


def range_sums(
    ring: RankedRing, tokens: Integers, halves: npt.NDArray[np.uint64]
) -> tuple[tuple[int, int, int, int], ...]:
    """Return, for each token range that has rows, its number, rows, and the sums of both halves of their digests."""
    ranges = ring.numbers_of(tokens)
    order = np.argsort(ranges, kind="stable")
    numbers, starts, rows = np.unique(ranges[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(halves[order], starts, axis=0)
    columns = (numbers.tolist(), rows.tolist(), sums[:, 0].tolist(), sums[:, 1].tolist())
    return tuple(zip(*columns, strict=True))
