"""Compare readers of Scylla's CDC log: ours, and the published Rust crate scylla-cdc 0.7.0.

``python bench/scylla_log.py`` prints a table, and one BENCHMARK_RESULT line with ratios. No Scylla runs here: the log
is on a real Cassandra 5.0 node, behind the tests' stand-in, a proxy by which clients find a Scylla
(tests/scylla_server). So this says what the clients cost, not how fast Scylla is. Both read the same rows of the same
6144 streams through the same stand-in, in turns, on one core; a turn has several passes in one process. The peer's
first pass and ours, which loads the kernels, do not count; of the others the best one by CPU time does.

ours    one process; the product's reader: requests of 100 streams, eight on their way at once, in raw pages, decoded to
        change rows with digests as Arrow batches, which are dropped
peer    CDCLogReader with a consumer that looks at each value and keeps counts; one window, no pauses
        (peers/scylla_cdc/src/main.rs)

Rates are by CPU time, which does not depend on other users of the machine. By the wall clock the node and the stand-in,
a Python program, may be the limit: the CPU time of each is shown, too. Both sides must count the same rows, values and
sums, which are also computed from how the log is made.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

from peers import scylla_cdc_rust
from peers.measure import cpu_seconds
from peers.one_core import run_on_one_core
from peers.scylla_log_table import END_MS, GENERATION_MS, KEYSPACE, START_MS, TABLE, TTL_S, expected, fill

from servers import ServerError
from servers.cassandra import CassandraNode, NodeSettings
from tests.scylla_server.proxy import StandIn, scylla_stand_in

ROOT = Path(__file__).parent.parent
HEAP_MB = 2048
PASSES = 4
TURNS = 2
CONTENDERS = ("ours", "peer")


@dataclass(frozen=True)
class Turn:
    """One run of a reader.

    :ivar rows: log rows of a pass
    :ivar seconds: wall clock of the best pass by CPU time; ``cpu_seconds``: user and system time of the reader in it
    :ivar first_cpu_seconds: of the first pass, which loads the kernels, and of ours also counts
    :ivar server_seconds: CPU of the node, a pass in the mean; ``stand_in_seconds``: of the stand-in
    :ivar peak_mb: largest resident memory of the reader
    """

    rows: int
    seconds: float
    cpu_seconds: float
    first_cpu_seconds: float
    server_seconds: float
    stand_in_seconds: float
    peak_mb: float

    @property
    def rate(self) -> float:
        """Log rows per CPU second of the reader."""
        return self.rows / self.cpu_seconds


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the log (default: 1,000,000)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the node's data here for the next run")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="(default: the last one)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception stops the server
    settings = NodeSettings(heap_mb=HEAP_MB, short_lived=False, cdc=False, segment_mib=32).on_free_ports()
    with tempfile.TemporaryDirectory(prefix="bench-scylla-log.") as scratch:
        node = CassandraNode(arguments.keep or Path(scratch, "node"), settings, ROOT / ".cache")
        try:
            program = scylla_cdc_rust.build(ROOT / ".cache")
            with node, scylla_stand_in(node) as scylla:
                began = time.monotonic()
                fill(scylla, arguments.rows)
                say(f"{arguments.rows:,} log rows are there after {time.monotonic() - began:.0f} s")
                results = measure(scylla, program, arguments.rows, arguments.core)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    show(results)
    return 0


def say(text: str) -> None:
    """Print progress to stderr; results go to stdout."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(scylla: StandIn, program: Path, rows: int, core: int) -> dict[str, Turn]:
    """Let both read in turns; return the better turn of each.

    :raises ServerError: a reader fails, or has not seen what is in the log
    """
    commands = {"ours": ours(scylla), "peer": peer(scylla, program)}
    results: dict[str, Turn] = {}
    for contender in CONTENDERS * TURNS:
        turn = run(contender, commands[contender], scylla, rows, core)
        say(f"{contender}: {turn.rate:,.0f} rows a CPU second, {turn.rows / turn.seconds:,.0f} a second")
        if contender not in results or turn.rate > results[contender].rate:
            results[contender] = turn
    return results


def ours(scylla: StandIn) -> list[str]:
    """Return the command of our reader."""
    order = {
        "host": scylla.host,
        "port": scylla.port,
        "keyspace": KEYSPACE,
        "table": TABLE,
        "generation_ms": GENERATION_MS,
        "start_ms": START_MS,
        "end_ms": END_MS,
        "ttl_s": TTL_S,
        "passes": PASSES,
    }
    return [sys.executable, str(Path(__file__).with_name("scylla_log_ours.py")), json.dumps(order)]


def peer(scylla: StandIn, program: Path) -> list[str]:
    """Return the command of the crate's program, with one thread: it has one core."""
    window = (str(START_MS), str(END_MS))
    return [str(program), f"{scylla.host}:{scylla.port}", KEYSPACE, TABLE, *window, str(PASSES), "1"]


def run(contender: str, command: list[str], scylla: StandIn, rows: int, core: int) -> Turn:
    """Run a reader, and check what it has seen.

    :raises ServerError: it fails, or has not seen what is in the log
    """
    pid = scylla.node.pid
    server, stand_in = cpu_seconds(pid), time.process_time()
    finished = run_on_one_core(command, core, contender, {"OMP_NUM_THREADS": "1"})
    server, stand_in = cpu_seconds(pid) - server, time.process_time() - stand_in
    check(contender, finished.lines, asdict(expected(rows)))
    best = min(finished.lines[1:], key=lambda line: float(line["cpu_seconds"]))
    return Turn(
        rows,
        best["seconds"],
        best["cpu_seconds"],
        finished.lines[0]["cpu_seconds"],
        server / len(finished.lines),
        stand_in / len(finished.lines),
        finished.peak_mb,
    )


def check(contender: str, passes: list[dict[str, Any]], wanted: dict[str, int]) -> None:
    """Check that the first pass has seen all that is in the log, and the others as many rows.

    :raises ServerError: they have not
    """
    if len(passes) != PASSES:
        raise ServerError(f"{contender} made {len(passes)} passes of {PASSES}")
    seen = {key: passes[0].get(key) for key in wanted}
    if seen != wanted:
        raise ServerError(f"{contender} saw {seen}, but the log has {wanted}")
    if any(one["rows"] != wanted["rows"] for one in passes):
        raise ServerError(f"{contender} saw {[one['rows'] for one in passes]} rows of {wanted['rows']}")


def show(results: dict[str, Turn]) -> None:
    """Print the table and the line of ratios."""
    heads = ("M rows/CPU s", "M rows/s", "CPU s", "first pass, CPU s", "node, CPU s", "stand-in, CPU s", "peak MB")
    print(f"| | {' | '.join(heads)} |\n|---|{len(heads) * '---|'}")
    found: dict[str, float] = {"rows": results["ours"].rows}
    for name, turn in results.items():
        values = (turn.rate / 1e6, turn.rows / turn.seconds / 1e6, turn.cpu_seconds, turn.first_cpu_seconds)
        rest = (turn.server_seconds, turn.stand_in_seconds, turn.peak_mb)
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in (*values, *rest))} |")
        found |= {f"{name}.rowsPerCpuSec": round(turn.rate), f"{name}.rowsPerSec": round(turn.rows / turn.seconds)}
        found |= {f"{name}.peakMB": round(turn.peak_mb)}
    one, other = results["ours"], results["peer"]
    found |= {"ours/peer.cpu": round(one.rate / other.rate, 3), "ours/peer.wall": round(other.seconds / one.seconds, 3)}
    print(f"BENCHMARK_RESULT {json.dumps({'benchmark': 'scylla_log', **found})}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
