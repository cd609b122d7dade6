"""Waiting until all writes before a moment are in the streams, the replicas and Kafka: ``cdcservice wait``.

The loops go on writing meanwhile, so "nothing is left" may never be true. Instead, the writes before the moment are
followed from place to place: out of the logs, out of the buckets, and out of the queue of late rows. Then stream,
replica and Kafka have to reach the last pass and the stream's last folder of that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter

from ringsync.config.sync import Sync
from ringsync.ledger.followed import followed_tables
from ringsync.ledger.staging import late_files
from ringsync.ledger.waiting_segments import waiting_keys
from ringsync.service.expected import CLOSE, LOG_STAGE
from ringsync.service.health import unpublished
from ringsync.status import STALE_AFTER_S, STOP_KEY, Status, age_s, read_statuses
from ringsync.steps.sync_plan import SyncPlan, plan_keys
from ringsync.storage.port import NotFoundError, ObjectStore
from ringsync.streams.cursor import CursorObject
from ringsync.streams.files import FileStream
from ringsync.streams.sink import CursorError

CLOCKS_MS = 1000
"""Greatest difference in ms between the clocks of this host and of the loops' hosts."""

GIVE_UP_AFTER_S = 300.0
"""Seconds without a status before we stop waiting for a loop: Airflow would have started it again by then."""

LATE = "out_of_sequence/queue"

_POLL_S = 0.5


@dataclass(frozen=True)
class Waited:
    """The result of waiting.

    :ivar left: sentence on what is not published; empty: all is published
    :ivar notes: sentences on what was not waited for, since it will not come
    """

    left: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """Work that is not done yet.

    :ivar loop: the loop that has to do it
    :ivar reason: sentence on what is left
    """

    loop: str
    reason: str


@dataclass(frozen=True)
class Seen:
    """The state of the sync at a moment.

    :ivar plan: the newest plan; None: there is none yet
    :ivar followed: ids of tables that ``bucket_close`` has to follow to their end, planned or not
    """

    statuses: Mapping[str, Status]
    plan: SyncPlan | None
    followed: Set[str] = frozenset()

    @property
    def tables(self) -> Mapping[str, Status]:
        """The status of each table, by ``bucket_close``."""
        tables: Mapping[str, Status] = self.statuses.get(CLOSE, {}).get("tables", {})
        return tables


class _NotPublishedError(Exception):
    """Waiting longer is of no use; the message says what is left."""


@dataclass
class _Patience:
    """Waiting for one step after the other, until ``end``, seconds since the epoch."""

    store: ObjectStore
    end: float
    tell: Callable[[str], None]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    began: float
    plan: SyncPlan | None = None
    plan_key: str = ""

    def until_nothing(self, left: Callable[[Seen], Iterable[Left]]) -> Seen:
        """Look again and again until nothing is left, and return the state then.

        :raises _NotPublishedError: the time is over, or a loop that has to do the work does not run
        """
        while True:
            seen = self._look()
            undone = list(left(seen))
            if not undone:
                return seen
            if self.store.stat(STOP_KEY) is not None:
                raise _NotPublishedError(f"the sync is stopped: cdcservice start. {undone[0].reason}")
            silences = [(self._silence_s(seen, work.loop), work.loop) for work in undone]
            silent_s, loop = max(silences, key=itemgetter(0))
            reason = undone[0].reason
            if silent_s > STALE_AFTER_S:
                reason = f"{loop} does not run: no sign of life for {silent_s:.0f} s"
            if silent_s > GIVE_UP_AFTER_S or self.clock() >= self.end:
                raise _NotPublishedError(reason)
            self.tell(reason)
            self.sleep(_POLL_S)

    def _look(self) -> Seen:
        """Read the present state of the sync, and each plan, which may be large, once."""
        keys = plan_keys(self.store)
        if keys and keys[-1] != self.plan_key:
            with suppress(NotFoundError):  # it is old, and removed since: the next look finds a newer one
                self.plan, self.plan_key = SyncPlan.from_json(self.store.get(keys[-1])), keys[-1]
        return Seen(read_statuses(self.store), self.plan, followed_tables(self.store).keys())

    def _silence_s(self, seen: Seen, loop: str) -> float:
        status, now_s = seen.statuses.get(loop), self.clock()
        return now_s - self.began if status is None else age_s(status, now_s)


