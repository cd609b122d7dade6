"""Measure the sync as a whole, on real servers: its lag, its cost, and how fast it drains a backlog.

``python bench/sync.py lag`` and ``python bench/sync.py backlog`` print tables and one BENCHMARK_RESULT line each.
Everything runs on one machine: nodes, broker, Spark and writer compete for its cores.

lag      three nodes, three replicas, a steady rate of writes (inserts, updates, deletions; three tables, one of them
         with a replica). Measures, from outside, the seconds from each write to its message and to its row in the
         replica; the load on the cluster, CPU and memory. Fails unless each change is published exactly once
backlog  one node has logged rows that are not read yet. Our sync drains them into Kafka with ``after_image`` none
         (JSON, Avro, and Avro without ``source.query``) and source; then Debezium's connector does. Debezium opens an
         HTTP port on all interfaces: so as root the whole scenario runs in a network of its own (``unshare -n``);
         without root there is no Debezium. Then three nodes: duplicates, changes that are not reported, and
         Debezium's lag, with a connector on each node
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import sync_lag
from peers.network import may_be_alone, run_program
from sync_backlog import OURS

from servers import ServerError
from servers.jars import fetch

ROOT = Path(__file__).parent.parent
DEFAULT_SYNC_MS = 10_000
"""Cassandra's ``commitlog_sync_period``."""

JARS = ("cassandra-5.0", "delta", "kafka", "debezium-cassandra-5")
"""Jars of all programs that scenario ``backlog`` needs."""

