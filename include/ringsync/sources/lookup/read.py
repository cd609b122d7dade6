"""The reader of rows by their keys, as row images: what rows look like after they were changed.

One request asks for many keys (requests.py), and some requests run at once. A request that fails is divided into two
with half of its keys each, down to single keys. So a key that cannot be read costs a few more requests, and all other
keys are read.

A read does not wait long for a cluster that does not answer, since others wait behind it, and its caller reads again
later. Once all pauses before a repetition were in vain, the read makes no more pauses, and a read without progress
ends. Result pages go to the compiled decoders as they come, those of some requests together; nothing else is kept.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from cassandra import InvalidRequest

from ringsync.cluster.guardrails import OF_LISTS
from ringsync.cluster.limits import Permits
from ringsync.cluster.masks import check_pages, wait_until_unmasked
from ringsync.cluster.page_size import STEP, PageSize
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.session import ClusterSettings, GuardrailError
from ringsync.compiled.arrow import Integers, valid_mask
from ringsync.formats.result_page import Page, join_pages, page_cells
from ringsync.images.from_pages import row_images, widened
from ringsync.images.schema import row_image_schema
from ringsync.ring.ranks import RankedRing
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.keys import RowKeys, key_columns_of, places_in, row_identities, row_keys, taken
from ringsync.sources.lookup.requests import (
    CLUSTERINGS,
    Kind,
    Lookup,
    LookupQuery,
    divided,
    halves,
    lookup_query,
    plan_lookups,
    request_of,
)
from ringsync.sources.scan.pages import (
    PASSING_ERRORS,
    RETRY_DELAYS_S,
    Asked,
    Pages,
    Request,
    Stuck,
    row_count,
    select_of,
)

IN_FLIGHT = 12
"""Requests on the way at once; fewer leave the server idle, more gain nothing. They are fewer while a row has more
than :data:`ringsync.cluster.page_size.PAGE_BYTES`."""
ROWS_AT_ONCE = 4096
BYTES_AT_ONCE = 8 * 2**20
"""Limits of the pages decoded together; the first one reached counts."""
MAX_FAILURES = 100
"""Failed requests of a read after which no failed one is repeated: more than single keys must be broken."""
_PERMITTED_KEYS = "permitted keys"
"""What a session knows of guardrails on the number of keys in a request."""
NO_PROGRESS_S = 15.0
"""Seconds without an answer after which a read ends, if even the smallest requests fail; ``request_timeout_s`` if that
is longer. As long as rows come, a read may take any time."""


@dataclass(frozen=True)
class UnreadRow:
    """A key whose row could not be read, after everything was tried.

    :ivar place: place of the key among the given keys
    :ivar reason: table and key, cause, consistency level, nodes and remedy, as text
    """

    place: int
    reason: str


@dataclass(frozen=True)
class RowsRead:
    """The rows of some keys.

    :ivar images: images of the rows that exist, in the order of the given keys
    :ivar places: place of each image's key among the given keys
    :ivar unread: keys that could not be read; any other key without an image has no row
    """

    images: pa.RecordBatch
    places: Integers
    unread: tuple[UnreadRow, ...]


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
    of_all: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> RowsRead:
    """Read rows by their keys.

    All rows are in memory at once: 100,000 keys are a good number. A key that is given several times gets one image.

    :param session: from :func:`ringsync.sources.scan.scan.scan_session`, as of a moment
    :param keys: keys (see :func:`ringsync.sources.lookup.keys.row_keys`), in any order. A key without clustering gets
        one image with only the static cells of its partition. A key of a whole partition gets one image for each row,
        and other keys of this partition get none of their own
    :param ring: ring snapshot; its first rank is asked first, whatever the consistency level
    :param settings: consistency level (``LOCAL_ONE``, ``LOCAL_QUORUM``, …), page size and user
    :param permits: permits for the pages
    :param element_times: whether the server can return the times of elements
        (:func:`ringsync.sources.scan.scan.columns_without_element_times`); if not, images have them as unknown
    :param misfits: see :func:`ringsync.images.from_pages.row_images`
    :param of_all: whether the rows are useful only together: then the first key that cannot be read ends the read
    :param sleep: function that waits before a request is repeated, given seconds
    :param clock: function that returns seconds since any moment
    :raises ClusterError: the user may not read the table, or its columns are masked for the user
    :raises GuardrailError: a guardrail forbids what the settings say
    :raises cassandra.InvalidRequest: the table is gone
    :raises UnrepresentableValueError: an Arrow type cannot hold a value, with ``misfits="error"``
    :raises ValueError: a key does not fit the table, or the session has no moment
    """
    if session.now is None:
        raise ValueError("rows are read as of a moment, but the session has none")
    wait_until_unmasked(session, table, settings.username)
    reader = _Reader(
        *(session, session.now, row_keys(keys, table), ring, settings, permits),
        *(element_times, misfits, of_all, sleep, clock),
    )
    reader.read()
    return reader.result()


def has_room(asked: Iterable[Asked | None], size: PageSize) -> bool:
    """Tell whether one more request may be on its way: together they have no more bytes than full pages.

    :param asked: pages on their way; None: one that must be asked for again
    """
    return sum(page.rows for page in asked if page) < IN_FLIGHT * size.fitting


@dataclass
class _Running:
    """A lookup on its way.

    :ivar rest: what is asked for after its answer
    """

    lookup: Lookup
    rest: Lookup | None
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
    """The reader of one call's rows."""

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
    answered: int = 0  # most keys of a lookup that came since one failed
    most_keys: int = sys.maxsize
    failed_keys: int = sys.maxsize  # fewest keys of a lookup that failed since one of so many came
    failures: int = 0
    failing_since: float | None = None
    delays: list[float] = field(default_factory=lambda: [*RETRY_DELAYS_S])
    ended: str | None = None
    unread: dict[int, str] = field(default_factory=dict)
    came: dict[Kind, _Came] = field(default_factory=dict)
    images: list[pa.RecordBatch] = field(default_factory=list)
    places: list[Integers] = field(default_factory=list)

    def read(self) -> None:
        """Read everything."""
        self.waiting.extend(plan_lookups(self.keys, self.ring))
        while self.waiting or self.running:
            while self.waiting and len(self.running) < IN_FLIGHT:
                if self.ended is not None:
                    self._give_up(self.waiting.popleft(), self.ended)
                    continue
                if not self._has_room() or not self._start():
                    break
            if self.running:
                running = self.running.popleft()
                self._finish(running)
                if running.rest:
                    self.waiting.appendleft(running.rest)
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
        return RowsRead(taken(images, order), places[order], tuple(unread))

    def _has_room(self) -> bool:
        """Tell whether the next lookup may be on its way with the others: all have no more bytes than full pages."""
        asked = [running.asked for running in self.running]
        return not asked or (self.answered > 0 and has_room(asked, self._size(self.waiting[0].kind)))

    def _start(self) -> bool:
        """Request the next lookup's first page.

        :returns: False: its permit must be waited for, and other lookups are on their way
        """
        lookup, rest = divided(self.waiting[0], self._most_keys(self.waiting[0]))
        query = self._query(lookup.kind)
        request = request_of(lookup, query.cql, self.keys)
        # A list that a node has not answered is never repeated as it was.
        delays = self.delays if lookup.patient and request.listed <= 1 else ()
        statements = self.session.statements
        pages = Pages(self.session, statements, lookup.endpoints, self.settings, self.permits, self.sleep, delays)
        try:
            asked = pages.ask(request, wait=not self.running)
            if asked is None:
                return False
            if asked.rows < request.listed:
                self.most_keys = asked.rows  # by the limits: each page would read what is left of the list
        except PASSING_ERRORS:
            asked = None  # _finish requests it again
        self.waiting.popleft()
        if rest and self.answered and lookup.most_keys >= CLUSTERINGS:
            self.waiting.appendleft(rest)
            rest = None
        self.running.append(_Running(lookup, rest, request, pages, asked))
        return True

    def _most_keys(self, lookup: Lookup) -> int:
        """Return how many keys may be asked for together, so that a node can bear all of their rows."""
        permitted = min(self.most_keys, lookup.most_keys, int(self.session.facts.get(_PERMITTED_KEYS, sys.maxsize)))
        if lookup.kind == "whole":
            return permitted
        # The keys of a read may be unlike those of the last one.
        return min(permitted, self._size(lookup.kind).keys(self.settings.page_size), max(1, STEP * self.answered))

    def _size(self, kind: Kind) -> PageSize:
        return self.session.sizes[select_of(self._query(kind).cql), False]

    def _query(self, kind: Kind) -> LookupQuery:
        if kind not in self.queries:
            server_time = not self.session.reads_as_of
            self.queries[kind] = lookup_query(
                self.keys.table, kind, element_times=self.element_times, server_time=server_time
            )
        return self.queries[kind]

    def _finish(self, running: _Running) -> None:
        """Wait for a lookup's pages, and decide what to do if they do not come."""
        lookup = running.lookup
        pages: list[Page] = []
        rows = 0
        try:
            for page in running.pages.read(running.request, running.asked):
                pages.append(page)
                rows += row_count(page)
        except Stuck as stuck:
            self._failed(running, stuck)
            return
        except GuardrailError as error:
            if error.name not in OF_LISTS or len(lookup.keys) == 1:
                raise  # it would be refused again
            self.session.facts[_PERMITTED_KEYS] = min(
                self.session.facts.get(_PERMITTED_KEYS, sys.maxsize), len(lookup.keys) // 2
            )
            self._refused(lookup, error)
            return
        except InvalidRequest as error:
            # This raises the error again if no key at all can be read.
            self.session.prepare(self._query(lookup.kind).cql)
            self._refused(lookup, error)
            return
        self.failing_since = None
        self.answered = max(self.answered, len(lookup.keys))
        if len(lookup.keys) >= self.failed_keys:
            self.failed_keys = sys.maxsize
        came = self.came.setdefault(lookup.kind, _Came())
        came.lookups += [lookup] * len(pages)
        came.pages += pages
        came.rows += rows
        came.size += sum(map(len, pages))
        if came.rows >= ROWS_AT_ONCE or came.size >= BYTES_AT_ONCE:
            self._decode(lookup.kind)

    def _failed(self, running: _Running, stuck: Stuck) -> None:
        now, lookup = self.clock(), running.lookup
        self.failures += 1
        self.answered = 0
        parts = [] if stuck.absent else halves(lookup, self.keys)
        is_known_as_too_large = len(lookup.keys) > self.most_keys
        if parts and not is_known_as_too_large and len(lookup.keys) >= self.failed_keys:
            # Nothing comes at this size: make all waiting lookups smaller, and count the time anew.
            self.most_keys, self.failing_since = max(1, len(lookup.keys) // 4), now
        elif self.failing_since is None:
            self.failing_since = now
        elif now - self.failing_since > max(NO_PROGRESS_S, self.settings.request_timeout_s):
            self._end(stuck)
        if not stuck.absent:
            self.failed_keys = min(self.failed_keys, len(lookup.keys))
            running.rest = running.rest and replace(running.rest, most_keys=1)
        elif running.rest:
            # Its replicas are the same.
            lookup, running.rest = replace(lookup, keys=np.append(lookup.keys, running.rest.keys)), None
        if self.ended is None and self.failures <= MAX_FAILURES:
            if parts:
                if not is_known_as_too_large:
                    self.sleep(RETRY_DELAYS_S[0])
                # They go behind the others, which need not wait for a slow lookup.
                self.waiting.extend(replace(part, most_keys=1, patient=len(part.keys) == 1) for part in parts)
                return
            if self.delays and not (lookup.patient and running.request.listed <= 1):
                self.waiting.append(replace(lookup, most_keys=1, patient=True))
                return
        if lookup.patient:
            self.delays.clear()
        if self.of_all:
            self._end(stuck)
        self._give_up(lookup, stuck.reason)

    def _end(self, stuck: Stuck) -> None:
        """Start no more lookups, and repeat none of those on their way."""
        self.ended = stuck.reason
        self.delays.clear()

    def _refused(self, lookup: Lookup, error: Exception) -> None:
        """Ask for fewer keys: the server refuses so many, or one of them."""
        parts = halves(lookup, self.keys)
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
        check_pages(self.session, table, self.settings.username)
        images = row_images(came.pages, query.table, query.layout, self.now, self.misfits)
        if not images.num_rows:
            return
        keys = self._keys_of(kind, came, query)
        wanted = keys >= 0
        if kind == "rows":  # what one lookup wants may have come for another, too
            wanted[np.setdiff1d(np.arange(len(keys)), np.unique(keys, return_index=True)[1])] = False
        if kind == "static":
            wanted &= _with_cells(images, query.table)
            images = widened(images, query.table, table)
        chosen = np.flatnonzero(wanted)
        self.images.append(images if wanted.all() else taken(images, chosen))
        self.places.append(keys[chosen])

    def _keys_of(self, kind: Kind, came: _Came, query: LookupQuery) -> Integers:
        """Return the place of each row's key among the keys; -1: it is not wanted."""
        asked = np.unique(np.concatenate([lookup.keys for lookup in came.lookups]))
        _, cells = page_cells(join_pages(came.pages), len(query.layout))
        # After the token come the columns of the table, those of its key first.
        key_count = len(query.table.key_columns)
        partition_keys, clustering = key_columns_of(cells[1 : 1 + key_count], query.table)
        if kind in ("static", "whole"):
            places = places_in(taken(self.keys.partition_keys, self.keys.partitions[asked]), partition_keys)
        else:
            places = places_in(taken(self.keys.identities, asked), row_identities(partition_keys, clustering))
        return np.where(places < 0, -1, asked[places])


def _with_cells(images: pa.RecordBatch, table: TableSchema) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Mark the images that have a value outside their partition key."""
    x = images.column("_x")
    has_value = np.zeros(images.num_rows, np.bool_)
    for place in range(1 + len(table.partition_key), 1 + len(table.columns)):
        has_value |= valid_mask(images.column(place))
        if x.null_count < len(x):
            has_value |= valid_mask(x.field(place - 1).field("raw"))
    return has_value
