"""Undecodable records in a real table and a real store: once each, with their bytes, wherever these are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ringsync.cluster.page_size import PAGE_BYTES
from ringsync.formats.commitlog.reader import ERROR_ROWS
from ringsync.ring.tokens import TokenRange
from ringsync.state.bootstrap import BootstrapState, CommittedRange
from ringsync.state.processor_error import LARGEST_INLINE, OVERFLOW, ErrorKey, ErrorTable, file_order
from ringsync.state.session import StateSession
from ringsync.storage.local import LocalStore

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def keyspace(session: Any) -> Iterator[str]:
    StateSession(session, "t_errors").create({"class": "NetworkTopologyStrategy", "datacenter1": "1"})
    yield "t_errors"
    session.execute("DROP KEYSPACE t_errors")


def errors(*raws: bytes | None) -> pa.RecordBatch:
    rows = [
        {"position": 100 * number, "length": len(raw or b""), "reason": f"reason {number % 2}", "raw": raw}
        | {"table_id": bytes(16) if number % 2 else None, "file": FILE}
        for number, raw in enumerate(raws, 1)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=ERROR_ROWS)


def test_a_record_is_one_row_however_often_it_is_put(keyspace: str, session: Any, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    kept = ErrorTable(session, keyspace, store)
    large = b"\x07" * (LARGEST_INLINE + 1)
    assert kept.is_there()
    for _ in range(2):
        kept.put(errors(b"small", b"", large, None), "node-1")
    kept.put(errors(b"small"), "node-2")
    rows = session.execute(
        "SELECT * FROM t_errors.processor_error WHERE node = 'node-1' AND file = 'CommitLog-7-1.log'"
    )
    found = [(row.position, row.length, row.reason, row.table_id, row.raw, row.raw_object) for row in rows]
    key = "errors/node-1/CommitLog-7-1.log/300"
    assert found == [
        (100, 5, "reason 1", bytes(16), b"small", None),
        (200, 0, "reason 0", None, b"", None),
        (300, len(large), "reason 1", bytes(16), None, key),
        (400, 0, "reason 0", None, None, None),
    ]
    assert store.get(key) == large
    assert kept.files() == [("node-1", FILE), ("node-2", FILE)]
    assert kept.files("node-2") == [("node-2", FILE)]
    assert [key.position for key in rows_of(kept, "node-1")] == [100, 200, 300, 400]
    row = kept.row(ErrorKey("node-1", FILE, 300))
    assert row is not None
    assert (row.raw, kept.mutation(row), row.records) == (None, large, 1)
    kept.remove([ErrorKey("node-1", FILE, 100), ErrorKey("node-1", FILE, 100), ErrorKey("node-1", FILE, 7)])
    assert kept.row(ErrorKey("node-1", FILE, 100)) is None
    assert [key.position for key in rows_of(kept, "node-1")] == [200, 300, 400]


FILE = "CommitLog-7-1.log"


def rows_of(kept: ErrorTable, node: str) -> list[ErrorKey]:
    """Keys of a partition; whether bytes are read makes no difference."""
    found = [[row.key for row in kept.rows(node, FILE, with_bytes=with_bytes)] for with_bytes in (False, True)]
    assert found[0] == found[1]
    return found[0]


def test_every_answer_is_bounded_by_bytes(keyspace: str, session: Any, tmp_path: Path) -> None:
    """Twenty rows of a megabyte were one page, and five thousand of the ledger's."""
    measured = Measured(session)
    kept = ErrorTable(measured, keyspace, LocalStore(tmp_path))  # type: ignore[arg-type]
    raws = [bytes([number]) * 300_000 for number in range(12)]
    kept.put(errors(*raws), "wide")
    assert [row.raw for row in kept.rows("wide", FILE, with_bytes=True)] == raws
    assert max(measured.sizes) <= PAGE_BYTES
    measured.sizes.clear()
    kept.put(errors(*[b"x"] * 1_000), "narrow")
    assert [key.position for key in rows_of(kept, "narrow")] == list(range(100, 100_100, 100))
    assert len(measured.sizes) <= 2 * 4, "narrow rows come in few pages"

    ledger = BootstrapState(measured, keyspace).take_over("wide", "one")
    ranges = [CommittedRange(TokenRange(n, n + 1), 1, 1, 1, 1, 1, "x" * 200_000) for n in range(20)]
    for one in ranges:
        ledger.commit(one)
    measured.sizes.clear()
    assert list(ledger.ranges()) == ranges
    assert max(measured.sizes) <= PAGE_BYTES


class Measured:
    """A session that measures the values of each page."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def execute(self, *arguments: Any, **options: Any) -> Any:
        found = self._session.execute(*arguments, **options)
        values = (value for row in found.current_rows for value in row)
        self.sizes.append(sum(len(value) for value in values if isinstance(value, str | bytes)))
        return found


def test_a_flood_goes_to_the_object_store(keyspace: str, session: Any, tmp_path: Path) -> None:
    """The limit holds for an hour, also across restarts; repeating a commit makes no second row."""
    store, now_s = LocalStore(tmp_path), 1_790_000_000.0

    def put(count: int) -> None:
        ErrorTable(session, keyspace, store, 5, lambda: now_s).put(errors(*[b"x"] * count), "flooded")

    kept = ErrorTable(session, keyspace, store)
    for count in (3, 4, 6, 6):
        put(count)
    overflow = [one for one in kept.files("flooded") if one[1] != FILE]
    assert len(overflow) == len(store.list(f"{OVERFLOW}flooded/")) == 2
    found = [row for node, file in overflow for row in kept.rows(node, file)]
    assert sorted((row.records, row.length, row.is_overflow) for row in found) == [(2, 2, True), (6, 6, True)]
    for row in found:
        assert row.reason.startswith(f"more than sync.max_errors_per_hour: {row.records} records of one commit")
        assert kept.overflow(row) == errors(*[b"x"] * 6).slice(0 if row.records == 6 else 2, row.records)
    now_s += 3600
    put(5)
    assert len(store.list(f"{OVERFLOW}flooded/")) == 2


def test_segments_are_ordered_by_their_time() -> None:
    names = ["CommitLog-7-10.log", "9-3-0123456789abcdef.arrow", "CommitLog-8-2.log", "other"]
    assert sorted(names, key=file_order) == [names[3], names[2], names[1], names[0]]
