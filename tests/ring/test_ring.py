"""Replicas as Cassandra places them; the oracle is the driver's own computation."""

from dataclasses import replace

import pytest
from cassandra.connection import DefaultEndPoint
from cassandra.metadata import Murmur3Token, NetworkTopologyStrategy, SimpleStrategy
from cassandra.policies import ConvictionPolicy
from cassandra.pool import Host as DriverHost
from hypothesis import given, settings

from ringsync.ring.ranks import ranked
from ringsync.ring.ring import Host, Replication, RingError, RingSnapshot, parse_replication, replicas, token_ranges
from ringsync.ring.tokens import RING_WIDTH, TokenRange
from tests.ring.strategies import rings


def host(number: int, *tokens: int, datacenter: str = "dc1", rack: str = "rack1") -> Host:
    return Host(str(number), f"10.0.0.{number}", 9042, datacenter, rack, tokens)


def simple(factor: int, *hosts: Host) -> RingSnapshot:
    return RingSnapshot(hosts, Replication("SimpleStrategy", (("", factor),)))


def drivers_replicas(ring: RingSnapshot) -> list[list[str]]:
    """Addresses by token in ring order, as cassandra-driver computes them."""
    driver_hosts = {}
    for member in ring.hosts:
        driver_host = DriverHost(DefaultEndPoint(member.address, member.port), ConvictionPolicy)
        driver_host.set_location_info(member.datacenter, member.rack)
        driver_hosts[member.id] = driver_host
    owners = {Murmur3Token(token): driver_hosts[member.id] for token, member in ring.owners}
    factors = dict(ring.replication.factors)
    if ring.replication.strategy == "SimpleStrategy":
        strategy = SimpleStrategy({"replication_factor": str(factors[""])})
    else:
        strategy = NetworkTopologyStrategy({name: str(count) for name, count in factors.items()})
    in_order = sorted(owners)
    found = strategy.make_token_replica_map(owners, in_order)
    return [[h.endpoint.address for h in found[token]] for token in in_order]


@settings(max_examples=200)
@given(rings())
def test_replicas_are_those_of_the_driver(ring: RingSnapshot) -> None:
    ours = [[member.address for member in holders] for _, holders in replicas(ring)]
    theirs = drivers_replicas(ring)
    for our, their in zip(ours, theirs, strict=True):
        # The driver counts a host twice that has two tokens on a rack it skipped: a defect of its, not the truth.
        if len(set(their)) == len(their):
            assert sorted(our) == sorted(their)
        assert len(set(our)) == len(our)
    if ring.replication.strategy == "SimpleStrategy":
        assert ours == theirs


@given(rings())
def test_ranges_cover_the_ring_once(ring: RingSnapshot) -> None:
    found = token_ranges(ring)
    assert sum(token_range.width for token_range in found) == RING_WIDTH
    assert all(left.end == right.start for left, right in zip(found, [*found[1:], found[0]], strict=True))


def test_racks_are_preferred_to_ring_order() -> None:
    members = [host(1, 10, rack="a"), host(2, 20, rack="a"), host(3, 30, rack="b")]
    ring = RingSnapshot(tuple(members), Replication("NetworkTopologyStrategy", (("dc1", 2),)))
    by_range = {token_range.end: [member.id for member in holders] for token_range, holders in replicas(ring)}
    assert by_range == {10: ["1", "3"], 20: ["2", "3"], 30: ["3", "1"]}


def test_one_token_is_the_whole_ring() -> None:
    ring = simple(3, host(1, 7))
    assert replicas(ring) == ((TokenRange(7, 7), ring.hosts),)


def test_everywhere() -> None:
    ring = RingSnapshot((host(1, 1), host(2, 2)), Replication("EverywhereStrategy", ()))
    assert [[member.id for member in holders] for _, holders in replicas(ring)] == [["1", "2"], ["2", "1"]]


def test_digest_is_of_the_topology_not_of_liveness() -> None:
    ring = simple(1, host(1, 1), host(2, 2))
    down = simple(1, host(1, 1), replace(host(2, 2), up=False))
    assert ring.digest == down.digest == simple(1, host(2, 2), host(1, 1)).digest
    assert ring.digest != simple(2, host(1, 1), host(2, 2)).digest
    assert ring.digest != simple(1, host(1, 1), host(2, 3)).digest


@pytest.mark.parametrize(
    ("ring", "message"),
    [
        (simple(1, host(1)), "no node of the ring owns a token"),
        (simple(1, host(1, 5), host(2, 5)), "two nodes claim token 5"),
        (RingSnapshot((host(1, 5),), Replication("LocalStrategy", ())), "LocalStrategy is not supported"),
        (
            RingSnapshot((host(1, 5),), Replication("NetworkTopologyStrategy", (("DC1", 3),))),
            "replicated to DC1; the cluster has dc1",
        ),
    ],
)
def test_broken_rings_are_refused(ring: RingSnapshot, message: str) -> None:
    with pytest.raises(RingError, match=message):
        replicas(ring)


def test_replication_options() -> None:
    package = "org.apache.cassandra.locator."
    assert parse_replication({"class": package + "SimpleStrategy", "replication_factor": "3"}) == Replication(
        "SimpleStrategy", (("", 3),)
    )
    assert parse_replication({"class": package + "NetworkTopologyStrategy", "b": "3/1", "a": "2"}) == Replication(
        "NetworkTopologyStrategy", (("a", 2), ("b", 3))
    )


def test_a_node_that_is_away_is_as_one_that_is_down_to_who_agrees_and_reads() -> None:
    """Of the other datacenter, too: as a node whose log is not to be read, it made passes that all replicas have."""
    hosts = [
        Host(f"h{place}", f"10.0.0.{place}", 9042, dc, "r", (place,), is_local=dc == "dc1")
        for place, dc in enumerate(["dc1", "dc1", "dc1", "dc2"])
    ]
    ring = RingSnapshot(tuple(hosts), Replication("NetworkTopologyStrategy", (("dc1", 3), ("dc2", 1))))
    assert set(ranked(ring).levels) == {"LOCAL_ONE"}
    for away in ("h1", "h3"):
        without = ranked(ring.without({away}))
        down = ranked(replace(ring, hosts=tuple(replace(host, up=host.id != away) for host in hosts)))
        assert without.levels == down.levels == ("LOCAL_QUORUM",) * 4
        assert without.live.tolist() == down.live.tolist()
        assert all(host.id != away for hosts in without.hosts for host in hosts[:3]), "it has the last rank"
        assert all(without.all_live), "it answers: only its log is not read"
        assert (without.ring.epoch, without.ring.digest) == (ring.epoch, ring.digest)
