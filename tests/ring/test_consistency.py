"""Which nodes a consistency level asks for, checked token by token."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.ring.consistency import asked_hosts, held_by, lacking_hosts, levels_as_good
from ringsync.ring.ring import Host, Replication, RingError, RingSnapshot, replicas
from ringsync.ring.tokens import MAX_TOKEN, WHOLE_RING, TokenRange, intersection
from tests.ring.strategies import rings

LEVELS = ("ONE", "TWO", "THREE", "QUORUM", "ALL", "LOCAL_QUORUM", "EACH_QUORUM", "LOCAL_ONE")


def ring_of(count: int, factor: int) -> RingSnapshot:
    hosts = tuple(Host(str(n), f"10.0.0.{n}", 9042, "dc1", f"r{n}", (n * 100,)) for n in range(count))
    return RingSnapshot(hosts, Replication("NetworkTopologyStrategy", (("dc1", factor),)))


def lacking(ring: RingSnapshot, level: str, *there: str) -> list[str]:
    return [host.id for host in lacking_hosts(ring, level, [WHOLE_RING], there)]


def test_three_nodes_with_three_replicas() -> None:
    ring = ring_of(3, 3)
    assert lacking(ring, "LOCAL_QUORUM", "0", "2") == lacking(ring, "ONE", "1") == []
    assert lacking(ring, "LOCAL_QUORUM", "0") == ["1", "2"]
    assert lacking(ring, "ALL", "0", "2") == ["1"]
    assert lacking(ring, "ONE") == ["0", "1", "2"]
    assert lacking(ring, "THREE", "0", "1") == ["2"]


def test_only_the_ranges_that_are_read_count() -> None:
    ring = ring_of(4, 1)  # node 2 holds (100, 200]
    assert [host.id for host in lacking_hosts(ring, "QUORUM", [TokenRange(120, 180)], {"1"})] == ["2"]
    assert lacking_hosts(ring, "QUORUM", [TokenRange(120, 180)], {"2"}) == ()
    assert [host.id for host in asked_hosts(ring, "QUORUM", [TokenRange(120, 220)])] == ["2", "3"]


def test_other_datacenters() -> None:
    hosts = tuple(
        Host(f"{dc}{n}", f"10.{dc}.0.{n}", 9042, f"dc{dc}", f"r{n}", (dc + n * 10,), is_local=dc == 1)
        for dc in (1, 2)
        for n in range(3)
    )
    ring = RingSnapshot(hosts, Replication("NetworkTopologyStrategy", (("dc1", 3), ("dc2", 3))))
    assert lacking(ring, "LOCAL_QUORUM", "10", "11") == []
    assert lacking(ring, "LOCAL_QUORUM", "20", "21", "22") == ["10", "11", "12"]
    assert lacking(ring, "QUORUM", "10", "11", "12", "20") == []
    assert lacking(ring, "QUORUM", "10", "11", "12") == ["20", "21", "22"]
    assert lacking(ring, "EACH_QUORUM", "10", "11", "12", "20") == ["21", "22"]
    assert [host.id for host in asked_hosts(ring, "LOCAL_ONE", [WHOLE_RING])] == ["10", "11", "12"]


@given(rings(), st.sampled_from(LEVELS), st.sets(st.integers(0, 11)))
def test_with_what_is_lacking_the_level_is_met(ring: RingSnapshot, level: str, some: set[int]) -> None:
    there = {str(number) for number in some}
    needed = {"TWO": 2, "THREE": 3}.get(level, 1)
    asked_of = [[h for h in hosts if h.is_local or not level.startswith("LOCAL_")] for _, hosts in replicas(ring)]
    if level != "EACH_QUORUM" and any(len(hosts) < needed for hosts in asked_of):
        with pytest.raises(RingError, match=r"choose another cassandra\.consistency_level"):
            lacking_hosts(ring, level, [WHOLE_RING], there)
        return
    more = {host.id for host in lacking_hosts(ring, level, [WHOLE_RING], there)}
    assert not more & there
    asked = {host.id for host in asked_hosts(ring, level, [WHOLE_RING])}
    assert more <= asked or level == "EACH_QUORUM"
    if all(len(hosts) >= needed for _, hosts in replicas(ring)):
        assert lacking_hosts(ring, level, [WHOLE_RING], there | asked) == ()


@given(rings(), st.sets(st.integers(0, 11)))
def test_each_token_is_read_from_those_of_its_replicas_that_count(ring: RingSnapshot, some: set[int]) -> None:
    there = {str(number) for number in some}
    wanted = [TokenRange(-1000, 1000), TokenRange(MAX_TOKEN - 5, MAX_TOKEN)]
    held = held_by(ring, wanted, there)
    for node in there:
        owned = [part for part, hosts in replicas(ring) if node in {host.id for host in hosts}]
        assert held.get(node, ()) == intersection(owned, wanted)


def hosts(*datacenters: str) -> tuple[Host, ...]:
    """Replicas of a range, one for each name; those of ``a`` are local."""
    return tuple(Host(f"{n}", "", 0, name, "", (), is_local=name == "a") for n, name in enumerate(datacenters))


@pytest.mark.parametrize(
    ("replicas", "level", "as_good"),
    [
        ("a", "ALL", ["LOCAL_ONE", "ONE", "LOCAL_QUORUM", "QUORUM", "EACH_QUORUM"]),
        ("aa", "ALL", ["LOCAL_QUORUM", "TWO", "QUORUM", "EACH_QUORUM"]),
        ("aaa", "ALL", ["THREE"]),
        ("aaaa", "ALL", []),
        ("aabb", "ALL", ["EACH_QUORUM"]),
        ("aaabbb", "ALL", []),
        ("aaa", "LOCAL_ONE", ["ONE", "LOCAL_QUORUM", "TWO", "QUORUM", "THREE", "EACH_QUORUM", "ALL"]),
        ("aaabbb", "LOCAL_ONE", ["LOCAL_QUORUM", "QUORUM", "EACH_QUORUM", "ALL"]),
        ("aaa", "LOCAL_QUORUM", ["TWO", "QUORUM", "THREE", "EACH_QUORUM", "ALL"]),
        ("aaabbb", "LOCAL_QUORUM", ["EACH_QUORUM", "ALL"]),
        ("aaabb", "LOCAL_QUORUM", ["EACH_QUORUM", "ALL"]),
        ("aaab", "LOCAL_QUORUM", ["QUORUM", "THREE", "EACH_QUORUM", "ALL"]),
    ],
)
def test_levels_that_are_as_good(replicas: str, level: str, as_good: list[str]) -> None:
    assert list(levels_as_good(level, [hosts(*replicas)])) == as_good
    for other in ("LOCAL_ONE", "ONE", "LOCAL_QUORUM", "TWO", "QUORUM", "THREE", "EACH_QUORUM", "ALL"):
        enough = all(meets(hosts(*replicas), some, level) for some in answers(hosts(*replicas), other))
        assert (other in as_good) == (other != level and enough and bool(answers(hosts(*replicas), other)))


def meets(replicas: tuple[Host, ...], some: tuple[Host, ...], level: str) -> bool:
    """Whether these are enough for a level."""
    local = [host for host in replicas if host.is_local]
    here = sum(host.is_local for host in some)
    of_each = {name: sum(host.datacenter == name for host in replicas) for name in {h.datacenter for h in replicas}}
    return {
        "LOCAL_ONE": here >= 1,
        "LOCAL_QUORUM": here > len(local) // 2,
        "EACH_QUORUM": all(sum(h.datacenter == name for h in some) > n // 2 for name, n in of_each.items()),
        "QUORUM": len(some) > len(replicas) // 2,
        "ALL": len(some) == len(replicas),
        "ONE": len(some) >= 1,
        "TWO": len(some) >= 2,
        "THREE": len(some) >= 3,
    }[level]


def answers(replicas: tuple[Host, ...], level: str) -> list[tuple[Host, ...]]:
    """All sets of replicas that are enough for a level."""
    every = (itertools.combinations(replicas, count) for count in range(len(replicas) + 1))
    return [some for sets in every for some in sets if meets(replicas, some, level)]
