"""The pages of one SELECT: asked for ahead, and asked for again when the cluster does not give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import RLock
from typing import Any

from cassandra import ConsistencyLevel, OperationTimedOut, ReadFailure, ReadTimeout, Unavailable
from cassandra.cluster import NoHostAvailable, Session
from cassandra.connection import ConnectionException
from cassandra.protocol import IsBootstrappingErrorMessage, OverloadedErrorMessage, ServerError
from cassandra.query import BoundStatement

from ringsync.cluster.limits import Permits
from ringsync.cluster.session import SCAN_PROFILE, ClusterSettings, explained_errors
from ringsync.formats.result_page import Page

PAGE_BYTES = 8 * 2**20
"""Wanted size of a page: where rows are wide, fewer rows are asked for than the settings allow."""

PAGES_AHEAD = 4
BYTES_AHEAD = 8 * 2**20
"""So much of a range may have come before its reader takes it, whichever is less, and one page be on its way."""

RETRY_DELAYS_S = (0.5, 2.0, 8.0)
"""Pauses before a page is asked for again."""
PATIENCE = 3
"""After so many pages for which all pauses were in vain only the first pause is made."""
SHRINK = 4
"""A page that did not come is asked for again with this part of its rows."""
GROWTH = 1.25
"""Each page that came allows the next one so many times as many rows, up to nearly what failed …"""
CREEP = 1.002
"""… which creeps up by so much: where large pages fail for good, few are tried, since each costs a timeout."""

_OVERLOADS = (OperationTimedOut, ReadTimeout, OverloadedErrorMessage)
_ABSENCES = (Unavailable, ConnectionException, IsBootstrappingErrorMessage, NoHostAvailable)
PASSING_ERRORS = (*_OVERLOADS, *_ABSENCES, ReadFailure, ServerError)
"""What may be over a moment later, or not happen to a smaller page."""

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
    :ivar limit: rows a page at most, and no page is asked for ahead; None: as the settings say
    :ivar thorough: whether pages get smaller until one of a single row fails, however many attempts that takes
    """

    cql: str
    values: tuple[bytes, ...]
    limit: int | None = None
    thorough: bool = False


class Stuck(Exception):
    """A page could not be had.

    :ivar absent: there was nobody to ask: neither a smaller page nor a smaller range can help
    :ivar reason: what happened, from whom it was wanted, and what may help
    """

    def __init__(self, absent: bool, reason: str) -> None:
        super().__init__(reason)
        self.absent = absent
        self.reason = reason


class Asked:
    """A page on its way. Its permit ends when it comes or fails, whether or not somebody still waits for it.

    :ivar rows: greatest number of rows
    :ivar place: the page's place among those of its SELECT
    :ivar rest: the page's bytes, and where the next page starts, once it has come and if there is a next one
    :ivar next: the page behind it, once it was asked for
    """

    def __init__(self, response: Any, rows: int, place: int, permits: Permits) -> None:
        self.rows = rows
        self.place = place
        self.rest: tuple[int, bytes] | None = None
        self.next: Asked | None = None
        self._response = response
        self._permits = permits
        self._ended: Future[None] = Future()

    def listen(self, came: Callable[[Page], None]) -> None:
        """Have the driver say when it comes.

        :param came: called with the page, in the driver's own thread
        """
        self._tell = came
        self._response.add_callbacks(self._came, self._failed)

    def page(self, user: str | None) -> tuple[bytes, bytes | None]:
        """Wait for the page; its bytes, and where the next one starts."""
        self._ended.result()
        with explained_errors(user):
            result = self._response.result()
        return result.current_rows[0], result.paging_state

    def _came(self, rows: list[Page]) -> None:
        page = rows[0]

        def end() -> None:
            self._permits.answered(row_count(page), len(page))
            if self._response.has_more_pages:
                self.rest = len(page), self._response._paging_state
            self._tell(page)

        self._end(end)

    def _failed(self, error: Exception) -> None:
        self._end(lambda: self._permits.failed(overloads(error)))

    def _end(self, end: Callable[[], None]) -> None:
        # In the driver's own thread, which no error may leave.
        try:
            end()
        except Exception as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


