"""Late rows where something fails: what does not count, and what holds up nobody. Without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ringsync.changes.identity import TableVersion
from ringsync.compiled.arrow import Mask
from ringsync.ledger.error_tries import TAKEN, mark_taken, taken
from ringsync.state.out_of_sequence import Shard
from ringsync.state.session import StateError
from ringsync.status import LATE_ROWS
from ringsync.steps.late.late_rows import LONGEST_WAIT_S, LateRows, check_counts
from ringsync.steps.loop import Patience
from ringsync.storage.local import LocalStore
from tests.mortal_store import IMMORTAL, Killed, MortalStore
from tests.steps.late_files import Write, put_late
from tests.steps.test_close import TABLE
from tests.steps.test_late_rows import GONE, HOUR_AGO, LOOKS, Clock, Published


class Queue:
    """The queue ``out_of_sequence`` in memory, one shard a file."""

    def __init__(self) -> None:
        self.rows: dict[str, list[bytes]] = {}

    def find(self, files: Sequence[str]) -> dict[str, Any]:
        return {}

    def admit(self, file: str, rows: pa.RecordBatch, wanted: Mask, now_ms: int, due_ms: int) -> tuple[Shard, ...]:
        self.rows[file] = rows["digest"].filter(pa.array(wanted)).to_pylist()
        return (Shard(file, 0, 1, now_ms, due_ms, 1, len(self.rows[file])),)

    def digests(self, shards: Sequence[Shard]) -> list[list[bytes]]:
        return [self.rows[one.file] for one in shards]

    def solve(self, shard: Shard, solved: list[bytes], left: int, due_ms: int) -> Shard:
        self.rows[shard.file] = [one for one in self.rows[shard.file] if one not in solved]
        return replace(shard, due_ms=due_ms, attempts=shard.attempts + 1, waiting=left)

    def forget(self, file: str, shards: int) -> None:
        self.rows.pop(file)


@pytest.mark.parametrize("name", ["admit", "solve"])
def test_a_write_of_the_queue_that_fails_is_no_row_without_an_outcome(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch counts when all of it is done: its rows are found published when it is tried again."""
    store, clock = LocalStore(tmp_path), Clock()
    writes = [Write(1, seq, "x", HOUR_AGO + seq) for seq in range(3)]
    effects, queue = Published(TABLE, writes[:1]), Queue()
    put_late(store, writes, TABLE, f"fails-{name}")
    late = LateRows(store, queue, effects, clock)  # type: ignore[arg-type]
    fails = [True] * 2
    real = getattr(queue, name)

    def failing(*arguments: Any) -> Any:
        if fails:
            fails.pop()
            raise StateError("Write timeout: QUORUM, 1 of 2 answered")
        return real(*arguments)

    monkeypatch.setattr(queue, name, failing)
    patience = Patience()
    said = []
    for _ in range(LOOKS + 2):
        said.append(patience.tried(late.cycle))
        check_counts(late.counts)
        clock.now += LONGEST_WAIT_S
    assert [one for one in said if one] == ["StateError: Write timeout: QUORUM, 1 of 2 answered"] * 2
    assert sorted(effects.times) == sorted(write.digest for write in writes)
    assert (late.status()["waiting"], store.list(LATE_ROWS)) == (0, [])
    assert late.counts["read"] + late.counts["due"] > len(writes)


