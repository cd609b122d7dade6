"""What follows from a pass: its bucket of the stream, its images in the replica, its messages in Kafka.

Everything here is made from what committed passes say, in their order, and may be repeated after a kill at any point:
a bucket is published once by its manifest, the replica takes each pass once, and Kafka is fed behind a cursor.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ringsync.cluster.control import ControlAddress
from ringsync.config import Config
from ringsync.ledger.passes import Pass, check_goes_on, forget_pass, get_pass, pass_numbers, passes_behind
from ringsync.ledger.table_versions import latest_version
from ringsync.ledger.topic_owners import tables_before, take_topic
from ringsync.ledger.tries import Try, list_tries, lost_tries, remove_tries
from ringsync.replica.base import ReplicaMismatchError, base_folder, transaction_of
from ringsync.replica.changes import CLOCK_SKEW_US, ReplicaState, StaleStateError, append_pass, replica_state
from ringsync.replica.delta_log import KnownSnapshots, read_snapshot
from ringsync.ring.ranks import RankedRing
from ringsync.steps.application import Application, StepError
from ringsync.steps.passes.make import PassContext, commit
from ringsync.steps.passes.missed_rows import TOLD_AGAIN, MissedRows, Owed, owed
from ringsync.steps.passes.replica_task import ReplicaTask
from ringsync.steps.passes.rows_after import AfterReader, Mode
from ringsync.steps.sync_plan import SyncTable
from ringsync.storage import delta_options
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, StreamConflictError, StreamDamagedError, bootstrap_topic
from ringsync.streams.messages import envelope_schema, key_schema

FORGOTTEN_LATER_MS = 600_000
"""Passes are kept so much longer than a bootstrap begins with them: it may begin while they are forgotten."""

ASKED_EVERY_S = 60.0
"""So often a replica is looked at while there is no new pass: it may have been bootstrapped, or its table altered."""

SWEEP_EVERY_S = 6 * 3600.0
"""What tries that failed have left is looked for so often at most in a run, beside once after its first pass."""


def digests_kept_ms(config: Config) -> int:
    """So long copies of what was published may come, and must be known."""
    return int(config.sync.digest_retention_h * 3_600_000)


def put_schemas(store: ObjectStore, config: Config, table: SyncTable, topic: str) -> int:
    """Put the schemas of messages beside a stream of a table, under the version that its own topic has for them.

    :returns: the version
    """
    key, value = (
        make(table.schema, config.server_name, config.stream.mapping) for make in (key_schema, envelope_schema)
    )
    version = FileStream(store, table.topic).put_next_schemas(key, value)
    if topic != table.topic:
        FileStream(store, topic).put_schemas(version, key, value)
    return version


def publish_passes(
    store: ObjectStore,
    config: Config,
    table: SyncTable,
    announce: Callable[[str, str], None] = lambda topic, bucket: None,
    *,
    gone: bool = False,
) -> None:
    """Make visible what is not yet of all passes of a table, in their order: so they come into the stream.

    :param announce: called with the topic and the bucket that has become visible
    :param gone: another table has the topic by now: what cannot become visible is named and left out
    """
    passes = {number: get_pass(store, table.table_id, number) for number in pass_numbers(store, table.table_id)}
    done = last_published(store, table, passes)
    for number in sorted(known for known in passes if known > done):
        publish_pass(store, config, table, passes, number, announce, gone=gone)


def last_published(store: ObjectStore, table: SyncTable, passes: Mapping[int, Pass]) -> int:
    """Up to which pass all buckets are visible: they become so in their order."""
    topics = [table.topic, bootstrap_topic(table.topic)]
    for number in sorted(passes, reverse=True):
        one = passes[number]
        # Where a version before had another table's bucket of this number there, this one's is not visible.
        if one.kind in ("changes", "rows") and any(
            FileStream(store, topic).parts(one.bucket) == list(one.parts) for topic in topics
        ):
            return number
    return 0


def publish_pass(
    store: ObjectStore,
    config: Config,
    table: SyncTable,
    passes: Mapping[int, Pass],
    number: int,
    announce: Callable[[str, str], None] = lambda topic, bucket: None,
    *,
    gone: bool = False,
) -> None:
    """Make a pass's bucket of the stream visible. A cut-over moves what has waited in the bootstrap stream there, and
    so does the begin of a bootstrap that replaces one which never ended: it comes before the new one's rows. The start
    of a table that was created again makes all of the old one visible.

    :param passes: all up to this number, and those behind it that are known
    :param announce: called with the topic and the bucket that has become visible
    :param gone: see :func:`publish_passes`
    :raises StreamDamagedError: a bucket cannot become visible
    :raises StepError: another table's bucket has its place, which a version before let happen
    """
    one = passes[number]
    waiting, stream = FileStream(store, bootstrap_topic(table.topic)), FileStream(store, table.topic)
    if one.kind == "changes" and one.bootstrap:
        # Moved already, if this is done again after the cut-over.
        if stream.parts(one.bucket) is None:
            waiting.publish(one.bucket, one.parts)
    elif one.kind in ("changes", "rows"):
        with _named(table, gone, one, _is_replaced(passes, one)):
            stream.publish(one.bucket, one.parts)
            announce(stream.topic, one.bucket)
    elif one.kind == "start":
        _publish_table_before(store, config, table, announce)
    elif left := _since_cutover(passes, number):
        put_schemas(store, config, table, waiting.topic)
        for before in left:
            with _named(table, gone, before):
                waiting.move(before.bucket, before.parts, stream)
                announce(stream.topic, before.bucket)


@contextmanager
def _named(table: SyncTable, gone: bool, one: Pass, replaced: bool = False) -> Iterator[None]:
    """Say what is wrong where a bucket cannot become visible. One of a table that is gone holds up nobody, nor do rows
    that are copied anew."""
    try:
        yield
    except (StreamDamagedError, StreamConflictError) as error:
        name = f"{table.schema.full_name} (table id {table.table_id})"
        if gone:
            print(
                f"ringsync: warning: {name} is gone, and a bucket of it is left out of its stream: {error}", flush=True
            )
        elif replaced:
            print(
                f"ringsync: warning: rows of bootstrap {one.bootstrap} of {name} are left out of its stream, since it "
                f"is bootstrapped anew: {error}",
                flush=True,
            )
        elif isinstance(error, StreamConflictError):
            raise StepError(
                f"{error}. {name} was created again under a version of ringsync that gave its passes numbers of the "
                "table before: drop it and create it again, and bootstrap it"
            ) from error
        elif one.kind == "rows":
            raise StreamDamagedError(f"{error}; {name} goes on when it is bootstrapped anew, with restart") from error
        else:
            raise


def _is_replaced(passes: Mapping[int, Pass], one: Pass) -> bool:
    """Tell whether these are the rows of a bootstrap behind which another has begun, which copies all of them."""
    return one.kind == "rows" and any(number > one.number and later.kind == "begin" for number, later in passes.items())


def _publish_table_before(
    store: ObjectStore, config: Config, table: SyncTable, announce: Callable[[str, str], None]
) -> None:
    # Nobody has followed those without a version; but what was published before them is made visible by none of them.
    versions = (latest_version(store, before) for before in tables_before(store, table.topic, table.table_id))
    if version := next(filter(None, versions), None):
        publish_passes(store, config, SyncTable(version, table.topic, by_arrival=False), announce, gone=True)


def _since_cutover(passes: Mapping[int, Pass], number: int) -> list[Pass]:
    """Return the passes before this one that wait in the bootstrap stream."""
    found: list[Pass] = []
    for before in sorted((known for known in passes if known < number), reverse=True):
        if passes[before].kind == "cutover":
            break
        if passes[before].kind == "changes" and passes[before].bootstrap:
            found.append(passes[before])
    return found[::-1]


@dataclass(frozen=True)
class _Asked:
    """What was known of the replica.

    :ivar last: the number of the last pass then
    :ivar at: time of the question, by the monotonic clock, s
    """

    state: ReplicaState | None
    last: int
    at: float


class FollowUps:
    """Of one table.

    :param context: Spark's
    :param control: keeps the limits of reading the cluster
    :param announce: called with the topic and the bucket of everything that becomes visible
    :raises TableReplacedError: by this, :meth:`refresh` and :meth:`catch_up`: another table has the topic by now
    """

    def __init__(
        self,
        application: Application,
        table: SyncTable,
        context: Any,
        control: ControlAddress,
        announce: Callable[[str, str], None] = lambda topic, bucket: None,
    ) -> None:
        self._application = application
        self._store = application.store
        self._table = table
        self._context, self._control, self._announce = context, control, announce
        self.ring: RankedRing | None = None
        self._passes: dict[int, Pass] = {}
        take_topic(self._store, table.topic, table.table_id, int(time.time() * 1000))
        self.refresh()
        self._mismatch: str | None = None
        self._asked: _Asked | None = None
        self._published = last_published(self._store, table, self._passes)
        self._owed: tuple[Owed, ...] = ()
        self._owed_at = 0
        self._has_new = False
        self._swept_at: float | None = None
        self._versions: dict[str, int] = {}
        self._snapshots: KnownSnapshots = {}

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
        """Those that have not been forgotten, in their order."""
        return [self._passes[number] for number in sorted(self._passes)]

    @property
    def bootstrap(self) -> str:
        """The bootstrap that is going on; empty: none."""
        latest = self._passes.get(self.last)
        return "" if latest is None or latest.kind == "cutover" else latest.bootstrap

    @property
    def topic(self) -> str:
        """Where the messages of the next pass go."""
        return bootstrap_topic(self._table.topic) if self.bootstrap else self._table.topic

    @property
    def schema_version(self) -> int:
        """Of the schemas of the stream, which are put beside it if they are not there."""
        if self.topic not in self._versions:
            self._versions[self.topic] = put_schemas(self._store, self._application.config, self._table, self.topic)
        return self._versions[self.topic]

    def reader(self, mode: Mode) -> AfterReader:
        """Tell how tasks find the rows after changes."""
        replica = self._replica()
        # While a bootstrap goes on, and where another process is behind, it lacks passes.
        return self._reader(mode, replica if replica is not None and replica.applied == self.last else None, self.last)

    def _reader(self, mode: Mode, replica: ReplicaState | None, last: int) -> AfterReader:
        """Tell how tasks find the rows after changes of the pass behind this one."""
        assert self.ring is not None
        config, name = self._application.config, self._table.schema.full_name
        return AfterReader(
            config=config,
            version=self._table.version,
            mode=mode,
            ring=self.ring,
            control=self._control,
            replica=replica,
            before=config.sync.after_image_of(name) == "replica",
            expand=config.sync.expand_deletions_of(name),
            deletions=self._deletions_until(last) if mode == "replica" else (),
            deletions_known_from_us=max(replica.deletions_known_from_us, self._kept_since_us()) if replica else 0,
            # A node that was down lacks what was published meanwhile until it has its hints.
            one_is_enough=all(one.everywhere for one in self._passes.values() if one.kind == "changes"),
        )

    def _kept_since_us(self) -> int:
        """Since when deletions of partitions and ranges are known, µs: their passes are kept for a time, and some
        minutes more, by which clocks may differ; those that were forgotten do not come back when it is made longer."""
        since_us = int(time.time() * 1_000_000) - digests_kept_ms(self._application.config) * 1000
        oldest = self._passes.get(min(self._passes, default=0))
        if oldest is None or oldest.number == 1 or oldest.kind == "start":
            return since_us
        return max(since_us, oldest.created_at_ms * 1000 + CLOCK_SKEW_US)

    def _replica(self) -> ReplicaState | None:
        """Return the replica as it is; None: the table has none, or none that can follow its changes."""
        options = delta_options(**self._application.config.store.model_dump())
        try:
            state = replica_state(self._store, self._table.schema, options, self._snapshots)
            self._mismatch = self._unusable(state) if state else None
        except ReplicaMismatchError as error:
            state, self._mismatch = None, str(error)
        usable = state if self._mismatch is None else None
        self._asked = _Asked(usable, self.last, time.monotonic())
        return usable

    def _unusable(self, state: ReplicaState) -> str | None:
        """Tell why a replica cannot follow the changes; None: it can."""
        if not state.whole:
            return "only a selection was copied: it is not kept in sync"
        if self._passes and state.applied + 1 < (oldest := min(self._passes)):
            # It was of no use for hours, and passes are not kept for ever.
            return (
                f"the replica has pass {state.applied}, and those before {oldest} are not kept any more: trigger "
                "bootstrap_table again"
            )
        return None

    def _replica_lately(self) -> ReplicaState | None:
        """Return the replica as it was when it was last asked for: an idle table is looked at once a minute."""
        asked = self._asked
        if asked is None or asked.last != self.last or time.monotonic() - asked.at >= ASKED_EVERY_S:
            return self._replica()
        return asked.state

    def made(self, one: Pass) -> None:
        """Take note of a pass that this process has committed."""
        self._passes[one.number] = one

    def refresh(self) -> None:
        """Take in passes that others have made or forgotten."""
        numbers = pass_numbers(self._store, self._table.table_id)
        known = self._passes
        self._passes = {
            number: known.get(number) or get_pass(self._store, self._table.table_id, number) for number in numbers
        }
        check_goes_on(self._passes.get(self.last))

    def catch_up(self) -> bool:
        """Do what is left to do for all passes, and now and then remove what tries that failed have left.

        :returns: False: the replica takes more passes in the next turn
        """
        # Listed before the passes are read: of what becomes a pass meanwhile the pass tells.
        tries = list_tries(self._store, self._table.table_id) if self._is_sweep_due() else None
        for one in passes_behind(self._store, self._table.table_id, self.last):
            self._passes[one.number] = one
        check_goes_on(self._passes.get(self.last))
        self._publish()
        if tries is not None:
            self._sweep(tries)
        has_all = self._update_replica()
        self._forget()
        return has_all

    def tell_missed(self) -> None:
        """Tell what a bootstrap owes once the replica has all passes; last, so that nothing waits for it."""
        state = self._replica_lately() if self._debts() and not self.bootstrap else None
        if state is not None and state.applied == self.last and self._told_again(state, self._debts()[0]):
            self._publish()
            self._update_replica()

    def _publish(self) -> None:
        for number in sorted(self._passes):
            if number > self._published:
                publish_pass(self._store, self._application.config, self._table, self._passes, number, self._announce)
                self._published = number
                self._has_new = True

    def _is_sweep_due(self) -> bool:
        """Once this run has seen a new pass, and seldom after that: a table that is idle costs nothing."""
        return self._has_new and (self._swept_at is None or time.monotonic() - self._swept_at >= SWEEP_EVERY_S)

    def _sweep(self, tries: Sequence[Try]) -> None:
        """Remove what is left of tries to make a pass that came to nothing.

        :param tries: the tries as they were before the passes were read
        """
        topics = [self._table.topic, bootstrap_topic(self._table.topic)]
        lost = lost_tries(tries, self._passes, self._published)
        remove_tries(self._store, self._table.table_id, topics, lost)
        self._swept_at, self._has_new = time.monotonic(), False

    def _update_replica(self) -> bool:
        """Bring the replica up to the last pass; while a bootstrap goes on, the one that it makes is waited for.

        :returns: False: its turn is over. It was as long as a cycle takes at least, so the next one begins at once
        """
        end = time.monotonic() + self._application.config.sync.poll_interval_ms / 1000
        while not self.bootstrap:
            state = self._replica_lately()
            if state is None or not (waiting := [number for number in sorted(self._passes) if number > state.applied]):
                break
            one = self._passes[waiting[0]]
            # Who was alive may have agreed on what only the smaller part of the replicas has.
            disagreed = one.late or not one.everywhere
            reader = replace(self._reader("replica", state, one.number - 1), disagreed=disagreed)
            task = ReplicaTask(reader, one.number)
            files = []
            if one.changes:
                results = self._context.parallelize(one.changes, len(one.changes)).mapPartitions(task).collect()
                files = [file for file in results if file]
            now_ms = int(time.time() * 1000)
            try:
                append_pass(self._store, self._table.schema, one.number, files, now_ms, seen=state)
            except StaleStateError as error:
                print(f"ringsync: {error}", flush=True)
            self._asked = None
            if len(waiting) > 1 and time.monotonic() >= end:
                return False
        return True

    def _debts(self) -> tuple[Owed, ...]:
        """Return what bootstraps owe."""
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
        folder = base_folder(self._table.schema.keyspace, self._table.schema.name)
        base = read_snapshot(self._store, folder, self._snapshots)
        context = PassContext(
            reader=self._reader("none", state, self.last),
            topic=self.topic,
            number=self.last + 1,
            attempt=secrets.token_hex(4),
            bootstrap="",
            late=True,
            endpoints={},
            schema_version=self.schema_version,
        )
        task = MissedRows(context, debt.copied.bootstrap, base.transactions.get(transaction_of(debt.copied.bootstrap)))
        copies = FileStream(self._store, self._table.topic).parts(debt.copied.bucket)
        files = [key for one in reversed(debt.missed) for key in one.changes] if copies is not None else []
        # One task after the other: what the newest file tells of a row, others need not.
        outputs = self._context.parallelize([files], 1).mapPartitions(task).collect()
        made = commit(self._store, context, outputs, {TOLD_AGAIN: debt.copied.begin, "everywhere": 1})
        if made is not None:
            self.made(made)
        return made is not None

    def _deletions_until(self, last: int) -> tuple[tuple[str, int | None], ...]:
        """Return the deletions of partitions and ranges of all passes up to this one."""
        before = (known for known in self.passes if known.number <= last)
        return tuple((key, known.deleted_until_us) for known in before for key in known.deletions)

    def _forget(self) -> None:
        """Remove passes so old that no copy of theirs comes any more, that no bootstrap begins with, and none owes."""
        if self.bootstrap:
            return
        state = self._replica_lately()
        done = state.applied if state else self.last
        if state is not None or self._mismatch is not None:
            done = min([done, *(debt.missed[0].number - 1 for debt in self._debts())])
        oldest_ms = time.time() * 1000 - digests_kept_ms(self._application.config) - FORGOTTEN_LATER_MS
        for number in sorted(self._passes)[:-1]:
            if self._passes[number].created_at_ms > oldest_ms or number > done:
                break
            forget_pass(self._store, self._passes[number])
            del self._passes[number]  # a pass that is still there must be known: what none names is swept

    def is_done(self) -> bool:
        """Tell whether stream and replica have all passes. Of a bootstrap that goes on they have not."""
        if self.bootstrap or self._published < self.last:
            return False
        state = self._replica()
        return state is None or (state.applied >= self.last and not self._debts())

    def status(self) -> dict[str, Any]:
        """Tell how far the table's passes have come."""
        state = self._replica_lately()
        return {
            "last_pass": self.last,
            "published_pass": self._published,
            "bootstrap": self.bootstrap,
            "replica_error": self._mismatch,
            "replica_pass": state.applied if state else None,
        }
