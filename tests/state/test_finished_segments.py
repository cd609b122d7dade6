"""What is remembered of segments that are staged whole: one object, whatever happened while it was written."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.formats.commitlog.segment import Wanted
from ringsync.ledger.finished_segments import REMEMBERED_S, SegmentIds, finished_segments, fold_finished
from ringsync.ledger.staging import LogPart, StageCommit, put_commit
from ringsync.ring.ring import Host
from ringsync.steps.stage.stage_task import Staged, StageWork
from ringsync.storage import open_store
from ringsync.storage.port import AlreadyExistsError
from tests.steps.node_logs import claimed, read_node_log

NODE = "7c1f8b1e-0000-0000-0000-000000000001"
HOST = Host(NODE, "10.0.0.1", 9042, "datacenter1", "rack1", ())
NOW_MS = 1_800_000_000_000
LONG_AGO_MS = NOW_MS - int(REMEMBERED_S * 1000) - 1


STAGED = Staged(
    StageWork(NODE, "CommitLog-7-6.log", Wanted(after=100, until=150), 2),
    LogPart("CommitLog-7-6.log", 6, 100, 150, False),
    NOW_MS,
)


@given(st.lists(st.sets(st.integers(0, 30)), max_size=5))
def test_ids_are_a_set(parts: list[set[int]]) -> None:
    found = SegmentIds()
    for part in parts:
        found = found.with_ids(part)
    wanted = set().union(*parts)
    assert {one for one in range(-1, 32) if one in found} == wanted
    ends = [end for pair in found.ranges for end in pair]
    assert ends == sorted(ends)
    assert all(second[0] > first[1] + 1 for first, second in zip(found.ranges, found.ranges[1:], strict=False))


def test_what_was_finished_long_ago_becomes_one_object_and_stays_finished(tmp_path: Path) -> None:
    store, folder = open_store(str(tmp_path / "lake")), tmp_path / "cdc_raw"
    folder.mkdir()
    finished = {1: LONG_AGO_MS, 2: LONG_AGO_MS, 4: LONG_AGO_MS, 5: NOW_MS}
    put_commit(store, StageCommit(NODE, 1, (), {6: 100}, finished, {}, ()))
    log = read_node_log(store, HOST, folder, NOW_MS)
    assert finished_segments(store, NODE).ranges == ((1, 2), (4, 4))
    assert (log.number, log.ends, log.finished) == (1, {6: 100}, {5: NOW_MS})
    put_commit(store, log.commit_of([STAGED]))

    again = read_node_log(store, HOST, folder, NOW_MS)
    assert [one for one in range(1, 9) if one in again.folded or one in again.finished] == [1, 2, 4, 5]
    assert (again.number, again.ends) == (2, {6: 150})
    # Cassandra links an old segment again after a crash.
    for segment in (2, 3):
        (folder / f"CommitLog-7-{segment}.log").write_bytes(b"log")
        (folder / f"CommitLog-7-{segment}_cdc.idx").write_text("100\nCOMPLETED")
    assert [Path(work.file).name for work in again.new_work(NOW_MS, 1000, claimed)] == ["CommitLog-7-3.log"]
    again.remove_finished()
    assert sorted(path.name for path in folder.iterdir()) == ["CommitLog-7-3.log", "CommitLog-7-3_cdc.idx"]


def test_who_loses_the_race_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    seen = store.stat

    def late(key: str) -> object:
        found = seen(key)
        monkeypatch.undo()
        fold_finished(store, NODE, [2])
        return found

    monkeypatch.setattr(store, "stat", late)
    with pytest.raises(AlreadyExistsError):
        fold_finished(store, NODE, [1])
    assert finished_segments(store, NODE).ranges == ((2, 2),)
