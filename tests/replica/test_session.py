"""The Spark session: settings, and nothing that listens outside loopback."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from pyspark import SparkConf
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import TimestampType

from ringsync.config import ConfigError, load_config
from ringsync.replica.session import (
    MOST_BYTES,
    _settings,
    _with_tries,
    check_file_system,
    limit_batch_bytes,
    limit_batches,
)
from ringsync.storage import SPARK_FILE_SYSTEM, spark_options
from ringsync.wiring import store_of
from servers.gcs import GcsEmulator
from servers.ports import free_port

PROJECT = Path(__file__).parents[2]


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


@pytest.mark.spark
def test_wide_rows_among_many_narrow_ones_make_no_large_batch(spark: SparkSession) -> None:
    """100 rows of 2.5 MB among 20,000 of 100 bytes are 12 KB on average: a repair of such a table ran out of memory."""

    def size(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch([pa.array([batch.nbytes]), pa.array([batch.num_rows])], names=["size", "rows"])

    width = 2_500_000
    rows = spark.range(0, 3000, 1, 1).selectExpr(
        f"repeat('x', CASE WHEN id BETWEEN 1000 AND 1099 THEN {width} ELSE 9 END) v"
    )
    try:
        limit_batch_bytes(spark)
        found = rows.mapInArrow(size, "size bigint, rows bigint").toArrow()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxBytesPerBatch")
    assert sum(found["rows"].to_pylist()) == 3000
    assert max(found["size"].to_pylist()) <= MOST_BYTES + 2 * width


def test_the_store_gives_defaults_and_whoever_submits_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    options = spark_options("gs://bucket", gcs_endpoint="http://127.0.0.1:1")
    given = SparkConf(loadDefaults=False).set(SPARK_FILE_SYSTEM, "my.FileSystem")
    monkeypatch.setattr("ringsync.replica.session._initial_conf", lambda: given)
    found = _settings("x", (), {}, "local[1]", options)
    assert found.get(SPARK_FILE_SYSTEM) == "my.FileSystem"
    assert found.get("spark.master") == "local[1,4]"
    assert [_with_tries(one) for one in ("local", "local[*]", "local[2,1]", "yarn")] == [
        *("local[1,4]", "local[*,4]", "local[2,1]", "yarn")
    ]
    assert {name: found.get(name) for name in options} == options | {SPARK_FILE_SYSTEM: "my.FileSystem"}


@pytest.mark.spark
def test_a_jar_that_is_missing_is_told(spark: SparkSession) -> None:
    check_file_system({})
    with pytest.raises(ConfigError, match=r"no.* jars has the class com\.google.*GoogleHadoopFileSystem: add the jar"):
        check_file_system(spark_options("gs://bucket"))
    check_file_system({SPARK_FILE_SYSTEM: "org.apache.hadoop.fs.RawLocalFileSystem"})


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.parametrize("name", ["replica_merge", "replica_verify"])
def test_an_application_without_the_jar_ends_before_it_does_anything(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    with GcsEmulator() as emulator:
        document = {
            "server_name": "test",
            "cassandra": {"contact_points": ["127.0.0.1"], "port": free_port("127.0.0.1")},
            "store": {"url": f"{emulator.url}/lake", "gcs_endpoint": emulator.endpoint},
        }
        conf = tmp_path / "ringsync.yaml"
        conf.write_text(yaml.safe_dump(document))
        main = runpy.run_path(str(PROJECT / "spark_apps" / f"{name}.py"))["main"]
        assert main(["--conf", str(conf), "--table", "shop.orders", "--run", "r"]) == 3
        errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ringsync: error:")]
        assert len(errors) == 1
        assert "gcs-connector" in errors[0]
        assert "RINGSYNC_SPARK_JARS" in errors[0]
        assert [stat.key for stat in store_of(load_config(conf)).list()] == [f"reports/{name}/r.json"]


def test_timestamps_are_instants() -> None:
    schema = from_arrow_schema(pa.schema([("t", pa.timestamp("us", "UTC"))]))
    assert schema["t"].dataType == TimestampType()
