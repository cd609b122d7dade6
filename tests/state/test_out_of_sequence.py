"""The queue of late rows on a real node: what is admitted is found again, once, and what has gone leaves nothing."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.state.out_of_sequence import BATCH_BYTES, SHARD_ROWS, OutOfSequence, batches
from ringsync.state.session import StateSession

pytestmark = pytest.mark.server
FILE = "staging/late/0123/node-7.arrow"


@pytest.fixture(scope="module")
def queue(session: Any) -> Iterator[OutOfSequence]:
    StateSession(session, "t_queue").create({"class": "NetworkTopologyStrategy", "datacenter1": "1"})
    yield OutOfSequence(session, "t_queue")
    session.execute("DROP KEYSPACE t_queue")


def late_rows(count: int) -> pa.RecordBatch:
    columns: dict[str, Any] = {field.name: pa.nulls(count, field.type) for field in CHANGE_ROWS}
    numbers = range(count)
    columns["digest"] = pa.array([number.to_bytes(16, "big") for number in numbers], pa.binary(16))
    columns["table_id"] = pa.array([bytes(16)] * count, pa.binary(16))
    columns["partition_key"] = pa.array([number.to_bytes(4, "big") for number in numbers], pa.binary())
    columns["clustering"] = pa.array([b"c" if number % 2 else None for number in numbers], pa.binary())
    columns["kind"] = pa.array([number % 2 for number in numbers], pa.int8())
    columns["write_time"] = pa.array([1_700_000_000_000_000 + number for number in numbers], pa.int64())
    return pa.RecordBatch.from_pydict(columns, schema=CHANGE_ROWS)


def test_no_mutation_is_larger_than_a_node_takes() -> None:
    """A hundred rows with keys of 64 KB were 13 MB, more than half a segment of 16 MB."""
    rows = [("file", 0, bytes([number]) * 65_000, bytes(65_000), number) for number in range(100)]
    cut = [*batches(rows)]
    assert [row for batch in cut for row in batch] == rows
    assert max(map(len, cut)) == 8
    large = ("file", 1, bytes(2 * BATCH_BYTES))
    assert [*batches([rows[0], large, large])] == [[rows[0]], [large], [large]]
    assert list(map(len, batches([("file", 0, b"k")] * 250))) == [100, 100, 50]
    assert [*batches([])] == []


def test_from_admission_to_the_end(queue: OutOfSequence, session: Any) -> None:
    rows = late_rows(2 * SHARD_ROWS + 3)
    wanted = np.ones(len(rows), np.bool_)
    wanted[5], wanted[SHARD_ROWS : 2 * SHARD_ROWS] = False, False
    assert queue.find([FILE]) == {}
    admitted = queue.admit(FILE, rows, wanted, 1_000, 1_500)
    assert [(s.number, s.shards, s.due_ms, s.attempts, s.waiting) for s in admitted] == [
        (0, 3, 1_500, 1, SHARD_ROWS - 1),
        (1, 3, 1_500, 1, 0),
        (2, 3, 1_500, 1, 3),
    ]
    assert queue.find([FILE, "staging/late/another.arrow"]) == {FILE: admitted}
    digests = queue.digests(admitted)
    assert sorted(d for shard in digests for d in shard) == rows["digest"].filter(pa.array(wanted)).to_pylist()
    row = session.execute(
        "SELECT * FROM t_queue.out_of_sequence WHERE late_file = %s AND shard = 0 AND digest = %s",
        (FILE, digests[0][7]),
    ).one()
    assert (row.table_id, row.partition_key, row.clustering) == (bytes(16), (8).to_bytes(4, "big"), None)
    assert (row.kind, row.write_time) == (0, 1_700_000_000_000_008)
    left = queue.solve(admitted[2], digests[2][1:], 1, 60_000)
    assert left == replace(admitted[2], due_ms=60_000, attempts=2, waiting=1)
    assert queue.solve(admitted[0], digests[0], 0, 60_000).waiting == 0
    assert [s.waiting for s in queue.find([FILE])[FILE]] == [0, 0, 1]
    assert queue.digests([left]) == [[digests[2][0]]]
    queue.solve(left, digests[2][:1], 0, 0)
    queue.forget(FILE, 3)
    assert queue.find([FILE]) == {}
    assert session.execute("SELECT count(*) FROM t_queue.out_of_sequence").one()[0] == 0


def test_admitting_again_changes_nothing_but_what_is_wanted_no_more(queue: OutOfSequence) -> None:
    """As after a kill: by then some of the rows may have been published otherwise."""
    rows = late_rows(10)
    queue.admit(FILE, rows, np.ones(10, np.bool_), 1_000, 1_000)
    again = queue.admit(FILE, rows, np.arange(10) > 3, 2_000, 2_000)
    assert len(queue.digests(again)[0]) == 10
    queue.forget(FILE, 1)


def test_what_has_gone_through_does_not_slow_it_down(queue: OutOfSequence) -> None:
    """Ten million rows in miniature: reading what is there costs the same as before them."""
    rows, wanted = late_rows(SHARD_ROWS), np.ones(SHARD_ROWS, np.bool_)

    def seconds(number: int) -> float:
        started = time.perf_counter()
        for _ in range(20):
            assert queue.digests(queue.find([f"{number}"])[f"{number}"])[0][0] == bytes(16)
        return time.perf_counter() - started

    queue.admit("0", late_rows(50), wanted[:50], 0, 0)
    before = seconds(0)
    for number in range(1, 13):
        shards = queue.admit(f"{number}", rows, wanted, 0, 0)
        digests = queue.digests(shards)[0]
        # Half go one by one, the rest with their partition.
        queue.solve(shards[0], digests[: SHARD_ROWS // 2], SHARD_ROWS // 2, 0)
        queue.forget(f"{number}", 1)
    queue.admit("13", late_rows(50), wanted[:50], 0, 0)
    assert seconds(13) < 3 * before + 0.2
