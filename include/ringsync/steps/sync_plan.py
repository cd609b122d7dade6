"""What the steps of the sync agree on in a window interval: the ring, and the tables (DESIGN §5, step 1).

``plans/sync/<start of the interval, ms>.json`` is written once, by whoever comes first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ringsync.config import Config
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.schema.description import describe, from_description
from ringsync.schema.from_cluster import read_tables
from ringsync.schema.table import Schema, TableSchema
from ringsync.sources.cluster import read_hosts, read_replications
from ringsync.state.staging import Bucket
from ringsync.storage.port import AlreadyExistsError, NotFoundError, ObjectStore
from ringsync.streams.topics import data_topic

KEPT_PLANS = 100


@dataclass(frozen=True)
class SyncTable:
    """A table with ``cdc = true`` that ``sync.include`` and ``sync.exclude`` let us follow.

    :ivar topic: of its messages
    :ivar by_arrival: its rows belong to the interval in which they are read, since its writers set timestamps
    """

    schema: TableSchema
    topic: str
    by_arrival: bool

    @property
    def table_id(self) -> str:
        return self.schema.table_id


@dataclass(frozen=True)
class SyncPlan:
    """The plan of one interval.

    :ivar interval: which
    :ivar hosts: nodes that own tokens, and whether they are alive
    :ivar replications: by keyspace of the tables
    :ivar tables: that are followed
    """

    interval: Bucket
    hosts: tuple[Host, ...]
    replications: Mapping[str, Replication]
    tables: tuple[SyncTable, ...]

    def ring(self, keyspace: str) -> RingSnapshot:
        """The ring with the replication of a keyspace."""
        return RingSnapshot(self.hosts, self.replications[keyspace])

    def to_json(self) -> str:
        """The plan as a JSON object; :meth:`from_json` gives an equal plan back."""
        return json.dumps(
            {
                "interval": str(self.interval),
                "hosts": [asdict(host) for host in self.hosts],
                "replications": {name: asdict(one) for name, one in self.replications.items()},
                "tables": [
                    {"schema": describe(table.schema), "topic": table.topic, "by_arrival": table.by_arrival}
                    for table in self.tables
                ],
            }
        )

    @staticmethod
    def from_json(text: str | bytes) -> SyncPlan:
        """Read what :meth:`to_json` wrote."""
        document = json.loads(text)
        return SyncPlan(
            Bucket.parse(document["interval"]),
            tuple(Host(**{**host, "tokens": tuple(host["tokens"])}) for host in document["hosts"]),
            {name: _replication(one) for name, one in document["replications"].items()},
            tuple(
                SyncTable(from_description(one["schema"]), one["topic"], one["by_arrival"])
                for one in document["tables"]
            ),
        )


def _replication(document: dict[str, Any]) -> Replication:
    return Replication(document["strategy"], tuple((name, factor) for name, factor in document["factors"]))


def interval_at(moment_ms: int, length_ms: int) -> Bucket:
    """The window interval of a moment (ms since the epoch)."""
    return Bucket(moment_ms // length_ms * length_ms, length_ms)


def plan_of(store: ObjectStore, config: Config, session: Any, interval: Bucket) -> SyncPlan:
    """The plan of an interval: that which is there, or one that is made now.

    :raises RingError: the ring cannot be understood, e.g. while nodes join
    :raises ClusterError: the cluster does not answer
    """
    key = f"plans/sync/{interval.start:013}.json"
    try:
        return SyncPlan.from_json(store.get(key))
    except NotFoundError:
        made = make_plan(config, session, read_tables(session), interval)
    try:
        store.put(key, made.to_json().encode(), if_absent=True)
    except AlreadyExistsError:
        return SyncPlan.from_json(store.get(key))
    for stat in store.list("plans/sync/")[:-KEPT_PLANS]:
        store.delete(stat.key)
    return made


def make_plan(config: Config, session: Any, schema: Schema, interval: Bucket) -> SyncPlan:
    """Look what there is now.

    :param schema: of the cluster
    """
    rows = session.execute("SELECT id, cdc FROM system_schema.tables")
    with_cdc = {row.id.hex for row in rows if row.cdc}
    tables = tuple(
        SyncTable(table, data_topic(config.server_name, table), config.sync.bucket_by_of(table.full_name) == "arrival")
        for table in schema.tables
        if table.table_id in with_cdc and config.sync.follows(table.full_name)
    )
    replications = read_replications(session, {table.schema.keyspace for table in tables})
    return SyncPlan(interval, read_hosts(session), replications, tables)
