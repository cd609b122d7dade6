"""The replica of one table as Delta, in Spark: read as row images, ranges of it replaced.

``<uri>/base`` is a plain Delta table of row images (:mod:`ringsync.schema.row_image`): deletion vectors, no column
mapping, type widening or clustering, so that any engine reads it (docs/replica.md). Its properties
``ringsync.*`` say what it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from ringsync.replica.base import ReplicaMismatchError, check_table_id, identity, own_properties
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

    :ivar uri: its folder, ``…/replica/<keyspace>/<table>``: a local path or an object store's URI
    """

    uri: str
    table: TableSchema

    @property
    def base_uri(self) -> str:
        """Folder of the Delta table."""
        return f"{self.uri.rstrip('/')}/base"

    @property
    def sql_name(self) -> str:
        """The Delta table as Spark SQL names it."""
        return "delta.`" + self.base_uri.replace("`", "``") + "`"

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
            .save(self.base_uri)
        )
        return self._last_commit(spark, description)

    def read_base(self, spark: SparkSession) -> DataFrame:
        """The row images of the base, cells that have expired included (:func:`ringsync.replica.view.live`)."""
        return spark.read.format("delta").load(self.base_uri)

    def properties(self, spark: SparkSession) -> dict[str, str]:
        """The base's ``ringsync.*`` properties without that prefix; empty when there is no base or it is not ours."""
        if not DeltaTable.isDeltaTable(spark, self.base_uri):
            return {}
        found = spark.sql(f"DESCRIBE DETAIL {self.sql_name}").collect()[0]["properties"]
        return own_properties(found)

    def check_same_table(self, spark: SparkSession) -> None:
        """Look whether the base, if there is one, is the replica of this table with this schema.

        :raises ReplicaMismatchError: it is not
        """
        if not DeltaTable.isDeltaTable(spark, self.base_uri):
            return
        found = self.properties(spark)
        check_table_id(self.base_uri, found, self.table)
        if found.get("schema_digest") != self.table.digest:
            raise ReplicaMismatchError(
                f"the schema of {self.table.full_name} changed since the replica {self.base_uri} was made: "
                "trigger bootstrap_table again"
            )

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
