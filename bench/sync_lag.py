"""Run the scenario ``lag`` of bench/sync.py: write to three nodes at a steady rate; see when writes are published."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cassandra import ConsistencyLevel
from peers.events import make_topics, read_events, wait_until_quiet
from sync_cost import Cost, Watch, is_in_time, wait_for
from sync_loops import LOOPS, SERVER, Loops, write_conf
from sync_writer import KEYSPACE, TABLES, creation, rows_before, table_of

from ringsync.orchestration import BOOTSTRAP_DRAIN, BOOTSTRAP_PREPARE, BOOTSTRAP_SCAN
from ringsync.replica.changes import SYNC
from ringsync.replica.folders import changes_folder
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream
from servers import ServerError, last_lines
from servers.cassandra import CassandraNode
from servers.cluster import begin_segments, connected, three_nodes
from servers.kafka import BrokerSettings, KafkaBroker

BOOTSTRAPPED = "orders"
FIRST_ADDRESS = 91
LATE_S = 300.0
"""Seconds from a write to its message from which docs/performance.md counts the message as late."""
TOPICS = {table: f"{SERVER}.{KEYSPACE}.{table}" for table in TABLES}
PASSES = "pass-*"


@dataclass(frozen=True)
class Order:
    """The settings of a run.

    :ivar minutes: duration of the writes
    :ivar rate: changes a second
    :ivar sync_ms: how often the nodes sync their commit logs
    """

    minutes: float
    rate: float
    window_ms: int
    sync_ms: int
    after_image: str
    kafka: bool

    @property
    def changes(self) -> int:
        return int(self.minutes * 60 * self.rate)


@dataclass
class Found:
    """The results of a run.

    :ivar writer: the writer's report
    :ivar lags: seconds from a change's write, by destination: ``message``, ``replica``, ``kafka``
    :ivar wrong: number of errors by kind; all must be 0
    """

    writer: dict[str, Any]
    cost: Cost
    peak_mb: dict[str, float]
    reports: dict[str, dict[str, Any]]
    messages: int = 0
    lags: dict[str, list[float]] = field(default_factory=dict)
    wrong: Counter[str] = field(default_factory=Counter)

    @property
    def staged(self) -> int:
        """Number of staged change rows of all replicas."""
        return int(self.reports["commitlog_stage"]["staged"])


def measure(order: Order, scratch: Path, cache: Path, say: Any) -> Found:
    """Run the scenario.

    :param say: prints progress
    :raises ServerError: something fails, or does not happen in time
    """
    settings = {"commitlog_sync_ms": order.sync_ms, "segment_mib": 32, "heap_mb": 512, "cdc_total_mib": 4096}
    with (
        three_nodes(scratch / "nodes", cache, FIRST_ADDRESS, **settings) as nodes,
        kafka(order, scratch, cache) as broker,
    ):
        with connected(nodes, ConsistencyLevel.ALL, 60) as session:
            for statement in creation(replicas=3, cdc=frozenset(TABLES) - {BOOTSTRAPPED}):
                session.execute(statement)
        rows = rows_before(order.changes)
        say(f"three nodes are up; {rows:,} rows are written before")
        write(nodes, scratch, rows=rows)
        with connected(nodes, ConsistencyLevel.ALL, 60) as session:
            begin_segments(session, KEYSPACE)
        conf = configuration(order, scratch, nodes, broker)
        with Loops(conf, cache) as loops:
            loops.start(*LOOPS)
            wait_for("the stage has looked at cdc_raw", lambda: is_emptied(loops), 120)
            for application in (BOOTSTRAP_PREPARE, BOOTSTRAP_SCAN, BOOTSTRAP_DRAIN):
                options = ["--enable-cdc"] if application is BOOTSTRAP_PREPARE else []
                loops.finish(application, f"{KEYSPACE}.{BOOTSTRAPPED}", *options)
            wait_for("the loops follow", lambda: follows(loops), 120)
            say(f"{KEYSPACE}.{BOOTSTRAPPED} is bootstrapped; {order.changes:,} changes are written")
            with Watch(dict(loops.running), nodes, frozenset({KEYSPACE})) as watch:
                before = watch.cost()
                writer = write(nodes, scratch, changes=order.changes, rate=order.rate)
                say(f"written in {writer['seconds']:.0f} s; what is left is published")
                patience = 7 * order.window_ms / 1000 + 120
                complete = is_in_time(lambda: published(loops, order.changes), patience)
                cost = watch.cost().since(before)
            reports = loops.stop()
        found = Found(writer, cost, watch.peak_mb, reports)
        found.wrong["not published in time"] = int(not complete)
        judge(loops.lake, order, scratch / "times", found, broker)
    return found


@contextmanager
def kafka(order: Order, scratch: Path, cache: Path) -> Iterator[KafkaBroker | None]:
    """Start a broker with the topics, if one is wanted."""
    if not order.kafka:
        yield None
        return
    with KafkaBroker(scratch / "kafka", BrokerSettings(heap_mb=512).on_free_ports(), cache) as broker:
        make_topics(broker.bootstrap, list(TOPICS.values()))
        yield broker


def configuration(order: Order, scratch: Path, nodes: Sequence[CassandraNode], broker: KafkaBroker | None) -> Path:
    """Write a ``ringsync.yaml`` with the defaults and the order's settings."""
    sections: dict[str, Any] = {
        "commitlog_processor_window_interval_ms": order.window_ms,
        "sync": {"after_image": order.after_image},
    }
    if broker:
        sections["kafka"] = {"bootstrap_servers": [broker.bootstrap], "partitions": 1}
    return write_conf(scratch, nodes, **sections)


