"""Stage what the nodes of a worker queue have logged (DESIGN §5, step 2): a loop.

In each cycle: what ``_cdc.idx`` says is synced and no commit covers is decoded by Spark tasks and laid into buckets;
then, for each segment, one commit makes its files, their digests and the new offset durable at once. A segment that is
complete and wholly committed is removed from ``cdc_raw``, and nothing else ever is.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringsync.config import Config
from ringsync.formats.commitlog.index import parse_index
from ringsync.formats.commitlog.names import INDEX_SUFFIX, index_name, segment_id, segment_name
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.ring import Host
from ringsync.schema.from_cluster import read_tables
from ringsync.schema.table import TableSchema
from ringsync.sources.cluster import read_ring, read_settings
from ringsync.state.finished_segments import REMEMBERED_S, SegmentIds, finished_segments, fold_finished
from ringsync.state.processor_error import ErrorTable
from ringsync.state.staging import (
    StageCommit,
    closed_until,
    commit_keys,
    decode_rows,
    get_commit,
    put_commit,
)
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.loop import Patience, connect_patiently, cycles, put_status, seconds_left, start_workers
from ringsync.steps.own_keyspace import create_state
from ringsync.steps.stage_task import Staged, StagedTable, StageTask, StageWork, Windows
from ringsync.steps.sync_plan import SyncPlan, interval_at, plan_of
from ringsync.storage.port import ObjectStore

CYCLE_BYTES = 64 * 2**20
"""Of the log of one node that are staged in one cycle: a backlog comes in pieces, and each is committed."""


@dataclass
class NodeLog:
    """How far a node's log is staged.

    :ivar folder: its ``cdc_raw``
    :ivar ends: logical position by segment id
    :ivar finished: segments of which nothing more will come, though Cassandra may link them again after a crash
    :ivar folded: those of which that was known long before
    """

    node: str
    endpoint: str
    folder: Path
    ends: dict[int, int]
    finished: set[int]
    folded: SegmentIds = field(default_factory=SegmentIds)
    counts: Counter[str] = field(default_factory=Counter)
    backlog: int = 0
    clear_at_ms: int = 0
    error: str | None = None


def run(application: Application) -> tuple[Report, ExitCode]:
    """Stage until the time is over.

    :raises ClusterError: the cluster cannot be reached at the beginning
    :raises StepError: the counts do not reconcile
    """
    from ringsync.replica.session import spark_session

    config, store = application.config, application.store
    # Whatever the master of all others is: executors elsewhere cannot read this host's commit logs.
    master = f"local[{config.sync.stage_cores}]"
    spark = spark_session(f"commitlog_stage {application.options.queue} {application.run}", master=master)
    start_workers(spark.sparkContext, "ringsync.steps.stage_task")
    session = connect_patiently(config.cluster_settings())
    create_state(session, config)
    errors = ErrorTable(session, config.state.keyspace, store)
    patience = Patience()
    stager = Stager(application, session, spark.sparkContext, errors.put)
    run_s = seconds_left(config.sync.run_s, application.options.until, time.time())
    for _ in cycles(store, run_s, config.sync.poll_interval_ms / 1000):
        error = patience.tried(stager.cycle)
        put_status(store, "commitlog_stage", application.options.queue, {"nodes": stager.status(), "error": error})
    return stager.report(), ExitCode.OK


class Stager:
    """The nodes of one queue.

    :param context: Spark's
    :param put_errors: makes records that could not be decoded durable: rows of ``ERRORS`` and the node's id
    """

    def __init__(
        self, application: Application, session: Any, context: Any, put_errors: Callable[[Any, str], None]
    ) -> None:
        self._config: Config = application.config
        self._config_path = application.config_path
        self._store: ObjectStore = application.store
        self._queue: str = application.options.queue
        self._session = session
        self._context = context
        self._put_errors = put_errors
        self._logs: dict[str, NodeLog] = {}
        self._plan: SyncPlan | None = None
        self._rings: dict[str, RankedRing] = {}
        self._schema_version: object = None
        self._logged: tuple[TableSchema, ...] = ()

    def cycle(self) -> None:
        """Stage what is new.

        :raises StepError: the counts do not reconcile
        """
        windows = self._windows()
        began_ms = int(time.time() * 1000)
        work = [one for log in self._node_logs() for one in self._new_work(log)]
        # Asked after the indexes were read: what was logged for a table before it had cdc is no loss.
        if work:
            staged = self._stage(work, windows)
            unknown = [one.work for one in staged if one.unknown]
            if unknown and self._refresh_schema():
                again = {one.work: one for one in self._stage(unknown, windows)}
                staged = [again.get(one.work, one) for one in staged]
            for one in staged:
                self._commit(one)
        for log in self._logs.values():
            if not log.backlog and not log.error:
                log.clear_at_ms = began_ms

    def _windows(self) -> Windows:
        newest = interval_at(int(time.time() * 1000), self._config.commitlog_processor_window_interval_ms)
        if self._plan is None or self._plan.interval != newest:
            self._plan = plan_of(self._store, self._config, self._session, newest)
            self._rings = {keyspace: ranked(self._plan.ring(keyspace)) for keyspace in self._plan.replications}
        return Windows(newest, closed_until(self._store))

    def _node_logs(self) -> list[NodeLog]:
        """The nodes of this queue; those that have left the ring are no longer read."""
        hosts = [host for host in self._hosts() if self._config.sync.queue_of(host.address, host.id) == self._queue]
        for host in hosts:
            if host.id not in self._logs and (folder := self._folder(host)) is not None:
                self._logs[host.id] = read_node_log(self._store, host, folder, int(time.time() * 1000))
        return [self._logs[host.id] for host in hosts if host.id in self._logs]

    def _hosts(self) -> tuple[Host, ...]:
        return self._plan.hosts if self._plan else ()

    def _folder(self, host: Host) -> Path | None:
        """Where the node keeps its log for us; remembered, since a node that is down cannot be asked."""
        if self._config.sync.cdc_raw:
            return Path(self._config.sync.cdc_raw)
        key = f"staging/nodes/{host.id}"
        if told := read_settings(self._session, host.id, ["cdc_raw_directory"]).get("cdc_raw_directory"):
            self._store.put(key, told.encode())
            return Path(told)
        return Path(self._store.get(key).decode()) if self._store.stat(key) else None

    def _new_work(self, log: NodeLog) -> list[StageWork]:
        """What is synced and not staged, the oldest segments first, up to :data:`CYCLE_BYTES`."""
        try:
            found = list(synced_parts(log))
        except (OSError, ValueError) as error:
            log.error = str(error)
            return []
        log.error = None
        log.backlog = sum(size for _, size in found)
        work, left = [], CYCLE_BYTES
        for part, size in found:
            if left > 0:
                work.append(part)
                left -= size
        return work

    def _stage(self, work: Sequence[StageWork], windows: Windows) -> list[Staged]:
        if not self._logged:
            self._refresh_schema()
        with_cdc = {row.id.hex for row in self._session.execute("SELECT id, cdc FROM system_schema.tables") if row.cdc}
        if not with_cdc <= {table.table_id for table in self._logged}:
            self._refresh_schema()
        kept = tuple(
            StagedTable(
                table.table_id,
                self._config.sync.bucket_by_of(table.full_name) == "arrival",
                self._ring_of(table.keyspace),
            )
            for table in self._logged
            if table.table_id in with_cdc and self._config.sync.follows(table.full_name)
        )
        task = StageTask(self._config_path, self._logged, kept, windows)
        # A task for each core: to start one takes longer than a small segment.
        tasks = min(len(work), self._context.defaultParallelism)
        return list(self._context.parallelize(list(work), tasks).mapPartitions(task).collect())

    def _ring_of(self, keyspace: str) -> RankedRing:
        if keyspace not in self._rings:
            self._rings[keyspace] = ranked(read_ring(self._session, keyspace))
        return self._rings[keyspace]

    def _refresh_schema(self) -> bool:
        """Read the schema if it has changed; whether it has."""
        version = self._session.execute("SELECT schema_version FROM system.local").one().schema_version
        if version == self._schema_version:
            return False
        self._logged = tuple(read_tables(self._session).by_id().values())
        self._schema_version = version
        return True

    def _commit(self, staged: Staged) -> None:
        """Make a part of a segment durable, and remove the segment if this was its end.

        :raises StepError: the counts do not reconcile
        """
        log, commit = self._logs[staged.work.node], staged.commit
        if staged.unreadable:
            log.error = staged.unreadable
            return
        check_counts(commit)
        self._keep_damaged(staged)
        if staged.error_count:
            self._put_errors(decode_rows(staged.errors), commit.node)
        counting = put_commit(self._store, commit)
        if counting.files != commit.files:
            for file in commit.files:
                self._store.delete(file.key)
        log.counts.update(counting.counts)
        log.ends[counting.segment_id] = counting.end
        log.backlog = max(0, log.backlog - (counting.end - counting.start))
        if counting.finished:
            log.finished.add(counting.segment_id)
            remove_segment(Path(staged.work.file))

    def _keep_damaged(self, staged: Staged) -> None:
        """Keep a copy of a segment that could not be read whole, before it is removed: what is in it is not lost."""
        commit, file = staged.commit, Path(staged.work.file)
        key = f"cdc_damaged/{commit.node}/{commit.segment}"
        if commit.counts["damages"] or (commit.finished and self._store.stat(key)):
            self._store.put(key, file.read_bytes())

    def status(self) -> dict[str, Any]:
        """How far each node's log is staged."""
        return {
            log.node: {
                "endpoint": log.endpoint,
                "up": any(host.up for host in self._hosts() if host.id == log.node),
                "segment": (last := max(log.ends, default=None)),
                "position": log.ends.get(last) if last is not None else None,
                "backlog_bytes": log.backlog,
                "clear_at_ms": log.clear_at_ms,
                "records": log.counts["records"],
                "rows": log.counts["rows"],
                "late": log.counts["late"],
                "errors": log.counts["errors"],
                "error": log.error,
            }
            for log in self._logs.values()
        }

    def report(self) -> Report:
        """What was staged by this run."""
        total: Counter[str] = Counter()
        for log in self._logs.values():
            total.update(log.counts)
        return {"queue": self._queue, "nodes": self.status(), **total}


