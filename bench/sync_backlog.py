"""Run the scenario ``backlog`` of bench/sync.py in a process of its own: ``python bench/sync_backlog.py ORDER``.

ORDER is JSON. For one node: ``rows`` of its backlog, and ``ours``, names of OURS that drain it. For three nodes:
``facts``, the number of changes of each kind (sync_facts.py), and ``rate`` and ``seconds`` of writes. Also ``scratch``,
and ``alone``: the process has a network of its own; if not, there is no Debezium. It prints a line of JSON. Every
contender gets a copy of the same logs in the nodes' ``cdc_raw``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import numpy as np
import sync_facts as facts
from cassandra import ConsistencyLevel
from peers import debezium
from peers.events import make_topics, read_events, wait_until_quiet
from peers.log import KEYSPACE, SETTINGS, create_tables
from peers.log import write as write_log
from peers.network import switch_loopback_on
from sync_cost import Watch, wait_for
from sync_lag import write as write_steadily
from sync_loops import CLOSE, STAGE, Loops, write_conf
from sync_writer import KEYSPACE as SHOP
from sync_writer import TABLES, creation

from servers.cassandra import CassandraNode
from servers.cluster import connected, three_nodes
from servers.kafka import BrokerSettings, KafkaBroker

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"
WINDOW_MS = 60_000
WINDOW_COUNT = 100
"""Number of open windows. The loops already run when the logs appear: with the default of five, older rows are late."""
SYNC_SECONDS = 3.0
FILLER_BYTES = 400_000
PRIMING_ROWS = 500
IDLE_SECONDS = 300
"""Seconds that a consumer waits for our first event: the loops have to start on a busy machine."""
FIRST_ADDRESS = 95
OURS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none, JSON": ({"after_image": "none"}, {"serialisation": "json"}),
    "none, as Debezium": (
        {"after_image": "none", "source_query": False},
        {"serialisation": "json", "json_schemas": False},
    ),
    "source": ({"after_image": "source"}, {}),
    "none": ({"after_image": "none"}, {}),
    "none, no query": ({"after_image": "none", "source_query": False}, {}),
}
"""Our variants, in the order in which they drain: settings of the sections sync and kafka. Debezium's events are JSON
without schemas, and have no query."""
WATCH_SECONDS = 10.0
"""Seconds between two looks at our memory. Debezium's is read once, at its end."""


def main() -> None:
    """Execute the order."""
    order = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception stops the servers
    if order["alone"]:
        switch_loopback_on()
    scratch = Path(order["scratch"])
    result: dict[str, Any] = {}
    if order["rows"]:
        result["rates"] = rates(order, scratch / "one")
    if order["facts"]:
        result["three"] = three(order, scratch / "three")
    print(json.dumps(result))


def say(text: str) -> None:
    """Print progress to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class SavedLogs:
    """A copy of the complete segments in the nodes' ``cdc_raw``: contenders remove the segments that they have read.

    :param folder: folder for hard links of the segments, on the nodes' file system
    """

    def __init__(self, nodes: Sequence[CassandraNode], folder: Path) -> None:
        self._saved: list[tuple[Path, Path]] = []
        for number, node in enumerate(nodes):
            copy = folder / str(number)
            copy.mkdir(parents=True)
            for index in sorted(node.cdc_raw.glob("*_cdc.idx")):
                if b"COMPLETED" in index.read_bytes():
                    # Segments are restored before their indexes: an index announces its segment.
                    for file in (index.with_name(index.name.replace("_cdc.idx", ".log")), index):
                        os.link(file, copy / file.name)
                        self._saved.append((copy / file.name, file))

    def take_away(self) -> None:
        """Remove all these segments from ``cdc_raw``."""
        for _, file in self._saved:
            file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Put missing segments back."""
        for copy, file in self._saved:
            if not file.exists():
                os.link(copy, file)


def fill_segments(nodes: Sequence[CassandraNode], segment_mib: int) -> None:
    """Write to a table without cdc until every node begins a new segment: all other changes are in complete ones."""
    with connected(nodes, ConsistencyLevel.ALL, 60) as session:
        replication = f"{{'class': 'SimpleStrategy', 'replication_factor': {len(nodes)}}}"
        session.execute(f"CREATE KEYSPACE filler WITH replication = {replication}")
        session.execute("CREATE TABLE filler.blobs (id int PRIMARY KEY, data blob)")
        insert = session.prepare("INSERT INTO filler.blobs (id, data) VALUES (?, ?)")
        for number in range(segment_mib * 3 + 3):
            session.execute(insert, (number, bytes(FILLER_BYTES)))


