"""Compare readers of commit logs of a real Cassandra 5.0 node: ours, Cassandra's own, and plain Python.

``python bench/commitlog.py`` prints a table for each data set, and one BENCHMARK_RESULT line with ratios. All
programs run on one core, one after another, twice. The faster run of each counts, since no machine is equally fast all
the time. The files are in the system's cache. Rates are by CPU time, which does not depend on other users of the
machine; on an idle machine they equal rates by the wall clock.

uniform  inserts of six cells, 158 bytes each
mix      of 100: 80 inserts (4 with TTL), 10 updates, 5 writes to collections, 5 deletions; several tables

arrow    our reader: change rows with digests as Arrow batches, which are dropped
parquet  our reader: the same change rows as staging files (zstd), on disk at the end of the pass
java     Cassandra's CommitLogReader; a handler visits each row and cell and keeps nothing
python   the plain-Python model of the tests, on a part of the first segment
debezium only in the backlog. It opens an HTTP port on all interfaces. So as root the whole scenario runs in a network
         of its own (``unshare -n``); without root there is no Debezium
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

from peers import cassandra_reader
from peers.log import DataSet, data_set, schema_file
from peers.network import may_be_alone, run_program
from peers.one_core import Passes, on_one_core

from servers import ServerError

ROOT = Path(__file__).parent.parent
OURS = ("arrow", "parquet")
CONTENDERS = (*OURS, "java", "python", "debezium")
PASSES = {"arrow": 6, "parquet": 4, "java": 8}
TURNS = 2
PYTHON_BYTES = 4 << 20
HEADS = (
    "M mutations/CPU s",
    "first pass",
    "M rows/CPU s",
    "MB/CPU s",
    "M mutations/s",
    "first batch, s",
    "peak MB",
    "MB written",
)


@dataclass(frozen=True)
class Bench:
    """The places and the core of a run.

    :ivar core: the only core that a measured program may use
    :ivar kernels: folder of compiled kernels; empty at the start
    :ivar scratch: folder that is deleted at the end
    """

    core: int
    kernels: Path
    scratch: Path

    @property
    def cache(self) -> Path:
        return ROOT / ".cache"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the commit logs here for the next run")
    parser.add_argument("--uniform", type=int, default=400_000, metavar="N", help="statements (default: 400,000)")
    parser.add_argument("--mix", type=int, default=1_500_000, metavar="N", help="statements (default: 1,500,000)")
    parser.add_argument("--backlog", type=int, default=200_000, metavar="N", help="rows (default: 200,000)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="(default: all)")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="(default: the last one)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception stops the servers
    with tempfile.TemporaryDirectory(prefix="bench-commitlog.") as name:
        scratch = Path(name)
        bench = Bench(arguments.core, scratch / "kernels", scratch)
        folder = arguments.keep or scratch / "logs"
        try:
            found: dict[str, float] = {}
            for what, statements in (("uniform", arguments.uniform), ("mix", arguments.mix)):
                data = data_set(folder, what, statements, bench.cache)
                say(f"{what}: {statements:,} statements in {len(data.segments)} segments")
                if not found:
                    found["compile.seconds"] = compile_kernels(bench, data)
                results = measure(bench, data, [contender for contender in arguments.only if contender != "debezium"])
                found |= show(data, results)
            if "debezium" in arguments.only:
                found |= backlog(bench, arguments.backlog)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    pairs = " ".join(f"{key}={value:.6g}" for key, value in found.items())
    print(f"BENCHMARK_RESULT | scenario=commitlog {pairs}", flush=True)
    return 0


def say(text: str) -> None:
    """Print progress to stderr; results go to stdout."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def compile_kernels(bench: Bench, data: DataSet) -> float:
    """Compile the kernels, as set-up does; return the seconds that it takes."""
    seconds = ours(bench, data, 1).end_seconds
    say(f"kernels are compiled after {seconds:.0f} s")
    return seconds


def measure(bench: Bench, data: DataSet, contenders: Sequence[str]) -> dict[str, Passes]:
    """Run the contenders in turns; return the faster run of each."""
    results: dict[str, Passes] = {}
    for contender in [*contenders] * TURNS:
        if contender == "java":
            result = cassandra_reader.read(data.segments, PASSES["java"], bench.core, bench.cache, bench.scratch)
        elif contender == "python":
            result = plain_python(bench, data)
        else:
            result = ours(bench, data, PASSES[contender], contender == "parquet")
        warm = result.warm
        best = results.setdefault(contender, result)
        if warm.mutations / warm.cpu_seconds > best.warm.mutations / best.warm.cpu_seconds:
            results[contender] = result
        say(f"{data.name}, {contender}: {warm.mutations / warm.cpu_seconds:,.0f} mutations a CPU second")
    check(results)
    return results


def ours(bench: Bench, data: DataSet, passes: int, parquet: bool = False) -> Passes:
    """Run our reader in a new process."""
    with tempfile.TemporaryDirectory(dir=bench.scratch, prefix="staging.") as staging:
        order = {
            "schema": str(schema_file(bench.scratch)),
            "segments": [str(segment) for segment in data.segments],
            "passes": passes,
            "target": staging if parquet else None,
        }
        program = str(Path(__file__).with_name("commitlog_ours.py"))
        variables = {"NUMBA_CACHE_DIR": str(bench.kernels), "OMP_NUM_THREADS": "1"}
        return on_one_core([sys.executable, program, json.dumps(order)], bench.core, "Our reader", variables)


