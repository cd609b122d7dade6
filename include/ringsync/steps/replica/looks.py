"""The further looks at suspects, of all tables together: in tasks of Spark, once a replica has what was logged.

A table is looked at now and then while its replica still takes what was logged, since most suspects are only on their
way. So the wait ends when the last of them has come; only real differences are waited for to the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.cluster.control import ControlAddress, ControlClient, ControlServer, DriverGoneError
from ringsync.cluster.levels import at_permitted
from ringsync.cluster.limits import Permits
from ringsync.cluster.session import ClusterError, GuardrailError
from ringsync.compiled.arrow import Mask, integers
from ringsync.config import Config
from ringsync.images.differences import Difference
from ringsync.images.judgement import Copy, Slack
from ringsync.replica.changes import CLOCK_SKEW_US, ReplicaState
from ringsync.replica.lookup import previous_images
from ringsync.replica.suspects import Judged, Round, WaitingRows, judge_suspects, row_tokens
from ringsync.ring.ranks import RankedRing
from ringsync.sources.lookup.read import RowsRead, read_rows
from ringsync.sources.scan.plan import EXPIRY_SLACK_S, ScanPlan
from ringsync.sources.scan.scan import scan_session
from ringsync.steps.application import Application, TaskFailedError, driver_host, spark_is_gone, task_failure
from ringsync.steps.replica.caught_up import CLOCKS_MS, CatchUp, SyncSeen, why_behind
from ringsync.steps.replica.checksums import Sides
from ringsync.steps.replica.kept import few_together, get_suspects, put_suspects
from ringsync.steps.tables import at_once, halved
from ringsync.storage.port import StorageError
from ringsync.wiring import cluster_limits, cluster_settings, store_of

ROUNDS = 3
"""Most looks at a replica that has all that was logged: what has changed between all of them is not judged."""

POLL_S = 2.0
LONGEST_PAUSE_S = 30.0
"""Pauses between looks at the sync, and longest pause between looks at suspects while a replica is behind, s."""

UNSETTLED = "they changed between all looks"


def slack_of(plan: ScanPlan) -> Slack:
    """Return what the source of a plan cannot tell."""
    return Slack(0 if plan.exact_expiry else EXPIRY_SLACK_S, not plan.element_times)


@dataclass(frozen=True)
class TableLook:
    """How tasks look at a table's suspects.

    :ivar seen: the replica's state
    """

    plan: ScanPlan
    seen: ReplicaState
    ring: RankedRing
    has_all: bool
    waiting: WaitingRows
    copy: Copy | None


@dataclass(frozen=True)
class LookTask:
    """Looks at files of suspects.

    :ivar folder: where suspects that are left are kept
    :ivar edges: tokens in rising order, the bounds of the token ranges
    :ivar limit: most differences of a file to list
    """

    config: Config
    control: ControlAddress
    folder: str
    edges: tuple[int, ...]
    limit: int
    looks: Mapping[int, TableLook]

    def __call__(self, groups: Iterable[Sequence[tuple[int, list[str]]]]) -> Iterator[tuple[int, Any]]:
        for group in groups:
            yield from at_once(self.look, group)

    def look(self, piece: tuple[int, list[str]]) -> tuple[int, Any]:
        """Return the table's number, and :class:`Found` or what :func:`task_failure` says.

        :param piece: number of the table, keys of files
        """
        number, keys = piece
        of_table, store, found = self.looks[number], store_of(self.config), Found()
        try:
            with ControlClient(self.control) as permits:
                level = of_table.plan.consistency_level
                looks = Round(
                    partial(previous_images, of_table.seen, of_table.plan.table),
                    partial(self.read, of_table, permits, level),
                    partial(self.read_of_all, of_table, permits),
                    of_table.has_all,
                    of_table.waiting,
                    slack_of(of_table.plan),
                    of_table.copy,
                    self.limit,
                )
                for rows in get_suspects(store, keys):
                    judged = judge_suspects(rows, of_table.plan.table, looks)
                    left = put_suspects(store, self.folder, judged.left) if judged.left else []
                    found.add(self._found(judged, left), self.limit)
            return number, found
        except DriverGoneError:
            raise
        except Exception as error:
            return number, task_failure(error)

    def read(
        self, of_table: TableLook, permits: Permits, level: str, keys: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, int]:
        """Read rows of the source, as of now.

        :raises ClusterError: a row cannot be read
        """
        read, now_s = self._read(of_table, permits, level, keys, of_all=True)
        if read.unread:
            raise ClusterError(read.unread[0].reason)
        return read.images, now_s

    def read_of_all(
        self, of_table: TableLook, permits: Permits, keys: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, int, Mask] | None:
        """Read rows from all replicas, as of now, and tell which could be read: a node that is down concerns the keys
        that it has, and no others. None: none can be, the cluster forbids it, or the table is not followed."""
        if of_table.copy is not None:
            return None
        tokens, ring = integers(keys["token"]), of_table.ring
        asked = np.flatnonzero(ring.all_live[ring.numbers_of(tokens)])
        if not len(asked):
            return None
        try:
            rows, now_s = self._read(of_table, permits, "ALL", keys.take(pa.array(asked)), of_all=False)
        except GuardrailError:
            return None
        # One key of a partition that is read whole stands for all of it.
        unread = tokens[asked[[row.place for row in rows.unread]]]
        return rows.images, now_s, np.isin(tokens, tokens[asked]) & ~np.isin(tokens, unread)

    def _read(
        self, of_table: TableLook, permits: Permits, level: str, keys: pa.RecordBatch, *, of_all: bool
    ) -> tuple[RowsRead, int]:
        settings, now_s = cluster_settings(self.config), int(time.time())
        session, table = scan_session(settings, now_s), of_table.plan.table

        def ask(permitted: str) -> RowsRead:
            return read_rows(
                session,
                table,
                keys,
                of_table.ring,
                replace(settings, consistency_level=permitted),
                permits,
                element_times=of_table.plan.element_times,
                misfits=of_table.plan.unrepresentable_values,
                of_all=of_all,
            )

        return at_permitted(session, table, level, of_table.ring, ask), now_s

    def _found(self, judged: Judged, left: list[str]) -> Found:
        edges = np.array(self.edges, np.int64)

        def ranges(tokens: Any) -> frozenset[int]:
            return frozenset((np.searchsorted(edges, tokens, side="left") - 1).tolist())

        rows_left = len(judged.left) if judged.left else 0
        unjudged = ranges(row_tokens(judged.left).to_numpy()) if judged.left else frozenset()
        wrong, late = (ranges(np.array(sorted(tokens), np.int64)) for tokens in (judged.tokens, judged.late))
        return Found(judged.outcomes, judged.kinds, judged.listed, wrong, late, left, rows_left, unjudged)


@dataclass
class Found:
    """What looks have found out of a table.

    :ivar wrong: numbers of the token ranges with differences; ``late``: with rows that wait as late
    :ivar files: keys of the suspects that are left, ``rows_left`` of them, in the token ranges ``unjudged``
    :ivar why: why they are left
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    listed: list[Difference] = field(default_factory=list)
    wrong: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    files: list[str] = field(default_factory=list)
    rows_left: int = 0
    unjudged: frozenset[int] = frozenset()
    why: str = ""

    def add(self, more: Found, limit: int) -> None:
        """Add what was found in another file.

        :param limit: most differences to list
        """
        self.outcomes.update(more.outcomes)
        self.kinds.update(more.kinds)
        self.listed = [*self.listed, *more.listed][:limit]
        self.wrong |= more.wrong
        self.late |= more.late
        self.files = [*self.files, *more.files]
        self.rows_left += more.rows_left
        self.unjudged |= more.unjudged


