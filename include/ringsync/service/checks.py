"""Checks before ``cdcservice start`` starts anything: cluster, object store, brokers, registry.

Each check returns remarks for the operator, or raises an error that says which key or address is wrong and what to do;
ConfigError if a password cannot be read or the store cannot be opened.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cassandra import InvalidRequest, Unauthorized
from cassandra.cluster import Session

from ringsync.cluster.cluster import SYNC_PERIOD, setting_ms, settings_of
from ringsync.cluster.node import NO_ANSWER
from ringsync.cluster.schema import read_tables
from ringsync.cluster.scylla import is_scylla
from ringsync.cluster.session import ClusterError, connect, endpoint_of, explained_errors
from ringsync.config import Config
from ringsync.config.sync import DEFAULT_QUEUE, Sync
from ringsync.cql.identifiers import printable
from ringsync.service.name_checks import check_logins, check_nodes
from ringsync.service.permitted import check_permitted
from ringsync.service.table_checks import CheckError, check_cdc_logs, check_readable, check_topics, tell_tables
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_settings, kafka_settings, store_of

if TYPE_CHECKING:
    from ringsync.streams.kafka.client import KafkaSettings

ANSWER_S = 10.0
"""Seconds within which brokers must answer."""

_SETTINGS = (
    *("cdc_enabled", "cdc_raw_directory", "cdc_block_writes", "cdc_total_space", "cdc_total_space_in_mb"),
    *SYNC_PERIOD,
)


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    :ivar settings: the node's settings by their names in cassandra.yaml; None: it is down and was not asked
    :ivar queue: the queue whose worker reads its log; None: ``sync.datacenters`` leaves it out
    """

    endpoint: str
    settings: Mapping[str, str] | None
    queue: str | None = DEFAULT_QUEUE

    @property
    def has_cdc(self) -> bool:
        """Whether the node is known to capture changes."""
        return self.settings is not None and self.settings.get("cdc_enabled") == "true"

    @property
    def sync_period_ms(self) -> int:
        """Milliseconds between two syncs of the commit log, which make new changes readable; 0: not known."""
        return setting_ms(self.settings or {}, SYNC_PERIOD)


def check_cluster(config: Config) -> list[str]:
    """Check that the cluster answers, that it permits what the sync does, and that a node captures changes.

    :raises ClusterError: unreachable, no login, no rights, forbidden by a guardrail, or columns are masked for us
    :raises StateError: our own keyspace cannot be used
    :raises CheckError: no node captures changes
    """
    with _asked(config) as session:
        if is_scylla(session):
            return check_cdc_logs(session, config)
        remarks = check_nodes(session.cluster.metadata.all_hosts(), config)
        nodes = read_nodes(session, config.sync)
        rows = session.execute("SELECT keyspace_name, table_name, cdc FROM system_schema.tables")
        names = sorted((row.keyspace_name, row.table_name) for row in rows if row.cdc)
        tables = {f"{printable(keyspace)}.{printable(table)}": (keyspace, table) for keyspace, table in names}
        followed = {name for table, name in tables.items() if config.sync.follows(table)}
        for name in sorted(followed):
            check_readable(session, *name)
        remarks = [*judge_nodes(nodes, config), *remarks]
        schemas = [table for table in read_tables(session).tables if (table.keyspace, table.name) in followed]
        remarks += check_permitted(session, config, schemas)
    check_topics(filter(config.sync.follows, tables), config)
    return [*tell_tables([*tables], config.sync), *remarks]


def is_of_scylla(config: Config) -> bool:
    """Ask the cluster whether it is ScyllaDB.

    :raises ClusterError: unreachable, no login, no rights
    """
    with _asked(config) as session:
        return is_scylla(session)


@contextmanager
def _asked(config: Config) -> Iterator[Session]:
    """Connect to the cluster, and explain the errors of asking it.

    :raises ClusterError: unreachable, no login, no rights
    """
    session = connect(cluster_settings(config))
    try:
        with explained_errors(config.cassandra.username):
            yield session
    except NO_ANSWER as error:
        raise ClusterError(f"the cluster does not answer: {type(error).__name__}: {error}") from error


