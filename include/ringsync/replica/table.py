"""The replica of one table as Delta, in Spark: read as row images, ranges of it replaced.

``<uri>/base`` is a plain Delta table of row images (:mod:`ringsync.images.schema`): deletion vectors, no column
mapping, type widening or clustering, so that any engine reads it (docs/replica.md). Its properties
``ringsync.*`` say what it is. ``<uri>/changes``, if it is there, holds newer images of some rows
(:mod:`ringsync.replica.changes`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from ringsync.images.keys import key_columns_sql, same_key_sql
from ringsync.replica.base import ReplicaMismatchError, check_same_schema, check_table_id, identity, own_properties
from ringsync.replica.changes import REPAIR, ReplicaState
from ringsync.schema.table import TableSchema


@dataclass(frozen=True)
class WriteResult:
    """One commit.

    :ivar version: Delta version
    :ivar rows: rows written
    :ivar files: data files written
    :ivar bytes: their size
    """

    version: int
    rows: int
    files: int
    bytes: int


@dataclass(frozen=True)
class ReplicaTable:
    """The replica of one table.

    :ivar uri: the table's folder, ``…/replica/<keyspace>/<table>``: a local path or an object store's URI
    """

    uri: str
    table: TableSchema

    @property
    def base_uri(self) -> str:
        """Folder of the Delta table."""
        return f"{self.uri.rstrip('/')}/base"

    @property
    def changes_uri(self) -> str:
        """Folder of the Delta table of changes, which need not be there."""
        return f"{self.uri.rstrip('/')}/changes"

    @property
    def sql_name(self) -> str:
        """The base as Spark SQL names it."""
        return _sql_name(self.base_uri)

    @property
    def changes_sql_name(self) -> str:
        """The table of changes as Spark SQL names it."""
        return _sql_name(self.changes_uri)

    def replace_ranges(
        self, rows: DataFrame, ranges: Sequence[tuple[int, int]], *, properties: Mapping[str, str]
    ) -> WriteResult:
        """Replace every row whose token lies in one of the ranges, in one commit; other rows stay as they are.

        :param rows: row images of exactly these ranges
        :param ranges: (start, end], not wrapping
        :param properties: go into the commit's user metadata, e.g. ``run_id``
        :raises ReplicaMismatchError: when the base belongs to another table id or schema, or is not there
        """
        spark = rows.sparkSession
        if not DeltaTable.isDeltaTable(spark, self.base_uri):
            raise ReplicaMismatchError(f"{self.base_uri}: no replica of {self.table.full_name} yet: bootstrap it first")
        self.check_same_table(spark)
        description = {**identity(self.table), "repair": "true", **properties}
        (
            rows.write.format("delta")
            .mode("overwrite")
            .option("replaceWhere", token_condition(ranges))
            .option("userMetadata", json.dumps(description))
            # What these rows' images knew of deletions is gone.
            .option("txnAppId", REPAIR)
            .option("txnVersion", str(int(time.time() * 1_000_000)))
            .save(self.base_uri)
        )
        return self._last_commit(spark, description)

    def read_base(self, spark: SparkSession) -> DataFrame:
        """The row images of the base, cells that have expired included (:func:`ringsync.replica.view.live`)."""
        return spark.read.format("delta").load(self.base_uri)

    def read_changes(self, spark: SparkSession) -> DataFrame | None:
        """All images in the table of changes, with ``_version``; None: the base has none."""
        theirs, own = _properties(spark, self.changes_uri), self.properties(spark)
        if not theirs or theirs.get("base", "") != own.get("base", ""):
            return None
        return spark.read.format("delta").load(self.changes_uri)

    def read_images(self, spark: SparkSession) -> DataFrame:
        """The newest image of each row, of base and changes: also rows that are deleted, cells that have expired.

        :raises ReplicaMismatchError: the base is that of a table that was dropped, and created again as this one
        """
        if own := self.properties(spark):
            check_table_id(self.base_uri, own, self.table)
        changes, base = self.read_changes(spark), self.read_base(spark)
        return base if changes is None else newest_images(base, changes, self.table)

    def images_at(self, spark: SparkSession, state: ReplicaState) -> DataFrame:
        """The same as of a state of the replica, whatever is written to it meanwhile."""
        base = _at(spark, self.base_uri, state.base_version)
        if state.changes_version < 0:
            return base
        return newest_images(base, _at(spark, self.changes_uri, state.changes_version), self.table)

    def forget_changes(self, spark: SparkSession, ranges: Sequence[tuple[int, int]], up_to_pass: int) -> None:
        """Delete the images of these ranges and passes from the table of changes, if it is there, in one commit.

        :param ranges: (start, end], not wrapping
        """
        if DeltaTable.isDeltaTable(spark, self.changes_uri):
            condition = f"_version <= {up_to_pass} AND ({token_condition(ranges)})"
            spark.sql(f"DELETE FROM {self.changes_sql_name} WHERE {condition}")

    def properties(self, spark: SparkSession) -> dict[str, str]:
        """The base's ``ringsync.*`` properties without that prefix; empty when there is no base or it is not ours."""
        return _properties(spark, self.base_uri)

    def check_same_table(self, spark: SparkSession) -> None:
        """Look whether the base, if there is one, is the replica of this table with this schema.

        :raises ReplicaMismatchError: it is not
        """
        if not DeltaTable.isDeltaTable(spark, self.base_uri):
            return
        check_same_schema(self.base_uri, self.properties(spark), self.table)

    def _last_commit(self, spark: SparkSession, description: Mapping[str, str]) -> WriteResult:
        """The newest commit with this description: another writer may have committed since."""
        history = spark.sql(f"DESCRIBE HISTORY {self.sql_name}")
        mine = history.where(history.userMetadata == json.dumps(description)).orderBy("version", ascending=False)
        commit = mine.select("version", "operationMetrics").first()
        metrics = commit["operationMetrics"]
        return WriteResult(
            version=commit["version"],
            rows=int(metrics["numOutputRows"]),
            files=int(metrics.get("numFiles", metrics.get("numAddedFiles", 0))),
            bytes=int(metrics.get("numOutputBytes", metrics.get("numAddedBytes", 0))),
        )


