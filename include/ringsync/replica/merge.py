"""Bring the newest images of the table of changes into the base, seldom and many at once; and keep both tables tidy.

A MERGE costs as much for a thousand rows as for a hundred thousand (it reads the keys of the whole base). It commits to
the base; what it has merged is then deleted from the changes. Between these two commits, or after a kill there, the
same images are in both, which no reader notices; the next merge merges them again.

Rows that are dead for good are not kept: deleted or expired so long ago that Cassandra itself may have forgotten it
(``gc_grace_seconds``), so that no older write may come any more that they would have to defeat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BooleanType, StructType

from ringsync.compiled.arrow import integers, valid_mask
from ringsync.images.keys import same_key_sql
from ringsync.images.live import live_rows
from ringsync.images.schema import lake_names, row_image_schema
from ringsync.images.times import cell_times
from ringsync.replica.base import base_folder
from ringsync.replica.changes import VERSION, ReplicaState, check_base, forget_merged, write_checkpoint
from ringsync.replica.delta_log import DeltaSnapshot, file_rows, read_snapshot
from ringsync.replica.session import limit_batches, to_spark_schema
from ringsync.replica.table import ReplicaTable, newest_changes
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

SMALL_FILE_BYTES = 16 * 2**20
MANY_FILES = 16
"""So many small files are worth compacting."""
SCATTERED_FRACTION = 0.25
"""Of the base's rows, deleted or in small files; more are worth writing all anew."""

_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"


@dataclass(frozen=True)
class MergeResult:
    """What a merge has done; ``read = updated + inserted + deleted + never_there + superseded``.

    :ivar merged_pass: the last pass whose images are in the base now
    :ivar read: images in the table of changes
    :ivar superseded: rows dropped because a newer one was there
    :ivar updated: rows of the base replaced
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
    """Whether it is time to merge: there are changes, and they are many or old.

    :param now_ms: ms since the epoch
    :param interval_s: changes older than that are merged
    :param rows_fraction: share of the base's rows, 0…1; more changes than that are merged
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
    """Merge all changes of a state of the replica into its base, and delete them.

    :param state: what is added to the changes later stays there
    :param now_s: seconds since the epoch
    :param dead_kept_s: seconds that dead rows are kept; at least the table's ``gc_grace_seconds``
    :param properties: go into the commit's user metadata beside ``merged_pass``, e.g. ``run_id``
    :raises delta.exceptions.DeltaConcurrentModificationException: somebody else has written to the base meanwhile;
        nothing was merged, or the changes are still there
    :raises StaleStateError: a bootstrap has replaced the base meanwhile: the same
    """
    limit_batches(spark, state.changed_rows, state.changed_bytes)
    version = str(state.changes_version)
    changes = spark.read.format("delta").option("versionAsOf", version).load(replica.changes_uri)
    newest = _with_dead(newest_changes(changes, replica.table), replica.table, now_s - dead_kept_s, now_s).persist()
    try:
        read = changes.count()
        found = newest.selectExpr(
            "count(*) AS n", "count_if(`#dead`) AS dead", "min(token) AS low", "max(token) AS high"
        ).first()
        if not found["n"]:
            return MergeResult(state.applied, 0, 0, 0, 0, 0, 0)
        description = json.dumps({"merged_pass": str(state.applied), **properties})
        check_base(store, replica.table, state)
        metrics = _merge(spark, replica, newest, (found["low"], found["high"]), description, state.base_version)
    finally:
        newest.unpersist()
    forget_merged(store, replica.table, state, now_s * 1000)
    return MergeResult(
        merged_pass=state.applied,
        read=read,
        superseded=read - found["n"],
        updated=metrics["Updated"],
        inserted=metrics["Inserted"],
        deleted=metrics["Deleted"],
        never_there=found["dead"] - metrics["Deleted"],
    )


def _merge(
    spark: SparkSession,
    replica: ReplicaTable,
    newest: DataFrame,
    tokens: tuple[int, int],
    description: str,
    after_version: int,
) -> dict[str, int]:
    names = [f"`{name}`" for name in row_image_schema(replica.table).names]
    before = spark.conf.get(_USER_METADATA, "")
    spark.conf.set(_USER_METADATA, description)
    try:
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
    finally:
        if before:
            spark.conf.set(_USER_METADATA, before)
        else:
            spark.conf.unset(_USER_METADATA)
    history = spark.sql(f"DESCRIBE HISTORY {replica.sql_name}")
    mine = history.where((history.version > after_version) & (history.userMetadata == description)).first()
    metrics = mine["operationMetrics"] if mine else {}  # a merge that changes nothing commits nothing
    return {name: int(metrics.get(f"numTargetRows{name}", 0)) for name in ("Updated", "Inserted", "Deleted")}


