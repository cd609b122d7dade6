"""Reading archived segments: what left a node unread comes to its tables, by the schema of its day.

A segment from ``cdc/`` is read like one in ``cdc_raw``: from where the node's commits end in it, into a commit of the
same chain. So nothing is read twice, whoever reads at once. Rows of open buckets are staged, all others are late. Then
the segment moves to ``cdc_archive/``.

With an interval, segments that were read before are read again, whole, as late rows: those that were published are
recognised by their digests and dropped, the others are published. Rows that are older than the digests that are kept
are left out.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ringsync.cluster.cluster import read_ring
from ringsync.cluster.node import ask_one
from ringsync.cluster.schema import NodeTables, read_node_tables, read_tables
from ringsync.cluster.whole_schema import Agreement
from ringsync.formats.commitlog.segment import Wanted
from ringsync.ledger import archive
from ringsync.ledger.archive import READ, WAITING, ArchivedSegment
from ringsync.ledger.layout import check_layout
from ringsync.ledger.past_schema import Histories, PastSchema, read_histories
from ringsync.ledger.staging import closed_until, decode_rows, put_commit
from ringsync.ledger.table_versions import CdcBegun, TableVersionError, version_of
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.ring import RingError
from ringsync.schema.table import TableSchema
from ringsync.state.processor_error import ErrorTable
from ringsync.steps.application import Application, ExitCode, Report, StepError, spark_is_gone
from ringsync.steps.loop import PASSING, connect_patiently, put_status, start_workers, starts_again
from ringsync.steps.own_keyspace import create_state
from ringsync.steps.passes.follow_ups import digests_kept_ms
from ringsync.steps.stage.node_log import SYNC_MARGIN_MS, UNKNOWN_SYNC_MS, NodeLog
from ringsync.steps.stage.stage_task import Staged, StageTask, StageWork, check_counts, keep_damaged
from ringsync.steps.stage.staged_files import StagedTable, Windows
from ringsync.steps.stage.switched_off import note_switched_off
from ringsync.steps.sync_plan import SyncPlan, interval_at, plan_of
from ringsync.storage.port import NotFoundError, StorageError
from ringsync.wiring import cluster_settings

ATTEMPTS = 20
"""Tries to commit what was read of a node: in each, a stage may be faster."""

SEGMENTS_OF_A_COMMIT = 8
"""Most segments that are read into one commit."""


@starts_again()
def run(application: Application) -> tuple[Report, ExitCode]:
    """Read all archived segments that wait, or those with writes of an interval, read before or not.

    :returns: exit code 1 when segments are left that cannot be read: the report says which and why
    :raises LayoutError: the state is of a version of ringsync that this one does not know
    :raises AwayError: cluster or object store are away
    """
    from ringsync.replica.session import spark_session

    config, store, options = application.config, application.store, application.options
    check_layout(store)
    damaged: list[str] = []
    waiting = list(archive.archived(store, WAITING, damaged))
    again: list[ArchivedSegment] = []
    logs: list[str] = []
    if options.since is not None:
        waiting = [entry for entry in waiting if entry.touches(options.since, options.until)]
        known = {(entry.node, entry.name) for entry in waiting}
        again = [
            entry for entry in archive.archived(store, READ, damaged) if entry.touches(options.since, options.until)
        ]
        again = [entry for entry in again if (entry.node, entry.name) not in known]
    counts: Counter[str] = Counter(segments=len(waiting) + len(again), read=0, read_again=0, moved=0, left=0)
    if waiting or again:
        spark = spark_session(f"archive_reprocess {application.run}", master=f"local[{config.sync.stage_cores}]")
        start_workers(spark.sparkContext, "ringsync.steps.stage.stage_task")
        session = connect_patiently(partial(cluster_settings, config))
        create_state(session, config)
        errors = ErrorTable(session, config.state.keyspace, store, config.sync.max_errors_per_hour)
        reprocessor = Reprocessor(application, session, spark.sparkContext, errors.put)
        reprocessor.read(waiting)
        if options.since is not None:
            again += reprocessor.read_in_part
            counts["segments"] += len(reprocessor.read_in_part)
        reprocessor.read_again(again)
        counts.update(reprocessor.counts)
        damaged += dict.fromkeys(reprocessor.left)
        counts["left"] = counts["segments"] - counts["read"] - counts["read_again"] - counts["moved"]
        logs = reprocessor.logs
    left, tried = [*archive.archived(store, WAITING, [])], {*waiting}
    unread = [f"{entry.node}/{entry.name}" for entry in left if entry in tried]
    put_status(store, "archive_reprocess", "archive", {"waiting": len(left), "unreadable": unread, "problems": damaged})
    report: Report = {**counts, "waiting": len(left), **({"error": "; ".join(damaged)} if damaged else {})}
    if options.since is not None:
        report["logs"] = sorted(set(logs))
    return report, ExitCode.COMPLETED_WITH_ERRORS if damaged else ExitCode.OK


@dataclass
class Reprocessor:
    """Reads archived segments.

    :ivar context: Spark's
    :ivar put_errors: makes records that could not be decoded durable: rows of ``ERROR_ROWS`` and the node's id
    :ivar left: sentence on each segment that could not be read
    :ivar logs: the segments that were read, ``<node>/<name>``
    :ivar read_in_part: those of which some or all was read before
    """

    application: Application
    session: Any
    context: Any
    put_errors: Callable[[Any, str], None]
    counts: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    read_in_part: list[ArchivedSegment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._store, self._config = self.application.store, self.application.config
        self._rings: dict[str, RankedRing | None] = {}
        self._agree = Agreement(self.session, time.monotonic)
        # What the sync would see and record comes first: it may have stood still since a table was created or altered.
        interval = interval_at(int(time.time() * 1000), self._config.commitlog_processor_window_interval_ms)
        self._plan: SyncPlan = plan_of(self._store, self._config, self.session, interval)
        self._begun = CdcBegun(self._store)
        self._there: NodeTables
        schema, self._there = ask_one(self.session, lambda node: (read_tables(node), read_node_tables(node)))
        self._present = schema.by_id()
        known = read_histories(self._store)
        unreadable: dict[str, str] = {}
        for table in self._present.values():
            follows = table.table_id in self._there.with_cdc and self._config.sync.follows(table.full_name)
            if follows:
                self._begun.begins(table.table_id, self._there.altered_ms.get(table.table_id, 0))
            if (follows or table.table_id in known.entries) and not _is_known(known, table):
                try:
                    version_of(self._store, table)
                except TableVersionError as error:
                    unreadable[table.table_id] = f"{table.full_name}: {error}"
        # Of a table that was never followed, no version is needed.
        self._histories: Histories = read_histories(self._store)
        self._held_up = frozenset(one for one in unreadable if one in self._begun)
        self.left += [*self._histories.damaged, *unreadable.values()]

    def _left_out(self, entry: ArchivedSegment) -> frozenset[str]:
        """Return the ids of tables that had lost cdc before anything of a segment was written."""
        margin_ms = UNKNOWN_SYNC_MS + SYNC_MARGIN_MS
        return frozenset(
            table_id
            for table_id, altered_ms in self._there.altered_ms.items()
            if table_id not in self._there.with_cdc and altered_ms + margin_ms < entry.began_ms <= entry.ended_ms
        )

    def read(self, entries: Sequence[ArchivedSegment]) -> None:
        """Read segments into commits of their nodes, and move them to ``cdc_archive/``."""
        for node, of_node in _by_node(entries).items():
            for start in range(0, len(of_node), SEGMENTS_OF_A_COMMIT):
                some = of_node[start : start + SEGMENTS_OF_A_COMMIT]
                with tempfile.TemporaryDirectory() as folder:
                    there = self._fetched(some, WAITING, Path(folder))
                    if self._failure(partial(self._commit, node, there, Path(folder))):
                        for entry in there:  # one of them alone may be to blame
                            self._try(entry, partial(self._commit, node, [entry], Path(folder)))

    def read_again(self, entries: Sequence[ArchivedSegment]) -> None:
        """Read segments that were read before, as late rows."""
        known_from_us = (int(time.time() * 1000) - digests_kept_ms(self._config)) * 1000
        windows = Windows(self._plan.interval, 2**62, known_from_us)
        for entry in entries:
            with tempfile.TemporaryDirectory() as folder:
                if not self._fetched([entry], READ, Path(folder)):
                    continue
                self._try(entry, partial(self._read_again, entry, Path(folder) / entry.name, windows))

    def _read_again(self, entry: ArchivedSegment, file: Path, windows: Windows) -> None:
        work = StageWork(entry.node, str(file), Wanted(completed_at=archive.completed_at(entry.index)), 0)
        past, left_out = self._histories.at(entry.ended_ms * 1000), self._left_out(entry)
        (part,) = self._stage([work], past, left_out, windows, by_arrival=False)
        if self._is_read(part):
            self._check(part, is_new=False)
            self.counts.update(part.counts)
            self.logs.append(f"{entry.node}/{entry.name}")
            self.counts["read_again"] += 1

    def _try(self, entry: ArchivedSegment, read: Callable[[], None]) -> None:
        if failure := self._failure(read):
            self.left.append(f"archived segment {entry.name} of node {entry.node}: {failure}")

    def _failure(self, read: Callable[[], None]) -> str:
        """Return how reading has failed; empty: it has not. So what cannot be read holds up nothing else.

        :raises Exception: nothing can be read now
        """
        try:
            read()
        except Exception as error:
            if isinstance(error, PASSING) or spark_is_gone(self.context):
                raise
            return f"{type(error).__name__}: {error}"
        return ""

    def _fetched(self, entries: Sequence[ArchivedSegment], source: str, folder: Path) -> list[ArchivedSegment]:
        """Fetch segments into a folder; return those that are there."""
        there = []
        for entry in entries:
            try:
                (folder / entry.name).write_bytes(archive.read_segment(self._store, source, entry))
                there.append(entry)
            except NotFoundError:
                if archive.is_moved(self._store, entry):
                    archive.remove(self._store, WAITING, entry)
                    self.counts["moved"] += 1
                elif archive.find(self._store, entry.node, entry.name) in (None, entry):
                    self.left.append(f"archived segment {entry.name} of node {entry.node} is gone: restore it")
            except StorageError as error:
                self.left.append(str(error))
        return there

    def _commit(self, node: str, entries: Sequence[ArchivedSegment], folder: Path) -> None:
        """Read the segments of a node that are not finished, and commit them.

        :raises StepError: the counts do not reconcile, or other processes were faster many times
        """
        for _ in range(ATTEMPTS):
            log = NodeLog(node, node, folder)
            log.read_progress(self._store, int(time.time() * 1000))
            unread = [entry for entry in entries if not log.has_finished(entry.segment_id)]
            staged = [part for part in self._read(log, unread, folder) if self._is_read(part)]
            written = log.written
            if staged:
                for part in staged:
                    self._check(part)
                commit = log.commit_of(staged)
                written = {**written, **commit.written}
                counting = put_commit(self._store, commit)
                if (counting.files, counting.late, counting.parts) != (commit.files, commit.late, commit.parts):
                    self._forget(staged)
                    continue
                for part in staged:
                    self.counts.update(part.counts)
            known = log.ends.keys() | (entry.segment_id for entry in entries if log.has_finished(entry.segment_id))
            unreadable = {entry.segment_id for entry in unread} - {part.part.segment_id for part in staged}
            for entry in (entry for entry in entries if entry.segment_id not in unreadable):
                data = (folder / entry.name).read_bytes()
                archive.mark_read(self._store, entry, data, written.get(entry.segment_id))
                self.logs.append(f"{entry.node}/{entry.name}")
                self.counts["read"] += 1
                if entry.segment_id in known:
                    self.read_in_part.append(entry)
            return
        raise StepError(f"{ATTEMPTS} times another process was faster with a commit: try again")

    def _read(self, log: NodeLog, entries: Sequence[ArchivedSegment], folder: Path) -> Iterator[Staged]:
        """Read segments from where their node's commits end in them; those of one schema in one job."""
        windows = Windows(self._plan.interval, closed_until(self._store))
        jobs: list[tuple[tuple[PastSchema, frozenset[str]], list[StageWork]]] = []
        for entry in entries:
            by = self._histories.at(entry.ended_ms * 1000), self._left_out(entry)
            after = log.ends.get(entry.segment_id, 0)
            reached = log.reached.get(entry.segment_id, 0)
            wanted = Wanted(after=after, completed_at=archive.completed_at(entry.index), reached=reached)
            work = StageWork(log.node, str(folder / entry.name), wanted, log.number + 1)
            if jobs and jobs[-1][0] == by:
                jobs[-1][1].append(work)
            else:
                jobs.append((by, [work]))
        for (past, left_out), works in jobs:
            yield from self._stage(works, past, left_out, windows, by_arrival=True)

    def _stage(
        self,
        works: Sequence[StageWork],
        past: PastSchema,
        left_out: frozenset[str],
        windows: Windows,
        *,
        by_arrival: bool,
    ) -> list[Staged]:
        """Decode segments.

        :param left_out: ids of tables whose rows are not followed in these segments
        :param by_arrival: whether tables are bucketed by arrival where the configuration says so
        """
        follows, arrives = self._config.sync.follows, self._config.sync.bucket_by_of
        kept = tuple(
            StagedTable(
                version,
                by_arrival and arrives(version.table.full_name) == "arrival",
                self._ring_of(version.table.keyspace),
            )
            for table_id, version in past.versions.items()
            if table_id in self._begun and table_id not in left_out and follows(version.table.full_name)
        )
        logged: dict[str, TableSchema] = {**self._present}
        logged |= {table_id: version.table for table_id, version in past.versions.items()}
        task = StageTask(self._config, tuple(logged.values()), kept, windows, held_up=self._held_up - left_out)
        pieces = min(len(works), self.context.defaultParallelism)
        return list(self.context.parallelize(list(works), pieces).mapPartitions(task).collect())

    def _is_read(self, part: Staged) -> bool:
        """Tell whether a segment was read to its end, by schemas that have all of it; if not, say why. What no node
        knows, though all agree, is an error of its record."""
        reason = part.unreadable
        if part.unknown_tables & self._held_up:
            reason = "the schema of a record's table is unknown"
            self._forget([part])
        elif not reason and part.has_unknown and not self._agree():
            reason = "the schema lacks a table or column of it, and nodes disagree: it is read again later"
            self._forget([part])
        if reason:
            self.left.append(f"archived segment {part.part.segment} of node {part.work.node}: {reason}")
        return not reason

    def _check(self, part: Staged, *, is_new: bool = True) -> None:
        """Check that each row has one outcome, and keep what could not be read.

        :param is_new: False: that is kept since the first reading, or was solved or discarded
        :raises StepError: the counts do not reconcile
        """
        try:
            check_counts(part, part.work.node)
            if is_new and part.error_count:
                self.put_errors(decode_rows(part.errors), part.work.node)
            if is_new:
                keep_damaged(self._store, part)
                note_switched_off(self._store, self._begun, part.switched_off)
        except Exception:
            self._forget([part])
            raise

    def _forget(self, staged: Sequence[Staged]) -> None:
        """Remove files that no commit will list."""
        for key in (key for part in staged for key in part.files):
            self._store.delete(key)

    def _ring_of(self, keyspace: str) -> RankedRing | None:
        """Return the token ranges of a keyspace; None: it is gone, or they cannot be read."""
        if keyspace not in self._rings:
            try:
                known = keyspace in self._plan.replications
                self._rings[keyspace] = ranked(
                    self._plan.ring(keyspace) if known else read_ring(self.session, keyspace)
                )
            except RingError:
                self._rings[keyspace] = None
        return self._rings[keyspace]


def _is_known(histories: Histories, table: TableSchema) -> bool:
    """Tell whether a table's present schema is recorded."""
    return any(entry.version.table == table for entry in histories.entries.get(table.table_id, ()))


def _by_node(entries: Sequence[ArchivedSegment]) -> dict[str, list[ArchivedSegment]]:
    found: dict[str, list[ArchivedSegment]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: (entry.node, entry.segment_id)):
        found[entry.node].append(entry)
    return found
