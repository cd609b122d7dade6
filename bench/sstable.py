"""Compare ways to the rows of a real Cassandra 5.0 node: our reader of its SSTables, cqlite, Cassandra's own
sstabledump, and our token-range scan.

``python bench/sstable.py`` prints a table for each data set, and one BENCHMARK_RESULT line with ratios. All programs
run on one core, one after another, twice. The faster run of each counts. The files are in the system's cache. Rates are
input rows by CPU time, which does not depend on other users of the machine.

compacted    one SSTable
overlapping  four; half of the rows of each are in all of them, some are updates or deletions

arrow        our reader: change rows of each SSTable with digests, as Arrow batches
changes      our reader and merge: each row once, as change rows with digests
images       the same as typed columns, with the times of all cells
values       the rows that a SELECT shows, as typed columns without times
times        images as a Parquet file (snappy)
parquet      values as a Parquet file (snappy)
cqlite       cqlite-py's export_parquet (snappy): values without times
sstabledump  JSON lines; its JVM starts in the same process, as a user starts it
scan         our scan by token ranges, values without times, as Arrow batches: the node has compacted the table. CPU is
             that of client and node; both may use all cores
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

from peers.measure import together
from peers.one_core import Pass, Passes, on_one_core
from peers.sstabledump import dump
from peers.sstables import KEYSPACE, TABLE, SSTableSet, node_of, sstables
from scan import WARM_UP_READS, make_plan, shares
from scan_ours import reader

from servers import ServerError, last_lines

ROOT = Path(__file__).parent.parent
OURS = ("arrow", "changes", "images", "values", "times", "parquet")
CONTENDERS = (*OURS, "cqlite", "sstabledump", "scan")
COUNTERPARTS = (
    *(("parquet", "cqlite"), ("times", "cqlite"), ("arrow", "sstabledump"), ("images", "sstabledump")),
    ("values", "scan"),
)
"""Contender of ours and peer that are compared."""
PASSES, TURNS = 4, 2
CQLITE = "cqlite-py==0.17.0"
HEADS = ("M input rows/CPU s", "first pass", "M input rows/s", "rows", "peak MB", "MB written")


@dataclass(frozen=True)
class Bench:
    """The places and the core of a run.

    :ivar core: the only core that a measured program may use
    :ivar kernels: folder of compiled kernels; empty at the start
    :ivar kept: folder of the SSTables, and of the node that has written them
    :ivar scratch: folder that is deleted at the end
    """

    core: int
    kernels: Path
    kept: Path
    scratch: Path

    @property
    def cache(self) -> Path:
        return ROOT / ".cache"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the SSTables here for the next run")
    parser.add_argument("--rows", type=int, default=200_000, metavar="N", help="of each SSTable (default: 200,000)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="(default: all)")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="(default: the last one)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception stops the server
    with tempfile.TemporaryDirectory(prefix="bench-sstable.") as name:
        kept = arguments.keep or Path(name, "sstables")
        bench = Bench(arguments.core, Path(name, "kernels"), kept, Path(name))
        try:
            made = sstables(kept, arguments.rows, bench.cache)
            for what in ("changes", "parquet"):  # compiles the kernels
                ours(bench, made.compacted, what, 1)
            found: dict[str, float] = {}
            for folder in (made.compacted, made.overlapping):
                results: dict[str, Passes] = {}
                for contender in [*arguments.only] * TURNS:
                    run(bench, folder, contender, arguments.rows, results)
                arrow = results.get("arrow") or ours(bench, folder, "arrow", 1)
                found |= show(folder, made, results, arrow.warm.rows)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    pairs = " ".join(f"{key}={value:.6g}" for key, value in found.items())
    print(f"BENCHMARK_RESULT | scenario=sstable {pairs}", flush=True)
    return 0


def run(bench: Bench, folder: Path, contender: str, rows: int, results: dict[str, Passes]) -> None:
    """Run a contender, and keep the result if it is its best."""
    if contender == "sstabledump":
        files = list(folder.rglob("*-Data.db"))
        if len(files) > 1:
            return  # it reads one SSTable, and merges nothing
        result = dump(files[0], results["arrow"].warm.rows if "arrow" in results else rows, *_places(bench))
    elif contender == "scan":
        if folder.name != "compacted":
            return  # its node has no other SSTables any more
        result = scan(bench)
    elif contender == "cqlite":
        result = cqlite(bench, folder)
    else:
        result = ours(bench, folder, contender, PASSES)
    best = results.setdefault(contender, result)
    if result.warm.cpu_seconds < best.warm.cpu_seconds:
        results[contender] = result
    print(
        f"{time.strftime('%H:%M:%S')} {folder.name}, {contender}: {result.warm.cpu_seconds:.2f} CPU s", file=sys.stderr
    )


def _places(bench: Bench) -> tuple[int, Path, Path]:
    return bench.core, bench.cache, bench.scratch


def ours(bench: Bench, folder: Path, what: str, passes: int) -> Passes:
    """Run our reader in a new process."""
    order = {"folder": str(folder), "what": what, "passes": passes, "target": str(bench.scratch)}
    program = str(Path(__file__).with_name("sstable_ours.py"))
    variables = {"NUMBA_CACHE_DIR": str(bench.kernels), "OMP_NUM_THREADS": "1"}
    return on_one_core([sys.executable, program, json.dumps(order)], bench.core, "Our reader", variables)


def cqlite(bench: Bench, folder: Path) -> Passes:
    """Run cqlite in a new process; it is installed in a folder of its own, once.

    :raises ServerError: it cannot be installed, or fails
    """
    package = bench.cache / "peers" / CQLITE
    if not package.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package), CQLITE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServerError(f"{CQLITE} cannot be installed:\n{last_lines(done.stdout + done.stderr)}")
    order = {
        **{"package": str(package), "folder": str(folder), "table": f"{KEYSPACE}.{TABLE}"},
        **{"passes": 2, "target": str(bench.scratch)},
    }
    program = str(Path(__file__).parent / "peers" / "cqlite_export.py")
    return on_one_core([sys.executable, program, json.dumps(order)], bench.core, "cqlite")


def scan(bench: Bench) -> Passes:
    """Start the node, and read the table by token ranges.

    :raises ServerError: the node does not start, or a process fails
    """
    with node_of(bench.kept, bench.cache) as node:
        config_path, plan = make_plan(node, bench.scratch, False, KEYSPACE, TABLE)
        given = [("arrow", *share) for share in shares(config_path, plan, 2)]
        reads = together(reader, given, node.pid, WARM_UP_READS + 2)
    passes = (Pass(one.seconds, one.client_seconds + one.server_seconds, one.rows, one.rows, 0) for one in reads)
    return Passes(tuple(passes), None, 0, 0, 0)


def show(folder: Path, made: SSTableSet, results: dict[str, Passes], rows: int) -> dict[str, float]:
    """Print the table of a data set, which has so many input rows; return the figures for the last line."""
    files = list(folder.rglob("*-Data.db"))
    size = sum(file.stat().st_size for file in files)
    print(f"\n**{folder.name}**: {len(files)} SSTables of Cassandra {made.version}, {size / 1e6:.0f} MB; one core\n")
    print(f"| | {' | '.join(HEADS)} |\n|---|{len(HEADS) * '---|'}")
    found: dict[str, float] = {}
    rates: dict[str, float] = {}
    for name, result in results.items():
        warm, first = result.warm, result.passes[0]
        rates[name] = rows / warm.cpu_seconds
        print(
            f"| {name} | {rates[name] / 1e6:.3f} | {rows / first.cpu_seconds / 1e6:.3f} "
            f"| {rows / warm.seconds / 1e6:.3f} | {warm.rows:,} | {result.peak_mb:.0f} | {warm.written / 1e6:.0f} |"
        )
        key = f"{folder.name}.{name}"
        found |= {f"{key}.rowsPerCpuSec": round(rates[name]), f"{key}.peakMB": result.peak_mb}
    for mine, peer in COUNTERPARTS:
        if mine in rates and peer in rates:
            found[f"{folder.name}.{mine}/{peer}"] = rates[mine] / rates[peer]
    return found


if __name__ == "__main__":
    sys.exit(main())
