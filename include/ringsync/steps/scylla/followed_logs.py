"""The tables whose CDC logs are read: their schemas, their options, and the generations of their streams."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringsync.changes.identity import TableVersion
from ringsync.cluster.generations import (
    MOST_ERROR_MS,
    Clocks,
    Streams,
    clocks,
    has_tablets,
    vnode_streams,
)
from ringsync.cluster.node import NO_ANSWER, ask_one, one_node, schema_version
from ringsync.cluster.schema import tables_of
from ringsync.cluster.scylla import CdcOptions, read_cdc_options
from ringsync.cluster.whole_schema import Agreement
from ringsync.config import Config
from ringsync.ledger.table_versions import TableVersionError, version_of
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.ring import RingError
from ringsync.schema.table import Schema, TableSchema, UnreadableTable
from ringsync.scylla.generations import Generation, Interval, intervals
from ringsync.scylla.log_schema import LOG_SUFFIX, LogTableError, log_table_of
from ringsync.scylla.progress import ARRIVAL_MARGIN_MS, SLOT_MS, Position, Rules, Sweep
from ringsync.sources.cdc_log import Requests
from ringsync.steps.scylla.known_generations import KnownGenerations, Needed
from ringsync.steps.scylla.log_task import FollowedLog
from ringsync.steps.scylla.positions import log_begins_ms, note_log_begins
from ringsync.steps.stage.staged_files import StagedTable
from ringsync.steps.sync_plan import SyncPlan
from ringsync.storage.port import ObjectStore

CLOCKS_EVERY_S = 60.0
"""Time between two looks at the nodes' clocks."""

LONGEST_GRACE_MS = 600_000
"""Longest time from which on rows are not read for the first time, since they would expire meanwhile; of a small TTL a
quarter of it."""

LEEWAY_MS = 5_000
"""So far may a write time be ahead of its coordinator's clock (S: cdc/metadata.cc)."""


UNREADABLE_MS = 3_600_000
"""Time after the end of a log that was lost after which it is given up if it cannot be read."""

PLAN_MS = 120_000
"""So late the loop may notice that a table has lost ``cdc``, or has it again: plans are made once a minute."""

LONGEST_ROUND_MS = 180_000
"""A window is not made longer than this to ask less often: changes would be published too late."""


class NotYetError(Exception):
    """Nothing can be read now, for no table; the message says why."""


@dataclass(frozen=True)
class FollowedTable:
    """A table whose log is read.

    :ivar log: None: it cannot be read, see ``problem``; without one, it is gone
    :ivar generations: all that are known, by their times, with their streams
    :ivar requests: what is asked for, of each of them, by its time
    :ivar ends_ms: it has lost its log at this moment: it is read up to it; None: it has one
    :ivar begins_ms: it was read to its end before, and nobody has watched it since this moment; None: it is not so
    :ivar problem: why its log cannot be read; empty: it can. ``has_keys_only``: since it lacks values
    :ivar keys: names of the base table's key columns
    """

    table_id: str
    name: str
    log: FollowedLog | None
    generations: tuple[Generation, ...] = ()
    requests: Mapping[int, Requests] = field(default_factory=dict)
    has_tablets: bool = False
    ends_ms: int | None = None
    problem: str = ""
    begins_ms: int | None = None
    has_keys_only: bool = False
    keys: tuple[str, ...] = ()

    @property
    def ttl_s(self) -> int:
        """TTL of what is logged now, s; 0: none."""
        return (self.log.ttl_s if self.log else None) or 0

    @property
    def log_id(self) -> str:
        """Id of the log table."""
        return self.log.log_id if self.log else ""

    def kept_from_ms(self, ttl_s: int, now_ms: int) -> int:
        """Return from which write time on the log has all rows: earlier ones it may have forgotten, or the generation
        of their streams is not described any more.

        :param ttl_s: smallest TTL that the rows may have; 0: none
        """
        first_ms = self.intervals[0].start_ms
        return max(first_ms, now_ms - 1000 * ttl_s) if ttl_s else first_ms

    @property
    def intervals(self) -> list[Interval]:
        """When the generations operate."""
        return intervals([one.time_ms for one in self.generations])

    @property
    def described(self) -> list[Interval]:
        """When those generations operate that have streams."""
        return [when for one, when in zip(self.generations, self.intervals, strict=True) if one.ranges]


