"""A limit of bytes holds where rows are held, not only where they are handed on: Arrow's pool says what is held.

All limits are scaled down to pieces of 1 MiB.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ringsync.cluster.limits import Limiter
from ringsync.cluster.page_size import PAGE_BYTES
from ringsync.images.from_changes import row_images_of
from ringsync.ledger.staging import encode_blocks, encode_rows, rows_key
from ringsync.replica.lookup import previous_images
from ringsync.ring.tokens import WHOLE_RING
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.read import BYTES_AT_ONCE
from ringsync.steps.close import close_task
from ringsync.steps.close.agreement import Reading
from ringsync.steps.close.close_task import CloseTask, SliceOfBucket
from ringsync.steps.late import late_rows
from ringsync.steps.late.late_pass import Outcome
from ringsync.steps.late.late_rows import LateRows
from ringsync.steps.passes import pieces, spared_rows
from ringsync.steps.passes.replica_task import ReplicaTask
from ringsync.steps.passes.rows_after import AfterReader
from ringsync.storage.local import LocalStore
from tests.reconciled import merged
from tests.replica.bases import state_of, write_base, write_pass
from tests.sources.test_page_size import Node, Response
from tests.steps.late_files import RangeDelete, Write, change_rows, put_late
from tests.steps.test_close import NOW, TABLE, VERSION, Lake, lake

__all__ = ["lake"]
PIECE = 2**20
AT = NOW.start * 1000


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for of in (pieces, close_task):
        monkeypatch.setattr(of, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(pieces, "_known", defaultdict(pieces._Known))


@pytest.fixture
def most_pieces() -> Iterator[Callable[[], float]]:
    """Tells how many pieces' bytes Arrow had allocated at most, in addition to those at the last call."""
    found, ended = [0, 0], Event()

    def watch() -> None:
        while not ended.wait(0.001):
            found[1] = max(found[1], pa.total_allocated_bytes())

    def most() -> float:
        before, peak = found
        found[:] = [pa.total_allocated_bytes()] * 2
        return (peak - before) / PIECE

    thread = Thread(target=watch)
    thread.start()
    yield most
    ended.set()
    thread.join()


@pytest.mark.parametrize("slices", [1, 7])
def test_the_blocks_of_a_pass(lake: Lake, most_pieces: Callable[[], float], slices: int) -> None:
    """Cycles of three nodes' stages: here all that a task had ever decoded stayed in memory."""
    blocks = []
    for number in range(45):
        writes = [Write(number % 15 * 20 + n, 1, "x" * 25_000, AT + n) for n in range(20)]
        rows = VERSION.to_store(change_rows(writes, TABLE))
        data, (place,) = encode_blocks([rows], rows_key("a", number + 1, "file"))
        lake.store.put(place.key, data)
        blocks.append((place, "a"))
    (whole,) = WHOLE_RING.unwrap()
    readings = [Reading(tuple(blocks), (part,), 900) for part in whole.split(slices)]
    context = lake.context(late=False)
    task = CloseTask(replace(context, reader=replace(context.reader, mode="none")), by_arrival=False)
    most_pieces()
    results = list(
        task((f"{n:04}", (SliceOfBucket(str(NOW), (reading,), (), ()),)) for n, reading in enumerate(readings))
    )
    assert most_pieces() < 12
    assert sum(result.read for result in results) == 900
    assert sum(result.repeated for result in results) == 600


