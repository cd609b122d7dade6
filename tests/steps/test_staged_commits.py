"""Commits are taken in by table: one that is gone, or not known yet, keeps no other waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ringsync.cql.types import Native
from ringsync.schema.table import Column, TableSchema
from ringsync.state.staging import Block, Bucket, Place, StageCommit, commit_keys, put_commit
from ringsync.state.table_versions import version_of
from ringsync.steps.staged_commits import HOMELESS_MS, StagedCommits
from ringsync.storage.local import LocalStore

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
    return StageCommit("node-1", number, 0, (), {1: 100 * number}, {}, {"rows": 20}, blocks)


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
    assert commits.problems(HOMELESS_MS)["rows_homeless"] == {}
    assert commits.problems(HOMELESS_MS + 1)["rows_homeless"] == {GONE: 10}

    version_of(store, TableSchema("shop", "gone", GONE, (Column("id", "partition_key", Native("int")),)))
    commits.forget(GONE, ())
    assert "10 staged rows" in capsys.readouterr().out
    assert commits.problems(HOMELESS_MS + 1)["rows_of_dropped_tables"] == {"shop.gone": 10}
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
    assert list(commits.problems(0)["commits_broken"]) == [broken]


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
