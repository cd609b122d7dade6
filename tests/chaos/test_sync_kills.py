"""The oracle of the sync under Airflow, while every kind of process is killed, more than thirty times in one run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel

from ringsync.airflow_client import AirflowClient, AirflowError
from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, data_topic
from ringsync.wiring import store_of
from servers.airflow import Airflow
from servers.cassandra import CassandraNode
from servers.cluster import connected, three_nodes
from servers.jars import fetch
from servers.kafka import BrokerSettings, KafkaBroker
from servers.ports import free_port
from servers.spark import lean_java_options
from tests.chaos.applications import PROJECT
from tests.chaos.processes import command_of, parent_of, running
from tests.kafka_reading import avro_of, kafka_messages, read_topic
from tests.streams.outbox import published
from tests.sync.judge import judge
from tests.sync.pipeline import LOOPS, wait_until_drained, write_conf
from tests.sync.scenario import TABLES, create_schema, modes, statements, write

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark, pytest.mark.airflow]

VICTIMS = {
    **{"commitlog_stage": 6, "bucket_close": 6, "out_of_sequence": 3, "replica_merge": 2, "schema_update": 3},
    **{"scheduler": 3, "worker": 3, "node": 3, "broker": 3},
}
"""How often each is killed, after one kill of each step of a bootstrap."""
BOOTSTRAP_STEPS = ("bootstrap_prepare", "bootstrap_scan", "bootstrap_drain")
BOOTSTRAPPED = ("workload.single", "workload.collections")
DAGS = ("commitlog_sync", "out_of_sequence", "replica_merge", "schema_updater")
SEED = 20261121
PATIENCE_S = 300
RUN_S = 180
"""Runs of the loops end and begin again in between, too."""


@dataclass
class Sync:
    """Everything that can be killed."""

    conf: Path
    nodes: list[CassandraNode]
    broker: KafkaBroker
    airflow: Airflow
    client: AirflowClient
    store: ObjectStore
    kills: dict[str, int] = field(default_factory=dict)
    moments: random.Random = field(default_factory=lambda: random.Random(SEED))

    def kill(self, victim: str) -> None:
        """Kill one of a kind, and start again what nobody else does."""
        match victim:
            case "node":
                node = self.moments.choice(self.nodes)
                node.kill()
                time.sleep(self.moments.uniform(1, 15))
                node.start()
            case "broker":
                self.broker.kill()
                time.sleep(self.moments.uniform(1, 15))
                self.broker.start()
            case "scheduler":
                os.kill(self.airflow.pids["scheduler"], signal.SIGKILL)
                time.sleep(self.moments.uniform(1, 10))
                self.airflow.revive("scheduler")
            case "worker":
                os.kill(until(self.worker), signal.SIGKILL)
            case "replica_merge":
                if not running(f"{victim}.py", str(self.conf)):  # one at a time, and one may be running by schedule
                    until(lambda: self.trigger(victim, f"merge-{time.time():.0f}", {"table": BOOTSTRAPPED[0]}))
                self.kill_driver(victim)
            case _:
                self.kill_driver(victim)
        self.kills[victim] = self.kills.get(victim, 0) + 1

    def kill_driver(self, application: str, run: str = "") -> None:
        """Kill the JVM of an application or its Python, whichever chance has it, at any moment of its life."""
        pids = until(lambda: running(f"{application}.py", str(self.conf), run))
        time.sleep(self.moments.uniform(0, 8))
        pids = running(f"{application}.py", str(self.conf), run) or pids
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(self.moments.choice(pids), signal.SIGKILL)

    def worker(self) -> int | None:
        """A process of Airflow's executor that has a loop as its task."""
        loops = [pid for name in LOOPS for pid in running(f"{name}.py", str(self.conf))]
        self.moments.shuffle(loops)
        for pid in loops:
            while pid > 1:
                if "LocalExecutor" in command_of(pid):
                    return pid
                pid = parent_of(pid)
        return None

    def trigger(self, dag: str, run: str, parameters: dict[str, Any]) -> bool:
        """Trigger a DAG; False: Airflow does not answer just now."""
        try:
            self.client.trigger(dag, run, parameters)
        except AirflowError as error:
            print(f"not triggered yet: {error}", flush=True)
            return False
        return True

    def succeeded(self, dag: str, run: str) -> bool:
        """Whether a run has ended well; False: it has not ended."""
        state = self.client.state(dag, run)
        assert not state.finished or state.state == "success", state
        return state.finished

    def unpaused(self, dag: str) -> bool:
        """Let a DAG run; False: Airflow does not know it yet."""
        try:
            self.client.set_paused(dag, False)
        except AirflowError:
            return False
        return True


