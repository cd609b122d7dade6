"""The nodes' clocks are seconds apart, and each coordinator dates the writes by its own: the oracle."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel
from cassandra.policies import HostDistance

from ringsync.config import load_config
from ringsync.ledger.staging import closed_until
from servers.cluster import connected, three_nodes
from servers.jars import fetch
from servers.java import find_java_home
from tests.chaos.under_airflow import until
from tests.sync.judge import judge
from tests.sync.pipeline import WINDOW_MS, pipeline, wait_until_drained, write_conf
from tests.sync.scenario import TABLES, bootstrap, create_schema, kill_and_start, modes, start_loops, statements, write

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

SHIFTS_MS = (0, -3_500, 3_500)
"""By how much the nodes' clocks are wrong: more than a window, so some rows are late, and others come before it.
Nodes whose clocks are further apart than their timeouts do not talk to each other."""
BOOTSTRAPPED = ("workload.single", "workload.collections")
CLOCK = """
public class ShiftedClock implements org.apache.cassandra.utils.Clock {
    public long nanoTime() { return System.nanoTime(); }
    public long currentTimeMillis() { return System.currentTimeMillis() + Long.getLong("shift.ms"); }
}
"""


def compiled(folder: Path, cache: Path) -> Path:
    """A folder with the class of the clock."""
    folder.mkdir()
    (folder / "ShiftedClock.java").write_text(CLOCK)
    javac = find_java_home() / "bin" / "javac"
    subprocess.run([javac, "-cp", f"{fetch('cassandra-5.0', cache)}/*", "ShiftedClock.java"], cwd=folder, check=True)
    return folder


def test_clocks_are_seconds_apart(tmp_path: Path, cache: Path, spark: Any) -> None:
    classes = compiled(tmp_path / "classes", cache)
    clocks = [{"properties": (("cassandra.clock", "ShiftedClock"), ("shift.ms", str(shift)))} for shift in SHIFTS_MS]
    with (
        three_nodes(tmp_path / "nodes", cache, 151, clocks, classes=(classes,)) as nodes,
        connected(nodes, ConsistencyLevel.QUORUM) as session,
        connected(nodes, ConsistencyLevel.ALL) as reading,
    ):
        assert max(SHIFTS_MS) > WINDOW_MS
        create_schema(session)
        # Without its own times the driver leaves them to the coordinators.
        session.use_client_timestamp = False
        apart = set(told_times(session))
        assert max(apart) - min(apart) > max(SHIFTS_MS) - min(SHIFTS_MS) - 1000
        conf = write_conf(tmp_path, nodes, sync={"tables": modes(1)})
        workload = statements(41, 5000)
        with pipeline(conf, tmp_path, cache) as running:
            start_loops(running)
            until(lambda: closed_until(running.store))
            write(session, workload, 100)
            for table in BOOTSTRAPPED:
                bootstrap(conf, table, table, [lambda: write(session, workload, 40)] * 2)
            for loop in list(running.running):
                write(session, workload, 100)
                kill_and_start(running, loop)
            nodes[1].kill()
            write(session, workload, 200)
            nodes[1].start()
            write(session, workload, 200)
            wait_until_drained(running.store, 600, running.check)
            rows = judge(running.store, reading, TABLES, BOOTSTRAPPED, load_config(conf).sync)
            print(f"rows: {rows}")
    assert min(rows.values()) > 5


def told_times(session: Any) -> Iterator[int]:
    """What the nodes say of the time, within a second, ms."""
    for host in session.cluster.metadata.all_hosts():
        assert session.cluster.profile_manager.distance(host) == HostDistance.LOCAL
        ((told,),) = session.execute("SELECT toUnixTimestamp(now()) FROM system.local", host=host)
        yield told
