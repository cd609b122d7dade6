"""The DAGs as Airflow sees them: they load, quickly and lightly, refuse bad parameters, and submit what they should."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.dags.tasks import DAGS, ROOT, RUN, context, parameters, rendered

HEAVY = {"pyspark", "delta", "deltalake", "cassandra", "google", "pyarrow", "numpy", "numba"}
SYNC = {
    *("commitlog_stage", "scylla_log_stage", "bucket_close", "out_of_sequence", "replica_merge", "schema_updater"),
    *("commitlog_archive", "archive_reprocess", "alarms"),
}
LOOPS = {
    **{"commitlog_stage": "stage", "scylla_log_stage": "stage", "bucket_close": "close", "out_of_sequence": "publish"},
    **{"schema_updater": "update", "commitlog_archive": "archive", "alarms": "watch"},
}
"""The task of each loop, by DAG."""


def test_all_dags_load_and_no_others(bag: Any) -> None:
    assert bag.import_errors == {}
    assert set(bag.dags) == {"bootstrap_table", "replica_verify", *SYNC}


def test_parsing_imports_nothing_heavy() -> None:
    script = f"""
import json, sys
from pathlib import Path
import airflow.providers.apache.spark.operators.spark_submit, airflow.sdk
before = set(sys.modules)
from airflow.dag_processing.dagbag import BundleDagBag
bag = BundleDagBag({str(DAGS)!r}, bundle_path=Path({str(DAGS)!r}), bundle_name="dags")
print("RESULT", json.dumps([sorted(bag.dags), sorted(set(sys.modules) - before)]))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "include")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    dags, modules = json.loads(line.removeprefix("RESULT "))
    assert len(dags) == 11
    assert not {module.split(".")[0] for module in modules} & HEAVY


@pytest.mark.parametrize("file", sorted(DAGS.glob("*.py")), ids=lambda file: file.name)
def test_files_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 80


def test_dags_say_whose_they_are_and_what_they_do(bag: Any) -> None:
    from ringsync.orchestration import OWNER

    for dag in bag.dags.values():
        assert dag.tags <= {"ringsync", "bootstrap", "verify", "sync"}
        assert "ringsync" in dag.tags
        assert dag.description
        is_started = dag.dag_id in {*SYNC, "replica_verify"}
        assert (dag.schedule is not None) is bool(dag.is_paused_upon_creation) is is_started, dag.dag_id
        for topic in ("What it does", "Inputs", "Outputs", "To re-run", "When it fails"):
            assert f"**{topic}" in dag.doc_md, f"{dag.dag_id}: {topic}"
        for task in dag.tasks:
            assert task.owner == OWNER


@pytest.mark.parametrize("dag_id", LOOPS)
def test_a_run_of_loops_is_followed_by_another(bag: Any, dag_id: str) -> None:
    """The scheduler passes over a run whose logical date another run of the DAG has: for ever, if it is the next."""
    from airflow.timetables.base import TimeRestriction
    from airflow.timetables.simple import ContinuousTimetable

    dag = bag.dags[dag_id]
    allowed = TimeRestriction(dag.start_date, None, dag.catchup)
    first = ContinuousTimetable().next_dagrun_info(last_automated_data_interval=None, restriction=allowed)
    assert first is not None
    second = ContinuousTimetable().next_dagrun_info(
        last_automated_data_interval=first.data_interval, restriction=allowed
    )
    assert second is not None
    assert second.logical_date != first.logical_date


def test_loops_start_again_at_once_and_wait_for_no_slot(bag: Any) -> None:
    loops = [bag.dags[dag].get_task(task) for dag, task in LOOPS.items()]
    for task in loops:
        assert (task.retries, task.retry_delay.total_seconds(), task.pool) == (100, 5, "default_pool")
        # Four bootstraps that begin together would else take all slots.
        assert task.priority_weight > 4
    for dag_id in ("bootstrap_table", "replica_verify", "replica_merge", "archive_reprocess"):
        for task in bag.dags[dag_id].tasks:
            if task.task_id != "snapshots_ended":  # nothing runs there
                assert (task.retries, task.retry_delay.total_seconds()) == (2, 30)


