"""Reading of a CDC log: the rows of some streams, as the pages that the cluster sends."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ringsync.cluster.generations import Clocks
from ringsync.cluster.limits import Permits
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.session import ClusterSettings
from ringsync.formats.result_page import Page
from ringsync.ring.ranks import RankedRing
from ringsync.scylla.generations import Generation
from ringsync.scylla.log_rows import MOST_BYTES, LogRows, decode_log
from ringsync.scylla.log_schema import LogTable, lowest_time
from ringsync.sources.scan.pages import Asked, Pages, Request, Stuck
from ringsync.sources.scan.scan import scan_session

STREAMS_AT_ONCE = 100
"""Streams of one request: Scylla refuses more (``max_partition_key_restrictions_per_query``)."""

PAGE_ROWS = 8000
"""Most rows of a page. Those of logs are small, so many are about the MiB with which Scylla ends a page of its own
accord (``query_page_size_in_bytes``): the setting ``page_size``, for tables' rows, would only make more pages."""

JOINED_BYTES = 8 * 2**20
"""Bytes of pages that are decoded together: what a batch costs besides its rows is shared by many requests, most of
which bring few."""


class LogReadError(RuntimeError):
    """A part of a log could not be read; the message says what, and what may help."""


@dataclass(frozen=True)
class LogRead:
    """What some streams had.

    :ivar pages: without the last ones if they are too large
    :ivar at_s: when each page was asked for, s since the epoch, by this host's clock
    :ivar took_s: longest time that a page took to come, s
    :ivar is_too_large: whether the reading was given up, since there were too many bytes
    """

    pages: Sequence[Page]
    at_s: Sequence[float]
    took_s: float
    is_too_large: bool = False

    @property
    def size(self) -> int:
        """Bytes of the pages."""
        return sum(map(len, self.pages))

    def decoded(
        self, table: LogTable, log_ttls_s: Sequence[int], *, clocks: Clocks, take_incomplete: bool = False
    ) -> LogRows:
        """Decode the pages: :func:`ringsync.scylla.log_rows.decode_log`.

        :param clocks: of the servers, one of which says how much is left of a row's TTL
        """
        return decode_log(
            self.pages,
            table,
            read_at_s=[int(at_s + clocks.ahead_ms / 1000) for at_s in self.at_s],
            log_ttls_s=log_ttls_s,
            take_incomplete=take_incomplete,
            took_s=math.ceil(self.took_s),
            error_s=round(clocks.doubt_ms / 1000),
        )


Of = TypeVar("Of")


def joined(reads: Iterable[tuple[Of, LogRead]]) -> Iterator[tuple[Of, LogRead]]:
    """Join reads that follow one another, to be decoded together: up to ``JOINED_BYTES``, or one that has more. One
    that was given up stays alone: the next one may have its last rows, too.

    :param reads: what each is of, and the read. Only reads of equal things are joined, and those whose pages took
        equally many seconds: how long they took says how exactly it is known when a row arrived
    """
    together: list[LogRead] = []
    size, last = 0, None
    for of, read in reads:
        kind = of, math.ceil(read.took_s)
        is_cut = read.is_too_large or (bool(together) and together[-1].is_too_large)
        if last is not None and (kind != last or size + read.size > JOINED_BYTES or is_cut):
            yield last[0], _joined(together)
            together, size = [], 0
        together.append(read)
        size += read.size
        last = kind
    if last is not None:
        yield last[0], _joined(together)


def _joined(reads: Sequence[LogRead]) -> LogRead:
    pages, at_s = [one for read in reads for one in read.pages], [one for read in reads for one in read.at_s]
    return LogRead(pages, at_s, max(read.took_s for read in reads), any(read.is_too_large for read in reads))


