"""Read a table by token ranges into the replica, then publish its rows as op ``r`` (DESIGN §6, step 2).

The source is read once. The replica becomes visible in one commit; the stream's bucket, made from that very
version of the replica, in one manifest. A killed run leaves what was there before, and is repeated from its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

import ringsync
from ringsync.config import Config, load_config
from ringsync.progress import read_progress
from ringsync.schema.from_cluster import read_table
from ringsync.schema.row_image import row_image_schema
from ringsync.sources.session import connect
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.bootstrap_prepare import BootstrapPlan, load_plan
from ringsync.streams.files import FileStream, Part, StreamConflictError
from ringsync.streams.messages import Messages, envelope_schema, key_schema, snapshot_messages

MESSAGES_PER_PART = 250_000
"""A file of the stream is put together in memory: this bounds it to some hundred megabytes."""


def run(application: Application) -> tuple[Report, ExitCode]:
    """Scan, write, publish.

    :raises StepError: the schema changed since the plan or while scanning; the counts do not reconcile
    """
    from ringsync.replica.session import spark_session
    from ringsync.replica.table import ReplicaTable
    from ringsync.sources.cassandra_table import CassandraTable

    plan = load_plan(application.store, application.run)
    table = plan.scan.table
    check_schema(application.config, plan)
    spark = spark_session(f"bootstrap_scan {table.full_name} {plan.run}")
    spark.dataSource.register(CassandraTable)
    rows = (
        spark.read.format("cassandra_table")
        .option("config", application.config_path)
        .option("plan", plan.scan.to_json())
        .option("progress", f"progress/{plan.run}")
        .load()
    )
    replica = ReplicaTable(application.store.uri(f"replica/{table.keyspace}/{table.name}"), table)
    written = replica.write_base(
        rows,
        as_of_us=plan.as_of_us,
        properties={"run_id": plan.run},
        replace_schema=replica.properties(spark).get("table_id") == table.table_id,
        deletion_vectors=application.config.replica.deletion_vectors,
    )
    check_schema(application.config, plan)
    images = spark.read.format("delta").option("versionAsOf", written.version).load(replica.base_uri)
    bucket = f"{plan.bucket}.v{written.version:06d}"
    parts = publish(images, bucket, plan, application)
    read = read_progress(application.store, plan.run)
    report = {
        "ranges": read.ranges_done,
        "rows": read.rows,
        "rows_read": read.rows,
        "rows_written": written.rows,
        "messages_published": sum(part.records for part in parts),
        "cells": read.cells,
        "bytes_read": read.bytes,
        "pages": read.pages,
        "replica": {"uri": replica.base_uri, **asdict(written)},
        "stream": {"topic": plan.topic, "bucket": bucket, "parts": len(parts)},
    }
    reconcile(report)
    return report, ExitCode.OK


def check_schema(config: Config, plan: BootstrapPlan) -> None:
    """Look whether the table still is what the plan says.

    :raises StepError: it is not
    """
    planned = plan.scan.table
    now = read_table(connect(config.cluster_settings()), planned.keyspace, planned.name)
    if now.digest != planned.digest:
        raise StepError(
            f"the schema of {planned.full_name} changed since the bootstrap was planned: trigger bootstrap_table again"
        )


def reconcile(report: Report) -> None:
    """Every row read is written and published, once.

    :raises StepError: the counts differ
    """
    counts = {name: report[name] for name in ("rows_read", "rows_written", "messages_published")}
    if len(set(counts.values())) != 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise StepError(f"the counts do not reconcile: {told}; nothing may be trusted, trigger bootstrap_table again")


def publish(images: Any, bucket: str, plan: BootstrapPlan, application: Application) -> list[Part]:
    """Publish row images to the table's topic, in a bucket of their own.

    :param images: DataFrame of the row images of one version of the replica
    :param bucket: belongs to that version, so that a repeated scan publishes beside, never into it
    """
    config, table = application.config, plan.scan.table
    stream = FileStream(application.store, plan.topic)
    mapping = config.stream.mapping
    version = put_schemas(
        stream, key_schema(table, config.server_name, mapping), envelope_schema(table, config.server_name, mapping)
    )
    task = _PublishTask(application.config_path, plan, bucket, version)
    written = images.mapInArrow(task, "name string, records bigint, bytes bigint, crc32c bigint").collect()
    parts = sorted((Part(**row.asDict()) for row in written), key=lambda part: part.name)
    stream.publish(bucket, parts)
    return parts


def put_schemas(stream: FileStream, key: dict[str, Any], value: dict[str, Any]) -> int:
    """Put the schemas beside the stream under the first version that has or takes them.

    :returns: the version, from 1
    """
    version = 1
    while True:
        try:
            stream.put_schemas(version, key, value)
            return version
        except StreamConflictError:
            version += 1


@dataclass(frozen=True)
class _PublishTask:
    """Encodes the row images of one Spark task and writes them as parts of the bucket."""

    config_path: str
    plan: BootstrapPlan
    bucket: str
    schema_version: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        config = load_config(self.config_path)
        stream = FileStream(config.open_store(), self.plan.topic)
        task = TaskContext.get()
        prefix = f"part-{task.partitionId() if task else 0:05d}"
        for number, group in enumerate(_groups(batches, MESSAGES_PER_PART)):
            part = stream.write_part(
                self.bucket,
                f"{prefix}-{number:04d}",
                (self._messages(batch, config) for batch in group),
                self.schema_version,
                config.stream.codec,
            )
            yield pa.RecordBatch.from_pylist([asdict(part)])

    def _messages(self, batch: pa.RecordBatch, config: Config) -> Messages:
        table = self.plan.scan.table
        return snapshot_messages(
            batch.cast(row_image_schema(table)),
            table,
            config.server_name,
            config.stream.mapping,
            hostname=config.cassandra.contact_points[0],
            processed_at_ms=self.plan.scan.now * 1000,
            schema_version=self.schema_version,
            version=ringsync.__version__,
        )


def _groups(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[list[pa.RecordBatch]]:
    """Lists of batches with at least so many rows, but for the last."""
    group: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            group.append(batch)
        if sum(held.num_rows for held in group) >= rows:
            yield group
            group = []
    if group:
        yield group
