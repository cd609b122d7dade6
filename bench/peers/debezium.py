"""Run Debezium's connector for Cassandra 5 (3.5.0.Beta1), which drains the logs of nodes into a real Kafka."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.measure import cpu_seconds, peak_mb

from servers import ServerError
from servers.cassandra import MODULE_FLAGS, CassandraNode
from servers.jars import fetch
from servers.java import find_java_home
from servers.kafka import KafkaBroker
from servers.ports import free_port
from servers.process import ServerProcess, stop_together

HEAP_MB = 1024
IDLE_SECONDS = 60
STOP_SECONDS = 15
TOPIC_PREFIX = "dbz"
MAIN_CLASS = "io.debezium.connector.cassandra.CassandraConnectorTask"
DRIVER = """datastax-java-driver {{ basic {{
  contact-points = ["{node}"], load-balancing-policy {{ local-datacenter = datacenter1 }}, request.timeout = 10 seconds
}} }}
"""


@dataclass(frozen=True)
class Drained:
    """The result of a run.

    :ivar events: number of events in Kafka
    :ivar first_seconds: from the start of the process to the first event that a consumer saw
    :ivar last_seconds: the same to the last event
    :ivar cpu_seconds: CPU time of the connector
    :ivar megabytes: size of the events' values
    :ivar peak_mb: largest resident memory of the connector
    """

    events: int
    first_seconds: float
    last_seconds: float
    cpu_seconds: float
    megabytes: float
    peak_mb: float


def drain(node: CassandraNode, broker: KafkaBroker, keyspace: str, table: str, rows: int, scratch: Path) -> Drained:
    """Start the connector, and wait until a consumer has seen an event for each row.

    The connector deletes the segments that it has read from the node's ``cdc_raw``.

    :param rows: number of rows in the node's commit log, each with a key of its own
    :param scratch: folder for the connector's files
    :raises ServerError: the connector fails, or events are missing 60 s after the last one
    """
    with events_counted(broker, topic_of(keyspace, table), rows) as counter:
        began = time.monotonic()
        with connectors([node], broker, scratch) as (process,):
            printed, _ = counter.communicate()
            used, peak = (0.0, 0.0) if process.ended else (cpu_seconds(process.pid), peak_mb(process.pid))
            found = counted(printed, rows, process)
    return Drained(found["events"], found["first"] - began, found["last"] - began, used, found["bytes"] / 1e6, peak)


def topic_of(keyspace: str, table: str) -> str:
    """Return the topic of a table's events."""
    return f"{TOPIC_PREFIX}.{keyspace}.{table}"


@contextmanager
def connectors(nodes: Sequence[CassandraNode], broker: KafkaBroker, scratch: Path) -> Iterator[list[ServerProcess]]:
    """Run a connector for each node, as its documentation says, until the block ends.

    :param scratch: folder for the connectors' files
    """
    processes: list[ServerProcess] = []
    try:
        for number, node in enumerate(nodes):
            folder = scratch / str(number)
            folder.mkdir()
            command = _command(node, broker, folder)
            processes.append(ServerProcess(command, folder / "debezium.log", _environment(), folder))
        yield processes
    finally:
        stop_together(processes, STOP_SECONDS)


def counted(printed: str, rows: int, process: ServerProcess) -> dict[str, Any]:
    """Read the figures that a consumer has printed.

    :param process: process whose log is shown if events are missing
    :raises ServerError: events are missing
    """
    found: dict[str, Any] = json.loads(printed.splitlines()[-1]) if printed.strip() else {"events": 0, "keys": 0}
    if found["events"] < rows or found["keys"] < rows:
        raise ServerError(
            f"{found['events']} events for {found['keys']} keys of {rows} came to Kafka.\n{process.log_end()}"
        )
    return found


def _environment() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin"}


@contextmanager
def events_counted(
    broker: KafkaBroker, topic: str, rows: int, idle_seconds: int = IDLE_SECONDS
) -> Iterator[subprocess.Popen[str]]:
    """Run a consumer that makes the topic and waits for events, until the block ends.

    :param idle_seconds: seconds that it waits for the next event
    """
    program = str(Path(__file__).with_name("CountEvents.java"))
    java = str(find_java_home() / "bin" / "java")
    counter = subprocess.Popen(
        [java, "-cp", broker.class_path, program, broker.bootstrap, topic, str(rows), str(idle_seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        if counter.stdout is None or counter.stdout.readline().strip() != "ready":
            raise ServerError(f"The consumer of {topic} does not start.")
        yield counter
    finally:
        counter.kill()
        counter.wait()


def _command(node: CassandraNode, broker: KafkaBroker, scratch: Path) -> list[str]:
    jars = fetch("debezium-cassandra-5", node.cache).resolve()
    for name in ("offsets", "relocated"):
        (scratch / name).mkdir()
    (scratch / "application.conf").write_text(DRIVER.format(node=f"{node.contact_point}:{node.port}"))
    settings = {
        "topic.prefix": TOPIC_PREFIX,
        "kafka.producer.bootstrap.servers": broker.bootstrap,
        "kafka.producer.acks": "all",
        "key.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "cassandra.config": node.folder / "cassandra.yaml",
        "cassandra.driver.config.file": scratch / "application.conf",
        "cassandra.cluster.name": node.settings.cluster_name,
        "offset.backing.store.dir": scratch / "offsets",
        "commit.log.relocation.dir": scratch / "relocated",
        # Without this, the connector reads the end of the log only when its segment is full: never, here.
        "commit.log.real.time.processing.enabled": "true",
        "commit.log.marked.complete.poll.interval.ms": 500,
        "commit.log.relocation.dir.poll.interval.ms": 1000,
        "cdc.dir.poll.interval.ms": 1000,
        "http.port": free_port(),
        "snapshot.mode": "NEVER",
    }
    (scratch / "debezium.properties").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return [
        *(str(find_java_home() / "bin" / "java"), *MODULE_FLAGS, "-XX:+UseSerialGC", "-Xms256m", f"-Xmx{HEAP_MB}m"),
        *("-Djdk.attach.allowAttachSelf=true", f"-Dcassandra.storagedir={scratch}"),
        *(f"-Dlogback.configurationFile={node.folder / 'logback.xml'}", "-cp", f"{jars}/*"),
        *(MAIN_CLASS, str(scratch / "debezium.properties")),
    ]
