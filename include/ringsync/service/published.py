"""When all that was written before a moment is in the streams, the replicas and Kafka: ``cdcservice wait``.

The loops go on writing meanwhile, so that "nothing is left" may never be true. What was written before the moment is
followed instead, from place to place: out of the logs, out of the queue of late rows, out of the buckets, and then
behind the numbers of the passes and the names of the stream's buckets that there were by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field

from ringsync.config.sync import Sync
from ringsync.ledger.followed import followed_tables
from ringsync.service.health import unpublished
from ringsync.status import LATE_ROWS, STALE_AFTER_S, STOP_KEY, Status, age_s, read_statuses
from ringsync.steps.sync_plan import SyncPlan
from ringsync.storage.port import NotFoundError, ObjectStore
from ringsync.streams.files import FileStream
from ringsync.streams.kafka.cursor import CursorObject
from ringsync.streams.kafka.errors import CursorError

CLOCKS_MS = 1000
"""The clocks of whoever waits and of the loops' hosts may differ by so much."""

GIVE_UP_AFTER_S = 300.0
"""Who has said nothing for so long is not waited for: Airflow would have started the loop again."""

CLOSE, LATE = "bucket_close/close", "out_of_sequence/queue"

_POLL_S = 0.5


@dataclass(frozen=True)
class Waited:
    """How it ended.

    :ivar left: what is not published, in a sentence; empty: all is
    :ivar notes: what was not waited for, since it will not come
    """

    left: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """Something that is not done yet.

    :ivar loop: the loop that has to do it
    """

    loop: str
    reason: str


@dataclass(frozen=True)
class Seen:
    """How things stand at a moment.

    :ivar statuses: what each loop last said, by loop
    :ivar plan: the newest; None: there is none yet
    :ivar followed: ids of tables that ``bucket_close`` has to follow to their end, planned or not
    """

    statuses: Mapping[str, Status]
    plan: SyncPlan | None
    followed: Set[str] = frozenset()

    @property
    def close(self) -> Status:
        """What ``bucket_close`` says."""
        return self.statuses.get(CLOSE, {})

    @property
    def tables(self) -> Mapping[str, Status]:
        """What it says of each table."""
        found: Mapping[str, Status] = self.close.get("tables", {})
        return found


@dataclass
class _Eyes:
    """Looks at the store; a plan, which may be large, is read once."""

    store: ObjectStore
    key: str = ""
    plan: SyncPlan | None = None

    def look(self) -> Seen:
        """
        :raises StorageError: the store cannot be read
        """
        keys = [stat.key for stat in self.store.list("plans/sync/")]
        if keys and keys[-1] != self.key:
            with suppress(NotFoundError):  # it is old, and removed since: the next look finds a newer one
                self.plan, self.key = SyncPlan.from_json(self.store.get(keys[-1])), keys[-1]
        return Seen(read_statuses(self.store), self.plan, followed_tables(self.store).keys())


class _NotPublishedError(Exception):
    """It is of no use to wait longer; the message says for what."""


@dataclass
class _Patience:
    """Waits for one thing after the other.

    :ivar end: seconds since the epoch
    """

    store: ObjectStore
    end: float
    tell: Callable[[str], None]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    began: float = field(init=False)
    eyes: _Eyes = field(init=False)

    def __post_init__(self) -> None:
        self.began, self.eyes = self.clock(), _Eyes(self.store)

    def until_nothing(self, left: Callable[[Seen], Iterable[Left]]) -> Seen:
        """Look again and again until nothing is left.

        :returns: what was seen then
        :raises _NotPublishedError: the time is over, or who has to do it does not run
        """
        while True:
            seen = self.eyes.look()
            found = list(left(seen))
            if not found:
                return seen
            if self.store.stat(STOP_KEY) is not None:
                raise _NotPublishedError(f"the sync is stopped: cdcservice start. {found[0].reason}")
            silent = {one.loop: self._silence_s(seen, one.loop) for one in found}
            loop = max(silent, key=lambda loop: silent[loop])
            reason = found[0].reason
            if silent[loop] > STALE_AFTER_S:
                reason = f"{loop} does not run: no sign of life for {silent[loop]:.0f} s"
            if silent[loop] > GIVE_UP_AFTER_S or self.clock() >= self.end:
                raise _NotPublishedError(reason)
            self.tell(reason)
            self.sleep(_POLL_S)

    def _silence_s(self, seen: Seen, loop: str) -> float:
        status, now_s = seen.statuses.get(loop), self.clock()
        return now_s - self.began if status is None else age_s(status, now_s)


