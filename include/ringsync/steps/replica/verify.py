"""The comparison of source and replica, cell by cell, and the repair of differences (docs/replica.md).

Both sides are seen as of one moment, now: expired cells are gone from both. Each token range is summed up to a checksum
on both sides; only ranges whose checksums differ are read again and compared row by row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ringsync.cluster.control import ControlClient, ControlServer
from ringsync.cluster.session import connect
from ringsync.config import Config
from ringsync.ledger.gaps import note_verified
from ringsync.ledger.table_versions import as_recorded, version_of
from ringsync.ring.tokens import WHOLE_RING
from ringsync.sources.scan.plan import ScanPlan, Selection, within
from ringsync.sources.scan.planning import make_scan_plan
from ringsync.status import read_statuses
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.replica.follow_schema import followed_state
from ringsync.steps.replica.session import check_session, store_session
from ringsync.storage import delta_options
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_limits, cluster_settings

if TYPE_CHECKING:
    from ringsync.replica.changes import ReplicaState

Ranges = Sequence[tuple[int, int]]
ROWS_OF_A_TASK = 100_000
"""About how many of the replica's rows a task reads; it opens both tables of the replica."""
CHANGES_OF_A_TASK = 32 << 20
"""About how many bytes of the table of changes a task has in memory."""

REPAIRS = 5
"""How often a repair is begun while merges are faster."""


