"""The steps after a pass: its folder of the stream, its images in the replica, its messages in Kafka.

All of them work on committed passes, in their order, and may be repeated after a kill at any point: a manifest
publishes a folder once, the replica takes each pass once, and the relay to Kafka has a cursor.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ringsync.cluster.control import ControlAddress
from ringsync.config import Config
from ringsync.ledger.passes import Pass, check_goes_on, forget_pass, get_pass, pass_numbers, passes_behind
from ringsync.ledger.table_versions import TableVersionError, latest_version, next_version
from ringsync.ledger.topic_owners import tables_before, take_topic
from ringsync.ledger.tries import list_tries, lost_tries, remove_tries
from ringsync.replica.base import transaction_of
from ringsync.replica.changes import CLOCK_SKEW_US, ReplicaState, StaleStateError, append_pass
from ringsync.replica.delta_log import KnownSnapshots, read_snapshot
from ringsync.replica.errors import ReplicaMismatchError, ReplicaWaitsError, SchemaChangedError
from ringsync.replica.folders import base_folder
from ringsync.ring.ranks import RankedRing
from ringsync.ring.ring import Host
from ringsync.steps.application import Application, StepError
from ringsync.steps.passes.behind import lag_until_ms
from ringsync.steps.passes.make import PassContext, commit
from ringsync.steps.passes.missed_rows import TOLD_AGAIN, MissedRows, Owed, owed
from ringsync.steps.passes.replica_task import ReplicaTask
from ringsync.steps.passes.rows_after import AfterReader, Mode
from ringsync.steps.replica.follow_schema import followed_state
from ringsync.steps.sync_plan import SyncTable
from ringsync.storage import delta_options
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, StreamConflictError, StreamDamagedError, bootstrap_topic
from ringsync.streams.messages import envelope_schema, key_schema

FORGOTTEN_LATER_MS = 600_000
"""Time for which passes are kept beyond a bootstrap's need: one may begin while they are being removed."""

ASKED_EVERY_S = 60.0
"""Time between two reads of an idle replica: it may have been bootstrapped, or its table altered."""

SWEEP_EVERY_S = 6 * 3600.0
"""Least time between two searches for what failed tries have left; the first follows a run's first pass."""


def digests_kept_ms(config: Config) -> int:
    """Return how long copies of published rows may come and must be known."""
    return int(config.sync.digest_retention_h * 3_600_000)


def put_schemas(store: ObjectStore, config: Config, table: SyncTable, topic: str) -> int:
    """Put the schemas of messages beside a stream of a table.

    :returns: their version: the table's, or a new one if messages of this version had another form, because the
        configuration or ringsync was another
    """
    key, value = (
        make(table.schema, config.server_name, config.stream.mapping) for make in (key_schema, envelope_schema)
    )
    version = table.version
    while True:
        try:
            for name in {table.topic: None, topic: None}:
                FileStream(store, name).put_schemas(version.number, key, value)
        except StreamConflictError:
            version = next_version(store, version)
        else:
            return version.number


def publish_passes(
    store: ObjectStore,
    config: Config,
    table: SyncTable,
    announce: Callable[[str, str], None] = lambda topic, folder: None,
    *,
    gone: bool = False,
) -> None:
    """Make visible, in their order, the folders of a table's passes that are not visible yet.

    :param announce: called with the topic and the folder that has become visible
    :param gone: whether another table has the topic by now: a folder that cannot become visible is logged and left out
    """
    passes = {number: get_pass(store, table.table_id, number) for number in pass_numbers(store, table.table_id)}
    done = last_published(store, table, passes)
    for number in sorted(passes):
        if number > done:
            publish_pass(store, config, table, passes, number, announce, gone=gone)


def last_published(store: ObjectStore, table: SyncTable, passes: Mapping[int, Pass]) -> int:
    """Return the last pass whose folder is visible: all before it are visible, too."""
    streams = [FileStream(store, topic) for topic in (table.topic, bootstrap_topic(table.topic))]
    for number in sorted(passes, reverse=True):
        made = passes[number]
        # If the topic's owners were lost, another table's folder may be there: then this pass's folder is not visible.
        if made.kind in ("changes", "rows") and any(
            stream.parts(made.folder) == list(made.parts) for stream in streams
        ):
            return number
    return 0


