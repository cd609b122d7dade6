"""Read a table through the Spark Cassandra Connector, as Spark SQL, once into each sink; runs inside Spark 3.5.

Start-up is not counted: before measuring begins, the session exists and the whole table has been read once, so that the
JVM has compiled its code. CPU is that of this process and of its JVM.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import Work, timed
from pyspark.sql import SparkSession

SPLIT_MB = 16


def session(order: dict[str, Any]) -> SparkSession:
    settings = {
        "spark.jars": ",".join(order["jars"]),
        "spark.driver.memory": "2g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.extensions": "com.datastax.spark.connector.CassandraSparkExtensions",
        "spark.sql.catalog.cassandra": "com.datastax.spark.connector.datasource.CassandraCatalog",
        "spark.cassandra.connection.host": order["address"],
        "spark.cassandra.connection.port": order["port"],
        "spark.cassandra.input.fetch.sizeInRows": order["page_size"],
        "spark.cassandra.input.split.sizeInMB": SPLIT_MB,
        "spark.cassandra.input.consistency.level": "LOCAL_ONE",
    }
    builder = SparkSession.builder.master("local[2]").appName("bench")
    for key, value in settings.items():
        builder = builder.config(key, str(value))
    return builder.getOrCreate()


def main() -> None:
    order = json.loads(sys.argv[1])
    spark = session(order)
    timed_columns = [f"{call}({column})" for column in order["timed_columns"] for call in ("writetime", "ttl")]
    named = [f"{call} AS {call.replace('(', '_').rstrip(')')}" for call in timed_columns]
    rows = spark.sql(f"SELECT {', '.join(['*', *named])} FROM cassandra.{order['keyspace']}.{order['table']}")
    # Counting is not measured: it would be another query.
    count = rows.count()

    def read(sink: str) -> Work:
        if sink == "noop":
            rows.write.format("noop").mode("overwrite").save()
            return Work(count)
        target = Path(order["folder"], "parquet")
        rows.write.mode("overwrite").parquet(str(target))
        return Work(count, sum(file.stat().st_size for file in target.glob("*.parquet")))

    read("noop")
    results = {sink: asdict(timed(lambda sink=sink: read(sink), order["server"])[0]) for sink in order["sinks"]}
    Path(order["folder"], "results.json").write_text(json.dumps(results))
    spark.stop()


if __name__ == "__main__":
    main()
