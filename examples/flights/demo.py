"""``make demo``: a real Cassandra and a real Airflow on this machine, five tables, five verified replicas.

Everything lies in ``.demo/`` and is used again by a second run; nothing listens outside the loopback interface.
On a terminal it stays up until Ctrl-C, elsewhere it stops everything at once. Exit code 1: something differed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from examples.flights.load import TABLES, load
from ringsync.cli import Run, read_report, start
from ringsync.config import load_config
from ringsync.progress import Progress, follow, read_progress
from ringsync.warm import warm
from servers import ServerError
from servers.airflow import Airflow
from servers.cassandra import CassandraNode, NodeSettings
from servers.jars import fetch
from servers.java import find_java_home
from servers.ports import require_free
from servers.spark import lean_java_options

PROJECT = Path(__file__).parents[2]
FOLDER = PROJECT / ".demo"
CACHE = PROJECT / ".cache"
NEEDED_BYTES = 3 * 2**30
NODE = NodeSettings(address="127.0.0.1", native_port=29042, storage_port=27000, jmx_port=27199, cluster_name="demo")
AIRFLOW_PORT = 28080
PARALLELISM = 3
"""Spark JVMs at once: one more than cores, since each waits now and then."""
REPLICATED = tuple(table for table in TABLES if table != "route_counts")
"""The largest first. The counters are there to try it oneself: trigger `flights.route_counts` in the UI."""
POLL_S = 3.0
KEYSPACE = "flights"


def main() -> int:
    """Run the demo.

    :returns: 0: every replica equals its source; 1: something differs; 3: it could not run; 4: Ctrl-C
    """
    console = Console(highlight=False)
    # However it is told to end, the servers are stopped; a shell's background jobs ignore SIGINT otherwise.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as servers:
            return _demo(console, servers)
    except ServerError as error:
        print(f"ringsync: error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 4


def _demo(console: Console, servers: contextlib.ExitStack) -> int:
    check_machine()
    console.print("Fetching the server jars, compiling the kernels, archiving Spark's classes (once)")
    delta = sorted(fetch("delta", CACHE).glob("*.jar"))
    fetch("cassandra-5.0", CACHE)
    warm()
    java_options = lean_java_options(CACHE, delta)
    began = time.monotonic()
    airflow = Airflow(
        home=FOLDER / "airflow",
        port=AIRFLOW_PORT,
        dags=PROJECT / "dags",
        environment={
            "RINGSYNC_CONFIG": str(FOLDER / "ringsync.yaml"),
            "RINGSYNC_SPARK_JARS": ",".join(map(str, delta)),
            "JDK_JAVA_OPTIONS": java_options,
        },
        parallelism=PARALLELISM,
    )
    write_configuration(airflow)
    node = CassandraNode(FOLDER / "cassandra", NODE, CACHE)
    console.print("Starting Cassandra 5.0 and Airflow 3.3")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(servers.enter_context, airflow)
        servers.enter_context(node)
        load_flights(node, console)
        starting.result()
    os.environ["RINGSYNC_AIRFLOW_PASSWORD"] = airflow.password
    runs = bootstrap_all(console)
    equal = summarise(runs, console, time.monotonic() - began)
    show_places(airflow, console)
    if sys.stdin.isatty() and sys.stdout.isatty():
        console.print("\nEverything stays up until Ctrl-C.")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)
    return 0 if equal else 1


def check_machine() -> None:
    """Look for what would fail much later.

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
        "scan": {"min_splits": 2, "split_size_mb": 8},
        # Compressing would take longer than all else that is done to a message.
        "stream": {"codec": "null"},
        "airflow": {"url": airflow.url, "username": airflow.username},
    }
    (FOLDER / "ringsync.yaml").write_text(yaml.safe_dump(document, sort_keys=False))


