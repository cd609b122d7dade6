"""The loop that stages what the nodes of a worker queue have logged.

In each cycle Spark tasks decode what is synced (``_cdc.idx``) and in no commit yet, and put the rows into buckets.
Then, for each node, one commit makes its files, their digests and the new positions durable at once. Only segments that
are complete and wholly committed are ever removed from ``cdc_raw``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from ringsync.changes.identity import TableVersion
from ringsync.cluster.cluster import SYNC_PERIOD, read_ring, read_settings, setting_ms
from ringsync.cluster.scylla import is_scylla
from ringsync.cluster.whole_schema import Agreement
from ringsync.config import Config
from ringsync.ledger.layout import check_layout
from ringsync.ledger.staging import closed_until, commit_keys, decode_rows, put_commit
from ringsync.ledger.table_versions import CdcBegun, TableVersionError, latest_version, version_of
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.ring import Host, RingError
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.state.processor_error import ErrorTable
from ringsync.steps.absent_tables import AbsentTables
from ringsync.steps.application import Application, ExitCode, Report, StepError, spark_is_gone
from ringsync.steps.loop import (
    Patience,
    connect_patiently,
    cycles,
    put_status,
    start_workers,
    starts_again,
)
from ringsync.steps.own_keyspace import create_state
from ringsync.steps.stage.claims import (
    ForeignClaimError,
    Place,
    claim,
    get_place,
    has_claim,
    may_be_first,
    other_claims,
    release,
)
from ringsync.steps.stage.former_nodes import FormerNodes
from ringsync.steps.stage.lost_segments import LostSegments
from ringsync.steps.stage.node_log import NodeLog
from ringsync.steps.stage.schemas import QueueSchemas
from ringsync.steps.stage.stage_task import Staged, StageTask, StageWork, check_counts, keep_damaged
from ringsync.steps.stage.staged_files import StagedTable, Windows
from ringsync.steps.stage.switched_off import note_switched_off
from ringsync.steps.sync_plan import SyncPlan, interval_at, plan_of
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_settings

CYCLE_BYTES = 64 * 2**20
"""Bytes of one node's log that are staged in one cycle: a backlog comes in pieces, and each is committed."""


@starts_again()
def run(application: Application) -> tuple[Report, ExitCode]:
    """Stage until the time is over.

    :returns: exit code 1 when a node could not be staged at the end, or the last cycle failed
    :raises LayoutError: the state is of a version of ringsync that this one does not know
    :raises AwayError: cluster or object store are away
    :raises ClusterError: the cluster refuses us
    :raises StepError: the cluster is ScyllaDB
    """
    from ringsync.replica.session import spark_session

    config, store = application.config, application.store
    check_layout(store)
    # Always local: executors elsewhere cannot read this host's commit logs.
    master = f"local[{config.sync.stage_cores}]"
    spark = spark_session(f"commitlog_stage {application.options.queue} {application.run}", master=master)
    start_workers(spark.sparkContext, "ringsync.steps.stage.stage_task")
    session = connect_patiently(partial(cluster_settings, config))
    if is_scylla(session):
        raise StepError("this cluster is ScyllaDB: its CDC logs are read by the DAG scylla_log_stage; cdcservice start")
    create_state(session, config)
    errors = ErrorTable(session, config.state.keyspace, store, config.sync.max_errors_per_hour)
    patience = Patience(lambda: spark_is_gone(spark.sparkContext))
    stager = Stager(application, session, spark.sparkContext, errors.put)
    for _ in cycles(application, config.sync.poll_interval_ms):
        error = patience.tried(stager.cycle)
        put_status(store, "commitlog_stage", application.options.queue, {"nodes": stager.status(), "error": error})
    report = {**stager.report(), **({"error": error} if error else {})}
    return report, ExitCode.COMPLETED_WITH_ERRORS if error or stager.is_failing else ExitCode.OK


def _now_ms() -> int:
    return int(time.time() * 1000)


