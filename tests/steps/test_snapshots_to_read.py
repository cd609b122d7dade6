"""Which snapshots a scan reads: those that are there, if they are enough; else it says which nodes and queues lack."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.ledger.snapshots import (
    FOLDER,
    NodeSnapshot,
    SnapshotsOf,
    keep_snapshots_of,
    put_failure,
    put_manifest,
)
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.ring.tokens import WHOLE_RING
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap.snapshot import snapshots_to_read
from ringsync.storage.local import LocalStore
from ringsync.storage.port import StorageError

BOOTSTRAP = "20261125T101500Z-0000000a"
HOSTS = tuple(Host(f"id-{n}", f"10.0.0.{n}", 9042, "dc1", f"r{n}", (n * 100,)) for n in (1, 2, 3))
RING = RingSnapshot(HOSTS, Replication("NetworkTopologyStrategy", (("dc1", 3),)))
QUEUES = {host.id: f"rack-{host.id[-1]}" for host in HOSTS}


def plan(level: str) -> Any:
    """As much of a plan as says what is read."""
    selection = SimpleNamespace(ranges=[WHOLE_RING])
    scan = SimpleNamespace(table=SimpleNamespace(full_name="shop.orders"), consistency_level=level, selection=selection)
    return SimpleNamespace(bootstrap=SimpleNamespace(id=BOOTSTRAP), scan=scan)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Two of three nodes have a snapshot."""
    found = LocalStore(tmp_path)
    keep_snapshots_of(found, SnapshotsOf(BOOTSTRAP, "shop", "orders", RING, QUEUES))
    for host in HOSTS[:2]:
        put_manifest(found, BOOTSTRAP, NodeSnapshot(host.id, found.url, 0, ()))
    return found


def test_enough_replicas_are_read_and_the_others_are_named(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    about, found = snapshots_to_read(store, plan("LOCAL_QUORUM"))
    assert about.ring == RING
    assert about.queues == QUEUES
    assert {one.host for one in found} == {"id-1", "id-2"}
    said = capsys.readouterr().out
    assert "shop.orders is read without node 10.0.0.3:9042 (id-3): no snapshot" in said
    assert "'rack-3'" in said


def test_too_few_are_an_error_that_names_nodes_and_queues(store: LocalStore) -> None:
    with pytest.raises(StepError, match=r"for ALL .*node 10\.0\.0\.3:9042 \(id-3\): no snapshot .* its queue 'rack-3'"):
        snapshots_to_read(store, plan("ALL"))
    put_failure(store, BOOTSTRAP, "id-3", "node 10.0.0.3:9042: nodetool failed")
    with pytest.raises(StepError, match=r"nodetool failed. Mend the cause"):
        snapshots_to_read(store, plan("ALL"))


def test_without_any_task_the_queues_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="on a worker of each queue"):
        snapshots_to_read(LocalStore(tmp_path), plan("ONE"))


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"sstables": [{}]}', b"\xff"])
def test_a_damaged_manifest_says_what_to_do(store: LocalStore, content: bytes) -> None:
    key = f"{FOLDER}{BOOTSTRAP}/id-2.json"
    store.put(key, content)
    with pytest.raises(StorageError, match=f"{key} cannot be read .* remove it and run the bootstrap again"):
        snapshots_to_read(store, plan("LOCAL_QUORUM"))