def wait_until_over() -> None:
    """Wait until the logs are synced and the window interval of the last write is over: then the rows are a backlog."""
    time.sleep(SYNC_SECONDS)
    left = WINDOW_MS / 1000 - time.time() % (WINDOW_MS / 1000)
    time.sleep(left + 0.5)


def rates(order: dict[str, Any], scratch: Path) -> dict[str, dict[str, float]]:
    """Measure the speed of each contender: one node, one replica, a log that is not read yet."""
    settings = replace(SETTINGS, segment_mib=order["segment_mib"], cdc_total_mib=8192).on_free_ports()
    found: dict[str, dict[str, float]] = {}
    with CassandraNode(scratch / "node", settings, CACHE) as node:
        create_tables(node)
        write_log(node, "uniform", order["rows"])
        fill_segments([node], order["segment_mib"])
        say(f"{order['rows']:,} rows are written to one node")
        wait_until_over()
        logs = SavedLogs([node], scratch / "saved")
        broker_settings = BrokerSettings(heap_mb=512, short_lived=False).on_free_ports()
        with KafkaBroker(scratch / "kafka", broker_settings, CACHE) as broker:
            # The first variant runs twice, and only its second run counts: the broker has just started.
            for number, name in enumerate([order["ours"][0], *order["ours"]]):
                logs.take_away()
                found[name] = ours(name, node, broker, order["rows"], scratch / f"ours{number}", logs)
                say(f"ours, {name}: {found[name]['working_seconds']:.1f} s without start-up")
            if order["alone"]:
                logs.restore()
                found["debezium"] = drained_by_debezium(node, broker, order["rows"], scratch / "debezium")
                say(f"Debezium: {found['debezium']['working_seconds']:.1f} s without start-up")
    return found


def ours(
    name: str, node: CassandraNode, broker: KafkaBroker, rows: int, folder: Path, logs: SavedLogs
) -> dict[str, float]:
    """Let our loops drain the log into a topic of their own.

    Their start-up ends when some changes of another table are in Kafka; only then the logs are put into ``cdc_raw``.
    """
    (sync, kafka), server = OURS[name], folder.name
    conf = write_conf(
        folder,
        [node],
        server_name=server,
        kafka={"bootstrap_servers": [broker.bootstrap], "partitions": 1, **kafka},
        sync=sync,
        commitlog_processor_window_count=WINDOW_COUNT,
    )
    topic = f"{server}.{KEYSPACE}.orders"
    with debezium.events_counted(broker, topic, rows, IDLE_SECONDS) as counter, Loops(conf, CACHE) as loops:
        began = time.monotonic()
        loops.start(STAGE, CLOSE)
        with Watch(dict(loops.running), [node], frozenset({KEYSPACE}), WATCH_SECONDS) as watch:
            prime(node, loops, f"{server}.{KEYSPACE}.baskets")
            before, ready = watch.cost(), time.monotonic() - began
            logs.restore()
            printed, _ = counter.communicate()
            after = watch.cost()
        loops.check()
        counted = debezium.counted(printed, rows, loops.running[CLOSE.name])
        loops.stop()
    cost, last = after.since(before), counted["last"] - began
    return {
        "events": counted["events"],
        "ready_seconds": ready,
        "first_seconds": counted["first"] - began,
        "last_seconds": last,
        "working_seconds": last - ready,
        "cpu_seconds": sum(after.cpu.values()),
        "working_cpu_seconds": sum(cost.cpu.values()),
        "server_cpu_seconds": cost.server_cpu,
        "peak_mb": sum(watch.peak_mb.values()),
        "megabytes": counted["bytes"] / 1e6,
        "requests": cost.requests,
        "received_mb": cost.received / 1e6,
        "reads": cost.reads,
    }


def prime(node: CassandraNode, loops: Loops, topic: str) -> None:
    """Write some rows of another table, dated into the last interval, which is over, and wait until Kafka has them."""
    with connected([node], ConsistencyLevel.ONE, 60) as session:
        insert = session.prepare(f"INSERT INTO {KEYSPACE}.baskets (customer, tags) VALUES (?, ?) USING TIMESTAMP ?")
        written_us = time.time_ns() // 1000 - WINDOW_MS * 1000
        for number in range(PRIMING_ROWS):
            session.execute(insert, (f"{topic}-{number}", {"ready"}, written_us))
    cursor = loops.lake / "streams" / topic / "kafka.json"
    wait_for("the loops are ready", cursor.exists, IDLE_SECONDS)


def drained_by_debezium(node: CassandraNode, broker: KafkaBroker, rows: int, folder: Path) -> dict[str, float]:
    """Let Debezium's connector drain the log; count from its first event: its start cannot be seen from outside."""
    folder.mkdir()
    found: dict[str, float] = asdict(debezium.drain(node, broker, KEYSPACE, "orders", rows, folder))
    return {**found, "working_seconds": found["last_seconds"] - found["first_seconds"]}


