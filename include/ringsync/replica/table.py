"""The replica of one table as Delta, in Spark: reading its row images and replacing token ranges.

``<uri>/base`` is a plain Delta table of row images (:mod:`ringsync.images.schema`) with deletion vectors, but without
column mapping, type widening or clustering, so that any engine reads it (docs/replica.md). Its properties
``ringsync.*`` identify it. ``<uri>/changes``, if it exists, holds newer images of some rows
(:mod:`ringsync.replica.changes`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from delta import exceptions
from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from ringsync.images.conform import by_name
from ringsync.images.keys import key_columns_sql, same_key_sql
from ringsync.images.schema import row_image_schema
from ringsync.replica.base import (
    check_readable,
    check_same_schema,
    check_table_id,
    identity,
    own_properties,
)
from ringsync.replica.changes import REPAIR, VERSION, ReplicaState
from ringsync.replica.errors import ReplicaMismatchError
from ringsync.replica.features import columns_differ
from ringsync.ring.tokens import MAX_TOKEN
from ringsync.schema.table import TableSchema

CONFLICTS = (
    *(exceptions.ConcurrentAppendException, exceptions.ConcurrentDeleteDeleteException),
    *(exceptions.ConcurrentDeleteReadException, exceptions.ConcurrentTransactionException),
    *(exceptions.ConcurrentWriteException, exceptions.DeltaConcurrentModificationException),
    *(exceptions.MetadataChangedException, exceptions.ProtocolChangedException),
)
"""What Delta raises when another writer was faster: in Python these have no class in common."""


@dataclass(frozen=True)
class WriteResult:
    """A commit to the base: its Delta version, and the rows, files and bytes that it wrote."""

    version: int
    rows: int
    files: int
    bytes: int


@dataclass(frozen=True)
class ReplicaTable:
    """The replica of one table.

    :ivar uri: folder of the replica, ``…/replica/<keyspace>/<table>``: a local path or an object store's URI
    """

    uri: str
    table: TableSchema

    @property
    def base_uri(self) -> str:
        """Folder of the base."""
        return f"{self.uri.rstrip('/')}/base"

    @property
    def changes_uri(self) -> str:
        """Folder of the changes table, which need not exist."""
        return f"{self.uri.rstrip('/')}/changes"

    @property
    def sql_name(self) -> str:
        """Name of the base in Spark SQL."""
        return _sql_name(self.base_uri)

    @property
    def changes_sql_name(self) -> str:
        """Name of the changes table in Spark SQL."""
        return _sql_name(self.changes_uri)

    def replace_ranges(
        self, rows: DataFrame, ranges: Sequence[tuple[int, int]], *, properties: Mapping[str, str]
    ) -> WriteResult:
        """Replace every row whose token lies in one of the ranges, in one commit; other rows stay unchanged.

        :param rows: row images of exactly these ranges
        :param ranges: token ranges (start, end], not wrapping
        :param properties: user metadata of the commit, e.g. ``run_id``
        :raises ReplicaMismatchError: the base belongs to another table id or schema, or does not exist
        """
        spark = rows.sparkSession
        if not DeltaTable.isDeltaTable(spark, self.base_uri):
            raise ReplicaMismatchError(f"{self.base_uri}: no replica of {self.table.full_name} yet: bootstrap it first")
        check_same_schema(self.base_uri, self.properties(spark), self.table)
        description = {**identity(self.table), "repair": "true", **properties}
        (
            rows.write.format("delta")
            .mode("overwrite")
            .option("replaceWhere", token_condition(ranges))
            .option("userMetadata", json.dumps(description))
            # The replaced images knew of deletions that the new ones do not show.
            .option("txnAppId", REPAIR)
            .option("txnVersion", str(int(time.time() * 1_000_000)))
            .save(self.base_uri)
        )
        return self._last_commit(spark, description)

    def read_base(self, spark: SparkSession) -> DataFrame:
        """Read the row images of the base, expired cells included (:func:`ringsync.replica.view.live`)."""
        return spark.read.format("delta").load(self.base_uri)

    def read_changes(self, spark: SparkSession) -> DataFrame | None:
        """Read all images in the changes table, with ``_version``; None: the base has no changes."""
        of_changes, of_base = _properties(spark, self.changes_uri), self.properties(spark)
        if not of_changes or of_changes.get("base", "") != of_base.get("base", ""):
            return None
        return spark.read.format("delta").load(self.changes_uri)

    def read_images(self, spark: SparkSession) -> DataFrame:
        """Read the newest image of each row from base and changes, deleted rows and expired cells included.

        :raises ReplicaMismatchError: the base belongs to a table that was dropped and created again
        :raises SchemaChangedError: the table was altered in a way in which these files cannot be read
        """
        # Properties first: if another version is written meanwhile, those of before do not fit, and nothing is read.
        of_changes, of_base = _properties(spark, self.changes_uri), self.properties(spark)
        changes, base = self.read_changes(spark), self.read_base(spark)
        if of_base:
            check_table_id(self.base_uri, of_base, self.table)
            check_readable(self.base_uri, of_base, base.columns, self.table)
        rows = conformed(base, self.table)
        if changes is None:
            return rows
        check_readable(self.changes_uri, of_changes, changes.columns, self.table)
        return newest_images(rows, conformed(changes, self.table), self.table)

    def images_at(self, spark: SparkSession, state: ReplicaState) -> DataFrame:
        """Read the newest images as of a state of the replica, regardless of later writes."""
        base = conformed(_at(spark, self.base_uri, state.base_version), self.table)
        if state.changes_version < 0:
            return base
        changes = conformed(_at(spark, self.changes_uri, state.changes_version), self.table)
        return newest_images(base, changes, self.table)

    def forget_changes(self, spark: SparkSession, ranges: Sequence[tuple[int, int]], up_to_pass: int) -> None:
        """Delete the images of these ranges and passes from the changes table, if it exists, in one commit.

        :param ranges: token ranges (start, end], not wrapping
        :param up_to_pass: number of the last pass whose images are deleted
        """
        if DeltaTable.isDeltaTable(spark, self.changes_uri):
            condition = f"_version <= {up_to_pass} AND ({token_condition(ranges)})"
            spark.sql(f"DELETE FROM {self.changes_sql_name} WHERE {condition}")

    def properties(self, spark: SparkSession) -> dict[str, str]:
        """Read the base's ``ringsync.*`` properties without the prefix; empty if there is no base or it is not ours."""
        return _properties(spark, self.base_uri)

    def _last_commit(self, spark: SparkSession, description: Mapping[str, str]) -> WriteResult:
        """Read the newest commit with this description; another writer may have committed since."""
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


