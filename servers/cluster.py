"""Three real Cassandra nodes of one cluster on the loopback interface, and sessions on them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cassandra import ConsistencyLevel, Unavailable
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.query import SimpleStatement

from servers import ServerError
from servers.cassandra import SUPERUSER, CassandraNode, NodeSettings
from servers.ports import free_port

ACQUAINTED_SECONDS = 60
"""Greatest time after a cluster's start until its nodes see each other as alive, and until they agree on a schema."""


@contextmanager
def three_nodes(
    folder: Path, cache: Path, first: int, each: Sequence[Mapping[str, Any]] = ({},) * 3, **settings: Any
) -> Iterator[list[CassandraNode]]:
    """
    Start three nodes of one cluster, at 127.0.0.<first> and the next two addresses; they end with the block.

    :param folder: folder that holds the nodes' folders.
    :param cache: folder that keeps the jars.
    :param first: last number of the first address.
    :param each: fields of `NodeSettings` of each node.
    :param settings: fields of `NodeSettings`, for all nodes.
    :raises ServerError: a node does not come up, or the others do not see it as alive.
    """
    chosen = {"num_tokens": 8, "heap_mb": 256, **settings}
    common = NodeSettings(address=f"127.0.0.{first}", cluster_name=f"ring{first}", **chosen).on_free_ports()
    common = replace(common, seeds=(common.address,))
    nodes = [
        CassandraNode(
            folder / str(n),
            replace(common, address=f"127.0.0.{n}", jmx_port=free_port(), **own),
            cache,
        )
        for n, own in zip(range(first, first + 3), each, strict=True)
    ]
    try:
        for node in nodes:
            node.start()
        _wait_until_they_know_each_other(nodes)
        yield nodes
    finally:
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(CassandraNode.stop, nodes))


def joining(nodes: list[CassandraNode], **settings: Any) -> CassandraNode:
    """
    Return one more node for a cluster, at the next address, as the last of its nodes; it is yet to be started.

    :param nodes: the nodes of the cluster.
    :param settings: fields of `NodeSettings` that differ from the first node's.
    """
    number = max(int(node.settings.address.rpartition(".")[2]) for node in nodes) + 1
    chosen = {"address": f"127.0.0.{number}", "jmx_port": free_port(), "auto_bootstrap": True, **settings}
    first = nodes[0]
    nodes.append(CassandraNode(first.folder.with_name(str(number)), replace(first.settings, **chosen), first.cache))
    return nodes[-1]


def _wait_until_they_know_each_other(nodes: Sequence[CassandraNode]) -> None:
    """Wait until all nodes see each other as alive: a node answers queries before that."""
    deadline = time.monotonic() + ACQUAINTED_SECONDS
    for node in nodes:
        while (reason := _why_not_all_answer(node)) is not None:
            if time.monotonic() > deadline:
                raise ServerError(f"The nodes do not see each other as alive after {ACQUAINTED_SECONDS} s: {reason}")
            time.sleep(0.2)


def _why_not_all_answer(node: CassandraNode) -> str | None:
    """Let a node query all three, and return why it could not; None: it could."""
    # Cassandra gives this keyspace three replicas.
    query = SimpleStatement(
        "SELECT * FROM system_distributed.view_build_status", consistency_level=ConsistencyLevel.ALL
    )
    cluster = node.cluster()
    try:
        cluster.connect().execute(query)
    except (Unavailable, NoHostAvailable) as error:
        return str(error)
    finally:
        cluster.shutdown()
    return None


@contextmanager
def connected(nodes: Sequence[CassandraNode], consistency_level: int, timeout_s: float = 20) -> Iterator[Any]:
    """
    Yield a session whose statements have a consistency level; as the superuser, if there are roles.

    :param nodes: nodes of one cluster, all with the same port.
    :param consistency_level: a value of `cassandra.ConsistencyLevel`.
    :param timeout_s: seconds until a request is given up.
    """
    profile = ExecutionProfile(consistency_level=consistency_level, request_timeout=timeout_s)
    with_password = nodes[0].settings.authenticator == "password"
    cluster = Cluster(
        [node.contact_point for node in nodes],
        port=nodes[0].port,
        protocol_version=5,
        auth_provider=PlainTextAuthProvider(*SUPERUSER) if with_password else None,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
    )
    try:
        yield cluster.connect()
    finally:
        cluster.shutdown()


@contextmanager
def creating(node: CassandraNode) -> Iterator[Any]:
    """
    Yield a session for many schema statements: not after each of them, but at the end of the block, all nodes agree.

    Nodes learn from gossip, once a second, that they agree; without this each statement takes that long.

    :param node: a node of the cluster, which executes all statements.
    :raises ServerError: the nodes do not agree in time.
    """
    cluster = node.cluster(max_schema_agreement_wait=0)
    try:
        yield cluster.connect()
        if not cluster.control_connection.wait_for_schema_agreement(wait_time=ACQUAINTED_SECONDS):
            raise ServerError(f"The nodes do not agree on the schema after {ACQUAINTED_SECONDS} s.")
    finally:
        cluster.shutdown()


def begin_segments(session: Any, keyspace: str) -> None:
    """
    Make all nodes begin a new segment of their commit logs: they do so when a table is dropped.

    Otherwise the sync would publish rows that were written before ``cdc`` was enabled, in the same segment.

    :param session: a session of the Python driver.
    :param keyspace: an existing keyspace, without a table of the name ``nothing``.
    """
    session.execute(f"CREATE TABLE IF NOT EXISTS {keyspace}.nothing (id int PRIMARY KEY)")
    session.execute(f"DROP TABLE {keyspace}.nothing")
