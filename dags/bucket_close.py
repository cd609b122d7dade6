"""Publish what is staged: changes become messages and the newest state of replicas.

**What it does.** A loop publishes rows on which the replicas agree, and all rows of closed buckets. It adds them to the
replica and sends them to Kafka. It serves Cassandra and ScyllaDB.

**Inputs.** What `commitlog_stage` or `scylla_log_stage` has staged, the cluster, and the configuration `ringsync.yaml`
(`RINGSYNC_CONFIG`).

**Outputs,** all in the object store: `streams/<topic>/`, the tables `changes` of `replica/<keyspace>/<table>/`,
intermediate files under `staging/` and `sync/`, numbers every few seconds under `status/bucket_close/`, and a report
per run, `reports/bucket_close/<run>.json`.

**To re-run.** Nothing to do: Airflow starts a killed loop again after five seconds, and the loop goes on where it was.
A run ends after `sync.run_s` seconds, or when `ringsync.yaml` has changed; then the next run begins by itself.
`cdcservice start` and `stop` switch the sync on and off.

**When it fails.** `cdcservice status` shows what stands still and why; the last line of the task's log says what failed
and what to do. After exit code 3 (configuration, connection or rights) the next run tries again. docs/sync.md explains
each number.
"""

from __future__ import annotations

from airflow.sdk import DAG
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import BUCKET_CLOSE, LOOP_DAG, dag_of

with DAG(
    dag_of(BUCKET_CLOSE),
    dag_display_name="Publish changes",
    description="Publish staged changes as messages, and add them to the replicas",
    doc_md=__doc__,
    **LOOP_DAG,
):
    SparkApplicationOperator(task_id="close", spark=BUCKET_CLOSE)
