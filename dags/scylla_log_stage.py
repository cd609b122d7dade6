"""Read the CDC logs of ScyllaDB: writes to tables with `cdc` are staged, for `bucket_close` to publish.

**What it does.** A loop reads the tables' CDC logs, window by window, and puts the change rows into buckets. The DAGs
`commitlog_stage` do the same for Cassandra; `cdcservice start` switches on what the cluster needs.

**Inputs.** The tables `…_scylla_cdc_log` and the cluster's generations of CDC streams, and the configuration
`ringsync.yaml` (`RINGSYNC_CONFIG`), section `scylla`.

**Outputs,** all in the object store: files under `staging/`, numbers every few seconds under
`status/scylla_log_stage/`, and a report per run, `reports/scylla_log_stage/<run>.json`. Nothing is changed in the
cluster.

**To re-run.** Nothing to do: Airflow starts a killed loop again after five seconds, and the loop goes on where it was.
A run ends after `sync.run_s` seconds, or when `ringsync.yaml` has changed; then the next run begins by itself.
`cdcservice start` and `stop` switch the sync on and off; `start` asks the cluster which database it is.

**When it fails.** `cdcservice status` shows what stands still and why; the last line of the task's log says what failed
and what to do. After exit code 3 (configuration, connection or rights) the next run tries again.
A sync that stands still for longer than a log's TTL loses changes. docs/scylla.md explains it.
"""

from __future__ import annotations

from airflow.sdk import DAG
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import LOOP_DAG, SCYLLA_LOG_STAGE, dag_of

with DAG(
    dag_of(SCYLLA_LOG_STAGE),
    dag_display_name="Read the CDC logs of ScyllaDB",
    description="Stage changes from ScyllaDB's CDC logs",
    doc_md=__doc__,
    **LOOP_DAG,
):
    SparkApplicationOperator(task_id="stage", spark=SCYLLA_LOG_STAGE)