def publish_pass(
    store: ObjectStore,
    config: Config,
    table: SyncTable,
    passes: Mapping[int, Pass],
    number: int,
    announce: Callable[[str, str], None] = lambda topic, folder: None,
    *,
    gone: bool = False,
) -> None:
    """Make a pass's folder of the stream visible.

    A cut-over moves the folders that have waited in the bootstrap stream to the table's stream. So does the begin of a
    bootstrap that replaces an unfinished one: they come before the new one's rows. The start of a table that was
    created again makes all passes of the old table visible.

    :param passes: all up to this number, and the known ones behind it
    :param announce: called with the topic and the folder that has become visible
    :param gone: see :func:`publish_passes`
    :raises StreamDamagedError: a folder cannot become visible
    :raises StepError: another table's folder has its place: the topic's owners were lost
    """
    made = passes[number]
    waiting, stream = FileStream(store, bootstrap_topic(table.topic)), FileStream(store, table.topic)
    if made.kind == "changes" and made.bootstrap:
        # Moved already, if this is done again after the cut-over.
        if stream.parts(made.folder) is None:
            waiting.publish(made.folder, made.parts)
    elif made.kind in ("changes", "rows"):
        begun_anew = any(later > number and passes[later].kind == "begin" for later in passes)
        with _named(table, gone, made, replaced=made.kind == "rows" and begun_anew):
            stream.publish(made.folder, made.parts)
            announce(stream.topic, made.folder)
    elif made.kind == "start":
        if before := _table_before(store, table):
            publish_passes(store, config, before, announce, gone=True)
    elif left := _since_cutover(passes, number):
        if table.version.number:
            put_schemas(store, config, table, waiting.topic)
        for moved in left:
            with _named(table, gone, moved):
                waiting.move(moved.folder, moved.parts, stream)
                announce(stream.topic, moved.folder)


def _table_before(store: ObjectStore, table: SyncTable) -> SyncTable | None:
    """Return the table that had the topic before this one; None: there is none that was followed.

    If its version is damaged, it has number 0 and this table's columns: to make its passes visible, only its id counts.
    """
    for table_id in tables_before(store, table.topic, table.table_id):
        try:
            version = latest_version(store, table_id)
        except TableVersionError as error:
            print(f"ringsync: warning: {table.schema.full_name} was dropped and created again: {error}", flush=True)
            version = replace(table.version, table=replace(table.schema, table_id=table_id), number=0)
        if version is not None:  # without a version it was never followed, and the one before it not by this one
            return SyncTable(version, table.topic, by_arrival=False)
    return None


@contextmanager
def _named(table: SyncTable, gone: bool, made: Pass, replaced: bool = False) -> Iterator[None]:
    """Report why a folder cannot become visible. If the table is gone, or its rows are being copied anew, this is only
    a warning."""
    try:
        yield
    except (StreamDamagedError, StreamConflictError) as error:
        name = f"{table.schema.full_name} (table id {table.table_id})"
        if gone:
            print(
                f"ringsync: warning: {name} is gone, and a folder of it is left out of its stream: {error}", flush=True
            )
        elif replaced:
            print(
                f"ringsync: warning: rows of bootstrap {made.bootstrap} of {name} are left out of its stream, since it "
                f"is bootstrapped anew: {error}",
                flush=True,
            )
        elif isinstance(error, StreamConflictError):
            raise StepError(
                f"{error}. Another table has had the topic of {name}, and who had it was lost: drop the table and "
                "create it again, and bootstrap it"
            ) from error
        elif made.kind == "rows":
            raise StreamDamagedError(f"{error}; {name} goes on when it is bootstrapped anew, with restart") from error
        else:
            raise


def _since_cutover(passes: Mapping[int, Pass], number: int) -> list[Pass]:
    """Return the passes before this one that wait in the bootstrap stream."""
    waiting: list[Pass] = []
    for before in (passes[known] for known in sorted(passes) if known < number):
        if before.kind == "cutover":
            waiting.clear()
        elif before.kind == "changes" and before.bootstrap:
            waiting.append(before)
    return waiting