Figures = dict[str, float | str]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scenarios = parser.add_subparsers(dest="scenario", required=True)
    add_lag(scenarios.add_parser("lag", help="seconds from write to message and replica; about 15 minutes"))
    add_backlog(scenarios.add_parser("backlog", help="events a second, beside Debezium; about 10 minutes"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception stops the servers
    os.environ["PYTHONPATH"] = str(ROOT / "include")
    with tempfile.TemporaryDirectory(prefix="bench-sync.", ignore_cleanup_errors=True) as scratch:
        try:
            compile_kernels()
            run = lag if arguments.scenario == "lag" else backlog
            figures, wrong = run(arguments, Path(scratch))
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    pairs = " ".join(
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}" for key, value in figures.items()
    )
    print(f"\nBENCHMARK_RESULT | scenario=sync_{arguments.scenario} {pairs}", flush=True)
    for error in wrong:
        print(f"WRONG: {error}", file=sys.stderr)
    return 1 if wrong else 0


def add_lag(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lag``."""
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of writes (default: 10)")
    parser.add_argument("--rate", type=float, default=300.0, help="changes a second (default: 300)")
    parser.add_argument("--window-ms", type=int, default=60_000, help="window interval (default: 60,000)")
    parser.add_argument(
        "--sync-ms",
        type=int,
        help="commitlog_sync_period of the nodes (default: 10,000, as Cassandra's; 1,000 for windows under a minute)",
    )
    parser.add_argument(
        "--after-image", choices=("source", "replica", "none"), default="source", help="(default: source)"
    )
    parser.add_argument(
        "--kafka", action="store_true", help="run a broker, and measure the seconds until it has a message"
    )


def add_backlog(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``backlog``."""
    parser.add_argument(
        "--rows", type=int, default=200_000, help="of one node's backlog; 0: leave out (default: 200,000)"
    )
    parser.add_argument(
        "--segment-mib", type=int, default=1, help="segment size of that node's commit log (default: 1)"
    )
    parser.add_argument(
        "--ours",
        nargs="+",
        choices=tuple(OURS),
        default=tuple(OURS),
        help="our variants that drain the rows (default: all, in this order)",
    )
    parser.add_argument(
        "--facts", type=int, default=1000, help="changes of each kind on three nodes; 0: leave out (default: 1000)"
    )
    parser.add_argument("--rate", type=float, default=300.0, help="changes a second, for Debezium's lag (default: 300)")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of these writes (default: 60)")


def say(text: str) -> None:
    """Print progress to stderr; results go to stdout."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def compile_kernels() -> None:
    """Compile the kernels, as set-up does."""
    from ringsync.warm import warm

    warm()


def lag(arguments: argparse.Namespace, scratch: Path) -> tuple[Figures, list[str]]:
    """The scenario; the figures and what is wrong."""
    order = sync_lag.Order(
        minutes=arguments.minutes,
        rate=arguments.rate,
        window_ms=arguments.window_ms,
        sync_ms=arguments.sync_ms or (DEFAULT_SYNC_MS if arguments.window_ms >= 60_000 else 1000),
        after_image=arguments.after_image,
        kafka=arguments.kafka,
    )
    found = sync_lag.measure(order, scratch, ROOT / ".cache", say)
    return sync_lag.show(order, found), sync_lag.problems(order, found)


def backlog(arguments: argparse.Namespace, scratch: Path) -> tuple[Figures, list[str]]:
    """The scenario; the figures and what is wrong."""
    alone = may_be_alone()
    for name in JARS if alone else ():
        fetch(name, ROOT / ".cache")  # a separate network cannot reach the package registry
    if not alone:
        say("no right to make a network: without Debezium, whose HTTP port would be open on all interfaces")
    names = ("rows", "ours", "segment_mib", "facts", "rate", "seconds")
    order = {**{name: getattr(arguments, name) for name in names}, "scratch": str(scratch), "alone": alone}
    found = run_program(Path(__file__).with_name("sync_backlog.py"), order, alone=alone, name="The backlog")
    figures: Figures = {"rows": arguments.rows}
    wrong: list[str] = []
    if "rates" in found:
        figures |= show_rates(arguments.rows, found["rates"])
    if "three" in found:
        figures |= show_three(found["three"], wrong)
    return figures, wrong


def show_rates(rows: int, found: Mapping[str, Mapping[str, float]]) -> Figures:
    """Print the speed of each contender; return the figures for the last line."""
    print(f"\n**backlog**: {rows:,} rows of one node; node and broker run on the same {os.cpu_count()} cores\n")
    heads = ("first event, s", "last event, s", "events/s", "without start-up, s", "events/s", "CPU s", "peak MB")
    print(f"| | {' | '.join(heads)} |\n|---|{len(heads) * '---|'}")
    figures: Figures = {}
    for name, result in found.items():
        rate, warm = rows / result["last_seconds"], rows / result["working_seconds"]
        first, last, working = (result[f"{moment}_seconds"] for moment in ("first", "last", "working"))
        times = f"{first:.1f} | {last:.1f} | {rate:,.0f} | {working:.1f}"
        print(f"| {name} | {times} | {warm:,.0f} | {result['cpu_seconds']:.0f} | {result['peak_mb']:,.0f} |")
        key = key_of(name)
        figures |= {f"{key}.{what}": value for what, value in result.items()}
        figures |= {f"{key}.eventsPerSec": warm, f"{key}.eventsPerSecWithStart": rate}
    if source := found.get("source"):
        per_row = 1 / rows
        print(
            f"\nThe reads of after_image source: {source['reads'] * per_row:.2f} rows or ranges, "
            f"{source['requests'] * per_row:.3f} requests and {1e6 * source['received_mb'] * per_row:,.0f} bytes from "
            f"the node for each change; CPU of the node {source['server_cpu_seconds']:.1f} s"
        )
    return figures | ratios(found)


def ratios(found: Mapping[str, Mapping[str, float]]) -> Figures:
    """Divide our events a second by Debezium's."""
    figures: Figures = {}
    if "debezium" in found:
        theirs = found["debezium"]
        for name in (name for name in found if name != "debezium"):
            for what, key in (("eventsPerSec", "working_seconds"), ("eventsPerSecWithStart", "last_seconds")):
                figures[f"{key_of(name)}/debezium.{what}"] = theirs[key] / found[name][key]
        told = ", ".join(f"{key} {value:.1f}" for key, value in figures.items())
        print(f"\nRatios: {told}")
    return figures


def key_of(name: str) -> str:
    """Return the key of a contender's figure in the last line."""
    first, *others = name.replace(",", "").split()
    return first + "".join(word[0].upper() + word[1:] for word in others)


def show_three(found: Mapping[str, Any], wrong: list[str]) -> Figures:
    """Print the changes that are reported of three nodes' logs; return the figures for the last line."""
    names = [name for name in ("ours", "debezium") if name in found]
    changes, each = found["changes"], found["each"]
    print(f"\n**three nodes**: {changes:,} changes, {each:,} of each kind, three replicas\n")
    print(f"| reported of {each:,} | {' | '.join(names)} |\n|---|{len(names) * '---|'}")
    for kind in found["ours"]["told"]:
        print(f"| {kind} | {' | '.join(str(found[name]['told'][kind]) for name in names)} |")
    figures: Figures = {"facts.changes": changes}
    for name in names:
        result = found[name]
        untold = changes - sum(result["told"].values())
        print(
            f"{name}: {result['messages']:,} messages for {result['rows']:,} rows, {untold:,} changes are not reported"
        )
        figures |= {f"{name}.duplicates": result["messages"] - result["rows"], f"{name}.untold": untold}
        if name == "ours" and (untold or result["messages"] != changes):
            wrong.append(
                f"ours has {result['messages']:,} messages for {changes:,} changes, {untold:,} are not reported"
            )
    if lag_of_theirs := found.get("debezium_lag"):
        figures |= {f"debezium.lag.{key}": value for key, value in lag_of_theirs.items()}
        print(
            f"\nDebezium's lag to the first copy of each of {lag_of_theirs['written']:,} changes: p50 "
            f"{lag_of_theirs['p50']:.1f} s, p99 {lag_of_theirs['p99']:.1f} s, max {lag_of_theirs['max']:.1f} s; "
            f"{lag_of_theirs['events']:,} events, {lag_of_theirs['missing']:,} changes are missing"
        )
    return figures


if __name__ == "__main__":
    sys.exit(main())
