"""The merge of a replica's changes into its base, seldom and many at once, and the maintenance of both tables.

A MERGE costs as much for a thousand rows as for a hundred thousand, since it reads the keys of the whole base. It
commits to the base; a second commit then deletes the merged images from the changes. Between these two commits, or
after a kill there, both tables hold the same images. No reader notices it, and the next merge merges them again.

A merge drops rows that are dead for good: they were deleted or expired so long ago that Cassandra itself may have
forgotten it (``gc_grace_seconds``). No older write that they would have to win against can still come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BooleanType

from ringsync.compiled.arrow import Integers, Mask, integers, valid_mask
from ringsync.images.keys import same_key_sql
from ringsync.images.live import live_rows
from ringsync.images.schema import row_image_schema
from ringsync.images.times import cell_times
from ringsync.images.to_changes import has_clustering
from ringsync.replica.base import MERGE
from ringsync.replica.changes import (
    VERSION,
    ReplicaState,
    StaleStateError,
    check_base,
    forget_merged,
    write_checkpoint,
)
from ringsync.replica.delta_log import DeltaSnapshot, file_rows, read_snapshot
from ringsync.replica.features import clustering_columns, writer_features
from ringsync.replica.folders import base_folder, changes_folder
from ringsync.replica.session import limit_batches
from ringsync.replica.table import ReplicaTable, conformed, newest_changes
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

SMALL_FILE_BYTES = 16 * 2**20
MANY_FILES = 16
"""Number of small files from which compacting is worth it."""
SCATTERED_FRACTION = 0.25
"""Fraction of the base's rows, deleted or in small files, above which all files are written again."""

_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_APPLICATION, _VERSION = "spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion"


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge; ``read = updated + inserted + deleted + never_there + superseded``.

    :ivar merged_pass: number of the last pass whose images the base contains now
    :ivar read: images in the changes table
    :ivar superseded: images dropped because the changes had a newer one
    :ivar inserted: rows that the base did not have
    :ivar deleted: rows of the base that are dead for good
    :ivar never_there: rows dead for good that the base did not have
    """

    merged_pass: int
    read: int
    superseded: int
    updated: int
    inserted: int
    deleted: int
    never_there: int


def due(state: ReplicaState, now_ms: int, *, interval_s: float, rows_fraction: float) -> bool:
    """Tell whether it is time to merge: there are changes, and they are many or old.

    :param interval_s: age of the oldest change, in seconds, from which a merge is due
    :param rows_fraction: share of the base's rows, 0…1; a merge is due if there are more changes
    """
    if state.changed_since_ms is None:
        return False
    return state.changed_rows > rows_fraction * state.base_rows or now_ms - state.changed_since_ms >= interval_s * 1000


def merge_changes(
    spark: SparkSession,
    store: ObjectStore,
    replica: ReplicaTable,
    state: ReplicaState,
    *,
    now_s: int,
    dead_kept_s: int,
    properties: Mapping[str, str],
) -> MergeResult:
    """Merge all changes of a state of the replica into its base, and delete them from the changes.

    :param state: state to merge; changes added later stay
    :param dead_kept_s: seconds to keep dead rows; at least the table's ``gc_grace_seconds``
    :param properties: user metadata of the commit beside ``merged_pass``, e.g. ``run_id``
    :raises CONFLICTS: another writer has written to the base meanwhile;
        nothing was merged, or the changes are still there
    :raises StaleStateError: the base has another version than the state, with the same effect: another merge or repair,
        a bootstrap or a change of the table's schema came first
    """
    limit_batches(spark, state.changed_rows, state.changed_bytes)
    folder = base_folder(replica.table.keyspace, replica.table.name)
    version = str(state.changes_version)
    changes = conformed(
        spark.read.format("delta").option("versionAsOf", version).load(replica.changes_uri), replica.table
    )
    newest = _with_dead(newest_changes(changes, replica.table), replica.table, now_s - dead_kept_s, now_s).persist()
    try:
        read = changes.count()
        summary = newest.selectExpr(
            "count(*) AS n", "count_if(`#dead`) AS dead", "min(token) AS low", "max(token) AS high"
        ).first()
        if not summary["n"]:
            return MergeResult(state.applied, 0, 0, 0, 0, 0, 0)
        description = json.dumps({"merged_pass": str(state.applied), **properties})
        check_base(store, replica.table, state, same_version=True)
        done = _merge(spark, replica, newest, (summary["low"], summary["high"]), description, state.base_version)
        if done is None and read_snapshot(store, folder).transactions.get(MERGE, -1) > state.base_version:
            raise StaleStateError(f"{replica.base_uri}: another writer has changed the base meanwhile; merge again")
        done = done or {"Updated": 0, "Inserted": 0, "Deleted": 0}
    finally:
        newest.unpersist()
    forget_merged(store, replica.table, state, now_s * 1000)
    return MergeResult(
        merged_pass=state.applied,
        read=read,
        superseded=read - summary["n"],
        updated=done["Updated"],
        inserted=done["Inserted"],
        deleted=done["Deleted"],
        never_there=summary["dead"] - done["Deleted"],
    )


def _merge(
    spark: SparkSession,
    replica: ReplicaTable,
    newest: DataFrame,
    tokens: tuple[int, int],
    description: str,
    after_version: int,
) -> dict[str, int] | None:
    """Merge; None: nothing was committed, since there was nothing to change, or something else was merged first."""
    names = [f"`{name}`" for name in row_image_schema(replica.table).names]
    # Delta skips a transaction whose version the table has, or had passed, when the MERGE begins to read it.
    transaction = {_APPLICATION: MERGE, _VERSION: str(after_version + 1)}
    with _settings(spark, {_USER_METADATA: description, **transaction}):
        spark.sql(
            f"""
            MERGE INTO {replica.sql_name} AS base USING {{newest}} AS newest
            ON base.token BETWEEN {tokens[0]}L AND {tokens[1]}L AND {same_key_sql(replica.table, "base", "newest")}
            WHEN MATCHED AND newest.`#dead` THEN DELETE
            WHEN MATCHED THEN UPDATE SET {", ".join(f"base.{name} = newest.{name}" for name in names)}
            WHEN NOT MATCHED AND NOT newest.`#dead` THEN
                INSERT ({", ".join(names)}) VALUES ({", ".join(f"newest.{name}" for name in names)})""",
            newest=newest,
        )
    history = spark.sql(f"DESCRIBE HISTORY {replica.sql_name}")
    mine = history.where((history.version > after_version) & (history.userMetadata == description)).first()
    metrics = mine["operationMetrics"] if mine else None
    return metrics and {
        name: int(metrics.get(f"numTargetRows{name}", 0)) for name in ("Updated", "Inserted", "Deleted")
    }


@contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Have settings of the session for a while."""
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, was in before.items():
            if was is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, was)


