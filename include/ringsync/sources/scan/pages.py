"""The pages of one SELECT: requested ahead, and requested again if they do not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import RLock
from typing import Any

from cassandra import ConsistencyLevel, OperationTimedOut, ReadFailure, ReadTimeout, Unavailable
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ConnectionException
from cassandra.protocol import IsBootstrappingErrorMessage, OverloadedErrorMessage, ServerError
from cassandra.query import BoundStatement

from ringsync.cluster.limits import Permits
from ringsync.cluster.page_size import STEP, PageSize
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.session import SCAN_PROFILE, ClusterSettings, explained_errors
from ringsync.formats.result_page import Page

PAGES_AHEAD = 4
BYTES_AHEAD = 8 * 2**20
"""Limits of what may wait for the reader when another page is requested; the first one reached counts."""

RETRY_DELAYS_S = (0.5, 2.0, 8.0)
"""Pauses before a page is requested again."""
PATIENCE = 3
"""Pages for which all pauses were in vain; after so many, only the first pause is made."""
_OVERLOADS = (OperationTimedOut, ReadTimeout, OverloadedErrorMessage)
_ABSENCES = (Unavailable, ConnectionException, IsBootstrappingErrorMessage, NoHostAvailable)
PASSING_ERRORS = (*_OVERLOADS, *_ABSENCES, ReadFailure, ServerError)
"""Errors that may be over a moment later, or that a smaller page may not have."""

_LONGER_TIMEOUTS = (
    "longer timeouts may help: range_request_timeout and read_request_timeout of the nodes, "
    "cassandra.request_timeout_s of ringsync"
)
_HINTS: dict[type[Exception], str] = {
    ReadTimeout: _LONGER_TIMEOUTS,
    OperationTimedOut: _LONGER_TIMEOUTS,
    ReadFailure: "the logs of the nodes say why, often too many tombstones: compact the table",
    Unavailable: "too few replicas are alive: see nodetool status",
    OverloadedErrorMessage: "lower limits may help",
}


@dataclass(frozen=True)
class Request:
    """A SELECT and its parameters.

    :ivar values: values as Cassandra serialises them
    :ivar limit: most rows of a page; no page is then requested ahead, unless ``ahead``. None: as the settings say
    :ivar listed: number of rows that it lists by their keys
    :ivar thorough: whether pages get smaller until one of a single row fails, however many attempts that takes
    :ivar begins_small: whether its first page has one row, whatever other rows of the table are like: for many rows of
        one partition, which may be unlike all others
    """

    cql: str
    values: tuple[bytes, ...]
    limit: int | None = None
    ahead: bool = False
    listed: int = 0
    thorough: bool = False
    begins_small: bool = False


class Stuck(Exception):
    """A page could not be read.

    :ivar absent: whether no node could be asked: then neither a smaller page nor a smaller range can help
    :ivar reason: what happened, which nodes were asked, and what may help
    """

    def __init__(self, absent: bool, reason: str) -> None:
        super().__init__(reason)
        self.absent = absent
        self.reason = reason


class Asked:
    """A page on its way. Its permit ends when the page comes or fails, even if no reader waits for it any more.

    :ivar rows: most rows that it may have
    :ivar place: the page's place among those of its SELECT
    :ivar rest: the page's size in bytes, and the next page's paging state; None: it has not come yet, or is the last
    :ivar next: the page behind it, once that is requested
    :ivar asked_s: when it was asked for, s since the epoch, by this host's clock; ``came_s``: when it came
    """

    def __init__(self, response: Any, rows: int, place: int, permits: Permits) -> None:
        self.rows = rows
        self.place = place
        self.rest: tuple[int, bytes] | None = None
        self.next: Asked | None = None
        self.asked_s = self.came_s = time.time()
        self._response = response
        self._permits = permits
        self._ended: Future[None] = Future()

    @property
    def coordinator(self) -> Any:
        """The driver's host that has answered."""
        return self._response.coordinator_host

    def listen(self, came: Callable[[Page], None]) -> None:
        """Let the driver call a function when the page comes.

        :param came: function that gets the page, in the driver's own thread
        """
        self._listener = came
        self._response.add_callbacks(self._came, self._failed)

    def page(self, user: str | None) -> tuple[bytes, bytes | None]:
        """Wait for the page, and return its bytes and the next page's paging state. It can be had once."""
        self._ended.result()
        with explained_errors(user):
            result = self._response.result()
        # The driver's objects refer to each other, so they last until garbage is collected; the page need not.
        return result.current_rows.pop(), result.paging_state

    def _came(self, rows: list[Page]) -> None:
        page = rows[0]
        self.came_s = time.time()

        def end() -> None:
            self._permits.answered(row_count(page), len(page))
            if self._response.has_more_pages:
                self.rest = len(page), self._response._paging_state
            self._listener(page)

        self._end(end)

    def _failed(self, error: Exception) -> None:
        self._end(lambda: self._permits.failed(overloads(error)))

    def _end(self, end: Callable[[], None]) -> None:
        # This runs in the driver's own thread, which must not get an error.
        try:
            end()
        except Exception as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