def write(nodes: Sequence[CassandraNode], scratch: Path, **order: Any) -> dict[str, Any]:
    """Run the writer to its end.

    :raises ServerError: the writer fails; with its last lines
    """
    request = {
        "nodes": [node.contact_point for node in nodes],
        "port": nodes[0].port,
        "times": str(scratch / "times"),
        **order,
    }
    command = [sys.executable, str(Path(__file__).with_name("sync_writer.py")), json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServerError(f"The writer has failed:\n{last_lines(done.stdout + done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_emptied(loops: Loops) -> bool:
    """Tell whether the stage can delete in the ``cdc_raw`` of all three nodes: else cdc is not switched on."""
    loops.check()
    nodes = loops.status().get("commitlog_stage/default", {}).get("nodes", {})
    return len(nodes) == 3 and all(node["empties"] for node in nodes.values())


def follows(loops: Loops) -> bool:
    """Tell whether the loops work and the bootstrap is over."""
    loops.check()
    status = loops.status()
    table = status.get("bucket_close/close", {}).get("tables", {}).get(f"{KEYSPACE}.{BOOTSTRAPPED}")
    return "commitlog_stage/default" in status and bool(table) and not table["bootstrap"]


def published(loops: Loops, changes: int) -> bool:
    """Tell whether all messages are published and the replica has every pass."""
    loops.check()
    passes = {table: passes_of(loops.lake, table) for table in TABLES}
    if sum(records for found in passes.values() for records, _ in found.values()) < changes:
        return False
    return max(commits_of(loops.lake), default=0) >= max(passes[BOOTSTRAPPED], default=0)


def passes_of(lake: Path, table: str) -> dict[int, tuple[int, float]]:
    """Return, by number of the pass, the number of its messages and when they became visible (s since the epoch)."""
    found = {}
    for path in (lake / "streams" / TOPICS[table]).glob(f"{PASSES}/manifest.json"):
        records = json.loads(path.read_bytes())["records"]
        found[int(path.parent.name.rpartition("-")[2])] = (records, path.stat().st_mtime)
    return found


def commits_of(lake: Path) -> dict[int, float]:
    """Return, by number of the pass, when the Delta table of changes had it (s since the epoch)."""
    found = {}
    for path in (lake / changes_folder(KEYSPACE, BOOTSTRAPPED) / "_delta_log").glob("*.json"):
        for line in path.read_text().splitlines():
            action = json.loads(line).get("txn", {})
            if action.get("appId") == SYNC:
                found[int(action["version"])] = path.stat().st_mtime
    return found


def judge(lake: Path, order: Order, times: Path, found: Found, broker: KafkaBroker | None) -> None:
    """Check that every change is one message with the row that it has made, and record its lag."""
    written = array("q")
    written.frombytes(times.read_bytes())
    wanted = {us: table_of(number) for number, us in enumerate(written)}
    commits, store = commits_of(lake), LocalStore(lake)
    in_kafka = kafka_times(broker) if broker else {}
    seen: Counter[int] = Counter()
    for table, topic in TOPICS.items():
        stream = FileStream(store, topic)
        for number, (_, visible) in sorted(passes_of(lake, table).items()):
            for message in stream.read(f"pass-{number:012}"):
                value = message["value"]
                us = value["source"]["ts_us"]
                seen[us] += 1
                found.messages += 1
                check_message(value, wanted.get(us) == table, found.wrong)
                add(found, "message", visible - us / 1e6)
                if table == BOOTSTRAPPED:
                    add(found, "replica", commits.get(number, np.inf) - us / 1e6)
                if broker:
                    add(found, "kafka", in_kafka.get(value["source"]["event_id"], np.inf) - us / 1e6)
    found.wrong["missing"] = sum(us not in seen for us in wanted)
    found.wrong["doubled"] = sum(count - 1 for count in seen.values())


def check_message(value: dict[str, Any], known: bool, wrong: Counter[str]) -> None:
    """Check that a message belongs to a written change, and that its row has the change's time."""
    after = value["after"]
    wrong["unknown"] += not known
    wrong["late"] += bool(value["source"]["late"])
    wrong["rows"] += (after is None) != (value["op"] == "d")
    wrong["rows"] += after is not None and after["written_us"] != value["source"]["ts_us"]


def kafka_times(broker: KafkaBroker) -> dict[str, float]:
    """Wait until no more events come; return, by event id, when the broker first had it (s since the epoch)."""
    topics = list(TOPICS.values())
    wait_until_quiet(broker.bootstrap, topics, sys.maxsize, idle_s=5, longest_s=30)
    found: dict[str, float] = {}
    for topic in topics:
        for event in read_events(broker.bootstrap, topic):
            found.setdefault(event.headers["event_id"].decode(), event.appended_ms / 1000)
    return found


def add(found: Found, where: str, seconds: float) -> None:
    found.lags.setdefault(where, []).append(seconds)


def show(order: Order, found: Found) -> dict[str, float | str]:
    """Print the tables; return the figures for the last line."""
    changes = found.writer["written"]
    print(
        f"\n**lag**: {changes:,} changes in {found.writer['seconds']:.0f} s, windows of {order.window_ms / 1000:g} s, "
        f"logs synced every {order.sync_ms / 1000:g} s, after_image {order.after_image}\n"
    )
    print("| write to … | p50 s | p99 s | max s | over 5 minutes |\n|---|---|---|---|---|")
    figures: dict[str, float | str] = {"windowMs": order.window_ms, "afterImage": order.after_image}
    figures |= {"changes": changes, "messages": found.messages, "eventsPerSec": changes / found.writer["seconds"]}
    for where, lags in found.lags.items():
        p50, p99, most = (float(np.percentile(lags, part)) for part in (50, 99, 100))
        late = sum(lag > LATE_S for lag in lags)
        print(f"| {where} | {p50:.1f} | {p99:.1f} | {most:.1f} | {late:,} of {len(lags):,} |")
        figures |= {f"{where}.p50Sec": p50, f"{where}.p99Sec": p99, f"{where}.maxSec": most, f"{where}.over5min": late}
    figures |= show_cost(found, changes)
    figures |= {f"wrong.{name}": count for name, count in sorted(found.wrong.items()) if " " not in name}
    return figures


def show_cost(found: Found, changes: int) -> dict[str, float | str]:
    """Print the cost; return the figures for the last line."""
    cost = found.cost
    per_change = {
        "requestsPerChange": cost.requests / changes,
        "receivedBytesPerChange": cost.received / changes,
        "sentBytesPerChange": cost.sent / changes,
        "readsPerChange": cost.reads / changes,
    }
    print(
        f"\n{found.staged:,} change rows came from {len(found.reports['commitlog_stage']['nodes'])} logs; "
        f"{found.staged - found.messages:,} copies were dropped. Load on the cluster for each change: "
        f"{per_change['requestsPerChange']:.2f} requests, {per_change['receivedBytesPerChange']:,.0f} bytes from it, "
        f"{per_change['sentBytesPerChange']:,.0f} to it; {per_change['readsPerChange']:.2f} reads by coordinators\n"
    )
    print("| | CPU s per 1000 changes | peak MB |\n|---|---|---|")
    figures: dict[str, float | str] = {"staged": found.staged, "duplicatesDropped": found.staged - found.messages}
    figures |= per_change
    for name, used in cost.cpu.items():
        print(f"| {name} | {1000 * used / changes:.2f} | {found.peak_mb[name]:,.0f} |")
        figures |= {f"{name}.cpuSecPer1000": 1000 * used / changes, f"{name}.peakMB": found.peak_mb[name]}
    total = 1000 * sum(cost.cpu.values()) / changes
    print(f"| all three | {total:.2f} | {sum(found.peak_mb.values()):,.0f} |")
    print(f"| the three nodes | {1000 * cost.server_cpu / changes:.2f} | |")
    return figures | {"cpuSecPer1000": total, "peakMB": sum(found.peak_mb.values())}


def problems(order: Order, found: Found) -> list[str]:
    """List the errors that make the benchmark fail; late messages are no error."""
    found_wrong = [f"{count:,} {name}" for name, count in found.wrong.items() if count and name != "late"]
    if found.writer["written"] != order.changes:
        found_wrong.append(f"{found.writer['written']:,} changes written of {order.changes:,}")
    return found_wrong
