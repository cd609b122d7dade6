"""Follow the CDC logs of ScyllaDB: writes to tables with `cdc` become messages and the newest state of replicas.

**What it does.** Two loops work side by side for `sync.run_s` seconds; then the next run begins. `stage` reads the
tables' CDC logs, window by window, and puts the change rows into buckets. `close` publishes them: it adds them to the
replicas and sends them to Kafka. The DAG `commitlog_sync` does the same for Cassandra; only one of the two is on.

**Inputs.** The tables `…_scylla_cdc_log` and the cluster's generations of CDC streams, and the configuration
`ringsync.yaml` (`RINGSYNC_CONFIG`), section `scylla`.

**Outputs,** all in the object store: `streams/<topic>/`, the tables `changes` of `replica/<keyspace>/<table>/`,
intermediate files under `staging/` and `sync/`, numbers every few seconds under `status/`, and a report per task,
`reports/<application>/<run>.json`. Nothing is changed in the cluster.

**To re-run.** Nothing to do: Airflow starts a killed loop again after five seconds, and the loop goes on where it was.
The next run begins by itself. `cdcservice start` and `stop` switch the sync on and off; `start` asks the cluster which
database it is.

**When it fails.** `cdcservice status` shows what stands still and why; the last line of the task's log says what failed
and what to do. After exit code 3 (configuration, connection or rights) the loop is only tried again in the next run.
A sync that stands still for longer than a log's TTL loses changes. docs/scylla.md explains it.
"""

from __future__ import annotations

from airflow.sdk import DAG
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import BUCKET_CLOSE, LOOPS_SINCE, OWNER, SCYLLA_LOG_STAGE, known_config, safe_run_id

with DAG(
    "scylla_sync",
    dag_display_name="Follow the CDC logs of ScyllaDB",
    description="Publish changes from ScyllaDB's CDC logs as messages, and add them to the replicas",
    doc_md=__doc__,
    schedule="@continuous",
    start_date=LOOPS_SINCE,
    catchup=False,
    max_active_runs=1,
    max_active_tasks=2,
    is_paused_upon_creation=True,
    tags=["ringsync", "sync"],
    default_args={"owner": OWNER},
    user_defined_macros={"safe_run_id": safe_run_id, "run_s": known_config().sync.run_s},
):
    SparkApplicationOperator(task_id="stage", spark=SCYLLA_LOG_STAGE)
    SparkApplicationOperator(task_id="close", spark=BUCKET_CLOSE)
