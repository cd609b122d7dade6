"""``make demo``: a real Cassandra and a real Airflow on this machine, five tables, five verified replicas.

The sync follows the commit logs while the tables are copied and a writer changes them; in the end every replica must
equal its source. All files are in ``.demo/``, and a second run uses them again; nothing listens outside the loopback
interface. On a terminal the demo stays up until Ctrl-C; otherwise it stops everything at its end. Exit code 1: a
replica differs from its source, or a change was not published.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

import ringsync.cli
from examples.flights.changes import Writer, changes, read_keys
from examples.flights.load import TABLES, load
from ringsync.airflow_client import AirflowClient, AirflowError
from ringsync.config import Config, ConfigError, load_config
from ringsync.ledger.passes import get_pass, pass_numbers
from ringsync.progress import follow, read_progress
from ringsync.service.expected import expected_in
from ringsync.service.published import wait_until_published
from ringsync.service.runs import Run, patient, read_report, start
from ringsync.status import read_statuses
from ringsync.steps.application import ExitCode
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.warm import warm
from ringsync.wiring import store_of
from servers import ServerError
from servers.airflow import Airflow
from servers.cassandra import CassandraNode, NodeSettings
from servers.cluster import begin_segments
from servers.jars import fetch
from servers.java import find_java_home
from servers.ports import require_free
from servers.spark import lean_java_options

Result = TypeVar("Result")

PROJECT = Path(__file__).parents[2]
FOLDER = PROJECT / ".demo"
CACHE = PROJECT / ".cache"
NEEDED_BYTES = 3 * 2**30
NODE = NodeSettings(address="127.0.0.1", native_port=29042, storage_port=27000, jmx_port=27199, cluster_name="demo")
AIRFLOW_PORT = 28080
PARALLELISM = 10
"""Number of tasks at once: six loops of the sync work all the time, and leave the others to bootstraps and merges."""
REPLICATED = tuple(table for table in TABLES if table != "route_counts")
"""The tables to copy, in one run. Copy the counters yourself: trigger `flights.route_counts` in the UI."""
POLL_S = 3.0
LINE_S = 15.0
"""Seconds between two lines about work that takes long, where there is no terminal."""
WINDOW_MS = 10_000
"""Length of a window: five of them must pass before everything is published, so a minute would be too long here."""
CHANGES_PER_S = 20
WRITE_ON_S = 15
"""Time for which changes go on after the last bootstrap."""
SEED = 2013
SYNC_STARTS_WITHIN_S = 300
PUBLISHED_WITHIN_S = 240
LOG_SYNC_MS = 3_000
"""The node's ``commitlog_sync_period``, plus the delay that busy cores may add."""
KEYSPACE = "flights"


def main() -> int:
    """Run the demo.

    :returns: 0: everything is published, and every replica equals its source; 1: not; 3: it could not run; 4: Ctrl-C
    """
    console = Console(highlight=False)
    # Both signals must stop the servers; a shell's background jobs ignore SIGINT otherwise.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as servers:
            return _demo(console, servers)
    except (ServerError, AirflowError, ConfigError, StorageError) as error:
        print(f"ringsync: error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 4


def _demo(console: Console, servers: contextlib.ExitStack) -> int:
    check_machine()
    delta = sorted(told(console, "Fetching the jars of Delta (60 MB, once)", fetch, "delta", CACHE).glob("*.jar"))
    told(console, "Fetching the jars of Cassandra 5.0 (60 MB, once)", fetch, "cassandra-5.0", CACHE)
    told(console, "Compiling the kernels (some 20 s of a core, once)", warm)
    java_options = told(console, "Archiving Spark's classes (half a minute, once)", lean_java_options, CACHE, delta)
    began = time.monotonic()
    airflow = Airflow(
        home=FOLDER / "airflow",
        port=AIRFLOW_PORT,
        dags=PROJECT / "dags",
        environment={
            "RINGSYNC_CONFIG": str(FOLDER / "ringsync.yaml"),
            "RINGSYNC_SPARK_JARS": ",".join(map(str, delta)),
            "JDK_JAVA_OPTIONS": java_options,
            # The DAGs do not change; parsing them every five seconds would take a quarter of a core.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "600",
        },
        parallelism=PARALLELISM,
    )
    write_configuration(airflow)
    node = CassandraNode(FOLDER / "cassandra", NODE, CACHE)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(servers.enter_context, airflow)
        told(console, "Starting Cassandra 5.0, and Airflow 3.3 beside it", servers.enter_context, node)
        load_flights(node, console)
        told(console, "Waiting until Airflow has started: its database, scheduler and UI", starting.result)
    os.environ["RINGSYNC_AIRFLOW_PASSWORD"] = airflow.password
    config = load_config(FOLDER / "ringsync.yaml")
    forget_interrupted(airflow)
    start_sync(config, console)
    cluster = node.cluster()
    servers.callback(cluster.shutdown)
    outcome = copy_while_writing(config, cluster.connect(), console)
    good = summarise(outcome, console, time.monotonic() - began)
    show_places(airflow, console)
    if sys.stdin.isatty() and sys.stdout.isatty():
        console.print("\nEverything stays up until Ctrl-C: write to the tables, and see what cdcservice status shows.")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)
    cdcservice("stop")
    return 0 if good else 1


