"""Pieces of a pass: however many rows a slice has, and however wide they are, not more are in memory than fit."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringsync.changes.batch import ChangeRows
from ringsync.changes.schema import OF_PARTITIONS, STATIC
from ringsync.images.from_changes import row_images_of
from ringsync.ledger.passes import pass_folder
from ringsync.ledger.staging import encode_blocks, encode_rows, rows_key
from ringsync.replica.folders import changes_folder
from ringsync.ring.tokens import WHOLE_RING, TokenRange
from ringsync.steps.close import close_task
from ringsync.steps.close.agreement import Reading
from ringsync.steps.close.close_task import CloseTask, SliceOfBucket, SliceResult
from ringsync.steps.passes import pieces as module
from ringsync.steps.passes import replica_task, rows_after
from ringsync.steps.passes.pieces import pieces
from ringsync.steps.passes.replica_task import ReplicaTask
from ringsync.steps.passes.rows_after import AfterReader, Seen
from ringsync.streams.files import FileStream
from tests.reconciled import merged
from tests.steps.late_files import RangeDelete, Write, change_rows
from tests.steps.test_close import NOW, TABLE, VERSION, Lake, lake

__all__ = ["lake"]
AT = NOW.start * 1000


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for of in (module, close_task):
        monkeypatch.setattr(of, "PIECE_BYTES", 2**20)
    monkeypatch.setattr(module, "FIRST_ROWS", 20)
    monkeypatch.setattr(module, "_known", defaultdict(module._Known))


def close(lake: Lake, writes: list[Write], mode: Any) -> list[SliceResult]:
    """What the task makes of one slice with all of these changes."""
    context = lake.context(late=False)
    task = CloseTask(replace(context, reader=replace(context.reader, mode=mode)), by_arrival=False)
    data, places = encode_blocks([VERSION.to_store(change_rows(writes, TABLE))], rows_key("a", 1, "file"))
    lake.store.put(places[0].key, data)
    reading = Reading(((places[0], "a"),), WHOLE_RING.unwrap(), len(writes))
    return list(task([("0000", (SliceOfBucket(str(NOW), (reading,), (), ()),))]))


def said(lake: Lake, results: list[SliceResult]) -> list[tuple[int, int]]:
    stream = FileStream(lake.store, "test.shop.t")
    stream.publish(pass_folder(1), [output.part for result in results for output in result.outputs])
    return sorted((one["key"]["id"], one["key"]["seq"]) for one in stream.read(pass_folder(1)))


@pytest.mark.parametrize("partitions", [1, 7, 500], ids=lambda count: f"{count} partitions")
def test_small_changes_of_wide_rows(lake: Lake, monkeypatch: pytest.MonkeyPatch, partitions: int) -> None:
    """A slice has 50,000 changes. If their rows have 44 KB, these are more than an array can hold."""
    sizes: list[int] = []

    def read_keys(reader: AfterReader, keys: pa.RecordBatch, levels: Any, now_s: int) -> Seen:
        there = [
            Write(int.from_bytes(key), int.from_bytes(clustering[-4:]), "x" * 10_000, AT + 10**6)
            for key, clustering in zip(keys["partition_key"].to_pylist(), keys["clustering"].to_pylist(), strict=True)
        ]
        images = row_images_of(merged(change_rows(there, TABLE), TABLE), TABLE, "raw")
        sizes.append(images.nbytes)
        return Seen(images, *np.ones((2, len(there)), np.bool_))

    monkeypatch.setattr(rows_after, "read_keys", read_keys)
    writes = [Write(n % partitions, n // partitions, "new", AT + n) for n in range(500)]
    results = close(lake, writes, "source")
    assert max(sizes) < 1.2 * 2**20
    assert len(sizes) < 500 * 10_000 / 2**20 * 1.2 + 2
    assert said(lake, results) == sorted((write.id, write.seq) for write in writes)
    assert sum(result.read for result in results) == len(writes)


def test_wide_changes(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all rows of a slice were put together before anything else."""
    sizes: list[int] = []
    real = close_task.close_slice

    def close_slice(*arguments: Any) -> SliceResult:
        sizes.append(sum(arguments[2].rows_of(reading).nbytes for part in arguments[4] for reading in part.readings))
        return real(*arguments)

    monkeypatch.setattr(close_task, "close_slice", close_slice)
    writes = [Write(n, 1, "x" * 10_000, AT + n) for n in range(1_000)]
    results = close(lake, writes, "none")
    assert max(sizes) < 1.5 * 2**20
    assert said(lake, results) == [(n, 1) for n in range(1_000)]


