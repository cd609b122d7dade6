"""Follow the commit logs: writes to tables with `cdc = true` become messages and the newest state of replicas.

**What it does.** Two loops work side by side for `sync.run_s` seconds; then the next run begins. `stage_…`, one task
for each queue of workers, reads the synced part of its nodes' commit logs and puts the change rows into buckets.
`close` publishes rows on which the replicas agree, and all rows of closed buckets. It adds them to the replica and
sends them to Kafka.

**Inputs.** The nodes' `cdc_raw` folders and the configuration `ringsync.yaml` (`RINGSYNC_CONFIG`), whose
`sync.queue_of_node` says in which Airflow queue a node's task runs.

**Outputs,** all in the object store: `streams/<topic>/`, the tables `changes` of `replica/<keyspace>/<table>/`,
intermediate files under `staging/` and `sync/`, numbers every few seconds under `status/`, and a report per task,
`reports/<application>/<run>.json`.

**To re-run.** Nothing to do: Airflow starts a killed loop again after five seconds, and the loop goes on where it was.
The next run begins by itself. `cdcservice start` and `stop` switch the sync on and off.

**When it fails.** `cdcservice status` shows what stands still and why; the last line of the task's log says what failed
and what to do. After exit code 3 (configuration, connection or rights) the loop is only tried again in the next run.
docs/sync.md explains each number.
"""

from __future__ import annotations

from airflow.sdk import DAG
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import BUCKET_CLOSE, LOOPS_SINCE, OWNER, commitlog_stage, known_config, safe_run_id

SYNC = known_config().sync

with DAG(
    "commitlog_sync",
    dag_display_name="Follow the commit logs",
    description="Publish changes from the nodes' commit logs as messages, and add them to the replicas",
    doc_md=__doc__,
    schedule="@continuous",
    start_date=LOOPS_SINCE,
    catchup=False,
    max_active_runs=1,
    max_active_tasks=len(SYNC.queues) + 1,
    is_paused_upon_creation=True,
    tags=["ringsync", "sync"],
    default_args={"owner": OWNER},
    user_defined_macros={"safe_run_id": safe_run_id, "run_s": SYNC.run_s},
):
    for queue in SYNC.queues:
        SparkApplicationOperator(task_id=f"stage_{queue}", spark=commitlog_stage(queue))
    SparkApplicationOperator(task_id="close", spark=BUCKET_CLOSE)
