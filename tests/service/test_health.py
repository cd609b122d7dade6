"""What is wrong with a sync, what a cluster's settings mean for it, and how its status looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ringsync.airflow_client import DagHealth, RunState, TaskState
from ringsync.cluster.cluster import duration_ms
from ringsync.config import Config
from ringsync.service.checks import Node, judge_nodes
from ringsync.service.command import wait_until_idle
from ringsync.service.delays import Limits
from ringsync.service.expected import Expected
from ringsync.service.health import HOMELESS_MS, judges, problems
from ringsync.service.problem import Kind
from ringsync.service.show import status_lines
from ringsync.service.table_checks import CheckError, tell_tables
from ringsync.status import forget, read_statuses
from ringsync.storage import open_store
from tests.test_metrics import NODE, TABLE

NOW_S = 50.0
EXPECTED = Expected.of_commit_logs(["default"])
RUNNING = DagHealth(False, RunState("bucket_close", "r", "running", (TaskState("close", "running", 1, None),)), None)


def healthy() -> dict[str, Any]:
    return {
        "commitlog_stage/default": {"at_ms": 45_000, "nodes": {"4e5d": NODE}},
        "bucket_close/close": {"at_ms": 49_000, "tables": {"shop.orders": TABLE}},
        "out_of_sequence/queue": {"at_ms": 40_000, "waiting": 3, "oldest_ms": 20_000},
        "schema_update/schema": {"at_ms": 45_000, "changes": 4, "problems": []},
        "alarms/alarms": {"at_ms": 45_000, "raised": 0, "problems": []},
    }


def found(statuses: dict[str, Any], dags: dict[str, DagHealth], stopped: bool = False) -> list[str]:
    return [problem.text for problem in problems(statuses, dags, EXPECTED, stopped, NOW_S, limits=Limits(60, 60, 60))]


def test_nothing_is_wrong() -> None:
    assert found(healthy(), {"bucket_close": RUNNING}) == []


def test_a_loop_that_is_silent_is_named() -> None:
    statuses = healthy()
    statuses["bucket_close/close"]["at_ms"] = 9_000
    del statuses["out_of_sequence/queue"]
    assert found(statuses, {}) == [
        "bucket_close/close: no sign of life for 41 s",
        "out_of_sequence/queue: no sign of life yet",
    ]


def test_what_holds_up_the_schema_is_named() -> None:
    statuses = healthy()
    statuses["schema_update/schema"]["problems"] = ["shop.orders: schemas/shop.orders/000002.json cannot be read"]
    assert found(statuses, {}) == ["schema_update/schema: shop.orders: schemas/shop.orders/000002.json cannot be read"]


def test_rows_of_a_table_that_nobody_has_named_for_long_are_named() -> None:
    statuses = healthy()
    statuses["bucket_close/close"] |= {
        "rows_homeless": {"ab": 5},
        "homeless_since_ms": {"ab": 49_000 - HOMELESS_MS + 1},
    }
    assert found(statuses, {}) == []
    statuses["bucket_close/close"]["homeless_since_ms"]["ab"] -= 1
    (problem,) = found(statuses, {})
    assert problem == "bucket_close/close: 5 staged rows of table id ab wait, and the table is unknown"


def test_a_bootstrap_that_nobody_works_on_is_named() -> None:
    one = {"table": "shop.orders", "table_id": "ab", "bootstrap": "b-1", "run": "r", "step": "scan", "fraction": 0.42}
    statuses = healthy() | {"bootstrap/ab": {**one, "at_ms": 30_000}}
    assert found(statuses, {}) == []
    lines = list(status_lines(statuses, {}, NOW_S))
    assert ["shop.orders", "scan", "42%", "b-1"] in [line.split()[:4] for line in lines]
    assert not any(line.startswith("bootstrap/ab") for line in lines)
    statuses["bootstrap/ab"]["at_ms"] = -600_000
    (problem,) = found(statuses, {})
    assert problem.startswith("shop.orders: bootstrap b-1 is not finished, and nobody has worked on it for ")
    assert problem.endswith("or with --cancel, which ends it")


def test_what_loops_tell_of_nodes_and_tables() -> None:
    statuses = healthy()
    statuses["commitlog_stage/default"]["nodes"] = {"4e5d": {**NODE, "error": "no such folder", "errors": 1200}}
    statuses["bucket_close/close"]["tables"] = {"shop.orders": {**TABLE, "kafka_error": "Kafka is not available"}}
    statuses["out_of_sequence/queue"] |= {
        **{"error": "no quorum", "files_broken": 3, "tables_unknown": 0},
        "broken": {"staging/late/a/b.arrow": "version 3 is not known"},
    }
    assert found(statuses, {}) == [
        "commitlog_stage/default: node 10.0.0.1:9042: no such folder",
        "shop.orders: Kafka is not available",
        "out_of_sequence/queue: no quorum",
        "out_of_sequence/queue: staging/late/a/b.arrow cannot be used: version 3 is not known",
        "out_of_sequence/queue: 2 more files of late rows cannot be used: its report says why",
    ]


def test_what_airflow_tells() -> None:
    failed = RunState("out_of_sequence", "r7", "failed", (TaskState("publish", "failed", 3, 1.0),))
    dags = {"bucket_close": DagHealth(True, None, None), "out_of_sequence": DagHealth(False, failed, failed)}
    assert found(healthy(), dags) == [
        "DAG bucket_close is paused: cdcservice start",
        "DAG out_of_sequence: its last run failed, r7",
        "DAG out_of_sequence: task publish failed: see its log in Airflow",
    ]
    assert found(healthy(), dags, stopped=True) == ["stopped: cdc_raw of the nodes fills until cdcservice start"]


def test_the_status_shows_what_there_is_in_columns() -> None:
    lines = list(status_lines(healthy(), {"bucket_close": RUNNING}, NOW_S))
    assert "DAG           state    tasks" in lines
    assert "bucket_close  running  close running" in lines
    assert "bucket_close/close       1 s ago" in lines
    node = next(line for line in lines if line.startswith("10.0.0.1"))
    assert node.split() == ["10.0.0.1:9042", "up", "17", "4,096", "0.0", "5", "9", "1", "0"]
    table = next(line for line in lines if line.startswith("shop.orders"))
    assert table.split() == [
        *("shop.orders", "1.5", "20.0", "–", "–", "–", "2", "0:00:49", "ago", "7", "6", "–", "40", "80", "0"),
    ]
    late = lines[lines.index("late rows waiting  oldest       published  duplicates") + 1]
    assert late.split() == ["3", "0:00:30", "ago", "–", "–"]
    assert lines[-2].split() == ["4", "–", "–", "–"]


def test_what_is_wanted_is_told_and_is_no_problem() -> None:
    statuses = healthy()
    statuses["bucket_close/close"]["datacenters_left_out"] = {"dc2": ["10.1.0.1:9042", "10.1.0.2:9042"]}
    statuses["commitlog_stage/default"]["nodes"] = {"4e5d": {**NODE, "up": False, "left": True}}
    assert found(statuses, {}) == []
    lines = list(status_lines(statuses, {}, NOW_S))
    place = lines.index("not read (sync.datacenters)  nodes")
    assert lines[place + 1].split() == ["dc2", "10.1.0.1:9042,", "10.1.0.2:9042"]
    assert any(line.startswith("What is written there is published once a node that is read") for line in lines)
    assert next(line for line in lines if line.startswith("10.0.0.1")).split()[1] == "left"


def test_statuses_lie_in_the_store(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert read_statuses(store) == {}
    store.put("status/commitlog_stage/default.json", b'{"at_ms": 1}')
    store.put("status/bucket_close/close.json", b'{"at_ms": 2}')
    forget(store, "commitlog_stage/default")
    assert read_statuses(store) == {"bucket_close/close": {"at_ms": 2}}


def settings(**changes: Any) -> Config:
    document = {"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": "/lake"}, **changes}
    return Config.model_validate(document)


CAPTURING = {"cdc_enabled": "true", "commitlog_sync_period": "10s", "cdc_block_writes": "false"}


def test_a_cluster_without_cdc_is_refused() -> None:
    nodes = [Node("a:9042", {"cdc_enabled": "false"}), Node("b:9042", None)]
    with pytest.raises(CheckError, match=r"no node captures changes: set cdc_enabled: true .* \(asked: a:9042\)"):
        judge_nodes(nodes, settings())


def test_logs_that_are_synced_too_seldom_are_refused() -> None:
    short = settings(commitlog_processor_window_interval_ms=2000)
    with pytest.raises(
        CheckError, match="a:9042 syncs its commit log every 10000 ms, but buckets are open for 10000 ms"
    ):
        judge_nodes([Node("a:9042", CAPTURING)], short)
    old = {"cdc_enabled": "true", "commitlog_sync_period_in_ms": "10000"}
    with pytest.raises(CheckError, match="every 10000 ms"):
        judge_nodes([Node("a:9042", old)], short)


def test_nodes_whose_worker_would_read_one_folder_are_refused() -> None:
    """Every packaged node says the same path, and one worker on one host finds one folder there."""
    raw = {**CAPTURING, "cdc_raw_directory": "/var/lib/cassandra/cdc_raw"}
    alike = [Node("a:9042", raw), Node("b:9042", raw), Node("c:9042", raw, "c")]
    with pytest.raises(CheckError, match=r"queue default: nodes a:9042, b:9042 name the same folder /var/.*/cdc_raw"):
        judge_nodes(alike, settings())
    with pytest.raises(CheckError, match="same folder /mnt/raw"):
        judge_nodes([Node("a:9042", CAPTURING), Node("b:9042", None)], settings(sync={"cdc_raw": "/mnt/raw"}))
    alike[1] = Node("b:9042", raw | {"cdc_raw_directory": "/var/lib/cassandra/cdc_raw/"})
    with pytest.raises(CheckError, match="nodes a:9042, b:9042 name the same folder"):
        judge_nodes(alike, settings())
    idle = raw | {"cdc_enabled": "false"}
    assert judge_nodes([Node("a:9042", raw), Node("b:9042", idle)], settings())
    apart = [Node("a:9042", raw), Node("b:9042", raw, "b"), Node("c:9042", raw, "c")]
    assert judge_nodes(apart, settings()) == ["nodes that capture changes: a:9042, b:9042, c:9042"]


def test_remarks_about_tables() -> None:
    sync = {
        "include": ["shop.*", "log.*"],
        "exclude": ["*.tmp_*", "shop.draft"],
        "tables": {
            "shop.im*": {"bucket_by": "arrival", "after_image": "none", "expand_deletions": True},
            "shop.oders": {},
        },
    }
    config = settings(sync=sync).sync
    tables = ["other.orders", "shop.imports", "shop.orders", "shop.tmp_1", 'shop."Tmp_1"']
    assert tell_tables(tables, config) == [
        "tables that are followed: shop.imports (after_image: none, bucket_by: arrival, expand_deletions: true), "
        'shop.orders, shop."Tmp_1"',
        "tables with cdc = true that sync.include or sync.exclude leaves out: other.orders, shop.tmp_1",
        "warning: sync.include: log.* names no table that has cdc = true",
        "warning: sync.exclude: shop.draft names no table that has cdc = true",
        "warning: sync.tables: shop.oders names no table that has cdc = true",
    ]
    assert tell_tables(["other.orders"], config)[0] == (
        "warning: no table is followed: sync.include and sync.exclude leave out all that have cdc = true"
    )
    assert tell_tables(tables, settings().sync) == [f"tables that are followed: {', '.join(tables)}"]
    assert tell_tables([], config) == [
        "no table has cdc = true yet: ALTER TABLE … WITH cdc = true, or cdcservice bootstrap"
    ]


def test_remarks_about_nodes() -> None:
    blocking = {**CAPTURING, "cdc_block_writes": "true", "cdc_total_space": "4096MiB"}
    nodes = [
        *(Node("a:9042", CAPTURING), Node("b:9042", {"cdc_enabled": "false"})),
        *(Node("c:9042", None), Node("d:9042", blocking)),
    ]
    assert judge_nodes(nodes, settings()) == [
        "nodes that capture changes: a:9042, d:9042",
        "warning: c:9042 is down and was not asked",
        "warning: b:9042 has cdc_enabled: false: what only this node has is not seen",
        "warning: d:9042 refuses writes once cdc_raw holds 4096MiB (cdc_block_writes: true): docs/sync.md",
    ]


def test_nodes_that_are_not_to_be_read_are_not_taken_for_down() -> None:
    """The driver asks no node of another datacenter; but a ``cdc_raw`` that nobody empties fills."""
    nodes = [Node("a:9042", CAPTURING), Node("b:9042", None, None), Node("c:9042", CAPTURING, None)]
    told, more = judge_nodes(nodes, settings(sync={"datacenters": ["dc1"]}))
    assert told == "nodes that capture changes: a:9042"
    assert more.startswith("nodes that are not read (sync.datacenters): b:9042, c:9042. They need cdc_enabled: false")
    with pytest.raises(CheckError, match="no node captures changes"):
        judge_nodes(nodes[1:], settings())


@pytest.mark.parametrize(("text", "ms"), [("10s", 10_000), ("1500ms", 1500), ("2m", 120_000), ("", 0), ("soon", 0)])
def test_durations(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


class Busy:
    """An Airflow whose tasks of the sync end one after the other."""

    def __init__(self, *running: list[str]) -> None:
        self._running = list(running)

    def busy_tasks(self, dag: str) -> list[str]:
        if dag != "bucket_close":
            return []
        return self._running.pop(0) if len(self._running) > 1 else self._running[0]


def test_stopping_waits_for_what_runs_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    airflow: Any = Busy(["close", "stage"], ["close", "stage"], ["close"], [])
    seconds = iter(range(100))
    assert wait_until_idle(airflow, EXPECTED.dags, 60, Console(width=120), lambda: next(seconds), lambda _: None) == []
    assert capsys.readouterr().out.splitlines() == [
        "waiting for bucket_close.close, bucket_close.stage",
        "waiting for bucket_close.close",
    ]
    still: Any = Busy(["close"])
    assert wait_until_idle(still, EXPECTED.dags, 60, Console(), lambda: next(seconds), lambda _: None) == [
        "bucket_close.close"
    ]


@pytest.mark.parametrize(("run", "is_raised"), [("scheduled__2026-11-29T00:00:00+00:00", True), ("manual__x", False)])
def test_a_scheduled_verification_that_fails_is_told(run: str, is_raised: bool) -> None:
    """It was told after nine days. A run that somebody has triggered says nothing of it: what is raised stays."""
    failed = RunState("replica_verify", run, "failed", (TaskState("verify", "failed", 1, 1.0),))
    dags = {"replica_verify": DagHealth(False, failed, failed)}
    told = found(healthy(), dags)
    assert ("DAG replica_verify: task verify failed: see its log in Airflow" in told) is is_raised
    assert judges(healthy(), dags, EXPECTED, False, NOW_S)("DAG replica_verify") is is_raised


def test_who_may_say_that_it_is_over() -> None:
    """A loop that is silent or stopped has told nothing; how a DAG's last run has ended, Airflow knows at any time."""
    failed = RunState("replica_merge", "r", "failed", ())
    dags = {"bucket_close": RUNNING, "replica_merge": DagHealth(False, failed, failed)}
    statuses = healthy()
    statuses["bucket_close/close"]["at_ms"] = 9_000

    def judge(stopped: bool = False) -> set[str]:
        owners = {*statuses, "archive_reprocess/archive", "", "DAG bucket_close", "DAG replica_merge"}
        owners |= {"pause of DAG bucket_close", "DAG gone", "pause of DAG gone"}
        return {owner for owner in owners if judges(statuses, dags, EXPECTED, stopped, NOW_S)(owner)}

    always = {"", "alarms/alarms", "archive_reprocess/archive", "pause of DAG bucket_close"}
    always |= {"DAG bucket_close", "DAG replica_merge"}
    assert judge() == always | {"commitlog_stage/default", "out_of_sequence/queue", "schema_update/schema"}
    assert judge(stopped=True) == always
    is_judge = judges(statuses, dags, EXPECTED, False, NOW_S, damaged={"replica_verify/proofs"})
    assert not is_judge("replica_verify/proofs"), "what it has told before stays raised"
    assert is_judge("commitlog_stage/default")


