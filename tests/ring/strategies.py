"""Synthetic rings: few or many nodes and tokens, several datacenters and racks, any replication."""

from hypothesis import strategies as st

from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, TokenRange

EDGES = [MIN_TOKEN + 1, MIN_TOKEN + 2, -1, 0, 1, MAX_TOKEN - 1, MAX_TOKEN]

tokens = st.one_of(st.sampled_from(EDGES), st.integers(MIN_TOKEN + 1, MAX_TOKEN), st.integers(-50, 50))
ranges = st.builds(
    TokenRange, st.one_of(st.just(MIN_TOKEN), tokens), st.one_of(st.just(MIN_TOKEN), st.just(MAX_TOKEN), tokens)
)


@st.composite
def rings(draw: st.DrawFn) -> RingSnapshot:
    """A ring whose keyspace at least one node holds."""
    nodes = draw(st.integers(1, 12))
    tokens_each = draw(st.integers(1, 8))
    all_tokens = draw(st.lists(tokens, min_size=nodes, max_size=nodes * tokens_each, unique=True))
    datacenters = draw(st.integers(1, 3))
    racks = draw(st.integers(1, 4))
    hosts = tuple(
        Host(
            id=str(number),
            address=f"10.0.0.{number}",
            port=9042,
            datacenter=f"dc{number % datacenters}",
            rack=f"rack{draw(st.integers(1, racks))}",
            tokens=tuple(sorted(all_tokens[number::nodes])),
            up=draw(st.integers(0, 5)) > 0,
        )
        for number in range(nodes)
    )
    if draw(st.booleans()):
        return RingSnapshot(hosts, Replication("SimpleStrategy", (("", draw(st.integers(1, 5))),)))
    names = sorted({host.datacenter for host in hosts})
    factors = [(name, draw(st.integers(0, 5))) for name in names]
    factors[0] = (factors[0][0], max(1, factors[0][1]))
    return RingSnapshot(hosts, Replication("NetworkTopologyStrategy", tuple(factors)))
