"""What is remembered of segments that are staged whole: one object, whatever happened while it was written."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.ring.ring import Host
from ringsync.state.finished_segments import REMEMBERED_S, SegmentIds, finished_segments, fold_finished
from ringsync.state.staging import StageCommit, StagedFile, commit_keys, put_commit
from ringsync.steps.commitlog_stage import read_node_log, synced_parts
from ringsync.storage import open_store
from ringsync.storage.port import AlreadyExistsError, ObjectStore

NODE = "7c1f8b1e-0000-0000-0000-000000000001"
HOST = Host(NODE, "10.0.0.1", 9042, "datacenter1", "rack1", ())
NOW_MS = 1_800_000_000_000
LONG_AGO_MS = NOW_MS - int(REMEMBERED_S * 1000) - 1


def commit_of(segment: int, start: int = 0, *, finished: bool = True, at_ms: int = LONG_AGO_MS) -> StageCommit:
    return StageCommit(NODE, f"CommitLog-7-{segment}.log", segment, start, start + 100, finished, at_ms, {}, ())


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
    waited_for = StagedFile("staging/rows/t/b/f.arrow", "t", "b", 1, "r", ())
    lately, open_one, two, waiting = (
        commit_of(5, at_ms=NOW_MS),
        commit_of(6, finished=False),
        [commit_of(7, finished=False), commit_of(7, 100)],
        StageCommit(**{**vars(commit_of(8)), "files": (waited_for,)}),
    )
    kept = [lately, open_one, *two, waiting]
    for commit in [*(commit_of(segment) for segment in (1, 2, 4)), *kept]:
        put_commit(store, commit)
    log = read_node_log(store, HOST, folder, NOW_MS)
    assert finished_segments(store, NODE).ranges == ((1, 2), (4, 4))
    assert commit_keys(store, NODE) == [commit.key for commit in kept]
    assert log.ends[6] == 100

    again = read_node_log(store, HOST, folder, NOW_MS)
    assert [one for one in range(1, 9) if one in again.folded or one in again.finished] == [1, 2, 4, 5, 7, 8]
    # Cassandra links an old segment again after a crash.
    for segment in (2, 3):
        (folder / f"CommitLog-7-{segment}.log").write_bytes(b"log")
        (folder / f"CommitLog-7-{segment}_cdc.idx").write_text("100\nCOMPLETED")
    assert [Path(work.file).name for work, _ in synced_parts(again)] == ["CommitLog-7-3.log"]
    assert sorted(path.name for path in folder.iterdir()) == ["CommitLog-7-3.log", "CommitLog-7-3_cdc.idx"]


def test_who_loses_the_race_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    mine, theirs = commit_of(1), commit_of(2)
    for commit in (mine, theirs):
        put_commit(store, commit)
    seen = store.stat

    def late(key: str) -> object:
        found = seen(key)
        monkeypatch.undo()
        fold_finished(store, NODE, [theirs])
        return found

    monkeypatch.setattr(store, "stat", late)
    with pytest.raises(AlreadyExistsError):
        fold_finished(store, NODE, [mine])
    assert commit_keys(store, NODE) == [mine.key]
    assert left(store) == ((2, 2),)


def left(store: ObjectStore) -> tuple[tuple[int, int], ...]:
    return finished_segments(store, NODE).ranges