@dataclass
class Suspected:
    """A table with suspects.

    :ivar sides: as of look 1
    :ivar state: reads the replica's present state
    :ivar failure: why it cannot be looked at
    """

    sides: Sides
    ring: RankedRing
    state: Callable[[], ReplicaState]
    found: Found
    failure: Exception | None = None

    def applied(self) -> int:
        """Read the last pass that the replica has."""
        return self.state().applied

    @property
    def copy(self) -> Copy | None:
        """What the replica is if nobody keeps it in step."""
        as_of_us, now_us = self.sides.seen.as_of_us, self.sides.plan.now * 1_000_000
        return None if self.sides.is_followed else Copy(as_of_us, now_us + CLOCK_SKEW_US)


@dataclass(frozen=True)
class Looker:
    """Looks at suspects in tasks of Spark.

    :ivar context: Spark's
    :ivar folder: where suspects are kept
    :ivar edges: tokens in rising order, the bounds of the token ranges
    """

    context: Any
    application: Application
    folder: str
    edges: tuple[int, ...]

    def look(self, tables: Mapping[int, Suspected], looks: Mapping[int, TableLook]) -> None:
        """Look once at all suspects of some tables, and note what was found.

        :param tables: by their numbers
        """
        config, store = self.application.config, self.application.store
        before = {number: tables[number].found.files for number in looks}

        def work(numbers: Sequence[int]) -> list[list[Any]]:
            pieces = [(number, keys) for number in numbers for keys in few_together(before[number])]
            chosen = {number: looks[number] for number in numbers}
            limit = config.verify.max_listed_differences
            task = LookTask(config, control.address, self.folder, self.edges, limit, chosen)
            count = min(len(pieces), self.context.defaultParallelism)
            groups = [pieces[first::count] for first in range(count)]
            found = self.context.parallelize(groups, count).mapPartitions(task).collect()
            return [[result for number, result in found if number == wanted] for wanted in numbers]

        with ControlServer(host=driver_host(self.context)) as control:
            control.watch_limits(store, f"verify-{self.application.run}", cluster_limits(config))
            numbers = [number for number in looks if before[number]]
            results = halved(work, numbers, partial(spark_is_gone, self.context)) if numbers else []
        for number, result in zip(numbers, results, strict=True):
            table = tables[number]
            failures = [one for one in result if isinstance(one, dict)] if isinstance(result, list) else []
            if isinstance(result, Exception) or failures:
                table.failure = result if isinstance(result, Exception) else TaskFailedError(**failures[0])
                continue
            table.found = replace(table.found, files=[], rows_left=0, unjudged=frozenset())
            for one in result:
                table.found.add(one, config.verify.max_listed_differences)
            for key in before[number]:
                with suppress(StorageError):  # the run removes its whole folder at its end
                    store.delete(key)