def read_node_log(store: ObjectStore, host: Host, folder: Path, now_ms: int) -> NodeLog:
    """How far a node's log was staged before. What was finished long ago is put together in one object.

    :param now_ms: ms since the epoch
    """
    log = NodeLog(host.id, host.endpoint, folder, {}, set())
    keys: dict[str, list[str]] = defaultdict(list)
    for key in commit_keys(store, host.id):
        keys[key.rpartition("-")[0]].append(key)
    old = []
    for of_segment in keys.values():
        commit = get_commit(store, of_segment[-1])
        log.ends[commit.segment_id] = commit.end
        if commit.finished:
            log.finished.add(commit.segment_id)
            is_alone = len(of_segment) == 1 and not any(file.bucket for file in commit.files)
            if is_alone and commit.read_at_ms < now_ms - REMEMBERED_S * 1000:
                old.append(commit)
    log.folded = fold_finished(store, host.id, old) if old else finished_segments(store, host.id)
    return log


def synced_parts(log: NodeLog) -> Iterator[tuple[StageWork, int]]:
    """The parts of segments that are synced and not staged, and about how many bytes each has.

    :raises OSError: the folder cannot be read
    :raises ValueError: an index is none
    """
    for index in sorted(log.folder.glob(f"*{INDEX_SUFFIX}"), key=lambda path: segment_id(path.name) or 0):
        file, identity = index.with_name(segment_name(index.name)), segment_id(index.name)
        if identity is None:
            continue
        if identity in log.finished or identity in log.folded:
            # Cassandra links a segment again when it replays it after a crash.
            remove_segment(file)
            continue
        try:
            found, size = parse_index(index.read_bytes()), file.stat().st_size
        except ValueError as error:
            raise ValueError(f"{index}: {error}") from None
        start = log.ends.get(identity, 0)
        if found is not None and (found.completed or found.offset > start):
            wanted = replace(found.wanted, after=start)
            yield StageWork(log.node, str(file), wanted), max(0, (size if found.completed else found.offset) - start)


def check_counts(commit: StageCommit) -> None:
    """Every row that was decoded has one outcome.

    :raises StepError: it has not
    """
    counts = commit.counts
    outcomes = sum(counts[name] for name in ("staged", "late", "repeated", "not_cdc"))
    if counts["rows"] != outcomes:
        raise StepError(f"{commit.segment} of {commit.node}: {counts['rows']} rows decoded, {outcomes} accounted for")


def remove_segment(file: Path) -> None:
    """Remove a segment and its index from ``cdc_raw``; the index last, so that what is left tells that it was read."""
    file.unlink(missing_ok=True)
    file.with_name(index_name(file.name)).unlink(missing_ok=True)
