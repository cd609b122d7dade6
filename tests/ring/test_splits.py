"""Splits cover the ring exactly once, whatever the ring and the estimates look like."""

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.ring.ring import Host, Replication, RingSnapshot, replicas
from ringsync.ring.splits import SizeEstimate, Split, combine_estimates, plan_splits
from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, RING_WIDTH, TokenRange
from tests.ring.strategies import rings

estimates = st.none() | st.builds(SizeEstimate, st.integers(-5, 2**70), st.integers(-5, 2**80))


def even_ring(nodes: int, tokens_each: int, factor: int) -> RingSnapshot:
    """Nodes with equal shares of the ring."""
    step = RING_WIDTH // (nodes * tokens_each)
    owned = [[MIN_TOKEN + step * (1 + n + nodes * i) - 1 for i in range(tokens_each)] for n in range(nodes)]
    hosts = [Host(str(n), f"10.0.0.{n}", 9042, "dc1", "rack1", tuple(owned[n])) for n in range(nodes)]
    return RingSnapshot(tuple(hosts), Replication("SimpleStrategy", (("", factor),)))


def in_token_order(splits: tuple[Split, ...]) -> list[Split]:
    return sorted(splits, key=lambda split: split.ranges[0].range)


def alive(holders: tuple[Host, ...]) -> set[str]:
    """Who can be asked: all, when none is up."""
    return {host.endpoint for host in holders if host.up} or {host.endpoint for host in holders}


@settings(max_examples=200)
@given(rings(), estimates, st.integers(1, 40), st.integers(1, 40))
def test_every_token_is_read_once_and_from_a_replica(
    ring: RingSnapshot, estimate: SizeEstimate | None, minimum: int, maximum: int
) -> None:
    splits = plan_splits(ring, estimate, split_size_bytes=2**26, minimum=minimum, maximum=maximum)
    assert min(minimum, maximum) <= len(splits) <= maximum
    parts = [part for split in in_token_order(splits) for part in split.ranges]
    assert parts[0].range.start == MIN_TOKEN
    assert parts[-1].range.end == MAX_TOKEN
    assert all(left.range.end == right.range.start for left, right in pairwise(parts))
    owned = replicas(ring)
    for part in parts:
        assert part.range.start < part.range.end
        for token in (part.range.start + 1, part.range.end):
            assert set(part.endpoints) == alive(next(holders for token_range, holders in owned if token in token_range))


def test_size_decides_the_number() -> None:
    ring = even_ring(nodes=3, tokens_each=16, factor=3)
    estimate = SizeEstimate(partitions=10_000, bytes=100 * 2**20)
    splits = plan_splits(ring, estimate, split_size_bytes=10 * 2**20, minimum=1, maximum=1000)
    assert len(splits) == 10


def test_nodes_that_all_hold_everything_are_not_cut_by_their_tokens_but_in_two() -> None:
    splits = plan_splits(even_ring(3, 256, 3), None, split_size_bytes=1, minimum=6, maximum=6)
    assert [len(split.ranges) for split in splits] == [2] * 6
    assert Counter(split.endpoint for split in splits) == {f"10.0.0.{n}:9042": 2 for n in range(3)}


def test_tasks_started_together_ask_different_nodes() -> None:
    splits = plan_splits(even_ring(6, 8, 3), None, split_size_bytes=1, minimum=48, maximum=48)
    assert all(left.endpoint != right.endpoint for left, right in pairwise(splits))
    widths: Counter[str] = Counter()
    for split in splits:
        for part in split.ranges:
            widths[part.endpoints[0]] += part.range.width
    assert max(widths.values()) < 1.5 * min(widths.values())


def test_many_small_vnodes_do_not_make_many_tasks() -> None:
    splits = plan_splits(even_ring(20, 64, 3), SizeEstimate(5, 100), split_size_bytes=2**26, minimum=4, maximum=9)
    assert len(splits) == 4


def test_hosts_of_the_wanted_datacenter_are_asked() -> None:
    near = Host("1", "10.0.0.1", 9042, "near", "r", (0,))
    far = Host("2", "10.0.0.2", 9042, "far", "r", (1000,))
    ring = RingSnapshot((near, far), Replication("NetworkTopologyStrategy", (("near", 1), ("far", 1))))
    splits = plan_splits(ring, None, split_size_bytes=1, minimum=2, maximum=2, datacenter="near")
    assert {part.endpoints for split in splits for part in split.ranges} == {("10.0.0.1:9042",)}


def test_estimates_are_extrapolated_from_what_is_known() -> None:
    quarter = {(str(MIN_TOKEN), str(-(2**62))): (100, 10), (str(-(2**62)), "0"): (0, 0)}
    assert combine_estimates(quarter) == SizeEstimate(200, 2000)
    wrapping = {(str(2**62), str(-(2**62))): (7, 3)}
    assert combine_estimates(wrapping) == SizeEstimate(14, 42)
    many = {(str(r.start), str(r.end)): (1, 1) for r in TokenRange(MIN_TOKEN, MIN_TOKEN).split(1000)}
    assert combine_estimates(many) == SizeEstimate(1000, 1000)


def test_no_estimate() -> None:
    assert combine_estimates({}) is None
    assert combine_estimates({("0", "5"): (0, 0)}) is None
