"""Settling of buckets, simulated: whatever replicas have, and whenever it is staged, each row is published once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.ledger.staging import Block, Bucket, Place
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.steps.close.agreement import OpenBucket, Settled, settle, settle_together
from ringsync.steps.close.close_task import cut
from ringsync.steps.stage.staged_files import range_sums

BUCKET = Bucket(60_000, 60_000)
NODES = ("a", "b", "c")


def ring(*, down: str = "", moved: bool = False) -> RankedRing:
    """Three nodes with two tokens each; or with others, after one has moved."""
    tokens = {"a": (-50, 0 if not moved else 5), "b": (-30, 20), "c": (-10, 40)}
    hosts = [Host(name, f"127.0.0.{i}", 9042, "dc", "r1", tokens[name], name != down) for i, name in enumerate(NODES)]
    return ranked(RingSnapshot(tuple(hosts), Replication("SimpleStrategy", (("", 3),))))


def at(key: str) -> Place:
    return Place(key, 0, 1, 0)


def staged(where: RankedRing, key: str, rows: dict[int, int]) -> Block:
    """A block with these rows: token by digest."""
    halves = np.array([(digest, digest * 7919) for digest in rows], np.uint64)
    sums = range_sums(where, np.array(list(rows.values()), np.int64), halves)
    return Block(at(key), "t", 1, str(BUCKET), len(rows), where.ring.digest, sums)


ROWS = st.dictionaries(st.integers(1, 60), st.integers(-60, 60), min_size=1, max_size=25)


@given(
    data=st.data(),
    rows=ROWS,
    down=st.sampled_from(["", "", "c"]),
    moved=st.booleans(),
    most=st.sampled_from([1, 5, 1000]),
)
@settings(max_examples=150, deadline=None)
def test_every_row_is_published_once(
    data: st.DataObject, rows: dict[int, int], down: str, moved: bool, most: int
) -> None:
    before, now = ring(down=down), ring(down=down, moved=moved)
    # Each row is on at least one node; each node stages its rows in some files, at some moments.
    holders = {digest: data.draw(st.sets(st.sampled_from(NODES), min_size=1)) for digest in rows}
    arrivals = [(node, digest) for digest in rows for node in sorted(holders[digest])]
    arrivals = data.draw(st.permutations(arrivals))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arrivals)), max_size=4)))
    contents: dict[str, dict[int, int]] = {}
    bucket = OpenBucket(BUCKET)
    published: list[int] = []
    read_before: set[tuple[str, int, str]] = set()

    def cycle(where: RankedRing, is_closed: bool) -> None:
        while (found := settle(bucket, where, BUCKET.end, is_closed=is_closed, most=most)) is not None:
            take(found, where)

    def take(found: Settled, where: RankedRing) -> None:
        assert found.everywhere == all(not down and not reading.united for _, reading in found.readings)
        for number, reading in found.readings:
            read = [
                digest
                for place, _ in reading.files
                for digest, token in contents[place.key].items()
                if any(token in part for part in reading.ranges)
            ]
            assert len(read) == reading.rows
            if not reading.united:
                assert len({node for _, node in reading.files}) == 1
                once = {(where.ring.digest, number, place.key) for place, _ in reading.files}
                assert not once & read_before
                read_before.update(once)
            published.extend(sorted(set(read) - set(published)))
        bucket.published(found, where.ring.digest)

    for start, end in zip([0, *cuts], [*cuts, len(arrivals)], strict=True):
        for node in NODES:
            own = {digest: rows[digest] for n, digest in arrivals[start:end] if n == node}
            if own:
                key = f"{node}{start}"
                contents[key] = own
                bucket.files[at(key)] = (node, staged(before, key, own))
        cycle(before, False)
    agreed = set(published)
    cycle(now, True)
    assert sorted(published) == sorted(rows)
    assert bucket.united == {at(key) for key in contents}
    # What all live replicas have needs no waiting for the close.
    everywhere = {digest for digest in rows if holders[digest] >= set(NODES) - {down}}
    if everywhere == set(rows):
        assert agreed == set(rows)
    # A straggler's file, even after the close.
    contents["late"] = {1000: 7, next(iter(rows)): rows[next(iter(rows))]}
    bucket.files[at("late")] = ("b", staged(before, "late", contents["late"]))
    cycle(now, True)
    assert sorted(published) == sorted([*rows, 1000])


def test_nothing_is_settled_before_its_interval_is_over() -> None:
    where = ring()
    bucket = OpenBucket(BUCKET, {at(node): (node, staged(where, node, {1: 5})) for node in NODES})
    assert settle(bucket, where, BUCKET.end - 1, is_closed=False) is None
    found = settle(bucket, where, BUCKET.end, is_closed=False)
    assert found is not None
    assert [reading.files for _, reading in found.readings] == [((at(node), node),) for node in ("b",)]


def test_no_key_is_in_two_slices_of_a_pass_when_the_ring_changes() -> None:
    before, now = ring(), ring(moved=True)
    rows = {digest: digest - 60 for digest in range(1, 120)}
    buckets = {}
    for number, where in enumerate((now, before, now, before, before, before, now)):
        bucket = Bucket(BUCKET.start * (number + 1), BUCKET.length)
        files = {at(f"{node}{number}"): (node, staged(where, f"{node}{number}", rows)) for node in NODES}
        buckets[bucket] = OpenBucket(bucket, files)
    passes = 0
    while found := settle_together(buckets, now, BUCKET.end * 9, closed_until=BUCKET.end * 9, most=10**6):
        passes += 1
        slices = cut(found, {one.bucket: () for one in found}, {one.bucket: () for one in found})
        for token in rows.values():
            holding = {
                name
                for name, parts in slices
                for part in parts
                for reading in part.readings
                if any(token in one for one in reading.ranges)
            }
            assert len(holding) == 1
        for one in found:
            buckets[one.bucket].published(one, now.ring.digest)
    assert all(bucket.united == set(bucket.files) for bucket in buckets.values())
    assert passes == 5, "each bucket of before the change had a pass, and so a cycle, of its own"


def test_ranks_are_the_same_for_all_and_the_dead_come_last() -> None:
    alive, one_down = ring(), ring(down="b")
    for number, hosts in enumerate(alive.hosts):
        assert sorted(host.id for host in hosts) == list(NODES)
        assert hosts[0].tokens.count(int(alive.ends[number])) == 1
        assert [h.id for h in one_down.hosts[number]] == [h.id for h in hosts if h.id != "b"] + ["b"]
    assert replace(alive).numbers_of(np.array([-51, -50, -49, 40, 41])).tolist() == [0, 0, 1, 5, 0]


def test_rows_read_at_a_consistency_level_are_settled_at_once_and_once() -> None:
    """Scylla's log tables: there is nothing that replicas have to agree on, whatever the ring looks like."""

    def block(key: str, rows: int) -> Block:
        return Block(at(key), "t", 1, str(BUCKET), rows, "", (), is_agreed=True)

    where = ring(down="a")
    bucket = OpenBucket(BUCKET, {at(key): ("cdc_logs", block(key, rows)) for key, rows in (("x", 3), ("y", 4))})
    assert settle(bucket, where, BUCKET.end - 1, is_closed=False) is None
    found = settle(bucket, where, BUCKET.end, is_closed=False)
    assert found is not None
    ((_, reading),) = found.readings
    assert (reading.rows, reading.united, reading.level) == (7, False, "LOCAL_QUORUM")
    assert {place.key for place, _ in reading.files} == {"x", "y"}
    # A late row may be one that was published long ago.
    assert not found.everywhere
    bucket.published(found, where.ring.digest)
    assert settle(bucket, ring(moved=True), BUCKET.end, is_closed=True) is None
    bucket.files[at("z")] = ("cdc_logs", block("z", 1))
    found = settle(bucket, ring(moved=True), BUCKET.end, is_closed=True)
    assert found is not None
    assert [place.key for place, _ in found.readings[0][1].files] == ["z"]
    bucket.published(found, where.ring.digest)
    assert bucket.united == {at("x"), at("y"), at("z")}


def test_no_key_of_such_rows_is_in_two_slices_of_a_pass() -> None:
    buckets = {}
    for number in range(4):
        bucket = Bucket(BUCKET.start * (number + 1), BUCKET.length)
        block = Block(at(f"{number}"), "t", 1, str(bucket), 60_000, "", (), is_agreed=True)
        buckets[bucket] = OpenBucket(bucket, {block.place: ("cdc_logs", block)})
    found = settle_together(buckets, ring(), BUCKET.end * 9, closed_until=0, most=10**6)
    assert len(found) == 4
    slices = cut(found, {one.bucket: () for one in found}, {one.bucket: () for one in found})
    assert len(slices) == 5
    ranges = [
        {part for bucket in buckets for reading in bucket.readings for part in reading.ranges} for _, buckets in slices
    ]
    for token in (-(2**62), 0, 77, 2**62):
        assert sum(any(token in part for part in of_slice) for of_slice in ranges) == 1
