"""Late rows of a table whose token ranges are not all in the same state, or whose rows wait in a bucket, too."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.compiled.arrow import integers
from ringsync.ledger.passes import digest_halves, get_pass, pass_folder, pass_numbers
from ringsync.ledger.staging import (
    Block,
    Bucket,
    StageCommit,
    encode_blocks,
    encode_rows,
    late_key,
    put_commit,
    rows_key,
)
from ringsync.ring.ranks import ranked
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.steps.late import late_pass
from ringsync.steps.late.late_pass import LatePasses
from ringsync.steps.passes.rows_after import UnreadRowsError
from ringsync.steps.stage.staged_files import range_sums
from tests.commitlog_model.murmur3 import token
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import RING, TABLE
from tests.steps.test_followed import World
from tests.steps.test_id_comes_again import FIRST, cycle

THERE = replace(TABLE, table_id=FIRST)
IDS = range(1, 20)
WRITES = [Write(id_, 1, "late", 1_790_000_000_000_000) for id_ in IDS]


def ring(*up: bool, others: int = 0) -> RingSnapshot:
    """Five nodes, each range on three of them.

    :param others: nodes of another datacenter, which nobody asks
    """
    hosts = (
        Host(f"n{n}", f"127.0.0.{n + 1}", 9042, "dc", "r1", (-(2**63) + n * 2**64 // 5 + 1,), alive)
        for n, alive in enumerate(up)
    )
    far = (
        Host(f"m{n}", f"127.0.1.{n + 1}", 9042, "far", "r1", (-(2**63) + n * 2**64 // 5 + 2,), is_local=False)
        for n in range(others)
    )
    return RingSnapshot((*hosts, *far), Replication("NetworkTopologyStrategy", (("dc", 3), ("far", min(3, others)))))


def readable(snapshot: RingSnapshot) -> set[int]:
    """The ``id`` of rows that a quorum can answer for."""
    found = ranked(snapshot)
    tokens = [token(id_.to_bytes(4, "big")) for id_ in IDS]
    numbers = [next((n for n, end in enumerate(found.ends) if one <= end), 0) for one in tokens]
    return {
        id_
        for id_, n in zip(IDS, numbers, strict=True)
        if sum(host.up for host in found.hosts[n] if host.is_local) >= 2
    }


class Late:
    """``out_of_sequence`` whose reads need a quorum."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, snapshot: RingSnapshot) -> None:
        world = World(folder, monkeypatch)
        world.there, self.readable = (FIRST,), readable(snapshot)
        monkeypatch.setattr(late_pass, "ranked", lambda _: ranked(snapshot))
        monkeypatch.setattr(late_pass, "make_outputs", self._make)
        self.passes = LatePasses(world.application, None, None)  # type: ignore[arg-type]
        assert self.passes.table(FIRST) is not None

    def _make(self, context: Any, store: Any, rows: Any, name: str) -> Any:
        asked = {int.from_bytes(key, "big") for batch in rows.values() for key in batch["partition_key"].to_pylist()}
        if asked - self.readable:
            raise UnreadRowsError("two of three nodes are down")
        return _make(context, store, rows, name)


_make = late_pass.make_outputs


@pytest.mark.parametrize("others", [0, 5])
def test_rows_of_a_range_without_a_quorum_hold_up_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    late = Late(tmp_path, monkeypatch, ring(False, False, True, True, True, others=others))
    assert 3 < len(late.readable) < len(IDS) - 3
    rows = change_rows(WRITES, THERE)
    outcome = late.passes.publish(THERE, rows)
    waiting = rows["partition_key"].filter(outcome.waiting).to_pylist()
    assert {int.from_bytes(key, "big") for key in waiting} == set(IDS) - late.readable
    assert outcome.published == len(late.readable)
    again = late.passes.publish(THERE, rows)
    assert (again.published, again.waiting.tolist()) == (0, outcome.waiting.tolist())
    late.readable = set(IDS)
    assert late.passes.publish(THERE, rows).published == len(waiting)


def test_where_no_range_is_to_blame_all_rows_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(tmp_path, monkeypatch, ring(True, True, True, True, True))
    late.readable = set()
    with pytest.raises(UnreadRowsError):
        late.passes.publish(THERE, change_rows(WRITES, THERE))


@pytest.mark.parametrize("close_first", [False, True])
def test_rows_that_wait_in_a_bucket_and_are_read_again_are_published_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close_first: bool
) -> None:
    """A backfill, whose rows are all late. One is dated ahead: it waits in the newest bucket of the time it came."""
    world = World(tmp_path, monkeypatch)
    world.there = (FIRST,)
    length = 60_000
    bucket = Bucket(int(time.time() * 1000) // length * length - length, length)
    writes = [Write(1, seq, "x", (bucket.start + ahead * length) * 1000) for seq, ahead in enumerate((0, 60))]
    rows = change_rows(writes, THERE)
    stored, key = world.table(FIRST).version.to_store(rows), rows_key("a", 1, "x")
    data, (place,) = encode_blocks([stored], key)
    world.store.put(key, data)
    sums = range_sums(RING, integers(rows["token"]), digest_halves(rows["digest"]))
    block = Block(place, FIRST, 1, str(bucket), len(rows), RING.ring.digest, sums)
    put_commit(world.store, StageCommit("a", 1, (), {}, {}, {}, (block,)))
    world.store.put(late_key(FIRST, "a-1-0"), encode_rows(stored))
    closer = world.closer()
    for is_close in (close_first, not close_first):
        if is_close:
            cycle(closer)
        else:
            world.publish_late()
    cycle(closer)
    assert [get_pass(world.store, FIRST, number).late for number in pass_numbers(world.store, FIRST)] == [
        not close_first
    ]
    assert world.folders == [pass_folder(1)]
    counts = closer._tables[FIRST].counts
    assert (counts["agreed"], counts["published_before"]) == (2, 0 if close_first else 2)