@dataclass(frozen=True)
class LogReader:
    """Reads logs. Readings that have begun go on together: pages are asked for ahead, in the driver's thread."""

    session: SessionAt
    settings: ClusterSettings
    permits: Permits

    @staticmethod
    def open(settings: ClusterSettings, permits: Permits) -> LogReader:
        """Open a reader on the process's session.

        :raises ClusterError: as :func:`ringsync.cluster.session.connect`
        """
        return LogReader(scan_session(settings, None), settings, permits)

    def begin(
        self,
        table: LogTable,
        streams: Sequence[bytes],
        start_ms: int,
        end_ms: int,
        *,
        most_bytes: int = MOST_BYTES,
        endpoints: tuple[str, ...] = (),
        from_time: bytes | None = None,
    ) -> Callable[[], LogRead]:
        """Begin to read the rows of some streams with a write time in ``[start_ms, end_ms)``: ask for the first pages.

        :param streams: ids, at most :data:`STREAMS_AT_ONCE`
        :param most_bytes: bytes of pages with more of which the reading is given up; at most what can be decoded
        :param endpoints: ``address:port`` of the replicas to ask first
        :param from_time: timeuuid at which to begin in place of ``start_ms``
        :returns: function that reads to the end. It raises a :class:`LogReadError` if they cannot be read now, and
            ``cassandra.InvalidRequest`` if the log is gone, or has other columns
        """
        settings = replace(self.settings, page_size=PAGE_ROWS)
        pages = Pages(self.session, self.session.statements, endpoints, settings, self.permits, time.sleep)
        listed = struct.pack(">i", len(streams)) + b"".join(struct.pack(">i", len(one)) + one for one in streams)
        times = from_time or lowest_time(start_ms), lowest_time(end_ms)
        request = Request(table.select(bypass_cache=True), (listed, *times))
        try:
            first = pages.ask(request, wait=True)
        except Exception:
            first = None  # the function asks again, and raises what does not pass

        def end() -> LogRead:
            try:
                return _to_the_end(pages, request, first, most_bytes)
            except Stuck as error:
                raise LogReadError(f"{table.full_name}: {len(streams)} streams {error.reason}") from error

        return end


def _to_the_end(pages: Pages, request: Request, first: Asked | None, most_bytes: int) -> LogRead:
    came, at_s, took_s, size = [], [], 0.0, 0
    for page in pages.read(request, first):
        asked_s, came_s = pages.times
        came.append(page)
        at_s.append(asked_s)
        took_s = max(took_s, came_s - asked_s)
        if (size := size + len(page)) > most_bytes:
            break
    return LogRead(came, at_s, took_s, size > most_bytes)


Requests = tuple[tuple[tuple[bytes, ...], tuple[str, ...]], ...]
"""The streams that each request asks for, and ``address:port`` of the local replicas that have all of them."""


def grouped(generation: Generation, ring: RankedRing | None) -> Requests:
    """Group the streams of a generation into requests, so that the node that is asked has all streams of a request
    itself, and requests are as few as Scylla allows.

    :param ring: None: with tablets, or if it cannot be read; then neighbours on the ring are asked together
    """
    ends = np.array([one.end for one in generation.ranges], np.int64)
    replicas: list[tuple[str, ...]] = [()] * len(ends)
    if ring is not None:
        hosts = [ring.hosts[number] for number in ring.numbers_of(ends).tolist()]
        replicas = [tuple(host.endpoint for host in ranked if host.is_local) for ranked in hosts]
    groups: list[tuple[list[bytes], tuple[str, ...]]] = []
    # Ranges with the same first replica become neighbours.
    for place in sorted(range(len(ends)), key=replicas.__getitem__):
        streams = [stream.data for stream in generation.ranges[place].streams]
        for start in range(0, len(streams), STREAMS_AT_ONCE):
            part = streams[start : start + STREAMS_AT_ONCE]
            together, shared = groups[-1] if groups else ([], ())
            common = tuple(endpoint for endpoint in shared if endpoint in replicas[place])
            if groups and len(together) + len(part) <= STREAMS_AT_ONCE and (common or shared == replicas[place]):
                groups[-1] = [*together, *part], common
            else:
                groups.append((part, replicas[place]))
    return tuple((tuple(group), endpoints) for group, endpoints in groups)
