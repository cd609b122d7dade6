"""The planning of a scan: it asks the cluster once and decides everything about the scan."""

from __future__ import annotations

from dataclasses import replace

from cassandra.cluster import Session

from ringsync.cluster.cluster import read_size_estimate
from ringsync.cluster.masks import check_unmasked
from ringsync.cluster.protocol import NOW_SINCE
from ringsync.cluster.session import ClusterError
from ringsync.cluster.shared import Shared
from ringsync.config import Config
from ringsync.ring.ring import RingSnapshot
from ringsync.ring.splits import SizeEstimate, plan_splits
from ringsync.ring.tokens import TokenSet
from ringsync.sources.scan import scan
from ringsync.sources.scan.beginnings import beginning_rows
from ringsync.sources.scan.plan import ScanPlan, Selection
from ringsync.sources.scan.where import WhereError
from ringsync.wiring import cluster_settings


def make_scan_plan(
    session: Session,
    config: Config,
    keyspace: str,
    table: str,
    *,
    now: int,
    times: bool = True,
    selection: Selection | None = None,
    shared: Shared | None = None,
    from_sstables: bool = False,
) -> ScanPlan:
    """Make the plan for scanning a table, from the present state of the cluster.

    :param session: from :func:`ringsync.cluster.session.connect`
    :param now: seconds since the epoch, see :class:`ScanPlan`
    :param selection: None: all of the table
    :param shared: what is known of the cluster; if it knows all tables, the splits are as few as possible: asking all
        nodes for their estimates of each of many tables would cost more than it saves
    :param from_sstables: whether SSTables are read, which have all times, whatever the server can return
    :raises SchemaError: there is no such table
    :raises ClusterError: the user may not read the table, or would read masked values; or the selection does not fit
        the table; or the server cannot return the times of elements, and ``replica.element_times`` is not ``unknown``
    """
    selection = selection or Selection()
    shared = shared or Shared(session)
    schema = shared.table(keyspace, table)
    try:
        schema = schema if selection.columns is None else schema.only(selection.columns)
    except ValueError as error:
        raise ClusterError(f"columns: {error}") from None
    scan.check_readable(session, schema, config.cassandra.username)
    if not from_sstables:
        check_unmasked(session, schema, config.cassandra.username)
    missing = scan.columns_without_element_times(session, schema) if times and not from_sstables else ()
    if missing and config.replica.element_times == "error":
        names = ", ".join(f"{column.name} {column.type}" for column in missing)
        raise ClusterError(
            f"{schema.full_name}: this server cannot return WRITETIME and TTL of the elements of {names} (Cassandra "
            "can from 5.0 on). Set replica.element_times: unknown to replicate them without these times"
        )
    large = bool(schema.clustering) and shared.may_have_large_partitions(keyspace, table)
    estimate = read_size_estimate(session, keyspace, table) if shared.known is None or large else None
    plan = ScanPlan(
        table=schema,
        selection=selection,
        now=now,
        times=times,
        element_times=times and not missing,
        consistency_level=config.cassandra.consistency_level,
        unrepresentable_values=config.replica.unrepresentable_values,
        ring_digest="",
        splits=(),
        exact_expiry=session.cluster.protocol_version >= NOW_SINCE,
        beginning_rows=beginning_rows(estimate, config.cassandra.page_size) if large else None,
    )
    if selection.where is not None:
        reader = scan.scan_session(cluster_settings(config), now)
        try:
            query = scan.scan_query(schema, times=False, element_times=False, where=selection.where)
            scan.prepare_scan(reader, query)
        except WhereError as error:
            raise ClusterError(str(error)) from error
    ring, datacenter = shared.ring(keyspace), shared.datacenter
    if shared.known is not None:
        return cut(ring, datacenter, config, plan, selection.ranges, None, minimum=1)
    return cut(ring, datacenter, config, plan, selection.ranges, estimate, minimum=config.scan.min_splits)


def cut(
    ring: RingSnapshot,
    datacenter: str,
    config: Config,
    plan: ScanPlan,
    ranges: TokenSet,
    estimate: SizeEstimate | None,
    *,
    minimum: int,
) -> ScanPlan:
    """Give the plan splits for these ranges, by the ring.

    :param datacenter: whose nodes are asked first
    :param estimate: estimated size of the whole table
    :param minimum: least number of splits, of any size
    :raises RingError: the ring is not supported
    """
    splits = plan_splits(
        ring,
        estimate,
        split_size_bytes=config.scan.split_size_mb * 2**20,
        minimum=minimum,
        maximum=config.scan.max_splits,
        datacenter=datacenter,
        within=ranges,
    )
    return replace(plan, ring_digest=ring.digest, splits=splits)