def wait_until_published(
    store: ObjectStore,
    sync: Sync,
    synced_ms: int,
    timeout_s: float,
    kafka: bool = False,
    tell: Callable[[str], None] = lambda left: None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Waited:
    """Wait until all that the nodes had synced to their commit logs by a moment is in streams, replicas and Kafka.

    :param synced_ms: ms since the epoch: of the last write, and the nodes' ``commitlog_sync_period``
    :param timeout_s: seconds
    :param kafka: whether there is one
    :param tell: called with what is left, again and again
    :raises StorageError: the store cannot be read
    """
    patience = _Patience(store, clock() + timeout_s, tell, clock, sleep)

    def now_ms() -> int:
        return int(clock() * 1000) + CLOCKS_MS

    try:
        patience.until_nothing(lambda seen: logs_left(seen, sync, synced_ms + CLOCKS_MS))
        # Whatever was written lies in buckets that had begun by now, or in files of late rows; when a bucket is closed,
        # rows of which it cannot be known what they have come to go there, too.
        staged_ms = now_ms()
        patience.until_nothing(lambda seen: buckets_left(seen, staged_ms, staged_ms))
        files = {stat.key for stat in store.list(LATE_ROWS)}
        patience.until_nothing(lambda seen: late_left(store, seen, files))
        late_ms = now_ms()
        seen = patience.until_nothing(lambda seen: buckets_left(seen, staged_ms, late_ms))
        passes = {table: None if one.get("bootstrap") else int(one["last_pass"]) for table, one in seen.tables.items()}
        seen = patience.until_nothing(lambda seen: passes_left(seen, passes))
        if kafka:
            buckets: dict[str, set[str]] = {}
            seen = patience.until_nothing(lambda seen: kafka_left(store, seen, buckets))
    except _NotPublishedError as error:
        return Waited(str(error), ())
    return Waited("", tuple(_notes(seen)))


def logs_left(seen: Seen, sync: Sync, synced_ms: int) -> Iterator[Left]:
    """Nodes whose logs are not staged up to a moment; those that are down are not waited for.

    Tables are known by the plan: one that was made before may lack a table that was written to.
    """
    if seen.plan is None or seen.plan.interval.start < synced_ms:
        yield Left(CLOSE, "the loops have not begun the next window interval")
        return
    for host in seen.plan.read_hosts:
        if not host.up:
            continue
        loop = f"commitlog_stage/{sync.queue_of(host.address, host.id)}"
        status = seen.statuses.get(loop, {})
        node = status.get("nodes", {}).get(host.id)
        if node is None:
            yield Left(loop, f"the log of node {host.endpoint} is not read: {status.get('error') or f'{loop} has not'}")
        elif int(node["clear_at_ms"]) < synced_ms:
            reason = node.get("error") or status.get("error") or f"{node.get('backlog_bytes', 0):,} bytes are left"
            yield Left(loop, f"the log of node {host.endpoint} is not staged: {reason}")


def late_left(store: ObjectStore, seen: Seen, files: set[str]) -> Iterator[Left]:
    """Files of late rows that are still there: each is removed when all its rows are published.

    :param files: keys of the files to wait for, also of tables that are gone: they are removed soon
    """
    left = files & {stat.key for stat in store.list(LATE_ROWS)}
    if left:
        late = seen.statuses.get(LATE, {})
        reason = f"{len(left):,} files of late rows are not published, {late.get('waiting') or 0:,} rows wait"
        broken = f"{late['files_broken']:,} files cannot be read" if late.get("files_broken") else ""
        yield Left(LATE, ": ".join(filter(None, (reason, late.get("error") or broken))))


def _unseen(seen: Seen) -> Iterator[Left]:
    """Tables that are to be followed, planned or not, and that ``bucket_close`` does not tell of."""
    for table_id in sorted(seen.followed - {one.get("table_id") for one in seen.tables.values()}):
        yield Left(CLOSE, f"bucket_close has not looked at table id {table_id} yet")


def buckets_left(seen: Seen, staged_ms: int, late_ms: int) -> Iterator[Left]:
    """Buckets that began before a moment, and are not wholly published.

    :param staged_ms: time when all rows were staged, ms since the epoch
    :param late_ms: time when all late rows were published, ms since the epoch
    """
    close = seen.close
    if close.get("error"):
        yield Left(CLOSE, f"bucket_close: {close['error']}")
    elif int(close.get("began_ms", 0)) < max(staged_ms, late_ms):
        yield Left(CLOSE, "bucket_close has not looked since")
    else:
        for reason in unpublished("bucket_close", close):
            yield Left(CLOSE, reason)
        yield from _unseen(seen)
        for table, one in seen.tables.items():
            oldest = one.get("oldest_open_bucket_ms")
            if oldest is not None and oldest <= staged_ms:
                yield Left(CLOSE, f"{table}: {_error(one) or 'its oldest bucket is not closed'}")


def passes_left(seen: Seen, passes: dict[str, int | None]) -> Iterator[Left]:
    """Tables whose stream or replica do not have all passes; those without a replica are not waited for.

    :param passes: the last pass to wait for, by table; None: the table is being bootstrapped, and its number follows
    """
    yield from _unseen(seen)
    planned = {table.schema.full_name for table in seen.plan.tables} if seen.plan else set()
    for table in sorted(passes):
        one = seen.tables.get(table)
        if one is None:
            if table in planned:  # one that is not has come to its end
                yield Left(CLOSE, "bucket_close has not looked since")
            continue
        if one.get("bootstrap"):
            yield Left(CLOSE, f"{table} is being bootstrapped ({one['bootstrap']}): its changes wait")
            continue
        if one.get("error"):  # maybe its passes could not even be looked up
            yield Left(CLOSE, f"{table}: {one['error']}")
            continue
        last = passes[table] = int(one["last_pass"]) if (known := passes[table]) is None else known
        if one.get("published_pass", last) < last:
            yield Left(CLOSE, f"the stream of {table} has pass {one['published_pass']} of {last}")
        elif one.get("replica_error"):
            yield Left(CLOSE, f"the replica of {table} is not kept in step: {one['replica_error']}")
        elif one["replica_pass"] is not None and one["replica_pass"] < last:
            yield Left(CLOSE, f"the replica of {table} has pass {one['replica_pass']} of {last}")


def kafka_left(store: ObjectStore, seen: Seen, buckets: dict[str, set[str]]) -> Iterator[Left]:
    """Buckets of the streams that Kafka does not have.

    :param buckets: the buckets to wait for, by topic: all that are published when this is first asked
    """
    yield from _unseen(seen)
    topics = {one["topic"]: str(one.get("kafka_error") or "") for one in seen.tables.values() if "topic" in one}
    for topic in sorted(topics.keys() | {table.topic for table in (seen.plan.tables if seen.plan else ())}):
        if topic not in buckets:
            buckets[topic] = set(FileStream(store, topic).buckets())
        if not buckets[topic]:
            continue
        try:
            cursor = CursorObject(store, topic, topic).load()
        except CursorError as error:
            yield Left(CLOSE, str(error))
            continue
        buckets[topic] = {bucket for bucket in buckets[topic] if bucket not in cursor}
        if buckets[topic]:
            reason = f"Kafka lacks {len(buckets[topic]):,} buckets of {topic}"
            yield Left(CLOSE, ": ".join(filter(None, (reason, topics.get(topic)))))


def _notes(seen: Seen) -> Iterator[str]:
    for host in seen.plan.hosts if seen.plan else ():
        if not host.is_read:
            yield f"node {host.endpoint} is not read (sync.datacenters): what only it has logged does not come"
        elif not host.up:
            yield f"node {host.endpoint} is down: what only it has logged comes when it is back"
    for table, one in seen.tables.items():
        if one["replica_pass"] is None:
            yield f"{table} has no replica: cdcservice bootstrap --table {table} makes one"


def _error(one: Status) -> str:
    """What a table says is wrong, but for Kafka."""
    return next(
        (str(value) for key, value in one.items() if key.endswith("error") and value and "kafka" not in key), ""
    )
