"""``replica_merge``: a table that cannot be merged is named, and holds up no other, not even if it kills the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ringsync.config import ConfigError, load_config
from ringsync.cql.types import Native
from ringsync.replica import changes
from ringsync.replica import merge as replica_merge
from ringsync.replica.errors import ReplicaMismatchError
from ringsync.replica.evolve import RewriteNeededError
from ringsync.schema.table import Column, TableSchema
from ringsync.steps.application import Application, ExitCode, StepError
from ringsync.steps.replica import merge
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ChecksumError, UnavailableError

TABLES = ("shop.a", "shop.b", "shop.c")


class Killed(BaseException):
    """By the kernel, since it took too much memory: nobody catches it."""


class Merges:
    """Runs of ``replica_merge`` over three tables that are due.

    :ivar fails: what merging does, by table
    :ivar tried: tables whose merges were begun, in order
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.conf = folder / "ringsync.yaml"
        document = {"server_name": "test", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "lake"}}
        self.conf.write_text(yaml.safe_dump(document))
        self.store = LocalStore(folder / "lake")
        self.fails: dict[str, Callable[[], None]] = {}
        self.tried: list[str] = []
        self.damaged: set[str] = set()
        self.rewritten: set[str] = set()
        real = changes.replica_state

        def state(store: Any, table: TableSchema, options: Any) -> Any:
            if table.full_name in self.damaged:
                return real(store, table, options)
            if table.full_name in self.rewritten:
                raise RewriteNeededError("a key column was renamed")
            return SimpleNamespace(changed_rows=5, changes_version=3)

        def merge_table(_: Any, table: TableSchema, *__: Any) -> dict[str, Any]:
            return self.begin(table)

        patch.setattr(merge, "connect", lambda _: None)
        patch.setattr(merge, "candidates", lambda *_: [(_table(name), 864_000) for name in TABLES])
        patch.setattr(changes, "replica_state", state)
        patch.setattr(replica_merge, "due", lambda *_, **__: True)
        patch.setattr(merge, "merge_table", merge_table)

    def begin(self, table: TableSchema) -> dict[str, Any]:
        self.tried.append(table.full_name)
        self.fails.get(self.tried[-1], lambda: None)()
        return {"read": 5}

    def run(self, named: str | None = None) -> tuple[dict[str, Any], ExitCode]:
        options = argparse.Namespace(table=named)
        config = load_config(self.conf)
        return merge.run(Application("replica_merge", str(self.conf), config, self.store, None, "r", options))

    def damage(self, table: str, content: bytes) -> None:
        self.damaged.add(table)
        keyspace, name = table.split(".")
        self.store.put(f"replica/{keyspace}/{name}/base/_delta_log/{0:020}.json", content)


def _table(name: str) -> TableSchema:
    keyspace, _, table = name.partition(".")
    return TableSchema(keyspace, table, table * 32, (Column("id", "partition_key", Native("int")),))


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.fixture
def merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Merges:
    return Merges(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Job aborted: File part-0.parquet does not exist"),  # as py4j's: none of ours
        ChecksumError("part-0.parquet is damaged"),
        UnavailableError("part-0.parquet: Input/output error"),
        MemoryError(),
        ReplicaMismatchError("another table id"),
        StepError("the counts do not reconcile"),
    ],
)
def test_a_table_that_cannot_be_merged_holds_up_no_other(
    merges: Merges, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    merges.fails = {"shop.a": failing(error), "shop.b": failing(error)}
    report, code = merges.run()
    assert code == ExitCode.COMPLETED_WITH_ERRORS
    assert (list(report["merged"]), list(report["failed"])) == (["shop.c"], ["shop.a", "shop.b"])
    assert str(error) in report["failed"]["shop.a"]
    assert "shop.a, shop.b" in report["error"]
    assert "ringsync: warning: shop.a" in capfd.readouterr().out
    with pytest.raises(type(error)):
        merges.run("shop.a")


@pytest.mark.parametrize("content", [b"", b'{"metaData": {"id": "x", "confi'])
def test_a_damaged_log_of_a_table_holds_up_no_other(merges: Merges, content: bytes) -> None:
    merges.damage("shop.a", content)
    report, code = merges.run()
    assert (merges.tried, code) == (["shop.b", "shop.c"], ExitCode.COMPLETED_WITH_ERRORS)
    assert list(report["failed"]) == ["shop.a"]


def test_tables_that_kill_the_run_come_last_the_next_time(merges: Merges) -> None:
    """The one that has killed it first of these, once it is mended, does not wait behind the others for ever."""
    merges.fails = {"shop.a": failing(Killed()), "shop.b": failing(Killed())}
    for expected in (["shop.a"], ["shop.b"], ["shop.c", "shop.a"], ["shop.c", "shop.b"]):
        merges.tried.clear()
        with pytest.raises(Killed):
            merges.run()
        assert merges.tried == expected
    merges.fails.clear()
    for expected in (["shop.c", "shop.a", "shop.b"], list(TABLES)):
        merges.tried.clear()
        assert merges.run()[1] == ExitCode.OK
        assert merges.tried == expected


def test_what_cannot_be_read_of_earlier_runs_holds_up_nothing(merges: Merges) -> None:
    merges.store.put(merge.UNMERGED_KEY, b"")
    assert merges.run()[1] == ExitCode.OK
    assert merges.tried == list(TABLES)


def test_what_is_wrong_for_all_ends_the_run(merges: Merges, monkeypatch: pytest.MonkeyPatch) -> None:
    merges.fails = {"shop.a": failing(ConfigError("replica"))}
    with pytest.raises(ConfigError):
        merges.run()
    merges.tried.clear()
    merges.fails = {"shop.b": failing(RuntimeError("the JVM is gone"))}
    monkeypatch.setattr(merge, "_spark_is_gone", lambda: True)
    with pytest.raises(RuntimeError):
        merges.run()
    assert merges.tried == ["shop.b"]


def test_bases_to_write_again_come_first(merges: Merges, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tables' passes waited behind the merges of all other tables. One that has killed a run comes last, too."""
    monkeypatch.setattr(merge, "rewrite_table", lambda _, table, __: merges.begin(table))
    merges.rewritten.add("shop.b")
    assert merges.run()[1] == ExitCode.OK
    assert merges.tried == ["shop.b", "shop.a", "shop.c"]
    merges.tried.clear()
    merges.fails = {"shop.b": failing(Killed())}
    for expected in (["shop.b"], ["shop.a", "shop.c", "shop.b"]):
        merges.tried.clear()
        with pytest.raises(Killed):
            merges.run()
        assert merges.tried == expected
