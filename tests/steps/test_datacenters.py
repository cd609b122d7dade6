"""Datacenters whose logs are not read, and those that no read asks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from ringsync.cluster.schema import NodeTables
from ringsync.config import load_config
from ringsync.images.from_changes import row_images_of
from ringsync.ledger.staging import Block, Bucket, Place
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.schema.table import Schema
from ringsync.sources.lookup.read import RowsRead
from ringsync.steps import sync_plan
from ringsync.steps.close.agreement import OpenBucket, settle
from ringsync.steps.passes import rows_after
from ringsync.steps.passes.rows_after import AfterReader, images_after
from ringsync.steps.sync_plan import SyncPlan, make_plan
from tests.reconciled import merged
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import NOW, TABLE, VERSION, Lake

BOTH = Replication("NetworkTopologyStrategy", (("dc1", 3), ("dc2", 3)))


def hosts(*, down: str = "") -> tuple[Host, ...]:
    """Three nodes in each datacenter; those of the first are asked."""
    return tuple(
        Host(
            name,
            f"127.0.0.{n + 1}",
            9042,
            f"dc{1 + n // 3}",
            "r1",
            (-(2**63) + n * 2**64 // 6 + 1,),
            up=name not in down,
            is_local=n < 3,
        )
        for n, name in enumerate("abcdef")
    )


def planned(lake: Lake, monkeypatch: pytest.MonkeyPatch, nodes: tuple[Host, ...], *, read: list[str]) -> RankedRing:
    """The ring as the plan has it, with ``sync.datacenters``; it is what its JSON says."""
    document = yaml.safe_load(lake.conf.read_text()) | {"sync": {"datacenters": read}}
    lake.conf.write_text(yaml.safe_dump(document))
    monkeypatch.setattr(sync_plan, "read_hosts", lambda session: nodes)
    monkeypatch.setattr(sync_plan, "read_hint_window", lambda session, of_scylla: 0)
    monkeypatch.setattr(sync_plan, "read_tables", lambda session: Schema(()))
    monkeypatch.setattr(sync_plan, "connected_nodes", lambda session: ())
    monkeypatch.setattr(sync_plan, "heartbeats", lambda nodes, now_s: {})
    monkeypatch.setattr(sync_plan, "read_node_tables", lambda node: NodeTables(frozenset(), frozenset(), {}))
    monkeypatch.setattr(sync_plan, "ask_one", lambda session, read: read(session))
    plan = make_plan(lake.store, load_config(lake.conf), None, Bucket(0, 60_000))
    plan = SyncPlan.from_json(replace(plan, replications={"shop": BOTH}).to_json())
    return ranked(plan.ring("shop"))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def level(ring: RankedRing, *, having: str) -> tuple[str, bool] | None:
    """At which level a read meets what these nodes have agreed on, and whether all have."""
    bucket = OpenBucket(Bucket(0, 60_000))
    for node in having:
        place = Place(f"staging/rows/{node}/1.arrow", 0, 1, 0)
        bucket.files[place] = node, Block(place, TABLE.table_id, "0-60000", 1, 1, ring.ring.digest, ((0, 1, 5, 7),))
    one = settle(bucket, ring, 10**9, is_closed=False)
    return None if one is None else (one.readings[0][1].level, one.everywhere)


def test_agreement_is_of_the_nodes_that_are_read_and_that_reads_ask(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ring(down: str, *read: str) -> RankedRing:
        return planned(lake, monkeypatch, hosts(down=down), read=list(read))

    assert level(ring("", "dc1"), having="abc") == ("LOCAL_ONE", True)
    assert level(ring("def", "dc1"), having="abc") == ("LOCAL_ONE", True)
    assert level(ring("a", "dc1"), having="bc") == ("LOCAL_QUORUM", False)
    assert level(ring("ab", "dc1"), having="c") == ("ALL", False)
    assert level(ring("", "dc2"), having="def") == ("ALL", False), "reads ask others"
    assert level(ring(""), having="abc") is None
    assert level(ring(""), having="abcdef") == ("LOCAL_ONE", True)
    assert level(ring("d"), having="abcef") == ("LOCAL_QUORUM", False)
    assert level(ring("ab"), having="cdef") == ("ALL", False)


@pytest.mark.parametrize(("down", "asked", "is_open"), [("", ["ALL"], False), ("e", ["LOCAL_QUORUM"], True)])
@pytest.mark.parametrize("read", [[], ["dc1"]])
def test_all_replicas_are_asked_as_long_as_they_are_alive(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, read: list[str], down: str, asked: list[str], is_open: bool
) -> None:
    ring, levels = planned(lake, monkeypatch, hosts(down=down), read=read), []

    def read_rows(session: Any, table: Any, keys: Any, ring: Any, settings: Any, *_: Any, **__: Any) -> RowsRead:
        """The row was deleted a moment later."""
        levels.append(settings.consistency_level)
        return RowsRead(row_images_of(merged(change_rows([], TABLE), TABLE), TABLE, "raw"), np.empty(0, np.int64), ())

    monkeypatch.setattr(rows_after, "read_rows", read_rows)
    monkeypatch.setattr(rows_after, "ControlClient", nullcontext)
    monkeypatch.setattr(rows_after, "scan_session", lambda *_: SimpleNamespace(reads_as_of=True, facts={}))
    monkeypatch.setattr(rows_after, "tells_element_times", lambda *_: True)
    reader = AfterReader(load_config(lake.conf), VERSION, "source", ring, control=None, replica=None, disagreed=True)  # type: ignore[arg-type]
    found = images_after(reader, merged(change_rows([Write(1, 1, "short-lived", NOW.start * 1000)], TABLE), TABLE))
    assert (levels, found.open.tolist()) == (asked, [is_open])


def test_a_quorum_is_one_of_those_that_are_asked() -> None:
    def most(down: str) -> bool:
        return bool(ranked(RingSnapshot(hosts(down=down), BOTH)).most_live.all())

    assert [most(down) for down in ("", "a", "ab", "def")] == [True, True, False, True]
