"""One table's trouble is its own: whatever goes wrong with it, the others are served, and it is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringsync.config import ConfigError
from ringsync.config.sync import Sync
from ringsync.cql.types import Native
from ringsync.ledger.passes import TableReplacedError
from ringsync.ledger.staging import Block, Bucket, Place
from ringsync.ledger.table_versions import version_of
from ringsync.ring.ring import Host, Replication, RingError
from ringsync.schema.table import Column, Schema, TableSchema
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.steps import absent_tables
from ringsync.steps.absent_tables import AbsentTables
from ringsync.steps.application import StepError, plain
from ringsync.steps.close import bucket_close
from ringsync.steps.close.bucket_close import Closer
from ringsync.steps.close.followed import Followed
from ringsync.steps.close.staged_commits import StagedCommits
from ringsync.steps.close.table_state import TableState
from ringsync.steps.sync_plan import SyncPlan, SyncTable, interval_at
from ringsync.storage.local import LocalStore

EXPECTED = Expected.of_commit_logs([])

INTERVAL = interval_at(1_790_000_000_000, 60_000)
HOST = Host("a", "127.0.0.1", 9042, "dc", "r1", (0,))


def table_of(name: str, *columns: str) -> TableSchema:
    values = tuple(Column(one, "regular", Native("int")) for one in columns)
    return TableSchema("shop", name, name * 32, (Column("id", "partition_key", Native("int")), *values))


class Service:
    """Follow-ups of a table, which fail as long as they are told to."""

    def __init__(self, name: str) -> None:
        self.name, self.served, self.followed = name, 0, []
        self.fails: Exception | None = None
        self.ring: Any = None
        self.last, self.passes, self.replica_lag_ms = 0, (), None

    def catch_up(self) -> bool:
        if self.fails:
            raise self.fails
        self.served += 1
        return True

    def tell_missed(self) -> None:
        """Nothing was missed."""

    def follow(self, table: SyncTable) -> None:
        self.followed.append(table.version.number)

    def status(self) -> dict[str, Any]:
        return {"last_pass": 0, "bootstrap": "", "replica_error": None, "replica_pass": None}


@pytest.fixture
def closer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Closer:
    """A loop over the tables a, b, c and d, whose follow-ups are told what to do."""
    found = object.__new__(Closer)
    found._store = LocalStore(tmp_path)
    found._staged = StagedCommits(found._store)
    tables = {one: SyncTable(version_of(found._store, table_of(one)), f"t.{one}", False) for one in "abcd"}
    found._plan = SyncPlan(
        INTERVAL, (HOST,), {"shop": Replication("SimpleStrategy", (("", 1),))}, tuple(tables.values())
    )
    found._tables = {table.table_id: TableState(table, Service(name)) for name, table in tables.items()}  # type: ignore[arg-type]
    found._rings, found._other_rings, found._absent, found._unread = {}, {}, AbsentTables(), {}
    found._agree = lambda: True  # type: ignore[assignment]
    found._looked, found._others_failed = found._plan, {}
    found._unread_since_ms, found._session, found._unheard = {}, None, frozenset()
    found._closed_until, found._complete_until = 0, None
    found._over, found._had_turns, found._serving = False, False, None
    found._feed = SimpleNamespace(status=lambda topic: None, watch=lambda topic: None, announce=None)  # type: ignore[assignment]
    found._config = SimpleNamespace(server_name="t", sync=Sync())  # type: ignore[assignment]
    found._followed = Followed(found._store, found._config, found._feed)
    found._spark_context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False)))
    monkeypatch.setattr(found, "_read_plan", lambda now_ms: found._plan)
    monkeypatch.setattr(found, "_close_buckets", lambda plan, now_ms: None)
    return found


def service(closer: Closer, name: str) -> Any:
    return closer._tables[name * 32].follow_ups


@pytest.mark.parametrize(
    "error", [RuntimeError("1 rows could not be read"), StepError("the counts do not reconcile"), RingError("no node")]
)
def test_a_table_that_fails_holds_up_no_other(
    closer: Closer, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_790_000_000.0]
    monkeypatch.setattr(bucket_close, "time", SimpleNamespace(time=lambda: clock[0]))
    service(closer, "b").fails = error
    for _ in range(100):
        clock[0] += 1
        closer.cycle()
    assert [service(closer, name).served for name in "abcd"] == [100, 0, 100, 100]
    told = closer.status()
    assert told["shop.b"]["error"] == f"{type(error).__name__}: {error}"
    assert [told[f"shop.{name}"]["error"] for name in "acd"] == [None] * 3
    assert 5 < closer._tables["b" * 32].failures < 12, "it backs off"
    status = {"bucket_close/close": {"at_ms": 0, "error": None, "tables": told, **closer.problems()}}
    assert any(str(error) in one.text and "shop.b" in one.text for one in problems(status, {}, EXPECTED, False, 0.0))

    service(closer, "b").fails = None
    clock[0] += 60
    closer.cycle()
    assert (service(closer, "b").served, closer.status()["shop.b"]["error"]) == (1, None)


class Clock:
    """Time that passes when it is told to, s since the epoch."""

    def __init__(self) -> None:
        self.now = 1_790_000_000.0

    def time(self) -> float:
        return self.now


def test_a_table_whose_tries_take_long_takes_less_than_half_of_the_time(
    closer: Closer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It backs off from the end of its try, and for as long as that took: what it asks for is not there now."""
    clock = Clock()
    monkeypatch.setattr(bucket_close, "time", clock)
    tried = []

    def slow() -> None:
        tried.append(clock.now)
        clock.now += 40
        raise RuntimeError("rows could not be read")

    service(closer, "b").catch_up = slow
    for _ in range(400):
        clock.now += 1
        closer.cycle()
    assert [service(closer, name).served for name in "acd"] == [400, 400, 400]
    pauses = np.diff(tried) - 40
    assert min(pauses) >= 40
    assert max(pauses) <= 62