def told(console: Console, what: str, work: Callable[..., Result], *arguments: Any) -> Result:
    """Do some work, while a thread says what it is and how long it takes: nobody waits without knowing why."""
    began, over = time.monotonic(), threading.Event()

    def tell() -> None:
        said = began
        while not over.wait(1.0):
            now = time.monotonic()
            status.update(f"{what}: {now - began:.0f} s")
            if not console.is_terminal and now - said >= LINE_S:
                said = now
                console.print(f"{what}: {now - began:.0f} s")

    with console.status(what) as status:
        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            result = work(*arguments)
        finally:
            over.set()
            teller.join()
    if time.monotonic() - began >= POLL_S:
        console.print(f"{what}: done in {time.monotonic() - began:.0f} s")
    return result


def cdcservice(command: str) -> None:
    """Run a command as a user does.

    :raises ServerError: the command fails; it has printed why
    """
    code = ringsync.cli.main([command, "--conf", str(FOLDER / "ringsync.yaml")])
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code != ExitCode.OK:
        raise ServerError(f"cdcservice {command} ended with exit code {code}, see above")


def start_sync(config: Config, console: Console) -> None:
    """Start the sync, and wait until its loops run: with few cores they must start before anything else.

    :raises ServerError: the sync does not start
    """
    store, begun_ms = store_of(config), time.time() * 1000
    cdcservice("start")
    wanted = set(expected_in(config, store).loops)
    told(console, "Waiting until the loops of the sync run, each a Spark of its own", wait_for, store, wanted, begun_ms)


def wait_for(store: ObjectStore, loops: set[str], begun_ms: float) -> None:
    """Wait until all these loops have given a sign of life since a moment.

    :raises ServerError: one does not
    """
    end = time.monotonic() + SYNC_STARTS_WITHIN_S
    while missing := loops - {loop for loop, status in read_statuses(store).items() if status["at_ms"] > begun_ms}:
        if time.monotonic() > end:
            raise ServerError(f"no sign of life of {', '.join(sorted(missing))}: see their logs in the Airflow UI")
        time.sleep(1)


def forget_interrupted(airflow: Airflow) -> None:
    """End the runs that an interrupted demo has left in Airflow's database: they would go on beside the new runs.

    The loops of the sync may go on.
    """
    client = AirflowClient(airflow.url, airflow.username, airflow.password)
    for dag in ("bootstrap_table", "replica_verify"):
        client.end_unfinished(dag)


def check_machine() -> None:
    """Check what would otherwise fail much later.

    :raises ServerError: no JDK 17; a port is taken; too little disk space
    """
    find_java_home()
    require_free(NODE.address, {"CQL": NODE.native_port, "storage": NODE.storage_port, "JMX": NODE.jmx_port})
    require_free("127.0.0.1", {"Airflow": AIRFLOW_PORT})
    FOLDER.mkdir(exist_ok=True)
    free = shutil.disk_usage(FOLDER).free
    if free < NEEDED_BYTES:
        raise ServerError(
            f"{FOLDER} has {free / 2**30:.1f} GiB of free disk space, the demo needs {NEEDED_BYTES / 2**30:.0f} GiB"
        )


