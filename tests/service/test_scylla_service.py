"""A sync of ScyllaDB: what has to run, what is wrong, what is waited for, and how its status looks."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import ringsync.service.command as command
from ringsync.airflow_client import DagHealth
from ringsync.changes.identity import TableVersion
from ringsync.cli import main
from ringsync.config import Config, load_config
from ringsync.config.sync import Sync
from ringsync.cql.types import Native
from ringsync.ledger.database import CDC_LOGS, follows_scylla, note_database
from ringsync.ledger.gaps import Gap, note_gap
from ringsync.ledger.staging import Bucket
from ringsync.metrics import exposition, report_metrics
from ringsync.ring.ring import Host
from ringsync.schema.table import Column, TableSchema
from ringsync.scylla.progress import Position, Waiting
from ringsync.service.delays import Limits
from ringsync.service.expected import Expected, expected_in
from ringsync.service.health import judges, problems
from ringsync.service.look import look
from ringsync.service.problem import Kind, Problem
from ringsync.service.published import Seen, logs_left, wait_until_published
from ringsync.service.show import status_lines
from ringsync.service.workers import WorkerReports, wait_for_workers
from ringsync.status import Status, read_statuses
from ringsync.steps.application import ExitCode
from ringsync.steps.loop import put_status
from ringsync.steps.sync_plan import SyncPlan, SyncTable
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ChecksumError
from tests.test_metrics import TABLE, read

NOW_S = 1000.0
LOG = {"until_ms": 955_000, "behind_ms": 44_000, "waiting": 2, "waiting_from_ms": 940_000, "error": None}
LOGS = {
    **{"at_ms": 999_000, "logs": {"shop.orders": LOG}, "clear_at_ms": 955_000, "error": None},
    **{"generations": 3, "empty_generations_ms": [], "clock_skew_ms": 120, "rows": 1234},
    "errors": 0,
}
OF_SCYLLA = Expected.of_cdc_logs(["default", "rack-a"])
LASTING = {"alarms", "replica_verify"}
SYNC_DAGS = {"bucket_close", "out_of_sequence", "replica_merge", "schema_updater"}
STAGES = {"commitlog_stage", "commitlog_stage_rack-a"}


def healthy(**of_logs: Any) -> dict[str, Any]:
    return {
        "scylla_log_stage/log": {**LOGS, **of_logs},
        "bucket_close/close": {
            "at_ms": 999_000,
            "tables": {"shop.orders": {**TABLE, "oldest_open_bucket_ms": 990_000}},
        },
        "out_of_sequence/queue": {"at_ms": 999_000},
        "schema_update/schema": {"at_ms": 999_000, "problems": []},
        "alarms/alarms": {"at_ms": 999_000, "problems": []},
    }


def found(statuses: dict[str, Any], *, stopped: bool = False) -> list[Problem]:
    return problems(statuses, {}, OF_SCYLLA, stopped, NOW_S, limits=Limits(300))


def of_log(**changes: Any) -> dict[str, Any]:
    return healthy(logs={"shop.orders": {**LOG, **changes}})


def test_which_database_is_followed_is_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert follows_scylla(store) is False, "nothing is known: as it always was"
    for of_scylla in (True, False, True):
        note_database(store, of_scylla)
        assert follows_scylla(store) is of_scylla
    (key,) = [stat.key for stat in store.list("state/")]
    for damaged in (b"{", b"[]", b"{}"):
        store.put(key, damaged)
        with pytest.raises(ChecksumError, match="is damaged: cdcservice start writes it anew"):
            follows_scylla(store)


def test_one_configuration_serves_both_databases(tmp_path: Path) -> None:
    """Every DAG is switched on or off, and only what reads changes differs."""
    document = {"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": str(tmp_path)}}
    document["sync"] = {"queue_of_node": {"10.0.0.1": "rack-a"}}
    config, store = Config.model_validate(document), LocalStore(tmp_path)
    of_cassandra = expected_in(config, store)
    note_database(store, of_scylla=True)
    of_scylla = expected_in(config, store)
    archive = {"commitlog_archive", "commitlog_archive_rack-a"}
    assert set(of_cassandra.dags) == SYNC_DAGS | STAGES | {"archive_reprocess"}
    assert set(of_cassandra.lasting_dags) == LASTING | archive
    assert set(of_cassandra.needless_dags) == {"scylla_log_stage"}
    assert set(of_scylla.dags) == SYNC_DAGS | {"scylla_log_stage"}
    assert set(of_scylla.lasting_dags) == LASTING
    assert set(of_scylla.needless_dags) == {"archive_reprocess"} | STAGES | archive
    assert set(of_cassandra.loops) - set(of_scylla.loops) == {
        *("commitlog_stage/default", "commitlog_stage/rack-a"),
        *("commitlog_archive/default", "commitlog_archive/rack-a"),
    }
    assert set(of_scylla.loops) - set(of_cassandra.loops) == {"scylla_log_stage/log"}
    off = expected_in(Config.model_validate({**document, "archive": {"policy": "off"}}), LocalStore(tmp_path / "new"))
    assert set(off.lasting_dags) == LASTING
    assert set(off.needless_dags) == {"scylla_log_stage"} | archive


def test_nothing_is_wrong() -> None:
    assert found(healthy()) == []


def test_the_loop_that_reads_logs_is_expected_and_no_other() -> None:
    statuses = healthy()
    del statuses["scylla_log_stage/log"]
    (problem,) = found(statuses)
    assert problem.text == "scylla_log_stage/log: no sign of life yet"


@pytest.mark.parametrize(
    ("statuses", "kind", "where", "text"),
    [
        (of_log(error="no table x"), Kind.LOG_UNREADABLE, "shop.orders", "its CDC log is not read: no table x"),
        (
            of_log(sweep_error="no y"),
            Kind.LOG_UNREADABLE,
            "shop.orders",
            "late rows of its CDC log are not looked for: no y",
        ),
        (
            of_log(until_ms=600_000),
            Kind.TABLE_LAGGING,
            "shop.orders",
            "is read only up to what was written 0:06:40 ago",
        ),
        (of_log(until_ms=0, error="x"), Kind.LOG_UNREADABLE, "shop.orders", "is not read: x"),
        (
            *(healthy(empty_generations_ms=[1_635_882_326_384]), Kind.GENERATION_EMPTY, "generation 1635882326384"),
            "the generation of CDC streams of 2021-11-02T19:45:26.384+00:00 has no streams",
        ),
        (healthy(error="no quorum"), Kind.LOOP_FAILING, "scylla_log_stage/log", "scylla_log_stage/log: no quorum"),
    ],
)
def test_what_the_loop_tells_of_logs(statuses: dict[str, Any], kind: Kind, where: str, text: str) -> None:
    (problem,) = found(statuses)
    assert (problem.kind, problem.where, problem.owner) == (kind, where, "scylla_log_stage/log")
    assert text in problem.text
    assert not problem.is_critical


def test_a_log_that_is_not_read_yet_is_no_problem_and_is_shown() -> None:
    statuses = of_log(until_ms=0, behind_ms=None, waiting=0, waiting_from_ms=None)
    assert found(statuses) == []
    assert ["shop.orders", "–", "–", "0", "–"] in [line.split() for line in status_lines(statuses, {}, NOW_S)]


def test_closing_without_the_logs_is_told() -> None:
    from ringsync.steps.close.closing import log_progress

    statuses = healthy()
    silent = log_progress(None, 999_000, 60_000, {})
    statuses["bucket_close/close"]["unread"] = dict(silent.unread)
    (problem,) = found(statuses)
    assert (problem.kind, problem.where) == (Kind.LOG_UNREADABLE, "the CDC logs")
    assert "node" not in problem.text


def test_a_stopped_sync_says_how_long_its_changes_last() -> None:
    (problem,) = found(healthy(at_ms=0, error="x"), stopped=True)
    assert problem.text == "stopped: changes stay in the CDC logs for as long as their TTL until cdcservice start"
    judge = judges(healthy(), {"scylla_log_stage": DagHealth(False, None, None)}, OF_SCYLLA, True, NOW_S)
    assert not judge("scylla_log_stage/log")
    assert judge("alarms/alarms")


def test_the_status_shows_the_logs() -> None:
    lines = [line.split() for line in status_lines(healthy(), {}, NOW_S)]
    assert ["shop.orders", "1970-01-01T00:15:55Z", "45.0", "2", "–"] in lines
    assert ["3", "0.1", "1,234", "0"] in lines
    assert lines.count(["scylla_log_stage/log", "1", "s", "ago"]) == 1


def test_what_a_log_has_forgotten_is_critical_until_the_table_was_verified(tmp_path: Path) -> None:
    document = {"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": str(tmp_path)}}
    config, store = Config.model_validate({**document, "airflow": {"url": "http://127.0.0.1:9"}}), LocalStore(tmp_path)
    note_database(store, of_scylla=True)
    tables = {"5" * 32: "shop.orders"}
    note_gap(store, Gap(CDC_LOGS, "", "shop.orders-5000", 5000, 65_000, tables, ()))
    put_status(store, "bucket_close", "close", {"tables": {"shop.orders": {"table_id": "5" * 32, "replica_pass": 3}}})
    seen = look(config, store, NOW_S)
    (gap,) = [problem for problem in seen.problems if problem.is_critical]
    assert (gap.kind, gap.where) == (Kind.LOG_GAP, "shop.orders-5000")
    assert "from 1970-01-01T00:00:05Z to 1970-01-01T00:01:05Z" in gap.text
    assert "cdcservice verify --repair --table shop.orders" in gap.text
    assert "node" not in gap.text
    silent = {problem.where for problem in seen.problems if problem.kind == Kind.LOOP_SILENT}
    assert "scylla_log_stage/log" in silent
    assert "commitlog_stage/default" not in silent


def test_the_position_says_when_its_oldest_group_was_written() -> None:
    """By the documents' own value: b223c55e-6d07-11ea-7654-24e4fb3f20b9 is 1584969040910883 µs."""
    times = ["c72c7c3e2fda11ebba1de2d8e9bb0299", "b223c55e6d0711ea765424e4fb3f20b9"]
    position = Position.begin(0, [0], 1000)
    assert position.waiting_from_ms is None
    position = replace(position, waiting=tuple(Waiting(0, "00", time, 0, 0) for time in times))
    assert position.waiting_from_ms == 1_584_969_040_910