def load_flights(node: CassandraNode, console: Console) -> None:
    """Load the data set, unless a run before this one did."""
    loaded = FOLDER / "cassandra" / "loaded"
    if loaded.exists():
        console.print("The flights are there from an earlier run")
        return
    cluster = node.cluster()
    try:
        with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("Loading 336,776 flights", total=None)
            rows = load(cluster.connect(), progress=lambda done, total: bar.update(task, completed=done, total=total))
    finally:
        cluster.shutdown()
    node.nodetool("flush", KEYSPACE)
    node.nodetool("refreshsizeestimates")
    loaded.touch()
    console.print(f"Loaded {sum(rows.values()):,} rows into {len(rows)} tables")


def bootstrap_all(console: Console) -> list[Run]:
    """Trigger ``bootstrap_table`` for every table through Airflow's API, and follow all runs to their ends."""
    config = load_config(FOLDER / "ringsync.yaml")
    quiet = Console(quiet=True)
    # The largest first, so that it does not begin last.
    runs = [start(config, "bootstrap_table", f"{KEYSPACE}.{table}", {}, quiet) for table in REPLICATED]
    follow(
        lambda: total([read_progress(run.store, run.run) for run in runs]),
        lambda: stage(runs),
        console,
        "Bootstrap",
        POLL_S,
    )
    return runs


def total(parts: Sequence[Progress]) -> Progress:
    """Several runs as one; they count by their rows, as far as these are known."""
    weights = [part.estimated_rows or 1 for part in parts]
    return Progress(
        attempt=max(part.attempt for part in parts),
        ranges_done=sum(part.ranges_done for part in parts),
        ranges_failed=sum(part.ranges_failed for part in parts),
        fraction=sum(part.fraction * weight for part, weight in zip(parts, weights, strict=True)) / sum(weights),
        rows=sum(part.rows for part in parts),
        rows_per_s=sum(part.rows_per_s or 0 for part in parts) or None,
    )


def stage(runs: Sequence[Run]) -> str | None:
    """How many runs are over, e.g. ``2/5 tables``; None when all are."""
    finished = sum(run.client.state(run.dag, run.run).finished for run in runs)
    return None if finished == len(runs) else f"{finished}/{len(runs)} tables"


def summarise(runs: Sequence[Run], console: Console, seconds: float) -> bool:
    """Print what came out.

    :returns: whether every table was replicated and verified without a difference
    """
    table = Table("table")
    for name in ("rows", "cells", "scan s", "rows/s", "differences"):
        table.add_column(name, justify="right")
    equal = True
    for run in runs:
        scan, verify = (read_report(run.store, name, run.run) for name in ("bootstrap_scan", "replica_verify"))
        differences = verify.get("differences")
        equal &= differences == 0 and verify.get("rows") == scan.get("rows")
        failed = next(_errors(run), None)
        if failed:
            table.add_row(run.table, "", "", "", "", f"failed: {failed}")
            continue
        speed = scan["rows"] / scan["seconds"]
        numbers = (f"{scan['rows']:,}", f"{scan['cells']:,}", f"{scan['seconds']:.1f}", f"{speed:,.0f}")
        table.add_row(run.table, *numbers, f"{differences:,}")
    console.print(table)
    verdict = "0 differences: every replica equals its source" if equal else "NOT every replica equals its source"
    console.print(f"{verdict}. {seconds:.0f} s from start to end.")
    return equal


def _errors(run: Run) -> Iterator[str]:
    for application in ("bootstrap_prepare", "bootstrap_scan", "replica_verify"):
        report = read_report(run.store, application, run.run)
        if not report or report.get("error"):
            yield str(report.get("error") or f"{application} left no report; its log is in the Airflow UI")


def show_places(airflow: Airflow, console: Console) -> None:
    """Say where everything is."""
    lake = FOLDER / "lake"
    console.print(f"replica   {lake}/replica/{KEYSPACE}/<table>/base  (Delta)", soft_wrap=True)
    console.print(f"stream    {lake}/streams/demo.{KEYSPACE}.<table>/  (Avro)", soft_wrap=True)
    console.print(
        f"Airflow   {airflow.url}  user {airflow.username}, password in {airflow.password_file}", soft_wrap=True
    )
    console.print(f"Cassandra {NODE.address}:{NODE.native_port}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