@dataclass(frozen=True)
class _ByName:
    """A schema, by ids and names of tables."""

    tables: Mapping[str, TableSchema]
    names: Mapping[tuple[str, str], TableSchema | UnreadableTable]
    ids: frozenset[str] = frozenset()

    @classmethod
    def of(cls, schema: Schema) -> _ByName:
        every: tuple[TableSchema | UnreadableTable, ...] = (*schema.unreadable, *schema.tables)
        tables = {one.table_id: one for one in schema.tables}
        return cls(tables, {(one.keyspace, one.name): one for one in every}, schema.ids)

    def log_of(self, table: TableSchema) -> TableSchema | UnreadableTable | None:
        """Return a table's log."""
        return self.names.get((table.keyspace, table.name + LOG_SUFFIX))

    def about(self, table_id: str) -> tuple[Any, Any]:
        """Return all that is said of a table."""
        table = self.tables.get(table_id)
        return table, self.log_of(table) if table else None


class FollowedLogs:
    """Looks at the cluster, and remembers what has not changed.

    :param silent_since_s: what :class:`Agreement` knew at the end of a run that ended a moment ago
    :param unwatched_since_ms: when a run before has looked at the cluster last, by the cluster's clock, ms since the
        epoch; None: a moment ago
    :param seen_ms: when that was in any case; None: nobody knows
    """

    def __init__(
        self,
        config: Config,
        store: ObjectStore,
        session: Any,
        silent_since_s: Mapping[str, float],
        unwatched_since_ms: int | None,
        seen_ms: int | None = None,
    ) -> None:
        self._config, self._store, self._session = config, store, session
        self._agree = Agreement(session, time.time, silent_since_s)
        self._unwatched_since_ms = unwatched_since_ms
        self._version = ""
        self._schema = _ByName({}, {})
        self._options: Mapping[str, CdcOptions] = {}
        self._versions: dict[str, TableVersion] = {}
        self._rings: dict[str, RankedRing | None] = {}
        self._streams: dict[str, tuple[SyncPlan | None, Streams]] = {}
        self._requests: dict[str, int] = {}
        self._left_ms: dict[str, int] = {}
        self._clocks_s: float | None = None
        self._plan: SyncPlan | None = None
        self._seen_ms = seen_ms
        self._back_ms: dict[str, int] = {}
        self._generations = KnownGenerations(session)
        self._wrong_clock = ""
        self.clocks = Clocks(0, 0, 0, "")

    def look(self, plan: SyncPlan, positions: Mapping[str, Position], now_ms: int) -> list[FollowedTable]:
        """Return the tables to read: those of the plan, and those that have lost their log until it is read to its end.

        :param positions: how far logs are read, by table id
        :param now_ms: the time by this host's clock, ms since the epoch
        :raises NotYetError: nodes disagree about the schema: a SELECT might leave out a column that is new; or none
            tells the time
        """
        self._look_at_schema()
        self._requests = {}
        if plan is not self._plan:
            self._plan, self._rings = plan, {}
        if self._clocks_s is None or time.monotonic() - self._clocks_s >= CLOCKS_EVERY_S:
            self._look_at_clocks()
        # The plan may be a little older than the schema: a table of the same name may be there meanwhile.
        cluster_ms = now_ms + round(self.clocks.ahead_ms)
        self._generations.look(self._needed(plan, positions, cluster_ms))
        tables = []
        for one in plan.tables:
            if self.is_there(one.table_id):
                table = self._table(one.table_id, one.schema, None)
                tables.append(replace(table, begins_ms=self._comes_back(one.table_id, positions, cluster_ms)))
        planned = {table.table_id for table in plan.tables}
        for table_id in planned & self._left_ms.keys():
            del self._left_ms[table_id]
        for table_id in positions.keys() - planned:
            if (left := self._left(table_id, positions[table_id], cluster_ms)) is not None:
                tables.append(left)
        self._seen_ms = cluster_ms
        return tables

    def have_changed(self, tables: Sequence[FollowedTable]) -> set[str]:
        """Return the ids of tables that were altered since :meth:`look`, or may be: a SELECT of before leaves out a
        column that is new."""
        try:
            if self._agree() and schema_version(one_node(self._session)) == self._version:
                return set()
            now = _ByName.of(ask_one(self._session, tables_of)) if self._agree() else _ByName({}, {})
        except NO_ANSWER:
            now = _ByName({}, {})
        return {one.table_id for one in tables if self._schema.about(one.table_id) != now.about(one.table_id)}

    def begin(self, table: FollowedTable, now_ms: int) -> Position:
        """Return where the reading of a log begins: where its capture began, or ``scylla.lookback_s`` ago. That is
        kept, so that nothing is left out if the first window fails for long."""
        # What expires while it is read is not promised.
        ttl_s = table.ttl_s
        kept_from_ms = table.kept_from_ms(ttl_s, now_ms + min(LONGEST_GRACE_MS, 1000 * ttl_s // 4))
        noted = log_begins_ms(self._store, table.table_id)
        if noted is None:
            start_ms = max(self._lookback_ms(now_ms), kept_from_ms)
            note_log_begins(self._store, table.table_id, start_ms)
        else:
            start_ms = max(noted, table.intervals[0].start_ms)  # with tablets there was no log before
        known = [one.start_ms for one in table.described]
        begun = Position.begin(start_ms, known, self._config.scylla.window_ms, kept_from_ms)
        return replace(begun, ttl_s=ttl_s, log_id=table.log_id, keys=table.keys)

    def begun_anew(self, table: FollowedTable, known: Position, begins_ms: int, searched_ms: int) -> Position:
        """Return where the reading of a log begins anew. Of all that is in it one knows the TTLs.

        :param known: its position so far
        :param searched_ms: what arrived earlier is not looked for among write times from before
        """
        times = [one.start_ms for one in table.described]
        begun = Position.begin(begins_ms, times, self._config.scylla.window_ms, begins_ms)
        far = Sweep(searched_ms, searched_ms)
        begun = replace(begun, far=far, log_id=table.log_id, keys=table.keys)
        return replace(begun, ttl_s=known.ttl_s, former_ttls=known.former_ttls)

    def is_there(self, table_id: str) -> bool:
        """Tell whether there is a table."""
        return table_id in self._schema.ids

    def rules(self, table: FollowedTable, ttls_s: Sequence[int]) -> Rules:
        """Return how a table's log is read.

        :param ttls_s: TTLs that its rows may have, s; empty: none ever expires, and nothing tells when one arrived
        """
        config, ttl_ms = self._config.scylla, 1000 * min(ttls_s, default=0)
        digests_ms = 3_600_000 * self._config.sync.digest_retention_h
        # What is found must neither have expired, nor be unknown though it was published. And three sweeps at least
        # see each write time: rows between two of them are too early for far sweeps.
        reach_ms = min(config.near_reach_ms, digests_ms * 7 // 8, ttl_ms * 3 // 4 or math.inf)
        near_ms, far_ms = min(config.near_sweep_ms, reach_ms // 3), min(config.far_sweep_ms, ttl_ms // 2)
        confidence_ms = config.confidence_ms + self.clocks.delay_ms
        # All tables together ask no more than so often; their windows become longer instead.
        all_requests_ms = 1000 * sum(self._requests.values()) // config.queries_per_s
        window_ms = max(config.window_ms, min(all_requests_ms, LONGEST_ROUND_MS))
        sweeps = int(near_ms), int(reach_ms), far_ms
        return Rules(confidence_ms, window_ms, *sweeps, far_of_all=table.has_tablets, skew_ms=self.clocks.doubt_ms)

    def status(self) -> dict[str, Any]:
        """Return what is known of generations and clocks, for ``cdcservice status``."""
        return {
            "generations": self._generations.shared_count,
            "empty_generations_ms": sorted(self._generations.empty),
            "clock_skew_ms": round(abs(self.clocks.ahead_ms) + self.clocks.error_ms),
            "problems": [*filter(None, (self._generations.problem, self._wrong_clock))],
            "silent_since_s": self._agree.silent_since_s,
            "requests_of_a_round": sum(self._requests.values()),
        }

    def _look_at_schema(self) -> None:
        if not self._agree():
            raise NotYetError("nodes disagree about the schema, or do not answer: logs are read once they agree")
        version = schema_version(one_node(self._session))
        if version != self._version:
            schema, self._options, self._version = ask_one(
                self._session, lambda node: (tables_of(node), read_cdc_options(node), schema_version(node))
            )
            self._schema = _ByName.of(schema)

    def _look_at_clocks(self) -> None:
        """Compare the nodes' clocks: one that is behind writes longer to a generation, and to a window."""
        found = clocks(self._session)
        if found is None and self._clocks_s is None:
            raise NotYetError("no node tells its time: logs are read once one does")
        self.clocks = found or self.clocks
        is_far_off = self.clocks.error_ms > MOST_ERROR_MS
        self._wrong_clock = _WRONG_CLOCK.format(self.clocks.worst, self.clocks.error_ms / 1000) if is_far_off else ""
        self._clocks_s = time.monotonic()

    def _lookback_ms(self, now_ms: int) -> int:
        return now_ms - 1000 * self._config.scylla.lookback_s

    def _needed(self, plan: SyncPlan, positions: Mapping[str, Position], now_ms: int) -> dict[Streams, Needed]:
        """Return which generations are needed, by all tables that share them."""
        found: dict[Streams, Needed] = {}
        for table_id in {*(one.table_id for one in plan.tables), *positions}:
            table = self._schema.tables.get(table_id)
            if table is None or not isinstance(self._schema.log_of(table), TableSchema):
                continue
            try:
                streams = self._streams_of(table)
            except NO_ANSWER:
                continue  # the same error names the table where its log is looked at
            position, other = positions.get(table_id), found.get(streams, Needed(now_ms))
            from_ms = self._needed_from_ms(table_id, position, now_ms)
            known = position.known if position is not None else ()
            found[streams] = Needed(min(from_ms, other.from_ms), other.known.union(known))
        return found

    def _needed_from_ms(self, table_id: str, position: Position | None, now_ms: int) -> int:
        """Return the write time from which on something of a table's log may be read, ms since the epoch."""
        if position is None:
            noted = log_begins_ms(self._store, table_id)
            from_ms = self._lookback_ms(now_ms) if noted is None else noted
        elif position.has_ended:  # if its log is there again, it begins where somebody has looked last
            looks_ms = (self._unwatched_since_ms, self._seen_ms, self._back_ms.get(table_id))
            from_ms = min((look_ms for look_ms in looks_ms if look_ms is not None), default=now_ms) - PLAN_MS
        else:
            near = position.near
            from_ms = min(position.unread_from_ms, near.ended_ms if near.next_ms is None else near.next_ms)
        return from_ms - self._config.scylla.near_reach_ms - SLOT_MS - ARRIVAL_MARGIN_MS

    def _table(self, table_id: str, base: TableSchema, ends_ms: int | None) -> FollowedTable:
        name = base.full_name

        def unreadable(problem: str) -> FollowedTable:
            return FollowedTable(table_id, name, None, ends_ms=ends_ms, problem=problem)

        try:
            now = self._schema.tables.get(table_id, base)
            version = self._versions[table_id] = version_of(self._store, now, self._versions.get(table_id))
            log = self._schema.log_of(now)
            if log is None and ends_ms is not None:
                return FollowedTable(table_id, name, None, ends_ms=ends_ms)
            if not isinstance(log, TableSchema):
                reason = log.reason if log else "it is not there"
                return unreadable(f"log table {now.name}{LOG_SUFFIX}: {reason}")
            options = self._options.get(table_id)
            if options is not None and options.delta != "full":
                return replace(unreadable(_KEYS_ONLY), has_keys_only=True)
            ring = self._ring_of(now.keyspace)
            by_arrival = self._config.sync.bucket_by_of(name) == "arrival"
            ttl_s = (options.ttl_s if options is not None else 0) or None
            is_on = options is not None and options.enabled
            staged = StagedTable(version, by_arrival, ring)
            followed = FollowedLog(staged, log_table_of(version.table, log, is_on=is_on), ttl_s, log.table_id)
            streams = self._streams_of(now)
            generations = self._generations.of(streams)
        except (TableVersionError, LogTableError) as error:
            return unreadable(str(error))
        except NO_ANSWER as error:
            return unreadable(f"{type(error).__name__}: {error}")
        if not generations:
            return unreadable("no generation of CDC streams is published")
        is_own = streams.table is not None
        requests = {
            one.time_ms: self._generations.requests(streams, one, None if is_own else ring) for one in generations
        }
        self._requests[table_id] = len(requests[generations[-1].time_ms])
        return FollowedTable(
            *(table_id, name, followed, generations, requests, is_own, ends_ms), keys=followed.log.key_names
        )

    def _comes_back(self, table_id: str, positions: Mapping[str, Position], now_ms: int) -> int | None:
        """Return where the reading of a log begins anew that was lost, was read to its end, and is there again, ms
        since the epoch: nothing was logged until the look before. It stays until it is in the table's position."""
        position = positions.get(table_id)
        if position is None or not position.has_ended:
            self._back_ms.pop(table_id, None)
            return None
        seen_ms = now_ms if self._seen_ms is None else self._seen_ms
        return self._back_ms.setdefault(table_id, max(position.until_ms, seen_ms - PLAN_MS))

    def _left(self, table_id: str, position: Position, now_ms: int) -> FollowedTable | None:
        """Return a table that has left the plan, until its log is read to the end; None: it is, or is gone.

        After a time without us such a log is looked at anew, from then on: cdc may have been on meanwhile, unless the
        configuration leaves the table out. What cannot be read for long ends with a gap.
        """
        there = self._schema.tables.get(table_id)
        if there is None:
            return None
        ends_ms, begins_ms = self._left_ms.get(table_id), None
        if ends_ms is None and (self._unwatched_since_ms is None or not self._may_have_had_cdc(there)):
            if position.has_ended:
                return None
            ends_ms = position.ends_ms
        if ends_ms is None:
            last_ms = now_ms + LEEWAY_MS + self.clocks.doubt_ms
            ends_ms = self._left_ms[table_id] = -(-last_ms // SLOT_MS) * SLOT_MS
        if position.has_ended:
            if position.ends_ms == ends_ms:
                return None
            begins_ms = max(position.until_ms, (self._unwatched_since_ms or 0) - PLAN_MS)
        found = self._table(table_id, there, ends_ms)
        if position.until_ms >= ends_ms:  # no window of it is read
            self._requests.pop(table_id, None)
        if found.problem and now_ms >= ends_ms + UNREADABLE_MS:
            print(f"ringsync: warning: {found.name} has left the sync, and is given up: {found.problem}", flush=True)
            return FollowedTable(table_id, found.name, None, ends_ms=ends_ms)
        return replace(found, begins_ms=begins_ms)

    def _may_have_had_cdc(self, table: TableSchema) -> bool:
        return self._config.sync.follows(table.full_name) and self._schema.log_of(table) is not None

    def _streams_of(self, table: TableSchema) -> Streams:
        known = self._streams.get(table.keyspace)
        if known is None or known[0] is not self._plan:
            try:
                per_table = has_tablets(self._session, table.keyspace)
                now = Streams((table.keyspace, "")) if per_table else vnode_streams(self._session)
            except NO_ANSWER:
                if known is None:
                    raise
                now = known[1]  # it hardly ever changes
            known = self._streams[table.keyspace] = self._plan, now
        found = known[1]
        return found if found.table is None else Streams((table.keyspace, table.name))

    def _ring_of(self, keyspace: str) -> RankedRing | None:
        assert self._plan is not None
        if keyspace not in self._rings:
            try:
                ring = self._plan.ring(keyspace) if keyspace in self._plan.replications else None
                self._rings[keyspace] = ranked(ring) if ring else None
            except RingError:
                self._rings[keyspace] = None
        return self._rings[keyspace]


_WRONG_CLOCK = (
    "the clock of node {} is {:,.0f} s from the others' (median): rows that it takes may be missed, and times to live "
    "be wrong. Set it, then cdcservice verify"
)
_KEYS_ONLY = (
    "its log has keys only (cdc = {'delta': 'keys'}): the values are missing. ALTER the table WITH cdc = {'enabled': "
    "true, 'delta': 'full'}: the time until then is a gap"
)
