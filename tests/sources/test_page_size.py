"""No response hurts a node: pages are bounded by bytes from the first one on, and shrink after each that did not come.

The node here is simulated: it answers with pages that say how large they are.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cassandra.connection import ConnectionShutdown
from cassandra.policies import RetryPolicy
from cassandra.protocol import IsBootstrappingErrorMessage, OverloadedErrorMessage
from cassandra.query import PreparedStatement

from ringsync.cluster.limits import Limiter
from ringsync.cluster.page_size import PAGE_BYTES, PageSize, PageSizes
from ringsync.cluster.session import ClusterSettings, PagesShrink
from ringsync.cql.codec.decode import decode
from ringsync.cql.types import Native
from ringsync.formats.result_page import page_cells
from ringsync.ring.splits import ReplicaRange, SizeEstimate
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.scan.beginnings import FIRST_ROWS, beginning_rows
from ringsync.sources.scan.forecast import PLACE_BYTES, PLACES, Forecast, Unknown, sample
from ringsync.sources.scan.scan import PreparedScan, Unread, read_range, scan_query
from tests.sources.scans import timeout

TABLE = TableSchema(
    "k", "t", "0" * 32, (Column("id", "partition_key", Native("int")), Column("v", "regular", Native("blob")))
)
DEFAULTS = ClusterSettings(("nowhere",), consistency_level="LOCAL_ONE")
QUERY = scan_query(TABLE, times=True, element_times=True)


class Sized(bytes):
    """A page's first bytes, which says how long all of it is."""

    size: int

    def __len__(self) -> int:
        return self.size


@dataclass
class Response:
    """The driver's future of a page."""

    page: bytes
    _paging_state: bytes | None
    coordinator_host: Any = None

    @property
    def has_more_pages(self) -> bool:
        return self._paging_state is not None

    def add_callbacks(self, came: Callable[[list[bytes]], None], failed: Callable[[Exception], None]) -> None:
        came([self.page])

    def result(self) -> Any:
        return SimpleNamespace(current_rows=[self.page], paging_state=self._paging_state)


@dataclass
class Refusal:
    """The driver's future of a page that does not come."""

    error: Exception

    def add_callbacks(self, came: Callable[[list[bytes]], None], failed: Callable[[Exception], None]) -> None:
        failed(self.error)

    def result(self) -> Any:
        raise self.error