ORDERS = TableSchema("shop", "orders", "5" * 32, (Column("id", "partition_key", Native("int")),))
PLANNED = SyncTable(TableVersion.first(ORDERS), "test.shop.orders", False)
PLAN = SyncPlan(Bucket(5000, 2000), (), {}, (PLANNED,), of_scylla=True)


def left(log: Status | None, *, plan: SyncPlan = PLAN, **others: Any) -> list[str]:
    logs = {**({"shop.orders": log} if log is not None else {}), **others}
    status = {"at_ms": 0, "logs": logs, "clear_at_ms": 9000, "error": None}
    return [one.reason for one in logs_left(Seen({"scylla_log_stage/log": status}, plan), Sync(), 3000)]


def test_logs_are_waited_for_until_they_are_read_up_to_the_moment() -> None:
    read_up = {"until_ms": 3000, "waiting": 0, "waiting_from_ms": None, "error": None}
    assert left(read_up) == []
    assert left({**read_up, "until_ms": 2999}) == ["the CDC log of shop.orders is not staged: it is being read"]
    assert left(None) == ["the CDC log of shop.orders is not staged: it is being read"], "it is planned since"
    failed = {**read_up, "until_ms": 2999, "error": "no table x"}
    assert left(failed) == ["the CDC log of shop.orders is not staged: no table x"]
    assert left({**read_up, "error": "since a moment ago"}) == []
    assert left(read_up, **{"shop.left": failed}) == ["the CDC log of shop.left is not staged: no table x"]
    assert left(read_up, plan=replace(PLAN, interval=Bucket(2000, 2000))) == [
        "the loops have not begun the next window interval"
    ]


