"""Make the plan of a scan: look at the cluster once, decide everything."""

from __future__ import annotations

from cassandra.cluster import Session

from ringsync.config import Config
from ringsync.ring.ring import RingSnapshot
from ringsync.ring.splits import Split, plan_splits
from ringsync.schema.from_cluster import read_table
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.cluster import read_ring, read_size_estimate
from ringsync.sources.plan import ScanPlan
from ringsync.sources.scan import check_readable, columns_without_element_times
from ringsync.sources.session import ClusterError


class ElementTimesError(ClusterError):
    """The server cannot tell when the elements of a collection were written, and the configuration wants to know."""


def make_scan_plan(
    session: Session, config: Config, keyspace: str, table: str, *, now: int, times: bool = True
) -> ScanPlan:
    """Look at the cluster and decide how the table is scanned.

    :param session: from :func:`ringsync.sources.session.connect`
    :param now: seconds since the epoch, see :class:`ScanPlan`
    :param times: whether to read writetimes and expiry
    :raises UnknownTableError: when there is no such table
    :raises NoPermissionError: when the user may not read it
    :raises ElementTimesError: when the server cannot tell the times of elements, unless
        ``replica.element_times`` is ``unknown``
    """
    schema = read_table(session, keyspace, table)
    check_readable(session, schema, config.cassandra.username)
    missing = columns_without_element_times(session, schema) if times else ()
    if missing and config.replica.element_times == "error":
        raise ElementTimesError(_explain_missing_times(schema, missing))
    ring = read_ring(session, keyspace)
    return ScanPlan(
        table=schema,
        now=now,
        times=times,
        element_times=times and not missing,
        consistency_level=config.cassandra.consistency_level,
        unrepresentable_values=config.replica.unrepresentable_values,
        ring_digest=ring.digest,
        splits=_splits(session, config, schema, ring),
    )


def _splits(session: Session, config: Config, table: TableSchema, ring: RingSnapshot) -> tuple[Split, ...]:
    # The policy asks nodes of the local datacenter only, so whoever answers is of it.
    local = session.execute("SELECT data_center FROM system.local").one()
    return plan_splits(
        ring,
        read_size_estimate(session, table.keyspace, table.name),
        split_size_bytes=config.scan.split_size_mb * 2**20,
        minimum=config.scan.min_splits,
        maximum=config.scan.max_splits,
        datacenter=local.data_center,
    )


def _explain_missing_times(table: TableSchema, columns: tuple[Column, ...]) -> str:
    names = ", ".join(f"{column.name} {column.type}" for column in columns)
    return (
        f"{table.full_name}: this server cannot tell WRITETIME and TTL of the elements of {names} (Cassandra can "
        "from 5.0 on). Set replica.element_times: unknown to replicate them without these times"
    )