def conformed(images: DataFrame, table: TableSchema) -> DataFrame:
    """Return row images in a table's schema: base and changes differ in it while the replica follows an ALTER TABLE.

    Columns are found by their names; those that are not there are null. The keys must be there
    (:func:`ringsync.replica.base.check_readable`).
    """
    schema = row_image_schema(table)
    if VERSION in images.columns:
        schema = schema.append(pa.field(VERSION, pa.int64()))
    wanted = from_arrow_schema(schema)
    if columns_differ(images.schema.json(), wanted.json()) is None:
        return images.select(*(f"`{name}`" for name in wanted.names))

    def named(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield by_name(batch, schema)

    return images.mapInArrow(named, wanted)


def newest_images(base: DataFrame, changes: DataFrame, table: TableSchema) -> DataFrame:
    """Take each key's image with the greatest ``_version`` in the changes, else the base's; columns as in the base."""
    return base.sparkSession.sql(
        # Changes first: Delta resolves tables from left to right. If a merge moves images to the base in between, they
        # must be seen twice rather than not at all.
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
    """Take the image with the greatest ``_version`` of each key."""
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
    """Write the SQL condition that ``token`` lies in one of these ranges (start excluded, end included).

    The range that ends the ring has the rows without a token, too, as :func:`ringsync.replica.lookup.images_between`.

    :raises ValueError: there is no range, or a range wraps
    """
    if not ranges or any(start >= end for start, end in ranges):
        raise ValueError(f"token ranges must be given, each with start < end: {list(ranges)[:5]}")
    joined: list[tuple[int, int]] = []  # neighbours become one range: Spark plans thousands of conditions slowly
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            start, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((start, end))
    conditions = [f"(token > {start}L AND token <= {end}L)" for start, end in joined]
    return " OR ".join([*conditions, *(["token IS NULL"] if joined[-1][1] == MAX_TOKEN else [])])
