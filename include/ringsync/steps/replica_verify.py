"""Compare source and replica cell by cell, and repair what differs (DESIGN §8).

Both sides are seen as of one moment, now: expired cells are gone from both. Each token range is summed up to a
checksum on both sides; only ranges whose checksums differ are read again and compared row by row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from ringsync.config import Config, load_config
from ringsync.ring.tokens import WHOLE_RING
from ringsync.sources.control import ControlClient, ControlServer
from ringsync.sources.plan import ScanPlan, Selection, within
from ringsync.sources.planning import make_scan_plan
from ringsync.sources.session import connect
from ringsync.status import read_statuses
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.storage.port import ObjectStore

Ranges = Sequence[tuple[int, int]]


def run(application: Application, clock: Callable[[], float] = time.time) -> tuple[Report, ExitCode]:
    """Verify, and repair if asked.

    :returns: exit code 1 when differences are left
    :raises StepError: there is no replica
    :raises ReplicaMismatchError: the replica is of another table id or schema
    """
    from ringsync.replica.base import base_folder, own_properties, replica_folder
    from ringsync.replica.changes import ReplicaState, replica_state
    from ringsync.replica.checksum import range_checksums
    from ringsync.replica.compare import Comparison, compare_ranges, repair
    from ringsync.replica.delta_log import read_snapshot
    from ringsync.replica.session import spark_session
    from ringsync.replica.table import ReplicaTable, token_condition
    from ringsync.replica.view import as_selected, live
    from ringsync.sources.cassandra_table import CassandraTable

    config, store = application.config, application.store
    keyspace, name = application.one_table
    folder = base_folder(keyspace, name)
    properties = own_properties(read_snapshot(store, folder).metadata.get("configuration") or {})
    if not properties:
        raise StepError(f"{store.uri(folder)}: there is no replica of {keyspace}.{name}: trigger bootstrap_table first")
    selection = Selection.from_json(properties["selection"])
    plan = make_scan_plan(
        connect(config.cluster_settings()), config, keyspace, name, now=int(clock()), selection=selection
    )
    table = plan.table
    spark = spark_session(f"replica_verify {table.full_name} {application.run}")
    spark.dataSource.register(CassandraTable)
    replica = ReplicaTable(store.uri(replica_folder(keyspace, name)), table)

    def state() -> ReplicaState:
        complete_until_us = synced_until_us(store, table.table_id)  # asked first: the replica has it by then
        found = replica_state(store, table)
        assert found is not None, f"{replica.uri} was there a moment ago"
        return replace(found, as_of_us=max(found.as_of_us, complete_until_us))

    def source_images(ranges: Ranges) -> Any:
        reader = spark.read.format("cassandra_table").option("config", application.config_path)
        return reader.option("plan", within(plan, ranges).to_json()).load()

    def compare(seen: ReplicaState) -> Comparison:
        images = replica.images_at(spark, seen)
        edges = boundaries(config)
        return compare_ranges(
            source_checksums(spark, application, plan, edges),
            range_checksums(images, table, edges, plan.now),
            lambda ranges: as_selected(source_images(ranges), table, plan.now),
            # Here, not behind the functions in Python, to which all other rows would go.
            lambda ranges: live(images.where(token_condition(ranges)), table, plan.now),
            edges,
            table,
            changed_after_us=seen.as_of_us,
            limit=config.verify.max_listed_differences,
        )

    seen = state()
    found = compare(seen)
    report = {**describe(found, plan), "replica_pass": seen.applied}
    if application.options.repair and not found.is_equal:
        written = repair(
            replica,
            source_images(found.differing_ranges),
            found.differing_ranges,
            up_to_pass=seen.applied,
            properties={"run_id": application.run},
        )
        found = compare(state())
        report = {**describe(found, plan), "before_repair": report, "repair": asdict(written)}
    return report, ExitCode.OK if found.is_equal else ExitCode.COMPLETED_WITH_ERRORS


def synced_until_us(store: ObjectStore, table_id: str) -> int:
    """The moment until which the sync has given to a replica all that was not late, in µs since the epoch.

    Without it whatever differs and was written after the bootstrap would pass for a change that is on its way.

    :returns: 0: it does not say
    """
    tables = read_statuses(store).get("bucket_close/close", {}).get("tables", {})
    found = [one.get("complete_until_ms") for one in tables.values() if one["table_id"] == table_id]
    return max((moment * 1000 for moment in found if moment), default=0)


def source_checksums(spark: Any, application: Application, plan: ScanPlan, boundaries: Sequence[int]) -> Any:
    """The source's checksums, each task reading one split and summing it up where it reads.

    Nothing but the sums leaves a task: sending the rows through the JVM would cost several times the reading.
    """
    from ringsync.replica.checksum import PARTIAL_CHECKSUMS, check_boundaries, partial_checksums, sum_up
    from ringsync.replica.live_rows import selected_rows
    from ringsync.sources.cassandra_table import read_split

    edges = check_boundaries(boundaries)
    config_path = application.config_path
    with ControlServer(host=spark.conf.get("spark.driver.host", "127.0.0.1")) as control:
        control.watch_limits(application.store, f"verify-{application.run}", application.config.cluster_limits())
        address = control.address

        def sum_up_splits(batches: Iterator[Any]) -> Iterator[Any]:
            config = load_config(config_path)
            for some in batches:
                for index in some.column("id").to_pylist():
                    with ControlClient(address) as permits:
                        rows = read_split(config, plan, plan.splits[index], permits)
                        shown = (selected_rows(batch, plan.table, plan.now) for batch in rows)
                        yield partial_checksums(shown, plan.table, edges, None)

        count = len(plan.splits)
        tasks = spark.range(0, count, 1, count)
        return sum_up(tasks.mapInArrow(sum_up_splits, PARTIAL_CHECKSUMS).toArrow(), edges)


def boundaries(config: Config) -> list[int]:
    """Equal token ranges over the whole ring, as many as ``verify.ranges``."""
    ranges = WHOLE_RING.split(config.verify.ranges)
    return [ranges[0].start, *(token_range.end for token_range in ranges[:-1]), 2**63 - 1]


def describe(found: Any, plan: ScanPlan) -> Report:
    """A comparison as the report shows it.

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
