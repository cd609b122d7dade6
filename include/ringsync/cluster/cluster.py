"""What a running cluster says of itself: its ring, and how big a table is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cassandra import DriverException, InvalidRequest, RequestExecutionException
from cassandra.cluster import NoHostAvailable, Session

from ringsync.ring.ring import Host, Replication, RingError, RingSnapshot, parse_replication
from ringsync.ring.splits import SizeEstimate, combine_estimates

PARTITIONER = "org.apache.cassandra.dht.Murmur3Partitioner"


def read_ring(session: Session, keyspace: str) -> RingSnapshot:
    """The ring as one node of the cluster sees it now; liveness is the driver's opinion.

    :param session: from :func:`ringsync.cluster.session.connect`
    :param keyspace: whose replication to take
    :raises RingError: for another partitioner than Murmur3Partitioner, or a keyspace that does not exist
    """
    hosts = read_hosts(session)
    return RingSnapshot(hosts, read_replications(session, [keyspace])[keyspace])


def read_hosts(session: Session) -> tuple[Host, ...]:
    """The nodes that own tokens, as one of them sees them now; liveness is the driver's opinion.

    :raises RingError: for another partitioner than Murmur3Partitioner, or while a node joins or leaves
    """
    # All rows must come from one node: every node describes the others.
    local, peers = _read_hosts(session)
    if local.partitioner != PARTITIONER:
        raise RingError(f"the cluster uses {local.partitioner}; ringsync reads clusters with Murmur3Partitioner only")
    session.cluster.refresh_nodes()
    known = {host.host_id: host for host in session.cluster.metadata.all_hosts()}
    # The policy asks nodes of the local datacenter only, so whoever answers is of it.
    hosts = [_host(row, known, local.data_center) for row in _usable((local, *peers))]
    return tuple(sorted(hosts, key=lambda host: host.id))


def read_replications(session: Session, keyspaces: Iterable[str]) -> dict[str, Replication]:
    """How keyspaces are replicated.

    :raises RingError: when one of them does not exist
    """
    found = {}
    for keyspace in sorted(keyspaces):
        options = session.execute(
            "SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = %s", (keyspace,)
        ).one()
        if options is None:
            raise RingError(f"there is no keyspace {keyspace}")
        found[keyspace] = parse_replication(options.replication)
    return found


def _host(row: Any, known: Mapping[Any, Any], local: str) -> Host:
    if row.host_id not in known:
        raise RingError(f"node {row.host_id} joined or left while the ring was read: try again")
    driver_host = known[row.host_id]
    return Host(
        id=str(row.host_id),
        address=str(driver_host.endpoint.address),
        port=int(driver_host.endpoint.port),
        datacenter=row.data_center,
        rack=row.rack,
        tokens=tuple(sorted(int(token) for token in row.tokens)),
        # None: the driver has not tried it yet, e.g. a node of another datacenter.
        up=driver_host.is_up is not False,
        is_local=row.data_center == local,
    )


def _read_hosts(session: Session) -> tuple[Any, list[Any]]:
    columns = "host_id, data_center, rack, tokens"
    answer = session.execute(f"SELECT {columns}, partitioner FROM system.local")
    node = answer.response_future.coordinator_host
    try:
        peers = session.execute(f"SELECT {columns} FROM system.peers_v2", host=node).all()
    except InvalidRequest:  # Cassandra 3
        peers = session.execute(f"SELECT {columns} FROM system.peers", host=node).all()
    return answer.one(), peers


def _usable(rows: Iterable[Any]) -> Iterator[Any]:
    """Hosts that own tokens: a joining node has none yet, and peers may hold half-written rows of nodes long gone."""
    return (row for row in rows if row.host_id and row.tokens and row.data_center and row.rack)


def read_size_estimate(session: Session, keyspace: str, table: str) -> SizeEstimate | None:
    """Ask every live node for its own ``system.size_estimates``; None when none of them knows anything.

    Each node estimates its primary ranges, seldom (every five minutes) and only what it has flushed. What the
    answers do not cover, because a node is down or has no row yet, is taken to be as dense as what they cover.

    :param session: from :func:`ringsync.cluster.session.connect`
    """
    rows: dict[tuple[str, str], tuple[int, int]] = {}
    for host in session.cluster.metadata.all_hosts():
        if host.is_up is False:
            continue
        try:
            answer = session.execute(
                "SELECT range_start, range_end, partitions_count, mean_partition_size FROM system.size_estimates "
                "WHERE keyspace_name = %s AND table_name = %s",
                (keyspace, table),
                host=host,
            )
            for row in answer:
                rows[row.range_start, row.range_end] = (row.partitions_count, row.mean_partition_size)
        except (NoHostAvailable, DriverException, RequestExecutionException):
            continue  # An estimate is a hint: a node that does not answer must not stop a scan.
    return combine_estimates(rows)


def read_settings(session: Session, host_id: str, names: Sequence[str]) -> dict[str, str]:
    """Settings of one node, as it says itself (Cassandra 4.0 and later); those that it does not have are left out.

    :param host_id: of the node
    :param names: as in cassandra.yaml
    :returns: nothing at all of a node that cannot be asked
    """
    hosts = [host for host in session.cluster.metadata.all_hosts() if str(host.host_id) == host_id]
    found: dict[str, str] = {}
    try:
        for name in names if hosts else ():
            rows = session.execute(
                "SELECT name, value FROM system_views.settings WHERE name = %s", (name,), host=hosts[0]
            )
            found |= {row.name: row.value for row in rows if row.value is not None}
    except (NoHostAvailable, DriverException, RequestExecutionException):
        return {}
    return found
