"""The Spark session: settings, and nothing that listens outside loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import TimestampType

from ringsync.replica.session import limit_batches


@pytest.mark.spark
def test_session_is_exact_and_lean(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.databricks.delta.snapshotPartitions") == "2"
    options = spark.sparkContext.getConf().get("spark.driver.extraJavaOptions")
    assert "-XX:+UseSerialGC" in (options or "")


@pytest.mark.spark
def test_nothing_listens_outside_loopback(spark: SparkSession) -> None:
    java = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]
    sockets = {os.readlink(link) for link in Path(f"/proc/{java}/fd").iterdir() if link.is_symlink()}
    listening = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{java}/net/{family}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in sockets:
                listening.append(local.split(":")[0])
    assert listening
    assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.spark
@pytest.mark.parametrize(("size", "most"), [(0, 1000), (3000 * 10_000, 1000), (3000 * 1_000_000, 16), (3000 << 25, 1)])
def test_batches_of_long_rows_have_few_of_them(spark: SparkSession, size: int, most: int) -> None:
    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch([pa.array([batch.num_rows])], names=["rows"])

    try:
        limit_batches(spark, 3000, size)
        counts = spark.range(0, 3000, 1, 1).mapInArrow(count, "rows bigint").toArrow()["rows"].to_pylist()
    finally:
        limit_batches(spark, 0, 0)
    assert (sum(counts), max(counts)) == (3000, most)


def test_timestamps_are_instants() -> None:
    schema = from_arrow_schema(pa.schema([("t", pa.timestamp("us", "UTC"))]))
    assert schema["t"].dataType == TimestampType()
