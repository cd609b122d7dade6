"""A host whose worker is away for long: nobody else waits for it, it is named, and it catches up.

Airflow reaches the hosts of the database by edge workers only, each with its own queue, folder and environment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.airflow_client import AirflowClient, AirflowError
from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.ledger.alarms import Alarm, history, raised_now
from ringsync.service.published import wait_until_published
from ringsync.storage.port import ObjectStore
from ringsync.wiring import store_of
from servers.cluster import connected, creating, three_nodes
from servers.edge import EdgeWorker, edge_airflow
from servers.jars import fetch
from servers.ports import free_port
from servers.spark import lean_java_options
from tests.chaos.applications import PROJECT
from tests.chaos.under_airflow import until, writing
from tests.sync.judge import judge, stream_messages
from tests.sync.pipeline import LOG_SYNC_MS, write_conf
from tests.sync.scenario import TABLES, create_schema, statements

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

WINDOW_MS = 10_000
"""A sixth of the default: ten minutes are an hour."""
BEFORE_S, AWAY_S, AFTER_S = 120, 600, 120
NOTICED_S = 190
"""So long it takes until the others agree without it: 40 s until its loop is silent, two minutes, and some cycles."""
SILENT = ("archive-silent", "commitlog_stage/two")
"""The alarm: without the archive nobody else empties ``cdc_raw`` of its node."""
DAGS = (
    *("commitlog_stage", "commitlog_stage_one", "commitlog_stage_two", "bucket_close", "out_of_sequence"),
    *("schema_updater", "alarms"),
)


def lags_s(store: ObjectStore, session: Any, since_s: float, until_s: float) -> list[float]:
    """How long after it was written each change became a message, s, of what was written in a time."""
    found = []
    for name in TABLES:
        for message in stream_messages(store, read_table(session, *name.split("."))):
            written_s = message["value"]["source"]["ts_us"] / 1e6
            if since_s <= written_s < until_s:
                found.append(message["value"]["ts_ms"] / 1000 - written_s)
    return found


def told(lags: Sequence[float]) -> str:
    return (
        f"{len(lags)} messages: p50 {statistics.median(lags):.1f} s, p95 {statistics.quantiles(lags, n=20)[18]:.1f} s"
    )


def is_named(alarms: Sequence[Alarm]) -> bool:
    return any((alarm.kind, alarm.where) == SILENT for alarm in alarms)


def switch_on(client: AirflowClient, dag: str) -> bool:
    try:
        client.set_paused(dag, False)
    except AirflowError:  # Airflow does not know it yet
        return False
    return True


def test_a_host_that_is_patched_for_an_hour(tmp_path: Path, cache: Path) -> None:
    jars = [str(jar) for jar in sorted(fetch("delta", cache).glob("*.jar"))]
    with (
        three_nodes(tmp_path / "nodes", cache, 191) as nodes,
        connected(nodes, ConsistencyLevel.ALL) as session,
        ExitStack() as servers,
    ):
        with creating(nodes[0]) as creator:
            create_schema(creator)
        port = free_port()
        (tmp_path / "conf").mkdir()
        queues = dict(zip((node.contact_point for node in nodes), ("one", "two", "one"), strict=True))
        conf = write_conf(
            tmp_path / "conf",
            nodes,
            window_ms=WINDOW_MS,
            store={"url": str(tmp_path / "lake")},
            sync={"queue_of_node": queues, "run_s": 3600},
            airflow={"url": f"http://127.0.0.1:{port}"},
            alarms={"after_s": 30, "interval_s": 5},
            archive={"policy": "off"},
        )
        lean = lean_java_options(cache, [Path(jar) for jar in jars])
        of_all = {"RINGSYNC_CONFIG": str(conf), "PYTHONPATH": f"{PROJECT}/include"}
        airflow = edge_airflow(tmp_path / "airflow", port, PROJECT / "dags", environment=of_all)
        servers.enter_context(airflow)
        own = {"RINGSYNC_SPARK_JARS": ",".join(jars), "JDK_JAVA_OPTIONS": lean}
        workers = {
            queue: EdgeWorker(tmp_path / f"host-{queue}", airflow, [queue], PROJECT / "dags", conf, told, 6)
            for queue, told in (
                ("default", {**own, "RINGSYNC_AIRFLOW_PASSWORD": airflow.password}),
                ("one", own),
                ("two", own),
            )
        }
        for worker in workers.values():
            servers.enter_context(worker)
        client = AirflowClient(airflow.url, airflow.username, airflow.password)
        for dag in DAGS:
            until(partial(switch_on, client, dag))
        store = store_of(load_config(conf))
        with writing(session, statements(41, 100_000)):
            until(lambda: all(store.stat(f"status/commitlog_stage/{queue}.json") for queue in ("one", "two")))
            until(lambda: store.stat("status/bucket_close/close.json"))
            time.sleep(60)
            began = time.time()
            time.sleep(BEFORE_S)
            left = time.time()
            workers["two"].kill()
            until(lambda: is_named(raised_now(store)), 180)
            named_s = time.time() - left
            time.sleep(left + AWAY_S - time.time())
            assert is_named(raised_now(store))
            back = time.time()
            workers["two"].start()
            until(lambda: not is_named(raised_now(store)), 300)
            cleared_s = time.time() - back
            time.sleep(AFTER_S)
            ended = time.time()
        written_until_ms = int(time.time() * 1000) + LOG_SYNC_MS
        published = wait_until_published(store, load_config(conf).sync, written_until_ms, 300, tell=lambda _: None)
        assert not published.left, published.left
        for dag in DAGS:
            client.set_paused(dag, True)
        found = {
            "before": lags_s(store, session, began, left - 10),
            "away": lags_s(store, session, left + NOTICED_S, back - 10),
            "back": lags_s(store, session, back, ended),
        }
        print({name: told(lags) for name, lags in found.items()}, f"named {named_s:.0f} s, cleared {cleared_s:.0f} s")
        rows = judge(store, session, TABLES, (), load_config(conf).sync)
    assert min(rows.values()) > 5
    usual_s = statistics.median(found["before"])
    for name in ("away", "back"):
        assert statistics.median(found[name]) < usual_s + WINDOW_MS / 1000, (name, told(found[name]))
    raised = [alarm for alarm in history(store, int(left * 1000)) if (alarm.raised_ms or 0) > left * 1000]
    assert {(alarm.kind, alarm.where) for alarm in raised if "silent" in alarm.kind} == {SILENT}
    # Of no table while the host is away, but for the minutes until the others have noticed.
    noticed_ms = int((left + NOTICED_S + 60) * 1000)
    lagging = [alarm for alarm in raised if alarm.kind == "table-lagging"]
    assert [alarm.text for alarm in lagging if (alarm.cleared_ms or ended * 1000) > noticed_ms] == []
