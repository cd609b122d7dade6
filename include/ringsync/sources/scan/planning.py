"""The planning of a scan: it reads the cluster once and decides everything."""

from __future__ import annotations

from dataclasses import replace

from cassandra.cluster import Session

from ringsync.cluster.cluster import read_ring, read_size_estimate
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterError
from ringsync.config import Config
from ringsync.ring.coverage import TokenSet
from ringsync.ring.splits import SizeEstimate, plan_splits
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.scan import scan
from ringsync.sources.scan.plan import ScanPlan, Selection
from ringsync.sources.scan.where import WhereError
from ringsync.wiring import cluster_settings


class SelectionError(ClusterError):
    """The columns, token range or condition to read do not fit the table."""


class ElementTimesError(ClusterError):
    """The server cannot give the times of a collection's elements, but the configuration requires them."""


def make_scan_plan(
    session: Session,
    config: Config,
    keyspace: str,
    table: str,
    *,
    now: int,
    times: bool = True,
    selection: Selection | None = None,
) -> ScanPlan:
    """Make the plan for scanning a table, from the present state of the cluster.

    :param session: from :func:`ringsync.cluster.session.connect`
    :param now: seconds since the epoch, see :class:`ScanPlan`
    :param selection: None: all of the table
    :raises UnknownTableError: there is no such table
    :raises SelectionError: the selection does not fit the table
    :raises NoPermissionError: the user may not read the table
    :raises ElementTimesError: the server cannot give the times of elements, and ``replica.element_times`` is not
        ``unknown``
    """
    selection = selection or Selection()
    schema = _selected(read_table(session, keyspace, table), selection)
    scan.check_readable(session, schema, config.cassandra.username)
    missing = scan.columns_without_element_times(session, schema) if times else ()
    if missing and config.replica.element_times == "error":
        raise ElementTimesError(_explain_missing_times(schema, missing))
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
    )
    if selection.where is not None:
        _check_where(config, plan)
    estimate = read_size_estimate(session, keyspace, table)
    return cut(session, config, plan, selection.ranges, estimate, minimum=config.scan.min_splits)


def cut(
    session: Session, config: Config, plan: ScanPlan, ranges: TokenSet, estimate: SizeEstimate | None, *, minimum: int
) -> ScanPlan:
    """Give the plan splits for these ranges, by the present ring.

    :param estimate: estimated size of the whole table
    :param minimum: least number of splits, of any size
    :raises RingError: the ring is not supported or changes now
    """
    ring = read_ring(session, plan.table.keyspace)
    # The policy asks only nodes of the local datacenter, so the answering node is one of them.
    local = session.execute("SELECT data_center FROM system.local").one()
    splits = plan_splits(
        ring,
        estimate,
        split_size_bytes=config.scan.split_size_mb * 2**20,
        minimum=minimum,
        maximum=config.scan.max_splits,
        datacenter=local.data_center,
        within=ranges,
    )
    return replace(plan, ring_digest=ring.digest, splits=splits)


def _check_where(config: Config, plan: ScanPlan) -> None:
    session = scan.scan_session(cluster_settings(config), plan.now)
    try:
        query = scan.scan_query(plan.table, times=False, element_times=False, where=plan.selection.where)
        scan.prepare_scan(session, query)
    except WhereError as error:
        raise SelectionError(str(error)) from error


def _selected(table: TableSchema, selection: Selection) -> TableSchema:
    try:
        return table if selection.columns is None else table.only(selection.columns)
    except ValueError as error:
        raise SelectionError(f"columns: {error}") from None


def _explain_missing_times(table: TableSchema, columns: tuple[Column, ...]) -> str:
    names = ", ".join(f"{column.name} {column.type}" for column in columns)
    return (
        f"{table.full_name}: this server cannot tell WRITETIME and TTL of the elements of {names} (Cassandra can "
        "from 5.0 on). Set replica.element_times: unknown to replicate them without these times"
    )