@dataclass
class Pages:
    """A reader of pages from the replicas of one token range. The session remembers how large pages may be.

    ``times`` says when the page that :meth:`read` returned last was asked for, and when it came, s since the epoch;
    ``ended``, whether it was the last page.

    :ivar statements: statements prepared on this session, by CQL; new ones are added
    :ivar endpoints: ``address:port`` of the replicas; the first one is asked first
    :ivar sleep: function that waits before a page is requested again, given seconds
    :ivar delays: pauses before a page is requested again, in seconds; empty: each page is requested once. The caller
        may shorten a list at any time
    """

    session: SessionAt
    statements: dict[str, Any]
    endpoints: tuple[str, ...]
    settings: ClusterSettings
    permits: Permits
    sleep: Callable[[float], None]
    delays: Sequence[float] = RETRY_DELAYS_S

    def __post_init__(self) -> None:
        self._stuck = 0
        self._taken = -1
        self._rows_came = 0
        self._last: Asked | None = None
        self.times = 0.0, 0.0
        self.ended = False
        # The reader and the driver's thread may request the next page at the same time.
        self._lock = RLock()

    def read(self, request: Request, asked: Asked | None = None) -> Iterator[Page]:
        """Return the pages of a SELECT. Before it returns one, it requests the next, if that needs no waiting.

        The driver's own thread also requests the next page when one comes, unless enough pages wait for the reader. So
        the server need not wait for the reader.

        :param asked: the first page, if it is on its way
        :raises Stuck: a page could not be read
        """
        paging_state: bytes | None = None
        self._taken = -1
        while True:
            asked, page, paging_state = self._page(request, paging_state, asked)
            self._taken = asked.place
            if self._last is not None:
                self._go_on(request, self._last)
            self.times, self.ended = (asked.asked_s, asked.came_s), paging_state is None
            yield page
            if self.ended:
                return
            asked = asked.next

    def _go_on(self, request: Request, last: Asked) -> None:
        """Request the next page, if the last one has come, few pages wait for the reader, and it needs no waiting."""
        with self._lock:
            waiting = last.place - self._taken
            if last.rest is None or last.next is not None or waiting >= PAGES_AHEAD:
                return
            if request.limit is not None and not request.ahead:
                return
            size, paging_state = last.rest
            if waiting * size < BYTES_AHEAD:
                last.next = self.ask(request, paging_state, last.place + 1, wait=False)

    def ask(self, request: Request, paging_state: bytes | None = None, place: int = 0, *, wait: bool) -> Asked | None:
        """Request one page.

        :returns: None: only without ``wait``, if its permit must be waited for
        """
        if paging_state is None:
            self._rows_came = 0
        rows = self.permits.ask(self._rows(request), wait)
        if rows is None:
            return None
        try:
            statement = self._bound(request, rows)
            response = self.session.execute_async(statement, execution_profile=SCAN_PROFILE, paging_state=paging_state)
        except BaseException as error:
            self.permits.failed(overloads(error))
            raise

        asked = Asked(response, rows, place, self.permits)

        def came(page: Page) -> None:
            self._rows_came += row_count(page)
            self._size(request).came(row_count(page), len(page), request.listed)
            self._go_on(request, asked)

        self._last = asked
        asked.listen(came)
        return asked

    def _page(
        self, request: Request, paging_state: bytes | None, asked: Asked | None
    ) -> tuple[Asked, Page, bytes | None]:
        """Return the requested page, and the next page's paging state; request the page again after passing errors."""
        delays = iter(self.delays if self._stuck < PATIENCE else self.delays[:1])
        size = self._size(request)
        ceiling = size.ceiling
        attempts = 0
        while True:
            rows = asked.rows if asked else self._rows(request)
            try:
                asked = asked or self.ask(request, paging_state, self._taken + 1, wait=True)
                assert asked is not None
                rows = asked.rows
                page, further = asked.page(self.settings.username)
                self.session.coordinators.add(asked.coordinator)
                return asked, page, further
            except PASSING_ERRORS as error:
                attempts += 1
                absent = all(isinstance(cause, _ABSENCES) for cause in causes(error))
                delay = next(delays, None)
                if delay is None and (absent or rows == 1 or not request.thorough):
                    self._stuck += 1
                    # Smaller pages did not help, so large ones may not be the cause.
                    size.ceiling = ceiling
                    raise Stuck(absent, self._explain(error, attempts, rows)) from error
                if not all(isinstance(cause, Unavailable | IsBootstrappingErrorMessage) for cause in causes(error)):
                    size.failed(rows)
                self.endpoints = self.endpoints[1:] + self.endpoints[:1]
                if delay:
                    self.sleep(delay)
                asked = None

    def _bound(self, request: Request, rows: int) -> Any:
        if request.cql not in self.statements:
            self.statements[request.cql] = self.session.prepare(request.cql)
        statement = BoundStatement(self.statements[request.cql])
        # Its bind() would serialise Python's values; here they are serialised already.
        statement.values = statement.raw_values = list(request.values)
        statement.consistency_level = ConsistencyLevel.name_to_value[self.settings.consistency_level]
        statement.is_idempotent = True
        # A page that is not full is the last: a list's page has room for one more row, and saves a request.
        statement.fetch_size = min(rows + 1, self.settings.page_size) if request.listed else rows
        statement.endpoints = self.endpoints
        return statement

    def _size(self, request: Request) -> PageSize:
        return self.session.sizes[select_of(request.cql), request.thorough]

    def _rows(self, request: Request) -> int:
        most = min(self.settings.page_size, request.limit or self.settings.page_size)
        rows = self._size(request).rows(min(most, STEP * self._rows_came) if request.begins_small else most)
        return max(rows, min(request.listed, most))  # what is listed is read at once, whatever the page has

    def _explain(self, error: Exception, attempts: int, rows: int) -> str:
        cause = causes(error)[-1]
        hint = next((f"; {hint}" for kind, hint in _HINTS.items() if isinstance(cause, kind)), "")
        return (
            f"could not be read at {self.settings.consistency_level} from {', '.join(sorted(self.endpoints))} in "
            f"{attempts} attempts, the last with pages of {rows} rows: {type(cause).__name__}: {cause}{hint}"
        )


def select_of(cql: str) -> str:
    """Return what a SELECT reads of each row, and of which table."""
    return cql.partition(" WHERE ")[0]


def causes(error: BaseException) -> list[BaseException]:
    """Return the errors of the single nodes, if the driver has gathered them; else the error itself."""
    if isinstance(error, NoHostAvailable) and isinstance(error.errors, dict):
        return [cause for cause in error.errors.values() if isinstance(cause, BaseException)] or [error]
    return [error]


def overloads(error: BaseException) -> bool:
    """Tell whether the error shows that the cluster is overloaded."""
    return any(isinstance(cause, _OVERLOADS) for cause in causes(error))


def row_count(page: Page) -> int:
    """Return the number of rows of a result page."""
    return int.from_bytes(page[:4], "big")