@dataclass
class Node:
    """A session with one node, which has a row of some bytes at each of the tokens from 1 on.

    :ivar most_bytes: of a page that it can bear
    :ivar broken: tokens whose rows it never reads
    :ivar pages: bytes of the pages that came; ``refused``: rows of those that did not
    """

    rows: Sequence[int]
    most_bytes: float = float("inf")
    broken: frozenset[int] = frozenset()
    sizes: PageSizes = field(default_factory=lambda: PageSizes(PageSize))
    statements: dict[str, Any] = field(default_factory=dict)
    coordinators: set[Any] = field(default_factory=set)
    pages: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def prepare(self, cql: str) -> Any:
        return PreparedStatement([], b"", None, cql, "k", 5, None, None)

    def execute_async(self, statement: Any, execution_profile: str, paging_state: bytes | None) -> Any:
        start, end = (int.from_bytes(value, "big", signed=True) for value in statement.values)
        start = struct.unpack(">q", paging_state)[0] if paging_state else max(0, start)
        upto = min(end, len(self.rows), start + statement.fetch_size)
        size = sum(self.rows[start:upto])
        if size > self.most_bytes or any(start < token <= upto for token in self.broken):
            self.refused.append(statement.fetch_size)
            return Refusal(timeout())
        self.pages.append(size)
        left = upto < min(end, len(self.rows))
        return Response(self.page(start, upto, size), struct.pack(">q", upto) if left else None)

    def page(self, start: int, end: int, size: int) -> bytes:
        page = Sized(struct.pack(">i", max(0, end - start)))
        page.size = 4 + size
        return page

    def scan(self, ranges: int) -> list[Unread]:
        """Read all rows, in some ranges, each with readers of its own."""
        edges = [len(self.rows) * place // ranges for place in range(ranges + 1)]
        prepared = PreparedScan(QUERY, self.statements, {})
        pages = []
        for edge in itertools.pairwise(edges):
            part = ReplicaRange(TokenRange(*edge), ("a", "b", "c"))
            session: Any = self
            pages += read_range(session, prepared, part, DEFAULTS, Limiter(), sleep=lambda _: None)
        return [page for page in pages if isinstance(page, Unread)]


@pytest.mark.parametrize(
    ("rows", "size", "ranges"),
    [(100, 2_500_000, 1), (20_000, 10_000, 1), (1_300, 100_000, 50), (5_000, 100_000, 1), (40, 16_000_000, 8)],
)
def test_every_page_is_bounded_from_the_first_on(rows: int, size: int, ranges: int) -> None:
    """The first pages of ranges had 5,000 rows: 130 MB of rows of 100 KB, and a node with a small heap died."""
    node = Node([size] * rows)
    assert node.scan(ranges) == []
    assert sum(node.pages) == rows * size
    assert max(node.pages) <= max(PAGE_BYTES, size)
    assert len(node.pages) <= rows * size / PAGE_BYTES * 2 + ranges + 10, "and not many more than needed"


def test_rows_that_get_wider() -> None:
    """A partition of wide rows among others of many narrower ones is met with small pages if others were as wide."""
    choose = random.Random(1)
    rows = [choose.choice([1_000, 10_000, 100_000]) for _ in range(20_000)]
    node = Node([*rows, *[2_500_000] * 100, *rows])
    node.scan(20)
    assert max(node.pages) < 80 * 2**20
    assert sum(size > 4 * PAGE_BYTES for size in node.pages) == 1


def test_narrow_rows_come_in_full_pages_soon() -> None:
    node = Node([200] * 1_000_000)
    node.scan(16)
    assert len(node.pages) <= 1_000_000 / DEFAULTS.page_size + 16 + 5


def test_one_wide_row_is_forgotten() -> None:
    node = Node([*[200] * 100_000, 2_500_000, *[200] * 900_000])
    node.scan(16)
    assert len(node.pages) <= 1_000_000 / DEFAULTS.page_size + 16 + 150


@pytest.mark.parametrize("most_bytes", [1_000_000, 100_000, 10_000])
def test_what_was_refused_is_not_asked_again(most_bytes: int) -> None:
    """Each range began anew with a page that the node could not bear: now one range learns for all of the process."""
    node = Node([500] * 20_000, most_bytes)
    assert node.scan(100) == []
    assert sum(node.pages) == 20_000 * 500
    assert len(node.refused) <= 12


@pytest.mark.parametrize("narrow", [5_000 + 1_111, 5_000 + 5_000])
def test_a_page_that_failed_is_not_asked_of_the_next_replica(narrow: int) -> None:
    """5,000 narrow rows were asked for where there are wide ones: then 1,250 of the next replica, 312, 78."""
    node = Node([*[200] * narrow, *[2_500_000] * 2_000], most_bytes=10_000_000)
    assert node.scan(1) == []
    assert len(node.refused) <= (1 if narrow == 6_111 else 5)
    assert sum(node.pages) == narrow * 200 + 2_000 * 2_500_000


@pytest.mark.parametrize("before", [0, 50])
@pytest.mark.parametrize("failures", [1, 4])
def test_a_short_page_that_fails_does_not_slow_the_table(before: int, failures: int) -> None:
    """The table's first page has one row; when it failed, a million rows came in 7,139 pages instead of 204."""
    size = PageSize()
    for _ in range(before):
        size.came(rows := size.rows(5_000), rows * 200)
    for _ in range(failures):
        size.failed(size.rows(2))
    pages = rows = 0
    while rows < 1_000_000:
        size.came(came := size.rows(5_000), came * 200)
        rows, pages = rows + came, pages + 1
    assert pages <= 1_000_000 / 5_000 + 5


def test_failures_in_the_past_are_forgotten() -> None:
    size = PageSize()
    for _ in range(20):
        while (rows := size.rows(5_000)) < 5:
            size.came(rows, rows * 200)
        size.failed(rows)
    pages = 0
    while (rows := size.rows(5_000)) < 5_000:
        size.came(rows, rows * 200)
        pages += 1
    assert pages < 8_000


# Large partitions

CLUSTERED = TableSchema(
    "k",
    "c",
    "0" * 32,
    (
        Column("id", "partition_key", Native("int")),
        Column("n", "clustering", Native("int")),
        Column("v", "regular", Native("blob")),
    ),
)
OF_PARTITIONS = scan_query(CLUSTERED, times=True, element_times=True)
EMPTY_ROW = 66
"""Bytes of a row without a value."""


@dataclass
class Partitions(Node):
    """A node with partitions at the tokens from 1 on, each with rows whose values have so many bytes."""

    partitions: Sequence[Sequence[int]] = ()

    def execute_async(self, statement: Any, execution_profile: str, paging_state: bytes | None) -> Any:
        cql, numbers = statement.prepared_statement.query_string, [int.from_bytes(v, "big") for v in statement.values]
        limit = re.search(r"PER PARTITION LIMIT (\d+)", cql)
        # Token of a partition and number of a row; the paging state is the last one's.
        token, n = struct.unpack(">qq", paging_state) if paging_state else (numbers[0] + 1, -1)
        rows: list[tuple[int, int]] = []
        while token <= min(numbers[1], len(self.partitions)) and len(rows) <= statement.fetch_size:
            upto = min(int(limit[1]) if limit else 2**31, len(self.partitions[token - 1]))
            rows += [(token, row) for row in range(n + 1, upto)][: statement.fetch_size + 1 - len(rows)]
            token, n = token + 1, -1
        page = rows[: statement.fetch_size]
        body = struct.pack(">i", len(page)) + b"".join(self.row(*row) for row in page)
        self.pages.append(len(body))
        return Response(body, struct.pack(">qq", *page[-1]) if len(rows) > len(page) else None)

    def row(self, token: int, n: int) -> bytes:
        key, value = struct.pack(">i", token), bytes(self.partitions[token - 1][n])
        cells = (struct.pack(">q", token), key, struct.pack(">i", n), value, struct.pack(">q", 1))
        return b"".join(struct.pack(">i", len(cell)) + cell for cell in cells) + struct.pack(">i", -1)

    def read(self, beginning_rows: int | None = None, page_size: int = 5_000) -> list[tuple[int, int]]:
        """Token and clustering of all rows, as they come."""
        part, session = ReplicaRange(TokenRange(0, len(self.partitions)), ("a",)), cast(Any, self)
        scan = PreparedScan(OF_PARTITIONS, self.statements, {}, beginning_rows)
        settings = ClusterSettings(("nowhere",), consistency_level="LOCAL_ONE", page_size=page_size)
        found: list[tuple[int, int]] = []
        for page in read_range(session, scan, part, settings, Limiter()):
            assert not isinstance(page, Unread)
            _, cells = page_cells(page, len(OF_PARTITIONS.layout))
            tokens, numbers = (
                decode(Native(name), cells[at]).values.to_pylist() for name, at in (("bigint", 0), ("int", 2))
            )
            found += zip(tokens, numbers, strict=True)
        return found

    @property
    def beginning_rows(self) -> int:
        size = sum(sum(sizes) + EMPTY_ROW * len(sizes) for sizes in self.partitions)
        return beginning_rows(SizeEstimate(len(self.partitions), size), 5_000)

    def every(self) -> list[tuple[int, int]]:
        return [(token, n) for token, sizes in enumerate(self.partitions, 1) for n in range(len(sizes))]


@pytest.mark.parametrize("of", [1, 3, 15, 100], ids=lambda rows: f"of {rows} rows")
@pytest.mark.parametrize(("rows", "size"), [(100, 250_000), (1_000, 10_000), (20, 2_500_000)])
def test_a_large_partition_is_not_met_unawares(of: int, rows: int, size: int) -> None:
    """Behind many narrow rows a page had all of a partition of wide ones."""
    before = 12_000 // of
    partitions = [[50] * of] * before + [[size] * rows] + [[50] * of] * 100 + [[100] * 8_000] + [[50] * of] * before
    careless, careful = Partitions([], partitions=partitions), Partitions([], partitions=partitions)
    assert careless.read() == careless.every() == careful.read(careful.beginning_rows)
    assert max(careless.pages) >= min(rows, 5_000) * size
    assert max(careful.pages) <= FIRST_ROWS * (size + EMPTY_ROW) + 1.1 * PAGE_BYTES
    assert len(careful.pages) <= 3 * len(careless.pages) + 2.1 * rows * size / PAGE_BYTES + 60


def test_many_large_partitions() -> None:
    """One of ten partitions is large, and wide or not."""
    choose = random.Random(3)
    kinds = [[100_000] * 30, [10_000] * 200, [100] * 3_000]
    partitions = [choose.choice(kinds) if token % 10 == 9 else [50] * 5 for token in range(400)]
    node = Partitions([], partitions=partitions)
    assert node.read(node.beginning_rows) == node.every()
    assert max(node.pages) <= 8 * 2**20
    size = sum(sum(sizes) for sizes in partitions)
    assert len(node.pages) < 2.5 * size / PAGE_BYTES + 40 * 10


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 10, 20, 50, 100, 1_000, 20_000])
def test_what_care_costs(rows: int) -> None:
    """Each partition of 9 to 100 rows was read by a request of its own: 4,455 requests instead of 12."""
    partitions = [[50] * rows] * (60_000 // rows)
    careless, careful = Partitions([], partitions=partitions), Partitions([], partitions=partitions)
    careless.read()
    assert careful.read(careful.beginning_rows) == careful.every()
    of_beginnings = FIRST_ROWS / rows if rows >= FIRST_ROWS else 0
    assert sum(careful.pages) <= sum(careless.pages) * (1 + of_beginnings) * 1.01
    pages = len(careless.pages) * (1 + of_beginnings)
    # A page of beginnings leads to some pages of rows, of which the last is not full.
    assert len(careful.pages) <= pages + len(careless.pages) * of_beginnings + 8
    assert len(careful.pages) <= 3 * len(careless.pages) + 8


@pytest.mark.parametrize("seed", range(40))
def test_every_row_comes_once_and_in_order(seed: int) -> None:
    choose = random.Random(seed)
    counts, sizes = [0, 1, 2, 3, 7, 8, 9, 40], [0, 9, 9, 9, 20_000]
    partitions = [[choose.choice(sizes)] * choose.choice(counts) for _ in range(choose.randrange(1, 60))]
    page_size = choose.choice([1, 2, 3, 7, 16, 17, 100, 5_000])
    node = Partitions([], partitions=partitions)
    assert node.read(page_size, page_size) == node.every()


def test_a_forecast_meets_no_large_partition_unawares() -> None:
    """Its first pages have 1,000 rows of narrow ones."""
    partitions = [[50] * 3] * 20_000
    for token in random.Random(1).sample(range(20_000), 100):
        partitions[token] = [500_000] * 40
    ranges = [ReplicaRange(TokenRange(0, len(partitions)), ("a",))]

    def pages(*, careful: bool) -> list[int]:
        node = Partitions([], partitions=partitions)
        session: Any = node
        found = sample(
            *(session, OF_PARTITIONS, ranges, DEFAULTS, Limiter()),
            beginning_rows=node.beginning_rows if careful else None,
            sleep=lambda _: None,
        )
        assert isinstance(found, Forecast)
        return node.pages

    assert max(pages(careful=False)) > 2 * FIRST_ROWS * 500_000
    found = pages(careful=True)
    assert max(found) <= FIRST_ROWS * 500_066 + PAGE_BYTES
    assert sum(found) <= PLACES * 10 * PLACE_BYTES


# The driver


@pytest.mark.parametrize(
    "error",
    [ConnectionShutdown("gone"), OverloadedErrorMessage(0x1001, "too much", {})],
    ids=lambda e: type(e).__name__,
)
def test_the_driver_hands_no_page_to_the_next_node(error: Exception) -> None:
    """Its own policy did: a page that killed a node went on to all other replicas."""
    assert RetryPolicy().on_request_error(None, 1, error, 0)[0] == RetryPolicy.RETRY_NEXT_HOST
    assert PagesShrink().on_request_error(None, 1, error, 0)[0] == RetryPolicy.RETHROW


def test_who_refuses_at_once_has_read_nothing() -> None:
    booting = IsBootstrappingErrorMessage(0x1002, "not yet", {})
    assert PagesShrink().on_request_error(None, 1, booting, 0)[0] == RetryPolicy.RETRY_NEXT_HOST
    given = {"consistency": 1, "required_responses": 1, "received_responses": 1, "data_retrieved": False}
    assert PagesShrink().on_read_timeout(None, **given, retry_num=0)[0] == RetryPolicy.RETHROW


# Forecasts


class Cells(Node):
    """A node whose pages can be decoded."""

    def page(self, start: int, end: int, size: int) -> bytes:
        def cell(value: bytes) -> bytes:
            return struct.pack(">i", len(value)) + value

        value = b"v" * (self.rows[start] - 40 if end > start else 0)
        row = cell(b"\0\0\0\1") + cell(value) + cell(struct.pack(">q", 1)) + struct.pack(">i", -1)
        tokens = (cell(struct.pack(">q", token)) for token in range(start + 1, end + 1))
        return struct.pack(">i", max(0, end - start)) + b"".join(token + row for token in tokens)


def forecast(node: Node) -> Forecast | Unknown:
    session: Any = node
    ranges = [ReplicaRange(TokenRange(0, len(node.rows)), ("a",))]
    return sample(session, QUERY, ranges, DEFAULTS, Limiter(), sleep=lambda _: None)


def test_a_forecast_reads_little_of_wide_rows() -> None:
    """Each place had a page of 1,000 rows first, whatever they were."""
    node = Cells([200_000] * 3_000)
    found = forecast(node)
    assert isinstance(found, Forecast)
    assert found.bytes == pytest.approx(3_000 * 200_000, rel=0.1)
    assert max(node.pages) <= PAGE_BYTES
    assert sum(node.pages) <= PLACES * 2 * PLACE_BYTES


@pytest.mark.parametrize("token", [1, 900_001])
def test_a_forecast_does_not_fail(token: int) -> None:
    """One of the places has a partition that no replica can read, as after many deletions: that ended `prepare`."""
    node = Cells([50] * 1_600_000, broken=frozenset(range(token, token + 100)))
    found = forecast(node)
    assert isinstance(found, Unknown)
    assert f"({token - 1}, " in found.reason
    assert found.as_report() == {"unknown": found.reason}
    assert len(node.refused) == 4, "and is not asked for it over and over"


def test_a_forecast_of_all_places() -> None:
    found = forecast(Cells([50] * 1_600_000))
    assert isinstance(found, Forecast)
    assert found.rows == pytest.approx(1_600_000, rel=0.01)
