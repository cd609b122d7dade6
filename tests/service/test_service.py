"""``cdcservice start``, ``status`` and ``stop`` with a real Airflow and a real Cassandra."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringsync.airflow_client import WORKED_S, DagHealth
from ringsync.cli import main
from ringsync.config import load_config
from ringsync.ledger.alarms import Alarm, get_active
from ringsync.service.look import client_of
from ringsync.status import NODES, read_statuses
from ringsync.steps.loop import put_status
from ringsync.storage.port import ObjectStore
from ringsync.wiring import store_of
from servers.airflow import Airflow
from servers.cassandra import CassandraNode
from servers.ports import free_port
from tests.service.conftest import Collector

pytestmark = [pytest.mark.server, pytest.mark.airflow]

LOOPS = {
    *("commitlog_stage/default", "bucket_close/close", "out_of_sequence/queue", "schema_update/schema"),
    "commitlog_archive/default",
    "alarms/alarms",
}
SYNC = (
    "commitlog_stage, bucket_close, out_of_sequence, replica_merge, schema_updater, archive_reprocess, alarms, "
    "replica_verify, commitlog_archive"
)


@pytest.fixture(scope="module")
def document(cassandra: CassandraNode, airflow: Airflow) -> dict[str, Any]:
    return {
        "server_name": "test",
        "cassandra": {"contact_points": [cassandra.contact_point], "port": cassandra.port},
        "store": {"url": "../lake"},
        "airflow": {"url": airflow.url, "username": airflow.username},
    }


@pytest.fixture(autouse=True)
def password(airflow: Airflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGSYNC_AIRFLOW_PASSWORD", airflow.password)


def test_start_status_and_stop(
    project: Path,
    document: dict[str, Any],
    collector: Collector,
    session: Any,
    keyspace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session.execute(f"CREATE TABLE {keyspace}.orders (id int PRIMARY KEY, v text) WITH cdc = true")
    conf = project / "config" / "ringsync.yaml"
    conf.write_text(yaml.safe_dump(document))

    def status() -> tuple[int, dict[str, Any]]:
        code = main(["status", "--json", "--conf", str(conf)])
        return code, json.loads(capsys.readouterr().out)

    code, found = status()
    assert code == 1
    paused = "DAG bucket_close is paused: cdcservice start"
    assert {"kind": "dag-paused", "where": "bucket_close", "text": paused} in found["problems"]
    store = store_of(load_config(conf))
    put_status(store, "cluster", "nodes", {"down": {}, "down_until_ms": 7})
    archived = "cdc/n1/CommitLog-7-1.log.json"
    store.put(archived, b"{}")
    assert main(["start", "--conf", str(conf)]) == 0
    store.delete(archived)
    run = client_of(load_config(conf)).newest_run("archive_reprocess")
    assert run is not None
    assert run.run.startswith("start_"), "what waits is read at once, not when the next run of an archive has ended"
    assert NODES in read_statuses(store), "no loop writes it before the next plan"
    said = capsys.readouterr().out
    assert f"{keyspace}.orders" in said
    assert "cdc_raw can be listed, read and deleted from: 127.0.0.1:9042" in said
    assert "nodes that capture changes: 127.0.0.1" in said
    assert f"started: {SYNC};" in said

    found = until(lambda: healthy(status()), 240, status)
    assert set(found["loops"]) == {*LOOPS, NODES}
    short = ("replica_merge", "archive_reprocess", "replica_verify")
    assert {name: dag["run"]["state"] for name, dag in found["dags"].items() if name not in short} == {
        "commitlog_stage": "running",
        "bucket_close": "running",
        "out_of_sequence": "running",
        "schema_updater": "running",
        "commitlog_archive": "running",
        "alarms": "running",
    }
    assert main(["status", "--conf", str(conf)]) == 0
    assert "all is well" in capsys.readouterr().out
    assert main(["start", "--check", "--conf", str(conf)]) == 0
    assert "cdc_raw can be listed, read and deleted from: 127.0.0.1:9042" in capsys.readouterr().out
    assert main(["wait", "--timeout", "1", "--conf", str(conf)]) == 1
    assert "not all is published: the loops have not begun the next window interval" in capsys.readouterr().err
    assert main(["status", "--prometheus", "--conf", str(conf)]) == 0
    assert 'ringsync_status_timestamp_seconds{loop="bucket_close",queue="close"}' in capsys.readouterr().out

    client, asked = client_of(load_config(conf)), []
    request = client._request
    client._request = lambda *given: asked.append(given[1]) or request(*given)  # type: ignore[method-assign,func-returns-value]
    in_minutes = datetime.now(UTC) + timedelta(seconds=WORKED_S + 60)
    loops = ["commitlog_stage", "bucket_close", "out_of_sequence", "schema_updater", "commitlog_archive", "alarms"]
    for all_tasks in (False, True):
        for dag, health in client.health(loops, in_minutes, all_tasks=all_tasks).items():
            assert isinstance(health, DagHealth), health
            assert (health.paused, health.run and health.run.state, health.ended) == (False, "running", None), dag
    assert not [path for path in asked if any(path.startswith(f"dags/{dag}/") for dag in loops)], "all at once"

    # The task can ask Airflow, too: what was told while Airflow was starting is over.
    until(lambda: not away(store), 300, lambda: away(store))
    before = read_statuses(store)["commitlog_stage/default"]
    os.kill(before["pid"], signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: read_statuses(store)["commitlog_stage/default"]["pid"] != before["pid"], 180)
    seconds = time.monotonic() - killed

    assert main(["stop", "--conf", str(conf), "--timeout", "120"]) == 0, capsys.readouterr().err
    left = "commit logs are archived until cdcservice start. Still on: alarms, replica_verify, commitlog_archive"
    assert f"stopped; {left}" in capsys.readouterr().out
    code, found = status()
    assert code == 1
    stopped = "stopped: commit logs are archived until cdcservice start"
    assert found["problems"] == [{"kind": "sync-stopped", "where": "sync", "text": stopped}]
    assert found["dags"]["commitlog_archive"]["run"]["state"] == "running"
    print(f"a killed loop worked again after {seconds:.1f} s")
    tags = {"application": "commitlog_stage"}
    until(lambda: ("airflow.ringsync.commitlog_stage.rows", 17, tags) in collector.numbers, 120)
    node = {**tags, "node": "n1"}
    assert ("airflow.ringsync.commitlog_stage.backlog_bytes", 2.5, node) in collector.numbers


def test_start_names_everything_that_does_not_work(
    tmp_path: Path, document: dict[str, Any], airflow: Airflow, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = free_port()
    (tmp_path / "file").touch()
    broken = {
        "cassandra": {**document["cassandra"], "port": nowhere},
        "store": {"url": "file/lake"},
        "airflow": {**document["airflow"], "username": "nobody"},
    }
    (tmp_path / "ringsync.yaml").write_text(yaml.safe_dump({**document, **broken}))
    assert main(["start", "--conf", str(tmp_path / "ringsync.yaml")]) == 3
    said = capsys.readouterr()
    assert "nothing was started: cluster, store, airflow" in said.out
    assert f"cannot reach the cluster at 127.0.0.1:{nowhere} (Connection refused)" in said.err
    assert "file/lake" in said.err
    assert "refuses the login of user nobody" in said.err


def healthy(status: tuple[int, dict[str, Any]]) -> dict[str, Any] | None:
    code, found = status
    assert found["healthy"] is (code == 0)
    return found if code == 0 else None


def away(store: ObjectStore) -> list[Alarm]:
    return [alarm for alarm in get_active(store).alarms if alarm.kind == "airflow-away"]


def until(holds: Callable[[], Any], seconds: float, seen: Callable[[], Any] = str) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"it never came, but: {seen()}"
        time.sleep(0.5)
    return found