def run(application: Application, clock: Callable[[], float] = time.time) -> tuple[Report, ExitCode]:
    """Verify, and repair if asked.

    :returns: exit code 1 when differences are left
    :raises ConfigError: Spark lacks a jar to reach the object store
    :raises StepError: there is no replica
    :raises ScanError: the source could not be read; for a repair of a table that is followed, from all replicas
    :raises ReplicaMismatchError: the replica is of another table id, or cannot follow the table's schema yet
    """
    from ringsync.replica.base import base_folder, own_properties, replica_folder
    from ringsync.replica.changes import check_base, outdate_merges
    from ringsync.replica.compare import Comparison, compare_ranges, repair
    from ringsync.replica.delta_log import read_snapshot
    from ringsync.replica.session import limit_batches
    from ringsync.replica.table import ReplicaTable, token_condition
    from ringsync.replica.view import as_selected, live
    from ringsync.sources.cassandra_table import CassandraTable

    config, store = application.config, application.store
    check_session(application)
    keyspace, name = application.one_table
    folder = base_folder(keyspace, name)
    properties = own_properties(read_snapshot(store, folder).metadata.get("configuration") or {})
    if not properties:
        raise StepError(f"{store.uri(folder)}: there is no replica of {keyspace}.{name}: trigger bootstrap_table first")
    selection = Selection.from_json(properties["selection"])
    plan = make_scan_plan(
        connect(cluster_settings(config)), config, keyspace, name, now=int(clock()), selection=selection
    )
    # Recorded before it is used: the history gives columns their names in the lake.
    table = as_recorded(store, plan.table) if plan.table.is_selection else version_of(store, plan.table).table
    plan = replace(plan, table=table)
    spark = store_session(application, f"replica_verify {table.full_name} {application.run}")
    spark.dataSource.register(CassandraTable)
    replica = ReplicaTable(store.uri(replica_folder(keyspace, name)), table)

    def state() -> ReplicaState:
        complete_until_us = synced_until_us(store, table.table_id)  # read first: the replica has all of this by then
        present = followed_state(store, table, delta_options(**config.store.model_dump()))
        assert present is not None, f"{replica.uri} was there a moment ago"
        return replace(present, as_of_us=max(present.as_of_us, complete_until_us))

    def source_images(ranges: Ranges, level: str = plan.consistency_level) -> Any:
        reader = spark.read.format("cassandra_table").option("config", application.config_path)
        asked = replace(within(plan, ranges), consistency_level=level)
        return reader.option("plan", asked.to_json()).load()

    def compare(seen: ReplicaState) -> Comparison:
        edges = boundaries(config)
        limit_batches(spark, seen.base_rows + seen.changed_rows, seen.base_bytes + seen.changed_bytes)
        return compare_ranges(
            source_checksums(spark, application, plan, edges),
            replica_checksums(spark, plan, seen, edges),
            lambda ranges: as_selected(source_images(ranges), table, plan.now),
            # The condition comes first: otherwise all rows would go through the functions in Python.
            lambda ranges: live(replica.images_at(spark, seen).where(token_condition(ranges)), table, plan.now),
            edges,
            table,
            changed_after_us=seen.as_of_us,
            limit=config.verify.max_listed_differences,
        )

    seen = state()
    comparison = compare(seen)
    report = {**describe(comparison, plan), "replica_pass": seen.applied}
    if application.options.repair and not comparison.is_equal:
        level, first = repair_level(store, plan), seen

        def correct() -> Any:
            return repair(
                replica,
                source_images(comparison.differing_ranges, level),
                comparison.differing_ranges,
                up_to_pass=state().applied,
                properties={"run_id": application.run},
                check=lambda: check_base(store, table, first),
            )

        written = again_after_conflicts(correct)
        outdate_merges(store, table, int(clock() * 1000))
        comparison = compare(state())
        report = {
            **describe(comparison, plan),
            "before_repair": report,
            "repair": {**asdict(written), "consistency_level": level},
        }
    if comparison.is_equal:
        # Later rows were not compared: they may be on their way.
        note_verified(store, table.table_id, min(int(plan.now * 1000), seen.as_of_us // 1000))
    return report, ExitCode.OK if comparison.is_equal else ExitCode.COMPLETED_WITH_ERRORS


def again_after_conflicts(repair: Callable[[], Any]) -> Any:
    """Repair, and again if a merge has written to the same files meanwhile.

    :raises StepError: merges were faster each time
    """
    from ringsync.replica.table import CONFLICTS

    for _ in range(REPAIRS):
        try:
            return repair()
        except CONFLICTS as error:
            print(f"ringsync: a merge was faster, and the repair begins anew: {error}", flush=True)
    raise StepError(f"{REPAIRS} times a merge was faster than the repair: repair again when no merge runs")


def repair_level(store: ObjectStore, plan: ScanPlan) -> str:
    """Return the consistency level of a repair's reads: ALL for a table that is followed.

    A row that was published is in the replica, but maybe only one node has it yet. A repair that does not read from
    this node would remove the row for ever: the other nodes get copies later, but these count as published before.
    """
    published = store.list(f"sync/{plan.table.table_id}/published/")
    return "ALL" if published else plan.consistency_level


def synced_until_us(store: ObjectStore, table_id: str) -> int:
    """Return the moment until which the sync has brought all rows but late ones to a replica, µs since the epoch.

    Without it, any difference written after the bootstrap would count as a change that is on its way.

    :returns: 0: unknown
    """
    tables = read_statuses(store).get("bucket_close/close", {}).get("tables", {})
    moments = [table.get("complete_until_ms") for table in tables.values() if table["table_id"] == table_id]
    return max((moment * 1000 for moment in moments if moment), default=0)


def source_checksums(spark: Any, application: Application, plan: ScanPlan, edges: Sequence[int]) -> Any:
    """Return the source's checksums: a task reads a split."""
    from ringsync.images.live import selected_rows
    from ringsync.replica.checksum import range_checksums
    from ringsync.sources.cassandra_table import read_split

    config = application.config
    with ControlServer(host=spark.conf.get("spark.driver.host", "127.0.0.1")) as control:
        control.watch_limits(application.store, f"verify-{application.run}", cluster_limits(config))
        address = control.address

        def read(piece: int) -> Iterator[Any]:
            with ControlClient(address) as permits:
                for batch in read_split(config, plan, plan.splits[piece], permits):
                    yield selected_rows(batch, plan.table, plan.now)

        return range_checksums(spark, len(plan.splits), read, plan.table, edges)


def replica_checksums(spark: Any, plan: ScanPlan, seen: ReplicaState, edges: Sequence[int]) -> Any:
    """Return the replica's checksums: a task reads some token ranges."""
    from ringsync.images.live import shown_rows
    from ringsync.replica.checksum import range_checksums
    from ringsync.replica.lookup import images_between

    wanted = (seen.base_rows + seen.changed_rows) // ROWS_OF_A_TASK, seen.changed_bytes // CHANGES_OF_A_TASK
    pieces = min(max(spark.sparkContext.defaultParallelism, *wanted), len(edges) - 1)
    ends = [edges[(len(edges) - 1) * piece // pieces] for piece in range(pieces + 1)]

    def read(piece: int) -> Iterator[Any]:
        return shown_rows(images_between(seen, plan.table, ends[piece], ends[piece + 1]), plan.table, plan.now)

    return range_checksums(spark, pieces, read, plan.table, edges)


def boundaries(config: Config) -> list[int]:
    """Return the bounds of ``verify.ranges`` equal token ranges over the whole ring."""
    ranges = WHOLE_RING.split(config.verify.ranges)
    return [ranges[0].start, *(token_range.end for token_range in ranges[:-1]), 2**63 - 1]


def describe(found: Any, plan: ScanPlan) -> Report:
    """Return a comparison as the report shows it.

    :param found: :class:`ringsync.replica.compare.Comparison`
    """
    return {
        "consistency_level": plan.consistency_level,
        "ranges": found.ranges,
        "ranges_differing": len(found.differing_ranges),
        "rows": found.source_rows,
        "cells": found.source_cells,
        "replica_rows": found.replica_rows,
        "replica_cells": found.replica_cells,
        "rows_of_differing_ranges": dict(found.rows),
        "differences": sum(found.differences_by_kind.values()),
        "differences_by_kind": dict(found.differences_by_kind),
        "listed": [asdict(difference) for difference in found.differences],
        "times_unknown_for_elements": not plan.element_times,
    }
