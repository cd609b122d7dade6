"""The Spark session that every application and test uses: Delta, UTC, exact dates, no port open to the network."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

LEAN_CONF: dict[str, str] = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For applications that live under about a minute: a third of the CPU seconds at start.

The options must be there before the JVM starts. :func:`spark_session` sees to it when it starts the JVM itself;
under spark-submit the JVM is there already, so a DAG passes these as ``--conf`` (``SparkSubmitOperator(conf=…)``).
"""

LOOPBACK_CONF: dict[str, str] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}
"""Nothing listens outside loopback: for local masters."""

MOST_ROWS = 1000
"""Rows of a batch that goes from Spark to Python or back."""

BATCH_BYTES = 16 << 20
"""Of the rows of a batch, as they are in compressed files: some ten times that in memory."""

DEFAULT_CONF: dict[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",
    # VACUUM would list a folder with 10,000 tasks.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.databricks.delta.optimize.maxFileSize": str(128 * 1024 * 1024),
    # With a limit of bytes (SPARK-51316) Spark asks a batch for its size after every row, and then goes through all the
    # lists in it that are not set: 327,381 rows of 22 columns go to Python in 28 s with it, in 11 s without, and the
    # more rows a batch has, the worse. Few rows need no such limit; for long ones there is limit_batches.
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(MOST_ROWS),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    "spark.python.daemon.module": "ringsync.spark_daemon",
}

EXACT_CONF: dict[str, str] = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.legacy.disableMapKeyNormalization": "true",
}
"""Values pass unchanged: dates before 1582 are not shifted, the map key -0.0 does not become 0.0."""


def spark_session(
    app_name: str,
    *,
    jars: Sequence[str] = (),
    conf: Mapping[str, str] | None = None,
    master: str | None = None,
    lean: bool = False,
) -> SparkSession:
    """Start (or get) the Spark session.

    What spark-submit was given as ``--conf`` wins over the defaults here; ``conf`` wins over both.

    :param app_name: name shown in logs and reports
    :param jars: Delta's jar files; none when spark-submit got them as ``--jars``
    :param conf: further Spark settings
    :param master: Spark master; None: as spark-submit says, else ``local[*]``
    :param lean: add :data:`LEAN_CONF`, for short applications
    """
    settings = _initial_conf()
    settings.setAppName(app_name)
    if master:
        settings.setMaster(master)
    else:
        settings.setIfMissing("spark.master", "local[*]")
    defaults = {**DEFAULT_CONF, **(LEAN_CONF if lean else {})}
    if settings.get("spark.master", "").startswith("local"):
        defaults |= LOOPBACK_CONF
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for key, value in defaults.items():
        settings.setIfMissing(key, value)
    if jars:
        settings.set("spark.jars", ",".join(jars))
    for key, value in {**EXACT_CONF, **(conf or {})}.items():
        settings.set(key, value)
    return SparkSession.builder.config(conf=settings).getOrCreate()


def limit_batches(spark: SparkSession, rows: int, size: int) -> None:
    """From now on batches of this session have as many rows as fit into memory, and :data:`MOST_ROWS` at most.

    :param rows: number of rows in the table that is read
    :param size: bytes of its files, compressed
    """
    fitting = BATCH_BYTES * rows // size if size else MOST_ROWS
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(max(1, min(MOST_ROWS, fitting))))


def _initial_conf() -> SparkConf:
    """The settings of spark-submit, when it started this process; otherwise none, and no JVM is started yet."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized()
    return SparkConf()


def to_spark_schema(schema: pa.Schema) -> StructType:
    """The Spark schema that holds the same values as this Arrow schema; timestamps are instants."""
    return from_arrow_schema(schema)