def test_groups_that_are_not_complete_are_waited_for_if_they_were_written_before() -> None:
    log = {"until_ms": 9000, "waiting": 2, "error": None}
    assert left({**log, "waiting_from_ms": 3000}) == []
    assert left({**log, "waiting_from_ms": 2999}) == [
        "the CDC log of shop.orders is not staged: 2 groups of rows are not complete"
    ]


def test_a_loop_that_has_told_nothing_is_waited_for_and_named(tmp_path: Path) -> None:
    (one,) = logs_left(Seen({}, PLAN), Sync(), 3000)
    assert one.loop == "scylla_log_stage/log"
    store, now = LocalStore(tmp_path), [6.0]
    store.put("plans/sync/0000000005000.json", PLAN.to_json().encode())

    def sleep(seconds: float) -> None:
        now[0] += 100 * seconds

    waited = wait_until_published(store, Sync(), 1000, 3600, clock=lambda: now[0], sleep=sleep)
    assert waited.left.startswith("scylla_log_stage/log does not run: no sign of life for ")


def test_nodes_that_are_down_are_no_matter_of_logs() -> None:
    from ringsync.service.published import _notes

    down = Host("a", "10.0.0.1", 9042, "dc", "r", (1,), up=False)
    plan = replace(PLAN, hosts=(down,))
    assert list(_notes(Seen({}, plan))) == []
    assert len(list(_notes(Seen({}, replace(plan, of_scylla=False))))) == 1


