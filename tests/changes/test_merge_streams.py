"""Tests of the merge of sorted streams: its parts together are what the merge of all rows at once returns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.changes.keys.order import clustering_keys
from ringsync.changes.keys.order_kernels import END
from ringsync.changes.reconcile.streams import MergedPart, Stream, merge_streams
from ringsync.changes.schema import PARTITION_DELETION, RANGE_DELETION, ROW, STATIC
from ringsync.cql.cells import cells_of_values
from tests.changes.test_merge_rows import (
    NUMBERS,
    ONE,
    SOURCE,
    TABLES,
    WITH_NODE,
    batch_of,
    change_rows,
    clustering,
    in_partitions,
    shown,
)
from tests.reconciled import merged_batch

TABLE = TABLES["t"]
Row = dict[str, Any]


def key(clustering: bytes, side: int = 0) -> bytes:
    return clustering_keys(cells_of_values([clustering]), TABLE, side).value(0) or b""


def place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in an SSTable; a range stands where it ends."""
    head = (row["token"], row["partition_key"])
    if row["kind"] in (PARTITION_DELETION, STATIC):
        return *head, int(row["kind"] == STATIC), b""
    return *head, 2, key(row["range_end"], END) if row["kind"] == RANGE_DELETION else key(row["clustering"])


def as_in_an_sstable(batch: pa.RecordBatch, cuts: Sequence[int]) -> list[pa.RecordBatch]:
    """Merge rows, leave out ranges that overlap others, and cut the rest into batches, and ranges with them."""
    chosen: list[Row] = []
    for row in sorted(merged_batch(batch, TABLE).to_pylist(), key=place):
        before = [one for one in chosen if one["kind"] == RANGE_DELETION and place(one)[:2] == place(row)[:2]]
        if row["kind"] == RANGE_DELETION and before and key(row["clustering"]) < place(before[-1])[3]:
            continue
        chosen.append(row)
    limits = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(chosen)), len(chosen)]
    batches = []
    for first, end in itertools.pairwise(limits):
        rows, behind = chosen[first:end], chosen[end:]
        last = rows[-1] if rows else None
        for row in behind:
            if last and last["kind"] == ROW and covers(row, last):
                rows = [*rows, {**row, "range_end": last["clustering"] + b"\1"}]
                row["clustering"] = last["clustering"] + b"\0"
        batches.append(pa.RecordBatch.from_pylist(rows, WITH_NODE))
    return batches


def covers(row: Row, other: Row) -> bool:
    if row["kind"] != RANGE_DELETION or place(row)[:2] != place(other)[:2]:
        return False
    return key(row["clustering"]) < key(other["clustering"]) < place(row)[3]


def opened(batches: list[pa.RecordBatch]) -> Stream:
    def open_() -> Iterator[pa.RecordBatch]:
        return iter(batches)

    return Stream(min([one["token"][0].as_py() for one in batches if len(one)], default=0), open_)


def joined(parts: list[MergedPart]) -> pa.RecordBatch:
    batches = [part.rows.to_arrow() for part in parts]
    return pa.Table.from_batches(batches, WITH_NODE).combine_chunks().to_batches(max_chunksize=None)[0]


@settings(max_examples=150, deadline=None)
@given(in_partitions(change_rows()), st.lists(st.integers(0, 3), max_size=14), st.lists(st.integers(0, 10), max_size=6))
def test_parts_are_the_merge_of_everything(found: list[Row], streams: list[int], cuts: list[int]) -> None:
    source_of = [*streams, *[0] * len(found)]
    sources = []
    for number in range(4):
        own = [row for row, source in zip(found, source_of, strict=False) if source == number]
        sources.append(as_in_an_sstable(batch_of(own, TABLE), [cut + number for cut in cuts]))
    everything = [batch for batches in sources for batch in batches if len(batch)]
    parts = list(merge_streams([opened(batches) for batches in sources], TABLE))
    if not everything:
        assert not parts
        return
    (whole,) = pa.Table.from_batches(everything).combine_chunks().to_batches()
    result = joined(parts)
    expected = merged_batch(whole, TABLE)
    without = [name for name in result.schema.names if name not in SOURCE]
    assert sorted(result.select(without).to_pylist(), key=repr) == sorted(
        expected.select(without).to_pylist(), key=repr
    )
    for now in (0, 2, 10):
        assert shown(result, "t", now) == shown(whole, "t", now)


def test_a_partition_larger_than_a_batch_keeps_its_head() -> None:
    rows: list[Row] = [{"kind": PARTITION_DELETION, "deletion": {"timestamp": 3, "local_deletion_time": 1}}]
    rows += [{"kind": STATIC, "cells": [live("s", 5)]}]
    whole = [{"cells": [], "complex_deletions": [], "p": 1, **row} for row in rows]
    late = [
        {"kind": ROW, "clustering": clustering_of(number), "cells": [live("v", 2 + number % 3)], "p": 1}
        for number in range(40)
    ]
    late = [{"complex_deletions": [], **row} for row in late]
    head, tail = batch_of(whole, TABLE), batch_of(late, TABLE)
    parts = list(merge_streams([opened([head]), opened([tail.slice(at, 8) for at in range(0, 40, 8)])], TABLE))
    assert len(parts) > 4
    for part in parts[1:]:
        assert sorted(part.carried.kind.tolist()) == [STATIC, PARTITION_DELETION]
    assert sum(len(part.rows) for part in parts) == 2 + 40
    times = [time for part in parts for time in part.rows.cells.timestamp.tolist()]
    assert sorted(set(times)) == [4, 5]


def test_rows_out_of_order_are_refused() -> None:
    rows = batch_of([{"kind": STATIC, "cells": [live("s", 5)], "complex_deletions": [], "p": p} for p in (2, 0)], TABLE)
    with pytest.raises(ValueError, match="of token 0, is not in its order"):
        list(merge_streams([opened([rows.slice(0, 1), rows.slice(1)])], TABLE))
    with pytest.raises(ValueError, match="of token 0, is not in its order"):
        list(merge_streams([opened([rows])], TABLE))


def live(name: str, timestamp: int) -> Row:
    number = NUMBERS["t"][name]
    return {"column": number, "path": None, "value": b"x", "timestamp": timestamp, "ttl": None, "kind": 1}


def clustering_of(number: int) -> bytes:
    return clustering([ONE, f"{number:03}".encode()])