def test_a_table_that_fails_backs_off(tmp_path: Path) -> None:
    """Others wait while it is tried: it is so ever more seldom, and for less than half of the time."""
    store, clock, effects = LocalStore(tmp_path), Clock(), Published(TABLE, [])
    poisoned = replace(TABLE, table_id="0" * 32)
    put_late(store, [Write(1, 1, "x", HOUR_AGO)], poisoned, "a")
    real, tried, fail_all = effects.table, [], False

    def failing(table_id: str) -> TableVersion | None:
        if table_id != poisoned.table_id and not fail_all:
            return real(table_id)
        tried.append(clock.now)
        clock.now += 200
        raise RuntimeError("rows could not be read")

    effects.table = failing  # type: ignore[method-assign]
    late = LateRows(store, Queue(), effects, clock)  # type: ignore[arg-type]
    for number in range(100):
        put_late(store, [Write(2, number, "x", HOUR_AGO)], TABLE, f"backs-off-{number}")
        late.cycle()
        assert late.problems == ["table id " + "0" * 32 + ": rows could not be read"]
        assert late.counts["published"] == number + 1
        clock.now += 10
    assert min(np.diff(tried)) >= 400
    effects.table = real  # type: ignore[method-assign]
    effects.version = TableVersion.first(poisoned)
    clock.now += 200
    late.cycle()
    assert (late.problems, late.counts["published"]) == ([], 101)

    effects.table, fail_all = failing, True  # type: ignore[method-assign]
    late = LateRows(store, Queue(), effects, clock)  # type: ignore[arg-type]
    file = put_late(store, [Write(1, 2, "x", HOUR_AGO)], TABLE, "b")
    late.cycle()
    assert "rows could not be read" in late.problems[0]
    store.delete(file)
    late.cycle()
    assert late.problems == [], "nothing of it is there any more"


OF_RETRY = "errors-1790000000000-0a1b2c3d"


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_file_of_errors_retry_is_marked_before_it_is_removed(waiting: int, tmp_path: Path) -> None:
    """A kill in between does no harm: the file is looked at once more, and all of it was published."""
    writes = [Write(1, seq, "x", HOUR_AGO + seq) for seq in range(3)]
    killed, puts = True, 0
    while killed:
        store, clock, effects = MortalStore(tmp_path / str(puts)), Clock(), Published(TABLE, writes[:waiting])
        file = put_late(store, writes, TABLE, OF_RETRY)
        put_late(store, writes[:1], TABLE, "node-1-a")
        store.left, killed = puts, False
        late = LateRows(store, Queue(), effects, clock)  # type: ignore[arg-type]
        try:
            for _ in range(LOOKS):
                late.cycle()
                clock.now += LONGEST_WAIT_S
        except Killed:
            killed = True
        store.left = IMMORTAL
        is_published = not effects.digests_left(writes)
        assert taken(store, file) in ([None, "published"] if is_published else [None])
        assert store.stat(file) is not None or taken(store, file) == "published"
        late = LateRows(store, Queue(), effects, clock)  # type: ignore[arg-type]
        for _ in range(LOOKS):
            late.cycle()
            clock.now += LONGEST_WAIT_S
        assert sorted(effects.times) == sorted(write.digest for write in writes)
        assert (store.list(LATE_ROWS), taken(store, file)) == ([], "published")
        assert len(store.list(TAKEN)) == 1, "nobody asks about other files"
        puts += 1
        assert puts <= 4
    assert puts == 4


def test_a_file_of_errors_retry_that_somebody_removes_is_not_marked(tmp_path: Path) -> None:
    """Neither before it was looked at, nor while its rows wait."""
    writes = [Write(1, seq, "x", HOUR_AGO + seq) for seq in range(3)]
    store, clock, effects = LocalStore(tmp_path), Clock(), Published(TABLE, writes[:1])
    file = put_late(store, writes, TABLE, OF_RETRY)
    late = LateRows(store, Queue(), effects, clock)  # type: ignore[arg-type]
    late.cycle()
    assert late.status()["waiting"] == 1
    store.delete(file)
    for _ in range(LOOKS):
        clock.now += LONGEST_WAIT_S
        late.cycle()
    assert (late.status()["waiting"], taken(store, file)) == (0, None)


def test_a_file_of_errors_retry_whose_table_is_gone_is_marked_as_given_up(tmp_path: Path) -> None:
    store, effects = LocalStore(tmp_path), Published(TABLE, [])
    file = put_late(store, [Write(1, 1, "x", HOUR_AGO)], replace(TABLE, table_id=GONE), OF_RETRY)
    LateRows(store, Queue(), effects, Clock()).cycle()  # type: ignore[arg-type]
    assert (store.stat(file), taken(store, file)) == (None, "of_dropped_tables")
    mark_taken(store, file, "published")
    assert taken(store, file) == "of_dropped_tables", "what was said once stays"
