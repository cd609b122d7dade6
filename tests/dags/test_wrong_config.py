"""The archive and the alarms need only what they use: not a right ``ringsync.yaml``, not the connections of others."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringsync.status import read_statuses
from ringsync.storage.local import LocalStore
from tests.dags.tasks import DAGS, RUN, rendered

DOCUMENT = {
    "server_name": "s",
    "cassandra": {
        "contact_points": ["127.0.0.1"],
        "port": 9,
        "username": "u",
        "password": {"airflow_connection": "cassandra_password"},
        "connect_timeout_s": 0.5,
    },
    "store": {"url": "lake"},
    "airflow": {"url": "http://127.0.0.1:9", "password": {"airflow_connection": "airflow_password"}},
    "alarms": {"after_s": 0, "interval_s": 1},
    "metrics": {"prometheus_file": "ringsync.prom"},
    "sync": {"run_s": 1.5, "queue_of_node": {"10.0.0.2": "rack-2"}},
}
TYPO = {"kafca": None}
KAFKA = {
    "kafka": {
        "bootstrap_servers": ["k:9092"],
        "sasl_mechanism": "PLAIN",
        "username": "u",
        "password": {"airflow_connection": "kafka_password"},
        "tls": {},
    }
}


def parsed() -> Any:
    from airflow.dag_processing.dagbag import BundleDagBag

    return BundleDagBag(DAGS, bundle_path=DAGS, bundle_name="dags")


class Installation:
    """A home of Airflow, which has no connection, and a configuration."""

    def __init__(self, folder: Path) -> None:
        self.conf, self.store = folder / "ringsync.yaml", LocalStore(folder / "lake")
        self.prometheus = folder / "ringsync.prom"

    def write(self, *more: dict[str, Any]) -> None:
        document = DOCUMENT
        for sections in more:
            document = {**document, **sections}
        self.conf.write_text(yaml.safe_dump(document))
        os.utime(self.conf, (0, 0))  # nobody is still writing it

    def task(self, bag: Any, dag: str, task: str) -> Any:
        return rendered(bag, dag, task, {})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    (tmp_path / "airflow").mkdir()
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    monkeypatch.setenv("RINGSYNC_CONFIG", str(tmp_path / "ringsync.yaml"))
    monkeypatch.setattr("ringsync.orchestration.LOOP_REST_S", 0.0)
    found = Installation(tmp_path)
    found.write()
    return found


@pytest.fixture
def no_connections(here: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed()
    from airflow.sdk.exceptions import AirflowNotFoundException

    class Connection:
        @staticmethod
        def get(name: str) -> Any:
            raise AirflowNotFoundException(f"The conn_id `{name}` isn't defined")

    monkeypatch.setattr(sys.modules["ringsync_tasks"], "Connection", Connection)


def test_a_typo_takes_no_dag_out_of_airflow(here: Installation) -> None:
    good = parsed()
    assert good.import_errors == {}
    here.write(TYPO)
    bag = parsed()
    assert (bag.import_errors, set(bag.dags)) == ({}, set(good.dags))
    assert {"commitlog_archive", "commitlog_archive_rack-2", "archive_reprocess", "alarms"} <= set(bag.dags)
    here.write({"sync": {"run_s": 1.5}})
    assert "commitlog_archive_rack-2" not in parsed().dags


def test_a_configuration_that_never_was_right_is_an_import_error(here: Installation) -> None:
    here.write(TYPO)
    errors = parsed().import_errors
    assert {"commitlog_archive.py", "commitlog_stage.py"} <= {Path(file).name for file in errors}
    assert all("kafca: unknown key; did you mean kafka?" in text for text in errors.values())


@pytest.mark.parametrize("more", [TYPO, KAFKA], ids=["typo", "kafka"])
def test_the_alarms_go_on_and_say_what_is_wrong(
    here: Installation, no_connections: None, more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    here.write(more)
    here.task(parsed(), "alarms", "watch").execute({"run_id": RUN})
    wrong = read_statuses(here.store)["alarms/alarms"]["config_error"]
    assert ("ringsync.yaml: kafca: unknown key; did you mean kafka?" in wrong) == (more is TYPO)
    kinds = {alarm["kind"] for alarm in json.loads(here.store.get("alarms/active.json"))["alarms"]}
    assert ("config-wrong" in kinds) == (more is TYPO)
    assert "airflow-away" in kinds, "its password cannot be had, and that alone is missing"
    assert 'ringsync_alarm{kind="airflow-away"' in here.prometheus.read_text()
    said = capsys.readouterr().out
    assert "connection airflow_password: " in said
    assert "kafka_password" not in said
    assert "cassandra_password" not in said


@pytest.mark.parametrize("more", [TYPO, KAFKA], ids=["typo", "kafka"])
def test_the_archive_goes_on_and_says_what_is_wrong(
    here: Installation, no_connections: None, more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot ask the cluster either, and knows no node from before: that is a problem, not "all is well"."""
    here.write(more)
    here.task(parsed(), "commitlog_archive", "archive").execute({"run_id": RUN})
    told = read_statuses(here.store)["commitlog_archive/default"]
    assert ("ringsync.yaml: kafca: unknown key; did you mean kafka?" in told["config_error"]) == (more is TYPO)
    (problem,) = told["problems"]
    assert problem.startswith("no node is known yet, so nobody watches cdc_raw: cassandra.password: ")
    assert "kafka_password" not in capsys.readouterr().out


def test_all_others_need_the_right_file_and_their_connections(here: Installation, no_connections: None) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    bag = parsed()
    for dag, task in (("bucket_close", "close"), ("out_of_sequence", "publish")):
        here.write(TYPO)
        with pytest.raises(AirflowFailException, match=r"configuration: .*ringsync\.yaml: kafca: unknown key"):
            sys.modules["ringsync_tasks"].prepare_environment(here.task(bag, dag, task).spark.secrets)
        here.write(KAFKA)
        with pytest.raises(AirflowFailException, match=r"cassandra_password.* isn't defined: create it in Airflow"):
            sys.modules["ringsync_tasks"].prepare_environment(here.task(bag, dag, task).spark.secrets)


def test_a_loop_that_fails_for_good_keeps_its_run_open_for_a_while(
    here: Installation, no_connections: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow begins the next run of a continuous DAG at once: with exit code 3 there were thousands a day."""
    from airflow.sdk.exceptions import AirflowFailException

    task, slept = here.task(parsed(), "commitlog_archive", "archive"), list[float]()
    monkeypatch.setattr("ringsync.orchestration.LOOP_REST_S", 30.0)
    monkeypatch.setattr(sys.modules["ringsync_bounds"].time, "sleep", slept.append)
    (tmp_path / "application.py").write_text("import sys\nprint('ringsync: report: {}')\nsys.exit(3)\n")
    task.path = str(tmp_path / "application.py")
    with pytest.raises(AirflowFailException):
        task.execute({})
    assert slept == [30.0]
