"""What all replicas had is known of these replicas only: a node that has joined since may lack it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.ledger.passes import get_pass
from ringsync.ledger.staging import rows_key
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.ring.tokens import WHOLE_RING
from ringsync.steps.close import close_task
from ringsync.steps.close.agreement import Reading
from ringsync.steps.close.close_task import SliceOfBucket, StagedFiles, close_slice
from ringsync.steps.passes import follow_ups as steps
from ringsync.steps.passes.follow_ups import FollowUps
from ringsync.steps.passes.make import Made, PassContext
from ringsync.steps.passes.rows_after import AfterReader
from tests.steps.late_files import Write, change_rows
from tests.steps.test_bootstrap_begins_back import again, bootstrap, follow_ups
from tests.steps.test_close import NOW, TABLE, VERSION, Lake, encode_blocks

TOKENS = {"a": (-50, 0), "b": (-30, 20), "c": (-10, 40), "n": (-20, 10), "r": (-50, 0), "o": (-40, 5)}


def ring(nodes: str, factors: tuple[tuple[str, int], ...] = (("", 3),), down: str = "", **others: Any) -> RankedRing:
    """Nodes by their names; ``r`` has the tokens of ``a``, which it replaces."""
    hosts = (Host(name, f"127.0.0.{ord(name)}", 9042, "dc", "r1", TOKENS[name], name not in down) for name in nodes)
    strategy = "SimpleStrategy" if factors[0][0] == "" else "NetworkTopologyStrategy"
    return ranked(RingSnapshot(tuple(replace(host, **others) for host in hosts), Replication(strategy, factors)))


BEFORE = ring("abc")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def publish(lake: Lake, where: RankedRing, *, patch: pytest.MonkeyPatch) -> FollowUps:
    """A pass of one row, which all replicas have; what is known of it."""
    patch.setattr("tests.steps.test_close.RING", where)
    lake.publish(NOW, [Write(1, len(lake.passes) + 1, "x", NOW.start * 1000 + 5)], by_arrival=False)
    number = len(lake.passes)
    made = get_pass(lake.store, TABLE.table_id, number)
    known = replace(made, counts={**made.counts, "everywhere": 1})
    lake.store.put(f"sync/{TABLE.table_id}/passes/{number:012}.json", json.dumps(asdict(known)).encode())
    return follow_ups(lake)


def levels(found: FollowUps, now: RankedRing) -> str:
    """Which replicas are asked for the rows after changes on which all agree."""
    found.ring = now
    reader = found.reader("source")
    return "all" if reader.disagreed else "one" if reader.one_is_enough else "quorum"


@pytest.mark.parametrize(
    ("now", "asked"),
    [
        (ring("abc"), "one"),
        (ring("abc", down="b"), "one"),  # its level is for the changes themselves to say
        (ring("abcn"), "quorum"),
        (ring("rbc"), "quorum"),
        (ring("ab"), "quorum"),
        (ring("abc", down="b", is_local=False), "one"),
        (ring("abc", (("", 2),)), "all"),
        (ring("abc", (("dc", 3),)), "all"),
    ],
)
def test_one_replica_is_asked_only_in_the_ring_in_which_all_had_what_was_published(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, now: RankedRing, asked: str
) -> None:
    """A node that had just joined was asked alone. It lacked a column that it had dropped while it joined; so did the
    row after the next change."""
    found = publish(lake, BEFORE, patch=monkeypatch)
    assert levels(found, now) == asked
    # What is published now is everywhere in this ring; what was published before still is not.
    found = publish(lake, now, patch=monkeypatch)
    assert levels(found, now) == asked
    again(lake, lambda one: replace(one, epoch=now.ring.epoch))
    assert levels(follow_ups(lake), now) == "one"


def test_logs_of_another_datacenter_tell_nothing_of_this_one(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """``cassandra.local_datacenter`` and ``sync.datacenters`` are not of the topology."""

    def of_two(local: str, read: str) -> RankedRing:
        hosts = (replace(host, datacenter="dc2" if host.id == "n" else "dc1") for host in ring("abn").ring.hosts)
        told = (
            replace(host, is_local=host.datacenter == local, is_read=host.datacenter in read.split()) for host in hosts
        )
        return ranked(RingSnapshot(tuple(told), Replication("NetworkTopologyStrategy", (("dc1", 2), ("dc2", 1)))))

    found = publish(lake, of_two("dc1", "dc1"), patch=monkeypatch)
    assert levels(found, of_two("dc1", "dc1")) == "one"
    assert levels(found, of_two("dc2", "dc1 dc2")) == "quorum"


def test_what_an_older_version_has_published_is_known_of_no_ring(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a later version, which writes more of a pass, keep this one from reading it."""
    publish(lake, BEFORE, patch=monkeypatch)
    key = f"sync/{TABLE.table_id}/passes/{1:012}.json"
    document = json.loads(lake.store.get(key))
    del document["epoch"]
    lake.store.put(key, json.dumps({**document, "of_a_later_version": 1}).encode())
    assert levels(follow_ups(lake), BEFORE) == "quorum"


def test_a_pass_without_rows_is_everywhere(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a pass tells again what a bootstrap has missed."""
    publish(lake, BEFORE, patch=monkeypatch)
    again(lake, lambda one: replace(one, counts={**one.counts, "rows": 0}))
    assert levels(follow_ups(lake), ring("abcn")) == "one"


@pytest.mark.parametrize(("now", "disagreed"), [(BEFORE, False), (ring("abcn"), True), (ring("abc", (("", 2),)), True)])
def test_the_replica_asks_all_for_a_pass_of_another_ring(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, now: RankedRing, disagreed: bool
) -> None:
    bootstrap(lake, "b1")
    readers: list[AfterReader] = []
    real = steps.ReplicaTask

    def task(reader: AfterReader, number: int) -> Any:
        readers.append(reader)
        return real(reader, number)

    monkeypatch.setattr(steps, "ReplicaTask", task)
    lake.passes = list(follow_ups(lake).passes)
    found = publish(lake, BEFORE, patch=monkeypatch)
    found.ring = now
    found.catch_up()
    assert [reader.disagreed for reader in readers] == [disagreed]


def test_a_slice_on_which_all_agree_asks_all_if_the_reader_does(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a keyspace got more replicas, a quorum may be of new ones only."""
    found, asked = publish(lake, BEFORE, patch=monkeypatch), list[AfterReader]()

    def make_outputs(context: PassContext, store: Any, rows: Any, name: str) -> Made:
        asked.append(context.reader)
        return Made(None, next(iter(rows.values())).slice(0, 0))

    monkeypatch.setattr(close_task, "make_outputs", make_outputs)
    rows = change_rows([Write(1, 1, "x", NOW.start * 1000 + 5)], TABLE)
    data, places = encode_blocks([VERSION.to_store(rows)], rows_key("a", 1, "file"))
    lake.store.put(places[0].key, data)
    slices = [SliceOfBucket(str(NOW), (Reading(((places[0], "a"),), WHOLE_RING.unwrap(), 1),), (), ())]
    for now in (BEFORE, ring("abcn"), ring("abc", (("", 2),))):
        found.ring = now
        context = found.context(found.reader("source"), late=False)
        close_slice(context, lake.store, StagedFiles(lake.store, VERSION), "0000", slices, False)
    assert [(one.one_is_enough, one.disagreed) for one in asked] == [(True, False), (False, False), (False, True)]