def test_a_partition_with_more_than_a_task_holds(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cut by token makes it smaller. It costs a few further looks at the blocks, whatever its token is."""
    blocks, decoded = [], list[str]()
    real = close_task.read_block
    monkeypatch.setattr(close_task, "read_block", lambda *given: decoded.append(given[1].key) or real(*given))
    for number in range(20):
        writes = [Write(0 if n % 2 else number * 20 + n, number * 20 + n, "x" * 25_000, AT) for n in range(20)]
        rows = VERSION.to_store(change_rows(writes, TABLE))
        data, (place,) = encode_blocks([rows], rows_key("a", number + 1, "file"))
        lake.store.put(place.key, data)
        blocks.append((place, "a"))
    context = lake.context(late=False)
    task = CloseTask(replace(context, reader=replace(context.reader, mode="none")), by_arrival=False)
    reading = Reading(tuple(blocks), WHOLE_RING.unwrap(), 400)
    results = list(task([("0000", (SliceOfBucket(str(NOW), (reading,), (), ()),))]))
    assert sum(output.rows for result in results for output in result.outputs) == 400
    assert len(decoded) <= 5 * len(blocks)


def test_the_partitions_of_deletions(tmp_path: Path, lake: Lake, most_pieces: Callable[[], float]) -> None:
    """Each deletion was one row of a piece, whatever its partition has in the replica."""
    rows = change_rows([Write(n, seq, "x" * 10_000, AT) for n in range(100) for seq in range(20)], TABLE)
    images = row_images_of(merged(rows, TABLE), TABLE, "raw")
    write_base(tmp_path, TABLE, pa.Table.from_batches([images]).sort_by("token"))
    reader: AfterReader = replace(lake.context(late=False).reader, mode="replica", replica=state_of(tmp_path, TABLE))
    del rows, images
    for name, writes in {
        "ranges": [RangeDelete(n, 0, 1, AT + 1) for n in range(100)],
        "partitions": [Write(n, None, None, AT + 1) for n in range(100)],
    }.items():
        lake.store.put(name, encode_rows(VERSION.to_store(change_rows(writes, TABLE))))
        most_pieces()
        files = list(ReplicaTask(reader, 1)([name]))
        assert most_pieces() < 6
        assert sum(file.rows for file in files) == {"ranges": 100, "partitions": 2000}[name]


class Partition(Node):
    """A node that answers each request with the rows of one partition."""

    now, reads_as_of = 0, True

    def __post_init__(self) -> None:
        self.facts: dict[Any, Any] = {}

    def execute_async(self, statement: Any, execution_profile: str, paging_state: bytes | None) -> Any:
        start = int.from_bytes(paging_state or b"")
        upto = min(len(self.rows), start + statement.fetch_size)
        size = sum(self.rows[start:upto])
        self.pages.append(size)
        return Response(self.page(start, upto, size), upto.to_bytes(8) if upto < len(self.rows) else None)


@pytest.mark.parametrize("width", [1_000, 250_000, 3_000_000])
def test_what_a_deletion_has_spared(monkeypatch: pytest.MonkeyPatch, lake: Lake, width: int) -> None:
    """4,096 rows were decoded together, whatever they weigh; and pages of many deletions were asked for at once."""
    node, together = Partition([width] * 300), list[int]()
    monkeypatch.setattr(spared_rows, "scan_session", lambda *_: node)
    monkeypatch.setattr(spared_rows, "tells_element_times", lambda *_: True)
    monkeypatch.setattr(spared_rows, "level_to_ask", lambda *given: given[2])
    monkeypatch.setattr(spared_rows, "wait_until_unmasked", lambda *_: None)
    monkeypatch.setattr(spared_rows, "check_pages", lambda *_: None)
    monkeypatch.setattr(spared_rows, "ControlClient", lambda _: contextlib.nullcontext(Limiter()))
    monkeypatch.setattr(spared_rows, "row_images", lambda pages, *_: together.append(sum(map(len, pages))))
    rows = merged(change_rows([Write(n, None, None, AT) for n in range(30)], TABLE), TABLE)
    reader = lake.context(late=False).reader
    assert len(list(spared_rows._under(reader, rows, 0, set()))) == len(together)
    assert sum(together) >= 30 * 300 * width
    assert max(together) < BYTES_AT_ONCE + max(2 * PAGE_BYTES, 2 * width)


def test_files_of_late_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_pieces: Callable[[], float]) -> None:
    """64 files were decoded before the first batch was published."""
    monkeypatch.setattr(late_rows, "BATCH_BYTES", PIECE)
    store, found = LocalStore(tmp_path), list[float]()
    for number in range(70):
        put_late(store, [Write(number, n, "x" * 20_000, AT) for n in range(25)], TABLE, f"{number:03}")

    def publish(table: TableSchema, rows: pa.RecordBatch) -> Outcome:
        if not found:
            time.sleep(0.5)  # others may work meanwhile
        found.append(most_pieces())
        return Outcome(len(rows), np.zeros(len(rows), np.bool_))

    effects = SimpleNamespace(table=lambda _: VERSION, gone=lambda _: frozenset(), publish=publish)
    late = LateRows(store, cast(Any, SimpleNamespace(find=lambda _: {})), cast(Any, effects))
    most_pieces()
    late.cycle()
    assert late.counts["published"] == 70 * 25
    assert max(found) < 8


def test_one_row_of_a_large_partition(tmp_path: Path, most_pieces: Callable[[], float]) -> None:
    """All images that the table of changes had of its partition were in memory together."""
    few = row_images_of(
        merged(change_rows([Write(1, seq, "x" * 300, AT) for seq in range(500)], TABLE), TABLE), TABLE, "raw"
    )
    images = pa.Table.from_batches([few] * 120).combine_chunks()
    images = images.set_column(
        images.schema.get_field_index("seq"), few.schema.field("seq"), pa.array(range(60_000), pa.int32())
    )
    write_base(tmp_path, TABLE, images.slice(0, 0))
    write_pass(tmp_path, TABLE, images, 1)
    key = row_images_of(merged(change_rows([Write(1, 7, "x", AT)], TABLE), TABLE), TABLE, "raw")
    state = state_of(tmp_path, TABLE)
    most_pieces()
    found = previous_images(state, TABLE, key)
    assert most_pieces() < 12 < images.nbytes / PIECE
    assert found.equals(images.filter(pc.equal(images["seq"], 7)).combine_chunks().to_batches()[0])