class FollowUps:
    """What follows from the passes of one table.

    :param context: Spark's
    :param control: keeps the limits of reading the cluster
    :param announce: called with the topic and the folder of everything that becomes visible
    :raises TableReplacedError: here, in :meth:`refresh` and :meth:`catch_up`: another table has the topic by now
    """

    def __init__(
        self,
        application: Application,
        table: SyncTable,
        context: Any,
        control: ControlAddress,
        announce: Callable[[str, str], None] = lambda topic, folder: None,
    ) -> None:
        self._application = application
        self._store, self._table = application.store, table
        self._context, self._control, self._announce = context, control, announce
        self.ring: RankedRing | None = None
        self._passes: dict[int, Pass] = {}
        take_topic(self._store, table.topic, table.table_id, int(time.time() * 1000))
        self.refresh()
        self._mismatch: str | None = None
        self._waits = self._has_new = False
        self._asked: tuple[ReplicaState | None, int, float] | None = None  # state, last pass then, monotonic time, s
        self._published, self._owed_at = last_published(self._store, table, self._passes), 0
        self._owed: tuple[Owed, ...] = ()
        self._swept_at: float | None = None
        self._versions: dict[str, int] = {}
        self._snapshots: KnownSnapshots = {}
        self.replica_lag_ms: int | None = None

    def follow(self, table: SyncTable) -> None:
        """Go on with a newer version of the table."""
        self._table = table
        self._versions.clear()
        self._asked = None

    @property
    def last(self) -> int:
        """The number of the last pass; 0: there is none."""
        return max(self._passes, default=0)

    @property
    def passes(self) -> Sequence[Pass]:
        """The passes that are kept, in their order."""
        return [self._passes[number] for number in sorted(self._passes)]

    @property
    def bootstrap(self) -> str:
        """The bootstrap that is going on; empty: none."""
        latest = self._passes.get(self.last)
        return "" if latest is None or latest.kind == "cutover" else latest.bootstrap

    @property
    def topic(self) -> str:
        """The topic of the next pass's messages."""
        return bootstrap_topic(self._table.topic) if self.bootstrap else self._table.topic

    @property
    def schema_version(self) -> int:
        """Version of the stream's schemas, which are put beside it if they are missing."""
        if self.topic not in self._versions:
            self._versions[self.topic] = put_schemas(self._store, self._application.config, self._table, self.topic)
        return self._versions[self.topic]

    def reader(self, mode: Mode) -> AfterReader:
        """Return the reader with which tasks find the rows after changes of the next pass."""
        replica = self._replica()
        # During a bootstrap, and while another process is behind, the replica lacks passes.
        return self._reader(mode, replica if replica is not None and replica.applied == self.last else None, self.last)

    def _reader(self, mode: Mode, replica: ReplicaState | None, last: int) -> AfterReader:
        """Return the reader with which tasks find the rows after changes of the pass that follows ``last``."""
        assert self.ring is not None
        config, name, epoch = self._application.config, self._table.schema.full_name, self.ring.ring.epoch
        return AfterReader(
            config=config,
            version=self._table.version,
            mode=mode,
            ring=self.ring,
            control=self._control,
            replica=replica,
            before=config.sync.after_image_of(name) == "replica",
            expand=config.sync.expand_deletions_of(name),
            deletions=tuple(
                (key, made.deleted_until_us)
                for made in self.passes
                if mode == "replica" and made.number <= last
                for key in made.deletions
            ),
            deletions_known_from_us=max(replica.deletions_known_from_us, self._kept_since_us()) if replica else 0,
            # A node that was down or has joined lacks some of what was published before until it has its hints.
            one_is_enough=all(made.is_everywhere(epoch) for made in self.passes if made.kind == "changes"),
            disagreed=any(made.has_other_replication(epoch) for made in self.passes),
        )

    def context(self, reader: AfterReader, hosts: Iterable[Host] = (), *, late: bool) -> PassContext:
        """Return what the tasks of the next pass need to know."""
        return PassContext(
            reader=reader,
            topic=self.topic,
            number=self.last + 1,
            attempt=secrets.token_hex(4),
            bootstrap=self.bootstrap,
            late=late,
            endpoints={host.id: host.address for host in hosts},
            schema_version=self.schema_version,
        )

    def _kept_since_us(self) -> int:
        """Return since when all deletions of partitions and ranges are known, µs. Their passes are kept for a time, and
        some minutes more for clocks that differ; forgotten passes do not come back when that time is made longer."""
        since_us = int(time.time() * 1_000_000) - digests_kept_ms(self._application.config) * 1000
        oldest = self._passes.get(min(self._passes, default=0))
        if oldest is None or oldest.number == 1 or oldest.kind == "start":
            return since_us
        return max(since_us, oldest.created_at_ms * 1000 + CLOCK_SKEW_US)

    def _replica(self) -> ReplicaState | None:
        """Read the replica's state; None: the table has none, or none that can follow its changes."""
        options = delta_options(**self._application.config.store.model_dump())
        try:
            state = followed_state(self._store, self._table.schema, options, self._snapshots)
            self._mismatch = self._unusable(state) if state else None
            self._waits = False
        except ReplicaMismatchError as error:
            state, self._mismatch = None, str(error)
            self._waits = isinstance(error, ReplicaWaitsError)
        usable = state if self._mismatch is None else None
        self._asked = usable, self.last, time.monotonic()
        return usable

    def _unusable(self, state: ReplicaState) -> str | None:
        """Tell why a replica cannot follow the changes; None: it can."""
        if not state.whole:
            return "only a selection was copied: it is not kept in sync"
        if self._passes and state.applied + 1 < (oldest := min(self._passes)):
            return (
                f"the replica has pass {state.applied}, and those before {oldest} are not kept any more: trigger "
                "bootstrap_table again"
            )
        return None

    def _replica_lately(self) -> ReplicaState | None:
        """Return the replica's state; that of an idle table is read once a minute."""
        if self._asked is not None:
            state, last, asked_at = self._asked
            if last == self.last and time.monotonic() - asked_at < ASKED_EVERY_S:
                return state
        return self._replica()

    def made(self, new: Pass) -> None:
        """Take note of a pass that this process has committed."""
        self._passes[new.number] = new

    def refresh(self) -> None:
        """Take in passes that others have made or forgotten."""
        numbers = pass_numbers(self._store, self._table.table_id)
        known = self._passes
        self._passes = {
            number: known.get(number) or get_pass(self._store, self._table.table_id, number) for number in numbers
        }
        check_goes_on(self._passes.get(self.last))

    def catch_up(self) -> bool:
        """Do what is left to do for all passes, and now and then remove what failed tries have left.

        :returns: False: the replica takes more passes in the next turn
        """
        # Listed before the passes are read: a try that becomes a pass meanwhile is known by it.
        # Only after this run's first pass, and seldom after that: an idle table costs nothing.
        is_due = self._swept_at is None or time.monotonic() - self._swept_at >= SWEEP_EVERY_S
        tries = list_tries(self._store, self._table.table_id) if self._has_new and is_due else None
        for new in passes_behind(self._store, self._table.table_id, self.last):
            self.made(new)
        check_goes_on(self._passes.get(self.last))
        self._publish()
        if tries is not None:
            topics = [self._table.topic, bootstrap_topic(self._table.topic)]
            lost = lost_tries(tries, self._passes, self._published)
            remove_tries(self._store, self._table.table_id, topics, lost)
            self._swept_at, self._has_new = time.monotonic(), False
        has_all = self._update_replica()
        self._forget()
        return has_all

    def tell_missed(self) -> None:
        """Make the pass that a bootstrap owes, once the replica has all passes; last, so that nothing waits for it."""
        state = self._replica_lately() if self._debts() and not self.bootstrap else None
        if state is not None and state.applied == self.last and self._told_again(state, self._debts()[0]):
            self._publish()
            self._update_replica()

    def _publish(self) -> None:
        for number in sorted(self._passes):
            if number > self._published:
                publish_pass(self._store, self._application.config, self._table, self._passes, number, self._announce)
                self._published, self._has_new = number, True

    def _update_replica(self) -> bool:
        """Bring the replica up to the last pass; during a bootstrap the replica waits for the base that it makes.

        :returns: False: the replica lacks passes, but the table's turn is over: it took at least a cycle's time
        """
        end = time.monotonic() + self._application.config.sync.poll_interval_ms / 1000
        while not self.bootstrap:
            state = self._replica_lately()
            if state is None or not (waiting := [number for number in sorted(self._passes) if number > state.applied]):
                break
            next_pass = self._passes[waiting[0]]
            reader = self._reader("replica", state, next_pass.number - 1)
            # The live replicas may have agreed on changes that most replicas lack.
            if next_pass.late or not next_pass.is_everywhere(reader.ring.ring.epoch):
                reader = replace(reader, disagreed=True)
            files = []
            if changes := next_pass.changes:
                tasks = self._context.parallelize(changes, len(changes))
                files = tasks.mapPartitions(ReplicaTask(reader, next_pass.number)).collect()
            now_ms = int(time.time() * 1000)
            try:
                append_pass(self._store, self._table.schema, next_pass.number, files, now_ms, seen=state)
                self.replica_lag_ms = lag_until_ms(next_pass, now_ms)
            except (StaleStateError, SchemaChangedError) as error:
                print(f"ringsync: {error}", flush=True)
            self._asked = None
            if len(waiting) > 1 and time.monotonic() >= end:
                return False
        return True

    def _debts(self) -> tuple[Owed, ...]:
        if self._owed_at != self.last:
            config = self._application.config
            only_changes = config.sync.after_image_of(self._table.schema.full_name) == "none"
            self._owed = () if only_changes else owed(self.passes, digests_kept_ms(config))
            self._owed_at = self.last
        return self._owed

    def _told_again(self, state: ReplicaState, debt: Owed) -> bool:
        """Make the pass that a bootstrap owes.

        :returns: False: another process has made a pass meanwhile
        """
        schema = self._table.schema
        base = read_snapshot(self._store, base_folder(schema.keyspace, schema.name), self._snapshots)
        context = self.context(self._reader("none", state, self.last), late=True)
        task = MissedRows(context, debt.copied.bootstrap, base.transactions.get(transaction_of(debt.copied.bootstrap)))
        copies = FileStream(self._store, self._table.topic).parts(debt.copied.folder)
        files = [key for missed in reversed(debt.missed) for key in missed.changes] if copies is not None else []
        # One task takes all files: what the newest tells of a row, others need not.
        outputs = self._context.parallelize([files], 1).mapPartitions(task).collect()
        if made := commit(self._store, context, outputs, {TOLD_AGAIN: debt.copied.begin, "everywhere": 1}):
            self.made(made)
        return made is not None

    def _forget(self) -> None:
        """Remove passes that are too old for further copies, of closed buckets, and that no bootstrap needs."""
        state = None if self.bootstrap else self._replica_lately()
        if self.bootstrap or self._waits:  # the replica will take the passes
            return
        done = state.applied if state else self.last
        if state is not None or self._mismatch is not None:
            done = min([done, *(debt.missed[0].number - 1 for debt in self._debts())])
        oldest_ms = time.time() * 1000 - digests_kept_ms(self._application.config) - FORGOTTEN_LATER_MS
        for made in self.passes[:-1]:
            if made.created_at_ms > oldest_ms or made.number > done or made.is_of_open_bucket(self._store):
                break
            forget_pass(self._store, made)
            del self._passes[made.number]  # later than the object: files of an unknown pass are swept

    def is_done(self) -> bool:
        """Tell whether stream and replica, unless it can never follow, have all passes; no, during a bootstrap."""
        if self.bootstrap or self._published < self.last:
            return False
        state = self._replica()
        return not self._waits if state is None else state.applied >= self.last and not self._debts()

    def status(self) -> dict[str, Any]:
        """Return the progress of the table's passes."""
        replica = self._replica_lately()
        return {
            "last_pass": self.last,
            "published_pass": self._published,
            "bootstrap": self.bootstrap,
            "replica_error": self._mismatch,
            "replica_pass": replica.applied if replica else None,
        }