def test_each_loop_has_a_dag_of_its_own_and_waits_for_no_other(bag: Any) -> None:
    """In a common run all of them stood still while the host of one queue was away."""
    for dag_id, task_id in LOOPS.items():
        dag = bag.dags[dag_id]
        assert {task.task_id: task.queue for task in dag.tasks} == {task_id: "default"}
        assert (dag.schedule, dag.max_active_runs, dag.catchup) == ("@continuous", 1, False)
        (task,) = dag.tasks
        assert (task.depends_on_past, task.wait_for_downstream, task.upstream_list) == (False, False, [])
        assert getattr(task, "inlets", []) == []


def test_airflow_s_name_for_loops_is_that_by_which_they_are_known(bag: Any) -> None:
    from airflow.timetables.simple import ContinuousTimetable

    from ringsync.airflow_client import CONTINUOUS

    assert {dag_id for dag_id, dag in bag.dags.items() if dag.schedule == CONTINUOUS} == set(LOOPS)
    assert ContinuousTimetable().summary == CONTINUOUS


def test_each_queue_of_workers_has_dags_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.dag_processing.dagbag import BundleDagBag

    from ringsync.config import load_config
    from ringsync.orchestration import BUCKET_CLOSE, commitlog_archive, commitlog_stage, dag_of
    from ringsync.service.expected import expected_of

    nodes = {f"10.0.0.{node}": f"rack-{node % 2}" for node in range(9)}
    document = {"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "lake"}}
    (tmp_path / "ringsync.yaml").write_text(json.dumps({**document, "sync": {"queue_of_node": nodes, "run_s": 120.0}}))
    monkeypatch.setenv("RINGSYNC_CONFIG", str(tmp_path / "ringsync.yaml"))
    dags = BundleDagBag(DAGS, bundle_path=DAGS, bundle_name="dags").dags
    of_queues = {
        f"commitlog_{kind}{suffix}": {task: queue}
        for kind, task in (("stage", "stage"), ("archive", "archive"))
        for suffix, queue in (("", "default"), ("_rack-0", "rack-0"), ("_rack-1", "rack-1"))
    }
    loops = {dag_id: dag for dag_id, dag in dags.items() if dag.schedule == "@continuous"}
    assert {dag_id: {task.task_id: task.queue for task in dag.tasks} for dag_id, dag in loops.items()} == {
        **{dag_id: {task_id: "default"} for dag_id, task_id in LOOPS.items()},
        **of_queues,
    }
    assert {dag_of(loop(queue)) for loop in (commitlog_stage, commitlog_archive) for queue in (
        "default", "rack-0", "rack-1",
    )} == set(of_queues)  # fmt: skip
    assert dag_of(BUCKET_CLOSE) == "bucket_close"
    config = load_config(tmp_path / "ringsync.yaml")
    for of_scylla in (False, True):
        expected = expected_of(config, of_scylla)
        switched = {*expected.all_dags, *expected.needless_dags}
        assert switched == set(dags) - {"bootstrap_table"}, "start switches each DAG on or off"
        assert not {*expected.all_dags} & {*expected.needless_dags}
    task = dags["commitlog_stage_rack-1"].get_task("stage").prepare_for_execution()
    task.render_template_fields(context(dags["commitlog_stage_rack-1"].params))
    assert task.application_args[2:] == ["--run", f"{RUN}.rack-1", "--queue", "rack-1"]
    assert task.report == f"reports/commitlog_stage/{RUN}.rack-1.json"
    assert task.execution_timeout.total_seconds() == 120 + 1800


def test_parameters_explain_themselves(bag: Any) -> None:
    for dag in bag.dags.values():
        for name, parameter in dag.params.items():
            assert dag.params.get_param(name).schema["title"], parameter
            assert dag.params.get_param(name).schema["description_md"]


@pytest.mark.parametrize(
    ("dag_id", "conf"),
    [
        ("bootstrap_table", {"table": "shop.orders"}),
        ("bootstrap_table", {"table": '"Shop"."my ""orders"""', "splits": 1, "verify": False, "dry_run": True}),
        ("bootstrap_table", {"table": "shop.orders", "splits": None}),
        ("bootstrap_table", {"table": 'shop.*, crm.c?, "A".b\nx.y'}),
        ("replica_verify", {"table": "*.*"}),
        ("replica_verify", {}),
        ("bootstrap_table", {"table": "shop.orders", "columns": "a,b", "token_range": "-5:7", "where": "x > 1"}),
        ("replica_verify", {"table": "shop.orders", "repair": True}),
        ("replica_merge", {}),
        ("replica_merge", {"table": "shop.orders"}),
        ("archive_reprocess", {"since": "2026-11-21T04:00:00Z", "until": "2026-11-21T05:00:00Z"}),
    ],
)
def test_good_parameters_are_taken(bag: Any, dag_id: str, conf: dict[str, Any]) -> None:
    assert parameters(bag, dag_id, conf).items() >= conf.items()


@pytest.mark.parametrize(
    ("dag_id", "conf"),
    [
        ("bootstrap_table", {}),
        ("bootstrap_table", {"table": "x"}),
        ("bootstrap_table", {"table": "shop.orders --repair"}),
        ("bootstrap_table", {"table": None}),
        ("bootstrap_table", {"table": "shop.orders, customers"}),
        ("replica_merge", {"table": "shop.*"}),
        ("bootstrap_table", {"table": "shop.orders", "splits": 0}),
        ("bootstrap_table", {"table": "shop.orders", "splits": 1.5}),
        ("bootstrap_table", {"table": "shop.orders", "splits": "8"}),
        ("bootstrap_table", {"table": "shop.orders", "verify": "no"}),
        ("bootstrap_table", {"table": "shop.orders", "mode": "pages"}),
        ("replica_verify", {"table": "shop.orders", "repair": 1}),
        ("replica_merge", {"table": "shop"}),
        ("archive_reprocess", {"since": "yesterday"}),
    ],
)
def test_bad_parameters_are_refused(bag: Any, dag_id: str, conf: dict[str, Any]) -> None:
    from airflow.sdk.exceptions import ParamValidationError

    with pytest.raises(ParamValidationError):
        parameters(bag, dag_id, conf)


COMMANDS = [
    ("bootstrap_table", "prepare", {}, "bootstrap_prepare", "lean 1g", []),
    ("bootstrap_table", "prepare", {"mode": "sstable"}, "bootstrap_prepare", "lean 1g", ["--mode=sstable"]),
    ("bootstrap_table", "prepare", {"splits": 12, "dry_run": True}, "bootstrap_prepare", "lean 1g",
     ["--splits=12", "--dry-run"]),
    ("bootstrap_table", "prepare", {"columns": '"A",b', "token_range": "-5:7", "where": "x = '-1'", "restart": True},
     "bootstrap_prepare", "lean 1g", ['--columns="A",b', "--token-range=-5:7", "--where=x = '-1'", "--restart"]),
    ("bootstrap_table", "scan", {"splits": 12}, "bootstrap_scan", "2g", []),
    ("bootstrap_table", "drain", {}, "bootstrap_drain", "lean 1g", []),
    ("bootstrap_table", "drain", {"verify": False}, "bootstrap_drain", "lean 1g", ["--last"]),
    ("bootstrap_table", "verify", {}, "replica_verify", "2g", []),
    ("replica_verify", "verify", {"repair": False}, "replica_verify", "2g", []),
    ("replica_verify", "verify", {"repair": True}, "replica_verify", "2g", ["--repair"]),
]  # fmt: skip


@pytest.mark.parametrize(("dag_id", "task_id", "conf", "application", "jvm", "options"), COMMANDS)
def test_the_command_that_is_submitted(
    bag: Any, dag_id: str, task_id: str, conf: dict[str, Any], application: str, jvm: str, options: list[str]
) -> None:
    from ringsync.orchestration import given

    task = rendered(bag, dag_id, task_id, {"table": "shop.orders", **conf})
    task.application_args = given(task.application_args)
    command = task._get_hook()._build_spark_submit_command(task.application)
    log = (ROOT / "config" / "spark-log4j2.properties").as_uri()
    lean = " -XX:TieredStopAtLevel=1 -XX:+UseSerialGC" if "lean" in jvm else ""
    assert command == [
        *("spark-submit", "--master", "local[2]", "--conf", "spark.ui.enabled=false"),
        *("--conf", f"spark.driver.extraJavaOptions=-Dlog4j2.configurationFile={log}{lean}"),
        *("--driver-memory", jvm.split()[-1], "--name", f"{application} shop.orders {RUN}"),
        *("--deploy-mode", "client", str(ROOT / "spark_apps" / f"{application}.py")),
        *("--conf", str(ROOT / "config" / "ringsync.yaml"), "--table", "shop.orders", "--run", RUN),
        *options,
    ]
    assert Path(task.application).is_file()


@pytest.mark.parametrize(
    ("dag_id", "task_id", "conf", "application", "options"),
    [
        ("commitlog_stage", "stage", {}, "commitlog_stage", ["--queue", "default"]),
        ("bucket_close", "close", {}, "bucket_close", []),
        ("scylla_log_stage", "stage", {}, "scylla_log_stage", []),
        ("out_of_sequence", "publish", {}, "out_of_sequence", []),
        ("schema_updater", "update", {}, "schema_update", []),
        ("replica_merge", "merge", {}, "replica_merge", []),
        ("replica_merge", "merge", {"table": "shop.orders"}, "replica_merge", ["--table=shop.orders"]),
        ("archive_reprocess", "reprocess", {}, "archive_reprocess", []),
        (
            *("archive_reprocess", "reprocess", {"since": "2026-11-21T04:00:00Z"}, "archive_reprocess"),
            ["--since=2026-11-21T04:00:00Z"],
        ),
    ],
)
def test_applications_of_the_sync_are_for_all_tables(
    bag: Any, dag_id: str, task_id: str, conf: dict[str, Any], application: str, options: list[str]
) -> None:
    from ringsync.orchestration import given

    task = rendered(bag, dag_id, task_id, conf)
    run = f"{RUN}.default" if dag_id == "commitlog_stage" else RUN
    expected = ["--conf", str(ROOT / "config" / "ringsync.yaml"), "--run", run, *options]
    assert given(task.application_args) == expected
    assert task.name == f"{application} {run}"
    assert task.report == f"reports/{application}/{run}.json"
    assert Path(task.application) == ROOT / "spark_apps" / f"{application}.py"


def test_a_scheduled_verification_is_of_what_is_due(bag: Any) -> None:
    """And its first one is not at once: when the sync is started, tables are only being bootstrapped."""
    from airflow.sdk import CronTriggerTimetable

    from ringsync.orchestration import given

    task = rendered(bag, "replica_verify", "verify", {})
    assert given(task.application_args)[2:] == ["--table", "*.*", "--run", RUN, "--due"]
    assert task.name == f"replica_verify *.* {RUN}"
    daily = CronTriggerTimetable("@daily", timezone="UTC", run_immediately=timedelta(0))
    assert (bag.dags["replica_verify"].schedule, bag.dags["replica_verify"].catchup) == (daily, False)


@pytest.mark.parametrize(
    ("task_id", "conf", "skipped"),
    [
        ("prepare", {"dry_run": True}, False),
        ("scan", {"dry_run": True}, True),
        ("scan", {"verify": False}, False),
        ("verify", {"verify": False}, True),
        ("verify", {}, False),
    ],
)
def test_what_is_left_out(bag: Any, task_id: str, conf: dict[str, Any], skipped: bool) -> None:
    from airflow.sdk.exceptions import AirflowSkipException

    task = rendered(bag, "bootstrap_table", task_id, {"table": "shop.orders", **conf})
    assert bool(task.skip_if) is skipped
    if skipped:
        with pytest.raises(AirflowSkipException, match=task.skip_if):
            task.execute({})


def test_a_backfill_is_for_its_interval(bag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringsync.orchestration import given
    from ringsync.storage.local import LocalStore

    document = {"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "lake"}}
    (tmp_path / "ringsync.yaml").write_text(json.dumps(document))
    monkeypatch.setenv("RINGSYNC_CONFIG", str(tmp_path / "ringsync.yaml"))

    def reprocess(run_type: str) -> Any:
        task = bag.dags["archive_reprocess"].get_task("reprocess").prepare_for_execution()
        task.render_template_fields(context(parameters(bag, "archive_reprocess", {}), run_type))
        return task

    told = given(reprocess("backfill").application_args)
    assert told[-2:] == ["--since=2026-11-20T03:00:00+00:00", "--until=2026-11-20T04:00:00+00:00"]
    # Else it is for all that waits, and no JVM is started if nothing does.
    for run_type in ("scheduled", "asset_triggered", "manual"):
        task = reprocess(run_type)
        assert not any("since" in argument for argument in given(task.application_args))
        assert task.skip_if == "no archived commit log waits"
    LocalStore(tmp_path / "lake").put("cdc/a/CommitLog-7-1.log.json", b"{}")
    assert reprocess("scheduled").skip_if == ""


NOTIFIER = """
from airflow.sdk import BaseNotifier

class Writes(BaseNotifier):
    template_fields = ("text",)

    def __init__(self, path, text):
        super().__init__()
        if not text:
            raise ValueError("no text")
        self.path, self.text = path, text

    def notify(self, context):
        with open(self.path, "a") as file:
            file.write(f"{context['run_id']}: {self.text}\\n")
"""


@pytest.fixture
def watching(bag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the task of the DAG ``alarms`` once, with notifiers."""
    monkeypatch.setenv("RINGSYNC_CONFIG", str(tmp_path / "ringsync.yaml"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ours_for_alarms.py").write_text(NOTIFIER)

    def run(notifiers: list[dict[str, Any]]) -> None:
        document = {
            **{"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "lake"}},
            **{"airflow": {"url": "http://127.0.0.1:9"}, "sync": {"run_s": 0.1}},
            "alarms": {"after_s": 0, "interval_s": 1, "notifiers": notifiers},
        }
        (tmp_path / "ringsync.yaml").write_text(json.dumps(document))
        task = rendered(bag, "alarms", "watch", {})
        task.execute({"run_id": RUN})

    return run


def test_any_notifier_of_airflow_is_told(watching: Any, tmp_path: Path) -> None:
    told = tmp_path / "told"
    watching(
        [
            {
                "name": "ours_for_alarms.Writes",
                "arguments": {"path": str(told), "text": "{{ alarm.kind }} {{ alarm.where }}"},
            }
        ]
    )
    assert f"{RUN}: airflow-away Airflow\n" in told.read_text()
    assert f"{RUN}: loop-silent bucket_close/close\n" in told.read_text()


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("nowhere.Writes", {}, "ModuleNotFoundError"),
        ("ours_for_alarms.Reads", {}, "ImportError"),
        ("ours_for_alarms.Writes", {"a": 1}, "TypeError"),
        ("ours_for_alarms.Writes", {"path": "p", "text": ""}, "ValueError"),
    ],
)
def test_a_notifier_that_cannot_be_made_is_named_and_the_others_are_told(
    watching: Any, tmp_path: Path, name: str, arguments: dict[str, Any], error: str
) -> None:
    good = {"name": "ours_for_alarms.Writes", "arguments": {"path": str(tmp_path / "told"), "text": "{{ alarm.kind }}"}}
    watching([{"name": name, "arguments": arguments}, good])
    assert f"{RUN}: airflow-away\n" in (tmp_path / "told").read_text()
    (problem,) = json.loads((tmp_path / "lake/status/alarms/alarms.json").read_text())["problems"]
    assert problem.startswith(f"notifier 0 (alarms.notifiers) cannot be made: {name} ({error}); ")


def test_steps_come_in_order(bag: Any) -> None:
    tasks = {task.task_id: task.downstream_task_ids for task in bag.dags["bootstrap_table"].tasks}
    assert tasks == {
        **{"prepare": {"snapshot_default", "scan"}, "snapshot_default": {"snapshots_ended"}},
        **{"snapshots_ended": {"scan"}, "scan": {"drain"}, "drain": {"verify"}, "verify": set()},
    }


def test_a_queue_takes_snapshots_only_with_mode_sstable(
    bag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.dag_processing.dagbag import BundleDagBag

    from ringsync.orchestration import given

    def reasons(bag: Any) -> list[str]:
        found = []
        for conf in ({}, {"mode": "sstable"}, {"mode": "sstable", "dry_run": True}, {"mode": "token_range"}):
            task = rendered(bag, "bootstrap_table", "snapshot_default", {"table": "shop.orders", **conf})
            assert given(task.arguments) == [
                *("--conf", task.arguments[1], "--table", "shop.orders", "--run", f"{RUN}.default"),
                *("--queue", "default", f"--bootstrap-run={RUN}"),
            ]
            found.append(task.skip_if)
        return found

    reading, dry = "the rows are selected from the cluster", "dry run: nothing is copied"
    assert reasons(bag) == [reading, "", dry, reading]
    document = {"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "lake"}}
    more = {"scan": {"mode": "sstable"}, "sync": {"queue_of_node": {"10.0.0.1": "rack-1"}}}
    (tmp_path / "ringsync.yaml").write_text(json.dumps({**document, **more}))
    monkeypatch.setenv("RINGSYNC_CONFIG", str(tmp_path / "ringsync.yaml"))
    other = BundleDagBag(DAGS / "bootstrap_table.py", bundle_path=DAGS, bundle_name="dags")
    assert reasons(other) == ["", "", dry, reading]
    assert other.dags["bootstrap_table"].get_task("snapshot_rack-1").queue == "rack-1"


def test_sixty_queues_are_little_work_for_airflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of ten minutes were 18,000 task instances a day, each of which is a row in seven tables (docs/deploy.md)."""
    from airflow.dag_processing.dagbag import BundleDagBag

    from ringsync.config import load_config

    nodes = {f"10.0.0.{node}": f"host-{node}" for node in range(60)}
    document = {"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "lake"}}
    (tmp_path / "ringsync.yaml").write_text(json.dumps({**document, "sync": {"queue_of_node": nodes}}))
    monkeypatch.setenv("RINGSYNC_CONFIG", str(tmp_path / "ringsync.yaml"))
    run_s = load_config(tmp_path / "ringsync.yaml").sync.run_s
    of_a_day: dict[str, float] = {}
    for dag in BundleDagBag(DAGS, bundle_path=DAGS, bundle_name="dags").dags.values():
        if dag.schedule == "@continuous":
            runs = 86_400 / run_s
        elif isinstance(dag.schedule, timedelta):
            runs = timedelta(days=1) / dag.schedule
        else:  # each hour, daily, or by hand
            runs = {"archive_reprocess": 24, "replica_verify": 1}.get(dag.dag_id, 0)
        of_a_day[dag.dag_id] = runs * len(dag.tasks)
    assert len([dag for dag in of_a_day if dag.startswith("commitlog_stage_host-")]) == 60
    assert sum(of_a_day.values()) < 1_800
    print(f"{sum(of_a_day.values()):,.0f} task instances a day")