def reports(store: LocalStore, before: dict[str, int], told: list[str]) -> WorkerReports:
    seconds = iter(range(100))
    return wait_for_workers(store, OF_SCYLLA, before, 3.0, told.append, lambda: next(seconds), lambda _: None)


def test_start_waits_for_the_first_sign_of_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, told = LocalStore(tmp_path), list[str]()
    put_status(store, "scylla_log_stage", "log", LOGS)
    before = read_statuses(store)["scylla_log_stage/log"]["at_ms"]
    silent = reports(store, {"log": before}, told)
    assert told == ["waiting for the loop that reads the CDC logs: scylla_log_stage: log"]
    assert command._print_reports(silent, Console(file=io.StringIO())) == ExitCode.COMPLETED_WITH_ERRORS
    assert "scylla_log_stage/log has not read the CDC logs: it has given no sign of life" in capsys.readouterr().err
    output = io.StringIO()
    assert command._print_reports(reports(store, {}, told), Console(file=output, width=200)) == ExitCode.OK
    assert output.getvalue() == "CDC logs that are read: shop.orders\n"
    failing = {**LOGS, "logs": {"shop.orders": LOG, "shop.items": {**LOG, "error": "keys only"}}}
    put_status(store, "scylla_log_stage", "log", failing)
    assert command._print_reports(reports(store, {}, told), Console(file=output)) == ExitCode.COMPLETED_WITH_ERRORS
    assert "shop.items: its CDC log is not read: keys only" in capsys.readouterr().err


def test_a_cycle_that_failed_says_nothing_of_logs(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put_status(store, "scylla_log_stage", "log", {**LOGS, "logs": {}, "error": "no quorum"})
    assert reports(store, {}, []).silent == {"log": "no quorum"}


def test_a_cycle_that_goes_on_says_nothing_of_logs(tmp_path: Path) -> None:
    """Until the first one of a run has ended, the sign of life repeats what the run before has seen, or nothing."""
    store = LocalStore(tmp_path)
    put_status(store, "scylla_log_stage", "log", {"logs": {}, "error": None, "busy": {"with": None, "since_ms": 1}})
    assert reports(store, {}, []).silent.keys() == {"log"}


class FakeAirflow:
    """Remembers which DAGs are paused."""

    url = "http://airflow"

    def __init__(self, *running: str) -> None:
        every = {*OF_SCYLLA.all_dags, *OF_SCYLLA.needless_dags}
        self.paused = {dag: dag not in running for dag in every}
        self.switched: list[str] = []

    def is_paused(self, dag: str) -> bool:
        return self.paused[dag]

    def set_paused(self, dag: str, paused: bool) -> None:
        self.paused[dag] = paused
        self.switched.append(dag)

    def busy_tasks(self, dag: str) -> list[str]:
        return []


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "ringsync.yaml"
    sync = {"queue_of_node": {"10.0.0.1": "rack-a"}}
    document = {"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": "lake"}, "sync": sync}
    path.write_text(yaml.safe_dump(document))
    return path