def longest_sync_period_ms(config: Config) -> int:
    """Return the longest time, in ms, from a write until all live nodes have it in their readable logs. ScyllaDB writes
    to its CDC logs together with the tables.

    :raises ClusterError: the cluster does not answer
    """
    with _asked(config) as session:
        if is_scylla(session):
            return 0
        return max(node.sync_period_ms for node in read_nodes(session, config.sync))


def read_nodes(session: Session, sync: Sync) -> list[Node]:
    """Read the settings of all nodes; each node knows only its own.

    :raises Unauthorized: we may not read system_views
    """
    nodes = []
    for host in session.cluster.metadata.all_hosts():
        is_read = not sync.datacenters or host.datacenter in sync.datacenters
        queue = sync.queue_of(str(host.endpoint.address), str(host.host_id)) if is_read else None
        try:
            settings = settings_of(session, host, _SETTINGS)
        except (Unauthorized, InvalidRequest):
            raise
        except NO_ANSWER:
            settings = None
        nodes.append(Node(endpoint_of(host), settings, queue))
    return nodes


def judge_nodes(nodes: Collection[Node], config: Config) -> list[str]:
    """Return remarks on the nodes' settings.

    :raises CheckError: no node captures changes, they sync their logs too seldom for the windows, or one worker would
        read several from one folder
    """
    read = [node for node in nodes if node.queue is not None]
    asked = [node for node in read if node.settings is not None]
    capturing = [node for node in asked if node.has_cdc]
    if not capturing:
        raise CheckError(
            "no node captures changes: set cdc_enabled: true in cassandra.yaml of each node and restart it "
            f"(asked: {', '.join(node.endpoint for node in asked) or 'none, all are down'})"
        )
    open_ms = config.commitlog_processor_window_count * config.commitlog_processor_window_interval_ms
    slowest = max(capturing, key=lambda node: node.sync_period_ms)
    if slowest.sync_period_ms >= open_ms:
        raise CheckError(
            f"{slowest.endpoint} syncs its commit log every {slowest.sync_period_ms} ms, but buckets are open for "
            f"{open_ms} ms: every change would be late. Lower commitlog_sync_period there, or raise "
            "commitlog_processor_window_count or commitlog_processor_window_interval_ms"
        )
    _check_folders(read, config.sync)
    remarks = [f"nodes that capture changes: {', '.join(node.endpoint for node in capturing)}"]
    if unread := [node.endpoint for node in nodes if node.queue is None]:
        remarks.append(
            f"nodes that are not read (sync.datacenters): {', '.join(unread)}. They need cdc_enabled: false: nobody "
            "empties their cdc_raw, and a node whose cdc_raw is full refuses writes to tables with cdc"
        )
    remarks += [f"warning: {node.endpoint} is down and was not asked" for node in read if node.settings is None]
    remarks += [
        f"warning: {node.endpoint} has cdc_enabled: false: what only this node has is not seen"
        for node in asked
        if not node.has_cdc
    ]
    remarks += [
        f"warning: {node.endpoint} refuses writes once cdc_raw holds {node.settings.get('cdc_total_space')} "
        "(cdc_block_writes: true): docs/sync.md"
        for node in capturing
        if node.settings and node.settings.get("cdc_block_writes") == "true"
    ]
    return remarks


def _check_folders(nodes: Iterable[Node], sync: Sync) -> None:
    """Check that the nodes of a queue have different paths: one process on one host reads all of them.

    :raises CheckError: two nodes have the same path
    """
    endpoints: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in nodes:
        captures = node.settings is None or node.has_cdc
        if node.queue and captures and (folder := sync.cdc_raw or (node.settings or {}).get("cdc_raw_directory")):
            endpoints[node.queue, os.path.normpath(folder)].append(node.endpoint)
    for (queue, folder), sharing in endpoints.items():
        if len(sharing) > 1:
            raise CheckError(
                f"queue {queue}: nodes {', '.join(sorted(sharing))} name the same folder {folder}, which can be of one "
                "of them only: have each read on its own host (sync.queue_of_node), or under a path of its own "
                "(cdc_raw_directory); none of their logs would be read"
            )


