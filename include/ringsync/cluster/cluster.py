"""Information that a running cluster gives about itself: its ring, the size of a table, settings of a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cassandra import InvalidRequest
from cassandra.cluster import Session
from cassandra.policies import HostDistance

from ringsync.cluster.node import NO_ANSWER
from ringsync.ring.ring import Host, Replication, RingError, RingSnapshot, parse_replication
from ringsync.ring.splits import SizeEstimate, combine_estimates

PARTITIONER = "org.apache.cassandra.dht.Murmur3Partitioner"

SYNC_PERIOD = ("commitlog_sync_period", "commitlog_sync_period_in_ms")
"""The time between two syncs of a node's commit log, which make new changes readable: the setting, as Cassandra 4.1 and
later name it, and earlier versions."""

HINT_WINDOW = ("max_hint_window", "max_hint_window_in_ms")
"""Likewise for how long a node keeps hints for another that is down."""

DEFAULT_HINT_WINDOW_MS = 10_800_000
"""Cassandra's and ScyllaDB's default of that setting."""

PARTITION_SIZES = "SELECT keyspace_name, table_name, mebibytes FROM system_views.max_partition_size"
"""(C: db/virtual/TableMetricTables, since 4.0)"""

_DURATIONS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def read_ring(session: Session, keyspace: str) -> RingSnapshot:
    """Read the ring as one node of the cluster sees it now; the driver says which nodes are alive.

    :raises RingError: the partitioner is not Murmur3Partitioner, or the keyspace does not exist
    """
    return RingSnapshot(read_hosts(session), read_replications(session, [keyspace])[keyspace])


def read_hosts(session: Session) -> tuple[Host, ...]:
    """Read the nodes that own tokens, as one node sees them now; the driver says which nodes are alive.

    A node of another datacenter that was down when the driver connected counts as alive: gossip knows better
    (:mod:`ringsync.cluster.gossip`).

    :raises RingError: the partitioner is not Murmur3Partitioner, or a node joins or leaves now
    """
    # All rows must come from one node: every node describes the others.
    local, peers = _read_hosts(session)
    if local.partitioner != PARTITIONER:
        raise RingError(f"the cluster uses {local.partitioner}; ringsync reads clusters with Murmur3Partitioner only")
    session.cluster.refresh_nodes()
    known = {host.host_id: host for host in session.cluster.metadata.all_hosts()}
    # A joining node has no tokens yet, and peers may hold incomplete rows of former nodes.
    usable = (row for row in (local, *peers) if row.host_id and row.tokens and row.data_center and row.rack)
    # The policy asks nodes of the local datacenter only, so the answering node is in it.
    hosts = [_host(row, known, local.data_center) for row in usable]
    return tuple(sorted(hosts, key=lambda host: host.id))


def read_replications(session: Session, keyspaces: Iterable[str]) -> dict[str, Replication]:
    """Read how keyspaces are replicated.

    :raises RingError: a keyspace does not exist
    """
    replications = {}
    for keyspace in sorted(keyspaces):
        options = session.execute(
            "SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = %s", (keyspace,)
        ).one()
        if options is None:
            raise RingError(f"there is no keyspace {keyspace}")
        replications[keyspace] = parse_replication(options.replication)
    return replications


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
    except InvalidRequest:  # ScyllaDB has only this
        peers = session.execute(f"SELECT {columns} FROM system.peers", host=node).all()
    return answer.one(), peers


def read_size_estimate(session: Session, keyspace: str, table: str) -> SizeEstimate | None:
    """Ask every live node for its own ``system.size_estimates``; None: no node has any.

    Each node estimates its primary ranges every five minutes, from flushed data only. Ranges without an estimate, for
    example of a node that is down, are taken to be as dense as the others.
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
        except NO_ANSWER:
            continue  # An estimate is a hint: a node that does not answer must not stop a scan.
    return combine_estimates(rows)


def read_largest_partitions(session: Session) -> dict[tuple[str, str], int] | None:
    """Ask every live node that serves us for the size of the largest partition in the SSTables of each table, MiB.

    :returns: by keyspace and table; None: a node does not say
    """
    largest: dict[tuple[str, str], int] = {}
    distance = session.cluster.profile_manager.distance
    hosts = [host for host in session.cluster.metadata.all_hosts() if distance(host) != HostDistance.IGNORED]
    try:
        for host in hosts:
            for row in session.execute(PARTITION_SIZES, host=host) if host.is_up is not False else ():
                name = row.keyspace_name, row.table_name
                largest[name] = max(largest.get(name, 0), row.mebibytes)
    except NO_ANSWER:
        return None
    return largest


def read_settings(session: Session, host_id: str, names: Sequence[str]) -> dict[str, str]:
    """Ask a node for its settings. ScyllaDB tells none.

    :param names: names of settings as in cassandra.yaml
    :returns: values by name, without settings that the node does not have; nothing if the node cannot be asked
    """
    hosts = [host for host in session.cluster.metadata.all_hosts() if str(host.host_id) == host_id]
    try:
        return settings_of(session, hosts[0], names) if hosts else {}
    except NO_ANSWER:
        return {}


def settings_of(session: Session, host: Any, names: Iterable[str]) -> dict[str, str]:
    """Ask a node for its settings, by one name at a time: a guardrail may forbid lists.

    :param host: the driver's host; None: any
    :returns: values by name, without settings that the node does not have
    :raises Unauthorized: we may not read system_views
    """
    cql = "SELECT value FROM system_views.settings WHERE name = %s"
    answers = {name: session.execute_async(cql, (name,), host=host) for name in names}
    rows = {name: answer.result().one() for name, answer in answers.items()}
    return {name: row.value for name, row in rows.items() if row is not None and row.value is not None}


def setting_ms(settings: Mapping[str, str], names: tuple[str, str]) -> int:
    """Return a duration that a node is set to, ms; 0: not known.

    :param settings: the node's settings
    :param names: :data:`SYNC_PERIOD` or :data:`HINT_WINDOW`
    """
    name, former_name_ms = names
    return duration_ms(settings.get(name) or f"{settings.get(former_name_ms) or 0}ms")


def duration_ms(text: str) -> int:
    """Convert one of Cassandra's durations, e.g. ``10s`` or ``1500ms``, to ms; 0: it is no duration."""
    number = text.rstrip("dhms")
    unit = _DURATIONS_MS.get(text[len(number) :])
    return int(number) * unit if number.isdecimal() and unit else 0