def test_a_table_that_fails_does_not_keep_the_run_from_its_end(closer: Closer) -> None:
    """Its job is cancelled, others are not tried again; what was wrong before is told, not that it was cancelled."""
    for name in "bc":
        service(closer, name).fails = RuntimeError("rows could not be read")
    closer.cycle()
    cancelled = []
    closer._spark_context.cancelAllJobs = lambda: cancelled.append(closer.at())

    def cut_off() -> None:
        closer.end()
        raise RuntimeError("job 7 was cancelled")

    service(closer, "b").catch_up = cut_off
    service(closer, "c").catch_up = lambda: pytest.fail("the run is over")
    for name in "bc":
        closer._tables[name * 32].again_ms = 0
    closer.cycle()
    assert cancelled == ["shop.b"]
    assert closer.status()["shop.b"]["error"] == "RuntimeError: rows could not be read"
    assert [service(closer, name).served for name in "ad"] == [2, 1], "the next run begins with a whole cycle"


def test_the_end_of_a_run_waits_for_a_table_that_is_well(closer: Closer) -> None:
    """Else a pass that takes longer than a run would never be made."""
    closer._spark_context.cancelAllJobs = lambda: pytest.fail("it makes progress")
    real = service(closer, "b").catch_up

    def long() -> None:
        closer.end()
        real()

    service(closer, "b").catch_up = long
    closer.cycle()
    assert [service(closer, name).served for name in "abcd"] == [1, 1, 1, 1], "the first cycle of a run serves all"
    closer.cycle()
    assert [service(closer, name).served for name in "abcd"] == [1, 1, 1, 1]


def test_a_run_ends_with_the_table_that_it_is_at(closer: Closer) -> None:
    """Until the next run nobody reads the logs, and a cycle of many tables with a backlog takes minutes."""
    closer.cycle()
    real = service(closer, "b").catch_up

    def long() -> None:
        closer.end()
        real()

    service(closer, "b").catch_up = long
    closer.cycle()
    assert [service(closer, name).served for name in "abcd"] == [2, 2, 1, 1]
    assert closer._complete_until is None, "not all tables have had their turn"


def test_nothing_is_published_before_the_replica_has_all(closer: Closer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_close, "settle_together", lambda *arguments, **others: pytest.fail("too early"))
    for name in "abcd":
        service(closer, name).catch_up = lambda: False
    closer.cycle()
    assert [closer._tables[name * 32].error for name in "abcd"] == [None] * 4


def test_a_wrong_configuration_is_everybodys(closer: Closer) -> None:
    service(closer, "b").fails = ConfigError("x")
    with pytest.raises(ConfigError):
        closer.cycle()