def check_store(config: Config) -> list[str]:
    """Check that the object store keeps objects.

    :raises StorageError: it cannot be used
    :raises CheckError: it returns other content than was put
    """
    store = store_of(config)
    key, content = f"control/probe-{secrets.token_hex(8)}", secrets.token_bytes(32)
    store.put(key, content, if_absent=True)
    try:
        if store.get(key) != content:
            raise CheckError(f"{store.url}: what was put into {key} is not what is there (store.url)")
    finally:
        store.delete(key)
    return [f"{store.url} can be written and read", *tell_readers(store)]


def tell_readers(store: ObjectStore) -> list[str]:
    """Return a remark if everybody on this machine can read a store in a folder."""
    if isinstance(store, LocalStore) and os.stat(store.path).st_mode & stat.S_IXOTH:
        return [f"warning: every user of this machine can read {store.url}: chmod o-rwx {store.path} (docs/storage.md)"]
    return []


def check_kafka(config: Config) -> list[str]:
    """Check that the brokers answer and take transactions, if brokers are configured.

    :raises CheckError: they do not answer, refuse us, or take no transactions
    """
    settings = kafka_settings(config)
    if settings is None:
        return ["none configured: the streams are Avro files only"]
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    from ringsync.streams.kafka.client import connection_settings, told

    servers = ", ".join(settings.bootstrap_servers)
    reasons: list[str] = []
    admin = None
    try:
        admin = AdminClient(connection_settings(settings, lambda error: reasons.append(error.str())))
        metadata = admin.list_topics(timeout=ANSWER_S)
    except KafkaException as error:
        if admin is not None:
            admin.poll(0)
        reason = reasons[0] if reasons else told(error.args[0])  # the last says only that all are down
        raise CheckError(
            f"Kafka does not answer at {servers}: {reason}; check kafka.bootstrap_servers, kafka.tls and the login"
        ) from error
    _check_transactions(settings, servers)
    return [f"{len(metadata.brokers)} brokers answer at {servers}, and take transactions"]


def _check_transactions(settings: KafkaSettings, servers: str) -> None:
    """Check that the brokers let us begin transactions, which keep an old relay from disordering a topic."""
    from confluent_kafka import KafkaException, Producer

    from ringsync.streams.kafka.client import TRANSACTIONAL_IDS, producer_settings

    producer = Producer(
        {**producer_settings(settings, lambda _: None), "transactional.id": f"{TRANSACTIONAL_IDS}check"}
    )
    try:
        producer.init_transactions(ANSWER_S)
    except KafkaException as error:
        raise CheckError(
            f"Kafka at {servers} begins no transactions: {error.args[0].str()}; allow Write and Describe on "
            f"transactional ids that begin with {TRANSACTIONAL_IDS}; with fewer than three brokers set "
            "transaction.state.log.replication.factor and transaction.state.log.min.isr (docs/kafka.md)"
        ) from error


def check_registry(config: Config) -> list[str]:
    """Check that the schema registry answers, if one is configured.

    :raises CheckError: it does not answer, does not let us in, or is no schema registry
    """
    settings = kafka_settings(config)
    if settings is None or settings.schema_registry_url is None:
        return []
    from ringsync.streams.kafka.client import registry_of
    from ringsync.streams.sink import RelayError

    registry = registry_of(settings)
    assert registry is not None
    try:
        subjects = registry.subjects()
    except RelayError as error:
        raise CheckError(f"{error} (kafka.schema_registry_url)") from error
    return [f"{registry.url} answers, {len(subjects)} subjects"]


CHECKS = {
    "cluster": check_cluster,
    "store": check_store,
    "kafka": check_kafka,
    "schema registry": check_registry,
    "logins": check_logins,
}
"""Checks by what they look at."""
