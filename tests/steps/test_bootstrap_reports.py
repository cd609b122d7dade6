"""The signs of life of a bootstrap's tables, on a real node: who reads or waits gives them, who has failed does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ringsync.cluster.session import ClusterSettings, connect
from ringsync.progress import Progress
from ringsync.ring.tokens import WHOLE_RING
from ringsync.state.bootstrap import SCANNING, Bootstrap, BootstrapState
from ringsync.state.session import StateSession
from ringsync.steps.bootstrap import collect
from ringsync.steps.bootstrap.collect import Collector, reported
from ringsync.storage.local import LocalStore
from servers.cassandra import CassandraNode

pytestmark = pytest.mark.server

READS, WAITS, FAILED = "reads", "waits", "failed"


def test_who_waits_for_its_publishing_is_alive_and_who_has_failed_is_not(
    cassandra: CassandraNode, keyspace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = connect(ClusterSettings((cassandra.contact_point,), cassandra.port))
    StateSession(session, "cdc").create({"class": "NetworkTopologyStrategy", "datacenter1": "1"})
    state = BootstrapState(session, "cdc")
    monkeypatch.setattr(collect, "BEAT_INTERVAL_S", 0.1)
    monkeypatch.setattr(collect, "PROGRESS_INTERVAL_S", 0.05)
    collectors = {}
    for name in (READS, WAITS, FAILED):
        bootstrap = Bootstrap(keyspace, name, f"{keyspace}-{name}", SCANNING, "{}", "run", 1)
        assert state.begin(bootstrap, None)
        collectors[name] = Collector(state.take_over(bootstrap.id, "run on here"), (WHOLE_RING,), 1, 1)
    said: list[str] = []

    def say(collector: Collector, _: Progress) -> None:
        said.append(collector.ledger.bootstrap_id.rpartition("-")[2])

    def look() -> tuple[set[str], set[str]]:
        """Who is alive, and who has said something since a moment ago."""
        time.sleep(0.5)
        said.clear()
        time.sleep(0.5)
        return {name for name in collectors if state.alive(f"{keyspace}-{name}")}, {*said}

    with reported([*collectors.values()], state, LocalStore(tmp_path), "run", say):
        assert look() == ({READS, WAITS, FAILED},) * 2
        collectors[WAITS].over = True
        collectors[FAILED].fail()
        state.rest([f"{keyspace}-{FAILED}"])  # else it lives for 20 s
        assert look() == ({READS, WAITS},) * 2
        state.take_over(f"{keyspace}-{WAITS}", "cancelled elsewhere")
        time.sleep(0.5)
        assert look()[1] == {READS}
    assert state.alive(f"{keyspace}-{READS}") is None