def plain_python(bench: Bench, data: DataSet) -> Passes:
    """Run the tests' model on the beginning of a segment."""
    order = {"schema": str(schema_file(bench.scratch)), "segment": str(data.segments[0]), "bytes": PYTHON_BYTES}
    program = str(Path(__file__).parent / "peers" / "plain_python.py")
    return on_one_core([sys.executable, program, json.dumps(order)], bench.core, "The plain-Python reader")


def backlog(bench: Bench, rows: int) -> dict[str, float]:
    """Run bench/commitlog_backlog.py and print its table; return the figures for the last line.

    :raises ServerError: it fails; with its last lines
    """
    alone = may_be_alone()
    if not alone:
        say("no right to make a network: Debezium's HTTP port will be open on all interfaces meanwhile")
    with tempfile.TemporaryDirectory(dir=bench.scratch, prefix="backlog.") as scratch:
        order = {"rows": rows, "core": bench.core, "kernels": str(bench.kernels), "scratch": scratch, "alone": alone}
        found = run_program(
            Path(__file__).with_name("commitlog_backlog.py"), order, alone=alone, name="Draining the backlog"
        )
    return show_backlog(rows, found)


def show_backlog(rows: int, found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Print the table; return the figures for the last line."""
    print(f"\n**backlog**: {rows:,} rows; the node, and Kafka, run on the same {os.cpu_count()} cores\n")
    heads = ("first row, s", "last row, s", "without start-up, s", "CPU s", "MB written")
    print(f"| | {' | '.join(heads)} |\n|---|{len(heads) * '---|'}")
    for name in ("ours", "debezium"):
        result = found[name]
        # A start-up ends when the program begins to read. For Debezium only its first event shows this.
        result["working_seconds"] = result.get("pass_seconds", result["last_seconds"] - result["first_seconds"])
        values = [
            result[key] for key in ("first_seconds", "last_seconds", "working_seconds", "cpu_seconds", "megabytes")
        ]
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |")
    ours, theirs = found["ours"], found["debezium"]
    figures = {f"backlog.{name}.{key}": value for name, result in found.items() for key, value in result.items()}
    for key in ("last_seconds", "working_seconds", "cpu_seconds"):
        figures[f"backlog.ours/debezium.{key}"] = theirs[key] / ours[key]
    return figures


def check(results: dict[str, Passes]) -> None:
    """Check that no contender is faster because it reads less; Cassandra counts rows of its system tables, too.

    :raises ServerError: a contender has read less
    """
    java, arrow = results.get("java"), results.get("arrow")
    if java and arrow and java.warm.mutations < 0.999 * arrow.warm.mutations:
        raise ServerError(f"Cassandra's reader saw {java.warm.mutations} mutations, ours {arrow.warm.mutations}.")
    if java and arrow and java.warm.cells < arrow.warm.cells:
        raise ServerError(f"Cassandra's reader saw {java.warm.cells} cells, ours {arrow.warm.cells}.")


def show(data: DataSet, results: dict[str, Passes]) -> dict[str, float]:
    """Print the table of a data set; return the figures for the last line."""
    size = data.log_bytes
    record = size / data.statements
    print(
        f"\n**{data.name}**: {data.statements:,} mutations, {size / 1e6:.0f} MB in {len(data.segments)} segments of "
        f"Cassandra {data.version}, {record:.0f} bytes each; one core\n"
    )
    print(f"| | {' | '.join(HEADS)} |\n|---|{len(HEADS) * '---|'}")
    found: dict[str, float] = {}
    for name, result in results.items():
        warm, first = result.warm, result.passes[0]
        ready = f"{result.ready_seconds:.2f}" if result.ready_seconds is not None else "–"
        rate = warm.mutations / warm.cpu_seconds
        print(
            f"| {name} | {rate / 1e6:.3f} | {first.mutations / first.cpu_seconds / 1e6:.3f} "
            f"| {warm.rows / warm.cpu_seconds / 1e6:.3f} | {rate * record / 1e6:.0f} "
            f"| {warm.mutations / warm.seconds / 1e6:.3f} | {ready} | {result.peak_mb:.0f} | {warm.written / 1e6:.0f} |"
        )
        key = f"{data.name}.{name}"
        found |= {f"{key}.mutationsPerCpuSec": round(rate), f"{key}.rowsPerCpuSec": round(warm.rows / warm.cpu_seconds)}
        found |= {f"{key}.MBPerCpuSec": rate * record / 1e6, f"{key}.peakMB": result.peak_mb}
        found[f"{key}.first.mutationsPerCpuSec"] = round(first.mutations / first.cpu_seconds)
        if result.ready_seconds is not None:
            found[f"{key}.readySec"] = result.ready_seconds
    return found | ratios(data.name, results)


def ratios(name: str, results: dict[str, Passes]) -> dict[str, float]:
    """Compute the speed of our warm readers relative to each other contender, warm and on its first pass."""
    found = {}
    for ours_name in (contender for contender in results if contender in OURS):
        warm = results[ours_name].warm
        rate = warm.mutations / warm.cpu_seconds
        for peer in (contender for contender in results if contender not in OURS):
            theirs, first = results[peer].warm, results[peer].passes[0]
            found[f"{name}.{ours_name}/{peer}"] = rate / (theirs.mutations / theirs.cpu_seconds)
            if len(results[peer].passes) > 1:
                found[f"{name}.{ours_name}/{peer}.first"] = rate / (first.mutations / first.cpu_seconds)
    return found


if __name__ == "__main__":
    sys.exit(main())
