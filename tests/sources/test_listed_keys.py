"""No request by key hurts a node: what it lists is bounded by bytes, as are all requests on their way together.

Cassandra reads all listed rows of a partition into memory before it cuts a page, and does so again for each page
(C: db/SinglePartitionReadCommand ``queryMemtableAndSSTablesInTimestampOrder``). The node here is simulated: it answers
from a thread of its own, and says how many bytes it had in memory.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import InvalidRequest
from cassandra.connection import ConnectionShutdown
from cassandra.query import PreparedStatement

from ringsync.cluster.limits import Limiter
from ringsync.cluster.page_size import LIST_BYTES, PAGE_BYTES, PageSize, PageSizes
from ringsync.cluster.session import ClusterSettings
from ringsync.cql.types import Native
from ringsync.ring.ranks import ranked
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.lookup.read import IN_FLIGHT, RowsRead, read_rows
from tests.sources.row_key_batches import Key, batch_of

INT = Native("int")
VALUES = (
    Column("c", "clustering", INT),
    Column("s", "static", Native("blob")),
    Column("v", "regular", Native("blob")),
)
TABLE = TableSchema("k", "t", "0" * 32, (Column("k", "partition_key", INT), *VALUES))
OF_TENANTS = TableSchema("k", "t", "1" * 32, (Column("tenant", "partition_key", INT), *TABLE.columns))
SETTINGS = ClusterSettings(("nowhere",), consistency_level="LOCAL_ONE")
HOSTS = tuple(Host(str(n), f"127.0.0.{n}", 9042, "dc", "r", (n,)) for n in (1, 2, 3))
RING = ranked(RingSnapshot(HOSTS, Replication("SimpleStrategy", (("", 1),))))

Rows = Mapping[tuple[int, ...], int]
"""Bytes of the value of each row, by its key; a key without clustering is of a static value."""


@dataclass
class Node:
    """A session with a node.

    :ivar most_bytes: of listed rows in memory, for all requests; it drops the connections if there are more
    :ivar listed: keys of each request; ``worked``: bytes of their rows; ``largest``: most bytes of all requests at once
    """

    rows: Rows
    table: TableSchema = TABLE
    most_bytes: float = float("inf")
    sizes: PageSizes = field(default_factory=lambda: PageSizes(PageSize))
    now: int = 0
    reads_as_of: bool = True
    statements: dict[str, Any] = field(default_factory=dict)
    facts: dict[Any, Any] = field(default_factory=dict)
    coordinators: set[Any] = field(default_factory=set)
    listed: list[int] = field(default_factory=list)
    worked: list[int] = field(default_factory=list)
    lists: list[Any] = field(default_factory=list)
    refused: list[Any] = field(default_factory=list)
    largest: int = 0
    pages: int = 0
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(IN_FLIGHT))

    def __post_init__(self) -> None:
        self._lock, self._busy = threading.Lock(), 0

    @property
    def plain(self) -> Any:
        def unknown(*arguments: Any, **options: Any) -> Any:
            raise InvalidRequest("unconfigured table column_masks")

        return SimpleNamespace(execute_async=unknown)

    def prepare(self, cql: str) -> Any:
        return PreparedStatement([], b"", None, cql, "k", 5, None, None)

    def execute_async(self, statement: Any, execution_profile: str, paging_state: bytes | None) -> Any:
        cql, values = statement.prepared_statement.query_string, statement.values
        *first, last = values[: len(self.table.partition_key)]
        partitions = [(*map(number, first), number(value)) for value in items(last)]
        of_statics = "DISTINCT" in cql
        clusterings = [] if of_statics else [number(item) for item in items(values[-1])]
        keys = partitions if of_statics else [(*p, c) for p in partitions for c in clusterings]
        found = [key for key in keys if key in self.rows]
        # One partition after another is read, and all that is listed of it.
        start = struct.unpack(">i", paging_state)[0] if paging_state else 0
        page = found[start : start + statement.fetch_size]
        in_memory = {key[:-1] if not of_statics else key for key in page}
        work = sum(self.rows[key] for key in found[start:] if of_statics or key[:-1] in in_memory)
        upto = start + len(page)
        with self._lock:
            self.pages += 1
            self.listed.append(len(keys))
            self.worked.append(work)
            self._busy += work
            self.largest = max(self.largest, self._busy)
            asked = (frozenset(partitions), frozenset(clusterings))
            dead = self._busy > self.most_bytes
            (self.refused if dead else self.lists).append(asked)

        left = struct.pack(">i", upto) if len(page) == statement.fetch_size else None
        body = struct.pack(">i", len(page)) + b"".join(self.row(key, cql) for key in page)
        return Response(self, body, left, work, ConnectionShutdown("gone") if dead else None)

    def ended(self, work: int) -> None:
        with self._lock:
            self._busy -= work

    def row(self, key: tuple[int, ...], cql: str) -> bytes:
        value = bytes(self.rows[key])
        partition, clustering = key[: len(self.table.partition_key)], key[len(self.table.partition_key) :]
        cells = [struct.pack(">q", 0), *(struct.pack(">i", part) for part in (*partition, *clustering))]
        times = [struct.pack(">q", 1), None]
        cells += [value, *times] if "DISTINCT" in cql else [None, value, None, None, *times]
        return b"".join(struct.pack(">i", -1 if cell is None else len(cell)) + (cell or b"") for cell in cells)

    def read(self, keys: list[Key]) -> RowsRead:
        session: Any = self
        return read_rows(
            *(session, self.table, batch_of(keys), RING, SETTINGS, Limiter()),
            element_times=True,
            misfits="error",
            sleep=lambda _: None,
        )


@dataclass
class Response:
    """The driver's future of a page that takes a millisecond."""

    node: Node
    page: bytes
    _paging_state: bytes | None
    work: int
    error: Exception | None
    coordinator_host: Any = None

    @property
    def has_more_pages(self) -> bool:
        return self._paging_state is not None

    def add_callbacks(self, came: Callable[[list[bytes]], None], failed: Callable[[Exception], None]) -> None:
        def answer() -> None:
            time.sleep(0.001)
            self.node.ended(self.work)
            failed(self.error) if self.error else came([self.page])

        self.node.threads.submit(answer)

    def result(self) -> Any:
        if self.error:
            raise self.error
        return SimpleNamespace(current_rows=[self.page], paging_state=self._paging_state)


