"""The generations of a Scylla's CDC streams, from the tables that it has for clients.

With vnodes all tables share them: ``system_distributed.cdc_generation_timestamps`` and
``cdc_streams_descriptions_v2``. A generation is published in two steps, the streams first, so only what the former
names is whole. A cluster that was upgraded from Scylla 4.3 has the old table, too, until it is rewritten. With tablets
each table has its own: ``system.cdc_timestamps`` and ``system.cdc_streams`` (S: db/system_distributed_keyspace.cc,
db/virtual_tables.cc).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import median_low
from typing import Any

from cassandra import ConsistencyLevel, InvalidRequest
from cassandra.query import SimpleStatement

from ringsync.cluster.node import NO_ANSWER
from ringsync.scylla.generations import Generation, StreamRange
from ringsync.scylla.stream_ids import StreamId

_EPOCH = datetime(1970, 1, 1)
MOST_ERROR_MS = 300_000
"""Error of a node's clock that is allowed for; one that is farther off must not hold up all others."""
_CURRENT = 0
"""``stream_state`` of the streams of a table's set; the others are those that it closed and opened."""


@dataclass(frozen=True)
class Streams:
    """Where the streams of some tables are described.

    :ivar table: keyspace and base table, with tablets; None: the generations of the vnodes
    :ivar is_old: whether only Scylla 4.3's table is whole
    """

    table: tuple[str, str] | None = None
    is_old: bool = False


def has_tablets(session: Any, keyspace: str) -> bool:
    """Tell whether a keyspace has tablets. An old Scylla does not know them, nor the table that tells."""
    try:
        cql = "SELECT * FROM system_schema.scylla_keyspaces WHERE keyspace_name = %s"
        row = session.execute(cql, (keyspace,)).one()
    except InvalidRequest:
        return False
    return getattr(row, "initial_tablets", None) is not None


def vnode_streams(session: Any) -> Streams:
    """Find where the generations of the vnodes are described: in the old table until all of it is in the new one."""
    if not _exists(session, "cdc_streams_descriptions"):
        return Streams()
    if not _exists(session, "cdc_streams_descriptions_v2"):
        return Streams(is_old=True)
    rewritten = session.execute("SELECT key FROM system.cdc_local WHERE key = 'rewritten'").one()
    return Streams(is_old=rewritten is None)


def read_times(session: Any, streams: Streams) -> list[int]:
    """Read the times of all generations, ms since the epoch, in their order."""
    if streams.table is not None:
        cql = "SELECT timestamp AS time FROM system.cdc_timestamps WHERE keyspace_name = %s AND table_name = %s"
        rows = session.execute(cql, streams.table)
    elif streams.is_old:
        rows = _everywhere(session, "SELECT time FROM system_distributed.cdc_streams_descriptions")
    else:
        cql = "SELECT time FROM system_distributed.cdc_generation_timestamps WHERE key = 'timestamps'"
        rows = _everywhere(session, cql)
    return sorted({_ms(row.time) for row in rows})


def read_generation(session: Any, streams: Streams, time_ms: int) -> Generation:
    """Read a generation whose time :func:`read_times` has told. It may have no streams (scylla-cdc-java #144)."""
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    if streams.table is not None:
        cql = (
            "SELECT stream_id FROM system.cdc_streams "
            "WHERE keyspace_name = %s AND table_name = %s AND timestamp = %s AND stream_state = %s"
        )
        rows = session.execute(cql, (*streams.table, moment, _CURRENT))
        return Generation(time_ms, _by_end((StreamId(row.stream_id).token, (row.stream_id,)) for row in rows))
    if streams.is_old:
        cql = "SELECT streams FROM system_distributed.cdc_streams_descriptions WHERE time = %s"
        row = _everywhere(session, cql, (moment,)).one()
        found = row.streams if row is not None and row.streams else ()
        by_range: dict[Any, list[bytes]] = defaultdict(list)
        for stream in found:
            index = StreamId(stream).index
            by_range[stream if index is None else index].append(stream)
        ends = ((max(StreamId(one).token for one in group), group) for group in by_range.values())
        return Generation(time_ms, _by_end(ends))
    cql = "SELECT range_end, streams FROM system_distributed.cdc_streams_descriptions_v2 WHERE time = %s"
    rows = _everywhere(session, cql, (moment,))
    return Generation(time_ms, _by_end((row.range_end, row.streams or ()) for row in rows))


def clock_offset_ms(session: Any, host: Any = None) -> float:
    """Return how far a node's clock is ahead of ours, ms, exact to half of the time that the answer takes.

    :param host: the driver's host; None: as the session chooses
    """
    before = datetime.now(UTC).timestamp() * 1000
    row = session.execute("SELECT toUnixTimestamp(now()) AS now_ms FROM system.local", host=host).one()
    after = datetime.now(UTC).timestamp() * 1000
    return float(row.now_ms) - (before + after) / 2


@dataclass(frozen=True)
class Clocks:
    """The clocks of a cluster's nodes.

    :ivar ahead_ms: how far their median is ahead of ours
    :ivar behind_ms: how far one is behind the median at most: it writes longer to a generation, and to a window
    :ivar error_ms: how far one is from the median at most; ``worst``: its address, or those of two that differ
    """

    ahead_ms: float
    behind_ms: float
    error_ms: float
    worst: str

    @property
    def delay_ms(self) -> int:
        """How long to wait for what a node that is behind still writes: not for one that is far off."""
        return round(min(self.behind_ms, MOST_ERROR_MS))

    @property
    def doubt_ms(self) -> int:
        """How wrong a time may be that a node has told."""
        return round(min(self.error_ms, MOST_ERROR_MS))


def clocks(session: Any) -> Clocks | None:
    """Compare the nodes' clocks; None: no node answers."""
    offsets: list[tuple[float, str]] = []
    for host in session.cluster.metadata.all_hosts():
        if host.is_up is not False:
            try:
                offsets.append((clock_offset_ms(session, host), str(host.endpoint)))
            except NO_ANSWER:
                continue  # nobody writes to it, either, or the next look tells
    if not offsets:
        return None
    # Of two the slower: what is read a little late is whole.
    middle_ms = median_low(offset_ms for offset_ms, _ in offsets)
    error_ms, worst = max((abs(offset_ms - middle_ms), address) for offset_ms, address in offsets)
    worst = worst if len(offsets) != 2 else " or ".join(sorted(address for _, address in offsets))
    return Clocks(middle_ms, middle_ms - min(offsets)[0], error_ms, worst)


def _by_end(ranges: Any) -> tuple[StreamRange, ...]:
    """Make ranges. What a client reads is a set: its order says nothing, so a sorted one is as good."""
    found = {end: tuple(sorted(map(StreamId, streams))) for end, streams in ranges}
    return tuple(StreamRange(end, found[end]) for end in sorted(found))


def _exists(session: Any, table: str) -> bool:
    try:
        session.execute(f"SELECT time FROM system_distributed.{table} LIMIT 1")
    except InvalidRequest:
        return False
    return True


def _everywhere(session: Any, cql: str, values: tuple[Any, ...] = ()) -> Any:
    """Execute at a level at which what a node has published is seen by all: QUORUM, on a cluster of one node ONE."""
    alone = len(session.cluster.metadata.all_hosts()) == 1
    level = ConsistencyLevel.ONE if alone else ConsistencyLevel.QUORUM
    return session.execute(SimpleStatement(cql, consistency_level=level), values or None)


def _ms(moment: datetime) -> int:
    return round((moment - _EPOCH) / timedelta(milliseconds=1))
