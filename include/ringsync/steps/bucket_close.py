"""Close buckets and publish (DESIGN §5, steps 3 to 5): a loop.

In each cycle and for each table: what the live replicas agree on, and all of buckets that are closed, becomes a pass —
messages of the stream and merged change rows — and every pass is then followed up: stream, replica, Kafka. A row that
comes after its range was settled is published by the next pass over the range; what was published is known by digest.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ringsync.config import Config
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.sources.control import ControlServer
from ringsync.state.staging import (
    Bucket,
    StageCommit,
    closed_until,
    commit_keys,
    get_commit,
    put_closed_until,
    retire_commit,
)
from ringsync.steps.agreement import OpenBucket, Settled, settle_together
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.close_task import CloseTask, SliceResult
from ringsync.steps.follow_ups import FollowUps
from ringsync.steps.kafka_feed import KafkaFeed
from ringsync.steps.loop import (
    Patience,
    connect_patiently,
    cycles,
    put_metrics,
    put_status,
    seconds_left,
    start_workers,
)
from ringsync.steps.passes import PassContext, commit
from ringsync.steps.rows_after import AfterReader
from ringsync.steps.slices import cut
from ringsync.steps.sync_plan import SyncPlan, SyncTable, interval_at, plan_of
from ringsync.storage.port import NotFoundError, ObjectStore
from ringsync.streams.pass_log import Pass, digest_keys

PASS_ROWS = 250_000
"""A pass has about so many rows at most, the oldest first: Kafka gets one while the next is made."""

REPEATED_MS = 600_000
"""Writers that get no answer repeat a statement sooner than this."""


def run(application: Application) -> tuple[Report, ExitCode]:
    """Close and publish until the time is over.

    :raises ClusterError: the cluster cannot be reached at the beginning
    :raises StepError: the counts do not reconcile
    """
    from ringsync.replica.session import spark_session

    config, store = application.config, application.store
    spark = spark_session(f"bucket_close {application.run}")
    start_workers(spark.sparkContext, "deltalake", "ringsync.steps.close_task", "ringsync.steps.replica_task")
    session = connect_patiently(config.cluster_settings())
    with (
        ControlServer(host=_driver_host(spark.sparkContext)) as control,
        KafkaFeed(store, config.kafka_settings()) as feed,
    ):
        control.watch_limits(store, application.run, config.cluster_limits())
        closer = Closer(application, session, spark.sparkContext, control, feed)
        patience = Patience()
        run_s = seconds_left(config.sync.run_s, application.options.until, time.time())
        for number in cycles(store, run_s, config.sync.poll_interval_ms / 1000):
            began_ms = int(time.time() * 1000)
            error = patience.tried(closer.cycle)
            status = {"began_ms": began_ms, "tables": closer.status(), "error": error}
            put_status(store, "bucket_close", "close", status)
            put_metrics(store, config.metrics.prometheus_file, number)
    return closer.report(), ExitCode.OK


def _driver_host(context: Any) -> str:
    return str(context.getConf().get("spark.driver.host", "127.0.0.1"))


@dataclass
class TableState:
    """What this run knows of a table.

    :ivar buckets: those that have staged files
    :ivar lags_ms: from write to message, of rows of the last pass
    :ivar agreement_ms: from write to agreement of the replicas, of rows of the last pass on which they agreed
    """

    table: SyncTable
    follow_ups: FollowUps
    buckets: dict[Bucket, OpenBucket] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    lags_ms: list[int] = field(default_factory=list)
    agreement_ms: list[int] = field(default_factory=list)


class Closer:
    """All tables.

    :param context: Spark's
    :param control: keeps the limits of reading after-images
    :param feed: of Kafka
    """

    def __init__(
        self, application: Application, session: Any, context: Any, control: ControlServer, feed: KafkaFeed
    ) -> None:
        self._application = application
        self._config: Config = application.config
        self._store: ObjectStore = application.store
        self._session = session
        self._context = context
        self._control = control
        self._feed = feed
        self._commits: dict[str, StageCommit] = {}
        self._tables: dict[str, TableState] = {}
        self._plan: SyncPlan | None = None
        self._rings: dict[str, RankedRing] = {}
        self._closed_until = closed_until(self._store)
        self._complete_until: int | None = None
        self._began_ms = int(time.time() * 1000)

    def cycle(self) -> None:
        """Publish what is settled.

        :raises StepError: the counts do not reconcile
        """
        self._complete_until = None
        now_ms = int(time.time() * 1000)
        plan = self._read_plan(now_ms)
        self._close_buckets(plan, now_ms)
        self._read_commits()
        for state in self._tables.values():
            state.follow_ups.catch_up()
            settled = self._settled(state, now_ms)
            if settled and self._publish(state, settled, now_ms):
                state.follow_ups.catch_up()
        self._retire()
        self._complete_until = self._closed_until

    def _read_plan(self, now_ms: int) -> SyncPlan:
        interval = interval_at(now_ms, self._config.commitlog_processor_window_interval_ms)
        if self._plan is None or self._plan.interval != interval:
            self._plan = plan_of(self._store, self._config, self._session, interval)
            self._rings = {keyspace: ranked(self._plan.ring(keyspace)) for keyspace in self._plan.replications}
            for table in self._plan.tables:
                if table.table_id not in self._tables:
                    follow_ups = FollowUps(
                        self._application, table, self._context, self._control.address, self._feed.announce
                    )
                    self._feed.watch(table.topic)
                    self._tables[table.table_id] = TableState(table, follow_ups)
                self._tables[table.table_id].follow_ups.ring = self._rings[table.schema.keyspace]
        return self._plan

    def _close_buckets(self, plan: SyncPlan, now_ms: int) -> None:
        """Close what is old enough: once every live node has staged what it logged then, or patience is over."""
        length = plan.interval.length
        window = (self._config.commitlog_processor_window_count - 1) * length
        seen = self._clear_at()
        clear = min((seen.get(host.id, 0) for host in plan.hosts if host.up), default=now_ms)
        until = min(now_ms, clear) - window
        if now_ms - self._began_ms > window + length:
            until = max(until, now_ms - 2 * window - length)
        until = until // length * length
        if until > self._closed_until:
            put_closed_until(self._store, until)
            self._closed_until = until

    def _clear_at(self) -> dict[str, int]:
        """By host id the last moment (ms) at which all that the node had synced was staged."""
        found: dict[str, int] = {}
        for queue in self._config.sync.queues:
            try:
                status = json.loads(self._store.get(f"status/commitlog_stage/{queue}.json"))
            except NotFoundError:
                continue
            found |= {node: int(one["clear_at_ms"]) for node, one in status["nodes"].items()}
        return found

    def _read_commits(self) -> None:
        """Take in what was staged since; of a table that is not in the plan yet in a later cycle."""
        listed = commit_keys(self._store)
        for key in self._commits.keys() - set(listed):
            del self._commits[key]
        for key in listed:
            if key in self._commits:
                continue
            try:
                found = get_commit(self._store, key)
            except NotFoundError:
                continue  # its segment was finished long ago
            files = [file for file in found.files if file.bucket]
            if all(file.table_id in self._tables for file in files):
                self._commits[key] = found
                for file in files:
                    buckets, bucket = self._tables[file.table_id].buckets, Bucket.parse(file.bucket)
                    buckets.setdefault(bucket, OpenBucket(bucket)).files[file.key] = (found.node, file)

    def _settled(self, state: TableState, now_ms: int) -> list[Settled]:
        ring = self._rings[state.table.schema.keyspace]
        return settle_together(state.buckets, ring, now_ms, closed_until=self._closed_until, most=PASS_ROWS)

    def _publish(self, state: TableState, settled: Sequence[Settled], settled_at_ms: int) -> bool:
        """Make a pass, unless all was published before.

        :param settled_at_ms: ms since the epoch
        :returns: False: another process has made a pass meanwhile; all is done anew in the next cycle
        """
        follow_ups = state.follow_ups
        number = follow_ups.last + 1
        context = PassContext(
            config_path=self._application.config_path,
            reader=self._reader(state),
            topic=follow_ups.topic,
            number=number,
            attempt=secrets.token_hex(4),
            bootstrap=follow_ups.bootstrap,
            late=False,
            endpoints={host.id: host.address for host in (self._plan.hosts if self._plan else ())},
            schema_version=follow_ups.schema_version,
        )
        passes, by_arrival = follow_ups.passes, state.table.by_arrival
        published = {one.bucket: published_before(passes, one, by_arrival, time.time() * 1000) for one in settled}
        slices = cut(settled, published)
        results: list[SliceResult] = []
        if slices:
            task = CloseTask(context, by_arrival)
            # A task for each core: all slices of one share the files that it has decoded.
            tasks = min(len(slices), self._context.defaultParallelism)
            results = self._context.parallelize(slices, tasks).mapPartitions(task).collect()
        counts = count(settled, results)
        outputs = [result.outputs for result in results if result.outputs]
        if outputs:
            made = commit(self._store, context, outputs, counts)
            if made is None:
                return False
            follow_ups.made(made)
        ring = self._rings[state.table.schema.keyspace].ring.digest
        for one in settled:
            state.buckets[one.bucket].published(one, ring)
        state.counts.update({**counts, "messages": sum(one.messages for one in outputs)})
        state.lags_ms = [lag for one in outputs for lag in one.lags_ms] or state.lags_ms
        if outputs and not counts["at_close"]:
            state.agreement_ms = [lag - (one.made_at_ms - settled_at_ms) for one in outputs for lag in one.lags_ms]
        return True

    def _reader(self, state: TableState) -> AfterReader:
        return state.follow_ups.reader(self._config.sync.after_image_of(state.table.schema.full_name))

    def _retire(self) -> None:
        """Forget closed buckets all of whose files are published, and commits all of whose files are forgotten."""
        for state in self._tables.values():
            for bucket, one in list(state.buckets.items()):
                if bucket.end <= self._closed_until and one.files.keys() <= one.united:
                    state.counts["copies"] += sum(file.rows for _, file in one.files.values())
                    del state.buckets[bucket]
        open_files = {key for state in self._tables.values() for one in state.buckets.values() for key in one.files}
        last: dict[tuple[str, int], int] = defaultdict(int)
        for found in self._commits.values():
            place = (found.node, found.segment_id)
            last[place] = max(last[place], found.start)
        for key, found in list(self._commits.items()):
            files = [file for file in found.files if file.bucket]
            is_last = last[found.node, found.segment_id] == found.start
            if not any(file.key in open_files for file in files) and (files or not is_last):
                retire_commit(self._store, found, is_last=is_last)
                self._commits[key] = replace(found, files=())
                if not is_last:
                    del self._commits[key]

    def status(self) -> dict[str, Any]:
        """How things stand, by table."""
        return {state.table.schema.full_name: self._status_of(state) for state in self._tables.values()}

    def _status_of(self, state: TableState) -> dict[str, Any]:
        lags, agreements = state.lags_ms, state.agreement_ms
        follow_ups, kafka = state.follow_ups.status(), self._feed.status(state.table.topic) or {}
        return {
            "table_id": state.table.table_id,
            "open_buckets": len(state.buckets),
            "oldest_open_bucket_ms": min((bucket.start for bucket in state.buckets), default=None),
            "rows_published": state.counts["rows"],
            "messages": state.counts["messages"],
            "duplicates": state.counts["repeated"] + state.counts["published_before"],
            "rows_agreed": state.counts["agreed"],
            "rows_read_at_close": state.counts["at_close"],
            "only_one_replica": state.counts["only_one"],
            "lag_ms": {
                "message_p50": int(np.percentile(lags, 50)) if lags else None,
                "message_p99": int(np.percentile(lags, 99)) if lags else None,
                "agreement_p50": int(np.percentile(agreements, 50)) if agreements else None,
            },
            **follow_ups,
            "complete_until_ms": self._complete_until if _is_complete(state, follow_ups, self._closed_until) else None,
            "kafka_messages": kafka.get("messages"),
            "kafka_error": kafka.get("error"),
        }

    def report(self) -> Report:
        """What was published by this run."""
        return {"tables": self.status(), "closed_until_ms": self._closed_until}


def _is_complete(state: TableState, follow_ups: Mapping[str, Any], closed: int) -> bool:
    """Whether the replica has all that was written before the closed buckets' end, but for what came late.

    :param follow_ups: their status
    :param closed: ms since the epoch
    """
    return (
        not state.table.by_arrival
        and not follow_ups["bootstrap"]
        and follow_ups["replica_pass"] == follow_ups["last_pass"]
        and all(bucket.end > closed for bucket in state.buckets)
    )


def published_before(passes: Sequence[Pass], one: Settled, by_arrival: bool, now_ms: float) -> tuple[str, ...]:
    """Keys of the digests among which those of a bucket's rows are, if the rows were published before.

    Copies of rows whose writers set the time may have been in any bucket: what a node gets by a hint comes hours after
    what the others had. And a slow stage may have laid rows into an older bucket than theirs.

    :param passes: all that have not been forgotten
    :param by_arrival: rows belong to the bucket of their arrival; maybe only since lately
    :param now_ms: ms since the epoch
    """
    if one.everywhere:
        return digest_keys(passes, {str(one.bucket)}, min(one.bucket.start, now_ms - REPEATED_MS))
    oldest = "" if by_arrival else str(one.bucket)
    buckets = {bucket for known in passes for bucket in known.digests if bucket >= oldest}
    return digest_keys(passes, buckets, -math.inf)


def count(settled: Sequence[Settled], results: Iterable[SliceResult]) -> Counter[str]:
    """Add up what tasks have read and what became of it; 0 for what there was nothing of.

    :raises StepError: a row has no outcome, or a range had other rows than its digests say
    """
    total: Counter[str] = Counter()
    for result in results:
        rows = result.outputs.rows if result.outputs else 0
        total.update(
            read=result.read,
            repeated=result.repeated,
            published_before=result.published_before,
            only_one=result.only_one,
            rows=rows,
        )
    for one in settled:
        for _, reading in one.readings:
            total["at_close" if reading.united else "agreed"] += reading.rows
    expected = total["agreed"] + total["at_close"]
    outcomes = total["rows"] + total["repeated"] + total["published_before"]
    if total["read"] != expected or total["read"] != outcomes:
        raise StepError(
            f"the counts do not reconcile: {expected} rows are staged, {total['read']} were read, {outcomes} "
            "accounted for; nothing was published"
        )
    return total
