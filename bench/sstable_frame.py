"""Compare ways to the rows of a table as a Spark DataFrame: our data source reads its SSTables, and Spark's own reader
a Parquet file of the same rows.

``python bench/sstable_frame.py --keep FOLDER`` prints a line for each, and one BENCHMARK_RESULT line with ratios. The
rows are those of bench/sstable.py, by default 1,200,000 in each SSTable. A session with one slot reads them into the
sink ``noop``, both in turn. Rates are output rows by the run time of all tasks, as Spark tells it; the fastest of
several runs counts. A task has two processes, Python and the JVM: it is fastest where there are two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

from peers.sstables import sstables
from pyspark.sql import DataFrame, SparkSession

from ringsync.replica.session import spark_session
from ringsync.sources.cassandra_sstable import CassandraSSTable
from servers.jars import fetch

ROOT = Path(__file__).parent.parent
RUNS = 6


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Read SSTables into a Spark DataFrame, beside Spark's Parquet reader.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the SSTables here for the next run")
    parser.add_argument("--rows", type=int, default=1_200_000, metavar="N", help="of each SSTable (default: 1,200,000)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-frame.") as name:
        folder = Path(name)
        made = sstables(arguments.keep or folder / "sstables", arguments.rows, ROOT / ".cache")
        os.environ["PYTHONPATH"] = str(ROOT / "include")
        jars = sorted(fetch("delta", ROOT / ".cache").glob("*.jar"))
        conf = {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.driver.bindAddress": "127.0.0.1"}
        spark = spark_session("bench", jars=list(map(str, jars)), master="local[1]", conf=conf)
        try:
            spark.dataSource.register(CassandraSSTable)
            compacted = compare(spark, "compacted", made.compacted, folder / "compacted")
            found = compacted | compare(spark, "overlapping", made.overlapping, folder / "overlapping")
        finally:
            spark.stop()
    pairs = " ".join(f"{key}={value:.6g}" for key, value in found.items())
    print(f"BENCHMARK_RESULT | scenario=sstable_frame {pairs}", flush=True)
    return 0


def compare(spark: SparkSession, name: str, folder: Path, target: Path) -> dict[str, float]:
    """Read a data set both ways, in turn; return the rates (rows/s per task) and their ratio.

    :param folder: the SSTables; ``target``: a folder to be made, for the Parquet file
    """
    source = spark.read.format("cassandra_sstable").option("rows", "values").load(str(folder))
    source.coalesce(1).write.parquet(str(target))
    ways = {"ours": source, "parquet": spark.read.parquet(str(target))}
    rates = dict.fromkeys(ways, 0.0)
    rows = ways["parquet"].count()
    for _ in range(RUNS):
        for way, frame in ways.items():
            rates[way] = max(rates[way], rows / seconds(spark, frame))
    for way, rate in rates.items():
        print(f"{name}, {way}: {rows:,} rows, {rate / 1e6:.2f} M rows/s per task", flush=True)
    return {
        f"{name}.rowsPerTaskSec": rates["ours"],
        f"{name}.parquetRowsPerTaskSec": rates["parquet"],
        f"{name}.ours/parquet": rates["ours"] / rates["parquet"],
    }


def seconds(spark: SparkSession, frame: DataFrame) -> float:
    """Read a DataFrame to its end; return the run time of its tasks, s."""
    frame.write.format("noop").mode("overwrite").save()
    context = spark.sparkContext
    stages = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/stages?status=complete"
    with urllib.request.urlopen(stages) as answer:
        last = max(json.load(answer), key=lambda stage: int(stage["stageId"]))
    return float(last["executorRunTime"]) / 1000


if __name__ == "__main__":
    raise SystemExit(main())