def wait_until_published(
    store: ObjectStore,
    sync: Sync,
    synced_ms: int,
    timeout_s: float,
    kafka: Callable[[str], str] | None = None,
    tell: Callable[[str], None] = lambda left: None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Waited:
    """Wait until all that the nodes had synced to their commit logs by a moment is in streams, replicas and Kafka.

    :param synced_ms: time of the last write plus the nodes' ``commitlog_sync_period``, ms since the epoch. Scylla's CDC
        logs have a write at once
    :param kafka: names Kafka's topic of a stream; None: there is no Kafka
    :param tell: function that is called with what is left, again and again
    :raises StorageError: the store cannot be read
    """
    patience = _Patience(store, clock() + timeout_s, tell, clock, sleep, began=clock())

    def now_ms() -> int:
        return int(clock() * 1000) + CLOCKS_MS

    try:
        patience.until_nothing(lambda seen: logs_left(seen, sync, synced_ms + CLOCKS_MS))
        # What was archived unread is in no log any more.
        archived = {*waiting_keys(store)}
        patience.until_nothing(lambda seen: archive_left(store, archived))
        # All writes are in buckets that have begun by now, or in files of late rows. A closing bucket also moves rows
        # there if their present state cannot be known.
        staged_ms = now_ms()
        patience.until_nothing(lambda seen: buckets_left(seen, staged_ms, staged_ms))
        files = {*late_files(store)}
        patience.until_nothing(lambda seen: late_left(store, seen, files))
        late_ms = now_ms()
        seen = patience.until_nothing(lambda seen: buckets_left(seen, staged_ms, late_ms))
        passes = {
            table: None if status.get("bootstrap") else status.get("last_pass") for table, status in seen.tables.items()
        }
        seen = patience.until_nothing(lambda seen: passes_left(seen, passes))
        if kafka:
            folders: dict[str, set[str]] = {}
            seen = patience.until_nothing(lambda seen: kafka_left(store, kafka, seen, folders))
    except _NotPublishedError as error:
        return Waited(str(error), ())
    return Waited("", tuple(_notes(seen)))


def logs_left(seen: Seen, sync: Sync, synced_ms: int) -> Iterator[Left]:
    """Yield logs that are not staged up to a moment.

    The plan must begin after that moment: an older plan may lack a table that was written to.
    """
    if seen.plan is None or seen.plan.interval.start < synced_ms:
        yield Left(CLOSE, "the loops have not begun the next window interval")
    elif seen.plan.of_scylla:
        yield from _cdc_logs_left(seen.statuses.get(LOG_STAGE), seen.plan, synced_ms)
    else:
        yield from _commit_logs_left(seen, seen.plan, sync, synced_ms)


def _cdc_logs_left(status: Status | None, plan: SyncPlan, synced_ms: int) -> Iterator[Left]:
    """Yield tables whose CDC logs are not read up to a moment, also those that are not planned any more."""
    if status is None:
        yield Left(LOG_STAGE, f"the CDC logs are not read: {LOG_STAGE} has given no sign of life")
        return
    logs: dict[str, Status] = {table.schema.full_name: {} for table in plan.tables}
    logs |= status.get("logs", {})
    for table, log in logs.items():
        is_behind = int(log.get("until_ms") or 0) < synced_ms
        waiting_ms = log.get("waiting_from_ms")
        if is_behind or (waiting_ms is not None and waiting_ms < synced_ms):
            what = "it is being read" if is_behind else f"{log.get('waiting') or 0:,} groups of rows are not complete"
            reason = log.get("error") or status.get("error") or what
            yield Left(LOG_STAGE, f"the CDC log of {table} is not staged: {reason}")


def _commit_logs_left(seen: Seen, plan: SyncPlan, sync: Sync, synced_ms: int) -> Iterator[Left]:
    """Yield nodes whose logs are not staged up to a moment, also those that have left the ring. Nodes that are down are
    not waited for, nor are those that were down when they left, unless their logs can be read.
    """
    former = [one.host for one in plan.former if one.host.is_read]
    for host in (*plan.read_hosts, *former):
        loop = f"commitlog_stage/{sync.queue_of(host.address, host.id)}"
        status = seen.statuses.get(loop, {})
        node = status.get("nodes", {}).get(host.id)
        if not host.up and not (host in former and node and node.get("is_read")):
            continue
        log = f"the log of node {host.endpoint}{', which has left the ring,' if host in former else ''}"
        if node is None:
            yield Left(loop, f"{log} is not read: {status.get('error') or f'{loop} has not'}")
        elif int(node.get("clear_at_ms") or 0) < synced_ms:
            reason = node.get("error") or status.get("error") or f"{node.get('backlog_bytes') or 0:,} bytes are left"
            yield Left(loop, f"{log} is not staged: {reason}")


def archive_left(store: ObjectStore, keys: Set[str]) -> Iterator[Left]:
    """Yield the archived commit logs that ``archive_reprocess`` has not read yet.

    :param keys: keys of the objects to wait for
    """
    left = keys & {*waiting_keys(store)}
    if left:
        yield Left(CLOSE, f"{len(left):,} archived commit logs wait for the DAG archive_reprocess")


def late_left(store: ObjectStore, seen: Seen, files: set[str]) -> Iterator[Left]:
    """Yield the files of late rows that still exist: each is removed when all its rows are published.

    :param files: keys of the files to wait for, also of tables that are gone: they are removed soon
    """
    left = files & {*late_files(store)}
    if left:
        late = seen.statuses.get(LATE, {})
        reason = f"{len(left):,} files of late rows are not published, {late.get('waiting') or 0:,} rows wait"
        broken = f"{late['files_broken']:,} files cannot be read" if late.get("files_broken") else ""
        yield Left(LATE, ": ".join(filter(None, (reason, late.get("error") or broken))))


def _unseen(seen: Seen) -> Iterator[Left]:
    """Yield the tables to follow, planned or not, that are missing in the status of ``bucket_close``."""
    for table_id in sorted(seen.followed - {status.get("table_id") for status in seen.tables.values()}):
        yield Left(CLOSE, f"bucket_close has not looked at table id {table_id} yet")


def buckets_left(seen: Seen, staged_ms: int, late_ms: int) -> Iterator[Left]:
    """Yield the buckets that began before a moment and are not wholly published.

    :param staged_ms: time when all rows were staged, ms since the epoch
    :param late_ms: time when all late rows were published, ms since the epoch
    """
    close = seen.statuses.get(CLOSE, {})
    if close.get("error"):
        yield Left(CLOSE, f"bucket_close: {close['error']}")
    elif int(close.get("began_ms") or 0) < max(staged_ms, late_ms):
        yield Left(CLOSE, "bucket_close has not looked since")
    else:
        for problem in unpublished("bucket_close", close):
            yield Left(CLOSE, problem.text)
        yield from _unseen(seen)
        for table, status in seen.tables.items():
            oldest = status.get("oldest_open_bucket_ms")
            if oldest is not None and oldest <= staged_ms:
                yield Left(CLOSE, f"{table}: {_error(status) or 'its oldest bucket is not closed'}")


def passes_left(seen: Seen, passes: dict[str, int | None]) -> Iterator[Left]:
    """Yield the tables whose stream or replica lacks passes; a table without a replica only needs its stream.

    :param passes: the last pass to wait for, by table; None: the table is being bootstrapped, and its number follows
    """
    yield from _unseen(seen)
    planned = {table.schema.full_name for table in seen.plan.tables} if seen.plan else set()
    for table in sorted(passes):
        if (status := seen.tables.get(table)) is None:
            if table in planned:  # a table that is not planned has come to its end
                yield Left(CLOSE, "bucket_close has not looked since")
        elif status.get("bootstrap"):
            yield Left(CLOSE, f"{table} is being bootstrapped ({status['bootstrap']}): its changes wait")
        elif status.get("error"):  # maybe its passes could not even be looked up
            yield Left(CLOSE, f"{table}: {status['error']}")
        else:
            last = passes[table] = status.get("last_pass") if (known := passes[table]) is None else known
            if last is None:
                yield Left(CLOSE, f"{table}: its last pass is unknown")
            elif (published := status.get("published_pass")) is not None and published < last:
                yield Left(CLOSE, f"the stream of {table} has pass {published} of {last}")
            elif status.get("replica_error"):
                yield Left(CLOSE, f"the replica of {table} is not kept in step: {status['replica_error']}")
            elif status.get("replica_pass") is not None and status["replica_pass"] < last:
                yield Left(CLOSE, f"the replica of {table} has pass {status['replica_pass']} of {last}")


def kafka_left(
    store: ObjectStore, topic_of: Callable[[str], str], seen: Seen, folders: dict[str, set[str]]
) -> Iterator[Left]:
    """Yield the topics whose Kafka copy lacks folders.

    :param topic_of: names Kafka's topic of a stream
    :param folders: the folders to wait for, by topic: all that are published at the first call
    """
    yield from _unseen(seen)
    topics = {
        status["topic"]: str(status.get("kafka_error") or "") for status in seen.tables.values() if status.get("topic")
    }
    for topic in sorted(topics.keys() | {table.topic for table in (seen.plan.tables if seen.plan else ())}):
        if topic not in folders:
            folders[topic] = set(FileStream(store, topic).folders())
        if not folders[topic]:
            continue
        try:
            cursor = CursorObject(store, topic, topic_of(topic)).load()
        except CursorError as error:
            yield Left(CLOSE, str(error))
            continue
        folders[topic] = {folder for folder in folders[topic] if folder not in cursor}
        if folders[topic]:
            reason = f"Kafka lacks {len(folders[topic]):,} folders of {topic}"
            yield Left(CLOSE, ": ".join(filter(None, (reason, topics.get(topic)))))


def _notes(seen: Seen) -> Iterator[str]:
    for host in seen.plan.hosts if seen.plan and not seen.plan.of_scylla else ():
        if not host.is_read:
            yield f"node {host.endpoint} is not read (sync.datacenters): what only it has logged does not come"
        elif not host.up:
            yield f"node {host.endpoint} is down: what only it has logged comes when it is back"
    for table, status in seen.tables.items():
        if status.get("replica_pass") is None:
            yield f"{table} has no replica: cdcservice bootstrap --table {table} makes one"


def _error(status: Status) -> str:
    """Return a table's error, except Kafka's."""
    errors = (str(value) for key, value in status.items() if key.endswith("error") and "kafka" not in key and value)
    return next(errors, "")
