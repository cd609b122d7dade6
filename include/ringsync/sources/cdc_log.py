"""Reading of a CDC log: the rows of some streams, as the pages that the cluster sends."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringsync.cluster.limits import Permits
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.session import ClusterSettings
from ringsync.formats.result_page import Page
from ringsync.ring.ranks import RankedRing
from ringsync.scylla.generations import Generation
from ringsync.scylla.log_rows import MOST_BYTES, LogRows, decode_log
from ringsync.scylla.log_schema import LogTable, lowest_time
from ringsync.sources.scan.pages import Pages, Request, Stuck
from ringsync.sources.scan.scan import scan_session

STREAMS_AT_ONCE = 100
"""Streams of one request: Scylla refuses more (``max_partition_key_restrictions_per_query``)."""


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

    def decoded(
        self, table: LogTable, log_ttl_s: int | None, *, clock_ahead_s: float = 0.0, take_incomplete: bool = False
    ) -> LogRows:
        """Decode the pages: :func:`ringsync.scylla.log_rows.decode_log`.

        :param clock_ahead_s: how far the servers' clock is ahead of this host's, s
        """
        return decode_log(
            self.pages,
            table,
            read_at_s=[int(at_s + clock_ahead_s) for at_s in self.at_s],
            log_ttl_s=log_ttl_s,
            take_incomplete=take_incomplete,
            took_s=math.ceil(self.took_s),
        )


@dataclass(frozen=True)
class LogReader:
    """Reads logs. Several threads may use it at once."""

    session: SessionAt
    settings: ClusterSettings
    permits: Permits

    @staticmethod
    def open(settings: ClusterSettings, permits: Permits) -> LogReader:
        """Open a reader on the process's session.

        :raises ClusterError: as :func:`ringsync.cluster.session.connect`
        """
        return LogReader(scan_session(settings, None), settings, permits)

    def read(
        self,
        table: LogTable,
        streams: Sequence[bytes],
        start_ms: int,
        end_ms: int,
        *,
        most_bytes: int = MOST_BYTES,
        endpoints: tuple[str, ...] = (),
    ) -> LogRead:
        """Read the rows of some streams with a write time in ``[start_ms, end_ms)``.

        :param streams: ids, at most :data:`STREAMS_AT_ONCE`
        :param most_bytes: bytes of pages with more of which the reading is given up; at most what can be decoded
        :param endpoints: ``address:port`` of the replicas to ask first
        :raises LogReadError: they cannot be read now
        :raises cassandra.InvalidRequest: the log is gone, or has other columns
        """
        pages = Pages(self.session, self.session.statements, endpoints, self.settings, self.permits, time.sleep)
        listed = struct.pack(">i", len(streams)) + b"".join(struct.pack(">i", len(one)) + one for one in streams)
        values = (listed, lowest_time(start_ms), lowest_time(end_ms))
        request = Request(table.select(bypass_cache=True), values)
        try:
            came, at_s, took_s, size = [], [], 0.0, 0
            for page in pages.read(request):
                asked_s, came_s = pages.times
                came.append(page)
                at_s.append(asked_s)
                took_s = max(took_s, came_s - asked_s)
                if (size := size + len(page)) > most_bytes:
                    break
            return LogRead(came, at_s, took_s, size > most_bytes)
        except Stuck as error:
            raise LogReadError(f"{table.full_name}: {len(streams)} streams {error.reason}") from error


Requests = tuple[tuple[tuple[bytes, ...], tuple[str, ...]], ...]
"""The streams that each request asks for, and ``address:port`` of replicas of the first of them."""


def grouped(generation: Generation, ring: RankedRing | None) -> Requests:
    """Group the streams of a generation into requests, as few as Scylla allows. Those of one token range, which have
    the same replicas, stay together unless they are too many.

    :param ring: None: with tablets, or if it cannot be read
    """
    ends = np.array([one.end for one in generation.ranges], np.int64)
    replicas: list[tuple[str, ...]] = [()] * len(ends)
    if ring is not None:
        replicas = [tuple(host.endpoint for host in ring.hosts[number]) for number in ring.numbers_of(ends).tolist()]
    groups: list[tuple[list[bytes], tuple[str, ...]]] = []
    for one, endpoints in zip(generation.ranges, replicas, strict=True):
        streams = [stream.data for stream in one.streams]
        for start in range(0, len(streams), STREAMS_AT_ONCE):
            part = streams[start : start + STREAMS_AT_ONCE]
            if groups and len(groups[-1][0]) + len(part) <= STREAMS_AT_ONCE:
                groups[-1][0].extend(part)
            else:
                groups.append((part, endpoints))
    return tuple((tuple(group), endpoints) for group, endpoints in groups)
