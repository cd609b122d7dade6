"""A log is altered while it is followed, or its cluster is in trouble: nothing is lost untold, and nothing is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.changes.identity import TableVersion
from ringsync.cluster.generations import MOST_ERROR_MS, Clocks, Streams, clocks
from ringsync.cluster.scylla import CdcOptions
from ringsync.config.sections import Scylla
from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.staging import commit_keys, decode_rows, get_commit, read_block
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Schema
from ringsync.scylla.progress import (
    ARRIVAL_MARGIN_MS,
    Position,
    Sweep,
)
from ringsync.sources.cdc_log import LogRead, grouped
from ringsync.steps import loop
from ringsync.steps.bootstrap import prepare
from ringsync.steps.scylla import followed_logs, scylla_log_stage
from ringsync.steps.scylla.followed_logs import FollowedLogs, FollowedTable, _ByName
from ringsync.steps.scylla.known_generations import KnownGenerations
from ringsync.steps.scylla.log_task import FollowedLog
from ringsync.steps.stage.staged_files import StagedTable
from ringsync.storage.local import LocalStore
from tests.bounded import as_long_as
from tests.scylla.generations import streams_of
from tests.scylla.log_tables import Tables, log_text, tables_of
from tests.scylla.test_log_stager import MINUTE, NAME, NOW, TABLE_ID, Cluster, Row, Sync, generation, spread
from tests.scylla.test_log_sweeps import CELLS_TTL_S, ONLY, Log, Switched, log_of, staged, switched
from tests.scylla.test_log_task import HOUR, OTHER, TTL_S, followed, moment

DAY = 24 * HOUR


@pytest.fixture
def sync_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], Sync]:
    return lambda cluster: Sync(tmp_path / "lake", cluster, monkeypatch)


def all_rows(sync: Sync) -> Iterator[dict[str, Any]]:
    """All rows that are staged, late ones too."""
    for key in commit_keys(sync.store, CDC_LOGS):
        commit = get_commit(sync.store, key)
        for batch in (
            *(read_block(sync.store, block.place) for block in commit.blocks),
            *(decode_rows(sync.store.get(late)) for late in commit.late),
        ):
            yield from batch.to_pylist()


def error_of_expiry(row: Mapping[str, Any]) -> int:
    """So much later than it does a row's cell expires, s, if the row came in time."""
    return int(row["cells"][0]["local_deletion_time"] - CELLS_TTL_S - row["write_time"] // 10**6)


@dataclass
class Altered(Cluster):
    """A table that is altered at a moment.

    :ivar before: as it was; ``after``: as it is since ``altered_ms``
    """

    before: Tables | None = None
    after: Tables | None = None
    altered_ms: int = NOW + 30 * MINUTE
    problem: str = ""

    @property
    def tables(self) -> Tables:
        found = self.after if self.now_ms >= self.altered_ms else self.before
        assert found is not None
        return found

    def look(self, plan: Any, positions: Mapping[str, Position], now_ms: int) -> list[FollowedTable]:
        if self.problem:
            return [FollowedTable(TABLE_ID, NAME, None, problem=self.problem, has_keys_only=True)]
        log = FollowedLog(StagedTable(TableVersion.first(self.tables.base), False, None), self.tables.log, TTL_S)
        requests = {one.time_ms: grouped(one, None) for one in self.generations}
        keys = self.tables.log.key_names
        return [FollowedTable(TABLE_ID, NAME, log, tuple(self.generations), requests, keys=keys)]


def test_the_time_without_values_is_a_gap(sync_of: Callable[[Cluster], Sync]) -> None:
    """cdc was altered to ``delta: keys``, and back."""
    tables = tables_of("pk int, ck int, a int", "pk, ck")
    cluster = Altered([ONLY], before=tables, after=tables, has_from_ms=None, begin_ms=NOW - 5 * MINUTE)
    sync = sync_of(cluster)
    sync.run(30)
    until_ms = sync.position.until_ms
    cluster.problem = "keys only"
    sync.run(60, step_ms=MINUTE)
    assert sync.position.has_keys_only
    sync.start()
    cluster.problem, back_ms = "", cluster.now_ms
    sync.run(1)
    ((first_ms, last_ms),) = sync.gaps()
    assert first_ms <= until_ms
    assert last_ms >= back_ms
    sync.run(60, step_ms=MINUTE)
    assert len(sync.gaps()) == 1
    assert not sync.position.has_keys_only


class Renamed(Altered):
    """``ck`` becomes ``ck2``, and the log loses what it had of ``ck`` (scylladb #25119)."""

    def read(self, log: Any, streams: Sequence[bytes], start_ms: int, end_ms: int, **_: Any) -> LogRead:
        rows = []
        for row in (one for one in self.rows if start_ms <= one.time_ms < end_ms and one.is_there(self.now_ms)):
            # Every second row is a range deletion.
            for place, operation in enumerate((6, 7) if row.ck % 2 else (2,)):
                is_lost = self.now_ms >= self.altered_ms and max(row.time_ms, row.seen_ms) < self.altered_ms
                key = None if is_lost else row.ck + 5 * place
                given = {"cdc$stream_id": row.stream, "cdc$time": moment(row.time_ms), "cdc$operation": operation}
                left = {'TTL("cdc$operation")': TTL_S - (self.now_ms - max(row.time_ms, row.seen_ms)) // 1000}
                end = {} if operation == 6 else {"cdc$end_of_batch": True}
                content = {"a": 1} if operation == 2 else {}
                keys = {"pk": 1, self.tables.log.key_names[-1]: key}
                rows.append(given | {"cdc$batch_seq_no": place} | left | end | content | keys)
        return LogRead([self.tables.page(rows)], [self.now_ms / 1000], 0.0)


def test_a_renamed_key_column_widens_no_deletion(sync_of: Callable[[Cluster], Sync]) -> None:
    before, after = (tables_of(f"pk int, {name} int, a int", f"pk, {name}") for name in ("ck", "ck2"))
    stream, *_ = streams_of(ONLY)
    cluster = Renamed([ONLY], before=before, after=after, has_from_ms=None, begin_ms=NOW - 5 * MINUTE)
    cluster.rows = [Row(stream, NOW + number * MINUTE // 2, number) for number in range(200)]
    # Hints bring two more, which makes near sweeps read again what was read before.
    cluster.rows += [Row(stream, NOW + at_ms, 900, seen_ms=NOW + 33 * MINUTE) for at_ms in (2 * MINUTE + 7, MINUTE + 9)]
    sync = sync_of(cluster)
    sync.run(200)
    found = list(all_rows(sync))
    assert all(len(row["clustering"]) > 4 + 1 for row in found), "no bound is empty"
    ((first_ms, last_ms),) = sync.gaps()
    assert first_ms <= cluster.altered_ms <= last_ms <= cluster.altered_ms + 3 * ARRIVAL_MARGIN_MS + MOST_ERROR_MS
    at_ms = {row["write_time"] // 1000 for row in found}
    assert {row.time_ms for row in cluster.rows} - at_ms <= set(range(first_ms, last_ms + 1)) | {NOW + MINUTE + 9}
    assert sync.stager.status()["errors"] == 0


def test_what_is_read_while_the_table_is_altered_does_not_count(sync_of: Callable[[Cluster], Sync]) -> None:
    """The SELECT has no column that is new."""
    cluster = Cluster([ONLY], has_from_ms=None, begin_ms=NOW - 5 * MINUTE)
    cluster.rows = spread(ONLY, NOW, NOW + 20 * MINUTE, 100)
    sync = sync_of(cluster)
    sync.run(5)
    until_ms = sync.position.until_ms
    cluster.have_changed = lambda tables: {table.table_id for table in tables}  # type: ignore[method-assign]
    sync.run(3)
    assert sync.position.until_ms == until_ms
    assert "altered" in sync.stager.status()["logs"][NAME]["error"]
    del cluster.have_changed  # type: ignore[method-assign]
    sync.run(30)
    assert sync.staged() == dict.fromkeys(range(100), 1)


def test_which_tables_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = followed().log.base
    (log,) = parse_schema(log_text(base), "log").tables
    other = replace(base, name="other", table_id="77" * 16)
    of_other = replace(log, name="other_scylla_cdc_log", table_id="78" * 16)
    before = Schema((base, log, other, of_other))
    now, version, agrees = before, "1", [True]
    monkeypatch.setattr(followed_logs, "one_node", lambda _: None)
    monkeypatch.setattr(followed_logs, "schema_version", lambda _: version)
    monkeypatch.setattr(followed_logs, "ask_one", lambda *_: now)
    logs = FollowedLogs(SimpleNamespace(), LocalStore(tmp_path), SimpleNamespace(), {}, None)  # type: ignore[arg-type]
    logs._agree = lambda: agrees[0]  # type: ignore[assignment, return-value]
    logs._schema, logs._version = _ByName.of(before), "1"
    tables = [FollowedTable(one.table_id, one.full_name, None) for one in (base, other)]
    assert logs.have_changed(tables) == set()
    version = "2"
    assert logs.have_changed(tables) == set(), "of a third one"
    now = Schema((base, log, replace(other, columns=other.columns[:-1]), of_other))
    assert logs.have_changed(tables) == {other.table_id}
    now = Schema((base, replace(log, columns=log.columns[:-1]), other, of_other))
    assert logs.have_changed(tables) == {base.table_id}
    agrees[0] = False
    assert logs.have_changed(tables) == {base.table_id, other.table_id}


@pytest.mark.parametrize(
    ("behind_ms", "error_ms", "waits_ms", "allows_ms"),
    [(0, 7_200_000, 0, 300_000), (1500, 2000, 1500, 2000), (90_000_000, 90_000_000, 300_000, 300_000)],
)
def test_a_wrong_clock_holds_up_nobody_for_long(
    tmp_path: Path, behind_ms: int, error_ms: int, waits_ms: int, allows_ms: int
) -> None:
    """Who is ahead not at all."""
    config: Any = SimpleNamespace(scylla=Scylla(), sync=SimpleNamespace(digest_retention_h=4.0))
    logs = FollowedLogs(config, LocalStore(tmp_path), None, {}, None)
    logs.clocks = Clocks(0, behind_ms, error_ms, "10.0.0.9:9042")
    rules = logs.rules(FollowedTable(TABLE_ID, NAME, None), [TTL_S])
    assert (rules.confidence_ms, rules.skew_ms) == (Scylla().confidence_ms + waits_ms, allows_ms)


def test_a_wrong_clock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_logs, "clocks", lambda _: Clocks(100, 0, 7_200_000, "10.0.0.9:9042"))
    logs = FollowedLogs(SimpleNamespace(), LocalStore(tmp_path), None, {}, None)  # type: ignore[arg-type]
    logs._look_at_clocks()
    (told,) = logs.status()["problems"]
    assert "10.0.0.9:9042 is 7,200 s" in told
    monkeypatch.setattr(followed_logs, "clocks", lambda _: Clocks(100, 0, 200, "10.0.0.9:9042"))
    logs._look_at_clocks()
    assert logs.status()["problems"] == []


def test_of_two_clocks_nobody_knows_which_is_right() -> None:
    """What is read by the slower is late, and whole."""
    hosts = [
        SimpleNamespace(is_up=True, ahead_ms=ahead_ms, endpoint=name) for name, ahead_ms in (("a", 0), ("b", 10**6))
    ]

    def execute(_: str, host: Any) -> Any:
        row = SimpleNamespace(now_ms=time.time() * 1000 + host.ahead_ms)
        return SimpleNamespace(one=lambda: row)

    metadata = SimpleNamespace(all_hosts=lambda: hosts)
    found = clocks(SimpleNamespace(cluster=SimpleNamespace(metadata=metadata), execute=execute))
    assert found is not None
    assert (found.ahead_ms, found.error_ms) == (pytest.approx(0, abs=500), pytest.approx(10**6, abs=500))
    assert (found.delay_ms, found.doubt_ms, found.worst) == (0, MOST_ERROR_MS, "a or b")


def test_cdc_that_comes_back_with_a_smaller_ttl_dates_no_row_wrongly(sync_of: Callable[[Cluster], Sync]) -> None:
    """Rows of before are still in the log. They came in the last half hour before a far sweep."""
    sync = sync_of(log := switched())
    sync.run(11 * 60 + 45, step_ms=5 * MINUTE)
    base_ms = log.now_ms
    log.add(20, lambda number: base_ms + number * MINUTE, 0)
    sync.run(30, step_ms=MINUTE)
    log.is_on = False
    for _ in as_long_as(lambda: not sync.position.has_ended):
        sync.run(5, step_ms=5 * MINUTE)
    assert log.now_ms - base_ms < 24 * HOUR
    log.is_on, log.ttl_s = True, TTL_S // 2
    sync.run(24 * 60, step_ms=5 * MINUTE)
    assert set(map(error_of_expiry, all_rows(sync))) == {0}
    assert not sync.gaps()


def test_a_column_that_is_added_without_cdc_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ScyllaDB alters a log only while cdc is on."""
    base = followed().log.base
    (log,) = parse_schema(log_text(base), "log").tables
    column = replace(base.columns[-1], name="new")
    schema = Schema((replace(base, columns=(*base.columns, column)), replace(log, table_id="66" * 16)))
    monkeypatch.setattr(FollowedLogs, "_look_at_schema", lambda _: None)
    monkeypatch.setattr(FollowedLogs, "_look_at_clocks", lambda _: None)
    monkeypatch.setattr(FollowedLogs, "_streams_of", lambda *_: Streams())
    monkeypatch.setattr(KnownGenerations, "of", lambda *_: (ONLY,))
    sync = SimpleNamespace(bucket_by_of=lambda _: "write_time", follows=lambda _: True)
    config: Any = SimpleNamespace(sync=sync, scylla=Scylla())
    logs = FollowedLogs(config, LocalStore(tmp_path), SimpleNamespace(), {}, None)
    logs._schema, logs._options = _ByName.of(schema), {TABLE_ID: CdcOptions(False)}
    nothing: Any = SimpleNamespace(tables=(), replications={})
    (found,) = logs.look(nothing, {TABLE_ID: Position.begin(NOW - HOUR, [ONLY.time_ms], 15_000)}, NOW)
    assert found.problem == ""
    logs._options = {TABLE_ID: CdcOptions(True)}
    (found,) = logs.look(nothing, {TABLE_ID: Position.begin(NOW - HOUR, [ONLY.time_ms], 15_000)}, NOW)
    assert 'the log has no "new"' in found.problem


@pytest.mark.parametrize("keys_only", [False, True])
def test_what_is_written_during_a_problem_when_cdc_comes_back_is_read(
    sync_of: Callable[[Cluster], Sync], keys_only: bool
) -> None:
    """Nothing of before is missing. Without values all of that time is."""
    sync = sync_of(log := switched())
    lose_cdc(sync, log)
    off_ms, look = log.now_ms, log.look
    log.is_on = True
    log.add(60, lambda number: off_ms + number * MINUTE, 0)
    gone = {"log": None, "problem": "it is away", "has_keys_only": keys_only}
    log.look = lambda *of: [replace(one, **gone) for one in look(*of)]  # type: ignore[method-assign]
    sync.run(30, step_ms=MINUTE)
    sync.start()
    sync.run(30, step_ms=MINUTE)
    del log.look  # type: ignore[method-assign]
    sync.run(120, step_ms=MINUTE)
    assert staged(sync) == dict.fromkeys(range(60), 1)
    assert [since >= off_ms - 30 * MINUTE for since, _ in sync.gaps()] == [True] * keys_only


def test_where_a_log_that_comes_back_begins_stays(tmp_path: Path) -> None:
    """Nodes disagree, a look fails, or a commit: time passes until it is in the position."""
    over = Sweep(NOW - 20 * HOUR, NOW - 20 * HOUR)
    ended = replace(Position.begin(NOW - 90 * HOUR, [], 15_000), until_ms=NOW - 30 * HOUR, ends_ms=NOW - 30 * HOUR)
    ended = replace(ended, near=over, far=over, ttl_s=TTL_S)
    assert ended.has_ended
    logs = FollowedLogs(SimpleNamespace(), LocalStore(tmp_path), None, {}, None, NOW - 3 * HOUR)  # type: ignore[arg-type]
    begins_ms = logs._comes_back(TABLE_ID, {TABLE_ID: ended}, NOW)
    assert begins_ms == NOW - 3 * HOUR - followed_logs.PLAN_MS
    logs._seen_ms = NOW
    assert logs._comes_back(TABLE_ID, {TABLE_ID: ended}, NOW + HOUR) == begins_ms
    assert logs._comes_back(TABLE_ID, {TABLE_ID: replace(ended, ends_ms=None)}, NOW + HOUR) is None
    assert logs._comes_back(TABLE_ID, {TABLE_ID: ended}, NOW + HOUR) == NOW - followed_logs.PLAN_MS


def test_a_table_that_stands_holds_up_no_bucket(sync_of: Callable[[Cluster], Sync]) -> None:
    """Its newest generation has no streams. One that only is behind is waited for."""
    other_id = "6e" + TABLE_ID[2:]
    stands = (ONLY, generation(NOW + 10 * MINUTE, 0))

    class Two(Log):
        def look(self, plan: Any, positions: Mapping[str, Position], now_ms: int) -> list[FollowedTable]:
            requests = {one.time_ms: grouped(one, None) for one in stands}
            log = replace(followed(OTHER, other_id), ttl_s=self.ttl_s)
            other = FollowedTable(other_id, "ks.other", log, stands, requests)
            return [*super().look(plan, positions, now_ms), other]

    sync = sync_of(log := Two([ONLY], has_from_ms=None))
    sync.run(12)
    assert sync.stager.status()["clear_at_ms"] == NOW + 10 * MINUTE
    sync.run(10)
    assert log.now_ms - sync.stager.status()["clear_at_ms"] < 2 * MINUTE
    loop.put_status(sync.store, "scylla_log_stage", scylla_log_stage.STATUS, sync.stager.status() | {"error": None})
    sync.start()
    sync.run(1)
    assert log.now_ms - sync.stager.status()["clear_at_ms"] < 2 * MINUTE, "a new run goes on counting"


def test_a_smaller_ttl_dates_no_row_wrongly(sync_of: Callable[[Cluster], Sync]) -> None:
    """Far sweeps read rows with the former one as long as they are there."""
    sync = sync_of(log := log_of())
    base_ms = log.now_ms
    log.add(12 * 6, lambda number: base_ms + number * 10 * MINUTE, 0)
    sync.run(12 * 60, step_ms=5 * MINUTE)
    log.ttl_s = TTL_S // 2
    sync.run(30 * 60, step_ms=5 * MINUTE)
    assert set(map(error_of_expiry, all_rows(sync))) == {0}
    assert not sync.gaps()


class Begun(Log):
    """The reading begins as that of the product does."""

    store: Any = None

    def begin(self, table: FollowedTable, now_ms: int) -> Position:
        config: Any = SimpleNamespace(scylla=self.settings)
        return FollowedLogs(config, self.store, None, {}, None).begin(table, now_ms)


@pytest.mark.parametrize("ttl_s", [900, 1800, 3600, 4000])
def test_what_expires_while_it_is_read_first_is_no_gap(sync_of: Callable[[Cluster], Sync], ttl_s: int) -> None:
    log = Begun([ONLY], has_from_ms=None, ttl_s=ttl_s)

    def takes_time(*_: int) -> bool:
        log.now_ms += 1500
        return False

    log.failing = takes_time
    sync = sync_of(log)
    log.store = sync.store
    sync.run(60)
    assert not sync.gaps()


def lose_cdc(sync: Sync, log: Switched) -> None:
    """Let cdc be off for three days. All is read before that."""
    sync.run(60, step_ms=MINUTE)
    log.is_on = False
    sync.run(72 * 60, step_ms=20 * MINUTE)
    assert sync.position.has_ended


def test_cdc_that_comes_back_after_days_is_no_gap(sync_of: Callable[[Cluster], Sync]) -> None:
    """All was read before, and nothing was logged meanwhile."""
    sync = sync_of(log := switched())
    lose_cdc(sync, log)
    sync.start()
    log.is_on = True
    log.add(60, lambda number: log.now_ms + number * MINUTE, 0)
    log.failing = lambda *_: True
    sync.run(10, step_ms=MINUTE)
    log.failing = lambda *_: False
    sync.run(120, step_ms=MINUTE)
    assert not sync.gaps()
    assert staged(sync) == dict.fromkeys(range(60), 1)


def test_a_generation_that_nodes_forget_one_after_the_other_is_not_new(sync_of: Callable[[Cluster], Sync]) -> None:
    first, second = generation(NOW - 30 * HOUR, 2), generation(NOW - 26 * HOUR, 2)
    log = Log([first, second], has_from_ms=None, begin_ms=NOW - 29 * HOUR)
    log.now_ms = NOW - 25 * HOUR
    sync = sync_of(log)
    sync.run(26 * 60, step_ms=10 * MINUTE)
    before = sync.gaps()
    for generations in ([second], [first, second], [second], [first, second], [second]):
        log.generations = generations
        sync.run(1)
    sync.run(30, step_ms=MINUTE)
    assert sync.gaps() == before
    assert not sync.position.again


def test_a_log_is_read_from_before_the_scan_by_any_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "clocks", lambda _: Clocks(-600_000, 3000, 5000, ""))
    assert prepare._log_from_ms(None, NOW // 1000, 30_000) == NOW - 633_000
    monkeypatch.setattr(prepare, "clocks", lambda _: Clocks(0, 30 * 24 * HOUR, 30 * 24 * HOUR, ""))
    assert prepare._log_from_ms(None, NOW // 1000, 30_000) == NOW - 330_000, "one that is far off is not waited for"
    monkeypatch.setattr(prepare, "clocks", lambda _: None)
    assert prepare._log_from_ms(None, NOW // 1000, 30_000) == NOW - 30_000