def number(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def items(value: bytes) -> Iterator[bytes]:
    """The elements of a serialised list."""
    at = 4
    for _ in range(number(value[:4])):
        end = at + 4 + number(value[at : at + 4])
        yield value[at + 4 : end]
        at = end


def key_of(table: TableSchema, key: tuple[int, ...]) -> Key:
    width = len(table.partition_key)
    parts = [struct.pack(">i", part) for part in key]
    return Key(key, tuple(parts[:width]), tuple(parts[width:]) or None)


def read_all(node: Node, keys: list[tuple[int, ...]] | None = None, *, shuffled: bool = True) -> None:
    """Read keys, in any order; all rows must come."""
    keys = list(node.rows) if keys is None else keys
    if shuffled:
        random.Random(1).shuffle(keys)
    found = node.read([key_of(node.table, key) for key in keys])
    assert not found.unread
    assert sorted(keys[place] for place in found.places.tolist()) == sorted(key for key in keys if key in node.rows)


WIDE = 250_000
SHAPES: dict[str, Rows] = {
    "of one partition": {(1, n): WIDE for n in range(100)},
    "of many partitions": {(n, 1): WIDE for n in range(300)},
    "of some partitions": {(n % 20, n): WIDE for n in range(300)},
    "with other clusterings": {(n, c): WIDE for n in range(16) for c in (1, 2, n)},
    "static": {(n,): WIDE for n in range(100)},
    "behind narrow ones": {(k, c): 20 if k else WIDE for k in (*range(1, 40), 0) for c in range(100)},
    "very wide": {(n % 4, n): 3 * PAGE_BYTES for n in range(40)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rows_of_a_list_are_bounded(shape: str) -> None:
    """A list of 100 rows of 2.5 MB killed a node at the first page, of one row."""
    node = Node(SHAPES[shape])
    read_all(node)
    widest = max(node.rows.values())
    surprise = LIST_BYTES if shape == "behind narrow ones" else 0
    is_mixed = shape == "with other clusterings"  # a page, and what is listed of its last partition
    assert max(node.worked) <= max(1.1 * PAGE_BYTES * (1 + is_mixed), widest, surprise)
    assert node.largest <= max(IN_FLIGHT * PAGE_BYTES * 1.1 + widest, 2 * surprise)
    pages = sum(node.rows.values()) / PAGE_BYTES * 2
    few = len(node.rows) / 8 if shape == "behind narrow ones" else len({key[0] for key in node.rows}) * 3
    assert node.pages <= pages + few + 20, "and not many more than needed"
    assert is_mixed or len(node.lists) == len(set(node.lists)), "and no list is read twice, for another page"


def test_wide_rows_of_a_tenant_among_narrow_ones() -> None:
    """The keys of a tenant are asked for together: all requests on the way were for wide rows."""
    rows = {(tenant, n, 1): WIDE if tenant == 3 else 20 for tenant in range(5) for n in range(1_500)}
    node = Node(rows, OF_TENANTS)
    read_all(node)
    assert max(node.worked) <= 50 * WIDE
    assert sum(work > LIST_BYTES for work in node.worked) == 0
    assert node.largest <= 3 * 50 * WIDE


@pytest.mark.parametrize("shape", ["one of each partition", "of large partitions", "few are there"])
def test_narrow_rows_come_in_full_lists_soon(shape: str) -> None:
    keys = {
        "one of each partition": [(n, 1) for n in range(10_000)],
        "of large partitions": [(n % 5, n) for n in range(10_000)],
        "few are there": [(n, 1) for n in range(10_000)],
    }[shape]
    of = 20 if shape == "few are there" else 1
    node = Node(dict.fromkeys(keys[::of], 100))
    read_all(node, keys)
    full = 100 if shape == "of large partitions" else 50
    assert node.pages <= 10_000 / full * 1.05 + 100
    node.pages = 0
    read_all(node, keys)
    assert node.pages <= 10_000 / full * 1.05 + 25, "and a read that knows the table needs fewer small ones"


def test_a_list_that_killed_a_node_is_not_asked_again() -> None:
    """It went on to all other replicas."""
    rows = {(k, c): 20 if c < 20 else WIDE for k in range(3) for c in range(200)}
    node = Node(rows, most_bytes=40 * WIDE)
    read_all(node, shuffled=False)
    refused = [asked for asked in node.refused if len(asked[1]) > 1]
    assert refused
    assert not any(asked in node.lists for asked in refused)
    assert len(refused) == len(set(refused)) <= 6
