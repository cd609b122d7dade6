"""The sync under Airflow, with all that can be killed in it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ringsync.airflow_client import AirflowClient, AirflowError
from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, data_topic
from ringsync.wiring import store_of
from servers.airflow import Airflow
from servers.cassandra import CassandraNode
from servers.jars import fetch
from servers.kafka import BrokerSettings, KafkaBroker
from servers.ports import free_port
from servers.spark import lean_java_options
from tests.chaos.applications import PROJECT
from tests.chaos.processes import command_of, parent_of, running
from tests.kafka_reading import avro_of, kafka_messages, read_topic
from tests.streams.outbox import published
from tests.sync.evolving import in_background
from tests.sync.pipeline import LOOPS, write_conf
from tests.sync.scenario import TABLES, modes, write

BOOTSTRAPPED = ("workload.single", "workload.collections")
SYNC_DAGS = ("commitlog_stage", "bucket_close", "out_of_sequence", "replica_merge", "schema_updater")
PATIENCE_S = 300
RUN_S = 180
"""Runs of the loops end and begin again in between, too."""


@dataclass
class Sync:
    """Everything that can be killed."""

    conf: Path
    nodes: list[CassandraNode]
    broker: KafkaBroker | None
    airflow: Airflow
    client: AirflowClient
    store: ObjectStore
    moments: random.Random
    kills: dict[str, int] = field(default_factory=dict)

    def kill(self, victim: str) -> None:
        """Kill one of a kind, and start again what nobody else does."""
        match victim:
            case "node":
                node = self.moments.choice(self.nodes)
                node.kill()
                time.sleep(self.moments.uniform(1, 15))
                node.start()
            case "broker":
                assert self.broker
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


def started(
    folder: Path,
    cache: Path,
    nodes: Sequence[CassandraNode],
    servers: ExitStack,
    moments: random.Random,
    *,
    dags: Sequence[str] = SYNC_DAGS,
    jars: Sequence[str] = ("delta",),
    modules: Mapping[str, str] = {},
    with_kafka: bool = True,
    heartbeat_s: int = 20,
    **sections: Any,
) -> Sync:
    """The sync under Airflow.

    :param servers: ends what is started here
    :param dags: which to switch on
    :param jars: sets of jars that Spark needs
    :param modules: source of Python modules that tasks can import, by name
    :param heartbeat_s: so long a task may be silent until Airflow takes it for dead
    :param sections: of the configuration
    """
    broker = KafkaBroker(folder / "kafka", BrokerSettings().on_free_ports(), cache) if with_kafka else None
    if broker:
        sections["kafka"] = {"bootstrap_servers": [servers.enter_context(broker).bootstrap]}
    delta = sorted(fetch("delta", cache).glob("*.jar"))
    wanted = [jar for name in jars for jar in sorted(fetch(name, cache).glob("*.jar"))]
    followed = {"tables": modes(0), "run_s": RUN_S, **sections.pop("sync", {})}
    port = free_port()
    conf = write_conf(folder, nodes, sync=followed, airflow={"url": f"http://127.0.0.1:{port}"}, **sections)
    ours = folder / "modules"
    ours.mkdir()
    for name, source in modules.items():
        (ours / f"{name}.py").write_text(source)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(PROJECT / "include"), str(ours)]),
        "RINGSYNC_CONFIG": str(conf),
        "RINGSYNC_SPARK_JARS": ",".join(map(str, wanted)),
        "JDK_JAVA_OPTIONS": lean_java_options(cache, delta),
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": str(heartbeat_s),
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    }
    airflow = servers.enter_context(
        Airflow(folder / "airflow", port, PROJECT / "dags", environment=environment, parallelism=10)
    )
    client = AirflowClient(airflow.url, airflow.username, airflow.password)
    sync = Sync(conf, list(nodes), broker, airflow, client, store_of(load_config(conf)), moments)
    for dag in dags:
        until(partial(sync.unpaused, dag))
    return sync


@contextlib.contextmanager
def writing(session: Any, workload: Iterator[str]) -> Iterator[None]:
    """Execute statements while the block lasts."""
    ended = threading.Event()
    with in_background(partial(_write_on, session, workload, ended)):
        try:
            yield
        finally:
            ended.set()


def judge_kafka(sync: Sync, session: Any, tables: Sequence[str] = TABLES) -> None:
    """Each message of the file streams is in Kafka, the same under the same event id."""
    assert sync.broker
    for name in tables:
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
