"""Compare scans of a whole table of a local Cassandra node: ours, the server's own limit, and three peers.

``python bench/scan.py`` prints a table of ratios and two BENCHMARK_RESULT lines, one for the values alone and one
for the values with WRITETIME and TTL of each value column. Cassandra runs on the same machine as its clients and
competes with them for its cores: rates are those of both together; CPU seconds are each side's own.

limit   our scan's own query, whose pages are dropped at once: no client can be faster with this query
arrow   our scan: row images as Arrow batches, which are dropped
driver  the Python driver's compiled decoding to named tuples, which are dropped
dsbulk  dsbulk 1.10.0, unload to CSV files; start-up (unloading an empty table) is subtracted
spark   Spark Cassandra Connector 3.5.1 on Spark 3.5, local[2], into the noop sink and to Parquet; a warm session

The numbers after the name of a Python client are processes × token ranges in flight in each. All use LOCAL_ONE, pages
of 5000 rows and no compression on the wire. They take turns, in several rounds, because a machine is not equally fast
all the time; the median of a contender's reads by rate counts. "CPU bound" is the rate at which client and server
together would keep all cores busy: compare by it if something else runs on the machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import yaml
from peers import dsbulk, spark_connector
from peers.measure import Measurement, Work, together
from peers.pages import driver_rows, raw_pages
from peers.table import COLUMNS, KEYSPACE, PARTITION_ROWS, TABLE, fill
from scan_ours import IN_FLIGHT, OURS, reader

from ringsync.cluster.session import close_all, connect
from ringsync.config import load_config
from ringsync.sources.scan.plan import ScanPlan
from ringsync.sources.scan.planning import make_scan_plan
from ringsync.wiring import cluster_settings
from servers import ServerError
from servers.cassandra import CassandraNode, NodeSettings

ROOT = Path(__file__).parent.parent
PAGE_ROWS = 5000
SPLITS = 16
HEAP_MB = 2048
WARM_UP_READS = 2
CONTENDERS = ("limit", *OURS, "driver", "dsbulk", "spark")

Results = dict[str, Measurement]
Runs = Iterator[tuple[str, Measurement]]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table (default: 1,000,000)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds, in each of which every contender reads once (default: 3)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the node's data here for the next run")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="(default: all)")
    arguments = parser.parse_args()
    if arguments.rows <= 0 or arguments.rows % PARTITION_ROWS:
        parser.error(f"--rows must be a multiple of {PARTITION_ROWS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception stops the server
    settings = NodeSettings(heap_mb=HEAP_MB, short_lived=False, cdc=False, segment_mib=32).on_free_ports()
    with tempfile.TemporaryDirectory(prefix="bench-scan.") as scratch:
        node = CassandraNode(arguments.keep or Path(scratch, "node"), settings, ROOT / ".cache")
        try:
            with node:
                began = time.monotonic()
                fill(node, arguments.rows)
                say(f"{arguments.rows} rows are there after {time.monotonic() - began:.0f} s")
                for times in (False, True):
                    results = measure(node, Path(scratch), times, arguments)
                    show(results, arguments.rows, times)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def say(text: str) -> None:
    """Print progress to stderr; results go to stdout."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(node: CassandraNode, scratch: Path, times: bool, arguments: argparse.Namespace) -> Results:
    """Measure the contenders in turns; return the median read of each.

    :param times: whether they also read WRITETIME and TTL
    """
    config_path, plan = make_plan(node, scratch, times)
    # The server's JVM first compiles its code; this should not count against a contender.
    together(raw_pages, shares(config_path, plan, 2, IN_FLIGHT), node.pid, WARM_UP_READS)
    found: dict[str, list[Measurement]] = {}
    for turn in range(1, arguments.rounds + 1):
        for contender in arguments.only:
            for name, read in run(contender, node, scratch, config_path, plan):
                if read.rows != arguments.rows:
                    raise ServerError(f"{name} read {read.rows} rows of {arguments.rows}")
                say(f"round {turn}, {'with' if times else 'without'} times, {name}: {read.rows_per_second:,.0f} rows/s")
                found.setdefault(name, []).append(read)
    return {
        name: sorted(reads, key=lambda read: read.rows_per_second)[len(reads) // 2] for name, reads in found.items()
    }


def make_plan(
    node: CassandraNode, scratch: Path, times: bool, keyspace: str = KEYSPACE, table: str = TABLE
) -> tuple[str, ScanPlan]:
    """Write a configuration for the node and plan the scan; return the configuration's path and the plan."""
    path = scratch / "ringsync.yaml"
    source = {
        "contact_points": [node.contact_point],
        "port": node.port,
        "consistency_level": "LOCAL_ONE",
        "page_size": PAGE_ROWS,
    }
    scan = {"min_splits": SPLITS, "max_splits": SPLITS}
    path.write_text(
        yaml.safe_dump({"server_name": "bench", "cassandra": source, "store": {"url": "store"}, "scan": scan})
    )
    config = load_config(path)
    try:
        session = connect(cluster_settings(config))
        return str(path), make_scan_plan(session, config, keyspace, table, now=int(time.time()), times=times)
    finally:
        close_all()


def shares(config_path: str, plan: ScanPlan, processes: int, *more: object) -> list[tuple[object, ...]]:
    """Return each process's arguments; each of n processes reads every n-th split."""
    return [(config_path, plan.to_json(), plan.splits[first::processes], *more) for first in range(processes)]


def run(contender: str, node: CassandraNode, scratch: Path, config_path: str, plan: ScanPlan) -> Runs:
    """Let a contender read once in each of its variants; return measurements by the variant's name."""

    def python_client(
        prepare: Callable[..., Callable[[], Work]],
        variants: Sequence[tuple[int, int]],
        *first: object,
        tell: bool = True,
    ) -> Runs:
        for processes, in_flight in variants:
            given = shares(config_path, plan, processes, *([in_flight] if tell else []))
            name = f"{contender} {processes}×{in_flight}"
            yield name, together(prepare, [(*first, *share) for share in given], node.pid, 1)[0]

    processes = [(2, IN_FLIGHT), (4, IN_FLIGHT)]
    if contender == "limit":
        yield from python_client(raw_pages, [(2, IN_FLIGHT), (2, 2 * IN_FLIGHT)])
    elif contender == "driver":
        yield from python_client(driver_rows, processes)
    elif contender == "dsbulk":
        yield contender, dsbulk.unload(node, PAGE_ROWS, scratch, times=plan.times)
    elif contender == "spark":
        found = spark_connector.read(node, PAGE_ROWS, scratch, times=plan.times)
        yield from ((f"{contender} {sink}", measured) for sink, measured in found.items())
    else:
        yield from python_client(reader, processes, contender, tell=False)


def show(results: Results, rows: int, times: bool) -> None:
    """Print the table and the line of ratios."""
    best = best_by_contender(results)
    limit = best.get("limit")
    print(
        f"\n{rows:,} rows × {len(COLUMNS)} columns, {'with' if times else 'without'} WRITETIME and TTL; "
        f"Cassandra {NodeSettings.version} on the same {os.cpu_count()} cores"
    )
    print(f"{'':<16}{'rows/s':>12}{'of limit':>10}{'client CPU':>12}{'server CPU':>12}{'CPU bound':>12}{'written':>10}")
    print(f"{'':<16}{'':>12}{'':>10}{'s/M rows':>12}{'s/M rows':>12}{'rows/s':>12}{'MB':>10}")
    for name, read in results.items():
        of_limit = f"{read.rows_per_second / limit.rows_per_second:.2f}" if limit else ""
        print(
            f"{name:<16}{read.rows_per_second:>12,.0f}{of_limit:>10}{read.client_seconds / rows * 1e6:>12.2f}"
            f"{read.server_seconds / rows * 1e6:>12.2f}{cpu_bound(read):>12,.0f}{read.written_bytes / 1e6:>10.0f}"
        )
    print(f"BENCHMARK_RESULT | scenario=scan times={str(times).lower()} rows={rows} {pairs(best)}", flush=True)


def cpu_bound(read: Measurement) -> float:
    """Compute rows per second if client and server kept every core busy; other load hardly changes it."""
    return (os.cpu_count() or 1) * read.rows / (read.client_seconds + read.server_seconds)


def best_by_contender(results: Results) -> Results:
    """Choose the fastest variant of each contender; Spark's sinks stay apart, since they do different work."""
    best: Results = {}
    for name, read in results.items():
        key = name.replace(" ", "_") if name.startswith("spark") else name.split()[0]
        if key not in best or best[key].rows_per_second < read.rows_per_second:
            best[key] = read
    return best


def pairs(best: Results) -> str:
    """Format rates, CPU, and our share of each other contender's rate (higher is better) and CPU (lower is better)."""
    found = []
    for name, read in best.items():
        cpu = read.client_seconds / read.rows * 1e6
        found += [f"{name}.rowsPerSec={read.rows_per_second:.0f}", f"{name}.clientCpuPerMRows={cpu:.2f}"]
    for ours in (name for name in best if name in OURS):
        for name, read in best.items():
            if name not in OURS:
                found.append(f"{ours}/{name}.rate={best[ours].rows_per_second / read.rows_per_second:.2f}")
                found.append(f"{ours}/{name}.cpuBound={cpu_bound(best[ours]) / cpu_bound(read):.2f}")
                found.append(f"{ours}/{name}.cpu={best[ours].client_seconds / read.client_seconds:.3f}")
    return " ".join(found)


if __name__ == "__main__":
    sys.exit(main())