def test_trouble_with_the_archive_is_urgent_when_room_is_scarce() -> None:
    for free, kind in ((90, Kind.ARCHIVE_FAILING), (20, Kind.CDC_RAW_FULL), (None, Kind.CDC_RAW_FULL)):
        node = {"endpoint": "a:9042", "error": "no store", "free_bytes": free, "total_bytes": 100}
        statuses = healthy() | {"commitlog_archive/default": {"at_ms": 45_000, "nodes": {"4e5d": node}}}
        (problem,) = problems(statuses, {}, Expected.of_commit_logs(["default"], archives=True), False, NOW_S)
        assert (problem.kind, problem.is_critical) == (kind, kind == Kind.CDC_RAW_FULL)


@pytest.mark.parametrize(
    ("archives", "empties"), [(True, "commitlog_archive/default"), (False, "commitlog_stage/default")]
)
def test_a_damaged_status_hides_no_dead_archive(archives: bool, empties: str) -> None:
    """A loop that runs writes it again within seconds; of one that is dead, only the damage was told, for days. Without
    an archive the stage alone empties cdc_raw."""
    everything = Expected.of_commit_logs(["default"], archives=archives)
    well = {loop: {"at_ms": NOW_S * 1000} for loop in everything.loops}
    for stopped in (False, True):
        for loop in everything.loops:
            statuses = {name: status for name, status in well.items() if name != loop}
            found = problems(statuses, {}, everything, stopped, NOW_S, damaged={loop: "no object"})
            kinds = {problem.kind for problem in found if problem.where == loop}
            silent = {Kind.ARCHIVE_SILENT} if loop == empties else {Kind.LOOP_SILENT}
            is_silent = loop in everything.lasting_loops or (loop == empties and not stopped)
            assert kinds == {Kind.STATUS_UNREADABLE, *(silent if is_silent else ())}, (loop, stopped)
