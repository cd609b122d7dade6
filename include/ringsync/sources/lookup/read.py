"""Read rows by their keys, as row images: what a row looks like after it was changed.

Many keys are asked for in one request (requests.py), some requests at a time. One that fails is asked again as two
with half of its keys each, down to single keys: so one key that cannot be read costs a few more requests, and only
itself. What the cluster does not give now is not waited for: whoever asked does so again later, and others wait behind
him. So the pauses before a request is repeated are made once in vain, and a read that brings nothing ends. Result pages
go to the compiled decoders as they come, some requests' together, and nothing else is kept.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from cassandra import InvalidRequest

from ringsync.cluster.limits import Permits
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.session import ClusterSettings
from ringsync.compiled.arrow import Integers, valid_mask
from ringsync.formats.result_page import Page, join_pages, page_cells
from ringsync.images.from_pages import row_images, widened
from ringsync.images.schema import row_image_schema
from ringsync.ring.ranks import RankedRing
from ringsync.ring.tokens import RING_WIDTH
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.keys import RowKeys, key_columns_of, places_in, row_identities, row_keys, taken
from ringsync.sources.lookup.requests import Kind, Lookup, LookupQuery, halves, lookup_query, plan_lookups, request_of
from ringsync.sources.scan.pages import PASSING_ERRORS, RETRY_DELAYS_S, Asked, Pages, Request, Stuck, row_count

IN_FLIGHT = 12
"""Requests on the way at once; fewer leave the server idle, more gain nothing."""
ROWS_AT_ONCE = 4096
BYTES_AT_ONCE = 8 * 2**20
"""So much is decoded in one go, whichever comes first."""
MAX_FAILURES = 100
"""After so many failed requests of one read those that fail are not asked again: more than single keys is broken."""
NO_PROGRESS_S = 15.0
"""A read ends when requests have failed for so long, even the smallest, and nothing came; one request may take longer
(``request_timeout_s``), and has its time. As long as rows come a read may take any time."""


@dataclass(frozen=True)
class UnreadRow:
    """A key whose row could not be read, after everything was tried.

    :ivar place: among the keys that were given
    :ivar reason: names table and key, cause, consistency level, nodes and remedy
    """

    place: int
    reason: str


@dataclass(frozen=True)
class RowsRead:
    """The rows of some keys.

    :ivar images: images of the rows that exist, in the order of the given keys
    :ivar places: place of each image's key among the given keys
    :ivar unread: keys of which nobody knows; of all others without an image there is no row
    :ivar received: rows that the cluster sent, also those that nobody wanted
    """

    images: pa.RecordBatch
    places: Integers
    unread: tuple[UnreadRow, ...]
    received: int


def read_rows(
    session: SessionAt,
    table: TableSchema,
    keys: pa.RecordBatch,
    ring: RankedRing,
    settings: ClusterSettings,
    permits: Permits,
    *,
    element_times: bool,
    misfits: Literal["error", "raw"],
    table_rows: float | None = None,
    of_all: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> RowsRead:
    """Read rows by their keys.

    All is held in memory at once: 100,000 keys are a good portion. A key that is given several times has one image.

    :param session: from :func:`ringsync.sources.scan.scan.scan_session`, as of a moment
    :param keys: keys (:data:`ringsync.sources.lookup.keys.ROW_KEYS`), in any order. For a key without clustering there
        is one image with the static cells of its partition only, or one image for each row of the partition; other
        keys of a partition that is wanted as a whole get no image of their own
    :param ring: the first rank is asked first, whatever the consistency level
    :param settings: consistency level (``LOCAL_ONE``, ``LOCAL_QUORUM``, …), page size and user
    :param permits: asked for every page, by the rows that it may have
    :param element_times: whether the server can tell the times of elements
        (:func:`ringsync.sources.scan.scan.columns_without_element_times`); if not, images say that they are unknown
    :param misfits: see :func:`ringsync.images.from_pages.row_images`
    :param table_rows: about so many rows the table has, one copy of it: lets small token ranges be read as a whole of
        which large parts are wanted; None: that is not done
    :param of_all: the rows are of use only if all of them come: the first key that cannot be read ends the read
    :param sleep: waits so many seconds before something is asked again
    :param clock: s, of any beginning
    :raises NoPermissionError: when the user may not read the table
    :raises cassandra.InvalidRequest: when the table is gone
    :raises UnrepresentableValueError: for a value that its Arrow type cannot hold, with ``misfits="error"``
    :raises ValueError: for a key that is not one of the table's
    """
    if session.now is None:
        raise ValueError("rows are read as of a moment: the session has none")
    reader = _Reader(
        *(session, session.now, row_keys(keys, table), ring, settings, permits),
        *(element_times, misfits, of_all, sleep, clock),
    )
    reader.read(table_rows / RING_WIDTH if table_rows else None)
    return reader.result()


@dataclass
class _Running:
    """A lookup on its way."""

    lookup: Lookup
    request: Request
    pages: Pages
    asked: Asked | None


@dataclass
class _Came:
    """Pages that wait to be decoded together, each with its lookup."""

    lookups: list[Lookup] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    rows: int = 0
    size: int = 0


@dataclass
class _Reader:
    """Reads the rows of one call."""

    session: SessionAt
    now: int
    keys: RowKeys
    ring: RankedRing
    settings: ClusterSettings
    permits: Permits
    element_times: bool
    misfits: Literal["error", "raw"]
    of_all: bool
    sleep: Callable[[float], None]
    clock: Callable[[], float]
    queries: dict[Kind, LookupQuery] = field(default_factory=dict)
    waiting: deque[Lookup] = field(default_factory=deque)
    running: deque[_Running] = field(default_factory=deque)
    most_keys: int = sys.maxsize
    failures: int = 0
    failing_since: float | None = None
    delays: list[float] = field(default_factory=lambda: [*RETRY_DELAYS_S])
    ended: str | None = None
    unread: dict[int, str] = field(default_factory=dict)
    came: dict[Kind, _Came] = field(default_factory=dict)
    images: list[pa.RecordBatch] = field(default_factory=list)
    places: list[Integers] = field(default_factory=list)
    received: int = 0

    def read(self, rows_per_token: float | None) -> None:
        """Read everything."""
        every = np.arange(len(self.keys.places))
        self.waiting.extend(plan_lookups(self.keys, self.ring, every, rows_per_token=rows_per_token))
        while self.waiting or self.running:
            while self.waiting and len(self.running) < IN_FLIGHT:
                if self.ended is not None:
                    self._give_up(self.waiting.popleft(), self.ended)
                    continue
                if len(self.waiting[0].keys) > self.most_keys:
                    self.waiting.extend(self._smaller(self.waiting.popleft()))
                    continue
                started = self._start(self.waiting[0])
                if started is None:
                    break
                self.waiting.popleft()
                self.running.append(started)
            if self.running:
                self._finish(self.running.popleft())
        for kind in [*self.came]:
            self._decode(kind)

    def result(self) -> RowsRead:
        """Return what was read."""
        nothing = pa.RecordBatch.from_pylist([], row_image_schema(self.keys.table))
        images = pa.concat_batches(self.images or [nothing])
        places = self.keys.places[np.concatenate([np.zeros(0, np.int64), *self.places])]
        order = np.argsort(places, kind="stable")
        unread = [UnreadRow(int(self.keys.places[key]), reason) for key, reason in self.unread.items()]
        unread.sort(key=lambda row: row.place)
        return RowsRead(taken(images, order), places[order], tuple(unread), self.received)

    def _start(self, lookup: Lookup) -> _Running | None:
        """Ask for a lookup's first page; None: that would take a wait, and others are on their way."""
        query = self._query(lookup.kind)
        request = request_of(lookup, query.cql, self.keys)
        delays = self.delays if lookup.patient else ()
        statements = self.session.statements
        pages = Pages(self.session, statements, lookup.endpoints, self.settings, self.permits, self.sleep, delays)
        try:
            asked = pages.ask(request, wait=not self.running)
            if asked is None:
                return None
        except PASSING_ERRORS:
            asked = None  # it is asked again by whoever waits for it
        return _Running(lookup, request, pages, asked)

    def _query(self, kind: Kind) -> LookupQuery:
        if kind not in self.queries:
            self.queries[kind] = lookup_query(self.keys.table, kind, element_times=self.element_times)
        return self.queries[kind]

    def _finish(self, running: _Running) -> None:
        """Wait for a lookup's pages, and decide what to do if they do not come."""
        lookup = running.lookup
        found: list[Page] = []
        rows = 0
        try:
            for page in running.pages.read(running.request, running.asked):
                found.append(page)
                rows += row_count(page)
                if lookup.most_rows is not None and rows > lookup.most_rows:
                    break
        except Stuck as stuck:
            self._failed(lookup, stuck)
            return
        except InvalidRequest as error:
            self._refused(lookup, error)
            return
        self.received += rows
        self.failing_since = None
        if lookup.most_rows is not None and rows > lookup.most_rows:
            # A partition in it is larger than most: reading on costs more than reading rows by their keys.
            self.waiting.extend(plan_lookups(self.keys, self.ring, lookup.keys))
            return
        came = self.came.setdefault(lookup.kind, _Came())
        came.lookups += [lookup] * len(found)
        came.pages += found
        came.rows += rows
        came.size += sum(map(len, found))
        if came.rows >= ROWS_AT_ONCE or came.size >= BYTES_AT_ONCE:
            self._decode(lookup.kind)

    def _failed(self, lookup: Lookup, stuck: Stuck) -> None:
        now = self.clock()
        self.failures += 1
        parts = self._smaller(lookup)
        is_known_as_too_large = len(lookup.keys) > self.most_keys
        if self.failing_since is None:
            self.failing_since = now
        elif parts and not stuck.absent and not is_known_as_too_large:
            # Nothing comes at this size: all that waits is asked for in smaller portions, and has its time anew.
            self.most_keys, self.failing_since = max(1, len(lookup.keys) // 4), now
        elif now - self.failing_since > max(NO_PROGRESS_S, self.settings.request_timeout_s):
            self._end(stuck)
        if self.ended is None and self.failures <= MAX_FAILURES:
            if parts and not stuck.absent:
                if not is_known_as_too_large:
                    self.sleep(RETRY_DELAYS_S[0])
                # Behind the others, which need not wait for what is slow.
                self.waiting.extend(replace(part, patient=len(part.keys) == 1) for part in parts)
                return
            if not lookup.patient and self.delays:
                self.waiting.append(replace(lookup, patient=True))
                return
        if lookup.patient:
            self.delays.clear()
        if self.of_all:
            self._end(stuck)
        self._give_up(lookup, stuck.reason)

    def _end(self, stuck: Stuck) -> None:
        """Ask for nothing more; also what is on its way is not asked for again."""
        self.ended = stuck.reason
        self.delays.clear()

    def _smaller(self, lookup: Lookup) -> list[Lookup]:
        if lookup.kind == "slice":
            return plan_lookups(self.keys, self.ring, lookup.keys)
        return halves(lookup, self.keys)

    def _refused(self, lookup: Lookup, error: InvalidRequest) -> None:
        """Ask for fewer keys: the server does not take so many (guardrails), or one of them."""
        if "uardrail" in str(error):
            self.most_keys = max(1, min(self.most_keys, len(lookup.keys) // 2))
        else:
            # Raises where no key can be read.
            self.session.prepare(self._query(lookup.kind).cql)
        parts = self._smaller(lookup)
        self.waiting.extend(parts)
        if not parts:
            self._give_up(lookup, f"could not be read: {error}")

    def _give_up(self, lookup: Lookup, reason: str) -> None:
        for key in lookup.keys.tolist():
            table = self.keys.table.full_name
            self.unread[key] = f"{table}: the row with {self.keys.text(key)} {reason}"

    def _decode(self, kind: Kind) -> None:
        """Decode the pages that came for lookups of a kind, and keep the rows that are wanted."""
        came = self.came.pop(kind)
        query, table = self._query(kind), self.keys.table
        images = row_images(came.pages, query.table, query.layout, self.now, self.misfits)
        if not images.num_rows:
            return
        keys = self._keys_of(kind, came, query)
        wanted = keys >= 0
        if kind == "static":
            wanted &= _with_cells(images, query.table)
            images = widened(images, query.table, table)
        chosen = np.flatnonzero(wanted)
        self.images.append(images if wanted.all() else taken(images, chosen))
        self.places.append(keys[chosen])

    def _keys_of(self, kind: Kind, came: _Came, query: LookupQuery) -> Integers:
        """Return the place of each row's key among the keys; -1: nobody wants it."""
        asked = np.unique(np.concatenate([lookup.keys for lookup in came.lookups]))
        _, cells = page_cells(join_pages(came.pages), len(query.layout))
        # Behind the token come the columns of the table, and first those of its key.
        key_count = len(query.table.key_columns)
        partition_keys, clustering = key_columns_of(cells[1 : 1 + key_count], query.table)
        if kind in ("static", "whole"):
            places = places_in(taken(self.keys.partition_keys, self.keys.partitions[asked]), partition_keys)
        else:
            places = places_in(taken(self.keys.identities, asked), row_identities(partition_keys, clustering))
        return np.where(places < 0, -1, asked[places])


def _with_cells(images: pa.RecordBatch, table: TableSchema) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell which images have any value."""
    x = images.column("_x")
    found = np.zeros(images.num_rows, np.bool_)
    for place in range(1 + len(table.partition_key), 1 + len(table.columns)):
        found |= valid_mask(images.column(place))
        if x.null_count < len(x):
            found |= valid_mask(x.field(place - 1).field("raw"))
    return found