def write_configuration(airflow: Airflow) -> None:
    """Write ``.demo/ringsync.yaml``: only what differs from the defaults."""
    document = {
        "server_name": "demo",
        "cassandra": {"contact_points": [NODE.address], "port": NODE.native_port},
        "store": {"url": "lake"},
        "commitlog_processor_window_interval_ms": WINDOW_MS,
        "out_of_sequence_processor_poll_interval_ms": 2000,
        "sync": {"run_s": 3600},
        # Otherwise this many changes would start merges in the middle of the demo, on few cores.
        "replica": {"merge_rows_fraction": 0.5},
        "scan": {"min_splits": 2, "split_size_mb": 8},
        # Compression would take longer than all other work on a message.
        "stream": {"codec": "null"},
        "airflow": {"url": airflow.url, "username": airflow.username},
    }
    (FOLDER / "ringsync.yaml").write_text(yaml.safe_dump(document, sort_keys=False))


def load_flights(node: CassandraNode, console: Console) -> None:
    """Load the data set, unless an earlier run has loaded it."""
    loaded = FOLDER / "cassandra" / "loaded"
    if loaded.exists():
        console.print("The flights are loaded already, by an earlier run")
        return
    cluster = node.cluster()
    try:
        with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("Loading 336,776 flights", total=None)
            if not console.is_terminal:
                console.print("Loading 336,776 flights into Cassandra, a minute or so")
            session = cluster.connect()
            rows = load(session, progress=lambda done, total: bar.update(task, completed=done, total=total))
        begin_segments(session, KEYSPACE)
    finally:
        cluster.shutdown()
    node.nodetool("flush", KEYSPACE)
    node.nodetool("refreshsizeestimates")
    loaded.touch()
    console.print(f"Loaded {sum(rows.values()):,} rows into {len(rows)} tables")


@dataclass(frozen=True)
class Outcome:
    """The results of the demo.

    :ivar bootstrap: bootstrap run of all tables
    :ivar verification: verification run of all tables, after the last change
    :ivar written: number of changes that were written
    :ivar published: number of their messages, by ``keyspace.table``
    :ivar left: sentence on what was not published in time; empty: all was
    """

    bootstrap: Run
    verification: Run
    written: int
    published: Mapping[str, int]
    left: str


def copy_while_writing(config: Config, session: Any, console: Console) -> Outcome:
    """Bootstrap all tables while changes are written, let the changes go on, then verify all replicas.

    :raises ServerError: the changes could not be written
    """
    began_ms = int(time.time() * 1000)
    with Writer(session, changes(SEED, read_keys(session)), CHANGES_PER_S) as writer:
        options = {"enable_cdc": True, "verify": False}
        bootstrap = run_all(config, "bootstrap_table", options, console, "Bootstrap", writer)
        told(console, f"Changes are written for {WRITE_ON_S} s more", time.sleep, WRITE_ON_S)
    if writer.error is not None:
        raise ServerError(f"changes could not be written: {type(writer.error).__name__}: {writer.error}")
    written, written_until_ms = sum(writer.written.values()), int(time.time() * 1000) + LOG_SYNC_MS
    console.print(f"{written:,} changes were written, now they are published")
    store, kafka = store_of(config), config.kafka_topic if config.kafka else None
    waited = told(
        console,
        f"Waiting until the windows of {WINDOW_MS // 1000} s have closed, and all is published",
        lambda: wait_until_published(store, config.sync, written_until_ms, PUBLISHED_WITHIN_S, kafka=kafka),
    )
    verification = run_all(config, "replica_verify", {}, console, "Verify")
    return Outcome(bootstrap, verification, written, published_since(store, began_ms), waited.left)


def run_all(
    config: Config, dag: str, options: dict[str, Any], console: Console, title: str, writer: Writer | None = None
) -> Run:
    """Trigger a DAG for all tables through Airflow's API, and follow the run to its end.

    :param options: the DAG's parameters besides the tables
    :param writer: the writer of changes; if it stops, following ends
    """
    run = start(config, dag, ", ".join(f"{KEYSPACE}.{table}" for table in REPLICATED), options, Console(quiet=True))
    follow(
        lambda: read_progress(run.store, run.run),
        patient(lambda: None if writer and writer.error else stage(run)),
        console,
        title,
        POLL_S,
    )
    return run