def test_nothing_is_lost_or_doubled_by_thirty_kills(tmp_path: Path, cache: Path) -> None:
    """A random workload is written at QUORUM meanwhile; two tables are bootstrapped."""
    with ExitStack() as servers:
        nodes = servers.enter_context(three_nodes(tmp_path / "nodes", cache, 81))
        session = servers.enter_context(connected(nodes, ConsistencyLevel.QUORUM))
        create_schema(session)
        sync = started(tmp_path, cache, nodes, servers)
        workload = statements(SEED, 20_000)
        ended = threading.Event()
        writing = threading.Thread(target=_write_on, args=(session, workload, ended))
        writing.start()
        try:
            bootstrap_under_fire(sync)
            victims = [name for name, count in VICTIMS.items() for _ in range(count)]
            sync.moments.shuffle(victims)
            for number, victim in enumerate(victims):
                time.sleep(sync.moments.uniform(1, 12))
                print(f"{time.strftime('%H:%M:%S')} kill {number}: {victim}", flush=True)
                sync.kill(victim)
        finally:
            ended.set()
            writing.join()
        assert sum(sync.kills.values()) >= 30
        wait_until_drained(sync.store, 600)
        with connected(nodes, ConsistencyLevel.ALL) as reading:
            rows = judge(sync.store, reading, TABLES, BOOTSTRAPPED, load_config(sync.conf).sync)
            judge_kafka(sync, reading)
        print(f"killed: {sync.kills}; rows: {rows}")
    assert min(rows.values()) > 5


def started(folder: Path, cache: Path, nodes: list[CassandraNode], servers: ExitStack) -> Sync:
    """The sync under Airflow, with Kafka."""
    broker = servers.enter_context(KafkaBroker(folder / "kafka", BrokerSettings().on_free_ports(), cache))
    jars = sorted(fetch("delta", cache).glob("*.jar"))
    conf = write_conf(
        folder,
        nodes,
        sync={"tables": modes(0), "run_s": RUN_S},
        kafka={"bootstrap_servers": [broker.bootstrap]},
    )
    environment = {
        "RINGSYNC_CONFIG": str(conf),
        "RINGSYNC_SPARK_JARS": ",".join(map(str, jars)),
        "JDK_JAVA_OPTIONS": lean_java_options(cache, jars),
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    }
    airflow = servers.enter_context(
        Airflow(folder / "airflow", free_port(), PROJECT / "dags", environment=environment, parallelism=8)
    )
    client = AirflowClient(airflow.url, airflow.username, airflow.password)
    sync = Sync(conf, nodes, broker, airflow, client, store_of(load_config(conf)))
    for dag in DAGS:
        until(partial(sync.unpaused, dag))
    return sync


def bootstrap_under_fire(sync: Sync) -> None:
    """Bootstrap the tables at once, and kill each step of the first one."""
    for name in BOOTSTRAPPED:
        until(partial(sync.trigger, "bootstrap_table", name, {"table": name, "verify": False}))
    for step in BOOTSTRAP_STEPS:
        sync.kill_driver(step, BOOTSTRAPPED[0])
        sync.kills[step] = 1
    for name in BOOTSTRAPPED:
        until(partial(sync.succeeded, "bootstrap_table", name), 600)


def judge_kafka(sync: Sync, session: Any) -> None:
    """Each message of the file streams is in Kafka, the same under the same event id."""
    for name in TABLES:
        stream = FileStream(sync.store, data_topic("test", read_table(session, *name.split("."))))
        until(partial(_is_relayed, stream, published(stream), sync.broker.bootstrap))


def _is_relayed(stream: FileStream, wanted: dict[str, Any], bootstrap: str) -> bool:
    records = read_topic(bootstrap, stream.topic)
    found = kafka_messages(records, avro_of(stream, 0), avro_of(stream, 1))
    # As text: NaN is not equal to itself.
    return all(repr(found.get(event_id)) == repr(message) for event_id, message in wanted.items())


def until(found: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """Wait for something that is true, and give it."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, f"not after {seconds} s"
        time.sleep(0.5)
    return result


def _write_on(session: Any, workload: Iterator[str], ended: threading.Event) -> None:
    while not ended.is_set():
        write(session, workload, 5, give_up_s=120)
        time.sleep(0.3)