def _with_dead(images: DataFrame, table: TableSchema, dead_since_s: int, now_s: int) -> DataFrame:
    """Drop ``_version`` and add ``#dead``: whether the row is dead for good."""
    images = images.drop(VERSION)

    def mark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            dead = dead_for_good(batch, table, dead_since_s, now_s)
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, pa.array(dead)], schema=batch.schema.append(pa.field("#dead", pa.bool_()))
            )

    return images.mapInArrow(mark, from_arrow_schema(row_image_schema(table)).add("#dead", BooleanType()))


def dead_for_good(images: pa.RecordBatch, table: TableSchema, dead_since_s: int, now_s: int) -> Mask:
    """Find the dead rows that died so long ago that no copy of an older write can be left.

    :param dead_since_s: seconds since the epoch; a row with a later deletion or expiry is not dead for good
    """
    images = images.cast(row_image_schema(table))
    shown = live_rows(images, table, now_s)
    alive, static = (shown[name].to_numpy(zero_copy_only=False) for name in ("#alive", "#static"))
    # Static cells live in the image without clustering; a row that only repeats them may go.
    dead: Mask = ~(alive | (static & ~has_clustering(images, table)))
    if dead.any():
        dead &= _last_death(images, table) <= dead_since_s
    return dead


def _last_death(images: pa.RecordBatch, table: TableSchema) -> Integers:
    """Return when the last part of each dead row died; the far future if that is unknown."""
    merge, row = images["_merge"], images["_row"]
    deletion, unseen = (pc.struct_field(merge, name) for name in ("deletion_local", "unseen_at"))
    unknown = valid_mask(pc.struct_field(row, "deleted_at")) & ~valid_mask(deletion)
    last = np.where(unknown, np.iinfo(np.int64).max, 0)
    times = [deletion, pc.struct_field(merge, "live_expires_at"), pc.divide(unseen, 1_000_000)]
    times += [cell_times(images, table, column.name)[1] for column in table.value_columns]
    tombstones = pc.struct_field(merge, "tombstones")
    for ended in times:
        if pa.types.is_list(ended.type):
            np.maximum.at(last, integers(pc.list_parent_indices(ended)), integers(pc.list_flatten(ended)))
        else:
            last = np.maximum(last, integers(ended))
    local = pc.struct_field(pc.list_flatten(tombstones), "local_deletion_time")
    np.maximum.at(last, integers(pc.list_parent_indices(tombstones)), integers(local))
    return last


def tidy(spark: SparkSession, store: ObjectStore, replica: ReplicaTable, options: Mapping[str, str]) -> bool:
    """Clean up after a merge: write checkpoints, remove files that no query needs, compact the base if it pays.

    Each merge adds small files with tokens from everywhere to the base, and marks rows deleted in the others. If that
    concerns more than a quarter of the rows, all files are written again in token order.

    :param options: settings by which delta-rs reaches the store
    :returns: whether the base was compacted
    """
    table = replica.table
    name = table.keyspace, table.name
    write_checkpoint(store, base_folder(*name), options)
    write_checkpoint(store, changes_folder(*name), options, forget_old_commits=True)
    spark.sql(f"VACUUM {replica.changes_sql_name}")
    base = read_snapshot(store, base_folder(*name))
    # Neither OPTIMIZE without ZORDER nor REORG keeps rows in order. A table that was ever clustered takes no ZORDER,
    # and FULL only while it has columns to cluster by.
    is_clustered, was_clustered = clustering_columns(base.domains), "clustering" in writer_features(base.protocol)
    if not _is_scattered(base) or (was_clustered and not is_clustered):
        return False
    how = "FULL" if was_clustered else "ZORDER BY (token)"
    spark.sql(f"OPTIMIZE {replica.sql_name} {how}")
    spark.sql(f"VACUUM {replica.sql_name}")
    return True


def _is_scattered(base: DeltaSnapshot) -> bool:
    small = sum(file.get("size", 0) < SMALL_FILE_BYTES for file in base.files)
    in_small = sum(file_rows(file) for file in base.files if file.get("size", 0) < SMALL_FILE_BYTES)
    scattered = base.deleted_rows + (in_small if small >= MANY_FILES else 0)
    return scattered > SCATTERED_FRACTION * max(base.rows, 1)