def newest_images(base: DataFrame, changes: DataFrame, table: TableSchema) -> DataFrame:
    """Of each key the image with the greatest ``_version`` in the changes, else the base's; columns as in the base."""
    return base.sparkSession.sql(
        # Changes first: Delta resolves tables from left to right, and what a merge moves from the changes to the base
        # in between must be seen twice rather than not at all.
        f"""
        SELECT {_columns(base)} FROM {{newest}} AS newest
        UNION ALL
        SELECT {_columns(base)} FROM {{base}} AS base
        LEFT ANTI JOIN {{changes}} AS changes ON {same_key_sql(table, "base", "changes")}""",
        base=base,
        changes=changes,
        newest=newest_changes(changes, table),
    )


def newest_changes(changes: DataFrame, table: TableSchema) -> DataFrame:
    """Of each key the image with the greatest ``_version``."""
    keys = ", ".join(key_columns_sql(table, "changes"))
    return changes.sparkSession.sql(
        f"""
        SELECT {_columns(changes)} FROM (
            SELECT *, row_number() OVER (PARTITION BY {keys} ORDER BY _version DESC) AS `#number`
            FROM {{changes}} AS changes)
        WHERE `#number` = 1""",
        changes=changes,
    )


def _columns(rows: DataFrame) -> str:
    return ", ".join(f"`{name}`" for name in rows.columns)


def _at(spark: SparkSession, uri: str, version: int) -> DataFrame:
    return spark.read.format("delta").option("versionAsOf", version).load(uri)


def _sql_name(uri: str) -> str:
    return "delta.`" + uri.replace("`", "``") + "`"


def _properties(spark: SparkSession, uri: str) -> dict[str, str]:
    if not DeltaTable.isDeltaTable(spark, uri):
        return {}
    return own_properties(spark.sql(f"DESCRIBE DETAIL {_sql_name(uri)}").collect()[0]["properties"])


def token_condition(ranges: Sequence[tuple[int, int]]) -> str:
    """SQL: whether ``token`` lies in one of these ranges (start excluded, end included).

    :raises ValueError: when there is no range, or one wraps
    """
    if not ranges or any(start >= end for start, end in ranges):
        raise ValueError(f"token ranges must be given, each with start < end: {list(ranges)[:5]}")
    joined: list[tuple[int, int]] = []  # neighbours become one range: Spark plans thousands of conditions slowly
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            start, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((start, end))
    return " OR ".join(f"(token > {start}L AND token <= {end}L)" for start, end in joined)
