"""Which keys are asked for together: each once, from its own replicas, and never too many."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cql.types import Native
from ringsync.ring.ranks import ranked
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.lookup.keys import STATIC, WHOLE, RowKeys, row_keys
from ringsync.sources.lookup.requests import (
    PARTITIONS,
    Lookup,
    halves,
    lookup_query,
    plan_lookups,
    request_of,
)
from tests.sources.row_key_batches import Key, batch_of

INT = Native("int")
SINGLE = TableSchema(
    "k",
    "single",
    "00" * 16,
    (
        Column("a", "partition_key", INT),
        Column("c", "clustering", INT),
        Column("s", "static", INT),
        Column("v", "regular", INT),
    ),
)
COMPOSITE = TableSchema("k", "composite", "01" * 16, (Column("p", "partition_key", INT), *SINGLE.columns))
HOSTS = tuple(
    Host(str(n), f"127.0.0.{n}", 9042, "dc", "r", tuple(range(-(2**62) + n, 2**62, 2**60))) for n in (1, 2, 3)
)
RING = ranked(RingSnapshot(HOSTS, Replication("SimpleStrategy", (("", 2),))))


def key_of(table: TableSchema, partition: int, clustering: int | None, whole: bool) -> Key:
    first = [struct.pack(">i", partition % 7)] if table is COMPOSITE else []
    own = None if clustering is None or whole else (struct.pack(">i", clustering),)
    return Key((), (*first, struct.pack(">i", partition)), own, whole)


@st.composite
def wanted(draw: st.DrawFn) -> RowKeys:
    table = draw(st.sampled_from([SINGLE, COMPOSITE]))
    pick = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.sampled_from([0, 1, 10, 1500]))
    partitions = pick.integers(0, draw(st.sampled_from([1, 5, 200, 10**6])), count).tolist()
    clusterings = pick.integers(0, draw(st.sampled_from([1, 4, 10**6])), count).tolist()
    kinds = pick.integers(0, draw(st.sampled_from([1, 30])), count).tolist()
    keys = [
        key_of(table, partition, None if kind == 1 else clustering, kind == 2)
        for partition, clustering, kind in zip(partitions, clusterings, kinds, strict=True)
    ]
    found = row_keys(batch_of(keys), table)
    whole = {key.partition for key in keys if key.whole}
    expected = {(key.partition, key.clustering, key.whole) for key in keys if key.whole or key.partition not in whole}
    assert len(found.places) == len(expected)
    assert {(keys[p].partition, keys[p].clustering, keys[p].whole) for p in found.places.tolist()} == expected
    return found


def check(lookup: Lookup, keys: RowKeys) -> None:
    partitions = np.unique(keys.partitions[lookup.keys])
    for number in RING.numbers_of(keys.tokens[lookup.keys]).tolist():
        assert lookup.endpoints == tuple(host.endpoint for host in RING.hosts[number])
    clusterings = keys.clusterings[lookup.keys]
    if lookup.kind in ("static", "whole"):
        assert set(clusterings.tolist()) == {STATIC if lookup.kind == "static" else WHOLE}
    else:
        assert (clusterings >= 0).all()
    assert len(np.unique(keys.prefixes[partitions])) == 1
    assert len(partitions) <= PARTITIONS
    assert len(lookup.keys) <= 3 * PARTITIONS or lookup.most_keys == 1
    request = request_of(lookup, lookup_query(keys.table, lookup.kind, element_times=True).cql, keys)
    assert len(request.values) == request.cql.count("?")


@settings(max_examples=25, deadline=None)
@given(wanted())
def test_each_key_is_asked_for_once_from_its_replicas(keys: RowKeys) -> None:
    everything = np.arange(len(keys.places))
    lookups = plan_lookups(keys, RING)
    assert (
        sorted(np.concatenate([everything[:0], *(lookup.keys for lookup in lookups)]).tolist()) == everything.tolist()
    )
    for lookup in lookups:
        check(lookup, keys)
    left, singles = [*lookups], []
    while left:
        lookup = left.pop()
        parts = halves(lookup, keys)
        assert bool(parts) == (len(lookup.keys) > 1)
        left += parts
        singles += [] if parts else [lookup.keys[0]]
    assert len(singles) == len(set(singles)) == sum(len(look.keys) for look in lookups)


def test_partitions_that_want_the_same_go_together() -> None:
    keys = row_keys(batch_of([key_of(SINGLE, n, n % 5, False) for n in range(3000)]), SINGLE)
    lookups = plan_lookups(keys, RING)
    assert all(len(np.unique(keys.clusterings[lookup.keys])) == 1 for lookup in lookups)
    assert len(lookups) <= 3000 / PARTITIONS + 5 * 3