def test_start_asks_the_cluster_and_switches_on_what_it_needs(
    conf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    airflow = FakeAirflow(*STAGES, "commitlog_archive", "commitlog_archive_rack-a", "alarms")
    store = LocalStore(conf.parent / "lake")
    put_status(store, "commitlog_stage", "default", {"nodes": {}})
    store.put("status/stray/loop.json", b"{")
    monkeypatch.setattr(command, "is_of_scylla", lambda _: True)
    monkeypatch.setattr(command, "CHECKS", {})
    monkeypatch.setattr(command, "client_of", lambda _: airflow)
    monkeypatch.setattr(command, "connect", lambda _: None)
    monkeypatch.setattr(command, "create_state", lambda *_: None)
    assert main(["start", "--timeout", "0", "--conf", str(conf)]) == ExitCode.COMPLETED_WITH_ERRORS
    assert {dag for dag, paused in airflow.paused.items() if not paused} == SYNC_DAGS | {"scylla_log_stage", *LASTING}
    assert max(map(airflow.switched.index, STAGES)) < airflow.switched.index("scylla_log_stage")
    assert follows_scylla(store)
    assert read_statuses(store) == {}, "loops of the other database are forgotten"
    assert store.list("status/") == [], "so is what nobody understands"
    said = capsys.readouterr()
    started = "scylla_log_stage, bucket_close, out_of_sequence, replica_merge, schema_updater, alarms, replica_verify"
    assert f"started: {started};" in said.out
    assert "scylla_log_stage/log has not read the CDC logs" in said.err
    assert main(["stop", "--conf", str(conf)]) == ExitCode.OK
    assert {dag for dag, paused in airflow.paused.items() if not paused} == LASTING
    assert "changes stay in the CDC logs for as long as their TTL until cdcservice start" in capsys.readouterr().out
    monkeypatch.setattr(command, "is_of_scylla", lambda _: False)
    assert main(["start", "--timeout", "0", "--conf", str(conf)]) == ExitCode.COMPLETED_WITH_ERRORS
    assert not follows_scylla(store)
    assert {dag for dag, paused in airflow.paused.items() if paused} == {"scylla_log_stage"}


def test_a_check_notes_nothing(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "is_of_scylla", lambda _: True)
    monkeypatch.setattr(command, "CHECKS", {})
    monkeypatch.setattr(command, "client_of", lambda _: FakeAirflow())
    assert main(["start", "--check", "--conf", str(conf)]) == ExitCode.OK
    assert not follows_scylla(LocalStore(conf.parent / "lake"))
    assert load_config(conf).scylla.window_ms == 15_000


def test_prometheus_and_airflow_get_the_numbers_of_logs() -> None:
    told = read(exposition({"scylla_log_stage/log": LOGS}))
    table = 'table="shop.orders"'
    assert told["ringsync_log_behind_seconds", table] == 44
    assert told["ringsync_log_failing", table] == 0
    assert told["ringsync_log_waiting", table] == 2
    assert told["ringsync_logs_read_timestamp_seconds", ""] == 955
    assert told["ringsync_logs_clock_skew_seconds", ""] == 0.12
    assert told["ringsync_logs_rows_total", ""] == 1234
    failing = {**LOGS, "logs": {"shop.orders": {**LOG, "behind_ms": None, "error": "x"}}}
    told = read(exposition({"scylla_log_stage/log": failing}))
    assert told["ringsync_log_failing", table] == 1
    assert ("ringsync_log_behind_seconds", table) not in told
    report = json.loads(json.dumps({"application": "scylla_log_stage", **LOGS}))
    numbers = {(one.name, one.tags.get("table")): one.value for one in report_metrics(report)}
    assert numbers["ringsync.scylla_log_stage.behind_ms", "shop.orders"] == 44_000
    assert numbers["ringsync.scylla_log_stage.rows", None] == 1234
    assert not [name for name, _ in numbers if "until_ms" in name or "waiting_from" in name]