def published_since(store: ObjectStore, began_ms: int) -> dict[str, int]:
    """Count the messages of changes that the sync has published, by ``keyspace.table``.

    :param began_ms: start of the count, ms since the epoch
    """
    tables = read_statuses(store).get("bucket_close/close", {}).get("tables", {})
    messages: dict[str, int] = {}
    for name, table in tables.items():
        passes = [get_pass(store, table["table_id"], number) for number in pass_numbers(store, table["table_id"])]
        new = [published for published in passes if published.created_at_ms >= began_ms]
        messages[name] = sum(part.records for published in new for part in published.parts)
    return messages


def stage(run: Run) -> str | None:
    """Say what a run is doing, e.g. ``scan (running)``; None: it is finished."""
    state = run.client.state(run.dag, run.run)
    if state.finished:
        return None
    return f"{state.current.task} ({state.current.state})" if state.current else state.state


def summarise(outcome: Outcome, console: Console, seconds: float) -> bool:
    """Print the results.

    :returns: whether everything is published, and every replica equals its source
    """
    table = Table()
    table.add_column("table", no_wrap=True)
    for name in ("rows", "cells", "published", "differences"):
        table.add_column(name, justify="right")
    reasons = list(_errors(outcome))
    equal = not reasons
    copied = read_report(outcome.bootstrap.store, "bootstrap_scan", outcome.bootstrap.run)
    scans = copied.get("tables", {})
    verified = read_report(outcome.verification.store, "replica_verify", outcome.verification.run)
    comparisons = verified.get("tables", {})
    for name in (f"{KEYSPACE}.{table}" for table in REPLICATED):
        published = outcome.published.get(name, 0)
        scan, compared = scans.get(name), comparisons.get(name)
        if scan is None or compared is None or "rows" not in scan or "replica_rows" not in compared:
            equal = False
            table.add_row(name, "", "", f"{published:,}", "failed")
            continue
        # Writes have ended, so nothing may be left that could not be judged, or that was left out.
        rows = compared["rows_of_differing_ranges"]
        differences = compared["differences"] + sum(
            rows.get(name, 0) for name in ("changed_after", "late", "not_judged")
        )
        equal &= differences == 0 and compared["rows"] == compared["replica_rows"]
        numbers = (compared["rows"], compared["cells"], published, differences)
        table.add_row(name, *(f"{number:,}" for number in numbers))
    console.print(table)
    for reason in reasons:
        console.print(reason, soft_wrap=True)
    console.print(f"{copied.get('rows', 0):,} rows were copied in {copied.get('seconds', 0):.0f} s.")
    console.print(
        f"{outcome.written:,} changes written; changes of one row within {WINDOW_MS // 1000} s are one message."
    )
    if outcome.left:
        console.print(f"NOT everything is published after {PUBLISHED_WITHIN_S} s: {outcome.left}")
    verdict = "0 differences: every replica equals its source" if equal else "NOT every replica equals its source"
    console.print(f"{verdict}. {seconds:.0f} s from start to end.")
    return equal and not outcome.left


def _errors(outcome: Outcome) -> Iterator[str]:
    steps = ("bootstrap_prepare", "bootstrap_scan", "bootstrap_drain")
    for run, step in (*((outcome.bootstrap, step) for step in steps), (outcome.verification, "replica_verify")):
        report = read_report(run.store, step, run.run)
        if not report or report.get("error"):
            yield str(report.get("error") or f"{step} left no report; its log is in the Airflow UI")


def show_places(airflow: Airflow, console: Console) -> None:
    """Print the addresses and folders of servers and data."""
    lake = FOLDER / "lake"
    console.print(f"replica   {lake}/replica/{KEYSPACE}/<table>/base  (Delta)", soft_wrap=True)
    console.print(f"stream    {lake}/streams/demo.{KEYSPACE}.<table>/  (Avro)", soft_wrap=True)
    console.print(
        f"Airflow   {airflow.url}  user {airflow.username}, password in {airflow.password_file}", soft_wrap=True
    )
    console.print(f"Cassandra {NODE.address}:{NODE.native_port}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