def judge_all(
    looker: Looker,
    tables: Sequence[Suspected],
    sync_period_ms: int,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Look at the suspects of all tables until each is judged, or cannot be; what was found is added to the tables.

    :param sync_period_ms: time from a write until it can be read in the logs, ms
    """
    numbered = dict(enumerate(tables))
    for _ in range(ROUNDS):
        logged_ms = int(clock() * 1000) + sync_period_ms + CLOCKS_MS
        waiting = {
            number: CatchUp(table.sides.plan.table, logged_ms)
            for number, table in numbered.items()
            if table.found.files and not table.found.why and table.failure is None
        }
        _round(looker, numbered, waiting, clock, sleep)
    for table in tables:
        table.found.outcomes["not_judged"] += table.found.rows_left
        table.found.why = (table.found.why or UNSETTLED) if table.found.rows_left else ""


def _round(
    looker: Looker,
    tables: Mapping[int, Suspected],
    waiting: dict[int, CatchUp],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Look at suspects until the replicas have what was logged, or until the wait is over.

    :param waiting: numbers of the tables; emptied
    """
    end_s, pause_s, next_s = clock() + looker.application.config.verify.wait_s, POLL_S, 0.0
    while waiting:
        seen = _sync_seen(looker, clock, sleep, end_s)
        if isinstance(seen, Exception):
            for number in waiting:
                tables[number].failure = seen
            return
        is_over, is_due = seen.is_stopped or clock() >= end_s, clock() >= next_s
        looks: dict[int, TableLook] = {}
        reasons: dict[int, str] = {}
        for number, catch_up in waiting.items():
            table = tables[number]
            try:
                reasons[number] = why_behind(seen, catch_up, table.applied) if table.sides.is_followed else ""
                has_all = not reasons[number]
                if has_all or is_over or is_due:
                    waits = catch_up.waiting or WaitingRows()
                    looks[number] = TableLook(table.sides.plan, table.state(), table.ring, has_all, waits, table.copy)
            except Exception as error:  # it is this table's alone
                table.failure = error
        looker.look(tables, looks)
        for number in [*waiting]:
            table = tables[number]
            if number in looks and (looks[number].has_all or is_over):
                table.found.why = reasons[number]
                del waiting[number]
            elif table.failure is not None or not table.found.files:
                del waiting[number]
        if is_due:
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            next_s = clock() + pause_s
        if waiting:
            sleep(POLL_S)


def _sync_seen(
    looker: Looker, clock: Callable[[], float], sleep: Callable[[float], None], end_s: float
) -> SyncSeen | Exception:
    """Look at the sync, again if the store breaks off; after ``end_s`` return why it cannot be looked at."""
    while True:
        try:
            return SyncSeen.look(looker.application.store, looker.application.config, int(clock() * 1000))
        except Exception as error:
            if clock() >= end_s:
                return error
        sleep(POLL_S)