def _with_dead(images: DataFrame, table: TableSchema, dead_since_s: int, now_s: int) -> DataFrame:
    """Images without ``_version``, with ``#dead``: dead for good."""
    images = images.drop(VERSION)

    def mark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            dead = dead_for_good(batch, table, dead_since_s, now_s)
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, pa.array(dead)], schema=batch.schema.append(pa.field("#dead", pa.bool_()))
            )

    return images.mapInArrow(mark, StructType([*to_spark_schema(row_image_schema(table))]).add("#dead", BooleanType()))


def dead_for_good(images: pa.RecordBatch, table: TableSchema, dead_since_s: int, now_s: int) -> npt.NDArray[np.bool_]:
    """Rows of which nothing lives, and everything died so long ago that no copy of an older write can be left.

    :param dead_since_s: seconds since the epoch: what was deleted or has expired later is kept
    :param now_s: seconds since the epoch
    """
    images = images.cast(row_image_schema(table))
    shown = live_rows(images, table, now_s)
    alive = shown["#alive"]
    if table.clustering and table.of_kind("static"):
        # Static cells live in the image without clustering; a row that only repeats them may go.
        name = lake_names(table)[table.clustering[0].name]
        alone = pc.and_(pc.is_null(images[name]), pc.is_null(pc.struct_field(images["_x"], [name, "raw"])))
        alive = pc.or_(alive, pc.and_(shown["#static"], alone))
    dead: npt.NDArray[np.bool_] = ~alive.to_numpy(zero_copy_only=False)
    if dead.any():
        dead &= _last_death(images, table) <= dead_since_s
    return dead


def _last_death(images: pa.RecordBatch, table: TableSchema) -> npt.NDArray[np.int64]:
    """When the last thing of each row that is dead died, as far as known; far in the future where it is not known."""
    merge, row = images["_merge"], images["_row"]
    deletion, unseen = (pc.struct_field(merge, name) for name in ("deletion_local", "unseen_at"))
    unknown = valid_mask(pc.struct_field(row, "deleted_at")) & ~valid_mask(deletion)
    last = np.where(unknown, np.iinfo(np.int64).max, 0)
    times = [deletion, pc.struct_field(merge, "live_expires_at"), pc.divide(unseen, 1_000_000)]
    times += [cell_times(images, table, column.name)[1] for column in table.value_columns]
    tombstones = pc.struct_field(merge, "tombstones")
    for one in times:
        if pa.types.is_list(one.type):
            np.maximum.at(last, integers(pc.list_parent_indices(one)), integers(pc.list_flatten(one)))
        else:
            last = np.maximum(last, integers(one))
    local = pc.struct_field(pc.list_flatten(tombstones), "local_deletion_time")
    np.maximum.at(last, integers(pc.list_parent_indices(tombstones)), integers(local))
    return last


def tidy(spark: SparkSession, store: ObjectStore, replica: ReplicaTable, options: Mapping[str, str]) -> bool:
    """After a merge: sum both logs up, remove files that no query can need any more, compact the base where it pays.

    Each merge adds small files with tokens from everywhere to the base, and marks rows deleted in the others. Where
    that has come to a quarter of the rows, all files are written anew in token order.

    :param options: settings by which delta-rs reaches the store
    :returns: whether the base was compacted
    """
    table = replica.table
    write_checkpoint(replica.base_uri, options)
    write_checkpoint(replica.changes_uri, options, forget_old_commits=True)
    spark.sql(f"VACUUM {replica.changes_sql_name}")
    if not _is_scattered(read_snapshot(store, base_folder(table.keyspace, table.name))):
        return False
    # Neither OPTIMIZE without ZORDER nor REORG keeps rows in order.
    spark.sql(f"OPTIMIZE {replica.sql_name} ZORDER BY (token)")
    spark.sql(f"VACUUM {replica.sql_name}")
    return True


def _is_scattered(base: DeltaSnapshot) -> bool:
    small = sum(file.get("size", 0) < SMALL_FILE_BYTES for file in base.files)
    in_small = sum(file_rows(file) for file in base.files if file.get("size", 0) < SMALL_FILE_BYTES)
    scattered = base.deleted_rows + (in_small if small >= MANY_FILES else 0)
    return scattered > SCATTERED_FRACTION * max(base.rows, 1)