def test_narrow_rows_are_one_piece(lake: Lake) -> None:
    """From the second slice on."""
    first = close(lake, [Write(n, 1, "x", AT + n) for n in range(500)], "none")
    second = close(lake, [Write(n, 2, "x", AT + n) for n in range(500)], "none")
    assert [len(result.outputs) for result in (*first, *second)] == [2, 1]


@pytest.mark.parametrize("seed", range(20))
def test_what_belongs_together_is_in_one_piece(seed: int) -> None:
    choose = random.Random(seed)
    writes: list[Write | RangeDelete] = [
        Write(choose.randrange(20), choose.randrange(30), choose.choice(["x", None]), AT + n) for n in range(1_000)
    ]
    writes += [RangeDelete(id_, 2, 9, AT) for id_ in (3, 4)] + [Write(5, None, None, AT)]
    choose.shuffle(writes)
    halves = {name: change_rows(part, TABLE) for name, part in (("a", writes[:400]), ("b", writes[400:]))}
    place_of: dict[Any, int] = {}
    digests: list[tuple[str, bytes]] = []
    for place, piece in enumerate(pieces(halves, TABLE, OF_PARTITIONS if seed % 2 else ())):
        for name, batch in piece.items():
            for row in batch.to_pylist():
                digests.append((name, row["digest"]))
                id_ = int.from_bytes(row["partition_key"])
                key = id_ if id_ in (3, 4, 5) else (id_, row["clustering"])
                assert place_of.setdefault(key, place) == place
    assert place > 5
    assert sorted(digests) == sorted(
        (name, digest) for name, batch in halves.items() for digest in batch["digest"].to_pylist()
    )


def test_only_partitions_that_are_read_are_pieces_of_their_own(lake: Lake) -> None:
    """With expand_deletions each deleted or static partition was: 50,000 pieces of some objects each."""
    reader = replace(lake.context(late=False).reader, replica=SimpleNamespace(), mode="none", expand=True)
    static = change_rows([Write(n, None, None, AT + n) for n in range(60)], TABLE)
    static = static.set_column(static.schema.names.index("kind"), "kind", pa.array([STATIC] * 60, static["kind"].type))
    assert len([*pieces({"": static}, TABLE, reader.read_whole)]) <= 3
    assert len([*pieces({"": static}, TABLE, replace(reader, before=True).read_whole)]) > 10
    deleted = change_rows([RangeDelete(n, 2, 9, AT) for n in range(60)], TABLE)
    assert len([*pieces({"": deleted}, TABLE, reader.read_whole)]) > 10
    keys = replace(TABLE, columns=tuple(column for column in TABLE.columns if column.kind != "clustering"))
    assert replace(reader, version=replace(VERSION, table=keys)).read_whole == ()


def test_a_part_without_rows_reads_no_digests(lake: Lake) -> None:
    """A slice that is too large is halved many times: each empty half read all files of digests."""
    task = CloseTask(lake.context(late=False), by_arrival=False)
    data, places = encode_blocks([VERSION.to_store(change_rows([Write(1, 1, "x", AT)], TABLE))], rows_key("a", 1, "f"))
    lake.store.put(places[0].key, data)
    reading = Reading(((places[0], "a"),), TokenRange(0, 1).unwrap(), 1)
    (result,) = task([("0000", (SliceOfBucket(str(NOW), (reading,), ("is not there",), ()),))])
    assert (result.outputs, result.read) == ((), 0)


def test_the_replica_s_rows(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a pass without images in its messages are wide, too."""
    sizes: list[int] = []

    def complete_rows(reader: AfterReader, rows: ChangeRows) -> Any:
        found = [Write(int.from_bytes(key), 1, "x" * 10_000, AT) for key in rows.keys["partition_key"].to_pylist()]
        images = row_images_of(merged(change_rows(found, TABLE), TABLE), TABLE, "raw")
        sizes.append(images.nbytes)
        return SimpleNamespace(images=images)

    monkeypatch.setattr(replica_task, "complete_rows", complete_rows)
    lake.store.put(
        "changes", encode_rows(VERSION.to_store(change_rows([Write(n, 1, "x", AT) for n in range(500)], TABLE)))
    )
    (file,) = ReplicaTask(lake.context(late=False).reader, 1)(["changes"])
    assert file.rows == 500
    assert max(sizes) < 1.2 * 2**20
    table = pq.read_table(pa.BufferReader(lake.store.get(f"{changes_folder(TABLE.keyspace, TABLE.name)}/{file.name}")))
    assert table["token"].to_pylist() == sorted(table["token"].to_pylist())