def three(order: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Measure three nodes with three replicas: duplicates, changes that are not reported, and Debezium's lag."""
    result: dict[str, Any] = {"changes": order["facts"] * len(facts.KINDS), "each": order["facts"]}
    with (
        three_nodes(scratch / "nodes", CACHE, FIRST_ADDRESS, heap_mb=512, cdc_total_mib=4096) as nodes,
        KafkaBroker(scratch / "kafka", BrokerSettings(heap_mb=512).on_free_ports(), CACHE) as broker,
    ):
        with connected(nodes, ConsistencyLevel.ALL, 60) as session:
            for statement in (*facts.CREATION, *creation(replicas=3, cdc=frozenset(TABLES))):
                session.execute(statement)
            facts.write(session, order["facts"], time.time_ns() // 1000)
        fill_segments(nodes, 1)
        say(f"{result['changes']:,} changes are written to three nodes")
        wait_until_over()
        logs = SavedLogs(nodes, scratch / "saved")
        result["ours"] = ours_told(nodes, broker, result["changes"], scratch / "ours")
        say("ours has drained the logs of three nodes")
        if order["alone"]:
            logs.restore()
            result |= debezium_told(nodes, broker, order, result["changes"], scratch)
    return result


def ours_told(nodes: Sequence[CassandraNode], broker: KafkaBroker, changes: int, folder: Path) -> dict[str, Any]:
    """Run our loops on the logs of three nodes; return which changes they report."""
    topic = f"facts_of_ours.{facts.KEYSPACE}.{facts.TABLE}"
    make_topics(broker.bootstrap, [topic])
    kafka = {"bootstrap_servers": [broker.bootstrap], "partitions": 1, "serialisation": "json"}
    conf = write_conf(folder, nodes, server_name="facts_of_ours", kafka=kafka, sync={"after_image": "none"})
    with Loops(conf, CACHE) as loops:
        loops.start(STAGE, CLOSE)
        # Wait for one more than expected: so a duplicate would be seen.
        wait_until_quiet(broker.bootstrap, [topic], changes + 1, idle_s=15, longest_s=IDLE_SECONDS)
        loops.check()
        loops.stop()
    return told_in(broker, topic, ours=True)


def debezium_told(
    nodes: Sequence[CassandraNode], broker: KafkaBroker, order: dict[str, Any], changes: int, scratch: Path
) -> dict[str, Any]:
    """Run a connector on each node; return which changes of the backlog they report, and their lag during writes."""
    topic = debezium.topic_of(facts.KEYSPACE, facts.TABLE)
    shop = [debezium.topic_of(SHOP, table) for table in TABLES]
    make_topics(broker.bootstrap, [topic, *shop])
    (scratch / "debezium").mkdir()
    with debezium.connectors(nodes, broker, scratch / "debezium"):
        wait_until_quiet(broker.bootstrap, [topic], 3 * changes, idle_s=15, longest_s=IDLE_SECONDS)
        say("Debezium has drained the logs of three nodes; its lag is measured")
        written = write_steadily(nodes, scratch, changes=int(order["rate"] * order["seconds"]), rate=order["rate"])[
            "written"
        ]
        wait_until_quiet(broker.bootstrap, shop, sys.maxsize, idle_s=15, longest_s=60)
    return {"debezium": told_in(broker, topic, ours=False), "debezium_lag": lag_of_debezium(broker, shop, written)}


def told_in(broker: KafkaBroker, topic: str, *, ours: bool) -> dict[str, Any]:
    """Judge which changes a topic reports."""
    return asdict(facts.judge(((event.key, event.value) for event in read_events(broker.bootstrap, topic)), ours=ours))


def lag_of_debezium(broker: KafkaBroker, topics: Sequence[str], written: int) -> dict[str, float]:
    """Return the seconds from a change's write to its first copy in Kafka, and count copies and missing changes."""
    first: dict[int, float] = {}
    changed: set[tuple[str, bytes]] = set()
    events = 0
    for topic in topics:
        for event in read_events(broker.bootstrap, topic):
            us = json.loads(event.value)["source"]["ts_us"]
            first[us] = min(first.get(us, np.inf), event.appended_ms / 1000 - us / 1e6)
            changed.add((topic, event.key))
            events += 1
    lags = list(first.values()) or [np.nan]
    p50, p99, most = (float(np.percentile(lags, part)) for part in (50, 99, 100))
    missing = written - len(changed)
    return {"written": written, "events": events, "missing": missing, "p50": p50, "p99": p99, "max": most}


if __name__ == "__main__":
    main()
