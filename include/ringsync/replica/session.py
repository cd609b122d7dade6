"""The Spark session that every application and test uses: Delta, UTC, exact dates, no port open to the network."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from ringsync.config import ConfigError
from ringsync.storage import SPARK_FILE_SYSTEM, SPARK_JAR

LOOPBACK_CONF: dict[str, str] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}
"""Settings for local masters: nothing listens outside loopback."""

MOST_ROWS = 1000
"""Most rows of a batch that goes from Spark to Python or back."""

BATCH_BYTES = 16 << 20
"""Size of a batch's rows in compressed files. In memory they take some ten times as much."""

MOST_BYTES = 32 << 20
"""Bytes of a batch in memory, where they are limited: it has one row more."""

TASK_TRIES = 4
"""How often a cluster tries a task (``spark.task.maxFailures``)."""

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
    # With a limit of bytes (SPARK-51316) Spark asks a batch for its size after every row, and then goes through all its
    # lists that are not set: 327,381 rows of 22 columns go to Python in 28 s with the limit, in 11 s without. The more
    # rows a batch has, the worse. Small batches need no such limit but where rows are long: limit_batches and
    # limit_batch_bytes look after these.
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(MOST_ROWS),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    "spark.python.daemon.module": "ringsync.spark_daemon",
    # Code of tasks that is larger goes by a file, which nobody removes before the driver ends (PySpark's class
    # Broadcast): a loop of hours would leave gigabytes, with the secrets that executors need.
    "spark.broadcast.UDFCompressionThreshold": "1g",
}

EXACT_CONF: dict[str, str] = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.legacy.disableMapKeyNormalization": "true",
}
"""Settings that leave values unchanged: dates before 1582 are not shifted, the map key -0.0 does not become 0.0."""


def spark_session(
    app_name: str,
    *,
    jars: Sequence[str] = (),
    conf: Mapping[str, str] | None = None,
    master: str | None = None,
    store: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start (or get) the Spark session.

    Settings that spark-submit got as ``--conf`` win over the defaults here; ``conf`` wins over both.

    :param jars: Delta's jar files; none when spark-submit got them as ``--jars``
    :param master: Spark master; None: as spark-submit says, else ``local[*]``
    :param store: further defaults: how Spark reaches the object store (:func:`ringsync.storage.spark_options`)
    """
    settings = _settings(app_name, jars, conf or {}, master, store or {})
    return SparkSession.builder.config(conf=settings).getOrCreate()


def check_file_system(store: Mapping[str, str]) -> None:
    """Check that Spark will have the class by which it reaches the object store. This starts a JVM, but no Spark.

    :param store: as for :func:`spark_session`; empty: nothing is checked
    :raises ConfigError: the class is in no jar
    """
    if not store:
        return
    settings = _settings("check", (), {}, None, store)
    SparkContext._ensure_initialized(conf=settings)
    jvm, name = SparkContext._jvm, settings.get(SPARK_FILE_SYSTEM)
    assert jvm is not None
    try:
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(name)
    except Py4JJavaError as error:
        raise ConfigError(
            f"store.url: Spark cannot reach gs://, since none of its jars has the class {name}: add the jar "
            f"{SPARK_JAR}, to RINGSYNC_SPARK_JARS for Airflow, or to spark.jars (docs/storage.md)"
        ) from error


def _settings(
    app_name: str, jars: Sequence[str], conf: Mapping[str, str], master: str | None, store: Mapping[str, str]
) -> SparkConf:
    settings = _initial_conf()
    settings.setAppName(app_name)
    if master:
        settings.setMaster(master)
    else:
        settings.setIfMissing("spark.master", "local[*]")
    if store:
        settings.setMaster(_with_tries(settings.get("spark.master", "")))
    defaults = {**DEFAULT_CONF, **store}
    if settings.get("spark.master", "").startswith("local"):
        defaults |= LOOPBACK_CONF
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for key, value in defaults.items():
        settings.setIfMissing(key, value)
    if jars:
        settings.set("spark.jars", ",".join(jars))
    for key, value in {**EXACT_CONF, **conf}.items():
        settings.set(key, value)
    return settings


def limit_batches(spark: SparkSession, rows: int, size: int) -> None:
    """Limit the session's batches to the rows that fit into memory, and to :data:`MOST_ROWS`.

    :param rows: number of rows in the table to read
    :param size: compressed size of the table's files, bytes
    """
    fitting = BATCH_BYTES * rows // size if size else MOST_ROWS
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(max(1, min(MOST_ROWS, fitting))))


def limit_batch_bytes(spark: SparkSession) -> None:
    """Limit the session's batches to :data:`MOST_BYTES`, also where a few wide rows lie among many narrow ones, of
    which an average says nothing. Spark needs more than twice as long (:data:`DEFAULT_CONF`): for work that is rare."""
    spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(MOST_BYTES))


def _with_tries(master: str) -> str:
    """Let a local master try a task as often as a cluster does: an answer of the object store may break off."""
    match = re.fullmatch(r"local(?:\[(\d+|\*)\])?", master)
    return f"local[{match[1] or 1},{TASK_TRIES}]" if match else master


def _initial_conf() -> SparkConf:
    """Return spark-submit's settings if it started this process; else none, without starting a JVM."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized()
    return SparkConf()
