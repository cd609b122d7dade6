"""Compare reads of rows by key from a local Cassandra node: our reader, and the Python driver with one request per row.

``python bench/row_reads.py`` prints a table and a BENCHMARK_RESULT line. Both read the same rows with WRITETIME and TTL
of each value column, at LOCAL_ONE, each in a process of its own; Cassandra runs on the same machine and competes with
them for its cores.

rows    one row of each of many partitions, chosen at random: what a sync reads after updates
dense   every third row of a part of the ring: neighbouring partitions with several wanted rows each

ours    row images as an Arrow batch
driver  execute_concurrent_with_args with a prepared SELECT and named tuples, as its documentation shows
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import numpy as np
import pyarrow as pa
from cassandra import ConsistencyLevel
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
from cassandra.concurrent import execute_concurrent_with_args
from cassandra.policies import RoundRobinPolicy
from peers.measure import Measurement, Work, together
from peers.table import COLUMNS, KEYSPACE, PARTITION_ROWS, TABLE, VALUE_COLUMNS, fill

from ringsync.cluster.cluster import read_ring
from ringsync.cluster.limits import Limiter
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterSettings, connect
from ringsync.ring.ranks import ranked
from ringsync.sources.lookup.read import read_rows
from ringsync.sources.scan.scan import scan_session
from servers import ServerError
from servers.cassandra import CassandraNode, NodeSettings

ROOT = Path(__file__).parent.parent
HEAP_MB = 2048
CONCURRENCY = 128
REPEATS = 3
"""Number of reads; the first warms up client and server."""


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the table (default: 100,000)")
    parser.add_argument("--keys", type=int, default=10_000, help="keys to read (default: 10,000)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the node's data here for the next run")
    arguments = parser.parse_args()
    if arguments.rows % PARTITION_ROWS or not 0 < arguments.keys <= arguments.rows // PARTITION_ROWS:
        parser.error(f"--rows must be a multiple of {PARTITION_ROWS}, and --keys not be more than its partitions")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception stops the server
    node_settings = NodeSettings(heap_mb=HEAP_MB, short_lived=False, cdc=False, segment_mib=32).on_free_ports()
    with tempfile.TemporaryDirectory(prefix="bench-row-reads.") as scratch:
        try:
            with CassandraNode(arguments.keep or Path(scratch, "node"), node_settings, ROOT / ".cache") as node:
                fill(node, arguments.rows)
                settings = ClusterSettings(
                    (node.contact_point,),
                    node.port,
                    consistency_level="LOCAL_ONE",
                    request_timeout_s=60,
                    connect_timeout_s=60,
                )
                for scenario, keys in chosen_keys(node, arguments.keys).items():
                    path = Path(scratch, scenario)
                    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, keys.schema) as writer:
                        writer.write_batch(keys)
                    show(scenario, measure(settings, str(path), keys.num_rows, node.pid))
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def chosen_keys(node: CassandraNode, count: int) -> dict[str, pa.RecordBatch]:
    """Choose the keys to read in each scenario, with their plain values for the driver."""
    cluster = node.cluster()
    try:
        rows = list(cluster.connect().execute(f"SELECT token(customer), customer, seq FROM {KEYSPACE}.{TABLE}"))
    finally:
        cluster.shutdown()
    pick = np.random.default_rng(6)
    one_of_each = pick.permutation(len(rows) // PARTITION_ROWS)[:count] * PARTITION_ROWS
    one_of_each += pick.integers(0, PARTITION_ROWS, count)
    places = {"rows": one_of_each, "dense": np.arange(0, min(3 * count, len(rows)), 3)}
    return {scenario: keys_of([rows[place] for place in some.tolist()]) for scenario, some in places.items()}


def keys_of(rows: list[tuple[int, str, int]]) -> pa.RecordBatch:
    customers, numbers = [row[1] for row in rows], [row[2] for row in rows]
    head = (1).to_bytes(4, "little") + (4).to_bytes(4, "little")
    return pa.RecordBatch.from_pydict(
        {
            "token": pa.array([row[0] for row in rows], pa.int64()),
            "partition_key": pa.array([customer.encode() for customer in customers], pa.binary()),
            "clustering": pa.array([head + number.to_bytes(4, "big", signed=True) for number in numbers], pa.binary()),
            "customer": customers,
            "seq": pa.array(numbers, pa.int32()),
        }
    )


def measure(settings: ClusterSettings, path: str, keys: int, server: int) -> dict[str, Measurement]:
    """Measure each contender; return its median read by rate; the first read does not count."""
    found = {}
    for name, prepare in (("ours", ours), ("driver", driver)):
        reads = together(prepare, [(settings, path)], server, REPEATS)[1:]
        if any(read.rows != keys for read in reads):
            raise ServerError(f"{name} read {[read.rows for read in reads]} rows of {keys}")
        rates = ", ".join(f"{read.rows_per_second:,.0f}" for read in reads)
        print(f"{time.strftime('%H:%M:%S')} {name}: {rates} rows/s", file=sys.stderr, flush=True)
        found[name] = sorted(reads, key=lambda read: read.rows_per_second)[len(reads) // 2]
    return found


def ours(settings: ClusterSettings, path: str) -> Callable[[], Work]:
    """Connect; return a function that reads row images."""
    keys = read_keys(path)
    session = scan_session(settings, int(time.time()))
    table = read_table(connect(settings), KEYSPACE, TABLE)
    ring = ranked(read_ring(connect(settings), KEYSPACE))

    def read() -> Work:
        found = read_rows(session, table, keys, ring, settings, Limiter(), element_times=True, misfits="error")
        return Work(found.images.num_rows)

    return read


def driver(settings: ClusterSettings, path: str) -> Callable[[], Work]:
    """Connect as any user of the driver does; return a function that reads rows."""
    keys = read_keys(path)
    parameters = list(zip(keys["customer"].to_pylist(), keys["seq"].to_pylist(), strict=True))
    profile = ExecutionProfile(RoundRobinPolicy(), request_timeout=60, consistency_level=ConsistencyLevel.LOCAL_ONE)
    cluster = Cluster(
        list(settings.contact_points),
        port=settings.port,
        protocol_version=5,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        connect_timeout=60,
        control_connection_timeout=60,
    )
    session = cluster.connect()
    times = [f"{call}({column})" for column in VALUE_COLUMNS for call in ("writetime", "ttl")]
    select = ", ".join(["token(customer)", *COLUMNS, *times])
    prepared = session.prepare(f"SELECT {select} FROM {KEYSPACE}.{TABLE} WHERE customer = ? AND seq = ?")

    def read() -> Work:
        results = execute_concurrent_with_args(session, prepared, parameters, concurrency=CONCURRENCY)
        return Work(sum(len(result.current_rows) for _, result in results))

    return read


def read_keys(path: str) -> pa.RecordBatch:
    with pa.OSFile(path, "rb") as file:
        return pa.ipc.open_file(file).get_batch(0)


def show(scenario: str, results: dict[str, Measurement]) -> None:
    """Print the table and the line of ratios."""
    print(f"\n{scenario}: {results['ours'].rows:,} rows; Cassandra {NodeSettings.version} on the same cores")
    print(f"{'':<10}{'rows/s':>12}{'client CPU':>14}{'server CPU':>14}  (CPU in µs a row)")
    pairs = []
    for name, read in results.items():
        client, server = (1e6 * used / read.rows for used in (read.client_seconds, read.server_seconds))
        print(f"{name:<10}{read.rows_per_second:>12,.0f}{client:>14.1f}{server:>14.1f}")
        pairs.append(f"{name}.rowsPerSec={read.rows_per_second:.0f} {name}.clientCpuPerMRows={client:.1f}")
    ratio = results["ours"].rows_per_second / results["driver"].rows_per_second
    pairs.append(f"ours/driver.rate={ratio:.2f}")
    print(f"BENCHMARK_RESULT | scenario=row_reads keys={scenario} {' '.join(pairs)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
