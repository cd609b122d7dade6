"""The oracle on a simulated ScyllaDB: generations, tablets, skewed clocks, late rows and duplicates, and kills.

Cassandra holds the rows, behind a stand-in that takes and refuses what Scylla does; the simulator writes base tables
and their logs. docs/scylla.md says what this cannot show.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.config import load_config
from ringsync.scylla.progress import SLOT_MS
from servers.cassandra import CassandraNode, NodeSettings
from tests.chaos.applications import environment
from tests.scylla_server.proxy import scylla_stand_in
from tests.scylla_sim.clock import SECOND
from tests.scylla_sim.cluster import Disturbances
from tests.scylla_sim.tables import all_tables
from tests.scylla_sim.workload import Habits
from tests.scylla_sim.world import World
from tests.sync.judge import judge
from tests.sync.pipeline import PROJECT, Pipeline, pipeline, wait_until_drained, write_conf

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

SEED = 20261126
WRITING_S = 240
NEW_GENERATION_EVERY_S = 50
SLACK_S = 3
"""Expiries differ by the second that TTLs leave open, and by the skew of coordinators, unknown to Cassandra."""
LOOPS = ("scylla_log_stage", "bucket_close", "out_of_sequence")
DISTURBANCES = Disturbances((0.0, 1.5), slow=0.05, slow_s=(1.5, 3.0), duplicate=0.05, cut=0.1, old_times=0.3)
HABITS = Habits(late=0.05, late_s=300.0, ttls_s=(86_400, 20 * 86_400))
SCYLLA = {
    "confidence_ms": 6000,
    "window_ms": 2000,
    "near_sweep_ms": 30_000,
    "near_reach_ms": 1_200_000,
    "far_sweep_ms": 120_000,
}
"""Late rows are looked for often: in production once in an hour, or some."""


@contextmanager
def killing(loops: Pipeline, chance: random.Random, kills: Counter[str]) -> Iterator[None]:
    """Kill a loop at random now and then, and start it again."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(chance.uniform(15, 30)):
            name = chance.choice(LOOPS)
            loops.kill(name)
            kills[name] += 1
            loops.start(name)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def bootstrap(conf: Path, tables: str, folder: Path) -> None:
    """Copy tables, as their users do, by the three steps."""
    for step in ("bootstrap_prepare", "bootstrap_scan", "bootstrap_drain"):
        log = folder / f"{step}.log"
        arguments = [sys.executable, str(PROJECT / "spark_apps" / f"{step}.py"), "--conf", str(conf), "--table", tables]
        with log.open("ab") as out:
            done = subprocess.run(
                [*arguments, "--run", "first"], env=environment(), stdout=out, stderr=out, check=False
            )
        assert done.returncode == 0, log.read_text()[-3000:]


def test_a_simulated_cluster_is_followed_exactly(tmp_path: Path, cache: Path) -> None:
    chance, kills = random.Random(SEED), Counter[str]()
    with ExitStack() as stack:
        node = stack.enter_context(CassandraNode(tmp_path / "node", NodeSettings().on_free_ports(), cache))
        stand_in = stack.enter_context(scylla_stand_in(node, element_times=True))
        world = World(
            *(stand_in, chance, all_tables("vnodes", lists=False), all_tables("tablets", lists=False)[:2]),
            skews_s=(-1.5, 0.0, 1.5),
            disturbances=DISTURBANCES,
        )
        world.create()
        address: Any = SimpleNamespace(contact_point=stand_in.host, port=stand_in.port)
        copied = [table.full_name for table in (world.vnodes[0], world.tablets[1])]
        tables = [table.full_name for table in world.tables]
        modes = {
            name: {"after_image": mode} for name, mode in zip(tables, ("source", "none", "replica") * 2, strict=False)
        }
        conf = write_conf(tmp_path, [address], scylla=SCYLLA, sync={"tables": modes})
        loops = stack.enter_context(pipeline(conf, tmp_path, cache))
        for name in LOOPS:
            loops.start(name)
        write = partial(world.write, habits=HABITS, change_every_s=NEW_GENERATION_EVERY_S)
        write(20)
        writing = threading.Thread(target=write, args=(WRITING_S,))
        writing.start()
        with killing(loops, chance, kills):
            bootstrap(conf, ",".join(copied), tmp_path)
            writing.join()
        began = time.monotonic()
        wait_until_drained(loops.store, 400, loops.check)
        # What came late is found by the first sweep after its slot is over, and then goes the late way.
        slot_s = SLOT_MS / 1000
        time.sleep(slot_s - time.time() % slot_s + 1.5 * SCYLLA["near_sweep_ms"] / 1000)
        wait_until_drained(loops.store, 400, loops.check)
        print(f"drained after {time.monotonic() - began:.0f} s; {dict(world.counts)}; killed {dict(kills)}")
        print(f"log rows: {world.materialiser.written}; at {world.cluster.now_us() // SECOND}")
        rows = judge(loops.store, world.direct, tables, copied, load_config(conf).sync, (), SLACK_S)
        print(f"rows: {rows}")
    assert sum(kills.values()) >= 5
    assert world.counts["changes"] >= 4
    assert min(rows.values()) > 5