def test_a_keyspace_whose_ring_cannot_be_had_is_the_trouble_of_its_tables(
    closer: Closer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SyncTable(
        version_of(closer._store, TableSchema("local", "e", "e" * 32, table_of("e").columns)), "t.e", False
    )
    closer._tables["e" * 32] = TableState(other, Service("e"))  # type: ignore[arg-type]

    def refuse(session: Any, keyspace: str) -> Any:
        raise RingError(f"{keyspace} has no ring")

    monkeypatch.setattr(bucket_close, "read_ring", refuse)
    closer._session = None
    closer.cycle()
    assert [service(closer, name).served for name in "abcde"] == [1, 1, 1, 1, 0]
    assert closer.status()["local.e"]["error"] == "RingError: local has no ring"


def test_a_version_that_a_stage_has_seen_first_is_learned_of(closer: Closer) -> None:
    newer = version_of(closer._store, table_of("a", "v"))
    block = Block(Place("f", 0, 1, 0), "a" * 32, newer.number, str(Bucket(INTERVAL.start, 60_000)), 1, "", ())
    closer._renew(closer._tables["a" * 32])
    assert service(closer, "a").followed == []
    closer._tables["a" * 32].add("a", block)
    closer._renew(closer._tables["a" * 32])
    assert service(closer, "a").followed == [newer.number]
    assert closer._tables["a" * 32].table.version == newer
    # A plan that was made before does not bring the older one back.
    closer._tables["a" * 32].follow(closer._plan.tables[0])  # type: ignore[union-attr]
    assert closer._tables["a" * 32].table.version == newer


def test_the_old_one_of_a_table_that_was_created_again_is_shown_until_it_is_forgotten(
    closer: Closer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows that wait are counted, and its error is said once more."""
    again = SyncTable(version_of(closer._store, replace(table_of("b", "v"), table_id="e" * 32)), "t.b", False)
    closer._tables["e" * 32] = TableState(again, Service("e"))  # type: ignore[arg-type]
    block = Block(Place("f", 0, 1, 0), "b" * 32, 1, str(Bucket(INTERVAL.start, 60_000)), 7, "", ())
    closer._tables["b" * 32].add("a", block)
    service(closer, "b").fails = RuntimeError("no such column")
    closer.cycle()
    told = closer.status()
    assert (told["shop.b"]["table_id"], told["shop.b"]["error"]) == ("e" * 32, None)
    assert told[f"shop.b (table id {'b' * 32})"]["error"] == "RuntimeError: no such column"
    assert told.keys() == {f"shop.{name}" for name in "abcd"} | {f"shop.b (table id {'b' * 32})"}

    service(closer, "b").fails = TableReplacedError("b" * 32)
    closer._tables["b" * 32].again_ms = 0
    clock = [0.0]
    monkeypatch.setattr(absent_tables, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    closer._absent.look({"b" * 32}, frozenset, lambda: True)
    closer.cycle()
    assert closer.problems()["rows_of_dropped_tables"] == {}, "they wait until the schema has not had it for a minute"
    closer._session, closer._plan = None, replace(closer._plan, tables=(again,))
    monkeypatch.setattr(bucket_close, "read_tables", lambda session: Schema((again.schema,)))
    monkeypatch.setattr(closer, "_tables", {key: closer._tables[key] for key in ("b" * 32, "e" * 32)})
    clock[0] = absent_tables.GONE_AFTER_S
    closer.cycle()
    told = closer.status()
    assert told.keys() == {"shop.b"}
    assert (told["shop.b"]["table_id"], service(closer, "e").served) == ("e" * 32, 3)
    assert closer.problems()["rows_of_dropped_tables"] == {"shop.b": 7}
    assert f"shop.b (table id {'b' * 32}) is gone, and failed before: RuntimeError: no such" in capsys.readouterr().out


def test_what_a_task_has_raised_is_told_in_its_own_words() -> None:
    traceback = (
        "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
        ": org.apache.spark.SparkException: Job aborted due to stage failure\n"
        "Traceback (most recent call last):\n"
        '  File "worker.py", line 1, in main\n'
        "ringsync.changes.identity.UnresolvedRowsError: rows of shop.t were staged under version 2\n\n"
        "\tat org.apache.spark.api.python.BasePythonRunner\n"
    )
    assert plain(RuntimeError(traceback)) == "rows of shop.t were staged under version 2"
    assert plain(ValueError("no")) == "ValueError: no"
