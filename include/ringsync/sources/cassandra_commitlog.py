"""The Spark data source ``cassandra_commitlog``: the content of commit log segments as change rows.

::

    from ringsync.sources.cassandra_commitlog import CassandraCommitLog

    spark.dataSource.register(CassandraCommitLog)
    changes = (
        spark.read.format("cassandra_commitlog")
        .option("schema", "/etc/ringsync/schema.cql")
        .load("/var/lib/cassandra/cdc_raw")
    )

============  ========================================================================================
option
============  ========================================================================================
``path``      argument of ``load``: a segment, or a folder of segments, local or ``gs://…``; several are
              separated by commas
``schema``    path of a schema.cql with table ids, as ``DESCRIBE SCHEMA WITH INTERNALS`` prints it
``config``    instead of ``schema``: path of the configuration file, to read the schema from the cluster
``tables``    ``keyspace.table, …``: only these; default: all of the schema
``table``     ``keyspace.table``: only this one, with typed columns (:mod:`ringsync.changes.typed`)
``from``      ``SEGMENT:POSITION``: only what was logged behind this position of this segment …
``to``        … and up to this one
``keystore``  path of the keystore or key of encrypted segments; its password is in the executors'
              environment (:mod:`ringsync.formats.keystores.lookup`)
``index``     ``obey`` (default): read only the synced part of a segment whose ``_cdc.idx`` is not completed;
              ``ignore``: read everything
``damage``    ``fail`` (default) if a part of a segment cannot be read, or a record cannot be decoded (also of
              unknown tables, unless ``tables`` or ``table`` is given); ``skip``: leave it out
``rows``      ``changes`` (default): change rows (:data:`ringsync.changes.schema.CHANGE_ROWS`); ``problems``:
              instead the parts that cannot be read or decoded, with their raw bytes
============  ========================================================================================

The driver reads the schema and the configuration once. Segments and keystore must be at the same path on every
executor. Local segments are split over tasks by their sections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ringsync.sources import segments
from ringsync.sources.options import OptionError, checked, for_spark

OPTIONS = ("path", "schema", "config", "tables", "table", "keystore", "from", "to", "index", "damage", "rows")
CHOICES = {"index": ("obey", "ignore"), "damage": ("fail", "skip"), "rows": ("changes", "problems")}


class CassandraCommitLog(DataSource):  # type: ignore[misc]
    """Commit log segments as a Spark DataFrame of change rows; see the module for its options."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._tables: segments.LogTables | None = None

    @classmethod
    def name(cls) -> str:
        return "cassandra_commitlog"

    def schema(self) -> StructType:
        return from_arrow_schema(segments.row_schema(self._log_options(), self._log_tables()))

    def reader(self, schema: StructType) -> CommitLogReader:
        return CommitLogReader(self._log_options(), self._log_tables())

    def _log_tables(self) -> segments.LogTables:
        """Find the tables, once: Spark's columns and the rows must have one schema."""
        if self._tables is None:
            self._tables = segments.find_tables(self._log_options())
        return self._tables

    def _log_options(self) -> segments.LogOptions:
        options = checked("cassandra_commitlog", self.options, OPTIONS, CHOICES)
        if "path" not in options:
            raise OptionError("cassandra_commitlog needs the segments: .load('/path/of/cdc_raw')")
        if ("schema" in options) == ("config" in options):
            raise OptionError("cassandra_commitlog needs either the option schema or the option config")
        if "table" in options and ("tables" in options or options.get("rows") == "problems"):
            raise OptionError("option table of cassandra_commitlog goes neither with tables nor with rows=problems")
        return segments.log_options(options)


@dataclass
class PartPartition(InputPartition):  # type: ignore[misc]
    """The input of one task: a segment or a part of it."""

    part: segments.SegmentPart


@dataclass
class CommitLogReader(DataSourceReader):  # type: ignore[misc]
    """A reader that reads each part of each segment in its own task."""

    options: segments.LogOptions
    tables: segments.LogTables

    def partitions(self) -> list[PartPartition]:
        return [PartPartition(part) for part in segments.find_parts(self.options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without segments Spark invents a partition.
        if isinstance(partition, PartPartition):
            read = segments.read_problems if self.options.rows == "problems" else segments.read_part
            for rows in read(self.options, self.tables, partition.part):
                yield for_spark(rows)