class Stager:
    """The nodes of one queue, each on its own: a node that fails is tried again later, and holds up no other.

    :param context: Spark's
    :param put_errors: makes records that could not be decoded durable: rows of ``ERROR_ROWS`` and the node's id
    """

    def __init__(
        self, application: Application, session: Any, context: Any, put_errors: Callable[[Any, str], None]
    ) -> None:
        self._config: Config = application.config
        self._store: ObjectStore = application.store
        self._queue: str = application.options.queue
        self._session = session
        self._context = context
        self._put_errors = put_errors
        self._logs: dict[str, NodeLog] = {}
        self._former = FormerNodes(self._store, self._config)
        self._counts_of_former: Counter[str] = Counter()
        self._plan: SyncPlan | None = None
        self._rings: dict[str, RankedRing | None] = {}
        self._schemas = QueueSchemas(session)
        self._agree = Agreement(session, time.monotonic)
        self._lost = LostSegments(self._store)
        self._versions: dict[str, TableVersion] = {}
        self._begun: CdcBegun | None = None
        self._recalled: dict[str, TableVersion] = {}
        self._damaged: dict[str, str] = {}
        self._absent = AbsentTables()
        self._gone: frozenset[str] = frozenset()

    def cycle(self) -> None:
        """Stage what is new."""
        windows = self._windows()
        now_ms = _now_ms()
        logs = self._node_logs(now_ms)
        work: list[StageWork] = []
        for log in logs:
            with log.alone(_now_ms):
                work += log.new_work(now_ms, CYCLE_BYTES, partial(self._not_ours, log))
        staged = self._stage(work, windows) if work else []
        unknown = [part for part in staged if part.has_unknown]
        if unknown and self._recall(unknown):
            again = {part.work: part for part in self._stage([part.work for part in unknown], windows)}
            self._forget(*(part for part in staged if part.work in again))
            staged = [again.get(part.work, part) for part in staged]
        for log in logs:
            if log.is_due(now_ms):
                with log.alone(_now_ms):
                    of_node = [part for part in staged if part.work.node == log.node]
                    self._commit(log, of_node, now_ms)
                    log.served(bool(of_node), now_ms)
            log.look_back(now_ms)
            with log.alone(_now_ms):
                self._look_for_lost(log, now_ms)
            if self._config.archive.policy != "always":  # else commitlog_archive keeps a copy, and removes them
                log.remove_finished()
        for log in [log for log in self._logs.values() if log.node in self._former]:
            with log.alone(_now_ms):
                if self._former.is_over(log, now_ms, self._tables_of):
                    self._forget_log(log.node)

    def _forget_log(self, node: str) -> None:
        self._counts_of_former.update(self._logs.pop(node).counts)

    def _look_for_lost(self, log: NodeLog, now_ms: int) -> None:
        if log.is_due(now_ms) and log.error is None:
            self._lost.look(log, now_ms, self._tables_of, self._ring_of)

    def _tables_of(self, log: NodeLog) -> dict[str, str]:
        """Return the names of the tables whose changes a log may have, by id: also of those that cannot be planned."""
        self._schemas.look([log.node])
        planned = {table.table_id: table.schema.full_name for table in (self._plan.tables if self._plan else ())}
        return {**planned, **self._captured(log)}

    def _windows(self) -> Windows:
        interval = interval_at(_now_ms(), self._config.commitlog_processor_window_interval_ms)
        if self._plan is None or self._plan.interval != interval:
            plan = plan_of(self._store, self._config, self._session, interval, self._plan)
            self._versions |= {table.table_id: table.version for table in plan.tables}
            self._plan, self._rings = plan, {}
            self._former.take(plan)
            for node in self._logs.keys() - {host.id for host in (*plan.hosts, *self._former.hosts)}:
                self._forget_log(node)
        return Windows(self._plan.interval, closed_until(self._store))

    def _node_logs(self, now_ms: int) -> list[NodeLog]:
        """Return the nodes of this queue to read now.

        Only one failing node is tried at a time, after all others, and after these have had as much time as its last
        try.
        """
        hosts = [host for host in self._hosts() if self._config.sync.queue_of(host.address, host.id) == self._queue]
        logs = {host: self._logs.setdefault(host.id, NodeLog(host.id, host.endpoint, None)) for host in hosts}
        well = [host for host, log in logs.items() if not log.failures]
        failing = sorted(logs.keys() - set(well), key=lambda host: logs[host].again_ms)
        rested = all(log.rested_ms <= now_ms for log in logs.values())
        tried = [*well, *(failing[:1] if rested else [])]
        for host in tried:
            log = logs[host]
            log.has_left = host.id in self._former
            if log.is_due(now_ms):
                with log.alone(_now_ms):
                    (self._former.find if log.has_left else self._find)(log)
                    self._former.remember(host, log)
                    if not log.is_known:
                        log.read_progress(self._store, now_ms)
        return [log for host in tried if (log := logs[host]).is_due(now_ms)]

    def _hosts(self) -> tuple[Host, ...]:
        """Return the nodes whose logs are read: those of the ring, and those that have left it."""
        return (*self._plan.read_hosts, *self._former.hosts) if self._plan else ()

    def _find(self, log: NodeLog) -> None:
        """Find where the node keeps its log for us, and claim the folder. The node is asked until it has answered, and
        while it captures nothing, once in an interval."""
        assert self._plan is not None
        if log.asked_in != self._plan.interval and not (log.has_answered and log.folder and log.captures):
            self._ask(log)
            log.asked_in = self._plan.interval
        if log.folder and not log.token:
            try:
                log.token = claim(self._store, log.node, log.folder, anew=log.may_claim)
                log.unclaimed = log.why_unclaimed()
            except OSError as error:
                log.unclaimed = f"{error.strerror or error}: may the user of this worker write there?"
            except ForeignClaimError as error:
                log.unclaimed = str(error)

    def _ask(self, log: NodeLog) -> None:
        """Ask the node where its log is. If it does not answer, its last answer holds; without one, the folder of the
        configuration does.

        A node that captures nothing names a folder, too, which may be another node's. If it captured changes before, it
        may have left segments in its own: they are read where its newest claim is.
        """
        known = get_place(self._store, log.node)
        told = read_settings(self._session, log.node, ["cdc_enabled", "cdc_raw_directory", *SYNC_PERIOD])
        log.has_answered = bool(told)
        log.sync_ms = setting_ms(told, SYNC_PERIOD) or log.sync_ms
        log.captures = told.get("cdc_enabled") != "false" if told else known != Place(None)
        folder = self._config.sync.cdc_raw or told.get("cdc_raw_directory") or (known.folder if known else None)
        log.may_claim = log.captures if told else may_be_first(folder, known)
        if not log.captures and not commit_keys(self._store, log.node):
            folder = None
            if known != Place(None):
                release(self._store, log.node, known or Place(None))
        log.folder = Path(folder) if folder else None

    def _not_ours(self, log: NodeLog, names: Collection[str]) -> str | None:
        """Tell why a node's folder, which has files of these names, is not read."""
        assert log.folder is not None
        if not has_claim(log.folder, log.node, log.token):
            why, log.token = log.unclaimed if not log.token else "its claim was removed or replaced", ""
            return f"{log.folder} is not claimed for the node: {why}"
        # A node that has left the ring claims nothing that another node uses.
        endpoints = {host.id: host.endpoint for host in self._hosts() if host.id not in self._former}
        endpoints[log.node] = log.endpoint
        shared = other_claims(self._store, log.folder, names, log.node, endpoints)
        log.is_shared = shared is not None
        return shared

    def _stage(self, work: Sequence[StageWork], windows: Windows) -> list[Staged]:
        nodes = {part.node for part in work}
        self._schemas.look(nodes)
        captured = {node: self._captured(self._logs[node]) for node in nodes}
        kept_ids = frozenset().union(*captured.values())
        logged = self._schemas.logged
        followed = self._followed([logged[table_id] for table_id in sorted(kept_ids & logged.keys())])
        recalled = [version for table_id, version in self._recalled.items() if table_id not in logged]
        gone = [version for version in recalled if version.table_id in self._gone]
        waiting = [version for version in recalled if version not in gone]
        kept = tuple(
            StagedTable(
                version,
                self._config.sync.bucket_by_of(version.table.full_name) == "arrival",
                self._ring_of(version.table.keyspace),
            )
            for version in (*followed, *waiting)
        )
        task = StageTask(
            self._config,
            (*logged.values(), *(version.table for version in recalled)),
            kept,
            windows,
            held_up=frozenset(self._damaged),
            gone=frozenset(version.table_id for version in gone),
            left_out={node: kept_ids.difference(names) for node, names in captured.items()},
            passed_over=frozenset(self._schemas.unreadable) - kept_ids,
        )
        return self._run(task, work)

    def _run(self, task: StageTask, work: Sequence[StageWork]) -> list[Staged]:
        """Run one job for all healthy nodes. If it fails as a whole (a worker has crashed, its memory is used up), run
        one for each: then a failure concerns one node.

        :raises Exception: Spark does not even run a job without work
        """
        apart = {part.node for part in work if self._logs[part.node].failures}
        staged: list[Staged] = []
        try:
            staged += self._job(task, [part for part in work if part.node not in apart])
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            print(f"ringsync: warning: a job failed, each node has one of its own now: {message[:2000]}", flush=True)
            apart = {part.node for part in work}
        for node in sorted(apart):
            with self._logs[node].alone(_now_ms):
                staged += self._job(task, [part for part in work if part.node == node])
        if not staged:
            self._context.parallelize([0], 1).mapPartitions(list).collect()
        return staged

    def _job(self, task: StageTask, work: Sequence[StageWork]) -> list[Staged]:
        if not work:
            return []
        # A task for each core: to start one takes longer than a small segment.
        tasks = min(len(work), self._context.defaultParallelism)
        return list(self._context.parallelize(list(work), tasks).mapPartitions(task).collect())

    def _captured(self, log: NodeLog) -> dict[str, str]:
        """Return the names of the tables, by id, whose rows in a node's log are staged: they have cdc, or may have had
        it when some of what we read was logged."""
        tables: Iterator[TableSchema | UnreadableTable]
        tables = chain(self._schemas.logged.values(), self._schemas.unreadable.values())
        named = {table.table_id: table.full_name for table in tables}
        follows = self._config.sync.follows
        return {one: name for one, name in named.items() if follows(name) and self._has_cdc(log, one)}

    def _has_cdc(self, log: NodeLog, table_id: str) -> bool:
        tables = self._schemas.of_node[log.node].tables
        altered_ms = tables.altered_ms.get(table_id)  # None: unknown, or dropped
        if table_id in tables.with_cdc:
            self._cdc_begun().begins(table_id, altered_ms or 0)
            return True
        if table_id not in self._cdc_begun():
            return False
        # The last ALTER of anything: between two looks, it may have had cdc once more.
        return altered_ms is None or log.may_have(altered_ms)

    def _cdc_begun(self) -> CdcBegun:
        """Return the tables that have or had cdc."""
        if self._begun is None:
            self._begun = CdcBegun(self._store)
        return self._begun

    def _followed(self, tables: Sequence[TableSchema]) -> list[TableVersion]:
        """Return the versions of followed tables. One whose version is damaged is left out: only logs that have rows of
        it wait."""
        versions, kept, known = [], {table.table_id for table in tables}, self._schemas.logged
        self._damaged = {one: why for one, why in self._damaged.items() if one in kept or one not in known}
        for table in tables:
            try:
                version = version_of(self._store, table, self._versions.get(table.table_id))
            except TableVersionError as error:
                self._note_damaged(table.table_id, f"{table.full_name}: {error}")
            else:
                self._versions[table.table_id] = version
                self._damaged.pop(table.table_id, None)
                versions.append(version)
        return versions

    def _note_damaged(self, table_id: str, why: str) -> None:
        if self._damaged.get(table_id) != why:
            print(f"ringsync: warning: {why}. Nodes whose log has rows of it wait", flush=True)
        self._damaged[table_id] = why

    def _ring_of(self, keyspace: str) -> RankedRing | None:
        """Return the token ranges of a keyspace; None: they cannot be read, which ``bucket_close`` reports."""
        if keyspace not in self._rings:
            assert self._plan is not None
            try:
                known = keyspace in self._plan.replications
                ring = self._plan.ring(keyspace) if known else read_ring(self._session, keyspace)
                self._rings[keyspace] = ranked(ring)
            except RingError:
                self._rings[keyspace] = None
        return self._rings[keyspace]

    def _recall(self, unknown: Sequence[Staged]) -> bool:
        """Find the schemas of tables that the schema lacks, in their histories; return whether something is new, also
        in the nodes' schemas.

        A followed table that was dropped: its rows are staged, so that no other table of the log waits. Whether it is
        gone for good is for ``bucket_close`` to find out. Of all others, rows can only be read once they are gone: one
        that is not followed may be new, on a node that cannot be asked.
        """
        ids = frozenset().union(*(part.unknown_tables for part in unknown))
        nodes = {part.work.node for part in unknown} | {log.node for log in self._logs.values() if log.missed_tables()}
        before = self._schemas.logged
        self._gone = self._absent.look(
            ids.union(*(log.missed_tables() for log in self._logs.values())),
            lambda: self._ids_of(nodes),
            lambda: all(self._schemas.of_node[node].is_own for node in nodes) or self._agree(),
        )
        if not ids:
            self._schemas.look(nodes)
        known, new = self._schemas.logged, False
        for table_id in ids - self._recalled.keys() - known.keys() - self._schemas.unreadable.keys():
            try:
                version = latest_version(self._store, table_id)
            except TableVersionError as error:
                self._note_damaged(table_id, f"table id {table_id}: {error}")
                self._gone -= {table_id}
                continue
            self._damaged.pop(table_id, None)
            if version is not None and (table_id in self._gone or self._is_recalled(version.table)):
                self._recalled[table_id] = version
                new = True
        return new or known is not before

    def _is_recalled(self, table: TableSchema) -> bool:
        return self._config.sync.follows(table.full_name) and table.table_id in self._cdc_begun()

    def _ids_of(self, nodes: Collection[str]) -> frozenset[str]:
        self._schemas.look(nodes)
        return self._schemas.ids(nodes)

    def _doubt(self, part: Staged) -> str:
        """Tell why the schema by which something was read may be the wrong one; empty: it is not."""
        if damaged := sorted(part.unknown_tables & self._damaged.keys()):
            return f"the schema of a record's table is unknown. {self._damaged[damaged[0]]}"
        if not part.unknown_tables <= self._gone | self._schemas.unreadable.keys():
            return "the schema does not have the table of a record, which may be new: read again soon"
        is_own = self._schemas.of_node[part.work.node].is_own
        if (is_own and not part.unknown_columns) or self._agree():
            return ""
        if not is_own:
            return "its node cannot be asked, and nodes disagree about the schema (nodetool describecluster)"
        return (
            "a record names a column that its table does not have in the schema, about which nodes disagree (nodetool "
            "describecluster): read again soon"
        )

    def _commit(self, log: NodeLog, staged: Sequence[Staged], now_ms: int) -> None:
        """Make durable what was read of a node.

        :raises StepError: the counts do not reconcile
        """
        taken = []
        for part in staged:
            if log.accepts(part, now_ms, self._doubt(part)):
                taken.append(part)
            else:
                self._forget(part)
        if not taken:
            return
        try:
            for part in taken:
                check_counts(part, log.node)
                keep_damaged(self._store, part)
                note_switched_off(self._store, self._cdc_begun(), part.switched_off)
            if undecoded := [decode_rows(part.errors) for part in taken if part.error_count]:
                self._put_errors(pa.concat_batches(undecoded), log.node)
        except Exception:
            self._forget(*taken)
            raise
        commit = log.commit_of(taken)
        counting = put_commit(self._store, commit)
        if (counting.files, counting.late, counting.parts) != (commit.files, commit.late, commit.parts):
            self._forget(*taken)
        log.take(counting)

    def _forget(self, *staged: Staged) -> None:
        """Remove files that no commit will list."""
        for key in (key for part in staged for key in part.files):
            self._store.delete(key)

    @property
    def is_failing(self) -> bool:
        """Whether a node could not be staged when that was last tried."""
        return any(log.failures for log in self._logs.values())

    def status(self) -> dict[str, Any]:
        """Return how far each node's log is staged."""
        up = {host.id for host in self._hosts() if host.up}
        found = {log.node: {"up": log.node in up, "left": log.has_left, **log.status()} for log in self._logs.values()}
        for node in filter(self._former.__contains__, found):
            found[node]["error"] = self._former.problem(self._logs[node])
        return found

    def report(self) -> Report:
        """Return what was staged by this run."""
        total = Counter(self._counts_of_former)
        for log in self._logs.values():
            total.update(log.counts)
        return {"queue": self._queue, "nodes": self.status(), **total}
