"""Commits are taken in by table: one that is gone, or not known yet, keeps no other waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.cql.types import Native
from ringsync.ledger.staging import Block, Bucket, Place, StageCommit, commit_keys, put_commit, rows_key, rows_keys
from ringsync.ledger.table_versions import version_of
from ringsync.schema.table import Column, TableSchema
from ringsync.steps.close.staged_commits import SWEEP_EVERY_MS, StagedCommits
from ringsync.storage.local import LocalStore
from ringsync.storage.port import Stat

GONE, LEFT = "a" * 32, "b" * 32
BUCKET = str(Bucket(1_790_000_000_000, 60_000))


@dataclass
class Table:
    blocks: list[Block] = field(default_factory=list)

    def add(self, node: str, block: Block) -> None:
        self.blocks.append(block)


def block(table_id: str, key: str, start: int = 0) -> Block:
    return Block(Place(key, start, 10, 0), table_id, 1, BUCKET, 10, "ring", ((0, 10, 1, 1),))


def commit(number: int, *blocks: Block) -> StageCommit:
    return StageCommit("node-1", number, (), {1: 100 * number}, {}, {"rows": 20}, blocks)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_commit_of_two_tables_waits_for_neither(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    key = "staging/rows/node-1/f.arrow"
    store.put(key, b"rows")
    put_commit(store, commit(1, block(GONE, key), block(LEFT, key, 10)))
    put_commit(store, commit(2))
    commits, left = StagedCommits(store), Table()
    commits.read({LEFT: left}, now_ms=0)
    assert [one.place.start for one in left.blocks] == [10]
    commits.retire(set())  # what is left is published
    assert store.stat(key), "the other table's rows wait for it"
    assert commits.problems()["rows_homeless"] == {GONE: 10}
    assert commits.problems()["homeless_since_ms"] == {GONE: 0}

    version_of(store, TableSchema("shop", "gone", GONE, (Column("id", "partition_key", Native("int")),)))
    commits.forget(GONE, ())
    assert "10 staged rows" in capsys.readouterr().out
    assert commits.problems()["rows_of_dropped_tables"] == {"shop.gone": 10}
    commits.retire(set())
    assert store.stat(key) is None
    assert commit_keys(store) == [commit(2).key], "the newest one tells how far the log is read"


def test_a_table_that_becomes_known_gets_what_has_waited(store: LocalStore) -> None:
    put_commit(store, commit(1, block(GONE, "f"), block(LEFT, "f", 10)))
    commits, table = StagedCommits(store), Table()
    commits.read({}, now_ms=0)
    commits.read({GONE: table}, now_ms=1)
    commits.read({GONE: table}, now_ms=2)
    assert [one.table_id for one in table.blocks] == [GONE]


def test_a_commit_that_cannot_be_read_is_named_and_hides_no_other(store: LocalStore) -> None:
    broken = commit(1).key
    store.put(broken, b'{"node": "from another version"}')
    put_commit(store, commit(2, block(LEFT, "f")))
    commits, table = StagedCommits(store), Table()
    commits.read({LEFT: table}, now_ms=0)
    assert len(table.blocks) == 1
    assert list(commits.problems()["commits_broken"]) == [broken]


def test_the_newest_commit_of_a_node_stays_without_its_rows(store: LocalStore) -> None:
    store.put("f", b"rows")
    put_commit(store, commit(1, block(LEFT, "f")))
    commits = StagedCommits(store)
    commits.read({LEFT: Table()}, now_ms=0)
    commits.retire(set())
    again, table = StagedCommits(store), Table()
    again.read({LEFT: table}, now_ms=0)
    assert (store.stat("f"), table.blocks) == (None, [])
    assert commit_keys(store) == [commit(1).key]


def test_a_number_is_not_given_twice_however_late_somebody_comes_with_it(store: LocalStore) -> None:
    """The first commit waits; the two behind it are published, and the second of them is gone."""
    for number in (1, 2, 3, 4):
        assert put_commit(store, commit(number, block(LEFT, f"f{number}"))) == commit(number, block(LEFT, f"f{number}"))
    commits = StagedCommits(store)
    commits.read({LEFT: Table()}, now_ms=0)
    commits.retire({block(LEFT, "f1").place})
    newest = replace(commit(4), blocks=())
    assert commit_keys(store) == [commit(1).key, newest.key]
    for number in (1, 2, 3, 4):
        assert put_commit(store, commit(number, block(LEFT, f"other-{number}"))) == newest
    assert commit_keys(store) == [commit(1).key, newest.key]
    assert put_commit(store, commit(5)) == commit(5)
    commits.read({LEFT: Table()}, now_ms=1)
    commits.retire(set())
    assert commit_keys(store) == [commit(5).key]
    assert put_commit(store, commit(1)) == commit(5)


def test_a_commit_before_which_one_cannot_be_read_stays_without_its_rows(store: LocalStore) -> None:
    store.put(commit(1).key, b'{"followed": "from another version"}')
    for number in (2, 3, 4):
        store.put(commit(number).key, json.dumps(asdict(commit(number, block(LEFT, "f")))).encode())
    commits = StagedCommits(store)
    commits.read({LEFT: Table()}, now_ms=0)
    commits.retire(set())
    assert commit_keys(store) == [commit(number).key for number in (1, 2, 4)]
    assert put_commit(store, commit(3)) == replace(commit(4), blocks=())


def test_files_of_tries_that_no_commit_lists_are_swept(store: LocalStore) -> None:
    """Also when a run lasts long. What may yet be committed stays, and what is not ours."""
    lost, own = rows_key("node-1", 1, "lost"), rows_key("node-1", 1, "own")
    coming, other = rows_key("node-1", 3, "coming"), rows_key("node-2", 1, "coming")
    unclear, older = rows_key("node-3", 1, "unclear"), "staging/rows/node-1/1790000000000-0-abcdef01.arrow"
    for key in (lost, own, coming, other, unclear, older):
        store.put(key, b"rows")
    put_commit(store, commit(1, block(LEFT, own)))
    put_commit(store, commit(2))
    store.put("staging/log/node-3/000000000002.json", b"{}")
    commits = StagedCommits(store)
    commits.read({LEFT: Table()}, now_ms=0)
    kept = [older, own, coming, other, unclear]
    assert rows_keys(store) == sorted(kept)
    store.put(lost, b"rows")
    commits.read({LEFT: Table()}, now_ms=SWEEP_EVERY_MS - 1)
    assert lost in rows_keys(store), "not in each cycle"
    commits.read({LEFT: Table()}, now_ms=SWEEP_EVERY_MS)
    assert rows_keys(store) == sorted(kept)


def test_what_is_committed_while_files_are_listed_is_kept(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    own = rows_key("node-1", 1, "own")
    store.put(own, b"rows")
    real = store.list

    def slow(prefix: str = "", start: str = "") -> list[Stat]:
        found = real(prefix, start)
        if prefix.startswith("staging/rows"):
            put_commit(store, commit(1, block(LEFT, own)))
        return found

    monkeypatch.setattr(store, "list", slow)
    commits = StagedCommits(store)
    commits.read({LEFT: Table()}, now_ms=0)
    assert store.stat(own)


@pytest.mark.parametrize("kill", range(1, 5))
def test_whatever_is_killed_when_commits_retire_leaves_nothing_behind(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, kill: int
) -> None:
    keys = [rows_key("node-1", number, "own") for number in (1, 2, 3)]
    for number, key in enumerate(keys, 1):
        store.put(key, b"rows")
        put_commit(store, commit(number, block(LEFT, key)))
    first = StagedCommits(store)
    first.read({LEFT: Table()}, now_ms=0)
    calls = 0
    for name in ("put", "delete"):
        real = getattr(store, name)

        def deadly(*arguments: Any, real: Callable[..., Any] = real, **others: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == kill:
                raise KeyboardInterrupt
            return real(*arguments, **others)

        monkeypatch.setattr(store, name, deadly)
    waiting = {block(LEFT, keys[0]).place}
    with pytest.raises(KeyboardInterrupt):
        first.retire(waiting)
    again = StagedCommits(store)
    again.read({LEFT: Table()}, now_ms=0)
    again.retire(waiting)
    assert rows_keys(store) == keys[:1]
    assert commit_keys(store) == [commit(1).key, commit(3).key]
