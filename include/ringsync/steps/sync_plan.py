"""The plan of a window interval, on which the steps of the sync agree: the ring, and the tables.

The first process that needs ``plans/sync/<start of the interval, ms>.json`` writes it, once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ringsync.changes.identity import TableVersion
from ringsync.cluster.cluster import read_hosts, read_replications
from ringsync.cluster.gossip import Heard, hear, heartbeats
from ringsync.cluster.node import ChangingSchemaError, ask_one, connected_nodes
from ringsync.cluster.schema import read_node_tables, read_tables
from ringsync.cluster.scylla import is_scylla
from ringsync.config import Config
from ringsync.ledger.read_nodes import get_read_node
from ringsync.ledger.staging import Bucket
from ringsync.ledger.table_versions import CdcBegun, TableVersionError, version_document, version_from, version_of
from ringsync.ring.ring import Host, Replication, RingError, RingSnapshot
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.steps.down_nodes import FRESH_MS, down_since, read_hint_window, status_of
from ringsync.steps.holes import note_holes
from ringsync.steps.loop import put_status
from ringsync.steps.stage.claims import is_claimed, known_nodes
from ringsync.storage.clock import store_ms
from ringsync.storage.port import AlreadyExistsError, ChecksumError, NotFoundError, ObjectStore, list_named
from ringsync.streams.files import data_topic

KEPT_PLANS = 100

_PLANS = "plans/sync/"


@dataclass(frozen=True)
class SyncTable:
    """A table that is followed.

    :ivar by_arrival: whether a row belongs to the interval in which it is read, since writers set its timestamp
    """

    version: TableVersion
    topic: str
    by_arrival: bool

    @property
    def schema(self) -> TableSchema:
        return self.version.table

    @property
    def table_id(self) -> str:
        return self.version.table_id


@dataclass(frozen=True)
class FormerHost:
    """A node that has left the ring, and whose log may not be read to its end yet.

    :ivar host: the node as it was known last: ``up`` tells whether it may have been alive when it left
    :ivar since_ms: a moment when it had left, ms since the epoch
    """

    host: Host
    since_ms: int


@dataclass(frozen=True)
class SyncPlan:
    """The plan of one interval.

    :ivar hosts: nodes that own tokens; ``sync.datacenters`` decides whether their logs are read
    :ivar replications: replication of each keyspace that has tables
    :ivar left_out: why a table cannot be followed now, by its name
    :ivar former: nodes that have left the ring, until their claims are given up (:mod:`ringsync.steps.stage.claims`);
        ``is_read`` tells of them, too, whether their logs are read
    :ivar of_scylla: whether changes are in tables (ScyllaDB), not in commit logs
    :ivar heard: the last heartbeats of nodes, by host id; ms since the epoch
    :ivar down: since when nodes are down, ms since the epoch, by host id
    :ivar hint_window_ms: for how long the others keep hints for them; 0: not known
    """

    interval: Bucket
    hosts: tuple[Host, ...]
    replications: Mapping[str, Replication]
    tables: tuple[SyncTable, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    former: tuple[FormerHost, ...] = ()
    of_scylla: bool = False
    heard: Mapping[str, Heard] = field(default_factory=dict)
    down: Mapping[str, int] = field(default_factory=dict)
    hint_window_ms: int = 0

    @property
    def read_hosts(self) -> tuple[Host, ...]:
        """The nodes whose logs are read."""
        return tuple(host for host in self.hosts if host.is_read)

    def left_out_datacenters(self) -> dict[str, list[str]]:
        """Return the addresses of the nodes whose logs are not read, by datacenter."""
        found: dict[str, list[str]] = {}
        for host in self.hosts:
            if not host.is_read:
                found.setdefault(host.datacenter, []).append(host.endpoint)
        return found

    def ring(self, keyspace: str) -> RingSnapshot:
        """Return the ring with the replication of a keyspace."""
        return RingSnapshot(self.hosts, self.replications[keyspace])

    def to_json(self) -> str:
        """Return the plan as a JSON object; :meth:`from_json` gives an equal plan back."""
        return json.dumps(
            {
                "interval": str(self.interval),
                "hosts": [asdict(host) for host in self.hosts],
                "replications": {name: asdict(replication) for name, replication in self.replications.items()},
                "tables": [
                    {"version": version_document(table.version), "topic": table.topic, "by_arrival": table.by_arrival}
                    for table in self.tables
                ],
                "left_out": dict(self.left_out),
                "former": [asdict(former) for former in self.former],
                "of_scylla": self.of_scylla,
                "heard": dict(self.heard),
                "down": dict(self.down),
                "hint_window_ms": self.hint_window_ms,
            }
        )

    @staticmethod
    def from_json(text: str | bytes) -> SyncPlan:
        """Read what :meth:`to_json` wrote."""
        document = json.loads(text)
        return SyncPlan(
            Bucket.parse(document["interval"]),
            tuple(map(_host, document["hosts"])),
            {
                name: Replication(entry["strategy"], tuple(map(tuple, entry["factors"])))
                for name, entry in document["replications"].items()
            },
            tuple(
                SyncTable(version_from(entry["version"]), entry["topic"], entry["by_arrival"])
                for entry in document["tables"]
            ),
            document["left_out"],
            tuple(FormerHost(_host(entry["host"]), entry["since_ms"]) for entry in document["former"]),
            document["of_scylla"],
            {host: Heard(*heard) for host, heard in document["heard"].items()},
            document["down"],
            document["hint_window_ms"],
        )


def _host(document: Mapping[str, Any]) -> Host:
    return Host(**{**document, "tokens": tuple(document["tokens"])})


def interval_at(moment_ms: int, length_ms: int) -> Bucket:
    """Return the window interval of a moment."""
    return Bucket(moment_ms // length_ms * length_ms, length_ms)


def plan_of(
    store: ObjectStore, config: Config, session: Any, interval: Bucket, before: SyncPlan | None = None
) -> SyncPlan:
    """Read the plan of an interval, or make it now. There is none of the future by the store's clock: a worker whose
    clock is ahead gets the present plan.

    :param before: an earlier plan, from which the versions of unchanged tables are taken. It stays the plan, of this
        interval, while the schema changes all the time, so that the sync goes on meanwhile
    :raises ClusterError: the cluster does not answer
    :raises ChangingSchemaError: the schema changes all the time, and there is no plan before
    """
    key = _key(interval)
    try:
        return SyncPlan.from_json(store.get(key))
    except NotFoundError:
        # Listed before the time is asked for: however long this process pauses, what is later is of another clock.
        keys = plan_keys(store)
        present = interval_at(store_ms(store, interval.start), interval.length)
        if present.start < interval.start:
            return plan_of(store, config, session, present, before)
        try:
            made = make_plan(store, config, session, interval, before)
        except ChangingSchemaError:
            if before is None:
                raise
            return replace(before, interval=interval)
    try:
        store.put(key, made.to_json().encode(), if_absent=True)
    except AlreadyExistsError:
        return SyncPlan.from_json(store.get(key))
    if key > max(keys, default=""):  # not where a clock is far behind
        put_status(store, "cluster", "nodes", status_of(made.hosts, made.down, made.interval, made.hint_window_ms))
    # Another process may have made the next plan meanwhile. Later ones are of a time when the store's clock was ahead.
    last = _key(Bucket(present.end, present.length))
    kept = [one for one in keys if one <= last][1 - KEPT_PLANS :]  # and what was made now
    for old in set(keys).difference(kept):
        store.delete(old)
    return made


def plan_keys(store: ObjectStore) -> list[str]:
    """List the keys of the plans that are kept, the oldest first."""
    return [stat.key for stat in list_named(store, _PLANS, r"\d{13}\.json")]


def make_plan(
    store: ObjectStore, config: Config, session: Any, interval: Bucket, before: SyncPlan | None = None
) -> SyncPlan:
    """Make a plan of the present cluster. A table that cannot be planned is left out, with the reason."""
    of_scylla = is_scylla(session)
    schema, told = ask_one(session, lambda node: (read_tables(node), read_node_tables(node)))
    with_cdc = told.with_cdc
    known = {table.table_id: table.version for table in before.tables} if before else {}
    left_out = {table.full_name: table.reason for table in schema.unreadable if table.table_id in with_cdc}
    begun = CdcBegun(store)
    there: tuple[TableSchema | UnreadableTable, ...] = (*schema.tables, *schema.unreadable)
    for one in there:  # also what is left out: its rows wait in the logs
        if one.table_id in with_cdc and config.sync.follows(one.full_name):
            begun.begins(one.table_id, told.altered_ms.get(one.table_id, 0))
    if not of_scylla:
        note_holes(store, config, there, told, begun, interval.start - interval.length)
    wanted, last = config.sync.datacenters, _plan_before(store, interval)
    plan = _of_nodes(session, interval, last, of_scylla=of_scylla)
    hosts = tuple(replace(host, is_read=not wanted or host.datacenter in wanted) for host in plan.hosts)
    replications: dict[str, Replication] = {}
    tables: list[SyncTable] = []
    for table in schema.tables:
        if table.table_id not in with_cdc or not config.sync.follows(table.full_name):
            continue
        try:
            if table.keyspace not in replications:
                replications |= read_replications(session, {table.keyspace})
        except RingError as error:
            left_out[table.full_name] = f"the ring of its keyspace cannot be read: {error}"
            continue
        try:
            tables.append(sync_table(store, config, table, known.get(table.table_id)))
        except TableVersionError as error:
            left_out[table.full_name] = str(error)
    former = tuple(
        replace(one, host=replace(one.host, is_read=not wanted or one.host.datacenter in (*wanted, "")))
        for one in _former(store, hosts, interval, last)
    )
    return replace(plan, hosts=hosts, replications=replications, tables=tuple(tables), left_out=left_out, former=former)


def _of_nodes(session: Any, interval: Bucket, before: SyncPlan | None, *, of_scylla: bool) -> SyncPlan:
    """Begin a plan: it knows the nodes, which of them are down, and since when."""
    if before and before.interval.end < interval.start - FRESH_MS:
        before = replace(before, down={})
        if of_scylla:  # gossip remembers when a node was heard of while nobody looked; ScyllaDB says who is up now
            before = replace(before, heard={host: one._replace(silent_since=0) for host, one in before.heard.items()})
    hosts, nodes, heard = read_hosts(session), [*connected_nodes(session)], before.heard if before else {}
    if beats := heartbeats(nodes, interval.start / 1000):
        heard = hear(beats, [host.id for host in hosts], heard, interval.start)
    down = down_since(hosts, nodes[0].up if nodes else (), heard, before.down if before else {}, interval)
    window_ms = read_hint_window(session, of_scylla=of_scylla) if down else 0
    hosts = tuple(replace(host, up=host.up and host.id not in down) for host in hosts)
    window_ms = window_ms or (before.hint_window_ms if before else 0)
    return SyncPlan(interval, hosts, {}, (), of_scylla=of_scylla, heard=heard, down=down, hint_window_ms=window_ms)


def _former(store: ObjectStore, hosts: Collection[Host], interval: Bucket, before: SyncPlan | None) -> list[FormerHost]:
    """Find the nodes that have left the ring and have a claim: they were read, and maybe not to the end.

    The claims tell which nodes these are. The plan before tells since when, and which were dead; if it does not, they
    have left just now, and were alive.
    """
    there = {host.id for host in hosts}
    gone = [node for node in known_nodes(store) if node not in there and is_claimed(store, node)]
    if not gone:
        return []
    known: dict[str, FormerHost] = {}
    if before is not None:
        is_old = before.interval.end < interval.start - FRESH_MS
        known = {host.id: FormerHost(replace(host, up=host.up or is_old), interval.end) for host in before.hosts}
        known |= {former.host.id: former for former in before.former}
    return [known.get(node) or FormerHost(_remembered(store, node), interval.end) for node in gone]


def _remembered(store: ObjectStore, node: str) -> Host:
    """Return a node of which no plan tells, by its claim. If nothing is known of it, it counts to the default queue."""
    known = get_read_node(store, node)
    if known is None:
        return Host(node, node, 0, "", "", ())
    return Host(node, known.address, known.port, known.datacenter, "", ())


def _plan_before(store: ObjectStore, interval: Bucket) -> SyncPlan | None:
    """Read the newest plan before an interval that is not damaged; None: there is none. Later ones were made by a clock
    that is ahead."""
    for key in reversed([key for key in plan_keys(store) if key < _key(interval)]):
        with suppress(NotFoundError, ChecksumError, ValueError, KeyError, TypeError):
            return SyncPlan.from_json(store.get(key))
    return None


def _key(interval: Bucket) -> str:
    return f"{_PLANS}{interval.start:013}.json"


def sync_table(store: ObjectStore, config: Config, table: TableSchema, known: TableVersion | None = None) -> SyncTable:
    """Return how a table is followed.

    :param known: the version of the table that the caller knows
    """
    by_arrival = config.sync.bucket_by_of(table.full_name) == "arrival"
    return SyncTable(version_of(store, table, known), data_topic(config.server_name, table), by_arrival)
