"""The creation of ringsync's own keyspace, by the first application that needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ringsync.cluster.agreement import nodes_behind
from ringsync.cluster.cluster import read_hosts
from ringsync.config import Config
from ringsync.ring.ring import Host
from ringsync.state.session import TABLES, StateSession


def create_state(session: Any, config: Config) -> None:
    """Create missing keyspace and tables, replicated as configured, and wait until all nodes know them.

    :raises StateError: they cannot be created
    """
    state = StateSession(session, config.state.keyspace)
    if not state.has(TABLES):
        state.create(config.state.replication or replication(read_hosts(session)), partial(nodes_behind, session))
    # Another application may be creating them right now, and only the node that it asked knows them at first. If nodes
    # disagree for another reason, the first use of a missing table fails with an error of its own.
    nodes_behind(session)


def replication(hosts: Sequence[Host]) -> Mapping[str, str]:
    """Return three replicas for each datacenter, or as many as it has nodes."""
    nodes = Counter(host.datacenter for host in hosts)
    factors = {datacenter: str(min(3, count)) for datacenter, count in sorted(nodes.items())}
    return {"class": "NetworkTopologyStrategy", **factors}
