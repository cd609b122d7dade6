"""``make demo-scylla``: writes → CDC log → messages → replica, and a verification, in under three minutes.

No package has a Scylla server, so this is a real Cassandra behind a stand-in (tests/scylla_server): it takes what
Scylla takes, refuses what Scylla refuses, and a simulator writes each table's log as Scylla does. ringsync itself is
what it always is: it finds out that this is a Scylla by asking.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ringsync.cluster.schema import read_table
from ringsync.streams.files import FileStream, data_topic
from ringsync.warm import warm
from servers.cassandra import CassandraNode, NodeSettings
from servers.jars import DEFAULT_CACHE, fetch
from tests.scylla_server.proxy import scylla_stand_in
from tests.scylla_sim.cluster import Disturbances
from tests.scylla_sim.tables import BaseTable, CqlColumn
from tests.scylla_sim.workload import Habits
from tests.scylla_sim.world import World
from tests.sync.pipeline import Pipeline, pipeline, wait_until_drained, write_conf

ORDERS = BaseTable(
    "shop",
    "orders",
    (("customer", "int"),),
    (("number", "int"),),
    (
        CqlColumn("name", "text", static=True),
        CqlColumn("state", "text"),
        CqlColumn("total", "decimal"),
        CqlColumn("tags", "text", "set"),
        CqlColumn("prices", "int", "map", key="text"),
    ),
)
WRITING_S = 30
LOOPS = ("scylla_log_stage", "bucket_close", "out_of_sequence")
SCYLLA = {"confidence_ms": 5000, "window_ms": 2000, "near_sweep_ms": 30_000, "near_reach_ms": 300_000}
HABITS = Habits(partitions=40, rows=10, late=0.0, again=0.0, ttls_s=(86_400,))


def say(text: str) -> None:
    """Print a line with the time since the beginning."""
    print(f"{time.monotonic() - BEGAN:5.0f} s  {text}", flush=True)


BEGAN = time.monotonic()


def main() -> None:
    for package in ("cassandra-5.0", "delta"):
        fetch(package, DEFAULT_CACHE)
    say("compiling the kernels (some 20 s of a core, once)")
    warm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringsync-scylla-")))
        say("starting Cassandra, and a stand-in that makes a ScyllaDB of it for its clients")
        node = stack.enter_context(CassandraNode(folder / "node", NodeSettings().on_free_ports(), DEFAULT_CACHE))
        stand_in = stack.enter_context(scylla_stand_in(node, element_times=True))
        some = Disturbances((0.0, 1.0), duplicate=0.02, cut=0.05)
        world = World(stand_in, random.Random(7), [ORDERS], shards=2, tokens=16, disturbances=some)
        world.create()
        say(f"{ORDERS.full_name} has cdc = {{'enabled': true}}; 96 streams; ringsync follows its log")
        address: Any = SimpleNamespace(contact_point=stand_in.host, port=stand_in.port)
        conf = write_conf(folder, [address], scylla=SCYLLA, scan={"min_splits": 2})
        loops = stack.enter_context(pipeline(conf, folder, DEFAULT_CACHE))
        write = partial(world.write, habits=HABITS, change_every_s=60.0)
        write(3)
        for name in LOOPS:
            loops.start(name)
        writing = threading.Thread(target=write, args=(WRITING_S,))
        writing.start()
        for step in ("bootstrap_prepare", "bootstrap_scan", "bootstrap_drain"):
            loops.run(step, "demo", "--table", ORDERS.full_name)
            say(f"{step} is done, while others write")
        writing.join()
        say(f"{world.counts['written']} writes, {world.materialiser.written} rows in the log; waiting for the last one")
        wait_until_drained(loops.store, 120, loops.check)
        show_messages(loops, world)
        report = loops.run("replica_verify", "demo", "--table", ORDERS.full_name)
        rows, cells, differences = (report[name] for name in ("rows", "cells", "differences"))
        say(f"verified: {rows} rows, {cells} cells with writetime and TTL: {differences} differences")
        if differences:
            sys.exit(1)


def show_messages(loops: Pipeline, world: World) -> None:
    """Say how many messages there are of each kind, and print one."""
    stream = FileStream(loops.store, data_topic("test", read_table(world.direct, "shop", "orders")))
    messages = [message for folder in stream.folders() for message in stream.read(folder)]
    kinds = Counter(message["value"]["op"] for message in messages)
    say(f"{len(messages)} messages: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}; a change:")
    updates = [
        message for message in messages if message["value"]["op"] == "u" and message["key"]["number"] is not None
    ]
    change = max(updates, key=lambda message: len(message["value"]["source"]["query"] or ""))
    shown = {"key": change["key"], **{name: change["value"][name] for name in ("op", "after")}}
    print(json.dumps(shown, default=str, indent=1), change["value"]["source"]["query"], sep="\n", flush=True)


if __name__ == "__main__":
    main()
