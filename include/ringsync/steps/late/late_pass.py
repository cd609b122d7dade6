"""The effects of late rows on cluster and stream: passes of their own (late_rows.py).

``bucket_close`` publishes at the same time. Both number the passes of a table with one counter, and look at all passes
before their own. The second begins anew, so no row is in two passes.

A row may be in a file of late rows and wait in a bucket at once: a backfill has read it again, another node's copy came
before the close, a close that was killed had it wait, or ``cdcservice errors retry`` decodes what the stage has decoded
meanwhile. Whoever publishes it first keeps its digest, and the other looks for it there: with the bucket of its write
time, or under LATE. The close of a bucket that is not that of the write time looks for it, too (``published_elsewhere``
in bucket_close.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.changes.identity import TableVersion
from ringsync.cluster.cluster import read_ring
from ringsync.cluster.control import ControlAddress
from ringsync.cluster.schema import read_tables
from ringsync.cluster.whole_schema import Agreement
from ringsync.compiled.arrow import Integers, Mask, integers
from ringsync.ledger.followed import keep_following
from ringsync.ledger.passes import LATE, among, are_published, digest_halves, read_digests, sorted_digests
from ringsync.ledger.staging import Bucket, closed_until
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.ring import RingError
from ringsync.schema.table import TableSchema
from ringsync.steps.absent_tables import AbsentTables
from ringsync.steps.application import Application, StepError
from ringsync.steps.passes.follow_ups import FollowUps
from ringsync.steps.passes.make import commit, make_outputs
from ringsync.steps.passes.pieces import pieces
from ringsync.steps.passes.rows_after import AfterReader, UnreadRowsError
from ringsync.steps.sync_plan import SyncPlan, SyncTable, interval_at, plan_of, sync_table
from ringsync.storage.port import NotFoundError
from ringsync.streams.files import StreamConflictError

ATTEMPTS = 20
"""Number of tries to make a pass: in each, another process may be faster."""

OWN_BUCKET_MS = 3_600_000
"""So long after a bucket has closed, even a task that has not heard of it has stopped adding rows."""

_FILES = 256
"""Files of digests that are kept in memory."""


@dataclass(frozen=True)
class Outcome:
    """The result for late rows.

    :ivar published: number of rows in the pass; other rows that do not wait had been published before
    :ivar waiting: rows whose present state cannot be known while replicas are down
    """

    published: int
    waiting: Mask


class LatePasses:
    """What late rows need of the cluster, and what they do to the stream.

    :param session: a session with the driver's default row factory
    :param control: keeps the limits of reading the cluster
    """

    def __init__(self, application: Application, session: Any, control: ControlAddress) -> None:
        self._application = application
        self._config = application.config
        self._store = application.store
        self._session = session
        self._control = control
        self._plan: SyncPlan | None = None
        self._tables: dict[str, TableVersion] = {}
        self._known: Mapping[str, TableSchema] = {}
        self._known_at: Bucket | None = None
        self._absent = AbsentTables()
        self._agree = Agreement(session, time.monotonic)
        self._follow_ups: dict[str, FollowUps] = {}
        self._digests = lru_cache(maxsize=_FILES)(lambda key: read_digests(self._store, key))

    def table(self, table_id: str) -> TableVersion | None:
        """Return the table of an id (32 hexadecimal digits); None: the schema does not have it.

        A table that has lost cdc is published to the end.

        :raises TableReplacedError: the schema has it, but another table has its stream
        """
        plan = self._read_plan()
        if table_id not in self._tables:
            if self._known_at != plan.interval:
                self._read_schema()
                self._known_at = plan.interval
            if (table := self._known.get(table_id)) is not None:
                ring = ranked(read_ring(self._session, table.keyspace))
                self._follow(sync_table(self._store, self._config, table), ring)
        return self._tables.get(table_id)

    def gone(self, missed: Set[str]) -> frozenset[str]:
        """Return which of the missed tables are gone: their waiting rows are to be removed."""
        if not self._absent.is_due(missed):
            return frozenset()
        gone = self._absent.look(missed, self._read_schema, self._agree)
        self._absent.forget(gone)
        return gone

    def _read_schema(self) -> frozenset[str]:
        """Read the schema, and return the ids of its tables."""
        schema = read_tables(self._session)
        self._known = schema.by_id()
        return schema.ids

    def _read_plan(self) -> SyncPlan:
        """Return the plan of the present interval: ring, tables and their schemas."""
        interval = interval_at(int(time.time() * 1000), self._config.commitlog_processor_window_interval_ms)
        if self._plan is None or self._plan.interval != interval:
            self._plan = plan_of(self._store, self._config, self._session, interval, self._plan)
            rings: dict[str, RankedRing | None] = {}
            for keyspace in self._plan.replications:
                try:
                    rings[keyspace] = ranked(self._plan.ring(keyspace))
                except RingError:
                    rings[keyspace] = None  # bucket_close reports why; the keyspace's late rows wait
            self._tables.clear()
            for table in self._plan.tables:
                if (ring := rings[table.schema.keyspace]) is not None:
                    with suppress(Exception):  # table() raises it for this table alone, if the schema has it
                        self._follow(table, ring)
        return self._plan

    def _follow(self, table: SyncTable, ring: RankedRing) -> None:
        if table.table_id not in self._follow_ups:
            self._follow_ups[table.table_id] = FollowUps(self._application, table, None, self._control)
        self._follow_ups[table.table_id].follow(table)
        self._follow_ups[table.table_id].ring = ring
        self._tables[table.table_id] = table.version

    def published(self, table: TableSchema, rows: pa.RecordBatch) -> Mask:
        """Tell which change rows have been published."""
        follow_ups = self._follow_ups[table.table_id]
        for _ in range(ATTEMPTS):
            follow_ups.refresh()
            buckets = _buckets_of(follow_ups, integers(rows["write_time"]) // 1000)
            keys = [key for made in follow_ups.passes for bucket in buckets for key in made.digests.get(bucket, ())]
            try:
                return are_published(digest_halves(rows["digest"]), map(self._digests, keys))
            except NotFoundError as error:
                missing = error  # a pass was forgotten, with its digests, since we looked for passes
        raise StepError(f"{table.full_name}: a pass is there, but its digests are missing: {missing}")

    def _reader(self, table: TableSchema) -> AfterReader:
        """Read rows after late changes from all replicas: any may have been late."""
        mode = self._config.sync.after_image_of(table.full_name)
        return replace(self._follow_ups[table.table_id].reader("none" if mode == "none" else "source"), disagreed=True)

    def publish(self, table: TableSchema, rows: pa.RecordBatch) -> Outcome:
        """Commit a pass of late rows, without those that were published before.

        The plan that :meth:`table` has read has resolved the rows, so it is not read again here. If rows cannot be
        read, only those wait whose token ranges have lost most of their replicas.

        :param rows: change rows, each once
        :raises UnreadRowsError: the rows after the changes could not be read at quorum
        """
        assert self._plan is not None
        follow_ups = self._follow_ups[table.table_id]
        halves, held = digest_halves(rows["digest"]), np.zeros(len(rows), np.bool_)
        for _ in range(ATTEMPTS):
            new = ~self.published(table, rows)
            held &= new
            left = rows.filter(pa.array(new & ~held))
            if not len(left):
                # An earlier try may have published them, and was killed before this line.
                keep_following(self._store, table.table_id)
                return Outcome(0, held)
            context = follow_ups.context(self._reader(table), self._plan.hosts, late=True)
            try:
                length = self._config.commitlog_processor_window_interval_ms
                places = by_bucket(left, length, closed_until(self._store))
                some = pieces(places, table, context.reader.read_whole)
                made = [make_outputs(context, self._store, piece, "late") for piece in some]
            except UnreadRowsError:
                ring = context.reader.ring
                lost = new & ~ring.most_live[ring.numbers_of(integers(rows["token"]))]
                if held.any() or not lost.any():
                    raise
                held = lost
                continue
            except StreamConflictError:
                continue  # another process has made this pass, and has published it already
            left_open = pa.concat_batches([piece.open for piece in made])
            waiting = held | among(halves, sorted_digests(digest_halves(left_open["digest"])))
            outputs = [piece.outputs for piece in made if piece.outputs]
            if not outputs:
                return Outcome(0, waiting)
            committed = commit(self._store, context, outputs, {})
            if committed is not None:
                follow_ups.made(committed)
                keep_following(self._store, table.table_id)
                return Outcome(sum(output.rows for output in outputs), waiting)
        raise StepError(
            f"{table.full_name}: {ATTEMPTS} times another process was faster with a pass: does bucket_close run twice?"
        )


def by_bucket(rows: pa.RecordBatch, length: int, closed_until_ms: int) -> dict[str, pa.RecordBatch]:
    """Divide late rows by the place of their digests: the bucket of their write time, if it may still be published,
    otherwise LATE.

    :param length: of a bucket, ms
    :param closed_until_ms: end of the closed buckets, ms since the epoch
    """
    starts = integers(rows["write_time"]) // 1000 // length * length
    starts[starts < closed_until_ms - OWN_BUCKET_MS] = -1
    return {
        str(Bucket(start, length)) if start >= 0 else LATE: rows.filter(pa.array(starts == start))
        for start in np.unique(starts).tolist()
    }


def _buckets_of(follow_ups: FollowUps, write_times_ms: Integers) -> list[str]:
    """Return where the digests of published rows may be: with the buckets of their times, and under LATE."""
    times = np.sort(write_times_ms)
    buckets = [LATE]
    for bucket in map(Bucket.parse, {bucket for made in follow_ups.passes for bucket in made.digests} - {LATE}):
        first, last = np.searchsorted(times, [bucket.start, bucket.end], side="left")
        if last > first:
            buckets.append(str(bucket))
    return buckets