class _Size:
    """How many rows a page may have: fewer after pages that failed, and where rows are wide."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bearable = self._fitting = float(limit)
        self.ceiling = float(limit)

    @property
    def rows(self) -> int:
        return max(1, int(min(self._bearable, self._fitting)))

    def came(self, page: Page) -> None:
        rows = row_count(page)
        self.ceiling = min(self._limit, self.ceiling * CREEP)
        self._bearable = min(self.ceiling, self._bearable * GROWTH + 1)
        self._fitting = rows * PAGE_BYTES / len(page) if rows else self._limit

    def failed(self, rows: int) -> None:
        self.ceiling = 0.8 * rows
        self._bearable = rows / SHRINK


@dataclass
class Pages:
    """Asks the replicas of one token range for pages, and remembers how large these may be.

    :ivar statements: what was prepared on this session, by its CQL; is added to
    :ivar endpoints: ``address:port`` of the replicas, the one to ask first in front
    :ivar sleep: waits so many seconds before a page is asked for again
    :ivar delays: pauses (s) before a page is asked for again; none: each page is asked for once. Whoever gives a list
        may shorten it meanwhile
    """

    session: Session
    statements: dict[str, Any]
    endpoints: tuple[str, ...]
    settings: ClusterSettings
    permits: Permits
    sleep: Callable[[float], None]
    delays: Sequence[float] = RETRY_DELAYS_S

    def __post_init__(self) -> None:
        # What is too large in one partition need not be so in a range of many, and the other way round.
        self._sizes = {thorough: _Size(self.settings.page_size) for thorough in (False, True)}
        self._stuck = 0
        self._taken = -1
        self._last: Asked | None = None
        # The reader and the driver's thread may both want to go on.
        self._lock = RLock()

    def read(self, request: Request, asked: Asked | None = None) -> Iterator[Page]:
        """Return the pages of a SELECT, each asked for before its predecessor is handed out if that needs no waiting.

        The driver's own thread asks for the next page when one comes, unless enough are waiting, so that the server
        need not wait for the reader.

        :param asked: the first page, if it is on its way
        :raises Stuck: at a page that could not be had
        """
        paging_state: bytes | None = None
        self._taken = -1
        while True:
            asked, page, paging_state = self._page(request, paging_state, asked)
            self._taken = asked.place
            if self._last is not None:
                self._go_on(request, self._last)
            yield page
            if paging_state is None:
                return
            asked = asked.next

    def _go_on(self, request: Request, last: Asked) -> None:
        """Ask for the page behind the last one, if that has come, not too many are waiting, and it needs no waiting."""
        with self._lock:
            waiting = last.place - self._taken
            if last.rest is None or last.next is not None or request.limit is not None or waiting >= PAGES_AHEAD:
                return
            size, paging_state = last.rest
            if waiting * size < BYTES_AHEAD:
                last.next = self.ask(request, paging_state, last.place + 1, wait=False)

    def ask(self, request: Request, paging_state: bytes | None = None, place: int = 0, *, wait: bool) -> Asked | None:
        """Ask for one page.

        :returns: None without ``wait``, if there would be a wait
        """
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
            self._sizes[request.thorough].came(page)
            self._go_on(request, asked)

        self._last = asked
        asked.listen(came)
        return asked

    def _page(
        self, request: Request, paging_state: bytes | None, asked: Asked | None
    ) -> tuple[Asked, Page, bytes | None]:
        """Return the page that was asked for, asking again after passing errors, and where the next one starts."""
        delays = iter(self.delays if self._stuck < PATIENCE else self.delays[:1])
        size = self._sizes[request.thorough]
        ceiling = size.ceiling
        attempts = 0
        while True:
            rows = asked.rows if asked else self._rows(request)
            try:
                asked = asked or self.ask(request, paging_state, self._taken + 1, wait=True)
                assert asked is not None
                rows = asked.rows
                return asked, *asked.page(self.settings.username)
            except PASSING_ERRORS as error:
                attempts += 1
                absent = all(isinstance(cause, _ABSENCES) for cause in causes(error))
                delay = next(delays, None)
                if delay is None and (absent or rows == 1 or not request.thorough):
                    self._stuck += 1
                    # Smaller pages were no remedy, so nobody knows whether large ones are an evil.
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
        statement.fetch_size = rows
        statement.endpoints = self.endpoints
        return statement

    def _rows(self, request: Request) -> int:
        return min(self._sizes[request.thorough].rows, request.limit or self.settings.page_size)

    def _explain(self, error: Exception, attempts: int, rows: int) -> str:
        cause = causes(error)[-1]
        hint = next((f"; {hint}" for kind, hint in _HINTS.items() if isinstance(cause, kind)), "")
        return (
            f"could not be read at {self.settings.consistency_level} from {', '.join(sorted(self.endpoints))} in "
            f"{attempts} attempts, the last with pages of {rows} rows: {type(cause).__name__}: {cause}{hint}"
        )


def causes(error: BaseException) -> list[BaseException]:
    """Return the errors of the single nodes, where the driver has gathered them; else the error itself."""
    if isinstance(error, NoHostAvailable) and isinstance(error.errors, dict):
        return [cause for cause in error.errors.values() if isinstance(cause, BaseException)] or [error]
    return [error]


def overloads(error: BaseException) -> bool:
    """Tell whether the error is a sign that the cluster is asked too hard."""
    return any(isinstance(cause, _OVERLOADS) for cause in causes(error))


def row_count(page: Page) -> int:
    """Return rows of a result page."""
    return int.from_bytes(page[:4], "big")
